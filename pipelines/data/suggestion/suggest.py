"""A first mapping for an undescribed folder, with example values and open questions.

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
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import yaml

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
    Column,
    Shares,
    choose_roles,
    list_names,
    names_subject,
    pick,
    tell,
)
from pipelines.data.suggestion.preview import preview

MAX_ROWS = 5000
"""Rows of a file that are examined."""
COMPRESSED_NAME = re.compile(rf"\.({'|'.join(COMPRESSED_SUFFIXES)})$", re.IGNORECASE)


def line(key: str, value: Any, why: str = "") -> str:
    """Return a line of YAML with a comment.

    Features with the names of their columns are written as a list.
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
    return f"{text.ljust(46)}  # {why}" if why else text


TOKEN = r"(?:[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|\d+)"
"""Parts that differ between the names of a log's files: numbers and UUIDs."""
MAX_ID_BLOCKS = 16
"""Blocks of at most 8 MiB that are read for the ids of a file beside the log."""


class Look:
    """Files of one layout, described by the beginning of the largest.

    `keys` are the format of the files, as keys of a mapping.
    """

    def __init__(self, folder: str, files: list[str]) -> None:
        self.folder, self.files = folder, files
        self.name = files[0].rpartition("/")[2]
        largest = max(
            (join(folder, file) for file in files), key=lambda uri: file_info(uri).size
        )
        self.keys, frame = read_beginning(largest)
        self.rows = len(frame) * len(files)
        self.size = sum(file_info(join(folder, file)).size for file in files)
        self.columns = [Column(name, frame[name]) for name in frame.columns]
        self.ids_by_key: dict[str, FileIds] | None = None
        self.assign({"user": {}, "item": {}})

    def assign(self, shares: Shares) -> None:
        """Choose the user, the item and the time; `shares` as in `choose_roles`."""
        self.roles = choose_roles(self.columns, self.rows, shares)

    @property
    def is_log(self) -> bool:
        """Whether the files have users and items."""
        roles = self.roles
        return bool(roles.user and (roles.item or roles.listed))

    @property
    def possible_keys(self) -> list[Column]:
        """Columns that may identify the rows."""
        return [
            c
            for c in self.columns
            if c.share > 0.9 and c.distinct > 1 and not c.time and not c.measure
        ]

    @property
    def names_only(self) -> bool:
        """Whether the file has no header, so that names of columns are generated."""
        return "header" in self.keys

    def read_ids(self) -> dict[str, FileIds]:
        """Return the ids of all possible keys, by column; of large files some."""
        if self.ids_by_key is None:
            self.ids_by_key = read_ids(self, [c.name for c in self.possible_keys])
        return self.ids_by_key

    def pattern(self, every: list[str], grows: bool) -> str:
        """Return a pattern of the files' names.

        Args:
            every: All files of the folder; the pattern matches no other of them, if
                one can be found.
            grows: Whether a single file also gets a pattern, for files to come.
        """
        if len(self.files) == 1 and not (grows and re.search(TOKEN, self.files[0])):
            return self.files[0]
        zipped = "*" * any(map(COMPRESSED_NAME.search, self.files))
        nested = ["/" in file for file in self.files]
        folder = "*/" if all(nested) else "*" if any(nested) else ""
        stem = COMPRESSED_NAME.sub("", self.name)
        for stands in ("*", "[0-9a-f]*"):
            stem_pattern = re.sub(rf"{TOKEN}(?:[-_.:T]?{TOKEN})*", stands, stem)
            pattern = folder + stem_pattern + (zipped if len(self.files) > 1 else "")
            if len(self.files) == 1:
                pattern += self.name[len(stem) :]
            matched = {file for file in every if fnmatchcase(file, pattern)}
            if matched == {*self.files}:
                break
        return pattern


@dataclass
class FileIds:
    """The distinct ids in a column of files."""

    ids: pl.Series
    is_whole: bool
    """Whether the files were read to their ends."""
    repeats: bool
    """Whether several files have mostly the same ids."""


def read_ids(look: Look, expressions: list[str]) -> dict[str, FileIds]:
    """Return the ids that expressions give in the files, up to MAX_ID_BLOCKS."""
    ids_by_file = {name: list[pl.Series]() for name in expressions}
    blocks = 0
    for file in look.files:
        file_ids = {name: list[pl.Series]() for name in expressions}
        uri = join(look.folder, file)
        frames = read_frames(uri, Files(**look.keys), expressions)
        with closing(frame for frame in frames) as stream:
            for frame in stream if blocks < MAX_ID_BLOCKS else ():
                blocks += 1
                wanted = {name: name for name in expressions}
                values, _ = evaluate(frame.with_missing, wanted, uri)
                for name in expressions:
                    ids = clean_ids(values[name]).drop_nulls().unique()
                    file_ids[name].append(ids)
                if blocks == MAX_ID_BLOCKS:
                    break
        for name, series in file_ids.items():
            if series:
                ids_by_file[name].append(pl.concat(series).unique())
    nothing = pl.Series([], dtype=pl.String)
    return {
        name: FileIds(
            ids=pl.concat([nothing, *parts]).unique(),
            is_whole=blocks < MAX_ID_BLOCKS,
            repeats=mostly_shared(parts),
        )
        for name, parts in ids_by_file.items()
    }


def mostly_shared(ids_by_file: list[pl.Series]) -> bool:
    """Return whether the files have mostly the same ids."""
    total = sum(len(ids) for ids in ids_by_file)
    return len(ids_by_file) > 1 and pl.concat(ids_by_file).n_unique() < 0.7 * total


def read_beginning(uri: str) -> tuple[dict[str, Any], pl.DataFrame]:
    """Return the format of a file, as keys of a mapping, and its first rows."""
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
    dialect = json_dialect if kind == "jsonl" else csv_dialect
    more_keys, names = dialect(lines, suffix)
    keys |= more_keys
    # pandas writes an index without a name
    names = [name for name in dict.fromkeys(names) if name]
    return keys, _first_rows(uri, Files(**keys), names)


def _first_rows(uri: str, files: Files, names: list[str]) -> pl.DataFrame:
    return next(read_frames(uri, files, names)).rows.select(names).head(MAX_ROWS)


def _detect_encoding(uri: str) -> tuple[str, pl.DataFrame]:
    """Return the encoding of a text file, and its first lines."""
    for encoding in ("utf-8", "utf-16"):
        files = Files(format="lines", encoding=encoding)
        with suppress(UserError, StopIteration):
            frame = next(read_frames(uri, files, ["line"])).rows
            # text in another encoding may decode as UTF-16 by chance
            if encoding == "utf-8" or frame["line"][0][0].isascii():
                return encoding, frame
    files = Files(format="lines", encoding="cp1252")
    return "cp1252", next(read_frames(uri, files, ["line"])).rows


def json_dialect(lines: list[str], suffix: str) -> tuple[dict[str, Any], list[str]]:
    """Return the keys of a mapping, and the columns, of JSON text."""
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


def csv_dialect(lines: list[str], suffix: str) -> tuple[dict[str, Any], list[str]]:
    """Return the keys of a mapping, and the columns, of CSV text.

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
    marked = (each.replace(delimiter, mark) for each in lines[:200])
    rows = list(csv.reader(marked, delimiter=mark, **options))
    if _lacks_header(rows):
        keys["header"] = [f"c{number}" for number in range(1, len(rows[0]) + 1)]
    return keys, keys.get("header", rows[0])


def _find_delimiter(text: str, kind: str | None, default: str) -> str:
    """Return the delimiter that most rows have as often as the first."""
    quoted = r'(?<![^\t;,|:\n])"(?:[^"\\]|\\.|"")*"(?![^\t;,|:\n\r])'
    rows = re.sub(quoted, "q", text).split("\n")[:200]
    even = {}
    for delimiter in ("::", "\t", ";", "|", ",", " "):
        count = rows[0].count(delimiter)
        even[delimiter] = sum(row.count(delimiter) == count > 0 for row in rows)
    best = max(even, key=lambda delimiter: even[delimiter])
    required = 1 if best == " " else 0.9
    if kind is None and even[best] < required * len(rows):
        raise UserError(
            "it has no columns; of lines such as `u1 i3 i7` set 'format: lines' and "
            "'sequence'"
        )
    return best if even[best] and (best != " " or kind is None) else default


def _lacks_header(rows: list[list[str]]) -> bool:
    """Return whether the first line has numbers of the shape of later ones."""
    shapes = [
        [re.sub(r"\d+", "0", cell) for cell in row]
        for row in rows
        if len(row) == len(rows[0])
    ]
    for column, cell in enumerate(shapes[0]):
        alike = sum(row[column] == cell for row in shapes)
        if "0" in cell and alike > max(1, len(shapes) / 2):
            return True
    return False


@dataclass
class Suggestion:
    """A first mapping file."""

    text: str
    """Content of the file."""
    doubts: list[str]
    """Lines of the file that determine the training and are in doubt."""


class Draft:
    """Lines of a mapping, and the doubtful ones among them."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.doubts: list[str] = []

    def add(
        self, key: str, value: Any, why: str = "", doubts: Sequence[str] = ()
    ) -> None:
        """Add a line; `doubts` join its comment and mark it as doubtful."""
        made = line(key, value, "; ".join(filter(None, [why, *doubts])))
        self.lines.append(made)
        if doubts:
            self.doubts.append(made)

    @property
    def keys(self) -> list[str]:
        """The keys of the lines."""
        return [each.split(":")[0] for each in self.lines]


def suggest(folder: str, kind: str | None = None) -> Suggestion:
    """Suggest a first mapping of the files of a folder.

    Args:
        folder: Folder of a raw log.
        kind: Kind of the requests. By default a search if there are queries with
            results, otherwise a behaviour.

    Raises:
        UserError: If none of the files can be a log.
    """
    log, looks, every = find_log(folder)
    user, item, shown = log.roles.user, log.roles.item, log.roles.listed
    listed = next((c for c in log.columns if c.list), None)
    assert user is not None
    users = find_description("user", user, log, looks)
    items = find_description("item", item or shown or listed, log, looks)
    draft = Draft()
    add_files(draft, log, looks, every)
    doubts = log.roles.user_doubts + users.doubts
    draft.add("user", users.wrap(user.name), user.shown, doubts)
    labels = add_events(draft, log, items, kind)
    add_description(draft, "user", users, every)
    add_description(draft, "item", items, every)
    prepare = ["prepare:", *setting_lines(kind, draft.keys, labels, log)]
    prepare += min_matched_line(users, items)
    lines = [*draft.lines, *check_mapping(folder, draft.lines, prepare), *prepare]
    return Suggestion("\n".join(lines) + "\n", draft.doubts)


def add_files(draft: Draft, log: Look, looks: list[Look], every: list[str]) -> None:
    """Add the lines about the files of events and their format."""
    asked = {
        "header": "the file has none: rename these, here and below",
        "encoding": "is it this one?",
    }
    names = {c.name for c in log.columns}
    doubts = []
    for look in looks:
        pattern = look.pattern(every, False)
        if {
            c.name for c in look.columns
        } == names and look.names_only == log.names_only:
            doubts.append(f"and {pattern} too?")
        elif log_rank(look) == log_rank(log) and look.size > log.size / 10:
            doubts.append(f"or {pattern}?")
    count = f"{len(log.files):,} files" if len(log.files) > 1 else ""
    draft.add("files", log.pattern(every, True), count, doubts)
    for key, value in log.keys.items():
        draft.add(key, value, asked.get(key, ""))


def add_events(
    draft: Draft, log: Look, items: Description, kind: str | None
) -> dict[str, Any]:
    """Add the lines about the columns of events, and return the labels."""
    user, item, shown = log.roles.user, log.roles.item, log.roles.listed
    times = log.roles.times
    left = [c for c in log.columns if c not in (user, item, shown, *times)]
    clock = next((c for c in left if c.most(r"^\d\d?:\d\d(:\d\d)?$")), None)
    listed = next((c for c in log.columns if c.list), None)
    labels: dict[str, Any] = {}
    asks: dict[str, Any] = {}
    features: dict[str, dict[str, str]] = {"numbers": {}, "categories": {}}
    shows = shown and (kind == "search" or (kind is None and pick(left, "query")))
    doubts = log.roles.item_doubts + items.doubts
    if listed and user and user.share > 0.9 and not times and not shows:
        draft.add("sequence", listed.list, listed.shown, doubts)
        if item:
            draft.add("item", item.name, f"after the list: {item.shown}")
    else:
        if shown:
            why = f"each is an event: {shown.shown}"
            draft.add("explode", {"shown": shown.list}, why, doubts)
            draft.add("item", items.wrap("shown"))
        elif item:
            draft.add("item", items.wrap(item.name), item.shown, doubts)
        add_time(draft, log, clock)
        left = [
            c
            for c in left
            if c is not clock and (not tell(c.name, "time") or tell(c.name, "outcome"))
        ]
        for role in ("request", "query", "position"):
            add_request(draft, role, left)
        for c in left:
            classify_column(c, bool(shown), log.names_only, labels, asks, features)
    head = "labels:  # what a user did, never an input of its own event"
    if labels or asks:
        draft.lines.append(head if labels else f"# {head}")
    for name, value in labels.items():
        draft.add(f"  {name}", value)
    for name, value in asks.items():
        ask = "did the user do this? then take away the '#'"
        draft.add(f"  # {name}", value, ask)
    ask = "known before the event? then take away the '#'; what came of it is a label"
    for key, made in features.items():
        if made:
            draft.add(f"# {key}", made, ask)
    return labels


def add_request(draft: Draft, role: str, left: list[Column]) -> None:
    """Add the line of a request, a query or a position, whose column leaves `left`."""
    candidates = [c for c in left if not c.list]
    column = pick(candidates, role)
    if not column or column.distinct < 2:
        return
    strength = tell(column.name, role)
    rivals = [
        c for c in candidates if c is not column and tell(c.name, role) >= strength
    ]
    rivals = [c for c in rivals if c.distinct > 1]
    other = f"; or {list_names(rivals)}?" if rivals else ""
    draft.add(role, column.name, column.shown + other)
    left.remove(column)


def setting_lines(
    kind: str | None, keys: list[str], labels: dict[str, Any], log: Look
) -> list[str]:
    """Return lines with settings of jobs.prepare.

    Args:
        kind: Kind of the requests, or None.
        keys: Keys of the mapping.
        labels: Labels of the mapping.
        log: Files of the log.
    """
    acts = [name for name, value in labels.items() if isinstance(value, str)]
    behaviour = None
    for words in ("click", "purchas|buy|bought|order", "like"):
        matches = [name for name in acts if re.search(words, name)]
        behaviour = behaviour or next(iter(matches), None)
    has_results = "query" in keys and ("explode" in keys or "position" in keys)
    if kind is None and behaviour and has_results:
        kind = "search"
    lines = []
    if kind:
        lines.append(line("  kind", kind))
    elif len(acts) > 1 and log.roles.times:
        question = "each event shown, with what was done? then --suggest --kind actions"
        lines.append(line("  kind", "retrieval", question))
    lines.append("  core: 0" if kind in ("search", "actions") else "  core: 5")
    if acts and kind == "search":
        behaviour = behaviour or acts[0]
    if behaviour and kind != "actions":
        others = [name for name in acts if name != behaviour]
        rivals = f"or {', '.join(others[:3])}?" if others else ""
        lines.append(line("  behaviour", behaviour, rivals))
    split = "temporal" if log.roles.times else "leave_last_out"
    lines.append(line("  split", {"kind": split}))
    if kind == "actions":
        lines += numeric_label_lines(labels, log)
    return lines


def numeric_label_lines(labels: dict[str, Any], log: Look) -> list[str]:
    """Return the section with tasks and inputs from numeric labels of a feed."""
    tasks, inputs = list[str](), list[str]()
    for name, value in labels.items():
        if isinstance(value, str):
            continue
        column = next(c for c in log.columns if c.value == value["column"])
        text = column.ids.str.replace(",", ".")
        numbers = text.cast(pl.Float64, strict=False).drop_nulls()
        low, middle, high = (
            float(f"{numbers.quantile(share):g}") for share in (0, 0.5, 0.99)
        )
        limit = {"at_least": middle} if middle > low else {"above": low}
        task = {"label": name, **limit}
        question = "from where on is it one? or no task"
        tasks.append(line(f"      high_{name}", task, question))
        if high > low:
            inputs.append(line(f"      {name}", {"label": name, "range": [low, high]}))
    lines = ["    tasks:", *tasks] if tasks else []
    lines += ["    inputs:", *inputs] if inputs else []
    return ["  actions:", *lines] if lines else []


def find_log(folder: str) -> tuple[Look, list[Look], list[str]]:
    """Find the files that are most like a log.

    Returns:
        The log, the other files, and the names of all files.

    Raises:
        UserError: If no file can be a log.
    """
    every = list_files(folder, "*", required=False, what="file")
    groups: dict[str, list[str]] = {}
    for file in every:
        name = COMPRESSED_NAME.sub("", file.rpartition("/")[2])
        groups.setdefault(re.sub(TOKEN, "0", name), []).append(file)
    looks, refused = list[Look](), list[str]()
    for files in groups.values():
        try:
            looks.append(Look(folder, files))
        except (UserError, StopIteration, OSError, ValueError, csv.Error) as error:
            reason = " ".join(str(error).split())[:200] or "it has no rows"
            refused.append(f"{files[0]}: {reason}")
    logs = [look for look in looks if look.is_log]
    refused += [
        f"{each.name} has no users and items, but {describe_columns(each)}"
        for each in looks
    ]
    if not logs:
        why = "; ".join(refused)[:600] or "it is empty"
        raise UserError(f"{folder} holds no file that can be read as a log: {why}")
    log = max(logs, key=lambda look: (*log_rank(look), look.size))
    others = [look for look in looks if look is not log]
    log.assign(measure_shares(log, others))
    return log, others, every


def log_rank(look: Look) -> tuple[bool, bool, int, bool]:
    """Return a sort key that tells a log from other files; larger is likelier."""
    roles = look.roles
    ordered = bool(roles.times or roles.listed)
    return look.is_log, not tell(look.name, "beside"), roles.sure, ordered


def describe_columns(look: Look) -> str:
    """Return the names of a file's columns, with hints at nested events."""
    names = ", ".join(c.name for c in look.columns)
    hints = [explain_nested(c) for c in look.columns]
    return "; ".join([names, *filter(None, hints)])


def explain_nested(column: Column) -> str:
    """Return the lines of a mapping that read a list of objects as events."""
    kind = column.values.dtype
    if not isinstance(kind, pl.List) or not isinstance(kind.inner, pl.Struct):
        return ""
    objects = column.values.explode().drop_nulls().struct.unnest()
    fields = [Column(name, objects[name]) for name in objects.columns]
    time = next((c for c in fields if c.time), None)
    ids = [c for c in fields if c.may_be_id and c is not time]
    item = pick(ids, "item") or next(iter(ids), None)
    lines = [line("explode", {"event": column.name})]
    lines += [line("item", f"event.{item.name}")] if item else []
    times = {"column": f"event.{time.name}", **time.time} if time else {}
    lines += [line("time", times)] if time else []
    read = ", ".join(f"`{each}`" for each in lines)
    return f"{column.name} is a list of objects, which {read} read"


def measure_shares(log: Look, looks: list[Look]) -> Shares:
    """Return the share of each column's ids that files of users and items contain.

    A file whose ids count up from 1 is no evidence, as other ids count up too.
    """
    shares: Shares = {"user": {}, "item": {}}
    columns = [c for c in log.columns if c.may_be_id]
    for look in looks:
        for role, key in find_keys(look):
            ids = look.read_ids()[key.name].ids
            if count_up(ids):
                continue
            for c in columns:
                unique = c.ids.unique()
                share = int(unique.is_in(ids.implode()).sum()) / len(unique)
                shares[role][c.name] = max(share, shares[role].get(c.name, 0))
    return shares


def count_up(ids: pl.Series) -> bool:
    """Return whether ids are mostly the integers of a range."""
    if ids.str.contains(r"\D|^0\d").any():
        return False
    numbers = ids.cast(pl.Int64, strict=False).drop_nulls()
    low, high = numbers.min(), numbers.max()
    if not isinstance(low, int) or not isinstance(high, int):
        return True  # no ids, or too large to be counted
    return len(numbers) >= (high - low + 1) / 10


def find_keys(look: Look) -> list[tuple[str, Column]]:
    """Return possible keys of a file beside the log, with the roles of their names."""
    if tell(look.name, "beside"):
        return []
    keys = []
    for role, other in (("user", "item"), ("item", "user")):
        if tell(look.name, other) and not tell(look.name, role):
            continue
        keys += [
            (role, key)
            for key in look.possible_keys
            if tell(look.name, role) or tell(key.name, role)
        ]
    return keys


def add_time(draft: Draft, log: Look, clock: Column | None) -> None:
    """Add the line of the time.

    It is a column of times, a day and a time of day, or the order of the rows.
    """
    time = next(iter(log.roles.times), None)
    if time is None:
        doubt = "no column looks like times: the order of the rows, or of which column?"
        draft.add("time", {"unit": "order"}, "", [doubt])
        return
    made, why = {"column": time.name, **time.time}, time.shown
    if clock and "%H" not in time.day and "%I" not in time.day:
        seconds = " %H:%M:%S" if clock.most(r"^\d+:\d+:") else " %H:%M"
        column = f"{time.sql} || ' ' || {clock.sql}"
        made, why = {"column": column, "format": time.day + seconds}, ""
    draft.add("time", made, why, log.roles.time_doubts)


def classify_column(
    c: Column,
    exploded: bool,
    bare: bool,
    labels: dict[str, Any],
    asks: dict[str, Any],
    features: dict[str, dict[str, str]],
) -> None:
    """Add a column to the labels, the possible labels or the possible features, if any.

    Args:
        c: Column.
        exploded: Whether events are elements of lists.
        bare: Whether names are generated.
        labels: Labels by name, changed in place.
        asks: Possible labels by name, changed in place.
        features: Possible features by kind and name, changed in place.
    """
    code = c.few and not c.measure and not tell(c.name, "amount")
    actions = (
        c.ids.unique(maintain_order=True).to_list()
        if not c.number and c.distinct < 12
        else []
    )
    if exploded and c.list and tell(c.name, "outcome"):
        labels[c.feature] = f"coalesce(array_contains({c.list}, shown), false)"
    elif exploded and tell(c.name, "outcome") and not c.number:  # at most one item
        labels[c.feature] = (
            f"coalesce(array_contains(string_to_array({c.sql}, ' '), shown), false)"
        )
    elif c.flag and not tell(c.name, "time"):
        (labels if tell(c.name, "outcome") else asks)[c.feature] = c.name
    elif c.number and (tell(c.name, "outcome") or (bare and c.distinct < 12)):
        labels[c.feature] = {"column": c.value, "type": "float32"}
    elif actions and all(tell(each, "outcome") for each in actions):
        labels.update(
            {re.sub(r"\W", "_", each): f"{c.sql} = '{each}'" for each in actions}
        )
    elif (
        c.number
        and not code
        and not re.search("(?i)id$", c.name)
        and (c.share < 0.99 or not c.whole)
    ):
        features["numbers"][c.feature] = c.value
    elif c.few:
        features["categories"][c.feature] = c.name


@dataclass
class Description:
    """The files that describe the users or the items of the log."""

    look: Look | None = None
    """The files, or None."""
    key: Column | None = None
    """Column of their ids."""
    log_sql: str = "{}"
    """SQL that converts the ids of the log to those of the files."""
    file_sql: str = "{}"
    """SQL that converts the ids of the files to those of the log."""
    matched: tuple[int, int] = (0, 0)
    """Number of ids in the beginning of the log that the files have, and of all its
    ids."""
    share: float = 1.0
    """The smaller of the shares of ids and of events that the files cover."""
    is_measured: bool = False
    """Whether the files were read to their ends."""
    file_doubts: list[str] = field(default_factory=list)
    """Doubts about the files."""
    key_doubts: list[str] = field(default_factory=list)
    """Doubts about the column of their ids."""
    doubts: list[str] = field(default_factory=list)
    """Doubts about the column of ids of the log."""

    def wrap(self, name: str) -> str:
        """Return the SQL of the log's ids."""
        return self.log_sql.format(name)


def find_description(
    role: str, ids: Column | None, log: Look, looks: list[Look]
) -> Description:
    """Find the files that describe the users or the items of a log best.

    A file of another name with the same ids is a rival: the name of a file is weak
    evidence, as ids that count up are in files of other things too.

    Args:
        role: `user` or `item`.
        ids: Column of the log with the ids, or None.
        log: The log.
        looks: Files beside the log.
    """
    if ids is None:
        return Description()
    values = ids.ids if ids.lists is None else ids.lists.explode().drop_nulls()
    of_others = {c.name for c in log.columns if c is not ids and names_subject(c.name)}
    found: list[tuple[int, Description]] = []
    for look in looks:
        for key in look.possible_keys:
            says = count_name_matches(role, ids, look, key)
            if (
                says is None
                or key.name in of_others
                or not any(describing_columns(role, look, key).values())
            ):
                continue
            file_ids = look.read_ids()[key.name]
            made = match_ids(look, key, ids, values, file_ids)
            if says > 1 or made.share > 0.1:
                found.append((says, made))
    if not found:
        return Description()
    says, best = max(found, key=lambda pair: pair[0] + pair[1].share)
    assert best.look is not None
    assert best.key is not None
    margin = 1
    if best.key.name != ids.name and count_up(best.look.read_ids()[best.key.name].ids):
        margin = 2
    close = [pair for pair in found if abs(pair[1].share - best.share) <= 0.05]
    rivals = [other for other_says, other in close if says - other_says <= margin]
    for rival in [other for other_says, other in close if other_says == says]:
        if rival.look is best.look and rival.key and rival.key is not best.key:
            best.key_doubts.append(f"or {rival.key.name}?")
    files = [
        rival.look.files[0]
        for rival in rivals
        if rival.look
        and rival.look is not best.look
        and has_texts(role, rival) >= has_texts(role, best)
    ]
    best.file_doubts += [f"or {name}?" for name in dict.fromkeys(files)]
    if says == 0:
        best.file_doubts.append(f"does it describe {role}s?")
    return check_description(role, best)


def check_description(role: str, best: Description) -> Description:
    """Return the description with doubts, or an empty one if no id matches."""
    assert best.look is not None
    assert best.key is not None
    if best.look.read_ids()[best.key.name].repeats:
        best.file_doubts.append(f"{len(best.look.files)} files have the same {role}s?")
    if best.is_measured and best.matched[0] == 0:
        none = f"{best.look.name} has none of these ids, but {best.key.shown}; another?"
        return Description(doubts=[none])
    limit = 0.5 if role == "item" else 0.05
    if best.is_measured and best.share < limit:
        matched, of = best.matched
        best.file_doubts.append(f"it has only {matched:,} of {of:,} {role}s; is it?")
    return best


def count_name_matches(role: str, ids: Column, look: Look, key: Column) -> int | None:
    """Return how many names indicate that the file describes these ids.

    None stands for a file of something else.
    """
    other = "user" if role == "item" else "item"
    foreign = tell(look.name, other) and not tell(look.name, role)
    if foreign or tell(look.name, "beside"):
        return None
    same = key.name == ids.name and not look.names_only
    return same + bool(tell(key.name, role)) + bool(tell(look.name, role))


def match_ids(
    look: Look, key: Column, ids: Column, values: pl.Series, file_ids: FileIds
) -> Description:
    """Match the ids in the beginning of the log with the ids of a file.

    If more match in lower case, or padded with zeros to the width of the other side,
    the description contains the SQL for it.
    """
    made = Description(look, key, is_measured=file_ids.is_whole)
    made.matched, made.share = count_matches(values, file_ids.ids)
    for log_sql, file_sql in (
        ("lower({})", "lower({})"),
        (pad_sql(values, file_ids.ids, ids), "{}"),
        ("{}", pad_sql(file_ids.ids, values, key)),
    ):
        if made.share >= 0.9 or not log_sql or not file_sql:
            continue
        written = apply_sql(values, log_sql)
        if written.n_unique() < values.n_unique():
            continue  # it would join different ids
        matched, share = count_matches(written, apply_sql(file_ids.ids, file_sql))
        if share >= max(0.5, made.share + 0.1):
            made.matched, made.share = matched, share
            made.log_sql, made.file_sql = log_sql, file_sql
    return made


def count_matches(values: pl.Series, ids: pl.Series) -> tuple[tuple[int, int], float]:
    """Return (matched ids, ids), and the smaller of the shares of ids and rows."""
    unique, described = values.unique(), ids.implode()
    matched = int(unique.is_in(described).sum())
    rows = int(values.is_in(described).sum()) / max(1, len(values))
    return (matched, len(unique)), min(matched / max(1, len(unique)), rows)


def pad_sql(values: pl.Series, others: pl.Series, column: Column) -> str:
    """Return SQL that pads values with zeros to the common width of the others.

    It is empty if the others have no common width or no leading zero.
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
    """Apply SQL to ids."""
    wanted = {"id": sql.format("id")}
    return evaluate(pl.DataFrame({"id": values}), wanted, "ids")[0]["id"]


def describing_columns(role: str, look: Look, key: Column) -> dict[str, list[Column]]:
    """Return the columns of a file that describe items or users, by kind."""
    told = [
        c
        for c in look.columns
        if c is not key
        and not c.time
        and not c.shown.startswith("http")
        and not tell(c.name, "outcome")
    ]
    few = [c for c in told if c.few and not (tell(c.name, "amount") and role == "item")]
    if role == "user":
        return {"attributes": few}
    texts = [
        c for c in told if not c.number and not c.flag and (c.distinct > 1 or c.list)
    ]
    numbers = [
        c
        for c in told
        if c.number
        and c not in few
        and c.distinct > 1
        and not re.search("(?i)id$", c.name)
    ]
    return {"texts": texts, "attributes": few, "numbers": numbers}


def has_texts(role: str, description: Description) -> bool:
    """Return whether the files have texts."""
    look, key = description.look, description.key
    assert look is not None
    assert key is not None
    return bool(describing_columns(role, look, key).get("texts"))


def add_description(
    draft: Draft, role: str, description: Description, every: list[str]
) -> None:
    """Add the section of the files that describe users or items, if any do."""
    look, key = description.look, description.key
    if look is None or key is None:
        return
    draft.lines.append(f"{role}s:")
    pattern = look.pattern(every, False)
    draft.add("  files", pattern, "", description.file_doubts)
    for name, value in look.keys.items():
        draft.add(f"  {name}", value)
    key_sql = description.file_sql.format(key.name)
    draft.add(f"  {role}", key_sql, key.shown, description.key_doubts)
    for kind, columns in describing_columns(role, look, key).items():
        made = {c.feature: c.value for c in columns}
        if made:
            draft.add(f"  {kind}", made)
    came = [c.name for c in look.columns if c is not key and tell(c.name, "outcome")]
    if came:
        draft.add("  # left out", came, "known before every event of the log?")


def min_matched_line(users: Description, items: Description) -> list[str]:
    """Return the line of `min_matched` if the files lack users or items.

    It is half of the measured share, as the beginning of the log may differ from the
    rest.
    """
    measured = [
        (description.share, role, description)
        for role, description in (("users", users), ("items", items))
        if description.look and description.is_measured and description.share < 0.9
    ]
    if not measured:
        return []
    share, role, description = min(measured, key=lambda each: each[0])
    assert description.look is not None
    matched, of = description.matched
    why = (
        f"{matched:,} of the first {of:,} {role} have a row in {description.look.name}"
    )
    return [line("  min_matched", math.floor(share * 50) / 100, why)]


def check_mapping(folder: str, lines: list[str], settings: list[str]) -> list[str]:
    """Return comments about the mapping from the code that reads the log.

    Args:
        folder: Folder of the log.
        lines: Lines of the mapping.
        settings: Lines with settings of jobs.prepare.
    """
    try:
        log, config = (
            parse_log(yaml.safe_load("\n".join(lines))),
            read_config(yaml.safe_load("\n".join(settings))["prepare"]),
        )
        KINDS[config.kind].check(log, config)
        found = preview(log, folder, 0.01)
    except (UserError, ValueError) as error:
        return [f"# Not right yet: {' '.join(str(error).split())}"]
    lines = [
        f"# The first rows of {each.kind}: {each.rejected.rows_read:,}, "
        f"{each.rejected.rejects:,} of them rejected."
        for each in found
    ]
    unread = list_unread(log, folder)
    return [*lines, *([f"# No key reads {name_files(unread)}."] if unread else [])]
