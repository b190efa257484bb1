"""A log as a mapping file describes it: what a column is, is an SQL expression over the columns of the file.

    files: transactions_*.csv*
    user: customer_id
    item: lpad(article_id, 10, '0')
    time: {column: "day || ' ' || clock", format: "%d.%m.%Y %H:%M:%S", zone: Europe/Berlin}
    labels: {bought: "cast(quantity as double) > 0"}
    items: {files: articles.csv, item: "lpad(article_id, 10, '0')", texts: {title: "lower(name)"}}

The SQL is that of polars (`pl.sql_expr`); a text that is the name of a column is that column. `Log.read_events` gives
bounded blocks of events and of rejects, `sections` those of items, users and tables of features.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import Any
from urllib.parse import unquote

import polars as pl
import pyarrow as pa
from pyarrow import fs

from models.config import build, read_yaml
from models.item_ids import ODD, clean_id
from models.tables import UserError, join, open_uri
from pipelines.data.read import LONGEST_QUOTE, ROW, Files, Frame, Piece, list_files, read_frames, roots
from pipelines.data.tables import LABEL_TYPES, REJECTS, events_schema, items_schema
from pipelines.data.times import Time, milliseconds, moments

LOG_ROW = pa.field("log_row", pa.int64(), nullable=False)
REPEATS = "repeats"
"""Label of `jobs.prepare --duplicates count`: how often an event was there. It is not known before it happened."""
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
CAST = re.compile(r"(?<![\w_])cast\s*\(", re.IGNORECASE)
EXPLODED_ROWS = 1 << 18  # rows per block after lists are exploded
MOST_MINUTES = 60 * 24 * 3660  # ten years: a longer delay is a wrong unit
LAST_INT32 = 2**31 - 1
ELEMENT, REQUEST, UNEQUAL = "__element", "__request", "__unequal"
FORBID = {"extra": "forbid"}


def check_range(span: object) -> None:
    """ValueError unless `span` is [low, high]."""
    numbers = isinstance(span, list) and len(span) == 2
    if not numbers or not all(isinstance(end, int | float) and math.isfinite(end) for end in span) or span[0] >= span[1]:  # type: ignore
        raise ValueError(f"range is {span!r}; give the least and the largest value, such as [0.5, 5]")


@dataclass(frozen=True)
class Label:
    """What a user did with an item."""

    __pydantic_config__ = FORBID

    column: str
    """Column or SQL expression."""
    type: str = "bool"
    """bool (true, false, 1 or 0) or float32."""
    time: Any = None
    """Column or expression of the time at which the label was known, or {column, unit}; without a unit, that of the
    log's time. By default it is known with the event, or after `delay_minutes`."""
    delay_minutes: float | None = None
    """Minutes after the event until the label is known, such as 60; by default at once, or by `time`."""
    range: list[float] | None = None
    """float32: the smallest and the largest value, such as [0.5, 5]; rows outside are rejected. By default any number."""

    def __post_init__(self) -> None:
        if self.type not in LABEL_TYPES:
            raise ValueError(f"a label's type is '{self.type}'; it must be one of {', '.join(LABEL_TYPES)}")
        if self.time is not None and self.delay_minutes is not None:
            raise ValueError("a label has both 'time' and 'delay_minutes'; give the one that says when it is known")
        delay = self.delay_minutes
        if delay is not None and not 0 < delay <= MOST_MINUTES:
            raise ValueError(f"delay_minutes is {delay!r}; give minutes from above 0 to {MOST_MINUTES:,}, such as 60")
        if self.range is not None:
            if self.type != "float32":
                raise ValueError(f"'range' is of float32 labels, this one is {self.type}; leave it out")
            check_range(self.range)

    @property
    def late(self) -> bool:
        """Whether the label is known later than its event."""
        return self.time is not None or self.delay_minutes is not None

    @property
    def known_from(self) -> str:
        """What says from when on it is known."""
        return self.time.origin if self.time else f"{self.delay_minutes:g} minutes after its event"


@dataclass(frozen=True)
class History:
    """Earlier behaviours of the row's user, as a list of items without times: MIND's column of clicked news. The k-th of
    a list becomes an event of its user k milliseconds after `at`, so that rows that repeat the list give the same
    events again, which are dropped as repetitions."""

    __pydantic_config__ = FORBID

    column: str
    """Column or SQL expression of the list of items, oldest first."""
    at: str
    """A time before the log, as ISO 8601: the first item of a list gets it, each next one a millisecond more."""
    labels: list[str] | None = None
    """The bool labels that are true for these behaviours; [] for none. Required if the log has bool labels."""

    def __post_init__(self) -> None:
        if milliseconds(self.at) is None:
            raise ValueError(f"history.at is '{self.at}', which is no ISO 8601 time; write such as '2019-10-12'")


@dataclass(frozen=True)
class Section(Files):
    """Files that describe items or users, or that have features of them as they change."""

    __pydantic_config__ = FORBID

    files: str
    """Pattern of the files, relative to their folder (`*`, `?`, `[...]`)."""
    item: str | None = None
    """Column or SQL expression of the item's id."""
    user: str | None = None
    """Column or SQL expression of the user's id; if a user has several rows, the first is used."""
    time: Time | None = None
    """Time from which a row holds, as that of events: {column, unit}."""
    texts: dict[str, str] = field(default_factory=dict)
    """Texts by name: {name: column or SQL expression}, or a list of columns that keep their names."""
    attributes: dict[str, str] = field(default_factory=dict)
    """Categorical attributes by name, likewise."""
    categories: dict[str, str] = field(default_factory=dict)
    """Categorical features by name, likewise."""
    numbers: dict[str, str] = field(default_factory=dict)
    """Numbers by name, likewise."""
    folder: str = ""
    """Folder of the item files, relative to the input folder, such as `../catalogue`; empty: the input folder."""
    optional: bool = False
    """true: a log without item files is read too; its items have no texts and are counted."""
    keep: str = "used"
    """used: the catalogue holds the items with at least `core` behaviours. all: also every item of the item files, so
    that new items have semantic IDs and can be recommended; `core` then limits users, and items that the files lack."""

    def __post_init__(self) -> None:
        if self.keep not in ("used", "all"):
            raise ValueError(f"items.keep is '{self.keep}'; it is one of used, all")
        self.check_files()
        _check_sql(self.expressions)

    @property
    def key(self) -> str:
        """The column of events that it is of."""
        return "item_id" if self.item else "user_id"

    @property
    def origins(self) -> dict[str, str]:
        """Its columns, each with what it is in the raw file."""
        return {
            self.key: str(self.item or self.user),
            **({"timestamp_ms": self.time.origin} if self.time else {}),
            **{f"text_{name}": text for name, text in self.texts.items()},
            **{f"cat_{name}": text for name, text in {**self.attributes, **self.categories}.items()},
            **{f"num_{name}": text for name, text in self.numbers.items()},
        }

    @property
    def expressions(self) -> list[str]:
        given = [self.item or self.user, self.time.column if self.time else None]
        named = (self.texts, self.attributes, self.categories, self.numbers)
        return [text for text in (*given, *(text for each in named for text in each.values())) if text]

    @property
    def schema(self) -> pa.Schema:
        """Its columns; those of a table with times in the order of events."""
        kinds = {"timestamp_ms": pa.int64()}
        every = [
            pa.field(name, kinds.get(name, pa.float32() if name.startswith("num_") else pa.string()))
            for name in self.origins
        ]
        timed = [f for kind in ("num_", "cat_") for f in every if f.name.startswith(kind)]
        return pa.schema([*every[:2], *timed] if self.time else every)

    @property
    def features(self) -> pa.Schema:
        """Its features alone."""
        return pa.schema([f for f in self.schema if f.name.startswith(("num_", "cat_"))])

    def listed(self, input_uri: str, what: str) -> list[str]:
        """Its files relative to the input folder; UserError if there is none."""
        folder = join(input_uri, self.folder) if self.folder else input_uri
        filesystem, path = open_uri(folder)
        if self.optional and filesystem.get_file_info(path).type != fs.FileType.Directory:
            return []
        files = list_files(folder, self.files, required=not self.optional, what=f"{what} file")
        return [join(self.folder, file) if self.folder else file for file in files]

    def read(self, input_uri: str, file: str, digest: Any = None) -> Iterator[Block]:
        """Streams a file as rows of `schema`: ids, texts and attributes are text, empty ones null."""
        uri = join(input_uri, file)
        for frame in read_frames(uri, self, self.expressions, digest):
            row = _Rows(frame.rows, {name: text for name, text in self._wanted().items()}, uri)
            row.ids(self.key, str(self.item or self.user))
            if self.time:
                row.time("timestamp_ms", self.time)
            for name, text in self.origins.items():
                if name.startswith("num_"):
                    row.number(name, text)
                elif name.startswith(("text_", "cat_")):
                    row.text(name)
            yield row.block(frame, file, None, self.schema)

    def _wanted(self) -> dict[str, str]:
        return {**self.origins, **({"timestamp_ms": str(self.time.column)} if self.time else {})}


@dataclass(frozen=True)
class Log(Files):
    """A log described column by column."""

    __pydantic_config__ = FORBID

    files: str
    """Pattern of the event files, relative to the input folder (`*`, `?`, `[...]`); files of `items` and `users` that
    it matches too are left out."""
    user: str
    """Column or SQL expression of the user's id."""
    item: str | None = None
    """Column or SQL expression of the item's id; with `sequence`, of an item that comes after the list, if any."""
    time: Time | None = None
    """When the event happened: {column, unit: s | ms | us | ns | iso | order}, or {column, format: '%d.%m.%Y'}."""
    sequence: str | None = None
    """Instead of `time`: a list of all items of the row's user, oldest first; each becomes an event, and its time is its
    place in the list."""
    query: str | None = None
    """Column or SQL expression of the search query."""
    request: str | None = None
    """Column or SQL expression of the id of the request or page view."""
    position: str | None = None
    """Column or SQL expression of the rank shown, from 0; with `explode` it is the rank in the list."""
    labels: dict[str, Label] = field(default_factory=dict)
    """Labels by name: {name: column or SQL expression}, or {name: {column, type, time, ...}}."""
    numbers: dict[str, str] = field(default_factory=dict)
    """Numeric features, known before the event, by name: {name: column or SQL expression}, or a list of columns."""
    categories: dict[str, str] = field(default_factory=dict)
    """Categorical features, known before the event, likewise."""
    explode: dict[str, str] = field(default_factory=dict)
    """Lists of equal length that become one row per element: {name: list column or SQL expression}; the other keys read
    the elements by these names. A row with an empty list is rejected."""
    history: History | None = None
    """Earlier behaviours without times: {column, at, labels}."""
    items: Section | None = None
    """The item files: {files, item, texts, attributes, numbers}."""
    users: Section | None = None
    """The user files: {files, user, attributes}; attributes are categories of each of the user's events."""
    as_of: dict[str, Section] = field(default_factory=dict)
    """Files of features of items or users that change over time, by name: {files, item or user, time, numbers}."""

    counting = False
    """Whether events have the label REPEATS too, 1 until repeated ones are put together (`counted`)."""

    def __post_init__(self) -> None:
        self.check_files()
        if self.sequence is None and (self.item is None or self.time is None):
            missing = "item" if self.item is None else "time"
            example = {"item": "item: item_id", "time": "time: {column: time_ms, unit: ms}"}[missing]
            raise ValueError(f"'{missing}' is missing; add such as '{example}'")
        if self.sequence is not None:
            if self.time or self.explode or self.labels or self.history or self.request or self.position:
                raise ValueError(
                    "'sequence' is of lists without times or labels; leave out 'time', 'explode' and others"
                )
            object.__setattr__(self, "time", Time(unit="order"))
        assert self.time is not None
        for name, label in self.labels.items():
            self.labels[name] = self._timed(name, label)
        for kind in ("labels", "numbers", "categories", "explode"):
            _check_names(getattr(self, kind), kind)
        _check_section("items", self.items, "item", ("texts", "attributes", "numbers", "folder", "optional", "keep"))
        _check_section("users", self.users, "user", ("attributes",))
        for name, of in self.as_of.items():
            _check_names([name], "as_of")
            _check_section(f"as_of.{name}", of, "item" if of.item else "user", ("numbers", "categories", "time"))
            if of.time is None or not of.features.names:
                raise ValueError(
                    f"as_of.{name} needs 'time', and 'numbers' or 'categories'; add such as 'time: {{column: at, unit: ms}}'"
                )
            if of.time.clock != self.time.clock:
                raise ValueError(f"as_of.{name}.time has unit {of.time.unit}, which is not of the log's clock")
        features = [f"num_{name}" for name in self.numbers]
        features += [
            f"cat_{name}" for each in (self.categories, self.users.attributes if self.users else {}) for name in each
        ]
        features += [name for of in self.as_of.values() for name in of.features.names]
        if twice := [name for name, times in Counter(features).items() if times > 1]:
            raise ValueError(f"'{twice[0][4:]}' is the name of two features; give one of them another name")
        if self.history:
            self._check_history(self.history)
        _check_sql(self.expressions)

    def _timed(self, name: str, label: Label) -> Label:
        """The label with its `time` built, in the unit of the log's time unless it has its own."""
        where, time, own = f"labels.{name}", label.time, self.time
        assert own is not None
        if label.delay_minutes is not None and not own.clock:
            raise ValueError(f"{where}.delay_minutes needs clock times, but time.unit is order; give '{where}.time'")
        if time is None or isinstance(time, Time):
            return label
        if own.column is None:
            raise ValueError(f"{where}.time needs times, but those of the log are the order of rows; take it out")
        time = {"column": time} if isinstance(time, str) else time
        as_log = {key: value for key in ("unit", "format", "zone") if (value := getattr(own, key)) is not None}
        built: Time = build(Time, {**({} if {"unit", "format"} & set(time) else as_log), **time}, f"{where}.time.")
        if built.clock != own.clock:
            raise ValueError(
                f"{where}.time has unit {built.written}, but the log's time has {own.written}; give both one"
            )
        return replace(label, time=built)

    def _check_history(self, history: History) -> None:
        flags = [name for name, label in self.labels.items() if label.type == "bool"]
        if not self.info["clock"]:
            raise ValueError(
                "'history' dates behaviours before the log, which needs clock times; for lists alone set 'sequence'"
            )
        if history.labels is None and flags:
            raise ValueError(
                f"'history.labels' is missing; say which labels the earlier behaviours have, of {', '.join(flags)}, or []"
            )
        if unknown := [name for name in history.labels or [] if name not in flags]:
            raise ValueError(
                f"history.labels has '{unknown[0]}', which is no bool label; those are {', '.join(flags) or 'none'}"
            )

    @property
    def info(self) -> dict[str, Any]:
        """`labels` {name: bool | float32}, `numbers` [name], `categories` [name], `clock`: whether timestamps are clock
        times (else `timestamp_ms` is an ordinal), `ranges` of labels, and `known`, where labels are known later than
        their event: what says when."""
        known = {
            name: {"column": label.time.column, "unit": label.time.written}
            if label.time
            else {"delay_minutes": label.delay_minutes}
            for name, label in self.labels.items()
            if label.late
        }
        labels = {name: label.type for name, label in self.labels.items()} | (
            {REPEATS: "float32"} if self.counting else {}
        )
        return {
            **({"known": known} if known else {}),
            "labels": labels,
            "numbers": list(self.numbers),
            "categories": [*self.categories, *(self.users.attributes if self.users else ())],
            "clock": bool(self.time and self.time.clock),
            "ranges": {name: label.range for name, label in self.labels.items() if label.range is not None},
            **({"history": self.history.column} if self.history else {}),
        }

    @property
    def schema(self) -> pa.Schema:
        """Schema of the events, without LOG_ROW."""
        info = self.info
        return events_schema(info["labels"], info["numbers"], info["categories"], info.get("known", ()))

    def counted(self) -> Log:
        """The log whose events have the label REPEATS."""
        if REPEATS in self.labels:
            raise UserError(
                f"duplicates is count, but the log has a label '{REPEATS}' already; name that label otherwise"
            )
        made = replace(self)
        object.__setattr__(made, "counting", True)
        return made

    @property
    def config(self) -> dict[str, Any]:
        """What is not at its default, as plain values."""
        return dict(_given(self))

    @property
    def events_config(self) -> dict[str, Any]:
        """The part of `config` that the events depend on."""
        return {key: value for key, value in self.config.items() if key not in ("items", "as_of")}

    @property
    def absent(self) -> frozenset[str]:
        """Those of `query`, `request_id` and `position` that no event has. Null, "" and 0 stand for them."""
        request, position = self.request or self.explode, self.position or self.explode
        given = {"query": self.query, "request_id": request, "position": position}
        return frozenset(name for name, text in given.items() if not text)

    @property
    def items_columns(self) -> tuple[list[str], list[str]]:
        """Names of the item table's texts and attributes, without the `text_` and `cat_` prefixes."""
        return (list(self.items.texts), list(self.items.attributes)) if self.items else ([], [])

    @property
    def items_numbers(self) -> list[str]:
        return list(self.items.numbers) if self.items else []

    @property
    def items_schema(self) -> pa.Schema:
        return items_schema(*self.items_columns, self.items_numbers)

    @property
    def keeps_all_items(self) -> bool:
        """Whether the catalogue holds every item of the item files, with events or without."""
        return bool(self.items) and self.items.keep == "all"  # type: ignore[union-attr]

    @property
    def tables_as_of(self) -> dict[str, Section]:
        return self.as_of

    @property
    def origins(self) -> dict[str, str]:
        """The columns of events, each with what it is in the raw file."""
        single = {"query": self.query, "request_id": self.request, "position": self.position}
        users = self.users.attributes if self.users else {}
        item = " and then ".join(filter(None, [self.sequence, self.item]))
        time = "the place in its list" if self.sequence else self.time.origin if self.time else ""
        return {
            "user_id": self.user,
            "item_id": item,
            "timestamp_ms": time,
            **{target: text for target, text in single.items() if text},
            **{f"label_{name}": label.column for name, label in self.labels.items()},
            **{f"known_{name}": label.known_from for name, label in self.labels.items() if label.late},
            **{f"num_{name}": text for name, text in self.numbers.items()},
            **{f"cat_{name}": text for name, text in self.categories.items()},
            **{f"cat_{name}": f"{text} of the users" for name, text in users.items()},
        }

    @property
    def _wanted(self) -> dict[str, str]:
        """The expressions of one event by what they are."""
        single = {
            "user_id": self.user,
            "item_id": self.item,
            "query": self.query,
            "request_id": self.request,
            "position": self.position,
        }
        times = {"timestamp_ms": self.time, **{f"known_{name}": label.time for name, label in self.labels.items()}}
        return {
            **{target: text for target, text in single.items() if text},
            **{target: time.column for target, time in times.items() if time and time.column},
            **{f"label_{name}": label.column for name, label in self.labels.items()},
            **{f"num_{name}": text for name, text in self.numbers.items()},
            **{f"cat_{name}": text for name, text in self.categories.items()},
        }

    @property
    def _lists(self) -> list[str]:
        """The expressions of lists."""
        every = [self.sequence, self.history.column if self.history else None, *self.explode.values()]
        return [text for text in every if text]

    @property
    def expressions(self) -> list[str]:
        return [*self._wanted.values(), *self._lists]

    def _needs(self) -> list[str]:
        """The expressions without which no row is an event, as far as columns of the file have them."""
        every = [self.user, self.item, self.sequence, self.time.column if self.time else None, *self.explode.values()]
        return [text for text in every if text]

    def event_files(self, input_uri: str) -> list[str]:
        """Raw event files relative to the input folder, sorted. UserError if there is none, or if they are of several
        formats, which are often the same events twice."""
        beside = [of.files for of in (self.items, self.users, *self.as_of.values()) if of and of.files != self.files]
        files = list_files(input_uri, self.files, required=True, what="event file", beside=beside)
        kinds = {self.format_of(file): file for file in files}
        if len(kinds) > 1:
            raise UserError(
                f"{input_uri} holds events as {' and as '.join(f'{kind} ({file})' for kind, file in kinds.items())}, "
                f"which may be the same; set 'files' to one of them"
            )
        return files

    def item_files(self, input_uri: str) -> list[str]:
        """Raw item files relative to the input folder, sorted; empty if the log has none."""
        return self.items.listed(input_uri, "item") if self.items else []

    def user_files(self, input_uri: str) -> list[str]:
        return self.users.listed(input_uri, "user") if self.users else []

    def read_users(self, input_uri: str, digests: dict[str, Any], beginning: bool = False) -> Block | None:
        """The rows of the user files, each user once, for `read_events`; None if the log has none. digests: takes the
        hash of each file. beginning: of the first file alone."""
        if self.users is None:
            return None
        blocks = []
        for file in self.user_files(input_uri)[: 1 if beginning else None]:
            for block in self.users.read(input_uri, file, digests.get(file)):
                blocks.append(block)
                if beginning:
                    break
        rows = pl.DataFrame(pa.concat_tables(block.rows for block in blocks)).unique(
            "user_id", keep="first", maintain_order=True
        )
        rejects = pa.concat_tables(block.rejects for block in blocks)
        missing = common(block.missing for block in blocks)
        return Block(
            rows.to_arrow().cast(self.users.schema), rejects, sum(block.rows_read for block in blocks), missing
        )

    def read_events(
        self,
        input_uri: str,
        file: str,
        users: pa.Table | None = None,
        piece: Piece | None = None,
        number: int = 0,
        digest: Any = None,
    ) -> Iterator[Block]:
        """Streams one file, or a piece of it, as bounded blocks, in the file's order. Rows of `Block.rows` have LOG_ROW
        too: unique and increasing within the piece, after lists are exploded.

        users: the rows of `read_users`. number: place of the piece in the log, for times that are the order of rows.
        UserError if the file cannot be read: a missing column, a wrong format, an empty or truncated file.
        """  # fmt: skip
        uri, first, schema = join(input_uri, file), 0, self.schema.append(LOG_ROW)
        said = {
            key: unquote(value) for key, _, value in (part.partition("=") for part in file.split("/")[:-1]) if value
        }
        needs = [text for text in self._needs() if not {*self.explode} & set(roots(text, list(self.explode)))]
        for order, frame in enumerate(read_frames(uri, self, self._raw(said), digest, piece)):
            rows = frame.rows.with_columns(pl.lit(None if value == "__HIVE_DEFAULT_PARTITION__" else value).alias(key)
                                           for key, value in said.items() if key not in frame.rows.columns)  # fmt: skip
            missing = {name: hint for name, hint in frame.missing.items() if name not in said}
            if order == 0 and (
                lost := [name for text in needs for name in roots(text, rows.columns) if name in missing]
            ):
                raise UserError(
                    f"{uri} has no column '{lost[0]}'; {missing[lost[0]]}; correct the source file or the log"
                )
            frame = Frame(
                rows.with_columns(pl.lit(None, pl.Null).alias(name) for name in missing), frame.broken, missing
            )
            for made in (self._rows(frame, uri, users, number), self._earlier(frame, uri, users)):
                for row in made:
                    block = row.block(frame, file, piece, schema, first)
                    first += block.rows_read
                    yield block
                    frame = replace(frame, broken=[])

    def _raw(self, said: dict[str, str]) -> list[str]:
        """The expressions over columns of the file; of those that also read elements of lists, or the names of folders,
        the columns of the file."""
        found = [text for text in self._lists if not {*roots(text, list(said))} & said.keys()]
        others = [*self.explode, *said]
        for text in self._wanted.values():
            names = roots(text, others)
            found += [text] if not {*names} & {*others} else [f'"{name}"' for name in names if name not in others]
        return found

    def _rows(self, frame: Frame, uri: str, users: pa.Table | None, number: int) -> Iterator[_Rows]:
        """The rows of a frame, one for each event."""
        rows = frame.rows
        if self.sequence:
            yield from self._listed(rows, uri, users)
            return
        if self.explode:
            rows = self._with_lists(rows, uri)
        if not len(rows):
            yield _Rows(rows, {}, uri)
            return
        for piece in _slices(rows, next(iter(self.explode), None)):
            if self.explode:
                piece = piece.explode([*self.explode, ELEMENT], empty_as_null=True, keep_nulls=True)
            row = _Rows(piece, self._wanted, uri)
            self._describe(row, users)
            row.time("timestamp_ms", self.time, number)
            for name, label in self.labels.items():
                row.flag(f"label_{name}", label.column) if label.type == "bool" else row.number(
                    f"label_{name}", label.column, label.range
                )
                if label.late:
                    row.known(name, label)
            for name, text in self.numbers.items():
                row.number(f"num_{name}", text)
            for name in self.categories:
                row.text(f"cat_{name}")
            yield row

    def _describe(self, row: _Rows, users: pa.Table | None, item: str | None = None) -> None:
        """Ids, query and position, and what is known of the users."""
        row.ids("user_id", self.user)
        row.ids("item_id", item or str(self.item))
        if self.query:
            row.text("query")
        if self.request:
            row.ids("request_id", self.request)
        elif self.explode:
            row.values["request_id"] = row.raw[REQUEST]
        if self.position:
            row.integer("position", self.position)
        elif self.explode:
            row.values["position"] = row.raw[ELEMENT].fill_null(0).cast(pl.Int32)
            row.reject(row.raw[UNEQUAL].fill_null(False), f"{item or self.item}: lists of unequal length")
        if users is not None:
            row.join(users)

    def _with_lists(self, rows: pl.DataFrame, uri: str) -> pl.DataFrame:
        """The rows with the lists, the places of their elements, and the id of a request: a hash of what the row holds,
        so that the same row in two files is one request. Lists of unequal length are null."""
        columns = [name for name in rows.columns if name != ROW]
        made, _ = _evaluate(rows, self.explode, uri)
        for name, text in self.explode.items():
            if not isinstance(made[name].dtype, pl.List | pl.Null):
                raise UserError(
                    f"{uri}: explode.{name} is {made[name].dtype}, not a list; split text with string_to_array({text}, ' ')"
                )
        lists = [pl.lit(0) if made[name].dtype == pl.Null else pl.col(name).list.len().fill_null(0) for name in made.columns]
        lengths = made.select(each.alias(name) for name, each in zip(made.columns, lists, strict=True))
        fits = lengths.select(pl.all_horizontal(pl.all() == pl.nth(0))).to_series()
        length = pl.select(pl.when(fits).then(lengths.to_series(0)).otherwise(0)).to_series()
        lists = [
            pl.select(pl.when(fits & (length > 0)).then(made[name]).alias(name)).to_series() for name in made.columns
        ]
        place = pl.select(pl.int_ranges(0, length, dtype=pl.Int32)).to_series()
        place = pl.select(pl.when(length > 0).then(place).alias(ELEMENT)).to_series()
        digest = rows.select(columns).hash_rows(seed=0).map_elements(lambda h: f"{h:016x}", pl.String)
        return rows.with_columns(*lists, place, digest.alias(REQUEST), (~fits).alias(UNEQUAL))

    def _listed(self, rows: pl.DataFrame, uri: str, users: pa.Table | None) -> Iterator[_Rows]:
        """The events of whole sequences: at the place in the list of each, the item of `item` at its end."""
        wanted = {"list": str(self.sequence), **({"end": self.item} if self.item else {})}
        made, _ = _evaluate(rows, wanted, uri)
        if not isinstance(made["list"].dtype, pl.List | pl.Null):
            raise UserError(
                f"{uri}: sequence is {made['list'].dtype}, not a list; split text with string_to_array({self.sequence}, ' ')"
            )
        items = pl.col("list").cast(pl.List(pl.String)).fill_null([])
        items = pl.concat_list(items, pl.col("end").cast(pl.String)) if self.item else items
        rows = rows.with_columns(made.select(items.alias("__items")).to_series())
        rows = rows.with_columns(pl.int_ranges(0, pl.col("__items").list.len()).alias(ELEMENT))
        for piece in _slices(rows, "__items"):
            piece = piece.explode("__items", ELEMENT, empty_as_null=True, keep_nulls=True)
            row = _Rows(piece, {"user_id": self.user, "item_id": "__items"}, uri)
            self._describe(row, users, self.sequence)
            row.values["timestamp_ms"] = piece[ELEMENT].fill_null(0)
            yield row

    def _earlier(self, frame: Frame, uri: str, users: pa.Table | None) -> Iterator[_Rows]:
        """The earlier behaviours that the rows name, one row each. Lists that a user has twice are taken once; rows
        without a user or a time, which are rejects themselves, are left out."""
        if self.history is None or not len(frame.rows):
            return
        assert self.time is not None
        at = milliseconds(self.history.at)
        made, _ = _evaluate(
            frame.rows, {"user": self.user, "list": self.history.column, "time": str(self.time.column)}, uri
        )
        if not isinstance(made["list"].dtype, pl.List | pl.Null):
            raise UserError(
                f"{uri}: history.column is {made['list'].dtype}, not a list; split text with string_to_array({self.history.column}, ' ')"
            )
        time, bad = moments(made["time"], self.time, str(self.time.column))
        rows = frame.rows.with_columns(
            made["list"].cast(pl.List(pl.String)).alias("__items"),
            _clean(made["user"], uri, self.user).alias("__user"),
            time.alias("__time"),
        )
        rows = rows.filter(bad.is_null() & pl.col("__user").is_not_null() & (pl.col("__items").list.len() > 0))
        rows = rows.sort("__time", maintain_order=True).unique(["__user", "__items"], keep="first", maintain_order=True)
        rows = rows.sort(ROW).with_columns(pl.int_ranges(0, pl.col("__items").list.len()).alias(ELEMENT))
        for piece in _slices(rows, "__items"):
            piece = piece.explode("__items", ELEMENT)
            row = _Rows(piece, {"user_id": self.user, "item_id": "__items"}, uri)
            row.ids("user_id", self.user)
            row.ids("item_id", self.history.column)
            if users is not None:
                row.join(users)
            row.values["timestamp_ms"] = piece[ELEMENT] + at
            for name in self.history.labels or ():
                row.values[f"label_{name}"] = pl.repeat(True, len(piece), eager=True)
                if self.labels[name].late:
                    row.values[f"known_{name}"] = row.values["timestamp_ms"]
            late = row.values["timestamp_ms"] >= piece["__time"]
            row.reject(
                late, f"{self.history.column}: not before its row, give an earlier history.at than {self.history.at}"
            )
            yield row


@dataclass(frozen=True)
class Block:
    """A bounded piece of a raw log, or of the files of a section."""

    rows: pa.Table
    """Rows of the schema."""
    rejects: pa.Table
    """Rows that break the schema and lines that are no rows, as `tables.REJECTS`."""
    rows_read: int
    """Rows read, after lists are exploded: those of `rows` and rejects."""
    missing: dict[str, str] = field(default_factory=dict)
    """Columns that are not there, each with a hint at the nearest; a mistake if no block of the log has one."""


@dataclass
class Rejected:
    """How much of what was read was rejected, and why."""

    rows_read: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    """The first rejected row of each reason: where and what."""

    @classmethod
    def of(cls, block: Block) -> Rejected:
        found = cls(block.rows_read, Counter(block.rejects["reason"].to_pylist()))
        if found.reasons:
            first = pl.DataFrame(block.rejects).unique("reason", keep="first", maintain_order=True)
            for row in first.to_dicts():
                piece = f" of the piece at {row['piece']:,}" if row["piece"] else ""
                place = f"{row['file']} row {row['row']:,}{piece} (from 0, without header and blank lines)"
                found.examples[row["reason"]] = f"{place}: {row['source'][:200]}"
        return found

    def add(self, other: Rejected) -> None:
        """Adds what `other` counts; the result does not depend on the order."""
        self.rows_read += other.rows_read
        self.reasons.update(other.reasons)
        for reason, example in other.examples.items():
            self.examples[reason] = min(example, self.examples.get(reason, example))


def common(missing: Iterable[dict[str, str]]) -> dict[str, str]:
    """What all of these lack."""
    every = list(missing)
    return {name: hint for name, hint in every[0].items() if all(name in each for each in every)} if every else {}


class _Rows:
    """Rows of a frame on their way to a table: values by target column, and the first reason why a row is rejected."""

    def __init__(self, raw: pl.DataFrame, wanted: dict[str, str], uri: str) -> None:
        self.raw, self.uri, self.texts = raw, uri, wanted
        self.made, bad = _evaluate(raw, wanted, uri)
        self.values: dict[str, pl.Series] = {}
        self.reasons: list[pl.Series] = []
        for where, reason in bad:
            self.reject(where, reason)

    def reject(self, where: pl.Series, reason: str) -> None:
        if where.any():
            self.reasons.append(pl.select(pl.when(where).then(pl.lit(reason))).to_series())

    def _refuse(self, target: str, need: str) -> UserError:
        return UserError(
            f"{self.uri}: '{self.texts[target]}' is {self.made[target].dtype}, not {need}; convert it in the log, or with an "
            f"expression of SQL"
        )

    def ids(self, target: str, what: str) -> None:
        """An id as text; a word for nothing is none."""
        values = self.made[target]
        made = _clean(values, self.uri, what)
        self.values[target] = made
        if made.null_count():
            nothing = (
                values.is_null() if values.dtype != pl.String else values.is_null() | (values.str.strip_chars() == "")
            )
            self.reject(nothing & made.is_null(), f"{what}: missing")
            word = "not UTF-8 text" if values.dtype == pl.Binary else "missing, written as text such as nan or null"
            self.reject(~nothing & made.is_null(), f"{what}: {word}")

    def text(self, target: str) -> None:
        """Text; of lists the elements joined by blanks; empty text is null."""
        values = self.made[target]
        if isinstance(values.dtype, pl.List):
            values = values.cast(pl.List(pl.String)).list.join(" ", ignore_nulls=True)
        elif values.dtype.is_nested() or values.dtype == pl.Binary:
            raise self._refuse(target, "text")
        elif values.dtype.is_float():
            values = _floats(values)
        values = values.cast(pl.String)
        if target.startswith("text_") or values.dtype != pl.String:
            values = values.str.strip_chars()
        self.values[target] = pl.select(pl.when(values != "").then(values)).to_series()

    def time(self, target: str, time: Time | None, number: int = 0) -> None:
        assert time is not None
        if time.column is None:
            self.values[target] = self.raw[ROW] + (number << 40)
            return
        try:
            self.values[target], reason = moments(self.made[target], time, time.column)
        except TypeError:
            raise self._refuse(target, f"times as {time.written}") from None
        if reason.null_count() < len(reason):
            self.reasons.append(reason)

    def known(self, name: str, label: Label) -> None:
        """From when on the label is known, where it is set; null elsewhere."""
        value, stamp, target = self.values[f"label_{name}"], self.values["timestamp_ms"], f"known_{name}"
        set_ = value.fill_null(False) if label.type == "bool" else value.is_not_null()
        if label.time is None:
            moment = stamp + round((label.delay_minutes or 0) * 60_000)
        else:
            moment, reason = moments(self.made[target], label.time, label.time.column)
            said = pl.select(pl.when(set_).then(reason + f" (time of the label {name})")).to_series()
            self.reasons.append(said)
            early = f"{label.time.column}: before its event, check labels.{name}.time"
            self.reject(set_ & (moment < stamp).fill_null(False), early)
        self.values[target] = pl.select(pl.when(set_).then(moment)).to_series()

    def integer(self, target: str, what: str) -> None:
        values = self.made[target]
        number = values.str.strip_chars() if values.dtype == pl.String else values
        number = number.cast(pl.Int64, strict=False)
        self.reject(number.is_null(), f"{what}: missing or not an integer")
        self.reject(
            ((number < 0) | (number > LAST_INT32)).fill_null(False), f"{what}: negative, or more than int32 holds"
        )
        self.values[target] = number.cast(pl.Int32, strict=False)

    def number(self, target: str, what: str, span: list[float] | None = None) -> None:
        """A finite float32 within `span`, or null where the log has none."""
        values = self.made[target]
        if not (values.dtype == pl.String or values.dtype.is_numeric() or values.dtype in (pl.Boolean, pl.Null)):
            raise self._refuse(target, "numbers")
        values = values.str.strip_chars() if values.dtype == pl.String else values
        known = values.is_not_null() & (values != "") if values.dtype == pl.String else values.is_not_null()
        number = values.cast(pl.Float32, strict=False)
        comma = known & number.is_null()
        if comma.any() and values.dtype == pl.String:
            remedy = f"{what}: not a number, write such as cast(replace({what}, ',', '.') as double)"
            self.reject(comma & values.str.contains(r"^[+-]?[\d.,' ]*\d[,.]\d+$"), remedy)
        self.reject(comma, f"{what}: not a number")
        self.reject(number.is_not_null() & ~number.is_finite().fill_null(True), f"{what}: not finite")
        if span is not None:
            low, high = span
            self.reject(((number < low) | (number > high)).fill_null(False), f"{what}: outside {low:g} to {high:g}")
        self.values[target] = number

    def flag(self, target: str, what: str) -> None:
        """A bool, or 0, 1, true, false; null where the log has none."""
        values = self.made[target]
        if values.dtype in (pl.Boolean, pl.Null):
            self.values[target] = values.cast(pl.Boolean)
            return
        if not (values.dtype == pl.String or values.dtype.is_numeric()):
            raise self._refuse(target, "0, 1, true or false")
        raw = values.cast(pl.String).str.to_lowercase()
        yes, no = raw.is_in(["1", "true", "1.0"]), raw.is_in(["0", "false", "0.0"])
        self.reject(
            ~(yes | no) & raw.is_not_null() & (raw != ""),
            f"{what}: not a bool, compare it, such as cast({what} as double) > 0",
        )
        self.values[target] = pl.select(pl.when(yes | no).then(yes)).to_series()

    def join(self, users: pa.Table) -> None:
        """What the user files say of the users."""
        known = pl.DataFrame(users)
        found = self.values["user_id"].to_frame("user_id").join(known, on="user_id", how="left", maintain_order="left")
        self.values |= {name: found[name] for name in known.columns if name != "user_id"}

    def block(self, frame: Frame, file: str, piece: Piece | None, schema: pa.Schema, first: int = 0) -> Block:
        """The rows as a table of the schema, with LOG_ROW from `first` if it has that, and the rejects."""
        rows, kept = len(self.raw), None
        rejects = [_broken(frame, file, piece)] if frame.broken else []
        self.values["log_row"] = pl.int_range(first, first + rows, eager=True)
        unset = {"request_id": pl.lit(""), "position": pl.lit(0, pl.Int32), f"label_{REPEATS}": pl.lit(1.0)}
        if self.reasons:
            reason = pl.select(pl.coalesce(self.reasons)).to_series()
            if reason.null_count() < rows:
                kept = reason.is_null()
                rejects.append(self._rejects(reason, ~kept, file, piece))
        every = self.raw.select(
            self.values.get(f.name, unset.get(f.name, pl.lit(None)) if f.name not in self.values else None).alias(f.name) for f in schema
        ) if rows else None  # fmt: skip
        table = (
            schema.empty_table()
            if every is None
            else (every.filter(kept) if kept is not None else every).to_arrow().cast(schema)
        )
        rejected = pa.concat_tables(rejects) if rejects else REJECTS.empty_table()
        return Block(table, rejected, rows + len(frame.broken), frame.missing)

    def _rejects(self, reason: pl.Series, where: pl.Series, file: str, piece: Piece | None) -> pa.Table:
        names = [name for name in self.raw.columns if not name.startswith("__")]
        lost = self.raw.filter(where)
        return lost.select(
            pl.lit(file).alias("file"),
            pl.lit(piece.start if piece else 0, pl.Int64).alias("piece"),
            pl.col(ROW).alias("row"),
            reason.filter(where).alias("reason"),
            pl.struct(names).struct.json_encode().str.slice(0, LONGEST_QUOTE).alias("source"),
        ).to_arrow().cast(REJECTS)  # fmt: skip


def _broken(frame: Frame, file: str, piece: Piece | None) -> pa.Table:
    start = piece.start if piece else 0
    rows = [
        {"file": file, "piece": start, "row": n, "reason": why, "source": json.dumps({"line": text})}
        for n, why, text in frame.broken
    ]
    return pa.Table.from_pylist(rows, REJECTS)


def _slices(rows: pl.DataFrame, name: str | None) -> Iterator[pl.DataFrame]:
    """Slices of rows whose lists come to about EXPLODED_ROWS elements, so that blocks stay bounded."""
    if name is None:
        yield rows
        return
    elements = int(rows[name].list.len().sum() or 0) if isinstance(rows[name].dtype, pl.List) else 0
    yield from rows.iter_slices(max(1, len(rows) * EXPLODED_ROWS // max(elements, EXPLODED_ROWS)))


def _floats(values: pl.Series) -> pl.Series:
    """Floats as text, whole ones without their point."""
    whole = values.cast(pl.Int64, strict=False)
    same = (whole.cast(values.dtype) == values) & (values.abs() < 2**53)
    text = pl.when(same).then(whole.cast(pl.String)).when(values.is_not_nan()).then(values.cast(pl.String))
    return pl.select(text).to_series()


def _clean(values: pl.Series, uri: str, what: str) -> pl.Series:
    """Ids as `clean_id` has them."""
    kind = values.dtype
    if kind.is_nested() or kind.is_temporal():
        remedy = "name a field of it" if isinstance(kind, pl.Struct) else "explode lists of items"
        raise UserError(
            f"{uri}: '{what}' is {kind}, not text or integers; {remedy}, or convert it with an expression of SQL"
        )
    text = _floats(values) if kind.is_float() else values.cast(pl.String, strict=False)
    if kind.is_integer():
        return text
    odd = text.str.contains(ODD).fill_null(False)
    if not odd.any():
        return text
    strange = text.filter(odd)
    known = {value: clean_id(value) for value in strange.unique().to_list()}  # once per different value
    return text.scatter(odd.arg_true(), strange.replace_strict(known, return_dtype=pl.String))


def _expression(text: str, columns: list[str]) -> pl.Expr:
    """A column of that very name, else SQL over the columns."""
    return pl.col(text) if text in columns else pl.sql_expr(text)


def _evaluate(rows: pl.DataFrame, wanted: dict[str, str], uri: str) -> tuple[pl.DataFrame, list[tuple[pl.Series, str]]]:
    """The expressions by name, and of values that a `cast` cannot read where they are, with the reason."""
    if not wanted:
        return pl.DataFrame(), []
    try:
        made = {name: _expression(text, rows.columns).alias(name) for name, text in wanted.items()}
        return rows.with_columns(pl.lit(0).alias("__one")).select("__one", **made).drop("__one"), []
    except pl.exceptions.PolarsError as error:
        if len(wanted) > 1:
            found, bad = [], []
            for name, text in wanted.items():
                column, strange = _evaluate(rows, {name: text}, uri)
                found.append(column[name])
                bad += strange
            return pl.DataFrame(found), bad
        ((name, text),) = wanted.items()
        tolerant = CAST.sub("try_cast(", text)
        absent = any(rows[root].dtype == pl.Null for root in roots(text, rows.columns) if root in rows.columns)
        if absent or isinstance(error, pl.exceptions.StructFieldNotFoundError):
            return pl.DataFrame({name: pl.Series([None] * len(rows), dtype=pl.Null)}), []
        if tolerant == text or not isinstance(error, pl.exceptions.InvalidOperationError):
            reason = " ".join(str(error).split("This error occurred")[0].split())[:200]
            raise UserError(
                f"{uri}: '{text}' cannot be worked out ({reason}); correct the source file, such as with cast(... as double)"
            ) from None
        column, _ = _evaluate(rows, {name: tolerant}, uri)
        bad = pl.repeat(False, len(rows), eager=True)
        for inner in _casts(tolerant):  # a value that is there, and is not any more after a cast
            before, _ = _evaluate(rows, {"x": inner[0]}, uri)
            after, _ = _evaluate(rows, {"x": inner[1]}, uri)
            bad = bad | (before["x"].is_not_null() & after["x"].is_null())
        bad = bad & column[name].is_null()
        return column, [(bad, f"{text}: a value that cannot be read; write try_cast where it may be empty")]


def _casts(text: str) -> list[tuple[str, str]]:
    """What each `try_cast(what as type)` of an expression reads, and all of it."""
    found = []
    for start in re.finditer(r"(?i)try_cast\s*\(", text):
        depth, at = 1, start.end()
        while depth and at < len(text):
            depth += {"(": 1, ")": -1}.get(text[at], 0)
            at += 1
        inner = text[start.end() : at - 1]
        found.append((re.sub(r"(?is)\s+as\s+[^()]*(\([^()]*\))?\s*$", "", inner), text[start.start() : at]))
    return found


def _check_sql(expressions: Iterable[str]) -> None:
    """ValueError for what is neither the name of a column nor an expression of one row."""
    for text in expressions:
        try:
            meta = pl.sql_expr(text).meta
        except pl.exceptions.PolarsError as error:
            if re.fullmatch(r"[^()'\"|]+", text):  # a column with the name of a word of SQL
                continue
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"'{text}' is no SQL expression ({reason}); correct it, with names of odd columns in double quotes"
            ) from error
        try:
            of_rows = meta.is_length_preserving() or meta.is_literal()
        except pl.exceptions.PolarsError:  # `in` asks for columns
            of_rows = True
        if not of_rows:
            raise ValueError(
                f"'{text}' is no expression of one row, such as sums are; write one of the columns of a row"
            )


def _check_names(names: Iterable[str], key: str) -> None:
    for name in names:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ValueError(f"'{name}' in '{key}' is no name; use letters, digits and _, and begin with a letter")


def _check_section(where: str, of: Section | None, key: str, known: tuple[str, ...]) -> None:
    """ValueError for a section without its id, or with keys of other sections."""
    if of is None:
        return
    if not getattr(of, key):
        raise ValueError(f"'{where}.{key}' is missing; add such as '{key}: {key}_id'")
    allowed = {"files", key, *known, *(f.name for f in fields(Files))}
    for name in _given(of):
        if name not in allowed:
            raise ValueError(f"unknown key '{where}.{name}'; it takes {', '.join(sorted(allowed))}")
    for kind in ("texts", "attributes", "numbers", "categories"):
        _check_names(getattr(of, kind), f"{where}.{kind}")
    if where == "users" and not of.attributes:
        raise ValueError("users.attributes is empty; name at least one column, or leave out users")


def _given(value: Any) -> Any:
    """Of a dataclass the fields that are not at their default, as plain values, whatever it is in."""
    if isinstance(value, dict):
        return {key: _given(each) for key, each in value.items()}
    if not is_dataclass(value):
        return value
    own = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(value)}
    return {name: _given(each) for name, default in own.items() if (each := getattr(value, name)) != default}


def _plain(content: dict[str, Any]) -> dict[str, Any]:
    """The keys of a mapping file with its short forms written out: lists of columns, labels that are an expression."""
    made = dict(content)
    for key in ("numbers", "categories", "explode", "texts", "attributes"):
        value = made.get(key)
        if isinstance(value, list):
            if bad := [name for name in value if not isinstance(name, str) or not NAME.fullmatch(name)]:
                raise ValueError(f"'{key}' lists {bad[0]!r}, which is no name; write {{name: {bad[0]!r}, ...}}")
            made[key] = {name: name for name in value}
    if isinstance(made.get("labels"), dict):
        made["labels"] = {
            n: {"column": label} if isinstance(label, str) else label for n, label in made["labels"].items()
        }
    for key in ("items", "users"):
        if isinstance(made.get(key), dict):
            made[key] = _plain(made[key])
    if isinstance(made.get("as_of"), dict):
        made["as_of"] = {name: _plain(of) if isinstance(of, dict) else of for name, of in made["as_of"].items()}
    return made


def log_of(content: dict[str, Any]) -> Log:
    """The log that the keys of a mapping file describe; ValueError for what they cannot be."""
    log: Log = build(Log, _plain(content))
    return log


def load_source(uri: str, remedy: str = "check --source") -> tuple[Log, dict[str, Any]]:
    """The log that a mapping file describes, and its `prepare` section (settings of jobs.prepare; empty if there is
    none). UserError for a missing or damaged file (with the `remedy`), for an unknown key (with the nearest known one),
    and for values that cannot be."""
    content = read_yaml(uri, remedy)
    prepare = content.pop("prepare", None) or {}
    if not isinstance(prepare, dict):
        raise UserError(f"{uri}: 'prepare' is {type(prepare).__name__}, not a mapping of options")
    try:
        return log_of(content), prepare
    except ValueError as error:
        raise UserError(f"{uri}: {error}") from error
