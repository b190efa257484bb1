"""Parse the settings of `jobs.prepare`, and check them before any work starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from core.errors import UserError, raise_first
from core.files import join
from core.options import build, check_known, merge
from core.schemas import ItemsInfo
from core.tables import has_earlier_table, read_manifest
from pipelines.data.kinds import KINDS
from pipelines.data.prepare_config import PrepareConfig
from pipelines.data.reading.log import Log
from pipelines.data.reading.times import MAX_TIME_MS, MIN_TIME_MS

STATISTICS = "statistics.json"
"""Name of the file that a run writes last."""

TABLES = ("events", "rejects", "items", "queries", "sequences", "counts")
"""Names of the tables in the output folder."""


def read_config(*layers: dict[str, Any]) -> PrepareConfig:
    """Build the settings from plain values; later layers override earlier ones.

    Raises:
        UserError: for an unknown key or an invalid value.
    """
    return build(PrepareConfig, merge({}, *layers), "prepare.")


def resolve_config(
    source: Log, input_uri: str, output_uri: str, config: PrepareConfig
) -> PrepareConfig:
    """Check the settings against the log, and resolve `auto` of `split.by`.

    Args:
        source: Mapping of the raw log.
        input_uri: Folder of the raw files.
        output_uri: Folder of the tables.
        config: Settings.

    Returns:
        The settings with `temporal` or `leave_last_out` as `split.by`.

    Raises:
        UserError: if files are missing, the output folder cannot be written, or the
            settings do not fit the log.
    """
    check_known([config.kind], KINDS, "kind")
    kind = KINDS[config.kind]
    _check_behaviour(source, config)
    kind.check_settings(source, config)
    split: Any = config.split.resolve(source.info.clock)
    _check_combinations(source, config, split)
    _check_files_exist(source, input_uri, config.catalogue)
    for name in TABLES:
        has_earlier_table(join(output_uri, name), name)
    return replace(config, split=replace(config.split, by=split))


def _check_files_exist(source: Log, input_uri: str, catalogue: str | None) -> None:
    """Raise UserError if the log's files or the frozen catalogue are missing."""
    # each listing raises if it is empty
    source.event_files(input_uri)
    source.user_files(input_uri)
    for section in source.as_of.values():
        section.list_files(input_uri, "feature")
    if catalogue is None:
        source.item_files(input_uri)
    else:
        read_manifest(join(catalogue, "items"), ItemsInfo)


def _check_behaviour(source: Log, config: PrepareConfig) -> None:
    """Raise UserError if the behaviour is not a bool label of the log."""
    bool_labels = source.info.bool_labels
    if config.behaviour is not None and config.behaviour not in bool_labels:
        raise UserError(
            f"behaviour is '{config.behaviour}', which is not a bool label of the log; "
            f"its bool labels are: {', '.join(bool_labels) or 'none'}"
        )


def _check_combinations(source: Log, config: PrepareConfig, split: str) -> None:
    """Raise UserError if settings conflict with each other, the log or the kind."""
    info, name = source.info, config.kind
    kind, moment = KINDS[name], config.counts_as_of
    history = info.history
    is_late = config.behaviour in info.known
    counts_nothing = kind.has_counts and not (
        info.clock and config.kind_config.windows_days
    )
    raise_first(
        (
            history and not kind.allows_repeats,
            f"the source file has 'history', which only kind retrieval supports, but "
            f"kind is {name}; use --kind retrieval or remove 'history'",
        ),
        (
            config.duplicates != "drop" and not kind.allows_repeats,
            f"duplicates is {config.duplicates}, which only kind retrieval supports",
        ),
        (
            history and config.duplicates != "drop",
            f"duplicates is {config.duplicates}, but 'history' is repeated in each row "
            "of its user; use --duplicates drop",
        ),
        (
            config.core_window == "train" and split != "temporal",
            "core_window is train, which needs a temporal split; "
            "use --split.by temporal or core_window all",
        ),
        (
            is_late and config.ties != "strict",
            f"ties is {config.ties}, but label '{config.behaviour}' becomes known "
            "later than its event, so the order of the log is not the order in which "
            "labels become known; use --ties strict, or remove the label's time or "
            "delay",
        ),
        (
            moment is not None and not kind.has_counts,
            f"counts_as_of is set, which only kind search supports; remove it for "
            f"kind {name}",
        ),
        (
            moment is not None and counts_nothing,
            "counts_as_of is set, but a log without clock times, or with empty "
            "search.windows_days, has no counts; remove counts_as_of",
        ),
        (
            moment is not None and not MIN_TIME_MS <= moment <= MAX_TIME_MS,
            f"counts_as_of is {moment} ms, outside of the years 1980 to 2099; use a "
            "time such as 2022-05-07, or epoch ms",
        ),
        (
            config.catalogue is not None and not kind.allows_repeats,
            f"catalogue is set, which only kind retrieval supports; remove it for "
            f"kind {name}",
        ),
        (
            source.as_of and not kind.reads_as_of_features,
            f"as_of.{next(iter(source.as_of), '')} has features of requests, which "
            f"models of kind {name} do not read; remove it from the source file",
        ),
    )
