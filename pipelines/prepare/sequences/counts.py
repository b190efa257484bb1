"""Point-in-time counts: events with the same key in [t - window, t - delay).

A key is a value, such as one item or one query; a kind of key is what keys identify:
items, queries or authors.

`python -m jobs.prepare` computes them for kinds of request with counted features.
Events of all users count, so events are exchanged to the bucket of their key, and the
counts back to the part of the event (`count_in_buckets`). A bucket is counted by one
vectorised kernel: a sort, running sums, and a binary search per window. Its cost is
O(E log E), whatever the lengths of the windows. Counts are integers; `features.py` of a
kind turns them into the features that models read.

Shapes: E events, W windows, M counted labels.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.prepare.events.columns import sorted_unique
from pipelines.prepare.executor import KEY, Call, Exchange, Executor, fetch

ROWS_PER_BUCKET = 2_000_000
"""Mean number of rows per bucket, which take a few hundred MB. All events of one key
are in one bucket."""

MIN_BUCKETS = 8
"""Minimum number of buckets of a kind of key, for counting in parallel."""

NO_GAP = -1
"""Gap of a key without an earlier event."""

NO_KIND = -1
"""Index of the kind of key in the placeholder row of a part, which is sent so that a
part without any key is built too."""

Columns = dict[str, np.ndarray]
"""Arrays (n,) or (n, ...) of some rows of a part, by name; `row` (n,) int32 is their
row number in the part."""


def window_counts(
    key: np.ndarray,
    time: np.ndarray,
    counted_labels: np.ndarray,
    windows_ms: list[int],
    delay_ms: int,
    as_of: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Count the labels of each event's key in [t - window, t - delay).

    Events at the same time never count each other, whatever the delay.

    Args:
        key: Integers (E,) that identify the keys.
        time: Times (E,) in ms.
        counted_labels: Integers (E, M) to sum.
        windows_ms: Lengths (W,) of the windows in ms.
        delay_ms: Time in ms until a logged event is available.
        as_of: Times t (E,) in ms; by default the times of the events.

    Returns:
        The counts (E, W, M) int32, and the gap (E,) int64: ms from the key's latest
        event before t - delay to t, or NO_GAP.
    """
    num_events, num_labels = counted_labels.shape
    counts = np.zeros((num_events, len(windows_ms), num_labels), dtype=np.int32)
    gap = np.full(num_events, NO_GAP, dtype=np.int64)
    if not num_events:
        return counts, gap
    # events are sorted by one int64: key and rank of the time, which fit for any unit
    code = np.unique(key, return_inverse=True)[1].astype(np.int64)
    times, rank = np.unique(time, return_inverse=True)
    # distinct times t, and the index (E,) of each event's time t
    as_of_times, as_of_index = times, rank
    if as_of is not None:
        as_of_times, as_of_index = np.unique(as_of, return_inverse=True)
    sort_key = code * (len(times) + 1) + rank
    order = np.argsort(sort_key)
    sort_key = sort_key[order]
    as_of_index = as_of_index[order]
    time = time[order]
    key_start = sort_key - rank[order]  # (E,) sort key of the key's earliest time
    running = np.zeros((num_events + 1, num_labels), np.int64)  # sums before each event
    np.cumsum(counted_labels[order], axis=0, dtype=np.int64, out=running[1:])

    def events_before(shift: int) -> np.ndarray:
        """Return the number (E,) of sorted events before (key, t - shift)."""
        rank_before = np.searchsorted(times, as_of_times - shift)[as_of_index]
        return np.searchsorted(sort_key, key_start + rank_before)

    end = events_before(delay_ms)
    sorted_counts = np.empty_like(counts)
    for index, window in enumerate(windows_ms):
        sorted_counts[:, index] = running[end] - running[events_before(window)]
    counts[order] = sorted_counts
    latest = end - 1
    has_latest = (end > 0) & (key_start[latest] == key_start)
    gap[order] = np.where(has_latest, as_of_times[as_of_index] - time[latest], NO_GAP)
    return counts, gap


def smooth_rates(
    counts: np.ndarray, exposures: np.ndarray, prior: float, strength: float
) -> np.ndarray:
    """Return smoothed rates: (counts + prior * strength) / (exposures + strength)."""
    return (counts + prior * strength) / (exposures + strength)


def stack_columns(columns: list[np.ndarray]) -> np.ndarray:
    """Stack F arrays (E,) of any numeric type to an (E, F) float32 array."""
    stacked = np.empty((len(columns[0]), len(columns)), np.float32)
    for index, column in enumerate(columns):
        stacked[:, index] = column
    return stacked


class KeyCounter(ABC):
    """Counts of one kind of request, by one or more kinds of key."""

    shapes: list[dict[str, tuple[int, ...]]]
    """For each kind of key the names of its counts, and their shapes per event. Counts
    are int32, except an int64 `gap`."""

    @abstractmethod
    def read_keys(self, uri: str, *shared: Any) -> tuple[list[np.ndarray], Columns]:
        """Read the keys of a part's events, and the columns to count from.

        Args:
            uri: File of the events part.
            *shared: Lookup tables of the kind.

        Returns:
            For each kind of key the key (E,) of each event as an integer, negative for
            events without a key, and the columns (E, ...) that `count` reads.
        """

    @abstractmethod
    def count(self, kind_index: int, rows: Columns) -> Columns:
        """Count the events of some keys of one kind.

        Args:
            kind_index: Index of the kind of key in `shapes`.
            rows: Columns of `read_keys`, of all events with these keys.

        Returns:
            The counts (n, ...) by name, shaped as in `shapes[kind_index]`.
        """


def gather_counts(
    counter: KeyCounter, num_events: int, pieces: list[Columns]
) -> Columns:
    """Assemble the counts of a part's events from the counts of its kinds of key.

    Args:
        counter: Names and shapes of the counts.
        num_events: Number of events of the part.
        pieces: Counts of some rows of the part each.

    Returns:
        The counts (E, ...) by name; 0, or NO_GAP, for events without a key.
    """
    counts: Columns = {}
    for shapes in counter.shapes:
        for name, shape in shapes.items():
            if name == "gap":
                counts[name] = np.full(num_events, NO_GAP, dtype=np.int64)
            else:
                counts[name] = np.zeros((num_events, *shape), np.int32)
    for piece in pieces:
        for name in piece.keys() - {"row"}:
            counts[name][piece["row"]] = piece[name]
    return counts


def count_in_buckets(
    executor: Executor,
    parts: list[str],
    num_events: int,
    counter: KeyCounter,
    key_lookups: Call,
    build: Callable[..., Any],
    shared: Call = (),
) -> Iterator[tuple[int, Any]]:
    """Count the events of all parts, and build each part with its counts.

    Args:
        executor: Runs the exchange.
        parts: Files of the events parts.
        num_events: Number of events of all parts.
        counter: Reads and counts keys.
        key_lookups: Lookup tables that `counter.read_keys` takes after the file.
        build: Called as `build(*shared, file, pieces)`, with the `pieces` that
            `gather_counts` takes.
        shared: First arguments of `build`.

    Yields:
        The index of a part and the result of `build`, as parts finish.
    """
    num_buckets = choose_num_buckets(num_events, len(parts))
    kernel = _CountRows(counter)
    exchange = Exchange(
        read=_ScatterRows(counter, parts, key_lookups, num_buckets),
        num_reads=len(parts),
        kernel=_BuildPart(build, parts, kernel),
        num_partitions=len(parts),
        shared=shared,
        first_kernel=kernel,
        num_first_partitions=len(counter.shapes) * num_buckets,
    )
    return executor.exchange(exchange)


def export_counts(
    executor: Executor,
    parts: list[str],
    num_events: int,
    counter: KeyCounter,
    key_lookups: Call,
    write: Callable[..., Any],
    shared: Call = (),
) -> Iterator[tuple[int, Any]]:
    """Exchange the events of all parts to the buckets of their keys, and write buckets.

    Args:
        executor: Runs the exchange.
        parts: Files of the events parts.
        num_events: Number of events of all parts.
        counter: Reads keys.
        key_lookups: Lookup tables that `counter.read_keys` takes after the file.
        write: Called as `write(*shared, bucket, rows)`. `to_columns` converts `rows`;
            its column `kind_index` is the index of the kind of key, or NO_KIND in rows
            to ignore.
        shared: First arguments of `write`.

    Yields:
        The index of a bucket and the result of `write`, as buckets finish.
    """
    num_buckets = choose_num_buckets(num_events, len(parts))
    exchange = Exchange(
        read=_ScatterRows(counter, parts, key_lookups, num_buckets),
        num_reads=len(parts),
        kernel=_WriteBucket(write),
        num_partitions=len(counter.shapes) * num_buckets,
        shared=shared,
    )
    return executor.exchange(exchange)


def choose_num_buckets(num_events: int, num_parts: int) -> int:
    """Return the number of buckets that the keys of one kind are spread over.

    One part needs one bucket. More parts get at least MIN_BUCKETS, or one bucket per
    part if there are fewer parts, so that counting runs in parallel.
    """
    if num_parts <= 1:
        return 1
    return max(math.ceil(num_events / ROWS_PER_BUCKET), min(num_parts, MIN_BUCKETS))


@dataclass(frozen=True)
class _ScatterRows:
    """Reads the rows of a part, once per kind of key, addressed to their key's bucket.

    A placeholder row per part makes sure that each part is built.
    """

    counter: KeyCounter
    parts: list[str]
    key_lookups: Call
    num_buckets: int
    """Number of buckets of each kind of key."""

    def __call__(self, part: int) -> Iterator[pa.Table]:
        lookups = map(fetch, self.key_lookups)
        keys, columns = self.counter.read_keys(self.parts[part], *lookups)
        for kind_index, key in enumerate(keys):
            rows = np.flatnonzero(key >= 0)
            bucket = kind_index * self.num_buckets + key[rows] % self.num_buckets
            values = {name: column[rows] for name, column in columns.items()}
            yield _address(bucket, part, kind_index, rows, values)
        placeholder = {
            name: np.zeros((1, *column.shape[1:]), column.dtype)
            for name, column in columns.items()
        }
        yield _address(np.zeros(1), part, NO_KIND, np.array([-1]), placeholder)


def _address(
    partition: np.ndarray,
    part: int,
    kind_index: int,
    rows: np.ndarray,
    columns: Columns,
) -> pa.Table:
    """Convert columns of a part's rows to a table to exchange."""
    address: Columns = {
        KEY: partition.astype(np.int32),
        "part": np.full(len(rows), part, np.int32),
        "kind_index": np.full(len(rows), kind_index, np.int8),
        "row": rows.astype(np.int32),
    }
    return to_table({**address, **columns})


@dataclass(frozen=True)
class _CountRows:
    """Counts the rows of some buckets, and addresses the counts to their parts.

    All exchanged tables have one schema. The counts of a kind of key are
    flattened and concatenated to the column `flat`, which is as wide as the widest kind
    needs.
    """

    counter: KeyCounter

    @property
    def width(self) -> int:
        """Width of `flat`."""
        return max(
            sum(math.prod(shape) for name, shape in shapes.items() if name != "gap")
            for shapes in self.counter.shapes
        )

    def __call__(self, rows: pa.Table) -> pa.Table:
        tables = []
        kind_indices = rows["kind_index"].to_numpy()
        for kind_index in sorted_unique(kind_indices).tolist():
            columns = to_columns(rows.filter(pa.array(kind_indices == kind_index)))
            flat = np.zeros((len(columns["row"]), self.width), np.int32)
            gap = np.zeros(len(columns["row"]), np.int64)
            if kind_index != NO_KIND:
                counts = self.counter.count(kind_index, columns)
                for name, flat_columns in self._slices(kind_index).items():
                    flat[:, flat_columns] = counts[name].reshape(len(flat), -1)
                gap = counts.get("gap", gap)
            results = {name: columns[name] for name in ("part", "kind_index", "row")}
            results |= {KEY: columns["part"], "flat": flat, "gap": gap}
            tables.append(to_table(results))
        return pa.concat_tables(tables)

    def split_by_key(self, rows: pa.Table) -> list[Columns]:
        """Return the counts of one part for `gather_counts`, one element per kind."""
        pieces = []
        kind_indices = rows["kind_index"].to_numpy()
        for kind_index, shapes in enumerate(self.counter.shapes):
            columns = to_columns(rows.filter(pa.array(kind_indices == kind_index)))
            piece = {"row": columns["row"]}
            for name, flat_columns in self._slices(kind_index).items():
                flat = columns["flat"][:, flat_columns]
                piece[name] = flat.reshape(-1, *shapes[name])
            if "gap" in shapes:
                piece["gap"] = columns["gap"]
            pieces.append(piece)
        return pieces

    def _slices(self, kind_index: int) -> dict[str, slice]:
        """Return the range of columns of `flat` for each count of a kind of key."""
        slices: dict[str, slice] = {}
        begin = 0
        for name, shape in self.counter.shapes[kind_index].items():
            if name != "gap":
                slices[name] = slice(begin, begin + math.prod(shape))
                begin += math.prod(shape)
        return slices


@dataclass(frozen=True)
class _BuildPart:
    """Calls `build` with the counts of a part."""

    build: Callable[..., Any]
    parts: list[str]
    count: _CountRows

    def __call__(self, *arguments: Any) -> tuple[int, Any]:
        *shared, part, rows = arguments
        pieces = self.count.split_by_key(rows)
        return part, self.build(*shared, self.parts[part], pieces)


@dataclass(frozen=True)
class _WriteBucket:
    """Calls `write` with the rows of a bucket."""

    write: Callable[..., Any]

    def __call__(self, *arguments: Any) -> tuple[int, Any]:
        *_, bucket, _ = arguments
        return bucket, self.write(*arguments)


def to_table(columns: Columns) -> pa.Table:
    """Convert arrays (n, ...) to columns: numbers, or fixed-size lists of numbers."""
    arrays = {}
    for name, values in columns.items():
        array = pa.array(values.reshape(-1))
        if values.ndim > 1:
            array = pa.FixedSizeListArray.from_arrays(
                array, math.prod(values.shape[1:])
            )
        arrays[name] = array
    return pa.table(arrays)


def to_columns(table: pa.Table) -> Columns:
    """Convert columns of `to_table` to arrays (n,) or (n, width), without KEY."""
    columns = {}
    for name in table.column_names:
        if name == KEY:
            continue
        array = table[name].combine_chunks()
        if isinstance(array, pa.ChunkedArray):
            array = pa.concat_arrays(array.chunks)
        if pa.types.is_fixed_size_list(array.type):
            width = array.type.list_size
            values = array.flatten().to_numpy(zero_copy_only=False)
            columns[name] = values.reshape(-1, width)
        else:
            columns[name] = array.to_numpy(zero_copy_only=False)
    return columns
