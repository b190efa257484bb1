"""Point-in-time counts: events with the same key in [t - window, t - delay).

A key is a value, such as one item or one query; a kind of key is what keys identify:
items, queries or authors.

`python -m jobs.prepare` computes them for kinds of request with counted features.
Events of all users count, so events are exchanged to the bucket of their key, and the
features of the key back to the part of the event (`count_in_buckets`). A bucket is
counted by one vectorised kernel: a sort, running sums, and a binary search per window.
Its cost is O(E log E), whatever the lengths of the windows.

Shapes: E events, W windows, M counted labels, F features.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import polars as pl

from pipelines.prepare.executor import KEY, Call, Exchange, Executor, Shared, fetch

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
"""Arrays (n,) or (n, ...) of some rows of a part, by name."""


def window_counts(
    key: np.ndarray,
    time: np.ndarray,
    counted_labels: np.ndarray,
    windows_ms: list[int],
    delay_ms: int,
    as_of: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Count the labels of each event's key in [t - window, t - delay).

    Events at the same time never count each other, whatever the delay.

    Args:
        key: Integers (E,) that identify the keys.
        time: Times (E,) in ms.
        counted_labels: Integers (E, M) to sum.
        windows_ms: Lengths (W,) of the windows in ms.
        delay_ms: Time in ms until a logged event is available.
        as_of: Times t (E,) in ms.

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
    as_of_times, as_of_index = np.unique(as_of, return_inverse=True)
    sort_key = code * (len(times) + 1) + rank
    order = np.argsort(sort_key)
    sort_key = sort_key[order]
    as_of_index = as_of_index[order]
    time = time[order]
    key_start = sort_key - rank[order]  # (E,) sort key of the key's earliest time
    running = np.zeros((num_events + 1, num_labels), np.int32)  # sums before each event
    np.cumsum(counted_labels[order], axis=0, dtype=np.int32, out=running[1:])

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


def count_features(
    counts: np.ndarray, num_rates: int, prior: float, strength: float
) -> np.ndarray:
    """Return the features (E, F) of counts (E, W, M).

    `counts[:, :, 0]` are exposures, the others labels. Features of a window are
    log(1 + count) of each of the M, then the rates of the first `num_rates` labels,
    smoothed to (count + prior * strength) / (exposures + strength).
    """
    logarithms = np.log1p(np.arange(1 + counts.max(initial=0)))[counts]
    rates = counts[:, :, 1 : 1 + num_rates] + prior * strength
    rates /= counts[:, :, :1] + strength
    values = np.concatenate([logarithms, rates], axis=2)
    return values.reshape(len(counts), -1)


@dataclass(frozen=True)
class Lookups:
    """Tables that every part looks up, which are stored once for all tasks."""

    items: pl.DataFrame
    """`item_id`, `item_index`, and attributes and features of items."""
    queries: pl.DataFrame | None = None
    """`query` and `query_index`; None for kinds without queries."""
    as_of: dict[str, tuple[str, pl.DataFrame]] = field(default_factory=dict)
    """Column of ids, and rows, of each table with times that is joined to events."""
    sessions: pl.DataFrame | None = None
    """Rows of all sessions, with `item_index`, `session_type` and features of items."""


class KeyCounter(ABC):
    """Counted features of one kind of request, by one or more kinds of key."""

    @property
    @abstractmethod
    def names(self) -> list[list[str]]:
        """Names of the features of each kind of key."""

    @property
    @abstractmethod
    def never(self) -> dict[str, float]:
        """Features of a key without events, by name."""

    @abstractmethod
    def read_keys(
        self, uri: str, lookups: Lookups
    ) -> tuple[list[np.ndarray], pl.DataFrame]:
        """Read the keys of a part's events, and the columns to count from.

        Args:
            uri: File of the events part.
            lookups: Tables that every part looks up.

        Returns:
            For each kind of key the key (E,) of each event as an integer, negative for
            events without a key, and the columns that `compute` reads.
        """

    @abstractmethod
    def compute(self, kind_index: int, rows: Columns) -> np.ndarray:
        """Count the events of some keys of one kind, and return their features.

        Args:
            kind_index: Index of the kind of key in `names`.
            rows: Columns of `read_keys`, of all events with these keys.

        Returns:
            The features (n, F) in the order of `names[kind_index]`.
        """

    def gather(
        self, rows: pl.DataFrame | None, num_events: int, names: list[str]
    ) -> np.ndarray:
        """Return the features (E, F) of a part's events from the buckets of their keys.

        Args:
            rows: Results of `_count_rows` for the part; None without events.
            num_events: Number of events of the part.
            names: Names of the features, in the order of the columns to return.
        """
        never = [self.never[name] for name in names]
        features = np.tile(np.array(never, np.float32), (num_events, 1))
        if rows is None:
            return features
        for kind_index, kind_names in enumerate(self.names):
            piece = rows.filter(kind_index=kind_index)
            values = piece["features"].explode().to_numpy()
            columns = [names.index(name) for name in kind_names]
            row = piece["row"].to_numpy()[:, None]
            features[row, columns] = values.reshape(-1, len(columns))
        return features


def count_in_buckets(
    executor: Executor,
    parts: list[str],
    num_events: int,
    counter: KeyCounter,
    lookups: Shared,
    build: Callable[..., Any],
    shared: Call,
) -> Iterator[tuple[int, Any]]:
    """Count the events of all parts, and build each part with its features.

    Args:
        executor: Runs the exchange.
        parts: Files of the events parts.
        num_events: Number of events of all parts.
        counter: Reads and counts keys.
        lookups: Shared `Lookups` of `counter.read_keys`.
        build: Called as `build(*shared, file, rows)`, with the `rows` that
            `counter.gather` takes.
        shared: First arguments of `build`.

    Yields:
        The index of a part and the result of `build`, as parts finish.
    """

    def build_part(*arguments: Any) -> tuple[int, Any]:
        *values, part, rows = arguments
        return part, build(*values, parts[part], rows)

    exchange = exchange_keys(parts, num_events, counter, lookups, build_part, shared)
    return executor.exchange(
        replace(
            exchange,
            num_partitions=len(parts),
            first_kernel=partial(_count_rows, counter),
            num_first_partitions=exchange.num_partitions,
        )
    )


def exchange_keys(
    parts: list[str],
    num_events: int,
    counter: KeyCounter,
    lookups: Shared,
    kernel: Callable[..., Any],
    shared: Call,
) -> Exchange:
    """Return the exchange of the events of all parts to the buckets of their keys.

    Args:
        parts: Files of the events parts.
        num_events: Number of events of all parts.
        counter: Reads keys.
        lookups: Shared `Lookups` of `counter.read_keys`.
        kernel: Called as `kernel(*shared, bucket, rows)`; `split_by_kind` splits the
            rows.
        shared: First arguments of the kernel.
    """
    num_buckets = 1
    if len(parts) > 1:  # counted in parallel
        num_buckets = min(len(parts), MIN_BUCKETS)
        num_buckets = max(math.ceil(num_events / ROWS_PER_BUCKET), num_buckets)
    return Exchange(
        read=partial(_scatter_rows, counter, parts, lookups, num_buckets),
        num_reads=len(parts),
        kernel=kernel,
        num_partitions=len(counter.names) * num_buckets,
        shared=shared,
    )


def _scatter_rows(
    counter: KeyCounter,
    parts: list[str],
    lookups: Shared,
    num_buckets: int,
    part: int,
) -> Iterator[pl.DataFrame]:
    """Yield the rows of a part, once per kind of key, addressed to their key's bucket.

    A placeholder row per part makes sure that each part is built.
    """
    keys, columns = counter.read_keys(parts[part], fetch(lookups))
    columns = columns.with_row_index("row").with_columns(
        pl.lit(part, pl.Int32).alias("part")
    )
    for kind_index, key in enumerate(keys):
        bucket = (kind_index * num_buckets + key % num_buckets).astype(np.int32)
        rows = columns.with_columns(
            pl.Series(KEY, bucket), kind_index=pl.lit(kind_index, pl.Int8)
        )
        yield rows.filter(pl.Series(key >= 0))
    yield rows.clear(1).with_columns(
        pl.lit(part, pl.Int32).alias("part"),
        pl.lit(0, pl.Int32).alias(KEY),
        kind_index=pl.lit(NO_KIND, pl.Int8),
    )


def split_by_kind(rows: pl.DataFrame) -> dict[int, pl.DataFrame]:
    """Return the exchanged rows of each kind of key, by its index."""
    groups = rows.partition_by("kind_index", as_dict=True, maintain_order=False)
    return {index: group for (index,), group in sorted(groups.items())}


def _count_rows(counter: KeyCounter, rows: pl.DataFrame) -> pl.DataFrame:
    """Compute the features of the rows of some buckets, addressed to their parts."""
    results = []
    for kind_index, group in split_by_kind(rows).items():
        features = pl.Series([[]] * group.height)
        if kind_index != NO_KIND:
            values = counter.compute(kind_index, to_columns(group))
            features = pl.Series(values.astype(np.float32))
        result = group.select("row", "kind_index", pl.col("part").alias(KEY))
        features = features.cast(pl.List(pl.Float32)).alias("features")
        results.append(result.with_columns(features))
    return pl.concat(results)


def to_columns(frame: pl.DataFrame) -> Columns:
    """Return the columns of a frame as arrays."""
    return {column.name: column.to_numpy() for column in frame}
