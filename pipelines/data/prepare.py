"""Turn a raw log into the tables `events`, `rejects`, `items` and `sequences`.

    python -m jobs.prepare --source YAML --input RAW_DIR --output TABLES

Each step commits its tables when they are complete, and skips tables whose manifest has
the fingerprint of its configuration and inputs. So a run that was interrupted continues
with the missing tables, and a finished run does nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

from pyarrow import fs

from core.files import join, open_uri, write_file
from core.schemas import ItemsInfo, Split
from core.tables import Manifest, has_manifest, read_manifest, writing
from pipelines.data.engine import Engine
from pipelines.data.events.build_events import LoadStats, count_partitions, make_events
from pipelines.data.events.catalogue import make_items
from pipelines.data.events.frozen_catalogue import copy_items, read_split
from pipelines.data.kinds import KINDS
from pipelines.data.notices import collect_warnings
from pipelines.data.prepare_config import PrepareConfig
from pipelines.data.reading.log import Log
from pipelines.data.reading.unread import describe_unread
from pipelines.data.run import OutputTables, Report, Run
from pipelines.data.sequences.splits import cut_times
from pipelines.data.settings import STATISTICS, TABLES, resolve_config
from pipelines.data.statistics import summarise

MAX_SHARED_PARTITIONS = 64
"""Number of partitions (2 GiB of text) up to which all tasks share worker processes."""

MAX_APPENDED_PARTITIONS = 4
"""Number of partitions up to which this process appends without Ray: a partition takes
about a second, less than Ray needs to start."""


Existing = Literal["continue", "overwrite", "append"]
"""What to do with existing tables: `continue` writes missing tables, `overwrite`
replaces all tables, `append` adds files that the tables do not contain yet."""


def prepare(
    source: Log,
    input_uri: str,
    output_uri: str,
    config: PrepareConfig,
    existing: Existing = "continue",
    report: Report = print,
    start: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Write the tables of a raw log to `output_uri`.

    A small log is processed in this process (`_create_engine`). A larger log needs a
    running Ray.

    Args:
        source: Mapping of the raw log.
        input_uri: Folder of the raw files.
        output_uri: Folder of the tables.
        config: Settings of the tables.
        existing: What to do with existing tables.
        report: Prints a line.
        start: Starts Ray; called before Ray is first used.

    Returns:
        The content of statistics.json.
    """
    input_uri, output_uri = str(input_uri), str(output_uri)
    config = resolve_config(source, input_uri, output_uri, config)
    extends = existing == "append" and all(
        has_manifest(join(output_uri, name)) for name in ("events", "rejects")
    )
    partitions = _count_partitions(source, input_uri, output_uri, config, extends)
    engine = _create_engine(config, partitions, start, extends)
    overwrite = existing == "overwrite"
    is_complete = not overwrite and has_finished(output_uri)
    tables = OutputTables(output_uri, report, engine, overwrite, extends, is_complete)
    kind = KINDS[config.kind]
    behaviour = None if kind.uses_all_events else config.behaviour
    grows = existing == "append"
    run = Run(source, input_uri, config, behaviour, report, engine, tables, grows)
    for line in describe_unread(source, input_uri):
        report(line)
    clean_up = tables.clean_up_on_error(*TABLES) if extends else nullcontext()
    with writing(output_uri), clean_up:
        events, load_stats = make_events(run, partitions)
        split = _choose_split(run, events, load_stats)
        if config.catalogue is None:
            items = make_items(run, events, load_stats, split)
        else:
            items = copy_items(run, events, load_stats, config.catalogue, split)
        sequences = kind.make_sequences(run, events, items, split)
        tables.put_in_place()
        statistics = summarise(events, items, sequences)
        content = json.dumps(statistics, indent=2) + "\n"
        write_file(join(output_uri, STATISTICS), content.encode())
        if config.counts_as_of is not None:
            kind.make_counts(run, events, items, config.counts_as_of)
            tables.put_in_place()
    for line in collect_warnings(events, items, sequences):
        report(line)
    return statistics


def has_finished(output_uri: str) -> bool:
    """Return whether the output folder holds the tables of a finished run.

    A finished run has written its statistics, and the hashes of its events and items
    equal the hashes in the manifest of its sequences.
    """
    filesystem, path = open_uri(join(output_uri, STATISTICS))
    if filesystem.get_file_info(path).type != fs.FileType.File:
        return False
    if not has_manifest(join(output_uri, "sequences")):
        return False
    inputs = read_manifest(join(output_uri, "sequences")).inputs
    return all(
        has_manifest(join(output_uri, name))
        and read_manifest(join(output_uri, name)).hash == inputs.get(name)
        for name in ("events", "items")
    )


def _count_partitions(
    source: Log, input_uri: str, output_uri: str, config: PrepareConfig, extends: bool
) -> int:
    """Return the number of partitions of the events."""
    if config.partitions:
        return config.partitions
    if extends:
        partitions = read_manifest(join(output_uri, "events")).config["partitions"]
        return int(partitions)
    files = [*source.event_files(input_uri), *source.user_files(input_uri)]
    if config.catalogue is None:
        files += source.item_files(input_uri)
    return count_partitions([join(input_uri, file) for file in files])


def _create_engine(
    config: PrepareConfig, partitions: int, start: Callable[[], None], extends: bool
) -> Engine:
    """Return an engine that runs in this process for a small log, otherwise on Ray."""
    max_in_process = MAX_APPENDED_PARTITIONS if extends else 1
    return Engine(
        config.ray_data,
        in_process=not config.partitions and partitions <= max_in_process,
        share_workers=partitions <= MAX_SHARED_PARTITIONS,
        start=start,
    )


def _choose_split(run: Run, events: Manifest, load_stats: LoadStats) -> Split:
    """Return the split of earlier tables of the same events, or compute one."""
    config, has_clock_times = run.config, events.info.log.clock
    if config.catalogue is not None:
        return read_split(config.catalogue, has_clock_times)
    if config.split.by == "leave_last_out":
        if has_clock_times:
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
    items_uri = run.tables.table_uri("items")
    if has_manifest(items_uri) and not run.tables.overwrite:
        info = read_manifest(items_uri, ItemsInfo).info
        if info.split_made_from == inputs:
            return info.split
    return cut_times(load_stats(), config.split, run.engine)
