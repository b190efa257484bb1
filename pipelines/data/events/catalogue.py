"""The items table: the catalogue of a log, with the metadata of the item files.

`python -m jobs.prepare` runs `make_items`. The driver holds one id and one count per
item.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from models.storage.tables import Manifest, Part, UserError, join, write_part
from pipelines.data.engine import KEY, Engine, Exchange, ReadSummary, Shared, fetch
from pipelines.data.events.build_events import LoadStats, count_partitions
from pipelines.data.events.columns import Vocabulary
from pipelines.data.events.event_stats import EventStats
from pipelines.data.events.k_core import core_items
from pipelines.data.events.matching import Match, check_matched
from pipelines.data.reading.log import Log
from pipelines.data.reading.rows import RejectCounts, check_missing, common_missing
from pipelines.data.run import Run

ITEMS_PER_PART = 1_000_000

FILE, ROW, CONTENT = "__file", "__row", "__content"
"""Columns of exchanged metadata: number of the file, number of the row in it, hash of
the row's values."""


def make_items(
    run: Run, events: Manifest, load_stats: LoadStats, split: dict[str, Any]
) -> Manifest:
    """Make the `items` table and return its manifest.

    Args:
        run: The run.
        events: Manifest of the events.
        load_stats: Returns statistics of the events.
        split: The split as manifests record it.

    Raises:
        UserError: if the item files cannot be read or describe too few items.
    """
    config, source = run.config, run.source
    files = source.item_files(run.input)
    settings = _items_settings(run)
    inputs = {"events": events.hash}
    stamps = run.stamps(files)
    if finished := run.tables.find_finished("items", settings, inputs, stamps):
        return finished
    begin = time.perf_counter()
    stats = load_stats()
    earlier = run.tables.appended_version("items")
    gone = sorted(earlier.info["stamps"].keys() - {*files}) if earlier else []
    if gone:
        raise UserError(
            f"{run.input} lacks {gone[0]}: item files are read whole at each --append; keep them there"
        )
    with run.tables.clean_up_on_error("items"):
        catalogue = _choose_items(run, files, stats, split)
        counted = time.perf_counter()
        written = write_items(run, files, catalogue.ids)
        _check_files_unchanged(run, catalogue, written)
        run.check_rejects(written.rejected, " of the item files")
        info = {
            "core": config.core,
            "core_window": config.core_window,
            "core_rounds": catalogue.core_rounds,
            "behaviour": run.behaviour,
            "split": split,
            "split_made_from": run.split_inputs(events),
            "behaviours": stats.behaviours,
            "items_before_core": len(stats.items),
            "dropped_items": len(stats.items) - len(catalogue.in_core),
            "metadata_rows": written.rejected.rows_read,
            "metadata_rejects": written.rejected.rejects,
            "metadata_reject_reasons": dict(sorted(written.rejected.reasons.items())),
            "stamps": stamps,
            **written.to_info(source),
        }
        if files:
            info["matched"] = _match_items(run, catalogue, written, stats).to_info()
        new = ""
        if source.keeps_all_items:
            bare = len(catalogue.ids) - len(catalogue.in_core)
            info["items_without_behaviours"] = bare
            new = f", {bare:,} of them without behaviours"
        items = run.tables.commit(
            "items",
            source.items_schema,
            written.parts,
            settings,
            {**inputs, **written.hashes},
            info,
            core_s=counted - begin,
            write_s=time.perf_counter() - counted,
        )
    run.report(
        f"items: {items.rows:,} in the catalogue{new}, {info['dropped_items']:,} dropped by the {config.core}-core "
        f"({catalogue.core_rounds} rounds), {info['items_without_metadata']:,} without metadata, "
        f"{info['metadata_outside_catalogue']:,} metadata rows of other items left out"
    )
    return items


def _items_settings(run: Run) -> dict[str, Any]:
    config = run.config
    settings: dict[str, Any] = {
        "source": run.source.config,
        "core": config.core,
        "core_window": config.core_window,
        "behaviour": run.behaviour,
    }
    if config.core_window == "train":
        settings["split"] = config.split.settings()
    # as they are read back from a manifest
    return dict(json.loads(json.dumps(settings, default=str)))


# Which items are in the catalogue.


@dataclass(frozen=True)
class Catalogue:
    """The items of the catalogue."""

    ids: pa.Array
    """Ids in the order of `item_index`."""
    in_core: pa.Array
    """Ids of the items in the k-core of the behaviours, sorted."""
    core_rounds: int
    file_hashes: dict[str, str]
    """Hashes of the item files whose ids were read to choose the items."""
    extends: bool
    """Whether the first items are those of an earlier version."""


def _choose_items(
    run: Run, files: list[str], stats: EventStats, split: dict[str, Any]
) -> Catalogue:
    """Return the catalogue: the k-core, all items of the item files if the source keeps them, old items first."""
    described, hashes = None, dict[str, str]()
    if run.source.keeps_all_items:
        described, hashes = read_item_ids(run, files)
    before_ms = run.core_before_ms(split)
    in_core, rounds = core_items(
        stats, run.config.core, before_ms, run.engine, described
    )
    ids = in_core
    if described is not None:
        ids = pc.unique(pa.chunked_array([in_core.cast(pa.large_string()), described]))
        ids = ids.take(pc.sort_indices(ids))
    extends = run.tables.appended_version("items") is not None
    if extends:
        old = run.tables.read("items", ["item_id"])["item_id"].combine_chunks()
        ids = extend_catalogue(old.cast(ids.type), ids)
    return Catalogue(ids, in_core, rounds, hashes, extends)


def read_item_ids(run: Run, files: list[str]) -> tuple[pa.Array, dict[str, str]]:
    """Return the ids that item files describe, sorted, and the hashes of the files."""
    calls = [(run.source, run.input, file) for file in files]
    of_files = dict(run.engine.map_unordered(_read_ids_of_file, calls))
    ids = _unique([ids for ids, _ in of_files.values()])
    hashes = {file: of_files[number][1] for number, file in enumerate(files)}
    return ids.take(pc.sort_indices(ids)), hashes


def _read_ids_of_file(source: Log, input_uri: str, file: str) -> tuple[pa.Array, str]:
    """Return the ids that one item file describes, each once, and the file's hash."""
    assert source.items is not None
    digest = hashlib.sha256()
    chunks: list[pa.Array] = []
    for block in source.items.read(input_uri, file, digest):
        chunks += block.rows["item_id"].cast(pa.large_string()).chunks
    return _unique(chunks), digest.hexdigest()


def _unique(arrays: list[pa.Array]) -> pa.Array:
    return pc.unique(pa.chunked_array(arrays, pa.large_string()))


def extend_catalogue(old: pa.Array, ids: pa.Array) -> pa.Array:
    """Return `ids` with the items of `old` first, in their order.

    Raises:
        UserError: if an old item has left the catalogue.
    """
    gone = old.filter(pc.invert(pc.is_in(old, ids)))
    if len(gone):
        raise UserError(
            f"{len(gone):,} items, such as '{gone[0]}', are no longer in the catalogue, as a file of items lacks them "
            f"or the training window ends earlier; --append keeps them all: use --overwrite"
        )
    new = ids.filter(pc.invert(pc.is_in(ids, old)))
    return pa.concat_arrays([old, new])


# The items with their metadata: read by file, exchanged by range of item_index,
# written.


@dataclass(frozen=True)
class FileSummary:
    """Counts of one item file that was read."""

    rejected: RejectCounts
    outside: int
    """Rows of items outside the catalogue."""
    first_ids: list[str]
    missing: dict[str, str]
    """Columns that the file lacks, each with a hint at the nearest."""
    digest: str


@dataclass(frozen=True)
class ItemsReader:
    """Reads item files as metadata rows of the catalogue's items.

    One more read gives a row for each range of the catalogue, so that a range without
    metadata is written too.
    """

    files: list[str]
    source: Log
    input_uri: str
    schema: pa.Schema
    """Schema of the items table."""
    catalogue: Shared

    def __call__(self, number: int) -> Iterator[pa.Table | ReadSummary]:
        catalogue: Vocabulary = fetch(self.catalogue)
        if number == len(self.files):
            yield self._range_rows(len(catalogue))
            return
        assert self.source.items is not None
        rejected, outside, first_row = RejectCounts(), 0, 0
        first_ids, missing, digest = list[str](), [], hashlib.sha256()
        for block in self.source.items.read(self.input_uri, self.files[number], digest):
            rejected.add(RejectCounts.from_block(block))
            missing.append(block.missing)
            first_ids = first_ids or block.rows["item_id"].slice(0, 2).to_pylist()
            item = catalogue.lookup(block.rows["item_id"].combine_chunks())
            inside = np.flatnonzero(item >= 0)
            outside += len(item) - len(inside)
            yield self._metadata_rows(block.rows, number, first_row, item)
            first_row += len(item)
        yield self._exchange_schema.empty_table()
        summary = FileSummary(
            rejected, outside, first_ids, common_missing(missing), digest.hexdigest()
        )
        yield ReadSummary(number, summary)

    @property
    def _exchange_schema(self) -> pa.Schema:
        """Schema of the exchanged rows."""
        keys = [
            pa.field(FILE, pa.int32()),
            pa.field(ROW, pa.int64()),
            pa.field(CONTENT, pa.uint64()),
            pa.field(KEY, pa.int32()),
        ]
        index = pa.field("item_index", pa.int32())
        return pa.schema([index, *_metadata_fields(self.schema), *keys])

    def _range_rows(self, items: int) -> pa.Table:
        low = np.arange(0, items, ITEMS_PER_PART)
        columns = {
            "item_index": pa.array(low),
            FILE: pa.repeat(-1, len(low)),
            KEY: pa.array(low // ITEMS_PER_PART),
        }
        return _add_null_columns(columns, len(low), self._exchange_schema)

    def _metadata_rows(
        self, rows: pa.Table, file: int, first_row: int, item: np.ndarray
    ) -> pa.Table:
        """Return the rows of items of the catalogue, ready to exchange.

        Args:
            rows: Rows of a block of the file.
            file: Number of the file.
            first_row: Number of the block's first row in the file.
            item: (rows,) item_index, -1 outside the catalogue.
        """
        inside = np.flatnonzero(item >= 0)
        rows = rows.take(pa.array(inside))
        values = {name: rows[name] for name in rows.column_names}
        fields = pa.schema(_metadata_fields(self.schema))
        metadata = _add_null_columns(values, len(inside), fields)
        columns = {name: metadata[name] for name in metadata.column_names}
        columns |= {
            "item_index": pa.array(item[inside]),
            FILE: pa.repeat(file, len(inside)),
            ROW: pa.array(first_row + inside),
            CONTENT: pa.array(_hash_rows(metadata)),
            KEY: pa.array(item[inside] // ITEMS_PER_PART),
        }
        return _add_null_columns(columns, len(inside), self._exchange_schema)


def _metadata_fields(schema: pa.Schema) -> list[pa.Field]:
    """Return the columns of the items table that describe an item."""
    return [field for field in schema if field.name not in ("item_index", "item_id")]


def _add_null_columns(
    columns: dict[str, Any], rows: int, schema: pa.Schema
) -> pa.Table:
    """Return a table of `schema` with these columns and nulls in the others."""
    arrays = []
    for field in schema:
        if field.name in columns:
            arrays.append(columns[field.name])
        else:
            arrays.append(pa.nulls(rows, field.type))
    return pa.table(arrays, names=schema.names).cast(schema)


def _hash_rows(table: pa.Table) -> np.ndarray:
    """Return the (rows,) uint64 hashes of all columns, equal in every process."""
    if not table.num_columns:
        return np.zeros(table.num_rows, dtype=np.uint64)
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame.hash_rows(seed=0).to_numpy()


@dataclass(frozen=True)
class WrittenRange:
    """A part of items that was written."""

    part: Part
    low: int
    """Its first item_index."""
    missing: np.ndarray
    """(M,) item_index of items without metadata."""
    repeated: int
    """Rows of metadata after the first of their item."""
    differing: int
    """Repeated rows with other values than the first."""


@dataclass(frozen=True)
class RangeWriter:
    """Writes the part of one range of the catalogue: its items with their metadata."""

    items_uri: str
    schema: pa.Schema

    def __call__(
        self, catalogue: Vocabulary, number: int, rows: pa.Table
    ) -> WrittenRange:
        metadata = pl.from_arrow(rows)
        assert isinstance(metadata, pl.DataFrame)
        low = number * ITEMS_PER_PART
        high = min(low + ITEMS_PER_PART, len(catalogue))
        items = pl.DataFrame(
            {
                "item_index": np.arange(low, high, dtype=np.int32),
                "item_id": pl.from_arrow(catalogue.ids_at(np.arange(low, high))),
            }
        )
        metadata = metadata.filter(pl.col(FILE) >= 0).sort(FILE, ROW)
        first = metadata.unique("item_index", keep="first", maintain_order=True)
        missing = items.join(first, on="item_index", how="anti", maintain_order="left")
        table = items.join(first, on="item_index", how="left", maintain_order="left")
        table = table.select(self.schema.names).to_arrow().cast(self.schema)
        return WrittenRange(
            part=write_part(self.items_uri, table),
            low=low,
            missing=missing["item_index"].to_numpy().astype(np.int64),
            repeated=metadata.height - first.height,
            differing=_count_differing(metadata),
        )


def _count_differing(metadata: pl.DataFrame) -> int:
    """Return the number of rows that describe an item otherwise than its first row.

    `metadata` is sorted by file and row. A row is compared with the first row of its
    file. The first row of a file counts if no first row of an earlier file is equal.
    """
    first_of_file = pl.col(CONTENT).first().over("item_index", FILE)
    within_files = metadata.filter(pl.col(CONTENT) != first_of_file).height
    first_rows = metadata.unique(
        ["item_index", FILE], keep="first", maintain_order=True
    )
    contents = first_rows.unique(["item_index", CONTENT]).height
    return within_files + contents - metadata["item_index"].n_unique()


@dataclass(frozen=True)
class WrittenItems:
    """Parts of items that are written and not yet committed, with counts of their metadata."""

    ranges: list[WrittenRange]
    files: list[FileSummary]
    hashes: dict[str, str]
    """Hash of the parsed bytes by file."""
    rejected: RejectCounts

    @property
    def parts(self) -> list[Part]:
        return [each.part for each in self.ranges]

    @property
    def missing(self) -> np.ndarray:
        """(M,) item_index of items without metadata."""
        return np.concatenate([each.missing for each in self.ranges])

    @property
    def first_ids(self) -> list[str]:
        """The first ids of the item files."""
        return next((file.first_ids for file in self.files if file.first_ids), [])

    def to_info(self, source: Log) -> dict[str, Any]:
        """Return entries of the manifest's `info`."""
        return {
            "texts": source.items_columns[0],
            "attributes": source.items_columns[1],
            "numbers": source.items_numbers,
            "items_without_metadata": len(self.missing),
            "metadata_outside_catalogue": sum(file.outside for file in self.files),
            "metadata_repeated": sum(each.repeated for each in self.ranges),
            "metadata_differ": sum(each.differing for each in self.ranges),
        }


def write_items(run: Run, files: list[str], catalogue: pa.Array) -> WrittenItems:
    """Write the parts of the items table, without committing them.

    Items without metadata have null texts. Metadata of items outside the catalogue is
    left out. Both are counted.

    Args:
        run: The run.
        files: Item files, relative to the input folder.
        catalogue: Ids in the order of `item_index`.
    """
    engine: Engine = run.engine
    ranges = -(-len(catalogue) // ITEMS_PER_PART)
    vocabulary = engine.put(Vocabulary.from_ids(catalogue))
    schema = run.source.items_schema
    exchange = Exchange(
        ItemsReader(files, run.source, run.input, schema, vocabulary),
        len(files) + 1,
        RangeWriter(run.tables.table_uri("items"), schema),
        ranges,
        shared=(vocabulary,),
        summaries=True,
    )
    uris = [join(run.input, file) for file in files]
    is_small = ranges == 1 and count_partitions(uris) == 1
    summaries: dict[int, FileSummary] = {}
    written: list[WrittenRange] = []
    for output in engine.exchange(exchange, in_process=is_small):
        if isinstance(output, ReadSummary):
            summaries[output.number] = output.value
        else:
            written.append(output)
    of_files = [summaries[number] for number in range(len(files))]
    rejected = RejectCounts()
    for summary in of_files:
        rejected.add(summary.rejected)
    missing = common_missing([summary.missing for summary in of_files])
    check_missing(missing, "item", run.input)
    digests = [summary.digest for summary in of_files]
    return WrittenItems(
        sorted(written, key=lambda each: each.low),
        of_files,
        dict(zip(files, digests, strict=True)),
        rejected,
    )


def _check_files_unchanged(
    run: Run, catalogue: Catalogue, written: WrittenItems
) -> None:
    """Raise UserError if an item file has changed between its two reads."""
    for file, digest in catalogue.file_hashes.items():
        if written.hashes[file] != digest:
            raise UserError(
                f"{join(run.input, file)} has changed while it was read; run the same command again"
            )


def _match_items(
    run: Run, catalogue: Catalogue, written: WrittenItems, stats: EventStats
) -> Match:
    """Count the items of the events with metadata.

    Raises:
        UserError: if their share is below `min_matched`.
    """
    in_core, missing = catalogue.in_core, written.missing
    # both are sorted
    is_used = pc.is_in(stats.items, in_core).to_numpy(zero_copy_only=False)
    events = stats.counts[is_used]
    if run.source.keeps_all_items or catalogue.extends:
        # items that the events name are to have a row in the item files
        bare = catalogue.ids.take(pa.array(missing)).cast(in_core.type)
        missing = pc.index_in(bare, in_core).to_numpy().astype(np.int64)
    total = int(events.sum())
    match = Match(
        ids=len(in_core),
        ids_matched=len(in_core) - len(missing),
        events=total,
        events_matched=total - int(events[missing].sum()),
        unmatched=in_core.take(pa.array(missing[:2])).to_pylist(),
        others=written.first_ids,
    )
    check_matched(match, "item", run.config.min_matched, run.report)
    return match
