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

import numpy as np
import polars as pl

from core.schemas import Split
from pipelines.prepare.events.build_events import read_part
from pipelines.prepare.sequences.counts import (
    Columns,
    KeyCounter,
    Lookups,
    count_features,
    window_counts,
)
from pipelines.prepare.settings.actions import ITEM, USER, ActionsConfig

IDS = ("user_id", "item_id")


def count_time(split: Split) -> pl.Expr:
    """Return the end in ms of the time that the counts of an event cover.

    It is the event's time in training, and the start of its split for candidates of
    validation and test, as all candidates of a user are scored at once.
    """
    time, val, test = pl.col("timestamp_ms"), split.val_start_ms, split.test_start_ms
    return pl.when(time >= test).then(test).when(time >= val).then(val).otherwise(time)


def counted_labels(events: pl.DataFrame, config: ActionsConfig) -> np.ndarray:
    """Return the counted labels (E, M) uint8: an exposure per event, then the tasks."""
    tasks = {f"task_{name}": config.tasks[name].holds for name in config.counted_labels}
    labels = events.select(pl.repeat(True, pl.len()).alias("exposures"), **tasks)
    return labels.cast(pl.UInt8).to_numpy()


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
    def names(self) -> list[list[str]]:
        """Names of the features of each kind of key."""
        return [self.config.key_features(key) for key in self.keys]

    @property
    def never(self) -> dict[str, float]:
        """Features of a key without events: counts of 0, and rates of the prior."""
        settings, num_labels = self.config.counts, 1 + len(self.config.counted_labels)
        shape = len(settings.keys), len(settings.windows_days), num_labels
        features = self._rate(np.zeros(shape, np.int32)).ravel()
        return dict(zip(self.config.features, features, strict=True))

    def read_keys(
        self, uri: str, lookups: Lookups
    ) -> tuple[list[np.ndarray], pl.DataFrame]:
        """Read the items or attributes, times and labels of a part's events."""
        tasks = [self.config.tasks[name] for name in self.config.counted_labels]
        labels = {f"label_{label}" for task in tasks for label in task.labels}
        events = read_part(uri, [*IDS, "timestamp_ms", *labels])
        events = events.join(
            lookups.items, on="item_id", how="left", maintain_order="left"
        )
        names = ["item_index" if key == ITEM else f"key_{key}" for key in self.keys]
        keys = [events[name].fill_null(-1).to_numpy() for name in names]
        columns = events.select(
            pl.Series("counted_labels", counted_labels(events, self.config)),
            *(pl.Series(f"key_{index}", key) for index, key in enumerate(keys)),
            time="timestamp_ms",
            as_of=count_time(self.split),
        )
        return keys, columns

    def compute(self, kind_index: int, rows: Columns) -> np.ndarray:
        """Return the features (E, F) of the rows of one kind of key."""
        key, labels = rows[f"key_{kind_index}"], rows["counted_labels"]
        return self.count_key(key, rows["time"], labels, rows["as_of"])

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
            The features (E, F) of the key, in the order of `key_features`.
        """
        windows, delay = self.config.counts.windows_ms, self.config.counts.delay_ms
        return self._rate(window_counts(key, time, labels, windows, delay, as_of)[0])

    def _rate(self, counts: np.ndarray) -> np.ndarray:
        settings, num_rates = self.config.counts, len(self.config.counted_labels)
        return count_features(counts, num_rates, settings.prior, settings.strength)

    def compute_features(
        self, events: pl.DataFrame, counted: pl.DataFrame | None
    ) -> np.ndarray:
        """Return the features (E, F) float32 of a part's events, with users.

        Args:
            events: Events with `user` and `as_of`.
            counted: Features of the other kinds of key, for `gather`.
        """
        names = self.config.features
        features = self.gather(counted, events.height, names)
        if USER in self.config.counts.keys:
            columns = [names.index(name) for name in self.config.key_features(USER)]
            user, time, as_of = (
                events[name].to_numpy() for name in ("user", "timestamp_ms", "as_of")
            )
            labels = counted_labels(events, self.config)
            features[:, columns] = self.count_key(user, time, labels, as_of)
        return features
