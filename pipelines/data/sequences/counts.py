"""Point-in-time counts: events of one key in [t - window, t - delay), from events alone.

`python -m jobs.prepare` makes them for kinds of request with counted features. Events
of all users count, so rows travel to the bucket of their key, and their counts travel
back to their part: two exchanges in a row (`count_in_buckets`). Each bucket is one
vectorised kernel: a sort, running sums, and a binary search per window, so the cost is
E log E in the events, whatever the windows hold. The counts are integers; the
`features.py` of a kind computes what models read.

Shapes: E events, W windows, M labels that are counted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.data.engine import KEY, Call, Engine, Exchange, fetch
from pipelines.data.events.columns import sorted_unique

ROWS_PER_BUCKET = 2_000_000
"""Rows that a bucket is counted from, in a few hundred MB; all events of one key are in
one bucket."""

NO_GAP = -1
"""Gap of a key without an earlier event."""

NO_KEY = -1
"""`key_number` of the row that stands for a part."""

Columns = dict[str, np.ndarray]
"""Columns (n,) or (n, ...) of some rows of a part; `row` (n,) int32 is their row
number."""


def window_counts(
    key: np.ndarray,
    time: np.ndarray,
    counted_labels: np.ndarray,
    windows_ms: list[int],
    delay_ms: int,
    as_of: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Count the labels of the same key in [t - window, t - delay) for every event.

    Events of one time never count for each other, whatever the delay.

    Args:
        key: (E,) any integers.
        time: (E,) ms.
        counted_labels: (E, M) integers.
        windows_ms: (W,) lengths of the windows.
        delay_ms: What a log takes to arrive.
        as_of: (E,) ms t of each event; by default its own time.

    Returns:
        (E, W, M) int32 counts, and (E,) int64 ms from the key's last event before
        t - delay to t, NO_GAP without one.
    """
    events, labels = counted_labels.shape
    counts = np.zeros((events, len(windows_ms), labels), dtype=np.int32)
    gap = np.full(events, NO_GAP, dtype=np.int64)
    if not events:
        return counts, gap
    # (key, time) on one line of integers: time by rank, so that both fit whatever the
    # clock's unit.
    code = np.unique(key, return_inverse=True)[1].astype(np.int64)
    times, rank = np.unique(time, return_inverse=True)
    moments, moment = times, rank
    if as_of is not None:
        moments, moment = np.unique(as_of, return_inverse=True)
    line = code * (len(times) + 1) + rank
    order = np.argsort(line)
    rank, moment, time, line = rank[order], moment[order], time[order], line[order]
    key_begin = line - rank  # (E,) begin of the key's stretch of the line
    running = np.zeros((events + 1, labels), np.int64)
    np.cumsum(counted_labels[order], axis=0, dtype=np.int64, out=running[1:])

    def events_before(shift: int) -> np.ndarray:
        """Return (E,) the number of events on the line before (key, t - shift)."""
        rank_before = np.searchsorted(times, moments - shift)[moment]
        return np.searchsorted(line, key_begin + rank_before)

    end = events_before(delay_ms)
    sorted_counts = np.empty_like(counts)
    for number, window in enumerate(windows_ms):
        sorted_counts[:, number] = running[end] - running[events_before(window)]
    counts[order] = sorted_counts
    last = end - 1
    has_last = (end > 0) & (key_begin[last] == key_begin)
    gap[order] = np.where(has_last, moments[moment] - time[last], NO_GAP)
    return counts, gap


def smooth_rates(
    counts: np.ndarray, exposures: np.ndarray, prior: float, strength: float
) -> np.ndarray:
    """Return (count + prior * strength) / (exposures + strength)."""
    return (counts + prior * strength) / (exposures + strength)


def stack_columns(columns: list[np.ndarray]) -> np.ndarray:
    """Return F columns (E,) of any numbers as an (E, F) float32 array."""
    stacked = np.empty((len(columns[0]), len(columns)), np.float32)
    for number, column in enumerate(columns):
        stacked[:, number] = column
    return stacked


class KeyCounter(ABC):
    """Counts that one kind of request has, by several keys one after the other."""

    shapes: list[dict[str, tuple[int, ...]]]
    """Per key the names of its counts and their shapes for one event: int32, but for
    `gap`."""

    @abstractmethod
    def read_keys(self, uri: str, *shared: Any) -> tuple[list[np.ndarray], Columns]:
        """Return per key the (E,) integers of an events part, below 0 for events without it, and columns to count from."""

    @abstractmethod
    def count(self, key_number: int, rows: Columns) -> Columns:
        """Return the counts of all events of some keys: `shapes[key_number]`, with the events as first axis."""


def gather_counts(counter: KeyCounter, events: int, pieces: list[Columns]) -> Columns:
    """Return the counts of a part's events by name, (E, ...): 0, and NO_GAP, for events without the key."""
    counts: Columns = {}
    for shapes in counter.shapes:
        for name, shape in shapes.items():
            if name == "gap":
                counts[name] = np.full(events, NO_GAP, dtype=np.int64)
            else:
                counts[name] = np.zeros((events, *shape), np.int32)
    for piece in pieces:
        for name in piece.keys() - {"row"}:
            counts[name][piece["row"]] = piece[name]
    return counts


def count_in_buckets(
    engine: Engine,
    parts: list[str],
    events: int,
    counter: KeyCounter,
    count_inputs: Call,
    build: Callable[..., Any],
    shared: Call = (),
) -> Iterator[tuple[int, Any]]:
    """Count the events of all parts and build each part with its counts.

    Args:
        engine: Runs the exchange.
        parts: URIs of events parts.
        events: Events of all parts.
        counter: Reads and counts keys.
        count_inputs: Arguments of `counter.read_keys` after the part.
        build: Called as `build(*shared, part, pieces)`, with pieces for
            `gather_counts`.
        shared: First arguments of `build`.

    Yields:
        (number of the part, result of `build`) as parts finish.
    """
    buckets = num_buckets(events, len(parts))
    kernel = _CountRows(counter)
    exchange = Exchange(
        read=_ScatterRows(counter, parts, count_inputs, buckets),
        num_reads=len(parts),
        kernel=_BuildPart(build, parts, kernel),
        num_partitions=len(parts),
        shared=shared,
        first_kernel=kernel,
        num_first_partitions=len(counter.shapes) * buckets,
    )
    return engine.exchange(exchange)


def export_counts(
    engine: Engine,
    parts: list[str],
    events: int,
    counter: KeyCounter,
    count_inputs: Call,
    write: Callable[..., Any],
    shared: Call = (),
) -> Iterator[tuple[int, Any]]:
    """Bring the rows of each key together and write each bucket.

    Arguments are those of `count_in_buckets`. `write` is called as
    `write(*shared, bucket, rows)` with a table for `to_columns`, which has the column
    `number`: the number of the key, NO_KEY in rows to ignore.

    Yields:
        (bucket, result of `write`) as buckets finish.
    """
    buckets = num_buckets(events, len(parts))
    exchange = Exchange(
        read=_ScatterRows(counter, parts, count_inputs, buckets),
        num_reads=len(parts),
        kernel=_WriteBucket(write),
        num_partitions=len(counter.shapes) * buckets,
        shared=shared,
    )
    return engine.exchange(exchange)


def num_buckets(events: int, parts: int) -> int:
    """Return the number of buckets of each key."""
    if parts <= 1:
        return 1
    return max(-(-events // ROWS_PER_BUCKET), min(parts, 8))


@dataclass(frozen=True)
class _ScatterRows:
    """Reads a part as rows by the bucket of each of their keys, and one row that stands for the part."""

    counter: KeyCounter
    parts: list[str]
    count_inputs: Call
    buckets: int
    """Buckets of each key."""

    def __call__(self, part: int) -> Iterator[pa.Table]:
        inputs = map(fetch, self.count_inputs)
        keys, columns = self.counter.read_keys(self.parts[part], *inputs)
        for number, key in enumerate(keys):
            rows = np.flatnonzero(key >= 0)
            bucket = number * self.buckets + key[rows] % self.buckets
            values = {name: column[rows] for name, column in columns.items()}
            yield _address(bucket, part, number, rows, values)
        nothing = {
            name: np.zeros((1, *column.shape[1:]), column.dtype)
            for name, column in columns.items()
        }
        yield _address(np.zeros(1), part, NO_KEY, np.array([-1]), nothing)


def _address(
    partition: np.ndarray, part: int, number: int, rows: np.ndarray, columns: Columns
) -> pa.Table:
    """Return columns of rows of a part as a table to exchange, for the key with this number."""
    address: Columns = {
        KEY: partition.astype(np.int32),
        "part": np.full(len(rows), part, np.int32),
        "number": np.full(len(rows), number, np.int8),
        "row": rows.astype(np.int32),
    }
    return to_table({**address, **columns})


@dataclass(frozen=True)
class _CountRows:
    """Counts the rows of some buckets and addresses the counts to their parts.

    All exchanged tables have one schema: the counts of a key are flattened side by side
    into `flat`, which is as wide as the widest key's.
    """

    counter: KeyCounter

    @property
    def width(self) -> int:
        """Width of `flat`."""
        return max(
            sum(prod(shape) for name, shape in shapes.items() if name != "gap")
            for shapes in self.counter.shapes
        )

    def __call__(self, rows: pa.Table) -> pa.Table:
        tables = []
        numbers = rows["number"].to_numpy()
        for number in sorted_unique(numbers).tolist():
            columns = to_columns(rows.filter(pa.array(numbers == number)))
            flat = np.zeros((len(columns["row"]), self.width), np.int32)
            gap = np.zeros(len(columns["row"]), np.int64)
            if number != NO_KEY:
                counts = self.counter.count(number, columns)
                for name, where in self._slices(number).items():
                    flat[:, where] = counts[name].reshape(len(flat), -1)
                gap = counts.get("gap", gap)
            back = {name: columns[name] for name in ("part", "number", "row")}
            back |= {KEY: columns["part"], "flat": flat, "gap": gap}
            tables.append(to_table(back))
        return pa.concat_tables(tables)

    def pieces(self, rows: pa.Table) -> list[Columns]:
        """Return the counts of one part by key, for `gather_counts`."""
        pieces = []
        numbers = rows["number"].to_numpy()
        for number, shapes in enumerate(self.counter.shapes):
            columns = to_columns(rows.filter(pa.array(numbers == number)))
            piece = {"row": columns["row"]}
            for name, where in self._slices(number).items():
                piece[name] = columns["flat"][:, where].reshape(-1, *shapes[name])
            if "gap" in shapes:
                piece["gap"] = columns["gap"]
            pieces.append(piece)
        return pieces

    def _slices(self, number: int) -> dict[str, slice]:
        """Return the columns of `flat` that hold each count of a key."""
        slices, begin = {}, 0
        for name, shape in self.counter.shapes[number].items():
            if name != "gap":
                slices[name] = slice(begin, begin + prod(shape))
                begin += prod(shape)
        return slices


@dataclass(frozen=True)
class _BuildPart:
    """Calls `build` with the counts of a part."""

    build: Callable[..., Any]
    parts: list[str]
    count: _CountRows

    def __call__(self, *arguments: Any) -> tuple[int, Any]:
        *shared, part, rows = arguments
        pieces = self.count.pieces(rows)
        return part, self.build(*shared, self.parts[part], pieces)


@dataclass(frozen=True)
class _WriteBucket:
    """Calls `write` with the rows of a bucket."""

    write: Callable[..., Any]

    def __call__(self, *arguments: Any) -> tuple[int, Any]:
        *_, bucket, _ = arguments
        return bucket, self.write(*arguments)


def to_table(columns: Columns) -> pa.Table:
    """Return arrays (n, ...) as columns; wider ones as lists of fixed size."""
    arrays = {}
    for name, values in columns.items():
        array = pa.array(values.reshape(-1))
        if values.ndim > 1:
            array = pa.FixedSizeListArray.from_arrays(array, prod(values.shape[1:]))
        arrays[name] = array
    return pa.table(arrays)


def to_columns(table: pa.Table) -> Columns:
    """Return the columns of `to_table` without KEY; lists of fixed size as (n, width) arrays."""
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
