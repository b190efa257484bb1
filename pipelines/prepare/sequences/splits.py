"""Splits of requests into training, validation and test.

Shapes: R requests, U users.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass

from core.errors import UserError
from core.options import STRICT, Fraction, Free
from core.schemas import Split
from pipelines.prepare.events.columns import bool_column, label_columns, read_part
from pipelines.prepare.events.event_stats import HOUR_MS, EventStats
from pipelines.prepare.executor import Executor
from pipelines.prepare.reading.durations import DAY_MS

SPLITS = ("train", "val", "test")

TIE_SEED = 0
"""Seed of the hash that breaks ties between equal timestamps."""


@dataclass(config=STRICT)
class SplitConfig:
    """Settings of the split of requests."""

    by: Literal["auto", "leave_last_out", "temporal"] = "auto"
    """`temporal`: two cut times for all users. `leave_last_out`: each user's last
    request is for test, the one before it for validation. Users with fewer than three
    requests have all in training; a hash breaks ties between equal timestamps. `auto`:
    `temporal` if the log has clock times, else `leave_last_out`."""
    val_fraction: Fraction = 0.1
    """Share of all behaviours, before the k-core, in the validation window of a
    temporal split."""
    test_fraction: Fraction = 0.1
    """Share of all behaviours, before the k-core, in the test window of a temporal
    split."""
    val_start: Free = None
    """Start of the validation window, as ISO 8601 (UTC) or epoch ms; replaces the
    fractions, together with `test_start`."""
    test_start: Free = None
    """Start of the test window."""
    val_days: PositiveFloat | None = None
    """Days of the validation window; replaces the fractions, together with `test_days`.
    The cuts move with the end of the log."""
    test_days: PositiveFloat | None = None
    """Days of the test window, which ends with the last behaviour."""

    def __post_init__(self) -> None:
        for val, test in (("val_start", "test_start"), ("val_days", "test_days")):
            if (getattr(self, val) is None) != (getattr(self, test) is None):
                raise ValueError(f"split has one of {val} and {test}, it needs both")
            if getattr(self, val) is not None and self.by == "leave_last_out":
                raise ValueError(
                    f"split.{val} splits by time, but split.by is {self.by}"
                )
        if self.val_start is not None and self.val_days is not None:
            raise ValueError("split has both val_start and val_days")
        if self.val_start is not None:
            self.val_start = epoch_ms(self.val_start, "split.val_start")
            self.test_start = epoch_ms(self.test_start, "split.test_start")
            if self.val_start >= self.test_start:
                raise ValueError("split.val_start is not before split.test_start")
        if self.val_fraction + self.test_fraction >= 1:
            raise ValueError(
                f"split.val_fraction is {self.val_fraction:g} and split.test_fraction "
                f"{self.test_fraction:g}, which leaves nothing for training"
            )

    def settings(self) -> dict[str, Any]:
        """Return the settings that are set, as plain values."""
        return {
            name: value for name, value in asdict(self).items() if value is not None
        }

    def resolve(self, has_clock_times: bool) -> str:
        """Return `by` for a log with or without clock times."""
        if self.by == "temporal" and not has_clock_times:
            raise UserError(
                f"split.by is {self.by}, but the log has no clock times, only an "
                f"order of events within each user"
            )
        if self.by == "auto":
            return "temporal" if has_clock_times else "leave_last_out"
        return self.by


def epoch_ms(moment: Any, name: str) -> int:
    """Parse a time as epoch ms.

    Args:
        moment: Epoch ms, or ISO 8601, which is in UTC unless it has an offset.
        name: Name of the setting, for the error message.

    Raises:
        ValueError: If the time has another format.
    """
    text = str(moment)
    if text.isdecimal():
        return int(text)
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"{name} is '{moment}'; give a moment such as 2022-05-07 or epoch ms"
        ) from None
    if not parsed.tzinfo:
        parsed = parsed.replace(tzinfo=UTC)
    return round(parsed.timestamp() * 1000)


# Cut times of a temporal split.


def cut_times(stats: EventStats, config: SplitConfig, executor: Executor) -> Split:
    """Compute the windows of a temporal split.

    Args:
        stats: Statistics of all events.
        config: Settings of the split.
        executor: Runs a pass over the events, for a split by fractions.

    Returns:
        The split, with the first timestamps of the windows.
    """
    if config.val_start is not None or config.val_days is not None:
        val_start, test_start = _configured_starts(stats, config)
        if not stats.first_ms < val_start < test_start <= stats.last_ms:
            raise UserError(
                f"the cuts at {val_start} and {test_start} ms leave a split without "
                f"events: the log runs from {stats.first_ms} to {stats.last_ms} ms"
            )
    else:
        before_val = 1 - config.val_fraction - config.test_fraction
        before_test = 1 - config.test_fraction
        ranks = [
            min(int(stats.behaviours * share), stats.behaviours - 1)
            for share in (before_val, before_test)
        ]
        val_start, test_start = nth_times(stats, ranks, executor)
        if not stats.first_ms < val_start < test_start:
            raise UserError(
                f"a temporal split by fractions is not possible: training would end at "
                f"{val_start} and validation at {test_start} ms, but the log begins at "
                f"{stats.first_ms} ms"
            )
    return Split("temporal", val_start, test_start)


def _configured_starts(stats: EventStats, config: SplitConfig) -> list[int]:
    """Return the starts of the validation and test window that the settings give."""
    if config.val_days is None or config.test_days is None:
        return [config.val_start, config.test_start]
    test_start = stats.last_ms + 1 - round(config.test_days * DAY_MS)
    return [test_start - round(config.val_days * DAY_MS), test_start]


def nth_times(stats: EventStats, ranks: list[int], executor: Executor) -> list[int]:
    """Return the timestamps of behaviours by their rank in the order of time.

    The statistics contain the number of behaviours per hour, so one pass over the
    events is enough: it reads the hours with these ranks.

    Args:
        stats: Statistics of all events.
        ranks: Ranks of the behaviours, from 0.
        executor: Runs the pass.
    """
    hours = list(stats.hours)
    counts = np.array([*stats.hours.values()])
    end_ranks = np.cumsum(counts)
    hour_index = np.searchsorted(end_ranks, ranks, side="right")  # (ranks,)
    shared = (stats.behaviour, [hours[index] for index in hour_index])
    calls = [(uri,) for uri in stats.parts]
    parts = [part for _, part in executor.map_unordered(_times_in_hours, calls, shared)]
    result = []
    for index, (rank, hour) in enumerate(zip(ranks, hour_index, strict=True)):
        times = np.concatenate([part[index][0] for part in parts])
        num_behaviours = np.concatenate([part[index][1] for part in parts])
        order = np.argsort(times, kind="stable")
        rank_in_hour = rank - (end_ranks[hour] - counts[hour])
        end_ranks_in_hour = np.cumsum(num_behaviours[order])
        position = np.searchsorted(end_ranks_in_hour, rank_in_hour, side="right")
        result.append(int(times[order][position]))
    return result


def _times_in_hours(
    behaviour: str | None, hours: list[int], uri: str
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Count the behaviours of a part at each time within some hours."""
    table = read_part(uri, ["timestamp_ms", *label_columns(behaviour)], ())
    time = table["timestamp_ms"].to_numpy()
    if behaviour:
        time = time[bool_column(table, f"label_{behaviour}")]
    return [
        np.unique(time[(time >= hour) & (time < hour + HOUR_MS)], return_counts=True)
        for hour in hours
    ]


# The split of each request.


def assign_splits(
    split: Split,
    time: np.ndarray,
    user_start: np.ndarray,
    ids: tuple[pa.Array, pa.Array] | None = None,
) -> np.ndarray:
    """Return the index (R,) int8 into SPLITS of every request.

    Args:
        split: The split.
        time: Times (R,) in ms, or ordinals, ascending within a user.
        user_start: Index (U,) of each user's first request; unused by a temporal
            split.
        ids: User ids (R,) and item ids (R,) of the requests. Leave-last-out breaks ties
            between equal timestamps by a hash of the ids; without ids, requests keep
            the order of the array.
    """
    if split.by == "temporal":
        starts = np.array([split.val_start_ms, split.test_start_ms])
        return np.digitize(time, starts).astype(np.int8)
    user_end = np.append(user_start[1:], len(time))
    is_long = user_end - user_start >= 3
    begin, end = user_start[is_long], user_end[is_long]
    test, val = end - 1, end - 2
    if ids is not None:
        is_tied = (time[test] == time[val]) | (time[val] == time[val - 1])
        last, second_last = _draw_last_two(time, begin[is_tied], end[is_tied], ids)
        test[is_tied] = last
        val[is_tied] = second_last
    code = np.zeros(len(time), dtype=np.int8)
    code[test] = SPLITS.index("test")
    code[val] = SPLITS.index("val")
    return code


def format_moment(time_ms: int) -> str:
    """Format a time in ms like `2024-05-07 13:00:00`, in UTC."""
    moment = datetime.fromtimestamp(time_ms / 1000, UTC)
    return moment.strftime("%Y-%m-%d %H:%M:%S")


def _draw_last_two(
    time: np.ndarray, begin: np.ndarray, end: np.ndarray, ids: tuple[pa.Array, pa.Array]
) -> tuple[np.ndarray, np.ndarray]:
    """Find the last two requests of users, with a hash as the tie-breaker."""
    # the requests of each user that may be among the last two
    tails = []
    for first, stop in zip(begin, end, strict=True):
        tail_start = first + np.searchsorted(time[first:stop], time[stop - 2])
        tails.append(np.arange(tail_start, stop))
    rows = np.concatenate([np.zeros(0, np.int64), *tails])
    users, items = (column.take(pa.array(rows)).to_pylist() for column in ids)
    times = time[rows].tolist()
    hashes = [tie_hash(*key) for key in zip(users, times, items, strict=True)]
    lengths = np.array([len(tail) for tail in tails], dtype=np.int64)
    user = np.repeat(np.arange(len(tails)), lengths)
    order = rows[np.lexsort((np.array(hashes, np.uint64), times, user))]
    tail_ends = np.cumsum(lengths)
    return order[tail_ends - 1], order[tail_ends - 2]


def tie_hash(user: str, time: int, item: str) -> int:
    """Return a 64-bit hash that breaks ties between requests with equal timestamps.

    It depends on the arguments and TIE_SEED alone, so every machine gets the same
    order.
    """
    text = json.dumps([TIE_SEED, user, time, item])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def count_tied(
    code: np.ndarray, time: np.ndarray, user_start: np.ndarray
) -> dict[str, int]:
    """Count requests at the same time as another request of their user.

    Args:
        code: Index (R,) into SPLITS.
        time: Times (R,), ascending within a user.
        user_start: Index (U,) of each user's first request.

    Returns:
        The counts of validation and of test.
    """
    # whether a request has the time of the user's previous request; the last is False
    ties_previous = np.zeros(len(time) + 1, dtype=bool)
    ties_previous[1:-1] = time[1:] == time[:-1]
    ties_previous[user_start] = False
    is_tied = ties_previous[1:] | ties_previous[:-1]
    return {
        name: int((is_tied & (code == SPLITS.index(name))).sum()) for name in SPLITS[1:]
    }


def tied_targets(count: Mapping[str, int]) -> dict[str, int]:
    """Return the sums of `count_tied` over all parts."""
    return {name: count.get(f"tied_targets_{name}", 0) for name in SPLITS[1:]}


def require_training(num_requests: dict[str, int], noun: str) -> None:
    """Raise UserError if there is no request to train on.

    Args:
        num_requests: Number of usable requests per split.
        noun: Name of a request in the message.
    """
    if num_requests["train"]:
        return
    others = ", ".join(f"{num_requests[name]:,} {name}" for name in SPLITS[1:])
    raise UserError(f"there is no training {noun} ({others})")
