"""Turn a raw log into the tables `events`, `rejects`, `items` and `sequences`.

    python -m jobs.prepare --source YAML --input RAW_DIR --output TABLES

Each step commits its tables when they are complete, and skips tables whose manifest has
the fingerprint of its configuration and inputs. So a run that was interrupted continues
with the missing tables, and a finished run does nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any, NamedTuple

import polars as pl
import psutil
from pyarrow import fs

from core.errors import pluralize
from core.files import file_info, join, write_file
from core.options import build, merge
from core.schemas import (
    INFO_CLASSES,
    AsOfInfo,
    EventsInfo,
    ItemsInfo,
    SequencesInfo,
    Split,
)
from core.splits import SPLITS
from core.tables import Table, check_replaceable, find_table, read_parquet, writing
from pipelines.prepare.events.build_events import (
    count_partitions,
    make_events,
)
from pipelines.prepare.executor import Executor
from pipelines.prepare.items.catalogue import make_items
from pipelines.prepare.kinds.registry import KINDS, resolve_config
from pipelines.prepare.kinds.search.counts_as_of import make_counts
from pipelines.prepare.reading.log import Log, describe_unread, load_source
from pipelines.prepare.run import Report, Run
from pipelines.prepare.sequences.builder import make_sequences
from pipelines.prepare.sequences.splits import cut_times
from pipelines.prepare.settings.config import PrepareConfig, PrepareOptions

STATISTICS = "statistics.json"
"""Name of the file that a run writes last."""

TABLES = ("events", "rejects", "items", "queries", "sequences", "counts")
"""Names of the tables of any log."""

MEMORY_PER_PARTITION = 128 << 20
"""Bytes of memory that this process needs per partition of 32 MiB of text."""

MAX_ASCENDING = 0.6
"""Share of adjacent behaviours with ascending items above which a line is printed. Half
of them ascend by chance."""

MIN_STEPS = 1000
"""Number of adjacent behaviours below which their order is considered noise."""


class Prepared(NamedTuple):
    """The tables of a log, and the mapping that they were made with."""

    source: Log
    events: Table[EventsInfo]
    items: Table[ItemsInfo]
    sequences: Table[SequencesInfo]


def build_options(content: Mapping[str, Any], prefix: str = "") -> PrepareOptions:
    """Build options over the settings in the section `prepare` of the source file.

    Args:
        content: Values by option.
        prefix: Prefix of keys in messages.
    """
    source = content.get("source")
    defaults = load_source(source)[1] if source else {}
    build(PrepareConfig, defaults, "prepare.")
    return build(PrepareOptions, merge(defaults, content), prefix)


def make_tables(options: PrepareOptions) -> Prepared:
    """Make the tables of a raw log, and print their sizes."""
    began = time.perf_counter()
    source, settings = load_source(options.source)[0], options.settings
    print(f"reading {options.input}", flush=True)
    made = prepare(
        source,
        options.input,
        options.output,
        settings,
        overwrite=options.overwrite,
        append=options.append,
    )
    info, num_items = made.sequences.info, made.items.rows
    requests = [f"{info.requests[split]:,} {split}" for split in SPLITS]
    print(
        f"\n{pluralize(info.users, 'user')}, {pluralize(num_items, 'item')}, "
        f"{pluralize(info.interactions, 'interaction')}; "
        f"sparsity {1 - info.pairs / (info.users * num_items):.2%}, "
        f"mean length {info.interactions / info.users:.2f}; "
        f"requests: {', '.join(requests)}"
    )
    print(
        f"made in {time.perf_counter() - began:.1f} s: "
        f"{options.output}/{{events,items,sequences,rejects}} and "
        f"{options.output}/{STATISTICS}"
    )
    return made


def prepare(
    source: Log,
    input_uri: str,
    output_uri: str,
    config: PrepareConfig,
    report: Report = print,
    *,
    overwrite: bool = False,
    append: bool = False,
) -> Prepared:
    """Write the tables of a raw log to `output_uri`.

    A log that fits into half of the free memory is processed in this process, unless
    RAY_ADDRESS names a cluster or the settings a number of partitions. Other logs are
    processed on Ray Data.

    Args:
        source: Mapping of the raw log.
        input_uri: Folder of the raw files.
        output_uri: Folder of the tables.
        config: Settings of the tables.
        report: Prints a line.
        overwrite: Replace all tables; by default the missing ones are written.
        append: Add files that the tables do not contain yet.
    """
    input_uri, output_uri = str(input_uri), str(output_uri)
    config = resolve_config(source, input_uri, config)
    kind = KINDS[config.kind]
    with ExitStack() as stack:
        stack.enter_context(writing(output_uri))
        found: dict[str, Table] = {}
        for name in (*TABLES, *source.timed):
            uri = join(output_uri, name)
            if overwrite:
                check_replaceable(uri, name)
            elif table := find_table(uri, INFO_CLASSES.get(name, AsOfInfo)):
                found[name] = table
        extends = append and {"events", "rejects"} <= found.keys()
        partitions = config.partitions or 0
        if not partitions and extends:
            partitions = found["events"].config["partitions"]
        elif not partitions:
            files = [*source.event_files(input_uri), *source.user_files(input_uri)]
            files += source.item_files(input_uri)
            partitions = count_partitions([join(input_uri, file) for file in files])
        free = psutil.virtual_memory().available
        fits = partitions * MEMORY_PER_PARTITION <= free / 2
        names_cluster = config.partitions or os.environ.get("RAY_ADDRESS")
        executor = Executor(
            config.ray_data,
            in_process=fits and not names_cluster,
        )
        # a finished run has written its statistics, and its tables fit each other
        statistics_file = file_info(join(output_uri, STATISTICS))
        made_from = found["sequences"].inputs if "sequences" in found else {}
        is_complete = statistics_file.type == fs.FileType.File and all(
            name in found and found[name].hash == made_from.get(name)
            for name in ("events", "items")
        )
        run = Run(
            source,
            input_uri,
            output_uri,
            config,
            None if kind.uses_all_events else config.behaviour,
            report,
            executor,
            grows=append,
            append=extends,
            is_complete=is_complete,
            existing=found,
        )
        for line in describe_unread(source, input_uri):
            report(line)
        stack.enter_context(run.clean_up_on_error(*TABLES, *source.timed))
        events = make_events(run, partitions)
        split = _choose_split(run, events)
        items = make_items(run, events, split)
        sequences = make_sequences(run, kind, events, items, split)
        run.put_in_place()
        statistics = summarise(events, items, sequences)
        content = json.dumps(statistics, indent=2) + "\n"
        write_file(join(output_uri, STATISTICS), content.encode())
        if config.counts_as_of is not None:
            make_counts(run, events, items, config.counts_as_of)
            run.put_in_place()
    for line in collect_warnings(items, sequences):
        report(line)
    return Prepared(source, events, items, sequences)


def _choose_split(run: Run, events: Table[EventsInfo]) -> Split:
    """Return the split of earlier tables, or compute one."""
    config = run.config
    if config.split.by == "leave_last_out":
        if events.info.log.clock:
            run.report(
                "warning: split.by is leave_last_out, which trains on behaviours of "
                "other users that are later than a test request"
            )
        return Split(by="leave_last_out")
    if config.core_window == "all" and config.core > 1:
        run.report(
            "note: core_window is all: the k-core counts the test window too, as in "
            "the papers"
        )
    inputs = run.split_inputs(events)
    earlier = run.existing.get("items")
    if earlier and earlier.info.split_made_from == inputs:
        return earlier.info.split  # type: ignore[no-any-return]
    return cut_times(run, events)


def summarise(
    events: Table[EventsInfo],
    items: Table[ItemsInfo],
    sequences: Table[SequencesInfo],
) -> dict[str, Any]:
    """Return the content of statistics.json: sizes, and counts of dropped rows.

    `users`, `items`, `interactions`, `sparsity` (the share of (user, item) pairs
    without an interaction) and `mean_length` are the columns of Tables 10 and 13 of the
    SID-MLP paper. The branching per digit of its Table 7 is in the manifest of `trie`.
    """
    info = sequences.info
    users, interactions = info.users, info.interactions
    statistics = {
        "users": users,
        "items": items.rows,
        "interactions": interactions,
        "sparsity": round(1 - info.pairs / (users * items.rows), 6),
        "mean_length": round(interactions / users, 4),
        "max_length": info.max_length,
        "split": {k: value for k, value in asdict(items.info.split).items() if value},
    }
    for name in ("requests", *KINDS[info.kind].statistics):
        value = getattr(info, name)
        if isinstance(value, dict) and value.keys() == {*SPLITS}:
            # the same bytes for computed and reloaded counts
            value = {split: value[split] for split in SPLITS}
        statistics[name] = value
    return {
        **statistics,
        "tied_behaviours": info.tied_behaviours,
        "truncated_users": info.truncated_users,
        "truncated_events": info.truncated_events,
        "core": items.info.core,
        "core_window": items.info.core_window,
        "behaviour": info.behaviour,
        "ties": info.ties,
        "clock": info.log.clock,
        "raw": {
            "rows_read": events.info.rows_read,
            "rows_left_out": events.info.rows_left_out,
            "rejects": events.info.rejects,
            "reject_reasons": events.info.reject_reasons,
            "duplicates": events.info.duplicates,
            "events": events.rows,
            "users": events.info.users,
            "items": items.info.items_before_core,
            "items_dropped": items.info.dropped_items,
            "items_without_metadata": items.info.items_without_metadata,
            "metadata_outside_catalogue": items.info.metadata_outside_catalogue,
        },
        "hashes": {
            "events": events.hash,
            "items": items.hash,
            "sequences": sequences.hash,
        },
    }


def collect_warnings(
    items: Table[ItemsInfo], sequences: Table[SequencesInfo]
) -> list[str]:
    """Return the warnings about the tables with these manifests."""
    info = sequences.info
    lines = []
    if items.info.metadata_differ:
        lines.append(
            f"{items.info.metadata_differ:,} rows of the item files differ from the "
            f"first row of their item and were ignored"
        )
    if info.truncated_events:
        lines.append(
            f"the oldest {info.truncated_events:,} behaviours of "
            f"{info.truncated_users:,} users, over max_events "
            f"{info.max_events:,}, were dropped"
        )
    lines += describe_id_order(sequences)
    tied = getattr(info, "tied_targets", {})
    for name in SPLITS[1:]:
        if tied.get(name):
            lines.append(
                f"{tied[name]:,} {name} requests have the time of another of their "
                f"user; a hash decides which is held out"
            )
    return [f"warning: {line}" for line in lines]


def describe_id_order(sequences: Table[SequencesInfo]) -> list[str]:
    """Return a line if items ascend by id in a log without clock times.

    Histories are those of the first part of `sequences`, and ids are in the order of
    `item_index`.
    """
    if sequences.info.log.clock:
        return []
    part = read_parquet(sequences.part_uris()[0], ["item_index"])
    steps = pl.Series(part["item_index"]).list.diff(null_behavior="drop").explode()
    steps = steps.filter(steps != 0)
    share = (steps > 0).sum() / max(1, len(steps))
    if len(steps) < MIN_STEPS or share <= MAX_ASCENDING:
        return []
    return [
        f"{share:.0%} of adjacent behaviours have ascending item ids, 50% "
        "where the order is real: ties seem to be broken by id, and models that know "
        "the order are rewarded for it"
    ]
