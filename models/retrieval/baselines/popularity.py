"""Popularity: recommend to every user the items most frequent in training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from core.options import STRICT, NamedConfig
from models.retrieval.data import (
    Catalogue,
    HistoryBatch,
    InteractionBatch,
)
from models.retrieval.model import RetrievalModel
from models.retrieval.recommend import best_allowed, recommender


@dataclass(config=STRICT)
class PopularityConfig(NamedConfig):
    """Popularity: recommends the most frequent items of training to every user."""

    max_history: PositiveInt = 1
    """Number of latest behaviours read per request; popularity ignores them."""


class Popularity(RetrievalModel):
    """Counts of the training split's behaviours; ties go to the lower item_index."""

    name = "popularity"
    config_class: ClassVar[type] = PopularityConfig
    example_unit = "behaviour"
    trains_by_gradient = False
    is_baseline = True

    counts: Tensor
    """(N,) training behaviours of each item."""

    def __init__(self, config: Any, catalogue: Catalogue) -> None:
        super().__init__(config, catalogue)
        self.register_buffer("counts", torch.zeros(catalogue.num_items))

    def fit_in_one_pass(self, batches: Iterable[InteractionBatch]) -> None:
        """Count the targets of training batches of unit `behaviour`, once."""
        counts = torch.zeros(len(self.counts), dtype=torch.float64)
        for batch in batches:
            counts += torch.bincount(batch.target.cpu(), minlength=len(counts))
        self.counts.copy_(counts)

    @recommender
    def recommend(self, batch: HistoryBatch, k: int) -> tuple[Tensor, Tensor]:
        """Return items and scores, (B, k) both, equal for all requests."""
        items, scores = best_allowed(self.counts[None].clone(), k, batch)
        rows = len(batch.history)
        return items.expand(rows, k), scores.expand(rows, k)
