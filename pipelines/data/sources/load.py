"""Source files: a YAML with the `layout`, the layout's own keys, and a `prepare` section."""

from __future__ import annotations

import difflib
import importlib
from dataclasses import fields
from typing import Any

import yaml

from models.tables import UserError, open_uri
from pipelines.data.sources.base import Source

LAYOUTS = {
    "mapping": ("pipelines.data.sources.mapping", "Mapping"),
    "lcrec": ("pipelines.data.sources.lcrec", "LcRec"),
    "amazon2023": ("pipelines.data.sources.amazon2023", "Amazon2023"),
    "simulator": ("pipelines.data.sources.simulated", "Simulated"),
}


def load_source(uri: str) -> tuple[Source, dict[str, Any]]:
    """The source that the YAML file describes, and its `prepare` section (defaults for jobs.prepare:
    core, core_window, ties, split, max_events, behaviour; empty if there is none).

    Raises UserError for a missing or damaged file, an unknown layout or key (with the nearest known
    one), and values that the layout refuses.
    """
    filesystem, path = open_uri(uri)
    try:
        with filesystem.open_input_stream(path) as stream:
            content = yaml.safe_load(stream.read())
    except OSError as error:
        raise UserError(f"cannot read the source file {uri}; check --source") from error
    except yaml.YAMLError as error:
        raise UserError(f"{uri} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or "layout" not in content:
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


def build(kind: type, content: dict[str, Any], where: str = "") -> Any:
    """An instance of the dataclass `kind` from plain values. ValueError names unknown and missing keys."""
    known = {field.name: field for field in fields(kind)}
    for key in content:
        if key not in known:
            near = difflib.get_close_matches(str(key), list(known), n=1, cutoff=0.0)[0]
            raise ValueError(f"unknown key '{where}{key}'; the nearest key is '{near}'")
    try:
        return kind(**content)
    except TypeError as error:
        raise ValueError(f"{where or kind.__name__}: {error}") from error
