"""What a log brings of its own to rank by: which columns they are, and what the training window says of them.

A number's mean and deviation and a category's values come from training alone; the manifest of sequences holds them,
and `models/own_features.py` reads values by them. A category with more values than MOST_VALUES is hashed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import polars as pl
import pyarrow as pa

from models.config import check_known
from models.storage.tables import UserError
from pipelines.data.reading.log import Log

NUMBER, CATEGORY = "num_", "cat_"
"""Beginnings of the columns."""

OWN = "own"
"""Group of those of events."""

ITEMS = "items"
"""Group of those of the item files."""

MOST_VALUES = 10_000
"""Values of a category that the manifest lists; of more, each has the number of its hash."""

BUCKETS = 20_000
"""Numbers that hashed values have."""


def own_names(schema: pa.Schema) -> list[str]:
    """The columns of own features among those of events: numbers, then categories."""
    return [
        name
        for kind in (NUMBER, CATEGORY)
        for name in schema.names
        if name.startswith(kind)
    ]


def item_columns(source: Log, names: list[str]) -> pa.Schema:
    """The columns of the items table that are of `names`, attributes or numbers. UserError for one that it has not, or
    that has the name of another feature."""
    numbers, categories = source.items_numbers, source.items_columns[1]
    known = [*numbers, *categories]
    check_known(
        names,
        known,
        lambda name, near: (
            f"item_features has '{name}', which is no attribute or number of items"
            + (
                f"; the nearest is '{near}'"
                if known
                else ", as the source file names none"
            )
        ),
    )
    found = [pa.field(NUMBER + name, pa.float32()) for name in names if name in numbers]
    found += [
        pa.field(CATEGORY + name, pa.string()) for name in names if name in categories
    ]
    if twice := [
        column.name[len(NUMBER) :]
        for column in found
        if column.name in usual_groups(source, [])
    ]:
        raise UserError(
            f"item_features has '{twice[0]}', which is the name of another feature too; rename one"
        )
    return pa.schema(found)


def usual_groups(source: Log, item_features: list[str]) -> dict[str, str]:
    """The group that each own feature has where the source file names none, in the order of columns: `own`, the name of
    its table, or `items`."""
    groups = {
        name: OWN for name in source.schema.names if name.startswith((NUMBER, CATEGORY))
    }
    for table, of in source.as_of.items():
        groups |= dict.fromkeys(of.features.names, table)
    groups |= dict.fromkeys(
        item_columns(source, item_features).names if item_features else (), ITEMS
    )
    return {
        name: groups[name]
        for name in own_names(pa.schema([(name, pa.null()) for name in groups]))
    }


@dataclass(frozen=True)
class Moments:
    """What is known of numbers."""

    count: int = 0
    missing: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of the squared distances to the mean."""

    @classmethod
    def of(cls, values: pl.Series) -> Moments:
        known = values.drop_nulls().cast(pl.Float64)
        if not len(known):
            return cls(missing=len(values))
        mean = float(known.mean())  # type: ignore[arg-type]
        return cls(
            len(known),
            len(values) - len(known),
            mean,
            float(((known - mean) ** 2).sum()),
        )

    def __add__(self, other: Moments) -> Moments:
        count, apart = self.count + other.count, other.mean - self.mean
        if not count:
            return Moments(missing=self.missing + other.missing)
        share = other.count / count
        squares = self.squares + other.squares + apart**2 * self.count * share
        return Moments(
            count, self.missing + other.missing, self.mean + apart * share, squares
        )

    def describe(self, name: str) -> dict[str, Any]:
        """As the manifest says it."""
        std = math.sqrt(self.squares / self.count) if self.count else 0.0
        small = std <= 1e-9 * max(1.0, abs(self.mean))  # a constant, but for rounding
        return {
            "name": name,
            "mean": self.mean,
            "std": 0.0 if small else std,
            "missing": self.missing > 0,
        }


@dataclass(frozen=True)
class TrainingValues:
    """What some training rows say of own features."""

    numbers: dict[str, Moments]
    categories: dict[str, list[str] | None]
    """Sorted values; None for more than MOST_VALUES."""

    @classmethod
    def of(cls, columns: Mapping[str, pa.Array]) -> TrainingValues:
        """Of training rows, a column each."""
        numbers, categories = {}, {}
        for name, column in columns.items():
            values = pl.Series(pl.from_arrow(column))
            if name.startswith(NUMBER):
                numbers[name] = Moments.of(values)
            else:
                categories[name] = _listed(
                    values.drop_nulls().cast(pl.String).unique().to_list()
                )
        return cls(numbers, categories)

    def record(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def read(cls, record: dict[str, Any]) -> TrainingValues:
        """Of `record`."""
        return cls(
            {name: Moments(**each) for name, each in record["numbers"].items()},
            record["categories"],
        )


def _listed(values: Iterable[str]) -> list[str] | None:
    found = sorted(set(values))
    return found if len(found) <= MOST_VALUES else None


def describe_features(
    parts: Iterable[TrainingValues], names: list[str]
) -> dict[str, Any]:
    """What the manifest says of own features: `numbers` and `categories`, in the order of `names`."""
    numbers = {name: Moments() for name in names if name.startswith(NUMBER)}
    categories: dict[str, list[str] | None] = {
        name: [] for name in names if name.startswith(CATEGORY)
    }
    for seen in parts:
        for name, moments in seen.numbers.items():
            numbers[name] += moments
        for name, values in seen.categories.items():
            before = categories[name]
            categories[name] = (
                None
                if before is None or values is None
                else _listed([*before, *values])
            )
    return {
        "numbers": [moments.describe(name) for name, moments in numbers.items()],
        "categories": [
            {
                "name": name,
                "values": values or [],
                "buckets": BUCKETS if values is None else 0,
            }
            for name, values in categories.items()
        ],
    }
