"""Statistics of the events table for the catalogue and the split.

    stats = event_stats(parts, "click", executor)

A user is in one part only, so counts per user are local to a part. Counts per item
are summed over the parts: the driver holds one id and one count per item.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from core.errors import UserError
from pipelines.prepare.events.columns import dictionary_column, label_columns, read_part
from pipelines.prepare.executor import Executor

DAY_MS, HOUR_MS = 86_400_000, 3_600_000
GRAINS_MS = (DAY_MS, 1000)
"""Precisions of times that are detected, coarsest first; else it is a millisecond."""


@dataclass(frozen=True)
class PartStats:
    """Statistics of the behaviours of one part of the events table."""

    users: int
    """Number of users with an event, whether a behaviour or not."""
    behaviours: int
    """Number of behaviours."""
    items: pa.Array
    """(N,) distinct item ids of the behaviours."""
    counts: np.ndarray
    """(N,) number of behaviours on each item."""
    remainders: list[tuple[int, int]]
    """Smallest and largest remainder of the times modulo each of GRAINS_MS; empty
    without behaviours."""
    span: tuple[int, int] | None
    """Epoch ms of the first and the last behaviour; None without behaviours."""
    hours: dict[int, int]
    """Number of behaviours by the epoch ms of the start of their hour."""


@dataclass(frozen=True)
class EventStats:
    """Statistics of an events table for one choice of behaviours."""

    parts: list[str]
    """URIs of the parts."""
    behaviour: str | None
    """Label that makes an event a behaviour; None if every event is a behaviour."""
    is_late: bool
    """Whether the label is known later than its event, in a column `known_*`."""
    items: pa.Array
    """(N,) ids of all items with a behaviour, sorted."""
    counts: np.ndarray
    """(N,) number of behaviours on each item."""
    users: int
    """Number of users with an event, whether a behaviour or not."""
    behaviours: int
    """Number of behaviours."""
    first_ms: int
    """Smallest timestamp of a behaviour."""
    last_ms: int
    """Largest timestamp of a behaviour."""
    grain_ms: int
    """Precision of the times of behaviours: the coarsest of a day, a second and a
    millisecond such that all times differ by multiples of it."""
    hours: dict[int, int]
    """Number of behaviours by the epoch ms of the start of their hour, ascending."""


def part_stats(table: pa.Table, behaviour: str | None) -> PartStats:
    """Compute the statistics of one part of the events table.

    Args:
        table: Part as returned by `read_part`.
        behaviour: Label that makes an event a behaviour; None if every event is a
            behaviour.
    """
    users = len(dictionary_column(table, "user_id").dictionary)
    if behaviour:
        is_behaviour = pc.fill_null(table[f"label_{behaviour}"], False)
        table = table.filter(is_behaviour).combine_chunks()
    if not table.num_rows:
        no_ids = pa.array([], pa.large_string())
        return PartStats(users, 0, no_ids, np.zeros(0, np.int64), [], None, {})
    item, time = dictionary_column(table, "item_id"), table["timestamp_ms"].to_numpy()
    counts = np.bincount(item.indices.to_numpy(), minlength=len(item.dictionary))
    used = counts > 0  # a filter leaves unused values in the dictionary
    hours = pl.Series(time // HOUR_MS * HOUR_MS).value_counts(name="rows")
    remainders = [time % grain for grain in GRAINS_MS]
    return PartStats(
        users=users,
        behaviours=len(time),
        items=item.dictionary.filter(pa.array(used)).cast(pa.large_string()),
        counts=counts[used],
        remainders=[(int(values.min()), int(values.max())) for values in remainders],
        span=(int(time.min()), int(time.max())),
        hours=dict(hours.iter_rows()),
    )


def _read_part_stats(behaviour: str | None, uri: str) -> PartStats:
    columns = ["user_id", "item_id", "timestamp_ms", *label_columns(behaviour)]
    return part_stats(read_part(uri, columns), behaviour)


def event_stats(
    parts: list[str], behaviour: str | None, executor: Executor, is_late: bool = False
) -> EventStats:
    """Read all parts of the events table once and compute their statistics.

    Args:
        parts: URIs of the parts.
        behaviour: Label that makes an event a behaviour; None if every event is a
            behaviour.
        executor: Runs one task per part.
        is_late: Whether the label is known later than its event, in a column `known_*`.
    """
    collector = StatsCollector(behaviour, is_late)
    collector.read(parts, executor)
    return collector.result()


class StatsCollector:
    """Merges statistics of parts, in any order, to statistics of the events table."""

    def __init__(self, behaviour: str | None, is_late: bool) -> None:
        self.behaviour = behaviour
        self.is_late = is_late
        self.parts: list[str] = []
        self.hours: Counter[int] = Counter()
        self.times: list[int] = []
        self.remainders: list[set[int]] = [set() for _ in GRAINS_MS]
        self.users = 0
        self.items = IdCounts()

    def add(self, uri: str, stats: PartStats) -> None:
        """Add the statistics of one part."""
        self.parts.append(uri)
        self.users += stats.users
        if stats.span is None:
            return
        self.hours.update(stats.hours)
        self.times += stats.span
        self.items.add(stats.items, stats.counts)
        for total, ends in zip(self.remainders, stats.remainders, strict=True):
            total.update(ends)

    def read(self, parts: list[str], executor: Executor) -> None:
        """Read parts and add their statistics."""
        calls = [(uri,) for uri in parts]
        results = executor.map_unordered(_read_part_stats, calls, (self.behaviour,))
        for index, stats in results:
            self.add(parts[index], stats)

    def result(self) -> EventStats:
        """Return the statistics of all parts that were added."""
        if not self.times:
            raise UserError(
                f"no event has label '{self.behaviour}' set, so there are no behaviours"
            )
        items, counts = self.items.sort()
        return EventStats(
            parts=sorted(self.parts),
            behaviour=self.behaviour,
            is_late=self.is_late,
            items=items,
            counts=counts,
            users=self.users,
            behaviours=self.hours.total(),
            first_ms=min(self.times),
            last_ms=max(self.times),
            grain_ms=self._grain(),
            hours=dict(sorted(self.hours.items())),
        )

    def _grain(self) -> int:
        """Return the coarsest of GRAINS_MS for which all times have one remainder."""
        for grain, remainders in zip(GRAINS_MS, self.remainders, strict=True):
            if len(remainders) == 1:
                return grain
        return 1


class IdCounts:
    """Counts of ids, summed over many parts.

    Added ids are buffered until there are as many as distinct ids, so that each id is
    hashed a few times only, whatever the number of parts.
    """

    def __init__(self) -> None:
        self.total = pl.DataFrame(schema={"id": pl.String, "count": pl.Int64})
        self.buffer: list[pl.DataFrame] = []

    def add(self, ids: pa.Array, counts: np.ndarray | None = None) -> None:
        """Add (n,) distinct ids with their (n,) counts, by default zeros."""
        if counts is None:
            counts = np.zeros(len(ids), np.int64)
        column = pl.Series(pl.from_arrow(ids), dtype=pl.String)
        frame = pl.DataFrame({"id": column, "count": counts.astype(np.int64)})
        self.buffer.append(frame)
        if sum(map(len, self.buffer)) >= len(self.total):
            self._merge()

    def _merge(self) -> None:
        counts = pl.concat([self.total, *self.buffer])
        self.total = counts.group_by("id").agg(pl.col("count").sum())
        self.buffer = []

    def sort(self) -> tuple[pa.Array, np.ndarray]:
        """Return the (N,) distinct ids, sorted, and their (N,) counts."""
        self._merge()
        total = self.total.sort("id")
        return total["id"].to_arrow().cast(pa.large_string()), total["count"].to_numpy()
