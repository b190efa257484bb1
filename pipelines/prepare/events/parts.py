"""Order the events of a part, and compute statistics for the catalogue and the split.

    events, duplicates = order_events(rows, schema)
    stats = merge_stats(parts, "click", False, map(part_stats, frames))

A user is in one part only, so counts per user are local to a part. Counts per item
are summed over the parts: the driver holds one id and one count per item.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from core.splits import DAY_MS, HOUR_MS
from core.tables import read_parquet
from pipelines.prepare.executor import Executor

MISSING_VALUES = {"request_id": "", "position": 0}
"""Values of columns that a log does not have. Other missing columns are null."""

GRAINS_MS = (DAY_MS, 1000, 1)
"""Precisions of times that are detected, coarsest first."""

LOG_PLACE = "log_place"
"""Column with the row number of an event in the log; only with `ties: log_order`."""


def read_events(uri: str, columns: list[str]) -> pl.DataFrame:
    """Read columns of a part of the events table."""
    return pl.DataFrame(read_parquet(uri, columns))


def is_behaviour(behaviour: str | None) -> pl.Expr:
    """Return whether an event has the label that makes it a behaviour."""
    return pl.col(f"label_{behaviour}").fill_null(False) if behaviour else pl.lit(True)


def label_columns(behaviour: str | None, is_late: bool = False) -> list[str]:
    """Return the columns of a label: its value, and the time at which it is known.

    The list is empty without a label. Only a label that is known later than its event
    has a time.
    """
    names = [f"label_{behaviour}", f"known_{behaviour}"]
    return names[: 1 + is_late] if behaviour else []


def order_events(
    events: pl.DataFrame, schema: pa.Schema, keep_duplicates: bool = False
) -> tuple[pl.DataFrame, int]:
    """Sort the events of one partition and drop exact duplicates.

    Events are sorted by (user_id, timestamp_ms, request_id, position, item_id) and then
    by every other column, so the result does not depend on the order of the input. With
    a column `log_place` (`ties: log_order`), events of one user and time are sorted by
    (log_place, position) instead, and `position` becomes their rank in this order.

    Rows are sorted by one integer of user and time. Only ties, which are rare in most
    logs, are sorted by other columns.

    Args:
        events: Events in any order; columns that the log does not have may be missing.
        schema: Schema of the result.
        keep_duplicates: Keep events that repeat another event in every column.

    Returns:
        The events, whose ids are enums in the order of their text, and the number of
        duplicates, whether dropped or kept.
    """
    types = pl.Schema(schema)
    missing = {
        name: pl.lit(MISSING_VALUES.get(name), types[name])
        for name in schema.names
        if name not in events.columns
    }
    ids = [_to_enum(events[name]) for name in ("user_id", "item_id")]
    events = events.with_columns(*ids, **missing)
    time = events["timestamp_ms"]
    [key] = user_time_keys([(events["user_id"].to_physical(), time)])
    events = events.with_columns(key=key).sort("key")
    is_first = (events["key"].diff() != 0).fill_null(True)
    is_tied = ~(is_first & is_first.shift(-1, fill_value=True))
    duplicates = 0
    if is_tied.any():
        order = ["request_id", "position", "item_id", *schema.names]
        if LOG_PLACE in events.columns:
            order = [LOG_PLACE, "position"]
        ties = events.filter(is_tied).sort("key", *dict.fromkeys(order))
        distinct = ties.unique(schema.names, keep="first", maintain_order=True)
        duplicates = ties.height - distinct.height
        ties = ties if keep_duplicates else distinct
        events = pl.concat([events.filter(~is_tied), ties])
        events = events.sort("key", maintain_order=True)
    if LOG_PLACE in events.columns:
        rank = pl.int_range(pl.len(), dtype=pl.Int32).over("key")
        events = events.with_columns(position=rank)
    return events.select(schema.names), duplicates


def user_time_keys(columns: list[tuple[pl.Series, pl.Series]]) -> list[pl.Series]:
    """Return integers that sort like pairs of a user and a time, in all columns."""
    lows: list[Any] = [time.min() for _, time in columns if len(time)]
    highs: list[Any] = [time.max() for _, time in columns if len(time)]
    users: list[Any] = [user.max() for user, _ in columns if len(user)]
    first = min(lows, default=0)
    span = max(highs, default=0) - first + 1
    kind = pl.Int64 if (max(users, default=0) + 1) * span < 2**63 else pl.Int128
    return [
        user.cast(kind) * span + (time.cast(kind) - first) for user, time in columns
    ]


def _to_enum(strings: pl.Series) -> pl.Series:
    """Return strings as an enum of their sorted values."""
    # Arrow encodes in one pass, which takes polars a pass for the values and another
    encoded = strings.to_arrow().dictionary_encode()
    values = pl.Series(encoded.dictionary)
    order = values.arg_sort()
    rank = pl.Series(order.arg_sort(), dtype=pl.UInt32)
    codes = rank.gather(pl.Series(encoded.indices).cast(pl.UInt32))
    return codes.cat.to(pl.Enum(values.gather(order))).alias(strings.name)


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


def part_stats(events: pl.DataFrame, behaviour: str | None) -> PartStats:
    """Compute the statistics of one part of the events table.

    Args:
        events: Events of the part, sorted by user.
        behaviour: Label that makes an event a behaviour; None if every event is a
            behaviour.
    """
    users = events["user_id"].n_unique()
    events = events.filter(is_behaviour(behaviour))
    items = events.group_by(pl.col("item_id").alias("id")).len("count")
    items = items.cast({"id": pl.String, "count": pl.Int64})
    time = events["timestamp_ms"]
    if not len(time):
        return PartStats(users, items, {})
    hours = (time // HOUR_MS * HOUR_MS).value_counts(name="rows")
    times = time.to_numpy()
    first, last = int(times.min()), int(times.max())
    step = int(np.gcd.reduce(times - first))
    return PartStats(users, items, dict(hours.iter_rows()), first, last, step)


def read_stats(
    parts: list[str], behaviour: str | None, executor: Executor
) -> Iterable[PartStats]:
    """Read parts of the events table, and yield their statistics in any order."""
    calls = [(uri,) for uri in parts]
    results = executor.map_unordered(_read_part_stats, calls, (behaviour,))
    return (stats for _, stats in results)


def _read_part_stats(behaviour: str | None, uri: str) -> PartStats:
    columns = ["user_id", "item_id", "timestamp_ms", *label_columns(behaviour)]
    return part_stats(read_events(uri, columns), behaviour)


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
