"""The mapping of a raw log: its files, and an expression per column of a table.

    files: transactions_*.csv*
    user: customer_id
    item: lpad(article_id, 10, '0')
    time: {column: "day || ' ' || clock", format: "%d.%m.%Y %H:%M:%S"}
    labels: {bought: "cast(quantity as double) > 0"}
    items: {files: articles.csv, item: article_id, texts: {title: "lower(name)"}}

Each column of a table is given by the name of a column of the file, or by a SQL
expression of polars (`pl.sql_expr`). `rows.py` reads the files.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import pyarrow as pa
from pydantic import BeforeValidator, Field, TypeAdapter

from core.errors import UserError
from core.options import build, changed, read_yaml
from core.schemas import LogInfo, events_schema, items_schema
from pipelines.prepare.reading.read import Files, check_condition, check_sql, list_files
from pipelines.prepare.reading.times import Time
from pipelines.prepare.settings.names import check_names, check_range

MAX_DELAY_MINUTES = 60 * 24 * 3660
"""Ten years. A longer delay is assumed to be in a wrong unit."""
FORBID_EXTRA = {"extra": "forbid"}


def _name_columns(value: Any) -> Any:
    """Convert a list of columns to a mapping in which they keep their names."""
    return {name: name for name in value} if isinstance(value, list) else value


def _name_label(value: Any) -> Any:
    """Convert the expression of a label to a mapping."""
    return {"column": value} if isinstance(value, str) else value


Columns = Annotated[dict[str, str], BeforeValidator(_name_columns)]
"""Columns or SQL expressions by name, or a list of columns that keep their names."""


def _add_prefix(prefix: str, values: dict[str, str]) -> dict[str, str]:
    return {f"{prefix}_{name}": text for name, text in values.items()}


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


@dataclass(frozen=True)
class Section(Files):
    """Files with a table of their own: of items, of users, or of features."""

    __pydantic_config__ = FORBID_EXTRA

    files: str
    """Pattern of the files, relative to the input folder (`*`, `?`, `[...]`)."""

    def __post_init__(self) -> None:
        check_sql(self.columns.values())
        check_condition(self.where)
        check_names([name.partition("_")[2] for name in self.columns], self.files)

    @property
    def columns(self) -> dict[str, str]:
        """Column or SQL expression by column of the table; the ids come first."""
        raise NotImplementedError

    @property
    def key(self) -> str:
        """Column of events whose ids the rows describe: `item_id` or `user_id`."""
        return next(iter(self.columns))

    @property
    def schema(self) -> pa.Schema:
        """Schema of the rows."""
        types = {"timestamp_ms": pa.int64()}
        for name in self.columns:
            if name.startswith("num_"):
                types[name] = pa.float32()
        return pa.schema(
            [pa.field(name, types.get(name, pa.string())) for name in self.columns]
        )

    def list_files(self, input_uri: str) -> list[str]:
        """Return the files of the section, relative to the input folder."""
        noun = {"item_id": "item file", "user_id": "user file"}[self.key]
        is_optional = isinstance(self, Items) and self.optional
        return list_files(input_uri, self.files, required=not is_optional, what=noun)


@dataclass(frozen=True)
class Items(Section):
    """Item files: texts, attributes and numbers of items."""

    __pydantic_config__ = FORBID_EXTRA

    item: str
    """Column or SQL expression of the item's id; of several rows of an item, the first
    is used."""
    texts: Columns = field(default_factory=dict)
    """Texts by name: {name: column or SQL expression}, or a list of columns that keep
    their names."""
    attributes: Columns = field(default_factory=dict)
    """Categorical attributes by name, written as `texts`."""
    numbers: Columns = field(default_factory=dict)
    """Numeric features by name, written as `texts`."""
    optional: bool = False
    """true: item files may be missing; items without a row have no texts and are
    counted."""
    keep: Literal["used", "all"] = "used"
    """used: the catalogue contains the items with at least `core` behaviours. all: it
    also contains every item of the item files, so that new items have semantic IDs and
    can be recommended; `core` then only limits users and items without a row."""

    @property
    def columns(self) -> dict[str, str]:
        """Column or SQL expression by column of the table; the ids come first."""
        return {
            "item_id": self.item,
            **_add_prefix("text", self.texts),
            **_add_prefix("cat", self.attributes),
            **_add_prefix("num", self.numbers),
        }


@dataclass(frozen=True)
class Users(Section):
    """User files, whose attributes become features of all events of the user."""

    __pydantic_config__ = FORBID_EXTRA

    user: str
    """Column or SQL expression of the user's id; of several rows of a user, the first
    is used."""
    attributes: Annotated[Columns, Field(min_length=1)]
    """Categorical attributes by name: {name: column or SQL expression}, or a list of
    columns that keep their names."""

    @property
    def columns(self) -> dict[str, str]:
        """Column or SQL expression by column of the table; the ids come first."""
        return {"user_id": self.user, **_add_prefix("cat", self.attributes)}


@dataclass(frozen=True)
class AsOf(Section):
    """Files with features of items or users, each row valid from its time on."""

    __pydantic_config__ = FORBID_EXTRA

    time: Time
    """Time from which a row is valid, written as the time of events: {column, unit}."""
    item: str | None = None
    """Column or SQL expression of the item's id."""
    user: str | None = None
    """Column or SQL expression of the user's id."""
    numbers: Columns = field(default_factory=dict)
    """Numeric features by name: {name: column or SQL expression}, or a list of columns
    that keep their names."""
    categories: Columns = field(default_factory=dict)
    """Categorical features by name, written as `numbers`."""

    def __post_init__(self) -> None:
        if (self.item is None) == (self.user is None):
            raise ValueError("features of 'as_of' need either 'item' or 'user'")
        if not self.features:
            raise ValueError(f"{self.files} of 'as_of' has no features")
        super().__post_init__()

    @property
    def features(self) -> dict[str, str]:
        """Source column or SQL expression of each feature column, by feature column."""
        categories = _add_prefix("cat", self.categories)
        return {**_add_prefix("num", self.numbers), **categories}

    @property
    def columns(self) -> dict[str, str]:
        """Column or SQL expression by column of the table; the ids come first."""
        key = {"item_id": self.item} if self.item else {"user_id": str(self.user)}
        return {**key, "timestamp_ms": str(self.time.column), **self.features}


@dataclass(frozen=True)
class Session(Section):
    """Files of behaviours outside of searches, like views of items."""

    __pydantic_config__ = FORBID_EXTRA

    user: str
    """Column or SQL expression of the user's id."""
    item: str
    """Column or SQL expression of the item's id."""
    time: Time
    """Time of the behaviour, written as the time of events: {column, unit}."""

    @property
    def columns(self) -> dict[str, str]:
        """Column or SQL expression by column of the table; the ids come first."""
        time = str(self.time.column)
        return {"user_id": self.user, "item_id": self.item, "timestamp_ms": time}


@dataclass(frozen=True)
class Log(Files):
    """The mapping of a raw log: its files, and an expression per column."""

    __pydantic_config__ = FORBID_EXTRA

    files: str
    """Pattern of the event files, relative to the input folder (`*`, `?`, `[...]`).
    Files that also match another pattern of `items`, `users`, `as_of` or `sessions` are
    excluded."""
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
    """Column or SQL expression of the id of the request or page view; in a retrieval
    log, of the order whose items are a basket."""
    position: str | None = None
    """Column or SQL expression of the rank at which the item was shown, from 0; by
    default, with `explode`, the rank in the list."""
    labels: dict[str, Annotated[Label, BeforeValidator(_name_label)]] = field(
        default_factory=dict
    )
    """Labels by name: {name: column or SQL expression}, or {name: {column, type, time,
    ...}}."""
    numbers: Columns = field(default_factory=dict)
    """Numeric features, known before the event, by name: {name: column or SQL
    expression}, or a list of columns."""
    categories: Columns = field(default_factory=dict)
    """Categorical features, known before the event, written as `numbers`."""
    explode: Columns = field(default_factory=dict)
    """Lists of equal length that become one row per element: {name: list column or SQL
    expression}. The other keys read the elements by these names. Rows with an empty
    list are rejected."""
    items: Items | None = None
    """Item files: {files, item, texts, attributes, numbers}."""
    texts: Columns = field(default_factory=dict)
    """Texts of items that the event files have, usually written {items: {from: events,
    texts: ...}}: an item has its latest value before validation, or in the whole log if
    the split is leave_last_out."""
    users: Users | None = None
    """User files: {files, user, attributes}; the attributes become categorical features
    of all events of the user."""
    simulated: bool = False
    """true: the log is simulated, and results on it are labelled as simulated."""
    as_of: dict[str, AsOf] = field(default_factory=dict)
    """Files with features of items or users that change over time, by name: {files,
    item or user, time, numbers, categories}."""
    sessions: dict[str, Session] = field(default_factory=dict)
    """Files of further behaviours in the histories of searches, by type, such as
    `views`: {files, user, item, time}. They may be the event files with another
    `where`."""

    def __post_init__(self) -> None:
        if self.sequence is not None:
            others = (self.explode, self.labels, self.position, self.texts)
            if self.time or self.request or any(others):
                raise ValueError("'sequence' reads lists without times or labels")
            object.__setattr__(self, "time", Time(unit="order"))
        elif self.item is None or self.time is None:
            missing = "item" if self.item is None else "time"
            raise ValueError(f"'{missing}' is missing")
        if self.texts and self.items:
            raise ValueError("texts of items are either in 'items.files' or in events")
        for key in (
            "labels",
            "numbers",
            "categories",
            "texts",
            "explode",
            "as_of",
            "sessions",
        ):
            check_names(getattr(self, key), key)
        for name, label in self.labels.items():
            self.labels[name] = self._build_label_time(name, label)
        features = [*(f"num_{name}" for name in self.numbers)]
        features += [f"cat_{name}" for name in self.info.categories]
        for name, section in self.timed.items():
            if section.time.has_clock_times != self.has_clock_times:
                raise ValueError(
                    f"{name} needs a 'time' like that of events (both clock times or "
                    f"both order)"
                )
        for section in self.as_of.values():
            features += section.features
        repeated = [name for name, count in Counter(features).items() if count > 1]
        if repeated:
            raise ValueError(f"'{repeated[0][4:]}' is the name of two features")
        check_sql([*self.columns.values(), *self.lists])
        check_condition(self.where)

    def _build_label_time(self, name: str, label: Label) -> Label:
        """Return the label with its `time` as an instance of `Time`."""
        key, time = f"labels.{name}", label.time
        if label.delay_minutes is not None and not self.has_clock_times:
            raise ValueError(
                f"{key}.delay_minutes needs clock times, but time.unit is order"
            )
        if time is None or isinstance(time, Time):
            return label
        time = {"column": time} if isinstance(time, str) else dict(time)
        if not {"unit", "format"} & set(time):
            time = {**changed(self.event_time), **time}
        built: Time = build(Time, time, f"{key}.time.")
        if (
            built.has_clock_times != self.has_clock_times
            or self.event_time.column is None
        ):
            raise ValueError(
                f"{key}.time is {built.notation}, and the log's time "
                f"{self.event_time.notation}"
            )
        return replace(label, time=built)

    @property
    def timed(self) -> dict[str, AsOf | Session]:
        """Sections whose rows have times, by the name of their table."""
        as_of = {f"as_of_{name}": section for name, section in self.as_of.items()}
        sessions = {f"session_{name}": s for name, s in self.sessions.items()}
        return {**as_of, **sessions}

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
    def columns(self) -> dict[str, str]:
        """Column or SQL expression in the raw file, by column of events."""
        labels = {name: label.column for name, label in self.labels.items()}
        times = {
            name: label.time.column for name, label in self.labels.items() if label.time
        }
        columns = {
            "user_id": self.user,
            "item_id": self.item,
            "timestamp_ms": self.event_time.column,
            "query": self.query,
            "request_id": self.request,
            "position": self.position,
            **_add_prefix("label", labels),
            **_add_prefix("known", times),
            **_add_prefix("num", self.numbers),
            **_add_prefix("cat", self.categories),
            **_add_prefix("text", self.texts),
        }
        return {name: text for name, text in columns.items() if text}

    @property
    def lists(self) -> list[str]:
        """Columns or SQL expressions that must be lists."""
        return list(filter(None, [self.sequence, *self.explode.values()]))

    @property
    def info(self) -> LogInfo:
        """Labels and features of the events."""
        labels = self.labels
        users = self.users.attributes if self.users else ()
        return LogInfo(
            labels={name: label.type for name, label in labels.items()},
            numbers=list(self.numbers),
            categories=[*self.categories, *users],
            clock=self.has_clock_times,
            known={
                name: label.delay_minutes
                for name, label in labels.items()
                if label.is_late
            },
            ranges={name: label.range for name, label in labels.items() if label.range},
        )

    @property
    def schema(self) -> pa.Schema:
        """Schema of the events."""
        return events_schema(self.info, self.texts)

    @property
    def config(self) -> dict[str, Any]:
        """Keys whose values differ from the defaults, as plain values."""
        values: dict[str, Any] = TypeAdapter(Log).dump_python(
            self, exclude_defaults=True
        )
        return values

    @property
    def events_config(self) -> dict[str, Any]:
        """The keys of `config` that the events depend on."""
        config = self.config
        return {
            key: config[key]
            for key in config
            if key not in ("items", "as_of", "sessions")
        }

    @property
    def absent_columns(self) -> frozenset[str]:
        """Names among `query`, `request_id` and `position` that the log lacks."""
        names = {"query", "request_id", "position"} - self.columns.keys()
        return frozenset(names - {"request_id", "position"} if self.explode else names)

    @property
    def items_columns(self) -> tuple[list[str], list[str]]:
        """Names of the items' texts and attributes, without `text_` and `cat_`."""
        if self.items is None:
            return list(self.texts), []
        return list(self.items.texts), list(self.items.attributes)

    @property
    def items_numbers(self) -> list[str]:
        """Names of the items' numeric features, without `num_`."""
        return list(self.items.numbers) if self.items else []

    @property
    def items_schema(self) -> pa.Schema:
        """Schema of the items table."""
        return items_schema(*self.items_columns, self.items_numbers)

    def event_files(self, input_uri: str) -> list[str]:
        """Return the event files relative to the input folder, sorted."""
        sections = [self.items, self.users, *self.timed.values()]
        patterns = {section.files for section in sections if section} - {self.files}
        return list_files(
            input_uri, self.files, required=True, what="event file", exclude=patterns
        )

    def item_files(self, input_uri: str) -> list[str]:
        """Return the item files relative to the input folder, sorted."""
        return self.items.list_files(input_uri) if self.items else []

    def user_files(self, input_uri: str) -> list[str]:
        """Return the user files relative to the input folder, sorted."""
        return self.users.list_files(input_uri) if self.users else []


def parse_log(content: dict[str, Any]) -> Log:
    """Build a log from the content of a mapping file."""
    items = content.get("items")
    if isinstance(items, dict) and "from" in items:
        if items["from"] != "events" or items.keys() != {"from", "texts"}:
            raise UserError(
                f"items.from is {items['from']!r}; use 'events', with 'texts' and no "
                f"other key"
            )
        content = {**content, "items": None, "texts": items["texts"]}
    log: Log = build(Log, content)
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
    except UserError as error:
        raise UserError(f"{uri}: {error}", error.cause) from error


def describe_unread(log: Log, input_uri: str) -> list[str]:
    """Return a note on files of the folder that the mapping does not read."""
    sections = [log.items, log.users, *log.timed.values()]
    patterns = {log.files, "*.yaml", *(part.files for part in sections if part)}
    files = list_files(input_uri, "*", required=False, what="file", exclude=patterns)
    names = ", ".join(files[:3])
    note = f"note: no key of the mapping reads {len(files):,} files, such as {names}"
    return [note] if files else []
