"""TIGER's backbone: the encoder of T5 over `[user, L codes per item, end]`.

Shapes: `B` requests, `S` tokens of a history, `D` width, `V` tokens of the vocabulary.
"""

from __future__ import annotations

from torch import Tensor, nn

from models.derived import derived
from models.layers.t5 import Stack, T5Sizes
from models.retrieval.backbones.t5_packed import PackedEncoder
from models.retrieval.parts import Backbone, History, SidTokens, padding_mask


class T5Backbone(Backbone):
    """Token embeddings, which the decoder and the output layer share, and T5's encoder."""

    def __init__(self, tokens: SidTokens, sizes: T5Sizes, max_history: int) -> None:
        super().__init__()
        self.tokens, self.sizes, self.max_history = tokens, sizes, max_history
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.d_model)
        self.encoder = Stack(sizes, decoder=False)

    def encode(self, batch: dict[str, Tensor]) -> History:
        """States (B, S, D) of the tokens of each history."""
        tokens, lengths = self.tokens.history(batch), self.tokens.lengths(batch)
        bias = self.encoder.position_bias(tokens.shape[1])
        padding = padding_mask(lengths, tokens.shape[1], self.embedding.weight.dtype)
        dropout_p = self.sizes.dropout if self.training else 0.0
        states = self.encoder(self.embedding(tokens), bias if padding is None else bias + padding, dropout_p)
        return History(states, lengths)

    def infer(self, batch: dict[str, Tensor]) -> History:
        """As `encode`, without work for padding."""
        lengths = self.tokens.lengths(batch)
        return History(self.packed()(self.tokens.history(batch), lengths), lengths)

    def final_scale(self) -> Tensor:
        return self.encoder.final_layer_norm.weight

    def packed(self) -> PackedEncoder:
        """The encoder with the weights as they are now, kept until they change."""
        return derived(self, "packed_encoder", lambda: PackedEncoder(self.embedding, self.encoder))
