"""TIGER's decoder for beam search, with what beams of a user have in common computed once.

Cross-attention keys and values are computed once per user and read by all of its beams, which stand on
the query axis of one product. As they serve many queries, the query projection is folded into the keys
and the output projection into the values: `(x Wq)(s Wk)' = x (s Wk Wq')'`. Self-attention keys and values
stay where they were computed; a beam looks them up by its ancestors. The cache that `transformers` keeps
holds the cross-attention's once per beam and copies it at every step.

Shapes: `B` users, `W` beams, `N = B * W`, `S` source positions, `D` width, `H` heads, `K` width of a head, `V`
vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from models.derived import derived
from models.matmul import Packed
from models.retrieval.decoding import kernels
from models.retrieval.t5 import T5


def packed_decoder(t5: T5) -> PackedDecoder:
    """The decoder's weights of `t5` as they are now, kept on it until they change."""
    return derived(t5, "packed_decoder", lambda: PackedDecoder(t5))


class PackedDecoder:
    """The decoder's weights at this time: joined, with the norms' weights in what follows them."""

    @torch.no_grad()
    def __init__(self, t5: T5) -> None:
        self.t5, blocks = t5, t5.decoder.blocks
        self.scaled, self.heads = blocks[0].norm_of(0).scaled, t5.sizes.num_heads
        attentions = [(block.attention, block.norm_of(0).weight) for block in blocks]
        self.q = [Packed(a.q.weight * norm) for a, norm in attentions]
        self.kv = [Packed(torch.cat([a.k.weight, a.v.weight]) * norm) for a, norm in attentions]
        self.o = [Packed(block.attention.o.weight) for block in blocks]
        self.wi = [Packed(block.feedforward.wi.weight * block.norm_of(-1).weight) for block in blocks]
        self.wo = [Packed(block.feedforward.wo.weight) for block in blocks]
        token = self.scaled(t5.shared.weight)
        self.first_q, self.first_kv = self.q[0](token), self.kv[0](token)  # (V, ...): what block 0 makes of a token
        self.logits = Packed(t5.shared.weight * (t5.decoder.final_layer_norm.weight * t5.sizes.d_model**-0.5))
        self.keys, self.values = [], []  # each (H * D, D): of the source, with the projections of q and o in them
        for block in blocks:
            cross = block.cross_attention
            q, k, v = (layer.weight.unflatten(0, (cross.heads, -1)) for layer in (cross.q, cross.k, cross.v))
            o = cross.o.weight.unflatten(1, (cross.heads, -1))  # (D, H, K)
            keys = torch.einsum("hkd,hke->hde", q * block.norm_of(1).weight, k)
            self.keys.append(Packed(keys.flatten(0, 1)))
            self.values.append(Packed(torch.einsum("dhk,hke->hde", o, v).flatten(0, 1)))


class SharedKV:
    """A `Scorer` (see `beam.py`) over T5 weights.

    Log-probabilities are normalised over the whole vocabulary, as `transformers` does.
    """

    def __init__(self, t5: T5, source: Tensor, padding: Tensor | None, first_token: list[int], sizes: list[int]):
        """`source` (B, S, D) are encoder states, `padding` (B, 1, 1, S) is -inf where there is none; level
        l has `sizes[l]` tokens from `first_token[l]` on."""
        self.decoder = decoder = packed_decoder(t5)
        self.padding, self.first_token, self.sizes = padding, first_token, sizes
        shape = (decoder.heads, -1)
        self.cross = [  # keys and values (B, H * S, D) of each block
            tuple(fold(source).unflatten(-1, shape).transpose(1, 2).flatten(1, 2) for fold in folds)
            for folds in zip(decoder.keys, decoder.values, strict=True)
        ]
        self.bias = t5.decoder.position_bias(len(sizes))[0]  # (H, L, L)
        self.codes: list[list[Tensor]] = [[] for _ in decoder.kv]  # per block and level (n, 2 * H * K): keys, values
        self.places: list[Tensor] = []  # per level (N,): each beam's row among those of that level
        self.batch = len(source)

    def start(self) -> Tensor:
        begin = torch.zeros((self.batch, 1), dtype=torch.long, device=self.bias.device)  # T5 starts with padding
        return self._advance(begin, 0)[:, 0]

    def step(self, parents: Tensor, tokens: Tensor) -> Tensor:
        level = len(self.places)
        user = torch.arange(self.batch, device=parents.device).unsqueeze(1)
        parent = (parents + user * (len(self.places[-1]) // self.batch)).flatten()
        self.places = [place[parent] for place in self.places]
        return self._advance(tokens + self.first_token[level - 1], level)

    def _advance(self, tokens: Tensor, level: int) -> Tensor:
        """(B, W, C_level) after the last tokens (B, W)."""
        decoder, tokens_of = self.decoder, tokens.shape
        self.places.append(torch.arange(tokens.numel(), device=tokens.device))
        tokens = tokens.flatten()
        x = functional.embedding(tokens, decoder.t5.shared.weight)  # (N, D)
        for i, (keys, values) in enumerate(self.cross):
            if i == 0:
                q, kv = (functional.embedding(tokens, table) for table in (decoder.first_q, decoder.first_kv))
            else:
                normed = decoder.scaled(x)
                q, kv = decoder.q[i](normed), decoder.kv[i](normed)
            codes = [*self.codes[i], kv]
            if level < len(self.sizes) - 1:
                self.codes[i] = codes
            mixed = self._attend_to_codes(q, codes, self.bias[:, level, : level + 1])
            x = decoder.o[i](mixed, add=x).unflatten(0, tokens_of)  # (B, W, D)
            scores = (decoder.scaled(x) @ keys.transpose(1, 2)).unflatten(-1, (decoder.heads, -1))  # (B, W, H, S)
            scores = scores if self.padding is None else scores.add_(self.padding)
            x = (x + scores.softmax(-1).flatten(2) @ values).flatten(0, 1)
            x = decoder.wo[i](decoder.wi[i](decoder.scaled(x), relu=True), add=x)
        logits = decoder.logits(decoder.scaled(x))  # (N, V)
        first, size = self.first_token[level], self.sizes[level]
        if kernels.ready(logits):
            return kernels.log_softmax_part(logits, first, size).unflatten(0, tokens_of)
        return (logits.narrow(1, first, size) - logits.logsumexp(1, keepdim=True)).unflatten(0, tokens_of)

    def _attend_to_codes(self, q: Tensor, codes: list[Tensor], bias: Tensor) -> Tensor:
        """(N, H * K): self-attention of a block from the last codes, `q` (N, H * K), to all codes of their beams."""
        heads = self.decoder.heads
        if kernels.ready(q):
            return kernels.beam_attention(q, codes, self.places, bias, heads)
        query = q.unflatten(-1, (heads, -1))  # (N, H, K)
        seen = [
            kv.index_select(0, place).unflatten(-1, (2, heads, -1)).unbind(1)  # keys and values (N, H, K)
            for kv, place in zip(codes, self.places, strict=True)
        ]
        scores = torch.stack([(query * k).sum(-1) for k, _ in seen], -1)  # (N, H, level + 1)
        share = (scores + bias).softmax(-1).unsqueeze(-2)
        mixed = share[..., 0] * seen[0][1]
        for at, (_, v) in enumerate(seen[1:], start=1):
            mixed = mixed + share[..., at] * v
        return mixed.flatten(1)
