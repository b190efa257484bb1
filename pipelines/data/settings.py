"""Settings of `jobs.prepare` from files and options, and the checks that need no work and no Ray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from models.config import build, check_known, did_you_mean_key
from models.storage.tables import UserError, check_output, join, read_manifest
from models.storage.uri import check_writable
from pipelines.data.engine import RayDataConfig
from pipelines.data.kinds import KINDS
from pipelines.data.prepare_config import PrepareConfig, refuse
from pipelines.data.reading.log import Log
from pipelines.data.reading.times import MAX_TIME_MS, MIN_TIME_MS
from pipelines.data.sequences.splits import SplitConfig

STATISTICS = "statistics.json"
"""File of the output that a run writes last."""

TABLES = ("events", "rejects", "items", "queries", "sequences", "counts")
"""Folders of the output."""


def read_config(
    *layers: dict[str, Any], named: Callable[[str], str] = "'{}'".format
) -> PrepareConfig:
    """Build the settings from plain values.

    Args:
        layers: Values by key; later layers win, None means not given.
        named: Returns how messages call a key.

    Raises:
        UserError: for an unknown key or a value that is not allowed.
    """
    sections: dict[str, Any] = {"split": SplitConfig, "ray_data": RayDataConfig}
    sections |= {name: kind.config for name, kind in KINDS.items() if kind.config}
    values, of_sections = _merge_layers(layers, sections)
    name = values.get("kind", PrepareConfig.kind)
    if name not in KINDS:
        raise UserError(f"kind is '{name}'; it is one of {', '.join(KINDS)}")
    try:
        configs = {
            section: build(config, of_sections[section], f"prepare.{section}.", named)
            for section, config in sections.items()
        }
        values |= {"split": configs["split"], "ray_data": configs["ray_data"]}
        values["own"] = configs.get(name)
        settings: PrepareConfig = build(PrepareConfig, values, "prepare.", named)
    except ValueError as error:
        raise UserError(str(error)) from error
    if settings.duplicates != "drop" and not KINDS[name].repeats:
        raise UserError(
            f"duplicates is {settings.duplicates}, which is of kind retrieval; kind {name} shows an item once: use drop"
        )
    return settings


def _merge_layers(
    layers: tuple[dict[str, Any], ...], sections: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the plain values and the values by section of all layers.

    Raises:
        UserError: for an unknown key or a section that is not a mapping.
    """
    plain = [f.name for f in fields(PrepareConfig) if f.name != "own"]
    known = list(dict.fromkeys([*plain, *sections]))
    values: dict[str, Any] = {}
    of_sections: dict[str, dict[str, Any]] = {name: {} for name in sections}
    for layer in layers:
        check_known(
            layer,
            known,
            lambda key, near: (
                f"unknown key 'prepare.{key}'; {did_you_mean_key(key, known)}"
            ),
        )
        for key, value in layer.items():
            if key in sections:
                if not isinstance(value or {}, dict):
                    raise UserError(
                        f"prepare.{key} is '{value}'; it is a mapping such as {{key: value}}"
                    )
                given = {k: v for k, v in (value or {}).items() if v is not None}
                of_sections[key] |= given
            elif value is not None:
                values[key] = value
    return values, of_sections


def resolve_config(
    source: Log, input_uri: str, output_uri: str, config: PrepareConfig
) -> PrepareConfig:
    """Check the settings before any work, and return them with the kind of split decided.

    Raises:
        UserError: if files are missing, the output cannot be written, or the settings
            do
            not fit the log.
    """
    kind = KINDS[config.kind]
    _check_behaviour(source, config)
    kind.check(source, config)
    split: Any = config.split.resolve(source.info["clock"])
    _check_combinations(source, config, split)
    source.event_files(input_uri)
    if config.catalogue is None:
        source.item_files(input_uri)
    else:
        read_manifest(join(config.catalogue, "items"), "items")
    source.user_files(input_uri)
    for section in source.as_of.values():
        section.list_files(input_uri, "feature")
    check_output(output_uri, {name: name for name in TABLES}, [STATISTICS])
    check_writable(output_uri)
    return replace(config, split=replace(config.split, kind=split))


def _check_behaviour(source: Log, config: PrepareConfig) -> None:
    """Raise UserError for a behaviour that is not a bool label of the log."""
    labels = source.info["labels"]
    bools = [label for label, type_ in labels.items() if type_ == "bool"]
    if config.behaviour is not None and config.behaviour not in bools:
        raise UserError(
            f"behaviour is '{config.behaviour}', which is no bool label of the log; "
            f"those are: {', '.join(bools) or 'none'}"
        )


def _check_combinations(source: Log, config: PrepareConfig, split: str) -> None:
    """Raise UserError for settings that exclude each other, or that the log or the kind does not have.

    `split` is the resolved kind of split.
    """
    info, name = source.info, config.kind
    kind, moment = KINDS[name], config.counts_as_of
    history = info.get("history")
    is_late = config.behaviour in info.get("known", {})
    counts_nothing = kind.counted and not (info["clock"] and config.own.windows_days)
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
            config.split.folds > 1 and name != "retrieval",
            f"split.folds is {config.split.folds}, which is of kind retrieval: other kinds have features and "
            "statistics as of the cuts of one split; leave it out, and prepare a table for each window with "
            "--split.val_start and --split.test_start",
        ),
        (
            is_late and config.ties != "strict",
            f"ties is {config.ties}, but label '{config.behaviour}' is known later than "
            "its event, so the log's order is not that of what is known: use --ties strict, or leave out its time or "
            "delay",
        ),
        (
            moment is not None and not kind.counted,
            f"counts_as_of is given, which is of kind search; leave it out for "
            f"kind {name}",
        ),
        (
            moment is not None and counts_nothing,
            "counts_as_of is given, but nothing is counted without clock times or search.windows_days; leave "
            "it out",
        ),
        (
            moment is not None and not MIN_TIME_MS <= moment <= MAX_TIME_MS,
            f"counts_as_of is {moment} ms, which is not of the "
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
