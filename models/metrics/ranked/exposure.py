"""How a model spreads its recommendations over the catalogue."""

from __future__ import annotations

import torch
from torch import Tensor

from models.metrics.metric import CatalogueMetric


class Coverage(CatalogueMetric):
    """Share of the catalogue in any top 10."""

    name = label = "coverage"
    compared = (10,)

    def value(self, shown: Tensor, trained: Tensor) -> float:
        """Return the share."""
        return float((shown > 0).double().mean())


class NewItems(CatalogueMetric):
    """Share of the recommended items that have no training behaviours."""

    name, label = "new_items", "new items"
    compared = (10,)

    def value(self, shown: Tensor, trained: Tensor) -> float:
        """Return the share."""
        return float(shown[trained == 0].sum() / shown.double().sum())


class Gini(CatalogueMetric):
    """Gini coefficient: 0 if all items are shown equally often, 1 - 1 / N for one."""

    name, label = "gini", "Gini"
    lower_is_better = True
    compared = (10,)

    def value(self, shown: Tensor, trained: Tensor) -> float:
        """Return the coefficient."""
        counts = shown.double().sort().values
        num_items, total = len(counts), counts.sum()
        rank = torch.arange(1, num_items + 1, dtype=torch.float64)
        gini = 2 * (rank @ counts) / (num_items * total) - (num_items + 1) / num_items
        return float(gini)


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
