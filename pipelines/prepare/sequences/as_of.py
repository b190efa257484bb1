"""Features with times of their own, joined as of a request: the latest earlier row.

`python -m jobs.prepare` makes a table `as_of_NAME` for each section that a source file
declares in `as_of`, sorted by id and time. Requests and behaviours of `sequences` take
their values from it. Each task has the whole table in memory.

Shapes: E events, R rows of a table, T distinct times in it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa

from core.errors import UserError
from core.schemas import AsOfFeatures, AsOfInfo
from core.tables import Part, Table, write_part
from pipelines.prepare.events.columns import (
    Vocabulary,
    dictionary_column,
    encode_ids,
    sorted_unique,
)
from pipelines.prepare.executor import Shared
from pipelines.prepare.reading.log import Section
from pipelines.prepare.reading.rows import RejectCounts, check_missing, common_missing
from pipelines.prepare.run import Run

PREFIX = "as_of_"
"""Prefix of the names of the tables."""

BEFORE_ALL_MS = -(2**62)
"""A time before any event."""


def make_as_of_tables(run: Run) -> dict[str, Table[AsOfInfo]]:
    """Make the tables that the source declares, and return them by name."""
    return {
        f"{PREFIX}{name}": _make_table(run, name, section)
        for name, section in run.source.as_of.items()
    }


def _make_table(run: Run, name: str, section: Section) -> Table[AsOfInfo]:
    """Make the table of one section, unless it is up to date."""
    table = f"{PREFIX}{name}"
    files = section.list_files(run.input, "feature")
    settings = {"as_of": run.source.config["as_of"][name]}
    stamps = run.stamps(files)
    if finished := run.tables.find_finished(AsOfInfo, settings, {}, stamps, table):
        return finished
    uri = run.tables.table_uri(table)
    with run.tables.clean_up_on_error(table):
        call = (section, run.input, files, uri)
        [(_, written)] = run.executor.map_unordered(_write_table, [call])
        run.check_rejects(written.rejected, f" of {table}")
        if written.part is None:
            raise UserError(f"{run.input} has no valid row in {', '.join(files[:3])}")
        info = AsOfInfo(section.key, stamps)
        committed = run.tables.commit(
            table, section.schema, [written.part], settings, written.hashes, info
        )
    run.report(
        f"{table}: {committed.rows:,} rows; dropped {written.repeated:,} with the id "
        f"and time of a later row"
    )
    return committed


@dataclass(frozen=True)
class WrittenTable:
    """The part of a written table, and statistics of its files."""

    part: Part | None
    """The part, or None if no row is valid."""
    rejected: RejectCounts
    """Rows that were read and rejected."""
    repeated: int
    """Rows dropped because a later row has the same id and time."""
    hashes: dict[str, str]
    """Hash of the parsed bytes of each file."""


def _write_table(
    section: Section, input_uri: str, files: list[str], uri: str
) -> WrittenTable:
    """Read the files of a section, and write their rows sorted by id and time."""
    rejected = RejectCounts()
    hashes: dict[str, str] = {}
    missing = []
    blocks = [section.schema.empty_table()]
    for file in files:
        digest = hashlib.sha256()
        for block in section.read(input_uri, file, digest):
            rejected.add(RejectCounts.from_block(block))
            blocks.append(block.rows)
            missing.append(block.missing)
        hashes[file] = digest.hexdigest()
    check_missing(common_missing(missing), "feature", input_uri)
    rows = pl.DataFrame(pl.from_arrow(pa.concat_tables(blocks)))
    keys = [section.key, "timestamp_ms"]
    rows = rows.sort(keys, maintain_order=True)
    last = rows.unique(keys, keep="last", maintain_order=True)
    part = None
    if last.height:
        part = write_part(uri, last.to_arrow().cast(section.schema))
    return WrittenTable(part, rejected, rows.height - last.height, hashes)


@dataclass(frozen=True)
class AsOfTable:
    """A table of features with times, indexed for lookups.

    Rows are sorted by one int64 that combines id and time, so a lookup is a binary
    search.
    """

    name: str
    """Name of the table."""
    key: str
    """Column of events with the ids, `item_id` or `user_id`."""
    ids: Vocabulary
    """Indices of the ids."""
    times: np.ndarray
    """(T,) distinct times in ms, ascending."""
    sort_key: np.ndarray
    """(R,) ascending: index of the id * (T + 1) + rank of the time in `times`."""
    features: pa.Table
    """Features of the R rows."""

    @classmethod
    def from_rows(cls, name: str, rows: pa.Table, key: str) -> AsOfTable:
        """Build the index.

        Args:
            name: Name of the table.
            rows: Rows sorted by `key` and `timestamp_ms`.
            key: Column of the ids.
        """
        rows = rows.combine_chunks()
        # rows are sorted by id, so codes ascend
        ids = rows[key].combine_chunks().dictionary_encode()
        time = rows["timestamp_ms"].to_numpy()
        times = sorted_unique(time)
        code = ids.indices.to_numpy().astype(np.int64)
        sort_key = code * (len(times) + 1) + np.searchsorted(times, time)
        features = rows.drop_columns([key, "timestamp_ms"])
        return cls(
            name, key, Vocabulary.from_ids(ids.dictionary), times, sort_key, features
        )

    def latest_rows(self, events: pa.Table, at: np.ndarray) -> np.ndarray:
        """Return the latest earlier row (E,) of each event's id, or -1.

        Args:
            events: Rows of `read_part`.
            at: Times (E,) in ms; rows at this time or later are not returned.
        """
        code = encode_ids(dictionary_column(events, self.key), self.ids).astype(
            np.int64
        )
        first_key = code * (len(self.times) + 1)
        end_key = first_key + np.searchsorted(self.times, at)
        row = np.searchsorted(self.sort_key, end_key) - 1
        has_row = (code >= 0) & (row >= 0) & (self.sort_key[row] >= first_key)
        return np.where(has_row, row, -1)


def share_items(run: Run, columns: list[str]) -> list[Shared]:
    """Store item features for all tasks, as a table whose rows precede all events.

    Args:
        run: Log, settings and tables of this call of `prepare`.
        columns: Columns of `items`; without any, nothing is stored.
    """
    if not columns:
        return []
    items = run.tables.current("items").read(["item_id", *columns])
    items = items.sort_by("item_id")
    time = pa.repeat(pa.scalar(BEFORE_ALL_MS, pa.int64()), len(items))
    items = items.append_column("timestamp_ms", time)
    return [run.executor.put(AsOfTable.from_rows("items", items, "item_id"))]


def share_as_of(run: Run, tables: dict[str, Table[AsOfInfo]]) -> list[Shared]:
    """Store these tables for all tasks."""
    return [
        run.executor.put(AsOfTable.from_rows(name, table.read(), table.info.key))
        for name, table in tables.items()
    ]


def as_of_info(tables: dict[str, Table[AsOfInfo]]) -> dict[str, AsOfFeatures]:
    """Return the keys and features of these tables."""
    return {
        name: AsOfFeatures(
            table.info.key, [column["name"] for column in table.schema[2:]]
        )
        for name, table in tables.items()
    }


def join_as_of(
    events: pa.Table, at: np.ndarray, tables: Iterable[AsOfTable], count: Counter[str]
) -> pa.Table:
    """Join the features of tables to events.

    Args:
        events: Rows of `read_part`.
        at: Times (E,) in ms as of which features are taken.
        tables: Tables to join.
        count: Counter that the numbers of events without an earlier row, whose features
            are null, are added to, by table, in place.
    """
    for table in tables:
        row = table.latest_rows(events, at)
        count[f"nothing_of_{table.name}"] += int((row < 0).sum())
        features = table.features.take(pa.array(row, mask=row < 0))
        for name in features.column_names:
            events = events.append_column(name, features[name])
    return events


def report_missing(
    run: Run,
    tables: dict[str, Table[AsOfInfo]],
    num_events: int,
    count: Counter[str],
) -> None:
    """Report how many events have no earlier row in each table.

    Args:
        run: Log, settings and tables of this call of `prepare`.
        tables: The tables, by name.
        num_events: Number of events of the log.
        count: Counts of `join_as_of` over all parts.
    """
    for name in tables:
        num_missing = count[f"nothing_of_{name}"]
        if num_missing == num_events:
            raise UserError(
                f"{name} has no row before any of the {num_events:,} events"
            )
        if num_missing:
            run.report(
                f"{name}: {num_missing:,} of {num_events:,} events "
                f"({num_missing / num_events:.1%}) have no earlier row"
            )


def as_of_schema(sections: Sequence[Section]) -> pa.Schema:
    """Return the schema of the features of all sections."""
    features = (section.features for section in sections)
    return pa.schema(list(itertools.chain.from_iterable(features)))
