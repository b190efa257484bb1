"""Features with a time of their own, joined as of a request: the latest row with a time strictly before it.

`python -m jobs.prepare` makes a table `as_of_NAME` of each that a source file declares (`as_of`), sorted by
id and time, and the requests and behaviours of sequences take their values from it. A task holds such a table whole.

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
from pipelines.data.events.event_stats import Vocabulary, coded, distinct, positions_in
from pipelines.data.reading.log import Section
from pipelines.data.reading.rows import Rejected, check_missing, common
from pipelines.data.run import Run

PREFIX = "as_of_"
"""Begins the names of the tables' folders."""

FIRST = -(2**62)
"""ms, before any event."""


def _write_table(
    of: Section, input_uri: str, files: list[str], uri: str
) -> tuple[Part | None, Rejected, int, dict[str, str]]:
    """Reads the files and writes the one part, sorted; also gives what was rejected, how many rows were left out
    as a later one of the log has their id and time, and the hashes of the files."""
    rejected, found, hashes, missing = Rejected(), [of.schema.empty_table()], {}, []
    for file in files:
        digest = hashlib.sha256()
        for block in of.read(input_uri, file, digest):
            rejected.add(Rejected.from_block(block))
            found.append(block.rows)
            missing.append(block.missing)
        hashes[file] = digest.hexdigest()
    check_missing(common(missing), "feature", input_uri)
    rows = pl.DataFrame(pl.from_arrow(pa.concat_tables(found)))
    keys = [of.key, "timestamp_ms"]
    last = rows.sort(keys, maintain_order=True).unique(
        keys, keep="last", maintain_order=True
    )
    part = write_part(uri, last.to_arrow().cast(of.schema)) if last.height else None
    return part, rejected, rows.height - last.height, hashes


def make_as_of(run: Run) -> dict[str, Manifest]:
    """The tables that the source declares, by the name of their folder."""
    return {
        f"{PREFIX}{name}": _make_table(run, name, of)
        for name, of in run.source.as_of.items()
    }


def _make_table(run: Run, name: str, of: Section) -> Manifest:
    table, files = f"{PREFIX}{name}", of.list_files(run.input, "feature")
    settings = {"as_of": run.source.config["as_of"][name]}
    stamps = run.stamps(files)
    if finished := run.finished(table, settings, {}, stamps):
        return finished
    uri = run.table(table)
    with run.writing(table):
        ((_, (part, rejected, repeated, hashes)),) = run.engine.each(
            _write_table, [(of, run.input, files, uri)]
        )
        run.reject(rejected, f" of {table}")
        if part is None:
            raise UserError(
                f"{run.input} holds no valid row in {', '.join(files[:3])}; correct as_of.{name}"
            )
        info = {
            "key": of.key,
            "stamps": stamps,
            "rows_read": rejected.rows_read,
            "reject_reasons": dict(sorted(rejected.reasons.items())),
            "repeated": repeated,
        }
        made = run.commit(table, of.schema, [part], settings, hashes, info)
    run.say(
        f"{table}: {made.rows:,} rows; {repeated:,} others have the id and the time of a later one"
    )
    return made


@dataclass(frozen=True)
class AsOfTable:
    """One of these tables, to look up."""

    name: str
    """Its folder."""
    key: str
    """The column of events that it is of."""
    ids: Vocabulary
    """Its ids."""
    times: np.ndarray
    """(T,) ms, ascending."""
    place: np.ndarray
    """(R,) ascending: the id's place times T + 1, and the time's."""
    features: pa.Table
    """(R,) in that order."""

    @classmethod
    def of(cls, name: str, rows: pa.Table, key: str) -> AsOfTable:
        """Of rows sorted by id and time."""
        rows = rows.combine_chunks()
        id_ = (
            rows[key].combine_chunks().dictionary_encode()
        )  # in the order of the rows, which is that of ids
        time = rows["timestamp_ms"].to_numpy()
        times = distinct(time)
        place = id_.indices.to_numpy().astype(np.int64) * (
            len(times) + 1
        ) + np.searchsorted(times, time)
        return cls(
            name,
            key,
            Vocabulary.of(id_.dictionary),
            times,
            place,
            rows.drop_columns([key, "timestamp_ms"]),
        )

    def rows(self, events: pa.Table, at: np.ndarray) -> np.ndarray:
        """(E,) for each event the latest row of its id with a time strictly before `at` (E,) ms; -1 for none."""
        id_ = positions_in(coded(events, self.key), self.ids).astype(np.int64)
        first = id_ * (len(self.times) + 1)
        row = (
            np.searchsorted(
                self.place, first + np.searchsorted(self.times, at), side="left"
            )
            - 1
        )
        return np.where((id_ >= 0) & (row >= 0) & (self.place[row] >= first), row, -1)


def share_items(run: Run, columns: list[str]) -> list[Shared]:
    """The items table with these columns, as one that holds since the beginning of time; none without columns."""
    if not columns:
        return []
    items = run.read("items", ["item_id", *columns]).sort_by("item_id")
    items = items.append_column(
        "timestamp_ms", pa.repeat(pa.scalar(FIRST, pa.int64()), len(items))
    )
    return [run.engine.put(AsOfTable.of("items", items, "item_id"))]


def share_as_of(run: Run, made: dict[str, Manifest]) -> list[Shared]:
    """The tables where all tasks can read them."""
    return [
        run.engine.put(AsOfTable.of(name, run.read(name), manifest.info["key"]))
        for name, manifest in made.items()
    ]


def describe_as_of(made: dict[str, Manifest]) -> dict[str, Any]:
    """What the manifest of sequences says of them: by folder `key`, and `features`."""
    return {
        name: {
            "key": manifest.info["key"],
            "features": [column["name"] for column in manifest.schema[2:]],
        }
        for name, manifest in made.items()
    }


def attach(
    events: pa.Table, at: np.ndarray, tables: Iterable[AsOfTable], count: Counter[str]
) -> pa.Table:
    """The events with the features of the tables as of `at` (E,) ms, null where there is no earlier row; these are
    counted by table."""
    for table in tables:
        row = table.rows(events, at)
        count[f"nothing_of_{table.name}"] += int((row < 0).sum())
        found = table.features.take(pa.array(row, mask=row < 0))
        for name in found.column_names:
            events = events.append_column(name, found[name])
    return events


def say_missing(
    run: Run, made: dict[str, Manifest], events: int, count: Counter[str]
) -> None:
    """Says of how many events a table knows nothing; UserError where that are all."""
    for name, manifest in made.items():
        missing, key = count[f"nothing_of_{name}"], manifest.info["key"]
        if missing == events:
            raise UserError(
                f"{name} has no row before any of the {events:,} events; its ids ('{key}') or its times are others: "
                f"correct the source file"
            )
        if missing:
            run.say(
                f"{name}: {missing:,} of {events:,} events ({missing / events:.1%}) have no earlier row"
            )


def as_of_schema(tables: Sequence[Section]) -> pa.Schema:
    """The features of all tables."""
    return pa.schema([field for of in tables for field in of.features])
