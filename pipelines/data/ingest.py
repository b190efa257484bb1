"""Raw files to the events table: read, validate, shuffle by user, sort, drop duplicates, write.

`python -m jobs.prepare` runs it. Ray Data brings the rows of a user together (`dataflow.py`); numpy, Arrow and polars
do the work on whole partitions. After this step every user is in exactly one part, sorted, so that each later step is
one task per part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from models.tables import Part, UserError, join, open_uri
from models.words import number_of
from pipelines.data.dataflow import KEY, TALLY, Engine, Shared, fetch, partition_keys, tally_row
from pipelines.data.matching import Match, compare, sample
from pipelines.data.sources.base import Rejected, Source
from pipelines.data.sources.pieces import Piece, cuts, piece_at
from pipelines.data.sources.preview import check_missing
from pipelines.data.sources.readers import format_of, whole_only
from pipelines.data.survey import Gathering, Seen, coded, seen_in, user_keys
from pipelines.data.tables import write_part

BYTES_PER_PARTITION = 32 << 20  # of raw text; one partition then sorts in a few hundred MB
EXPANSION = {"gz": 4, "zst": 4, "bz2": 6, "parquet": 6}  # bytes of text per byte of a compressed file


@dataclass
class Ingested:
    """What the step wrote, to be committed."""

    parts: list[Part] = field(default_factory=list)
    """Of events, in the order of their first users."""
    users: int = 0
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
    try:
        with filesystem.open_input_stream(path, buffer_size=1 << 20) as stream:
            while chunk := stream.read(8 << 20):
                digest.update(chunk)
    except OSError as error:  # compressed files are unpacked here
        raise UserError(f"{uri} cannot be read ({error}); it may be truncated or damaged: copy it again") from error
    return digest.hexdigest()


def hash_files(uris: list[str], engine: Engine) -> list[str]:
    """sha256 of every file."""
    return [digest for _, digest in sorted(engine.each(hash_file, [(uri,) for uri in uris]))]


def partitions_for(uris: list[str]) -> int:
    """Number of partitions for the raw files, from their sizes."""
    total = 0
    for uri in uris:
        filesystem, path = open_uri(uri)
        total += filesystem.get_file_info(path).size * EXPANSION.get(uri.rsplit(".", 1)[-1], 1)
    return max(1, -(-total // BYTES_PER_PARTITION))


def pieces_of(
    source: Source, input_uri: str, files: list[str], size: int, engine: Engine
) -> list[tuple[str, Piece | None]]:
    """The files in order, those of more than `size` bytes in pieces of about that where they can be cut: Parquet at row
    groups, text at lines, CSV if no value of the file is quoted. A first pass over text counts its rows, so that each
    row has its own number."""
    calls: dict[str, list[tuple[Any, ...]]] = {}
    quoted_values = set()
    for file in files:
        calls[file] = []
        reading = source.reading_of(file)
        if reading is None or whole_only(file, reading):
            continue
        uri, kind = join(input_uri, file), format_of(file, reading.format)
        header = kind == "csv" and not reading.header
        calls[file] = [(uri, kind, header, cut) for cut in cuts(uri, kind, size)]
        quoted_values |= {file} if kind == "csv" and reading.quote is not False else set()
    every = [call for file in files for call in calls[file]]
    found = iter(piece for _, piece in sorted(engine.each(piece_at, every), key=itemgetter(0)))
    pieces: list[tuple[str, Piece | None]] = []
    for file in files:
        mine = [next(found) for _ in calls[file]]
        if len(mine) < 2 or (file in quoted_values and any(quoted for _, _, quoted in mine)):
            pieces.append((file, None))
            continue
        first_row = 0
        for piece, rows, _ in mine:
            if piece.start < piece.end:
                pieces.append((file, replace(piece, first_row=first_row)))
            first_row += rows
    return pieces


UNSET = {"request_id": "", "position": 0}
"""Values of columns that a log does not have; the others are null."""


def transit_schema(source: Source, log_order: bool) -> pa.Schema:
    """Columns that travel through the shuffle: what the log has of an event, its place in the log if it counts, and
    the key of its partition."""
    # Strings travel as they are. Dictionary-coding them first was measured on 1 million events and 32
    # partitions: 0.17 s of processor time and 75 MB shuffled against 0.07 s and 63 MB, because every
    # shard carries the whole dictionary of its block; coding all but the user ids gained no time.
    events = [field.with_nullable(True) for field in source.schema if field.name not in source.absent]
    place = [pa.field("log_place", pa.int64())] if log_order else []
    return pa.schema([*events, *place, pa.field(KEY, pa.int32())])


def restore_unset(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """With all columns of `schema`, in its order."""
    columns = [
        table[wanted.name]
        if wanted.name in table.column_names
        else pa.repeat(pa.scalar(UNSET.get(wanted.name), wanted.type), table.num_rows)
        for wanted in schema
    ]
    return pa.table(columns, schema=pa.schema([f.with_type(c.type) for f, c in zip(schema, columns, strict=True)]))


@dataclass
class _Tally:
    """What was read beside the events."""

    rejected: Rejected = field(default_factory=Rejected)
    events: int = 0
    """Rows that went into the shuffle."""
    parts: list[tuple[tuple[int, int], Part]] = field(default_factory=list)
    """Of the rejects: the numbers of the read and of the block in it, and the part."""
    missing: dict[str, str] | None = None
    """As `Block.missing`, of all blocks; None before the first."""

    def add(self, other: _Tally) -> None:
        """Adds what another tally counts; the result does not depend on the order, but for the parts'."""
        self.rejected.add(other.rejected)
        self.events += other.events
        self.parts += other.parts
        if self.missing is None or other.missing is None:
            self.missing = other.missing if self.missing is None else self.missing
        else:
            self.missing = {name: hint for name, hint in self.missing.items() if name in other.missing}


@dataclass(frozen=True)
class _Read:
    """Reads a raw file, or a piece of one, as tables to exchange, and writes its rejects."""

    number: int
    """Its place among all that is read."""
    file: str
    source: Source
    input_uri: str
    rejects_uri: str
    transit: pa.Schema
    keys: np.ndarray
    users: Shared
    piece: Piece | None

    def __call__(self) -> Iterator[pa.Table]:
        total = _Tally()
        blocks = self.source.read_events(self.input_uri, self.file, fetch(self.users), self.piece)
        for sequence, block in enumerate(blocks):
            tally = _Tally(Rejected.of(block), block.events.num_rows, [], block.missing)
            if block.rejects.num_rows:
                tally.parts.append(((self.number, sequence), write_part(self.rejects_uri, block.rejects)))
            total.add(tally)
            yield self.to_send(block.events)
        yield tally_row(self.transit, "user_id", total)

    def to_send(self, events: pa.Table) -> pa.Table:
        """The events as they travel."""
        columns = {name: events[name] for name in self.transit.names if name in events.column_names}
        columns[KEY] = pa.array(self.keys[user_keys(events["user_id"]) % len(self.keys)])
        if "log_place" in self.transit.names:
            columns["log_place"] = pc.add(events["log_row"], pa.scalar(self.number << 40, pa.int64()))
        return pa.table({name: columns[name] for name in self.transit.names}).cast(self.transit)


def sorted_codes(strings: pa.Array | pa.ChunkedArray) -> tuple[np.ndarray, pa.Array]:
    """The values as int32 indices into their sorted set, and that set."""
    coded = pc.dictionary_encode(strings)
    coded = coded.combine_chunks() if isinstance(coded, pa.ChunkedArray) else coded
    order = pc.sort_indices(coded.dictionary)
    rank = np.empty(len(order), dtype=np.int32)
    rank[order.to_numpy()] = np.arange(len(order), dtype=np.int32)
    return rank[coded.indices.to_numpy()], coded.dictionary.take(order)


def order_events(
    table: pa.Table, schema: pa.Schema, keep_duplicates: bool = False, count: str | None = None
) -> tuple[pa.Table, int]:
    """Sorts one partition and drops exact duplicates, unless they are kept: (events, number of duplicates). The ids of
    the result are dictionary-coded, each dictionary sorted; unset columns may be missing from `table`. count: the
    column that gets how often an event was there.

    The order is total: (user_id, timestamp_ms, request_id, position, item_id), then every other column,
    so the result does not depend on the order of the input. With a `log_place` column (`ties:
    log_order`) events of equal user and time stay in the log's order, those of one row by their position, and
    `position` becomes the rank among them.

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
    repeats = np.ones(rows, dtype=np.float32) if count else None
    if same.any():
        tied = np.zeros(rows, dtype=bool)
        tied[1:] |= same
        tied[:-1] |= same
        group = np.concatenate([[0], np.cumsum(~same)])[tied]  # number of the (user, time) group
        chosen = order[tied]
        place = [pa.field("log_place", pa.int64())] if "log_place" in table.column_names else []
        ties = restore_unset(table.take(pa.array(chosen)), pa.schema([*schema, *place]))
        order_, duplicate, position, times = _order_ties(ties, group, schema, keep_duplicates, bool(count))
        order[tied] = chosen[order_]
        if repeats is not None:
            repeats[tied] = times
        if position is not None:
            positions = np.zeros(rows, dtype=np.int32)
            positions[tied] = position
        duplicates = int(duplicate.sum())
        if duplicates and not keep_duplicates:
            keep = np.ones(rows, dtype=bool)
            keep[tied] = ~duplicate
            order = order[keep]
            positions = positions[keep] if positions is not None else None
            repeats = repeats[keep] if repeats is not None else None
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
    if repeats is not None and count:
        taken[count] = pa.array(repeats)
    return restore_unset(pa.table(taken), schema).combine_chunks(), duplicates


def _long(kind: pa.DataType) -> pa.DataType:
    """With 64-bit offsets: a partition may hold more than 2 GB of text on its way, over Arrow's 32-bit limit."""
    return pa.large_string() if kind == pa.string() else kind


def _order_ties(
    table: pa.Table, group: np.ndarray, schema: pa.Schema, keep_duplicates: bool, counted: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]:
    """For rows that are tied with a neighbour on (user, time): their order, and in that order which
    rows are duplicates of an earlier one, (under log order) the position of each, and where it is counted how often
    each is there."""
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    log_order = "log_place" in frame.columns
    frame = frame.with_columns(pl.Series("group", group), pl.int_range(pl.len()).alias("row"))
    others = [name for name in schema.names if name not in ("request_id", "position", "item_id", "user_id")]
    content = [*schema.names, "group"]
    ranked = ["group", "request_id", "position", "item_id", *others]
    if log_order:
        # the earliest of equal rows stays; equal rows need not be neighbours in the log
        frame = frame.sort("group", "log_place", "position")
        duplicate = ~frame.select(pl.struct(content).is_first_distinct()).to_series()
        kept = frame.with_columns((~duplicate | keep_duplicates).cast(pl.Int32).alias("kept"))
        position = kept.select(pl.col("kept").cum_sum().over("group") - 1).to_series()
        return frame["row"].to_numpy(), duplicate.to_numpy(), position.to_numpy(), _times(frame, content, counted)
    frame = frame.sort(ranked)
    duplicate = frame.select(
        pl.all_horizontal(pl.col(name).eq_missing(pl.col(name).shift(1)) for name in content)
    ).to_series()
    flags = duplicate.to_numpy().copy()
    flags[0] = False
    return frame["row"].to_numpy(), flags, None, _times(frame, content, counted)


def _times(frame: pl.DataFrame, content: list[str], counted: bool) -> np.ndarray | None:
    """(rows,) how many rows are equal to each in all of `content`; None where that is not asked for."""
    return frame.select(pl.len().over(content)).to_series().to_numpy() if counted else None


def _match_users(user: pa.DictionaryArray, described: pa.Table | None) -> tuple[Match, list[str]]:
    """How many users of one partition the user files describe, and some of the others."""
    if described is None:
        return Match(), []
    ids = user.dictionary
    known = pc.is_in(ids, described.column(0).cast(ids.type)).to_numpy(zero_copy_only=False)
    of_known = int(known[user.indices.to_numpy()].sum())
    return Match(len(ids), int(known.sum()), len(user), of_known), sample(ids.filter(pa.array(~known)))


@dataclass(frozen=True)
class _Written:
    """One partition, written."""

    part: Part
    first: str
    """Its first user."""
    duplicates: int
    users: int
    seen: Seen | None
    """What its behaviours are; None once that is gathered."""
    matched: tuple[Match, list[str]]
    """Users with a row in the user files, and some of the others."""


@dataclass(frozen=True)
class _Write:
    """Orders the events of one partition and writes their part."""

    events_uri: str
    schema: pa.Schema
    behaviour: str | None
    keep_duplicates: bool
    count: str | None
    keys: np.ndarray

    def __call__(self, described: pa.Table | None, key: int, rows: pa.Table) -> _Written:
        events, duplicates = order_events(rows, self.schema, self.keep_duplicates, self.count)
        user = coded(events, "user_id")
        strays = int((self.keys[user_keys(user.dictionary) % len(self.keys)] != key).sum())
        if strays:
            raise RuntimeError(f"the shuffle put {strays} users into the wrong partition; nothing was committed")
        part = write_part(self.events_uri, events)
        seen, matched = seen_in(events, self.behaviour, len(self.keys)), _match_users(user, described)
        return _Written(part, user[0].as_py(), duplicates, len(user.dictionary), seen, matched)


def ingest(
    source: Source,
    input_uri: str,
    files: list[str],
    events_uri: str,
    rejects_uri: str,
    partitions: int,
    log_order: bool,
    engine: Engine,
    gathering: Gathering,
    users: pa.Table | None = None,
    keep_duplicates: bool = False,
    progress: Callable[[str], None] = lambda line: None,
    count: str | None = None,
) -> Ingested:
    """Reads the raw files and writes the parts of events and rejects, uncommitted. `gathering` gets what is seen of
    the parts; `users` are the rows of `Source.read_users`, the id first; `count` is as of `order_events`. UserError for
    a file that cannot be read, and for a key that no file has; RuntimeError unless each event that was read, and so
    each user, is in exactly one part."""
    transit, keys, shared = transit_schema(source, log_order), partition_keys(partitions), engine.put(users)
    reads = [
        _Read(number, file, source, input_uri, rejects_uri, transit, keys, shared, piece)
        for number, (file, piece) in enumerate(
            pieces_of(source, input_uri, files, engine.settings.read_mb << 20, engine)
        )
    ]
    write = _Write(events_uri, source.schema, gathering.behaviour, keep_duplicates, count, keys)
    tally, written = _Tally(), dict[int, _Written]()

    def said(rows: int) -> None:
        if not written:
            progress(f"{number_of(rows, 'row')} read")

    for key, found in engine.exchange(reads, partitions, write, (shared,), "user_id", said):
        if key == TALLY:
            tally.add(found)
            continue
        if key in written:
            raise RuntimeError(f"the shuffle gave partition {len(written)} twice; nothing was committed")
        gathering.add(join(events_uri, found.part.path), found.seen, found.users)
        written[key] = replace(found, seen=None)
        rows = sum(each.part.rows for each in written.values())
        progress(f"partition {len(written)} of {partitions} sorted and written, {rows:,} events")
    check_missing(input_uri, tally.missing or {})
    return _checked(tally, list(written.values()), users, keep_duplicates)


def _checked(tally: _Tally, written: list[_Written], users: pa.Table | None, keep_duplicates: bool) -> Ingested:
    """What was written, in order. RuntimeError where events came out of the shuffle that did not go in, or not all."""
    written = sorted(written, key=lambda partition: partition.first)
    result = Ingested([partition.part for partition in written], rejected=tally.rejected)
    result.rejects = [part for _, part in sorted(tally.parts, key=lambda pair: pair[0])]
    result.duplicates = sum(partition.duplicates for partition in written)
    rows = sum(part.rows for part in result.parts) + (0 if keep_duplicates else result.duplicates)
    if rows != tally.events:
        raise RuntimeError(f"{tally.events:,} events were read and {rows:,} came out of the shuffle; nothing committed")
    result.users = sum(each.users for each in written)
    for partition in written:
        result.matched.add(partition.matched[0])
    if users is not None and result.matched.doubtful:
        ids = sample(pa.array([name for each in written for name in each.matched[1]], pa.string()))
        result.matched.explain(ids, compare(ids, [users.column(0)]))
    return result
