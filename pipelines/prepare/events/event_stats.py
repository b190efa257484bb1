"""Statistics of the events table for the catalogue and the split.

    stats = merge_stats(parts, "click", False, map(part_stats, tables))

A user is in one part only, so counts per user are local to a part. Counts per item
are summed over the parts: the driver holds one id and one count per item.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.prepare.events.columns import dictionary_column, label_columns, read_part
from pipelines.prepare.executor import Executor

DAY_MS, HOUR_MS = 86_400_000, 3_600_000
GRAINS_MS = (DAY_MS, 1000, 1)
"""Precisions of times that are detected, coarsest first."""


@dataclass(frozen=True)
class PartStats:
    """Statistics of the behaviours of one part of the events table."""

    users: int
    """Number of users with an event, whether a behaviour or not."""
    items: pl.DataFrame
    """`id` and `count`, the number of behaviours, of each item."""
    hours: dict[int, int]
    """Number of behaviours by the epoch ms of the start of their hour."""
    first_ms: int = 0
    """Smallest timestamp of a behaviour; 0 without behaviours."""
    last_ms: int = 0
    """Largest timestamp of a behaviour; 0 without behaviours."""
    step_ms: int = 0
    """Greatest common divisor of the distances between timestamps."""


@dataclass(frozen=True)
class EventStats:
    """Statistics of an events table for one choice of behaviours."""

    parts: list[str]
    """URIs of the parts."""
    behaviour: str | None
    """Label that makes an event a behaviour; None if every event is a behaviour."""
    is_late: bool
    """Whether the label is known later than its event, in a column `known_*`."""
    items: pl.DataFrame
    """`id` and `count`, the number of behaviours, of all items with a behaviour,
    sorted."""
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
    item, time = dictionary_column(table, "item_id"), table["timestamp_ms"].to_numpy()
    counts = np.bincount(item.indices.to_numpy(), minlength=len(item.dictionary))
    items = pl.DataFrame(
        {"id": pl.Series(item.dictionary, dtype=pl.String), "count": counts}
    )
    # a filter leaves unused values in the dictionary
    items = items.filter(pl.col("count") > 0)
    if not len(time):
        return PartStats(users, items, {})
    hours = pl.Series(time // HOUR_MS * HOUR_MS).value_counts(name="rows")
    return PartStats(
        users,
        items,
        dict(hours.iter_rows()),
        int(time.min()),
        int(time.max()),
        int(np.gcd.reduce(time - time[0])),
    )


def read_stats(
    parts: list[str], behaviour: str | None, executor: Executor
) -> Iterable[PartStats]:
    """Read parts of the events table, and yield their statistics in any order."""
    calls = [(uri,) for uri in parts]
    results = executor.map_unordered(_read_part_stats, calls, (behaviour,))
    return (stats for _, stats in results)


def _read_part_stats(behaviour: str | None, uri: str) -> PartStats:
    columns = ["user_id", "item_id", "timestamp_ms", *label_columns(behaviour)]
    return part_stats(read_part(uri, columns), behaviour)


def merge_stats(
    uris: list[str],
    behaviour: str | None,
    is_late: bool,
    stats_of_parts: Iterable[PartStats],
) -> EventStats:
    """Merge the statistics of all parts, in any order.

    Args:
        uris: URIs of the parts.
        behaviour: Label that makes an event a behaviour; None if every event is a
            behaviour.
        is_late: Whether the label is known later than its event, in a column `known_*`.
        stats_of_parts: Statistics of each part.
    """
    users, step_ms = 0, 0
    hours: Counter[int] = Counter()
    times: list[int] = []
    items = IdCounts()
    for stats in stats_of_parts:
        users += stats.users
        if not stats.hours:
            continue
        hours.update(stats.hours)
        times += [stats.first_ms, stats.last_ms]
        step_ms = math.gcd(step_ms, stats.step_ms, stats.first_ms - times[0])
        items.add(stats.items)
    return EventStats(
        parts=sorted(uris),
        behaviour=behaviour,
        is_late=is_late,
        items=items.sort(),
        users=users,
        behaviours=hours.total(),
        first_ms=min(times, default=0),
        last_ms=max(times, default=0),
        grain_ms=next(grain for grain in GRAINS_MS if step_ms % grain == 0),
        hours=dict(sorted(hours.items())),
    )


class IdCounts:
    """Counts of ids (`id`, `count`), summed over many parts.

    Added ids are buffered until there are as many as distinct ids, so that each id is
    hashed a few times only, whatever the number of parts.
    """

    def __init__(self) -> None:
        self.total = pl.DataFrame(schema={"id": pl.String, "count": pl.Int64})
        self.buffer: list[pl.DataFrame] = []

    def add(self, counts: pl.DataFrame) -> None:
        """Add the counts of distinct ids."""
        self.buffer.append(counts)
        if sum(map(len, self.buffer)) >= len(self.total):
            self._merge()

    def _merge(self) -> None:
        counts = pl.concat([self.total, *self.buffer])
        self.total = counts.group_by("id").agg(pl.col("count").sum())
        self.buffer = []

    def sort(self) -> pl.DataFrame:
        """Return the distinct ids, sorted, and their counts."""
        self._merge()
        return self.total.sort("id")
