"""What every raw log layout gives to `pipelines/data/prepare.py`: blocks of events, rejects, and items."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass, is_dataclass
from fnmatch import fnmatchcase
from typing import Any

import pyarrow as pa
from pyarrow import fs

from models.tables import UserError, open_uri
from pipelines.data.tables import events_schema

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


class Source(ABC):
    """A raw log layout with its configuration. Instances are small and picklable; they read nothing
    until asked, so Ray tasks may carry them."""

    @property
    @abstractmethod
    def info(self) -> dict[str, Any]:
        """`labels` {name: bool | float32}, `numbers` [name], `categories` [name], and `clock`: whether
        timestamps are clock times (else `timestamp_ms` is an ordinal)."""

    @property
    def schema(self) -> pa.Schema:
        """Schema of the events, without `log_row`."""
        info = self.info
        return events_schema(info["labels"], info["numbers"], info["categories"])

    @property
    def block_schema(self) -> pa.Schema:
        """Schema of `Block.events`."""
        return self.schema.append(LOG_ROW)

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as plain values, for fingerprints and manifests."""
        if not is_dataclass(self):
            raise TypeError(f"{type(self).__name__} is not a dataclass; give it its own `config`")
        return {"layout": type(self).__name__, **asdict(self)}

    @property
    @abstractmethod
    def items_columns(self) -> tuple[list[str], list[str]]:
        """Names of the item table's texts and attributes, without the `text_` and `cat_` prefixes."""

    @property
    def items_numbers(self) -> list[str]:
        """Names of the item table's numbers, without the `num_` prefix."""
        return []

    @abstractmethod
    def event_files(self, input_uri: str) -> list[str]:
        """Raw event files relative to the input folder, sorted. UserError if there is none."""

    @abstractmethod
    def read_events(self, input_uri: str, file: str) -> Iterator[Block]:
        """Streams one file as bounded blocks, in the file's order. UserError if the file as a whole
        cannot be read: a missing column, a wrong format, an empty or truncated file."""

    def user_files(self, input_uri: str) -> list[str]:
        """Raw files about users that `read_events` reads beside each event file; empty if the layout has none."""
        return []

    @abstractmethod
    def item_files(self, input_uri: str) -> list[str]:
        """Raw item files relative to the input folder, sorted; empty if the layout has none."""

    @abstractmethod
    def read_items(self, input_uri: str, file: str) -> Iterator[pa.Table]:
        """Streams one item file: `item_id`, then `text_*` and `cat_*`, all strings, and `num_*`, float32. Rows
        without an id are left out; an id may come more than once."""


def list_files(input_uri: str, pattern: str, *, required: bool, what: str) -> list[str]:
    """Files under the folder whose relative path matches the pattern (shell wildcards), sorted."""
    filesystem, root = open_uri(input_uri)
    try:
        infos = filesystem.get_file_info(fs.FileSelector(root, recursive=True))
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"the input folder {input_uri} cannot be read; check --input") from error
    names = (info.path[len(root) :].lstrip("/") for info in infos if info.type == fs.FileType.File)
    files = sorted(
        name
        for name in names
        if fnmatchcase(name, pattern) and not any(part.startswith((".", "_")) for part in name.split("/"))
    )
    if required and not files:
        raise UserError(f"{input_uri} holds no {what} like '{pattern}'; check --input and the source's file pattern")
    return files
