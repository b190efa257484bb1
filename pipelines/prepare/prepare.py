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
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple

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
from core.tables import Table, check_replaceable, find_table, writing
from pipelines.prepare.events.build_events import (
    count_partitions,
    make_events,
)
from pipelines.prepare.executor import Executor
from pipelines.prepare.items.catalogue import make_items
from pipelines.prepare.kinds.registry import KINDS, resolve_config
from pipelines.prepare.kinds.search.counts_as_of import make_counts
from pipelines.prepare.kinds.summary import collect_warnings, summarise
from pipelines.prepare.reading.log import Log, describe_unread, load_source
from pipelines.prepare.run import Report, Run
from pipelines.prepare.sequences.builder import make_sequences
from pipelines.prepare.sequences.splits import cut_times
from pipelines.prepare.settings.config import PrepareConfig, PrepareOptions
from pipelines.start import start_ray

STATISTICS = "statistics.json"
"""Name of the file that a run writes last."""

TABLES = ("events", "rejects", "items", "queries", "sequences", "counts")
"""Names of the tables of any log."""

MEMORY_PER_PARTITION = 128 << 20
"""Bytes of memory that this process needs per partition of 32 MiB of text."""


Existing = Literal["continue", "overwrite", "append"]
"""What to do with existing tables: `continue` writes missing tables, `overwrite`
replaces all tables, `append` adds files that the tables do not contain yet."""


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
    existing: Existing = "continue"
    if options.overwrite:
        existing = "overwrite"
    elif options.append:
        existing = "append"
    made = prepare(
        source, options.input, options.output, settings, existing, start=start_ray
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
    existing: Existing = "continue",
    report: Report = print,
    start: Callable[[], None] = lambda: None,
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
        existing: What to do with existing tables.
        report: Prints a line.
        start: Starts Ray; called before Ray is first used.
    """
    input_uri, output_uri = str(input_uri), str(output_uri)
    config = resolve_config(source, input_uri, config)
    kind = KINDS[config.kind]
    with ExitStack() as stack:
        stack.enter_context(writing(output_uri))
        found: dict[str, Table] = {}
        for name in (*TABLES, *source.timed):
            uri = join(output_uri, name)
            if existing == "overwrite":
                check_replaceable(uri, name)
            elif table := find_table(uri, INFO_CLASSES.get(name, AsOfInfo)):
                found[name] = table
        extends = existing == "append" and {"events", "rejects"} <= found.keys()
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
            start=start,
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
            grows=existing == "append",
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
