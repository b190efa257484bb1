"""What the rules of the audit share: a rule and its findings, the tables and how parts are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import polars as pl

from models.tables import Manifest, UserError, join, read_manifest, read_parquet

SHOWN = 3
"""Offending rows named per rule."""

DAY = 86_400_000
FEW = 30
"""Requests of a split below which it is noted."""

EVENT_ORDER = ["timestamp_ms", "request_id", "position", "item_id"]
SPLITS = ["train", "val", "test"]

REQUIRED = {
    "events": {
        "user_id": "string",
        "request_id": "string",
        "timestamp_ms": "int64",
        "item_id": "string",
        "query": "string",
        "position": "int32",
    },
    "items": {"item_index": "int32", "item_id": "string"},
    "sequences": {
        "user_id": "string",
        "item_index": "list<item: int32>",
        "timestamp_ms": "list<item: int64>",
        "requests": "list<item: struct<timestamp_ms: int64, query: string, history_end: int32, split: string, "
        "candidates: list<item: int32>>>",
    },
}
"""Columns that the rules read, as pyarrow writes their types."""

SEARCH_REQUIRED = {
    **{name: columns for name, columns in REQUIRED.items() if name != "sequences"},
    "queries": {"query_index": "int32", "query": "string"},
    "sequences": {
        "user_id": "string",
        "item_index": "list<item: int32>",
        "timestamp_ms": "list<item: int64>",
        "query_index": "list<item: int32>",
        "position": "list<item: int32>",
    },
}
"""The same for a search log; the manifest lists the other columns of its sequences."""

ACTIONS_REQUIRED = {
    **{name: columns for name, columns in REQUIRED.items() if name != "sequences"},
    "sequences": {
        "user_id": "string",
        "item_index": "list<item: int32>",
        "timestamp_ms": "list<item: int64>",
        "train_end": "int32",
        "val_end": "int32",
    },
}
"""The same for a log of actions."""


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
class Tables:
    """Manifests of the audited tables, and how to read a part of one."""

    uri: str
    """The folder that holds `events`, `items` and `sequences`."""
    events: Manifest
    items: Manifest
    sequences: Manifest
    queries: Manifest | None = None
    """Of a search log only."""

    @classmethod
    def open(cls, uri: str) -> Tables:
        """Raises UserError where one of the three is not a table, or they do not fit each other."""
        tables = cls(uri, *(read_manifest(join(uri, name), name) for name in ("events", "items", "sequences")))
        if tables.search:
            tables = replace(tables, queries=read_manifest(join(uri, "queries"), "queries"))
        if tables.behaviour and tables.behaviour not in {column["name"] for column in tables.events.schema}:
            raise UserError(
                f"sequences in {uri} hold the events with {tables.behaviour}, a column that events do not have; make "
                f"the tables again with --overwrite"
            )
        return tables

    def manifest(self, table: str) -> Manifest:
        manifests = {"events": self.events, "items": self.items, "sequences": self.sequences}
        if self.queries is not None:
            manifests["queries"] = self.queries
        return manifests[table]

    @property
    def search(self) -> bool:
        """Whether sequences are those of a search log."""
        return bool(self.sequences.info.get("kind") == "search")

    @property
    def actions(self) -> bool:
        """Whether sequences are those of a log of actions."""
        return bool(self.sequences.info.get("kind") == "actions")

    @property
    def required(self) -> dict[str, dict[str, str]]:
        """Columns that the rules read, by table."""
        if self.actions:
            return ACTIONS_REQUIRED
        return SEARCH_REQUIRED if self.search else REQUIRED

    def part(self, table: str, number: int, columns: list[str] | None = None) -> pl.DataFrame:
        """Part `number` of `table`."""
        path = self.manifest(table).files[number].path
        frame = pl.from_arrow(read_parquet(join(self.uri, table, path), columns))
        assert isinstance(frame, pl.DataFrame)
        return frame

    def parts(self, table: str, columns: list[str] | None = None) -> Iterator[tuple[int, pl.DataFrame]]:
        """Every part of `table` with its number."""
        for number in range(len(self.manifest(table).files)):
            yield number, self.part(table, number, columns)

    @property
    def behaviour(self) -> str | None:
        """The bool label that makes an event a behaviour; None where every event is one."""
        name = self.sequences.info.get("behaviour") or self.sequences.config.get("behaviour")
        return f"label_{name}" if name else None

    @property
    def counted(self) -> str | None:
        """The label of the events that make the catalogue: in a search log, all that was shown."""
        return None if self.search else self.behaviour

    @property
    def known(self) -> str:
        """The column of events that says from when on a behaviour is known: its label's where events have one."""
        own = (self.behaviour or "").replace("label_", "known_", 1)
        return own if own in {column["name"] for column in self.events.schema} else "timestamp_ms"

    @property
    def order_of_log(self) -> bool:
        """Whether tied behaviours keep the log's order (`ties: log_order`)."""
        return bool(self.sequences.info.get("ties", "strict") == "log_order")

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


def count_before(points: pl.DataFrame, marks: pl.DataFrame, key: list[str], time: str) -> pl.DataFrame:
    """`points` with `count`: how many `marks` of the same `key` have a `time` strictly below the point's.

    Both are laid on one line in time, points before marks of the same time, and marks are counted along it.
    """
    line = pl.concat(
        [points.with_columns(mark=pl.lit(0, pl.Int64)), marks.select(*key, time, mark=pl.lit(1, pl.Int64))],
        how="diagonal",
    )
    counted = line.sort(*key, time, "mark").with_columns(count=pl.col("mark").cum_sum().over(key))
    return counted.filter(pl.col("mark") == 0).drop("mark")
