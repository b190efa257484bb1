"""What the rules of the audit share: a rule and its findings, the tables and how parts are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from models.tables import Manifest, UserError, join, read_manifest, read_parquet

SHOWN = 3
"""Offending rows named per rule."""

DAY = 86_400_000
FEW = 30
"""Requests of a split below which it is noted."""

EVENT_ORDER = ["timestamp_ms", "request_id", "position", "item_id"]
SPLITS = ["train", "val", "test"]

EVENTS = {
    "user_id": "string",
    "request_id": "string",
    "timestamp_ms": "int64",
    "item_id": "string",
    "query": "string",
    "position": "int32",
}
ITEMS = {"item_index": "int32", "item_id": "string"}
BEHAVIOURS = {"user_id": "string", "item_index": "list<item: int32>", "timestamp_ms": "list<item: int64>"}
"""Columns of events, items and sequences that the rules read, as pyarrow writes their types."""


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
    """What a reader should know although it breaks nothing."""
    checked: bool = True
    """False where an earlier rule made this one impossible to check."""

    def broken(self, violations: int, examples: list[str]) -> None:
        """Adds violations and names the first of them."""
        self.violations += violations
        self.examples += examples[: SHOWN - len(self.examples)]

    def remark(self, note: str) -> None:
        """Adds a note."""
        self.note = f"{self.note}; {note}" if self.note else note

    def broken_rows(self, rows: pl.DataFrame, say: Callable[[dict], str]) -> None:
        """Adds one violation per row of `rows`; `say` names a row."""
        self.broken(rows.height, [say(row) for row in rows.head(SHOWN).iter_rows(named=True)])


@dataclass(frozen=True)
class KindRules:
    """The rules on the tables of one kind of request."""

    required: dict[str, dict[str, str]]
    """Its tables and the columns that the rules read, as pyarrow writes their types."""
    check: Callable[[Any], pl.DataFrame]
    """Of a `Sequences` (`sequences.py`): the rules on that table. Returns the users that events give (`user`)."""
    without: tuple[str, ...] = ()
    """Rules of the audit that there is nothing to check for on such tables."""
    all_shown: bool = False
    """Whether all that was shown makes the catalogue, and not the behaviours alone."""


@dataclass(frozen=True)
class Tables:
    """Manifests of the audited tables, and how to read a part of one."""

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
        kind = kinds[name]
        manifests |= {
            name: read_manifest(join(uri, name), name) for name in kind.required if name not in manifests
        }  # fmt: skip
        tables = cls(uri, manifests, kind)
        if tables.behaviour and tables.behaviour not in {column["name"] for column in tables.events.schema}:
            raise UserError(
                f"sequences in {uri} hold the events with {tables.behaviour}, a column that events do not have; make "
                f"the tables again with --overwrite"
            )
        return tables

    @property
    def events(self) -> Manifest:
        return self.manifests["events"]

    @property
    def items(self) -> Manifest:
        return self.manifests["items"]

    @property
    def sequences(self) -> Manifest:
        return self.manifests["sequences"]

    def part(self, table: str, number: int, columns: list[str] | None = None) -> pl.DataFrame:
        """Part `number` of `table`."""
        path = self.manifests[table].files[number].path
        frame = pl.from_arrow(read_parquet(join(self.uri, table, path), columns))
        assert isinstance(frame, pl.DataFrame)
        return frame

    def parts(self, table: str, columns: list[str] | None = None) -> Iterator[tuple[int, pl.DataFrame]]:
        """Every part of `table` with its number."""
        for number in range(len(self.manifests[table].files)):
            yield number, self.part(table, number, columns)

    @property
    def behaviour(self) -> str | None:
        """The bool label that makes an event a behaviour; None where every event is one."""
        name = self.sequences.info.get("behaviour") or self.sequences.config.get("behaviour")
        return f"label_{name}" if name else None

    @property
    def counted(self) -> str | None:
        """The label of the events that make the catalogue; None where all that was shown does."""
        return None if self.kind.all_shown else self.behaviour

    @property
    def known(self) -> str:
        """The column of events that says from when on a behaviour is known: its label's where events have one."""
        own = (self.behaviour or "").replace("label_", "known_", 1)
        return own if own in {column["name"] for column in self.events.schema} else "timestamp_ms"

    @property
    def late_labels(self) -> bool:
        """Whether events have labels that are known later than they."""
        return any(column["name"].startswith("known_") for column in self.events.schema)

    @property
    def order_of_log(self) -> bool:
        """Whether tied behaviours keep the log's order (`ties: log_order`)."""
        return bool(self.sequences.info.get("ties", "strict") == "log_order")

    @property
    def event_order(self) -> list[str]:
        """What a user's events are sorted by; in the log's order `position` counts all events of a time."""
        return [name for name in EVENT_ORDER if name != "request_id" or not self.order_of_log]

    def behaviours_of(self, events: pl.DataFrame) -> pl.DataFrame:
        """The events that count as behaviours."""
        return events if self.behaviour is None else events.filter(pl.col(self.behaviour).fill_null(False))


def label_of(behaviour: str | None) -> list[str]:
    """The label column as a list to read: empty where there is none."""
    return [behaviour] if behaviour else []


def name_event(row: dict) -> str:
    """An event in a message."""
    return f"user {row['user_id']}, item {row['item_id']} at {row['timestamp_ms']}"


def name_request(row: dict) -> str:
    """A request in a message."""
    return f"user {row['user_id']}, request {row['place']}"


def count_before(points: pl.DataFrame, counted: pl.DataFrame, key: list[str], time: str) -> pl.DataFrame:
    """`points` with `count`: how many rows of `counted` with the same `key` have a `time` strictly below the point's.

    Both are laid on one line in time, points before what is counted at the same time, and it is counted along it.
    """
    line = pl.concat(
        [points.with_columns(counts=pl.lit(0, pl.Int64)), counted.select(*key, time, counts=pl.lit(1, pl.Int64))],
        how="diagonal",
    )
    along = line.sort(*key, time, "counts").with_columns(count=pl.col("counts").cum_sum().over(key))
    return along.filter(pl.col("counts") == 0).drop("counts")
