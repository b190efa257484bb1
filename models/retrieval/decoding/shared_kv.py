"""TIGER's decoder for beam search, with what beams of a user have in common computed once.

Cross-attention keys and values are computed once per user and read by all of its beams, which stand on
the query axis of one product. As they serve many queries, the query projection is folded into the keys
and the output projection into the values: `(x Wq)(s Wk)' = x (s Wk Wq')'`. Self-attention keys and values
stay where they were computed; a beam looks them up by its ancestors. The cache that `transformers` keeps
holds the cross-attention's once per beam and copies it at every step.

Shapes: `B` users, `W` beams, `S` source positions, `D` width, `H` heads, `K` width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from models.retrieval.t5 import T5, Attention


class SharedKV:
    """A `Scorer` (see `beam.py`) over T5 weights.

    Log-probabilities are normalised over the whole vocabulary, as `transformers` does.
    """

    def __init__(self, t5: T5, source: Tensor, padding: Tensor | None, first_token: list[int], sizes: list[int]):
        """`source` (B, S, D) are encoder states, `padding` (B, 1, 1, S) is -inf where there is none; level
        l has `sizes[l]` tokens from `first_token[l]` on."""
        self.t5, self.padding, self.first_token, self.sizes = t5, padding, first_token, sizes
        self.blocks = t5.decoder.blocks
        self.cross = [_fold(block.cross_attention, source) for block in self.blocks]
        self.qkv = [torch.cat([a.q.weight, a.k.weight, a.v.weight]) for a in (b.attention for b in self.blocks)]
        self.bias = t5.decoder.position_bias(len(sizes))[0]  # (H, L, L)
        self.cache: list[list[Tensor]] = [[] for _ in self.blocks]  # per block and level (B, W, 2HK): keys, values
        self.ancestors: list[Tensor] = []  # per level but the first (B, W): each beam's place in that level's cache
        self.batch = len(source)

    def start(self) -> Tensor:
        begin = torch.zeros((self.batch, 1), dtype=torch.long, device=self.bias.device)  # T5 starts with padding
        return self._advance(self.t5.shared(begin), 0)[:, 0]

    def step(self, parents: Tensor, tokens: Tensor) -> Tensor:
        level = len(self.cache[0])
        self.ancestors = [ancestor.gather(1, parents) for ancestor in self.ancestors]
        if level > 1:
            self.ancestors.append(parents)
        return self._advance(self.t5.shared(tokens + self.first_token[level - 1]), level)

    def _advance(self, x: Tensor, level: int) -> Tensor:
        """(B, W, C_level) from the embedded last tokens x (B, W, D)."""
        for i, block in enumerate(self.blocks):
            x = x + self._attend_to_codes(i, block.norm(0, x), level)
            keys, values = self.cross[i]  # (B, D, H * S) and (B, H * S, D)
            scores = (block.norm(1, x) @ keys).unflatten(-1, (block.cross_attention.heads, -1))  # (B, W, H, S)
            scores = scores if self.padding is None else scores + self.padding
            x = x + scores.softmax(-1).flatten(2) @ values
            x = x + block.feedforward(block.norm(-1, x), 0.0)
        logits = self.t5.logits(self.t5.decoder.final_layer_norm(x))
        codes = logits.narrow(-1, self.first_token[level], self.sizes[level])
        return codes - logits.logsumexp(-1, keepdim=True)

    def _attend_to_codes(self, i: int, x: Tensor, level: int) -> Tensor:
        """(B, W, D): self-attention of block i from the last codes to all codes of their beams."""
        attention = self.blocks[i].attention
        width = attention.q.weight.shape[0]
        q, kv = functional.linear(x, self.qkv[i]).split([width, 2 * width], -1)
        seen = self.cache[i][:1] + [
            _rows(kept, ancestor) for kept, ancestor in zip(self.cache[i][1:], self.ancestors, strict=True)
        ]  # the start's is one per user and broadcasts
        if level < len(self.sizes) - 1:
            self.cache[i].append(kv)
        q = q.unflatten(-1, (attention.heads, -1))  # (B, W, H, K)
        pairs = [other.unflatten(-1, (2, attention.heads, -1)).unbind(2) for other in (*seen, kv)]
        scores = torch.stack([(q * k).sum(-1) for k, _ in pairs], -1)  # (B, W, H, level + 1)
        share = (scores + self.bias[:, level, : level + 1]).softmax(-1).unsqueeze(-2)
        mixed = share[..., 0] * pairs[0][1]
        for at, (_, v) in enumerate(pairs[1:], start=1):
            mixed = mixed + share[..., at] * v
        return attention.o(mixed.flatten(2))


def _fold(attention: Attention, source: Tensor) -> tuple[Tensor, Tensor]:
    """Keys (B, D, H * S) and values (B, H * S, D) of the source, with the projections of q and o in them."""
    q, k, v = (layer.weight.unflatten(0, (attention.heads, -1)) for layer in (attention.q, attention.k, attention.v))
    o = attention.o.weight.unflatten(1, (attention.heads, -1))  # (D, H, K)
    keys = functional.linear(source, torch.einsum("hkd,hke->hde", q, k).flatten(0, 1))  # (B, S, H * D)
    values = functional.linear(source, torch.einsum("dhk,hke->hde", o, v).flatten(0, 1))
    shape = (attention.heads, -1)
    return (
        keys.unflatten(-1, shape).permute(0, 3, 2, 1).flatten(2),
        values.unflatten(-1, shape).transpose(1, 2).flatten(1, 2),
    )


def _rows(kept: Tensor, place: Tensor) -> Tensor:
    """(B, W, ...): of `kept` (B, W', ...), for each beam the row at its `place` (B, W)."""
    first = torch.arange(len(kept), device=kept.device).unsqueeze(1) * kept.shape[1]
    return kept.flatten(0, 1).index_select(0, (place + first).flatten()).unflatten(0, place.shape)
