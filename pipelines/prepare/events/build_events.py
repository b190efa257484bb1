"""Build the tables `events` and `rejects` from raw files.

`python -m jobs.prepare` calls `make_events`. Rows are read, validated and shuffled by
user (`executor.py`). Kernels on whole partitions sort them, drop duplicates and write
one part each. As every user is in exactly one part, later steps run one task per part.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from core.errors import UserError, pluralize, raise_first
from core.files import join, open_uri
from core.schemas import REJECTS, EventsInfo, Match, PartitionInfo, RejectsInfo
from core.tables import Part, Table, read_parquet, write_part
from pipelines.prepare.events.columns import dictionary_column, user_keys
from pipelines.prepare.events.event_stats import (
    EventStats,
    PartStats,
    StatsCollector,
    event_stats,
    part_stats,
)
from pipelines.prepare.events.matching import WARN_BELOW, check_matched, matched_share
from pipelines.prepare.events.order_events import LOG_PLACE, order_events
from pipelines.prepare.executor import KEY, Exchange, ReadSummary, Shared, fetch
from pipelines.prepare.reading.log import Log
from pipelines.prepare.reading.read import FilePart, split_file
from pipelines.prepare.reading.rows import RejectCounts, check_missing, common_missing
from pipelines.prepare.run import Run

BYTES_PER_PARTITION = 32 << 20
"""Bytes of raw text per partition; sorting a partition takes a few hundred MB."""

EXPANSION = {"gz": 4, "zst": 4, "bz2": 6, "parquet": 6}
"""Estimated bytes of text per byte of a file, by the suffix of the file."""

DUPLICATES_WORD = {"drop": "dropped", "keep": "kept"}

LoadStats = Callable[[], EventStats]
"""Returns statistics of the events; reads the parts if this run has not read them
yet."""


def count_partitions(uris: list[str]) -> int:
    """Return the number of partitions for raw files, from their sizes and suffixes."""
    text_bytes = 0
    for uri in uris:
        filesystem, path = open_uri(uri)
        suffix = uri.rsplit(".", 1)[-1].lower()
        text_bytes += filesystem.get_file_info(path).size * EXPANSION.get(suffix, 1)
    return max(1, math.ceil(text_bytes / BYTES_PER_PARTITION))


# The step: which files to read, and what the manifests record.


@dataclass(frozen=True)
class LogFiles:
    """Files of a log, relative to the input folder."""

    events: list[str]
    """Event files to read; when appending, only the new files."""
    users: list[str]
    """User files."""
    stamps: dict[str, list[int]]
    """[size, modification time in ns] of these files and of files in the tables."""


def make_events(run: Run, num_partitions: int) -> tuple[Table[EventsInfo], LoadStats]:
    """Write the tables `events` and `rejects`, or append new files to them.

    Args:
        run: Log, settings and tables of this call of `prepare`.
        num_partitions: Number of partitions; ignored for existing events that are
            appended to, unless the configuration sets it.

    Returns:
        The table of the events, and a function that returns their statistics.
    """
    earlier = run.tables.appended_version(EventsInfo)
    if earlier:
        num_partitions = run.config.partitions or earlier.config["partitions"]
    events, users = run.source.event_files(run.input), run.source.user_files(run.input)
    files = LogFiles(events, users, run.stamps([*events, *users]))
    settings: dict[str, Any] = {
        "source": run.source.events_config,
        "ties": run.config.ties,
        "partitions": num_partitions,
        "duplicates": run.config.duplicates,
    }
    settings = json.loads(json.dumps(settings, default=str))
    if earlier:
        files = _check_append(run, earlier, settings, files)
        if not files.events:
            run.report(
                f"events: up to date, {pluralize(earlier.rows, 'row')}; no new files"
            )
            return earlier, _stats_loader(run, earlier)
    else:
        finished = run.tables.find_finished(EventsInfo, settings, {}, files.stamps)
        rejects = run.tables.find_finished(RejectsInfo, settings, {}, files.stamps)
        if finished and rejects:
            return finished, _stats_loader(run, finished)
    committed, stats = _read_files(run, files, settings, earlier)
    return committed, lambda: stats


def _stats_loader(run: Run, events: Table) -> LoadStats:
    """Return a function that reads the statistics of events on its first call."""
    loaded: list[EventStats] = []

    def load() -> EventStats:
        if not loaded:
            parts = events.part_uris()
            late = run.is_late
            loaded.append(event_stats(parts, run.behaviour, run.executor, late))
        return loaded[0]

    return load


def _check_append(
    run: Run, earlier: Table[EventsInfo], settings: dict[str, Any], files: LogFiles
) -> LogFiles:
    """Check that files can be appended to the events, and return the new files."""
    source, old = run.source, earlier.info.stamps
    old_user_files = {*earlier.info.user_files}
    old_files = old.keys() - old_user_files
    new_files = sorted(files.stamps.keys() - old.keys() - {*files.users})
    differing = [
        name
        for name, value in settings.items()
        if name != "source" and earlier.config.get(name) != value
    ]
    sources = (settings["source"], earlier.config["source"])
    mapped, mapped_before = ({**source, "files": ""} for source in sources)
    if mapped != mapped_before:
        differing.insert(0, "source")
    gone = sorted(file for file in old_files if not source.is_event_file(file))
    changed = [
        file
        for file, stamp in files.stamps.items()
        if old.get(file, stamp) != stamp
        and (file in files.users or _hash_file(run, file) != earlier.inputs[file])
    ]
    changed += sorted({*files.users} ^ old_user_files)
    log_order = run.config.ties == "log_order"
    too_early = [file for file in new_files if file < max(old_files)]
    opening = f"cannot append to {run.tables.table_uri('events')}"
    raise_first(
        (differing, f"{opening}: it was made with another {', '.join(differing)}"),
        (
            gone,
            f"{opening}: its file {', '.join(gone[:1])} does not match files "
            f"'{source.files}'",
        ),
        (
            changed,
            f"{opening}: {', '.join(changed[:1])} has changed since the table was made",
        ),
        (
            source.event_time.column is None and not source.sequence,
            f"{opening}: times are the order of rows, which new files do not continue",
        ),
        (
            log_order and "position" not in source.absent_columns,
            f"{opening}: ties is log_order, but the table has no positions of tied "
            "events",
        ),
        (
            log_order and too_early,
            f"{opening}: ties is log_order, and {', '.join(too_early[:1])} sorts "
            "before a file of the table",
        ),
        cause="settings",
    )
    return LogFiles(new_files, files.users, {**old, **files.stamps})


def _hash_file(run: Run, file: str) -> str:
    """Return the hash that `read_partitions` would record for an event file."""
    uri = join(run.input, file)
    digests = []
    for piece in split_file(uri, run.source, run.executor.settings.read_mb << 20):
        digest = hashlib.sha256()
        for _ in run.source.read_events(run.input, file, None, piece, 0, digest):
            pass
        digests.append(digest.hexdigest())
    return _combine_digests(digests)


def _combine_digests(digests: list[str]) -> str:
    """Combine the hashes of a file's pieces, in order, to the hash of the file."""
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _read_files(
    run: Run,
    files: LogFiles,
    settings: dict[str, Any],
    earlier: Table[EventsInfo] | None,
) -> tuple[Table[EventsInfo], EventStats]:
    """Read event files, and commit `events` and `rejects`."""
    partitions = settings["partitions"]
    run.report(
        f"events: reading {pluralize(len(files.events), 'file')} into "
        f"{pluralize(partitions, 'partition')}"
    )
    begin = time.perf_counter()
    with run.tables.clean_up_on_error("events", "rejects"):
        digests = {file: hashlib.sha256() for file in files.users}
        users = run.source.read_users(run.input, digests)
        check_missing(users.missing if users else {}, "user", run.input)
        rejected = RejectCounts.from_block(users) if users else RejectCounts()
        run.check_rejects(rejected, " of the user files")
        user_rows = users.rows if users else None
        result = read_partitions(run, files.events, partitions, user_rows, earlier)
        if not result.rejected.rows_read and not earlier:
            first = ", ".join(files.events[:3])
            raise UserError(f"{run.input} has no rows in {first}")
        run.check_rejects(result.rejected)
        if not result.partitions:
            raise UserError(f"{run.input} has no valid event")
        check_matched(result.matched, "user", run.config.min_matched, run.report)
        read_end = time.perf_counter()
        stats = result.stats.result()
        inputs = {**(earlier.inputs if earlier else {}), **result.hashes}
        inputs |= {file: digest.hexdigest() for file, digest in digests.items()}
        keep = run.config.duplicates == "keep"
        rows_read, reasons = result.rejected.rows_read, result.rejected.reasons
        if earlier:
            rows_read += earlier.info.rows_read
            reasons = Counter(earlier.info.reject_reasons) + reasons
        info = EventsInfo(
            log=run.source.info,
            parts=[written.info for written in result.partitions],
            ties=run.config.ties,
            rows_read=rows_read,
            rejects=reasons.total(),
            reject_reasons=dict(sorted(reasons.items())),
            duplicates=0 if keep else result.duplicates,
            duplicates_kept=result.duplicates if keep else None,
            users=stats.users,
            first_ms=stats.first_ms,
            last_ms=stats.last_ms,
            grain_ms=stats.grain_ms,
            stamps=files.stamps,
            user_files=files.users,
        )
        events = run.tables.commit(
            "events",
            run.source.schema,
            [written.part for written in result.partitions],
            settings,
            inputs,
            info,
            read_shuffle_sort_write_s=read_end - begin,
            survey_s=time.perf_counter() - read_end,
        )
        old_rejects: list[Part] = []
        rejects = run.tables.appended_version(RejectsInfo)
        if rejects and earlier:
            old_rejects = rejects.files
            if rejects.info.stamps != earlier.info.stamps:
                # A run that was killed after it committed rejects and before it
                # committed events has left rejects of files that events do not contain.
                old_rejects = old_rejects[: rejects.info.old_files]
        rejects_info = RejectsInfo(files.stamps, len(old_rejects))
        parts = [*old_rejects, *result.reject_parts]
        run.tables.commit("rejects", REJECTS, parts, settings, inputs, rejects_info)
    duplicates = pluralize(result.duplicates, "duplicate")
    run.report(
        f"events: {pluralize(events.rows, 'row')} of {pluralize(stats.users, 'user')}, "
        f"each in one part ({duplicates} {DUPLICATES_WORD[run.config.duplicates]}, "
        f"{pluralize(info.rejects, 'reject')}) in "
        f"{time.perf_counter() - begin:.1f} s"
    )
    return events, stats


# The rows: read by file, shuffled by user, written by partition.


def shuffle_schema(source: Log, log_order: bool) -> pa.Schema:
    """Return the schema of the shuffled rows.

    Strings are not dictionary-encoded, because every shard would carry the dictionary
    of its whole block: on 1 million events and 32 partitions, encoding took 0.17 s of
    CPU time and shuffled 75 MB, against 0.07 s and 63 MB without. Encoding all columns
    except the user ids saved no time.

    Args:
        source: Mapping of the raw log.
        log_order: Whether rows have their position in the log (`ties: log_order`).
    """
    fields = [
        field.with_nullable(True)
        for field in source.schema
        if field.name not in source.absent_columns
    ]
    if log_order:
        fields.append(pa.field(LOG_PLACE, pa.int64()))
    return pa.schema([*fields, pa.field(KEY, pa.int32())])


@dataclass(frozen=True)
class PieceSummary:
    """Summary of one piece of a raw file, which its reader sends to the driver."""

    rejected: RejectCounts
    events: int
    """Number of valid events."""
    reject_parts: list[Part]
    """Written parts of `rejects`."""
    missing: dict[str, str]
    """Columns that no block of the piece has, each with a hint at a similar name."""
    blocks: int
    digest: str
    """Hash of the parsed bytes."""


@dataclass(frozen=True)
class EventsReader:
    """The read of an exchange: yields rows to shuffle, and writes rejected rows."""

    pieces: list[tuple[str, FilePart | None]]
    """File, and piece of the file, of each read."""
    source: Log
    input_uri: str
    rejects_uri: str
    schema: pa.Schema
    """Schema of the rows, from `shuffle_schema`."""
    partitions: int
    users: Shared
    """Rows of the user files, or None."""

    def __call__(self, piece_index: int) -> Iterator[pa.Table | ReadSummary]:
        """Yield the rows of one piece, followed by its `PieceSummary`."""
        file, piece = self.pieces[piece_index]
        digest = hashlib.sha256()
        rejected = RejectCounts()
        num_events = 0
        reject_parts: list[Part] = []
        missing: list[dict[str, str]] = []
        blocks = self.source.read_events(
            self.input_uri, file, fetch(self.users), piece, piece_index, digest
        )
        for block in blocks:
            rejected.add(RejectCounts.from_block(block))
            if block.rejects.num_rows:
                reject_parts.append(write_part(self.rejects_uri, block.rejects))
            missing.append(block.missing)
            num_events += block.rows.num_rows
            yield self._add_partitions(block.rows, piece_index)
        # the row of the summary takes its schema from the block before it, and a piece
        # may have no block
        yield self.schema.empty_table()
        summary = PieceSummary(
            rejected,
            num_events,
            reject_parts,
            common_missing(missing),
            len(missing),
            digest.hexdigest(),
        )
        yield ReadSummary(piece_index, summary)

    def _add_partitions(self, events: pa.Table, piece_index: int) -> pa.Table:
        """Return events with their partition, in the schema of the shuffle."""
        columns = {
            name: events[name]
            for name in self.schema.names
            if name in events.column_names
        }
        partition = user_keys(events["user_id"]) % self.partitions
        columns[KEY] = pa.array(partition.astype(np.int32))
        if LOG_PLACE in self.schema.names:
            # Values start at 1 << 40, above the positions of events in existing parts.
            first = pa.scalar((piece_index + 1) << 40, pa.int64())
            columns[LOG_PLACE] = pc.add(events["log_row"], first)
        table = pa.table({name: columns[name] for name in self.schema.names})
        return table.cast(self.schema)


@dataclass(frozen=True)
class WrittenPartition:
    """A written part of the events table, with the events of one partition."""

    part: Part
    info: PartitionInfo
    stats: PartStats | None = None
    """Statistics of the behaviours; None for a part of an earlier run."""


@dataclass(frozen=True)
class PartitionWriter:
    """The kernel of an exchange: sorts events of a partition and writes a part."""

    events_uri: str
    schema: pa.Schema
    behaviour: str | None
    keep_duplicates: bool
    partitions: int
    existing: dict[int, WrittenPartition]
    """Parts of earlier runs, by partition, to merge with new events."""

    def __call__(
        self, users: pa.Table | None, partition: int, rows: pa.Table
    ) -> WrittenPartition:
        """Write the part of a partition.

        Args:
            users: Rows of the user files, or None.
            partition: Index of the partition.
            rows: Shuffled rows of the partition, in any order.
        """
        existing = self.existing.get(partition)
        if existing:
            old_rows = self._read_part(existing.part.path, rows.schema)
            rows = pa.concat_tables([old_rows, rows])
        events, duplicates = order_events(rows, self.schema, self.keep_duplicates)
        if existing and not self.keep_duplicates:
            duplicates += existing.info.duplicates
        user = dictionary_column(events, "user_id")
        is_misplaced = user_keys(user.dictionary) % self.partitions != partition
        if is_misplaced.any():
            raise RuntimeError(
                f"the shuffle put {is_misplaced.sum()} users into the wrong partition; "
                f"nothing was committed"
            )
        return WrittenPartition(
            part=write_part(self.events_uri, events),
            info=PartitionInfo(
                partition=partition,
                first_user=user[0].as_py(),
                duplicates=duplicates,
                matched=_match_users(user, users),
            ),
            stats=part_stats(events, self.behaviour),
        )

    def _read_part(self, path: str, schema: pa.Schema) -> pa.Table:
        """Read a part of an earlier run in the schema of the shuffle."""
        names = ["position" if name == LOG_PLACE else name for name in schema.names]
        part = read_parquet(join(self.events_uri, path), names).select(names)
        return part.rename_columns(schema.names).cast(schema)


def _match_users(user: pa.DictionaryArray, described: pa.Table | None) -> Match:
    """Count the users of one partition that have a row in the user files."""
    if described is None:
        return Match()
    ids = described["user_id"].cast(user.dictionary.type)
    is_matched = pc.is_in(user.dictionary, ids).to_numpy(zero_copy_only=False)
    unmatched = user.dictionary.filter(pa.array(~is_matched)).slice(0, 2)
    return Match(
        ids=len(is_matched),
        ids_matched=int(is_matched.sum()),
        events=len(user),
        events_matched=int(is_matched[user.indices.to_numpy()].sum()),
        unmatched=unmatched.to_pylist(),
    )


@dataclass
class ReadResult:
    """Written parts of events and rejects, not yet committed, and their counts."""

    stats: StatsCollector
    partitions: list[WrittenPartition] = field(default_factory=list)
    """Partitions with events, in the order of their first users."""
    reject_parts: list[Part] = field(default_factory=list)
    rejected: RejectCounts = field(default_factory=RejectCounts)
    hashes: dict[str, str] = field(default_factory=dict)
    """Hash of the parsed bytes of each file."""
    matched: Match = field(default_factory=Match)
    """Counts of users with a row in the user files."""

    @property
    def duplicates(self) -> int:
        """Number of duplicates, whether dropped or kept."""
        return sum(written.info.duplicates for written in self.partitions)


def read_partitions(
    run: Run,
    files: list[str],
    partitions: int,
    users: pa.Table | None,
    earlier: Table[EventsInfo] | None,
) -> ReadResult:
    """Read raw files and write parts of events and rejects, without committing them.

    Args:
        run: Log, settings and tables of this call of `prepare`.
        files: Event files, relative to the input folder.
        partitions: Number of partitions.
        users: Rows of the user files, or None.
        earlier: Table of the events that the files are appended to, or None.
            Partitions without new rows keep their part.

    Raises:
        RuntimeError: if the parts do not contain each event exactly once.
    """
    reader = _create_reader(run, files, partitions, users)
    existing: dict[int, WrittenPartition] = {}
    if earlier:
        for part, info in zip(earlier.files, earlier.info.parts, strict=True):
            existing[info.partition] = WrittenPartition(part, info)
    writer = PartitionWriter(
        run.tables.table_uri("events"),
        run.source.schema,
        run.behaviour,
        run.config.duplicates == "keep",
        partitions,
        existing,
    )
    exchange = Exchange(
        reader,
        len(reader.pieces),
        writer,
        partitions,
        shared=(reader.users,),
        summaries=True,
    )
    summaries: dict[int, PieceSummary] = {}
    written: dict[int, WrittenPartition] = {}
    result = ReadResult(StatsCollector(run.behaviour, run.is_late))
    for output in run.executor.exchange(exchange):
        if isinstance(output, ReadSummary):
            summaries[output.index] = output.value
        elif output.info.partition in written:
            raise RuntimeError(
                f"the shuffle returned partition {output.info.partition} twice; "
                f"nothing was committed"
            )
        else:
            written[output.info.partition] = output
            uri = join(writer.events_uri, output.part.path)
            result.stats.add(uri, output.stats)
    unchanged = {key: old for key, old in existing.items() if key not in written}
    uris = [join(writer.events_uri, old.part.path) for old in unchanged.values()]
    result.stats.read(uris, run.executor)
    all_partitions = [*written.values(), *unchanged.values()]
    result.partitions = sorted(all_partitions, key=lambda part: part.info.first_user)
    _add_summaries(run, result, reader, summaries, is_first=earlier is None)
    new_events = sum(summary.events for summary in summaries.values())
    rows = sum(partition.part.rows for partition in result.partitions)
    expected = new_events + sum(old.part.rows for old in existing.values())
    if run.config.duplicates == "drop":
        rows += result.duplicates
        expected += sum(old.info.duplicates for old in existing.values())
    if rows != expected:
        raise RuntimeError(
            f"{expected:,} events were read, but the shuffle returned {rows:,}; "
            f"nothing was committed"
        )
    for partition in result.partitions:
        result.matched.add(partition.info.matched)
    if users is not None and matched_share(result.matched) < WARN_BELOW:
        result.matched.others = users["user_id"].slice(0, 2).to_pylist()
    return result


def _create_reader(
    run: Run, files: list[str], num_partitions: int, users: pa.Table | None
) -> EventsReader:
    """Split the event files into pieces, and return their reader."""
    size = run.executor.settings.read_mb << 20
    pieces = []
    for file in files:
        for piece in split_file(join(run.input, file), run.source, size):
            pieces.append((file, piece))
    return EventsReader(
        pieces,
        run.source,
        run.input,
        run.tables.table_uri("rejects"),
        shuffle_schema(run.source, run.config.ties == "log_order"),
        num_partitions,
        run.executor.put(users),
    )


def _add_summaries(
    run: Run,
    result: ReadResult,
    reader: EventsReader,
    summaries: dict[int, PieceSummary],
    is_first: bool,
) -> None:
    """Add the summaries of all reads to the result, in the order of the files."""
    missing = []
    digests: dict[str, list[str]] = {file: [] for file, _ in reader.pieces}
    for piece_index, (file, _) in enumerate(reader.pieces):
        summary = summaries[piece_index]
        result.rejected.add(summary.rejected)
        result.reject_parts += summary.reject_parts
        if summary.blocks:
            missing.append(summary.missing)
        digests[file].append(summary.digest)
    missing_everywhere = common_missing(missing)
    if is_first:
        check_missing(missing_everywhere, "event", run.input)
    for name, hint in missing_everywhere.items():
        run.report(
            f"warning: no new file has a column '{name}', so its values are missing; "
            f"{hint}"
        )
    result.hashes = {
        file: _combine_digests(file_digests) for file, file_digests in digests.items()
    }
