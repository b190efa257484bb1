"""Counting statistics of a log of actions, point in time: what items, authors and users got before an event.

At time t a count covers [t - window, t - delay) and comes from events alone. For a training event t is its time; for
candidates of validation and test it is the cut before them, as all of a user's candidates are scored at once: at its
own time, a candidate's counts would hold what the user did with earlier candidates. A user's events are in one part,
so users are counted there; the rows of any other key travel to the bucket of the key.

Shapes: E events, W windows, M labels that are counted (exposures, then tasks), I items, F features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from pipelines.data.counts import MOST_BUCKETS, Piece, by_bucket, count_key, count_together, exchange, fill
from pipelines.data.kinds.actions.config import ITEM, USER, ActionsConfig
from pipelines.data.survey import coded, positions_in, read_coded

IDS = ("user_id", "item_id")

AsOf = Callable[[pa.Table, pa.Array], np.ndarray]
"""Of a part's events and the catalogue, (E,) ms: t of each event."""


def counted_labels(events: pa.Table, config: ActionsConfig) -> np.ndarray:
    """(E, M) uint8: one exposure each, and the tasks that are counted."""
    tasks = [config.tasks[name].values(events) for name in config.counts.marks]
    return np.stack([np.ones(events.num_rows, dtype=bool), *tasks], axis=1).astype(np.uint8)


def _scatter(
    uri: str,
    catalogue: pa.Array,
    attributes: dict[str, np.ndarray],
    config: ActionsConfig,
    as_of: AsOf,
    keys: list[str],
    buckets: int,
) -> list[Piece]:
    """One part's events by bucket of each key in turn: keys x buckets pieces. Events without the key are in none."""
    events = read_coded(uri, [*IDS, "timestamp_ms", *(f"label_{name}" for name in config.labels)], IDS)
    item = positions_in(coded(events, "item_id"), catalogue)
    columns = {
        "time": events["timestamp_ms"].to_numpy(),
        "as_of": as_of(events, catalogue),
        "counted_labels": counted_labels(events, config),
    }
    pieces = []
    for name in keys:
        key = item if name == ITEM else np.append(attributes[name], -1)[item]  # item -1 is the appended one
        pieces += by_bucket(key, buckets, {"key": key, **columns})
    return pieces


def _count_bucket(name: str, config: ActionsConfig, *pieces: Piece) -> list[Piece]:
    """Counts of one bucket of a key, back in a piece per part."""
    columns = ("key", "time", "counted_labels", "as_of")
    return count_together(pieces, lambda whole: {name: _count(config, *(whole[column] for column in columns))})


def _count(
    config: ActionsConfig, key: np.ndarray, time: np.ndarray, counted_labels: np.ndarray, as_of: np.ndarray
) -> np.ndarray:
    """(E, W, M) int32: labels of the same key in each window. key (E,), time and as_of (E,) ms."""
    return count_key(key, time, counted_labels, config.counts.windows_ms, config.counts.delay_ms, as_of)[0]


def count_actions(
    parts: list[str],
    catalogue: ray.ObjectRef,
    attributes: dict[str, np.ndarray],
    config: ActionsConfig,
    as_of: AsOf,
) -> list[list[ray.ObjectRef]]:
    """Per events part the pieces that `gather` puts together; they stay in Ray's object store.

    attributes: per name (I,) int32, the code of each item's value, -1 where it has none.
    """
    keys = [name for name in config.counts.keys if name != USER]
    if not keys:
        return [[] for _ in parts]
    buckets, shared = min(len(parts), MOST_BUCKETS), ray.put(attributes)
    calls = [(uri, catalogue, shared, config, as_of, keys, buckets) for uri in parts]
    return exchange(_scatter, calls, _count_bucket, [(name, config) for name in keys for _ in range(buckets)])


def gather(events: pa.Table, config: ActionsConfig, pieces: tuple[Piece, ...], as_of: np.ndarray) -> Piece:
    """Counts (E, W, M) int32 of a part's events by key; 0 for events without the key. as_of (E,) ms."""
    shape = (events.num_rows, len(config.counts.windows_ms), 1 + len(config.counts.marks))
    counts = {name: np.zeros(shape, dtype=np.int32) for name in config.counts.keys}
    fill(counts, pieces)
    if USER in counts and events.num_rows:
        user, time = coded(events, "user_id").indices.to_numpy(), events["timestamp_ms"].to_numpy()
        counts[USER] = _count(config, user, time, counted_labels(events, config), as_of)
    return counts


def features(counts: dict[str, np.ndarray], config: ActionsConfig) -> np.ndarray:
    """(E, F) float32 in the order of `config.features`: log(1 + count) of each label and smoothed rates of tasks."""
    prior, strength = config.counts.prior, config.counts.strength
    columns: list[Any] = []
    for name in config.counts.keys:
        for number in range(len(config.counts.windows_ms)):
            seen = counts[name][:, number].astype(np.float64)  # (E, M)
            columns += [*np.log1p(seen).T, *((seen[:, 1:] + prior * strength) / (seen[:, :1] + strength)).T]
    return np.stack(columns, axis=1).astype(np.float32)
