"""Write the keys of mapping files as tables of jobs/configs/sources/README.md.

    python -m tests.source_keys jobs/configs/sources/README.md

The keys, their meanings and defaults come from the dataclasses that read them. A test
checks that the page is up to date and that the examples are valid.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from pipelines.prepare.reading.log import AsOf, Items, Label, Log, Session, Users
from pipelines.prepare.reading.times import Time
from pipelines.prepare.settings.actions import ActionsConfig, Counts, Input, Task
from pipelines.prepare.settings.config import PrepareConfig, SearchConfig, SplitConfig

BEGIN = "<!-- {}: written by `python -m tests.source_keys jobs/configs/sources/README.md` -->"
END = "<!-- end of {} -->"

SECTIONS: dict[str, tuple[type, tuple[str, ...]]] = {
    "": (Log, ()),
    "time.": (Time, ()),
    "labels.NAME.": (Label, ()),
    "items.": (
        Items,
        (
            "files",
            "item",
            "texts",
            "attributes",
            "numbers",
            "optional",
            "keep",
        ),
    ),
    "users.": (Users, ("files", "user", "attributes")),
    "as_of.NAME.": (
        AsOf,
        ("files", "item", "user", "time", "numbers", "categories"),
    ),
    "sessions.NAME.": (Session, ("files", "user", "item", "time")),
    "prepare.": (PrepareConfig, ()),
    "prepare.split.": (SplitConfig, ()),
}
"""The dataclass that reads each section of a mapping file, and the fields that are keys
(all, if empty)."""

KINDS: dict[str, tuple[type, tuple[str, ...]]] = {
    "search.": (SearchConfig, ()),
    "actions.": (ActionsConfig, ()),
    "actions.tasks.NAME.": (Task, ()),
    "actions.inputs.NAME.": (Input, ()),
    "actions.counts.": (Counts, ()),
}
"""The same for the sections of `prepare` that belong to one kind of log."""

EXAMPLES = {
    "search.windows_days": "windows_days: [1, 7]",
    "search.delay_minutes": "delay_minutes: 15",
    "search.ctr_prior": "ctr_prior: 0.02",
    "search.ctr_strength": "ctr_strength: 50",
    "search.page_size": "page_size: 24",
    "search.max_request_minutes": "max_request_minutes: 30",
    "search.item_features": "item_features: [brand, price]",
    "search.unknown_when_ranking": "unknown_when_ranking: [pixels_from_top]",
    "search.groups": "groups: {relevance: [bm25, pair_ctr_7d]}",
    "actions.tasks": "tasks: {long_dwell: {label: dwell_ms, above: 10000}, like: {label: like}}",
    "actions.inputs": "inputs: {like: {label: like}, stars: {label: stars, range: [1, 5]}}",
    "actions.tasks.NAME.label": "tasks: {like: {label: like}}",
    "actions.tasks.NAME.above": "tasks: {long_dwell: {label: dwell_ms, above: 10000}}",
    "actions.tasks.NAME.at_least": "tasks: {liked: {label: stars, at_least: 4}}",
    "actions.tasks.NAME.any": "tasks: {contribution: {any: [like, comment, share]}}",
    "actions.inputs.NAME.label": "inputs: {like: {label: like}}",
    "actions.inputs.NAME.range": "inputs: {stars: {label: stars, range: [1, 5]}}",
    "actions.inputs.NAME.log_unit": "inputs: {dwell: {label: dwell_ms, range: [0, 120000], log_unit: 1000}}",
    "actions.counts.keys": "counts: {keys: [item, author]}",
    "actions.counts.counted_labels": "counts: {counted_labels: [long_dwell, like]}",
    "actions.counts.windows_days": "counts: {windows_days: [7, 30]}",
    "actions.counts.delay_minutes": "counts: {delay_minutes: 5}",
    "actions.counts.prior": "counts: {prior: 0.02}",
    "actions.counts.strength": "counts: {strength: 50}",
}
"""An example of each key of `KINDS`, as written below `search` or `actions`."""

OMITTED_FIELDS = (
    "prepare.search",
    "prepare.actions",
    "prepare.ray_data",
    "prepare.split",
    "time",
    "items",
    "users",
    "as_of",
    "sessions",
    "actions.counts",
)
"""Fields that are no keys, or that have a section."""


def read_field_docs(kind: type) -> dict[str, str]:
    """Return the docstring of each field of a dataclass and its bases, by field name."""
    docs: dict[str, str] = {}
    for cls in reversed(kind.__mro__[:-1]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(tree, ast.ClassDef)
        for node, next_node in zip(tree.body, tree.body[1:], strict=False):
            if not isinstance(node, ast.AnnAssign) or not isinstance(
                next_node, ast.Expr
            ):
                continue
            if isinstance(node.target, ast.Name):
                doc = ""
                if isinstance(next_node.value, ast.Constant):
                    doc = str(ast.literal_eval(next_node.value))
                docs[node.target.id] = " ".join(doc.split())
    return docs


def format_default(field: Field) -> str:
    """Return the default of a key as it is written in YAML."""
    if field.default is MISSING and field.default_factory is MISSING:
        return "required"
    value: Any = field.default
    if value is MISSING:
        value = field.default_factory()  # type: ignore[misc]
    if value is None or value in ("", [], {}):
        return ""
    if isinstance(value, list):
        value = [
            int(item) if isinstance(item, float) and item.is_integer() else item
            for item in value
        ]
    return str(value).lower() if isinstance(value, bool) else str(value)


def build_rows(
    sections: dict[str, tuple[type, tuple[str, ...]]],
) -> Iterator[tuple[str, str, str]]:
    """Yield key, meaning and default of each field, in the order of the sections."""
    for prefix, (kind, names) in sections.items():
        docs = read_field_docs(kind)
        # Keyword-only fields, on how files are written, come last.
        for field in sorted(fields(kind), key=lambda field: field.kw_only):
            key = prefix + field.name
            if key not in OMITTED_FIELDS and (not names or field.name in names):
                doc = re.sub(r"(^|\. )None: ", r"\1By default: ", docs[field.name])
                meaning = doc.replace("None: ", "by default: ")
                yield key, meaning, format_default(field)


def format_table(header: str, rows: Iterator[tuple[str, ...]]) -> str:
    """Return rows as a Markdown table; the first cell of a row is a key."""
    lines = [header, "|---" * header.count(" | ") + "|---|"]
    for key, *cells in rows:
        escaped = [cell.replace("|", "\\|") for cell in cells]
        line = f"| `{key}` | {' | '.join(escaped)} |"
        lines.append(line.replace("|  |", "| |"))
    return "\n".join(lines)


def write_tables(text: str) -> str:
    """Return a page with its tables written anew.

    Raises:
        ValueError: if the page lacks the lines between which the tables belong.
    """
    kinds = ((*row, f"`{EXAMPLES[row[0]]}`") for row in build_rows(KINDS))
    tables = {
        "keys": format_table("| key | meaning | default |", build_rows(SECTIONS)),
        "kinds": format_table("| key | meaning | default | example |", kinds),
    }
    for name, table in tables.items():
        first, last = BEGIN.format(name), END.format(name)
        before, begin, rest = text.partition(first)
        _, end, after = rest.partition(last)
        if not begin or not end:
            raise ValueError(f"the page has no lines '{first}' and '{last}'")
        text = f"{before}{first}\n{table}\n{last}{after}"
    return text


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(write_tables(path.read_text()))
