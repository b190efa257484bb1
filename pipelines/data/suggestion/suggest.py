"""Suggest a mapping file for an unknown log, with example values and open questions.

python -m jobs.prepare --suggest FOLDER [--kind search] [--output FILE]
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import yaml

from models.error_text import one_line
from models.storage.tables import UserError, file_info, join, open_uri
from pipelines.data.kinds import KINDS
from pipelines.data.reading.log import parse_log
from pipelines.data.reading.read import (
    COMPRESSED_SUFFIXES,
    SUFFIXES,
    Files,
    list_files,
    read_frames,
)
from pipelines.data.reading.rows import clean_ids, evaluate
from pipelines.data.reading.unread import list_unread, name_files
from pipelines.data.settings import read_config
from pipelines.data.suggestion.column_roles import (
    MIN_EVIDENCE,
    SIMILAR_SHARE,
    Column,
    Shares,
    choose_roles,
    list_names,
    names_subject,
    pick_column,
    role_score,
)
from pipelines.data.suggestion.preview import preview

MAX_ROWS = 5000
"""Number of rows of a file that are examined."""
COMPRESSED_NAME = re.compile(rf"\.({'|'.join(COMPRESSED_SUFFIXES)})$", re.IGNORECASE)


def yaml_line(key: str, value: Any, comment: str = "") -> str:
    """Return a line of YAML with a comment.

    A dict whose names equal their columns is written as a list.
    """
    if isinstance(value, dict) and all(name == text for name, text in value.items()):
        value = list(value)
    dumped = yaml.safe_dump(
        value,
        default_flow_style=True,
        width=1 << 20,
        allow_unicode=True,
        sort_keys=False,
    )
    text = f"{key}: {dumped.splitlines()[0]}"
    return f"{text.ljust(46)}  # {comment}" if comment else text


TOKEN = r"(?:[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|\d+)"
"""Regex of parts in which names of files of one layout differ: numbers and UUIDs."""
MAX_ID_BLOCKS = 16
"""Maximum number of blocks (of about 8 MiB) to read for the ids of a group of files."""

MIN_KEY_SHARE = 0.9
"""Share of distinct values in a column above which its values may identify the rows."""
MAX_NEW_SHARE = 0.7
"""Share of the ids of several files that are distinct, below which the files have
mostly the same ids."""
MIN_MATCHED_SHARE = 0.1
"""Share of a log's ids in a file above which the file may describe them although fewer
than two names match."""
GOOD_SHARE = 0.9
"""Share of a log's ids in a file from which on the ids need no conversion and missing
ids no `min_matched`."""
MIN_GAIN = 0.1
"""Smallest increase of the share of matched ids for which ids are converted."""
MIN_DESCRIBED_SHARE = {"item": 0.5, "user": 0.05}
"""Share of a log's items or users in a file below which the file is doubtful."""
MAX_SCORE_DIFFERENCE = 1
"""Largest difference in the number of matching names at which files fit about as
well."""


class FileGroup:
    """Files whose names differ only in numbers, described by the first rows of one."""

    def __init__(self, folder: str, files: list[str]) -> None:
        """Read the first rows of the largest file, and choose roles of its columns.

        Args:
            folder: Folder of the log.
            files: Files, relative to the folder.
        """
        self.folder, self.files = folder, files
        self.name = files[0].rpartition("/")[2]
        uris = [join(folder, file) for file in files]
        largest = max(uris, key=lambda uri: file_info(uri).size)
        self.format_keys, frame = read_first_rows(largest)
        """Format of the files, as keys of a mapping."""
        self.rows = len(frame) * len(files)
        """Approximate number of rows that were examined."""
        self.size = sum(file_info(uri).size for uri in uris)
        """Bytes of all files."""
        self.columns = [Column(name, frame[name]) for name in frame.columns]
        self.ids_by_key: dict[str, FileIds] | None = None
        self.assign_roles({"user": {}, "item": {}})

    def assign_roles(self, shares: Shares) -> None:
        """Choose the columns of users, items and times; see `choose_roles`."""
        self.roles = choose_roles(self.columns, self.rows, shares)

    @property
    def is_log(self) -> bool:
        """Whether the files have columns of users and items."""
        roles = self.roles
        return bool(roles.user and (roles.item or roles.listed))

    @property
    def possible_keys(self) -> list[Column]:
        """Columns whose values may identify the rows."""
        return [
            c
            for c in self.columns
            if c.distinct_share > MIN_KEY_SHARE
            and c.distinct > 1
            and not c.time_keys
            and not c.is_measurement
        ]

    @property
    def lacks_header(self) -> bool:
        """Whether the files have no header, so that names of columns are generated."""
        return "header" in self.format_keys

    def read_ids(self) -> dict[str, FileIds]:
        """Return the ids in the possible keys, by column; see `read_ids`."""
        if self.ids_by_key is None:
            self.ids_by_key = read_ids(self, [c.name for c in self.possible_keys])
        return self.ids_by_key

    def pattern(self, all_files: list[str], grows: bool) -> str:
        """Return a pattern that matches the names of the files.

        Args:
            all_files: All files of the folder. The pattern matches none of the others,
                unless no such pattern is found.
            grows: Whether a single file also gets a pattern, so that later files with
                other numbers match it, too.
        """
        if len(self.files) == 1 and not (grows and re.search(TOKEN, self.files[0])):
            return self.files[0]
        in_subfolder = ["/" in file for file in self.files]
        folder = ""
        if all(in_subfolder):
            folder = "*/"
        elif any(in_subfolder):
            folder = "*"
        stem = COMPRESSED_NAME.sub("", self.name)
        suffix = ""
        if len(self.files) == 1:
            suffix = self.name[len(stem) :]
        elif any(map(COMPRESSED_NAME.search, self.files)):
            suffix = "*"
        for wildcard in ("*", "[0-9a-f]*"):
            stem_pattern = re.sub(rf"{TOKEN}(?:[-_.:T]?{TOKEN})*", wildcard, stem)
            pattern = folder + stem_pattern + suffix
            matched = {file for file in all_files if fnmatchcase(file, pattern)}
            if matched == {*self.files}:
                break
        return pattern


@dataclass
class FileIds:
    """The distinct ids in a column of a group of files."""

    ids: pl.Series
    is_complete: bool
    """Whether all rows of all files were read."""
    repeats: bool
    """Whether several files have mostly the same ids."""


def read_ids(group: FileGroup, expressions: list[str]) -> dict[str, FileIds]:
    """Read the distinct ids of expressions in at most MAX_ID_BLOCKS blocks of files.

    Args:
        group: Files of one layout.
        expressions: Columns or SQL expressions.

    Returns:
        Ids by expression.
    """
    ids_by_file: dict[str, list[pl.Series]] = {name: [] for name in expressions}
    blocks = 0
    for file in group.files:
        if blocks == MAX_ID_BLOCKS:
            break
        file_ids: dict[str, list[pl.Series]] = {name: [] for name in expressions}
        uri = join(group.folder, file)
        frames = read_frames(uri, Files(**group.format_keys), expressions)
        with closing(frame for frame in frames) as stream:
            for frame in islice(stream, MAX_ID_BLOCKS - blocks):
                blocks += 1
                by_name = {name: name for name in expressions}
                values, _ = evaluate(frame.with_missing, by_name, uri)
                for name in expressions:
                    ids = clean_ids(values[name]).drop_nulls().unique()
                    file_ids[name].append(ids)
        for name, series in file_ids.items():
            if series:
                ids_by_file[name].append(pl.concat(series).unique())
    no_ids = pl.Series([], dtype=pl.String)
    return {
        name: FileIds(
            ids=pl.concat([no_ids, *per_file]).unique(),
            is_complete=blocks < MAX_ID_BLOCKS,
            repeats=have_same_ids(per_file),
        )
        for name, per_file in ids_by_file.items()
    }


def have_same_ids(ids_by_file: list[pl.Series]) -> bool:
    """Return whether several files have mostly the same ids."""
    total = sum(len(ids) for ids in ids_by_file)
    return (
        len(ids_by_file) > 1
        and pl.concat(ids_by_file).n_unique() < MAX_NEW_SHARE * total
    )


def read_first_rows(uri: str) -> tuple[dict[str, Any], pl.DataFrame]:
    """Detect the format of a file and read its first rows.

    Returns:
        Format as keys of a mapping, and at most MAX_ROWS rows.

    Raises:
        UserError: If the file cannot be read as a table.
    """
    filesystem, path = open_uri(uri)
    if path.lower().endswith(".parquet"):
        with filesystem.open_input_file(path) as file:
            names = pq.read_schema(file).names
        return {}, _first_rows(uri, Files(), names)
    encoding, frame = _detect_encoding(uri)
    keys: dict[str, Any] = {} if encoding == "utf-8" else {"encoding": encoding}
    lines = frame["line"].head(MAX_ROWS).to_list()
    suffix = COMPRESSED_NAME.sub("", path.lower()).rpartition(".")[2]
    kind = "jsonl" if lines[0].startswith("{") else SUFFIXES.get(suffix)
    detect_format = detect_json_format if kind == "jsonl" else detect_csv_format
    format_keys, names = detect_format(lines, suffix)
    keys |= format_keys
    # pandas writes an index whose name is empty
    names = [name for name in dict.fromkeys(names) if name]
    return keys, _first_rows(uri, Files(**keys), names)


def _first_rows(uri: str, files: Files, names: list[str]) -> pl.DataFrame:
    return next(read_frames(uri, files, names)).rows.select(names).head(MAX_ROWS)


def _detect_encoding(uri: str) -> tuple[str, pl.DataFrame]:
    """Detect the encoding of a text file."""
    for encoding in ("utf-8", "utf-16"):
        files = Files(format="lines", encoding=encoding)
        with suppress(UserError, StopIteration):
            frame = next(read_frames(uri, files, ["line"])).rows
            # text in another encoding may be valid UTF-16 by chance
            if encoding == "utf-8" or frame["line"][0][0].isascii():
                return encoding, frame
    files = Files(format="lines", encoding="cp1252")
    return "cp1252", next(read_frames(uri, files, ["line"])).rows


def detect_json_format(
    lines: list[str], suffix: str
) -> tuple[dict[str, Any], list[str]]:
    """Detect the format of JSON text.

    Args:
        lines: First lines of the file.
        suffix: Suffix of the file.

    Returns:
        Format as keys of a mapping, and the names of the columns.
    """
    texts = lines
    if lines[0].lstrip().startswith("["):
        texts = ["\n".join(lines).lstrip("[ \n")]
    rows: list[dict[str, Any]] = []
    for text in texts:
        with suppress(ValueError):
            value, _ = json.JSONDecoder(strict=False).raw_decode(text)
            if isinstance(value, dict):
                rows.append(value)
    names = list(dict.fromkeys(key for row in rows for key in row))
    if not names:
        return {"format": "keyed"}, ["key", "value"]
    is_nested = all(isinstance(value, list | dict) for value in rows[0].values())
    if len(lines) == 1 and is_nested:
        return {"format": "keyed"}, ["key", "value"]
    return {} if SUFFIXES.get(suffix) == "jsonl" else {"format": "jsonl"}, names


def detect_csv_format(
    lines: list[str], suffix: str
) -> tuple[dict[str, Any], list[str]]:
    """Detect the format of CSV text.

    Args:
        lines: First lines of the file.
        suffix: Suffix of the file.

    Returns:
        Format as keys of a mapping, and the names of the columns.

    Raises:
        UserError: If the text has no columns.
    """
    kind, text = SUFFIXES.get(suffix), "\n".join(lines)
    default = "\t" if suffix == "tsv" else ","
    delimiter = _find_delimiter(text, kind, default)
    keys: dict[str, Any] = {} if kind else {"format": "csv"}
    if delimiter != default:
        keys["delimiter"] = delimiter
    if '"' in text and not re.search(rf'(?m)(^|{re.escape(delimiter)})"', text):
        keys["quote"] = ""
    elif '\\"' in text and '""' not in text.replace('\\""', ""):
        keys["escape"] = "\\"
    options: Any = {"escapechar": keys.get("escape")}
    if "quote" in keys:
        options = {"quoting": csv.QUOTE_NONE}
    mark = delimiter if len(delimiter) == 1 else "\x1f"
    marked = (line.replace(delimiter, mark) for line in lines[:200])
    rows = list(csv.reader(marked, delimiter=mark, **options))
    if _lacks_header(rows):
        keys["header"] = [f"c{number}" for number in range(1, len(rows[0]) + 1)]
    return keys, keys.get("header", rows[0])


def _find_delimiter(text: str, kind: str | None, default: str) -> str:
    """Return the delimiter whose count in the first row occurs in most rows."""
    quoted = r'(?<![^\t;,|:\n])"(?:[^"\\]|\\.|"")*"(?![^\t;,|:\n\r])'
    rows = re.sub(quoted, "q", text).split("\n")[:200]
    matching_rows = {}
    for delimiter in ("::", "\t", ";", "|", ",", " "):
        count = rows[0].count(delimiter)
        matching = [row for row in rows if row.count(delimiter) == count > 0]
        matching_rows[delimiter] = len(matching)
    best = max(matching_rows, key=lambda delimiter: matching_rows[delimiter])
    required = 1 if best == " " else 0.9
    if kind is None and matching_rows[best] < required * len(rows):
        raise UserError(
            "it has no columns; for lines such as `u1 i3 i7` set 'format: lines' and "
            "'sequence'"
        )
    if not matching_rows[best] or (best == " " and kind is not None):
        return default
    return best


def _lacks_header(rows: list[list[str]]) -> bool:
    """Return whether a cell of the first line has a number like most later lines."""
    width = len(rows[0])
    masked = [
        [re.sub(r"\d+", "0", cell) for cell in row] for row in rows if len(row) == width
    ]
    for column, cell in enumerate(masked[0]):
        equal = sum(row[column] == cell for row in masked)
        if "0" in cell and equal > max(1, len(masked) / 2):
            return True
    return False


@dataclass
class Suggestion:
    """A suggested mapping file."""

    text: str
    """Content of the file."""
    doubts: list[str]
    """Lines of the file that are uncertain and affect training."""


class Draft:
    """Lines of a suggested mapping, and the uncertain lines among them."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.doubts: list[str] = []

    def add(
        self, key: str, value: Any, comment: str = "", doubts: Sequence[str] = ()
    ) -> None:
        """Add a line to the mapping.

        Args:
            key: Key of the mapping, indented.
            value: Value of the key.
            comment: Comment at the end of the line.
            doubts: Questions, which are appended to the comment and mark the line as
                uncertain.
        """
        added = yaml_line(key, value, "; ".join(filter(None, [comment, *doubts])))
        self.lines.append(added)
        if doubts:
            self.doubts.append(added)

    @property
    def keys(self) -> list[str]:
        """Keys of the lines."""
        return [line.split(":")[0] for line in self.lines]


def suggest(folder: str, kind: str | None = None) -> Suggestion:
    """Suggest a mapping for the files of a folder.

    Args:
        folder: Folder of a raw log.
        kind: Kind of the requests. By default `search` if there are queries with
            results, otherwise `retrieval`.

    Raises:
        UserError: If no file can be read as a log.
    """
    log, groups, all_files = find_log(folder)
    user, item, shown = log.roles.user, log.roles.item, log.roles.listed
    listed = next((c for c in log.columns if c.list_sql), None)
    assert user is not None
    users = find_description("user", user, log, groups)
    items = find_description("item", item or shown or listed, log, groups)
    draft = Draft()
    add_files(draft, log, groups, all_files)
    doubts = log.roles.user_doubts + users.doubts
    draft.add("user", users.wrap(user.name), user.examples, doubts)
    labels = add_events(draft, log, items, kind)
    add_description(draft, "user", users, all_files)
    add_description(draft, "item", items, all_files)
    prepare = ["prepare:", *setting_lines(kind, draft.keys, labels, log)]
    prepare += min_matched_line(users, items)
    lines = [*draft.lines, *check_mapping(folder, draft.lines, prepare), *prepare]
    return Suggestion("\n".join(lines) + "\n", draft.doubts)


def add_files(
    draft: Draft, log: FileGroup, groups: list[FileGroup], all_files: list[str]
) -> None:
    """Add the lines about the event files and their format.

    Args:
        draft: Mapping to add to.
        log: Files of the log.
        groups: Other files of the folder.
        all_files: Names of all files of the folder.
    """
    comments = {
        "header": "the file has none: rename these, here and below",
        "encoding": "is it this one?",
    }
    names = {c.name for c in log.columns}
    doubts = []
    for group in groups:
        pattern = group.pattern(all_files, False)
        same_names = {c.name for c in group.columns} == names
        if same_names and group.lacks_header == log.lacks_header:
            doubts.append(f"and {pattern} too?")
        elif log_rank(group) == log_rank(log) and group.size > log.size / 10:
            doubts.append(f"or {pattern}?")
    count = f"{len(log.files):,} files" if len(log.files) > 1 else ""
    draft.add("files", log.pattern(all_files, True), count, doubts)
    for key, value in log.format_keys.items():
        draft.add(key, value, comments.get(key, ""))


def add_events(
    draft: Draft, log: FileGroup, items: Description, kind: str | None
) -> dict[str, Any]:
    """Add the lines about the columns of events.

    Args:
        draft: Mapping to add to.
        log: Files of the log.
        items: Files that describe the items.
        kind: Kind of the requests, or None.

    Returns:
        The labels of the mapping.
    """
    user, item, shown = log.roles.user, log.roles.item, log.roles.listed
    times = log.roles.times
    unused = [c for c in log.columns if c not in (user, item, shown, *times)]
    clock = next((c for c in unused if c.mostly_matches(r"^\d\d?:\d\d(:\d\d)?$")), None)
    listed = next((c for c in log.columns if c.list_sql), None)
    is_search = kind == "search"
    if kind is None:
        is_search = pick_column(unused, "query") is not None
    doubts = log.roles.item_doubts + items.doubts
    drafts = _ColumnDrafts()
    has_row_per_user = bool(user and user.distinct_share > MIN_KEY_SHARE)
    is_sequence = has_row_per_user and not times and not (shown and is_search)
    if listed and is_sequence:
        draft.add("sequence", listed.list_sql, listed.examples, doubts)
        if item:
            draft.add("item", item.name, f"after the list: {item.examples}")
    else:
        if shown:
            comment = f"each is an event: {shown.examples}"
            draft.add("explode", {"shown": shown.list_sql}, comment, doubts)
            draft.add("item", items.wrap("shown"))
        elif item:
            draft.add("item", items.wrap(item.name), item.examples, doubts)
        add_time(draft, log, clock)
        unused = [
            c
            for c in unused
            if c is not clock
            and (not role_score(c.name, "time") or role_score(c.name, "outcome"))
        ]
        for role in ("request", "query", "position"):
            add_request(draft, role, unused)
        for c in unused:
            classify_column(c, bool(shown), log.lacks_header, drafts)
    add_labels_and_features(draft, drafts)
    return drafts.labels


@dataclass
class _ColumnDrafts:
    """Suggested labels and features of a log, by name."""

    labels: dict[str, Any] = field(default_factory=dict)
    possible_labels: dict[str, Any] = field(default_factory=dict)
    """Labels that are written as comments."""
    possible_numbers: dict[str, str] = field(default_factory=dict)
    """Numeric features that are written as comments."""
    possible_categories: dict[str, str] = field(default_factory=dict)
    """Categorical features that are written as comments."""


def add_labels_and_features(draft: Draft, drafts: _ColumnDrafts) -> None:
    """Add the lines about labels, and comments about possible labels and features."""
    head = "labels:  # what a user did, never an input of its own event"
    if drafts.labels or drafts.possible_labels:
        draft.lines.append(head if drafts.labels else f"# {head}")
    for name, value in drafts.labels.items():
        draft.add(f"  {name}", value)
    for name, value in drafts.possible_labels.items():
        question = "did the user do this? then remove the '#'"
        draft.add(f"  # {name}", value, question)
    question = "known before the event? then remove the '#'; an outcome is a label"
    if drafts.possible_numbers:
        draft.add("# numbers", drafts.possible_numbers, question)
    if drafts.possible_categories:
        draft.add("# categories", drafts.possible_categories, question)


def add_request(draft: Draft, role: str, unused: list[Column]) -> None:
    """Add the line of a request, a query or a position, if a column has this role.

    Args:
        draft: Mapping to add to.
        role: "request", "query" or "position".
        unused: Columns without a role. The chosen column is removed.
    """
    candidates = [c for c in unused if not c.list_sql]
    column = pick_column(candidates, role)
    if not column or column.distinct < 2:
        return
    score = role_score(column.name, role)
    rivals = [
        c
        for c in candidates
        if c is not column and c.distinct > 1 and role_score(c.name, role) >= score
    ]
    question = f"; or {list_names(rivals)}?" if rivals else ""
    draft.add(role, column.name, column.examples + question)
    unused.remove(column)


def setting_lines(
    kind: str | None, keys: list[str], labels: dict[str, Any], log: FileGroup
) -> list[str]:
    """Return the lines of the section `prepare` of the mapping.

    Args:
        kind: Kind of the requests, or None.
        keys: Keys of the mapping.
        labels: Labels of the mapping.
        log: Files of the log.
    """
    bool_labels = [name for name, value in labels.items() if isinstance(value, str)]
    behaviour = None
    for words in ("click", "purchas|buy|bought|order", "like"):
        matches = [name for name in bool_labels if re.search(words, name)]
        behaviour = behaviour or next(iter(matches), None)
    has_results = "query" in keys and ("explode" in keys or "position" in keys)
    if kind is None and behaviour and has_results:
        kind = "search"
    lines = []
    if kind:
        lines.append(yaml_line("  kind", kind))
    elif len(bool_labels) > 1 and log.roles.times:
        question = "each event shown, with what was done? then --suggest --kind actions"
        lines.append(yaml_line("  kind", "retrieval", question))
    lines.append("  core: 0" if kind in ("search", "actions") else "  core: 5")
    if bool_labels and kind == "search":
        behaviour = behaviour or bool_labels[0]
    if behaviour and kind != "actions":
        others = [name for name in bool_labels if name != behaviour]
        question = f"or {', '.join(others[:3])}?" if others else ""
        lines.append(yaml_line("  behaviour", behaviour, question))
    split = "temporal" if log.roles.times else "leave_last_out"
    lines.append(yaml_line("  split", {"kind": split}))
    if kind == "actions":
        lines += numeric_label_lines(labels, log)
    return lines


def numeric_label_lines(labels: dict[str, Any], log: FileGroup) -> list[str]:
    """Return the section `actions`, with tasks and inputs from numeric labels.

    Args:
        labels: Labels of the mapping.
        log: Files of the log.
    """
    tasks: list[str] = []
    inputs: list[str] = []
    for name, value in labels.items():
        if isinstance(value, str):
            continue
        column = next(c for c in log.columns if c.number_sql == value["column"])
        text = column.ids.str.replace(",", ".")
        numbers = text.cast(pl.Float64, strict=False).drop_nulls()
        low, middle, high = [
            float(f"{numbers.quantile(share):g}") for share in (0, 0.5, 0.99)
        ]
        limit = {"at_least": middle} if middle > low else {"above": low}
        task = {"label": name, **limit}
        question = "from where on is it one? or no task"
        tasks.append(yaml_line(f"      high_{name}", task, question))
        if high > low:
            inputs.append(
                yaml_line(f"      {name}", {"label": name, "range": [low, high]})
            )
    lines = ["    tasks:", *tasks] if tasks else []
    lines += ["    inputs:", *inputs] if inputs else []
    return ["  actions:", *lines] if lines else []


def find_log(folder: str) -> tuple[FileGroup, list[FileGroup], list[str]]:
    """Find the files of a folder that are most likely a log.

    Returns:
        The files of the log, the other groups of files, and the names of all files.

    Raises:
        UserError: If no file can be read as a log.
    """
    all_files = list_files(folder, "*", required=False, what="file")
    files_by_pattern: dict[str, list[str]] = {}
    for file in all_files:
        name = COMPRESSED_NAME.sub("", file.rpartition("/")[2])
        files_by_pattern.setdefault(re.sub(TOKEN, "0", name), []).append(file)
    groups: list[FileGroup] = []
    reasons: list[str] = []
    for files in files_by_pattern.values():
        try:
            groups.append(FileGroup(folder, files))
        except (UserError, StopIteration, OSError, ValueError, csv.Error) as error:
            reason = one_line(error) if str(error) else "it has no rows"
            reasons.append(f"{files[0]}: {reason}")
    logs = [group for group in groups if group.is_log]
    if not logs:
        reasons += [
            f"{group.name} has no users and items, but {describe_columns(group)}"
            for group in groups
        ]
        reason = "; ".join(reasons)[:600] or "it is empty"
        raise UserError(f"{folder} holds no file that can be read as a log: {reason}")
    log = max(logs, key=lambda group: (*log_rank(group), group.size))
    others = [group for group in groups if group is not log]
    log.assign_roles(measure_shares(log, others))
    return log, others, all_files


def log_rank(group: FileGroup) -> tuple[bool, bool, int, bool]:
    """Return a sort key of files, which is larger the likelier they are a log."""
    roles = group.roles
    ordered = bool(roles.times or roles.listed)
    return group.is_log, not role_score(group.name, "beside"), roles.sure, ordered


def describe_columns(group: FileGroup) -> str:
    """Return the names of the columns of files, with hints at nested events."""
    names = ", ".join(c.name for c in group.columns)
    hints = [explain_nested(c) for c in group.columns]
    return "; ".join([names, *filter(None, hints)])


def explain_nested(column: Column) -> str:
    """Return a hint at the keys that read a list of objects as events, or ""."""
    kind = column.values.dtype
    if not isinstance(kind, pl.List) or not isinstance(kind.inner, pl.Struct):
        return ""
    objects = column.values.explode().drop_nulls().struct.unnest()
    fields = [Column(name, objects[name]) for name in objects.columns]
    time = next((c for c in fields if c.time_keys), None)
    ids = [c for c in fields if c.may_be_id and c is not time]
    item = pick_column(ids, "item") or next(iter(ids), None)
    lines = [yaml_line("explode", {"event": column.name})]
    lines += [yaml_line("item", f"event.{item.name}")] if item else []
    times = {"column": f"event.{time.name}", **time.time_keys} if time else {}
    lines += [yaml_line("time", times)] if time else []
    keys = ", ".join(f"`{line}`" for line in lines)
    return f"{column.name} is a list of objects, which {keys} read"


def measure_shares(log: FileGroup, groups: list[FileGroup]) -> Shares:
    """Measure how many ids of each column are in files of users and of items.

    Files with consecutive ids are ignored, because ids of other things are often
    consecutive, too.

    Args:
        log: Files of the log.
        groups: Other files.

    Returns:
        Share of the distinct ids, by role and column.
    """
    shares: Shares = {"user": {}, "item": {}}
    columns = [c for c in log.columns if c.may_be_id]
    for group in groups:
        for role, key in find_keys(group):
            ids = group.read_ids()[key.name].ids
            if are_consecutive(ids):
                continue
            for c in columns:
                unique = c.ids.unique()
                share = int(unique.is_in(ids.implode()).sum()) / len(unique)
                shares[role][c.name] = max(share, shares[role].get(c.name, 0))
    return shares


def are_consecutive(ids: pl.Series) -> bool:
    """Return whether ids are integers that fill at least a tenth of their range."""
    if ids.str.contains(r"\D|^0\d").any():
        return False
    numbers = ids.cast(pl.Int64, strict=False).drop_nulls()
    low, high = numbers.min(), numbers.max()
    if not isinstance(low, int) or not isinstance(high, int):
        return True  # no ids, or above int64
    return len(numbers) >= (high - low + 1) / 10


def find_keys(group: FileGroup) -> list[tuple[str, Column]]:
    """Return pairs of a role and a column that may be the key of files.

    Args:
        group: Files other than the log.
    """
    if role_score(group.name, "beside"):
        return []
    keys = []
    for role, other in (("user", "item"), ("item", "user")):
        if role_score(group.name, other) and not role_score(group.name, role):
            continue
        keys += [
            (role, key)
            for key in group.possible_keys
            if role_score(group.name, role) or role_score(key.name, role)
        ]
    return keys


def add_time(draft: Draft, log: FileGroup, clock: Column | None) -> None:
    """Add the line of the time.

    The time is a column of times, a day and a time of day in two columns, or the order
    of the rows.

    Args:
        draft: Mapping to add to.
        log: Files of the log.
        clock: Column with a time of day, or None.
    """
    time = next(iter(log.roles.times), None)
    if time is None:
        doubt = "no column looks like times: the order of the rows, or of which column?"
        draft.add("time", {"unit": "order"}, "", [doubt])
        return
    value, comment = {"column": time.name, **time.time_keys}, time.examples
    if clock and "%H" not in time.day_format and "%I" not in time.day_format:
        seconds = " %H:%M:%S" if clock.mostly_matches(r"^\d+:\d+:") else " %H:%M"
        column = f"{time.sql} || ' ' || {clock.sql}"
        value = {"column": column, "format": time.day_format + seconds}
        comment = ""
    draft.add("time", value, comment, log.roles.time_doubts)


def classify_column(
    c: Column, exploded: bool, lacks_header: bool, drafts: _ColumnDrafts
) -> None:
    """Add a column to the labels, or to the possible labels or features, if it fits.

    Args:
        c: Column.
        exploded: Whether events are elements of lists.
        lacks_header: Whether the names of columns are generated.
        drafts: Labels and features, changed in place.
    """
    is_outcome = bool(role_score(c.name, "outcome"))
    actions: list[str] = []
    if not c.is_number and c.distinct < 12:
        actions = c.ids.unique(maintain_order=True).to_list()
    if exploded and c.list_sql and is_outcome:
        sql = f"coalesce(array_contains({c.list_sql}, shown), false)"
        drafts.labels[c.feature_name] = sql
    elif exploded and is_outcome and not c.is_number:  # text of at most one item
        items = f"string_to_array({c.sql}, ' ')"
        sql = f"coalesce(array_contains({items}, shown), false)"
        drafts.labels[c.feature_name] = sql
    elif c.is_flag and not role_score(c.name, "time"):
        labels = drafts.labels if is_outcome else drafts.possible_labels
        labels[c.feature_name] = c.name
    elif c.is_number and (is_outcome or (lacks_header and c.distinct < 12)):
        drafts.labels[c.feature_name] = {"column": c.number_sql, "type": "float32"}
    elif actions and all(role_score(action, "outcome") for action in actions):
        for action in actions:
            drafts.labels[re.sub(r"\W", "_", action)] = f"{c.sql} = '{action}'"
    elif _is_numeric_feature(c):
        drafts.possible_numbers[c.feature_name] = c.number_sql
    elif c.is_category:
        drafts.possible_categories[c.feature_name] = c.name


def _is_numeric_feature(c: Column) -> bool:
    """Return whether the values of a column are numbers, not codes or ids."""
    may_be_amount = c.is_measurement or role_score(c.name, "amount")
    if not c.is_number or (c.is_category and not may_be_amount):
        return False
    is_unique_integer = c.identifies_events and c.is_integer
    return not re.search("(?i)id$", c.name) and not is_unique_integer


@dataclass
class Description:
    """The files that describe the users or the items of a log."""

    group: FileGroup | None = None
    """The files, or None."""
    key: Column | None = None
    """Column with the ids of the files."""
    score: int = 0
    """Number of names that match (`count_name_matches`), 0 to 3."""
    log_sql: str = "{}"
    """SQL that converts ids of the log to the format of the files."""
    file_sql: str = "{}"
    """SQL that converts ids of the files to the format of the log."""
    matched: tuple[int, int] = (0, 0)
    """Number of distinct ids in the first rows of the log that are in the files, and
    number of all distinct ids in these rows."""
    share: float = 1.0
    """The smaller of the shares of ids and of events that are in the files."""
    is_measured: bool = False
    """Whether `share` was determined from all rows of the files."""
    file_doubts: list[str] = field(default_factory=list)
    """Doubts about the files."""
    key_doubts: list[str] = field(default_factory=list)
    """Doubts about `key`."""
    doubts: list[str] = field(default_factory=list)
    """Doubts about the column of ids of the log."""

    def wrap(self, name: str) -> str:
        """Return SQL that converts a column of the log to ids of the files."""
        return self.log_sql.format(name)


def find_description(
    role: str, ids: Column | None, log: FileGroup, groups: list[FileGroup]
) -> Description:
    """Find the files that describe the users or the items of a log best.

    Other files and other key columns that fit about as well are noted as doubts.

    Args:
        role: "user" or "item".
        ids: Column of the log with the ids, or None.
        log: Files of the log.
        groups: Other files.
    """
    if ids is None:
        return Description()
    candidates = list_candidates(role, ids, log, groups)
    if not candidates:
        return Description()
    best = max(candidates, key=lambda candidate: candidate.score + candidate.share)
    similar = [
        candidate
        for candidate in candidates
        if abs(candidate.share - best.share) <= SIMILAR_SHARE
    ]
    best.key_doubts += [f"or {name}?" for name in list_rival_keys(best, similar)]
    rival_files = list_rival_files(role, ids, best, similar)
    best.file_doubts += [f"or {name}?" for name in rival_files]
    if best.score == 0:
        best.file_doubts.append(f"does it describe {role}s?")
    return check_description(role, best)


def list_rival_keys(best: Description, similar: list[Description]) -> list[str]:
    """List the other columns of the best files that fit about as well as their key.

    Args:
        best: Description with the best files.
        similar: Descriptions that match about as many ids.
    """
    return [
        rival.key.name
        for rival in similar
        if rival.group is best.group
        and rival.score == best.score
        and rival.key
        and rival.key is not best.key
    ]


def list_rival_files(
    role: str, ids: Column, best: Description, similar: list[Description]
) -> list[str]:
    """List other files that fit about as well as the best files, one per group.

    Consecutive ids are weak evidence, because files of other things may have them, too.
    With them, files whose names match less well are listed as well.

    Args:
        role: "user" or "item".
        ids: Column of the log with the ids.
        best: Description with the best files.
        similar: Descriptions that match about as many ids.
    """
    assert best.group is not None
    assert best.key is not None
    max_difference = MAX_SCORE_DIFFERENCE
    best_ids = best.group.read_ids()[best.key.name].ids
    if best.key.name != ids.name and are_consecutive(best_ids):
        max_difference += 1
    needs_texts = has_texts(role, best)
    files = []
    for rival in similar:
        if rival.group is None or rival.group is best.group:
            continue
        names_fit = best.score - rival.score <= max_difference
        if names_fit and (has_texts(role, rival) or not needs_texts):
            files.append(rival.group.files[0])
    return list(dict.fromkeys(files))


def list_candidates(
    role: str, ids: Column, log: FileGroup, groups: list[FileGroup]
) -> list[Description]:
    """List the files and keys that may describe the users or items of a log.

    Args:
        role: "user" or "item".
        ids: Column of the log with the ids.
        log: Files of the log.
        groups: Other files.
    """
    values = ids.ids
    if ids.item_lists is not None:
        values = ids.item_lists.explode().drop_nulls()
    other_columns = [c for c in log.columns if c is not ids]
    other_subjects = {c.name for c in other_columns if names_subject(c.name)}
    candidates: list[Description] = []
    for group in groups:
        for key in group.possible_keys:
            score = count_name_matches(role, ids, group, key)
            if score is None or key.name in other_subjects:
                continue
            if not any(list_description_columns(role, group, key).values()):
                continue
            file_ids = group.read_ids()[key.name]
            description = match_ids(group, key, ids, values, file_ids)
            description.score = score
            if score > 1 or description.share > MIN_MATCHED_SHARE:
                candidates.append(description)
    return candidates


def check_description(role: str, best: Description) -> Description:
    """Add doubts to a description, or replace it by an empty one if no id matches."""
    assert best.group is not None
    assert best.key is not None
    if best.group.read_ids()[best.key.name].repeats:
        best.file_doubts.append(f"{len(best.group.files)} files have the same {role}s?")
    if best.is_measured and best.matched[0] == 0:
        name, examples = best.group.name, best.key.examples
        doubt = f"{name} has none of these ids, but {examples}; another?"
        return Description(doubts=[doubt])
    if best.is_measured and best.share < MIN_DESCRIBED_SHARE[role]:
        matched, total = best.matched
        best.file_doubts.append(f"it has only {matched:,} of {total:,} {role}s; is it?")
    return best


def count_name_matches(
    role: str, ids: Column, group: FileGroup, key: Column
) -> int | None:
    """Count the names that indicate that files describe the users or items of a log.

    Args:
        role: "user" or "item".
        ids: Column of the log with the ids.
        group: Other files.
        key: Column with the ids of these files.

    Returns:
        The number, from 0 to 3, or None if the name of the files excludes it.
    """
    other = "user" if role == "item" else "item"
    foreign = role_score(group.name, other) and not role_score(group.name, role)
    if foreign or role_score(group.name, "beside"):
        return None
    same = key.name == ids.name and not group.lacks_header
    return same + bool(role_score(key.name, role)) + bool(role_score(group.name, role))


def match_ids(
    group: FileGroup, key: Column, ids: Column, values: pl.Series, file_ids: FileIds
) -> Description:
    """Match the ids in the first rows of a log with the ids stored in a group of files.

    If clearly more ids match in lower case, or padded with zeros to the width of the
    other ids, the description contains the SQL of this conversion.

    Args:
        group: Files of one layout.
        key: Column of the files with their ids.
        ids: Column of the log with the ids.
        values: Ids in the first rows of the log.
        file_ids: Ids stored in the files.

    Returns:
        The files as a description, with the shares of ids and events that match.
    """
    description = Description(group, key, is_measured=file_ids.is_complete)
    description.matched, description.share = count_matches(values, file_ids.ids)
    for log_sql, file_sql in (
        ("lower({})", "lower({})"),
        (pad_sql(values, file_ids.ids, ids), "{}"),
        ("{}", pad_sql(file_ids.ids, values, key)),
    ):
        if description.share >= GOOD_SHARE or not log_sql or not file_sql:
            continue
        converted = apply_sql(values, log_sql)
        if converted.n_unique() < values.n_unique():
            continue  # the conversion would merge different ids
        matched, share = count_matches(converted, apply_sql(file_ids.ids, file_sql))
        if share >= max(MIN_EVIDENCE, description.share + MIN_GAIN):
            description.matched, description.share = matched, share
            description.log_sql, description.file_sql = log_sql, file_sql
    return description


def count_matches(values: pl.Series, ids: pl.Series) -> tuple[tuple[int, int], float]:
    """Count the ids of a log that are in files.

    Args:
        values: Ids of the rows of a log.
        ids: Distinct ids of the files.

    Returns:
        Numbers of matched and of all distinct ids of the log, and the smaller of the
        matched shares of distinct ids and of rows.
    """
    unique, file_ids = values.unique(), ids.implode()
    matched = int(unique.is_in(file_ids).sum())
    share_of_rows = int(values.is_in(file_ids).sum()) / max(1, len(values))
    share_of_ids = matched / max(1, len(unique))
    return (matched, len(unique)), min(share_of_ids, share_of_rows)


def pad_sql(values: pl.Series, others: pl.Series, column: Column) -> str:
    """Return SQL that pads ids with zeros to the common width of other ids.

    Args:
        values: Ids to pad.
        others: Ids with leading zeros.
        column: Column of `values`.

    Returns:
        SQL with {} for the column, or "" if the other ids have no common width or no
        leading zero, or if an id is wider.
    """
    widths = others.str.len_chars()
    padded = others.str.starts_with("0").any()
    if not padded or widths.n_unique() != 1:
        return ""
    width = int(widths[0])
    if int(values.str.len_chars().max() or 0) > width:  # type: ignore[arg-type]
        return ""
    is_text = column.values.dtype == pl.String
    text = "{}" if is_text else "cast({} as varchar)"
    return f"lpad({text}, {width}, '0')"


def apply_sql(values: pl.Series, sql: str) -> pl.Series:
    """Apply SQL, with {} for the column, to ids."""
    expressions = {"id": sql.format("id")}
    converted, _ = evaluate(pl.DataFrame({"id": values}), expressions, "ids")
    return converted["id"]


def list_description_columns(
    role: str, group: FileGroup, key: Column
) -> dict[str, list[Column]]:
    """Return the columns of files that describe users or items.

    Args:
        role: "user" or "item".
        group: Files of one layout.
        key: Column with the ids of the files.

    Returns:
        Columns by key of the section: texts, attributes or numbers.
    """
    columns = [
        c
        for c in group.columns
        if c is not key
        and not c.time_keys
        and not c.examples.startswith("http")
        and not role_score(c.name, "outcome")
    ]
    attributes = [c for c in columns if c.is_category]
    if role == "user":
        return {"attributes": attributes}
    attributes = [c for c in attributes if not role_score(c.name, "amount")]
    texts = [
        c
        for c in columns
        if not c.is_number and not c.is_flag and (c.distinct > 1 or c.list_sql)
    ]
    numbers = [
        c
        for c in columns
        if c.is_number
        and c not in attributes
        and c.distinct > 1
        and not re.search("(?i)id$", c.name)
    ]
    return {"texts": texts, "attributes": attributes, "numbers": numbers}


def has_texts(role: str, description: Description) -> bool:
    """Return whether the described files have columns of texts."""
    group, key = description.group, description.key
    assert group is not None
    assert key is not None
    return bool(list_description_columns(role, group, key).get("texts"))


def add_description(
    draft: Draft, role: str, description: Description, all_files: list[str]
) -> None:
    """Add the section `users` or `items`, if there are files that describe them.

    Args:
        draft: Mapping to add to.
        role: "user" or "item".
        description: Files that describe them.
        all_files: Names of all files of the folder.
    """
    group, key = description.group, description.key
    if group is None or key is None:
        return
    draft.lines.append(f"{role}s:")
    pattern = group.pattern(all_files, False)
    draft.add("  files", pattern, "", description.file_doubts)
    for name, value in group.format_keys.items():
        draft.add(f"  {name}", value)
    key_sql = description.file_sql.format(key.name)
    draft.add(f"  {role}", key_sql, key.examples, description.key_doubts)
    for kind, columns in list_description_columns(role, group, key).items():
        sql_by_name = {c.feature_name: c.number_sql for c in columns}
        if sql_by_name:
            draft.add(f"  {kind}", sql_by_name)
    others = [c for c in group.columns if c is not key]
    outcomes = [c.name for c in others if role_score(c.name, "outcome")]
    if outcomes:
        draft.add("  # left out", outcomes, "known before every event of the log?")


def min_matched_line(users: Description, items: Description) -> list[str]:
    """Return a list with the line of `min_matched` if the files lack users or items.

    The value is half of the measured share, as later rows of the log may match less
    often than the first rows.
    """
    measured = [
        (description.share, role, description)
        for role, description in (("users", users), ("items", items))
        if description.group
        and description.is_measured
        and description.share < GOOD_SHARE
    ]
    if not measured:
        return []
    share, role, description = min(measured, key=lambda entry: entry[0])
    assert description.group is not None
    matched, total = description.matched
    comment = (
        f"{matched:,} of the first {total:,} {role} have a row in "
        f"{description.group.name}"
    )
    return [yaml_line("  min_matched", math.floor(share * 50) / 100, comment)]


def check_mapping(folder: str, lines: list[str], settings: list[str]) -> list[str]:
    """Read the first rows with a suggested mapping.

    Args:
        folder: Folder of the log.
        lines: Lines of the mapping.
        settings: Lines with settings of jobs.prepare.

    Returns:
        Comments for the mapping file: the error, or numbers of rows and unread files.
    """
    try:
        log = parse_log(yaml.safe_load("\n".join(lines)))
        config = read_config(yaml.safe_load("\n".join(settings))["prepare"])
        KINDS[config.kind].check_settings(log, config)
        previews = preview(log, folder, 0.01)
    except (UserError, ValueError) as error:
        return [f"# Not right yet: {one_line(error, None)}"]
    comments = [
        f"# The first rows of {read.kind}: {read.rejected.rows_read:,}, "
        f"{read.rejected.rejects:,} of them rejected."
        for read in previews
    ]
    unread = list_unread(log, folder)
    if unread:
        comments.append(f"# No key reads {name_files(unread)}.")
    return comments
