"""Statistics of events parts that later steps need: items with counts, hours, first and last time.

    stats = event_stats(parts, "click", engine)

A user is in one part only, so counts per user are local to a part. Counts per item
are added up across parts: the driver holds one id and one count per item.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from models.storage.tables import UserError
from pipelines.data.engine import Engine
from pipelines.data.events.columns import dictionary_column, label_columns, read_part

DAY_MS, HOUR_MS = 86_400_000, 3_600_000
GRAINS_MS = (DAY_MS, 1000)
"""Possible precisions of a log's times, coarsest first."""


@dataclass(frozen=True)
class PartStats:
    """Statistics of the behaviours of one events part."""

    users: int
    """Users with an event of any kind."""
    behaviours: int
    """Rows that count as behaviours."""
    items: pa.Array
    """(N,) ids of the items of behaviours."""
    counts: np.ndarray
    """(N,) behaviours on each item."""
    remainders: list[tuple[int, int]]
    """Least and largest remainder of the times by each of GRAINS_MS; empty without
    behaviours."""
    span: tuple[int, int] | None
    """First and last time of a behaviour; None without behaviours."""
    hours: dict[int, int]
    """Behaviours by the first ms of their hour."""


@dataclass(frozen=True)
class EventStats:
    """Statistics of an events table for one choice of behaviours."""

    parts: list[str]
    """URIs of the parts."""
    behaviour: str | None
    """Label that makes an event a behaviour; None where every event is one."""
    late: bool
    """Whether events have a `known_*` column of that label."""
    items: pa.Array
    """(N,) ids of all items with a behaviour, sorted."""
    counts: np.ndarray
    """(N,) behaviours on each item."""
    users: int
    """Users with an event of any kind."""
    behaviours: int
    """Rows that count as behaviours."""
    first_ms: int
    """Smallest timestamp of a behaviour."""
    last_ms: int
    """Largest timestamp of a behaviour."""
    grain_ms: int
    """Coarsest of a day, a second and a millisecond by whose multiples all times of
    behaviours differ."""
    hours: dict[int, int]
    """Behaviours by the first ms of their hour, ascending."""


def part_stats(table: pa.Table, behaviour: str | None) -> PartStats:
    """Return the statistics of one events part of `read_part`."""
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
        remainders=[(int(rest.min()), int(rest.max())) for rest in remainders],
        span=(int(time.min()), int(time.max())),
        hours=dict(hours.iter_rows()),
    )


def _read_part_stats(behaviour: str | None, uri: str) -> PartStats:
    columns = ["user_id", "item_id", "timestamp_ms", *label_columns(behaviour)]
    return part_stats(read_part(uri, columns), behaviour)


def event_stats(
    parts: list[str], behaviour: str | None, engine: Engine, late: bool = False
) -> EventStats:
    """Read events parts once and return their statistics.

    Args:
        parts: URIs of the parts.
        behaviour: Label that makes an event a behaviour; None where every event is one.
        engine: Runs one task per part.
        late: Whether events have a `known_*` column of that label.

    Raises:
        UserError: if there is no behaviour at all.
    """
    collector = StatsCollector(behaviour, late)
    collector.read(parts, engine)
    return collector.result()


class StatsCollector:
    """Adds up the statistics of parts in any order. Holds one id and one count per item."""

    def __init__(self, behaviour: str | None, late: bool) -> None:
        self.behaviour = behaviour
        self.late = late
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

    def read(self, parts: list[str], engine: Engine) -> None:
        """Read parts and add their statistics."""
        calls = [(uri,) for uri in parts]
        results = engine.map_unordered(_read_part_stats, calls, (self.behaviour,))
        for number, stats in results:
            self.add(parts[number], stats)

    def result(self) -> EventStats:
        """Return the statistics of all parts that were added.

        Raises:
            UserError: if there is no behaviour at all.
        """
        if not self.times:
            raise UserError(
                f"no event has label '{self.behaviour}' set, so there are no behaviours; choose another 'behaviour' "
                f"or leave it out to take every event"
            )
        items, counts = self.items.sort()
        return EventStats(
            parts=sorted(self.parts),
            behaviour=self.behaviour,
            late=self.late,
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
        """Return the coarsest of GRAINS_MS by which all times have the same remainder."""
        for grain, remainders in zip(GRAINS_MS, self.remainders, strict=True):
            if len(remainders) == 1:
                return grain
        return 1


class IdCounts:
    """Counts of ids, added up over many parts.

    New ids wait until there are as many as distinct ids, so that each id is hashed
    a few times, whatever the number of parts.
    """

    def __init__(self) -> None:
        self.total = pl.DataFrame(schema={"id": pl.String, "count": pl.Int64})
        self.waiting: list[pl.DataFrame] = []

    def add(self, ids: pa.Array, counts: np.ndarray | None = None) -> None:
        """Add distinct ids with a count each, 0 without `counts`."""
        if counts is None:
            counts = np.zeros(len(ids), np.int64)
        column = pl.Series(pl.from_arrow(ids), dtype=pl.String)
        self.waiting.append(
            pl.DataFrame({"id": column, "count": counts.astype(np.int64)})
        )
        if sum(map(len, self.waiting)) >= len(self.total):
            self._merge()

    def _merge(self) -> None:
        every = pl.concat([self.total, *self.waiting])
        self.total = every.group_by("id").agg(pl.col("count").sum())
        self.waiting = []

    def sort(self) -> tuple[pa.Array, np.ndarray]:
        """Return all ids, sorted, and their counts."""
        self._merge()
        total = self.total.sort("id")
        return total["id"].to_arrow().cast(pa.large_string()), total["count"].to_numpy()
