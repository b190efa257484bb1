"""Raw files to the events table: read, validate, shuffle by user, sort, drop duplicates, write.

`python -m jobs.prepare` runs it. Ray Data brings the rows of a user together (`engine.py`); numpy, Arrow and polars
do the work on whole partitions. After this step every user is in exactly one part, sorted, so that each later step is
one task per part.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from models.storage.tables import (
    Manifest,
    Part,
    join,
    open_uri,
    read_parquet,
    write_part,
)
from models.storage.uri import read_json, write_file
from pipelines.data.engine import KEY, Shared, fetch
from pipelines.data.events.event_stats import (
    PartSurvey,
    Surveyor,
    coded,
    seen_in,
    user_keys,
)
from pipelines.data.events.matching import Match
from pipelines.data.reading.log import UNSET, Log
from pipelines.data.reading.read import FilePart, pieces
from pipelines.data.reading.rows import Rejected, check_missing, common
from pipelines.data.run import Run

BYTES_PER_PARTITION = (
    32 << 20
)  # of raw text; one partition then sorts in a few hundred MB
EXPANSION = {
    "gz": 4,
    "zst": 4,
    "bz2": 6,
    "parquet": 6,
}  # bytes of text per byte of a compressed file


@dataclass
class Ingested:
    """What the step wrote, to be committed."""

    parts: list[Part] = field(default_factory=list)
    """Of events, in the order of their first users."""
    users: int = 0
    rejects: list[Part] = field(default_factory=list)
    rejected: Rejected = field(default_factory=Rejected)
    hashes: dict[str, str] = field(default_factory=dict)
    """Of the bytes that were parsed, by file."""
    of_parts: list[dict[str, Any]] = field(default_factory=list)
    """Of each part what the manifest says of it, by which it is appended to: OF_PARTITION."""
    duplicates: int = 0
    """Found, whether dropped or kept."""
    matched: Match = field(default_factory=Match)
    """How many users have a row in the user files."""


def partitions_for(uris: list[str]) -> int:
    """Number of partitions for the raw files, from their sizes."""
    total = 0
    for uri in uris:
        filesystem, path = open_uri(uri)
        total += filesystem.get_file_info(path).size * EXPANSION.get(
            uri.rsplit(".", 1)[-1].lower(), 1
        )
    return max(1, -(-total // BYTES_PER_PARTITION))


def transit_schema(source: Log, log_order: bool) -> pa.Schema:
    """Columns that travel through the shuffle: what the log has of an event, its place in the log if it counts, and
    its partition."""
    # Strings travel as they are. Dictionary-coding them first was measured on 1 million events and 32
    # partitions: 0.17 s of processor time and 75 MB shuffled against 0.07 s and 63 MB, because every
    # shard carries the whole dictionary of its block; coding all but the user ids gained no time.
    events = [
        field.with_nullable(True)
        for field in source.schema
        if field.name not in source.absent
    ]
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
    return pa.table(
        columns,
        schema=pa.schema(
            [f.with_type(c.type) for f, c in zip(schema, columns, strict=True)]
        ),
    )


def write_tally(uri: str, number: int, rejected: Rejected, **more: Any) -> None:
    """What a task read beside its rows, as a small file that is named by its number: a task that Ray runs twice writes
    it twice."""
    write_file(
        join(uri, f"tally-{number}.json"),
        json.dumps({"rejected": vars(rejected), **more}).encode(),
    )


def read_tallies(uri: str, reads: int) -> Iterator[tuple[Rejected, dict[str, Any]]]:
    """What the tasks of all numbers wrote."""
    for number in range(reads):
        said = read_json(join(uri, f"tally-{number}.json"))
        rejected = said.pop("rejected")
        yield (
            Rejected(
                rejected["rows_read"],
                Counter(rejected["reasons"]),
                rejected["examples"],
            ),
            said,
        )


def combined(digests: list[str]) -> str:
    """The hash of a file from those of its pieces in order."""
    return (
        digests[0]
        if len(digests) == 1
        else hashlib.sha256("".join(digests).encode()).hexdigest()
    )


def hash_file(run: Run, file: str) -> str:
    """The hash of a file of events that `ingest` would take; it is read whole."""
    digests = []
    for piece in pieces(
        join(run.input, file), run.source, run.engine.settings.read_mb << 20
    ):
        digests.append(hashlib.sha256())
        for _ in run.source.read_events(run.input, file, None, piece, 0, digests[-1]):
            pass
    return combined([digest.hexdigest() for digest in digests])


@dataclass(frozen=True)
class _Read:
    """Reads raw files, or pieces of them, as tables to exchange, and writes their rejects."""

    pieces: list[tuple[str, FilePart | None]]
    source: Log
    input_uri: str
    events_uri: str
    rejects_uri: str
    transit: pa.Schema
    partitions: int
    users: Shared

    def __call__(self, number: int) -> Iterator[pa.Table]:
        file, piece = self.pieces[number]
        total, events, parts, missing, digest = Rejected(), 0, [], [], hashlib.sha256()
        for block in self.source.read_events(
            self.input_uri, file, fetch(self.users), piece, number, digest
        ):
            total.add(Rejected.from_block(block))
            if block.rejects.num_rows:
                parts.append(asdict(write_part(self.rejects_uri, block.rejects)))
            missing.append(block.missing)
            events += block.rows.num_rows
            yield self.to_send(block.rows, number)
        yield self.transit.empty_table()
        write_tally(
            self.events_uri,
            number,
            total,
            events=events,
            parts=parts,
            missing=common(missing),
            rows=len(missing),
            digest=digest.hexdigest(),
        )

    def to_send(self, events: pa.Table, number: int) -> pa.Table:
        """The events as they travel."""
        columns = {
            name: events[name]
            for name in self.transit.names
            if name in events.column_names
        }
        columns[KEY] = pa.array(
            (user_keys(events["user_id"]) % self.partitions).astype(np.int32)
        )
        if "log_place" in self.transit.names:
            # from 1 on, after the positions of events that are there
            columns["log_place"] = pc.add(
                events["log_row"], pa.scalar((number + 1) << 40, pa.int64())
            )
        return pa.table({name: columns[name] for name in self.transit.names}).cast(
            self.transit
        )


def sorted_codes(strings: pa.Array | pa.ChunkedArray) -> tuple[np.ndarray, pa.Array]:
    """The values as int32 indices into their sorted set, and that set."""
    coded = pc.dictionary_encode(strings)
    coded = coded.combine_chunks() if isinstance(coded, pa.ChunkedArray) else coded
    order = pc.sort_indices(coded.dictionary)
    rank = np.empty(len(order), dtype=np.int32)
    rank[order.to_numpy()] = np.arange(len(order), dtype=np.int32)
    return rank[coded.indices.to_numpy()], coded.dictionary.take(order)


def order_events(
    table: pa.Table, schema: pa.Schema, keep_duplicates: bool = False
) -> tuple[pa.Table, int]:
    """Sorts one partition and drops exact duplicates, unless they are kept: (events, number of duplicates). The ids of
    the result are dictionary-coded, each dictionary sorted; unset columns may be missing from `table`.

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
        same = (user[order][1:] == user[order][:-1]) & (
            time[order][1:] == time[order][:-1]
        )
    duplicates = 0
    positions = None
    if same.any():
        tied = np.zeros(rows, dtype=bool)
        tied[1:] |= same
        tied[:-1] |= same
        group = np.concatenate([[0], np.cumsum(~same)])[
            tied
        ]  # number of the (user, time) group
        chosen = order[tied]
        place = (
            [pa.field("log_place", pa.int64())]
            if "log_place" in table.column_names
            else []
        )
        ties = restore_unset(table.take(pa.array(chosen)), pa.schema([*schema, *place]))
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
        positions = (
            np.zeros(len(order), dtype=np.int32) if positions is None else positions
        )
    taken = {
        field.name: table[field.name]
        .cast(_long(field.type))
        .take(pa.array(order))
        .cast(field.type)
        for field in schema
        if field.name in table.column_names and field.name not in codes
    }
    taken |= {
        name: pa.DictionaryArray.from_arrays(code[order], ids)
        for name, (code, ids) in codes.items()
    }
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
    rows are duplicates of an earlier one, (under log order) the position of each."""
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    log_order = "log_place" in frame.columns
    frame = frame.with_columns(
        pl.Series("group", group), pl.int_range(pl.len()).alias("row")
    )
    others = [
        name
        for name in schema.names
        if name not in ("request_id", "position", "item_id", "user_id")
    ]
    content = [*schema.names, "group"]
    ranked = ["group", "request_id", "position", "item_id", *others]
    if log_order:
        # the earliest of equal rows stays; equal rows need not be neighbours in the log
        frame = frame.sort("group", "log_place", "position")
        duplicate = ~frame.select(pl.struct(content).is_first_distinct()).to_series()
        kept = frame.with_columns(
            (~duplicate | keep_duplicates).cast(pl.Int32).alias("kept")
        )
        position = kept.select(pl.col("kept").cum_sum().over("group") - 1).to_series()
        return frame["row"].to_numpy(), duplicate.to_numpy(), position.to_numpy()
    frame = frame.sort(ranked)
    duplicate = frame.select(
        pl.all_horizontal(
            pl.col(name).eq_missing(pl.col(name).shift(1)) for name in content
        )
    ).to_series()
    flags = duplicate.to_numpy().copy()
    flags[0] = False
    return frame["row"].to_numpy(), flags, None


OF_PARTITION = ["key", "first", "duplicates", "users", "matched"]
"""Columns of what is known of a partition, beside those of its part and of `PartSurvey`."""

OF_PART = ["path", "bytes", "rows", "sha256", *OF_PARTITION]


@dataclass(frozen=True)
class _Write:
    """Orders the events of one partition, those that are there and new ones, and writes their part; gives a row of what
    is known of it."""

    events_uri: str
    schema: pa.Schema
    behaviour: str | None
    keep_duplicates: bool
    partitions: int
    there: dict[int, dict[str, Any]]
    """By key what is known of the partitions that are there."""

    def __call__(
        self, described: pa.Table | None, key: int, rows: pa.Table
    ) -> pa.Table:
        there = self.there.get(key)
        if there:
            rows = pa.concat_tables([self.read(there["path"], rows.schema), rows])
        events, duplicates = order_events(rows, self.schema, self.keep_duplicates)
        duplicates += there["duplicates"] if there and not self.keep_duplicates else 0
        user = coded(events, "user_id")
        if strays := int((user_keys(user.dictionary) % self.partitions != key).sum()):
            raise RuntimeError(
                f"the shuffle put {strays} users into the wrong partition; nothing was committed"
            )
        part = write_part(self.events_uri, events)
        row = {
            **asdict(part),
            "key": key,
            "first": user[0].as_py(),
            "duplicates": duplicates,
            "users": len(user.dictionary),
            "matched": json.dumps(_match_users(user, described).record()),
        }
        seen = seen_in(events, self.behaviour)
        return pa.table(
            {name: pa.array([value]) for name, value in row.items()} | seen.as_row()
        )

    def read(self, path: str, transit: pa.Schema) -> pa.Table:
        """A part that is there, as rows that come from the log; its positions are places in the log, if these count."""
        names = [name if name != "log_place" else "position" for name in transit.names]
        return (
            read_parquet(join(self.events_uri, path), names)
            .select(names)
            .rename_columns(transit.names)
            .cast(transit)
        )


def _match_users(user: pa.DictionaryArray, described: pa.Table | None) -> Match:
    """How many users of one partition the user files describe."""
    if described is None:
        return Match()
    known = pc.is_in(
        user.dictionary, described["user_id"].cast(user.dictionary.type)
    ).to_numpy(zero_copy_only=False)
    others = user.dictionary.filter(pa.array(~known)).slice(0, 2).to_pylist()
    return Match(
        len(known),
        int(known.sum()),
        len(user),
        int(known[user.indices.to_numpy()].sum()),
        others,
    )


def ingest(
    run: Run,
    files: list[str],
    partitions: int,
    surveyor: Surveyor,
    users: pa.Table | None,
    before: Manifest | None,
) -> Ingested:
    """Reads the raw files and writes the parts of events and rejects, uncommitted. `surveyor` gets what is seen of the
    parts; `users` are the rows of `Log.read_users`. `before` are the events that the files are joined to: partitions
    without a new row keep their parts. UserError for a file that cannot be read, and for a column that no file has;
    RuntimeError unless each event that was read, and so each user, is in exactly one part."""
    source, engine, keep_duplicates = (
        run.source,
        run.engine,
        run.config.duplicates == "keep",
    )
    events_uri, rejects_uri = run.table("events"), run.table("rejects")
    size = engine.settings.read_mb << 20
    every = [
        (file, piece)
        for file in files
        for piece in pieces(join(run.input, file), source, size)
    ]
    transit = transit_schema(source, run.config.ties == "log_order")
    read = _Read(
        every,
        source,
        run.input,
        events_uri,
        rejects_uri,
        transit,
        partitions,
        engine.put(users),
    )
    there = {
        row["key"]: {**asdict(part), **row}
        for part, row in (
            zip(before.files, before.info["parts"], strict=True) if before else ()
        )
    }
    write = _Write(
        events_uri,
        source.schema,
        surveyor.behaviour,
        keep_duplicates,
        partitions,
        there,
    )
    written: dict[int, dict[str, Any]] = {}
    for found in engine.exchange(
        read, len(every), partitions, write, (engine.put(users),)
    ):
        for at, row in enumerate(found.select(OF_PART).to_pylist()):
            if row["key"] in written:
                raise RuntimeError(
                    f"the shuffle gave partition {row['key']} twice; nothing was committed"
                )
            surveyor.add(
                join(events_uri, row["path"]),
                PartSurvey.from_row(found.slice(at, 1)),
                row["users"],
            )
            written[row["key"]] = row
    kept = {key: row for key, row in there.items() if key not in written}
    surveyor.read([join(events_uri, row["path"]) for row in kept.values()], engine)
    events = sum(
        row["rows"] + (0 if keep_duplicates else row["duplicates"])
        for row in there.values()
    )
    result, missing = Ingested(), []
    digests: dict[str, list[str]] = {file: [] for file in files}
    for (file, _), (rejected, said) in zip(
        every, read_tallies(events_uri, len(every)), strict=True
    ):
        result.rejected.add(rejected)
        result.rejects += [Part(**part) for part in said["parts"]]
        events += said["events"]
        missing += [said["missing"]] if said["rows"] else []
        digests[file].append(said["digest"])
    lacking = common(missing)
    if before is None:
        check_missing(lacking, "event", run.input)
    for name, hint in lacking.items():
        run.say(
            f"warning: no new file has a column '{name}', which is left empty; {hint}"
        )
    result.hashes = {file: combined(of_file) for file, of_file in digests.items()}
    for row in sorted((written | kept).values(), key=lambda row: row["first"]):
        result.of_parts.append({name: row[name] for name in OF_PARTITION})
        result.parts.append(Part(row["path"], row["bytes"], row["rows"], row["sha256"]))
        result.users += row["users"]
        result.duplicates += row["duplicates"]
        result.matched.add(Match(**json.loads(row["matched"])))
    rows = sum(part.rows for part in result.parts) + (
        0 if keep_duplicates else result.duplicates
    )
    if rows != events:
        raise RuntimeError(
            f"{events:,} events were read and {rows:,} came out of the shuffle; nothing was committed"
        )
    if users is not None and result.matched.doubtful:
        result.matched.others = users["user_id"].slice(0, 2).to_pylist()
    return result
