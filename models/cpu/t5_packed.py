"""T5's encoder for inference on histories of different lengths, without padding.

    states = PackedEncoder(embedding, encoder)(tokens, lengths)

The states equal those of `T5Backbone.encode` up to float32 rounding. On a CPU the
histories are stored end to end and each attends to itself (`kernels.py`). Without the
compiled kernels they are sorted by length and encoded in buckets of similar length.
Both ways work on pieces whose activations fit the processor's cache. A GPU would have
to wait to read the lengths, so it encodes one padded piece. The weights of queries,
keys and values are joined, the norms' weights are folded into the next layer, and the
first block's projections are a table by token.

Shapes: `B` requests, `S` tokens of the longest, `n` tokens of a piece, `D` width, `H`
heads, `K` width of a head, `V` vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.cpu import kernels
from models.cpu.matmul import PackedLinear
from models.layers.t5 import Stack
from models.retrieval.parts import padding_mask, real_positions

MAX_PIECE_TOKENS = 768
"""Most tokens of a piece. Larger pieces do not fit the cache and take twice the time
per token (measured)."""

MAX_BUCKET_PADDING = 64
"""Most padded tokens of a bucket: about the cost of one more bucket."""


class PackedEncoder:
    """An encoder with its current weights, joined and folded."""

    @torch.no_grad()
    def __init__(self, embedding: nn.Embedding, encoder: Stack) -> None:
        self.embedding, self.encoder, self.sizes = embedding, encoder, encoder.sizes
        blocks = encoder.blocks
        self.normalize = blocks[0].get_norm(0).normalize
        self.qkv = [
            PackedLinear(
                torch.cat([a.q.weight, a.k.weight, a.v.weight])
                * block.get_norm(0).weight
            )
            for block, a in ((block, block.attention) for block in blocks)
        ]
        self.o = [PackedLinear(block.attention.o.weight) for block in blocks]
        self.wi = [
            PackedLinear(block.feedforward.wi.weight * block.get_norm(-1).weight)
            for block in blocks
        ]
        self.wo = [PackedLinear(block.feedforward.wo.weight) for block in blocks]
        self.first = self.qkv[0](self.normalize(embedding.weight))  # (V, 3 * H * K)

    def __call__(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Return the states (B, S, D) of padded histories.

        Args:
            tokens: (B, S) tokens, padded on the right.
            lengths: (B,) number of tokens of each history. States at padding are finite
                but have no meaning.
        """
        weight = self.embedding.weight
        if tokens.device.type != "cpu" or torch.compiler.is_compiling():
            return self.encode_padded(
                tokens, padding_mask(lengths, tokens.shape[1], weight.dtype)
            )
        full = weight.new_zeros((*tokens.shape, self.sizes.d_model))
        if kernels.ready(weight):
            real = real_positions(lengths, tokens.shape[1])
            full[real] = self.encode_packed(tokens[real], lengths)
            return full
        for rows in make_buckets(lengths):
            longest = int(lengths[rows].max())
            states = self.encode_padded(
                tokens[rows, :longest],
                padding_mask(lengths[rows], longest, weight.dtype),
            )
            full[rows, :longest] = states.to(full.dtype)
        return full

    def encode_packed(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Return the states (n, D) of histories that are stored end to end.

        Args:
            tokens: (n,) tokens of all histories, n = sum of lengths.
            lengths: (B,) number of tokens of each history.
        """
        if not len(lengths):
            return self.embedding.weight.new_zeros((0, self.sizes.d_model))
        bias = self.encoder.position_bias(int(lengths.max()))[0]
        heads = self.sizes.num_heads
        begin = functional.pad(lengths.cumsum(0), (1, 0))
        pieces = -(-len(tokens) // MAX_PIECE_TOKENS)
        # pieces of whole requests with about equal numbers of tokens
        requests = torch.bincount(begin[:-1] * pieces // len(tokens))
        edges = functional.pad(requests[requests > 0].cumsum(0), (1, 0)).tolist()
        states = []
        for first, last in itertools.pairwise(edges):
            piece = begin[first : last + 1]
            attend = partial(
                kernels.packed_attention, begin=piece - piece[0], bias=bias, heads=heads
            )
            states.append(self.states(tokens[piece[0] : piece[-1]], attend))
        return torch.cat(states)

    def encode_padded(self, tokens: Tensor, padding: Tensor | None) -> Tensor:
        """Return the states (B, S, D), computed at padding too.

        Args:
            tokens: (B, S) tokens.
            padding: (B, 1, 1, S), -inf at padding, or None.
        """
        bias = self.encoder.position_bias(tokens.shape[1])
        if padding is not None:
            bias = bias + padding
        attention = self.encoder.blocks[0].attention  # all blocks split heads alike

        def attend(qkv: Tensor) -> Tensor:
            q, k, v = attention.split(qkv, 3)
            return attention.heads_output(q, k, v, bias, 0.0)

        return self.states(tokens, attend)

    def states(self, tokens: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """Run all blocks over embedded tokens.

        Args:
            tokens: (...) tokens.
            attend: Maps queries, keys and values (..., 3 * H * K) to the mixed values
                (..., H * K).

        Returns:
            (..., D)
        """
        x = self.embedding(tokens)
        blocks = zip(self.qkv, self.o, self.wi, self.wo, strict=True)
        for i, (qkv, o, wi, wo) in enumerate(blocks):
            if i == 0:
                projected = functional.embedding(tokens, self.first)
            else:
                projected = qkv(self.norm(x))
            x = o(attend(projected), add=x)
            x = wo(wi(self.norm(x), relu=True), add=x)
        return self.norm(x) * self.encoder.final_layer_norm.weight

    def norm(self, x: Tensor) -> Tensor:
        """Divide `x` (..., D) by its root mean square.

        The weights of norms are folded into the layers after them.
        """
        if x.dim() == 2 and kernels.ready(x):
            return kernels.scaled_rows(x, self.sizes.epsilon)
        return self.normalize(x)


def make_buckets(lengths: Tensor) -> list[Tensor]:
    """Group rows of similar length, longest first.

    A bucket holds at most `MAX_PIECE_TOKENS` tokens (or one row) and, unless its rows
    have equal lengths, at most `MAX_BUCKET_PADDING` padded tokens.

    Args:
        lengths: (B,) lengths of the rows.

    Returns:
        Row numbers of each bucket.
    """
    ordered, order = lengths.sort(descending=True, stable=True)
    tokens_before = functional.pad(ordered.cumsum(0), (1, 0))
    buckets: list[Tensor] = []
    begin = 0
    while begin < len(order):
        longest = int(ordered[begin])
        rows = torch.arange(1, len(order) - begin + 1)
        tokens = tokens_before[begin + 1 :] - tokens_before[begin]
        padding = rows * longest - tokens  # never decreases
        fits = int((padding <= MAX_BUCKET_PADDING).sum())
        pieces = -(-fits // max(1, MAX_PIECE_TOKENS // longest))
        buckets += order[begin : begin + fits].tensor_split(pieces)
        begin += fits
    return buckets
