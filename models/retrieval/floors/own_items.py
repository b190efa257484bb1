"""Own items: recommend what a user took most often, then popular items.

With n_ui the occurrences of item i in the history of user u and d_ui the number of
behaviours after the latest of them, of at most L = `max_history` behaviours:

    score(u, i) = n_ui + 1 - d_ui / (L + 1)      if n_ui > 0
                  c_i / (1 + max_j c_j) - 1      otherwise

c_i counts the training behaviours with item i. The first line is above 1 and the second
below 0, so a user's items come first, by frequency, ties by the latest occurrence. It
is the personal top frequency of Hu et al., Modeling Personalized Item Frequency
Information for Next-basket Recommendation, SIGIR 2020.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from models.config import check_least
from models.retrieval.data import HistoryBatch
from models.retrieval.floors.interactions import (
    history_counts,
    popular_below_zero,
    real_items,
)
from models.retrieval.floors.popularity import Popularity
from models.retrieval.recommend import best_allowed, recommender


@dataclass
class OwnItemsConfig:
    """Own items: recommends a user's most frequent items, ties to the latest, then the most popular ones."""

    max_history: int = 1000
    """Behaviours read per request: the latest."""

    def __post_init__(self) -> None:
        check_least(self, ["max_history"], 1, "model.")


class OwnItems(Popularity):
    """Frequency and recency of the items of a user's history, backed by popularity."""

    name = "own_items"
    config_class = OwnItemsConfig

    @recommender
    def recommend(self, batch: HistoryBatch, k: int) -> tuple[Tensor, Tensor]:
        """Return (items, scores), each (B, k)."""
        num_items = len(self.counts)
        frequency = history_counts(batch, num_items)  # (B, N)
        items = real_items(batch, num_items)  # (B, T)
        position = torch.arange(items.shape[1], device=items.device)
        # 1 for a history's last behaviour, falling by 1 / (L + 1) per behaviour
        distance = batch.history_length[:, None] - 1 - position
        recency = 1 - distance / (self.config.max_history + 1)
        latest = frequency.new_zeros((len(items), num_items + 1))
        latest = latest.scatter_reduce_(1, items, recency, "amax")[:, :num_items]
        popular = popular_below_zero(self.counts)
        scores = torch.where(frequency > 0, frequency + latest, popular)
        return best_allowed(scores, k, batch)
