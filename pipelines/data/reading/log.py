"""A log as a mapping file describes it: what a column is, is an SQL expression over the columns of the file.

    files: transactions_*.csv*
    user: customer_id
    item: lpad(article_id, 10, '0')
    time: {column: "day || ' ' || clock", format: "%d.%m.%Y %H:%M:%S", zone: Europe/Berlin}
    labels: {bought: "cast(quantity as double) > 0"}
    items: {files: articles.csv, item: "lpad(article_id, 10, '0')", texts: {title: "lower(name)"}}

The SQL is that of polars (`pl.sql_expr`); a text that is the name of a column is that column. `Log.read_events` gives
bounded blocks of events and of rejects, `Section.read` those of items, users and tables of features.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import unquote

import polars as pl
import pyarrow as pa
from pyarrow import fs

from models.config import build, read_yaml
from models.storage.tables import UserError, join, open_uri
from pipelines.data.reading.read import (
    ROW,
    FilePart,
    Files,
    list_files,
    read_frames,
    roots,
)
from pipelines.data.reading.rows import (
    Block,
    Rows,
    as_text,
    check_sql,
    clean_ids,
    common,
    evaluate,
    evaluate_list,
    slices,
)
from pipelines.data.reading.times import Time, milliseconds, moments
from pipelines.data.schemas import LABEL_TYPES, REJECTS, events_schema, items_schema

LOG_ROW = pa.field("log_row", pa.int64(), nullable=False)
UNSET = {"request_id": "", "position": 0}
"""Values of columns that a log does not have; the others are null."""
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
LONGEST_NAME = 80  # MLflow takes 250 characters, of which a metric may have two names
CUTOFF = re.compile(r"_at_\d+$")  # how MLflow's names write the @10 of ndcg@10
METRIC_WORDS = ("mean", "with_position")
"""What metrics begin with that are of no single label."""
MOST_MINUTES = 60 * 24 * 3660  # ten years: a longer delay is a wrong unit
ELEMENT, REQUEST, UNEQUAL, LIST = "__element", "__request", "__unequal", "__list"
FORBID = {"extra": "forbid"}


def check_range(span: list[float]) -> None:
    """Raise ValueError unless `span` is [low, high]."""
    if len(span) != 2 or not -math.inf < span[0] < span[1] < math.inf:
        raise ValueError(
            f"range is {span!r}; give the least and the largest value, such as [0.5, 5]"
        )


@dataclass(frozen=True)
class Label:
    """A label: an action of a user on an item."""

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
    """float32: the smallest and the largest value, such as [0.5, 5]; rows outside are rejected. By default any
    number."""

    def __post_init__(self) -> None:
        if self.type not in LABEL_TYPES:
            raise ValueError(
                f"a label's type is '{self.type}'; it must be one of {', '.join(LABEL_TYPES)}"
            )
        if self.time is not None and self.delay_minutes is not None:
            raise ValueError(
                "a label has both 'time' and 'delay_minutes'; give the one that says when it is known"
            )
        delay = self.delay_minutes
        if delay is not None and not 0 < delay <= MOST_MINUTES:
            raise ValueError(
                f"delay_minutes is {delay!r}; give minutes from above 0 to {MOST_MINUTES:,}, such as 60"
            )
        if self.range is not None:
            if self.type != "float32":
                raise ValueError(
                    f"'range' is of float32 labels, this one is {self.type}; leave it out"
                )
            check_range(self.range)

    @property
    def late(self) -> bool:
        """Whether the label becomes known later than its event."""
        return self.time is not None or self.delay_minutes is not None

    @property
    def known_from(self) -> str:
        """Description of the time from which the label is known."""
        return (
            self.time.origin
            if self.time
            else f"{self.delay_minutes:g} minutes after its event"
        )


@dataclass(frozen=True)
class History:
    """Earlier behaviours of the row's user, as a list of items without times: MIND's column of clicked news. The k-th
    of a list becomes an event of its user k milliseconds after `at`, so that rows that repeat the list give the same
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
            raise ValueError(
                f"history.at is '{self.at}', which is no ISO 8601 time; write such as '2019-10-12'"
            )


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
        check_sql(self._column_expressions.values())

    @property
    def key(self) -> str:
        """The id column of events that the section describes."""
        return "item_id" if self.item else "user_id"

    @property
    def origins(self) -> dict[str, str]:
        """The section's columns, with the raw columns or expressions they are read
        from.
        """
        kinds = {
            "num_": self.numbers,
            "text_": self.texts,
            "cat_": {**self.attributes, **self.categories},
        }
        kinds = (
            kinds
            if self.time
            else {kind: kinds[kind] for kind in ("text_", "cat_", "num_")}
        )
        named = {
            f"{kind}{name}": text
            for kind, each in kinds.items()
            for name, text in each.items()
        }
        return {
            self.key: str(self.item or self.user),
            **({"timestamp_ms": self.time.origin} if self.time else {}),
            **named,
        }

    @property
    def _column_expressions(self) -> dict[str, str]:
        """Return the expression of each column."""
        time = {"timestamp_ms": str(self.time.column)} if self.time else {}
        return {**self.origins, **time} if self.item or self.user else {}

    @property
    def schema(self) -> pa.Schema:
        """Schema of the section's columns.

        Tables with times have the columns in the order of events: numbers, then
        categories.
        """
        kinds = {"timestamp_ms": pa.int64()} | {
            name: pa.float32() for name in self.origins if name.startswith("num_")
        }
        return pa.schema(
            [pa.field(name, kinds.get(name, pa.string())) for name in self.origins]
        )

    @property
    def features(self) -> pa.Schema:
        """Schema of the section's features."""
        return pa.schema(
            [f for f in self.schema if f.name.startswith(("num_", "cat_"))]
        )

    def list_files(self, input_uri: str, what: str) -> list[str]:
        """Return the section's files relative to the input folder.

        Raises:
            UserError: if there is no file.
        """
        folder = join(input_uri, self.folder) if self.folder else input_uri
        filesystem, path = open_uri(folder)
        if (
            self.optional
            and filesystem.get_file_info(path).type != fs.FileType.Directory
        ):
            return []
        files = list_files(
            folder, self.files, required=not self.optional, what=f"{what} file"
        )
        return [join(self.folder, file) if self.folder else file for file in files]

    def read(self, input_uri: str, file: str, digest: Any = None) -> Iterator[Block]:
        """Stream a file as rows of `schema`; ids, texts and attributes are text, with
        null for empty values.

        Args:
            digest: Hash that is updated with the bytes that are parsed.
        """
        uri = join(input_uri, file)
        for frame in read_frames(uri, self, self._column_expressions.values(), digest):
            rows = Rows(frame.whole, self._column_expressions, uri)
            rows.ids(self.key)
            for name in self.schema.names[1:]:
                if name == "timestamp_ms" and self.time:
                    rows.time(name, self.time)
                else:
                    (rows.number if name.startswith("num_") else rows.text)(name)
            yield rows.block(frame.broken, frame.missing, file, None, self.schema)


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
    """Instead of `time`: a list of all items of the row's user, oldest first; each becomes an event, and its time is
    its place in the list."""
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
    simulated: bool = False
    """true: the log is made up, and results on it are labelled so."""
    as_of: dict[str, Section] = field(default_factory=dict)
    """Files of features of items or users that change over time, by name: {files, item or user, time, numbers}."""

    def __post_init__(self) -> None:
        self.check_files()
        if self.sequence is not None:
            if (
                self.time
                or self.explode
                or self.labels
                or self.history
                or self.request
                or self.position
            ):
                raise ValueError(
                    "'sequence' is of lists without times or labels; leave out 'time', 'explode' and others"
                )
            object.__setattr__(self, "time", Time(unit="order"))
        elif self.item is None or self.time is None:
            missing = "item" if self.item is None else "time"
            example = {
                "item": "item: item_id",
                "time": "time: {column: time_ms, unit: ms}",
            }[missing]
            raise ValueError(f"'{missing}' is missing; add such as '{example}'")
        for name, label in self.labels.items():
            self.labels[name] = self._add_label_time(name, label)
        for kind in ("labels", "numbers", "categories", "explode", "as_of"):
            check_names(getattr(self, kind), kind)
        _check_section(
            "items",
            self.items,
            "item",
            ("texts", "attributes", "numbers", "folder", "optional", "keep"),
        )
        _check_section("users", self.users, "user", ("attributes",))
        for name, of in self.as_of.items():
            _check_section(
                f"as_of.{name}",
                of,
                "item" if of.item else "user",
                ("numbers", "categories", "time"),
            )
            if of.time is None or of.time.clock != self.clock or not of.features.names:
                need = "a 'time' of the log's kind, and 'numbers' or 'categories'"
                raise ValueError(
                    f"as_of.{name} needs {need}; add such as 'time: {{column: at, unit: ms}}'"
                )
        features = [
            *(f"num_{name}" for name in self.numbers),
            *(f"cat_{name}" for name in self.info["categories"]),
        ]
        features += [name for of in self.as_of.values() for name in of.features.names]
        if twice := [name for name, times in Counter(features).items() if times > 1]:
            raise ValueError(
                f"'{twice[0][4:]}' is the name of two features; give one of them another name"
            )
        if self.history:
            self._check_history(self.history)
        check_sql([*self._column_expressions.values(), *self._lists])

    def _add_label_time(self, name: str, label: Label) -> Label:
        """Return the label with its `time`, by default in the unit of the log's time."""
        where, time = f"labels.{name}", label.time
        if label.delay_minutes is not None and not self.clock:
            raise ValueError(
                f"{where}.delay_minutes needs clock times, but time.unit is order; give '{where}.time'"
            )
        if time is None or isinstance(time, Time):
            return label
        if self.event_time.column is None:
            raise ValueError(
                f"{where}.time needs times, but those of the log are the order of rows; take it out"
            )
        time = {"column": time} if isinstance(time, str) else dict(time)
        own = {} if {"unit", "format"} & set(time) else _given(self.event_time)
        built: Time = build(Time, {**own, **time}, f"{where}.time.")
        if built.clock != self.clock:
            raise ValueError(
                f"{where}.time is {built.written}, and the log's time {self.event_time.written}; give both one unit"
            )
        return replace(label, time=built)

    def _check_history(self, history: History) -> None:
        flags = [name for name, label in self.labels.items() if label.type == "bool"]
        if not self.clock:
            raise ValueError(
                "'history' is dated before the log, which needs clock times; for lists alone set 'sequence'"
            )
        if history.labels is None and flags:
            raise ValueError(
                f"'history.labels' is missing; name those that its items have, of {', '.join(flags)}, or []"
            )
        if unknown := [name for name in history.labels or [] if name not in flags]:
            raise ValueError(
                f"history.labels has '{unknown[0]}', no bool label; those are {', '.join(flags) or 'none'}"
            )

    @property
    def event_time(self) -> Time:
        assert self.time is not None  # of sequences it is set above
        return self.time

    @property
    def clock(self) -> bool:
        """Whether timestamps are clock times; else `timestamp_ms` is an ordinal."""
        return self.event_time.clock

    @property
    def info(self) -> dict[str, Any]:
        """Description of the events for their manifest.

        `labels` {name: bool | float32}, `numbers` [name], `categories` [name], `clock`,
        `ranges` of labels, and `known`: the time from which late labels are known.
        """
        known = {
            name: {"column": label.time.column, "unit": label.time.written}
            if label.time
            else {"delay_minutes": label.delay_minutes}
            for name, label in self.labels.items()
            if label.late
        }
        labels = {name: label.type for name, label in self.labels.items()}
        return {
            **({"known": known} if known else {}),
            "labels": labels,
            "numbers": list(self.numbers),
            "categories": [
                *self.categories,
                *(self.users.attributes if self.users else ()),
            ],
            "clock": self.clock,
            "ranges": {
                name: label.range
                for name, label in self.labels.items()
                if label.range is not None
            },
            **({"history": self.history.column} if self.history else {}),
        }

    @property
    def schema(self) -> pa.Schema:
        """Schema of the events, without LOG_ROW."""
        info = self.info
        return events_schema(
            info["labels"], info["numbers"], info["categories"], info.get("known", ())
        )

    @property
    def config(self) -> dict[str, Any]:
        """Non-default settings as plain values."""
        return dict(_given(self))

    @property
    def events_config(self) -> dict[str, Any]:
        """The part of `config` that the events depend on."""
        return {
            key: value
            for key, value in self.config.items()
            if key not in ("items", "as_of")
        }

    @property
    def absent(self) -> frozenset[str]:
        """Columns of `query`, `request_id` and `position` that no event has."""
        request, position = self.request or self.explode, self.position or self.explode
        given = {"query": self.query, "request_id": request, "position": position}
        return frozenset(name for name, text in given.items() if not text)

    @property
    def items_columns(self) -> tuple[list[str], list[str]]:
        """Names of the item table's texts and attributes, without their prefixes."""
        return (
            (list(self.items.texts), list(self.items.attributes))
            if self.items
            else ([], [])
        )

    @property
    def items_numbers(self) -> list[str]:
        return list(self.items.numbers) if self.items else []

    @property
    def items_schema(self) -> pa.Schema:
        return items_schema(*self.items_columns, self.items_numbers)

    @property
    def keeps_all_items(self) -> bool:
        """Whether the catalogue contains items without events."""
        return self.items is not None and self.items.keep == "all"

    @property
    def origins(self) -> dict[str, str]:
        """The columns of events, with the raw columns or expressions they are read
        from.
        """
        item = " and then ".join(filter(None, [self.sequence, self.item]))
        time = "the place in its list" if self.sequence else self.event_time.origin
        known = {
            f"known_{name}": label.known_from
            for name, label in self.labels.items()
            if label.late
        }
        users = self.users.attributes if self.users else {}
        of_users = {
            f"cat_{name}": f"{text} of the users" for name, text in users.items()
        }
        return {
            **self._column_expressions,
            "user_id": self.user,
            "item_id": item,
            "timestamp_ms": time,
            **known,
            **of_users,
        }

    @property
    def _column_expressions(self) -> dict[str, str]:
        """Return the expression of each column of an event."""
        single = {
            "user_id": self.user,
            "item_id": self.item,
            "timestamp_ms": self.event_time.column,
            "query": self.query,
        }
        single |= {"request_id": self.request, "position": self.position}
        return {
            **{target: text for target, text in single.items() if text},
            **{f"label_{name}": label.column for name, label in self.labels.items()},
            **{
                f"known_{name}": label.time.column
                for name, label in self.labels.items()
                if label.time
            },
            **{f"num_{name}": text for name, text in self.numbers.items()},
            **{f"cat_{name}": text for name, text in self.categories.items()},
        }

    @property
    def _lists(self) -> list[str]:
        """Return the expressions of list columns."""
        every = [
            self.sequence,
            self.history.column if self.history else None,
            *self.explode.values(),
        ]
        return [text for text in every if text]

    def event_files(self, input_uri: str) -> list[str]:
        """Return the sorted event files relative to the input folder.

        Raises:
            UserError: if there is none, or for several formats, which often contain the
                same events twice.
        """
        files = list_files(
            input_uri,
            self.files,
            required=True,
            what="event file",
            beside=self._patterns_beside,
        )
        kinds = {self.detect_format(file): file for file in files}
        if len(kinds) > 1:
            both = " and as ".join(f"{kind} ({file})" for kind, file in kinds.items())
            raise UserError(
                f"{input_uri} holds events as {both}, which may be the same; set 'files' to one of them"
            )
        return files

    @property
    def _patterns_beside(self) -> list[str]:
        """Return the patterns of files that are not event files."""
        sections = (self.items, self.users, *self.as_of.values())
        return [of.files for of in sections if of and of.files != self.files]

    def is_event_file(self, file: str) -> bool:
        """Return whether a file with this name, relative to the input folder, has events."""
        beside = any(fnmatchcase(file, other) for other in self._patterns_beside)
        return fnmatchcase(file, self.files) and not beside

    def item_files(self, input_uri: str) -> list[str]:
        """Return the sorted item files relative to the input folder; empty if the log
        has none.
        """
        return self.items.list_files(input_uri, "item") if self.items else []

    def user_files(self, input_uri: str) -> list[str]:
        return self.users.list_files(input_uri, "user") if self.users else []

    def read_users(
        self, input_uri: str, digests: dict[str, Any], beginning: bool = False
    ) -> Block | None:
        """Read the user files, the first row of each user; None if the log has none.

        Args:
            digests: Hashes per file, updated with the bytes that are parsed.
            beginning: Whether to read the first file only.
        """
        if self.users is None:
            return None
        files = self.user_files(input_uri)[: 1 if beginning else None]
        blocks = [
            block
            for file in files
            for block in self.users.read(input_uri, file, digests.get(file))
        ]
        rows = pl.DataFrame(
            pa.concat_tables(
                [self.users.schema.empty_table(), *(block.rows for block in blocks)]
            )
        )
        rows = rows.unique("user_id", keep="first", maintain_order=True)
        rejects = pa.concat_tables(
            [REJECTS.empty_table(), *(block.rejects for block in blocks)]
        )
        read, missing = (
            sum(block.rows_read for block in blocks),
            common(block.missing for block in blocks),
        )
        return Block(rows.to_arrow().cast(self.users.schema), rejects, read, missing)

    def read_events(
        self,
        input_uri: str,
        file: str,
        users: pa.Table | None = None,
        piece: FilePart | None = None,
        number: int = 0,
        digest: Any = None,
    ) -> Iterator[Block]:
        """Stream a file, or a piece of it, as bounded blocks in the file's order.

        Rows have the column LOG_ROW, unique and increasing within the piece after lists
        are exploded.

        Args:
            users: Rows of `read_users`.
            number: Number of the piece in the log, for times that are row numbers.
            digest: Hash that is updated with the bytes that are parsed.

        Raises:
            UserError: if the file cannot be read: a missing column, a wrong format, an
                empty or truncated file.
        """
        uri, first, schema = join(input_uri, file), 0, self.schema.append(LOG_ROW)
        folders = {
            key: value
            for key, _, value in (part.partition("=") for part in file.split("/")[:-1])
            if value
        }
        for order, frame in enumerate(
            read_frames(uri, self, self._file_expressions(folders), digest, piece)
        ):
            missing = {
                name: hint
                for name, hint in frame.missing.items()
                if name not in folders
            }
            if order == 0 and (
                lost := [
                    name for name in self._required_columns(folders) if name in missing
                ]
            ):
                raise UserError(
                    f"{uri} has no column '{lost[0]}'; {missing[lost[0]]}; correct the source file or the log"
                )
            rows, broken = frame.whole, frame.broken
            rows = rows.with_columns(
                _folder(value).alias(key)
                for key, value in folders.items()
                if key not in rows.columns
            )
            for part in (
                self._events(rows, uri, users, number),
                self._earlier(rows, uri, users),
            ):
                for made in part:
                    made.values["log_row"] = pl.int_range(
                        first, first + len(made.raw), eager=True
                    )
                    yield made.block(broken, missing, file, piece, schema, UNSET)
                    first, broken = first + len(made.raw), []

    def _file_expressions(self, folders: Iterable[str]) -> list[str]:
        """Return the expressions over columns of the file.

        For expressions that also read list elements or folder names, return the columns
        of the file that they read.
        """
        others, found = [*self.explode, *folders], []
        for text, made in [
            *((text, list(folders)) for text in self._lists),
            *((t, others) for t in self._column_expressions.values()),
        ]:
            names = roots(text, made)
            found += (
                [f'"{name}"' for name in names if name not in made]
                if {*names} & {*made}
                else [text]
            )
        return found

    def _required_columns(self, folders: Iterable[str]) -> list[str]:
        """Return the columns that a row must have to be an event."""
        made = [*self.explode, *folders]
        every = [
            self.user,
            self.item,
            self.sequence,
            self.event_time.column,
            *self.explode.values(),
        ]
        return [
            name
            for text in every
            if text
            for name in roots(text, made)
            if name not in made
        ]

    def _events(
        self, rows: pl.DataFrame, uri: str, users: pa.Table | None, number: int
    ) -> Iterator[Rows]:
        """Yield the rows of a frame, one per event."""
        if self.sequence:
            yield from self._list_events(
                rows,
                evaluate_list(rows, self.sequence, "sequence", uri),
                self.item,
                0,
                uri,
                users,
            )
            return
        for piece in slices(
            self._with_lists(rows, uri), next(iter(self.explode), None)
        ):
            piece = (
                piece.explode(
                    [*self.explode, ELEMENT], empty_as_null=True, keep_nulls=True
                )
                if self.explode
                else piece
            )
            made = Rows(piece, self._column_expressions, uri)
            made.ids("user_id")
            if self.explode:
                made.reject(piece[UNEQUAL], f"{self.item}: lists of unequal length")
                made.values["request_id"] = piece[REQUEST]
                made.values["position"] = piece[ELEMENT].fill_null(0).cast(pl.Int32)
            made.ids("item_id")
            made.time("timestamp_ms", self.event_time, number, past=True)
            if self.query:
                made.text("query")
            if self.request:
                made.ids("request_id")
            if self.position:
                made.integer("position")
            for name, label in self.labels.items():
                made.flag(f"label_{name}") if label.type == "bool" else made.number(
                    f"label_{name}", label.range
                )
                if label.late:
                    made.known(name, label.time, label.delay_minutes)
            for name in self.numbers:
                made.number(f"num_{name}")
            for name in self.categories:
                made.text(f"cat_{name}")
            made.join(users)
            yield made

    def _with_lists(self, rows: pl.DataFrame, uri: str) -> pl.DataFrame:
        """Return the rows with lists, element positions and request ids.

        The request id is a hash of the row's content, so an equal row in two files is
        one request. Lists of unequal length are null.
        """
        if not self.explode:
            return rows
        lists = {
            name: evaluate_list(rows, text, f"explode.{name}", uri)
            for name, text in self.explode.items()
        }
        lengths = pl.DataFrame(
            {name: each.list.len().fill_null(0) for name, each in lists.items()}
        )
        unequal = lengths.select(~pl.all_horizontal(pl.all() == pl.nth(0))).to_series()
        content = [
            as_text(rows[name]).alias(name)
            for name in sorted(rows.columns)
            if name != ROW
        ]
        digest = (
            pl.DataFrame(content)
            .hash_rows(seed=0)
            .map_elements("{:016x}".format, pl.String)
        )
        rows = rows.with_columns(
            **lists,
            **{REQUEST: digest, UNEQUAL: unequal, ELEMENT: lengths.to_series(0)},
        )
        fits = ~pl.col(UNEQUAL) & (pl.col(ELEMENT) > 0)
        place = pl.int_ranges(0, pl.col(ELEMENT), dtype=pl.Int32).alias(ELEMENT)
        return rows.with_columns(
            pl.when(fits).then(each) for each in (*map(pl.col, lists), place)
        )

    def _earlier(
        self, rows: pl.DataFrame, uri: str, users: pa.Table | None
    ) -> Iterator[Rows]:
        """Yield the earlier behaviours listed in the rows, one row each.

        Equal lists of a user are taken once. Rows without a user or a time are skipped:
        they are rejected themselves.
        """
        if self.history is None or not len(rows):
            return
        history, time, at = self.history, self.event_time, milliseconds(self.history.at)
        made, _ = evaluate(rows, {"user": self.user, "time": str(time.column)}, uri)
        own, bad = moments(made["time"], time, "")
        who, lists = (
            clean_ids(made["user"]),
            evaluate_list(rows, history.column, "history.column", uri).cast(
                pl.List(pl.String)
            ),
        )
        rows = rows.with_columns(
            who.alias(REQUEST), own.alias(UNEQUAL), lists.alias(LIST)
        )
        rows = rows.filter(
            bad.is_null() & who.is_not_null() & (lists.list.len() > 0)
        ).sort(UNEQUAL, maintain_order=True)
        rows = rows.unique([REQUEST, LIST], keep="first", maintain_order=True).sort(ROW)
        for events in self._list_events(rows, rows[LIST], None, at or 0, uri, users):
            for name in history.labels or ():
                events.values[f"label_{name}"] = pl.repeat(
                    True, len(events.raw), eager=True
                )
                if self.labels[name].late:
                    events.values[f"known_{name}"] = events.values["timestamp_ms"]
            late = events.values["timestamp_ms"] >= events.raw[UNEQUAL]
            events.reject(
                late,
                f"{history.column}: not before its row, give an earlier history.at than {history.at}",
            )
            yield events

    def _list_events(
        self,
        rows: pl.DataFrame,
        lists: pl.Series,
        last: str | None,
        at: int,
        uri: str,
        users: pa.Table | None,
    ) -> Iterator[Rows]:
        """Yield an event per list item, and for the item `last` at the end: the k-th at
        time `at` + k.
        """
        items = lists.cast(pl.List(pl.String)).fill_null([])
        if last:
            end = clean_ids(evaluate(rows, {"end": last}, uri)[0]["end"])
            items = pl.select(
                pl.when(end.is_null()).then(items).otherwise(pl.concat_list(items, end))
            ).to_series()
        places = pl.select(pl.int_ranges(0, items.list.len())).to_series()
        for piece in slices(
            rows.with_columns(items.alias(LIST), places.alias(ELEMENT)), LIST
        ):
            piece = piece.explode(LIST, ELEMENT, empty_as_null=True, keep_nulls=True)
            events = Rows(piece, {"user_id": self.user, "item_id": LIST}, uri)
            events.wanted["item_id"] = self.sequence or (
                self.history.column if self.history else LIST
            )
            events.ids("user_id")
            events.ids(
                "item_id",
                "missing or empty; of text with blanks in a row split regexp_replace(..., '\\s+', ' ')",
            )
            events.values["timestamp_ms"] = piece[ELEMENT].fill_null(0) + at
            events.join(users)
            yield events


def _folder(value: str) -> pl.Expr:
    """Return the value of a Hive folder name like `country=se`."""
    return pl.lit(
        None if value == "__HIVE_DEFAULT_PARTITION__" else unquote(value), pl.String
    )


def check_names(names: Iterable[Any], key: str) -> None:
    """Raise ValueError for a name that columns and metrics cannot have."""
    for name in names:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ValueError(
                f"'{name}' in '{key}' is no name; use letters, digits and _, and begin with a letter"
            )
        if len(name) > LONGEST_NAME:
            raise ValueError(
                f"the name '{name[:20]}...' in '{key}' has {len(name)} characters, which metrics cannot hold; use at "
                f"most {LONGEST_NAME}"
            )
        if CUTOFF.search(name):
            raise ValueError(
                f"'{name}' in '{key}' ends as the cutoff of a metric does, such as ndcg_at_10; use another name"
            )
        if key in ("labels", "tasks") and name in METRIC_WORDS:
            raise ValueError(
                f"'{name}' in '{key}' is a word of metrics, as in {name}/gauc; choose another name"
            )


def _check_section(
    where: str, of: Section | None, key: str, known: tuple[str, ...]
) -> None:
    """Raise ValueError for a section without an id column, or with keys of other
    sections.
    """
    if of is None:
        return
    if not getattr(of, key):
        raise ValueError(f"'{where}.{key}' is missing; add such as '{key}: {key}_id'")
    allowed = ["files", key, *known, *(f.name for f in fields(Files))]
    if unknown := [name for name in _given(of) if name not in allowed]:
        raise ValueError(
            f"unknown key '{where}.{unknown[0]}'; it takes {', '.join(allowed)}"
        )
    for kind in ("texts", "attributes", "numbers", "categories"):
        check_names(getattr(of, kind), f"{where}.{kind}")
    if where == "users" and not of.attributes:
        raise ValueError(
            "users.attributes is empty; name at least one column, or leave out users"
        )


def _given(value: Any) -> Any:
    """Convert a dataclass, or a container of dataclasses, to plain values without
    defaults.
    """
    if isinstance(value, dict):
        return {key: _given(each) for key, each in value.items()}
    if not is_dataclass(value):
        return value
    own = {
        f.name: f.default if f.default_factory is MISSING else f.default_factory()
        for f in fields(value)
    }
    return {
        name: _given(each)
        for name, default in own.items()
        if (each := getattr(value, name)) != default
    }


def _spelled_out(content: dict[str, Any]) -> dict[str, Any]:
    """Expand the short forms of a mapping: lists of columns, and labels given as an
    expression.
    """
    made = dict(content)
    for key, value in content.items():
        if key in (
            "numbers",
            "categories",
            "explode",
            "texts",
            "attributes",
        ) and isinstance(value, list):
            check_names(value, key)
            made[key] = {name: name for name in value}
        elif key == "labels" and isinstance(value, dict):
            made[key] = {
                name: {"column": each} if isinstance(each, str) else each
                for name, each in value.items()
            }
        elif key in ("items", "users") and isinstance(value, dict):
            made[key] = _spelled_out(value)
        elif key == "as_of" and isinstance(value, dict):
            made[key] = {
                name: _spelled_out(each) if isinstance(each, dict) else each
                for name, each in value.items()
            }
    return made


def parse_log(content: dict[str, Any]) -> Log:
    """Build the log that a mapping describes.

    Raises:
        ValueError: for invalid values.
    """
    log: Log = build(Log, _spelled_out(content))
    return log


def load_source(uri: str) -> tuple[Log, dict[str, Any]]:
    """Read a mapping file and its `prepare` section.

    Raises:
        UserError: for a missing or damaged file, an unknown key (names the nearest), or
            an invalid value.
    """
    content = read_yaml(uri, "check --source")
    prepare = content.pop("prepare", None) or {}
    if not isinstance(prepare, dict):
        raise UserError(
            f"{uri}: 'prepare' is {type(prepare).__name__}, not a mapping of options"
        )
    try:
        return parse_log(content), prepare
    except ValueError as error:
        raise UserError(f"{uri}: {error}") from error
