"""Splits: which of a user's requests are for training, validation and test.

Shapes: R requests, U users.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from models.config import check_choices, check_least
from models.storage.tables import UserError
from pipelines.data.engine import Engine
from pipelines.data.events.columns import bool_column, label_columns, read_part
from pipelines.data.events.event_stats import HOUR_MS, EventStats
from pipelines.data.reading.durations import DAY_MS

SPLITS = ("train", "val", "test")

TIE_SEED = 0
"""Seed of the hash that orders requests of one time."""


@dataclass
class SplitConfig:
    """Settings of the split of requests."""

    kind: Literal["auto", "leave_last_out", "temporal"] = "auto"
    """`temporal`: two cut times for all users. `leave_last_out`: each user's last
    request is for test, the one before it for validation; users with fewer than three
    have all in training, and among requests of one time a hash decides. `auto`:
    `temporal` if the log has clock times, else `leave_last_out`."""
    val_fraction: float = 0.1
    """Share of all behaviours, before the k-core, in the validation window of a
    temporal split."""
    test_fraction: float = 0.1
    """Share of all behaviours, before the k-core, in the test window of a temporal
    split."""
    val_start: Any = None
    """Start of the validation window, as ISO 8601 (UTC) or epoch ms; with `test_start`,
    it replaces the fractions."""
    test_start: Any = None
    """Start of the test window."""
    val_days: float | None = None
    """Days of the validation window; with `test_days` it replaces the fractions, and
    the cuts move with the log."""
    test_days: float | None = None
    """Days of the test window, which ends with the last behaviour."""
    folds: int = 1
    """Evaluations of a temporal split, of kind `retrieval`: test windows of equal
    length that follow each other and end with the test window, each after a validation
    window of its own. `fit.fold` of a training chooses one."""

    def __post_init__(self) -> None:
        check_choices(self, "split.")
        for name in ("val_fraction", "test_fraction"):
            value = getattr(self, name)
            if not 0 < value < 1:
                raise ValueError(
                    f"split.{name} is {value}; it must lie between 0 and 1, such as 0.1"
                )
        if self.val_fraction + self.test_fraction >= 1:
            total = self.val_fraction + self.test_fraction
            raise ValueError(
                f"split.val_fraction + split.test_fraction is {total}, which leaves nothing to train on"
            )
        for val, test in (("val_start", "test_start"), ("val_days", "test_days")):
            if (getattr(self, val) is None) != (getattr(self, test) is None):
                raise ValueError(
                    f"split has one of {val} and {test}; give both, or neither to cut by fractions"
                )
            if getattr(self, val) is not None and self.kind not in ("auto", "temporal"):
                raise ValueError(
                    f"split.{val} cuts in time, but split.kind is {self.kind}; use temporal"
                )
        check_least(self, ["val_days", "test_days"], 0, "split.")
        check_least(self, ["folds"], 1, "split.")
        if self.folds > 1 and self.kind == "leave_last_out":
            raise ValueError(
                f"split.folds is {self.folds}, but split.kind is leave_last_out; folds are windows of time: use temporal"
            )
        if self.val_start is not None and self.val_days is not None:
            raise ValueError(
                "split has both val_start and val_days; give the one that says where to cut"
            )
        if self.val_start is not None:
            starts = (
                epoch_ms(self.val_start, "split.val_start"),
                epoch_ms(self.test_start, "split.test_start"),
            )
            if not starts[0] < starts[1]:
                raise ValueError(
                    f"split.val_start {self.val_start} is not before split.test_start {self.test_start}; swap them"
                )
            self.val_start, self.test_start = starts

    def settings(self) -> dict[str, Any]:
        """Return the settings as plain values, without cut times and folds that are not set."""
        values = {
            name: value for name, value in asdict(self).items() if value is not None
        }
        if self.folds == 1:
            del values["folds"]
        return values

    def resolve(self, clock: bool) -> str:
        """Return the kind of split for a log with or without clock times.

        Raises:
            UserError: for a temporal split without clock times.
        """
        if self.kind == "temporal" and not clock:
            raise UserError(
                f"split.kind is {self.kind}, but the log has no clock times (only an order within each user), so there "
                f"is no cut time; use --split.kind leave_last_out"
            )
        if self.folds > 1 and not clock:
            raise UserError(
                f"split.folds is {self.folds}, but the log has no clock times (only an order within each user), so there "
                f"are no windows of time; leave it out"
            )
        if self.kind == "auto":
            return "temporal" if clock else "leave_last_out"
        return self.kind


def epoch_ms(moment: Any, name: str) -> int:
    """Return a moment in epoch ms, from epoch ms or ISO 8601 (UTC if it names no offset).

    Raises:
        ValueError: for anything else; `name` is the setting that the message names.
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


def cut_times(stats: EventStats, config: SplitConfig, engine: Engine) -> dict[str, Any]:
    """Return the temporal split as manifests record it: `val_start_ms` and `test_start_ms`.

    Each is the first timestamp of its window. With several folds, `folds` has both of
    each fold and `test_end_ms`, the first timestamp after its test window.

    Raises:
        UserError: if a window would be empty, the folds are longer than the log, or
            timestamps are too coarse to place the boundaries.
    """
    if config.val_start is not None or config.val_days is not None:
        starts = _configured_starts(stats, config)
        if not stats.first_ms < starts[0] < starts[1] <= stats.last_ms:
            raise UserError(
                f"the cuts at {starts[0]} and {starts[1]} ms leave a side without events: the log runs from "
                f"{stats.first_ms} to {stats.last_ms} ms; choose split.val_start and split.test_start "
                f"within it, or fewer days"
            )
    else:
        before_val = 1 - config.val_fraction - config.test_fraction
        before_test = 1 - config.test_fraction
        last = stats.behaviours - 1
        ranks = [
            min(int(stats.behaviours * share), last)
            for share in (before_val, before_test)
        ]
        starts = nth_times(stats, ranks, engine)
        if not stats.first_ms < starts[0] < starts[1]:
            raise UserError(
                f"a temporal split finds no two cut times: training would end at {starts[0]} and validation at "
                f"{starts[1]} ms, the log begins at {stats.first_ms}; use larger fractions or --split.kind "
                f"leave_last_out"
            )
    split = {"kind": "temporal", "val_start_ms": starts[0], "test_start_ms": starts[1]}
    if config.folds > 1:
        split["folds"] = _cut_folds(stats, starts, config.folds)
    return split


def _cut_folds(
    stats: EventStats, starts: list[int], folds: int
) -> list[dict[str, int]]:
    """Return the windows of each fold, oldest first.

    The last fold has the windows that begin at `starts` (validation, test). Each fold
    before it has the same windows, earlier by the length of the test window.

    Raises:
        UserError: if the first fold has nothing to train on.
    """
    val_start, test_start = starts
    test_end = stats.last_ms + 1
    length = test_end - test_start
    first_val_start = val_start - (folds - 1) * length
    if first_val_start <= stats.first_ms:
        possible = 1 + (val_start - stats.first_ms - 1) // length
        raise UserError(
            f"split.folds is {folds}, but fold 1 would have nothing to train on: its validation would begin at "
            f"{first_val_start} ms, the log begins at {stats.first_ms}; use at most {possible}, or a smaller "
            f"split.test_fraction or split.test_days"
        )
    shifts = [length * number for number in reversed(range(folds))]
    return [
        {
            "val_start_ms": val_start - shift,
            "test_start_ms": test_start - shift,
            "test_end_ms": test_end - shift,
        }
        for shift in shifts
    ]


def train_end_ms(split: dict[str, Any]) -> int:
    """Return the end of the training window that all folds of a temporal split share, in ms."""
    folds = split.get("folds") or [split]
    return int(folds[0]["val_start_ms"])


def _configured_starts(stats: EventStats, config: SplitConfig) -> list[int]:
    """Return the starts of both windows from times or days of the configuration."""
    if config.val_days is None or config.test_days is None:
        return [config.val_start, config.test_start]
    test_start = stats.last_ms + 1 - round(config.test_days * DAY_MS)
    return [test_start - round(config.val_days * DAY_MS), test_start]


def nth_times(stats: EventStats, ranks: list[int], engine: Engine) -> list[int]:
    """Return the timestamps of the behaviours at `ranks` (from 0) in the order of time.

    The statistics tell the hour of each; one pass over the parts tells the time within
    these hours.
    """
    hours, counts = list(stats.hours), np.array([*stats.hours.values()])
    end_ranks = np.cumsum(counts)
    hour_numbers = np.searchsorted(end_ranks, ranks, side="right")
    shared = (stats.behaviour, [hours[number] for number in hour_numbers])
    calls = [(uri,) for uri in stats.parts]
    parts = [part for _, part in engine.map_unordered(_times_in_hours, calls, shared)]
    chosen = []
    for index, number in enumerate(hour_numbers):
        times = np.concatenate([part[index][0] for part in parts])
        rows = np.concatenate([part[index][1] for part in parts])
        order = np.argsort(times, kind="stable")
        rank_in_hour = ranks[index] - (end_ranks[number] - counts[number])
        position = np.searchsorted(np.cumsum(rows[order]), rank_in_hour, side="right")
        chosen.append(int(times[order][position]))
    return chosen


def _times_in_hours(
    behaviour: str | None, hours: list[int], uri: str
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return for each hour the distinct times of a part's behaviours within it, and how many behaviours each has."""
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
    split: dict[str, Any],
    time: np.ndarray,
    user_start: np.ndarray,
    ids: tuple[pa.Array, pa.Array] | None = None,
) -> np.ndarray:
    """Return the (R,) int8 index into SPLITS of every request.

    Args:
        split: The split as manifests record it.
        time: (R,) ms or ordinals, ascending within a user.
        user_start: (U,) first request of each user.
        ids: (R,) user id and (R,) item id of the requests, by whose hash leave-last-out
            orders requests of one time. Without them the later one in the array is
            later.
    """
    if split["kind"] == "temporal":
        starts = [split["val_start_ms"], split["test_start_ms"]]
        return np.digitize(time, starts).astype(np.int8)
    user_end = np.append(user_start[1:], len(time))
    is_long = user_end - user_start >= 3
    begin, end = user_start[is_long], user_end[is_long]
    test, val = end - 1, end - 2
    if ids is not None:
        tied = (time[test] == time[val]) | (time[val] == time[val - 1])
        test[tied], val[tied] = _draw_last_two(time, begin[tied], end[tied], ids)
    code = np.zeros(len(time), dtype=np.int8)
    code[test] = SPLITS.index("test")
    code[val] = SPLITS.index("val")
    return code


def count_by_fold(split: Mapping[str, Any], time: np.ndarray) -> dict[str, int]:
    """Return the number of requests in each window of each fold, by `fold_NUMBER_SPLIT`.

    A request after the test window of its fold is in no split. time (R,) ms.
    """
    count = {}
    for number, fold in enumerate(split.get("folds", ()), 1):
        ends = [fold["val_start_ms"], fold["test_start_ms"], fold["test_end_ms"]]
        if number == len(split["folds"]):
            ends.pop()
        code = np.digitize(time, ends)
        for index, name in enumerate(SPLITS):
            count[f"fold_{number}_{name}"] = int((code == index).sum())
    return count


def folds_info(
    split: Mapping[str, Any], count: Mapping[str, int]
) -> dict[str, list[dict[str, int]]]:
    """Return the manifest's entry on the requests of each fold; no entry without folds.

    `count` holds the sums of `count_by_fold`.
    """
    numbers = range(1, 1 + len(split.get("folds", ())))
    requests = [
        {name: count[f"fold_{number}_{name}"] for name in SPLITS} for number in numbers
    ]
    return {"requests_per_fold": requests} if requests else {}


def describe_folds(info: Mapping[str, Any]) -> list[str]:
    """Return a line on each fold of sequences with the manifest entry `info`."""
    folds = info["split"].get("folds", ())
    lines = []
    for number, (fold, requests) in enumerate(
        zip(folds, info.get("requests_per_fold", ()), strict=True), 1
    ):
        counts = ", ".join(f"{requests[name]:,} {name}" for name in SPLITS)
        moments = [
            format_moment(fold[f"{name}_ms"])
            for name in ("val_start", "test_start", "test_end")
        ]
        lines.append(
            f"fold {number} of {len(folds)}: validation from {moments[0]}, test from {moments[1]} "
            f"to before {moments[2]}: {counts} requests"
        )
    return lines


def format_moment(time_ms: int) -> str:
    """Return a time as `2024-05-07 13:00:00`, in UTC."""
    moment = datetime.fromtimestamp(time_ms / 1000, UTC)
    return moment.strftime("%Y-%m-%d %H:%M:%S")


def _draw_last_two(
    time: np.ndarray, begin: np.ndarray, end: np.ndarray, ids: tuple[pa.Array, pa.Array]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the last and the last but one request (u,) of users with the requests from `begin` to `end` (u,).

    Requests of one time are ordered by a hash of user, time and item. In the order of
    item ids, the largest id of each basket would be the target.
    """
    spans = []
    for first, last in zip(begin, end, strict=True):
        low = first + np.searchsorted(time[first:last], time[last - 2])
        spans.append(np.arange(low, last))
    rows = np.concatenate([np.zeros(0, np.int64), *spans])
    users, items = (column.take(pa.array(rows)).to_pylist() for column in ids)
    times = time[rows].tolist()
    hashes = [tie_hash(*key) for key in zip(users, times, items, strict=True)]
    lengths = np.array([len(span) for span in spans], dtype=np.int64)
    owner = np.repeat(np.arange(len(spans)), lengths)
    order = rows[np.lexsort((np.array(hashes, np.uint64), times, owner))]
    after = np.cumsum(lengths)
    return order[after - 1], order[after - 2]


def tie_hash(user: str, time: int, item: str) -> int:
    """Return 64 bits by which requests of one time are ordered, equal on every machine."""
    text = json.dumps([TIE_SEED, user, time, item])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def count_tied(
    code: np.ndarray, time: np.ndarray, user_start: np.ndarray
) -> dict[str, int]:
    """Return by evaluation split the requests that have the time of another request of their user."""
    same = np.zeros(len(time) + 1, dtype=bool)
    same[1:-1] = time[1:] == time[:-1]
    same[user_start] = False
    tied = same[1:] | same[:-1]
    return {
        name: int((tied & (code == SPLITS.index(name))).sum()) for name in SPLITS[1:]
    }


def tied_targets_info(count: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return the manifest's entry on targets that were drawn among behaviours of one time, or no entry."""
    tied = {name: count.get(f"tied_targets_{name}", 0) for name in SPLITS[1:]}
    return {"tied_targets": tied} if any(tied.values()) else {}


def require_training(
    requests: dict[str, int],
    truncated: Mapping[str, int],
    max_events: int,
    noun: str,
    split: str,
    tied: int = 0,
) -> None:
    """Raise UserError if no request can be trained on.

    Args:
        requests: Requests per split that can be learned from.
        truncated: Counts `truncated_users` and `truncated_events`.
        max_events: Behaviours that are kept per user.
        noun: What a request is called in the message.
        split: Kind of the split.
        tied: Behaviours with the time of another one of their user.
    """
    if requests["train"]:
        return
    others = ", ".join(f"{requests[name]:,} {name}" for name in SPLITS[1:])
    remedy = "move the cuts with --split.val_start and --split.test_start, or choose another --split.kind"
    if split == "leave_last_out":
        remedy = "each user needs four behaviours for that: use --split.kind temporal if the log has clock times"
    if tied:
        remedy = f"{tied:,} behaviours have the time of another of their user: use --ties log_order, or {remedy}"
    if truncated["truncated_events"]:
        remedy = (
            f"max_events {max_events:,} has left out the oldest {truncated['truncated_events']:,} behaviours of "
            f"{truncated['truncated_users']:,} users: raise --max_events, or {remedy}"
        )
    raise UserError(
        f"there is no training {noun} (there are {others}), so nothing can be trained; {remedy}"
    )
