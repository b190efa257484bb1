"""TIGER's backbone: T5's encoder over `[user, L codes per item, end]`.

On a CPU with compiled kernels, inference stores the histories end to end, without
padding, in chunks whose activations fit into the processor's cache. The kernels compute
attention within each history (`models/cpu/kernels.py`). The weights of queries, keys
and values are concatenated, the norms' weights are folded into the next layer, and the
projections of the first block are a table by token.

Shapes: `B` requests, `S` tokens of a history, `n` tokens of a chunk, `D` width, `H`
heads, `K` width of a head, `V` tokens of the vocabulary.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.cpu import kernels
from models.cpu.weights import PackedLinear, cache_until_changed
from models.layers.t5 import EPSILON, Stack, T5Sizes
from models.retrieval.data import HistoryBatch
from models.retrieval.retriever import (
    Backbone,
    History,
    SidTokens,
    padding_mask,
    real_positions,
)

MAX_CHUNK_TOKENS = 768
"""Maximum tokens of a chunk. Larger chunks do not fit into the cache and take twice the
time per token (measured)."""


class PackedEncoder:
    """A T5 encoder with its current weights, concatenated and folded for the kernels.

    Args:
        table: (V, D) embeddings of tokens.
        encoder: Stack whose weights are used.
    """

    @torch.no_grad()
    def __init__(self, table: Tensor, encoder: Stack) -> None:
        self.table = table
        self.encoder = encoder
        self.blocks = []
        for block in encoder.blocks:
            attention, feedforward = block.attention, block.feedforward
            projections = (attention.q, attention.k, attention.v)
            qkv = torch.cat([projection.weight for projection in projections])
            weights = (
                qkv * block.get_norm(0).weight,
                attention.o.weight,
                feedforward.wi.weight * block.get_norm(-1).weight,
                feedforward.wo.weight,
            )
            self.blocks.append([PackedLinear(weight) for weight in weights])
        # (V, 3 * H * K): queries, keys and values of the first block by token
        normalize = encoder.final_layer_norm.normalize
        self.first_qkv = self.blocks[0][0](normalize(table))

    def __call__(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Return the states (B, S, D) of padded histories.

        States at padding are 0.

        Args:
            tokens: (B, S) tokens, padded on the right.
            lengths: (B,) number of tokens of each history.
        """
        states = self.table.new_zeros((*tokens.shape, self.table.shape[1]))
        is_real = real_positions(lengths, tokens.shape[1])
        packed = tokens[is_real]  # the tokens of all histories, end to end
        bias = self.encoder.position_bias(int(lengths.max()))[0]
        offsets = functional.pad(lengths.cumsum(0), (1, 0))  # (B + 1,)
        num_chunks = math.ceil(len(packed) / MAX_CHUNK_TOKENS)
        # chunks of whole requests with about equal numbers of tokens
        chunk = offsets[:-1] * num_chunks // len(packed)  # (B,)
        starts = 1 + chunk.diff().nonzero().flatten()
        edges = [0, *starts.tolist(), len(lengths)]
        chunks = []
        for first, last in itertools.pairwise(edges):
            begin = offsets[first : last + 1]
            chunk_tokens = packed[begin[0] : begin[-1]]
            chunks.append(self.run_blocks(chunk_tokens, begin - begin[0], bias))
        states[is_real] = torch.cat(chunks)
        return states

    def run_blocks(self, tokens: Tensor, begin: Tensor, bias: Tensor) -> Tensor:
        """Return the states (n, D) of a chunk.

        Args:
            tokens: (n,) tokens of whole histories.
            begin: Offset of each history, and n.
            bias: (H, S, S) position bias.
        """
        heads = self.encoder.sizes.num_heads
        x = functional.embedding(tokens, self.table)
        for i, (qkv, o, wi, wo) in enumerate(self.blocks):
            if i == 0:
                projected = functional.embedding(tokens, self.first_qkv)
            else:
                projected = qkv(kernels.scaled_rows(x, EPSILON))
            attended = kernels.packed_attention(projected, begin, bias, heads)
            x = o(attended, add=x)
            x = wo(wi(kernels.scaled_rows(x, EPSILON), relu=True), add=x)
        normed = kernels.scaled_rows(x, EPSILON)
        return normed * self.encoder.final_layer_norm.weight


class T5Backbone(Backbone):
    """T5's encoder, with token embeddings that decoder and output layer share."""

    def __init__(self, tokens: SidTokens, sizes: T5Sizes, max_history: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.sizes = sizes
        self.max_history = max_history
        self.embedding = nn.Embedding(tokens.vocabulary, sizes.d_model)
        self.encoder = Stack(sizes, decoder=False)

    def inputs(self, batch: HistoryBatch) -> tuple[Tensor, Tensor]:
        """Return the encoder's input: indices (B, S) into `table`, and lengths (B,)."""
        return self.tokens.history(batch), self.tokens.lengths(batch)

    def table(self) -> Tensor:
        """Return the input embeddings (V, D)."""
        return self.embedding.weight

    def encode(self, batch: HistoryBatch) -> History:
        """Return the states (B, S, D) of the tokens of each history."""
        tokens, lengths = self.inputs(batch)
        bias = self.encoder.position_bias(tokens.shape[1])
        padding = padding_mask(lengths, tokens.shape[1], self.embedding.weight.dtype)
        dropout_p = self.sizes.dropout if self.training else 0.0
        x = functional.embedding(tokens, self.table())
        states = self.encoder(x, bias if padding is None else bias + padding, dropout_p)
        return History(states, lengths)

    def infer(self, batch: HistoryBatch) -> History:
        """Return the states of `encode`, on a CPU without work for padding."""
        if not kernels.ready(self.embedding.weight):
            return T5Backbone.encode(self, batch)
        tokens, lengths = self.inputs(batch)
        return History(self.packed_encoder()(tokens, lengths), lengths)

    def packed_encoder(self) -> PackedEncoder:
        """Return the packed encoder, cached until the weights change."""
        return cache_until_changed(
            self, "packed_encoder", lambda: PackedEncoder(self.table(), self.encoder)
        )


class ExtendedT5(T5Backbone):
    """T5's encoder with extra input tokens that the decoder does not have.

    Token `V + i` is row i of `extra`.
    """

    def __init__(
        self, tokens: SidTokens, sizes: T5Sizes, max_history: int, num_extra: int
    ) -> None:
        """Build the encoder with `num_extra` extra tokens."""
        super().__init__(tokens, sizes, max_history)
        self.extra = nn.Embedding(num_extra, sizes.d_model)

    def table(self) -> Tensor:
        """Return the input embeddings (V + extra tokens, D)."""
        return torch.cat([self.embedding.weight, self.extra.weight])
