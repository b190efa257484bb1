"""Splits: which of a user's requests are for training, validation and test."""

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
from pipelines.data.events.event_stats import HOUR, Survey, behaviour_column, read_coded
from pipelines.data.reading.durations import DAY_MS

NAMES = ("train", "val", "test")

DRAW_SEED = 0
"""Seed of the draw among requests of one time."""


@dataclass
class SplitConfig:
    """How requests are split."""

    kind: Literal["auto", "leave_last_out", "temporal"] = "auto"
    """`temporal`: two cut times for all users. `leave_last_out`: each user's last request is for test, the one before
    it for validation; users with fewer than three have all in training, and among requests of one time a hash decides.
    `auto`: `temporal` if the log has clock times,
    else `leave_last_out`."""
    val_fraction: float = 0.1
    """Share of all behaviours, before the k-core, in the validation window of a temporal split."""
    test_fraction: float = 0.1
    """Share of all behaviours, before the k-core, in the test window of a temporal split."""
    val_start: Any = None
    """Start of the validation window, as ISO 8601 (UTC) or epoch ms; with `test_start`, it replaces the fractions."""
    test_start: Any = None
    """Start of the test window."""
    val_days: float | None = None
    """Days of the validation window; with `test_days` it replaces the fractions, and the cuts move with the log."""
    test_days: float | None = None
    """Days of the test window, which ends with the last behaviour."""

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
        """The settings as plain values; cut times that are not given are left out."""
        return {
            name: value for name, value in asdict(self).items() if value is not None
        }

    @property
    def shares(self) -> tuple[float, float]:
        """Shares of the behaviours that lie before validation, and before test."""
        return 1 - self.val_fraction - self.test_fraction, 1 - self.test_fraction

    def resolve(self, clock: bool) -> str:
        """The kind for a log with or without clock times; UserError for a temporal split without."""
        if self.kind == "temporal" and not clock:
            raise UserError(
                f"split.kind is {self.kind}, but the log has no clock times (only an order within each user), so there "
                f"is no cut time; use --split.kind leave_last_out"
            )
        return (
            ("temporal" if clock else "leave_last_out")
            if self.kind == "auto"
            else self.kind
        )


def epoch_ms(moment: Any, name: str) -> int:
    """A moment in epoch ms, from that or from ISO 8601; UTC where it names no offset. ValueError otherwise."""
    text = str(moment)
    if text.isdecimal():
        return int(text)
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"{name} is '{moment}'; give a moment such as 2022-05-07 or epoch ms"
        ) from None
    return round(
        (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp() * 1000
    )


def _times_within(
    behaviour: str | None, hours: list[int], uri: str
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The times of the behaviours of a part within each of the hours, with their numbers."""
    table = read_coded(uri, ["timestamp_ms", *behaviour_column(behaviour)], ())
    if behaviour:
        table = table.filter(table[f"label_{behaviour}"])
    time = table["timestamp_ms"].to_numpy()
    return [
        np.unique(time[(time >= hour) & (time < hour + HOUR)], return_counts=True)
        for hour in hours
    ]


def nth_times(survey: Survey, ranks: list[int], engine: Engine) -> list[int]:
    """The timestamps of the behaviours at `ranks` (from 0) in the order of time: the survey knows their hours, and one
    pass over the parts gives the times within these."""
    hours, rows = list(survey.hours), np.array([*survey.hours.values()])
    until = np.cumsum(rows)
    places = np.searchsorted(until, ranks, side="right")
    shared = (survey.behaviour, [hours[place] for place in places])
    found = [
        of_part
        for _, of_part in engine.each(
            _times_within, [(uri,) for uri in survey.parts], shared
        )
    ]
    chosen = []
    for number, (rank, place) in enumerate(zip(ranks, places, strict=True)):
        times, counts = (
            np.concatenate([of_part[number][column] for of_part in found])
            for column in (0, 1)
        )
        order = np.argsort(times, kind="stable")
        left = rank - until[place] + rows[place]
        chosen.append(
            int(
                times[order][
                    np.searchsorted(np.cumsum(counts[order]), left, side="right")
                ]
            )
        )
    return chosen


def cut_times(survey: Survey, config: SplitConfig, engine: Engine) -> dict[str, Any]:
    """The temporal split as its manifest records it: `val_start_ms` and `test_start_ms`, the first
    timestamps of the two windows. UserError if the clock is too coarse to cut."""
    if config.val_start is not None or config.val_days is not None:
        starts = [config.val_start, config.test_start]
        if config.val_days is not None and config.test_days is not None:
            test = survey.last_ms + 1 - round(config.test_days * DAY_MS)
            starts = [test - round(config.val_days * DAY_MS), test]
        if not survey.first_ms < starts[0] < starts[1] <= survey.last_ms:
            raise UserError(
                f"the cuts at {starts[0]} and {starts[1]} ms leave a side without events: the log runs from "
                f"{survey.first_ms} to {survey.last_ms} ms; choose split.val_start and split.test_start "
                f"within it, or fewer days"
            )
        return {
            "kind": "temporal",
            "val_start_ms": starts[0],
            "test_start_ms": starts[1],
        }
    ranks = [
        min(int(survey.behaviours * share), survey.behaviours - 1)
        for share in config.shares
    ]
    starts = nth_times(survey, ranks, engine)
    if not survey.first_ms < starts[0] < starts[1]:
        raise UserError(
            f"a temporal split finds no two cut times: training would end at {starts[0]} and validation at {starts[1]} "
            f"ms, the log begins at {survey.first_ms}; use larger fractions or --split.kind leave_last_out"
        )
    return {"kind": "temporal", "val_start_ms": starts[0], "test_start_ms": starts[1]}


def assign(
    split: dict[str, Any],
    time: np.ndarray,
    user_start: np.ndarray,
    ids: tuple[pa.Array, pa.Array] | None = None,
) -> np.ndarray:
    """Return the index into NAMES of every request.

    Args:
        split: as the manifest records it.
        time: (R,) ms or ordinals, ascending within a user.
        user_start: (U,) first request of each user.
        ids: (R,) user id and (R,) item id of the requests, by which leave-last-out draws among requests of one time.
            Without them the later request of one time is the later one.
    """
    if split["kind"] == "temporal":
        return np.digitize(
            time, [split["val_start_ms"], split["test_start_ms"]]
        ).astype(np.int8)
    ends = np.append(user_start[1:], len(time))
    enough = ends - user_start >= 3
    begins, ends = user_start[enough], ends[enough]
    tests, vals = ends - 1, ends - 2
    if ids is not None:
        tied = (time[tests] == time[vals]) | (time[vals] == time[vals - 1])
        tests[tied], vals[tied] = _draw_last_two(time, begins[tied], ends[tied], ids)
    code = np.zeros(len(time), dtype=np.int8)
    code[tests] = NAMES.index("test")
    code[vals] = NAMES.index("val")
    return code


def _draw_last_two(
    time: np.ndarray,
    begins: np.ndarray,
    ends: np.ndarray,
    ids: tuple[pa.Array, pa.Array],
) -> tuple[np.ndarray, np.ndarray]:
    """Return the last and the last but one request (u,) of users with the requests from `begins` to `ends` (u,).

    Requests of one time are in the order of a hash of user, time and item. In the order of item ids, the largest id of
    each basket would be the target.
    """
    spans = [
        np.arange(begin + np.searchsorted(time[begin:end], time[end - 2]), end)
        for begin, end in zip(begins, ends, strict=True)
    ]
    rows = np.concatenate([np.zeros(0, np.int64), *spans])
    users, items = (of.take(pa.array(rows)).to_pylist() for of in ids)
    times = time[rows].tolist()
    hashes = list(map(draw_hash, users, times, items))
    owner = np.repeat(np.arange(len(spans)), [len(span) for span in spans])
    order = rows[np.lexsort((np.array(hashes, np.uint64), times, owner))]
    after = np.cumsum([len(span) for span in spans], dtype=np.int64)
    return order[after - 1], order[after - 2]


def draw_hash(user: str, time: int, item: str) -> int:
    """Return 64 bits by which requests of one time are ordered, the same on every machine."""
    text = json.dumps([DRAW_SEED, user, time, item])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def count_tied(
    code: np.ndarray, time: np.ndarray, user_start: np.ndarray
) -> dict[str, int]:
    """Return the requests of each split but training that have the time of another request of their user."""
    same = np.zeros(len(time) + 1, dtype=bool)
    same[1:-1] = time[1:] == time[:-1]
    same[user_start] = False
    tied = same[1:] | same[:-1]
    return {
        name: int((tied & (code == number)).sum())
        for number, name in enumerate(NAMES)
        if number
    }


def tied_targets(count: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return what the manifest of sequences says of targets that were drawn among behaviours of one time."""
    tied = {name: count.get(f"tied_targets_{name}", 0) for name in NAMES[1:]}
    return {"tied_targets": tied} if any(tied.values()) else {}


def require_training(
    requests: dict[str, int],
    truncated: dict[str, int],
    max_events: int,
    what: str,
    split: str,
    tied: int = 0,
) -> None:
    """UserError where nothing can be trained. `requests` per split, those that can be learned from; `what` they are;
    `truncated`: `truncated_users` and `truncated_events`; `split`: its kind; `tied`: behaviours of one time."""
    if requests["train"]:
        return
    others = ", ".join(f"{requests[name]:,} {name}" for name in NAMES[1:])
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
        f"there is no training {what} (there are {others}), so nothing can be trained; {remedy}"
    )
