"""Audit of prepared tables for errors and leakage, computed from `events` alone.

    python -m jobs.audit --tables TABLES

The rules recompute the tables in plain polars and share no code with the steps that
made them, so that both cannot have the same bug. All tables are read into memory.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import polars as pl

from core.errors import UserError, pluralize
from core.files import join
from core.options import check_known
from core.schemas import INFO_CLASSES, SequencesInfo
from core.tables import Table, TableInfo, open_table
from pipelines.prepare.audit.actions import check_actions_tables
from pipelines.prepare.audit.base import Rule, Tables
from pipelines.prepare.audit.events import (
    check_catalogue,
    check_events,
    check_files,
    check_inputs,
    check_texts,
    check_users,
)
from pipelines.prepare.audit.retrieval import check_retrieval_tables
from pipelines.prepare.audit.search import check_search_tables

RULES = {
    "files": "files have the sizes, hashes, rows and columns that manifests list",
    "inputs": "items and sequences were made from these events and items",
    "events": "times are int64 and not negative; keys are set; each part is sorted",
    "rows": "rows of the log are events, duplicates or rejects, and `where` holds",
    "duplicates": "no event is in the table twice",
    "users": "events of a user are in one part; sequences has each expected user once",
    "catalogue": "item_index is dense, in the order of item_id; items are the k-core",
    "texts": "texts of items from events are the latest before validation",
    "behaviours": "lists have equal lengths and the behaviours of events, in order",
    "known": "a label is known at its time, or its delay after the event",
    "history": "history_end counts behaviours known strictly before the request",
    "targets": "request i is for behaviour or basket i; a search has its results",
    "splits": "requests are in the split of their rank or time; the cuts are right",
    "tasks": "in a log of actions, tasks and actions are computed from the labels",
    "counts": "counts in the manifest of sequences equal those of the table",
    "queries": "in a search log, query_index is dense, in the order of the queries",
    "features": "custom features are from the log, strictly before the request",
    "windows": "a windowed count at time t covers [t - window, t - delay)",
}
"""Condition of each rule, as the report shows it."""


KINDS = {
    "retrieval": check_retrieval_tables,
    "search": check_search_tables,
    "actions": check_actions_tables,
}
"""Checks of `sequences` by kind. They return the users (`user_id`) that the table must
contain."""


def audit_tables(uri: str) -> None:
    """Check the tables under `uri` for leakage and print the report.

    Raises:
        UserError: If a rule is violated.
    """
    began = time.monotonic()
    rules = audit(uri, lambda step: print(f"audit: {step}", file=sys.stderr))
    title = f"Audit of {uri}, {time.monotonic() - began:.1f} s"
    print(f"{title}\n{report(rules)}", flush=True)
    broken = [rule.name for rule in rules if rule.violations]
    if broken:
        total = pluralize(sum(rule.violations for rule in rules), "violation")
        raise UserError(
            f"{total} of {', '.join(broken)} in {uri}; do not train on these tables",
            "violation",
        )
    print("No violations.")


def audit(uri: str, progress: Callable[[str], None] = lambda line: None) -> list[Rule]:
    """Check the tables under `uri` against the rules of their kind.

    If a file differs from its manifest, only the rule `files` is checked.

    Args:
        uri: Folder of the tables.
        progress: Called with the name of each step.

    Returns:
        The rules that checked any row with their violations, in the order of `RULES`.
    """
    sequences = open_table(join(uri, "sequences"), SequencesInfo)
    check_known([sequences.info.kind], KINDS, "kind")
    opened: dict[str, Table] = {
        table: open_table(join(uri, table), INFO_CLASSES.get(table, TableInfo))
        for table in dict.fromkeys(("events", "items", *sequences.inputs))
    }
    tables = Tables({**opened, "sequences": sequences})
    rules = {name: Rule(name, holds) for name, holds in RULES.items()}
    progress("files")
    check_files(tables, rules["files"])
    if rules["files"].violations:
        return [rules["files"]]
    try:
        check_inputs(tables, rules["inputs"])
        progress("events")
        check_events(tables, rules)
        check_catalogue(tables, rules["catalogue"])
        check_texts(tables, rules["texts"])
        progress("sequences")
        users = KINDS[sequences.info.kind](tables, rules)
        check_users(tables, users, rules["users"])
    except pl.exceptions.ColumnNotFoundError as error:
        raise UserError(
            f"{uri} lacks a column: {str(error).partition(';')[0]}", "format"
        ) from error
    return [rule for rule in rules.values() if rule.rows or rule.violations]


def report(rules: list[Rule]) -> str:
    """Format the rules as a table for the terminal, then examples and notes."""
    width = max(len(rule.name) for rule in rules)
    lines = [f"{'rule':<{width}}  {'rows':>13}  {'violations':>10}  what must hold"]
    for rule in rules:
        counts = f"{rule.rows:>13,}  {rule.violations:>10,}"
        lines.append(f"{rule.name:<{width}}  {counts}  {rule.holds}")
    for rule in rules:
        lines += [f"  {rule.name}: {example}" for example in rule.examples]
        if rule.violations > len(rule.examples):
            more = rule.violations - len(rule.examples)
            lines.append(f"  {rule.name}: and {more:,} more")
        if rule.note:
            lines.append(f"  note, {rule.name}: {rule.note}")
    return "\n".join(lines)
