"""A first mapping of a folder that nobody has described: each guess with some values, and questions where in doubt.

python -m jobs.prepare --suggest FOLDER [--output FILE]
"""

from __future__ import annotations

import csv
import json
import os
import re
from contextlib import suppress
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import yaml

from models.tables import UserError, file_info, join, open_uri
from pipelines.data.log import log_of
from pipelines.data.preview import preview
from pipelines.data.read import PACKED, SUFFIXES, Files, list_files, read_frames
from pipelines.data.rows import clean_ids
from pipelines.data.times import Time, moments

ROWS = 5000  # of a file that are looked at
WORDS = {  # how the words of names begin, and with $ end
    "user": "user|uid$|u$|customer|member|visitor|account|review|client|buyer|viewer|kund|käufer|mitglied|usuario|yong",
    "item": "items?$|itemid|iid$|i$|article|artikel|product|produkt|movie|video|news$|asin|sku|track|song|book|meta$",
    "request": "request|impression|search|session|page|qid$",
    "query": "query|keyword|searchterm|suchbegriff",
    "position": "position|rank$|pos$",
    "time": "time|ts$|t$|dat(e|um|etime)?$|zeit|when|created|at$|day$|fecha|hour|clock|uhr|order$|index|step|seq",
    "late": "birth|deliver|ship|expir|valid|updat|modif|regist|return|releas|upload|geb|liefer|ablauf|nacim|naiss",
    "outcome": "rating|stars?$|score|overall|click|like|purchas|bought|buy|cart|quantit|qty|menge|anzahl|cantid|dwell|"
    "watch|play|stay|view|pv$|fav|follow|comment|forward|share|hate|hide|vote|transaction",
    "amount": "price|cost|preis|precio|prix|duration|seconds|minutes|length|weight|gewicht|dauer|width|height",
    "beside": "index|sids?$|codes$|readme|licen|hist|past|previous",
}
DAYS = ("%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y", "%m-%d-%Y", "%d-%m-%Y", "%Y/%m/%d", "%Y-%m-%d", "%d.%m.%y", "%m/%d/%y",
        "%d/%m/%y", "%d-%b-%Y", "%d %b %Y", "%d %B %Y", "%b %d, %Y", "%B %d, %Y")  # fmt: skip
CLOCKS = ("", " %H:%M", " %H:%M:%S", " %H:%M:%S.%f", " %I:%M %p", " %I:%M:%S %p")
FORMATS = [day + clock for day in DAYS for clock in CLOCKS]
FORMATS += ["%Y%m%d%H%M%S", "%a %b %d %H:%M:%S %z %Y", "%d/%b/%Y:%H:%M:%S %z"]
LISTS = ["{}", *(f"string_to_array({{}}, '{by}')" for by in " ,|;")]
LISTS += [r"string_to_array(regexp_replace({}, '[^\w,-]', '', 'g'), ',')"]  # ['a', 'b']
ZIPPED = re.compile(rf"\.({'|'.join(PACKED)})$", re.IGNORECASE)


def tell(name: str, role: str) -> int:
    """How much a name says that it is of a role; 0 for nothing."""
    words = re.findall(r"[^\W\d_]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).lower())
    ids = sum(word in ("id", "ids", "no", "nr", "key", "number", "nummer", "token") for word in words)
    hits = sum(bool(re.match(WORDS[role], word)) for word in words)
    return max(1, 9 + 2 * ids + hits - len(words)) if hits else 0


def pick(columns: list[Column], role: str) -> Any:
    """The column whose name tells most of a role."""
    return max((c for c in columns if tell(c.name, role)), key=lambda c: tell(c.name, role), default=None)


def line(key: str, value: Any, why: str = "") -> str:
    """A line of YAML with a comment; of features that have the names of their columns only these."""
    value = list(value) if isinstance(value, dict) and all(name == each for name, each in value.items()) else value
    text = yaml.safe_dump(value, default_flow_style=True, width=1 << 20, allow_unicode=True, sort_keys=False)
    return f"{key}: {text.splitlines()[0]}".ljust(46) + f"  # {why}" if why else f"{key}: {text.splitlines()[0]}"


class Column:
    """The first values of a column without nulls, and what they are like. `sql` stands for it within expressions."""

    def __init__(self, name: str, values: pl.Series) -> None:
        self.sql = '"' + name.replace('"', '""') + '"'
        with suppress(pl.exceptions.PolarsError):
            self.sql = name if pl.sql_expr(name).meta.root_names() == [name] else self.sql
        self.name = name if re.fullmatch(r"[^()'\"|]+", name) else self.sql
        self.feature = re.sub(r"\W+", "_", re.sub(r":\w+$", "", name), flags=re.ASCII).strip("_")
        self.feature = (
            self.feature if re.match("[A-Za-z]", self.feature) else f"x_{self.feature or name.encode().hex()}"
        )
        self.values = values = values.drop_nulls()
        plain = not values.dtype.is_nested() and not values.dtype.is_temporal()
        self.ids = ids = clean_ids(values).drop_nulls() if plain else pl.Series([], dtype=pl.String)
        self.distinct, self.share = ids.n_unique(), ids.n_unique() / max(len(ids), 1)
        self.comma = self.most(r"^-?\d+(,\d+)?$") and int(ids.str.contains(",").sum()) > len(ids) / 2
        self.number = self.comma or self.most(r"^[+-]?\d+(\.\d+)?([eE][+-]?\d+)?$")
        self.whole = self.most(r"^-?\d+$")
        self.flag = 0 < self.distinct <= 2 and self.most("^(0|1|(?i:true|false))$")
        self.few = self.distinct > 1 and (self.share < 0.2 or (self.distinct <= 50 and self.share <= 0.5))
        self.value = f"cast(replace({self.sql}, ',', '.') as double)" if self.comma else self.name
        some = values.head(200).unique(maintain_order=True) if plain else values
        self.shown = " | ".join(" ".join(str(value).split())[:40] for value in some.head(3).to_list())
        self.time, self.doubt = self.find_time() if len(values) else ({}, "")
        day = self.time.get("format", "%Y-%m-%d" if self.most(r"^\d{4}-\d\d-\d\d$") else "%H")
        self.day = "" if re.search("%[HI]", day) else day
        self.made, self.lists = self.as_list(LISTS)

    def most(self, pattern: str) -> bool:
        """Whether nearly all ids match a pattern."""
        return len(self.ids) > 0 and int(self.ids.str.contains(pattern).sum()) >= 0.99 * len(self.ids)

    def find_time(self) -> tuple[dict[str, str], str]:
        """The `unit` or `format` of times, {} for what are none, and what is in doubt."""
        kind, fits = self.values.dtype, dict[str, pl.Series]()
        tries = ["iso"] if kind in (pl.Date, pl.Datetime) else []
        tries += ["s", "ms", "us", "ns", "%Y%m%d"] if self.number and not self.comma else []
        tries += ["iso", *FORMATS] if kind == pl.String and self.most(r"^[\w ,:]{0,12}\d[\w.+:, /-]{5,30}$") else []
        for how in tries:
            time = Time("t", format=how) if "%" in how else Time("t", unit=how)
            with suppress(TypeError):
                found, why = moments(self.values.head(500), time, "t")
                usual = found.drop_nulls().is_between(788_918_400_000, 2_208_988_800_000).all()  # 1995 to 2040
                if why.null_count() >= 0.98 * len(why) and (usual or tell(self.name, "time") or not self.number):
                    fits[how] = found
        sure = [how for how, found in fits.items() if found.drop_nulls().is_sorted()]
        how = (sure if len(sure) == 1 else [*fits, ""])[0]
        doubt = any(not found.equals(fits[how]) for found in fits.values())
        return {"format" if "%" in how else "unit": how} if how else {}, "day or month first? " if doubt else ""

    def as_list(self, templates: list[str]) -> tuple[str, Any]:
        """As a list of ids: its column or SQL, and the lists; None for what are none."""
        kinds = [pl.String, pl.List(pl.Int64), pl.List(pl.String)]
        for each in templates if len(self.values) and not self.time and self.values.dtype in kinds else []:
            made = self.values.alias("x").to_frame().select(pl.sql_expr(each.format("x"))).to_series()
            if isinstance(made.dtype, pl.List):
                lists = made.cast(pl.List(pl.String))
                parts = lists.explode().drop_nulls().str.contains(r"^[\w:-]*\d[\w:-]*$")
                several = self.most(r"^\[.*\]$") if "regexp" in each else (lists.list.len() > 1).sum() >= len(made) / 2
                ids = (several or templates is not LISTS) and 0.95 * len(parts) <= int(parts.sum()) > 0
                if each == "{}" or (ids and not self.comma):
                    return self.name if each == "{}" else each.format(self.sql), lists
        return "", None


class Look:
    """Files of one layout by the beginning of the largest: `keys` say how to read them."""

    def __init__(self, folder: str, files: list[str]) -> None:
        self.files, self.name = files, files[0].rpartition("/")[2]
        uri = max((join(folder, file) for file in files), key=lambda uri: file_info(uri).size)
        self.keys, frame = read_beginning(uri)
        self.rows, self.columns = len(frame) * len(files), [Column(name, frame[name]) for name in frame.columns if name]
        folders = [dict(part.split("=", 1) for part in file.split("/")[:-1] if "=" in part) for file in files]
        self.columns += [Column(key, pl.Series([each.get(key) for each in folders])) for key in folders[0]]
        self.times = [c for c in self.columns if c.time]
        self.times.sort(key=lambda c: (bool(tell(c.name, "late")), bool(c.day), not tell(c.name, "time")))
        ids = [c for c in self.columns if c.distinct > 1 and not (c.time or c.comma or c.lists is not None)]
        ids = [c for c in ids if not (tell(c.name, "outcome") or tell(c.name, "amount") or c.most(r"^\d+[.:][\d:]+$"))]
        self.item = pick(ids, "item")
        self.lists = [c for c in self.columns if c.lists is not None and not tell(c.name, "outcome")]
        self.lists.sort(key=lambda c: (bool(tell(c.name, "beside")), -int(c.lists.list.len().sum())))
        self.list: Any = next(iter(self.lists if not self.item else []), None)
        ids = [c for c in ids if c is not self.item]
        self.user = pick(ids, "user") or pick(ids, "request")
        self.sure = bool(self.user) + bool(self.item or self.list)
        ids = [c for c in ids if not (c is self.user or c.flag or tell(c.name, "query") or tell(c.name, "position"))]
        ids = [c for c in ids if c.share < 0.99] or [c for c in ids if self.list]
        self.user = self.user or (ids.pop(0) if ids else None)
        self.item = self.item or (ids.pop(0) if ids and not self.list else None)
        self.rest = [c.name for c in ids if self.sure < 2 or tell(c.name, "user")][:3]

    @property
    def pattern(self) -> str:
        """A pattern of the files' names."""
        if len(self.files) == 1:
            return self.files[0]
        whole = {re.sub(r"\d+", "*", ZIPPED.sub("", file)) for file in self.files}
        last = {"*" + name.rpartition("/")[2] for name in whole}
        ends = {"*" + os.path.splitext(name)[1] for name in whole}
        return next(each for each in (whole, last, ends) if len(each) == 1).pop() + "*" * any(
            map(ZIPPED.search, self.files)
        )


def read_beginning(uri: str) -> tuple[dict[str, Any], pl.DataFrame]:
    """How a file is written, as keys of a mapping, and its first rows."""
    filesystem, path = open_uri(uri)
    if path.lower().endswith(".parquet"):
        with filesystem.open_input_file(path) as file:
            frame = pl.DataFrame(next(pq.ParquetFile(file).iter_batches(ROWS)))
            return {}, frame.cast({pl.Categorical: pl.String, pl.Binary: pl.String}, strict=False)
    for encoding in ("utf-8", "utf-16", "cp1252"):
        with suppress(*() if encoding == "cp1252" else (UserError, StopIteration)):
            files = Files(format="lines", encoding=encoding)
            lines = next(read_frames(uri, files, ["line"])).rows["line"].to_list()
            if encoding != "utf-16" or lines[0][0].isascii():
                break
    keys: dict[str, Any] = {} if encoding == "utf-8" else {"encoding": encoding}
    suffix = ZIPPED.sub("", path.lower()).rpartition(".")[2]
    kind, text = SUFFIXES.get(suffix), "\n".join(lines[:ROWS])
    if kind == "jsonl" or text.startswith("{"):
        rows: list[Any] = []
        for each in [text.lstrip("[ \n")] if text.startswith("[") else lines[:ROWS]:
            with suppress(ValueError):
                rows += [row for row in json.JSONDecoder(strict=False).raw_decode(each)[:1] if isinstance(row, dict)]
        names = list(dict.fromkeys(key for row in rows for key in row))
        if not names or (len(lines) == 1 and all(isinstance(value, list | dict) for value in rows[0].values())):
            kind, names = "keyed", ["key", "value"]
        keys |= {} if kind == "jsonl" else {"format": kind or "jsonl"}
        return keys, next(read_frames(uri, Files(**keys), names)).rows.select(names).head(ROWS)
    bare = re.sub(r'(?<![^\t;,|:\n])"(?:[^"\\]|\\.|"")*"(?![^\t;,|:\n\r])', "q", text).split("\n")[:200]
    even = {by: sum(row.count(by) == bare[0].count(by) > 0 for row in bare) for by in ("::", "\t", ";", "|", ",", " ")}
    by, usual = max(even, key=lambda by: even[by]), "\t" if suffix == "tsv" else ","
    if kind is None and (by == " " or even[by] < 0.9 * len(bare)):
        if not all(re.fullmatch(r"[\w-]+( [\w-]*\d[\w-]*)+", row) for row in bare):
            raise UserError(f"{uri} has no columns")
        if even[" "] < len(bare) or len({row.split(" ")[0] for row in bare}) == len(bare):
            return {**keys, "format": "lines"}, pl.DataFrame({"line": lines[:ROWS]})
    by = by if even[by] and (by != " " or kind is None) else usual
    keys |= ({} if kind else {"format": "csv"}) | ({"delimiter": by} if by != usual else {})
    if '"' in text and not re.search(rf'(?m)(^|{re.escape(by)})"', text):
        keys["quote"] = ""
    elif '\\"' in text and '""' not in text.replace('\\""', ""):
        keys["escape"] = "\\"
    how: Any = {"quoting": csv.QUOTE_NONE} if "quote" in keys else {"escapechar": keys.get("escape")}
    one = by if len(by) == 1 else "\x1f"
    cells = list(csv.reader((each.replace(by, one) for each in text.split("\n")), delimiter=one, **how))
    rows = [row for row in cells if len(row) == len(cells[0])]
    shapes = [[re.sub(r"\d+", "0", cell) for cell in row] for row in rows[:200]]
    for place, cell in enumerate(shapes[0]):
        if "0" in cell and sum(row[place] == cell for row in shapes) > max(1, len(shapes) / 2):
            keys["header"] = [f"c{number}" for number in range(1, len(cells[0]) + 1)]
    names = keys.get("header", cells[0])
    rows = rows if "header" in keys else rows[1:]
    columns = {name: [row[names.index(name)] or None for row in rows] for name in names}
    return keys, pl.DataFrame(columns, schema=dict.fromkeys(columns, pl.String))


def describe(role: str, ids: Column, looks: list[Look], taken: list[str]) -> list[str]:
    """The section of the file that describes these items or users best; nothing where none does."""
    found: list[tuple[float, int, Look, Column]] = []
    mine = (ids.ids if ids.lists is None else ids.lists.explode()).unique().implode()
    for look in looks:
        foreign = tell(look.name, "user" if role == "item" else "item") and not tell(look.name, role)
        for c in [] if foreign or tell(look.name, "beside") else look.columns:
            same = c.name == ids.name and "header" not in look.keys
            says = same + bool(tell(c.name, role)) + bool(tell(look.name, role))
            shared = int(c.ids.is_in(mine).sum()) / max(1, min(len(mine[0]), c.distinct))
            if c.share > 0.9 and c.distinct > 1 and not c.time and (says > 1 or shared > 0.1):
                found.append((says + shared, len(found), look, c))
    if not found:
        return []
    look, key = max(found)[2:]
    told = [c for c in look.columns if c is not key and not c.time and not c.shown.startswith("http")]
    few = [c for c in told if c.few and not (tell(c.name, "amount") and role == "item")]
    texts = [c for c in told if not c.number and not c.flag and (c.distinct > 1 or c.lists is not None)]
    numbers = [c for c in told if c.number and c not in few and c.distinct > 1 and not re.search("(?i)id$", c.name)]
    kinds = {"texts": texts, "attributes": few, "numbers": numbers} if role == "item" else {"attributes": few}
    lines = [line(f"  {name}", value) for name, value in {"files": look.pattern, **look.keys}.items()]
    lines = [f"{role}s:", *lines, line(f"  {role}", key.name, key.shown)]
    for kind, columns in kinds.items():
        made = {c.feature if c.feature not in taken else f"user_{c.feature}": c.value for c in columns}
        lines += [line(f"  {kind}", made)] if made else []
    return lines if any(kinds.values()) else []


def suggest(folder: str) -> str:
    """The text of a mapping for the files of a folder; UserError where none of them can be a log."""
    groups: dict[str, list[str]] = {}
    for file in list_files(folder, "*", required=False, what="file"):
        groups.setdefault(re.sub(r"\d+", "0", ZIPPED.sub("", file.rpartition("/")[2])), []).append(file)
    looks, refused = list[Look](), list[str]()
    for files in groups.values():
        try:
            looks.append(Look(folder, files))
        except (UserError, StopIteration, OSError, ValueError, csv.Error) as error:
            refused.append(f"{files[0]}: {' '.join(str(error).split())[:200] or 'it has no rows'}")
    logs = [look for look in looks if (look.user and (look.item or look.list)) or look.keys.get("format") == "lines"]
    if not logs:
        refused += [
            f"{each.name} has no users and items, but {', '.join(c.name for c in each.columns)}" for each in looks
        ]
        raise UserError(
            f"{folder} holds no file that can be read as a log: {'; '.join(refused)[:600] or 'it is empty'}"
        )
    rank = [
        (not tell(a.name, "beside"), a.sure > 1, bool(a.times or a.list), a.sure, a.rows, -n)
        for n, a in enumerate(logs)
    ]
    log = logs[-max(rank)[-1]]
    names = {c.name for c in log.columns}
    same = [a for a in looks if {c.name for c in a.columns} == names and a.keys == log.keys and log.times]
    log.files = sorted({file for look in [log, *same] for file in look.files})
    looks = [look for look in looks if look is not log and look not in same]
    asked = {"header": "the file has none: rename these, here and below", "encoding": "is it this one?"}
    lines = [line("files", log.pattern, f"{len(log.files):,} files" if len(log.files) > 1 else "")]
    lines += [line(key, value, asked.get(key, "")) for key, value in log.keys.items()]
    if log.keys.get("format") == "lines":
        lines.append(line("user", "split_part(line, ' ', 1)", log.columns[0].shown))
        rest = r"string_to_array(regexp_replace(line, '^\S+\s*', ''), ' ')"
        lines.append(line("sequence", rest, "all items of a user, oldest first?"))
        return tried(folder, lines, {"core": 5, "split": {"kind": "leave_last_out"}})
    user, item, shown, time = log.user, log.item, log.list, next(iter(log.times), None)
    assert user
    lines.append(line("user", user.name, user.shown + (f"; or user: {', '.join(log.rest)}?" if log.rest else "")))
    left = [c for c in log.columns if c not in (user, item, shown, *log.times)]
    labels, features = dict[str, Any](), dict[str, dict[str, str]]({"numbers": {}, "categories": {}})
    order = pick([c for c in left if c.whole and not tell(c.name, "outcome")], "time")
    every = [c for c in log.columns if c.lists is not None]
    sequence = every[0] if len(every) == 1 and user.share > 0.9 and not time and not order else None
    glued = bool(shown and shown.lists.explode().drop_nulls().str.contains(r"^.+[-:_][01]$").all())
    if sequence:
        lines.append(line("sequence", sequence.made, sequence.shown))
        lines += [line("item", item.name, f"after the list: {item.shown}")] if item else []
        left = []
    elif shown:
        explode, sizes = {"shown": shown.made}, shown.lists.list.len()
        labels |= {"click": "right(shown, 1)"} if glued else {}
        ids = shown.lists.explode().drop_nulls()
        shown.lists = pl.Series([[part[: -2 if glued else None] for part in each] for each in shown.lists])
        for c in list(left):
            made, lists = c.as_list(LISTS if c in every else [a for a in LISTS if a.format(shown.sql) == shown.made])
            if lists is None or not (c in every or tell(c.name, "outcome")):
                continue
            inside = lists.explode().drop_nulls().is_in(ids.implode()).mean() > 0.9
            alike = len(lists) == len(sizes) and (lists.list.len() == sizes).mean() > 0.8
            if inside and (tell(c.name, "outcome") or not alike):
                labels[c.feature] = f"coalesce(array_contains({made}, shown), false)"
            elif alike:
                explode[c.feature], inner = made, Column(c.feature, c.values.explode())
                time = time or (inner if inner.time else None)
            left.remove(c)
        lines.append(line("explode", explode, f"each of a list is an event: {shown.shown}"))
        lines.append(line("item", "left(shown, length(shown) - 2)" if glued else "shown"))
    else:
        lines.append(line("item", item.name, item.shown))
    clock = next((c for c in left if c.most(r"^\d\d?:\d\d(:\d\d)?$")), None)
    value, why = {"unit": "order"}, "no column looks like times: the order of the rows"
    if time:
        others = "".join(f"or {c.name}? " for c in log.times if c is not time)
        value, why = {"column": time.name, **time.time}, time.doubt + others + time.shown
    if time and time.day and clock:
        seconds = " %H:%M:%S" if clock.most(r"^\d+:\d+:") else " %H:%M"
        value = {"column": f"{time.sql} || ' ' || {clock.sql}", "format": time.day + seconds}
    elif time and time.day and order and 86_400 < order.ids.cast(pl.Int64).max() < 86_400_000:
        day = f"extract(epoch from strptime({time.sql}, '{time.day}'))"
        value = {"column": f"{day} * 1000 + cast({order.sql} as bigint)", "unit": "ms"}
        why = f"is {order.name} ms since midnight? {order.shown}"
    elif order and not time:
        value, why = {"column": order.name, "unit": "order"}, f"an order without clock times? {order.shown}"
    lines += [] if sequence else [line("time", value, why)]
    left = [c for c in left if c not in (order, clock) and (not tell(c.name, "time") or tell(c.name, "outcome"))]
    for role in ("request", "query", "position"):
        if (c := pick(left, role)) and c.distinct > 1:
            lines.append(line(role, c.name, c.shown))
            left.remove(c)
    if glued and (past := next((c for c in log.lists if c is not shown), None)):
        why = f"earlier behaviours; give a time before the log: {past.shown}"
        lines.append(line("history", {"column": past.made, "at": "2000-01-01", "labels": ["click"]}, why))
    for c in left:
        code = c.few and not tell(c.name, "amount")
        actions = c.ids.unique(maintain_order=True).to_list() if not c.number and c.distinct < 12 else []
        if c.flag and not tell(c.name, "time"):
            labels[c.feature] = c.name
        elif c.number and (tell(c.name, "outcome") or ("header" in log.keys and c.distinct < 12)):
            labels[c.feature] = {"column": c.value, "type": "float32"}
        elif actions and all(tell(each, "outcome") for each in actions):
            labels |= {re.sub(r"\W", "_", each): f"{c.sql} = '{each}'" for each in actions}
        elif c.number and not code and not re.search("(?i)id$", c.name) and (c.share < 0.99 or not c.whole):
            features["numbers"][c.feature] = c.value
        elif c.few:
            features["categories"][c.feature] = c.name
    lines += ["labels:  # what a user did, never an input of its own event"] if labels else []
    lines += [line(f"  {name}", value) for name, value in labels.items()]
    lines += [line(kind, made, "known before? else labels") for kind, made in features.items() if made]
    lines += describe("user", user, looks, list(features["categories"]))
    listed: Any = shown or item or sequence
    lines += describe("item", listed, looks, [])
    acts = [name for name, value in labels.items() if isinstance(value, str)]
    wanted = ("click", "purchas|buy|bought|order", "like")
    behaviour = next((name for word in wanted for name in acts if re.search(word, name)), None)
    text = "\n".join(lines)
    search = behaviour and "\nquery:" in text and ("\nexplode:" in text or "\nposition:" in text)
    prepare: dict[str, Any] = {"kind": "search", "core": 0} if search else {"core": 5}
    prepare |= {"behaviour": behaviour} if behaviour else {}
    prepare |= {"ties": "log_order"} if "explode:" in text and not time and not order else {}
    return tried(folder, lines, {**prepare, "split": {"kind": "temporal" if time else "leave_last_out"}})


def tried(folder: str, lines: list[str], prepare: dict[str, Any]) -> str:
    """The text, which the code that reads all of the log has tried."""
    try:
        for seen in preview(log_of(yaml.safe_load("\n".join(lines))), folder, 0.01):
            rejects = sum(seen.rejected.reasons.values())
            lines.append(f"# The first rows of {seen.kind}: {seen.rejected.rows_read:,}, {rejects:,} of them rejected.")
    except (UserError, ValueError) as error:
        lines.insert(0, f"# Not right yet: {' '.join(str(error).split())}")
    return "\n".join([*lines, "prepare:", *(line(f"  {key}", value) for key, value in prepare.items())]) + "\n"
