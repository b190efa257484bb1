"""Own items: recommend the most frequent items of a user's history, then popular items.

n_ui is the number of occurrences of item i in the latest L = `max_history` behaviours
of user u, d_ui the number of behaviours after its last occurrence, and c_i the number
of training behaviours with item i:

    score(u, i) = n_ui + 1 - d_ui / (L + 1)      if n_ui > 0
                  c_i / (1 + max_j c_j) - 1      otherwise

The first line is above 1 and the second below 0, so a user's items come first, by
frequency, ties by the latest occurrence. The ranking is the personal top frequency of
Hu et al., Modeling Personalized Item Frequency Information for Next-basket
Recommendation, SIGIR 2020.

Shapes: `B` requests, `T` behaviours of the longest history, `N` items.
"""

from __future__ import annotations

import torch
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from core.options import STRICT, NamedConfig
from models.retrieval.baselines.interactions import (
    add_scores,
    is_last_occurrence,
    real_items,
)
from models.retrieval.baselines.popularity import Popularity
from models.retrieval.data import HistoryBatch
from models.retrieval.recommend import best_allowed, recommender


@dataclass(config=STRICT)
class OwnItemsConfig(NamedConfig):
    """Own items: recommends a user's most frequent items, then popular items."""

    max_history: PositiveInt = 1000
    """Number of latest behaviours read per request."""


class OwnItems(Popularity):
    """A ranker by frequency and recency in the user's history, then by popularity."""

    name = "own_items"
    config_class = OwnItemsConfig

    @recommender
    def recommend(self, batch: HistoryBatch, k: int) -> tuple[Tensor, Tensor]:
        """Return items and scores, (B, k) both, the user's own items first."""
        num_items = len(self.counts)
        items = real_items(batch, num_items)  # (B, T), `num_items` at padding
        position = torch.arange(items.shape[1], device=items.device)
        # 1 for a history's last behaviour, falling by 1 / (L + 1) per behaviour
        distance = batch.history_length[:, None] - 1 - position
        recency = 1 - distance.double() / (self.config.max_history + 1)
        # in float64 a large count leaves recency its digits
        addends = 1 + recency * is_last_occurrence(items, num_items)
        scores = add_scores(self.counts, items, addends)
        best_items, best_scores = best_allowed(scores, k, batch)
        return best_items, best_scores.float()
