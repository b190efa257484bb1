"""T5's encoder for inference on ragged histories: no work for padding, none twice.

    states = PackedEncoder(embedding, encoder)(tokens, lengths)

The same states as `T5Backbone.encode`, up to the rounding of float32. On a CPU the histories stand end to end and each
attends to its own (`kernels.py`); without the compiled kernels they are sorted by length and encoded in buckets of
like length. Either way in pieces whose activations stay in the processor's cache. On a GPU, which would have to wait
to see lengths, in one padded piece. Weights of queries, keys and values are joined once, norms' weights are folded
into what follows, and what the first block computes from a token alone is a table.

Shapes: `B` requests, `S` tokens of the longest, `n` tokens of a piece, `D` width, `H` heads, `K` width of a head,
`V` vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.cpu import kernels
from models.cpu.matmul import Packed
from models.layers.t5 import Stack
from models.retrieval.parts import padding_mask, real_positions

TOKENS = 768
"""Most tokens of a piece: past this, measured, activations fall out of the cache and time per token doubles."""

WASTE = 64
"""Most padded tokens of a bucket: about what one bucket more costs."""


class PackedEncoder:
    """An encoder with its weights at this time."""

    @torch.no_grad()
    def __init__(self, embedding: nn.Embedding, encoder: Stack) -> None:
        self.embedding, self.encoder, self.sizes = embedding, encoder, encoder.sizes
        blocks = encoder.blocks
        self.normalize = blocks[0].get_norm(0).normalize
        self.qkv = [
            Packed(
                torch.cat([a.q.weight, a.k.weight, a.v.weight])
                * block.get_norm(0).weight
            )
            for block, a in ((block, block.attention) for block in blocks)
        ]
        self.o = [Packed(block.attention.o.weight) for block in blocks]
        self.wi = [
            Packed(block.feedforward.wi.weight * block.get_norm(-1).weight)
            for block in blocks
        ]
        self.wo = [Packed(block.feedforward.wo.weight) for block in blocks]
        self.first = self.qkv[0](self.normalize(embedding.weight))  # (V, 3 * H * K)

    def __call__(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """States (B, S, D) of `tokens` (B, S), each row's first `lengths` (B,) real. Those of padding are finite and
        mean nothing."""
        weight = self.embedding.weight
        if tokens.device.type != "cpu" or torch.compiler.is_compiling():
            return self.padded(
                tokens, padding_mask(lengths, tokens.shape[1], weight.dtype)
            )
        full = weight.new_zeros((*tokens.shape, self.sizes.d_model))
        if kernels.ready(weight):
            real = real_positions(lengths, tokens.shape[1])
            full[real] = self.packed(tokens[real], lengths)
            return full
        for rows in buckets(lengths):
            longest = int(lengths[rows].max())
            states = self.padded(
                tokens[rows, :longest],
                padding_mask(lengths[rows], longest, weight.dtype),
            )
            full[rows, :longest] = states.to(full.dtype)
        return full

    def packed(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """(sum of lengths, D): states of histories that stand end to end, `tokens` (sum of lengths,)."""
        if not len(lengths):
            return self.embedding.weight.new_zeros((0, self.sizes.d_model))
        bias = self.encoder.position_bias(int(lengths.max()))[0]
        heads = self.sizes.num_heads
        begin = functional.pad(lengths.cumsum(0), (1, 0))
        pieces = -(-len(tokens) // TOKENS)
        requests = torch.bincount(
            begin[:-1] * pieces // len(tokens)
        )  # per piece, whose tokens are about as many
        edges = functional.pad(requests[requests > 0].cumsum(0), (1, 0)).tolist()
        states = []
        for first, last in itertools.pairwise(edges):
            own = begin[first : last + 1]
            attend = partial(
                kernels.packed_attention, begin=own - own[0], bias=bias, heads=heads
            )
            states.append(self.states(tokens[own[0] : own[-1]], attend))
        return torch.cat(states)

    def padded(self, tokens: Tensor, padding: Tensor | None) -> Tensor:
        """(B, S, D) of tokens (B, S), all of which are computed; `padding` (B, 1, 1, S) is -inf at padded ones."""
        bias = self.encoder.position_bias(tokens.shape[1])
        bias = bias if padding is None else bias + padding
        attention = self.encoder.blocks[
            0
        ].attention  # splits into heads as those of all blocks do

        def attend(qkv: Tensor) -> Tensor:
            q, k, v = attention.split(qkv, 3)
            return attention.heads_output(q, k, v, bias, 0.0)

        return self.states(tokens, attend)

    def states(self, tokens: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """(..., D) of tokens (...); `attend` makes of (..., 3 * H * K) queries, keys and values the (..., H * K)
        that they mix to."""
        x = self.embedding(tokens)
        for i, (qkv, o, wi, wo) in enumerate(
            zip(self.qkv, self.o, self.wi, self.wo, strict=True)
        ):
            mixed = attend(
                functional.embedding(tokens, self.first)
                if i == 0
                else qkv(self.norm(x))
            )
            x = o(mixed, add=x)
            x = wo(wi(self.norm(x), relu=True), add=x)
        return self.norm(x) * self.encoder.final_layer_norm.weight

    def norm(self, x: Tensor) -> Tensor:
        """x (..., D) over its root mean square; the weights of norms are in what follows them."""
        if x.dim() == 2 and kernels.ready(x):
            return kernels.scaled_rows(x, self.sizes.epsilon)
        return self.normalize(x)


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
        pieces = -(-fits // max(1, TOKENS // longest))
        found += order[begin : begin + fits].tensor_split(pieces)
        begin += fits
    return found
