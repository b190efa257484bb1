"""Raw log to tables: events and rejects, items, sequences, statistics, each committed when whole.

`python -m jobs.prepare --source YAML --input RAW_DIR --output TABLES` runs it. Each step compares a
fingerprint of its configuration and inputs with the one in the table's manifest, so a run that was
stopped anywhere continues with what is missing, and a finished one does nothing.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import fs

from models.config import pluralize
from models.storage.tables import (
    Manifest,
    UserError,
    has_manifest,
    join,
    open_uri,
    read_manifest,
    read_table,
    writing,
)
from models.storage.uri import write_file
from pipelines.data.engine import Engine
from pipelines.data.events.build_events import hash_file, ingest, partitions_for
from pipelines.data.events.catalogue import (
    core_items,
    described_items,
    extended,
    match_items,
    with_described,
    write_items,
)
from pipelines.data.events.event_stats import Surveyor
from pipelines.data.events.frozen_catalogue import split_of, take_items
from pipelines.data.events.matching import Match, check_matched
from pipelines.data.kinds import KINDS
from pipelines.data.notices import notices
from pipelines.data.prepare_config import PrepareConfig, refuse
from pipelines.data.reading.log import Log
from pipelines.data.reading.rows import Rejected, check_missing
from pipelines.data.reading.unread import describe_unread
from pipelines.data.run import Run, Say
from pipelines.data.schemas import REJECTS
from pipelines.data.sequences.splits import cut_times
from pipelines.data.settings import STATISTICS, TABLES, check
from pipelines.data.statistics import summarise

SMALL = 64
"""Partitions of a small log, at most: 2 GiB of text."""

FEW = 4
"""Partitions that this process appends to alone, at most: a second of each is less than Ray takes to start."""

DONE_WITH = {"drop": "dropped", "keep": "kept"}
"""What is said of duplicates."""


def prepare(
    source: Log,
    input_uri: str,
    output_uri: str,
    config: PrepareConfig,
    overwrite: bool = False,
    say: Say = print,
    start: Callable[[], None] = lambda: None,
    append: bool = False,
) -> dict[str, Any]:
    """Makes the tables of a raw log under `output_uri` and returns their statistics. append: from the tables that are
    there, if any, and the files of events that these do not have.

    A log of one partition, where `config` names no number of them, is made by this process alone, and one of FEW is
    appended to; another one needs a running Ray, which `start` may start.

    Raises UserError for input, settings or output that cannot be used; the table in the making is then
    removed and finished ones stay as they were.
    """
    config = check(source, input_uri, output_uri, config)
    kind, whole = KINDS[config.kind], not overwrite and is_whole(str(output_uri))
    counted = None if kind.all_shown else config.behaviour
    files = [*source.event_files(str(input_uri)), *source.user_files(str(input_uri))]
    files += source.item_files(str(input_uri)) if config.catalogue is None else []
    grows = append
    append = append and all(
        has_manifest(join(str(output_uri), name)) for name in ("events", "rejects")
    )
    count = config.partitions or partitions_for(
        [join(str(input_uri), file) for file in files]
    )
    if append and not config.partitions:
        count = read_manifest(join(str(output_uri), "events"), "events").config[
            "partitions"
        ]
    here = not config.partitions and count <= (FEW if append else 1)
    engine = Engine(config.ray_data, here=here, small=count <= SMALL, start=start)
    run = Run(
        source,
        str(input_uri),
        str(output_uri),
        config,
        counted,
        overwrite,
        say,
        whole,
        engine,
        append,
        grows,
    )
    for line in describe_unread(source, run.input):
        say(line)
    with writing(run.output), run.writing(*TABLES) if append else nullcontext():
        before = run.before("events")
        events = _append_events(run, before) if before else _make_events(run, count)
        split = _split_rule(run, events)
        items = (
            _make_items(run, events, split)
            if config.catalogue is None
            else take_items(run, events, config.catalogue, split)
        )
        sequences = kind.sequences(run, events, items, split)
        run.switch()
        statistics = summarise(events, items, sequences)
        content = json.dumps(statistics, indent=2) + "\n"
        write_file(join(run.output, STATISTICS), content.encode())
        if config.counts_as_of is not None:
            kind.counts(run, events, items, config.counts_as_of)
            run.switch()
    for line in notices(events, items, sequences):
        say(line)
    return statistics


def is_whole(output: str) -> bool:
    """Whether a run has finished there: statistics are written last, and sequences name what they were made from."""
    filesystem, path = open_uri(join(output, STATISTICS))
    if filesystem.get_file_info(path).type != fs.FileType.File or not has_manifest(
        join(output, "sequences")
    ):
        return False
    made_from = read_manifest(join(output, "sequences")).inputs
    return all(
        has_manifest(join(output, name))
        and read_manifest(join(output, name)).hash == made_from.get(name)
        for name in ("events", "items")
    )


def _events_settings(run: Run, partitions: int) -> dict[str, Any]:
    config = run.config
    settings = {
        "source": run.source.events_config,
        "ties": config.ties,
        "partitions": partitions,
    }
    return _plain(settings | {"duplicates": config.duplicates})


def _make_events(run: Run, partitions: int) -> Manifest:
    source, settings = run.source, _events_settings(run, partitions)
    files, user_files = source.event_files(run.input), source.user_files(run.input)
    stamps = run.stamps([*files, *user_files])
    finished, finished_rejects = (
        run.finished(name, settings, {}, stamps) for name in ("events", "rejects")
    )
    if finished and finished_rejects:
        return finished
    return _ingest_events(run, files, settings, stamps)


def _append_events(run: Run, before: Manifest) -> Manifest:
    """The events of before and of the files that they are not made of. UserError where that would not be what all files
    at once become."""
    source, config, said = run.source, run.config, before.info
    settings = _events_settings(run, config.partitions or before.config["partitions"])
    user_files = source.user_files(run.input)
    stamps = run.stamps([*source.event_files(run.input), *user_files])
    new = sorted(stamps.keys() - said["stamps"].keys() - {*user_files})
    other = [
        name
        for name, value in settings.items()
        if name != "source" and before.config.get(name) != value
    ]
    if differs_beyond_files(settings["source"], before.config["source"]):
        other.insert(0, "source")
    old_files = said["stamps"].keys() - {*said["user_files"]}
    lost = sorted(file for file in old_files if not source.is_event_file(file))
    touched = [
        file
        for file, stamp in stamps.items()
        if said["stamps"].get(file, stamp) != stamp
    ]
    changed = [
        file
        for file in touched
        if file in user_files or hash_file(run, file) != before.inputs[file]
    ]
    changed += sorted({*user_files} ^ {*said["user_files"]})
    last = max(old_files)
    order, late = config.ties == "log_order", [file for file in new if file < last]
    here = f"--append to {run.table('events')}"
    refuse(
        (
            other,
            f"{here}: they were made with another {', '.join(other)}; use the same, or --overwrite",
        ),
        (
            lost,
            f"{here}: files is '{source.files}', which {', '.join(lost[:1])} does not "
            "match, though they have its events; give a pattern of the old files too, "
            "or use --overwrite",
        ),
        (
            changed,
            f"{here}: {', '.join(changed[:1])} is not what it was when they were made; give new events in files "
            "of new names, or use --overwrite",
        ),
        (
            source.event_time.column is None and not source.sequence,
            f"{here}: times are the order of rows, which new files "
            "have of their own; use --overwrite",
        ),
        (
            order and "position" not in source.absent,
            f"{here}: ties is log_order and the log has positions, which are "
            "lost where ties were ordered; use --overwrite",
        ),
        (
            order and late,
            f"{here}: ties is log_order, and {', '.join(late[:1])} comes before files that they have in "
            "the order of names; use --overwrite",
        ),
    )
    if not new:
        run.say(
            f"events: up to date, {pluralize(before.rows, 'row')}; all files were there before"
        )
        return before
    return _ingest_events(run, new, settings, {**said["stamps"], **stamps}, before)


def differs_beyond_files(source: dict[str, Any], before: dict[str, Any]) -> bool:
    """Return whether two mappings read events differently, whichever files they match."""
    return {**source, "files": ""} != {**before, "files": ""}


def _ingest_events(
    run: Run,
    files: list[str],
    settings: dict[str, Any],
    stamps: dict[str, list[int]],
    before: Manifest | None = None,
) -> Manifest:
    source, config, partitions = run.source, run.config, settings["partitions"]
    user_files, keep = source.user_files(run.input), config.duplicates == "keep"
    said: dict[str, Any] = before.info if before else {}
    run.say(
        f"events: reading {pluralize(len(files), 'file')} into {pluralize(partitions, 'partition')}"
    )
    begin = time.perf_counter()
    with run.writing("events", "rejects"):
        digests = {file: hashlib.sha256() for file in user_files}
        users = source.read_users(run.input, digests)
        check_missing(users.missing if users else {}, "user", run.input)
        of_users = Rejected.from_block(users) if users else Rejected()
        run.reject(of_users, " of the user files")
        surveyor = Surveyor(run.counted, run.late)
        result = ingest(
            run, files, partitions, surveyor, users.rows if users else None, before
        )
        inputs = {**(before.inputs if before else {}), **result.hashes}
        inputs |= {file: digest.hexdigest() for file, digest in digests.items()}
        rejected = result.rejected
        if not rejected.rows_read and not before:
            raise UserError(
                f"{run.input} holds no rows in {', '.join(files[:3])}; check --input"
            )
        run.reject(rejected)
        if not result.parts:
            raise UserError(f"{run.input} holds no valid event; see the reasons above")
        check_matched(result.matched, "user", config.min_matched, run.say)
        read = time.perf_counter()
        run.surveyed = surveyor.survey()
        survey_s = time.perf_counter() - read
        reasons = Counter(said.get("reject_reasons", {})) + rejected.reasons
        rejects = reasons.total()
        info = {
            **source.info,
            "stamps": stamps,
            "user_files": user_files,
            "parts": result.of_parts,
            "ties": config.ties,
            "rows_read": said.get("rows_read", 0) + rejected.rows_read,
            "rejects": rejects,
            "reject_reasons": dict(sorted(reasons.items())),
            "user_rows": of_users.rows_read,
            "user_rejects": of_users.rejects,
            "user_reject_reasons": dict(sorted(of_users.reasons.items())),
            "duplicates": 0 if keep else result.duplicates,
            **({"duplicates_kept": result.duplicates} if keep else {}),
            "users": run.surveyed.users,
            **({"users_matched": result.matched.record()} if users else {}),
            "first_ms": run.surveyed.first_ms,
            "last_ms": run.surveyed.last_ms,
            "grain_ms": run.surveyed.grain_ms,
        }
        events = run.commit(
            "events",
            source.schema,
            result.parts,
            settings,
            inputs,
            info,
            read_shuffle_sort_write_s=read - begin,
            survey_s=survey_s,
        )
        old = []
        if rejects_there := run.before("rejects"):
            # A run that was killed between the two manifests has left rejects of files that the events lack.
            same = rejects_there.info["stamps"] == said["stamps"]
            old = rejects_there.files[
                : None if same else rejects_there.info["old_files"]
            ]
        told = {"rows": rejects, "stamps": stamps, "old_files": len(old)}
        run.commit("rejects", REJECTS, [*old, *result.rejects], settings, inputs, told)
    run.say(
        f"events: {pluralize(events.rows, 'row')} of {pluralize(run.surveyed.users, 'user')}, each in one part "
        f"({pluralize(result.duplicates, 'duplicate')} {DONE_WITH[config.duplicates]}, {pluralize(rejects, 'reject')}) "
        f"in {time.perf_counter() - begin:.1f} s"
    )
    return events


def _split_rule(run: Run, events: Manifest) -> dict[str, Any]:
    """The split as manifests record it. Cut times come from the events, or from a finished table of them."""
    kind, clock = run.config.split.kind, events.info["clock"]
    if run.config.catalogue is not None:
        return split_of(run.config.catalogue, clock)
    if kind == "leave_last_out":
        if clock:
            run.say(
                "warning: leave_last_out on a log with clock times: training sees other users' behaviours that are "
                "later than a test request; use --split.kind temporal for an honest estimate"
            )
        return {"kind": "leave_last_out"}
    if run.config.core_window == "all" and run.config.core > 1:
        run.say(
            "note: the k-core counts the whole log, test window included, as papers do; use --core_window train to "
            "count the training window only"
        )
    wanted = run.split_key(events)
    for name in () if run.overwrite else ("sequences", "items"):
        if has_manifest(run.table(name)):
            info = read_manifest(run.table(name), name).info
            if info.get("split_made_from") == wanted:
                return dict(info["split"])
    return cut_times(run.survey(events), run.config.split, run.engine)


def _make_items(run: Run, events: Manifest, split: dict[str, Any]) -> Manifest:
    config, source = run.config, run.source
    files = source.item_files(run.input)
    settings = _plain(
        {
            "source": source.config,
            "core": config.core,
            "core_window": config.core_window,
            "behaviour": run.counted,
            **(
                {"split": config.split.settings()}
                if config.core_window == "train"
                else {}
            ),
        }
    )
    inputs = {"events": events.hash}
    stamps = run.stamps(files)
    if finished := run.finished("items", settings, inputs, stamps):
        return finished
    begin = time.perf_counter()
    found = run.survey(events)
    before = run.before("items")
    if before and (gone := sorted(before.info["stamps"].keys() - {*files})):
        raise UserError(
            f"{run.input} lacks {gone[0]}: item files are read whole at each --append; keep them there"
        )
    with run.writing("items"):
        described, others = (
            described_items(source, run.input, files, run.engine)
            if source.keeps_all_items
            else (None, {})
        )
        used, rounds = core_items(
            found, config.core, run.before_ms(split), run.engine, described
        )
        catalogue = used if described is None else with_described(used, described)
        if before:
            old = read_table(run.table("items"), "items", ["item_id"])[
                "item_id"
            ].combine_chunks()
            catalogue = extended(old.cast(catalogue.type), catalogue)
        counted = time.perf_counter()
        uri = run.table("items")
        parts, counts, rejected, missing, hashes = write_items(
            source, run.input, files, catalogue, uri, run.engine
        )
        if other := [file for file, digest in others.items() if hashes[file] != digest]:
            raise UserError(
                f"{join(run.input, other[0])} has changed while it was read; run the same line again"
            )
        inputs |= hashes
        run.reject(rejected, " of the item files")
        matched = Match()
        if files:
            of_items = found.counts[
                pc.is_in(found.items, used).to_numpy(zero_copy_only=False)
            ]  # both are sorted
            if (
                described is not None or before
            ):  # what the events name is to have a row in the item files
                bare = catalogue.take(pa.array(missing)).cast(used.type)
                missing = pc.index_in(bare, used).to_numpy().astype(np.int64)
            matched = match_items(used, missing, of_items, counts.pop("first"))
            check_matched(matched, "item", config.min_matched, run.say)
        info = {
            "core": config.core,
            "core_window": config.core_window,
            "core_rounds": rounds,
            "behaviour": run.counted,
            "split": split,
            "split_made_from": run.split_key(events),
            "behaviours": found.behaviours,
            "items_before_core": len(found.items),
            "dropped_items": len(found.items) - len(used),
            **(
                {"items_without_behaviours": len(catalogue) - len(used)}
                if described is not None
                else {}
            ),
            "metadata_rows": rejected.rows_read,
            "metadata_rejects": rejected.rejects,
            "metadata_reject_reasons": dict(sorted(rejected.reasons.items())),
            **({"matched": matched.record()} if files else {}),
            "stamps": stamps,
            **counts,
        }
        write_s = time.perf_counter() - counted
        items = run.commit(
            "items",
            source.items_schema,
            parts,
            settings,
            inputs,
            info,
            core_s=counted - begin,
            write_s=write_s,
        )
    new = (
        f", {info['items_without_behaviours']:,} of them without behaviours"
        if described is not None
        else ""
    )
    run.say(
        f"items: {items.rows:,} in the catalogue{new}, {info['dropped_items']:,} dropped by the {config.core}-core "
        f"({rounds} rounds), {info['items_without_metadata']:,} without metadata, "
        f"{info['metadata_outside_catalogue']:,} metadata rows of other items left out"
    )
    return items


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration as JSON values, as it will read back from a manifest."""
    return dict(json.loads(json.dumps(config, default=str)))
