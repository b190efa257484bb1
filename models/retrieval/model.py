"""The base class of retrieval models, which predict the next item out of all items.

Shapes: `B` requests, `T` behaviours of the longest history, `N` items.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from core.errors import UserError
from models.model import Model, Ranked
from models.retrieval import metrics
from models.retrieval.data import (
    Catalogue,
    HistoryBatch,
    RequestBatch,
)
from models.retrieval.options import RecommendOptions
from models.retrieval.requests import RETRIEVAL, RetrievalRequests
from models.retrieval.search import top_k

ITEMS_PER_BLOCK = 1024
"""Items whose similarities to all items are in memory at once."""


class RetrievalModel(Model):
    """A model that ranks the catalogue after a history, by `recommend(batch, k)`."""

    kind = RETRIEVAL
    requests_class = RetrievalRequests
    catalogue_class = Catalogue
    options_class: ClassVar[type] = RecommendOptions
    ranks: ClassVar[Ranked] = "catalogue"
    metrics_module: ClassVar[ModuleType] = metrics

    def recommend(
        self, batch: HistoryBatch, k: int, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Rank the catalogue after each history.

        Args:
            batch: Histories of B requests.
            k: Number of items to return.
            options: Fields of `options_class`.

        Returns:
            Items and scores, (B, k) both, best first.
        """
        raise NotImplementedError

    def encode_allowed(self, items: Tensor) -> Tensor:
        """Convert a set of `items` (N,) bool to the `allowed` argument of `recommend`.

        Returns:
            By default (N,) numbers to add to scores: 0 for items of the set, -inf for
            other items.
        """
        return torch.zeros(items.shape, device=items.device).masked_fill(
            ~items, -torch.inf
        )

    @torch.no_grad()
    def nearest_items(self, k: int) -> tuple[Tensor, Tensor]:
        """Return each item's nearest items and their cosines, (N, k) both, best first.

        If an item has fewer than k neighbours, the tail of its row is item -1 with
        score -inf.
        """
        vectors = self.item_vectors()
        if vectors is None:
            raise UserError(f"'{self.name}' has no item vectors")
        vectors = functional.normalize(vectors, dim=1)
        blocks = []
        for first in range(0, len(vectors), ITEMS_PER_BLOCK):
            cosine = vectors[first : first + ITEMS_PER_BLOCK] @ vectors.T
            cosine.diagonal(first).fill_(-torch.inf)  # not the item itself
            items, scores = top_k(cosine, k)
            blocks.append((items.masked_fill(scores == -torch.inf, -1), scores))
        all_items, all_scores = zip(*blocks, strict=True)
        return torch.cat(all_items), torch.cat(all_scores)

    def item_vectors(self) -> Tensor | None:
        """Return the vectors (N, D) of all items, or None if the model has none."""
        return None

    def measure(
        self,
        batch: RequestBatch,
        by_user: int = 0,
        shown: Tensor | None = None,
        trained: Tensor | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Rank the full catalogue and return the sums of the metrics.

        Args:
            batch: Requests with their targets.
            by_user: Also return the metrics of every `by_user`-th user; 0 for none.
            shown: (N,) int64 number of top 10 lists that contain each item, updated
                in place.
            trained: (N,) training behaviours of each item, for the metrics of requests
                for an item without any.
            options: Options of `recommend`.
        """
        items, _ = self.recommend(batch, max(metrics.CUTOFFS), **options)
        return metrics.measure_ranking(items, batch, by_user, shown, trained)
