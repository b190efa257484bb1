"""Raw files to the events table: read, validate, shuffle by user, sort, drop duplicates, write.

Ray Data partitions and schedules; polars and numpy do the work on whole partitions. After this step
every user is in exactly one part, sorted, so that each later step is one task per part.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import ray.data
from ray.data.context import ShuffleStrategy

from models.tables import Part, UserError, open_uri
from pipelines.data.sources.base import Block, Source
from pipelines.data.tables import write_part
from pipelines.data.tasks import run_all

TALLY = -1  # user_key of a row that carries counts instead of an event
BYTES_PER_PARTITION = 32 << 20  # of raw text; one partition then sorts in a few hundred MB
EXPANSION = {"gz": 4, "zst": 4, "bz2": 6, "parquet": 6}  # bytes of text per byte of a compressed file


@dataclass
class Ingested:
    """What the step wrote, to be committed."""

    parts: list[Part] = field(default_factory=list)
    rejects: list[Part] = field(default_factory=list)
    rows_read: int = 0
    duplicates: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    """One rejected row per reason: file, row and source."""


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


def user_keys(users: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """63-bit hashes of the user ids.

    The shuffle goes by this integer and not by the id: Ray hashes keys with polars if it is there and
    else with Python's `hash`, which for strings is another one in every process.
    """
    hashes = pl.Series(pl.from_arrow(users)).hash(seed=0).to_numpy()
    return (hashes >> np.uint64(1)).astype(np.int64)


def transit_schema(schema: pa.Schema, log_order: bool) -> pa.Schema:
    """Columns that travel through the shuffle: the key, the event, and its place in the log if it counts."""
    # Strings travel as they are, with 64-bit offsets: a partition may hold more than 2 GB of them, over
    # Arrow's 32-bit limit. Dictionary-coding them first was measured on 1 million events and 32
    # partitions: 0.17 s of processor time and 75 MB shuffled against 0.07 s and 63 MB, because every
    # shard carries the whole dictionary of its block; coding all but the user ids gained no time.
    fields = [f.with_type(pa.large_string()) if f.type == pa.string() else f for f in schema]
    place = [pa.field("log_place", pa.int64())] if log_order else []
    return pa.schema([pa.field("user_key", pa.int64()), *(f.with_nullable(True) for f in fields), *place])


def _tally_row(tally: dict[str, Any]) -> pa.Table:
    """Counts as a row of the data, so that they arrive exactly as often as the rows they count: once,
    even if Ray runs the task twice."""
    return pa.table({"user_key": [TALLY], "user_id": pa.array([json.dumps(tally)], pa.large_string())})


UNSET = {"request_id": "", "position": 0}  # value of a column that the log does not have; the others are null


def drop_unset(table: pa.Table) -> pa.Table:
    """Without the columns that hold nothing in this block: half of the bytes of a plain log."""

    def unset(name: str) -> bool:
        if name not in UNSET:
            return bool(table[name].null_count == table.num_rows)
        return bool(pc.all(pc.equal(table[name], UNSET[name])).as_py())

    return table.drop_columns([name for name in table.column_names if unset(name)])


def restore_unset(table: pa.Table, transit: pa.Schema) -> pa.Table:
    """With all columns of `transit` again. Where one block had a column and another had not, Ray's
    concatenation has put nulls."""
    for wanted in transit:
        if wanted.name not in table.column_names:
            unset = pa.scalar(UNSET.get(wanted.name), wanted.type)
            table = table.append_column(wanted, pa.repeat(unset, table.num_rows))
        elif wanted.name in UNSET and table[wanted.name].null_count:
            index = table.column_names.index(wanted.name)
            table = table.set_column(index, wanted, pc.fill_null(table[wanted.name], UNSET[wanted.name]))
    return table.select(transit.names).cast(transit)


class ReadError(UserError):
    """A UserError of a raw file, in words that Ray's notes on retries are not added to."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return self.text


def _blocks(source: Source, input_uri: str, file: str) -> Iterator[Block]:
    try:
        yield from source.read_events(input_uri, file)
    except UserError as error:
        raise ReadError(str(error)) from None


def _read(
    batch: pa.Table, source: Source, input_uri: str, rejects_uri: str, schema: pa.Schema, log_order: bool
) -> Iterator[pa.Table]:
    """Streams raw files as shuffle-ready tables; writes their rejects."""
    for number, file in zip(batch["number"].to_pylist(), batch["file"].to_pylist(), strict=True):
        for sequence, block in enumerate(_blocks(source, input_uri, file)):
            tally: dict[str, Any] = {"order": [number, sequence], "rows_read": block.rows_read}
            if block.rejects.num_rows:
                tally["part"] = asdict(write_part(rejects_uri, block.rejects))
                reasons = block.rejects["reason"].to_pylist()
                tally["reasons"] = Counter(reasons)
                tally["examples"] = {}
                for reason in tally["reasons"]:
                    row = block.rejects.slice(reasons.index(reason), 1).to_pylist()[0]
                    tally["examples"][reason] = f"{row['file']} row {row['row']}: {row['source'][:200]}"
            yield _tally_row(tally)
            if not block.events.num_rows:
                continue
            columns = {"user_key": pa.array(user_keys(block.events["user_id"]))}
            columns |= {name: block.events[name] for name in schema.names if name in block.events.column_names}
            if log_order:
                columns["log_place"] = pc.add(block.events["log_row"], pa.scalar(number << 40, pa.int64()))
            yield drop_unset(pa.table(columns).select(schema.names).cast(schema))


def order_events(table: pa.Table, schema: pa.Schema) -> tuple[pa.Table, int]:
    """Sorts one partition and drops exact duplicates: (events, number of duplicates).

    The order is total: (user_id, timestamp_ms, request_id, position, item_id), then every other column,
    so the result does not depend on the order of the input. With a `log_place` column (`ties:
    log_order`) events of equal user, time and request stay in the log's order, and `position` becomes
    the rank among them.

    Most logs have few ties, so the bulk of the sort is one argsort of an integer: the user's rank and
    the time in 63 bits. Only tied rows are compared column by column.
    """
    rows = table.num_rows
    users = pc.dictionary_encode(table["user_id"].combine_chunks())
    users = users.combine_chunks() if isinstance(users, pa.ChunkedArray) else users
    rank = np.empty(len(users.dictionary), dtype=np.int64)
    rank[pc.sort_indices(users.dictionary).to_numpy()] = np.arange(len(users.dictionary))
    user = rank[users.indices.to_numpy()]  # (rows,) rank of the user id within the partition
    time = table["timestamp_ms"].to_numpy()
    start, span = int(time.min()), int(time.max()) - int(time.min()) + 1
    if span * len(rank) < 2**63:
        key = user * span + (time - start)
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
        order_, duplicate, position = _order_ties(table.take(pa.array(chosen)), group, schema)
        order[tied] = chosen[order_]
        if position is not None:
            positions = np.zeros(rows, dtype=np.int32)
            positions[tied] = position
        if duplicate.any():
            keep = np.ones(rows, dtype=bool)
            keep[tied] = ~duplicate
            order = order[keep]
            positions = positions[keep] if positions is not None else None
            duplicates = int(duplicate.sum())
    if "log_place" in table.column_names and positions is None:
        positions = np.zeros(len(order), dtype=np.int32)
    events = table.select(schema.names).take(pa.array(order))
    if positions is not None:
        events = events.set_column(schema.get_field_index("position"), "position", pa.array(positions))
    return events.cast(schema), duplicates


def _order_ties(
    table: pa.Table, group: np.ndarray, schema: pa.Schema
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
        kept = frame.with_columns((~duplicate).cast(pl.Int32).alias("kept"))
        position = kept.select(pl.col("kept").cum_sum().over("group", "request_id") - 1).to_series()
        return frame["row"].to_numpy(), duplicate.to_numpy(), position.to_numpy()
    frame = frame.sort(ranked)
    duplicate = frame.select(
        pl.all_horizontal(pl.col(name).eq_missing(pl.col(name).shift(1)) for name in content)
    ).to_series()
    flags = duplicate.to_numpy().copy()
    flags[0] = False
    return frame["row"].to_numpy(), flags, None


def _write(table: pa.Table, events_uri: str, schema: pa.Schema, transit: pa.Schema) -> Iterator[pa.Table]:
    """One partition: passes the tallies on, orders the events, writes their part."""
    is_tally = pc.less(table["user_key"], 0)
    records = [json.loads(text) for text in table.filter(is_tally)["user_id"].to_pylist()]
    table = table.filter(pc.invert(is_tally)) if records else table
    if table.num_rows:
        table = restore_unset(table, transit)
        events, duplicates = order_events(table, schema)
        part = asdict(write_part(events_uri, events))
        records.append({"events": part, "first": events["user_id"][0].as_py(), "duplicates": duplicates})
    if records:
        yield pa.table({"record": [json.dumps(record) for record in records]})


def ingest(
    source: Source,
    input_uri: str,
    files: list[str],
    events_uri: str,
    rejects_uri: str,
    partitions: int,
    log_order: bool,
    progress: Callable[[str], None] = lambda line: None,
) -> Ingested:
    """Reads the raw files and writes the parts of events and rejects, uncommitted."""
    schema = source.schema
    transit = transit_schema(schema, log_order)
    read = partial(
        _read, source=source, input_uri=input_uri, rejects_uri=rejects_uri, schema=transit, log_order=log_order
    )
    names = [{"number": number, "file": file} for number, file in enumerate(files)]
    blocks = ray.data.from_items(names, override_num_blocks=len(names)).map_batches(
        read, batch_size=1, batch_format="pyarrow"
    )
    return shuffle(blocks, schema, transit, events_uri, partitions, progress)


def shuffle(
    blocks: ray.data.Dataset,
    schema: pa.Schema,
    transit: pa.Schema,
    events_uri: str,
    partitions: int,
    progress: Callable[[str], None],
) -> Ingested:
    """From rows of `transit` (less the columns that are unset) to the parts of the events table, one per partition."""
    context = blocks.context
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # it prints tracebacks of errors that are raised too
    # Ray's other strategy, shuffle_v2, took 34 s of processor time for 5 million events where this took 22: it
    # starts four more worker processes and copies each shard through a stream of its own.
    context.shuffle_strategy = ShuffleStrategy.HASH_SHUFFLE
    if len(ray.nodes()) == 1:  # else the shuffle's idle actors hold a share of a CPU: on two, one task at a time
        context.hash_shuffle_operator_actor_num_cpus_override = 0
    written = blocks.repartition(partitions, keys=["user_key"]).map_batches(
        partial(_write, events_uri=events_uri, schema=schema, transit=transit), batch_size=None, batch_format="pyarrow"
    )
    result = Ingested()
    parts: list[tuple[str, Part]] = []
    rejects: list[tuple[list[int], Part]] = []
    for record in _records(written):
        if "events" in record:
            parts.append((record["first"], Part(**record["events"])))
            result.duplicates += record["duplicates"]
            rows = sum(part.rows for _, part in parts)
            progress(f"partition {len(parts)} of {partitions} sorted and written, {rows:,} events")
            continue
        result.rows_read += record["rows_read"]
        if "part" in record:
            rejects.append((record["order"], Part(**record["part"])))
            result.reasons.update(record["reasons"])
            for reason, example in record["examples"].items():
                result.examples[reason] = min(example, result.examples.get(reason, example))
    result.parts = [part for _, part in sorted(parts, key=lambda pair: pair[0])]
    result.rejects = [part for _, part in sorted(rejects, key=lambda pair: pair[0])]
    return result


def _records(written: ray.data.Dataset) -> Iterator[dict[str, Any]]:
    batch: Any
    try:
        for batch in written.iter_batches(batch_size=None, batch_format="pyarrow"):
            yield from map(json.loads, batch["record"].to_pylist())
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise UserError(str(error.cause)) from None
        raise
