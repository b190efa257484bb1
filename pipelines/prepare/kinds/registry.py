"""All kinds of request, by name.

To add a kind, write a subclass of `SequenceBuilder` in `NAME/sequences.py` beside this
file and list it below, and its audit rules in `pipelines/prepare/audit/rules.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from core.errors import raise_first
from core.options import as_base, check_known
from pipelines.prepare.kinds.actions.sequences import ActionsBuilder
from pipelines.prepare.kinds.retrieval.sequences import RetrievalBuilder
from pipelines.prepare.kinds.search.sequences import SearchBuilder
from pipelines.prepare.kinds.simulation import write_log
from pipelines.prepare.reading.log import Log
from pipelines.prepare.reading.times import MAX_TIME_MS, MIN_TIME_MS
from pipelines.prepare.sequences.builder import SequenceBuilder
from pipelines.prepare.settings.config import PrepareConfig
from pipelines.prepare.settings.simulation import Settings, SimulateOptions

KINDS: dict[str, type[SequenceBuilder]] = {
    kind.name: kind for kind in (RetrievalBuilder, SearchBuilder, ActionsBuilder)
}


def resolve_config(source: Log, input_uri: str, config: PrepareConfig) -> PrepareConfig:
    """Check the settings against the log, and resolve `auto` of `split.by`.

    Args:
        source: Mapping of the raw log.
        input_uri: Folder of the raw files.
        config: Settings.

    Returns:
        The settings with `temporal` or `leave_last_out` as `split.by`.
    """
    check_known([config.kind], KINDS, "kind")
    info, name = source.info, config.kind
    if name == "retrieval" and source.request and info.clock:
        config = replace(config, baskets=config.baskets or "request")
    kind, moment = KINDS[name], config.counts_as_of
    kind.check_settings(source, config)
    split: Any = config.split.resolve(info.clock)
    late_label = ""
    if config.behaviour in info.known:
        late_label = f"label '{config.behaviour}', known later than its event,"
    has_counts = kind.has_counts and info.clock and config.search.windows_days
    retrieval_only = {
        "duplicates": config.duplicates != "drop",
        "baskets": config.baskets is not None,
    }
    refused = [key for key, is_set in retrieval_only.items() if is_set]
    bool_labels = info.bool_labels
    raise_first(
        (
            config.behaviour is not None and config.behaviour not in bool_labels,
            f"behaviour is '{config.behaviour}', but the bool labels of the log are "
            f"{', '.join(bool_labels) or 'none'}",
        ),
        (
            refused and not kind.allows_repeats,
            f"{' and '.join(refused)} of kind {name}: only kind retrieval supports it",
        ),
        (
            config.core > 1 and not kind.allows_repeats,
            f"core is {config.core}, but the catalogue of kind {name} contains every "
            f"item that was shown: at most 1",
        ),
        (
            config.ties != "strict" and (late_label or not kind.allows_repeats),
            f"ties is {config.ties}, but {late_label or f'kind {name}'} needs strict",
        ),
        (
            config.baskets and not (info.clock and config.ties == "strict"),
            f"baskets is {config.baskets}, which needs clock times and ties strict",
        ),
        (
            config.baskets == "request" and not source.request,
            "baskets is request, but the mapping names no 'request'",
        ),
        (
            config.core_window == "train" and split != "temporal",
            f"core_window is train, which needs a temporal split, and split.by is "
            f"{split}",
        ),
        (
            moment is not None and not has_counts,
            f"counts_as_of is set, but only kind search with clock times and "
            f"search.windows_days has counts, and kind is {name}",
        ),
        (
            moment is not None and not MIN_TIME_MS <= moment <= MAX_TIME_MS,
            f"counts_as_of is {moment} ms, outside of the years 1980 to 2099",
        ),
        (
            source.as_of and not kind.reads_as_of_features,
            f"as_of.{next(iter(source.as_of), '')} has features of requests, which "
            f"models of kind {name} do not read",
        ),
        (
            source.sessions and name != "search",
            f"sessions are histories of kind search, and kind is {name}",
        ),
    )
    # each listing raises if it is empty
    source.event_files(input_uri)
    source.user_files(input_uri)
    for section in source.timed.values():
        section.list_files(input_uri)
    source.item_files(input_uri)
    return replace(config, split=replace(config.split, by=split))


def simulate_log(options: SimulateOptions) -> None:
    """Write a simulated log, unless the folder already holds the log of the options."""
    check_known([options.kind], KINDS, "kind")
    settings, draw_log = as_base(options, Settings), KINDS[options.kind].draw_log
    is_new = write_log(options.output, options.kind, settings, draw_log)
    print(
        f"{'simulated' if is_new else 'up to date:'} {settings.events:,} events of "
        f"{settings.users:,} users on {settings.items:,} items, seed {settings.seed}: "
        f"{options.output}"
    )
