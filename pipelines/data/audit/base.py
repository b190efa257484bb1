"""What the rules of the audit share: a rule and its findings, the tables, which are read whole, and counts in time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import polars as pl

from models.storage.tables import Manifest, UserError, join, read_manifest, read_parquet

SHOWN = 3
"""Offending rows named per rule."""

DAY, MINUTE = 86_400_000, 60_000

EVENT_ORDER = ["timestamp_ms", "request_id", "position", "item_id"]
SPLITS = ["train", "val", "test"]


@dataclass
class Rule:
    """What one rule found."""

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
    """What lets the future in although it breaks nothing: a split or a core that was asked for."""

    def broken(self, example: str, violations: int = 1) -> None:
        """Adds violations and names one of them."""
        self.violations += violations
        self.examples += [example][: SHOWN - len(self.examples)]

    def broken_rows(self, rows: pl.DataFrame, say: str, **more: Any) -> None:
        """Adds one violation per row of `rows`; `say`, with columns and `more` in braces, names a row."""
        self.violations += rows.height
        first = rows.head(SHOWN - len(self.examples)).iter_rows(named=True)
        self.examples += [say.format(**row, **more) for row in first]


@dataclass
class Tables:
    """The audited tables."""

    uri: str
    """The folder that holds the tables."""
    manifests: dict[str, Manifest]
    """By table."""
    all_shown: bool
    """Whether all that was shown makes the catalogue, and not the behaviours alone."""

    @classmethod
    def open(cls, uri: str, all_shown: bool) -> Tables:
        """Sequences under `uri` and what they were made from. UserError where one of them is no table."""
        sequences = read_manifest(join(uri, "sequences"), "sequences")
        names = dict.fromkeys(("events", "items", *sequences.inputs))
        return cls(
            uri,
            {
                **{name: read_manifest(join(uri, name)) for name in names},
                "sequences": sequences,
            },
            all_shown,
        )

    def read(self, table: str) -> pl.DataFrame:
        """All rows of a table, with the number of their `part`."""
        files = self.manifests[table].files
        parts = [
            read_parquet(join(self.uri, table, part.path), None, part.sha256)
            for part in files
        ]
        if not parts:
            raise UserError(
                f"{join(self.uri, table)} lists no {table}; make the tables again"
            )
        return pl.concat(
            pl.DataFrame(pl.from_arrow(part)).with_columns(
                part=pl.lit(number, pl.Int32)
            )
            for number, part in enumerate(parts)
        )

    @cached_property
    def events(self) -> pl.DataFrame:
        return self.read("events")

    @cached_property
    def items(self) -> pl.DataFrame:
        return self.read("items")

    @cached_property
    def catalogue(self) -> pl.DataFrame:
        """`item_index` and `item_id` of all items."""
        return self.items.select("item_index", "item_id")

    @cached_property
    def sequences(self) -> pl.DataFrame:
        """The rows of sequences, with their number as `row`."""
        return self.read("sequences").drop("part").with_row_index("row")

    @cached_property
    def users_events(self) -> pl.DataFrame:
        """The events of the users of sequences, each with the `row` of its user."""
        return self.events.drop("part").join(
            self.sequences.select("user_id", "row"), on="user_id", maintain_order="left"
        )

    @property
    def info(self) -> dict[str, Any]:
        """What the manifest of sequences says."""
        return self.manifests["sequences"].info

    @property
    def event_columns(self) -> set[str]:
        return {column["name"] for column in self.manifests["events"].schema}

    @property
    def behaviour(self) -> str | None:
        """The bool label that makes an event a behaviour; None where every event is one."""
        name = self.info.get("behaviour")
        return f"label_{name}" if name else None

    @property
    def known(self) -> str:
        """The column of events that says from when on a behaviour is known: its label's where events have one."""
        own = (self.behaviour or "").replace("label_", "known_", 1)
        return own if own in self.event_columns else "timestamp_ms"

    @property
    def order_of_log(self) -> bool:
        """Whether tied behaviours keep the log's order (`ties: log_order`)."""
        return bool(self.info["ties"] == "log_order")

    @property
    def event_order(self) -> list[str]:
        """What a user's events are sorted by; in the log's order `position` counts all events of a time."""
        return [
            name
            for name in EVENT_ORDER
            if name != "request_id" or not self.order_of_log
        ]

    def behaviours_of(self, events: pl.DataFrame) -> pl.DataFrame:
        """The events that count as behaviours."""
        return (
            events
            if self.behaviour is None
            else events.filter(pl.col(self.behaviour).fill_null(False))
        )


EVENT, REQUEST = (
    "user {user_id}, item {item_id} at {timestamp_ms}",
    "user {user_id}, request {place}",
)
"""How messages name an event and a request."""


def before(
    points: pl.DataFrame, rows: pl.DataFrame, keys: list[str], shift: int, time: str
) -> pl.DataFrame:
    """Per row of `points`, in their order: the other columns of the latest of `rows` of the same `keys` whose `time` is
    strictly before the point's `at` less `shift`."""
    moved = (
        points.select(*keys, __at=pl.col("at") - shift)
        .with_row_index("__point")
        .sort("__at")
    )
    found = moved.join_asof(
        rows.sort(time),
        left_on="__at",
        right_on=time,
        by=keys,
        allow_exact_matches=False,
        check_sortedness=False,
    )
    return found.sort("__point").select(
        name for name in rows.columns if name not in (*keys, time)
    )


def sums_before(
    points: pl.DataFrame, counted: pl.DataFrame, keys: list[str], shift: int, time: str
) -> pl.DataFrame:
    """As `before`, the sums of the other columns of `counted` over all such rows."""
    names = [name for name in counted.columns if name not in (*keys, time)]
    along = (
        counted.drop_nulls(keys)
        .group_by(*keys, time)
        .agg(pl.col(names).sum())
        .sort(time)
    )
    return before(
        points,
        along.with_columns(pl.col(names).cum_sum().over(keys)),
        keys,
        shift,
        time,
    ).fill_null(0)


def counts_in(
    points: pl.DataFrame,
    counted: pl.DataFrame,
    keys: list[str],
    days: list[float],
    delay: float,
) -> Iterator[tuple[str, pl.DataFrame]]:
    """Per window the sums of `counted` in [at - window, at - delay) of each point, and its name. delay: minutes"""
    until = sums_before(points, counted, keys, round(delay * MINUTE), "timestamp_ms")
    for length in days:
        yield (
            f"{length:g}d",
            until
            - sums_before(points, counted, keys, round(length * DAY), "timestamp_ms"),
        )
