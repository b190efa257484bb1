"""Settings of `jobs.prepare` from files and options, and what can be known of them before any work, without Ray."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from models.config import build, check_known, instead
from models.tables import UserError, check_output, join, read_manifest
from models.uri import check_writable
from pipelines.data.kinds import KINDS
from pipelines.data.log import Log
from pipelines.data.prepare_config import PrepareConfig
from pipelines.data.ray_data_config import RayDataConfig
from pipelines.data.splits import SplitConfig
from pipelines.data.times import FIRST_MS, LAST_MS

STATISTICS = "statistics.json"
"""The file of the output that a run writes last."""

TABLES = ("events", "rejects", "items", "queries", "sequences", "counts")
"""Folders of the output."""


def read_config(*layers: dict[str, Any]) -> PrepareConfig:
    """Settings from plain values; later layers win, None means not given. UserError names an unknown key."""
    sections: dict[str, Any] = {"split": SplitConfig, "ray_data": RayDataConfig}
    sections |= {name: kind.config for name, kind in KINDS.items() if kind.config}
    known = list(dict.fromkeys([*(f.name for f in fields(PrepareConfig) if f.name != "own"), *sections]))
    values: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {name: {} for name in sections}
    for layer in layers:
        check_known(layer, known, lambda key, near: f"unknown key 'prepare.{key}'; {instead(key, known)}")
        for key, value in layer.items():
            if key in sections and not isinstance(value or {}, dict):
                raise UserError(f"prepare.{key} is '{value}'; it is a mapping such as {{key: value}}")
            if key in sections:
                nested[key] |= {name: each for name, each in (value or {}).items() if each is not None}
            elif value is not None:
                values[key] = value
    if (name := values.get("kind", PrepareConfig.kind)) not in tuple(KINDS):
        raise UserError(f"kind is '{name}'; it is one of {', '.join(KINDS)}")
    try:
        made = {section: build(config, nested[section], f"prepare.{section}.") for section, config in sections.items()}
        own = {"split": made["split"], "ray_data": made["ray_data"], "own": made.get(name)}
        settings: PrepareConfig = build(PrepareConfig, values | own, "prepare.")
    except ValueError as error:
        raise UserError(str(error)) from error
    if settings.duplicates != "drop" and not KINDS[name].repeats:
        raise UserError(
            f"duplicates is {settings.duplicates}, which is of kind retrieval; kind {name} shows an item once: use drop"
        )
    return settings


def _check_history(config: PrepareConfig) -> None:
    """UserError for settings that a log with earlier behaviours in its rows cannot have."""
    if not KINDS[config.kind].repeats:
        raise UserError(
            f"kind is {config.kind}, but the log has a 'history', whose behaviours were never shown as results; use "
            f"--kind retrieval, or take 'history' out of the source file"
        )
    if config.duplicates != "drop":
        raise UserError(
            f"duplicates is {config.duplicates}, but 'history' comes again in each row of its user; use --duplicates "
            f"drop"
        )


def _check_counts_as_of(source: Log, config: PrepareConfig) -> None:
    """UserError for a log of which nothing is counted that served models read."""
    if not KINDS[config.kind].counted:
        raise UserError(f"counts_as_of is given, which is of kind search; leave it out for kind {config.kind}")
    if not source.info["clock"] or not config.own.windows_days:
        why = "search.windows_days is empty" if source.info["clock"] else "the log has no clock times"
        raise UserError(f"counts_as_of is given, but {why}, so nothing is counted; leave it out")
    if not FIRST_MS <= config.counts_as_of <= LAST_MS:
        raise UserError(
            f"counts_as_of is {config.counts_as_of} ms, which is not of the years 1980 to 2099; give a moment such as "
            f"2022-05-07 or epoch ms"
        )


def check(source: Log, input_uri: str, output_uri: str, config: PrepareConfig) -> PrepareConfig:
    """What can be known before any work, without Ray: the files are there, the output can be written, the
    settings fit the log. Returns the configuration with everything decided that the source decides."""
    labels, kind = source.info["labels"], KINDS[config.kind]
    if config.behaviour is not None and labels.get(config.behaviour) != "bool":
        known = ", ".join(name for name, type_ in labels.items() if type_ == "bool") or "none"
        raise UserError(f"behaviour is '{config.behaviour}', which is no bool label of the log; those are: {known}")
    kind.check(source, config)
    if source.info.get("history"):
        _check_history(config)
    split: Any = config.split.resolve(source.info["clock"])
    if config.core_window == "train" and split != "temporal":
        raise UserError(
            "core_window is train, which needs a temporal split; use --split.kind temporal or core_window all"
        )
    if config.behaviour in source.info.get("known", {}) and config.ties != "strict":
        raise UserError(
            f"ties is {config.ties}, but label '{config.behaviour}' is known later than its event, so the log's order "
            f"is not that of what is known: use --ties strict, or leave out its time or delay"
        )
    if config.counts_as_of is not None:
        _check_counts_as_of(source, config)
    source.event_files(input_uri)
    if config.catalogue is None:
        source.item_files(input_uri)
    elif not kind.repeats:
        raise UserError(f"catalogue is given, which is of kind retrieval; leave it out for kind {config.kind}")
    else:
        read_manifest(join(config.catalogue, "items"), "items")
    source.user_files(input_uri)
    for name, of in source.as_of.items():
        if not kind.as_of:
            raise UserError(f"as_of.{name} has features of requests, which models of kind {config.kind} do not read")
        of.listed(input_uri, "feature")
    check_output(output_uri, {name: name for name in TABLES}, [STATISTICS])
    check_writable(output_uri)
    return replace(config, split=replace(config.split, kind=split))
