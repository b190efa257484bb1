"""Raw files to the events table: read, validate, shuffle by user, sort, drop duplicates, write.

`python -m jobs.prepare` runs `make_events`. Ray Data brings the rows of a user
together (`engine.py`); numpy, Arrow and polars work on whole partitions. After this
step every user is in exactly one part, sorted, so that each later step is one task per
part.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from models.config import pluralize
from models.storage.tables import (
    Manifest,
    Part,
    UserError,
    join,
    open_uri,
    part_uris,
    read_parquet,
    write_part,
)
from pipelines.data.engine import KEY, Exchange, ReadSummary, Shared, fetch
from pipelines.data.events.columns import dictionary_column, user_keys
from pipelines.data.events.event_stats import (
    EventStats,
    PartStats,
    StatsCollector,
    event_stats,
    part_stats,
)
from pipelines.data.events.matching import Match, check_matched
from pipelines.data.events.order_events import LOG_PLACE, order_events
from pipelines.data.prepare_config import refuse
from pipelines.data.reading.log import Log
from pipelines.data.reading.read import FilePart, split_file
from pipelines.data.reading.rows import RejectCounts, check_missing, common_missing
from pipelines.data.run import Run
from pipelines.data.schemas import REJECTS

BYTES_PER_PARTITION = 32 << 20
"""Bytes of raw text per partition; a partition then sorts in a few hundred MB."""

BYTES_OF_TEXT = {"gz": 4, "zst": 4, "bz2": 6, "parquet": 6}
"""Bytes of text per byte of a file, by the file's suffix."""

DUPLICATES_WORD = {"drop": "dropped", "keep": "kept"}

LoadStats = Callable[[], EventStats]
"""Returns statistics of the events; reads the parts if this run has not read them
yet."""


def count_partitions(uris: list[str]) -> int:
    """Return the number of partitions for raw files of these sizes."""
    total = 0
    for uri in uris:
        filesystem, path = open_uri(uri)
        suffix = uri.rsplit(".", 1)[-1].lower()
        total += filesystem.get_file_info(path).size * BYTES_OF_TEXT.get(suffix, 1)
    return max(1, -(-total // BYTES_PER_PARTITION))


# The step: which files are read, and what the manifest records.


@dataclass(frozen=True)
class LogFiles:
    """Files of a log, relative to the input folder."""

    events: list[str]
    """Files of events that are read; when appending, the new ones."""
    users: list[str]
    """User files."""
    stamps: dict[str, list[int]]
    """Size and time of change of these files, and of those that the tables have."""


def make_events(run: Run, partitions: int) -> tuple[Manifest, LoadStats]:
    """Make `events` and `rejects`, or add new files to them. Return the manifest and its statistics.

    Raises:
        UserError: if the log cannot be read, too many rows are rejected, or the tables
            would not equal those of all files at once.
    """
    earlier = run.tables.appended_version("events")
    if earlier:
        partitions = run.config.partitions or earlier.config["partitions"]
    events, users = run.source.event_files(run.input), run.source.user_files(run.input)
    files = LogFiles(events, users, run.stamps([*events, *users]))
    settings = _events_settings(run, partitions)
    if earlier:
        files = _check_append(run, earlier, settings, files)
        if not files.events:
            run.report(
                f"events: up to date, {pluralize(earlier.rows, 'row')}; all files were there before"
            )
            return earlier, _stats_loader(run, earlier)
    else:
        finished = run.tables.find_finished("events", settings, {}, files.stamps)
        rejects = run.tables.find_finished("rejects", settings, {}, files.stamps)
        if finished and rejects:
            return finished, _stats_loader(run, finished)
    manifest, stats = _read_files(run, files, settings, earlier)
    return manifest, lambda: stats


def _stats_loader(run: Run, events: Manifest) -> LoadStats:
    loaded: list[EventStats] = []

    def load() -> EventStats:
        if not loaded:
            parts = part_uris(run.tables.table_uri("events"), events)
            late = run.is_late
            loaded.append(event_stats(parts, run.behaviour, run.engine, late))
        return loaded[0]

    return load


def _events_settings(run: Run, partitions: int) -> dict[str, Any]:
    settings = {
        "source": run.source.events_config,
        "ties": run.config.ties,
        "partitions": partitions,
        "duplicates": run.config.duplicates,
    }
    # as they are read back from a manifest
    return dict(json.loads(json.dumps(settings, default=str)))


def _check_append(
    run: Run, earlier: Manifest, settings: dict[str, Any], files: LogFiles
) -> LogFiles:
    """Return the files that the tables do not have.

    Args:
        run: The run.
        earlier: Manifest of the events that are appended to.
        settings: Settings of the events of this run.
        files: All files of the log.

    Raises:
        UserError: if appending would not give the tables of all files at once.
    """
    source, old = run.source, earlier.info["stamps"]
    old_user_files = {*earlier.info["user_files"]}
    old_files = old.keys() - old_user_files
    new_files = sorted(files.stamps.keys() - old.keys() - {*files.users})
    differing = [
        name
        for name, value in settings.items()
        if name != "source" and earlier.config.get(name) != value
    ]
    if differs_beyond_files(settings["source"], earlier.config["source"]):
        differing.insert(0, "source")
    gone = sorted(file for file in old_files if not source.is_event_file(file))
    changed = _changed_files(run, earlier, files)
    changed += sorted({*files.users} ^ old_user_files)
    log_order = run.config.ties == "log_order"
    too_early = [file for file in new_files if file < max(old_files)]
    opening = f"--append to {run.tables.table_uri('events')}"
    refuse(
        (
            differing,
            f"{opening}: they were made with another {', '.join(differing)}; use the same, or --overwrite",
        ),
        (
            gone,
            f"{opening}: files is '{source.files}', which {', '.join(gone[:1])} does not "
            "match, though they have its events; give a pattern of the old files too, "
            "or use --overwrite",
        ),
        (
            changed,
            f"{opening}: {', '.join(changed[:1])} is not what it was when they were made; give new events in files "
            "of new names, or use --overwrite",
        ),
        (
            source.event_time.column is None and not source.sequence,
            f"{opening}: times are the order of rows, which new files "
            "have of their own; use --overwrite",
        ),
        (
            log_order and "position" not in source.absent_columns,
            f"{opening}: ties is log_order and the log has positions, which are "
            "lost where ties were ordered; use --overwrite",
        ),
        (
            log_order and too_early,
            f"{opening}: ties is log_order, and {', '.join(too_early[:1])} comes before files that they have in "
            "the order of names; use --overwrite",
        ),
    )
    return LogFiles(new_files, files.users, {**old, **files.stamps})


def differs_beyond_files(source: dict[str, Any], earlier: dict[str, Any]) -> bool:
    """Return whether two mappings read events differently, whichever files they match."""
    return {**source, "files": ""} != {**earlier, "files": ""}


def _changed_files(run: Run, earlier: Manifest, files: LogFiles) -> list[str]:
    """Return the files of the earlier version with another stamp and another content."""
    old = earlier.info["stamps"]
    changed = []
    for file, stamp in files.stamps.items():
        if old.get(file, stamp) == stamp:
            continue
        if file in files.users or _hash_file(run, file) != earlier.inputs[file]:
            changed.append(file)
    return changed


def _hash_file(run: Run, file: str) -> str:
    """Return the hash that `read_partitions` would record of a file of events."""
    uri = join(run.input, file)
    digests = []
    for piece in split_file(uri, run.source, run.engine.settings.read_mb << 20):
        digest = hashlib.sha256()
        for _ in run.source.read_events(run.input, file, None, piece, 0, digest):
            pass
        digests.append(digest.hexdigest())
    return _combine_digests(digests)


def _combine_digests(digests: list[str]) -> str:
    """Return the hash of a file from the hashes of its pieces, in order."""
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _read_files(
    run: Run, files: LogFiles, settings: dict[str, Any], earlier: Manifest | None
) -> tuple[Manifest, EventStats]:
    """Read files of events, write and commit `events` and `rejects`."""
    partitions = settings["partitions"]
    run.report(
        f"events: reading {pluralize(len(files.events), 'file')} into {pluralize(partitions, 'partition')}"
    )
    begin = time.perf_counter()
    with run.tables.clean_up_on_error("events", "rejects"):
        users, user_hashes, rejected_users = _read_users(run, files)
        result = read_partitions(run, files.events, partitions, users, earlier)
        _check_result(run, files.events, result, earlier)
        read = time.perf_counter()
        stats = result.stats.result()
        inputs = {**(earlier.inputs if earlier else {}), **result.hashes, **user_hashes}
        info = _events_info(run, result, stats, earlier)
        info |= {
            "stamps": files.stamps,
            "user_files": files.users,
            "user_rows": rejected_users.rows_read,
            "user_rejects": rejected_users.rejects,
            "user_reject_reasons": dict(sorted(rejected_users.reasons.items())),
        }
        if users is not None:
            info["users_matched"] = result.matched.to_info()
        events = run.tables.commit(
            "events",
            run.source.schema,
            [written.part for written in result.partitions],
            settings,
            inputs,
            info,
            read_shuffle_sort_write_s=read - begin,
            survey_s=time.perf_counter() - read,
        )
        old_rejects = _old_rejects(run, earlier)
        rejects_info = {
            "rows": info["rejects"],
            "stamps": files.stamps,
            "old_files": len(old_rejects),
        }
        parts = [*old_rejects, *result.reject_parts]
        run.tables.commit("rejects", REJECTS, parts, settings, inputs, rejects_info)
    run.report(
        f"events: {pluralize(events.rows, 'row')} of {pluralize(stats.users, 'user')}, each in one part "
        f"({pluralize(result.duplicates, 'duplicate')} {DUPLICATES_WORD[run.config.duplicates]}, "
        f"{pluralize(info['rejects'], 'reject')}) in {time.perf_counter() - begin:.1f} s"
    )
    return events, stats


def _read_users(
    run: Run, files: LogFiles
) -> tuple[pa.Table | None, dict[str, str], RejectCounts]:
    """Return the rows of the user files, the hashes of the files, and the rejected rows."""
    digests = {file: hashlib.sha256() for file in files.users}
    users = run.source.read_users(run.input, digests)
    check_missing(users.missing if users else {}, "user", run.input)
    rejected = RejectCounts.from_block(users) if users else RejectCounts()
    run.check_rejects(rejected, " of the user files")
    hashes = {file: digest.hexdigest() for file, digest in digests.items()}
    return users.rows if users else None, hashes, rejected


def _check_result(
    run: Run, files: list[str], result: ReadResult, earlier: Manifest | None
) -> None:
    """Raise UserError for a log without rows, without valid events, or with too many rejects."""
    if not result.rejected.rows_read and not earlier:
        raise UserError(
            f"{run.input} holds no rows in {', '.join(files[:3])}; check --input"
        )
    run.check_rejects(result.rejected)
    if not result.partitions:
        raise UserError(f"{run.input} holds no valid event; see the reasons above")
    check_matched(result.matched, "user", run.config.min_matched, run.report)


def _events_info(
    run: Run, result: ReadResult, stats: EventStats, earlier: Manifest | None
) -> dict[str, Any]:
    """Return the `info` of the manifest, but for the entries on files."""
    old: dict[str, Any] = earlier.info if earlier else {}
    keep = run.config.duplicates == "keep"
    reasons = Counter(old.get("reject_reasons", {})) + result.rejected.reasons
    info = {
        **run.source.info,
        "parts": [written.to_info() for written in result.partitions],
        "ties": run.config.ties,
        "rows_read": old.get("rows_read", 0) + result.rejected.rows_read,
        "rejects": reasons.total(),
        "reject_reasons": dict(sorted(reasons.items())),
        "duplicates": 0 if keep else result.duplicates,
        "users": stats.users,
        "first_ms": stats.first_ms,
        "last_ms": stats.last_ms,
        "grain_ms": stats.grain_ms,
    }
    if keep:
        info["duplicates_kept"] = result.duplicates
    return info


def _old_rejects(run: Run, earlier: Manifest | None) -> list[Part]:
    """Return the parts of `rejects` that belong to the earlier version of the events."""
    rejects = run.tables.appended_version("rejects")
    if not rejects or not earlier:
        return []
    if rejects.info["stamps"] == earlier.info["stamps"]:
        return rejects.files
    # A run that was killed between the two manifests has left rejects of files that the
    # events lack.
    return rejects.files[: rejects.info["old_files"]]


# Rows on their way: read by file, shuffled by user, written by partition.


def shuffle_schema(source: Log, log_order: bool) -> pa.Schema:
    """Return the columns that travel through the shuffle: columns of the log, log_place if it counts, and KEY.

    Strings travel as they are. Dictionary-coding them first was measured on 1 million
    events and 32 partitions: 0.17 s of processor time and 75 MB shuffled against 0.07 s
    and 63 MB, because every shard carries the whole dictionary of its block. Coding all
    but the user ids gained no time.
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
    """Counts of one piece of a raw file that was read."""

    rejected: RejectCounts
    events: int
    """Valid events."""
    reject_parts: list[Part]
    """Parts of `rejects` that the read wrote."""
    missing: dict[str, str]
    """Columns that no block of the piece has, each with a hint at the nearest."""
    blocks: int
    digest: str
    """Hash of the bytes that were parsed."""


@dataclass(frozen=True)
class EventsReader:
    """Reads pieces of raw files as rows to exchange. Writes the rejected rows."""

    pieces: list[tuple[str, FilePart | None]]
    """File and piece of each read."""
    source: Log
    input_uri: str
    rejects_uri: str
    schema: pa.Schema
    """`shuffle_schema`."""
    partitions: int
    users: Shared
    """Rows of the user files, or None."""

    def __call__(self, number: int) -> Iterator[pa.Table | ReadSummary]:
        file, piece = self.pieces[number]
        digest = hashlib.sha256()
        rejected, events, parts, missing = RejectCounts(), 0, [], []
        users = fetch(self.users)
        for block in self.source.read_events(
            self.input_uri, file, users, piece, number, digest
        ):
            rejected.add(RejectCounts.from_block(block))
            if block.rejects.num_rows:
                parts.append(write_part(self.rejects_uri, block.rejects))
            missing.append(block.missing)
            events += block.rows.num_rows
            yield self._add_partitions(block.rows, number)
        yield self.schema.empty_table()
        summary = PieceSummary(
            rejected,
            events,
            parts,
            common_missing(missing),
            len(missing),
            digest.hexdigest(),
        )
        yield ReadSummary(number, summary)

    def _add_partitions(self, events: pa.Table, number: int) -> pa.Table:
        """Return the events of a read in the schema of the shuffle."""
        columns = {
            name: events[name]
            for name in self.schema.names
            if name in events.column_names
        }
        partition = user_keys(events["user_id"]) % self.partitions
        columns[KEY] = pa.array(partition.astype(np.int32))
        if LOG_PLACE in self.schema.names:
            # from 1 on, after the positions of events that are there
            first = pa.scalar((number + 1) << 40, pa.int64())
            columns[LOG_PLACE] = pc.add(events["log_row"], first)
        table = pa.table({name: columns[name] for name in self.schema.names})
        return table.cast(self.schema)


@dataclass(frozen=True)
class WrittenPartition:
    """A part of events that was written."""

    part: Part
    partition: int
    first_user: str
    duplicates: int
    """Duplicates that were found, whether dropped or kept."""
    users: int
    matched: Match
    """Users with a row in the user files."""
    stats: PartStats | None = None
    """Statistics of the behaviours; None for a part of an earlier run."""

    def to_info(self) -> dict[str, Any]:
        """Return the part's entry in the manifest, by which a later run appends to it."""
        return {
            "key": self.partition,
            "first": self.first_user,
            "duplicates": self.duplicates,
            "users": self.users,
            "matched": json.dumps(self.matched.to_info()),
        }

    @classmethod
    def from_info(cls, part: Part, info: dict[str, Any]) -> WrittenPartition:
        """Build the part from its entry in the manifest."""
        return cls(
            part,
            info["key"],
            info["first"],
            info["duplicates"],
            info["users"],
            Match(**json.loads(info["matched"])),
        )


@dataclass(frozen=True)
class PartitionWriter:
    """Sorts the events of one partition, old and new ones, and writes their part."""

    events_uri: str
    schema: pa.Schema
    behaviour: str | None
    keep_duplicates: bool
    partitions: int
    existing: dict[int, WrittenPartition]
    """Parts of earlier runs by partition."""

    def __call__(
        self, users: pa.Table | None, partition: int, rows: pa.Table
    ) -> WrittenPartition:
        existing = self.existing.get(partition)
        if existing:
            old_rows = self._read_part(existing.part.path, rows.schema)
            rows = pa.concat_tables([old_rows, rows])
        events, duplicates = order_events(rows, self.schema, self.keep_duplicates)
        if existing and not self.keep_duplicates:
            duplicates += existing.duplicates
        user = dictionary_column(events, "user_id")
        wrong = user_keys(user.dictionary) % self.partitions != partition
        if wrong.any():
            raise RuntimeError(
                f"the shuffle put {wrong.sum()} users into the wrong partition; nothing was committed"
            )
        return WrittenPartition(
            part=write_part(self.events_uri, events),
            partition=partition,
            first_user=user[0].as_py(),
            duplicates=duplicates,
            users=len(user.dictionary),
            matched=_match_users(user, users),
            stats=part_stats(events, self.behaviour),
        )

    def _read_part(self, path: str, schema: pa.Schema) -> pa.Table:
        """Read a part of an earlier run as rows of the shuffle; its positions are places in the log if these count."""
        names = ["position" if name == LOG_PLACE else name for name in schema.names]
        part = read_parquet(join(self.events_uri, path), names).select(names)
        return part.rename_columns(schema.names).cast(schema)


def _match_users(user: pa.DictionaryArray, described: pa.Table | None) -> Match:
    """Return how many users of one partition have a row in the user files."""
    if described is None:
        return Match()
    ids = described["user_id"].cast(user.dictionary.type)
    is_described = pc.is_in(user.dictionary, ids).to_numpy(zero_copy_only=False)
    unmatched = user.dictionary.filter(pa.array(~is_described)).slice(0, 2)
    return Match(
        ids=len(is_described),
        ids_matched=int(is_described.sum()),
        events=len(user),
        events_matched=int(is_described[user.indices.to_numpy()].sum()),
        unmatched=unmatched.to_pylist(),
    )


@dataclass
class ReadResult:
    """Written parts of events and rejects, not yet committed."""

    stats: StatsCollector
    partitions: list[WrittenPartition] = field(default_factory=list)
    """In the order of their first users."""
    reject_parts: list[Part] = field(default_factory=list)
    rejected: RejectCounts = field(default_factory=RejectCounts)
    hashes: dict[str, str] = field(default_factory=dict)
    """Hash of the parsed bytes by file."""
    matched: Match = field(default_factory=Match)
    """Users with a row in the user files."""

    @property
    def duplicates(self) -> int:
        """Duplicates that were found, whether dropped or kept."""
        return sum(written.duplicates for written in self.partitions)


def read_partitions(
    run: Run,
    files: list[str],
    partitions: int,
    users: pa.Table | None,
    earlier: Manifest | None,
) -> ReadResult:
    """Read raw files and write parts of events and rejects, without committing them.

    Args:
        run: The run.
        files: Files of events, relative to the input folder.
        partitions: Number of partitions.
        users: Rows of the user files.
        earlier: Events that the files are added to: a partition without a new row keeps
            its part.

    Raises:
        UserError: for a file that cannot be read and a column that no file has.
        RuntimeError: unless each event that was read is in exactly one part.
    """
    reader = _events_reader(run, files, partitions, users)
    existing: dict[int, WrittenPartition] = {}
    if earlier:
        for part, info in zip(earlier.files, earlier.info["parts"], strict=True):
            existing[info["key"]] = WrittenPartition.from_info(part, info)
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
    for output in run.engine.exchange(exchange):
        if isinstance(output, ReadSummary):
            summaries[output.number] = output.value
        elif output.partition in written:
            raise RuntimeError(
                f"the shuffle gave partition {output.partition} twice; nothing was committed"
            )
        else:
            written[output.partition] = output
            uri = join(writer.events_uri, output.part.path)
            result.stats.add(uri, output.stats)
    unchanged = {key: old for key, old in existing.items() if key not in written}
    uris = [join(writer.events_uri, old.part.path) for old in unchanged.values()]
    result.stats.read(uris, run.engine)
    every = [*written.values(), *unchanged.values()]
    result.partitions = sorted(every, key=lambda each: each.first_user)
    _add_summaries(run, result, reader, summaries, is_first=earlier is None)
    read = sum(summary.events for summary in summaries.values())
    _check_events(run, result, existing, read)
    for partition in result.partitions:
        result.matched.add(partition.matched)
    if users is not None and result.matched.is_low:
        result.matched.others = users["user_id"].slice(0, 2).to_pylist()
    return result


def _events_reader(
    run: Run, files: list[str], partitions: int, users: pa.Table | None
) -> EventsReader:
    """Return the reader of all pieces of the files."""
    size = run.engine.settings.read_mb << 20
    every = []
    for file in files:
        for piece in split_file(join(run.input, file), run.source, size):
            every.append((file, piece))
    return EventsReader(
        every,
        run.source,
        run.input,
        run.tables.table_uri("rejects"),
        shuffle_schema(run.source, run.config.ties == "log_order"),
        partitions,
        run.engine.put(users),
    )


def _add_summaries(
    run: Run,
    result: ReadResult,
    reader: EventsReader,
    summaries: dict[int, PieceSummary],
    is_first: bool,
) -> None:
    """Add the counts of the reads to the result, in the order of the files.

    Raises:
        UserError: for a column that no file of a first run has.
    """
    missing = []
    digests: dict[str, list[str]] = {file: [] for file, _ in reader.pieces}
    for number, (file, _) in enumerate(reader.pieces):
        summary = summaries[number]
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
            f"warning: no new file has a column '{name}', which is left empty; {hint}"
        )
    result.hashes = {file: _combine_digests(each) for file, each in digests.items()}


def _check_events(
    run: Run, result: ReadResult, existing: dict[int, WrittenPartition], read: int
) -> None:
    """Raise RuntimeError unless the parts hold the old events and the `read` new ones."""
    parts_rows = sum(written.part.rows for written in result.partitions)
    expected = read + sum(old.part.rows for old in existing.values())
    if run.config.duplicates == "drop":
        parts_rows += result.duplicates
        expected += sum(old.duplicates for old in existing.values())
    if parts_rows != expected:
        raise RuntimeError(
            f"{expected:,} events were read and {parts_rows:,} came out of the shuffle; nothing was committed"
        )
