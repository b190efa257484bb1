"""Counts of items, queries and pairs as of one time, as features of served candidates.

    counts = Counts.load("tables/counts", features, settings)
    counts.fill(vectors, ["i0007", "i0123"], ["kettle", "kettle"])

`python -m jobs.prepare --counts_as_of TIME` writes the table. It has a row for each
item, each query and each pair of both that has events before TIME. A row holds the
features of its kind (item, query or pair), as a search at TIME has them, and null for
the other kinds. `time_features` computes features of the request's time.

Shapes: `N` candidates, `F` features, `n` counts of one kind of key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from core.errors import UserError
from core.options import find_difference
from core.ragged import find_sorted
from core.schemas import CountsInfo, SearchInfo
from core.tables import open_table

Floats = NDArray[np.float32]

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
HOURS = ("hour_sin", "hour_cos", "weekday_sin", "weekday_cos")
"""Names of the columns of `time_features`."""


def time_features(time: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return sine and cosine of the hour and of the weekday, in UTC.

    Args:
        time: (N,) times in ms.

    Returns:
        (N, 4) columns, named `HOURS`.
    """
    hour = time % DAY_MS // HOUR_MS
    # 1 January 1970 was a Thursday, day 3 of a week that begins on Monday
    weekday = (time + 3 * DAY_MS) % (7 * DAY_MS) // DAY_MS
    hour_angle = 2 * np.pi * hour / 24
    weekday_angle = 2 * np.pi * weekday / 7
    columns = [
        np.sin(hour_angle),
        np.cos(hour_angle),
        np.sin(weekday_angle),
        np.cos(weekday_angle),
    ]
    return np.stack(columns, 1)


@dataclass(frozen=True)
class Counts:
    """Counts of items, queries and pairs as of one time (see the module)."""

    feature_index: dict[str, list[int]]
    """(n,) index of each count among the F features, by kind of key: `item`, `query`
    and `pair`."""
    values: dict[str, Floats]
    """(rows + 1, n) counts by kind of key; the last row holds the values of keys
    without events."""
    row_by_item: dict[str, int]
    """Row of each item id."""
    row_by_query: dict[str, int]
    """Row of each query."""
    pairs: NDArray[np.int64]
    """Key of each pair, ascending: item row * number of queries + query row."""

    @classmethod
    def load(cls, uri: str, model: SearchInfo) -> Self:
        """Read a table of counts for a model.

        Args:
            uri: Folder of the table of counts.
            model: Info of the sequences of the model.
        """
        counts = open_table(uri, CountsInfo)
        info = counts.info
        table_settings = {**asdict(info.search), "behaviour": info.behaviour}
        model_settings = {**asdict(model.search), "behaviour": model.behaviour}
        if difference := find_difference(model_settings, table_settings):
            raise UserError(f"the model's tables were counted with {difference}: {uri}")
        table = counts.read()
        has_item = pc.is_valid(table["item_id"])
        has_query = pc.is_valid(table["query"])
        item_rows = table.filter(pc.and_not(has_item, has_query))
        query_rows = table.filter(pc.and_not(has_query, has_item))
        pair_rows = table.filter(pc.and_(has_item, has_query))
        item = _find_rows(pair_rows["item_id"], item_rows["item_id"])
        query = _find_rows(pair_rows["query"], query_rows["query"])
        key = item * len(query_rows) + query
        order = np.argsort(key)
        rows_by_kind = {
            "item": item_rows,
            "query": query_rows,
            "pair": pair_rows.take(pa.array(order)),
        }
        feature_index, values = {}, {}
        for kind, rows in rows_by_kind.items():
            names = info.features[kind]
            counted = np.zeros((len(rows) + 1, len(names)), np.float32)
            for column, name in enumerate(names):
                counted[:, column] = np.append(rows[name].to_numpy(), info.never[name])
            feature_index[kind] = [model.features.index(name) for name in names]
            values[kind] = counted
        return cls(
            feature_index=feature_index,
            values=values,
            row_by_item=_row_by_value(item_rows["item_id"]),
            row_by_query=_row_by_value(query_rows["query"]),
            pairs=key[order],
        )

    def fill(
        self, vectors: Floats, items: Sequence[str], queries: Sequence[str | None]
    ) -> None:
        """Write the counts of items, queries and their pairs into features.

        Args:
            vectors: (N, F) features of the candidates, changed in place.
            items: (N,) item ids.
            queries: (N,) queries of the requests.
        """
        item = np.array([self.row_by_item.get(id_, -1) for id_ in items], np.int64)
        query = np.array(
            [self.row_by_query.get(q or "", -1) for q in queries], np.int64
        )
        pair_row, is_counted = find_sorted(
            self.pairs, item * len(self.row_by_query) + query
        )
        is_counted &= (item >= 0) & (query >= 0)
        # row -1 is the last row, which holds the values of keys without events
        rows = {
            "item": item,
            "query": query,
            "pair": np.where(is_counted, pair_row, -1),
        }
        for kind, row in rows.items():
            vectors[:, self.feature_index[kind]] = self.values[kind][row]


def _find_rows(values: pa.ChunkedArray, keys: pa.ChunkedArray) -> NDArray[np.int64]:
    """Return the row (n,) of each value in `keys`."""
    return pc.index_in(values, keys.combine_chunks()).to_numpy().astype(np.int64)


def _row_by_value(column: pa.ChunkedArray) -> dict[str, int]:
    """Return the row of each value of a column of distinct values."""
    return {value: row for row, value in enumerate(column.to_pylist())}
