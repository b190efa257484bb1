"""Read the files of a log: events in blocks, and the rows of items, users and features.

for block in read_events(log, "raw", "log.csv"):
    block.rows, block.rejects
items = read_section(log.items, "raw", log.item_files("raw")).rows
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote

import polars as pl
import pyarrow as pa

from core.errors import UserError
from core.files import join
from pipelines.prepare.reading.log import AsOf, HistoryColumn, Log, Section
from pipelines.prepare.reading.read import ROW, FilePart, read_frames, root_columns
from pipelines.prepare.reading.rows import (
    Block,
    RejectCounts,
    Rows,
    as_text,
    check_missing,
    clean_ids,
    common_missing,
    evaluate,
    evaluate_list,
    split_rows,
)
from pipelines.prepare.reading.times import parse_iso_ms, parse_times

LOG_ROW = pa.field("log_row", pa.int64(), nullable=False)
MISSING_VALUES = {"request_id": "", "position": 0}
"""Values of columns that a log does not have. Other missing columns are null."""
# temporary columns of a frame while lists are exploded
ELEMENT, REQUEST, UNEQUAL, LIST = "__element", "__request", "__unequal", "__list"
TIME = "__time"


@dataclass(frozen=True)
class SectionRows:
    """The valid rows of the files of a section."""

    rows: pl.DataFrame
    rejected: RejectCounts
    hashes: dict[str, str]
    """Hash of the parsed bytes of each file."""


def read_section(section: Section, input_uri: str, files: list[str]) -> SectionRows:
    """Read files of a section, given relative to the input folder, in their order."""
    blocks = [pl.DataFrame(section.schema.empty_table())]
    hashes: dict[str, str] = {}
    missing: list[dict[str, str]] = []
    rejected = RejectCounts()
    for file in files:
        digest = hashlib.sha256()
        for block in read_section_file(section, input_uri, file, digest):
            blocks.append(pl.DataFrame(block.rows))
            rejected.add(RejectCounts.from_block(block))
            missing.append(block.missing)
        hashes[file] = digest.hexdigest()
    check_missing(common_missing(missing), section.key.removesuffix("_id"), input_uri)
    return SectionRows(pl.concat(blocks), rejected, hashes)


def read_users(log: Log, input_uri: str, files: list[str]) -> SectionRows | None:
    """Read user files, with one row per user; None if the log has none."""
    if log.users is None:
        return None
    read = read_section(log.users, input_uri, files)
    rows = read.rows.unique("user_id", keep="first", maintain_order=True)
    return replace(read, rows=rows)


def read_section_file(
    section: Section, input_uri: str, file: str, digest: Any = None
) -> Iterator[Block]:
    """Yield the rows of a file of a section in blocks."""
    uri = join(input_uri, file)
    for frame in read_frames(uri, section, section.columns.values(), digest):
        rows = Rows(frame.with_missing, section.columns, uri)
        rows.parse_ids(section.key)
        for name in section.schema.names[1:]:
            if isinstance(section, AsOf) and name == "timestamp_ms":
                rows.parse_time(name, section.time)
            elif name.startswith("num_"):
                rows.parse_number(name)
            else:
                rows.parse_text(name)
        yield rows.block(frame, file, None, section.schema)


def read_events(
    log: Log,
    input_uri: str,
    file: str,
    users: pl.DataFrame | None = None,
    piece: FilePart | None = None,
    piece_index: int = 0,
    digest: Any = None,
) -> Iterator[Block]:
    """Yield the events of a file, or of a piece of it, in bounded blocks.

    Events are in the order of the file. Their rows also have the column LOG_ROW,
    which ascends within the piece, after lists are exploded.

    Args:
        log: Mapping of the log.
        input_uri: Input folder.
        file: File, relative to the input folder.
        users: Rows of the user files, one per user, or None.
        piece: Part of the file; None for the whole file.
        piece_index: Index of the piece in the log, for times that are the
            order of rows.
        digest: Hash that is updated with the parsed bytes, or None.
    """
    uri, schema = join(input_uri, file), log.schema.append(LOG_ROW)
    parser = EventParser(log, uri, users, piece_index)
    # values of columns in the names of folders, such as `country=se`
    named = [folder.partition("=") for folder in file.split("/")[:-1]]
    folders = {
        key: None if value == "__HIVE_DEFAULT_PARTITION__" else unquote(value)
        for key, _, value in named
        if value
    }
    derived = [*log.explode, *folders]
    # names that `explode` gives, and that its lists do not read themselves
    exploded = {*log.explode}
    for text in log.lists:
        exploded -= {*root_columns(text, derived)}
    first_row = 0
    frames = read_frames(uri, log, [*log.lists, *log.columns.values()], digest, piece)
    for index, frame in enumerate(frames):
        missing = {n: hint for n, hint in frame.missing.items() if n not in derived}
        required = (log.user, log.item, log.sequence, log.event_time.column)
        for text in filter(None, (*required, *log.explode.values())):
            for name in root_columns(text, derived) if index == 0 else ():
                if name in missing:
                    raise UserError(f"{uri} has no column '{name}'; {missing[name]}")
        rows = frame.rows.drop(exploded & {*frame.rows.columns}).with_columns(
            *(pl.lit(None, pl.Null).alias(name) for name in missing),
            *(pl.lit(value, pl.String).alias(key) for key, value in folders.items()),
        )
        broken = frame.broken
        for events in parser.parse(rows):
            end_row = first_row + len(events.raw)
            events.values["log_row"] = pl.int_range(first_row, end_row, eager=True)
            part = replace(frame, broken=broken, missing=missing)
            yield events.block(part, file, piece, schema, MISSING_VALUES)
            first_row = end_row
            broken = []  # reported with the first block of the frame


@dataclass(frozen=True)
class EventParser:
    """Converts raw rows of a file to rows of events."""

    log: Log
    uri: str
    """File, for messages."""
    users: pl.DataFrame | None
    piece_index: int

    def parse(self, rows: pl.DataFrame) -> Iterator[Rows]:
        """Yield converted rows, one per event."""
        log = self.log
        if log.sequence:
            lists = evaluate_list(rows, log.sequence, "sequence", self.uri)
            yield from self._parse_lists(rows, lists, log.item, 0)
            return
        with_lists = self._add_lists(rows) if log.explode else rows
        for piece in split_rows(with_lists, next(iter(log.explode), None)):
            if log.explode:
                columns = [*log.explode, ELEMENT]
                piece = piece.explode(columns, empty_as_null=True, keep_nulls=True)
            yield self._parse_rows(piece)
        if log.history and len(rows):
            yield from self._parse_history(rows, log.history)

    def _parse_rows(self, piece: pl.DataFrame) -> Rows:
        """Convert raw rows, whose lists are exploded, to columns of events."""
        log = self.log
        rows = Rows(piece, log.columns, self.uri)
        rows.parse_ids("user_id")
        if log.explode:
            rows.reject(piece[UNEQUAL], f"{log.item}: lists of unequal length")
            rows.values["request_id"] = piece[REQUEST]
            rows.values["position"] = piece[ELEMENT].fill_null(0).cast(pl.Int32)
        rows.parse_ids("item_id")
        rows.parse_time("timestamp_ms", log.event_time, self.piece_index, past=True)
        if log.query:
            rows.parse_text("query")
        if log.request:
            rows.parse_ids("request_id")
        if log.position:
            rows.parse_integer("position")
        for name, label in log.labels.items():
            if label.type == "bool":
                rows.parse_flag(f"label_{name}")
            else:
                rows.parse_number(f"label_{name}", label.range)
            if label.is_late:
                rows.store_known_time(name, label.time, label.delay_minutes)
        for name in log.numbers:
            rows.parse_number(f"num_{name}")
        for name in log.categories:
            rows.parse_text(f"cat_{name}")
        rows.join(self.users)
        return rows

    def _add_lists(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Add the lists to explode, their elements' positions, and request ids."""
        lists = {
            name: evaluate_list(rows, text, f"explode.{name}", self.uri)
            for name, text in self.log.explode.items()
        }
        lengths = pl.DataFrame(
            {name: values.list.len().fill_null(0) for name, values in lists.items()}
        )
        is_unequal = lengths.select(~pl.all_horizontal(pl.all() == pl.nth(0)))
        first_length = lengths.to_series(0)
        is_usable = ~is_unequal.to_series() & (first_length > 0)
        positions = pl.int_ranges(0, first_length, dtype=pl.Int32, eager=True)
        names = sorted(name for name in rows.columns if name != ROW)
        content = pl.DataFrame([as_text(rows[name]).alias(name) for name in names])
        request = content.hash_rows(seed=0).map_elements("{:016x}".format, pl.String)
        usable = {
            name: pl.when(is_usable).then(values)
            for name, values in {**lists, ELEMENT: positions}.items()
        }
        extra = {REQUEST: request, UNEQUAL: is_unequal.to_series()}
        return rows.with_columns(**usable, **extra)

    def _parse_history(
        self, rows: pl.DataFrame, history: HistoryColumn
    ) -> Iterator[Rows]:
        """Yield the earlier behaviours in the rows, one row each."""
        log, time = self.log, self.log.event_time
        columns = {"user": log.user, "time": str(time.column)}
        values, _ = evaluate(rows, columns, self.uri)
        row_time, time_error = parse_times(values["time"], time, "")
        user = clean_ids(values["user"])
        lists = evaluate_list(rows, history.column, "history.column", self.uri)
        lists = lists.cast(pl.List(pl.String))
        rows = rows.with_columns(
            user.alias(REQUEST), row_time.alias(TIME), lists.alias(LIST)
        )
        is_valid = time_error.is_null() & user.is_not_null() & (lists.list.len() > 0)
        rows = rows.filter(is_valid).sort(TIME, maintain_order=True)
        rows = rows.unique([REQUEST, LIST], keep="first", maintain_order=True).sort(ROW)
        begin = parse_iso_ms(history.at) or 0
        for events in self._parse_lists(rows, rows[LIST], None, begin):
            moment = events.values["timestamp_ms"]
            for name in history.labels or ():
                is_set = pl.repeat(True, len(events.raw), eager=True)
                events.values[f"label_{name}"] = is_set
                if log.labels[name].is_late:
                    events.values[f"known_{name}"] = moment
            events.reject(
                moment >= events.raw[TIME],
                f"{history.column}: not before its row, give an earlier history.at "
                f"than {history.at}",
            )
            yield events

    def _parse_lists(
        self, rows: pl.DataFrame, lists: pl.Series, last: str | None, begin: int
    ) -> Iterator[Rows]:
        """Yield the rows of events from lists of items, one row per item.

        Args:
            rows: Rows of the file.
            lists: Items of each row.
            last: Column or SQL expression of an item after the list, or None.
            begin: Time of the first item of each list.
        """
        items = lists.cast(pl.List(pl.String)).fill_null([])
        if last:
            evaluated, _ = evaluate(rows, {"last": last}, self.uri)
            last_item = clean_ids(evaluated["last"])
            with_last = pl.concat_list(items, last_item)
            joined = pl.when(last_item.is_null()).then(items).otherwise(with_last)
            items = pl.select(joined).to_series()
        index = pl.select(pl.int_ranges(0, items.list.len())).to_series()
        rows = rows.with_columns(items.alias(LIST), index.alias(ELEMENT))
        for piece in split_rows(rows, LIST):
            piece = piece.explode(LIST, ELEMENT, empty_as_null=True, keep_nulls=True)
            events = Rows(piece, {"user_id": self.log.user, "item_id": LIST}, self.uri)
            events.expressions["item_id"] = self.log.lists[0]  # for messages
            events.parse_ids("user_id")
            events.parse_ids(
                "item_id",
                "missing or empty; of text with blanks in a row split "
                "regexp_replace(..., '\\s+', ' ')",
            )
            events.values["timestamp_ms"] = piece[ELEMENT].fill_null(0) + begin
            events.join(self.users)
            yield events
