"""TIGER (Rajput et al., 2023): a T5 encoder-decoder that writes the next item's semantic ID.

Input `[user, C codes per item for the latest items, end]`, output the C codes of the
next item, found by beam search within the trie of the catalogue. Sizes are those of the
public code behind the SID-MLP paper.

Shapes: `B` requests, `S` tokens of a history.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from models.config import check_choices, check_dropout, check_positive
from models.cpu.derived import cache_until_changed
from models.layers.t5 import T5Sizes
from models.retrieval.backbones.t5 import T5Backbone
from models.retrieval.data import Catalogue, HistoryBatch, RequestBatch
from models.retrieval.decoders.t5 import T5Decoder
from models.retrieval.options import DecodeBy, TigerOptions
from models.retrieval.parts import SidTokens, real_positions
from models.retrieval.recommend import recommender
from models.retrieval.retriever import Retriever
from models.retrieval.search.generate import generate, to_transformers


@dataclass
class TigerConfig:
    """Sizes of TIGER, by default the sizes of the public code of the SID-MLP paper."""

    d_model: int = 128
    """Width of token embeddings and states."""
    d_ff: int = 1024
    """Inner width of the feed-forward layers."""
    num_heads: int = 6
    """Attention heads."""
    d_kv: int = 64
    """Width of a head."""
    num_encoder_layers: int = 4
    """Encoder blocks (Sec. 4.1 of SID-MLP: a four-layer T5)."""
    num_decoder_layers: int = 4
    """Decoder blocks."""
    dropout: float = 0.1
    """Dropout on embeddings, attention and blocks."""
    label_smoothing: float = 0.0
    """Share of each target's probability that training spreads evenly over the
    vocabulary."""
    n_user_tokens: int = 1
    """Tokens that users are hashed to (TIGER has 2000; 1 in the code behind
    SID-MLP)."""
    max_history: int = 20
    """Latest items read."""
    beam: int = 50
    """Beams when recommending (Sec. 4.1 of SID-MLP)."""
    decoder: DecodeBy = "shared_kv"
    """`shared_kv` is ours; `hf` and `hf_nocache` are `transformers` generate, for
    comparison."""
    constrained: bool = True
    """Whether decoding keeps to the trie; without it, tuples of no item are dropped in
    the end."""
    end_token: bool = False
    """Whether training also asks for the end token after the codes, as T5's labels have
    it; search stops before it."""

    def __post_init__(self) -> None:
        positive = (
            "d_model",
            "d_ff",
            "num_heads",
            "d_kv",
            "num_encoder_layers",
            "num_decoder_layers",
        )
        check_positive(self, (*positive, "n_user_tokens", "max_history", "beam"))
        check_dropout(self, "dropout", "label_smoothing")
        check_choices(self)

    def sizes(self, vocabulary: int) -> T5Sizes:
        """Return the sizes of T5 for a vocabulary of so many tokens."""
        return T5Sizes(
            vocabulary,
            self.d_model,
            self.d_ff,
            self.num_heads,
            self.d_kv,
            self.num_encoder_layers,
            self.num_decoder_layers,
            self.dropout,
        )


class Tiger(Retriever):
    """T5's encoder as backbone and T5's decoder, with one token embedding."""

    name = "tiger"
    config_class = TigerConfig
    options_class = TigerOptions

    config: TigerConfig
    backbone: T5Backbone
    decoder: T5Decoder

    def __init__(self, config: TigerConfig, catalogue: Catalogue) -> None:
        tokens = SidTokens(catalogue, config.n_user_tokens)
        sizes = config.sizes(tokens.vocabulary)
        backbone = T5Backbone(tokens, sizes, config.max_history)
        super().__init__(
            config, catalogue, backbone, T5Decoder(tokens, sizes, backbone.embedding)
        )
        self.label_smoothing = config.label_smoothing

    def forward(self, batch: RequestBatch) -> dict[str, Tensor]:
        """Return the loss of `Retriever.forward`; with `end_token` over L + 1 positions."""
        if not self.config.end_token:
            return super().forward(batch)
        codes = self.tokens.codes(batch.target)
        given = functional.pad(
            codes + self.tokens.offset, (1, 0)
        )  # (B, L + 1): the start, then all codes
        logits = self.decoder.logits(self.decoder.states(self.encode(batch), given))
        end = torch.full_like(batch.target, self.tokens.end)
        return self.loss(logits, [*self.decoder.targets(codes), end])

    def item_vectors(self) -> Tensor:
        """Return the embeddings of each item's codes end to end, (N, L D)."""
        return self.backbone.embedding(self.tokens.items).flatten(1)

    @recommender
    def recommend(
        self,
        batch: HistoryBatch,
        k: int,
        beam: int | None = None,
        decoder: DecodeBy | None = None,
        constrained: bool | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Rank as `Retriever.recommend`; `decoder` None is the config's."""
        decoder = decoder or self.config.decoder
        if decoder == "shared_kv":
            return self.find(
                self.backbone.infer(batch),
                k,
                beam,
                constrained,
                allowed=batch.allowed,
            )
        return generate(
            self.by_transformers(),
            *self.with_mask(batch),
            self.trie,
            self.tokens.first,
            k,
            self.config.beam if beam is None else beam,
            use_cache=decoder == "hf",
            constrained=self.config.constrained if constrained is None else constrained,
            allowed=batch.allowed,
        )

    def by_transformers(self) -> Any:
        """Return the T5 of `transformers` with these weights."""
        return cache_until_changed(
            self, "transformers", lambda: to_transformers(self.backbone, self.decoder)
        )

    def with_mask(self, batch: HistoryBatch) -> tuple[Tensor, Tensor]:
        """Return the tokens (B, S) of the histories, and a mask (B, S) with 1 at real tokens."""
        tokens, lengths = self.backbone.inputs(batch)
        return tokens, real_positions(lengths, tokens.shape[1]).long()
