"""A rule and its findings, the audited tables, and counts in time.

`row` is the number of a user's row in `sequences`; `place` is the rank of a behaviour
or of a request within its user, from 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import polars as pl

from models.storage.tables import Manifest, UserError, join, read_manifest, read_parquet

MAX_EXAMPLES = 3
"""Offending rows that are named per rule."""

DAY_MS, HOUR_MS, MINUTE_MS = 86_400_000, 3_600_000, 60_000

EVENT_ORDER = ["timestamp_ms", "request_id", "position", "item_id"]
SPLITS = ["train", "val", "test"]

EVENT = "user {user_id}, item {item_id} at {timestamp_ms}"
"""Name of an event in messages."""

REQUEST = "user {user_id}, request {place}"
"""Name of a request in messages."""


@dataclass
class Rule:
    """A rule of the audit and its findings."""

    name: str
    """Short name, such as `history`."""
    holds: str
    """What must hold, in one line."""
    rows: int = 0
    """Rows checked."""
    violations: int = 0
    """Rows that break the rule."""
    examples: list[str] = field(default_factory=list)
    """The first offenders, one line each."""
    note: str = ""
    """A setting that lets the future in although it breaks no rule: a split or a core
    that was asked for."""

    def add_violation(self, example: str, violations: int = 1) -> None:
        """Add violations and the description of one of them."""
        self.violations += violations
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(example)

    def add_rows(self, rows: pl.DataFrame, template: str, **values: Any) -> None:
        """Add one violation per row of `rows`. `template` has their columns, and `values`, in braces."""
        self.violations += rows.height
        first = rows.head(MAX_EXAMPLES - len(self.examples)).iter_rows(named=True)
        self.examples += [template.format(**row, **values) for row in first]


@dataclass
class Tables:
    """The audited tables. They are read whole."""

    uri: str
    """The folder that holds the tables."""
    manifests: dict[str, Manifest]
    """Manifests by table."""
    all_shown: bool
    """Whether all events make the catalogue, not the behaviours alone."""

    @classmethod
    def open(cls, uri: str, all_shown: bool) -> Tables:
        """Open the sequences under `uri` and the tables that they were made from.

        Raises:
            UserError: if one of them is no table.
        """
        sequences = read_manifest(join(uri, "sequences"), "sequences")
        names = dict.fromkeys(("events", "items", *sequences.inputs))
        manifests = {name: read_manifest(join(uri, name)) for name in names}
        return cls(uri, {**manifests, "sequences": sequences}, all_shown)

    def read(self, table: str) -> pl.DataFrame:
        """Read all rows of a table, with the number of their `part`."""
        frames = []
        for number, part in enumerate(self.manifests[table].files):
            rows = read_parquet(join(self.uri, table, part.path), None, part.sha256)
            frame = pl.DataFrame(pl.from_arrow(rows))
            frames.append(frame.with_columns(part=pl.lit(number, pl.Int32)))
        if not frames:
            raise UserError(
                f"{join(self.uri, table)} lists no {table}; make the tables again"
            )
        return pl.concat(frames)

    @cached_property
    def events(self) -> pl.DataFrame:
        """Rows of `events`, with their `part`."""
        return self.read("events")

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
        """Rows of `sequences`, with their number as `row`."""
        return self.read("sequences").drop("part").with_row_index("row")

    @cached_property
    def users_events(self) -> pl.DataFrame:
        """Events of the users of sequences, each with the `row` of its user."""
        return self.with_user_rows(self.events.drop("part"))

    def with_user_rows(self, events: pl.DataFrame) -> pl.DataFrame:
        """Return the events of the users of sequences, each with the `row` of its user."""
        rows = self.sequences.select("user_id", "row")
        return events.join(rows, on="user_id", maintain_order="left")

    @property
    def info(self) -> dict[str, Any]:
        """`info` of the manifest of sequences."""
        return self.manifests["sequences"].info

    @property
    def event_columns(self) -> set[str]:
        """Names of the columns of events."""
        return {column["name"] for column in self.manifests["events"].schema}

    @property
    def behaviour(self) -> str | None:
        """Column of the bool label that makes an event a behaviour; None if every event is one."""
        name = self.info.get("behaviour")
        return f"label_{name}" if name else None

    @property
    def known(self) -> str:
        """Column of the time from which a behaviour is visible: its label's time where events have one."""
        column = (self.behaviour or "").replace("label_", "known_", 1)
        return column if column in self.event_columns else "timestamp_ms"

    @property
    def log_order(self) -> bool:
        """Whether tied behaviours keep the log's order (`ties: log_order`)."""
        return bool(self.info["ties"] == "log_order")

    @property
    def event_order(self) -> list[str]:
        """Columns that a user's events are sorted by; in the log's order `position` counts all events of a time."""
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
    """Return for each point, in their order, the other columns of the latest row before it.

    Args:
        points: Columns `keys` and `at`.
        rows: Columns `keys`, `time` and others.
        keys: Columns in which a point and its row are equal.
        shift: The row is strictly before `at` - `shift`.
        time: Column of the rows' time.
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
    others = [name for name in rows.columns if name not in (*keys, time)]
    return latest.sort("__point").select(others)


def sums_before(
    points: pl.DataFrame, rows: pl.DataFrame, keys: list[str], shift: int, time: str
) -> pl.DataFrame:
    """Return for each point, in their order, the sums of the other columns over all rows before it.

    Arguments are those of `latest_before`.
    """
    names = [name for name in rows.columns if name not in (*keys, time)]
    per_time = rows.drop_nulls(keys).group_by(*keys, time).agg(pl.col(names).sum())
    running = per_time.sort(time).with_columns(pl.col(names).cum_sum().over(keys))
    return latest_before(points, running, keys, shift, time).fill_null(0)


def window_sums(
    points: pl.DataFrame,
    rows: pl.DataFrame,
    keys: list[str],
    days: list[float],
    delay_minutes: float,
) -> Iterator[tuple[str, pl.DataFrame]]:
    """Yield for each window its name and the sums of `rows` in [at - window, at - delay) of each point.

    Args:
        points: Columns `keys` and `at`.
        rows: Columns `keys`, `timestamp_ms` and the columns to add up.
        keys: Columns in which a point and its rows are equal.
        days: Lengths of the windows.
        delay_minutes: The delay.
    """
    delay = round(delay_minutes * MINUTE_MS)
    until = sums_before(points, rows, keys, delay, "timestamp_ms")
    for length in days:
        window = round(length * DAY_MS)
        since = sums_before(points, rows, keys, window, "timestamp_ms")
        yield f"{length:g}d", until - since
