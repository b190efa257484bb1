"""Suggest a mapping file for an unknown log, with example values and open questions.

python -m jobs.prepare --suggest FOLDER [--kind search] [--output FILE]
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import yaml

from core.errors import UserError, one_line
from core.files import file_info, join, open_uri
from pipelines.prepare.reading.read import (
    COMPRESSED_SUFFIXES,
    SUFFIXES,
    Files,
    is_parquet,
    list_files,
    read_frames,
)
from pipelines.prepare.suggest.column_roles import (
    NEARLY_ALL,
    OTHER_TIME,
    Column,
    choose_roles,
)

MAX_ROWS = 5000
"""Number of rows of a file that are examined."""
COMPRESSED_NAME = re.compile(rf"\.({'|'.join(COMPRESSED_SUFFIXES)})$", re.IGNORECASE)
TOKEN = r"(?:[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|\d+)"
"""Regex of parts in which names of files of one layout differ: numbers and UUIDs."""


@dataclass
class Suggestion:
    """A suggested mapping file."""

    text: str = ""
    """Content of the file."""
    doubts: list[str] = field(default_factory=list)
    """Lines of the file that are uncertain and affect training."""

    def add(
        self,
        key: str,
        value: Any,
        column: Column | None = None,
        questions: Sequence[str] = (),
    ) -> None:
        """Add a line; with questions about it or its column it also is a doubt.

        A mapping {a: a, b: b} is written as [a, b].
        """
        if isinstance(value, dict) and list(value) == list(value.values()):
            value = list(value)
        dumped = yaml.safe_dump(
            value,
            default_flow_style=True,
            width=1 << 20,
            allow_unicode=True,
            sort_keys=False,
        )
        line = f"{key}: {dumped.splitlines()[0]}"
        comments = list(questions)
        if column:
            questions = column.doubts
            comments = list(filter(None, [column.examples, *questions]))
        if comments:
            line = f"{line.ljust(46)}  # {'; '.join(comments)}"
        self.text += f"{line}\n"
        if questions:
            self.doubts.append(line)


class FileGroup:
    """Files whose names differ only in numbers, described by the first rows of one."""

    def __init__(self, folder: str, pattern: str, files: list[str]) -> None:
        """Read the first rows of the largest file."""
        self.pattern = pattern
        sizes = {file: file_info(join(folder, file)).size for file in files}
        self.size = sum(sizes.values())
        largest = max(files, key=sizes.__getitem__)
        self.keys, self.rows = read_first_rows(join(folder, largest))
        """Format of the files, as keys of a mapping, and first rows of one file."""
        self.columns = [Column(values.name, values) for values in self.rows]
        has_header = "header" not in self.keys
        self.names = {" ".join(c.words) for c in self.columns if has_header}
        """Words of the names; empty if the names are generated."""
        self.roles = choose_roles(self.columns, [])

    @property
    def rank(self) -> tuple[bool, int, bool]:
        """Sort key, which is larger the likelier the files are a log."""
        roles = self.roles
        return bool(roles.user and roles.item), roles.named, roles.time is not None


def read_first_rows(uri: str) -> tuple[dict[str, Any], pl.DataFrame]:
    """Detect the format of a file and read its first rows.

    Returns:
        Format as keys of a mapping, and at most MAX_ROWS rows.
    """
    keys: dict[str, Any] = {}
    if is_parquet(uri):
        filesystem, path = open_uri(uri)
        with filesystem.open_input_file(path) as file:
            names = pq.read_schema(file).names
    else:
        lines: list[str] = []
        for encoding in ("utf-8", "utf-16", "cp1252"):
            files = Files(format="lines", encoding=encoding)
            with suppress(UserError, StopIteration):
                text = next(read_frames(uri, files, ["line"]))
                lines = text.rows["line"].to_list()
                # text in another encoding may be valid UTF-16 by chance
                is_utf16 = encoding == "utf-16" and not lines[0][0].isascii()
                if not text.broken and not is_utf16:
                    break
        if not lines:
            raise UserError("it has no rows")
        suffix = COMPRESSED_NAME.sub("", uri.lower()).rpartition(".")[2]
        if SUFFIXES.get(suffix) == "jsonl" or lines[0].startswith("{"):
            keys, names = _detect_json(lines, suffix)
        else:
            keys, names = _detect_csv(lines[:200], suffix)
        if encoding != "utf-8":
            keys["encoding"] = encoding
    # pandas writes an index whose name is empty
    names = [name for name in dict.fromkeys(names) if name]
    frame = next(read_frames(uri, Files(**keys), names)).rows
    return keys, frame.select(names).head(MAX_ROWS)


def _detect_json(lines: list[str], suffix: str) -> tuple[dict[str, Any], list[str]]:
    """Return the format of JSON text as keys of a mapping, and its columns."""
    text = "\n".join(lines).strip().removeprefix("[").lstrip()
    first: dict[str, Any] = {}
    end = 0
    with suppress(ValueError):
        first, end = json.JSONDecoder().raw_decode(text)
    is_nested = all(isinstance(value, list | dict) for value in first.values())
    if is_nested and end in (0, len(text)):  # one object that may end later
        return {"format": "keyed"}, ["key", "value"]
    return {} if suffix in SUFFIXES else {"format": "jsonl"}, list(first)


def _detect_csv(lines: list[str], suffix: str) -> tuple[dict[str, Any], list[str]]:
    """Return the format of CSV text as keys of a mapping, and its columns."""
    keys: dict[str, Any] = {} if suffix in SUFFIXES else {"format": "csv"}
    text = "\n".join(lines)
    rows = re.sub(r'(?<![^\t;,|:\n])"(?:[^"]|"")*"', "q", text).split("\n")

    def count_matching(delimiter: str) -> int:
        """Count the rows in which a delimiter is as frequent as in the first row."""
        count = rows[0].count(delimiter)
        return sum(row.count(delimiter) == count > 0 for row in rows)

    best = max(("::", "\t", ";", "|", ",", " "), key=count_matching)
    default = "\t" if suffix == "tsv" else ","
    if suffix in SUFFIXES and not count_matching(best):
        best = default
    elif count_matching(best) < 0.9 * len(rows):
        raise UserError("it has no columns; 'format: lines' reads lines of items")
    if best != default:
        keys["delimiter"] = best
    if '"' in text and not re.search(rf'(?m)(^|{re.escape(best)})"', text):
        keys["quote"] = ""
    names = rows[0].split(best)
    if '"' in lines[0] and len(best) == 1:
        names = next(csv.reader(lines, delimiter=best))
    # a header has no number where most rows have one
    masked = [re.sub(r"\d+", "0", row).split(best) for row in rows]
    masked = [row for row in masked if len(row) == len(names)]
    for values in zip(*masked, strict=True):
        if "0" in values[0] and values.count(values[0]) > max(1, len(masked) / 2):
            names = keys["header"] = [f"c{i + 1}" for i in range(len(names))]
    return keys, names


def find_log(folder: str) -> tuple[FileGroup, list[FileGroup]]:
    """Find the files of a folder that are most likely a log, and the other files."""
    files_by_pattern: dict[str, list[str]] = {}
    for file in list_files(folder, "*", required=False, what="file"):
        pattern = re.sub(TOKEN, "*", COMPRESSED_NAME.sub("*", file))
        files_by_pattern.setdefault(pattern, []).append(file)
    groups: list[FileGroup] = []
    reasons: list[str] = []
    for pattern, files in files_by_pattern.items():
        try:
            groups.append(FileGroup(folder, pattern, files))
        except (UserError, StopIteration, OSError, ValueError) as error:
            reasons.append(f"{pattern}: {one_line(error)}")
    log = max(groups, key=lambda group: (*group.rank, group.size), default=None)
    if log is None or not log.rank[0]:
        raise UserError(
            f"no file of {folder} has columns of users and items {'; '.join(reasons)}"
        )
    for group in groups:  # each has a user and an item
        for column in group.columns:
            column.doubts = []
    groups.remove(log)
    described = set().union(*(group.names for group in groups if log.names))
    log.roles = choose_roles(log.columns, described)
    return log, groups


def suggest(folder: str, kind: str | None = None) -> Suggestion:
    """Suggest a mapping for the files of a folder.

    Args:
        folder: Folder of a raw log.
        kind: Kind of the requests. By default `search` if there are queries with
            results, otherwise `retrieval`.
    """
    log, others = find_log(folder)
    mapping = Suggestion()
    rivals = [
        f"or {other.pattern}?"
        for other in others
        if other.rank == log.rank and other.size > log.size / 10
    ]
    mapping.add("files", log.pattern, questions=rivals)
    for key, value in log.keys.items():
        mapping.add(key, value)
    unused = [c for c in log.columns if not c.time and not c.has_word(OTHER_TIME)]
    user, item = log.roles.user, log.roles.item
    unused = [c for c in unused if c not in (user, item)]
    requests = _add_columns(mapping, log, unused, kind)
    unused = [c for c in unused if c not in requests.values()]
    labels = _suggest_labels(unused, item.list_sql)
    if labels:
        mapping.text += "labels:  # what a user did, never an input of its own event\n"
    for name, value in labels.items():
        mapping.add(f"  {name}", value)
    _add_items(mapping, item, others)
    flags = [name for name, value in labels.items() if isinstance(value, str)]
    has_results = "query" in requests and (item.list_sql or "position" in requests)
    kind = kind or ("search" if has_results and flags else "retrieval")
    mapping.text += f"prepare:\n  kind: {kind}\n"
    mapping.add("  core", 5 if kind == "retrieval" else 0)
    if flags and kind != "actions":
        mapping.add("  behaviour", min(flags, key=lambda name: "click" not in name))
    by = "temporal" if "column" in _describe_time(log) else "leave_last_out"
    mapping.add("  split", {"by": by})
    return mapping


def _add_columns(
    mapping: Suggestion, log: FileGroup, unused: list[Column], kind: str | None
) -> dict[str, Column]:
    """Add the columns of user, item and time, and of requests with several rows.

    Returns:
        The columns of `request`, `query` and `position` that the mapping has.
    """
    user, item, time = log.roles.user, log.roles.item, log.roles.time
    add = mapping.add
    add("user", user.name, user)
    by_role = {c.role: c for c in reversed(unused) if not c.list_sql}
    if item.list_sql and user.is_unique and not time and "query" not in by_role:
        add("sequence", item.list_sql, item)  # a row per user
        return {}
    if item.list_sql:
        add("explode", {"shown": item.list_sql}, item)
        add("item", "shown")
    else:
        add("item", item.name, item)
    keys = _describe_time(log)
    doubts = [] if "column" in keys else ["no times: is it the order of the rows?"]
    add("time", keys, time, doubts)
    is_search = "query" in by_role or item.list_sql or kind == "search"
    if not is_search and not _has_baskets(log, by_role.get("request")):
        return {}
    roles = ("request", "query", "position")
    requests = {role: by_role[role] for role in roles if role in by_role}
    for role, column in requests.items():
        add(role, column.name, column)
    return requests


def _add_items(mapping: Suggestion, item: Column, others: list[FileGroup]) -> None:
    """Add the files of items' texts, and a comment on the files that are not read."""
    for group in others:
        # the name of a column of lists differs from that of the ids in it
        keys = [
            c
            for c in group.columns
            if c.is_unique
            and c.distinct > 1
            and (c.words == item.words or (item.list_sql and c.role == "item"))
        ]
        texts = [c for c in group.columns if c.is_text and c not in keys]
        if keys and texts and group.names:
            mapping.text += "items:\n"
            for key, value in {"files": group.pattern, **group.keys}.items():
                mapping.add(f"  {key}", value)
            mapping.add("  item", keys[0].name, keys[0])
            mapping.add("  texts", {c.feature_name: c.name for c in texts})
            others.remove(group)
            break
    if others:
        patterns = [group.pattern for group in others]
        mapping.text += f"# Files not read: {', '.join(patterns)}\n"


def _has_baskets(log: FileGroup, request: Any) -> bool:
    """Return whether a request has several rows, nearly always of one user and time."""
    columns = (request, log.roles.user, log.roles.time)
    if None in columns:
        return False
    moments = log.rows.select(pl.sql_expr(c.name) for c in columns).n_unique()
    return moments <= min(len(log.rows) / 2, request.distinct / NEARLY_ALL)


def _describe_time(log: FileGroup) -> dict[str, str]:
    """Return the time of a log as keys of `time`."""
    time = log.roles.time
    if time:
        return {"column": time.name, **time.time}
    numbers = [c for c in log.columns if c.is_number and not c.has_word(OTHER_TIME)]
    by_word = {c.words[-1]: c for c in reversed(numbers) if c.words}
    if {"year", "month", "day"} <= set(by_word):
        parts = [
            f"cast({by_word[w].name} as varchar)" for w in ("year", "month", "day")
        ]
        parts[1:] = [f"lpad({part}, 2, '0')" for part in parts[1:]]
        return {"column": " || '-' || ".join(parts), "format": "%Y-%m-%d"}
    return {"unit": "order"}


def _suggest_labels(columns: list[Column], list_sql: str) -> dict[str, Any]:
    """Return the labels among the columns without a role.

    Args:
        columns: The columns.
        list_sql: SQL of the lists of items; empty if a row has one item.
    """
    labels: dict[str, Any] = {}
    for c in columns:
        if not c.is_outcome:
            continue
        if list_sql and not c.is_number:
            items = c.list_sql or f"string_to_array({c.name}, ' ')"
            sql = f"coalesce(array_contains({items}, shown), false)"
            labels[c.feature_name] = sql
        elif c.is_flag and not c.has_word("time|ms"):
            labels[c.feature_name] = c.name
        elif c.is_number and not c.has_id_word:
            labels[c.feature_name] = {"column": c.name, "type": "float32"}
    return labels
