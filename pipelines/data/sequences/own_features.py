"""Custom features that a log brings: their columns, and their statistics in training.

The manifest of sequences holds a number's mean and deviation and a category's values,
both of training rows alone; `models/own_features.py` reads values by them. A category
with more than MAX_VALUES values is hashed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl
import pyarrow as pa

from models.config import check_known
from models.storage.tables import UserError
from pipelines.data.reading.log import Log

NUMBER, CATEGORY = "num_", "cat_"
"""Prefixes of the columns, of one length."""

EVENT_GROUP = "own"
"""Group of the features of events."""

ITEM_GROUP = "items"
"""Group of the features of the item files."""

MAX_VALUES = 10_000
"""Values of a category that the manifest lists; of more, each is hashed."""

BUCKETS = 20_000
"""Hash buckets of a category with more values."""


def feature_columns(schema: pa.Schema) -> list[str]:
    """Return the columns of custom features in a schema: numbers, then categories."""
    numbers = [name for name in schema.names if name.startswith(NUMBER)]
    categories = [name for name in schema.names if name.startswith(CATEGORY)]
    return numbers + categories


def plain_name(column: str) -> str:
    """Return the name of a feature in the source file, given its column."""
    return column[len(NUMBER) :]


def item_columns(source: Log, names: list[str]) -> pa.Schema:
    """Return the columns of the items table with these attributes or numbers.

    Raises:
        UserError: for a name that the items do not have, or that is the name of another
            feature too.
    """
    numbers, categories = source.items_numbers, source.items_columns[1]
    available = [*numbers, *categories]

    def describe_unknown(name: str, near: str) -> str:
        hint = f"; the nearest is '{near}'"
        if not available:
            hint = ", as the source file names none"
        return f"item_features has '{name}', which is no attribute or number of items{hint}"

    check_known(names, available, describe_unknown)
    fields = [
        pa.field(NUMBER + name, pa.float32()) for name in names if name in numbers
    ]
    fields += [
        pa.field(CATEGORY + name, pa.string()) for name in names if name in categories
    ]
    others = default_groups(source, [])
    for field in fields:
        if field.name in others:
            raise UserError(
                f"item_features has '{plain_name(field.name)}', which is the name of another feature too; rename one"
            )
    return pa.schema(fields)


def default_groups(source: Log, item_features: list[str]) -> dict[str, str]:
    """Return the group of each custom feature without a group in the source file, in the order of columns.

    That is EVENT_GROUP, the name of the feature's table, or ITEM_GROUP.
    """
    groups = {}
    for name in source.schema.names:
        if name.startswith((NUMBER, CATEGORY)):
            groups[name] = EVENT_GROUP
    for table, section in source.as_of.items():
        groups |= dict.fromkeys(section.features.names, table)
    if item_features:
        columns = item_columns(source, item_features).names
        groups |= dict.fromkeys(columns, ITEM_GROUP)
    order = feature_columns(pa.schema([(name, pa.null()) for name in groups]))
    return {name: groups[name] for name in order}


@dataclass(frozen=True)
class Moments:
    """Count, mean and spread of a number's values, which can be added up over parts."""

    count: int = 0
    missing: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of the squared distances to the mean."""

    @classmethod
    def from_values(cls, values: pl.Series) -> Moments:
        """Compute the moments of values, some of them null."""
        present = values.drop_nulls().cast(pl.Float64)
        if not len(present):
            return cls(missing=len(values))
        mean = float(present.mean())  # type: ignore[arg-type]
        squares = float(((present - mean) ** 2).sum())
        return cls(len(present), len(values) - len(present), mean, squares)

    def __add__(self, other: Moments) -> Moments:
        count, missing = self.count + other.count, self.missing + other.missing
        if not count:
            return Moments(missing=missing)
        difference = other.mean - self.mean
        share = other.count / count
        squares = self.squares + other.squares
        squares += difference**2 * self.count * share
        return Moments(count, missing, self.mean + difference * share, squares)

    def to_info(self, name: str) -> dict[str, Any]:
        """Return the entry of the manifest's `info`."""
        std = math.sqrt(self.squares / self.count) if self.count else 0.0
        # a constant, but for rounding
        is_constant = std <= 1e-9 * max(1.0, abs(self.mean))
        return {
            "name": name,
            "mean": self.mean,
            "std": 0.0 if is_constant else std,
            "missing": self.missing > 0,
        }


@dataclass(frozen=True)
class TrainingValues:
    """Statistics of custom features over some training rows."""

    numbers: dict[str, Moments]
    categories: dict[str, list[str] | None]
    """Sorted values; None for more than MAX_VALUES."""

    @classmethod
    def from_columns(cls, columns: Mapping[str, pa.Array]) -> TrainingValues:
        """Compute the statistics of the columns of training rows."""
        numbers: dict[str, Moments] = {}
        categories: dict[str, list[str] | None] = {}
        for name, column in columns.items():
            values = pl.Series(pl.from_arrow(column))
            if name.startswith(NUMBER):
                numbers[name] = Moments.from_values(values)
            else:
                distinct = values.drop_nulls().cast(pl.String).unique().to_list()
                categories[name] = _sort_few(distinct)
        return cls(numbers, categories)


def _sort_few(values: Iterable[str]) -> list[str] | None:
    """Return distinct values, sorted; None for more than MAX_VALUES."""
    distinct = sorted(set(values))
    return distinct if len(distinct) <= MAX_VALUES else None


def describe_features(
    parts: Iterable[TrainingValues], names: list[str]
) -> dict[str, Any]:
    """Return the manifest's entry on custom features: `numbers` and `categories`, in the order of `names`.

    `parts` are the statistics of the training rows of all parts.
    """
    numbers = {name: Moments() for name in names if name.startswith(NUMBER)}
    categories: dict[str, list[str] | None] = {
        name: [] for name in names if name.startswith(CATEGORY)
    }
    for part in parts:
        for name, moments in part.numbers.items():
            numbers[name] += moments
        for name, values in part.categories.items():
            total = categories[name]
            if total is None or values is None:
                categories[name] = None
            else:
                categories[name] = _sort_few([*total, *values])
    return {
        "numbers": [moments.to_info(name) for name, moments in numbers.items()],
        "categories": [
            {
                "name": name,
                "values": values or [],
                "buckets": BUCKETS if values is None else 0,
            }
            for name, values in categories.items()
        ],
    }
