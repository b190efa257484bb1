"""TIGER's decoder for beam search, with what beams of a user have in common computed once.

Cross-attention keys and values are computed once per user and read by all of its beams: the beams stand
on the query axis of one attention call. Self-attention keys and values are cached over the few codes of
an ID and follow their beams. The cache that `transformers` keeps holds the cross-attention's once per
beam and copies it at every step.

Shapes: `B` users, `W` beams, `S` source positions, `t` codes so far, `H` heads, `K` width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from models.retrieval.t5 import T5


class SharedKV:
    """A `Scorer` (see `beam.py`) over T5 weights.

    Log-probabilities are normalised over the whole vocabulary, as `transformers` does.
    """

    def __init__(self, t5: T5, source: Tensor, padding: Tensor | None, first_token: list[int], sizes: list[int]):
        """`source` (B, S, D) are encoder states; level l has `sizes[l]` tokens from `first_token[l]` on."""
        self.t5, self.padding, self.first_token, self.sizes = t5, padding, first_token, sizes
        self.blocks = t5.decoder.blocks
        self.cross = [block.cross_attention.project(source, "kv") for block in self.blocks]  # (B, H, S, K) each
        self.self_weights = [
            torch.cat([a.q.weight, a.k.weight, a.v.weight]) for a in (block.attention for block in self.blocks)
        ]
        self.bias = t5.decoder.position_bias(len(sizes))[0]  # (H, L, L)
        self.cache: list[tuple[Tensor, Tensor]] = []  # per block keys and values (B, W, t, H, K)
        self.batch = len(source)

    def start(self) -> Tensor:
        begin = torch.zeros((self.batch, 1), dtype=torch.long, device=self.bias.device)  # T5 starts with padding
        return self._advance(self.t5.shared(begin), None, 0)[:, 0]

    def step(self, parents: Tensor, tokens: Tensor) -> Tensor:
        level = self.cache[0][0].shape[2]
        return self._advance(self.t5.shared(tokens + self.first_token[level - 1]), parents, level)

    def _advance(self, x: Tensor, parents: Tensor | None, level: int) -> Tensor:
        """(B, W, C_level) from the embedded last tokens x (B, W, D)."""
        last = level == len(self.sizes) - 1
        cache = []
        for i, block in enumerate(self.blocks):
            attention = block.attention
            qkv = functional.linear(block.norm(0, x), self.self_weights[i])  # (B, W, 3HK)
            q, k, v = qkv.unflatten(-1, (3, attention.heads, -1)).unbind(2)  # (B, W, H, K)
            k, v = k.unsqueeze(2), v.unsqueeze(2)
            if parents is not None:
                k = torch.cat([_follow(self.cache[i][0], parents), k], 2)  # (B, W, t, H, K)
                v = torch.cat([_follow(self.cache[i][1], parents), v], 2)
            if not last:
                cache.append((k, v))
            scores = (q.unsqueeze(2) * k).sum(-1) + self.bias[:, level, : level + 1].T  # (B, W, t, H)
            mixed = (scores.softmax(2).unsqueeze(-1) * v).sum(2)
            x = x + attention.o(mixed.flatten(2))

            cross = block.cross_attention
            q = cross.q(block.norm(1, x)).unflatten(-1, (cross.heads, -1)).transpose(1, 2)  # (B, H, W, K)
            k, v = self.cross[i]
            x = x + cross.mix(q, k, v, self.padding, 0.0)
            x = x + block.feedforward(block.norm(-1, x), 0.0)
        self.cache = cache
        logits = self.t5.logits(self.t5.decoder.final_layer_norm(x))
        codes = logits.narrow(-1, self.first_token[level], self.sizes[level])
        return codes - logits.logsumexp(-1, keepdim=True)


def _follow(cache: Tensor, parents: Tensor) -> Tensor:
    """(B, W, t, H, K): the cache rows of each beam's parent."""
    rows = torch.arange(len(cache), device=cache.device).unsqueeze(1)
    return cache[rows, parents]
