"""Rules with their violations, the audited tables, and sums over windows of time.

In frames, `row` is the index of a user's row in `sequences`, and `index` the index of a
behaviour or request within its user's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl

from core.settings import ActionCounts, SearchCounts
from core.tables import Table

MAX_EXAMPLES = 3
"""Maximum number of violations that are described per rule."""

MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS

EVENT_ORDER = ["timestamp_ms", "request_id", "position", "item_id"]
SPLITS = ["train", "val", "test"]

EVENT = "user {user_id}, item {item_id} at {timestamp_ms}"
"""Template of an event in messages."""

REQUEST = "user {user_id}, request {index}"
"""Template of a request in messages."""


@dataclass
class Rule:
    """A rule of the audit, and its violations."""

    name: str
    """Short name, such as `history`."""
    holds: str
    """The condition that must hold, in one line."""
    rows: int = 0
    """Number of rows checked."""
    violations: int = 0
    """Number of rows that break the rule."""
    examples: list[str] = field(default_factory=list)
    """Descriptions of the first violations, one line each."""
    note: str = ""
    """Warning about a setting of the tables that leaks the future although no rule is
    broken: the rule of the split, or the core of the whole log."""

    def add_violation(self, example: str, violations: int = 1) -> None:
        """Add `violations` rows, with a description of one of them."""
        self.violations += violations
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(example)

    def add_rows(self, rows: pl.DataFrame, template: str, **values: Any) -> None:
        """Add one violation per row.

        Args:
            rows: Rows that break the rule.
            template: Format string of their descriptions; the columns of `rows` are its
                fields.
            **values: Further fields of the format string.
        """
        self.violations += rows.height
        first = rows.head(MAX_EXAMPLES - len(self.examples)).iter_rows(named=True)
        self.examples += [template.format(**row, **values) for row in first]


@dataclass
class Tables:
    """The audited tables, which are read into memory."""

    opened: dict[str, Table]
    """The tables, by name."""

    def read(self, table: str) -> pl.DataFrame:
        """Read all rows of a table."""
        return pl.DataFrame(self.opened[table].read())

    @cached_property
    def events(self) -> pl.DataFrame:
        """Rows of `events`, with the index of their `part`."""
        rows = [part.rows for part in self.opened["events"].files]
        part = np.repeat(np.arange(len(rows)), rows)
        return self.read("events").with_columns(part=part)

    @cached_property
    def items(self) -> pl.DataFrame:
        """Rows of `items`."""
        return self.read("items")

    @cached_property
    def catalogue(self) -> pl.DataFrame:
        """`item_index` and `item_id` of all items."""
        return self.items.select("item_index", "item_id")

    @cached_property
    def sequences(self) -> pl.DataFrame:
        """Rows of `sequences`, with their index as `row`."""
        return self.read("sequences").with_row_index("row")

    @cached_property
    def users_events(self) -> pl.DataFrame:
        """Events of users in `sequences`, with the `row` of their user."""
        return self.with_user_rows(self.events.drop("part"))

    def with_user_rows(self, events: pl.DataFrame) -> pl.DataFrame:
        """Return the events of users in `sequences`, with the `row` of their user."""
        rows = self.sequences.select("user_id", "row")
        return events.join(rows, on="user_id", maintain_order="left")

    @cached_property
    def sessions(self) -> pl.DataFrame:
        """Behaviours of sessions: the rows of all `session_NAME`, in their order."""
        frames = [
            self.read(f"session_{name}").with_columns(session_type=pl.lit(name))
            for name in self.info.sessions
        ]
        return pl.concat(frames).with_row_index("session")

    @cached_property
    def core_events(self) -> pl.DataFrame:
        """`user_id` and `item_id` of the events in the k-core of the catalogue.

        Described items (`items_without_behaviours`) need no k events.
        """
        info = self.opened["items"].info
        behaviours = self.events
        if info.behaviour:
            behaviours = self.filter_behaviours(behaviours)
        core_window_events = behaviours
        if info.core_window == "train" and info.split.by == "temporal":
            known = self.known_time_column if info.behaviour else "timestamp_ms"
            core_window_events = behaviours.filter(
                pl.col(known) < info.split.val_start_ms
            )
        core = max(info.core, 1)
        is_core_item = pl.len().over("item_id") >= core
        if info.items_without_behaviours is not None:
            described = self.catalogue["item_id"].implode()
            is_core_item |= pl.col("item_id").is_in(described)
        core_events = core_window_events.select("user_id", "item_id")
        num_events = -1
        while core_events.height != num_events:  # the naive algorithm
            num_events = core_events.height
            core_events = core_events.filter(pl.len().over("user_id") >= core)
            core_events = core_events.filter(is_core_item)
        return core_events

    @property
    def info(self) -> Any:
        """`info` of the manifest of `sequences`, of the class of its kind."""
        return self.opened["sequences"].info

    @property
    def behaviour(self) -> str | None:
        """Column of the bool label that makes an event a behaviour; None if all do."""
        name = self.info.behaviour
        return f"label_{name}" if name else None

    @property
    def known_time_column(self) -> str:
        """Column of the time from which a behaviour is in histories.

        It is the time of the behaviour's label if events have one, else of the event.
        """
        column = (self.behaviour or "").replace("label_", "known_", 1)
        return column if column in self.events.columns else "timestamp_ms"

    @property
    def log_order(self) -> bool:
        """Whether behaviours at the same time keep the log's order (`ties`)."""
        return bool(self.info.ties == "log_order")

    @property
    def event_order(self) -> list[str]:
        """Columns that a user's events are sorted by.

        With `log_order`, `position` numbers all events at the same time, so the request
        id is not needed.
        """
        if self.log_order:
            return [name for name in EVENT_ORDER if name != "request_id"]
        return EVENT_ORDER

    def filter_behaviours(self, events: pl.DataFrame) -> pl.DataFrame:
        """Return the events that are behaviours."""
        if self.behaviour is None:
            return events
        return events.filter(pl.col(self.behaviour).fill_null(False))


def latest_before(
    points: pl.DataFrame, rows: pl.DataFrame, keys: list[str], shift: int, time: str
) -> pl.DataFrame:
    """Look up the latest row strictly before `at` - `shift` for each point.

    Args:
        points: Columns `keys`, and the time `at` in ms.
        rows: Columns `keys`, `time` and the columns to look up.
        keys: Columns in which a point and its row are equal.
        shift: Offset in ms.
        time: Name of the rows' column with the time.

    Returns:
        The looked-up columns, one row per point in the order of the points; null
        without an earlier row.
    """
    shifted = points.select(*keys, __at=pl.col("at") - shift)
    latest = (
        shifted.with_row_index("__point")
        .sort("__at")
        .join_asof(
            rows.sort(time),
            left_on="__at",
            right_on=time,
            by=keys,
            allow_exact_matches=False,
            check_sortedness=False,
        )
    )
    columns = [name for name in rows.columns if name not in (*keys, time)]
    return latest.sort("__point").select(columns)


def sums_before(
    points: pl.DataFrame, rows: pl.DataFrame, keys: list[str], shift: int, time: str
) -> pl.DataFrame:
    """Sum the rows strictly before `at` - `shift` for each point.

    Args:
        points: Columns `keys`, and the time `at` in ms.
        rows: Columns `keys`, `time` and the columns to sum.
        keys: Columns in which a point and its rows are equal.
        shift: Offset in ms.
        time: Name of the rows' column with the time.

    Returns:
        The sums, one row per point in the order of the points.
    """
    names = [name for name in rows.columns if name not in (*keys, time)]
    per_time = rows.drop_nulls(keys).group_by(*keys, time).agg(pl.col(names).sum())
    running = per_time.sort(time).with_columns(pl.col(names).cum_sum().over(keys))
    return latest_before(points, running, keys, shift, time).fill_null(0)


def window_features(
    points: pl.DataFrame,
    rows: pl.DataFrame,
    keys: list[str],
    name: str,
    settings: SearchCounts | ActionCounts,
    smoothing: tuple[float, float],
    rates: dict[str, str],
) -> dict[str, np.ndarray]:
    """Compute the counts of the rows in [at - window, at - delay), and their rates.

    Args:
        points: Columns `keys`, and the time `at` in ms.
        rows: Columns `keys`, `timestamp_ms`, and the columns to count: `exposures` and
            labels.
        keys: Columns in which a point and its rows are equal.
        name: Name of the kind of key, the first word of the features.
        settings: Lengths of the windows, and the delay of the labels.
        smoothing: Rate of a key without exposures, and its weight in exposures.
        rates: Label of each rate, by the rate's name.

    Returns:
        The features (points,), such as `item_exposures_7d`.
    """
    delay = round(settings.delay_minutes * MINUTE_MS)
    until = sums_before(points, rows, keys, delay, "timestamp_ms")
    prior, strength = smoothing
    features = {}
    for length in settings.windows_days:
        window = round(length * DAY_MS)
        sums = until - sums_before(points, rows, keys, window, "timestamp_ms")
        exposures = sums["exposures"].to_numpy() + strength
        for label in sums.columns:
            count = np.log1p(sums[label].to_numpy())
            features[f"{name}_{label}_{length:g}d"] = count
        for rate, label in rates.items():
            smoothed = sums[label].to_numpy() + prior * strength
            features[f"{name}_{rate}_{length:g}d"] = smoothed / exposures
    return features
