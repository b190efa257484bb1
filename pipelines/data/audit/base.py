"""What the rules of the audit share: a rule and its findings, the tables, which are read whole, and counts in time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import polars as pl

from models.tables import Manifest, UserError, join, read_manifest, read_parquet

SHOWN = 3
"""Offending rows named per rule."""

DAY, MINUTE = 86_400_000, 60_000

EVENT_ORDER = ["timestamp_ms", "request_id", "position", "item_id"]
SPLITS = ["train", "val", "test"]

COLUMNS = {
    "events": ("user_id", "request_id", "timestamp_ms", "item_id", "query", "position"),
    "items": ("item_index", "item_id"),
    "sequences": ("user_id", "item_index", "timestamp_ms"),
}
"""Columns that the rules of all kinds read."""


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
    checked: bool = True
    """False where an earlier rule made this one impossible to check."""

    def broken(self, example: str, violations: int = 1) -> None:
        """Adds violations and names one of them."""
        self.violations += violations
        self.examples += [example][: SHOWN - len(self.examples)]

    def remark(self, note: str) -> None:
        """Adds a note."""
        self.note = f"{self.note}; {note}" if self.note else note

    def broken_rows(self, rows: pl.DataFrame, say: str, **more: Any) -> None:
        """Adds one violation per row of `rows`; `say`, with columns and `more` in braces, names a row."""
        self.violations += rows.height
        first = rows.head(SHOWN - len(self.examples)).iter_rows(named=True)
        self.examples += [say.format(**row, **more) for row in first]


@dataclass(frozen=True)
class KindRules:
    """The rules on the tables of one kind of request."""

    columns: Mapping[str, tuple[str, ...]]
    """By table the columns that its rules read, beside those of all kinds (`COLUMNS`)."""
    check: Callable[[Any, dict[str, Rule], pl.DataFrame], pl.DataFrame]
    """`check(tables, rules, core_users)`: the rules on sequences, given the users (`user_id`) that the k-core keeps.
    Returns those that must be in sequences."""
    without: tuple[str, ...] = ()
    """Rules of the audit that there is nothing to check for on such tables."""
    all_shown: bool = False
    """Whether all that was shown makes the catalogue, and not the behaviours alone."""


@dataclass
class Tables:
    """The audited tables."""

    uri: str
    """The folder that holds the tables."""
    manifests: dict[str, Manifest]
    """By table."""
    kind: KindRules
    """The rules of their kind of request."""

    @classmethod
    def open(cls, uri: str, kinds: Mapping[str, KindRules]) -> Tables:
        """Raises UserError where one of them is not a table, or they do not fit each other."""
        manifests = {name: read_manifest(join(uri, name), name) for name in ("events", "items", "sequences")}
        name = manifests["sequences"].info["kind"]
        if name not in kinds:
            raise UserError(f"{uri} holds sequences of kind '{name}', which is none of {', '.join(kinds)}")
        own = {*kinds[name].columns, *(manifests["sequences"].info.get("as_of") or {})} - manifests.keys()
        manifests |= {table: read_manifest(join(uri, table)) for table in sorted(own)}
        tables = cls(uri, manifests, kinds[name])
        if tables.behaviour and tables.behaviour not in tables.event_columns:
            raise UserError(
                f"sequences in {uri} hold the events with {tables.behaviour}, a column that events do not have; make "
                f"the tables again with --overwrite"
            )
        return tables

    def read(self, table: str) -> pl.DataFrame:
        """All rows of a table, with the number of their `part`."""
        files = self.manifests[table].files
        parts = [read_parquet(join(self.uri, table, part.path), None, part.sha256) for part in files]
        if not parts:
            raise UserError(f"{join(self.uri, table)} lists no {table}; make the tables again")
        return pl.concat(
            pl.DataFrame(pl.from_arrow(part)).with_columns(part=pl.lit(number, pl.Int32))
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
    def clock(self) -> bool | None:
        """Whether events have clock times."""
        return self.manifests["events"].info.get("clock")

    @property
    def behaviour(self) -> str | None:
        """The bool label that makes an event a behaviour; None where every event is one."""
        name = self.info.get("behaviour") or self.manifests["sequences"].config.get("behaviour")
        return f"label_{name}" if name else None

    @property
    def known(self) -> str:
        """The column of events that says from when on a behaviour is known: its label's where events have one."""
        own = (self.behaviour or "").replace("label_", "known_", 1)
        return own if own in self.event_columns else "timestamp_ms"

    @property
    def order_of_log(self) -> bool:
        """Whether tied behaviours keep the log's order (`ties: log_order`)."""
        return bool(self.info.get("ties", "strict") == "log_order")

    @property
    def event_order(self) -> list[str]:
        """What a user's events are sorted by; in the log's order `position` counts all events of a time."""
        return [name for name in EVENT_ORDER if name != "request_id" or not self.order_of_log]

    @property
    def most(self) -> int:
        """Behaviours of a user that are kept."""
        return int(self.info.get("max_events") or 2**31)

    def behaviours_of(self, events: pl.DataFrame) -> pl.DataFrame:
        """The events that count as behaviours."""
        return events if self.behaviour is None else events.filter(pl.col(self.behaviour).fill_null(False))


EVENT, REQUEST = "user {user_id}, item {item_id} at {timestamp_ms}", "user {user_id}, request {place}"
"""How messages name an event and a request."""


def sums_before(points: pl.DataFrame, counted: pl.DataFrame, keys: list[str], time: str, shift: int) -> pl.DataFrame:
    """Per row of `points`, in their order: the sums of the other columns of `counted` over its rows of the same `keys`
    whose `time` is strictly before the point's `at` less `shift`."""
    names = [name for name in counted.columns if name not in (*keys, time)]
    along = counted.drop_nulls(keys).group_by(*keys, time).agg(pl.col(names).sum()).sort(time)
    along = along.with_columns(pl.col(names).cum_sum().over(keys))
    moved = points.select(*keys, at=pl.col("at") - shift).with_row_index("point").sort("at")
    found = moved.join_asof(
        along, left_on="at", right_on=time, by=keys, allow_exact_matches=False, check_sortedness=False
    )
    return found.sort("point").select(pl.col(names).fill_null(0))
