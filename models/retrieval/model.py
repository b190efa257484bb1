"""What retrieval models share: which item comes next, out of the whole catalogue?

Shapes: `B` requests, `T` behaviours of the longest history, `N` items.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from models.model import Model, Ranked
from models.retrieval import metrics
from models.retrieval.data import (
    TABLES,
    Catalogue,
    HistoryBatch,
    RequestBatch,
    RetrievalDataset,
)
from models.retrieval.options import RecommendOptions
from models.retrieval.requests import RetrievalRequests
from models.retrieval.search.nearest import nearest_by_cosine
from models.storage.inputs import Inputs
from models.storage.tables import UserError


class RetrievalModel(Model):
    """A model that ranks the catalogue after a history, by `recommend(batch, k)`."""

    family = "retrieval"
    dataset_class = RetrievalDataset
    requests_class = RetrievalRequests
    catalogue_tables = TABLES
    options_class: ClassVar[type | None] = RecommendOptions
    ranks: ClassVar[Ranked] = "catalogue"
    logs_every_run = True
    metrics_module: ClassVar[ModuleType] = metrics
    shown_metrics = metrics.SHOWN

    @classmethod
    def load_catalogue(
        cls,
        inputs: Inputs,
        *,
        scales: Mapping[str, Any] | None = None,
        manifest_only: bool = False,
    ) -> Catalogue:
        return Catalogue.load(inputs.tables, inputs.sids)

    @classmethod
    def list_unread(cls, info: Mapping[str, Any]) -> list[str]:
        """Return the labels and features of events; the model reads items and their order."""
        labels = [
            name for name in info.get("labels") or {} if name != info.get("behaviour")
        ]
        unread = {
            "numbers": info.get("numbers"),
            "categories": info.get("categories"),
            "labels": labels,
        }
        return [f"{kind} {', '.join(names)}" for kind, names in unread.items() if names]

    def recommend(
        self, batch: HistoryBatch, k: int, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Return (items, scores), each (B, k), best first."""
        raise NotImplementedError

    def encode_allowed(self, items: Tensor) -> Tensor:
        """Convert a set of `items` (N,) bool to the `allowed` argument of `recommend`.

        By default (N,) numbers to add to scores: 0, and -inf for items outside of the
        set.
        """
        return torch.zeros(items.shape, device=items.device).masked_fill(
            ~items, -torch.inf
        )

    @torch.no_grad()
    def nearest_items(self, k: int) -> tuple[Tensor, Tensor]:
        """Return each item's nearest items and their scores, each (N, k), best first.

        An item with fewer than k has item -1 with score -inf at the end.

        Raises:
            UserError: If the model has no vectors of items.
        """
        vectors = self.item_vectors()
        if vectors is None:
            raise UserError(
                f"'{self.name}' has no vectors of items; give a checkpoint of sasrec, "
                "tiger or item_knn"
            )
        return nearest_by_cosine(vectors, k)

    def item_vectors(self) -> Tensor | None:
        """Return the vectors of all items, (N, D), if the model learns some."""
        return None

    def measure(
        self,
        batch: RequestBatch,
        by_user: int = 0,
        shown: Tensor | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Return the sums of the metrics of a ranking of the full catalogue.

        Args:
            batch: Requests with their targets.
            by_user: Stride of the users of whom metrics are kept user by user.
            shown: (N,) int64 counts of the items in top tens, added to in place.
            options: Options of `recommend`.
        """
        items, _ = self.recommend(batch, max(metrics.CUTOFFS), **options)
        return metrics.measure_ranking(items, batch, by_user, shown)
