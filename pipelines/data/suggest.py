"""A first mapping of a folder that nobody has described: each guess with some values, and questions where in doubt.

python -m jobs.prepare --suggest FOLDER [--kind search] [--output FILE]
"""

from __future__ import annotations

import csv
import json
import re
from contextlib import suppress
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import yaml

from models.tables import UserError, file_info, join, open_uri
from pipelines.data.kinds import KINDS
from pipelines.data.log import log_of
from pipelines.data.preview import preview
from pipelines.data.read import PACKED, SUFFIXES, Files, list_files, read_frames
from pipelines.data.rows import clean_ids
from pipelines.data.settings import read_config
from pipelines.data.times import Time, moments

ROWS = 5000  # of a file that are looked at
WORDS = {  # how the words of names begin, and with $ end
    "user": "user|uid$|u$|customer|member|visitor|account|review|client|buyer|viewer|kund|käufer|mitglied|usuario|yong",
    "item": "items?$|itemid|iid$|i$|article|artikel|product|produkt|movie|video|news$|asin|sku|track|song|book|meta$",
    "request": "request|impression|search|session|page|qid$",
    "query": "query|keyword|search(term|string|phrase|text)|suchbegriff",
    "position": "position|rank$|pos$",
    "time": "time|ts$|t$|dat(e|um|etime)?$|zeit|when|created|at$|day$|fecha|hour|clock|uhr|order$|index|step|seq",
    "late": "birth|deliver|ship|expir|valid|updat|modif|regist|return|releas|upload|geb|liefer|ablauf|nacim|naiss",
    "outcome": "rating|stars?$|score|overall|click|like|purchas|bought|buy|cart|quantit|qty|menge|anzahl|cantid|dwell|"
    "watch|play|stay|view|pv$|fav|follow|comment|forward|share|hate|hide|vote|transaction|revenue|sales|spen[dt]|paid|"
    "gmv|profit|conver|refund|skip|complet|finish|reward|umsatz",
    "amount": "price|cost|preis|precio|prix|duration|seconds|minutes|length|weight|gewicht|dauer|width|height",
    "beside": "index|sids?$|codes$|readme|licen|hist|past|previous",
}
DAYS = (
    "%d.%m.%Y",
    "%m/%d/%Y",
    "%d/%m/%Y",
    "%m-%d-%Y",
    "%d-%m-%Y",
    "%Y/%m/%d",
    "%Y-%m-%d",
    "%d.%m.%y",
    "%m/%d/%y",
    "%d/%m/%y",
    "%d-%b-%Y",
    "%d %b %Y",
    "%d %B %Y",
    "%b %d, %Y",
    "%B %d, %Y",
)
CLOCKS = ("", " %H:%M", " %H:%M:%S", " %H:%M:%S.%f", " %I:%M %p", " %I:%M:%S %p")
FORMATS = [day + clock for day in DAYS for clock in CLOCKS]
ZIPPED = re.compile(rf"\.({'|'.join(PACKED)})$", re.IGNORECASE)


def tell(name: str, role: str) -> int:
    """How much a name says that it is of a role; 0 for nothing."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).lower()
    words = re.findall(
        r"[^\W\d_]+", re.sub(r"query[\W_]?id", "qid id", name)
    )  # of a request, not its text
    ids = sum(
        word in ("id", "ids", "no", "nr", "key", "number", "nummer", "token")
        for word in words
    )
    hits = sum(bool(re.match(WORDS[role], word)) for word in words)
    return max(1, 9 + 2 * ids + hits - len(words)) if hits else 0


def pick(columns: list[Column], role: str) -> Any:
    """The column whose name tells most of a role, of those without gaps if there are any."""
    return max(
        (c for c in columns if tell(c.name, role)),
        key=lambda c: (c.full, tell(c.name, role)),
        default=None,
    )


def line(key: str, value: Any, why: str = "") -> str:
    """A line of YAML with a comment; of features that have the names of their columns only these."""
    value = (
        list(value)
        if isinstance(value, dict) and all(name == each for name, each in value.items())
        else value
    )
    text = yaml.safe_dump(
        value,
        default_flow_style=True,
        width=1 << 20,
        allow_unicode=True,
        sort_keys=False,
    )
    return (
        f"{key}: {text.splitlines()[0]}".ljust(46) + f"  # {why}"
        if why
        else f"{key}: {text.splitlines()[0]}"
    )


class Column:
    """The first values of a column without nulls, and what they are like. `sql` stands for it within expressions."""

    def __init__(self, name: str, values: pl.Series) -> None:
        self.sql = '"' + name.replace('"', '""') + '"'
        with suppress(pl.exceptions.PolarsError):
            self.sql = (
                name if pl.sql_expr(name).meta.root_names() == [name] else self.sql
            )
        self.name = name if re.fullmatch(r"[^()'\"|]+", name) else self.sql
        plain = re.sub(r"\W+", "_", re.sub(r":\w+$", "", name), flags=re.ASCII).strip(
            "_"
        )
        self.feature = (
            plain
            if re.match("[A-Za-z]", plain)
            else f"x_{plain or name.encode().hex()}"
        )
        rows, values = len(values), values.drop_nulls()
        self.values = values
        flat = not values.dtype.is_nested() and not values.dtype.is_temporal()
        self.ids = ids = (
            clean_ids(values).drop_nulls() if flat else pl.Series([], dtype=pl.String)
        )
        self.full = (
            len(ids) >= 0.99 * rows
        )  # a row without a user or an item is rejected
        self.distinct, self.share = ids.n_unique(), ids.n_unique() / max(len(ids), 1)
        self.comma = (
            self.most(r"^-?\d+(,\d+)?$")
            and int(ids.str.contains(",").sum()) > len(ids) / 2
        )
        self.number = self.comma or self.most(r"^[+-]?\d+(\.\d+)?([eE][+-]?\d+)?$")
        self.whole = self.most(r"^-?\d+$")
        self.flag = 0 < self.distinct <= 2 and self.most("^(0|1|(?i:true|false))$")
        self.few = self.distinct > 1 and (
            self.share < 0.2 or (self.distinct <= 50 and self.share <= 0.5)
        )
        self.value = (
            f"cast(replace({self.sql}, ',', '.') as double)"
            if self.comma
            else self.name
        )
        some = values.head(200).unique(maintain_order=True) if flat else values
        self.shown = " | ".join(
            " ".join(str(value).split())[:40] for value in some.head(3).to_list()
        )
        self.time, self.doubt = self.find_time() if len(values) else ({}, "")
        self.day = self.time.get(
            "format", "%Y-%m-%d" if self.most(r"^\d{4}-\d\d-\d\d$") else "%H"
        )
        self.list: str
        self.lists: Any
        self.list, self.lists = (
            self.find_list()
            if len(values) and not self.time and not self.comma
            else ("", None)
        )

    def most(self, pattern: str) -> bool:
        """Whether nearly all ids match a pattern."""
        return len(self.ids) > 0 and int(
            self.ids.str.contains(pattern).sum()
        ) >= 0.99 * len(self.ids)

    def find_time(self) -> tuple[dict[str, str], str]:
        """The `unit` or `format` of times, {} for what are none, and what is in doubt."""
        kind, values, fits = (
            self.values.dtype,
            self.values.head(500),
            dict[str, pl.Series](),
        )
        tries = ["iso"] if kind in (pl.Date, pl.Datetime) else []
        tries += (
            ["s", "ms", "us", "ns", "%Y%m%d"] if self.number and not self.comma else []
        )
        tries += (
            ["iso", *FORMATS]
            if kind == pl.String and self.most(r"^[\w ,:]{0,12}\d[\w.+:, /-]{5,30}$")
            else []
        )
        for how in tries:
            with suppress(TypeError):
                found, _ = moments(
                    values,
                    Time("t", format=how) if "%" in how else Time("t", unit=how),
                    "t",
                )
                usual = found.drop_nulls().is_between(
                    788_918_400_000, 2_208_988_800_000
                )  # 1995 to 2040
                if found.null_count() <= 0.02 * len(found) and (
                    usual.all() or not self.number
                ):
                    fits[how] = found
        if not fits:
            return {}, ""
        how, first = next(iter(fits.items()))
        doubt = (
            ""
            if all(found.equals(first) for found in fits.values())
            else "day or month first? "
        )
        return {"format" if "%" in how else "unit": how}, doubt

    def find_list(self) -> tuple[str, Any]:
        """The column or SQL of a list of ids, and the lists; None for what are none."""
        inner = (
            self.values.dtype.inner if isinstance(self.values.dtype, pl.List) else None
        )
        if inner and (inner.is_integer() or inner == pl.String):
            return self.name, self.values.cast(pl.List(pl.String))
        for by in " ,|;" if self.values.dtype == pl.String else "":
            lists = self.values.str.split(by)
            ids = lists.explode().str.contains(r"^[\w:-]*\d[\w:-]*$")
            if (lists.list.len() > 1).sum() >= len(
                lists
            ) / 2 and ids.sum() >= 0.95 * len(ids):
                return f"string_to_array({self.sql}, '{by}')", lists
        return "", None


class Look:
    """Files of one layout by the beginning of the largest: `keys` say how to read them."""

    def __init__(self, folder: str, files: list[str]) -> None:
        self.files, self.name = files, files[0].rpartition("/")[2]
        self.keys, frame = beginning(
            max(
                (join(folder, file) for file in files),
                key=lambda uri: file_info(uri).size,
            )
        )
        self.rows, self.columns = (
            len(frame) * len(files),
            [Column(name, frame[name]) for name in frame.columns],
        )
        self.times = [c for c in self.columns if c.time]
        self.times.sort(
            key=lambda c: (
                bool(tell(c.name, "late")),
                "%H" not in c.day,
                not tell(c.name, "time"),
            )
        )
        ids = [
            c
            for c in self.columns
            if c.distinct > 1 and not (c.time or c.comma or c.list)
        ]
        ids = [
            c
            for c in ids
            if not (
                tell(c.name, "outcome")
                or tell(c.name, "amount")
                or c.most(r"^\d+[.:][\d:]+$")
            )
        ]
        self.item, lists = (
            pick(ids, "item"),
            [c for c in self.columns if c.list and not tell(c.name, "outcome")],
        )
        lists.sort(key=lambda c: bool(tell(c.name, "beside")))
        self.list = lists[0] if lists and not (self.item and self.item.full) else None
        self.item = None if self.list else self.item
        ids = [c for c in ids if c is not self.item]
        self.user = pick(ids, "user") or pick(ids, "request")
        self.sure = bool(self.user) + bool(self.item or self.list)
        ids = [
            c
            for c in ids
            if not (
                c is self.user
                or c.flag
                or tell(c.name, "query")
                or tell(c.name, "position")
            )
        ]
        ids = [c for c in ids if c.share < 0.99 or self.list]
        self.user = self.user or (ids.pop(0) if ids else None)
        self.item = self.item or (ids.pop(0) if ids and not self.list else None)
        self.others = [c.name for c in ids if self.sure < 2 or tell(c.name, "user")][:3]

    @property
    def pattern(self) -> str:
        """A pattern of the files' names."""
        ends, folder = (
            "*" * any(map(ZIPPED.search, self.files)),
            "*/" if "/" in self.files[0] else "",
        )
        name = folder + re.sub(r"\d+", "*", ZIPPED.sub("", self.name)) + ends
        return name if len(self.files) > 1 else self.files[0]


def beginning(uri: str) -> tuple[dict[str, Any], pl.DataFrame]:
    """How a file is written, as keys of a mapping, and its first rows."""
    filesystem, path = open_uri(uri)
    if path.lower().endswith(".parquet"):
        with filesystem.open_input_file(path) as file:
            names = pq.read_schema(file).names
        return {}, next(read_frames(uri, Files(), names)).rows.select(names).head(ROWS)
    for encoding in ("utf-8", "utf-16", "cp1252"):
        with suppress(*() if encoding == "cp1252" else (UserError, StopIteration)):
            frame = next(
                read_frames(uri, Files(format="lines", encoding=encoding), ["line"])
            ).rows
            if encoding != "utf-16" or frame["line"][0][0].isascii():
                break
    keys: dict[str, Any] = {} if encoding == "utf-8" else {"encoding": encoding}
    lines, suffix = (
        frame["line"].head(ROWS).to_list(),
        ZIPPED.sub("", path.lower()).rpartition(".")[2],
    )
    kind = "jsonl" if lines[0].startswith("{") else SUFFIXES.get(suffix)
    more, names = (json_dialect if kind == "jsonl" else csv_dialect)(lines, suffix)
    keys |= more
    names = [
        name for name in dict.fromkeys(names) if name
    ]  # pandas writes an index without a name
    return keys, next(read_frames(uri, Files(**keys), names)).rows.select(names).head(
        ROWS
    )


def json_dialect(lines: list[str], suffix: str) -> tuple[dict[str, Any], list[str]]:
    """Keys and columns of JSON."""
    rows: list[Any] = []
    for each in (
        ["\n".join(lines).lstrip("[ \n")]
        if lines[0].lstrip().startswith("[")
        else lines
    ):
        with suppress(ValueError):
            rows += [
                row
                for row in json.JSONDecoder(strict=False).raw_decode(each)[:1]
                if isinstance(row, dict)
            ]
    names = list(dict.fromkeys(key for row in rows for key in row))
    if not names or (
        len(lines) == 1
        and all(isinstance(value, list | dict) for value in rows[0].values())
    ):
        return {"format": "keyed"}, ["key", "value"]
    return {} if SUFFIXES.get(suffix) == "jsonl" else {"format": "jsonl"}, names


def csv_dialect(lines: list[str], suffix: str) -> tuple[dict[str, Any], list[str]]:
    """Keys and columns of CSV; UserError for what has no columns."""
    kind, text, usual = (
        SUFFIXES.get(suffix),
        "\n".join(lines),
        "\t" if suffix == "tsv" else ",",
    )
    bare = re.sub(
        r'(?<![^\t;,|:\n])"(?:[^"\\]|\\.|"")*"(?![^\t;,|:\n\r])', "q", text
    ).split("\n")[:200]
    even = {
        by: sum(row.count(by) == bare[0].count(by) > 0 for row in bare)
        for by in ("::", "\t", ";", "|", ",", " ")
    }
    by = max(even, key=lambda by: even[by])
    if kind is None and even[by] < (1 if by == " " else 0.9) * len(bare):
        raise UserError(
            "it has no columns; of lines such as `u1 i3 i7` set 'format: lines' and 'sequence'"
        )
    by = by if even[by] and (by != " " or kind is None) else usual
    keys: dict[str, Any] = ({} if kind else {"format": "csv"}) | (
        {"delimiter": by} if by != usual else {}
    )
    if '"' in text and not re.search(rf'(?m)(^|{re.escape(by)})"', text):
        keys["quote"] = ""
    elif '\\"' in text and '""' not in text.replace('\\""', ""):
        keys["escape"] = "\\"
    how: Any = (
        {"quoting": csv.QUOTE_NONE}
        if "quote" in keys
        else {"escapechar": keys.get("escape")}
    )
    one = by if len(by) == 1 else "\x1f"
    rows = list(
        csv.reader(
            (each.replace(by, one) for each in lines[:200]), delimiter=one, **how
        )
    )
    shapes = [
        [re.sub(r"\d+", "0", cell) for cell in row]
        for row in rows
        if len(row) == len(rows[0])
    ]
    for place, cell in enumerate(
        shapes[0]
    ):  # a first line like the others is no header
        if "0" in cell and sum(row[place] == cell for row in shapes) > max(
            1, len(shapes) / 2
        ):
            keys["header"] = [f"c{number}" for number in range(1, len(rows[0]) + 1)]
    return keys, keys.get("header", rows[0])


def suggest(folder: str, kind: str | None = None) -> str:
    """The text of a mapping for the files of a folder, by default of searches where there are queries with results
    shown, else of behaviours; UserError where none of them can be a log."""
    log, looks = find_log(folder)
    asked = {
        "header": "the file has none: rename these, here and below",
        "encoding": "is it this one?",
    }
    names = {c.name for c in log.columns}
    alike = [look.pattern for look in looks if {c.name for c in look.columns} == names]
    why = [f"{len(log.files):,} files"] * (len(log.files) > 1) + [
        f"and {each} too?" for each in alike
    ]
    lines = [line("files", log.pattern, "; ".join(why))]
    lines += [line(key, value, asked.get(key, "")) for key, value in log.keys.items()]
    user, item, shown = log.user, log.item, log.list
    doubts = [f"or user: {', '.join(log.others)}?"] * bool(log.others)
    doubts += [f"users of only {user.distinct} values?"] * (
        user.distinct < 5 and log.rows > 100
    )
    doubts += ["rows without a user are rejected; another column?"] * (not user.full)
    lines.append(line("user", user.name, "; ".join([user.shown, *doubts])))
    left = [c for c in log.columns if c not in (user, item, shown, *log.times)]
    clock = next((c for c in left if c.most(r"^\d\d?:\d\d(:\d\d)?$")), None)
    listed: Any = next((c for c in log.columns if c.list), None)
    labels: dict[str, Any] = {}
    asks: dict[str, Any] = {}
    features: dict[str, dict[str, str]] = {"numbers": {}, "categories": {}}
    shows = shown and (kind == "search" or (kind is None and pick(left, "query")))
    if listed and user.share > 0.9 and not log.times and not shows:
        lines.append(line("sequence", listed.list, listed.shown))
        lines += (
            [line("item", item.name, f"after the list: {item.shown}")] if item else []
        )
    else:
        lines += (
            [line("explode", {"shown": shown.list}, f"each is an event: {shown.shown}")]
            if shown
            else []
        )
        lines.append(
            line("item", "shown") if shown else line("item", item.name, item.shown)
        )
        lines.append(time_line(log, clock))
        left = [
            c
            for c in left
            if c is not clock and (not tell(c.name, "time") or tell(c.name, "outcome"))
        ]
        for role in ("request", "query", "position"):
            if (c := pick([c for c in left if not c.list], role)) and c.distinct > 1:
                lines.append(line(role, c.name, c.shown))
                left.remove(c)
        for c in left:
            sort_in(c, bool(shown), "header" in log.keys, labels, asks, features)
    head = "labels:  # what a user did, never an input of its own event"
    lines += [head if labels else f"# {head}"] if labels or asks else []
    lines += [line(f"  {name}", value) for name, value in labels.items()]
    lines += [
        line(f"  # {name}", value, "did the user do this? then take away the '#'")
        for name, value in asks.items()
    ]
    ask = "known before the event? then take away the '#'; what came of it is a label"
    lines += [line(f"# {key}", made, ask) for key, made in features.items() if made]
    lines += describe("user", user, looks)
    listed = item or shown or listed
    lines += describe("item", listed, looks)
    made = [
        "prepare:",
        *settings(kind, [line.split(":")[0] for line in lines], labels, log),
    ]
    return "\n".join([*lines, *tried(folder, lines, made), *made]) + "\n"


def settings(
    kind: str | None, keys: list[str], labels: dict[str, Any], log: Look
) -> list[str]:
    """Lines of settings of jobs.prepare. keys: those that the mapping has"""
    acts = [name for name, value in labels.items() if isinstance(value, str)]
    wanted = ("click", "purchas|buy|bought|order", "like")
    behaviour = next(
        (name for word in wanted for name in acts if re.search(word, name)), None
    )
    if (
        kind is None
        and behaviour
        and "query" in keys
        and ("explode" in keys or "position" in keys)
    ):
        kind = "search"
    feed = (
        "each event shown, with what was done? then --suggest --kind actions"
        if len(acts) > 1 and log.times
        else ""
    )
    lines = (
        [line("  kind", kind or "retrieval", "" if kind else feed)]
        if kind or feed
        else []
    )
    lines += ["  core: 0"] if kind in ("search", "actions") else ["  core: 5"]
    behaviour = behaviour or (acts[0] if acts and kind == "search" else None)
    lines += [line("  behaviour", behaviour)] if behaviour and kind != "actions" else []
    lines.append(
        line("  split", {"kind": "temporal" if log.times else "leave_last_out"})
    )
    return [*lines, *graded(labels, log)] if kind == "actions" else lines


def graded(labels: dict[str, Any], log: Look) -> list[str]:
    """The section that makes tasks and inputs of a feed's labels that are numbers."""
    tasks, inputs = list[str](), list[str]()
    for name, value in labels.items():
        if isinstance(value, str):
            continue
        column = next(c for c in log.columns if c.value == value["column"])
        numbers = (
            column.ids.str.replace(",", ".").cast(pl.Float64, strict=False).drop_nulls()
        )
        low, middle, high = (
            float(f"{numbers.quantile(share):g}") for share in (0, 0.5, 0.99)
        )
        limit = {"at_least": middle} if middle > low else {"above": low}
        tasks.append(
            line(
                f"      high_{name}",
                {"label": name, **limit},
                "from where on is it one? or no task",
            )
        )
        if high > low:
            inputs.append(line(f"      {name}", {"label": name, "range": [low, high]}))
    lines = ["    tasks:", *tasks] if tasks else []
    lines += ["    inputs:", *inputs] if inputs else []
    return ["  actions:", *lines] if lines else []


def find_log(folder: str) -> tuple[Look, list[Look]]:
    """The files that are most like a log, and the others; UserError where none are."""
    groups: dict[str, list[str]] = {}
    for file in list_files(folder, "*", required=False, what="file"):
        groups.setdefault(
            re.sub(r"\d+", "0", ZIPPED.sub("", file.rpartition("/")[2])), []
        ).append(file)
    looks, refused = list[Look](), list[str]()
    for files in groups.values():
        try:
            looks.append(Look(folder, files))
        except (UserError, StopIteration, OSError, ValueError, csv.Error) as error:
            refused.append(
                f"{files[0]}: {' '.join(str(error).split())[:200] or 'it has no rows'}"
            )
    logs = [look for look in looks if look.user and (look.item or look.list)]
    refused += [
        f"{each.name} has no users and items, but {', '.join(c.name for c in each.columns)}"
        for each in looks
    ]
    if not logs:
        why = "; ".join(refused)[:600] or "it is empty"
        raise UserError(f"{folder} holds no file that can be read as a log: {why}")
    log = max(
        logs,
        key=lambda a: (
            not tell(a.name, "beside"),
            a.sure,
            bool(a.times or a.list),
            a.rows,
        ),
    )
    return log, [look for look in looks if look is not log]


def time_line(log: Look, clock: Any) -> str:
    """When events happened: a column of times, a day beside a time of day, or the order of the rows."""
    time = next(iter(log.times), None)
    if time and clock and "%H" not in time.day and "%I" not in time.day:
        seconds = " %H:%M:%S" if clock.most(r"^\d+:\d+:") else " %H:%M"
        return line(
            "time",
            {
                "column": f"{time.sql} || ' ' || {clock.sql}",
                "format": time.day + seconds,
            },
            time.doubt,
        )
    if time:
        others = "".join(f"or {c.name}? " for c in log.times if c is not time)
        return line(
            "time", {"column": time.name, **time.time}, time.doubt + others + time.shown
        )
    return line(
        "time",
        {"unit": "order"},
        "no column looks like times: the order of the rows, or of which column?",
    )


def sort_in(
    c: Column,
    exploded: bool,
    bare: bool,
    labels: dict[str, Any],
    asks: dict[str, Any],
    features: dict[str, dict[str, str]],
) -> None:
    """Puts a column among the labels, what may be a label or what may be a feature, or leaves it out. bare: names say
    nothing."""
    code = c.few and not tell(c.name, "amount")
    actions = (
        c.ids.unique(maintain_order=True).to_list()
        if not c.number and c.distinct < 12
        else []
    )
    if exploded and c.list and tell(c.name, "outcome"):
        labels[c.feature] = f"coalesce(array_contains({c.list}, shown), false)"
    elif exploded and tell(c.name, "outcome") and not c.number:  # one item, or none
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


def describe(role: str, ids: Column, looks: list[Look]) -> list[str]:
    """The section of the file that describes these items or users best; nothing where none does."""
    found: list[tuple[float, int, Look, Column]] = []
    mine = (ids.ids if ids.lists is None else ids.lists.explode()).unique().implode()
    for look in looks:
        foreign = tell(look.name, "user" if role == "item" else "item") and not tell(
            look.name, role
        )
        for c in [] if foreign or tell(look.name, "beside") else look.columns:
            same = c.name == ids.name and "header" not in look.keys
            says = same + bool(tell(c.name, role)) + bool(tell(look.name, role))
            shared = int(c.ids.is_in(mine).sum()) / max(
                1, min(len(mine[0]), c.distinct)
            )
            if (
                c.share > 0.9
                and c.distinct > 1
                and not c.time
                and (says > 1 or shared > 0.1)
            ):
                found.append((says + shared, len(found), look, c))
    if not found:
        return []
    look, key = max(found)[2:]
    told = [
        c
        for c in look.columns
        if c is not key and not c.time and not c.shown.startswith("http")
    ]
    came, told = (
        [c for c in told if tell(c.name, "outcome")],
        [c for c in told if not tell(c.name, "outcome")],
    )
    few = [c for c in told if c.few and not (tell(c.name, "amount") and role == "item")]
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
    kinds = (
        {"texts": texts, "attributes": few, "numbers": numbers}
        if role == "item"
        else {"attributes": few}
    )
    lines = [
        line(f"  {name}", value)
        for name, value in {"files": look.pattern, **look.keys}.items()
    ]
    lines = [f"{role}s:", *lines, line(f"  {role}", key.name, key.shown)]
    for kind, columns in kinds.items():
        made = {c.feature: c.value for c in columns}
        lines += [line(f"  {kind}", made)] if made else []
    lines += (
        [
            line(
                "  # left out",
                [c.name for c in came],
                "known before every event of the log?",
            )
        ]
        if came
        else []
    )
    return lines if any(kinds.values()) else []


def tried(folder: str, lines: list[str], settings: list[str]) -> list[str]:
    """What the code that reads all of the log says of the mapping, and of the lines of settings."""
    try:
        log, config = (
            log_of(yaml.safe_load("\n".join(lines))),
            read_config(yaml.safe_load("\n".join(settings))["prepare"]),
        )
        KINDS[config.kind].check(log, config)
        found = preview(log, folder, 0.01)
    except (UserError, ValueError) as error:
        return [f"# Not right yet: {' '.join(str(error).split())}"]
    seen = [(each.kind, each.rejected) for each in found]
    return [
        f"# The first rows of {kind}: {of.rows_read:,}, {of.rejects:,} of them rejected."
        for kind, of in seen
    ]
