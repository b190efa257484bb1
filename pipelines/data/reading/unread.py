"""Files of the input folder that the mapping does not read."""

from __future__ import annotations

import re

from models.storage.tables import UserError
from pipelines.data.reading.log import Log
from pipelines.data.reading.read import list_files

MAPPING_SUFFIXES = (".yaml", ".yml")
"""Suffixes of files that are not data, such as the mapping file itself."""

MAX_NAMES = 5
"""Most names of files, or of groups of files, in a message."""


def list_unread(log: Log, input_uri: str) -> list[str]:
    """Return the data files of the folder that the mapping does not read, sorted."""
    every = list_files(input_uri, "*", required=False, what="file")
    read = {*log.event_files(input_uri), *log.user_files(input_uri)}
    read |= {*log.item_files(input_uri)}
    for features in log.as_of.values():
        read |= {*features.list_files(input_uri, "feature")}
    return [
        file
        for file in every
        if file not in read and not file.lower().endswith(MAPPING_SUFFIXES)
    ]


def find_alike(log: Log, input_uri: str, unread: list[str]) -> list[str]:
    """Return the unread files that are named like the event files."""
    shapes = {mask_digits(file) for file in log.event_files(input_uri)}
    return [file for file in unread if mask_digits(file) in shapes]


def mask_digits(file: str) -> str:
    """Replace the numbers in a file's name by `*`."""
    return re.sub(r"\d+", "*", file)


def name_files(files: list[str]) -> str:
    """Join the names of files; files that differ in numbers share one name."""
    groups: dict[str, list[str]] = {}
    for file in files:
        groups.setdefault(mask_digits(file), []).append(file)
    names = [
        group[0] if len(group) == 1 else f"{pattern} ({len(group):,} files)"
        for pattern, group in groups.items()
    ]
    rest = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {rest:,} more" if rest > 0 else "")


def describe_unread(log: Log, input_uri: str) -> list[str]:
    """Return messages about the files of the folder that the mapping does not read."""
    try:
        unread = list_unread(log, input_uri)
    except UserError:
        return []  # reported by the step that reads these files
    alike = find_alike(log, input_uri, unread)
    others = [file for file in unread if file not in alike]
    lines = []
    if alike:
        lines.append(
            f"warning: {name_files(alike)} of {input_uri} is not read, though named "
            f"like the files of events; to read it, write such as "
            f"'files: {mask_digits(alike[0])}' in the mapping, which is now "
            f"'{log.files}'"
        )
    if others:
        lines.append(f"note: no key of the mapping reads {name_files(others)}")
    return lines
