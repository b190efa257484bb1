"""Point-in-time counts of a log of actions: exposures and tasks by item, author, user.

A count at time t covers the events in [t - window, t - delay). For a training event t
is its time. For a candidate of validation or test it is the start of the split: all of
a user's candidates are scored at once, and counts at a candidate's own time would leak
the user's actions on earlier candidates. A user's events are in one part, so users are
counted in their part; the rows of any other key are exchanged to the bucket of the key.

Shapes: E events, W windows, M counted labels (exposures, then tasks), I items, F
features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from core.schemas import Split
from pipelines.prepare.events.columns import dictionary_column, encode_ids, read_part
from pipelines.prepare.kinds.actions.config import ITEM, USER, ActionsConfig
from pipelines.prepare.sequences.counts import (
    Columns,
    KeyCounter,
    gather_counts,
    smooth_rates,
    stack_columns,
    window_counts,
)

IDS = ("user_id", "item_id")


def count_times(split: Split, time: np.ndarray) -> np.ndarray:
    """Return the time (E,) in ms as of which the counts of each event are taken.

    It is the event's time in training, and the start of its split for candidates of
    validation and test, as all candidates of a user are scored at once.

    Args:
        split: The split.
        time: Times (E,) of the events in ms.
    """
    val, test = split.val_start_ms, split.test_start_ms
    return np.where(time >= test, test, np.where(time >= val, val, time))


def counted_labels(events: pa.Table, config: ActionsConfig) -> np.ndarray:
    """Return the counted labels (E, M) uint8: an exposure per event, then the tasks."""
    exposures = np.ones(events.num_rows, dtype=bool)
    tasks = [config.tasks[name].values(events) for name in config.counted_labels]
    return np.stack([exposures, *tasks], axis=1).astype(np.uint8)


@dataclass(frozen=True)
class ActionsCounter(KeyCounter):
    """Counts by all kinds of key of the configuration except the user."""

    config: ActionsConfig
    split: Split

    @property
    def keys(self) -> list[str]:
        """Names of the counted kinds of key: `item`, and attributes of items."""
        return [name for name in self.config.counts.keys if name != USER]

    @property
    def shapes(self) -> list[dict[str, tuple[int, ...]]]:  # type: ignore[override]
        """The shape (W, M) of the counts of each kind of key."""
        shape = len(self.config.counts.windows_ms), 1 + len(self.config.counted_labels)
        return [{name: shape} for name in self.keys]

    def read_keys(self, uri: str, *shared: Any) -> tuple[list[np.ndarray], Columns]:
        """Read the items or attributes, times and labels of a part's events.

        `shared` is the catalogue's `Vocabulary`, and by attribute the codes (I,) int32
        of the items' values, -1 for an item without a value.
        """
        catalogue, attributes = shared
        labels = [f"label_{name}" for name in self.config.labels]
        events = read_part(uri, [*IDS, "timestamp_ms", *labels], IDS)
        item = encode_ids(dictionary_column(events, "item_id"), catalogue)
        keys = []
        for name in self.keys:
            if name == ITEM:
                keys.append(item)
            else:
                # item -1 takes the appended -1
                keys.append(np.append(attributes[name], -1)[item])
        time = events["timestamp_ms"].to_numpy()
        columns = {f"key_{index}": key for index, key in enumerate(keys)}
        columns["time"] = time
        columns["as_of"] = count_times(self.split, time)
        columns["counted_labels"] = counted_labels(events, self.config)
        return keys, columns

    def count(self, kind_index: int, rows: Columns) -> Columns:
        """Return the counts (E, W, M) of the rows of one kind of key."""
        counts = self.count_key(
            rows[f"key_{kind_index}"],
            rows["time"],
            rows["counted_labels"],
            rows["as_of"],
        )
        return {self.keys[kind_index]: counts}

    def count_key(
        self, key: np.ndarray, time: np.ndarray, labels: np.ndarray, as_of: np.ndarray
    ) -> np.ndarray:
        """Count the labels of each event's key in each window.

        Args:
            key: Integers (E,) that identify the keys.
            time: Times (E,) in ms.
            labels: Counted labels (E, M).
            as_of: Times (E,) in ms as of which counts are taken.

        Returns:
            The counts (E, W, M) int32.
        """
        settings = self.config.counts
        windows, delay = settings.windows_ms, settings.delay_ms
        return window_counts(key, time, labels, windows, delay, as_of)[0]

    def gather(self, events: pa.Table, pieces: list[Columns] | None) -> Columns:
        """Return the counts (E, W, M) of a part's events by kind of key, with users.

        Args:
            events: Rows of `read_part`.
            pieces: Counts of the other kinds of key from their buckets; None counts as
                zero.
        """
        counts = gather_counts(self, events.num_rows, pieces or [])
        if USER in self.config.counts.keys:
            user = dictionary_column(events, "user_id").indices.to_numpy()
            time = events["timestamp_ms"].to_numpy()
            labels = counted_labels(events, self.config)
            as_of = count_times(self.split, time)
            counts[USER] = self.count_key(user, time, labels, as_of)
        return counts


def features(counts: Columns, config: ActionsConfig) -> np.ndarray:
    """Return the features (E, F) float32, in the order of `config.features`.

    Per kind of key and window they are log(1 + count) of each label, then the
    smoothed rate of each task.
    """
    prior, strength = config.counts.prior, config.counts.strength
    columns: list[np.ndarray] = []
    for name in config.counts.keys:
        for window in range(len(config.counts.windows_ms)):
            count = counts[name][:, window].astype(np.float64)  # (E, M)
            rates = smooth_rates(count[:, 1:], count[:, :1], prior, strength)
            columns += [*np.log1p(count).T, *rates.T]
    return stack_columns(columns)
