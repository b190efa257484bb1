"""Source files: a YAML with the `layout`, the layout's own keys, and a `prepare` section."""

from __future__ import annotations

import importlib
import re
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from models.config import instead, read_yaml
from models.tables import UserError
from pipelines.data.sources.base import Source

LAYOUTS = {
    "mapping": ("pipelines.data.sources.mapping", "Mapping"),
    "lcrec": ("pipelines.data.sources.lcrec", "LcRec"),
    "amazon2023": ("pipelines.data.sources.amazon2023", "Amazon2023"),
    "simulator": ("pipelines.data.sources.simulated", "Simulated"),
}


def load_source(uri: str, remedy: str = "check --source") -> tuple[Source, dict[str, Any]]:
    """The source that the YAML file describes, and its `prepare` section (defaults for jobs.prepare:
    core, core_window, ties, split, max_events, behaviour; empty if there is none).

    Raises UserError for a missing or damaged file (with the `remedy`), an unknown layout or key (with the nearest known
    one), and values that the layout refuses.
    """
    content = read_yaml(uri, remedy)
    if "layout" not in content:
        raise UserError(f"{uri} names no layout; begin it with 'layout: {' | '.join(LAYOUTS)}'")
    layout = content.pop("layout")
    prepare = content.pop("prepare", None) or {}
    if layout not in LAYOUTS:
        raise UserError(f"{uri}: unknown layout '{layout}'; it is one of {', '.join(LAYOUTS)}")
    if not isinstance(prepare, dict):
        raise UserError(f"{uri}: 'prepare' is {type(prepare).__name__}, not a mapping of options")
    module, name = LAYOUTS[layout]
    try:
        return build(getattr(importlib.import_module(module), name), content), prepare
    except ValueError as error:
        raise UserError(f"{uri}: {error}") from error


NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")

EXAMPLES = {
    "files": "files: log_*.csv",
    "user": "user: user_id",
    "item": "item: item_id",
    "time": "time: {column: time_ms, unit: ms}",
    "column": "column: time_ms",
    "unit": "unit: ms",
    "columns": "columns: [shown_ids]",
    "attributes": "attributes: {age: age_range}",
}
"""How the keys that a source file must have are written."""

WORDS = {
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "a mapping",
}


def build(kind: type, content: dict[str, Any], where: str = "") -> Any:
    """An instance of the dataclass `kind` from plain values. ValueError names unknown and missing keys."""
    known = {field.name: field for field in fields(kind)}
    for key in content:
        if key not in known:
            raise ValueError(f"unknown key '{where}{key}'; {instead(key, known)}")
    required = [key for key, f in known.items() if f.default is MISSING and f.default_factory is MISSING]
    if missing := [key for key in required if key not in content]:
        keys = " and ".join(f"'{where}{key}'" for key in missing)
        example = "; ".join(EXAMPLES.get(key, f"{key}: ...") for key in missing)
        raise ValueError(f"{keys} {'is' if len(missing) == 1 else 'are'} missing; add such as '{example}'")
    hints = get_type_hints(kind)
    for key, value in content.items():
        if not _fits(value, hints[key]):
            raise ValueError(f"'{where}{key}' is {value!r}, not {_words(hints[key])}{_quoted(value, hints[key])}")
    try:
        return kind(**content)
    except TypeError as error:
        raise ValueError(f"{where or kind.__name__}: {error}") from error


def named(value: Any, key: str) -> dict[str, str]:
    """{name: column}, from that or from a list of columns."""
    if isinstance(value, list):
        value = {column: column for column in value}
        if paths := [column for column in value if isinstance(column, str) and "." in column]:
            name = paths[0].rsplit(".", 1)[-1]
            raise ValueError(f"'{key}' lists '{paths[0]}', and a name has no dot; write {{{name}: {paths[0]}, ...}}")
    if not isinstance(value, dict):
        raise ValueError(f"'{key}' is {value!r}; write name: column, or a list of columns")
    for name, column in value.items():
        check_name(name, key)
        if not isinstance(column, str):
            raise ValueError(f"{key}.{name} is {column!r}, not the name of a column; write it in quotes")
    return value


def check_name(name: Any, key: str) -> None:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"'{name}' in '{key}' is no name; use letters, digits and _, and begin with a letter")


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value of a YAML file is of the type that a field declares; beneath the first level of lists only."""
    if hint is Any:
        return True
    if get_origin(hint) is UnionType:
        return any(_fits(value, each) for each in get_args(hint))
    if get_origin(hint) is list:
        return isinstance(value, list) and all(_fits(each, get_args(hint)[0]) for each in value)
    kind = get_origin(hint) or hint
    if not isinstance(kind, type):
        return True
    if isinstance(value, bool) and kind in (int, float):
        return False
    return isinstance(value, (int, float) if kind is float else kind)


def _words(hint: Any) -> str:
    """A declared type in words."""
    if get_origin(hint) is UnionType:
        return " or ".join(_words(each) for each in get_args(hint) if each is not NoneType)
    words = WORDS.get(get_origin(hint) or hint, str(hint))
    return f"{words} of {_words(get_args(hint)[0])}" if get_origin(hint) is list else words


def _quoted(value: Any, hint: Any) -> str:
    """What to do where YAML has read a number or a date in the place of text."""
    return "; write it in quotes" if _fits("", hint) and not isinstance(value, list | dict | NoneType) else ""
