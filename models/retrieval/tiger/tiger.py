"""TIGER (Rajput et al., 2023): a T5 that generates the next item's semantic ID.

The input is `[user, L codes per item for the latest items, end]`, the output the L
codes of the next item, decoded by beam search within the trie of the catalogue. Default
sizes are from the public code of the SID-MLP paper.

Shapes: `B` requests, `S` tokens of a history, `L` levels (codes of an item), `N` items,
`D` width.
"""

from __future__ import annotations

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from core.options import STRICT, NamedConfig
from models.layers.t5 import T5Sizes
from models.retrieval.data import Catalogue
from models.retrieval.retriever import Retriever, SidTokens
from models.retrieval.tiger.decoder import T5Decoder
from models.retrieval.tiger.encoder import T5Backbone


@dataclass(config=STRICT)
class TigerConfig(T5Sizes, NamedConfig):
    """Options of TIGER; the defaults are from the public code of the SID-MLP paper."""

    label_smoothing: float = 0.0
    """Share of each target's probability that training spreads evenly over the
    vocabulary."""
    n_user_tokens: PositiveInt = 1
    """Number of tokens that users are hashed to (2000 in TIGER, 1 in the public code of
    SID-MLP)."""
    max_history: PositiveInt = 20
    """Number of latest items read."""
    beam: PositiveInt = 50
    """Number of beams when recommending (Sec. 4.1 of SID-MLP)."""


class Tiger(Retriever):
    """T5's encoder as backbone and T5's decoder, with one token embedding."""

    name = "tiger"
    config_class = TigerConfig

    config: TigerConfig
    backbone: T5Backbone
    decoder: T5Decoder

    def __init__(self, config: TigerConfig, catalogue: Catalogue) -> None:
        tokens = SidTokens(catalogue, config.n_user_tokens)
        backbone = T5Backbone(tokens, config, config.max_history)
        super().__init__(config, catalogue, backbone, T5Decoder(backbone))
        self.label_smoothing = config.label_smoothing

    def item_vectors(self) -> Tensor:
        """Return the concatenated code embeddings (N, L * D) of each item."""
        return self.backbone.embedding(self.tokens.items).flatten(1)
