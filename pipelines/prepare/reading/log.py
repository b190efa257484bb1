"""Read a raw log as described by a mapping file.

    files: transactions_*.csv*
    user: customer_id
    item: lpad(article_id, 10, '0')
    time: {column: "day || ' ' || clock", format: "%d.%m.%Y %H:%M:%S"}
    labels: {bought: "cast(quantity as double) > 0"}
    items: {files: articles.csv, item: article_id, texts: {title: "lower(name)"}}

Each column of a table is given by the name of a column of the file, or by a SQL
expression of polars (`pl.sql_expr`). `Log.read_events` yields blocks of events and
rejects. `Section.read` yields blocks of items, users and features.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal
from urllib.parse import unquote

import polars as pl
import pyarrow as pa
from pydantic import Field

from core.errors import UserError
from core.files import join
from core.options import build, check_known, read_yaml
from core.schemas import REJECTS, LogInfo, events_schema, items_schema
from pipelines.prepare.reading.read import (
    ROW,
    FilePart,
    Files,
    list_files,
    read_frames,
    root_columns,
)
from pipelines.prepare.reading.rows import (
    Block,
    Rows,
    as_text,
    check_sql,
    clean_ids,
    common_missing,
    evaluate,
    evaluate_list,
    split_rows,
)
from pipelines.prepare.reading.times import Time, parse_iso_ms, parse_times

LOG_ROW = pa.field("log_row", pa.int64(), nullable=False)
MISSING_VALUES = {"request_id": "", "position": 0}
"""Values of columns that a log does not have. Other missing columns are null."""
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
MAX_NAME_LENGTH = 80
"""Maximum length of a name. MLflow allows 250, and a metric may contain two names."""
METRIC_CUTOFF = re.compile(r"_at_\d+$")
"""Suffix that stands for the @10 of ndcg@10 in the names of MLflow metrics."""
METRIC_WORDS = ("mean", "with_position")
"""First parts of metrics that do not belong to a single label."""
MAX_DELAY_MINUTES = 60 * 24 * 3660
"""Ten years. A longer delay is assumed to be in a wrong unit."""
# temporary columns of a frame while lists are exploded
ELEMENT, REQUEST, UNEQUAL, LIST = "__element", "__request", "__unequal", "__list"
TIME = "__time"
COLUMN_LISTS = ("numbers", "categories", "explode", "texts", "attributes")
"""Keys whose value may be a list of columns that keep their names."""
FORBID_EXTRA = {"extra": "forbid"}


def check_range(span: list[float]) -> None:
    """Raise a ValueError unless `span` is [low, high]."""
    if len(span) != 2 or not -math.inf < span[0] < span[1] < math.inf:
        raise ValueError(
            f"range is {span!r}; use the smallest and the largest value, such as "
            f"[0.5, 5]"
        )


@dataclass(frozen=True)
class Label:
    """A label: the action of a user on an item."""

    __pydantic_config__ = FORBID_EXTRA

    column: str
    """Column or SQL expression."""
    type: Literal["bool", "float32"] = "bool"
    """bool (true, false, 1 or 0) or float32."""
    time: Any = None
    """Time at which the label became known: a column or SQL expression in the unit of
    the log's time, or {column, unit}. By default the time of the event, plus
    `delay_minutes`."""
    delay_minutes: Annotated[float, Field(gt=0, le=MAX_DELAY_MINUTES)] | None = None
    """Minutes from the event until the label is known, such as 60; by default 0, or
    given by `time`."""
    range: list[float] | None = None
    """float32: the smallest and the largest value, such as [0.5, 5]; rows outside are
    rejected. By default any number."""

    def __post_init__(self) -> None:
        if self.time is not None and self.delay_minutes is not None:
            raise ValueError("a label has both 'time' and 'delay_minutes'")
        if self.range is not None:
            if self.type != "float32":
                raise ValueError(
                    f"a label of type {self.type} has 'range', which only float32 "
                    f"labels support"
                )
            check_range(self.range)

    @property
    def is_late(self) -> bool:
        """Whether the label is known later than its event."""
        return self.time is not None or self.delay_minutes is not None

    @property
    def known_origin(self) -> str:
        """Column or delay that determines when the label is known."""
        if self.time:
            return self.time.origin
        return f"{self.delay_minutes:g} minutes after its event"


@dataclass(frozen=True)
class History:
    """Earlier behaviours of the row's user, as a list of items without times.

    An example is MIND's column of clicked news. The k-th item of a list becomes an
    event of its user k milliseconds after `at`. Rows that repeat a list repeat its
    events, which are dropped as duplicates.
    """

    __pydantic_config__ = FORBID_EXTRA

    column: str
    """Column or SQL expression of the list of items, oldest first."""
    at: str
    """Time before the log, as ISO 8601, of the first item of each list. Each later item
    is one millisecond later."""
    labels: list[str] | None = None
    """Names of the bool labels that are true for these behaviours; [] for none.
    Required if the log has bool labels."""

    def __post_init__(self) -> None:
        if parse_iso_ms(self.at) is None:
            raise ValueError(
                f"history.at is '{self.at}', which is not an ISO 8601 time; use a time "
                f"such as '2019-10-12'"
            )


@dataclass(frozen=True)
class Section(Files):
    """A section of the mapping file: files with item or user attributes or features.

    With `time`, the features change over time, and each row is valid from its time on.
    """

    __pydantic_config__ = FORBID_EXTRA

    files: str
    """Pattern of the files, relative to the input folder (`*`, `?`, `[...]`)."""
    item: str | None = None
    """Column or SQL expression of the item's id."""
    user: str | None = None
    """Column or SQL expression of the user's id; of several rows of a user, the first
    is used."""
    time: Time | None = None
    """Time from which a row is valid, written as the time of events: {column, unit}."""
    texts: dict[str, str] = field(default_factory=dict)
    """Texts by name: {name: column or SQL expression}, or a list of columns that keep
    their names."""
    attributes: dict[str, str] = field(default_factory=dict)
    """Categorical attributes by name, written as `texts`."""
    categories: dict[str, str] = field(default_factory=dict)
    """Categorical features by name, written as `texts`."""
    numbers: dict[str, str] = field(default_factory=dict)
    """Numeric features by name, written as `texts`."""
    optional: bool = False
    """true: item files may be missing; items without a row have no texts and are
    counted."""
    keep: Literal["used", "all"] = "used"
    """used: the catalogue contains the items with at least `core` behaviours. all: it
    also contains every item of the item files, so that new items have semantic IDs and
    can be recommended; `core` then only limits users and items without a row."""

    def __post_init__(self) -> None:
        self.check_files()
        check_sql(self._expressions.values())

    @property
    def key(self) -> str:
        """Column of events whose ids the rows describe: `item_id` or `user_id`."""
        return "item_id" if self.item else "user_id"

    @property
    def origins(self) -> dict[str, str]:
        """Column or SQL expression in the raw file, by column of the section."""
        numbers = {f"num_{name}": text for name, text in self.numbers.items()}
        texts = {f"text_{name}": text for name, text in self.texts.items()}
        categories = {
            f"cat_{name}": text
            for name, text in {**self.attributes, **self.categories}.items()
        }
        key = {self.key: str(self.item or self.user)}
        if self.time:
            time = {"timestamp_ms": self.time.origin}
            return {**key, **time, **numbers, **texts, **categories}
        return {**key, **texts, **categories, **numbers}

    @property
    def _expressions(self) -> dict[str, str]:
        """SQL expressions by column of the section."""
        time = {"timestamp_ms": str(self.time.column)} if self.time else {}
        return {**self.origins, **time} if self.item or self.user else {}

    @property
    def schema(self) -> pa.Schema:
        """Schema of the rows; with times, numbers precede categories as in events."""
        types = {"timestamp_ms": pa.int64()}
        for name in self.origins:
            if name.startswith("num_"):
                types[name] = pa.float32()
        return pa.schema(
            [pa.field(name, types.get(name, pa.string())) for name in self.origins]
        )

    @property
    def features(self) -> pa.Schema:
        """Schema of the numeric and categorical features."""
        return pa.schema(
            [f for f in self.schema if f.name.startswith(("num_", "cat_"))]
        )

    def list_files(self, input_uri: str, what: str) -> list[str]:
        """Return the files of the section, relative to the input folder.

        Args:
            input_uri: Input folder.
            what: Kind of the files in messages: "item", "user" or "feature".
        """
        return list_files(
            input_uri, self.files, required=not self.optional, what=f"{what} file"
        )

    def read(self, input_uri: str, file: str, digest: Any = None) -> Iterator[Block]:
        """Yield the rows of a file in blocks.

        Args:
            input_uri: Input folder.
            file: File, relative to the input folder.
            digest: Hash that is updated with the parsed bytes, or None.
        """
        uri = join(input_uri, file)
        for frame in read_frames(uri, self, self._expressions.values(), digest):
            rows = Rows(frame.with_missing, self._expressions, uri)
            rows.parse_ids(self.key)
            for name in self.schema.names[1:]:
                if name == "timestamp_ms" and self.time:
                    rows.parse_time(name, self.time)
                elif name.startswith("num_"):
                    rows.parse_number(name)
                else:
                    rows.parse_text(name)
            yield rows.block(frame.broken, frame.missing, file, None, self.schema)


@dataclass(frozen=True)
class Log(Files):
    """The mapping of a raw log: its files, and an expression per column."""

    __pydantic_config__ = FORBID_EXTRA

    files: str
    """Pattern of the event files, relative to the input folder (`*`, `?`, `[...]`).
    Files that also match the pattern of `items`, `users` or `as_of` are excluded."""
    user: str
    """Column or SQL expression of the user's id."""
    item: str | None = None
    """Column or SQL expression of the item's id; with `sequence`, of an optional item
    after the end of the list."""
    time: Time | None = None
    """Time of the event: {column, unit: s | ms | us | ns | iso | order}, or {column,
    format: '%d.%m.%Y'}."""
    sequence: str | None = None
    """Column or SQL expression, instead of `time`, of a list of all items of the row's
    user, oldest first. Each item becomes an event whose time is its position in the
    list."""
    query: str | None = None
    """Column or SQL expression of the search query."""
    request: str | None = None
    """Column or SQL expression of the id of the request or page view."""
    position: str | None = None
    """Column or SQL expression of the rank at which the item was shown, from 0; by
    default, with `explode`, the rank in the list."""
    labels: dict[str, Label] = field(default_factory=dict)
    """Labels by name: {name: column or SQL expression}, or {name: {column, type, time,
    ...}}."""
    numbers: dict[str, str] = field(default_factory=dict)
    """Numeric features, known before the event, by name: {name: column or SQL
    expression}, or a list of columns."""
    categories: dict[str, str] = field(default_factory=dict)
    """Categorical features, known before the event, written as `numbers`."""
    explode: dict[str, str] = field(default_factory=dict)
    """Lists of equal length that become one row per element: {name: list column or SQL
    expression}. The other keys read the elements by these names. Rows with an empty
    list are rejected."""
    history: History | None = None
    """Earlier behaviours without times: {column, at, labels}."""
    items: Section | None = None
    """Item files: {files, item, texts, attributes, numbers}."""
    users: Section | None = None
    """User files: {files, user, attributes}; the attributes become categorical features
    of all events of the user."""
    simulated: bool = False
    """true: the log is simulated, and results on it are labelled as simulated."""
    as_of: dict[str, Section] = field(default_factory=dict)
    """Files with features of items or users that change over time, by name: {files,
    item or user, time, numbers, categories}."""

    def __post_init__(self) -> None:
        self.check_files()
        if self.sequence is not None:
            others = (self.explode, self.labels, self.history, self.position)
            if self.time or self.request or any(others):
                raise ValueError("'sequence' reads lists without times or labels")
            object.__setattr__(self, "time", Time(unit="order"))
        elif self.item is None or self.time is None:
            missing = "item" if self.item is None else "time"
            raise ValueError(f"'{missing}' is missing")
        self._check_sections()
        if self.history:
            flags = [name for name, kind in self.labels.items() if kind.type == "bool"]
            if not self.has_clock_times:
                raise ValueError("'history' needs a log with clock times")
            if self.history.labels is None and flags:
                raise ValueError("'history.labels' is missing")
            check_known(self.history.labels or [], flags, "history.labels")
        check_sql([*self._expressions.values(), *self._list_expressions])

    def _check_sections(self) -> None:
        """Build the times of labels, and check the names of columns and sections."""
        for name, label in self.labels.items():
            self.labels[name] = self._build_label_time(name, label)
        for kind in ("labels", "numbers", "categories", "explode", "as_of"):
            check_names(getattr(self, kind), kind)
        item_keys = ("texts", "attributes", "numbers", "optional", "keep")
        _check_section("items", self.items, "item", item_keys)
        _check_section("users", self.users, "user", ("attributes",))
        features = [
            *(f"num_{name}" for name in self.numbers),
            *(f"cat_{name}" for name in self.info.categories),
        ]
        for name, section in self.as_of.items():
            key = "item" if section.item else "user"
            feature_keys = ("numbers", "categories", "time")
            _check_section(f"as_of.{name}", section, key, feature_keys)
            time = section.time
            if time is None or time.has_clock_times != self.has_clock_times:
                raise ValueError(
                    f"as_of.{name} needs a 'time' like that of events (both clock "
                    f"times or both order); add it, for example "
                    f"'time: {{column: at, unit: ms}}'"
                )
            if not section.features.names:
                raise ValueError(f"as_of.{name} has no features")
            features += section.features.names
        repeated = [name for name, count in Counter(features).items() if count > 1]
        if repeated:
            raise ValueError(
                f"'{repeated[0][4:]}' is the name of two features; rename one of them"
            )

    def _build_label_time(self, name: str, label: Label) -> Label:
        """Return the label with its `time` as an instance of `Time`."""
        key, time = f"labels.{name}", label.time
        if label.delay_minutes is not None and not self.has_clock_times:
            raise ValueError(
                f"{key}.delay_minutes needs clock times, but time.unit is order"
            )
        if time is None or isinstance(time, Time):
            return label
        if self.event_time.column is None:
            raise ValueError(
                f"{key}.time needs a log with times, but events are in the order of "
                f"rows"
            )
        time = {"column": time} if isinstance(time, str) else dict(time)
        defaults = {}
        if not {"unit", "format"} & set(time):
            defaults = _changed_fields(self.event_time)
        built: Time = build(Time, {**defaults, **time}, f"{key}.time.")
        if built.has_clock_times != self.has_clock_times:
            raise ValueError(
                f"{key}.time is {built.notation}, and the log's time "
                f"{self.event_time.notation}"
            )
        return replace(label, time=built)

    @property
    def event_time(self) -> Time:
        """Column and notation of the time; unit `order` with `sequence`."""
        assert self.time is not None  # set by __post_init__ for sequences
        return self.time

    @property
    def has_clock_times(self) -> bool:
        """Whether timestamps are clock times; else `timestamp_ms` is an ordinal."""
        return self.event_time.has_clock_times

    @property
    def info(self) -> LogInfo:
        """Labels and features of the events."""
        labels = self.labels
        return LogInfo(
            labels={name: label.type for name, label in labels.items()},
            numbers=list(self.numbers),
            categories=[
                *self.categories,
                *(self.users.attributes if self.users else ()),
            ],
            clock=self.has_clock_times,
            known={
                name: label.delay_minutes
                for name, label in labels.items()
                if label.is_late
            },
            ranges={
                name: label.range
                for name, label in labels.items()
                if label.range is not None
            },
            history=self.history.column if self.history else None,
        )

    @property
    def schema(self) -> pa.Schema:
        """Schema of the events, without the column LOG_ROW."""
        info = self.info
        return events_schema(info.labels, info.numbers, info.categories, info.known)

    @property
    def config(self) -> dict[str, Any]:
        """Keys whose values differ from the defaults, as plain values."""
        return dict(_changed_fields(self))

    @property
    def events_config(self) -> dict[str, Any]:
        """The keys of `config` that the events depend on."""
        return {
            key: value
            for key, value in self.config.items()
            if key not in ("items", "as_of")
        }

    @property
    def absent_columns(self) -> frozenset[str]:
        """Names among `query`, `request_id` and `position` that the log lacks."""
        request, position = self.request or self.explode, self.position or self.explode
        sources = {"query": self.query, "request_id": request, "position": position}
        return frozenset(name for name, text in sources.items() if not text)

    @property
    def items_columns(self) -> tuple[list[str], list[str]]:
        """Names of the items' texts and attributes, without `text_` and `cat_`."""
        if self.items is None:
            return [], []
        return list(self.items.texts), list(self.items.attributes)

    @property
    def items_numbers(self) -> list[str]:
        """Names of the items' numeric features, without `num_`."""
        return list(self.items.numbers) if self.items else []

    @property
    def items_schema(self) -> pa.Schema:
        """Schema of the items table."""
        return items_schema(*self.items_columns, self.items_numbers)

    @property
    def keeps_all_items(self) -> bool:
        """Whether the catalogue has all items of the item files (`keep: all`)."""
        return self.items is not None and self.items.keep == "all"

    @property
    def origins(self) -> dict[str, str]:
        """Column or SQL expression in the raw file, by column of events."""
        item = " and then ".join(filter(None, [self.sequence, self.item]))
        time = "position in its list" if self.sequence else self.event_time.origin
        known = {
            f"known_{name}": label.known_origin
            for name, label in self.labels.items()
            if label.is_late
        }
        users = self.users.attributes if self.users else {}
        user_attributes = {
            f"cat_{name}": f"{text} of the users" for name, text in users.items()
        }
        return {
            **self._expressions,
            "user_id": self.user,
            "item_id": item,
            "timestamp_ms": time,
            **known,
            **user_attributes,
        }

    @property
    def _expressions(self) -> dict[str, str]:
        """SQL expressions by column of events."""
        columns = {
            "user_id": self.user,
            "item_id": self.item,
            "timestamp_ms": self.event_time.column,
            "query": self.query,
            "request_id": self.request,
            "position": self.position,
        }
        return {
            **{target: text for target, text in columns.items() if text},
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
    def _list_expressions(self) -> list[str]:
        """SQL expressions that must be lists."""
        expressions = [
            self.sequence,
            self.history.column if self.history else None,
            *self.explode.values(),
        ]
        return [text for text in expressions if text]

    def event_files(self, input_uri: str) -> list[str]:
        """Return the event files relative to the input folder, sorted."""
        files = list_files(
            input_uri,
            self.files,
            required=True,
            what="event file",
            exclude=self._section_patterns,
        )
        formats = {}
        if len({PurePosixPath(file).suffix for file in files}) > 1:
            formats = {self.detect_format(join(input_uri, f)): f for f in files}
        if len(formats) > 1:
            examples = [f"{name} ({file})" for name, file in formats.items()]
            raise UserError(
                f"{input_uri} has events as {' and as '.join(examples)}, which may be "
                f"the same"
            )
        return files

    @property
    def _section_patterns(self) -> list[str]:
        """Patterns of the files of sections, which are not event files."""
        sections = [self.items, self.users, *self.as_of.values()]
        patterns = [section.files for section in sections if section]
        return [pattern for pattern in patterns if pattern != self.files]

    def is_event_file(self, file: str) -> bool:
        """Return whether a file, relative to the input folder, is an event file."""
        if any(fnmatchcase(file, pattern) for pattern in self._section_patterns):
            return False
        return fnmatchcase(file, self.files)

    def item_files(self, input_uri: str) -> list[str]:
        """Return the item files relative to the input folder, sorted."""
        return self.items.list_files(input_uri, "item") if self.items else []

    def user_files(self, input_uri: str) -> list[str]:
        """Return the user files relative to the input folder, sorted."""
        return self.users.list_files(input_uri, "user") if self.users else []

    def read_users(
        self, input_uri: str, digests: dict[str, Any], first_file_only: bool = False
    ) -> Block | None:
        """Read the user files, with one row per user.

        Args:
            input_uri: Input folder.
            digests: Hash of each file, which is updated with the parsed bytes.
            first_file_only: Whether to read only the first file.

        Returns:
            The rows, or None if the log has no user files.
        """
        if self.users is None:
            return None
        files = self.user_files(input_uri)
        if first_file_only:
            files = files[:1]
        blocks = [
            block
            for file in files
            for block in self.users.read(input_uri, file, digests.get(file))
        ]
        schema = self.users.schema
        table = pa.concat_tables(
            [schema.empty_table(), *(block.rows for block in blocks)]
        )
        rejects = pa.concat_tables(
            [REJECTS.empty_table(), *(block.rejects for block in blocks)]
        )
        users = pl.DataFrame(table)
        users = users.unique("user_id", keep="first", maintain_order=True)
        return Block(
            users.to_arrow().cast(schema),
            rejects,
            sum(block.rows_read for block in blocks),
            common_missing(block.missing for block in blocks),
        )

    def read_events(
        self,
        input_uri: str,
        file: str,
        users: pa.Table | None = None,
        piece: FilePart | None = None,
        piece_index: int = 0,
        digest: Any = None,
    ) -> Iterator[Block]:
        """Yield the events of a file, or of a piece of it, in bounded blocks.

        Events are in the order of the file. Their rows also have the column LOG_ROW,
        which ascends within the piece, after lists are exploded.

        Args:
            input_uri: Input folder.
            file: File, relative to the input folder.
            users: Rows of `read_users`, or None.
            piece: Part of the file; None for the whole file.
            piece_index: Index of the piece in the log, for times that are the
                order of rows.
            digest: Hash that is updated with the parsed bytes, or None.
        """
        uri, schema = join(input_uri, file), self.schema.append(LOG_ROW)
        # values of columns in the names of folders, such as `country=se`
        named = [folder.partition("=") for folder in file.split("/")[:-1]]
        folders = {key: value for key, _, value in named if value}
        file_expressions = self._file_expressions(folders)
        first_row = 0
        frames = read_frames(uri, self, file_expressions, digest, piece)
        for index, frame in enumerate(frames):
            missing = {
                name: hint
                for name, hint in frame.missing.items()
                if name not in folders
            }
            if index == 0:
                derived = [*self.explode, *folders]
                expressions = [self.user, self.item, self.sequence]
                expressions += [self.event_time.column, *self.explode.values()]
                for text in filter(None, expressions):
                    for name in root_columns(text, derived):
                        if name in missing and name not in derived:
                            hint = missing[name]
                            raise UserError(f"{uri} has no column '{name}'; {hint}")
            rows = frame.with_missing
            for key, value in folders.items():
                if key not in frame.with_missing.columns:
                    is_null = value == "__HIVE_DEFAULT_PARTITION__"
                    literal = pl.lit(None if is_null else unquote(value), pl.String)
                    rows = rows.with_columns(literal.alias(key))
            broken = frame.broken
            events = self._frame_events(rows, uri, users, piece_index)
            history_events = self._history_events(rows, uri, users)
            for part in chain(events, history_events):
                end_row = first_row + len(part.raw)
                part.values["log_row"] = pl.int_range(first_row, end_row, eager=True)
                yield part.block(broken, missing, file, piece, schema, MISSING_VALUES)
                first_row = end_row
                broken = []  # reported with the first block of the frame

    def _file_expressions(self, folders: Iterable[str]) -> list[str]:
        """Return expressions whose columns are all columns of the file."""
        folders = list(folders)
        # each expression with the columns it may read that are not in the file
        pairs = [(text, folders) for text in self._list_expressions]
        pairs += [
            (text, [*self.explode, *folders]) for text in self._expressions.values()
        ]
        expressions = []
        for text, derived_columns in pairs:
            names = root_columns(text, derived_columns)
            in_file = [f'"{name}"' for name in names if name not in derived_columns]
            expressions += in_file if len(in_file) < len(names) else [text]
        return expressions

    def _frame_events(
        self, rows: pl.DataFrame, uri: str, users: pa.Table | None, piece_index: int
    ) -> Iterator[Rows]:
        """Yield converted rows of a frame, one per event."""
        if self.sequence:
            lists = evaluate_list(rows, self.sequence, "sequence", uri)
            yield from self._list_events(rows, lists, self.item, 0, uri, users)
            return
        first_list = next(iter(self.explode), None)
        for piece in split_rows(self._add_lists(rows, uri), first_list):
            if self.explode:
                columns = [*self.explode, ELEMENT]
                piece = piece.explode(columns, empty_as_null=True, keep_nulls=True)
            yield self._convert_rows(piece, uri, users, piece_index)

    def _convert_rows(
        self, piece: pl.DataFrame, uri: str, users: pa.Table | None, piece_index: int
    ) -> Rows:
        """Convert raw rows to columns of events."""
        rows = Rows(piece, self._expressions, uri)
        rows.parse_ids("user_id")
        if self.explode:
            rows.reject(piece[UNEQUAL], f"{self.item}: lists of unequal length")
            rows.values["request_id"] = piece[REQUEST]
            rows.values["position"] = piece[ELEMENT].fill_null(0).cast(pl.Int32)
        rows.parse_ids("item_id")
        rows.parse_time("timestamp_ms", self.event_time, piece_index, past=True)
        if self.query:
            rows.parse_text("query")
        if self.request:
            rows.parse_ids("request_id")
        if self.position:
            rows.parse_integer("position")
        for name, label in self.labels.items():
            if label.type == "bool":
                rows.parse_flag(f"label_{name}")
            else:
                rows.parse_number(f"label_{name}", label.range)
            if label.is_late:
                rows.store_known_time(name, label.time, label.delay_minutes)
        for name in self.numbers:
            rows.parse_number(f"num_{name}")
        for name in self.categories:
            rows.parse_text(f"cat_{name}")
        rows.join(users)
        return rows

    def _add_lists(self, rows: pl.DataFrame, uri: str) -> pl.DataFrame:
        """Add the lists to explode, their elements' positions, and request ids."""
        if not self.explode:
            return rows
        lists = {
            name: evaluate_list(rows, text, f"explode.{name}", uri)
            for name, text in self.explode.items()
        }
        lengths = pl.DataFrame(
            {name: values.list.len().fill_null(0) for name, values in lists.items()}
        )
        is_equal = pl.all_horizontal(pl.all() == pl.nth(0))
        is_unequal = lengths.select(~is_equal).to_series()
        first_length = lengths.to_series(0)
        is_usable = ~is_unequal & (first_length > 0)
        positions = pl.int_ranges(0, first_length, dtype=pl.Int32, eager=True)
        names = sorted(name for name in rows.columns if name != ROW)
        content = pl.DataFrame([as_text(rows[name]).alias(name) for name in names])
        request = content.hash_rows(seed=0).map_elements("{:016x}".format, pl.String)
        usable = {
            name: pl.when(is_usable).then(values)
            for name, values in {**lists, ELEMENT: positions}.items()
        }
        return rows.with_columns(**usable, **{REQUEST: request, UNEQUAL: is_unequal})

    def _history_events(
        self, rows: pl.DataFrame, uri: str, users: pa.Table | None
    ) -> Iterator[Rows]:
        """Yield the earlier behaviours in the rows, one row each."""
        history, time = self.history, self.event_time
        if history is None or not len(rows):
            return
        columns = {"user": self.user, "time": str(time.column)}
        values, _ = evaluate(rows, columns, uri)
        row_time, time_error = parse_times(values["time"], time, "")
        user = clean_ids(values["user"])
        lists = evaluate_list(rows, history.column, "history.column", uri)
        lists = lists.cast(pl.List(pl.String))
        rows = rows.with_columns(
            user.alias(REQUEST), row_time.alias(TIME), lists.alias(LIST)
        )
        is_valid = time_error.is_null() & user.is_not_null() & (lists.list.len() > 0)
        rows = rows.filter(is_valid).sort(TIME, maintain_order=True)
        rows = rows.unique([REQUEST, LIST], keep="first", maintain_order=True).sort(ROW)
        begin = parse_iso_ms(history.at) or 0
        for events in self._list_events(rows, rows[LIST], None, begin, uri, users):
            moment = events.values["timestamp_ms"]
            for name in history.labels or ():
                is_set = pl.repeat(True, len(events.raw), eager=True)
                events.values[f"label_{name}"] = is_set
                if self.labels[name].is_late:
                    events.values[f"known_{name}"] = moment
            events.reject(
                moment >= events.raw[TIME],
                f"{history.column}: not before its row, give an earlier history.at "
                f"than {history.at}",
            )
            yield events

    def _list_events(
        self,
        rows: pl.DataFrame,
        lists: pl.Series,
        last: str | None,
        begin: int,
        uri: str,
        users: pa.Table | None,
    ) -> Iterator[Rows]:
        """Yield the rows of events from lists of items, one row per item."""
        items = lists.cast(pl.List(pl.String)).fill_null([])
        if last:
            evaluated, _ = evaluate(rows, {"last": last}, uri)
            last_item = clean_ids(evaluated["last"])
            with_last = pl.concat_list(items, last_item)
            joined = pl.when(last_item.is_null()).then(items).otherwise(with_last)
            items = pl.select(joined).to_series()
        index = pl.select(pl.int_ranges(0, items.list.len())).to_series()
        rows = rows.with_columns(items.alias(LIST), index.alias(ELEMENT))
        for piece in split_rows(rows, LIST):
            piece = piece.explode(LIST, ELEMENT, empty_as_null=True, keep_nulls=True)
            events = Rows(piece, {"user_id": self.user, "item_id": LIST}, uri)
            column = self.history.column if self.history else LIST
            events.expressions["item_id"] = self.sequence or column  # for messages
            events.parse_ids("user_id")
            events.parse_ids(
                "item_id",
                "missing or empty; of text with blanks in a row split "
                "regexp_replace(..., '\\s+', ' ')",
            )
            events.values["timestamp_ms"] = piece[ELEMENT].fill_null(0) + begin
            events.join(users)
            yield events


def check_names(names: Iterable[Any], key: str) -> None:
    """Raise a ValueError for a name that cannot be part of a column or a metric.

    Args:
        names: Names of labels, features or other keys.
        key: Key of the mapping that has the names.
    """
    for name in names:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ValueError(
                f"'{name}' in '{key}' is not a valid name; use letters, digits and _, "
                f"beginning with a letter"
            )
        if len(name) > MAX_NAME_LENGTH:
            raise ValueError(
                f"the name '{name[:20]}...' in '{key}' has {len(name)} characters, too "
                f"many for the name of a metric; use at most {MAX_NAME_LENGTH}"
            )
        if METRIC_CUTOFF.search(name):
            raise ValueError(
                f"'{name}' in '{key}' ends like the cutoff of a metric such as "
                f"ndcg_at_10"
            )
        if key in ("labels", "tasks") and name in METRIC_WORDS:
            raise ValueError(
                f"'{name}' in '{key}' is reserved for metrics such as {name}/gauc"
            )


def _check_section(
    name: str, section: Section | None, id_key: str, optional_keys: tuple[str, ...]
) -> None:
    """Raise a ValueError for a section without ids, or with unsupported keys."""
    if section is None:
        return
    if not getattr(section, id_key):
        raise ValueError(f"'{name}.{id_key}' is missing")
    allowed = ["files", id_key, *optional_keys, *(f.name for f in fields(Files))]
    check_known(_changed_fields(section), allowed, name)
    for kind in ("texts", "attributes", "numbers", "categories"):
        check_names(getattr(section, kind), f"{name}.{kind}")
    if name == "users" and not section.attributes:
        raise ValueError("users.attributes is empty")


def _changed_fields(value: Any) -> Any:
    """Convert a dataclass to a dict of the fields that differ from their defaults."""
    if isinstance(value, dict):
        return {key: _changed_fields(inner) for key, inner in value.items()}
    if not is_dataclass(value):
        return value
    changed = {}
    for f in fields(value):
        default = f.default if f.default_factory is MISSING else f.default_factory()
        current = getattr(value, f.name)
        if current != default:
            changed[f.name] = _changed_fields(current)
    return changed


def _expand_short_forms(content: dict[str, Any]) -> dict[str, Any]:
    """Expand the short forms of a mapping and of its sections."""
    expanded = dict(content)
    for key, value in content.items():
        if key in COLUMN_LISTS and isinstance(value, list):
            check_names(value, key)
            expanded[key] = {name: name for name in value}
        elif key == "labels" and isinstance(value, dict):
            expanded[key] = {
                name: {"column": label} if isinstance(label, str) else label
                for name, label in value.items()
            }
        elif key in ("items", "users") and isinstance(value, dict):
            expanded[key] = _expand_short_forms(value)
        elif key == "as_of" and isinstance(value, dict):
            expanded[key] = {
                name: _expand_short_forms(inner) if isinstance(inner, dict) else inner
                for name, inner in value.items()
            }
    return expanded


def parse_log(content: dict[str, Any]) -> Log:
    """Build a log from the content of a mapping file.

    Raises:
        ValueError: If the content is invalid.
    """
    log: Log = build(Log, _expand_short_forms(content))
    return log


def load_source(uri: str) -> tuple[Log, dict[str, Any]]:
    """Load a mapping file.

    Returns:
        The log, and the section `prepare` with settings of jobs.prepare, {} by default.
    """
    content = read_yaml(uri)
    prepare = content.pop("prepare", None) or {}
    if not isinstance(prepare, dict):
        raise UserError(
            f"{uri}: 'prepare' is {type(prepare).__name__}, not a mapping of options"
        )
    try:
        return parse_log(content), prepare
    except ValueError as error:
        raise UserError(f"{uri}: {error}") from error
