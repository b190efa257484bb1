"""What every raw log layout gives to `pipelines/data/prepare.py`: blocks of events, rejects, and items."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from fnmatch import fnmatchcase
from typing import Any

import pyarrow as pa
from pyarrow import fs

from models.tables import UserError, join, open_uri
from pipelines.data.sources.pieces import Piece
from pipelines.data.sources.readers import Reading, TextFormat, place_of
from pipelines.data.tables import OWN, events_schema

LOG_ROW = pa.field("log_row", pa.int64(), nullable=False)


@dataclass(frozen=True)
class Block:
    """A bounded piece of a raw log."""

    events: pa.Table
    """The source's `schema` and a last column `log_row`: the row number in the file, after lists are
    exploded; unique and increasing within the file."""
    rejects: pa.Table
    """Rows that break the schema, as `tables.REJECTS`."""
    rows_read: int
    """Rows read, after lists are exploded: events and rejects."""
    missing: dict[str, str] = field(default_factory=dict)
    """Wanted keys that no row here has, each with a hint at the nearest; a mistake if no block of the log has it."""


@dataclass(frozen=True)
class Metadata:
    """What item files, a bounded piece of one, or user files say."""

    rows: pa.Table
    """Rows that have an id."""
    rejects: pa.Table
    """Rows without one and lines that are no rows, as `tables.REJECTS`."""
    rows_read: int
    """Rows read: some of those with an id may be left out of `rows`, as repetitions."""
    missing: dict[str, str] = field(default_factory=dict)
    """As `Block.missing`."""


@dataclass
class Rejected:
    """How much of what was read was rejected, and why."""

    rows_read: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, tuple[str, int, str]] = field(default_factory=dict)
    """The first rejected row of each reason: file, row and source."""

    @classmethod
    def of(cls, block: Block | Metadata) -> Rejected:
        reasons = block.rejects["reason"].to_pylist()
        found = cls(block.rows_read, Counter(reasons))
        for reason in found.reasons:
            row = block.rejects.slice(reasons.index(reason), 1).to_pylist()[0]
            found.examples[reason] = row["file"], row["row"], row["source"][:200]
        return found

    def example(self, reason: str, input_uri: str, written: TextFormat | None) -> str:
        """The example of a reason in words; `written` is how its files are."""
        file, row, source = self.examples[reason]
        return f"{file} {place_of(join(input_uri, file), written, row)}: {source}"

    def add(self, other: Rejected) -> None:
        """Adds what `other` counts; the result does not depend on the order."""
        self.rows_read += other.rows_read
        self.reasons.update(other.reasons)
        for reason, example in other.examples.items():
            self.examples[reason] = min(example, self.examples.get(reason, example))


class Source(ABC):
    """A raw log layout with its configuration. Instances are small and picklable; they read nothing
    until asked, so Ray tasks may carry them."""

    @property
    @abstractmethod
    def info(self) -> dict[str, Any]:
        """`labels` {name: bool | float32}, `numbers` [name], `categories` [name], and `clock`: whether
        timestamps are clock times (else `timestamp_ms` is an ordinal). `known`, where there are some: the labels that
        are known later than their event, by name, and what says when."""

    @property
    def schema(self) -> pa.Schema:
        """Schema of the events, without `log_row`."""
        info = self.info
        return events_schema(info["labels"], info["numbers"], info["categories"], info.get("known", ()))

    @property
    def block_schema(self) -> pa.Schema:
        """Schema of `Block.events`."""
        return self.schema.append(LOG_ROW)

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as plain values, for fingerprints and manifests. What is at its default is left out, so
        that a key that comes later changes no fingerprint."""
        return {"layout": type(self).__name__, **_given(self)}

    @property
    def events_config(self) -> dict[str, Any]:
        """The part of `config` that the events depend on: without what says how item files are read."""
        return self.config

    @property
    @abstractmethod
    def origins(self) -> dict[str, dict[str, str]]:
        """For `events`, `items` and `users`: the columns that are read, each with what it is in the raw file."""

    def written(self, kind: str) -> TextFormat | None:
        """How the files of a key of `origins` are written; None for those without lines and rows."""
        return None

    @property
    def absent(self) -> frozenset[str]:
        """Those of `query`, `request_id` and `position` that no event of the log has: they need not travel. Null, ""
        and 0 stand for them."""
        return frozenset()

    @property
    @abstractmethod
    def items_columns(self) -> tuple[list[str], list[str]]:
        """Names of the item table's texts and attributes, without the `text_` and `cat_` prefixes."""

    @property
    def items_numbers(self) -> list[str]:
        """Names of the item table's numbers, without the `num_` prefix."""
        return []

    @property
    def keeps_all_items(self) -> bool:
        """Whether the catalogue holds every item of the item files, with events or without."""
        return False

    @property
    def tables_as_of(self) -> dict[str, Any]:
        """Tables of features with a time of their own, by name, each an `as_of.AsOf`; empty if the layout has none."""
        return {}

    @abstractmethod
    def event_files(self, input_uri: str) -> list[str]:
        """Raw event files relative to the input folder, sorted. UserError if there is none."""

    def reading_of(self, file: str) -> Reading | None:
        """How the rows of an event file are read, for a large one to be read in pieces; None: always as a whole."""
        return None

    @abstractmethod
    def read_events(
        self, input_uri: str, file: str, users: pa.Table | None = None, piece: Piece | None = None
    ) -> Iterator[Block]:
        """Streams one file, or a piece of it, as bounded blocks, in the file's order. UserError if the file as a whole
        cannot be read: a missing column, a wrong format, an empty or truncated file.

        users: the rows of `read_users`, so that they are read once for all event files; None: it reads them.
        """

    def user_files(self, input_uri: str) -> list[str]:
        """Raw files about users; empty if the layout has none."""
        return []

    def read_users(self, input_uri: str, beginning: bool = False) -> Metadata | None:
        """What the user files say, for `read_events`; None if the layout has none. `beginning`: of one file only."""
        return None

    @abstractmethod
    def item_files(self, input_uri: str) -> list[str]:
        """Raw item files relative to the input folder, sorted; empty if the layout has none."""

    @abstractmethod
    def read_items(self, input_uri: str, file: str) -> Iterator[Metadata]:
        """Streams one item file: `item_id`, then `text_*` and `cat_*`, all strings, and `num_*`, float32. An id
        may come more than once."""


def _given(value: Any) -> Any:
    """Of a dataclass the fields that are not at their default, as plain values, whatever it is in."""
    if isinstance(value, dict):
        return {key: _given(each) for key, each in value.items()}
    if not is_dataclass(value):
        return value
    own = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(value)}
    return {name: _given(each) for name, default in own.items() if (each := getattr(value, name)) != default}


def list_files(input_uri: str, pattern: str, *, required: bool, what: str) -> list[str]:
    """Files under the folder whose relative path matches the pattern (shell wildcards), sorted.

    Parts and manifests in folders beneath it are tables of ours, written with the output inside the input: they are
    skipped. An input folder that is itself a table is read.
    """
    filesystem, root = open_uri(input_uri)
    try:
        infos = filesystem.get_file_info(fs.FileSelector(root, recursive=True))
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"the input folder {input_uri} cannot be read; check --input") from error
    names = (info.path[len(root) :].lstrip("/") for info in infos if info.type == fs.FileType.File)
    files = sorted(
        name
        for name in names
        if fnmatchcase(name, pattern)
        and not any(part.startswith((".", "_")) for part in name.split("/"))
        and not ("/" in name and OWN.fullmatch(name.rsplit("/", 1)[1]))
    )
    if required and not files:
        raise UserError(f"{input_uri} holds no {what} like '{pattern}'; check --input and the source's file pattern")
    return files
