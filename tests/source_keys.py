"""All keys of mapping files as a table of docs/own_log.md, from the dataclasses that read them.

    python -m tests.source_keys docs/own_log.md    # writes the table anew into the page

A test holds that the page is as this writes it.
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

from pipelines.data.log import History, Label, Log, Section
from pipelines.data.prepare_config import PrepareConfig
from pipelines.data.splits import SplitConfig
from pipelines.data.times import Time

BEGIN = "<!-- keys: written by `python -m tests.source_keys docs/own_log.md` -->"
END = "<!-- end of keys -->"

SECTIONS: dict[str, tuple[type, tuple[str, ...]]] = {
    "": (Log, ()),
    "time.": (Time, ()),
    "labels.NAME.": (Label, ()),
    "history.": (History, ()),
    "items.": (Section, ("files", "item", "texts", "attributes", "numbers", "folder", "optional", "keep")),
    "users.": (Section, ("files", "user", "attributes")),
    "as_of.NAME.": (Section, ("files", "item", "user", "time", "numbers", "categories")),
    "prepare.": (PrepareConfig, ()),
    "prepare.split.": (SplitConfig, ()),
}
"""What reads each section of a mapping file, and which of its fields, where not all."""

LEFT_OUT = ("prepare.own", "prepare.ray_data", "prepare.split", "time", "history", "items", "users", "as_of")
"""Fields that are no keys, or sections of their own."""


def described(kind: type) -> dict[str, str]:
    """What stands beneath each field of a dataclass, by its name, those of its bases among them."""
    found: dict[str, str] = {}
    for cls in reversed(kind.__mro__[:-1]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(tree, ast.ClassDef)
        for node, below in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(below, ast.Expr):
                text = ast.literal_eval(below.value) if isinstance(below.value, ast.Constant) else ""
                found[node.target.id] = " ".join(str(text).split())
    return found


def _default(field: Field) -> str:
    """A key's value where it is left out, as it is written in YAML."""
    if field.default is MISSING and field.default_factory is MISSING:
        return "required"
    value = field.default if field.default is not MISSING else ""
    if value is None or value == "":
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def rows() -> Iterator[tuple[str, str, str]]:
    """Each key with what it is and its default, sections in the order of SECTIONS."""
    for where, (kind, only) in SECTIONS.items():
        texts = described(kind)
        for field in sorted(fields(kind), key=lambda field: field.kw_only):  # how files are written comes last
            key = where + field.name
            if key not in LEFT_OUT and (not only or field.name in only):
                text = re.sub(r"(^|\. )None: ", r"\1By default: ", texts[field.name])
                yield key, text.replace("None: ", "by default: "), _default(field)


def table() -> str:
    """The keys in Markdown."""
    lines = ["| key | meaning | default |", "|---|---|---|"]
    lines += [f"| `{key}` | {text} | {default} |".replace(" |  |", " | |") for key, text, default in _escaped()]
    return "\n".join(lines)


def _escaped() -> Iterator[tuple[str, ...]]:
    for row in rows():
        yield tuple(cell.replace("|", "\\|") for cell in row)


def page(text: str) -> str:
    """A page with its table written anew. ValueError for one that has no place for it."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no lines '{BEGIN}' and '{END}'; write both where the table belongs")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(page(path.read_text()))
