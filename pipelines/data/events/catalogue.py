"""The catalogue: which items stay after the iterative k-core, and the items table with their metadata.

No process holds a table of users; the driver holds one id and one count per item.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from models.storage.tables import Part, UserError, join, write_part
from pipelines.data.engine import KEY, Engine, Shared, fetch
from pipelines.data.events.build_events import partitions_for, read_tallies, write_tally
from pipelines.data.events.event_stats import (
    Survey,
    Vocabulary,
    behaviour_column,
    coded,
    known_column,
    known_times,
    positions_in,
    read_coded,
    runs,
)
from pipelines.data.events.matching import Match
from pipelines.data.reading.log import Log
from pipelines.data.reading.rows import Rejected, check_missing, common

ITEMS_PER_PART = 1_000_000


def surviving_rows(
    item: np.ndarray,
    alive: np.ndarray | None,
    user_start: np.ndarray,
    counted: np.ndarray | None,
    core: int,
) -> np.ndarray:
    """Rows that belong to the core: of a living item and of a user who has `core` such rows.

    item (E,) index into alive (N,), None where all live; user_start (V,) first row of each user; counted (E,) rows
    within the window that membership is computed on, or None for all. Returns (E,) bool.
    """
    if not len(item):
        return np.zeros(0, dtype=bool)
    rows = np.ones(len(item), dtype=bool) if alive is None else alive[item]
    if counted is not None:
        rows &= counted
    per_user = np.add.reduceat(rows, user_start, dtype=np.int64)
    lengths = np.diff(np.append(user_start, len(item)))
    rows &= np.repeat(per_user >= core, lengths)
    return rows


def _pairs(
    behaviour: str | None,
    late: bool,
    before_ms: int | None,
    items: Vocabulary,
    uri: str,
) -> pa.Table:
    """The behaviours of one part that count, in the order of its users: `user`, a code within the part, and `item`."""
    names = ["user_id", "item_id", *behaviour_column(behaviour)]
    names += (
        ["timestamp_ms", *known_column(behaviour, late)]
        if before_ms is not None
        else []
    )
    table = read_coded(uri, names)
    keep = None
    if behaviour:
        keep = pc.fill_null(table[f"label_{behaviour}"], False).to_numpy()
    if before_ms is not None:
        early = known_times(table, behaviour) < before_ms
        keep = early if keep is None else keep & early
    user, item = (
        coded(table, "user_id").indices.to_numpy(),
        positions_in(coded(table, "item_id"), items),
    )
    keep = slice(None) if keep is None else keep
    return pa.table(
        {
            "user": pa.array(user[keep], pa.int32()),
            "item": pa.array(item[keep], pa.int32()),
        }
    )


def _count(alive: np.ndarray, core: int, pairs: pa.Table) -> pa.Table:
    """How many rows of one part count on each of its items: `item`, `count`."""
    user, item = pairs["user"].to_numpy(), pairs["item"].to_numpy()
    rows = surviving_rows(item, alive, runs(user), None, core)
    found = pl.DataFrame({"item": item[rows]}).group_by("item").len("count")
    return found.to_arrow().cast(
        pa.schema([("item", pa.int32()), ("count", pa.int64())])
    )


def _ids_of_file(source: Log, input_uri: str, file: str) -> tuple[pa.Array, str]:
    """The ids that one item file describes, each once, and its hash."""
    assert source.items is not None
    digest = hashlib.sha256()
    found = [
        block.rows["item_id"].cast(pa.large_string())
        for block in source.items.read(input_uri, file, digest)
    ]
    ids = pc.unique(
        pa.chunked_array(
            [chunk for ids in found for chunk in ids.chunks], pa.large_string()
        )
    )
    return ids, digest.hexdigest()


def described_items(
    source: Log, input_uri: str, files: list[str], engine: Engine
) -> tuple[pa.Array, dict[str, str]]:
    """The ids that item files describe, sorted, and the hashes of the files: the driver holds one id per item."""
    found = dict(
        engine.each(_ids_of_file, [(source, input_uri, file) for file in files])
    )
    ids = pc.unique(
        pa.chunked_array([of_file for of_file, _ in found.values()], pa.large_string())
    )
    return ids.take(pc.sort_indices(ids)), {
        file: found[number][1] for number, file in enumerate(files)
    }


def with_described(core: pa.Array, described: pa.Array) -> pa.Array:
    """The catalogue of the items in the k-core and those that item files describe, sorted."""
    ids = pc.unique(pa.chunked_array([core.cast(pa.large_string()), described]))
    return ids.take(pc.sort_indices(ids))


def extended(old: pa.Array, catalogue: pa.Array) -> pa.Array:
    """The catalogue with the items of `old` first, as they were numbered. UserError where one of them has left it."""
    if len(gone := old.filter(pc.invert(pc.is_in(old, catalogue)))):
        raise UserError(
            f"{len(gone):,} items, such as '{gone[0]}', are no longer in the catalogue, as a file of items lacks them "
            f"or the training window ends earlier; --append keeps them all: use --overwrite"
        )
    return pa.concat_arrays(
        [old, catalogue.filter(pc.invert(pc.is_in(catalogue, old)))]
    )


def core_items(
    survey: Survey,
    core: int,
    before_ms: int | None,
    engine: Engine,
    described: pa.Array | None = None,
) -> tuple[pa.Array, int]:
    """Ids of the items in the k-core, sorted, and the number of rounds it took.

    Repeats until nothing changes: users with fewer than `core` behaviours on living items drop out, then
    items with fewer than `core` behaviours by the users that stay. `before_ms` counts only behaviours
    known earlier than that (membership on the training window). The driver holds one count per item; 8 bytes per
    behaviour stay in the object store, or on its disk, between the rounds.

    described: items that stay whatever their behaviours (sorted).
    """
    core = max(core, 1)
    if core == 1 and before_ms is None:
        return survey.items, 0
    shared = (
        survey.behaviour,
        survey.late,
        before_ms,
        engine.put(Vocabulary.of(survey.items)),
    )
    pairs = list(engine.refs(_pairs, [(uri,) for uri in survey.parts], shared))
    alive = np.ones(len(survey.items), dtype=bool)
    stays = np.zeros(len(survey.items), dtype=bool)
    if described is not None:
        stays = pc.is_in(survey.items.cast(pa.large_string()), described).to_numpy(
            zero_copy_only=False
        )
    rounds = 0
    while True:
        counts = np.zeros(len(alive), dtype=np.int64)
        for _, found in engine.each(
            _count, [(core, of_part) for of_part in pairs], (engine.put(alive),)
        ):
            counts[found["item"].to_numpy()] += found["count"].to_numpy()
        rounds += 1
        left = (counts >= core) | stays
        if not counts[left].any():
            raise UserError(
                f"no item is left in the {core}-core of {survey.behaviours:,} behaviours; set a lower --core"
            )
        if (left == alive).all():
            return survey.items.filter(pa.array(alive)), rounds
        alive = left


FILE, ROW, CONTENT = "__file", "__row", "__content"
"""Columns of metadata on its way: the number of the file, that of the row in it, and a hash of what the row says."""


def _transit(schema: pa.Schema) -> pa.Schema:
    """Metadata on its way: what belongs to the items table, and where it comes from."""
    index = pa.field("item_index", pa.int32())
    place = [
        (FILE, pa.int32()),
        (ROW, pa.int64()),
        (CONTENT, pa.uint64()),
        (KEY, pa.int32()),
    ]
    return pa.schema(
        [index, *_described(schema), *(pa.field(*column) for column in place)]
    )


def _described(schema: pa.Schema) -> pa.Schema:
    """What the items table says of an item."""
    return pa.schema(
        [field for field in schema if field.name not in ("item_index", "item_id")]
    )


def _padded(columns: dict[str, Any], rows: int, schema: pa.Schema) -> pa.Table:
    """The columns, and nulls for the others of the schema."""
    every = [
        columns[f.name] if f.name in columns else pa.nulls(rows, f.type) for f in schema
    ]
    return pa.table(every, names=schema.names).cast(schema)


@dataclass(frozen=True)
class _ReadItems:
    """Reads item files as rows of the catalogue's items; others are counted. The number after that of the last file
    gives a row for each range of the catalogue, so that those without metadata are written too."""

    files: list[str]
    source: Log
    input_uri: str
    items_uri: str
    schema: pa.Schema
    catalogue: Shared

    def __call__(self, number: int) -> Iterator[pa.Table]:
        transit, catalogue = _transit(self.schema), fetch(self.catalogue)
        if number == len(self.files):
            low = np.arange(0, len(catalogue), ITEMS_PER_PART)
            columns = {
                "item_index": pa.array(low),
                FILE: pa.repeat(-1, len(low)),
                KEY: pa.array(low // ITEMS_PER_PART),
            }
            yield _padded(columns, len(low), transit)
            return
        assert self.source.items is not None
        outside, rejected, first, digest = 0, Rejected(), 0, hashlib.sha256()
        ids, missing = list[str](), []
        for block in self.source.items.read(self.input_uri, self.files[number], digest):
            rejected.add(Rejected.from_block(block))
            missing.append(block.missing)
            ids = ids or block.rows["item_id"].slice(0, 2).to_pylist()
            index = catalogue.positions(block.rows["item_id"].combine_chunks())
            known = np.flatnonzero(index >= 0)
            outside += len(index) - len(known)
            rows = block.rows.take(pa.array(known))
            said = _padded(
                {name: rows[name] for name in rows.column_names},
                len(known),
                _described(self.schema),
            )
            yield _padded(
                {
                    **{name: said[name] for name in said.column_names},
                    "item_index": pa.array(index[known]),
                    FILE: pa.repeat(number, len(known)),
                    ROW: pa.array(first + known),
                    CONTENT: pa.array(_hashes(said)),
                    KEY: pa.array(index[known] // ITEMS_PER_PART),
                },
                len(known),
                transit,
            )
            first += len(index)
        told = {
            "outside": outside,
            "digest": digest.hexdigest(),
            "ids": ids,
            "missing": common(missing),
        }
        write_tally(self.items_uri, number, rejected, **told)


def _hashes(table: pa.Table) -> np.ndarray:
    """(rows,) of all columns, the same in every process."""
    if not table.num_columns:
        return np.zeros(table.num_rows, dtype=np.uint64)
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame.hash_rows(seed=0).to_numpy()


def match_items(
    catalogue: pa.Array, missing: np.ndarray, events: np.ndarray, others: list[str]
) -> Match:
    """How many items have metadata. missing: (M,) the indices of those without; events: (items,) of each item; others:
    the first ids of the item files."""
    total, first = int(events.sum()), catalogue.take(pa.array(missing[:2])).to_pylist()
    described, lost = len(catalogue) - len(missing), int(events[missing].sum())
    return Match(len(catalogue), described, total, total - lost, first, others)


@dataclass(frozen=True)
class _WriteRange:
    """One part: the items of one range with their metadata. Also gives the indices of items without any, and how many
    rows of metadata came after the first of their item, and said something else."""

    items_uri: str
    schema: pa.Schema

    def __call__(self, catalogue: Vocabulary, key: int, rows: pa.Table) -> pa.Table:
        found = pl.from_arrow(rows)
        assert isinstance(found, pl.DataFrame)
        low = int(found.filter(pl.col(FILE) < 0)["item_index"][0])
        ids = catalogue.at(np.arange(low, min(low + ITEMS_PER_PART, len(catalogue))))
        frame = pl.DataFrame(
            {
                "item_index": np.arange(low, low + len(ids), dtype=np.int32),
                "item_id": pl.from_arrow(ids),
            }
        )
        found = found.filter(pl.col(FILE) >= 0).sort(FILE, ROW)
        first = found.unique("item_index", keep="first", maintain_order=True)
        # a row differs from the first of its file; the first of a file counts if no earlier file's first says the same
        of_file = found.unique(["item_index", FILE], keep="first", maintain_order=True)
        differ = found.filter(
            pl.col(CONTENT) != pl.col(CONTENT).first().over("item_index", FILE)
        ).height
        differ += of_file.unique(["item_index", CONTENT]).height - first.height
        missing = frame.join(first, on="item_index", how="anti", maintain_order="left")[
            "item_index"
        ].to_numpy()
        frame = frame.join(first, on="item_index", how="left", maintain_order="left")
        part = write_part(
            self.items_uri, frame.select(self.schema.names).to_arrow().cast(self.schema)
        )
        told = {
            **asdict(part),
            "low": low,
            "repeated": found.height - first.height,
            "differ": differ,
        }
        lost = pa.LargeListArray.from_arrays(
            pa.array([0, len(missing)], pa.int64()), pa.array(missing, pa.int64())
        )
        return pa.table(
            {name: [value] for name, value in told.items()} | {"missing": lost}
        )


def write_items(
    source: Log,
    input_uri: str,
    files: list[str],
    catalogue: pa.Array,
    items_uri: str,
    engine: Engine,
) -> tuple[list[Part], dict[str, Any], Rejected, np.ndarray, dict[str, str]]:
    """Writes the parts of the items table, uncommitted: (parts, counts for the manifest, rejected rows,
    indices of the items without metadata, hashes of the files).

    Items without metadata keep null texts and are counted; metadata of items that are not in the
    catalogue is left out and counted.
    """
    schema, ranges = source.items_schema, -(-len(catalogue) // ITEMS_PER_PART)
    shared = engine.put(Vocabulary.of(catalogue))
    read = _ReadItems(files, source, input_uri, items_uri, schema, shared)
    here = (
        ranges == 1 and partitions_for([join(input_uri, file) for file in files]) == 1
    )
    tables = list(
        engine.exchange(
            read,
            len(files) + 1,
            ranges,
            _WriteRange(items_uri, schema),
            (shared,),
            here=here,
        )
    )
    written = pa.concat_tables(tables).sort_by("low")
    missing = written["missing"].combine_chunks().flatten().to_numpy()
    outside, rejected, hashes, first, lost = 0, Rejected(), {}, list[str](), []
    for file, (of_file, said) in zip(
        files, read_tallies(items_uri, len(files)), strict=True
    ):
        rejected.add(of_file)
        lost.append(said["missing"])
        outside += said["outside"]
        hashes[file], first = said["digest"], first or said["ids"]
    check_missing(common(lost), "item", input_uri)
    info = {
        "first": first,  # ids of the item files
        "texts": source.items_columns[0],
        "attributes": source.items_columns[1],
        "numbers": source.items_numbers,
        "items_without_metadata": len(missing),
        "metadata_outside_catalogue": outside,
        "metadata_repeated": pc.sum(written["repeated"]).as_py(),
        "metadata_differ": pc.sum(written["differ"]).as_py(),
    }
    parts = [
        Part(**row)
        for row in written.select(["path", "bytes", "rows", "sha256"]).to_pylist()
    ]
    return parts, info, rejected, missing, hashes
