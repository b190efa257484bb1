"""Build the table `items`: the catalogue of a log, with metadata from item files.

`python -m jobs.prepare` calls `make_items`. The driver holds one id and one count per
item.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from core.errors import UserError
from core.files import join
from core.schemas import ItemsInfo, Split
from core.tables import Part, Table, write_part
from pipelines.prepare.events.build_events import LoadStats, count_partitions
from pipelines.prepare.events.columns import Vocabulary
from pipelines.prepare.events.event_stats import EventStats
from pipelines.prepare.events.k_core import core_items
from pipelines.prepare.events.matching import Match, check_matched
from pipelines.prepare.executor import (
    KEY,
    Exchange,
    Executor,
    ReadSummary,
    Shared,
    fetch,
)
from pipelines.prepare.reading.log import Log
from pipelines.prepare.reading.rows import RejectCounts, check_missing, common_missing
from pipelines.prepare.run import Run

ITEMS_PER_PART = 1_000_000

FILE, ROW, CONTENT = "__file", "__row", "__content"
"""Columns of exchanged metadata: index of the file, index of the row in the file, and
hash of the values of the row."""


def make_items(
    run: Run, events: Table, load_stats: LoadStats, split: Split
) -> Table[ItemsInfo]:
    """Write the table `items`, unless it is up to date.

    Args:
        run: Log, settings and tables of this call of `prepare`.
        events: Table of the events.
        load_stats: Returns statistics of the events.
        split: The split.
    """
    source, config = run.source, run.config
    files = source.item_files(run.input)
    settings: dict[str, Any] = {
        "source": source.config,
        "core": config.core,
        "core_window": config.core_window,
        "behaviour": run.behaviour,
    }
    if config.core_window == "train":
        settings["split"] = config.split.settings()
    settings = json.loads(json.dumps(settings, default=str))
    inputs = {"events": events.hash}
    stamps = run.stamps(files)
    if finished := run.tables.find_finished(ItemsInfo, settings, inputs, stamps):
        return finished
    begin = time.perf_counter()
    stats = load_stats()
    earlier = run.tables.appended_version(ItemsInfo)
    missing = sorted(earlier.info.stamps.keys() - {*files}) if earlier else []
    if missing:
        raise UserError(
            f"{run.input} has no file {missing[0]}, from which the items were made",
            "settings",
        )
    with run.tables.clean_up_on_error("items"):
        catalogue = _choose_items(run, files, stats, split)
        core_end = time.perf_counter()
        written = write_items(run, files, catalogue.ids)
        for file, digest in catalogue.file_hashes.items():
            if written.hashes[file] != digest:
                raise UserError(
                    f"{join(run.input, file)} changed while it was being read"
                )
        run.check_rejects(written.rejected, " of the item files")
        info = ItemsInfo(
            texts=source.items_columns[0],
            attributes=source.items_columns[1],
            numbers=source.items_numbers,
            core=config.core,
            core_window=config.core_window,
            core_rounds=catalogue.core_rounds,
            behaviour=run.behaviour,
            split=split,
            split_made_from=run.split_inputs(events),
            stamps=stamps,
            items_before_core=len(stats.items),
            dropped_items=len(stats.items) - len(catalogue.in_core),
            items_without_metadata=len(written.missing),
            metadata_outside_catalogue=sum(file.outside for file in written.files),
            metadata_differ=sum(part.differing for part in written.ranges),
        )
        if source.keeps_all_items:
            outside_core = len(catalogue.ids) - len(catalogue.in_core)
            info.items_without_behaviours = outside_core
        if files:
            _check_metadata(run, catalogue, written, stats)
        items = run.tables.commit(
            "items",
            source.items_schema,
            written.parts,
            settings,
            {**inputs, **written.hashes},
            info,
            core_s=core_end - begin,
            write_s=time.perf_counter() - core_end,
        )
    without_behaviours = ""
    if info.items_without_behaviours is not None:
        without_behaviours = (
            f", {info.items_without_behaviours:,} of them without behaviours"
        )
    run.report(
        f"items: {items.rows:,} in the catalogue{without_behaviours}, "
        f"{info.dropped_items:,} dropped by the {config.core}-core "
        f"({info.core_rounds} rounds), {info.items_without_metadata:,} without "
        f"metadata, {info.metadata_outside_catalogue:,} metadata rows of other "
        f"items dropped"
    )
    return items


# Which items are in the catalogue.


@dataclass(frozen=True)
class Catalogue:
    """The ids of the items in the catalogue."""

    ids: pa.Array
    """(N,) ids in the order of `item_index`."""
    in_core: pa.Array
    """Ids of the items in the k-core of the behaviours, sorted."""
    core_rounds: int
    file_hashes: dict[str, str]
    """Hashes of the item files whose ids were read to choose the items."""
    extends: bool
    """Whether the catalogue begins with the items of an earlier version."""


def _choose_items(
    run: Run, files: list[str], stats: EventStats, split: Split
) -> Catalogue:
    """Choose the items of the catalogue."""
    described, hashes = None, dict[str, str]()
    if run.source.keeps_all_items:
        described, hashes = read_item_ids(run, files)
    before_ms = run.core_before_ms(split)
    in_core, rounds = core_items(
        stats, run.config.core, before_ms, run.executor, described
    )
    ids = in_core
    if described is not None:
        ids = pc.unique(pa.chunked_array([in_core.cast(pa.large_string()), described]))
        ids = ids.take(pc.sort_indices(ids))
    earlier = run.tables.appended_version(ItemsInfo)
    if earlier:  # its items come first and keep their `item_index`
        old = earlier.read(["item_id"])["item_id"].combine_chunks().cast(ids.type)
        gone = old.filter(pc.invert(pc.is_in(old, ids)))
        if len(gone):
            raise UserError(
                f"{len(gone):,} items, such as '{gone[0]}', are no longer in the "
                "catalogue",
                "settings",
            )
        ids = pa.concat_arrays([old, ids.filter(pc.invert(pc.is_in(ids, old)))])
    return Catalogue(ids, in_core, rounds, hashes, earlier is not None)


def read_item_ids(run: Run, files: list[str]) -> tuple[pa.Array, dict[str, str]]:
    """Return the distinct ids in item files, sorted, and the hash of each file."""
    calls = [(run.source, run.input, file) for file in files]
    results = dict(run.executor.map_unordered(_read_file_ids, calls))
    ids = _unique([file_ids for file_ids, _ in results.values()])
    hashes = {file: results[file_index][1] for file_index, file in enumerate(files)}
    return ids.take(pc.sort_indices(ids)), hashes


def _read_file_ids(source: Log, input_uri: str, file: str) -> tuple[pa.Array, str]:
    """Return the distinct ids in one item file, and the hash of the file."""
    assert source.items is not None
    digest = hashlib.sha256()
    chunks: list[pa.Array] = []
    for block in source.items.read(input_uri, file, digest):
        chunks += block.rows["item_id"].cast(pa.large_string()).chunks
    return _unique(chunks), digest.hexdigest()


def _unique(arrays: list[pa.Array]) -> pa.Array:
    return pc.unique(pa.chunked_array(arrays, pa.large_string()))


# The metadata: read by file, shuffled by range of item_index, written by range.


@dataclass(frozen=True)
class FileSummary:
    """Summary of one item file, which its reader sends to the driver."""

    rejected: RejectCounts
    outside: int
    """Number of rows of items outside the catalogue."""
    first_ids: list[str]
    missing: dict[str, str]
    """Columns that the file lacks, each with a hint at a similar name."""
    digest: str
    """Hash of the parsed bytes."""


@dataclass(frozen=True)
class ItemsReader:
    """The read of an exchange: yields rows of item files for items of the catalogue.

    One additional read yields a row for each range of the catalogue, so that the kernel
    also runs for ranges without metadata.
    """

    files: list[str]
    source: Log
    input_uri: str
    schema: pa.Schema
    """Schema of the items table."""
    catalogue: Shared

    def __call__(self, file_index: int) -> Iterator[pa.Table | ReadSummary]:
        """Yield the rows of one file, followed by its `FileSummary`.

        Args:
            file_index: Index of the file. `len(files)` yields a row for each range of
                the catalogue instead, without a summary.
        """
        catalogue: Vocabulary = fetch(self.catalogue)
        if file_index == len(self.files):
            yield self._range_rows(len(catalogue))
            return
        assert self.source.items is not None
        rejected = RejectCounts()
        num_outside = first_row = 0
        first_ids: list[str] = []
        missing: list[dict[str, str]] = []
        digest = hashlib.sha256()
        for block in self.source.items.read(
            self.input_uri, self.files[file_index], digest
        ):
            rejected.add(RejectCounts.from_block(block))
            missing.append(block.missing)
            first_ids = first_ids or block.rows["item_id"].slice(0, 2).to_pylist()
            item = catalogue.lookup(block.rows["item_id"].combine_chunks())
            inside = np.flatnonzero(item >= 0)
            num_outside += len(item) - len(inside)
            yield self._metadata_rows(block.rows, file_index, first_row, item)
            first_row += len(item)
        # the row of the summary takes its schema from the block before it, and a file
        # may have no block
        yield self._exchange_schema.empty_table()
        summary = FileSummary(
            rejected,
            num_outside,
            first_ids,
            common_missing(missing),
            digest.hexdigest(),
        )
        yield ReadSummary(file_index, summary)

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

    def _range_rows(self, num_items: int) -> pa.Table:
        """Return a row without metadata, with file -1, for each range of items."""
        first_item = np.arange(0, num_items, ITEMS_PER_PART)
        columns = {
            "item_index": pa.array(first_item),
            FILE: pa.repeat(-1, len(first_item)),
            KEY: pa.array(first_item // ITEMS_PER_PART),
        }
        return _add_null_columns(columns, len(first_item), self._exchange_schema)

    def _metadata_rows(
        self, rows: pa.Table, file: int, first_row: int, item: np.ndarray
    ) -> pa.Table:
        """Return the rows of items of the catalogue, in the schema of the exchange."""
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
    """Return the fields of the items table other than the keys."""
    return [field for field in schema if field.name not in ("item_index", "item_id")]


def _add_null_columns(
    columns: dict[str, Any], rows: int, schema: pa.Schema
) -> pa.Table:
    """Build a table of `schema`, with nulls in the columns that are not given."""
    arrays = []
    for field in schema:
        if field.name in columns:
            arrays.append(columns[field.name])
        else:
            arrays.append(pa.nulls(rows, field.type))
    return pa.table(arrays, names=schema.names).cast(schema)


def _hash_rows(table: pa.Table) -> np.ndarray:
    """Return (R,) uint64 hashes of the rows that are the same in every process."""
    if not table.num_columns:
        return np.zeros(table.num_rows, dtype=np.uint64)
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame.hash_rows(seed=0).to_numpy()


@dataclass(frozen=True)
class WrittenRange:
    """A written part of the items table, with one range of `item_index`."""

    part: Part
    low: int
    """First item_index of the part."""
    missing: np.ndarray
    """(M,) item_index of items without metadata."""
    differing: int
    """Number of metadata rows that differ from the first row of their item."""


@dataclass(frozen=True)
class RangeWriter:
    """The kernel of an exchange: writes a range of the items with their metadata."""

    items_uri: str
    schema: pa.Schema

    def __call__(
        self, catalogue: Vocabulary, range_index: int, rows: pa.Table
    ) -> WrittenRange:
        """Write the part of a range.

        Args:
            catalogue: Vocabulary from item ids to `item_index`.
            range_index: Index of the range.
            rows: Shuffled metadata rows of the range, in any order.
        """
        metadata = pl.from_arrow(rows)
        assert isinstance(metadata, pl.DataFrame)
        low = range_index * ITEMS_PER_PART
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
            differing=_count_differing(metadata),
        )


def _count_differing(metadata: pl.DataFrame) -> int:
    """Count the repeated rows that differ from the first row of their item."""
    first_of_file = pl.col(CONTENT).first().over("item_index", FILE)
    within_files = metadata.filter(pl.col(CONTENT) != first_of_file).height
    first_rows = metadata.unique(
        ["item_index", FILE], keep="first", maintain_order=True
    )
    contents = first_rows.unique(["item_index", CONTENT]).height
    return within_files + contents - metadata["item_index"].n_unique()


@dataclass(frozen=True)
class WrittenItems:
    """Written parts of items, not yet committed, and counts of their metadata."""

    ranges: list[WrittenRange]
    files: list[FileSummary]
    hashes: dict[str, str]
    """Hash of the parsed bytes of each file."""
    rejected: RejectCounts

    @property
    def parts(self) -> list[Part]:
        """Parts in the order of `item_index`."""
        return [written.part for written in self.ranges]

    @property
    def missing(self) -> np.ndarray:
        """(M,) item_index of items without metadata."""
        return np.concatenate([written.missing for written in self.ranges])

    @property
    def first_ids(self) -> list[str]:
        """The first ids of the first item file that has any."""
        return next((file.first_ids for file in self.files if file.first_ids), [])


def write_items(run: Run, files: list[str], catalogue: pa.Array) -> WrittenItems:
    """Write the parts of the items table, without committing them.

    Items without metadata have null texts. Metadata of items outside the catalogue is
    dropped. Both are counted.

    Args:
        run: Log, settings and tables of this call of `prepare`.
        files: Item files, relative to the input folder.
        catalogue: (N,) ids in the order of `item_index`.
    """
    executor: Executor = run.executor
    ranges = math.ceil(len(catalogue) / ITEMS_PER_PART)
    vocabulary = executor.put(Vocabulary.from_ids(catalogue))
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
    for output in executor.exchange(exchange, in_process=is_small):
        if isinstance(output, ReadSummary):
            summaries[output.index] = output.value
        else:
            written.append(output)
    file_summaries = [summaries[index] for index in range(len(files))]
    rejected = RejectCounts()
    for summary in file_summaries:
        rejected.add(summary.rejected)
    missing = common_missing([summary.missing for summary in file_summaries])
    check_missing(missing, "item", run.input)
    digests = [summary.digest for summary in file_summaries]
    return WrittenItems(
        sorted(written, key=lambda part: part.low),
        file_summaries,
        dict(zip(files, digests, strict=True)),
        rejected,
    )


def _check_metadata(
    run: Run, catalogue: Catalogue, written: WrittenItems, stats: EventStats
) -> None:
    """Warn or raise if few items of the k-core, or few behaviours, have metadata."""
    in_core, missing = catalogue.in_core, written.missing
    # (items in the core,) behaviours on each, as both arrays of ids are sorted
    is_in_core = pc.is_in(stats.items, in_core).to_numpy(zero_copy_only=False)
    events = stats.counts[is_in_core]
    if run.source.keeps_all_items or catalogue.extends:
        # from an index in the catalogue to an index in the core
        missing_ids = catalogue.ids.take(pa.array(missing)).cast(in_core.type)
        missing = pc.index_in(missing_ids, in_core).to_numpy().astype(np.int64)
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
