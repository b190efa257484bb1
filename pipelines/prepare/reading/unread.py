"""Find files of the input folder that the mapping does not read."""

from __future__ import annotations

import re

from core.errors import UserError
from pipelines.prepare.reading.log import Log
from pipelines.prepare.reading.read import list_files

MAPPING_SUFFIXES = (".yaml", ".yml")
"""Suffixes of files that are not data, such as the mapping file itself."""

MAX_NAMES = 5
"""Maximum number of names of files, or of groups of files, in a message."""


def list_unread(log: Log, input_uri: str) -> list[str]:
    """Return the data files of the folder that the mapping does not read, sorted."""
    all_files = list_files(input_uri, "*", required=False, what="file")
    read = {*log.event_files(input_uri), *log.user_files(input_uri)}
    read |= {*log.item_files(input_uri)}
    for features in log.as_of.values():
        read |= {*features.list_files(input_uri, "feature")}
    return [
        file
        for file in all_files
        if file not in read and not file.lower().endswith(MAPPING_SUFFIXES)
    ]


def mask_digits(file: str) -> str:
    """Replace each number in the name of a file by `*`."""
    return re.sub(r"\d+", "*", file)


def name_files(files: list[str]) -> str:
    """Join the names of files; files whose names differ in numbers share a pattern."""
    groups: dict[str, list[str]] = {}
    for file in files:
        groups.setdefault(mask_digits(file), []).append(file)
    names = [
        group[0] if len(group) == 1 else f"{pattern} ({len(group):,} files)"
        for pattern, group in groups.items()
    ]
    text = ", ".join(names[:MAX_NAMES])
    if len(names) > MAX_NAMES:
        text += f" and {len(names) - MAX_NAMES:,} more"
    return text


def describe_unread(log: Log, input_uri: str) -> list[str]:
    """Return a note on the files of the folder that the mapping does not read."""
    try:
        unread = list_unread(log, input_uri)
    except UserError:
        return []  # reported by the step that reads these files
    return [f"note: no key of the mapping reads {name_files(unread)}"] if unread else []
