"""Raw files to the events table: read, validate, shuffle by user, sort, drop duplicates, write.

`python -m jobs.prepare` runs it. `shuffle.py` parts the rows; numpy, Arrow and polars do the work on whole
partitions. After this step every user is in exactly one part, sorted, so that each later step is one
task per part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import ray

from models.tables import Part, open_uri
from pipelines.data.matching import Match, compare, sample
from pipelines.data.shuffle import Shards, gather, scatter
from pipelines.data.sources.base import Rejected, Source
from pipelines.data.sources.preview import check_missing
from pipelines.data.survey import Arrays, arrays_of, coded
from pipelines.data.tables import write_part
from pipelines.data.tasks import run_all, run_tasks

BYTES_PER_PARTITION = 32 << 20  # of raw text; one partition then sorts in a few hundred MB
EXPANSION = {"gz": 4, "zst": 4, "bz2": 6, "parquet": 6}  # bytes of text per byte of a compressed file


@dataclass
class Ingested:
    """What the step wrote, to be committed."""

    parts: list[Part] = field(default_factory=list)
    """Of events, in the order of their first users."""
    arrays: list[ray.ObjectRef] = field(default_factory=list)
    """What `survey` needs to know of each of those parts."""
    users: int = 0
    """Users of all parts, added up."""
    rejects: list[Part] = field(default_factory=list)
    rejected: Rejected = field(default_factory=Rejected)
    duplicates: int = 0
    """Found, whether dropped or kept."""
    matched: Match = field(default_factory=Match)
    """How many users have a row in the user files."""


def hash_file(uri: str) -> str:
    """sha256 of a file."""
    filesystem, path = open_uri(uri)
    digest = hashlib.sha256()
    with filesystem.open_input_stream(path, buffer_size=1 << 20) as stream:
        while chunk := stream.read(8 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def hash_files(uris: list[str]) -> list[str]:
    """sha256 of every file, one Ray task each."""
    return run_all(hash_file, [(uri,) for uri in uris])


def partitions_for(uris: list[str]) -> int:
    """Number of partitions for the raw files, from their sizes."""
    total = 0
    for uri in uris:
        filesystem, path = open_uri(uri)
        total += filesystem.get_file_info(path).size * EXPANSION.get(uri.rsplit(".", 1)[-1], 1)
    return max(1, -(-total // BYTES_PER_PARTITION))


def transit_schema(schema: pa.Schema, log_order: bool) -> pa.Schema:
    """Columns that travel through the shuffle: the event, and its place in the log if it counts."""
    # Strings travel as they are. Dictionary-coding them first was measured on 1 million events and 32
    # partitions: 0.17 s of processor time and 75 MB shuffled against 0.07 s and 63 MB, because every
    # shard carries the whole dictionary of its block; coding all but the user ids gained no time.
    place = [pa.field("log_place", pa.int64())] if log_order else []
    return pa.schema([*(f.with_nullable(True) for f in schema), *place])


UNSET = {"request_id": "", "position": 0}  # value of a column that the log does not have; the others are null


def drop_unset(table: pa.Table) -> pa.Table:
    """Without the columns that hold nothing in this block: half of the bytes of a plain log."""

    def unset(name: str) -> bool:
        if name not in UNSET:
            return bool(table[name].null_count == table.num_rows)
        return bool(pc.all(pc.equal(table[name], UNSET[name])).as_py())

    return table.drop_columns([name for name in table.column_names if unset(name)])


def restore_unset(table: pa.Table, transit: pa.Schema) -> pa.Table:
    """With all columns of `transit` again. Where one block had a column and another had not, concatenation
    has put nulls."""
    columns = []
    for wanted in transit:
        unset = pa.scalar(UNSET.get(wanted.name), wanted.type)
        if wanted.name not in table.column_names:
            columns.append(pa.repeat(unset, table.num_rows))
        else:
            column = table[wanted.name]
            columns.append(pc.fill_null(column, unset) if wanted.name in UNSET and column.null_count else column)
    return pa.table(columns, schema=pa.schema([f.with_type(c.type) for f, c in zip(transit, columns, strict=True)]))


@dataclass(frozen=True)
class _Tally:
    """What a block of a raw file held beside its events."""

    order: tuple[int, int]
    """Number of the file, and of the block in it."""
    rejected: Rejected
    part: Part | None
    """Of its rejects."""
    missing: dict[str, str]
    """As `Block.missing`."""


def _read(
    number: int,
    file: str,
    source: Source,
    input_uri: str,
    rejects_uri: str,
    transit: pa.Schema,
    users: pa.Table | None,
) -> Iterator[tuple[_Tally, pa.Table]]:
    """Streams a raw file as tables to shuffle; writes its rejects."""
    for sequence, block in enumerate(source.read_events(input_uri, file, users)):
        part = write_part(rejects_uri, block.rejects) if block.rejects.num_rows else None
        tally = _Tally((number, sequence), Rejected.of(block), part, block.missing)
        events = block.events
        if "log_place" in transit.names:
            events = events.append_column("log_place", pc.add(events["log_row"], pa.scalar(number << 40, pa.int64())))
        yield tally, drop_unset(events.select(transit.names).cast(transit))


def _read_shards(partitions: int, *read: Any) -> Iterator[Any]:
    """The file that `_read` takes, by partition."""
    yield from scatter(_read(*read), partitions)


def sorted_codes(strings: pa.Array | pa.ChunkedArray) -> tuple[np.ndarray, pa.Array]:
    """The values as int32 indices into their sorted set, and that set."""
    coded = pc.dictionary_encode(strings)
    coded = coded.combine_chunks() if isinstance(coded, pa.ChunkedArray) else coded
    order = pc.sort_indices(coded.dictionary)
    rank = np.empty(len(order), dtype=np.int32)
    rank[order.to_numpy()] = np.arange(len(order), dtype=np.int32)
    return rank[coded.indices.to_numpy()], coded.dictionary.take(order)


def order_events(table: pa.Table, schema: pa.Schema, keep_duplicates: bool = False) -> tuple[pa.Table, int]:
    """Sorts one partition and drops exact duplicates, unless they are kept: (events, number of duplicates). The ids of
    the result are dictionary-coded, each dictionary sorted; unset columns may be missing from `table`.

    The order is total: (user_id, timestamp_ms, request_id, position, item_id), then every other column,
    so the result does not depend on the order of the input. With a `log_place` column (`ties:
    log_order`) events of equal user, time and request stay in the log's order, and `position` becomes
    the rank among them.

    Most logs have few ties, so the bulk of the sort is one argsort of an integer: the user's rank and
    the time in 63 bits. Only tied rows are compared column by column.
    """
    rows = table.num_rows
    codes = {name: sorted_codes(table[name]) for name in ("user_id", "item_id")}
    user, users = codes["user_id"]  # (rows,) rank of the user id within the partition
    time = table["timestamp_ms"].to_numpy()
    start, span = int(time.min()), int(time.max()) - int(time.min()) + 1
    if span * len(users) < 2**63:
        key = user.astype(np.int64) * span + (time - start)
        order = np.argsort(key)
        key = key[order]
        same = key[1:] == key[:-1]
    else:
        order = np.lexsort((time, user))
        same = (user[order][1:] == user[order][:-1]) & (time[order][1:] == time[order][:-1])
    duplicates = 0
    positions = None
    if same.any():
        tied = np.zeros(rows, dtype=bool)
        tied[1:] |= same
        tied[:-1] |= same
        group = np.concatenate([[0], np.cumsum(~same)])[tied]  # number of the (user, time) group
        chosen = order[tied]
        transit = transit_schema(schema, "log_place" in table.column_names)
        ties = restore_unset(table.take(pa.array(chosen)), transit)
        order_, duplicate, position = _order_ties(ties, group, schema, keep_duplicates)
        order[tied] = chosen[order_]
        if position is not None:
            positions = np.zeros(rows, dtype=np.int32)
            positions[tied] = position
        duplicates = int(duplicate.sum())
        if duplicates and not keep_duplicates:
            keep = np.ones(rows, dtype=bool)
            keep[tied] = ~duplicate
            order = order[keep]
            positions = positions[keep] if positions is not None else None
    if "log_place" in table.column_names:
        positions = np.zeros(len(order), dtype=np.int32) if positions is None else positions
    taken = {
        field.name: table[field.name].cast(_long(field.type)).take(pa.array(order)).cast(field.type)
        for field in schema
        if field.name in table.column_names and field.name not in codes
    }
    taken |= {name: pa.DictionaryArray.from_arrays(code[order], ids) for name, (code, ids) in codes.items()}
    if positions is not None:
        taken["position"] = pa.array(positions)
    return restore_unset(pa.table(taken), schema).combine_chunks(), duplicates


def _long(kind: pa.DataType) -> pa.DataType:
    """With 64-bit offsets: a partition may hold more than 2 GB of text on its way, over Arrow's 32-bit limit."""
    return pa.large_string() if kind == pa.string() else kind


def _order_ties(
    table: pa.Table, group: np.ndarray, schema: pa.Schema, keep_duplicates: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """For rows that are tied with a neighbour on (user, time): their order, and in that order which
    rows are duplicates of an earlier one and (under log order) the position of each."""
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    log_order = "log_place" in frame.columns
    frame = frame.with_columns(pl.Series("group", group), pl.int_range(pl.len()).alias("row"))
    others = [name for name in schema.names if name not in ("request_id", "position", "item_id", "user_id")]
    content = [*schema.names, "group"]
    ranked = ["group", "request_id", "position", "item_id", *others]
    if log_order:
        # the earliest of equal rows stays; equal rows need not be neighbours in the log
        frame = frame.sort("group", "request_id", "log_place")
        duplicate = ~frame.select(pl.struct(content).is_first_distinct()).to_series()
        kept = frame.with_columns((~duplicate | keep_duplicates).cast(pl.Int32).alias("kept"))
        position = kept.select(pl.col("kept").cum_sum().over("group", "request_id") - 1).to_series()
        return frame["row"].to_numpy(), duplicate.to_numpy(), position.to_numpy()
    frame = frame.sort(ranked)
    duplicate = frame.select(
        pl.all_horizontal(pl.col(name).eq_missing(pl.col(name).shift(1)) for name in content)
    ).to_series()
    flags = duplicate.to_numpy().copy()
    flags[0] = False
    return frame["row"].to_numpy(), flags, None


def _match_users(user: pa.DictionaryArray, described: pa.Table | None) -> tuple[Match, list[str]]:
    """How many users of one partition the user files describe, and some of the others."""
    if described is None:
        return Match(), []
    ids = user.dictionary
    known = pc.is_in(ids, described.column(0).cast(ids.type)).to_numpy(zero_copy_only=False)
    of_known = int(known[user.indices.to_numpy()].sum())
    return Match(len(ids), int(known.sum()), len(user), of_known), sample(ids.filter(pa.array(~known)))


def _write(
    events_uri: str,
    schema: pa.Schema,
    behaviour: str | None,
    keep_duplicates: bool,
    described: pa.Table | None,
    *shards: pa.Table,
) -> tuple[tuple[Part, str, int, int, tuple[Match, list[str]]], Arrays]:
    """One partition: orders the events and writes their part. Returns (part, first user, duplicates, users, those
    with a row in the user files) and what `survey` needs to know of the part."""
    table = pa.concat_tables(shards, promote_options="permissive")
    events, duplicates = order_events(table, schema, keep_duplicates)
    part = write_part(events_uri, events)
    arrays, users = arrays_of(events, behaviour)
    matched = _match_users(coded(events, "user_id"), described)
    return (part, events["user_id"][0].as_py(), duplicates, users, matched), arrays


def ingest(
    source: Source,
    input_uri: str,
    files: list[str],
    events_uri: str,
    rejects_uri: str,
    partitions: int,
    log_order: bool,
    behaviour: str | None = None,
    users: pa.Table | None = None,
    keep_duplicates: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> Ingested:
    """Reads the raw files and writes the parts of events and rejects, uncommitted. `behaviour` is for the
    arrays only; `users` are the rows of `Source.read_users`, the id first. UserError for a file that cannot be
    read, and for a key that no file has."""
    result = Ingested()
    shards: Shards = [[] for _ in range(partitions)]
    transit = transit_schema(source.schema, log_order)
    shared = ray.put(users)
    reads = [
        (partitions, number, file, source, input_uri, rejects_uri, transit, shared) for number, file in enumerate(files)
    ]
    rejects: list[tuple[tuple[int, int], Part]] = []
    missing: dict[str, str] | None = None
    tally: _Tally
    for tally in gather(_read_shards, reads, shards):
        result.rejected.add(tally.rejected)
        among = tally.missing if missing is None else missing
        missing = {name: hint for name, hint in among.items() if name in tally.missing}
        progress(f"{result.rejected.rows_read:,} rows read")
        if tally.part:
            rejects.append((tally.order, tally.part))
    check_missing(input_uri, missing or {})
    result.rejects = [part for _, part in sorted(rejects, key=lambda pair: pair[0])]

    filled = [shard for shard in shards if shard]
    del shards
    # popped, so that the store can let go of what is written
    writes = (
        (events_uri, source.schema, behaviour, keep_duplicates, shared, *filled.pop()) for _ in range(len(filled))
    )
    count, rows = len(filled), 0
    written: list[tuple[str, Part, ray.ObjectRef, list[str]]] = []
    match = Match()
    for _, ((part, first, duplicates, of_part, (matched, others)), arrays) in run_tasks(_write, writes, num_returns=2):
        written.append((first, part, arrays, others))
        result.duplicates += duplicates
        result.users += of_part
        match.add(matched)
        rows += part.rows
        progress(f"partition {len(written)} of {count} sorted and written, {rows:,} events")
    written.sort(key=lambda entry: entry[0])
    result.parts = [part for _, part, _, _ in written]
    result.arrays = [arrays for _, _, arrays, _ in written]
    if users is not None and match.doubtful:
        ids = sample(pa.array([name for *_, others in written for name in others], pa.string()))
        match.explain(ids, compare(ids, [users.column(0)]))
    result.matched = match
    return result
