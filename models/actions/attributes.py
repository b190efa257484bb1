"""Attributes of items as numbers: what the catalogue says of them, and the same of items that are not in it.

    attributes = Attributes.of(items)                      # the table `items`
    numbers, categories = attributes.read(items)           # and of new ones

Shapes: `n` items, `X` numbers, `G` categories.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.own_features import CATEGORY, NUMBER


@dataclass(frozen=True)
class Attributes:
    """What is learned from the catalogue's items."""

    numbers: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Mean and deviation by column; a deviation of 0 is that of a constant, or of no values."""
    categories: dict[str, pa.Array] = field(default_factory=dict)
    """Values by column, numbered from 1 in their order; 0 is for none and for another value."""

    @classmethod
    def of(cls, items: pa.Table) -> Self:
        """Those of the columns `num_*` and `cat_*`."""
        numbers = {name: spread(values(items[name])) for name in items.column_names if name.startswith(NUMBER)}
        categories = {name: known(items[name]) for name in items.column_names if name.startswith(CATEGORY)}
        return cls(numbers, categories)

    def read(self, items: pa.Table) -> tuple[Tensor, Tensor]:
        """(n, X) float32, standardised over the catalogue, 0 where there is none; (n, G) int64."""
        numbers, categories = np.zeros((len(items), len(self.numbers))), np.zeros((len(items), len(self.categories)))
        for place, (name, (mean, deviation)) in enumerate(self.numbers.items()):
            if deviation > 1e-9:
                numbers[:, place] = np.nan_to_num((values(items[name]) - mean) / deviation)
        for place, (name, there) in enumerate(self.categories.items()):
            found = pc.fill_null(pc.index_in(items[name].cast(pa.string()), there), -1)
            categories[:, place] = found.to_numpy() + 1
        return torch.from_numpy(numbers).float(), torch.from_numpy(categories).long()


def values(column: pa.ChunkedArray) -> NDArray[np.float64]:
    """NaN where there is none."""
    return pc.cast(column, pa.float64()).to_numpy()


def spread(numbers: NDArray[np.float64]) -> tuple[float, float]:
    """Mean and standard deviation of those that are there; 0 and 0 of none."""
    return (float(np.nanmean(numbers)), float(np.nanstd(numbers))) if np.isfinite(numbers).any() else (0.0, 0.0)


def known(column: pa.ChunkedArray) -> pa.Array:
    """Distinct strings, sorted, without the empty one."""
    there = pc.unique(column.cast(pa.string())).drop_null()
    there = there.filter(pc.not_equal(there, ""))
    return there.take(pc.sort_indices(there))
