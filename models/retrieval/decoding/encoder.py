"""T5's encoder for inference on ragged histories: no work for padding, none twice.

    states, padding = packed_encoder(t5)(tokens, lengths)

The same states as `T5.encode`, up to the rounding of float32. On a CPU requests are sorted by length and
encoded in buckets of like length whose activations stay in the processor's cache; on a GPU, which would have
to wait to see lengths, in one padded piece. Weights of queries, keys and values are joined once, and what the
first block computes from a token alone is a table.

Shapes: `B` requests, `S` tokens of the longest, `D` width, `H` heads, `K` width of a head, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from models.retrieval.decoding.derived import derived
from models.retrieval.t5 import T5

TOKENS = 768
"""Most tokens of a bucket: past this, measured, activations fall out of the cache and time per token doubles."""

WASTE = 64
"""Most padded tokens of a bucket: about what one bucket more costs."""


def packed_encoder(t5: T5) -> PackedEncoder:
    """The encoder with the weights of `t5` as they are now, kept on it until they change."""
    return derived(t5, "packed_encoder", lambda: PackedEncoder(t5))


class PackedEncoder:
    """The encoder of `t5` with its weights at this time."""

    @torch.no_grad()
    def __init__(self, t5: T5) -> None:
        self.t5 = t5
        blocks = t5.encoder.blocks
        self.qkv = [torch.cat([a.q.weight, a.k.weight, a.v.weight]) for a in (b.attention for b in blocks)]
        self.first = functional.linear(blocks[0].norm(0, t5.shared.weight), self.qkv[0])  # (V, 3 * H * K)

    def __call__(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor | None]:
        """(states (B, S, D); padding (B, 1, 1, S) of 0 and -inf or None where nothing is padded) of `tokens` (B, S),
        each row's first `lengths` (B,) real. States of padding are finite and mean nothing."""
        parts = list(self.parts(tokens, lengths))
        if isinstance(parts[0][0], slice):
            return parts[0][1:]
        full = self.t5.shared.weight.new_zeros((*tokens.shape, self.t5.sizes.d_model))
        for rows, states, _ in parts:
            full[rows, : states.shape[1]] = states
        return full, padding_of(lengths, tokens.shape[1], full.dtype)

    def parts(self, tokens: Tensor, lengths: Tensor) -> Iterator[tuple[Tensor | slice, Tensor, Tensor | None]]:
        """(rows of the batch, their states (b, s, D), their padding) of each bucket; every row is in one."""
        dtype = self.t5.shared.weight.dtype
        if tokens.device.type != "cpu" or torch.compiler.is_compiling():
            padding = padding_of(lengths, tokens.shape[1], dtype)
            yield slice(None), self.states(tokens, padding), padding
            return
        for rows in buckets(lengths):
            own = lengths[rows]
            length = int(own.max())
            padding = padding_of(own, length, dtype)
            yield rows, self.states(tokens[rows, :length], padding), padding

    def states(self, tokens: Tensor, padding: Tensor | None) -> Tensor:
        """(B, S, D) of tokens (B, S), all of which are computed; `padding` (B, 1, 1, S) is -inf at padded ones."""
        encoder = self.t5.encoder
        bias = encoder.position_bias(tokens.shape[1])
        bias = bias if padding is None else bias + padding
        x = self.t5.shared(tokens)
        for i, block in enumerate(encoder.blocks):
            if i == 0:
                qkv = functional.embedding(tokens, self.first)
            else:
                qkv = functional.linear(block.norm(0, x), self.qkv[i])
            q, k, v = block.attention.split(qkv, 3)
            x = x + block.attention.mix(q, k, v, bias, 0.0)
            x = x + block.feedforward(block.norm(-1, x), 0.0)
        return encoder.final_layer_norm(x)


def padding_of(lengths: Tensor, longest: int, dtype: torch.dtype) -> Tensor | None:
    """(B, 1, 1, longest): 0 at the first `lengths` (B,) positions and -inf after; None, on a CPU, where that is 0."""
    outside = torch.arange(longest, device=lengths.device) >= lengths.unsqueeze(1)
    if outside.device.type == "cpu" and not torch.compiler.is_compiling() and not bool(outside.any()):
        return None  # a GPU would have to wait for the answer
    return torch.zeros(outside.shape, dtype=dtype, device=outside.device).masked_fill(outside, -torch.inf)[
        :, None, None
    ]


def buckets(lengths: Tensor) -> list[Tensor]:
    """Row numbers by bucket, longest rows first: each holds at most `TOKENS` tokens (or one row) and, unless its
    rows are of one length, at most `WASTE` padded ones."""
    ordered, order = lengths.sort(descending=True, stable=True)
    before = functional.pad(ordered.cumsum(0), (1, 0))  # real tokens of the rows before
    found: list[Tensor] = []
    begin = 0
    while begin < len(order):
        longest = int(ordered[begin])
        rows = torch.arange(1, len(order) - begin + 1)
        waste = rows * longest - (before[begin + 1 :] - before[begin])
        fits = int((waste <= WASTE).sum())  # the waste never falls
        pieces = -(-fits * longest // TOKENS)
        found += order[begin : begin + fits].tensor_split(min(pieces, fits))
        begin += fits
    return found
