"""Splits of requests into training, validation and test."""

from __future__ import annotations

import hashlib
import json
from collections import Counter

import numpy as np
import polars as pl

from core.errors import UserError
from core.schemas import EventsInfo, Split
from core.splits import DAY_MS, HOUR_MS, SPLITS
from core.tables import Table
from pipelines.prepare.events.build_events import (
    is_behaviour,
    label_columns,
    load_stats,
    read_part,
)
from pipelines.prepare.run import Run

TIE_SEED = 0
"""Seed of the hash that breaks ties between equal timestamps."""


# Cut times of a temporal split.


def cut_times(run: Run, events: Table[EventsInfo]) -> Split:
    """Compute the windows of a temporal split, with a pass over the events if needed.

    Returns:
        The split, with the first timestamps of the windows.
    """
    stats, config = load_stats(run, events), run.config.split
    if config.val_days is not None and config.test_days is not None:
        test_start = stats.last_ms + 1 - round(config.test_days * DAY_MS)
        val_start = test_start - round(config.val_days * DAY_MS)
    elif config.val_start is not None:
        val_start, test_start = config.val_start, config.test_start
    else:
        before_val = 1 - config.val_fraction - config.test_fraction
        ranks = [
            min(int(stats.behaviours * share), stats.behaviours - 1)
            for share in (before_val, 1 - config.test_fraction)
        ]
        val_start, test_start = nth_times(run, events, ranks)
    if not stats.first_ms < val_start < test_start <= stats.last_ms:
        raise UserError(
            f"the cuts at {val_start} and {test_start} ms leave a split without "
            f"events: the log runs from {stats.first_ms} to {stats.last_ms} ms"
        )
    return Split("temporal", val_start, test_start)


def nth_times(run: Run, events: Table[EventsInfo], ranks: list[int]) -> list[int]:
    """Return the timestamps of behaviours by their rank in the order of time.

    The statistics contain the number of behaviours per hour, so one pass over the
    events is enough: it reads the hours with these ranks.

    Args:
        run: Log, settings and tables of this call of `prepare`.
        events: Table of the events.
        ranks: Ranks of the behaviours, from 0.
    """
    stats = load_stats(run, events)
    hours, counts = list(stats.hours), [*stats.hours.values()]
    end_ranks = np.cumsum(counts)
    hour_index = np.searchsorted(end_ranks, ranks, side="right")  # (ranks,)
    shared = (run.behaviour, [hours[index] for index in hour_index])
    calls = [(uri,) for uri in events.part_uris()]
    parts = run.executor.map_unordered(_times_in_hours, calls, shared)
    times = pl.concat([part for _, part in parts]).sort("timestamp_ms")
    result = []
    for rank, index in zip(ranks, hour_index, strict=True):
        in_hour = times.filter(
            pl.col("timestamp_ms") // HOUR_MS * HOUR_MS == hours[index]
        )
        rank_in_hour = rank - (end_ranks[index] - counts[index])
        is_before = in_hour["count"].cum_sum() <= rank_in_hour
        result.append(int(in_hour["timestamp_ms"][int(is_before.sum())]))
    return result


def _times_in_hours(behaviour: str | None, hours: list[int], uri: str) -> pl.DataFrame:
    """Count the behaviours of a part at each time within some hours."""
    events = read_part(uri, ["timestamp_ms", *label_columns(behaviour)])
    events = events.filter(is_behaviour(behaviour))
    hour = pl.col("timestamp_ms") // HOUR_MS * HOUR_MS
    return events.filter(hour.is_in(hours)).group_by("timestamp_ms").len("count")


# The split of each request.


def assign_splits(
    requests: pl.DataFrame, split: Split, *, hashes_ties: bool = True
) -> pl.DataFrame:
    """Add the column `split`, an enum of SPLITS.

    Args:
        requests: Columns `user`, `user_id`, `item_id` and `timestamp_ms`, sorted by
            user and time.
        split: The split.
        hashes_ties: Whether leave-last-out breaks ties between equal times by a hash of
            the ids; else requests keep their order.
    """
    time = pl.col("timestamp_ms")
    if split.by == "temporal":
        is_train, is_val = time < split.val_start_ms, time < split.test_start_ms
        train, val, test = (pl.lit(name, pl.Enum(SPLITS)) for name in SPLITS)
        name = pl.when(is_train).then(train).when(is_val).then(val).otherwise(test)
        return requests.with_columns(split=name)
    # the requests that may be among the last two of their user
    rows = requests.select("user", "user_id", "item_id", "timestamp_ms")
    tails = rows.with_row_index("row").filter(
        pl.len().over("user") >= 3,
        time >= time.get(-2, null_on_oob=True).over("user"),
    )
    if hashes_ties:
        is_tied = pl.struct("user", "timestamp_ms").is_duplicated()
        keys = tails.filter(is_tied).select("row", "user_id", "timestamp_ms", "item_id")
        hashes = [tie_hash(*key) for _, *key in keys.iter_rows()]
        keys = keys.select("row", tie=pl.Series(hashes, dtype=pl.UInt64))
        tails = tails.join(keys, on="row", how="left", maintain_order="left")
        tails = tails.sort("user", "timestamp_ms", "tie", maintain_order=True)
    last = tails.group_by("user").agg(
        val=pl.col("row").get(-2), test=pl.col("row").get(-1)
    )
    codes = np.zeros(requests.height, np.uint8)
    codes[last["val"].to_numpy()] = 1
    codes[last["test"].to_numpy()] = 2
    names = pl.Series(SPLITS, dtype=pl.Enum(SPLITS)).gather(codes)
    return requests.with_columns(split=names)


def tie_hash(user: str, time: int, item: str) -> int:
    """Return a 64-bit hash that breaks ties between requests with equal timestamps.

    It depends on the arguments and TIE_SEED alone, so every machine gets the same
    order.
    """
    text = json.dumps([TIE_SEED, user, time, item])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def count_splits(count: Counter[str], name: str, requests: pl.DataFrame) -> None:
    """Add the number of rows of each split to the counts `NAME_train` and so on."""
    for split, rows in requests.group_by("split").len().iter_rows():
        count[f"{name}_{split}"] += rows


def require_training(num_requests: dict[str, int], noun: str) -> None:
    """Raise UserError if no request is in the training split.

    Args:
        num_requests: Number of usable requests per split.
        noun: Name of a request in the message.
    """
    if num_requests["train"]:
        return
    others = ", ".join(f"{num_requests[name]:,} {name}" for name in SPLITS[1:])
    raise UserError(f"there is no training {noun} ({others})")
