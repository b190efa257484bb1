"""All keys of mapping files as tables of jobs/configs/sources/README.md, from the
dataclasses that read them.

    python -m tests.source_keys jobs/configs/sources/README.md    # writes the tables anew into the page

A test holds that the page is as this writes it, and that the examples are read.
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

from pipelines.data.actions.config import ActionsConfig, Counts, Input, Task
from pipelines.data.prepare_config import PrepareConfig
from pipelines.data.reading.log import History, Label, Log, Section
from pipelines.data.reading.times import Time
from pipelines.data.search.config import SearchConfig
from pipelines.data.sequences.splits import SplitConfig

BEGIN = "<!-- {}: written by `python -m tests.source_keys jobs/configs/sources/README.md` -->"
END = "<!-- end of {} -->"

SECTIONS: dict[str, tuple[type, tuple[str, ...]]] = {
    "": (Log, ()),
    "time.": (Time, ()),
    "labels.NAME.": (Label, ()),
    "history.": (History, ()),
    "items.": (
        Section,
        (
            "files",
            "item",
            "texts",
            "attributes",
            "numbers",
            "folder",
            "optional",
            "keep",
        ),
    ),
    "users.": (Section, ("files", "user", "attributes")),
    "as_of.NAME.": (
        Section,
        ("files", "item", "user", "time", "numbers", "categories"),
    ),
    "prepare.": (PrepareConfig, ()),
    "prepare.split.": (SplitConfig, ()),
}
"""What reads each section of a mapping file, and which of its fields, where not all."""

KINDS: dict[str, tuple[type, tuple[str, ...]]] = {
    "search.": (SearchConfig, ()),
    "actions.": (ActionsConfig, ()),
    "actions.tasks.NAME.": (Task, ()),
    "actions.inputs.NAME.": (Input, ()),
    "actions.counts.": (Counts, ()),
}
"""The same of the sections of `prepare` that are of one kind."""

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
"""Of each key of KINDS what may be written below `search` or `actions`."""

LEFT_OUT = (
    "prepare.kind_config",
    "prepare.ray_data",
    "prepare.split",
    "time",
    "history",
    "items",
    "users",
    "as_of",
    "actions.counts",
)
"""Fields that are no keys, or sections of their own."""


def described(kind: type) -> dict[str, str]:
    """What stands beneath each field of a dataclass, by its name, those of its bases
    among them.
    """
    found: dict[str, str] = {}
    for cls in reversed(kind.__mro__[:-1]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(tree, ast.ClassDef)
        for node, below in zip(tree.body, tree.body[1:], strict=False):
            if (
                isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
                and isinstance(below, ast.Expr)
            ):
                text = (
                    ast.literal_eval(below.value)
                    if isinstance(below.value, ast.Constant)
                    else ""
                )
                found[node.target.id] = " ".join(str(text).split())
    return found


def _default(field: Field) -> str:
    """A key's value where it is left out, as it is written in YAML."""
    if field.default is MISSING and field.default_factory is MISSING:
        return "required"
    value: Any = (
        field.default if field.default is not MISSING else field.default_factory()
    )  # type: ignore[misc]
    if value is None or value in ("", [], {}):
        return ""
    if isinstance(value, list):
        value = [
            int(each) if isinstance(each, float) and each.is_integer() else each
            for each in value
        ]
    return str(value).lower() if isinstance(value, bool) else str(value)


def rows(
    sections: dict[str, tuple[type, tuple[str, ...]]],
) -> Iterator[tuple[str, str, str]]:
    """Each key with what it is and its default, in the order of the sections."""
    for where, (kind, only) in sections.items():
        texts = described(kind)
        for field in sorted(
            fields(kind), key=lambda field: field.kw_only
        ):  # how files are written comes last
            key = where + field.name
            if key not in LEFT_OUT and (not only or field.name in only):
                text = re.sub(r"(^|\. )None: ", r"\1By default: ", texts[field.name])
                yield key, text.replace("None: ", "by default: "), _default(field)


def table(header: str, found: Iterator[tuple[str, ...]]) -> str:
    """Rows in Markdown, of which the first cell is a key."""
    lines = [header, "|---" * header.count(" | ") + "|---|"]
    for key, *cells in found:
        lines.append(
            f"| `{key}` | {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |".replace(
                "|  |", "| |"
            )
        )
    return "\n".join(lines)


def page(text: str) -> str:
    """A page with its tables written anew. ValueError for one that has no place for
    them.
    """
    kinds = ((*row, f"`{EXAMPLES[row[0]]}`") for row in rows(KINDS))
    tables = {
        "keys": table("| key | meaning | default |", rows(SECTIONS)),
        "kinds": table("| key | meaning | default | example |", kinds),
    }
    for name, written in tables.items():
        first, last = BEGIN.format(name), END.format(name)
        before, begin, rest = text.partition(first)
        _, end, after = rest.partition(last)
        if not begin or not end:
            raise ValueError(
                f"the page has no lines '{first}' and '{last}'; write both where the table belongs"
            )
        text = f"{before}{first}\n{written}\n{last}{after}"
    return text


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(page(path.read_text()))
