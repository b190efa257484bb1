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


def describe_unread(log: Log, input_uri: str) -> list[str]:
    """Return a note on the files of the folder that the mapping does not read.

    Files whose names differ in numbers share a pattern.
    """
    try:
        read = {*log.event_files(input_uri), *log.user_files(input_uri)}
        read |= {*log.item_files(input_uri)}
        for features in log.as_of.values():
            read |= {*features.list_files(input_uri)}
    except UserError:
        return []  # reported by the step that reads these files
    groups: dict[str, list[str]] = {}
    for file in list_files(input_uri, "*", required=False, what="file"):
        if file not in read and not file.lower().endswith(MAPPING_SUFFIXES):
            groups.setdefault(re.sub(r"\d+", "*", file), []).append(file)
    names = [
        group[0] if len(group) == 1 else f"{pattern} ({len(group):,} files)"
        for pattern, group in groups.items()
    ]
    if len(names) > MAX_NAMES:
        names[MAX_NAMES - 1 :] = [f"{len(names) - MAX_NAMES + 1:,} more"]
    return [f"note: no key of the mapping reads {', '.join(names)}"] if names else []
