"""Custom features of a log: their columns, and their statistics in training.

The manifest of `sequences` has the mean and standard deviation of each number, and the
values of each category, over training rows. `models/custom_features.py` reads features
by these statistics. A category with more than MAX_VALUES values is hashed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import polars as pl
import pyarrow as pa

from core.errors import UserError
from core.options import check_known
from core.schemas import Category, CustomFeatures, Number
from pipelines.prepare.reading.log import Log

NUMBER = "num_"
"""Prefix of the columns of numbers."""

CATEGORY = "cat_"
"""Prefix of the columns of categories, as long as NUMBER."""

EVENT_GROUP = "own"
"""Group of the features of events."""

ITEM_GROUP = "items"
"""Group of the features of the item files."""

MAX_VALUES = 10_000
"""Maximum number of values of a category that the manifest lists."""

BUCKETS = 20_000
"""Hash buckets of a category with more than MAX_VALUES values."""


def feature_columns(schema: pa.Schema) -> list[str]:
    """Return the columns of custom features in a schema: numbers, then categories."""
    numbers = [name for name in schema.names if name.startswith(NUMBER)]
    categories = [name for name in schema.names if name.startswith(CATEGORY)]
    return numbers + categories


def plain_name(column: str) -> str:
    """Return the name of a feature in the source file, given its column."""
    return column[len(NUMBER) :]


def item_columns(source: Log, names: list[str]) -> pa.Schema:
    """Return the schema of the item features with these names.

    Args:
        source: Mapping of the raw log.
        names: Names of attributes or numbers of items.
    """
    numbers, categories = source.items_numbers, source.items_columns[1]
    available = [*numbers, *categories]

    check_known(names, available, "item_features")
    fields = [
        pa.field(NUMBER + name, pa.float32()) for name in names if name in numbers
    ]
    fields += [
        pa.field(CATEGORY + name, pa.string()) for name in names if name in categories
    ]
    other_features = default_groups(source, [])
    for new in fields:
        if new.name in other_features:
            raise UserError(
                f"item_features has '{plain_name(new.name)}', which is also the name "
                f"of another feature; rename one of them"
            )
    return pa.schema(fields)


def default_groups(source: Log, item_features: list[str]) -> dict[str, str]:
    """Return the default group of each custom feature.

    It is EVENT_GROUP for features of events, ITEM_GROUP for features of items, and the
    name of the table for a feature with times of its own.

    Args:
        source: Mapping of the raw log.
        item_features: Names of the features of items.

    Returns:
        The group by column, in the order of `feature_columns`.
    """
    groups = {}
    for name in source.schema.names:
        if name.startswith((NUMBER, CATEGORY)):
            groups[name] = EVENT_GROUP
    for table, section in source.as_of.items():
        groups |= dict.fromkeys(section.features, table)
    if item_features:
        columns = item_columns(source, item_features).names
        groups |= dict.fromkeys(columns, ITEM_GROUP)
    order = feature_columns(pa.schema([(name, pa.null()) for name in groups]))
    return {name: groups[name] for name in order}


@dataclass(frozen=True)
class Moments:
    """Count, mean and variance of a number in a part."""

    count: int
    """Number of values."""
    missing: int
    """Number of nulls."""
    mean: float
    """Mean of the values."""
    squares: float
    """Sum of the squared distances to the mean."""


def compute_moments(values: pl.Series) -> Moments:
    """Compute the moments of a column; nulls only count as missing."""
    present = values.drop_nulls().cast(pl.Float64)
    if not len(present):
        return Moments(0, len(values), 0.0, 0.0)
    mean = float(present.mean())  # type: ignore[arg-type]
    squares = float(((present - mean) ** 2).sum())
    return Moments(len(present), len(values) - len(present), mean, squares)


def describe_number(name: str, parts: Iterable[Moments]) -> Number:
    """Return the number with the column `name`, given its moments in all parts."""
    count, mean, squares, has_missing = 0, 0.0, 0.0, False
    for part in parts:
        has_missing |= part.missing > 0
        if not part.count:
            continue
        difference = part.mean - mean
        share = part.count / (count + part.count)
        squares += part.squares
        squares += difference**2 * count * share
        mean += difference * share
        count += part.count
    std = math.sqrt(squares / count) if count else 0.0
    # rounding may give a constant a small deviation
    is_constant = std <= 1e-9 * max(1.0, abs(mean))
    return Number(name, mean, 0.0 if is_constant else std, has_missing)


@dataclass(frozen=True)
class TrainingValues:
    """Statistics of custom features over the training rows of a part."""

    numbers: dict[str, Moments]
    """Moments of each number."""
    categories: dict[str, list[str] | None]
    """Sorted values of each category; None for more than MAX_VALUES."""
    sums: dict[str, np.ndarray] = field(default_factory=dict)
    """Sums over the rows of other columns, by name."""

    @classmethod
    def from_frame(cls, rows: pl.DataFrame) -> TrainingValues:
        """Compute the statistics of the columns of training rows."""
        numbers: dict[str, Moments] = {}
        categories: dict[str, list[str] | None] = {}
        for values in rows:
            name = values.name
            if name.startswith(NUMBER):
                numbers[name] = compute_moments(values)
            else:
                distinct = values.drop_nulls().cast(pl.String).unique().to_list()
                categories[name] = _sort_few(distinct)
        return cls(numbers, categories)


def _sort_few(values: Iterable[str]) -> list[str] | None:
    """Return the distinct values, sorted, or None for more than MAX_VALUES."""
    distinct = sorted(set(values))
    return distinct if len(distinct) <= MAX_VALUES else None


def describe_features(parts: list[TrainingValues], names: list[str]) -> CustomFeatures:
    """Merge the statistics of parts.

    Args:
        parts: Statistics of the training rows of all parts.
        names: Columns of the features.

    Returns:
        The features, in the order of `names`.
    """
    numbers, categories = [], []
    for name in names:
        if name.startswith(NUMBER):
            moments = [part.numbers[name] for part in parts]
            numbers.append(describe_number(name, moments))
            continue
        merged: list[str] | None = []
        for part in parts:
            values = part.categories[name]
            if merged is None or values is None:
                merged = None
            else:
                merged = _sort_few([*merged, *values])
        buckets = BUCKETS if merged is None else 0
        categories.append(Category(name, tuple(merged or ()), buckets))
    return CustomFeatures(tuple(numbers), tuple(categories))
