"""A first mapping of a folder that nobody has described yet, with each guess as a comment.

    python -m jobs.prepare --suggest FOLDER

It looks at the beginning of every file: which hold events, items and users, by the names of their columns, the shape of
their values, and which ids two files share. What it writes is read once by the code that reads the whole log.
"""

from __future__ import annotations

import csv
import io
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from functools import cached_property
from itertools import islice

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from models.tables import UserError, join, open_uri
from pipelines.data.sources.base import list_files
from pipelines.data.sources.encodings import likely_encodings
from pipelines.data.sources.load import build
from pipelines.data.sources.mapping import Mapping
from pipelines.data.sources.nested import Path, arrow_paths, column_at, json_paths, names_of, value_at
from pipelines.data.sources.preview import preview
from pipelines.data.sources.readers import COMPRESSIONS, MOST_BREAKS, format_of
from pipelines.data.sources.transforms import DECIMALS

HEAD = 2 << 20  # bytes of a file that are looked at
ROWS = 5000  # of them
FEW_BROKEN = 0.1  # share of lines of JSON that may be damaged in a file that is looked at
FEW_ROWS = 10  # from which on a first row without a digit, above values that all have one, is their name
SIGN = r"(?:[A-Z]{0,2}[\p{Sc}%]|EUR|USD|GBP|CHF|JPY|CAD|AUD|SEK|NOK|DKK|PLN|CZK|kr|zł|Kč|Ft)"
MONEY = rf"^\s*(?:{SIGN}\s*)?([+-]?\d(?:[\d.,'\s]*\d)?)(?:\s*{SIGN})?\s*$"
"""Nothing else than an amount, so that what it does not understand, such as -$5, is a reject and no other amount."""
NUMBERS = 0.99  # share of values with a decimal mark that makes a column one of numbers
GUESSED = "guessed by its values alone"
SHOWN = 3  # values of a column in a comment
DELIMITERS = ("::", "\t", ";", "|", ",")
SEPARATORS = (" ", "|", ",", ";")
CLOCKS = (" %I:%M:%S %p", " %I:%M %p", " %H:%M:%S", " %H:%M", "")
DAYS = ("%m/%d/%Y", "%d/%m/%Y", "%m-%d-%Y", "%d-%m-%Y", "%d.%m.%Y", "%Y/%m/%d", "%Y-%m-%d", "%m/%d/%y", "%d/%m/%y",
        "%d.%m.%y")  # fmt: skip
FORMATS = (
    *(day + clock for day in DAYS for clock in CLOCKS),
    "%Y-%m-%dT%H:%M", "%b %d, %Y", "%d %b %Y", "%a %b %d %H:%M:%S %z %Y",
)  # fmt: skip
"""How times are written, other than ISO 8601 with seconds."""

DAY_OR_MONTH = "day or month first?"
WHICH_TIME = "the time of the event?"
THOUSANDS = {".": "points before thousands?", ",": "commas before thousands?"}
ASKED = "|".join(map(re.escape, (WHICH_TIME, DAY_OR_MONTH, *THOUSANDS.values())))
DOUBT = re.compile(rf"^(?:# )?(.+?): .*?((?:{ASKED}).*?check it)")
OF_EVENTS = re.compile(
    r"order|purchas|bought|buy|sale|sold|event|view|click|creat|visit|shown|served|impress|search|request|"
    r"bestell|kauf|auftrag|buchung|ereignis|erstell|compra|pedido|venta|evento|achat|commande|vente"
)
OF_OTHERS = re.compile(
    r"birth|\bdob\b|deliver|ship|expir|valid|updat|modif|changed|signup|sign.up|regist|joined|return|\bdue\b|releas|"
    r"geb(urt|oren|dat)|liefer|versand|ablauf|verfall|gültig|gueltig|änder|aender|aktualis|anmeld|fällig|faellig|"
    r"nacim|entrega|env[ií]o|caduc|vencim|actualiz|naissance|livrais|modifi|p[ée]remption"
)
"""Names of times of events, and of those that lie far from them; a name of both is of the second kind."""

CONTINENTAL = re.compile(
    r"datum|zeit|kunde|käufer|kaeufer|artikel|produkt|preis|menge|anzahl|betrag|fecha|cliente|precio|cantidad|prix|"
    r"quantité|achat|commande|[^\x00-\x7f]"
)
"""Names of languages that write the day first and a comma before decimals."""

FIRST_YEAR = 1980  # of times, as `normalise.py` reads them
ISO = r"^\d{4}-\d\d-\d\d([T ]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:?\d\d)?)?$"
EARLIEST, LATEST = 473_385_600, 4_102_444_799  # 1985 and the end of 2099, in seconds

USER = {"user", "users", "customer", "customers", "member", "members", "visitor", "account", "reviewer", "client",
        "person", "buyer", "uid", "userid", "customerid", "visitorid", "household",
        "kunde", "kunden", "käufer", "kaeufer", "mitglied", "mitglieder", "mitglieds"}  # fmt: skip
ITEM = {"item", "items", "article", "articles", "product", "products", "movie", "movies", "video", "videos", "news",
        "asin", "sku", "track", "song", "book", "books", "business", "game", "isbn", "document", "listing", "recipe",
        "post", "itemid", "productid", "movieid", "aid", "catalogue", "catalog", "meta",
        "artikel", "produkt", "produkte"}  # fmt: skip
TIME = {"time", "timestamp", "date", "datetime", "ts", "dat", "when", "created", "at", "day", "moment", "ms"}
ORDER = {"order", "index", "step", "sequence", "seq"}
REQUEST = {"request", "impression", "search", "page", "qid", "serp"}
QUERY = {"query", "keyword", "keywords", "term"}
POSITION = {"position", "rank", "pos"}
ID = {"id", "key", "no", "number", "hash", "nr", "nummer"}
COMPOUND = r"((?<!se)(?<!ur)kunden?|käufer|kaeufer|mitglied(?:er|s)?|artikel|produkte?)"
"""A part of words such as Kundennr and Stammkunde, but not of Sekunde and Urkunde."""
RATING = {"rating", "stars", "score", "overall"}
QUANTITY = {"quantity", "quantities", "qty", "count", "counts", "amount", "amounts", "units", "pieces", "price", "cost",
            "cents", "total", "duration", "seconds", "minutes", "length", "weight", "views", "age",
            "menge", "anzahl", "preis", "betrag", "dauer", "gewicht"}  # fmt: skip


def _words(name: str) -> set[str]:
    """The words of a name, and the parts of compounds."""
    parts = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", unicodedata.normalize("NFC", name)).lower()
    return set(re.split(r"[\W_]+", re.sub(COMPOUND, r"_\1_", parts))) - {""}


@dataclass
class Column:
    """A column and what its first values are like."""

    name: str
    values: pl.Series
    """Text or lists of text, without nulls and empty text."""
    continental: bool = False
    """Whether its file is written as on the continent of Europe: the day first, a comma before decimals."""

    @property
    def words(self) -> set[str]:
        """Of its name."""
        return _words(self.name)

    @property
    def within(self) -> str:
        """The path of the objects that it is a field of; empty for a column."""
        return self.name.rpartition(".")[0]

    @cached_property
    def listed(self) -> bool:
        return isinstance(self.values.dtype, pl.List)

    @cached_property
    def distinct(self) -> int:
        return int(self.values.n_unique()) if not self.listed else len(self.values)

    @cached_property
    def share(self) -> float:
        """Distinct values per value."""
        return self.distinct / max(len(self.values), 1)

    @cached_property
    def number(self) -> bool:
        if self.listed or not len(self.values):
            return False
        plain = self.values.cast(pl.Float64, strict=False).null_count() == 0
        return plain or self.mark is not None or self.thousands is not None

    @cached_property
    def mark(self) -> str | None:
        """The mark before the decimals of numbers such as 12,50 or 1,234.50; None for others."""
        commas = not self.listed and bool(self.values.str.contains(",", literal=True).any())
        text = self.values.str.extract(MONEY, 1) if self.money else self.values
        shares = {
            mark: float(text.str.strip_chars().str.contains(DECIMALS[mark]).mean() or 0)  # type: ignore[arg-type]
            for mark in ((",", ".") if commas else (".",) if self.money else ())
        }
        return next((mark for mark, share in shares.items() if share >= NUMBERS), None)

    @cached_property
    def grouped(self) -> str | None:
        """The mark between digits in groups of three, where all values are whole numbers if it is before thousands."""
        if self.listed or not len(self.values):
            return None
        text = (self.values.str.extract(MONEY, 1) if self.money else self.values).str.strip_chars()
        for mark in THOUSANDS:
            whole = text.str.contains(rf"^[+-]?(0|[1-9]\d{{0,2}}(\{mark}\d{{3}})*)$")
            if bool(whole.all()) and bool(text.str.contains(mark, literal=True).any()):
                return mark
        return None

    @property
    def thousands(self) -> str | None:
        """The mark before thousands, as it seems: on the continent a point, and a comma elsewhere and in amounts of
        money, as no currency has prices of three decimals alone."""
        if self.grouped == "." and self.continental:
            return "."
        return "," if self.grouped == "," and (self.money or not self.continental) else None

    @cached_property
    def money(self) -> bool:
        """Whether it holds numbers with a currency or a per cent sign."""
        if self.listed or not self.values.str.contains(SIGN).any():
            return False
        return float(self.values.str.contains(MONEY).mean() or 0) >= NUMBERS  # type: ignore[arg-type]

    @cached_property
    def integer(self) -> bool:
        return self.number and bool(self.values.str.contains(r"^-?\d+$").all())

    @cached_property
    def decimal(self) -> bool:
        """Whether it holds numbers, of which some have a part behind a point or a comma."""
        plain = not self.listed and bool(self.values.str.contains(r"^-?\d+([.]\d{1,3})?$").all())
        return (plain or self.mark is not None) and not self.integer

    @cached_property
    def flag(self) -> bool:
        return not self.listed and set(self.values.str.to_lowercase().unique()) in (
            {"0", "1"}, {"true", "false"}, {"0.0", "1.0"},
        )  # fmt: skip

    @cached_property
    def separator(self) -> str | None:
        """What stands between the ids of a list that is written as text."""
        listed = not self.listed and len(self.values) and not self.time and not self.decimal
        for separator in SEPARATORS if listed else ():
            parts = self.values.str.strip_chars().str.split(separator)
            tokens = parts.explode().filter(parts.explode() != "")
            several = float((parts.list.len() > 1).mean() or 0)  # type: ignore[arg-type]
            ids = float(tokens.str.contains(r"^[A-Za-z]{0,6}[-_:]?\d[\w:-]*$").mean() or 0)  # type: ignore[arg-type]
            if several >= 0.5 and ids >= 0.95:
                return separator
        return None

    @cached_property
    def glued(self) -> str | None:
        """What stands between an id and a 0 or 1 behind it, in all elements of a list."""
        for mark in ("-", ":", "_", ",") if self.separator else ():
            parts = self.values.str.strip_chars().str.split(self.separator or "").explode()
            if bool(parts.filter(parts != "").str.contains(rf"^.+{mark}[01]$").all()):
                return mark
        return None

    @cached_property
    def time(self) -> dict[str, str]:
        """The `unit` or `format` of times, a few others among them; empty for what are none."""
        if self.listed or not len(self.values):
            return {}
        if len(self._wholes) >= NUMBERS * len(self.values):
            return self._epoch or ({"format": "%Y%m%d"} if self._compact else {})
        if float(self.values.str.contains(ISO).mean() or 0) >= NUMBERS:  # type: ignore[arg-type]
            return {"unit": "iso"}
        if not self._readings:
            return {}
        if not self.ambiguous:
            return {"format": next(iter(self._readings))}
        sure = [written for written in self._readings if written in self._in_order]
        if len(sure) == 1:
            return {"format": sure[0]}
        first = "%d" if self.continental else "%m"
        return {"format": next((w for w in self._readings if w.startswith(first)), next(iter(self._readings)))}

    @cached_property
    def _readings(self) -> dict[str, pl.Series]:
        """The times by each format that reads the most values, which are all or nearly all."""
        text, found = self.values.str.strip_chars(), {}
        for written in FORMATS:
            for part, most in ((text.head(20), 5.0), (text, (1 - NUMBERS) * len(text))):  # most formats fail at once
                times = part.str.to_datetime(written, strict=False)
                if times.null_count() > most or (times.dt.year().min() or 0) < FIRST_YEAR:  # type: ignore[operator]  # %Y reads 25
                    break
            else:
                found[written] = times
        least = min((times.null_count() for times in found.values()), default=0)
        return {written: times for written, times in found.items() if times.null_count() == least}

    @property
    def _in_order(self) -> list[str]:
        """The formats by which the rows are in order of time, oldest or newest first."""
        return [
            written
            for written, times in self._readings.items()
            if times.n_unique() > 1 and any(times.drop_nulls().is_sorted(descending=down) for down in (False, True))
        ]

    @property
    def ambiguous(self) -> bool:
        """Whether its dates can be read with the day or the month first."""
        if self.listed or self.integer or len(self._readings) < 2:
            return False
        first, *others = self._readings.values()
        return any(not first.equals(other) for other in others)

    @property
    def clock(self) -> bool:
        """Whether it holds times of day without their date."""
        return not self.listed and bool(len(self.values) and self.values.str.contains(r"^\d\d?:\d\d(:\d\d)?$").all())

    @property
    def clock_time(self) -> bool:
        """Whether it holds dates with a time of day."""
        written = self.time.get("format", "%H" if self.time else "")
        return "%H" in written or "%I" in written

    @property
    def earliest(self) -> date:
        """The day of the first of these times."""
        ((key, value),) = self.time.items()
        if key == "format":
            return self.values.str.strip_chars().str.to_datetime(value, strict=False).dt.date().min()  # type: ignore
        if value == "iso":
            return date.fromisoformat(str(self.values.filter(self.values.str.contains(ISO)).min())[:10])
        seconds = int(self._wholes.min()) // {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[value]  # type: ignore[arg-type]
        return datetime.fromtimestamp(seconds, UTC).date()

    @cached_property
    def _wholes(self) -> pl.Series:
        """Its integers; those that are too large are null."""
        return self.values.filter(self.values.str.contains(r"^-?\d+$")).cast(pl.Int64, strict=False)

    @property
    def _epoch(self) -> dict[str, str]:
        """The unit of integers since 1970; of ids of that size only the name of the column tells them."""
        numbers = self._wholes
        if numbers.null_count() or not (self.words & TIME or re.fullmatch(r"c\d+", self.name)):
            return {}
        low, high = int(numbers.min()), int(numbers.max())  # type: ignore[arg-type]
        for unit, factor in {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}.items():
            if EARLIEST * factor <= low and high <= LATEST * factor:
                return {"unit": unit}
        return {}

    @property
    def _compact(self) -> bool:
        """Whether integers are days such as 20191115."""
        days = self._wholes.cast(pl.String)
        same = bool((days.str.len_chars() == 8).all()) and bool(self.words & TIME)
        return same and days.str.to_date("%Y%m%d", strict=False).null_count() == 0

    @property
    def quantity(self) -> bool:
        """Whether integers count or measure something, and are no codes: their name says so, or most are 0, 1 or 2 and
        the few others are larger."""
        if not self.integer or self.flag or self.time or self.words & ID:
            return False
        values = self.values.cast(pl.Int64, strict=False)
        skewed = values.is_between(0, 2).mean() or 0.0
        return bool(self.words & QUANTITY) or (self.distinct > 4 and values.min() in (0, 1) and float(skewed) > 0.6)  # type: ignore[arg-type]

    @property
    def few(self) -> bool:
        """Whether its values are categories: more than one, and each again and again."""
        return self.distinct > 1 and (self.share < 0.2 or (self.distinct <= 50 and self.share <= 0.5))

    @property
    def shown(self) -> str:
        """Some values, for a comment."""
        values = self.values.head(200).unique(maintain_order=True).head(SHOWN).to_list()
        texts = [
            "[" + ", ".join(map(str, v[:2])) + "]" if isinstance(v, list) else " ".join(str(v).split()) for v in values
        ]
        return " | ".join(text[:40] for text in texts) or "no values"

    def ids(self) -> pl.Series:
        """The ids in it, each once."""
        values = self.values.explode() if self.listed else self.values
        if self.separator:
            values = values.str.strip_chars().str.split(self.separator).explode()
        if self.glued:
            values = values.str.extract(rf"^(.+){self.glued}[01]$")
        return values.drop_nulls().str.strip_chars().unique()


@dataclass
class Look:
    """Files of one layout, by the beginning of the first."""

    files: list[str]
    kind: str
    size: int
    columns: list[Column]
    keys: dict[str, object] = field(default_factory=dict)
    """What says how to read them: format, delimiter, header, quote, encoding."""
    above: int = 0
    """Lines above that of the names, which no log may have."""

    @property
    def pattern(self) -> str:
        """A pattern of the files' names."""
        return self.files[0] if len(self.files) == 1 else _pattern(self.files)

    @property
    def name_words(self) -> set[str]:
        return _words(re.sub(r"\d+", "_", self.files[0].rsplit("/", 1)[-1]))

    def column(self, words: set[str], among: Iterable[Column] | None = None) -> Column | None:
        """The column whose name has most of these words, of several one that is called an id, then one whose values
        come again."""
        found = [c for c in (self.columns if among is None else among) if c.words & words]
        return max(
            found,
            key=lambda c: (
                len(c.words & (words | ID)) - len(c.words - words - ID),
                c.share < 0.99,
                -self.columns.index(c),
            ),
            default=None,
        )


def suggest(input_uri: str) -> str:
    """The text of a mapping for the files of a folder. UserError where none of them can be read as a log."""
    if list_files(input_uri, "*.inter.json*", required=False, what="history file"):
        return "# Histories in the layout of LC-Rec: *.inter.json, and texts in *.item.json.\nlayout: lcrec\n"
    looks, refused = _looks(input_uri)
    events = max(looks, key=lambda look: _like_events(look, looks))
    roles = _roles(events, looks)
    if roles.get("user") is None or roles.get("item") is None:
        names = ", ".join(c.name for c in events.columns[:30])
        raise UserError(
            f"{join(input_uri, events.files[0])} has no two columns that look like users and items; it has {names}: "
            f"copy the nearest file of jobs/configs/sources and change its names"
        )
    text = _Text()
    others = [look for look in looks if look is not events]
    items = _described(others, roles["item"], ITEM, USER)
    rest = [look for look in others if items is None or look is not items[0]]
    users = _described(rest, roles["user"], USER, ITEM)
    uses = {id(events): "events"} | {id(found[0]): use for found, use in ((items, "items"), (users, "users")) if found}
    for line in _head(input_uri, looks, events, roles, uses, users):
        text.comment(line)
    for file, why in refused.items():
        text.comment(f"{file} (not read: {why})")
    for role, column in roles.items():
        _call(events, column, "shown" if column and column.glued else role)
    for role, found in {"item": items, "user": users}.items():
        if found is not None:
            _call(found[0], found[1], role)
    _events(text, events, roles, items, users)
    lines = text.lines
    return "\n".join([*_checked(input_uri, lines), *lines]) + "\n"


def doubts(text: str) -> list[str]:
    """What a user should check first in a suggested mapping, a sentence each."""
    lines = text.splitlines()
    keys = [line.split(":")[0] for line in lines if GUESSED in line]
    alone = [f"{' and '.join(keys)} guessed by values alone, not by names; check these lines"] if keys else []
    return alone + [f"{found[1].strip()}: {found[2]}" for line in lines if (found := DOUBT.match(line))]


def _call(look: Look, column: Column | None, name: str) -> None:
    """Names a column of a file without names."""
    header = look.keys.get("header")
    if column is not None and isinstance(header, list):
        header[header.index(column.name)] = name
        column.name = name


def _checked(input_uri: str, lines: list[str]) -> list[str]:
    """Comments that say what the first rows become by this mapping."""
    content = yaml.safe_load("\n".join(lines))
    content.pop("layout")
    content.pop("prepare")
    try:
        found = preview(build(Mapping, content), input_uri, 0.01)
    except (UserError, ValueError) as error:
        return [f"# Not right yet: {error}"]
    said = (
        f"{seen.kind}: {seen.rejected.rows_read:,} rows, {sum(seen.rejected.reasons.values()):,} rejected"
        for seen in found
    )
    return [f"# The first rows by this mapping: {'; '.join(said)}."]


def _why_not_read(look: Look, roles: Roles) -> str:
    ids = [column.name for role in ("user", "item") if (column := roles[role])]
    if set(ids) <= {c.name for c in look.columns}:
        return f"not read: it has {' and '.join(ids)} too; if these are the same events, let 'files' match it"
    return "not read: it describes no users or items of the events"


def _owner(roles: Roles, users: tuple[Look, Column, bool] | None) -> Column | None:
    """The column that names the users, where the events have only what belongs to one, such as an order."""
    if roles["user"] is None or roles["user"].words & USER or users is None:
        return None
    return next((c for c in users[0].columns if c.words & USER and c is not users[1]), None)


def _head(
    input_uri: str, looks: list[Look], events: Look, roles: Roles, uses: dict[int, str],
    users: tuple[Look, Column, bool] | None,
) -> list[str]:  # fmt: skip
    said = [
        f"A first mapping of {input_uri}, guessed from the beginning of its files. Read each line, correct it, then"
    ]
    said.append("python -m jobs.prepare --source THIS_FILE --input FOLDER --output TABLES --dry-run")
    for look in looks:
        what = uses.get(id(look)) or _why_not_read(look, roles)
        said.append(f"{look.pattern} ({what}): {', '.join(c.name for c in look.columns)}"[:118])
        if look.above:
            said.append(f"{look.pattern}: its names are in line {look.above + 1}; delete the lines above them")
    if users and roles["user"] and (owner := _owner(roles, users)):
        said.append(
            f"{events.pattern} has no users: {users[0].pattern} has the {owner.name} of each {roles['user'].name}; "
            f"join the two files first"
        )
    clock = next((c for c in events.columns if c.clock), None)
    if clock and not any(c.clock_time for c in events.columns):
        said.append(
            f"{clock.name} is a time of day ({clock.shown}): join it with the date, or events of a day are ties"
        )
    return said


def _looks(input_uri: str) -> tuple[list[Look], dict[str, str]]:
    """The files that can be read, those of one layout together, and why each of the others cannot."""
    filesystem, root = open_uri(input_uri)
    found: dict[object, Look] = {}
    refused: dict[str, str] = {}
    for file in list_files(input_uri, "*", required=True, what="file"):
        size = filesystem.get_file_info(f"{root.rstrip('/')}/{file}").size
        try:
            look = _look(input_uri, file, size) if size else None
        except (UserError, pa.ArrowException, OSError, EOFError, ValueError, csv.Error) as error:
            refused[file] = " ".join(str(error).split())[:80]
            continue
        if look is None or len(look.columns) < 2:
            refused[file] = "no two columns" if size else "empty"
            continue
        continental = look.keys.get("delimiter") == ";" or any(
            (c.mark == "," and c.grouped is None) or CONTINENTAL.search(c.name.lower()) for c in look.columns
        )
        for column in look.columns:
            column.continental = continental
        name = re.sub(r"\d+", "0", _uncompressed(file.rsplit("/", 1)[-1]))
        names = [c.name for c in look.columns]
        key = (name, look.kind, tuple(names if "header" in look.keys else sorted(names)))
        if key in found:
            found[key].files.append(file)
            found[key].size += size
        else:
            found[key] = look
    if not found:
        said = "; ".join(f"{file} ({why})" for file, why in islice(refused.items(), 3))
        raise UserError(f"{input_uri} holds no file that can be read as a log: {said}; check --suggest")
    return list(found.values()), refused


def _pattern(files: list[str]) -> str:
    """A pattern of several files: their names, or their paths' ends, with `*` for what differs."""
    names = {re.sub(r"\d+", "*", file.rsplit("/", 1)[-1]) for file in files}
    if len(names) > 1 and len(plain := {_uncompressed(name) for name in names}) == 1:  # some are compressed
        names = {plain.pop() + "*"}
    name = names.pop() if len(names) == 1 else "*" + files[0].rsplit("/", 1)[-1]
    exact = {file.rsplit("/", 1)[-1] for file in files}
    name = exact.pop() if len(exact) == 1 else name
    return f"*{name}" if any("/" in file for file in files) else name


def _uncompressed(file: str) -> str:
    """A file's name without the suffix of a compression."""
    return next((file[: -len(suffix)] for suffix in COMPRESSIONS if file.lower().endswith(suffix)), file)


def _look(input_uri: str, file: str, size: int) -> Look | None:
    """The beginning of a file; None for what is no table."""
    if _uncompressed(file).lower().endswith((".dat", ".txt", ".data", ".log")):
        kind, keys = "csv", {"format": "csv"}
    else:
        kind, keys = format_of(file), {}
    filesystem, path = open_uri(join(input_uri, file))
    if kind == "parquet":
        with filesystem.open_input_file(path) as stream:
            parquet = pq.ParquetFile(stream)
            batch, schema = next(parquet.iter_batches(ROWS), None), pa.struct(list(parquet.schema_arrow))
        frame = pl.DataFrame(pl.from_arrow(batch)) if batch is not None else pl.DataFrame()
        if len(frame):
            frame = frame.select(column_at(path).alias(name) for name, path in names_of(arrow_paths(schema)).items())
        return Look([file], kind, size, _columns(frame), dict(keys))
    with filesystem.open_input_stream(path) as stream:
        head = stream.read(HEAD)
    if len(head) == HEAD:
        head = head[: head.rfind(b"\n") + 1]
    encoding = next(iter(likely_encodings(head)), "utf-8")
    text = head.decode(encoding, errors="replace").removeprefix("\ufeff")
    if encoding != "utf-8":
        keys["encoding"] = encoding
    if kind == "jsonl" and text.lstrip().startswith("["):
        raise UserError("one list, not an object a line: jq -c '.[]' FILE writes lines")
    if kind == "jsonl":
        rows = _objects(text)
        paths = names_of(path for row in rows for path in json_paths(row))
        frame = pl.DataFrame(
            {name: [_plain(value_at(row, path), path) for row in rows] for name, path in paths.items()}, strict=False
        )
        return Look([file], kind, size, _columns(frame), dict(keys))
    return _look_csv(file, size, text, dict(keys))


def _plain(value: object, path: Path) -> object:
    """The value, null for an object or a list where other rows have none."""
    return None if isinstance(value, dict) or (isinstance(value, list) and None not in path) else value


def _objects(text: str) -> list[dict[str, object]]:
    """The objects of the first lines of JSON. ValueError where more than a few lines are none."""
    rows, broken = [], []
    for number, line in enumerate(text.split("\n")[:ROWS], 1):  # within JSON text other ends of lines may stand
        try:
            rows += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            broken.append(f"line {number}: {error}")
    if len(broken) > FEW_BROKEN * (len(rows) + len(broken)):
        raise ValueError(broken[0])
    return rows


def _look_csv(file: str, size: int, text: str, keys: dict[str, object]) -> Look | None:
    usual = "\t" if ".tsv" in file else ","
    best: tuple[float, str, bool, list[list[str]]] | None = None
    for delimiter in DELIMITERS:
        for quoted in (True, False) if len(delimiter) == 1 else (False,):
            rows = _rows(text, delimiter, quoted)
            widths = Counter(map(len, rows)).most_common(1)
            width, count = widths[0] if widths else (0, 0)
            share = count / max(len(rows), 1) * (len(rows) >= 2)
            # without quotes there are rows by lines, and with stray ones fewer
            if width > 1 and share >= 0.9 and (best is None or share * (1 + len(rows) / 1e4) > best[0] + 0.02):
                best = share * (1 + len(rows) / 1e4), delimiter, quoted, [row for row in rows if len(row) == width]
    if best is None:
        return None
    _, delimiter, quoted, rows = best
    if delimiter != usual:
        keys["delimiter"] = delimiter
    if not quoted and len(delimiter) == 1:
        keys["quote"] = False
    if quoted and sum(cell.count("\n") for row in rows for cell in row) > MOST_BREAKS / 2 * len(rows):
        keys["quote"] = True
    titles = next((n for n, row in enumerate(rows) if sum(map(bool, row)) > 1), 0)  # rows of one cell stand above
    rows = rows[titles:]
    names = [cell.strip() for cell in rows[0]]
    named = [number for number, name in enumerate(names) if name]  # not the index of a data frame, nor empty columns
    above = 0
    if len(named) > 1 and _is_header([names[n] for n in named], [[row[n] for n in named] for row in rows[1:]]):
        lines = enumerate(text.splitlines()) if quoted and len(delimiter) == 1 else ()
        above = next((n for n, line in lines if next(csv.reader([line], delimiter=delimiter), None) == rows[0]), 0)
        above *= any(text.splitlines()[:above])
        rows, names = [[row[n] for n in named] for row in rows[1:]], [names[n] for n in named]
    else:
        names = [f"c{number}" for number in range(len(rows[0]))]
        keys["header"] = names
    frame = pl.DataFrame(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)))
    return Look([file], "csv", size, _columns(frame), keys, above)


def _rows(text: str, delimiter: str, quoted: bool) -> list[list[str]]:
    """The first rows; none where the quotes do not close."""
    if len(delimiter) > 1:
        return [line.split(delimiter) for line in text.splitlines()[:ROWS] if line]
    lines, rows = io.StringIO(text, newline=""), list[list[str]]()
    reader = csv.reader(lines, delimiter=delimiter, quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE)
    try:
        for row in reader:
            rows += [row] if any(row) else []
            if len(rows) == ROWS:
                break
    except csv.Error:
        return []
    return rows


def _is_header(names: list[str], rows: list[list[str]]) -> bool:
    """Whether a first row is the names of the columns: they are words, each once, unlike the values beneath."""
    words = all(re.fullmatch(r"([^\W\d]|[#@])[^\t\n;|]{0,60}", name) for name in names)
    if not words or len(set(names)) < len(names) or any(re.fullmatch(r".*\d[-:_][01]", name) for name in names):
        return False
    told = USER | ITEM | TIME | ID | RATING | QUERY | {"name", "title", "category", "price", "click"}
    told |= {"text", "description", "brand", "genres", "tag", "tags"}
    known = sum(bool(Column(name, pl.Series([], dtype=pl.String)).words & told) for name in names)
    beneath = list(zip(*rows, strict=True))
    unlike = any(
        all(re.fullmatch(r"[-\d.:/ T]+", cell) for cell in column if cell)
        or (len(rows) >= FEW_ROWS and not re.search(r"\d", name) and all(re.search(r"\d", cell) for cell in column))
        for name, column in zip(names, beneath, strict=True)
        if any(column)
    )
    return known >= 2 or (known >= 1 and unlike) or (unlike and all(len(name) > 1 for name in names))


def _columns(frame: pl.DataFrame) -> list[Column]:
    found = []
    for series in frame.get_columns():
        if isinstance(series.dtype, pl.List):
            inner = series.dtype.inner
            if not isinstance(inner, pl.Struct | pl.List):
                found.append(Column(series.name, series.drop_nulls().cast(pl.List(pl.String))))
            continue
        if isinstance(series.dtype, pl.Struct):
            continue
        if series.dtype in (pl.Datetime, pl.Date):
            series = series.cast(pl.Datetime("us")).dt.strftime("%Y-%m-%dT%H:%M:%S")
        text = series.cast(pl.String).drop_nulls()
        found.append(Column(series.name, text.filter(text != "")))
    return found


Roles = dict[str, Column | None]


def _roles(look: Look, looks: list[Look]) -> Roles:
    """Which column of an event file, one of all `looks`, is what; None for what it does not have."""
    left = list(look.columns)

    def take(column: Column | None) -> Column | None:
        if column in left:
            left.remove(column)
        return column

    times = _likely_times(look)
    time = take(look.column(TIME, times) or next(iter(times), None))
    lists = [c for c in left if c.listed or c.separator]
    shown = next((c for c in lists if c.glued), None)
    item = take(shown or look.column(ITEM, [c for c in left if not c.time]) or next(iter(lists), None))
    past = take(next((c for c in lists if c.separator and c is not item), None)) if shown else None
    request = take(look.column(REQUEST, [c for c in left if not c.words & USER and not c.listed]))
    user = take(look.column(USER, left))
    if user is None or item is None:  # names tell nothing: whose values come again like ids, of users first
        ids = [c for c in left if not c.flag and not c.listed and c.distinct > 1 and c.share < 0.99]
        ids = [c for c in ids if c.integer or not c.decimal]
        described = [c for c in ids if _is_key(c, [other for other in looks if other is not look])]
        if item is None and len(described) == 1 and described[0] is not ids[0]:
            item = take(described[0])
        user = take(user or next((c for c in ids if c is not item), None))
        item = take(item or next((c for c in [*described, *ids] if c is not user and c.distinct > 12), None))
    query = take(look.column(QUERY, [c for c in left if not c.number]))
    position = take(look.column(POSITION, [c for c in left if c.integer]))
    places = [c for c in left if c.integer and not c.words & (ID | QUANTITY)]
    order = take(look.column(ORDER, places)) if time is None else None
    return {
        "user": user,
        "item": item,
        "time": time,
        "request": request,
        "query": query,
        "position": position,
        "history": past,
        "order": order,
    }


def _time_rank(column: Column) -> int:
    """0 for a column whose name is of times of events, 2 for one of births, deliveries and the like."""
    name = re.sub(r"[\W_]+", " ", column.name.lower())
    return 2 if OF_OTHERS.search(name) else 0 if OF_EVENTS.search(name) else 1


def _likely_times(look: Look) -> list[Column]:
    """The columns of times whose names are the nearest to a time of events."""
    times = [c for c in look.columns if c.time]
    best = min(map(_time_rank, times), default=0)
    return [c for c in times if _time_rank(c) == best]


def _is_key(column: Column, others: list[Look]) -> bool:
    """Whether a column of the same name is an id of the rows of another file."""
    same = (c for look in others for c in look.columns if c.name == column.name and not c.listed)
    return any(c.share >= 0.9 and c.distinct > 1 for c in same)


def _like_events(look: Look, looks: list[Look]) -> tuple[int, int, int, int]:
    """How much a file looks like one of events: users and items, neither of them unique, then times, then size."""
    roles = _roles(look, looks)
    user, item = roles["user"], roles["item"]
    both = user is not None and item is not None
    repeats = both and user is not None and user.share < 0.99
    return int(both), int(bool(repeats)), int(roles["time"] is not None), look.size


def _described(
    looks: list[Look], ids: Column | None, words: set[str], others: set[str]
) -> tuple[Look, Column, bool] | None:
    """The file that describes these ids, its column of them, and whether they match but for zeros in front. Their
    names have these words, and none of the others alone."""
    best: tuple[float, Look, Column, bool] | None = None
    if ids is None:
        return None
    mine = ids.ids()
    for look in looks:
        for column in look.columns:
            if column.listed or column.separator or column.share < 0.9 or column.time:
                continue
            if column.words & others and not column.words & words:
                continue
            theirs = column.ids()
            exact = _overlap(mine, theirs)
            loose = _overlap(mine.str.strip_chars_start("0"), theirs.str.strip_chars_start("0"))
            called, told = bool(column.words & words), bool(look.name_words & words)
            score = max(exact, loose) + 0.8 * told + 1.2 * called
            if (max(exact, loose) >= 0.1 or (called and told)) and (best is None or score > best[0]):
                best = score, look, column, loose > exact + 0.05
    return best[1:] if best else None


def _of_items(column: Column, item: Column) -> bool:
    """Whether a column holds some of the items that the list of the item's column shows."""
    if item.listed or not item.separator or item.glued or column.listed:
        return column.listed and item.listed
    tokens = column.values.str.strip_chars().str.split(item.separator).explode()
    inside = tokens.filter(tokens != "").is_in(item.ids().implode())
    return len(inside) > 0 and int(inside.sum()) >= 0.9 * len(inside)


def _overlap(mine: pl.Series, theirs: pl.Series) -> float:
    """Share of the smaller side that is on the other too: both are of beginnings of files."""
    both = int(mine.is_in(theirs.implode()).sum())
    return both / max(min(len(mine), len(theirs)), 1)


class _Text:
    """Lines of YAML, each with a comment."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def comment(self, text: str) -> None:
        self.lines.append(f"# {text}")

    def add(self, line: str, why: str = "") -> None:
        self.lines.append(f"{line.ljust(46)}  # {why}" if why else line)


def _scalar(value: object) -> str:
    """A value of YAML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(map(_scalar, value))}]"
    plain = re.fullmatch(r"[A-Za-z_][\w./-]*", str(value)) and yaml.safe_load(str(value)) == value
    return str(value) if plain else json.dumps(value, ensure_ascii=False)


def _name(column: str) -> str:
    """A column's name as the name of a feature, without accents."""
    plain = unicodedata.normalize("NFKD", column.replace("ß", "ss")).encode("ascii", "ignore").decode()
    name = re.sub(r"[^A-Za-z0-9_]+", "_", plain).strip("_")
    return name if re.match(r"[A-Za-z]", name) else f"x_{name}"


def _listing(columns: list[Column]) -> str:
    """{name: column} in YAML."""
    return "{" + ", ".join(f"{_name(c.name)}: {_scalar(c.name)}" for c in columns) + "}"


def _say_quantities(text: _Text, numbers: list[Column], other: str) -> None:
    for column in numbers:
        if column.quantity:
            text.comment(f"{column.name} looks like a quantity: {column.shown}; if its values are codes: {other}")


def _decimals(columns: list[Column], indent: str) -> list[tuple[str, str]]:
    """Transforms of numbers that are no plain ones, each with its comment."""
    found = []
    for column in columns:
        if mark := {".": ",", ",": "."}.get(column.thousands or "", column.mark):
            quoted = MONEY.replace("'", "''")  # as YAML writes it
            regex = f"regex: '{quoted}', " if column.money else ""
            line = f'{indent}{_scalar(column.name)}: {{{regex}decimal: "{mark}"}}'
            asked = f"{THOUSANDS[column.thousands]} check it" if column.thousands else "the mark before its decimals"
            found.append((line, f"{asked}: {column.shown}"))
    return found


def _reading(text: _Text, look: Look, indent: str = "") -> None:
    whys = {
        "header": "no line of names: these are made up, rename them here and below",
        "quote": "values span lines" if look.keys.get("quote") else "quotes are plain characters",
        "encoding": "its bytes are not UTF-8",
    }
    for key, value in look.keys.items():
        text.add(f"{indent}{key}: {_scalar(value)}", whys.get(key, ""))


def _told(look: Look, column: Column, words: set[str]) -> str:
    """The comment of the user's or the item's column, which says where its name did not tell what it is."""
    told = column.words & words and "header" not in look.keys
    return column.shown if told else f"{GUESSED}, check it: {column.shown}"


def _timed(look: Look, time: Column) -> str:
    """The comment of the column of times, with what is in doubt."""
    others = [c.name for c in _likely_times(look) if c is not time]
    asked = [f"{WHICH_TIME} or {', '.join(others)}?"] if others else [WHICH_TIME] if _time_rank(time) == 2 else []
    if time.ambiguous:
        in_order = time.time["format"] in time._in_order and len(time._in_order) == 1
        asked.append(f"{DAY_OR_MONTH} {'by this the rows are in order,' if in_order else 'both can be,'}")
    return f"{' '.join(asked)} check it: {time.shown}" if asked else time.shown


def _events(
    text: _Text,
    look: Look,
    roles: Roles,
    items: tuple[Look, Column, bool] | None,
    users: tuple[Look, Column, bool] | None,
) -> None:
    user, item, time = roles["user"], roles["item"], roles["time"]
    assert user is not None
    assert item is not None
    text.add("layout: mapping")
    text.add(f"files: {_scalar(look.pattern)}", f"{len(look.files):,} files" if len(look.files) > 1 else "")
    _reading(text, look)
    text.add(f"user: {_scalar(user.name)}", _told(look, user, USER))
    transforms: list[tuple[str, str]] = []
    labels: list[tuple[str, str]] = []
    behaviour = ""
    beside = [c for c in look.columns if c is not item and c.listed and item.within and c.within == item.within]
    inside = [Column(c.name, c.values.explode().drop_nulls()) for c in beside]
    inside = [c for c in inside if c.flag or c.number or c.few]
    if item.glued:
        text.add("item: shown_item", f"a part of {item.name}: {item.shown}")
        text.add(f"explode: {{columns: [shown_item, clicked], separator: {_scalar(item.separator)}}}")
        transforms.append((f"  shown_item: {{column: {_scalar(item.name)}, regex: '^(.+){item.glued}[01]$'}}", ""))
        transforms.append((f"  clicked: {{column: {_scalar(item.name)}, regex: '{item.glued}([01])$'}}", ""))
        labels.append(("  click: {column: clicked}", "the 0 or 1 that is glued to each id"))
        behaviour = "click"
    else:
        text.add(f"item: {_scalar(item.name)}", _told(look, item, ITEM))
        if item.listed or item.separator:
            separator = f", separator: {_scalar(item.separator)}" if item.separator else ""
            columns = _scalar([item.name, *(c.name for c in inside)])
            text.add(f"explode: {{columns: {columns}{separator}}}", "one event for each of the list")
    if time is None and (order := roles["order"]) is not None:
        text.add(
            f"time: {{column: {_scalar(order.name)}, unit: order}}", f"an order without clock times: {order.shown}"
        )
    elif time is None:
        text.add("time: {unit: order}", "no column looks like times: the order of the lines")
    else:
        ((key, value),) = time.time.items()
        text.add(f"time: {{column: {_scalar(time.name)}, {key}: {_scalar(value)}}}", _timed(look, time))
    for key in ("request", "query", "position"):
        if (column := roles[key]) is not None:
            text.add(f"{key}: {_scalar(column.name)}", column.shown)
    if (past := roles["history"]) is not None:
        text.add("history:", f"earlier behaviours without times: {past.shown}")
        text.add(f"  column: {_scalar(past.name)}")
        text.add(f"  separator: {_scalar(past.separator)}")
        before = time.earliest if time else date(2000, 1, 31)
        text.add(f'  at: "{before - timedelta(days=30)}"', "a moment before the log, that they are dated to")
        text.add("  labels: [click]" if behaviour else "  labels: []")
    taken = [column for column in roles.values() if column is not None]
    left = [column for column in look.columns if column not in [*taken, *beside] and len(column.values)] + inside
    members = [c for c in left if _of_items(c, item)]
    for column in members:
        behaviour = _name(column.name) if not behaviour or "click" in column.name.lower() else behaviour
        labels.append(
            (f"  {_name(column.name)}: {{member_of: {_scalar(column.name)}}}", "whether the item is in this list")
        )
    flags = [c for c in left if c.flag]
    labels += [(f"  {_name(c.name)}: {{column: {_scalar(c.name)}}}", c.shown) for c in flags]
    ratings = [
        c for c in left if not c.flag and c.number and (c.words & RATING or ("header" in look.keys and c.distinct < 12))
    ]
    for column in ratings:
        labels.append((f"  {_name(column.name)}: {{column: {_scalar(column.name)}, type: float32}}", column.shown))
    if labels:
        text.add("labels:", "what the user did; never an input of its own event")
        for line, why in labels:
            text.add(line, why)
    left = [c for c in left if c not in (*flags, *ratings, *members) and not c.listed]
    numbers = [c for c in left if c.number and (not c.integer or c.quantity)]
    categories = [c for c in left if c not in numbers and not c.time and c.few]
    if numbers:
        text.add(f"numbers: {_listing(numbers)}", "known before the event? Else they are labels")
        _say_quantities(text, numbers, "categories")
        for column in numbers:
            if column.quantity and column.values.str.starts_with("-").any():
                text.comment(f"{column.name}: negative values look like returns; to leave them out:")
                text.comment(f'  labels: {{purchase: {{column: {_scalar(column.name)}, true_when: "> 0"}}}}')
                text.comment("  prepare: {behaviour: purchase}")
    if categories:
        text.add(f"categories: {_listing(categories)}", "known before the event? Else they are labels")
    read = {c.name for c in (*taken, *members, *flags, *ratings, *numbers, *categories)}
    rest = [c.name for c in look.columns if c.name not in read]
    if rest:
        text.comment(f"not read: {', '.join(rest)}")
    transforms += _decimals([*numbers, *ratings], "  ")
    padded = items is not None and items[2]
    width = max(map(len, [*item.ids().to_list(), *items[1].ids().to_list()])) if padded and items else 0
    if padded and not item.glued:
        transforms.append((f"  {_scalar(item.name)}: {{pad: {width}}}", "zeros in front differ between the files"))
    if transforms:
        text.add("transforms:")
        for line, why in transforms:
            text.add(line, why)
    if users is not None:
        _about(text, "users", "user", users, 0)
    if items is not None:
        _about(text, "items", "item", items, width)
    text.add("prepare:")
    clicks = [c for c in flags if "click" in c.name.lower()]
    if behaviour or flags:
        text.add(
            f"  behaviour: {behaviour or _name((clicks or flags)[0].name)}",
            "events with this label make histories; without: all events",
        )
    if roles["request"] is not None or item.listed or item.separator:
        text.add(
            "  # kind: search", "to rank what was shown, instead of recommending out of all items; it needs core: 0"
        )
    text.add("  core: 5", "users and items with fewer behaviours are left out; 0 keeps all")
    text.add(f"  split: {{kind: {'temporal' if time else 'leave_last_out'}}}")


def _about(text: _Text, section: str, key: str, found: tuple[Look, Column, bool], width: int) -> None:
    """The section of files that describe users or items."""
    look, ids, _ = found
    others = [c for c in look.columns if c is not ids and not c.time and len(c.values)]
    lists = [c for c in others if c.listed]
    others = [c for c in others if c.listed or (c.distinct > 1 and not re.match("https?://", str(c.values[0])))]
    told = [c for c in others if not c.listed and not c.number]
    ids_of_others = [c for c in others if c.integer and "id" in c.words]
    codes = [c for c in others if not c.listed and c.few and (not c.number or (c.integer and not c.quantity))]
    few = [c for c in others if c in ids_of_others or c in codes]
    numbers = [c for c in others if c.number and c not in few]
    if section == "users" and not few:
        text.comment(f"{look.pattern}: not read, it has no attributes of few values")
        return
    text.add(f"{section}:")
    text.add(f"  files: {_scalar(look.pattern)}")
    _reading(text, look, "  ")
    text.add(f"  {key}: {_scalar(ids.name)}", ids.shown)
    if section == "items":
        if told or lists:
            text.add(f"  texts: {_listing([*told, *lists])}", "what semantic IDs are made of")
        if lists and look.kind != "csv":
            text.add(f"  lists: {_scalar([c.name for c in lists])}")
        if numbers:
            text.add(f"  numbers: {_listing(numbers)}")
            _say_quantities(text, numbers, "attributes")
    if few:
        text.add(f"  attributes: {_listing(few)}", "categories: few values each")
    decimals = _decimals(numbers, "    ") if section == "items" else []
    if width or decimals:
        text.add("  transforms:")
        if width:
            text.add(f"    {_scalar(ids.name)}: {{pad: {width}}}")
        for line, why in decimals:
            text.add(line, why)
    if section == "items":
        text.add("  # keep: all", "also items without behaviours, so that new ones can be recommended")
