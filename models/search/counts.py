"""Counts of items, queries and pairs as of a moment, as features of what a request ranks.

    counts = Counts.load("tables/counts", features, settings)
    counts.fill(vectors, ["i0007", "i0123"], "kettle")

`python -m jobs.prepare --counts_as_of TIME` makes the table: a row per item, per query
and per pair of both that was there before TIME, with the features of its kind and null
elsewhere. What has no row was never there. The values are those of a search at TIME;
`hours` are features of a request's own time.

Shapes: `N` candidates, `F` features, `n` those of one kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from models.ragged import find_sorted
from models.storage.tables import UserError, read_manifest, read_table

Floats = NDArray[np.float32]

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
HOURS = ("hour_sin", "hour_cos", "weekday_sin", "weekday_cos")
"""Names of the columns of `hours`."""
COUNTED_BY = ("windows_days", "delay_minutes", "ctr_prior", "ctr_strength", "behaviour")
"""Settings of a log that decide the values."""


def hours(time: NDArray[np.int64]) -> NDArray[np.float64]:
    """(N, 4): hour and weekday of `time` (N,) ms, in UTC, on circles."""
    columns = []
    for period, start in (
        (DAY_MS, 0),
        (7 * DAY_MS, 3 * DAY_MS),
    ):  # 1 January 1970 was a Thursday
        angle = (
            2
            * np.pi
            * ((time + start) % period // (HOUR_MS if period == DAY_MS else DAY_MS))
        )
        angle /= 24 if period == DAY_MS else 7
        columns += [np.sin(angle), np.cos(angle)]
    return np.stack(columns, 1)


@dataclass(frozen=True)
class Rows:
    """The features of one kind of key."""

    places: NDArray[np.int64]
    """(n,) places of its features among the F."""
    values: Floats
    """(rows + 1, n); the last row is of what was never there."""

    @classmethod
    def of(
        cls,
        table: pa.Table,
        names: Sequence[str],
        features: Sequence[str],
        never: Mapping[str, float],
    ) -> Self:
        """Read the counts of `table`'s rows, by the key columns `names`."""
        columns = [
            np.append(table[name].to_numpy(), np.float32(never[name])) for name in names
        ]
        values = np.stack(columns, 1) if columns else np.zeros((len(table) + 1, 0))
        return cls(
            np.array([features.index(name) for name in names], np.int64),
            values.astype(np.float32),
        )


@dataclass(frozen=True)
class Counts:
    """See the module."""

    of: dict[str, Rows]
    """Features of `item`, `query` and `pair`."""
    items: dict[str, int]
    """Rows of items."""
    queries: dict[str, int]
    """Rows of queries."""
    pairs: NDArray[np.int64]
    """item row x queries + query row of each pair, ascending."""

    @classmethod
    def load(
        cls, uri: str, features: Sequence[str], settings: Mapping[str, Any]
    ) -> Self:
        """Read the table at `uri` for a model of these built-in features.

        Args:
            settings: Settings of the counts in the model's tables, from the manifest of
                `sequences`.

        Raises:
            UserError: if the table was made with other settings.
        """
        info = read_manifest(uri, "counts").info
        for name in COUNTED_BY:
            here, there = (
                {**each["search"], "behaviour": each["behaviour"]}[name]
                for each in (info, settings)
            )
            if here != there:
                raise UserError(
                    f"{uri} was counted with {name} {here}, the tables of the model with {there}; prepare the log with "
                    f"the model's source file"
                )
        table = read_table(uri, "counts")
        has_item, has_query = (
            pc.is_valid(table[name]) for name in ("item_id", "query")
        )
        parts = {
            "item": table.filter(pc.and_not(has_item, has_query)),
            "query": table.filter(pc.and_not(has_query, has_item)),
            "pair": table.filter(pc.and_(has_item, has_query)),
        }
        item, query = (
            pc.index_in(parts["pair"][name], parts[of][name].combine_chunks())
            .to_numpy()
            .astype(np.int64)
            for of, name in (("item", "item_id"), ("query", "query"))
        )
        key = item * len(parts["query"]) + query
        order = np.argsort(key)
        parts["pair"] = parts["pair"].take(pa.array(order))
        rows = {
            of: Rows.of(part, info["features"][of], features, info["never"])
            for of, part in parts.items()
        }
        items, queries = (
            parts["item"]["item_id"].to_pylist(),
            parts["query"]["query"].to_pylist(),
        )
        by_id = [
            {id_: row for row, id_ in enumerate(each)} for each in (items, queries)
        ]
        return cls(rows, by_id[0], by_id[1], key[order])

    def fill(self, vectors: Floats, items: Sequence[str], query: str | None) -> None:
        """Write the counts of `items` (N,) and of their pairs with the query to
        `vectors` (N, F).
        """
        item = np.array([self.items.get(id_, -1) for id_ in items], np.int64)
        asked = self.queries.get(query or "", -1)
        place, there = find_sorted(self.pairs, item * len(self.queries) + asked)
        there &= (item >= 0) & (asked >= 0)
        for of, row in {
            "item": item,
            "query": np.full(len(item), asked),
            "pair": np.where(there, place, -1),
        }.items():
            vectors[:, self.of[of].places] = self.of[of].values[
                row
            ]  # row -1 is the last one
