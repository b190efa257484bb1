"""The settings of `jobs.prepare`, and what can be known of them before any work, without Ray."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from models.tables import UserError
from pipelines.data.actions_config import ActionsConfig
from pipelines.data.search_config import SearchConfig
from pipelines.data.sources.base import Source
from pipelines.data.splits import SplitConfig
from pipelines.data.tables import check_output, check_writable

TABLES = ("events", "rejects", "items", "queries", "sequences")
"""Folders of the output."""

STATISTICS = "statistics.json"
"""The file of the output that a run writes last."""


@dataclass
class PrepareConfig:
    """What is made of a raw log. A source file's `prepare` section sets these; the command line wins."""

    kind: Literal["retrieval", "search", "actions"] = "retrieval"
    """What a request is: `retrieval`, each behaviour asks for itself; `search`, a search with the results it showed;
    `actions`, an impression whose actions are asked for."""
    core: int = 5
    """Iterative k-core: users and items with fewer behaviours are left out. 0 or 1 keeps all."""
    core_window: Literal["all", "train"] = "all"
    """Whether the k-core counts the whole log, as papers do, or the training window of a temporal split only."""
    ties: Literal["strict", "log_order"] = "strict"
    """`strict`: a history holds only what is strictly earlier. `log_order`: events of equal time keep the log's
    order and see the ones before; `position` then is that order."""
    split: SplitConfig = field(default_factory=SplitConfig)
    """How requests are split."""
    max_events: int = 10_000
    """Behaviours per user; of longer histories the most recent are kept."""
    behaviour: str | None = None
    """A bool label that makes an event a behaviour, such as `click`; by default every event is one."""
    partitions: int | None = None
    """Partitions of the shuffle and parts of the tables; by default from the bytes read."""
    max_rejects: float = 0.01
    """Share of rows that may break the schema before the job fails."""
    min_matched: float = 0.5
    """Share of the items, and of the users where there are user files, that must have a row in those files, by number
    and by events, before the job fails; 0 accepts any."""
    duplicates: Literal["drop", "keep"] = "drop"
    """Events that repeat another in every column: dropped as logged twice, or kept as real, such as two purchases of
    a day."""
    search: SearchConfig = field(default_factory=SearchConfig)
    """The features of a search log."""
    actions: ActionsConfig = field(default_factory=ActionsConfig)
    """Tasks, inputs and counts of a log of actions."""

    def __post_init__(self) -> None:
        if self.kind not in ("retrieval", "search", "actions"):
            raise ValueError(f"kind is '{self.kind}'; it is one of retrieval, search, actions")
        if self.core < 0:
            raise ValueError(f"core is {self.core}; it must be 0 (keep all) or more")
        if self.core_window not in ("all", "train"):
            raise ValueError(f"core_window is '{self.core_window}'; it is one of all, train")
        if self.ties not in ("strict", "log_order"):
            raise ValueError(f"ties is '{self.ties}'; it is one of strict, log_order")
        if self.max_events < 1:
            raise ValueError(f"max_events is {self.max_events}; a user needs at least 1")
        if self.partitions is not None and self.partitions < 1:
            raise ValueError(f"partitions is {self.partitions}; it must be 1 or more, or left out")
        if not 0 <= self.max_rejects <= 1:
            raise ValueError(f"max_rejects is {self.max_rejects}; it is a share between 0 and 1")
        if not 0 <= self.min_matched <= 1:
            raise ValueError(f"min_matched is {self.min_matched}; it is a share between 0 and 1")
        if self.duplicates not in ("drop", "keep"):
            raise ValueError(f"duplicates is '{self.duplicates}'; it is one of drop, keep")
        if self.duplicates == "keep" and self.kind != "retrieval":
            raise ValueError(
                f"duplicates is keep, which is of kind retrieval; kind {self.kind} shows an item once: use drop"
            )

    @classmethod
    def of(cls, *layers: dict[str, Any]) -> PrepareConfig:
        """From plain values; later layers win, None means not given. UserError names an unknown key."""
        values: dict[str, Any] = {}
        nested: dict[str, dict[str, Any]] = {name: {} for name in NESTED}
        for layer in layers:
            _check_keys(layer, cls, "")
            for name, kind in NESTED.items():
                given = layer.get(name) or {}
                if not isinstance(given, dict):
                    raise UserError(f"prepare.{name} is '{given}'; it is a mapping such as {{key: value}}")
                _check_keys(given, kind, f"{name}.")
                nested[name] |= {key: value for key, value in given.items() if value is not None}
            values |= {key: value for key, value in layer.items() if value is not None and key not in NESTED}
        try:
            return cls(**{name: kind(**nested[name]) for name, kind in NESTED.items()}, **values)
        except (ValueError, TypeError) as error:
            raise UserError(str(error)) from error

    @property
    def counted(self) -> str | None:
        """The label of the events that make the catalogue and the split: in a search log all that was shown do."""
        return None if self.kind == "search" else self.behaviour


NESTED: dict[str, Any] = {"split": SplitConfig, "search": SearchConfig, "actions": ActionsConfig}


def _check_keys(values: dict[str, Any], kind: type, where: str) -> None:
    known = [f.name for f in fields(kind)]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)[0]
            raise UserError(f"unknown key 'prepare.{where}{key}'; the nearest key is '{near}'")


def check(source: Source, input_uri: str, output_uri: str, config: PrepareConfig) -> PrepareConfig:
    """What can be known before any work, without Ray: the files are there, the output can be written, the
    settings fit the log. Returns the configuration with everything decided that the source decides."""
    labels = source.info["labels"]
    if config.behaviour is not None and labels.get(config.behaviour) != "bool":
        known = ", ".join(name for name, kind in labels.items() if kind == "bool") or "none"
        raise UserError(f"behaviour is '{config.behaviour}', which is no bool label of the log; those are: {known}")
    if config.kind == "actions":
        check_actions(source, config)  # first, as without a clock no split would be right
    kind: Any = config.split.resolve(source.info["clock"])
    if config.core_window == "train" and kind != "temporal":
        raise UserError(
            "core_window is train, which needs a temporal split; use --split.kind temporal or core_window all"
        )
    if config.behaviour in source.info.get("known", {}) and config.ties != "strict":
        raise UserError(
            f"ties is {config.ties}, but label '{config.behaviour}' is known later than its event, so the log's order "
            f"is not that of what is known: use --ties strict, or leave out its time or delay"
        )
    if kind == "per_user" and config.kind != "actions":
        raise UserError(f"split.kind is per_user, which is of logs of actions; use temporal for kind {config.kind}")
    if config.kind == "search":
        check_search(source, config)
    source.event_files(input_uri)
    source.item_files(input_uri)
    source.user_files(input_uri)
    check_output(output_uri, {name: name for name in TABLES}, [STATISTICS])
    check_writable(output_uri)
    return replace(config, split=replace(config.split, kind=kind))


def check_actions(source: Source, config: PrepareConfig) -> ActionsConfig:
    """The settings with what the log decides; UserError for settings that a log of actions cannot have."""
    if not source.info["clock"]:
        raise UserError(
            "the log has only an order of events, but a log of actions needs clock times, for its counts and its cut; "
            "give time.unit s, ms, us or iso"
        )
    if late := source.info.get("known"):
        raise UserError(
            f"label '{min(late)}' is known later than its event, but models of actions read the actions of every "
            f"earlier event; leave out its 'time' or 'delay_minutes', or use kind search or retrieval"
        )
    if config.behaviour is not None:
        raise UserError(
            f"behaviour is '{config.behaviour}', but in a log of actions every impression is a behaviour; leave it out"
        )
    if config.core > 1:
        raise UserError(
            f"core is {config.core}, but the catalogue of a log of actions holds every item that was shown; use "
            f"--core 0, and --core_window train to leave out items that the training window did not show"
        )
    if config.ties != "strict":
        raise UserError(f"ties is {config.ties}; counts see strictly earlier events only: use --ties strict")
    if config.split.resolve(source.info["clock"]) == "leave_last_out":
        raise UserError(
            "split.kind is leave_last_out, but a log of actions is cut in time; use --split.kind temporal, the same "
            "cut for all users, or per_user"
        )
    try:
        return config.actions.resolve(source.info, source.items_columns[1])
    except ValueError as error:
        raise UserError(f"prepare.actions: {error}") from error


def bool_labels(source: Source, behaviour: str | None) -> list[str]:
    """The log's bool labels, the one that makes a behaviour first."""
    labels = [name for name, kind in source.info["labels"].items() if kind == "bool"]
    return sorted(labels, key=lambda name: name != behaviour)


def check_search(source: Source, config: PrepareConfig) -> None:
    """UserError for settings that a search log cannot have."""
    if config.behaviour is None:
        known = ", ".join(bool_labels(source, None)) or "none"
        raise UserError(
            f"kind is search, which needs the bool label that makes a result a behaviour; set behaviour to one of: "
            f"{known}"
        )
    if config.core > 1:
        raise UserError(
            f"core is {config.core}, but the catalogue of a search log holds every item that was shown; use --core 0, "
            f"and --core_window train to leave out items that the training window did not show"
        )
    if config.ties != "strict":
        raise UserError(f"ties is {config.ties}; a search sees strictly earlier behaviours only: use --ties strict")
