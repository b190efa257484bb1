"""Build the tables `events` and `rejects` from raw files.

`python -m jobs.prepare` calls `make_events`. Rows are read, validated and shuffled by
user (`executor.py`). Kernels on whole partitions sort them, drop duplicates and write
one part each. As every user is in exactly one part, later steps run one task per part.
An append adds its rows to the parts of their users.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import polars as pl
import pyarrow as pa

from core.errors import UserError, pluralize
from core.files import join, open_uri
from core.schemas import REJECTS, EventsInfo, Match, PartitionInfo, RejectsInfo
from core.splits import HOUR_MS
from core.tables import Part, Table, read_parquet, write_frame
from pipelines.prepare.executor import KEY, Exchange, ReadSummary, Shared, fetch
from pipelines.prepare.reading.log import Log
from pipelines.prepare.reading.read import FilePart, split_file
from pipelines.prepare.reading.rows import (
    LOG_ROW,
    RejectCounts,
    check_missing,
    read_events,
    read_section,
)
from pipelines.prepare.run import EventStats, Run

BYTES_PER_PARTITION = 32 << 20
"""Bytes of raw text per partition; sorting a partition takes a few hundred MB."""

EXPANSION = {"gz": 4, "zst": 4, "bz2": 6, "parquet": 6}
"""Estimated bytes of text per byte of a file, by the suffix of the file."""

MAX_REJECT_SHARE = 0.5
"""Share of rejected rows above which the mapping is considered wrong at once."""

WARN_BELOW = 0.9
"""Share of matched ids below which a warning is printed."""

DUPLICATES_WORD = {"drop": "dropped", "keep": "kept"}

MISSING_VALUES = {"request_id": "", "position": 0}
"""Values of columns that a log does not have. Other missing columns are null."""

LOG_PLACE = "log_place"
"""Column with the row number of an event in the log; only with `ties: log_order`."""


def count_partitions(uris: list[str]) -> int:
    """Return the number of partitions for raw files, from their sizes and suffixes."""
    text_bytes = 0
    for uri in uris:
        filesystem, path = open_uri(uri)
        suffix = uri.rsplit(".", 1)[-1].lower()
        text_bytes += filesystem.get_file_info(path).size * EXPANSION.get(suffix, 1)
    return max(1, math.ceil(text_bytes / BYTES_PER_PARTITION))


def matched_share(match: Match) -> float:
    """Return the smaller of the matched shares of ids and of events, 1 without ids."""
    if not match.ids:
        return 1.0
    of_ids = match.ids_matched / match.ids
    return min(of_ids, match.events_matched / max(match.events, 1))


def check_matched(
    match: Match, noun: str, min_matched: float, report: Callable[[str], None]
) -> None:
    """Warn if few ids of the events have a row in their files.

    Args:
        match: Counts of ids.
        noun: Kind of the ids: `item` or `user`.
        min_matched: Minimum share of ids, and of events, with a row.
        report: Prints a line.
    """
    share = matched_share(match)
    if share >= max(min_matched, WARN_BELOW) or not match.ids:
        return
    share_of_ids = match.ids_matched / match.ids
    share_of_events = match.events_matched / max(match.events, 1)
    line = (
        f"{match.ids_matched:,} of {match.ids:,} {noun}s ({share_of_ids:.1%}), with "
        f"{share_of_events:.1%} of the events, have a row in the {noun} files: events "
        f"have {', '.join(map(repr, match.unmatched)) or 'none'}, the {noun} files "
        f"{', '.join(map(repr, match.others)) or 'none'}"
    )
    if share < min_matched:
        raise UserError(f"{line}, below min_matched {min_matched:g}")
    report(f"warning: {line}")


# The step: which files to read, and what the manifests record.


def make_events(run: Run, num_partitions: int) -> Table[EventsInfo]:
    """Write the tables `events` and `rejects`, or append new files to them.

    Args:
        run: Log, settings and tables of this call of `prepare`.
        num_partitions: Number of partitions; ignored for existing events that are
            appended to, unless the configuration sets it.
    """
    earlier = run.appended_version("events")
    if earlier:
        num_partitions = run.config.partitions or earlier.config["partitions"]
    files = run.source.event_files(run.input)
    user_files = run.source.user_files(run.input)
    stamps = run.stamps([*files, *user_files])
    settings: dict[str, Any] = {
        "source": run.source.events_config,
        "ties": run.config.ties,
        "partitions": num_partitions,
        "duplicates": run.config.duplicates,
    }
    settings = json.loads(json.dumps(settings, default=str))
    events = earlier
    if earlier:
        files = _find_new_files(run, earlier, settings, stamps, user_files)
        stamps = {**earlier.info.stamps, **stamps}
        if not files:
            rows = pluralize(earlier.rows, "row")
            run.report(f"events: up to date, {rows}; no new files")
    else:
        events = run.find_finished(EventsInfo, settings, {}, stamps)
        if not run.find_finished(RejectsInfo, settings, {}, stamps):
            events = None
    if events is None or (earlier and files):
        events = _read_files(run, files, user_files, stamps, settings, earlier)
    return events


def _find_new_files(
    run: Run,
    earlier: Table[EventsInfo],
    settings: dict[str, Any],
    stamps: dict[str, list[int]],
    user_files: list[str],
) -> list[str]:
    """Return the files that the events lack; refuse other settings and old files."""
    source, old, inputs = run.source, earlier.info.stamps, dict(earlier.inputs)
    for file in old.keys() & stamps.keys():
        # a copy of an event file has another time and the same size
        parts = slice(None if file in user_files else 1)
        if old[file][parts] != stamps[file][parts]:
            inputs[file] = "changed"
    for file in {*user_files} ^ {*earlier.info.user_files}:
        inputs[file] = "changed"
    mapping = {**settings["source"], "files": earlier.config["source"]["files"]}
    earlier.check_made_with({**settings, "source": mapping}, inputs)
    new_files = sorted(stamps.keys() - old.keys())
    continues = bool(source.event_time.column or source.sequence)
    if run.config.ties == "log_order" and new_files:
        continues = continues and "position" in source.absent_columns
        continues = continues and new_files[0] > max(old.keys() - user_files)
    if new_files and not continues:
        raise UserError(
            f"cannot append to {run.table_uri('events')}: its events are in the "
            f"order of the log, which {new_files[0]} does not continue",
            "settings",
        )
    return new_files


def _read_files(
    run: Run,
    files: list[str],
    user_files: list[str],
    stamps: dict[str, list[int]],
    settings: dict[str, Any],
    earlier: Table[EventsInfo] | None,
) -> Table[EventsInfo]:
    """Read event files, and commit `events` and `rejects`."""
    partitions, keep = settings["partitions"], run.config.duplicates == "keep"
    run.report(
        f"events: reading {pluralize(len(files), 'file')} into "
        f"{pluralize(partitions, 'partition')}"
    )
    begin = time.perf_counter()
    users = None
    if run.source.users:
        rows, rejected = read_section(run.source.users, run.input, user_files)
        run.check_rejects(rejected, " of the user files")
        users = rows.unique("user_id", keep="first", maintain_order=True)
    written, rejected, reject_parts, stats = exchange_events(
        run, files, partitions, users, earlier
    )
    if not earlier:
        check_missing(rejected.missing, "event", run.input)
    for name, hint in (rejected.missing or {}).items():
        run.report(
            f"warning: no new file has a column '{name}', so its values are "
            f"missing; {hint}"
        )
    run.check_rejects(rejected)
    if not rejected.rows_read and not earlier:
        raise UserError(f"{run.input} has no rows in {', '.join(files[:3])}")
    if not written:
        raise UserError(f"{run.input} has no valid event")
    matched, duplicates = Match(), 0
    for _, partition in written:
        matched.add(partition.matched)
        duplicates += partition.duplicates
    if users is not None and matched_share(matched) < WARN_BELOW:
        matched.others = users["user_id"].head(2).to_list()
    check_matched(matched, "user", run.config.min_matched, run.report)
    rows_read, reasons = rejected.rows_read, rejected.reasons
    left_out = rejected.left_out
    if earlier:
        rows_read += earlier.info.rows_read
        left_out += earlier.info.rows_left_out
        reasons = Counter(earlier.info.reject_reasons) + reasons
    info = EventsInfo(
        log=run.source.info,
        parts=[partition for _, partition in written],
        ties=run.config.ties,
        rows_read=rows_read,
        rejects=reasons.total(),
        reject_reasons=dict(sorted(reasons.items())),
        rows_left_out=left_out,
        duplicates=0 if keep else duplicates,
        duplicates_kept=duplicates if keep else None,
        users=stats.users,
        first_ms=stats.first_ms,
        last_ms=stats.last_ms,
        stamps=stamps,
        user_files=user_files,
    )
    events = run.commit(
        "events",
        run.source.schema,
        [part for part, _ in written],
        settings,
        {},
        info,
    )
    old_rejects: list[Part] = []
    if earlier:
        rejects = run.existing["rejects"]
        old_rejects = rejects.files
        if rejects.info.stamps != earlier.info.stamps:
            # A run that was killed after it committed rejects and before it
            # committed events has left rejects of files that events do not contain.
            old_rejects = old_rejects[: rejects.info.old_files]
    parts = [*old_rejects, *reject_parts]
    rejects_info = RejectsInfo(stamps, len(old_rejects))
    run.commit("rejects", REJECTS, parts, settings, {}, rejects_info)
    run.report(
        f"events: {pluralize(events.rows, 'row')} of "
        f"{pluralize(info.users, 'user')}, each in one part "
        f"({pluralize(duplicates, 'duplicate')} "
        f"{DUPLICATES_WORD[run.config.duplicates]}, "
        f"{pluralize(info.rejects, 'reject')}) in "
        f"{time.perf_counter() - begin:.1f} s"
    )
    return events


# The rows: read by file, shuffled by user, written by partition.


@dataclass(frozen=True)
class WrittenPartition:
    """A written part of the events table, with the events of one partition."""

    part: Part
    info: PartitionInfo
    received: int
    """Number of rows that the shuffle returned."""
    stats: EventStats
    """Statistics of the behaviours."""


def read_piece(
    pieces: list[tuple[str, FilePart | None]],
    source: Log,
    input_uri: str,
    rejects_uri: str,
    log_order: bool,
    partitions: int,
    max_rejects: float,
    users: Shared,
    piece_index: int,
) -> Iterator[pl.DataFrame | ReadSummary]:
    """Yield the rows of one piece with their partition, then a summary.

    Rejected rows are written to parts of `rejects`, which the summary lists after the
    counts of rejects.

    Args:
        pieces: File, and piece of the file, of each read.
        source: Mapping of the raw log.
        input_uri: Input folder.
        rejects_uri: Folder of the table `rejects`.
        log_order: Whether rows have their position in the log (`ties: log_order`).
        partitions: Number of partitions.
        max_rejects: Maximum share of rejected rows.
        users: Rows of the user files, or None.
        piece_index: Index of the piece to read.
    """
    file, piece = pieces[piece_index]
    rejected = RejectCounts()
    reject_parts: list[Part] = []
    # hashes are the same in every process
    partition = pl.col("user_id").hash(seed=0) // 2 % partitions
    keys = [partition.cast(pl.Int32).alias(KEY)]
    if log_order:
        # Values start at 1 << 40, above the positions of events in existing parts.
        place = pl.col(LOG_ROW) + ((piece_index + 1) << 40)
        keys.append(place.alias(LOG_PLACE))
    blocks = read_events(source, input_uri, file, fetch(users), piece, piece_index)
    for block in blocks:
        is_first = not piece_index and not rejected.rows_read
        rejected.add(block.counts)
        if is_first:  # the mapping is wrong: stop early
            rejected.check(max(max_rejects, MAX_REJECT_SHARE), " of the first events")
        if block.rejects.height:
            reject_parts.append(write_frame(rejects_uri, block.rejects, REJECTS))
        yield block.rows.with_columns(keys).drop(LOG_ROW)
    # a summary follows a frame, and a piece may have no block
    empty = pl.DataFrame(schema=pl.Schema(source.schema)).with_columns(
        pl.lit(0, pl.Int64).alias(LOG_ROW)
    )
    yield empty.with_columns(keys).drop(LOG_ROW, *source.absent_columns)
    yield ReadSummary(piece_index, (rejected, reject_parts))


def write_partition(
    events_uri: str,
    schema: pa.Schema,
    behaviour: str | None,
    keep_duplicates: bool,
    existing: dict[int, tuple[Part, PartitionInfo]],
    users: pl.DataFrame | None,
    partition: int,
    rows: pl.DataFrame,
) -> WrittenPartition:
    """Sort the events of a partition, and write its part.

    Args:
        events_uri: Folder of the table `events`.
        schema: Schema of the events.
        behaviour: Label that makes an event a behaviour; None if all events are.
        keep_duplicates: Keep events that repeat another event in every column.
        existing: Parts of earlier runs, by partition, to merge with new events.
        users: Rows of the user files, or None.
        partition: Index of the partition.
        rows: Shuffled rows of the partition, in any order.
    """
    received, old_duplicates = rows.height, 0
    if partition in existing:
        part, info = existing[partition]
        # with `ties: log_order`, the position in the log of earlier events
        old = pl.DataFrame(read_parquet(join(events_uri, part.path)))
        old = old.with_columns(pl.col("position").cast(pl.Int64).alias(LOG_PLACE))
        rows = pl.concat([old.select(rows.columns), rows])
        old_duplicates = 0 if keep_duplicates else info.duplicates
    events, duplicates = order_events(rows, schema, keep_duplicates)
    return WrittenPartition(
        part=write_frame(events_uri, events, schema),
        info=PartitionInfo(
            partition=partition,
            first_user=events["user_id"][0],
            duplicates=duplicates + old_duplicates,
            matched=_match_users(events["user_id"], users),
        ),
        received=received,
        stats=part_stats(events, behaviour),
    )


def _match_users(user: pl.Series, described: pl.DataFrame | None) -> Match:
    """Count the users of one partition that have a row in the user files."""
    if described is None:
        return Match()
    ids = user.dtype.categories  # type: ignore[attr-defined]
    is_matched = ids.is_in(described["user_id"].implode())
    return Match(
        ids=len(is_matched),
        ids_matched=is_matched.sum(),
        events=len(user),
        events_matched=is_matched.gather(user.to_physical()).sum(),
        unmatched=ids.filter(~is_matched).head(2).to_list(),
    )


def exchange_events(
    run: Run,
    files: list[str],
    partitions: int,
    users: pl.DataFrame | None,
    earlier: Table[EventsInfo] | None,
) -> tuple[list[tuple[Part, PartitionInfo]], RejectCounts, list[Part], EventStats]:
    """Read raw files and write parts of events and rejects, without committing them.

    Args:
        run: Log, settings and tables of this call of `prepare`.
        files: Event files, relative to the input folder.
        partitions: Number of partitions.
        users: Rows of the user files, or None.
        earlier: Table of the events that the files are appended to, or None.
            Partitions without new rows keep their part.

    Returns:
        The partitions with events, in the order of their first users, the counts and
        the parts of rejects, in the order of the log, and the statistics of the events.

    Raises:
        RuntimeError: If the shuffle did not return each event exactly once.
    """
    source, executor = run.source, run.executor
    events_uri = run.table_uri("events")
    existing: dict[int, tuple[Part, PartitionInfo]] = {}
    if earlier:
        pairs = zip(earlier.files, earlier.info.parts, strict=True)
        existing = {info.partition: (part, info) for part, info in pairs}
    size = executor.settings.read_mb << 20
    pieces = [
        (file, piece)
        for file in files
        for piece in split_file(join(run.input, file), source, size)
    ]
    shared_users = executor.put(users)
    keep_duplicates = run.config.duplicates == "keep"
    exchange = Exchange(
        partial(
            read_piece,
            pieces,
            source,
            run.input,
            run.table_uri("rejects"),
            run.config.ties == "log_order",
            partitions,
            run.config.max_rejects,
            shared_users,
        ),
        len(pieces),
        partial(
            write_partition,
            events_uri,
            source.schema,
            run.behaviour,
            keep_duplicates,
            existing,
        ),
        partitions,
        shared=(shared_users,),
    )
    summaries: dict[int, tuple[RejectCounts, list[Part]]] = {}
    current, received = dict(existing), 0

    def receive() -> Iterator[EventStats]:
        """Yield the statistics of each part, after it is written or if it stays."""
        nonlocal received
        for output in executor.exchange(exchange):
            if isinstance(output, ReadSummary):
                summaries[output.index] = output.value
                continue
            received += output.received
            current[output.info.partition] = output.part, output.info
            yield output.stats
        old_parts = [key for key, pair in existing.items() if current[key] is pair]
        uris = [join(events_uri, existing[key][0].path) for key in old_parts]
        yield from read_stats(run, uris)

    stats = merge_stats(receive())
    written = sorted(current.values(), key=lambda pair: pair[1].first_user)
    rejected = RejectCounts()
    reject_parts: list[Part] = []
    for index in range(len(pieces)):
        counts, parts = summaries[index]
        rejected.add(counts)
        reject_parts += parts
    expected = rejected.rows_read - rejected.rejects
    if received != expected:
        raise RuntimeError(
            f"{expected:,} events were read, but the shuffle returned {received:,}; "
            f"nothing was committed"
        )
    return written, rejected, reject_parts, stats


# Parts: their order, and their statistics for the catalogue and the split.


def read_part(uri: str, columns: list[str]) -> pl.DataFrame:
    """Read columns of a part of the events table."""
    return pl.DataFrame(read_parquet(uri, columns))


def is_behaviour(behaviour: str | None) -> pl.Expr:
    """Return whether an event has the label that makes it a behaviour."""
    return pl.col(f"label_{behaviour}").fill_null(False) if behaviour else pl.lit(True)


def label_columns(behaviour: str | None, is_late: bool = False) -> list[str]:
    """Return the columns of a label: its value, and the time at which it is known.

    The list is empty without a label. Only a label that is known later than its event
    has a time.
    """
    names = [f"label_{behaviour}", f"known_{behaviour}"]
    return names[: 1 + is_late] if behaviour else []


def order_events(
    events: pl.DataFrame, schema: pa.Schema, keep_duplicates: bool = False
) -> tuple[pl.DataFrame, int]:
    """Sort the events of one partition and drop exact duplicates.

    Events are sorted by (user_id, timestamp_ms, request_id, position, item_id) and then
    by every other column, so the result does not depend on the order of the input. With
    a column `log_place` (`ties: log_order`), events of one user and time are sorted by
    (log_place, position) instead, and `position` becomes their rank in this order.

    Rows are sorted by one integer of user and time. Only ties, which are rare in most
    logs, are sorted by other columns.

    Args:
        events: Events in any order; columns that the log does not have may be missing.
        schema: Schema of the result.
        keep_duplicates: Keep events that repeat another event in every column.

    Returns:
        The events, whose ids are enums in the order of their text, and the number of
        duplicates, whether dropped or kept.
    """
    types = pl.Schema(schema)
    missing = {
        name: pl.lit(MISSING_VALUES.get(name), types[name])
        for name in schema.names
        if name not in events.columns
    }
    ids = [_to_enum(events[name]) for name in ("user_id", "item_id")]
    events = events.with_columns(*ids, **missing)
    time = events["timestamp_ms"]
    [key] = user_time_keys([(events["user_id"].to_physical(), time)])
    events = events.with_columns(key=key).sort("key")
    is_first = (events["key"].diff() != 0).fill_null(True)
    is_tied = ~(is_first & is_first.shift(-1, fill_value=True))
    duplicates = 0
    if is_tied.any():
        order = ["request_id", "position", "item_id", *schema.names]
        if LOG_PLACE in events.columns:
            order = [LOG_PLACE, "position"]
        ties = events.filter(is_tied).sort("key", *dict.fromkeys(order))
        distinct = ties.unique(schema.names, keep="first", maintain_order=True)
        duplicates = ties.height - distinct.height
        ties = ties if keep_duplicates else distinct
        events = pl.concat([events.filter(~is_tied), ties])
        events = events.sort("key", maintain_order=True)
    if LOG_PLACE in events.columns:
        rank = pl.int_range(pl.len(), dtype=pl.Int32).over("key")
        events = events.with_columns(position=rank)
    return events.select(schema.names), duplicates


def user_time_keys(columns: list[tuple[pl.Series, pl.Series]]) -> list[pl.Series]:
    """Return integers that sort like pairs of a user and a time, in all columns."""
    lows: list[Any] = [time.min() for _, time in columns if len(time)]
    highs: list[Any] = [time.max() for _, time in columns if len(time)]
    users: list[Any] = [user.max() for user, _ in columns if len(user)]
    first = min(lows, default=0)
    span = max(highs, default=0) - first + 1
    kind = pl.Int64 if (max(users, default=0) + 1) * span < 2**63 else pl.Int128
    return [
        user.cast(kind) * span + (time.cast(kind) - first) for user, time in columns
    ]


def _to_enum(strings: pl.Series) -> pl.Series:
    """Return strings as an enum of their sorted values."""
    # Arrow encodes in one pass, which takes polars a pass for the values and another
    encoded = strings.to_arrow().dictionary_encode()
    values = pl.Series(encoded.dictionary)
    order = values.arg_sort()
    rank = pl.Series(order.arg_sort(), dtype=pl.UInt32)
    codes = rank.gather(pl.Series(encoded.indices).cast(pl.UInt32))
    return codes.cat.to(pl.Enum(values.gather(order))).alias(strings.name)


def part_stats(events: pl.DataFrame, behaviour: str | None) -> EventStats:
    """Compute the statistics of one part of the events table.

    Args:
        events: Events of the part, sorted by user.
        behaviour: Label that makes an event a behaviour; None if every event is a
            behaviour.
    """
    users = events["user_id"].n_unique()
    events = events.filter(is_behaviour(behaviour))
    items = events.group_by(pl.col("item_id").alias("id")).len("count")
    items = items.cast({"id": pl.String, "count": pl.Int64})
    time = events["timestamp_ms"]
    if not len(time):
        return EventStats(users, items, {})
    hours = (time // HOUR_MS * HOUR_MS).value_counts(name="rows")
    first_ms, last_ms = time.to_numpy().min(), time.to_numpy().max()
    return EventStats(
        users, items, dict(hours.iter_rows()), int(first_ms), int(last_ms)
    )


def read_stats(run: Run, parts: list[str]) -> Iterator[EventStats]:
    """Read parts of the events table, and yield their statistics in any order."""
    calls = [(uri,) for uri in parts]
    results = run.executor.map_unordered(_read_part_stats, calls, (run.behaviour,))
    return (stats for _, stats in results)


def _read_part_stats(behaviour: str | None, uri: str) -> EventStats:
    columns = ["user_id", "item_id", "timestamp_ms", *label_columns(behaviour)]
    return part_stats(read_part(uri, columns), behaviour)


def merge_stats(parts: Iterable[EventStats]) -> EventStats:
    """Merge the statistics of all parts, in any order.

    A user is in one part only. Counts per item are summed over the parts: the driver
    holds one id and one count per item.
    """
    users = 0
    hours: Counter[int] = Counter()
    times: list[int] = []
    items = IdCounts()
    for stats in parts:
        users += stats.users
        items.add(stats.items)
        hours.update(stats.hours)
        if stats.hours:
            times += [stats.first_ms, stats.last_ms]
    ordered = dict(sorted(hours.items()))
    first_ms, last_ms = min(times, default=0), max(times, default=0)
    return EventStats(users, items.sort(), ordered, first_ms, last_ms)


def load_stats(run: Run, events: Table[EventsInfo]) -> EventStats:
    """Return the statistics of the events, which are read if they are not new."""
    if run.stats is None:
        run.stats = merge_stats(read_stats(run, events.part_uris()))
    if not run.stats.behaviours:
        raise UserError(
            f"no event has label '{run.behaviour}' set, so there are no behaviours"
        )
    return run.stats


class IdCounts:
    """Counts of ids (`id`, `count`), summed over many parts.

    Added ids are buffered until there are as many as distinct ids, so that each id is
    hashed a few times only, whatever the number of parts.
    """

    def __init__(self) -> None:
        self.total = pl.DataFrame(schema={"id": pl.String, "count": pl.Int64})
        self.buffer: list[pl.DataFrame] = []

    def add(self, counts: pl.DataFrame) -> None:
        """Add the counts of distinct ids."""
        self.buffer.append(counts)
        if sum(map(len, self.buffer)) >= len(self.total):
            self._merge()

    def _merge(self) -> None:
        counts = pl.concat([self.total, *self.buffer])
        self.total = counts.group_by("id").agg(pl.col("count").sum())
        self.buffer = []

    def sort(self) -> pl.DataFrame:
        """Return the distinct ids, sorted, and their counts."""
        self._merge()
        return self.total.sort("id")
