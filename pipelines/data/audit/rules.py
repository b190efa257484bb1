"""Proves prepared tables free of leakage, from `events` alone: `python -m jobs.audit --tables DIR`.

Every rule is computed a second time here, in plain polars, and shares no code with the
steps that made the tables: it would prove nothing to ask the same function twice. All
tables are in memory.
"""

from __future__ import annotations

from collections.abc import Callable

import polars as pl

from models.storage.tables import UserError, join, read_manifest
from pipelines.data.audit.base import Rule, Tables
from pipelines.data.audit.events import (
    check_catalogue,
    check_events,
    check_files,
    check_inputs,
    check_users,
)
from pipelines.data.kinds import KINDS

RULES = {
    "files": "every listed file is whole: size, sha256, rows and columns as its manifest says",
    "inputs": "items and sequences were made from these events, sequences from these items",
    "events": "times are int64 and not negative; keys are set; each part is sorted",
    "duplicates": "no event stands in the table twice",
    "users": "a user's events are in one part; each surviving user is in sequences exactly once",
    "catalogue": "item_index is dense in the order of item_id; the k-core keeps and drops the right items",
    "behaviours": "lists have equal length and hold exactly what events give, in order",
    "known": "a label is known when its time or its delay says",
    "history": "history_end counts the user's behaviours that are known strictly before the request",
    "targets": "request i asks for behaviour i; in a search log it is what (user, request id) showed, at its earliest",
    "splits": "each request is in the split that its place or its time says; train_end and val_end are the cuts",
    "folds": "test windows are equally long, follow each other and end with the log; a fold has the requests of its times",
    "tasks": "in a log of actions tasks and actions are what the labels say",
    "counts": "the manifest of sequences counts what the table holds",
    "queries": "in a search log query_index is dense in the order of the text and covers what events ask",
    "features": "own features are what the log says, or said strictly before the request; statistics are of training",
    "windows": "a windowed count at time t covers [t - window, t - delay)",
}


def audit(uri: str, progress: Callable[[str], None] = lambda line: None) -> list[Rule]:
    """Check the tables under `uri` and return the rules of their kind, in the order of `RULES`.

    A file that differs from its manifest ends the audit with the rule `files`.

    Args:
        uri: Folder of the tables.
        progress: Is called with the name of each step.

    Raises:
        UserError: if there is no table to audit.
    """
    name = read_manifest(join(uri, "sequences"), "sequences").info["kind"]
    if name not in KINDS:
        raise UserError(
            f"{uri} holds sequences of kind '{name}', which is none of {', '.join(KINDS)}"
        )
    kind = KINDS[name]
    tables = Tables.open(uri, kind.all_shown)
    rules = {name: Rule(name, holds) for name, holds in RULES.items()}
    progress("files")
    check_files(tables, rules["files"])
    if rules["files"].violations:
        return [rules["files"]]
    try:
        check_inputs(tables, rules["inputs"])
        progress("events")
        check_events(tables, rules)
        core_users = check_catalogue(tables, rules["catalogue"])
        progress("sequences")
        users = kind.audit(tables, rules, core_users)
        check_users(tables, users, rules["users"])
    except pl.exceptions.ColumnNotFoundError as error:
        raise UserError(
            f"{uri} is not what jobs.prepare writes: {str(error).partition(';')[0]}"
        ) from error
    skipped = {*kind.without}
    if not any(name.startswith("known_") for name in tables.event_columns):
        skipped.add("known")
    if not (tables.info.get("split") or {}).get("folds"):
        skipped.add("folds")
    return [rule for name, rule in rules.items() if name not in skipped]


def report(rules: list[Rule]) -> str:
    """Return the rules as a table for the terminal, then the first offenders and the notes."""
    width = max(len(rule.name) for rule in rules)
    lines = [f"{'rule':<{width}}  {'rows':>13}  {'violations':>10}  what must hold"]
    for rule in rules:
        lines.append(
            f"{rule.name:<{width}}  {rule.rows:>13,}  {rule.violations:>10,}  {rule.holds}"
        )
    for rule in rules:
        lines += [f"  {rule.name}: {example}" for example in rule.examples]
        if rule.violations > len(rule.examples):
            more = rule.violations - len(rule.examples)
            lines.append(f"  {rule.name}: and {more:,} more")
        if rule.note:
            lines.append(f"  note, {rule.name}: {rule.note}")
    return "\n".join(lines)
