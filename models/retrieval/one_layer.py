"""One T5 decoder layer over frozen encoder states and embeddings: the student of Tables 1, 2, 8 and 9 of SID-MLP.

With a single layer nothing but the embedded prefix is attended to, so the newest code alone goes through the
layer at each step; keys and values of the states are made once per user and shared by the beams.

Shapes: `B` users, `W` beams, `S` source positions, `D` width, `H` heads, `K` width of a head.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn
from torch.nn import functional

from models.retrieval.t5 import T5, Stack, dropout

Context = tuple[Tensor, Tensor, Tensor | None]


class OneLayerDecoder(nn.Module):
    """A decoder `Block` of T5 with its final norm, each attention to be left out."""

    def __init__(self, teacher: T5, self_attention: bool, cross_attention: bool) -> None:
        """`teacher` gives sizes and embeddings, which are not trained and are kept where they are."""
        super().__init__()
        self.stack = Stack(replace(teacher.sizes, num_decoder_layers=1), decoder=True)
        self.self_attention, self.cross_attention = self_attention, cross_attention
        for layer, kept in ((0, self_attention), (1, cross_attention)):
            if not kept:
                self.stack.blocks[0].layer[layer] = nn.Identity()
        self._embedding = (teacher.shared,)  # the owner's, no submodule here

    def context(self, states: Tensor, padding: Tensor | None) -> Context:
        """Keys and values (B, H, S, K) of the encoder's states, and their padding."""
        block = self.stack.blocks[0]
        if not self.cross_attention:
            return states, states, padding
        k, v = block.cross_attention.project(states, "kv")
        return k, v, padding

    def forward(self, context: Context, tokens: Tensor) -> Tensor:
        """(B, W, D): the state after the tokens (B, W, level), scaled for the tied output layer as T5 does."""
        k, v, padding = context
        block, sizes = self.stack.blocks[0], self.stack.sizes
        share = sizes.dropout if self.training else 0.0
        rows, width, level = tokens.shape
        embedded = dropout(self._embedding[0](functional.pad(tokens, (1, 0))), share)  # T5 starts with padding
        x = embedded[:, :, -1]  # (B, W, D)
        if self.self_attention:
            normed = block.norm(0, embedded.flatten(0, 1))  # (B * W, level + 1, D)
            newest = normed[:, -1:].contiguous()  # a strided one would be multiplied row by row, 80 times slower
            (query,) = block.attention.project(newest, "q")
            keys, values = block.attention.project(normed, "kv")
            bias = self.stack.position_bias(level + 1)[:, :, -1:]
            mixed = block.attention.mix(query, keys, values, bias, share)
            x = x + dropout(mixed.view(rows, width, -1), share)
        if self.cross_attention:
            (query,) = block.cross_attention.project(block.norm(1, x), "q")
            x = x + dropout(block.cross_attention.mix(query, k, v, padding, share), share)
        x = x + dropout(block.feedforward(block.norm(-1, x), share), share)
        return dropout(self.stack.final_layer_norm(x), share) * sizes.d_model**-0.5
