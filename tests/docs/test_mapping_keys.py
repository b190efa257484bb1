"""The page of mapping keys has each key, its default and a valid example."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from typing import Any

import yaml
from pages import ROOT

from pipelines.prepare.reading.log import AsOf, Items, Label, Log, Session, Users
from pipelines.prepare.reading.times import Time
from pipelines.prepare.settings.actions import ActionsConfig, Counts, Input, Task
from pipelines.prepare.settings.config import PrepareConfig, SearchConfig, SplitConfig
from tests.fixtures.commands import read_config

SECTIONS: dict[str, type] = {
    "": Log,
    "time.": Time,
    "labels.NAME.": Label,
    "items.": Items,
    "users.": Users,
    "as_of.NAME.": AsOf,
    "sessions.NAME.": Session,
    "prepare.": PrepareConfig,
    "prepare.split.": SplitConfig,
    "search.": SearchConfig,
    "actions.": ActionsConfig,
    "actions.tasks.NAME.": Task,
    "actions.inputs.NAME.": Input,
    "actions.counts.": Counts,
}
"""The dataclass that reads each section of a mapping file."""
WITH_A_SECTION = "time items users as_of sessions prepare.search prepare.actions"
WITH_A_SECTION += " prepare.split prepare.ray_data actions.counts"
"""Keys whose fields are listed, or that are no part of a mapping."""


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
        return str(value).replace(".0", "")
    return str(value).lower() if isinstance(value, bool) else str(value)


def list_defaults() -> Iterator[tuple[str, str]]:
    """Yield each key of the page, and its default.

    How files are read is said once, for the files of events.
    """
    for prefix, kind in SECTIONS.items():
        for field in fields(kind):
            key = prefix + field.name
            if key not in WITH_A_SECTION.split() and not (prefix and field.kw_only):
                yield key, format_default(field)


def test_the_page_has_each_key_with_its_default_and_a_valid_example():
    text = (ROOT / "jobs/configs/sources/README.md").read_text()
    rows = re.findall(r"^\| `([\w.]+)` \|(.*)\|$", text, re.MULTILINE)
    page = {key: re.split(r"(?<!\\)\|", cells) for key, cells in rows}

    defaults = {key: cells[1].strip() for key, cells in page.items()}
    assert defaults == dict(list_defaults())
    for key, (_, _, *example) in page.items():
        kind, name = key.split(".")[0], key.split(".")[-1]
        if kind in ("search", "actions"):
            (code,) = example
            content = yaml.safe_load(code.strip(" `"))
            assert f"{name}: " in code
            read_config({"kind": kind, kind: content})
