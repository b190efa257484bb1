"""Settings of `jobs.prepare` from files and options, and what can be known of them before any work, without Ray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from models.config import build, check_known, instead
from models.storage.tables import UserError, check_output, join, read_manifest
from models.storage.uri import check_writable
from pipelines.data.engine import RayDataConfig
from pipelines.data.kinds import KINDS
from pipelines.data.prepare_config import PrepareConfig, refuse
from pipelines.data.reading.log import Log
from pipelines.data.reading.times import FIRST_MS, LAST_MS
from pipelines.data.sequences.splits import SplitConfig

STATISTICS = "statistics.json"
"""The file of the output that a run writes last."""

TABLES = ("events", "rejects", "items", "queries", "sequences", "counts")
"""Folders of the output."""


def read_config(
    *layers: dict[str, Any], named: Callable[[str], str] = "'{}'".format
) -> PrepareConfig:
    """Settings from plain values; later layers win, None means not given. UserError names an unknown key; `named` is
    how messages call one."""
    sections: dict[str, Any] = {"split": SplitConfig, "ray_data": RayDataConfig}
    sections |= {name: kind.config for name, kind in KINDS.items() if kind.config}
    known = list(
        dict.fromkeys(
            [*(f.name for f in fields(PrepareConfig) if f.name != "own"), *sections]
        )
    )
    values: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {name: {} for name in sections}
    for layer in layers:
        check_known(
            layer,
            known,
            lambda key, near: f"unknown key 'prepare.{key}'; {instead(key, known)}",
        )
        for key, value in layer.items():
            if key in sections and not isinstance(value or {}, dict):
                raise UserError(
                    f"prepare.{key} is '{value}'; it is a mapping such as {{key: value}}"
                )
            if key in sections:
                nested[key] |= {
                    name: each
                    for name, each in (value or {}).items()
                    if each is not None
                }
            elif value is not None:
                values[key] = value
    if (name := values.get("kind", PrepareConfig.kind)) not in tuple(KINDS):
        raise UserError(f"kind is '{name}'; it is one of {', '.join(KINDS)}")
    try:
        made = {
            section: build(config, nested[section], f"prepare.{section}.", named)
            for section, config in sections.items()
        }
        own = {
            "split": made["split"],
            "ray_data": made["ray_data"],
            "own": made.get(name),
        }
        settings: PrepareConfig = build(PrepareConfig, values | own, "prepare.", named)
    except ValueError as error:
        raise UserError(str(error)) from error
    if settings.duplicates != "drop" and not KINDS[name].repeats:
        raise UserError(
            f"duplicates is {settings.duplicates}, which is of kind retrieval; kind {name} shows an item once: use drop"
        )
    return settings


def check(
    source: Log, input_uri: str, output_uri: str, config: PrepareConfig
) -> PrepareConfig:
    """What can be known before any work, without Ray: the files are there, the output can be written, the
    settings fit the log. Returns the configuration with everything decided that the source decides."""
    info, kind, name = source.info, KINDS[config.kind], config.kind
    bools = [label for label, type_ in info["labels"].items() if type_ == "bool"]
    if config.behaviour is not None and config.behaviour not in bools:
        known = ", ".join(bools) or "none"
        raise UserError(
            f"behaviour is '{config.behaviour}', which is no bool label of the log; those are: {known}"
        )
    kind.check(source, config)
    split: Any = config.split.resolve(info["clock"])
    history, late, as_of = (
        info.get("history"),
        config.behaviour in info.get("known", {}),
        config.counts_as_of,
    )
    uncounted = (
        as_of is not None
        and kind.counted
        and not (info["clock"] and config.own.windows_days)
    )
    refuse(
        (
            history and not kind.repeats,
            f"the log has a 'history', which is of kind retrieval, but kind is {name}; use "
            "--kind retrieval, or take 'history' out of the source file",
        ),
        (
            history and config.duplicates != "drop",
            f"duplicates is {config.duplicates}, but 'history' comes again in "
            "each row of its user; use --duplicates drop",
        ),
        (
            config.core_window == "train" and split != "temporal",
            "core_window is train, which needs a temporal split; "
            "use --split.kind temporal or core_window all",
        ),
        (
            late and config.ties != "strict",
            f"ties is {config.ties}, but label '{config.behaviour}' is known later than "
            "its event, so the log's order is not that of what is known: use --ties strict, or leave out its time or "
            "delay",
        ),
        (
            as_of is not None and not kind.counted,
            f"counts_as_of is given, which is of kind search; leave it out for "
            f"kind {name}",
        ),
        (
            uncounted,
            "counts_as_of is given, but nothing is counted without clock times or search.windows_days; leave "
            "it out",
        ),
        (
            as_of is not None and not FIRST_MS <= as_of <= LAST_MS,
            f"counts_as_of is {as_of} ms, which is not of the "
            "years 1980 to 2099; give a moment such as 2022-05-07 or epoch ms",
        ),
        (
            config.catalogue is not None and not kind.repeats,
            f"catalogue is given, which is of kind retrieval; leave it "
            f"out for kind {name}",
        ),
        (
            source.as_of and not kind.as_of,
            f"as_of.{next(iter(source.as_of), '')} has features of requests, which "
            f"models of kind {name} do not read",
        ),
    )
    source.event_files(input_uri)
    if config.catalogue is None:
        source.item_files(input_uri)
    else:
        read_manifest(join(config.catalogue, "items"), "items")
    source.user_files(input_uri)
    for of in source.as_of.values():
        of.list_files(input_uri, "feature")
    check_output(output_uri, {name: name for name in TABLES}, [STATISTICS])
    check_writable(output_uri)
    return replace(config, split=replace(config.split, kind=split))
