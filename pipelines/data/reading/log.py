"""A raw log as described by a mapping file, whose columns are SQL expressions.

    files: transactions_*.csv*
    user: customer_id
    item: lpad(article_id, 10, '0')
    time: {column: "day || ' ' || clock", format: "%d.%m.%Y %H:%M:%S"}
    labels: {bought: "cast(quantity as double) > 0"}
    items: {files: articles.csv, item: article_id, texts: {title: "lower(name)"}}

Expressions are SQL of polars (`pl.sql_expr`) over the columns of the file; a text that
is the name of a column is this column. `Log.read_events` yields bounded blocks of
events and rejects, `Section.read` blocks of items, users and tables of features.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain
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
    root_columns,
)
from pipelines.data.reading.rows import (
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
from pipelines.data.reading.times import Time, parse_iso_ms, parse_times
from pipelines.data.schemas import LABEL_TYPES, REJECTS, events_schema, items_schema

LOG_ROW = pa.field("log_row", pa.int64(), nullable=False)
MISSING_VALUES = {"request_id": "", "position": 0}
"""Values of columns that a log does not have. All other columns are null then."""
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
MAX_NAME_LENGTH = 80
"""Most characters of a name. MLflow allows 250, and a metric may contain two names."""
METRIC_CUTOFF = re.compile(r"_at_\d+$")
"""The @10 of ndcg@10 in the names of MLflow metrics."""
METRIC_WORDS = ("mean", "with_position")
"""First parts of metrics that belong to no single label."""
MAX_DELAY_MINUTES = 60 * 24 * 3660
"""Ten years. A longer delay is in a wrong unit."""
# columns of a frame while lists are exploded
ELEMENT, REQUEST, UNEQUAL, LIST = "__element", "__request", "__unequal", "__list"
COLUMN_LISTS = ("numbers", "categories", "explode", "texts", "attributes")
"""Keys whose value may be a list of columns that keep their names."""
FORBID_EXTRA = {"extra": "forbid"}


def check_range(span: list[float]) -> None:
    """Raise a ValueError unless `span` is [low, high]."""
    if len(span) != 2 or not -math.inf < span[0] < span[1] < math.inf:
        raise ValueError(
            f"range is {span!r}; give the least and the largest value, such as [0.5, 5]"
        )


@dataclass(frozen=True)
class Label:
    """A label: the user's action on an item."""

    __pydantic_config__ = FORBID_EXTRA

    column: str
    """Column or SQL expression."""
    type: str = "bool"
    """bool (true, false, 1 or 0) or float32."""
    time: Any = None
    """Column or expression of the time at which the label was known, or {column, unit};
    by default in the unit of the log's time. Without it, the label is known with the
    event, or after `delay_minutes`."""
    delay_minutes: float | None = None
    """Minutes after the event until the label is known, such as 60; by default 0, or
    given by `time`."""
    range: list[float] | None = None
    """float32: the smallest and the largest value, such as [0.5, 5]; rows outside are
    rejected. By default any number."""

    def __post_init__(self) -> None:
        if self.type not in LABEL_TYPES:
            raise ValueError(
                f"a label's type is '{self.type}'; it must be one of "
                f"{', '.join(LABEL_TYPES)}"
            )
        if self.time is not None and self.delay_minutes is not None:
            raise ValueError(
                "a label has both 'time' and 'delay_minutes'; give the one that says "
                "when it is known"
            )
        delay = self.delay_minutes
        if delay is not None and not 0 < delay <= MAX_DELAY_MINUTES:
            raise ValueError(
                f"delay_minutes is {delay!r}; give minutes from above 0 to "
                f"{MAX_DELAY_MINUTES:,}, such as 60"
            )
        if self.range is not None:
            if self.type != "float32":
                raise ValueError(
                    f"'range' is of float32 labels, this one is {self.type}; leave it "
                    f"out"
                )
            check_range(self.range)

    @property
    def late(self) -> bool:
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
    event of its user k milliseconds after `at`. Rows that repeat the list give the same
    events again, which are dropped as repetitions.
    """

    __pydantic_config__ = FORBID_EXTRA

    column: str
    """Column or SQL expression of the list of items, oldest first."""
    at: str
    """A time before the log, as ISO 8601. The first item of a list gets this time, each
    later one a millisecond more."""
    labels: list[str] | None = None
    """The bool labels that are true for these behaviours; [] for none. Required if the
    log has bool labels."""

    def __post_init__(self) -> None:
        if parse_iso_ms(self.at) is None:
            raise ValueError(
                f"history.at is '{self.at}', which is no ISO 8601 time; write such as "
                f"'2019-10-12'"
            )


@dataclass(frozen=True)
class Section(Files):
    """Files with attributes of items or users, or with features as they change."""

    __pydantic_config__ = FORBID_EXTRA

    files: str
    """Pattern of the files, relative to their folder (`*`, `?`, `[...]`)."""
    item: str | None = None
    """Column or SQL expression of the item's id."""
    user: str | None = None
    """Column or SQL expression of the user's id; of several rows of a user the first is
    used."""
    time: Time | None = None
    """Time from which a row is valid, in the form of the time of events: {column,
    unit}."""
    texts: dict[str, str] = field(default_factory=dict)
    """Texts by name: {name: column or SQL expression}, or a list of columns that keep
    their names."""
    attributes: dict[str, str] = field(default_factory=dict)
    """Categorical attributes by name, in the form of `texts`."""
    categories: dict[str, str] = field(default_factory=dict)
    """Categorical features by name, in the form of `texts`."""
    numbers: dict[str, str] = field(default_factory=dict)
    """Numbers by name, in the form of `texts`."""
    folder: str = ""
    """Folder of the item files, relative to the input folder, such as `../catalogue`;
    empty: the input folder."""
    optional: bool = False
    """true: a log without item files is read too. Its items have no texts; they are
    counted."""
    keep: str = "used"
    """used: the catalogue contains the items with at least `core` behaviours. all: also
    every item of the item files, so that new items have semantic IDs and can be
    recommended; `core` then limits users, and items that the files lack."""

    def __post_init__(self) -> None:
        if self.keep not in ("used", "all"):
            raise ValueError(f"items.keep is '{self.keep}'; it is one of used, all")
        self.check_files()
        check_sql(self._expressions.values())

    @property
    def key(self) -> str:
        """Id column of events that the section belongs to."""
        return "item_id" if self.item else "user_id"

    @property
    def origins(self) -> dict[str, str]:
        """Column or expression in the raw file of each column."""
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
        """Expressions by column."""
        time = {"timestamp_ms": str(self.time.column)} if self.time else {}
        return {**self.origins, **time} if self.item or self.user else {}

    @property
    def schema(self) -> pa.Schema:
        """Schema of the rows; with times, numbers come first as in events."""
        kinds = {"timestamp_ms": pa.int64()} | {
            name: pa.float32() for name in self.origins if name.startswith("num_")
        }
        return pa.schema(
            [pa.field(name, kinds.get(name, pa.string())) for name in self.origins]
        )

    @property
    def features(self) -> pa.Schema:
        """Schema of the features alone."""
        return pa.schema(
            [f for f in self.schema if f.name.startswith(("num_", "cat_"))]
        )

    def list_files(self, input_uri: str, what: str) -> list[str]:
        """Return the files relative to the input folder.

        Raises:
            UserError: If there is none, unless the section is optional.
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
        """Yield the rows of a file in blocks. Ids, texts and attributes are text.

        Args:
            input_uri: Input folder.
            file: File relative to it.
            digest: Hash that is updated with the parsed bytes, or None.
        """
        uri = join(input_uri, file)
        for frame in read_frames(uri, self, self._expressions.values(), digest):
            rows = Rows(frame.with_missing, self._expressions, uri)
            rows.ids(self.key)
            for name in self.schema.names[1:]:
                if name == "timestamp_ms" and self.time:
                    rows.time(name, self.time)
                elif name.startswith("num_"):
                    rows.number(name)
                else:
                    rows.text(name)
            yield rows.block(frame.broken, frame.missing, file, None, self.schema)


@dataclass(frozen=True)
class Log(Files):
    """A log described column by column."""

    __pydantic_config__ = FORBID_EXTRA

    files: str
    """Pattern of the event files, relative to the input folder (`*`, `?`, `[...]`);
    files of `items` and `users` that it matches too are left out."""
    user: str
    """Column or SQL expression of the user's id."""
    item: str | None = None
    """Column or SQL expression of the item's id; with `sequence`, of an item that
    follows the list, if any."""
    time: Time | None = None
    """Time of the event: {column, unit: s | ms | us | ns | iso | order}, or {column,
    format: '%d.%m.%Y'}."""
    sequence: str | None = None
    """Instead of `time`: a list of all items of the row's user, oldest first. Each item
    becomes an event, and its time is its position in the list."""
    query: str | None = None
    """Column or SQL expression of the search query."""
    request: str | None = None
    """Column or SQL expression of the id of the request or page view."""
    position: str | None = None
    """Column or SQL expression of the rank shown, from 0; with `explode` it is the rank
    in the list."""
    labels: dict[str, Label] = field(default_factory=dict)
    """Labels by name: {name: column or SQL expression}, or {name: {column, type, time,
    ...}}."""
    numbers: dict[str, str] = field(default_factory=dict)
    """Numeric features, known before the event, by name: {name: column or SQL
    expression}, or a list of columns."""
    categories: dict[str, str] = field(default_factory=dict)
    """Categorical features, known before the event, in the form of `numbers`."""
    explode: dict[str, str] = field(default_factory=dict)
    """Lists of equal length that become one row per element: {name: list column or SQL
    expression}; the other keys read the elements by these names. A row with an empty
    list is rejected."""
    history: History | None = None
    """Earlier behaviours without times: {column, at, labels}."""
    items: Section | None = None
    """The item files: {files, item, texts, attributes, numbers}."""
    users: Section | None = None
    """The user files: {files, user, attributes}; attributes are categories of each of
    the user's events."""
    simulated: bool = False
    """true: the log is simulated, and results on it are labelled so."""
    as_of: dict[str, Section] = field(default_factory=dict)
    """Files of features of items or users that change over time, by name: {files, item
    or user, time, numbers}."""

    def __post_init__(self) -> None:
        self.check_files()
        if self.sequence is not None:
            others = (self.explode, self.labels, self.history, self.position)
            if self.time or self.request or any(others):
                raise ValueError(
                    "'sequence' is of lists without times or labels; leave out 'time', "
                    "'explode' and others"
                )
            object.__setattr__(self, "time", Time(unit="order"))
        elif self.item is None or self.time is None:
            missing = "item" if self.item is None else "time"
            example = {
                "item": "item: item_id",
                "time": "time: {column: time_ms, unit: ms}",
            }[missing]
            raise ValueError(f"'{missing}' is missing; add such as '{example}'")
        self._check_sections()
        if self.history:
            self._check_history(self.history)
        check_sql([*self._expressions.values(), *self._list_expressions])

    def _check_sections(self) -> None:
        """Complete the labels, and check names and sections."""
        for name, label in self.labels.items():
            self.labels[name] = self._add_label_time(name, label)
        for kind in ("labels", "numbers", "categories", "explode", "as_of"):
            check_names(getattr(self, kind), kind)
        item_keys = ("texts", "attributes", "numbers", "folder", "optional", "keep")
        _check_section("items", self.items, "item", item_keys)
        _check_section("users", self.users, "user", ("attributes",))
        for name, of in self.as_of.items():
            key = "item" if of.item else "user"
            feature_keys = ("numbers", "categories", "time")
            _check_section(f"as_of.{name}", of, key, feature_keys)
            if of.time is None or of.time.clock != self.clock or not of.features.names:
                need = "a 'time' of the log's kind, and 'numbers' or 'categories'"
                raise ValueError(
                    f"as_of.{name} needs {need}; add such as 'time: "
                    f"{{column: at, unit: ms}}'"
                )
        features = [
            *(f"num_{name}" for name in self.numbers),
            *(f"cat_{name}" for name in self.info["categories"]),
        ]
        features += [name for of in self.as_of.values() for name in of.features.names]
        if twice := [name for name, times in Counter(features).items() if times > 1]:
            raise ValueError(
                f"'{twice[0][4:]}' is the name of two features; give one of them "
                f"another name"
            )

    def _add_label_time(self, name: str, label: Label) -> Label:
        """Return the label with its time built, by default in the log's unit."""
        where, time = f"labels.{name}", label.time
        if label.delay_minutes is not None and not self.clock:
            raise ValueError(
                f"{where}.delay_minutes needs clock times, but time.unit is order; "
                f"give '{where}.time'"
            )
        if time is None or isinstance(time, Time):
            return label
        if self.event_time.column is None:
            raise ValueError(
                f"{where}.time needs times, but those of the log are the order of "
                f"rows; take it out"
            )
        time = {"column": time} if isinstance(time, str) else dict(time)
        defaults = {}
        if not {"unit", "format"} & set(time):
            defaults = _changed_fields(self.event_time)
        built: Time = build(Time, {**defaults, **time}, f"{where}.time.")
        if built.clock != self.clock:
            raise ValueError(
                f"{where}.time is {built.notation}, and the log's time "
                f"{self.event_time.notation}; give both one unit"
            )
        return replace(label, time=built)

    def _check_history(self, history: History) -> None:
        flags = [name for name, label in self.labels.items() if label.type == "bool"]
        if not self.clock:
            raise ValueError(
                "'history' is dated before the log, which needs clock times; for lists "
                "alone set 'sequence'"
            )
        if history.labels is None and flags:
            raise ValueError(
                f"'history.labels' is missing; name those that its items have, of "
                f"{', '.join(flags)}, or []"
            )
        if unknown := [name for name in history.labels or [] if name not in flags]:
            raise ValueError(
                f"history.labels has '{unknown[0]}', no bool label; those are "
                f"{', '.join(flags) or 'none'}"
            )

    @property
    def event_time(self) -> Time:
        assert self.time is not None  # set by __post_init__ for sequences
        return self.time

    @property
    def clock(self) -> bool:
        """Whether timestamps are clock times; else `timestamp_ms` is an ordinal."""
        return self.event_time.clock

    @property
    def info(self) -> dict[str, Any]:
        """Description of the events for the manifest.

        `labels` {name: bool | float32}, `numbers` [name], `categories` [name], `clock`,
        `ranges` of labels, and `known`: for labels that are known later than their
        event, the column or delay that determines when.
        """
        known = {
            name: {"column": label.time.column, "unit": label.time.notation}
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
        """Settings that differ from their defaults, as plain values."""
        return dict(_changed_fields(self))

    @property
    def events_config(self) -> dict[str, Any]:
        """The part of `config` that the events depend on."""
        return {
            key: value
            for key, value in self.config.items()
            if key not in ("items", "as_of")
        }

    @property
    def absent_columns(self) -> frozenset[str]:
        """Columns among `query`, `request_id` and `position` that no event has."""
        request, position = self.request or self.explode, self.position or self.explode
        sources = {"query": self.query, "request_id": request, "position": position}
        return frozenset(name for name, text in sources.items() if not text)

    @property
    def items_columns(self) -> tuple[list[str], list[str]]:
        """Names of the items' texts and attributes, without `text_` and `cat_`."""
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
        """Whether the catalogue has all items of the files, even without events."""
        return self.items is not None and self.items.keep == "all"

    @property
    def origins(self) -> dict[str, str]:
        """Column or expression in the raw file of each column of events."""
        item = " and then ".join(filter(None, [self.sequence, self.item]))
        time = "the place in its list" if self.sequence else self.event_time.origin
        known = {
            f"known_{name}": label.known_origin
            for name, label in self.labels.items()
            if label.late
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
        """Expressions of an event by column."""
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
    def _list_expressions(self) -> list[str]:
        """Expressions of lists."""
        every = [
            self.sequence,
            self.history.column if self.history else None,
            *self.explode.values(),
        ]
        return [text for text in every if text]

    def event_files(self, input_uri: str) -> list[str]:
        """Return the raw event files relative to the input folder, sorted.

        Raises:
            UserError: If there is none, or if they have several formats, which often
                contain the same events twice.
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
                f"{input_uri} holds events as {both}, which may be the same; set "
                f"'files' to one of them"
            )
        return files

    @property
    def _patterns_beside(self) -> list[str]:
        """Patterns of the files of sections."""
        sections = (self.items, self.users, *self.as_of.values())
        return [of.files for of in sections if of and of.files != self.files]

    def is_event_file(self, file: str) -> bool:
        """Return whether a file, relative to the input folder, is an event file."""
        beside = any(fnmatchcase(file, other) for other in self._patterns_beside)
        return fnmatchcase(file, self.files) and not beside

    def item_files(self, input_uri: str) -> list[str]:
        """Return the raw item files relative to the input folder, sorted."""
        return self.items.list_files(input_uri, "item") if self.items else []

    def user_files(self, input_uri: str) -> list[str]:
        return self.users.list_files(input_uri, "user") if self.users else []

    def read_users(
        self, input_uri: str, digests: dict[str, Any], beginning: bool = False
    ) -> Block | None:
        """Read the user files for `read_events`, with one row per user.

        Args:
            input_uri: Input folder.
            digests: Hash of each file, updated with the parsed bytes.
            beginning: Whether to read the first file only.

        Returns:
            The rows, or None if the log has no user files.
        """
        if self.users is None:
            return None
        files = self.user_files(input_uri)[: 1 if beginning else None]
        blocks = [
            block
            for file in files
            for block in self.users.read(input_uri, file, digests.get(file))
        ]
        schema = self.users.schema
        table = pa.concat_tables([schema.empty_table(), *(b.rows for b in blocks)])
        rejects = pa.concat_tables(
            [REJECTS.empty_table(), *(b.rejects for b in blocks)]
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
        number: int = 0,
        digest: Any = None,
    ) -> Iterator[Block]:
        """Yield the events of a file, or of a piece of it, in bounded blocks.

        Events are in the order of the file. Their rows have LOG_ROW too: unique and
        ascending within the piece, after lists are exploded.

        Args:
            input_uri: Input folder.
            file: File relative to it.
            users: Rows of `read_users`, or None.
            piece: Part of the file; None for the whole file.
            number: Index of the piece in the log, for times that are the order of rows.
            digest: Hash that is updated with the parsed bytes, or None.

        Raises:
            UserError: If the file cannot be read: a missing column, a wrong format, an
                empty or truncated file.
        """
        uri, schema = join(input_uri, file), self.schema.append(LOG_ROW)
        folders = _parse_folders(file)
        file_expressions = self._file_expressions(folders)
        first = 0
        frames = read_frames(uri, self, file_expressions, digest, piece)
        for order, frame in enumerate(frames):
            missing = {
                name: hint
                for name, hint in frame.missing.items()
                if name not in folders
            }
            if order == 0:
                self._check_required(missing, folders, uri)
            broken = frame.broken
            rows = frame.with_missing
            rows = rows.with_columns(
                _parse_folder_value(value).alias(key)
                for key, value in folders.items()
                if key not in rows.columns
            )
            events = self._frame_events(rows, uri, users, number)
            history_events = self._history_events(rows, uri, users)
            for part in chain(events, history_events):
                end = first + len(part.raw)
                part.values["log_row"] = pl.int_range(first, end, eager=True)
                yield part.block(broken, missing, file, piece, schema, MISSING_VALUES)
                first, broken = end, []

    def _check_required(
        self, missing: dict[str, str], folders: Iterable[str], uri: str
    ) -> None:
        """Raise a UserError if a column is missing without which no row is an event."""
        for name in self._required_columns(folders):
            if name in missing:
                raise UserError(
                    f"{uri} has no column '{name}'; {missing[name]}; correct the "
                    f"source file or the log"
                )

    def _file_expressions(self, folders: Iterable[str]) -> list[str]:
        """Return the expressions to evaluate on the columns of the file.

        Of an expression that also reads elements of lists or names of folders, the
        columns of the file are returned instead.
        """
        folders = list(folders)
        derived = [(text, folders) for text in self._list_expressions]
        derived += [
            (text, [*self.explode, *folders]) for text in self._expressions.values()
        ]
        expressions = []
        for text, derived_columns in derived:
            names = root_columns(text, derived_columns)
            in_file = [f'"{name}"' for name in names if name not in derived_columns]
            expressions += in_file if len(in_file) < len(names) else [text]
        return expressions

    def _required_columns(self, folders: Iterable[str]) -> list[str]:
        """Return the columns of the file without which no row is an event."""
        derived_columns = [*self.explode, *folders]
        expressions = [self.user, self.item, self.sequence, self.event_time.column]
        expressions += self.explode.values()
        columns = []
        for text in expressions:
            if text:
                columns += root_columns(text, derived_columns)
        return [name for name in columns if name not in derived_columns]

    def _frame_events(
        self, rows: pl.DataFrame, uri: str, users: pa.Table | None, number: int
    ) -> Iterator[Rows]:
        """Yield the rows of a frame, one per event."""
        if self.sequence:
            lists = evaluate_list(rows, self.sequence, "sequence", uri)
            yield from self._list_events(rows, lists, self.item, 0, uri, users)
            return
        first_list = next(iter(self.explode), None)
        for piece in split_rows(self._add_lists(rows, uri), first_list):
            if self.explode:
                columns = [*self.explode, ELEMENT]
                piece = piece.explode(columns, empty_as_null=True, keep_nulls=True)
            yield self._convert_rows(piece, uri, users, number)

    def _convert_rows(
        self, piece: pl.DataFrame, uri: str, users: pa.Table | None, number: int
    ) -> Rows:
        """Convert the columns of raw rows, one row per event."""
        rows = Rows(piece, self._expressions, uri)
        rows.ids("user_id")
        if self.explode:
            rows.reject(piece[UNEQUAL], f"{self.item}: lists of unequal length")
            rows.values["request_id"] = piece[REQUEST]
            rows.values["position"] = piece[ELEMENT].fill_null(0).cast(pl.Int32)
        rows.ids("item_id")
        rows.time("timestamp_ms", self.event_time, number, past=True)
        if self.query:
            rows.text("query")
        if self.request:
            rows.ids("request_id")
        if self.position:
            rows.integer("position")
        for name, label in self.labels.items():
            if label.type == "bool":
                rows.flag(f"label_{name}")
            else:
                rows.number(f"label_{name}", label.range)
            if label.late:
                rows.known(name, label.time, label.delay_minutes)
        for name in self.numbers:
            rows.number(f"num_{name}")
        for name in self.categories:
            rows.text(f"cat_{name}")
        rows.join(users)
        return rows

    def _add_lists(self, rows: pl.DataFrame, uri: str) -> pl.DataFrame:
        """Add the lists to explode, the positions of their elements and request ids.

        The id of a request is a hash of the row's content, so equal rows of two files
        are one request. Lists of unequal length become null.
        """
        if not self.explode:
            return rows
        lists = {
            name: evaluate_list(rows, text, f"explode.{name}", uri)
            for name, text in self.explode.items()
        }
        lengths = pl.DataFrame(
            {name: values.list.len().fill_null(0) for name, values in lists.items()}
        )
        unequal = lengths.select(~pl.all_horizontal(pl.all() == pl.nth(0))).to_series()
        names = sorted(name for name in rows.columns if name != ROW)
        content = pl.DataFrame([as_text(rows[name]).alias(name) for name in names])
        request = content.hash_rows(seed=0).map_elements("{:016x}".format, pl.String)
        rows = rows.with_columns(
            **lists,
            **{REQUEST: request, UNEQUAL: unequal, ELEMENT: lengths.to_series(0)},
        )
        is_usable = ~pl.col(UNEQUAL) & (pl.col(ELEMENT) > 0)
        index = pl.int_ranges(0, pl.col(ELEMENT), dtype=pl.Int32).alias(ELEMENT)
        return rows.with_columns(
            pl.when(is_usable).then(column) for column in (*map(pl.col, lists), index)
        )

    def _history_events(
        self, rows: pl.DataFrame, uri: str, users: pa.Table | None
    ) -> Iterator[Rows]:
        """Yield the earlier behaviours in the rows, one row each.

        Repeated lists of a user are used once. Rows without a user or a time are
        skipped, as they are rejected anyway.
        """
        if self.history is None or not len(rows):
            return
        history, time, begin = (
            self.history,
            self.event_time,
            parse_iso_ms(self.history.at),
        )
        columns = {"user": self.user, "time": str(time.column)}
        values, _ = evaluate(rows, columns, uri)
        row_time, time_error = parse_times(values["time"], time, "")
        user = clean_ids(values["user"])
        lists = evaluate_list(rows, history.column, "history.column", uri)
        lists = lists.cast(pl.List(pl.String))
        rows = rows.with_columns(
            user.alias(REQUEST), row_time.alias(UNEQUAL), lists.alias(LIST)
        )
        is_valid = time_error.is_null() & user.is_not_null() & (lists.list.len() > 0)
        rows = rows.filter(is_valid).sort(UNEQUAL, maintain_order=True)
        rows = rows.unique([REQUEST, LIST], keep="first", maintain_order=True).sort(ROW)
        for events in self._list_events(rows, rows[LIST], None, begin or 0, uri, users):
            stamp = events.values["timestamp_ms"]
            for name in history.labels or ():
                true = pl.repeat(True, len(events.raw), eager=True)
                events.values[f"label_{name}"] = true
                if self.labels[name].late:
                    events.values[f"known_{name}"] = stamp
            events.reject(
                stamp >= events.raw[UNEQUAL],
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
        """Yield an event for each item of lists.

        Args:
            rows: Rows of the file.
            lists: List of items of each row.
            last: Expression of an item that follows the list, or None.
            begin: Time of the first item; item k gets the time `begin` + k.
            uri: File, for messages.
            users: Rows of `read_users`, or None.
        """
        items = lists.cast(pl.List(pl.String)).fill_null([])
        if last:
            end = clean_ids(evaluate(rows, {"end": last}, uri)[0]["end"])
            with_end = pl.concat_list(items, end)
            joined = pl.when(end.is_null()).then(items).otherwise(with_end)
            items = pl.select(joined).to_series()
        index = pl.select(pl.int_ranges(0, items.list.len())).to_series()
        rows = rows.with_columns(items.alias(LIST), index.alias(ELEMENT))
        for piece in split_rows(rows, LIST):
            piece = piece.explode(LIST, ELEMENT, empty_as_null=True, keep_nulls=True)
            events = Rows(piece, {"user_id": self.user, "item_id": LIST}, uri)
            column = self.history.column if self.history else LIST
            events.expressions["item_id"] = self.sequence or column  # for messages
            events.ids("user_id")
            events.ids(
                "item_id",
                "missing or empty; of text with blanks in a row split "
                "regexp_replace(..., '\\s+', ' ')",
            )
            events.values["timestamp_ms"] = piece[ELEMENT].fill_null(0) + begin
            events.join(users)
            yield events


def _parse_folders(file: str) -> dict[str, str]:
    """Return the columns in the names of folders, for example `country=se`."""
    folders = {}
    for folder in file.split("/")[:-1]:
        key, _, value = folder.partition("=")
        if value:
            folders[key] = value
    return folders


def _parse_folder_value(value: str) -> pl.Expr:
    """Return the value in the name of a folder, as Hive writes it."""
    is_null = value == "__HIVE_DEFAULT_PARTITION__"
    return pl.lit(None if is_null else unquote(value), pl.String)


def check_names(names: Iterable[Any], key: str) -> None:
    """Raise a ValueError for a name that columns and metrics cannot have."""
    for name in names:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ValueError(
                f"'{name}' in '{key}' is no name; use letters, digits and _, and begin "
                f"with a letter"
            )
        if len(name) > MAX_NAME_LENGTH:
            raise ValueError(
                f"the name '{name[:20]}...' in '{key}' has {len(name)} characters, "
                f"which metrics cannot hold; use at most {MAX_NAME_LENGTH}"
            )
        if METRIC_CUTOFF.search(name):
            raise ValueError(
                f"'{name}' in '{key}' ends as the cutoff of a metric does, such as "
                f"ndcg_at_10; use another name"
            )
        if key in ("labels", "tasks") and name in METRIC_WORDS:
            raise ValueError(
                f"'{name}' in '{key}' is a word of metrics, as in {name}/gauc; choose "
                f"another name"
            )


def _check_section(
    where: str, of: Section | None, key: str, known: tuple[str, ...]
) -> None:
    """Raise a ValueError for a section without its id, or with foreign keys."""
    if of is None:
        return
    if not getattr(of, key):
        raise ValueError(f"'{where}.{key}' is missing; add such as '{key}: {key}_id'")
    allowed = ["files", key, *known, *(f.name for f in fields(Files))]
    if unknown := [name for name in _changed_fields(of) if name not in allowed]:
        raise ValueError(
            f"unknown key '{where}.{unknown[0]}'; it takes {', '.join(allowed)}"
        )
    for kind in ("texts", "attributes", "numbers", "categories"):
        check_names(getattr(of, kind), f"{where}.{kind}")
    if where == "users" and not of.attributes:
        raise ValueError(
            "users.attributes is empty; name at least one column, or leave out users"
        )


def _changed_fields(value: Any) -> Any:
    """Return the fields of a dataclass that differ from their defaults.

    Values are plain, dicts are converted recursively, other values are returned as is.
    """
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
    """Expand the short forms of a mapping: lists of columns, labels as expressions."""
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
    """Build the log that the content of a mapping file describes.

    Raises:
        ValueError: If the content is not valid.
    """
    log: Log = build(Log, _expand_short_forms(content))
    return log


def load_source(uri: str) -> tuple[Log, dict[str, Any]]:
    """Load a mapping file.

    Returns:
        The log, and the `prepare` section with settings of jobs.prepare, empty if there
        is none.

    Raises:
        UserError: If the file is missing or damaged, has an unknown key (the message
            names the nearest known one), or a value is not valid.
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
