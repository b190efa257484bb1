"""T5's decoder for beam search, with what beams of a user have in common computed once.

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
from torch import Tensor, nn
from torch.nn import functional

from models.cpu import kernels
from models.cpu.matmul import Packed
from models.layers.t5 import Stack
from models.retrieval.parts import History, SidTokens


class PackedDecoder:
    """The decoder's weights at this time: joined, with the norms' weights in what follows them."""

    @torch.no_grad()
    def __init__(self, embedding: nn.Embedding, stack: Stack) -> None:
        """`embedding` is that of the tokens, and the output layer."""
        self.embedding, self.stack, sizes, blocks = embedding, stack, stack.sizes, stack.blocks
        self.scaled, self.heads = stack.final_layer_norm.scaled, sizes.num_heads
        self.q, self.kv, self.o = [], [], []
        self.has_attention, self.has_cross_attention = blocks[0].has_attention, blocks[0].has_cross_attention
        if self.has_attention:
            attentions = [(block.attention, block.norm_of(0).weight) for block in blocks]
            self.q = [Packed(a.q.weight * norm) for a, norm in attentions]
            self.kv = [Packed(torch.cat([a.k.weight, a.v.weight]) * norm) for a, norm in attentions]
            self.o = [Packed(a.o.weight) for a, _ in attentions]
            token = self.scaled(embedding.weight)
            self.first_q, self.first_kv = self.q[0](token), self.kv[0](token)  # (V, ...): what block 0 makes of a token
        self.wi = [Packed(block.feedforward.wi.weight * block.norm_of(-1).weight) for block in blocks]
        self.wo = [Packed(block.feedforward.wo.weight) for block in blocks]
        self.logits = Packed(embedding.weight * (stack.final_layer_norm.weight * sizes.d_model**-0.5))
        self.keys, self.values = [], []  # each (H * D, D): of the states, with the projections of q and o in them
        for cross, norm in [(b.cross_attention, b.norm_of(1).weight) for b in blocks if self.has_cross_attention]:
            q, k, v = (layer.weight.unflatten(0, (cross.heads, -1)) for layer in (cross.q, cross.k, cross.v))
            o = cross.o.weight.unflatten(1, (cross.heads, -1))  # (D, H, K)
            self.keys.append(Packed(torch.einsum("hkd,hke->hde", q * norm, k).flatten(0, 1)))
            self.values.append(Packed(torch.einsum("dhk,hke->hde", o, v).flatten(0, 1)))


class SharedKV:
    """A `Scorer` (see `parts.py`) over T5 weights."""

    def __init__(self, decoder: PackedDecoder, history: History, tokens: SidTokens, vocabulary: bool = True) -> None:
        """Log-probabilities are normalised over the whole vocabulary, as `transformers` does, or over each level's
        codebook."""
        self.decoder, self.padding, self.tokens, self.vocabulary = decoder, history.padding, tokens, vocabulary
        shape = (decoder.heads, -1)
        self.cross = [  # keys and values (B, H * S, D) of each block
            tuple(fold(history.states).unflatten(-1, shape).transpose(1, 2).flatten(1, 2) for fold in folds)
            for folds in zip(decoder.keys, decoder.values, strict=True)
        ]
        if decoder.has_attention:
            self.bias = decoder.stack.position_bias(tokens.levels)[0]  # (H, L, L)
        self.codes: list[list[Tensor]] = [[] for _ in decoder.wi]  # per block and level (n, 2 * H * K): keys, values
        self.ancestors: list[Tensor] = []  # per level (N,): each beam's row among those of that level
        self.batch, self.device = len(history.states), history.states.device

    def start(self) -> Tensor:
        begin = torch.zeros((self.batch, 1), dtype=torch.long, device=self.device)  # T5 starts with padding
        return self._advance(begin, 0)[:, 0]

    def step(self, parents: Tensor, tokens: Tensor) -> Tensor:
        level = len(self.ancestors)
        user = torch.arange(self.batch, device=parents.device).unsqueeze(1)
        parent = (parents + user * (len(self.ancestors[-1]) // self.batch)).flatten()
        self.ancestors = [rows[parent] for rows in self.ancestors]
        return self._advance(tokens + self.tokens.first[level - 1], level)

    def _advance(self, tokens: Tensor, level: int) -> Tensor:
        """(B, W, C_level) after the last tokens (B, W)."""
        decoder, shape = self.decoder, tokens.shape
        self.ancestors.append(torch.arange(tokens.numel(), device=tokens.device))
        tokens = tokens.flatten()
        x = functional.embedding(tokens, decoder.embedding.weight)  # (N, D)
        for i, codes in enumerate(self.codes):
            if decoder.has_attention:
                if i == 0:
                    q, kv = (functional.embedding(tokens, table) for table in (decoder.first_q, decoder.first_kv))
                else:
                    normed = decoder.scaled(x)
                    q, kv = decoder.q[i](normed), decoder.kv[i](normed)
                seen = [*codes, kv]
                if level < self.tokens.levels - 1:
                    self.codes[i] = seen
                mixed = self._attend_to_codes(q, seen, self.bias[:, level, : level + 1])
                x = decoder.o[i](mixed, add=x)
            if decoder.has_cross_attention:
                keys, values = self.cross[i]
                x = x.unflatten(0, shape)  # (B, W, D)
                scores = (decoder.scaled(x) @ keys.transpose(1, 2)).unflatten(-1, (decoder.heads, -1))  # (B, W, H, S)
                scores = scores if self.padding is None else scores.add_(self.padding)
                x = (x + scores.softmax(-1).flatten(2) @ values).flatten(0, 1)
            x = decoder.wo[i](decoder.wi[i](decoder.scaled(x), relu=True), add=x)
        logits = decoder.logits(decoder.scaled(x))  # (N, V)
        first, size = self.tokens.first[level], self.tokens.sizes[level]
        if not self.vocabulary:
            return logits.narrow(1, first, size).float().log_softmax(1).unflatten(0, shape)
        if kernels.ready(logits):
            return kernels.log_softmax_part(logits, first, size).unflatten(0, shape)
        logits = logits.float()
        return (logits.narrow(1, first, size) - logits.logsumexp(1, keepdim=True)).unflatten(0, shape)

    def _attend_to_codes(self, q: Tensor, codes: list[Tensor], bias: Tensor) -> Tensor:
        """(N, H * K): self-attention of a block from the last codes, `q` (N, H * K), to all codes of their beams."""
        heads = self.decoder.heads
        if kernels.ready(q):
            return kernels.beam_attention(q, codes, self.ancestors, bias, heads)
        query = q.unflatten(-1, (heads, -1))  # (N, H, K)
        seen = [
            kv.index_select(0, rows).unflatten(-1, (2, heads, -1)).unbind(1)  # keys and values (N, H, K)
            for kv, rows in zip(codes, self.ancestors, strict=True)
        ]
        scores = torch.stack([(query * k).sum(-1) for k, _ in seen], -1)  # (N, H, level + 1)
        weights = (scores + bias).softmax(-1).unsqueeze(-2)
        mixed = weights[..., 0] * seen[0][1]
        for at, (_, v) in enumerate(seen[1:], start=1):
            mixed = mixed + weights[..., at] * v
        return mixed.flatten(1)
