"""Counting statistics of a log of actions, point in time: what items, authors and users got before an event.

`python -m jobs.prepare` makes them where a source says `prepare: {kind: actions}`. At moment t a count covers
[t - window, t - delay) and comes from events alone. For a training event t is its time; for candidates of validation
and test it is the cut before them, as all of a user's candidates are scored at once: at its own time, a candidate's
counts would hold what the user did with earlier candidates. A user's events are in one part, so users are counted
there; the rows of any other key travel to the partition of the key. The kernel is that of search logs
(`windows.window_counts`): a sort, running sums and a binary search per window, E log E in the events.

Shapes: E events, W windows, M marks (exposures, then tasks), I items, F features.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from pipelines.data.actions_config import ITEM, USER, ActionsConfig
from pipelines.data.survey import coded, read_coded
from pipelines.data.windows import MOST_BUCKETS, exchange, positions_in, window_counts

IDS = ("user_id", "item_id")

Piece = dict[str, np.ndarray]
Moments = Callable[[pa.Table, pa.Array], np.ndarray]
"""Of a part's events and the catalogue, (E,) ms: t of each event."""


def marks_of(events: pa.Table, config: ActionsConfig) -> np.ndarray:
    """(E, M) uint8: one exposure each, and the tasks that are counted."""
    tasks = [config.tasks[name].values(events) for name in config.counts.marks]
    return np.stack([np.ones(events.num_rows, dtype=bool), *tasks], axis=1).astype(np.uint8)


def _scatter(
    uri: str,
    catalogue: pa.Array,
    attributes: dict[str, np.ndarray],
    config: ActionsConfig,
    moments: Moments,
    keys: list[str],
    buckets: int,
) -> list[Piece]:
    """One part's events by bucket of each key in turn: keys x buckets pieces. Events without the key are in none."""
    events = read_coded(uri, [*IDS, "timestamp_ms", *(f"label_{name}" for name in config.labels)], IDS)
    item = positions_in(coded(events, "item_id"), catalogue)
    columns = {
        "time": events["timestamp_ms"].to_numpy(),
        "moment": moments(events, catalogue),
        "marks": marks_of(events, config),
    }
    pieces = []
    for name in keys:
        key = item if name == ITEM else np.append(attributes[name], -1)[item]  # item -1 is the appended one
        bucket = np.where(key >= 0, key % buckets, -1)
        order = np.argsort(bucket, kind="stable")
        for low, high in pairwise(np.searchsorted(bucket[order], np.arange(buckets + 1))):
            rows = order[low:high]
            piece = {"row": rows.astype(np.int32), "key": key[rows]}
            pieces.append(piece | {name: column[rows] for name, column in columns.items()})
    return pieces


def count_key(
    key: np.ndarray, time: np.ndarray, moment: np.ndarray, marks: np.ndarray, config: ActionsConfig
) -> np.ndarray:
    """(E, W, M) int32: marks of the same key in each window. key (E,), time and moment (E,) ms, marks (E, M)."""
    dense = np.unique(key, return_inverse=True)[1]
    return window_counts(dense, time, marks, config.counts.windows_ms, config.counts.delay_ms, moment)[0]


def _count_bucket(name: str, config: ActionsConfig, *pieces: Piece) -> list[Piece]:
    """Counts of one bucket of a key, back in a piece per part."""
    whole = {column: np.concatenate([piece[column] for piece in pieces]) for column in pieces[0]}
    counts = count_key(whole["key"], whole["time"], whole["moment"], whole["marks"], config)
    edges = np.cumsum([len(piece["row"]) for piece in pieces])[:-1]
    return [
        {"row": piece["row"], name: found} for piece, found in zip(pieces, np.split(counts, edges), strict=True)
    ]  # fmt: skip


def count_actions(
    parts: list[str],
    catalogue: ray.ObjectRef,
    attributes: dict[str, np.ndarray],
    config: ActionsConfig,
    moments: Moments,
) -> list[list[ray.ObjectRef]]:
    """Per events part the pieces that `gather` puts together; they stay in Ray's object store.

    attributes: per name (I,) int32, the code of each item's value, -1 where it has none.
    """
    keys = [name for name in config.counts.keys if name != USER]
    if not keys:
        return [[] for _ in parts]
    buckets, shared = min(len(parts), MOST_BUCKETS), ray.put(attributes)
    calls = [(uri, catalogue, shared, config, moments, keys, buckets) for uri in parts]
    return exchange(_scatter, calls, _count_bucket, [(name, config) for name in keys for _ in range(buckets)])


def gather(
    events: pa.Table, config: ActionsConfig, pieces: tuple[Piece, ...], moment: np.ndarray
) -> dict[str, np.ndarray]:
    """Counts (E, W, M) int32 of a part's events by key; 0 for events without the key. moment (E,) ms."""
    shape = (events.num_rows, len(config.counts.windows_ms), 1 + len(config.counts.marks))
    counts = {name: np.zeros(shape, dtype=np.int32) for name in config.counts.keys}
    for piece in pieces:
        [name] = piece.keys() - {"row"}
        counts[name][piece["row"]] = piece[name]
    if USER in counts and events.num_rows:
        user, time = coded(events, "user_id").indices.to_numpy(), events["timestamp_ms"].to_numpy()
        counts[USER] = count_key(user, time, moment, marks_of(events, config), config)
    return counts


def features(counts: dict[str, np.ndarray], config: ActionsConfig) -> np.ndarray:
    """(E, F) float32 in the order of `config.features`: log(1 + count) of each mark and smoothed rates of tasks."""
    prior, strength = config.counts.prior, config.counts.strength
    columns: list[Any] = []
    for name in config.counts.keys:
        for number in range(len(config.counts.windows_ms)):
            seen = counts[name][:, number].astype(np.float64)  # (E, M)
            columns += [*np.log1p(seen).T, *((seen[:, 1:] + prior * strength) / (seen[:, :1] + strength)).T]
    return np.stack(columns, axis=1).astype(np.float32)
