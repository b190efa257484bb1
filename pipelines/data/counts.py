"""Point-in-time counts: what happened to a key in [t - window, t - delay), from events alone.

`python -m jobs.prepare` makes them for kinds of request with counted features. Events of all users count, so rows
travel to the bucket of their key (`exchange`), and what is counted there comes back to their part. Each bucket is one
vectorised kernel: a sort, running sums, and a binary search per window, so the cost is E log E in the events,
whatever the windows hold. What comes back are integers; the `features.py` of a kind makes numbers for models of them.

Shapes: E events, W windows, M labels that are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import ray

MOST_BUCKETS = 64  # of a key: enough for some hundred million events, and parts x 64 pieces in transit
UNSEEN = -1  # gap of a key that was never there before

Piece = dict[str, np.ndarray]
"""Columns (n,) or (n, ...) of some rows of a part; `row` (n,) int32 says which."""


def window_counts(
    key: np.ndarray,
    time: np.ndarray,
    counted_labels: np.ndarray,
    windows_ms: list[int],
    delay_ms: int,
    as_of: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Labels of the same key in [t - window, t - delay) for every event, and the time since the last event.

    key (E,) dense codes from 0, time (E,) ms, counted_labels (E, M) int; t is `as_of` (E,) ms, by default the event's
    own time. Returns counts (E, W, M) int32 and gap (E,) int64: ms since the key's last event before t - delay,
    UNSEEN where there is none. Events of one time never count for each other, whatever the delay.
    """
    events, labels = counted_labels.shape
    counts = np.zeros((events, len(windows_ms), labels), dtype=np.int32)
    gap = np.full(events, UNSEEN, dtype=np.int64)
    if not events:
        return counts, gap
    # Times by rank, so that (key, rank) fits an integer whatever the clock's unit.
    values, rank = np.unique(time, return_inverse=True)
    moments, which = (values, rank) if as_of is None else np.unique(as_of, return_inverse=True)
    line = key.astype(np.int64) * (len(values) + 1) + rank
    order = np.argsort(line)
    rank, which, time, line = rank[order], which[order], time[order], line[order]
    base = line - rank  # (E,) start of the key's stretch of the line
    total = np.concatenate([np.zeros((1, labels), np.int64), np.cumsum(counted_labels[order], axis=0, dtype=np.int64)])

    def earlier(shift: int) -> np.ndarray:
        """(E,) events on the line before (key, t - shift)."""
        return np.searchsorted(line, base + np.searchsorted(values, moments - shift)[which])

    end = earlier(delay_ms)
    if windows_ms:
        counts[order] = np.stack([total[end] - total[earlier(window)] for window in windows_ms], axis=1)
    last = end - 1
    seen = (end > 0) & (base[last] == base)
    gap[order] = np.where(seen, moments[which] - time[last], UNSEEN)
    return counts, gap


def count_key(
    key: np.ndarray,
    time: np.ndarray,
    counted_labels: np.ndarray,
    windows_ms: list[int],
    delay_ms: int,
    as_of: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """`window_counts` of keys that are any integers."""
    dense = np.unique(key, return_inverse=True)[1]
    return window_counts(dense, time, counted_labels, windows_ms, delay_ms, as_of)


def by_bucket(key: np.ndarray, buckets: int, columns: Piece) -> list[Piece]:
    """A part's events by bucket of their key, one piece per bucket. key (E,), below 0 for events without: those are
    in no piece."""
    bucket = np.where(key >= 0, key % buckets, -1)
    order = np.argsort(bucket, kind="stable")
    edges = pairwise(np.searchsorted(bucket[order], np.arange(buckets + 1)))
    rows = (order[low:high] for low, high in edges)
    return [{"row": row.astype(np.int32), **{name: column[row] for name, column in columns.items()}} for row in rows]


def count_together(pieces: tuple[Piece, ...], count: Callable[[Piece], Piece]) -> list[Piece]:
    """What `count` finds of the rows of all pieces together, cut into a piece for each of them."""
    whole = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    edges = np.cumsum([len(piece["row"]) for piece in pieces])[:-1]
    cut = {name: np.split(column, edges) for name, column in {"row": whole["row"], **count(whole)}.items()}
    return [{name: column[number] for name, column in cut.items()} for number in range(len(pieces))]


def fill(counts: Piece, pieces: tuple[Piece, ...]) -> None:
    """Writes what was counted of a part's events to its rows of `counts`, by name (E, ...)."""
    for piece in pieces:
        for name in piece.keys() - {"row"}:
            counts[name][piece["row"]] = piece[name]


def exchange(
    scatter: Callable[..., list[Any]],
    calls: list[tuple[Any, ...]],
    count: Callable[..., list[Any]],
    heads: list[tuple[Any, ...]],
) -> list[list[ray.ObjectRef]]:
    """Rows to the bucket of their key and what is counted there back: per call one piece of every bucket.

    `scatter(*call)` gives a piece for each of `heads`; `count(*heads[n], *pieces)` has piece n of all calls
    and gives a piece back to each of them.
    """

    def several(function: Callable[..., Any], returns: int) -> Callable[..., list[ray.ObjectRef]]:
        """The function as a task that returns a list of references, whatever their number."""
        if returns == 1:  # Ray returns one value as it is and not as a list
            return lambda *call: [ray.remote(_only).remote(function, *call)]
        return ray.remote(function).options(num_returns=returns).remote  # type: ignore[no-any-return]

    pieces = [several(scatter, len(heads))(*call) for call in calls]  # calls x heads
    count_there = several(count, len(calls))
    counted = [count_there(*head, *(piece[number] for piece in pieces)) for number, head in enumerate(heads)]
    return [[bucket[number] for bucket in counted] for number in range(len(calls))]


def _only(function: Callable[..., list[Any]], *call: Any) -> Any:
    """The one element of what the function returns."""
    return function(*call)[0]
