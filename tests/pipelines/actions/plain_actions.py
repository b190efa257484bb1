"""Sequences of a log of actions as a slow and obvious program makes them: dicts and loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
DAY, MINUTE = 86_400_000, 60_000
KEY = ("user_id", "timestamp_ms", "request_id", "position", "item_id")


def features(
    rows: list[Row],
    row: Row,
    t: int,
    keys: dict[str, Callable[[Row], Any]],
    marks: dict[str, Callable[[Row], bool]],
    days: list[float],
    delay_minutes: float,
    prior: float,
    strength: float,
) -> list[float]:
    """Counts of the row's keys in [t - window, t - delay): exposures, each mark, the rate of each mark."""
    found: list[float] = []
    for key in keys.values():
        for window in days:
            seen = [
                other
                for other in rows
                if key(row) is not None
                and key(other) == key(row)
                and t - round(window * DAY) <= other["timestamp_ms"] < t - round(delay_minutes * MINUTE)
            ]
            taken = [sum(mark(other) for other in seen) for mark in marks.values()]
            found += [math.log1p(len(seen)), *map(math.log1p, taken)]
            found += [(count + prior * strength) / (len(seen) + strength) for count in taken]
    return found


def sequences(rows: list[Row], catalogue: list[str], cuts: tuple[int, int], max_events: int) -> dict[str, Row]:
    """{user: {events, train_end, val_end, moments}}: the user's latest events on items of the catalogue, in the total
    order; moments: t of their counts, which is their own time in training and that of the cut after it.
    """
    users = {}
    for user in sorted({row["user_id"] for row in rows}):
        mine = [row for row in rows if row["user_id"] == user and row["item_id"] in catalogue]
        mine = sorted(mine, key=lambda row: tuple(row[name] for name in KEY))[-max_events:]
        if mine:
            before = [sum(row["timestamp_ms"] < cut for row in mine) for cut in cuts]
            moments = [
                max([cut for cut in cuts if cut <= row["timestamp_ms"]] or [row["timestamp_ms"]]) for row in mine
            ]
            users[user] = {"events": mine, "train_end": before[0], "val_end": before[1], "moments": moments}
    return users
