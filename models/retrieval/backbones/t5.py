"""TIGER's backbone: T5's encoder over `[user, L codes per item, end]`.

Shapes: `B` requests, `S` tokens of a history, `D` width, `V` tokens of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.cpu.derived import cache_until_changed
from models.cpu.t5_packed import PackedEncoder
from models.layers.t5 import Stack, T5Sizes
from models.retrieval.data import HistoryBatch
from models.retrieval.parts import Backbone, History, SidTokens, padding_mask


class T5Backbone(Backbone):
    """T5's encoder, with token embeddings that decoder and output layer share."""

    def __init__(self, tokens: SidTokens, sizes: T5Sizes, max_history: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.sizes = sizes
        self.max_history = max_history
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.d_model)
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
        """Return the states of `encode`, computed without work for padding."""
        tokens, lengths = self.inputs(batch)
        return History(self.fast_encoder()(tokens, lengths), lengths)

    def packed_encoder(self) -> PackedEncoder | None:
        """Return the encoder for histories stored end to end; None in subclasses."""
        return self.fast_encoder()

    def fast_encoder(self) -> PackedEncoder:
        """Return the packed encoder, cached until the weights change."""
        return cache_until_changed(
            self, "packed_encoder", lambda: PackedEncoder(self.embedding, self.encoder)
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

    def packed_encoder(self) -> None:
        """Return None, as the packed encoder does not read extra tokens."""

    def fast_encoder(self) -> PackedEncoder:
        """Return the packed encoder over `table`, cached until the weights change."""

        def make_encoder() -> PackedEncoder:
            embedding = nn.Embedding.from_pretrained(self.table())
            return PackedEncoder(embedding, self.encoder)

        return cache_until_changed(self, "packed_encoder", make_encoder)
