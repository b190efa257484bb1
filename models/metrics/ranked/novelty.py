"""Novelty: how rare the recommended items are in the training log."""

from __future__ import annotations

from torch import Tensor

from models.metrics.metric import CatalogueMetric


class Novelty(CatalogueMetric):
    """Mean self-information of the recommended items, in bits.

    The self-information of an item is -log2 of its share of the training behaviours.
    An item without training behaviours counts as if it had one.
    """

    name = label = "novelty"
    compared = (10,)

    def value(self, shown: Tensor, trained: Tensor) -> float:
        """Return the mean over all items of all top 10 lists."""
        count = trained.double().clamp(min=1)
        information = -(count / count.sum()).log2()
        return float(shown.double() @ information / shown.sum())
