"""Counting statistics of a log of actions, point in time: what items, authors and users got before an event.

At time t a count covers [t - window, t - delay) and comes from events alone. For a
training event t is its time; for candidates of validation and test it is the cut before
them, as all of a user's candidates are scored at once: at its own time, a candidate's
counts would hold what the user did with earlier candidates. A user's events are in one
part, so users are counted there; the rows of any other key travel to the bucket of the
key.

Shapes: E events, W windows, M labels that are counted (exposures, then tasks), I items,
F features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.data.actions.config import ITEM, USER, ActionsConfig
from pipelines.data.events.columns import dictionary_column, index_in, read_part
from pipelines.data.sequences.counts import (
    Columns,
    KeyCounter,
    gather_counts,
    smooth_rates,
    stack_columns,
    window_counts,
)

IDS = ("user_id", "item_id")


def count_times(split: dict[str, Any], time: np.ndarray) -> np.ndarray:
    """Return (E,) ms at which each event's counts are taken.

    That is its own time in training, and for candidates the cut before them, when they
    are all scored: no candidate's counts know what was done with another. time (E,) ms.
    """
    val, test = split["val_start_ms"], split["test_start_ms"]
    return np.where(time >= test, test, np.where(time >= val, val, time))


def counted_labels(events: pa.Table, config: ActionsConfig) -> np.ndarray:
    """Return (E, M) uint8: one exposure per event, and the tasks that are counted."""
    exposures = np.ones(events.num_rows, dtype=bool)
    tasks = [config.tasks[name].values(events) for name in config.counted_labels]
    return np.stack([exposures, *tasks], axis=1).astype(np.uint8)


@dataclass(frozen=True)
class ActionsCounter(KeyCounter):
    """Counts by the keys of the configuration, but the user's."""

    config: ActionsConfig
    split: dict[str, Any]
    """The split as manifests record it."""

    @property
    def keys(self) -> list[str]:
        """Names of the keys."""
        return [name for name in self.config.counts.keys if name != USER]

    @property
    def shapes(self) -> list[dict[str, tuple[int, ...]]]:  # type: ignore[override]
        shape = len(self.config.counts.windows_ms), 1 + len(self.config.counted_labels)
        return [{name: shape} for name in self.keys]

    def read_keys(self, uri: str, *shared: Any) -> tuple[list[np.ndarray], Columns]:
        # attributes: by name (I,) int32 code of each item's value, -1 without one
        catalogue, attributes = shared
        labels = [f"label_{name}" for name in self.config.labels]
        events = read_part(uri, [*IDS, "timestamp_ms", *labels], IDS)
        item = index_in(dictionary_column(events, "item_id"), catalogue)
        keys = []
        for name in self.keys:
            if name == ITEM:
                keys.append(item)
            else:
                # item -1 takes the appended -1
                keys.append(np.append(attributes[name], -1)[item])
        time = events["timestamp_ms"].to_numpy()
        columns = {f"key_{number}": key for number, key in enumerate(keys)}
        columns["time"] = time
        columns["as_of"] = count_times(self.split, time)
        columns["counted_labels"] = counted_labels(events, self.config)
        return keys, columns

    def count(self, key_number: int, rows: Columns) -> Columns:
        counts = self.count_key(
            rows[f"key_{key_number}"],
            rows["time"],
            rows["counted_labels"],
            rows["as_of"],
        )
        return {self.keys[key_number]: counts}

    def count_key(
        self, key: np.ndarray, time: np.ndarray, labels: np.ndarray, as_of: np.ndarray
    ) -> np.ndarray:
        """Return (E, W, M) int32 labels of the same key in each window.

        Args:
            key: (E,) any integers.
            time: (E,) ms.
            labels: (E, M) counted labels.
            as_of: (E,) ms at which counts are taken.
        """
        settings = self.config.counts
        windows, delay = settings.windows_ms, settings.delay_ms
        return window_counts(key, time, labels, windows, delay, as_of)[0]

    def gather(self, events: pa.Table, pieces: list[Columns] | None) -> Columns:
        """Return the counts (E, W, M) of a part's events by key, the user's among them; 0 without the key."""
        counts = gather_counts(self, events.num_rows, pieces or [])
        if USER in self.config.counts.keys:
            user = dictionary_column(events, "user_id").indices.to_numpy()
            time = events["timestamp_ms"].to_numpy()
            labels = counted_labels(events, self.config)
            as_of = count_times(self.split, time)
            counts[USER] = self.count_key(user, time, labels, as_of)
        return counts


def features(counts: Columns, config: ActionsConfig) -> np.ndarray:
    """Return (E, F) float32 features in the order of `config.features`.

    They are log(1 + count) of each label and smoothed rates of tasks.
    """
    prior, strength = config.counts.prior, config.counts.strength
    columns: list[np.ndarray] = []
    for name in config.counts.keys:
        for number in range(len(config.counts.windows_ms)):
            count = counts[name][:, number].astype(np.float64)  # (E, M)
            rates = smooth_rates(count[:, 1:], count[:, :1], prior, strength)
            columns += [*np.log1p(count).T, *rates.T]
    return stack_columns(columns)
