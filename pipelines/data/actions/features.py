"""Counting statistics of a log of actions, point in time: what items, authors and users got before an event.

At time t a count covers [t - window, t - delay) and comes from events alone. For a training event t is its time; for
candidates of validation and test it is the cut before them, as all of a user's candidates are scored at once: at its
own time, a candidate's counts would hold what the user did with earlier candidates. A user's events are in one part,
so users are counted there; the rows of any other key travel to the bucket of the key.

Shapes: E events, W windows, M labels that are counted (exposures, then tasks), I items, F features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.data.actions.config import ITEM, USER, ActionsConfig
from pipelines.data.events.event_stats import coded, positions_in, read_coded
from pipelines.data.sequences.counts import (
    Columns,
    Windows,
    count_key,
    fill,
    side_by_side,
)

IDS = ("user_id", "item_id")

AsOf = Callable[[pa.Table], np.ndarray]
"""Of a part's events, (E,) ms: t of each event."""


def counted_labels(events: pa.Table, config: ActionsConfig) -> np.ndarray:
    """(E, M) uint8: one exposure each, and the tasks that are counted."""
    tasks = [config.tasks[name].values(events) for name in config.counted_labels]
    return np.stack([np.ones(events.num_rows, dtype=bool), *tasks], axis=1).astype(
        np.uint8
    )


@dataclass(frozen=True)
class ActionsWindows(Windows):
    """Counts by the keys of the configuration, but the user's."""

    config: ActionsConfig
    as_of: AsOf

    @property
    def keys(self) -> list[str]:
        """Their names."""
        return [name for name in self.config.counts.keys if name != USER]

    @property
    def shapes(self) -> list[dict[str, tuple[int, ...]]]:  # type: ignore[override]
        shape = len(self.config.counts.windows_ms), 1 + len(self.config.counted_labels)
        return [{name: shape} for name in self.keys]

    def keyed(self, uri: str, *shared: Any) -> tuple[list[np.ndarray], Columns]:
        catalogue, attributes = (
            shared  # per name (I,) int32, the code of each item's value, -1 where it has none
        )
        events = read_coded(
            uri,
            [*IDS, "timestamp_ms", *(f"label_{name}" for name in self.config.labels)],
            IDS,
        )
        item = positions_in(coded(events, "item_id"), catalogue)
        # item -1 is the appended one
        keys = [
            item if name == ITEM else np.append(attributes[name], -1)[item]
            for name in self.keys
        ]
        columns = {
            **{f"key_{number}": key for number, key in enumerate(keys)},
            "time": events["timestamp_ms"].to_numpy(),
            "as_of": self.as_of(events),
            "counted_labels": counted_labels(events, self.config),
        }
        return keys, columns

    def count(self, number: int, rows: Columns) -> Columns:
        columns = (f"key_{number}", "time", "counted_labels", "as_of")
        return {
            self.keys[number]: _count(
                self.config, *(rows[column] for column in columns)
            )
        }


def _count(
    config: ActionsConfig,
    key: np.ndarray,
    time: np.ndarray,
    counted_labels: np.ndarray,
    as_of: np.ndarray,
) -> np.ndarray:
    """(E, W, M) int32: labels of the same key in each window. key (E,), time and as_of (E,) ms."""
    return count_key(
        key,
        time,
        counted_labels,
        config.counts.windows_ms,
        config.counts.delay_ms,
        as_of,
    )[0]


def gather(
    events: pa.Table, config: ActionsConfig, pieces: list[Columns], as_of: np.ndarray
) -> Columns:
    """Counts (E, W, M) int32 of a part's events by key; 0 for events without the key. as_of (E,) ms."""
    shape = (
        events.num_rows,
        len(config.counts.windows_ms),
        1 + len(config.counted_labels),
    )
    counts = {name: np.zeros(shape, dtype=np.int32) for name in config.counts.keys}
    fill(counts, pieces)
    if USER in counts and events.num_rows:
        user, time = (
            coded(events, "user_id").indices.to_numpy(),
            events["timestamp_ms"].to_numpy(),
        )
        counts[USER] = _count(config, user, time, counted_labels(events, config), as_of)
    return counts


def features(counts: dict[str, np.ndarray], config: ActionsConfig) -> np.ndarray:
    """(E, F) float32 in the order of `config.features`: log(1 + count) of each label and smoothed rates of tasks."""
    prior, strength = config.counts.prior, config.counts.strength
    columns: list[Any] = []
    for name in config.counts.keys:
        for number in range(len(config.counts.windows_ms)):
            seen = counts[name][:, number].astype(np.float64)  # (E, M)
            columns += [
                *np.log1p(seen).T,
                *((seen[:, 1:] + prior * strength) / (seen[:, :1] + strength)).T,
            ]
    return side_by_side(columns)
