"""Features with a time of their own, joined as of a request: the latest row strictly before it.

`python -m jobs.prepare` makes a table `as_of_NAME` of each section that a source file
declares (`as_of`), sorted by id and time. Requests and behaviours of sequences take
their values from it. A task holds the table whole.

Shapes: E events, R rows of a table, T distinct times of it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from models.storage.tables import Manifest, Part, UserError, write_part
from pipelines.data.engine import Shared
from pipelines.data.events.columns import (
    Vocabulary,
    dictionary_column,
    index_in,
    sorted_unique,
)
from pipelines.data.reading.log import Section
from pipelines.data.reading.rows import RejectCounts, check_missing, common_missing
from pipelines.data.run import Run

PREFIX = "as_of_"
"""Prefix of the names of the tables."""

BEFORE_ALL_MS = -(2**62)
"""A time before any event."""


def make_as_of_tables(run: Run) -> dict[str, Manifest]:
    """Make the tables that the source declares. Return their manifests by table name."""
    return {
        f"{PREFIX}{name}": _make_table(run, name, section)
        for name, section in run.source.as_of.items()
    }


def _make_table(run: Run, name: str, section: Section) -> Manifest:
    table, files = f"{PREFIX}{name}", section.list_files(run.input, "feature")
    settings = {"as_of": run.source.config["as_of"][name]}
    stamps = run.stamps(files)
    if finished := run.tables.find_finished(table, settings, {}, stamps):
        return finished
    uri = run.tables.table_uri(table)
    with run.tables.clean_up_on_error(table):
        call = (section, run.input, files, uri)
        [(_, written)] = run.engine.map_unordered(_write_table, [call])
        run.check_rejects(written.rejected, f" of {table}")
        if written.part is None:
            raise UserError(
                f"{run.input} holds no valid row in {', '.join(files[:3])}; correct as_of.{name}"
            )
        info = {
            "key": section.key,
            "stamps": stamps,
            "rows_read": written.rejected.rows_read,
            "reject_reasons": dict(sorted(written.rejected.reasons.items())),
            "repeated": written.repeated,
        }
        manifest = run.tables.commit(
            table, section.schema, [written.part], settings, written.hashes, info
        )
    run.report(
        f"{table}: {manifest.rows:,} rows; {written.repeated:,} others have the id and the time of a later one"
    )
    return manifest


@dataclass(frozen=True)
class WrittenTable:
    """The one part of a table that was written."""

    part: Part | None
    """None if no row is valid."""
    rejected: RejectCounts
    repeated: int
    """Rows left out because a later row of the log has their id and time."""
    hashes: dict[str, str]
    """Hash of the parsed bytes by file."""


def _write_table(
    section: Section, input_uri: str, files: list[str], uri: str
) -> WrittenTable:
    """Read the files and write one part, sorted by id and time."""
    rejected, hashes, missing = RejectCounts(), {}, []
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
    """A table of features with times, ready for lookups."""

    name: str
    """Name of the table."""
    key: str
    """Column of events that its ids belong to."""
    ids: Vocabulary
    times: np.ndarray
    """(T,) ms, ascending."""
    line: np.ndarray
    """(R,) ascending: integer of the id times T + 1, plus the rank of the time."""
    features: pa.Table
    """(R,) in that order."""

    @classmethod
    def from_rows(cls, name: str, rows: pa.Table, key: str) -> AsOfTable:
        """Build the table from rows sorted by id and time."""
        rows = rows.combine_chunks()
        # Rows are sorted by id, so codes ascend.
        ids = rows[key].combine_chunks().dictionary_encode()
        time = rows["timestamp_ms"].to_numpy()
        times = sorted_unique(time)
        code = ids.indices.to_numpy().astype(np.int64)
        line = code * (len(times) + 1) + np.searchsorted(times, time)
        features = rows.drop_columns([key, "timestamp_ms"])
        return cls(
            name, key, Vocabulary.from_ids(ids.dictionary), times, line, features
        )

    def latest_rows(self, events: pa.Table, at: np.ndarray) -> np.ndarray:
        """Return for each event the latest row of its id strictly before `at` (E,) ms, -1 without one."""
        code = index_in(dictionary_column(events, self.key), self.ids).astype(np.int64)
        first = code * (len(self.times) + 1)
        end = np.searchsorted(self.line, first + np.searchsorted(self.times, at))
        row = end - 1
        is_found = (code >= 0) & (row >= 0) & (self.line[row] >= first)
        return np.where(is_found, row, -1)


def share_items(run: Run, columns: list[str]) -> list[Shared]:
    """Store the items table with these columns, as one that holds for all time; nothing without columns."""
    if not columns:
        return []
    items = run.tables.read("items", ["item_id", *columns]).sort_by("item_id")
    time = pa.repeat(pa.scalar(BEFORE_ALL_MS, pa.int64()), len(items))
    items = items.append_column("timestamp_ms", time)
    return [run.engine.put(AsOfTable.from_rows("items", items, "item_id"))]


def share_as_of(run: Run, manifests: dict[str, Manifest]) -> list[Shared]:
    """Store the tables where all tasks can read them."""
    shared = []
    for name, manifest in manifests.items():
        table = AsOfTable.from_rows(name, run.tables.read(name), manifest.info["key"])
        shared.append(run.engine.put(table))
    return shared


def as_of_info(manifests: dict[str, Manifest]) -> dict[str, Any]:
    """Return the manifest's entry on these tables: `key` and `features` by table."""
    return {
        name: {
            "key": manifest.info["key"],
            "features": [column["name"] for column in manifest.schema[2:]],
        }
        for name, manifest in manifests.items()
    }


def join_as_of(
    events: pa.Table, at: np.ndarray, tables: Iterable[AsOfTable], count: Counter[str]
) -> pa.Table:
    """Return the events with the features of the tables as of `at` (E,) ms.

    Features are null where there is no earlier row; `count` is given the number of
    these events by table.
    """
    for table in tables:
        row = table.latest_rows(events, at)
        count[f"nothing_of_{table.name}"] += int((row < 0).sum())
        features = table.features.take(pa.array(row, mask=row < 0))
        for name in features.column_names:
            events = events.append_column(name, features[name])
    return events


def report_missing(
    run: Run, manifests: dict[str, Manifest], events: int, count: Counter[str]
) -> None:
    """Report for each table how many of the events have no earlier row.

    Raises:
        UserError: if no event has one.
    """
    for name, manifest in manifests.items():
        missing, key = count[f"nothing_of_{name}"], manifest.info["key"]
        if missing == events:
            raise UserError(
                f"{name} has no row before any of the {events:,} events; its ids ('{key}') or its times are others: "
                f"correct the source file"
            )
        if missing:
            run.report(
                f"{name}: {missing:,} of {events:,} events ({missing / events:.1%}) have no earlier row"
            )


def as_of_schema(sections: Sequence[Section]) -> pa.Schema:
    """Return the feature columns of all sections."""
    return pa.schema([field for section in sections for field in section.features])
