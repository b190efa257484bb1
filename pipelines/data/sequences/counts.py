"""Point-in-time counts: what happened to a key in [t - window, t - delay), from events alone.

`python -m jobs.prepare` makes them for kinds of request with counted features. Events of all users count, so rows
travel to the bucket of their key, and what is counted there comes back to their part: two exchanges of Ray Data in a
row (`count_in_buckets`). Each bucket is one vectorised kernel: a sort, running sums, and a binary search per window, so
the cost is E log E in the events, whatever the windows hold. What comes back are integers; the `features.py` of a kind
makes numbers for models of them.

Shapes: E events, W windows, M labels that are counted.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import numpy as np
import pyarrow as pa

from models.storage.tables import Part
from pipelines.data.engine import KEY, Call, Engine, fetch
from pipelines.data.events.event_stats import distinct

ROWS_PER_BUCKET = 2_000_000  # a bucket is counted in a few hundred MB; all events of one key are in one
UNSEEN = -1  # gap of a key that was never there before

Columns = dict[str, np.ndarray]
"""Columns (n,) or (n, ...) of some rows of a part; `row` (n,) int32 says which."""

Found = tuple[Part | None, Counter[str], Any]
"""What a task wrote, what it counted on the way, and what else it found, as plain values."""


def window_counts(
    key: np.ndarray,
    time: np.ndarray,
    counted_labels: np.ndarray,
    windows_ms: list[int],
    delay_ms: int,
    as_of: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Labels of the same key in [t - window, t - delay) for every event, and the time since the last event.

    key (E,) dense codes from 0, time (E,) ms, counted_labels (E, M) int; t is `as_of` (E,) ms, by default the event's
    own time. Returns counts (E, W, M) int32 and gap (E,) int64: ms since the key's last event before t - delay,
    UNSEEN where there is none. Events of one time never count for each other, whatever the delay.
    """
    events, labels = counted_labels.shape
    counts = np.zeros((events, len(windows_ms), labels), dtype=np.int32)
    gap = np.full(events, UNSEEN, dtype=np.int64)
    if not events:
        return counts, gap
    # Times by rank, so that (key, rank) fits an integer whatever the clock's unit.
    values, rank = np.unique(time, return_inverse=True)
    moments, which = (
        (values, rank) if as_of is None else np.unique(as_of, return_inverse=True)
    )
    line = key.astype(np.int64) * (len(values) + 1) + rank
    order = np.argsort(line)
    rank, which, time, line = rank[order], which[order], time[order], line[order]
    base = line - rank  # (E,) start of the key's stretch of the line
    total = np.concatenate(
        [
            np.zeros((1, labels), np.int64),
            np.cumsum(counted_labels[order], axis=0, dtype=np.int64),
        ]
    )

    def earlier(shift: int) -> np.ndarray:
        """(E,) events on the line before (key, t - shift)."""
        return np.searchsorted(
            line, base + np.searchsorted(values, moments - shift)[which]
        )

    end = earlier(delay_ms)
    sorted_counts = np.empty_like(counts)
    for number, window in enumerate(windows_ms):
        sorted_counts[:, number] = total[end] - total[earlier(window)]
    counts[order] = sorted_counts
    last = end - 1
    seen = (end > 0) & (base[last] == base)
    gap[order] = np.where(seen, moments[which] - time[last], UNSEEN)
    return counts, gap


def count_key(
    key: np.ndarray,
    time: np.ndarray,
    counted_labels: np.ndarray,
    windows_ms: list[int],
    delay_ms: int,
    as_of: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """`window_counts` of keys that are any integers."""
    dense = np.unique(key, return_inverse=True)[1]
    return window_counts(dense, time, counted_labels, windows_ms, delay_ms, as_of)


def fill(counts: Columns, pieces: list[Columns]) -> None:
    """Writes what was counted of a part's events to its rows of `counts`, by name (E, ...)."""
    for piece in pieces:
        for name in piece.keys() - {"row"}:
            counts[name][piece["row"]] = piece[name]


def side_by_side(columns: list[np.ndarray]) -> np.ndarray:
    """(E, F) float32 of F columns (E,) of any numbers."""
    found = np.empty((len(columns[0]), len(columns)), np.float32)
    for number, column in enumerate(columns):
        found[:, number] = column
    return found


class Windows(ABC):
    """What a kind of request counts, by several keys one after the other: its `number` is that of the key."""

    shapes: list[dict[str, tuple[int, ...]]]
    """Per key the names of what is counted by it and their shapes for one event; int32, but `gap`."""

    @abstractmethod
    def keyed(self, uri: str, *shared: Any) -> tuple[list[np.ndarray], Columns]:
        """Of an events part per key (E,) integers, below 0 for events without it, and the columns to count from."""

    @abstractmethod
    def count(self, number: int, rows: Columns) -> Columns:
        """What is counted of all events of some keys: `shapes[number]` with the events first."""


@dataclass(frozen=True)
class _Scatter:
    """Reads a part as rows by the bucket of each of their keys, and a row that stands for the part."""

    windows: Windows
    parts: list[str]
    shared: Call
    buckets: int
    """Of each key."""

    def __call__(self, part: int) -> Iterator[pa.Table]:
        keys, columns = self.windows.keyed(self.parts[part], *map(fetch, self.shared))
        for number, key in enumerate(keys):
            rows = np.flatnonzero(key >= 0)
            bucket = number * self.buckets + key[rows] % self.buckets
            yield self._table(
                part,
                number,
                rows,
                {name: column[rows] for name, column in columns.items()},
                bucket,
            )
        nothing = {
            name: np.zeros((1, *column.shape[1:]), column.dtype)
            for name, column in columns.items()
        }
        yield self._table(part, -1, np.array([-1]), nothing, np.zeros(1))

    def _table(
        self,
        part: int,
        number: int,
        rows: np.ndarray,
        columns: Columns,
        bucket: np.ndarray,
    ) -> pa.Table:
        of: Columns = {
            KEY: bucket.astype(np.int32),
            "part": np.full(len(rows), part, np.int32),
            "number": np.full(len(rows), number, np.int8),
            "row": rows.astype(np.int32),
        }
        return to_table({**of, **columns})


@dataclass(frozen=True)
class _Count:
    """Counts the rows of some buckets and sends what it finds back to their parts."""

    windows: Windows

    def __call__(self, rows: pa.Table) -> pa.Table:
        width = max(
            sum(prod(shape) for name, shape in each.items() if name != "gap")
            for each in self.windows.shapes
        )
        done = []
        numbers = rows["number"].to_numpy()
        for number in distinct(numbers).tolist():
            piece = to_piece(rows.filter(pa.array(numbers == number)))
            flat = np.zeros((len(piece["row"]), width), np.int32)
            gap = np.zeros(len(piece["row"]), np.int64)
            if number >= 0:
                found, at = self.windows.count(number, piece), 0
                for name, shape in self.windows.shapes[number].items():
                    if name == "gap":
                        gap = found[name]
                    else:
                        flat[:, at : at + prod(shape)] = found[name].reshape(
                            len(flat), -1
                        )
                        at += prod(shape)
            back = {name: piece[name] for name in ("part", "number", "row")}
            done.append(
                to_table({KEY: piece["part"], **back, "flat": flat, "gap": gap})
            )
        return pa.concat_tables(done)

    def pieces(self, rows: pa.Table) -> list[Columns]:
        """What `__call__` made for one part."""
        found = []
        for number, shapes in enumerate(self.windows.shapes):
            piece, at = (
                to_piece(rows.filter(pa.array(rows["number"].to_numpy() == number))),
                0,
            )
            counted = {"row": piece["row"]}
            for name, shape in shapes.items():
                if name == "gap":
                    counted[name] = piece[name]
                else:
                    counted[name] = piece["flat"][:, at : at + prod(shape)].reshape(
                        -1, *shape
                    )
                    at += prod(shape)
            found.append(counted)
        return found


@dataclass(frozen=True)
class _Build:
    """Calls `build` with what was counted of a part."""

    build: Callable[..., Found]
    parts: list[str]
    count: _Count

    def __call__(self, *given: Any) -> pa.Table:
        *shared, part, rows = given
        return _row(
            part, self.build(*shared, self.parts[part], self.count.pieces(rows))
        )


@dataclass(frozen=True)
class _Export:
    """Calls `write` with the rows of a bucket."""

    write: Callable[..., Found]

    def __call__(self, *given: Any) -> pa.Table:
        *_, bucket, _ = given
        return _row(bucket, self.write(*given))


def _row(number: int, found: Found) -> pa.Table:
    """What was written and found, as columns."""
    part, count, other = found
    told = {"part": part and asdict(part), "count": count, "other": other}
    return pa.table(
        {
            "number": [number],
            **{name: [json.dumps(value)] for name, value in told.items()},
        }
    )


def _found(tables: Iterable[pa.Table]) -> Iterator[tuple[int, Found]]:
    """What `_row` was given."""
    for row in (row for table in tables for row in table.to_pylist()):
        part, count, other = (
            json.loads(row[name]) for name in ("part", "count", "other")
        )
        yield row["number"], (part and Part(**part), Counter(count), other)


def count_in_buckets(
    engine: Engine,
    parts: list[str],
    events: int,
    windows: Windows,
    counted_from: Call,
    build: Callable[..., Found],
    shared: Call = (),
) -> Iterator[tuple[int, Found]]:
    """Counts what `windows.keyed(part, *counted_from)` gives of the events parts, and yields (number of the part,
    `build(*shared, part, pieces)`) as they end. pieces: for `fill`, one per key. events: of all parts."""
    keys, buckets = len(windows.shapes), buckets_of(events, len(parts))
    scatter, count = _Scatter(windows, parts, counted_from, buckets), _Count(windows)
    build_ = _Build(build, parts, count)
    return _found(
        engine.exchange(
            scatter, len(parts), len(parts), build_, shared, (keys * buckets, count)
        )
    )


def export_counts(
    engine: Engine,
    parts: list[str],
    events: int,
    windows: Windows,
    counted_from: Call,
    write: Callable[..., Found],
    shared: Call = (),
) -> Iterator[tuple[int, Found]]:
    """Brings the rows of each key together, as `count_in_buckets` does, and yields (bucket, `write(*shared, bucket,
    rows)`) as they end. rows: those of `to_piece`, with the `number` of the key, -1 of rows that mean nothing."""
    keys, buckets = len(windows.shapes), buckets_of(events, len(parts))
    scatter = _Scatter(windows, parts, counted_from, buckets)
    return _found(
        engine.exchange(scatter, len(parts), keys * buckets, _Export(write), shared)
    )


def buckets_of(events: int, parts: int) -> int:
    """How many buckets the events of so many parts are counted in."""
    return max(-(-events // ROWS_PER_BUCKET), min(parts, 8)) if parts > 1 else 1


def to_table(columns: Columns) -> pa.Table:
    """Arrays (n, ...) as columns; wider ones as lists of fixed size."""

    def column(values: np.ndarray) -> pa.Array:
        if values.ndim == 1:
            return pa.array(values)
        return pa.FixedSizeListArray.from_arrays(
            pa.array(values.reshape(-1)), prod(values.shape[1:])
        )

    return pa.table({name: column(values) for name, values in columns.items()})


def to_piece(table: pa.Table) -> Columns:
    """What `to_table` was given, wider columns as (n, width)."""

    def values(column: pa.ChunkedArray) -> np.ndarray:
        array = column.combine_chunks()
        array = (
            pa.concat_arrays(array.chunks)
            if isinstance(array, pa.ChunkedArray)
            else array
        )
        if pa.types.is_fixed_size_list(array.type):
            return (
                array.flatten()
                .to_numpy(zero_copy_only=False)
                .reshape(-1, array.type.list_size)
            )
        return array.to_numpy(zero_copy_only=False)

    return {name: values(table[name]) for name in table.column_names if name != KEY}
