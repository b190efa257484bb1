"""The mapping source: a log described by a file that says which column is what. See `jobs/configs/sources`.

layout: mapping
files: log_*.csv*
user: user_id
item: video_id
time: {column: time_ms, unit: ms}
labels: {click: {column: is_click}}
items: {files: videos.csv*, item: video_id, texts: {title: title}}
users: {files: users.csv*, user: user_id, attributes: {age: age_range}}
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import polars as pl
import pyarrow as pa
from pyarrow import fs

from models.tables import UserError, join, open_uri
from pipelines.data.sources.as_of import build_as_of
from pipelines.data.sources.base import Block, Metadata, Source, list_files
from pipelines.data.sources.histories import History, check_history, earlier
from pipelines.data.sources.load import build, check_name, named
from pipelines.data.sources.normalise import NO_ID, PLACE, WRITTEN, Columns, Explode, Label, Time, blocks, rejected
from pipelines.data.sources.pieces import Piece
from pipelines.data.sources.readers import ROW, Frame, Reading, TextFormat, read_frames
from pipelines.data.sources.transforms import (
    DECIMALS,
    REFUSED,
    check_transforms,
    decimal_key,
    raw_columns,
    read_transforms,
    transformed,
)
from pipelines.data.tables import REJECTS

OF_USER = "user: "
"""Begins the columns that a user file adds to an event's."""


@dataclass(frozen=True)
class Items(TextFormat):
    """Where an item's texts and attributes come from."""

    files: str
    """Pattern of the item files, relative to their folder (`*`, `?`, `[...]`)."""
    item: str
    """Column with the item's id."""
    texts: Any = field(default_factory=dict)
    """Texts by name: {name: column}, or a list of columns that keep their names."""
    attributes: Any = field(default_factory=dict)
    """Categorical attributes by name: {name: column}, or a list of columns."""
    numbers: Any = field(default_factory=dict)
    """Numeric attributes by name: {name: column}, or a list of columns."""
    folder: str = ""
    """Folder of the item files, relative to the input folder, such as `../catalogue`; empty: the input folder."""
    optional: bool = False
    """true: a log without item files is read too; its items have no texts and are counted."""
    keep: str = "used"
    """used: the catalogue holds the items with at least `core` behaviours. all: also every item of the item files, so
    that new items have semantic IDs and can be recommended; `core` then limits users, and items that the files lack."""
    lists: list[str] = field(default_factory=list)
    """JSON: the columns that hold lists; their elements are joined by a space."""
    transforms: Any = field(default_factory=dict)
    """Changes to values before they are read, by column: {column: {html, strip, lower, regex, decimal, pad, ...}}."""

    def __post_init__(self) -> None:
        for key in ("texts", "attributes", "numbers"):
            object.__setattr__(self, key, named(getattr(self, key), f"items.{key}"))
        object.__setattr__(self, "transforms", read_transforms(self.transforms, "items."))
        _check_texts(self, ("files", "item"), "items.")
        if self.keep not in ("used", "all"):
            raise ValueError(f"items.keep is '{self.keep}'; it is one of used, all")
        self.check_format("items.")
        check_transforms(self.transforms, self._columns, "items.")

    @property
    def _columns(self) -> tuple[str, ...]:
        return (self.item, *self.texts.values(), *self.attributes.values(), *self.numbers.values())

    @property
    def reading(self) -> Reading:
        columns, ids = raw_columns(self._columns, self.transforms), raw_columns([self.item], self.transforms)
        return self.read_as(columns, lists=frozenset(self.lists), prose=True, ids=ids)


@dataclass(frozen=True)
class Users(TextFormat):
    """Where attributes of users come from: categories of each of their events, known before it."""

    files: str
    """Pattern of the user files, relative to the input folder (`*`, `?`, `[...]`)."""
    user: str
    """Column with the user's id; if a user has several rows, the first is used."""
    attributes: Any
    """Categorical attributes by name: {name: column}, or a list of columns."""
    transforms: Any = field(default_factory=dict)
    """Changes to values before they are read, by column, as in `items`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "attributes", named(self.attributes, "users.attributes"))
        object.__setattr__(self, "transforms", read_transforms(self.transforms, "users."))
        _check_texts(self, ("files", "user"), "users.")
        self.check_format("users.")
        if not self.attributes:
            raise ValueError("users.attributes is empty; name at least one column, or leave out users")
        check_transforms(self.transforms, [self.user, *self.attributes.values()], "users.")

    def listed(self, input_uri: str) -> list[str]:
        """The user files; UserError if there is none."""
        return list_files(input_uri, self.files, required=True, what="user file")

    def read(self, input_uri: str, beginning: bool = False) -> Metadata:
        """`OF_USER` and the id, then `OF_USER` and each attribute's name; all text, empty text is null."""
        columns = {"": self.user, **self.attributes}
        raw, ids = raw_columns(columns.values(), self.transforms), raw_columns([self.user], self.transforms)
        reading = self.read_as(raw, prose=True, ids=ids)
        found = [pl.DataFrame(schema={OF_USER + name: pl.String for name in columns})]
        rejects, rows_read = [REJECTS.empty_table()], 0
        missing: dict[str, str] = {}
        for file in self.listed(input_uri)[: 1 if beginning else None]:
            for frame in islice(read_frames(input_uri, file, reading), 1 if beginning else None):
                uri = join(input_uri, file)
                frame = replace(frame, rows=transformed(frame.rows, self.transforms, uri))
                made = [_as_text(frame.rows, column, uri).alias(OF_USER + name) for name, column in columns.items()]
                rows = frame.rows.select(made)
                rejects.append(_without_id(frame, rows[OF_USER], self.user, file))
                found.append(rows.filter(_read(frame)))
                rows_read += len(frame.rows) + len(frame.broken)
                missing = frame.missing
        users = pl.concat(found).filter(_known(OF_USER)).unique(OF_USER, keep="first", maintain_order=True)
        return Metadata(users.to_arrow(), pa.concat_tables(rejects), rows_read, missing if beginning else {})


@dataclass(frozen=True)
class Mapping(TextFormat, Source):
    """A log described column by column."""

    files: str
    """Pattern of the event files, relative to the input folder (`*`, `?`, `[...]`)."""
    user: str
    """Column with the user's id."""
    item: str
    """Column with the item's id, or with the list of ids that `explode` splits."""
    time: Any
    """Column and unit, or format: {column, unit: s | ms | us | ns | iso | order}, {column, format: '%d.%m.%Y'}."""
    query: str | None = None
    """Column with the search query."""
    request: str | None = None
    """Column with the id of the request or page view."""
    position: str | None = None
    """Column with the rank shown, from 0; with `explode` it is the rank in the list."""
    labels: Any = field(default_factory=dict)
    """Labels by name: {name: {column, type, true_when}} or {name: {member_of: column}}; add `time` or `delay_minutes`
    to labels that are known later than their event."""
    numbers: Any = field(default_factory=dict)
    """Numeric features, known before the event, by name: {name: column}, or a list of columns."""
    categories: Any = field(default_factory=dict)
    """Categorical features, known before the event, by name: {name: column}, or a list of columns."""
    explode: Any = None
    """List columns that become one row per element: {columns, separator}. A row with an empty list is rejected."""
    items: Any = None
    """The item files; None: no item files."""
    users: Any = None
    """The user files; None: no user files."""
    transforms: Any = field(default_factory=dict)
    """Changes to values before they are read, by column: {column: {html, strip, lower, regex, decimal, pad, ...}}; in a
    list, to each element."""
    history: Any = None
    """A column of earlier behaviours without times: {column, at, separator, labels}; None: no such column."""
    as_of: Any = field(default_factory=dict)
    """Files of features of items or users that change over time, by name (`as_of.py`)."""

    def __post_init__(self) -> None:
        _check_texts(self, ("files", "user", "item"))
        self.check_format()
        nested = {"time": Time, "explode": Explode, "items": Items, "users": Users, "history": History}
        for key, kind in nested.items():
            if isinstance(getattr(self, key), dict):
                object.__setattr__(self, key, build(kind, getattr(self, key), f"{key}."))
            elif getattr(self, key) is not None and not isinstance(getattr(self, key), kind):
                raise ValueError(f"'{key}' is {getattr(self, key)!r}, not a mapping of keys")
        if self.time is None:
            raise ValueError("'time' is empty; give its column and unit")
        if not isinstance(self.labels, dict):
            raise ValueError(f"'labels' is {self.labels!r}; write name: {{column: ...}}")
        labels = {}
        for name, label in self.labels.items():
            check_name(name, "labels")
            labels[name] = build(Label, label, f"labels.{name}.") if isinstance(label, dict) else label
            if not isinstance(labels[name], Label):
                raise ValueError(f"labels.{name} is {label!r}; write {{column: ...}} or {{member_of: ...}}")
            labels[name] = self._timed(name, labels[name])
        object.__setattr__(self, "labels", labels)
        for key in ("numbers", "categories"):
            object.__setattr__(self, key, named(getattr(self, key), key))
        twice = set(self.categories) & set(self.users.attributes if self.users else ())
        if twice:
            raise ValueError(f"'{min(twice)}' is in 'categories' and in 'users.attributes'; name one of them otherwise")
        taken = [*(f"num_{name}" for name in self.numbers), *(f"cat_{name}" for name in self.all_categories)]
        object.__setattr__(self, "as_of", build_as_of(self.as_of, self.time.clock, taken))
        if self.explode and self.item not in self.explode.columns:
            raise ValueError(f"explode.columns is {self.explode.columns}; the item column '{self.item}' must be in it")
        object.__setattr__(self, "transforms", read_transforms(self.transforms))
        check_transforms(self.transforms, self._read)
        if self.history:
            check_history(self.history, self.labels, self.time.clock)
            if self.history.column in (self.explode.columns if self.explode else ()):
                raise ValueError(
                    f"'{self.history.column}' is in 'history' and in 'explode'; name another column in one"
                )

    def _timed(self, name: str, label: Label) -> Label:
        """The label with its `time` built, in the unit of the log's time unless it has its own."""
        where, time = f"labels.{name}", label.time
        if label.delay_minutes is not None and not self.time.clock:
            raise ValueError(f"{where}.delay_minutes needs clock times, but time.unit is order; give '{where}.time'")
        if time is None or isinstance(time, Time):
            return label
        if self.time.column is None:
            raise ValueError(f"{where}.time needs times, but those of the log are the order of lines; take it out")
        time = {"column": time} if isinstance(time, str) else time
        if not isinstance(time, dict):
            raise ValueError(f"{where}.time is {time!r}; name its column, or write {{column: ..., unit: ...}}")
        as_log = {} if {"unit", "format"} & set(time) else {"unit": self.time.unit, "format": self.time.format}
        built = build(Time, {**as_log, **time}, f"{where}.time.")
        if built.clock != self.time.clock:
            raise ValueError(
                f"{where}.time has unit {built.written}, but the log's time has {self.time.written}; give both one"
            )
        return replace(label, time=built)

    @property
    def info(self) -> dict[str, Any]:
        late = {name: label for name, label in self.labels.items() if label.late}
        known = {
            name: {"column": label.time.column, "unit": label.time.written}
            if label.time
            else {"delay_minutes": label.delay_minutes}
            for name, label in late.items()
        }
        return {
            **({"known": known} if known else {}),
            "labels": {name: label.type for name, label in self.labels.items()},
            "numbers": list(self.numbers),
            "categories": list(self.all_categories),
            "clock": self.time.clock,
            "ranges": {name: label.range for name, label in self.labels.items() if label.range is not None},
            **({"history": self.history.column} if self.history else {}),
        }

    @property
    def events_config(self) -> dict[str, Any]:
        return {key: value for key, value in self.config.items() if key not in ("items", "as_of")}

    @property
    def all_categories(self) -> dict[str, str]:
        """Categorical features by name: those of events, then those of users."""
        attributes = self.users.attributes if self.users else {}
        return {**self.categories, **{name: OF_USER + name for name in attributes}}

    @property
    def columns(self) -> Columns:
        return Columns(
            user=self.user,
            item=self.item,
            time=self.time,
            query=self.query,
            request=self.request,
            position=self.position,
            labels=self.labels,
            numbers=self.numbers,
            categories=self.all_categories,
            explode=self.explode,
            elements={name: transform for name, transform in self.transforms.items() if name in self._lists},
        )

    @property
    def _lists(self) -> list[str]:
        """The columns of lists."""
        exploded = self.explode.columns if self.explode else []
        earlier = [self.history.column] if self.history else []
        return [*exploded, *(label.member_of for label in self.labels.values() if label.member_of), *earlier]

    @property
    def _moments(self) -> list[str | None]:
        """The columns of times."""
        return [self.time.column, *(label.time.column for label in self.labels.values() if label.time)]

    @property
    def _read(self) -> list[str]:
        """The columns that are read of an event file, raw ones and those that transforms make."""
        single = [self.user, self.item, self.time.column, self.query, self.request, self.position]
        labels = [label.column for label in self.labels.values()]
        wanted = [*single, *labels, *self._moments, *(label.member_of for label in self.labels.values())]
        wanted += [*(self.explode.columns if self.explode else ()), *self.numbers.values(), *self.categories.values()]
        wanted += [self.history.column if self.history else None]
        return list(dict.fromkeys(name for name in wanted if name))

    @property
    def reading(self) -> Reading:
        """The columns to read of an event file, and how."""
        exploded = self.explode.columns if self.explode else []
        members = [label.member_of for label in self.labels.values()]
        text = self.explode is not None and self.explode.separator is not None
        lists = [] if text else [*exploded, *members]
        lists += [self.history.column] if self.history and self.history.separator is None else []

        def raw(*names: str | None) -> tuple[str, ...]:
            return raw_columns([name for name in names if name], self.transforms)

        return self.read_as(
            raw(*self._read),
            lists=frozenset(raw(*lists)),
            integers=frozenset(raw(*self._moments, self.position)),
            required=raw(self.user, self.item, self.time.column, *exploded),
            ids=raw(self.user, self.item, self.request, *members),
        )

    @property
    def origins(self) -> dict[str, dict[str, str]]:
        single = {"query": self.query, "request_id": self.request, "position": self.position}
        users = self.users.attributes if self.users else {}
        return {
            "events": {
                "user_id": self.user,
                "item_id": self.item,
                "timestamp_ms": self.time.origin,
                **{target: column for target, column in single.items() if column},
                **{f"label_{name}": label.origin for name, label in self.labels.items()},
                **{f"known_{name}": label.known_from for name, label in self.labels.items() if label.late},
                **{f"num_{name}": column for name, column in self.numbers.items()},
                **{f"cat_{name}": column for name, column in self.categories.items()},
                **{f"cat_{name}": f"{column} of the users" for name, column in users.items()},
            },
            "items": items_origins(self.items) if self.items else {},
            "users": {OF_USER + n: c for n, c in {"": self.users.user, **users}.items()} if self.users else {},
            **{f"as_of.{name}": of.origins for name, of in self.as_of.items()},
        }

    def written(self, kind: str) -> TextFormat | None:
        of = {"events": self, "items": self.items, "users": self.users}
        written: TextFormat | None = {**of, **{f"as_of.{name}": table for name, table in self.as_of.items()}}[kind]
        return written

    @property
    def tables_as_of(self) -> dict[str, Any]:
        return dict(self.as_of)

    @property
    def absent(self) -> frozenset[str]:
        return self.columns.absent

    @property
    def items_columns(self) -> tuple[list[str], list[str]]:
        return (list(self.items.texts), list(self.items.attributes)) if self.items else ([], [])

    @property
    def items_numbers(self) -> list[str]:
        return list(self.items.numbers) if self.items else []

    @property
    def keeps_all_items(self) -> bool:
        return bool(self.items) and self.items.keep == "all"

    def event_files(self, input_uri: str) -> list[str]:
        return list_files(input_uri, self.files, required=True, what="event file")

    def reading_of(self, file: str) -> Reading:
        return self.reading

    def read_events(
        self, input_uri: str, file: str, users: pa.Table | None = None, piece: Piece | None = None
    ) -> Iterator[Block]:
        schema, columns, first, uri = self.block_schema, self.columns, 0, join(input_uri, file)
        number = self.event_files(input_uri).index(file) if self.time.column is None else 0
        if self.users:
            known = pl.DataFrame(users if users is not None else self.users.read(input_uri).rows)
        for frame in read_frames(input_uri, file, self.reading, piece):
            rows = transformed(frame.rows, self.transforms, uri, self._lists)
            if self.time.column is None:
                rows = rows.with_columns((pl.col(ROW) + (number << 40)).alias(PLACE))
            if self.users:
                key = pl.col(self.user).cast(pl.String).str.strip_chars()
                rows = rows.join(known, left_on=key, right_on=OF_USER, how="left", maintain_order="left")
            for block in blocks(rows, frame.broken, columns, schema, uri=uri, file=file, first_log_row=first):
                yield replace(block, missing=frame.missing)
                first += block.rows_read
            of_users = [OF_USER + name for name in self.users.attributes] if self.users else []
            for made, of_made in earlier(rows, self.history, columns, of_users, uri) if self.history else ():
                for block in blocks(made, [], of_made, schema, uri=uri, file=file, first_log_row=first):
                    yield replace(block, missing=frame.missing)
                    first += block.rows_read

    def user_files(self, input_uri: str) -> list[str]:
        return self.users.listed(input_uri) if self.users else []

    def read_users(self, input_uri: str, beginning: bool = False) -> Metadata | None:
        return self.users.read(input_uri, beginning) if self.users else None

    def item_files(self, input_uri: str) -> list[str]:
        if not self.items:
            return []
        folder = join(input_uri, self.items.folder) if self.items.folder else input_uri
        filesystem, path = open_uri(folder)
        if self.items.optional and filesystem.get_file_info(path).type != fs.FileType.Directory:
            return []
        files = list_files(folder, self.items.files, required=not self.items.optional, what="item file")
        return [join(self.items.folder, file) if self.items.folder else file for file in files]

    def read_items(self, input_uri: str, file: str) -> Iterator[Metadata]:
        return read_items(self.items, input_uri, file)


def items_fields(texts: list[str], attributes: list[str], numbers: Iterable[str] = ()) -> pa.Schema:
    """Schema of what `read_items` gives."""
    names = ["item_id", *(f"text_{name}" for name in texts), *(f"cat_{name}" for name in attributes)]
    return pa.schema(
        [*(pa.field(name, pa.string()) for name in names), *(pa.field(f"num_{name}", pa.float32()) for name in numbers)]
    )


def items_origins(items: Items) -> dict[str, str]:
    """The columns that `read_items` gives, each with its raw column."""
    names = items_fields(list(items.texts), list(items.attributes), items.numbers).names
    columns = [items.item, *items.texts.values(), *items.attributes.values(), *items.numbers.values()]
    return dict(zip(names, columns, strict=True))


def read_items(items: Items, input_uri: str, file: str) -> Iterator[Metadata]:
    """The item file; texts and attributes as text, with lists joined, empty text is null."""
    schema = items_fields(list(items.texts), list(items.attributes), items.numbers)
    for frame in read_frames(input_uri, file, items.reading):
        frame = replace(frame, rows=transformed(frame.rows, items.transforms, join(input_uri, file)))
        rows = frame.rows.select(
            (_as_number if target.startswith("num_") else _as_text)(frame.rows, column, join(input_uri, file)).alias(
                target
            )
            for target, column in items_origins(items).items()
        )
        known = rows.filter(_known("item_id") & _read(frame)).to_arrow().cast(schema)
        rejects = _without_id(frame, rows["item_id"], items.item, file)
        yield Metadata(known, rejects, len(rows) + len(frame.broken), frame.missing)


def _known(name: str) -> pl.Expr:
    """Whether there is an id."""
    return pl.col(name).is_not_null() & ~pl.col(name).is_in(NO_ID)


def _read(frame: Frame) -> pl.Series:
    """Whether the transforms could read each row."""
    if REFUSED not in frame.rows.columns:
        return pl.select(pl.repeat(True, len(frame.rows))).to_series()
    return frame.rows[REFUSED].is_null()


def _without_id(frame: Frame, ids: pl.Series, name: str, file: str) -> pa.Table:
    """The frame's broken lines, and its rows without an id or that a transform could not read, as `REJECTS`."""
    missing = pl.when(ids.is_null()).then(pl.lit(f"{name}: missing"))
    reason = pl.select(missing.when(ids.is_in(NO_ID)).then(pl.lit(f"{name}: {WRITTEN}"))).to_series()
    if REFUSED in frame.rows.columns:
        reason = frame.rows.select(pl.coalesce(REFUSED, reason)).to_series()
    return rejected(frame.rows, reason, frame.broken, file)


def _as_number(rows: pl.DataFrame, column: str, uri: str) -> pl.Expr:
    """A finite float32 or null; UserError names the first value that is neither a number nor empty."""
    dtype = rows.schema[column]
    if not (dtype == pl.String or dtype.is_numeric() or dtype == pl.Null):
        raise UserError(f"{uri}: column '{column}' is {dtype}, not numbers; name another column in the source file")
    value = pl.col(column).cast(pl.Float32, strict=False)
    value = pl.when(value.is_finite()).then(value)
    if dtype == pl.String:
        strange = rows.filter(value.is_null() & (pl.col(column).str.strip_chars() != ""))
        if strange.height:
            fits = [mark for mark in DECIMALS if re.fullmatch(DECIMALS[mark], strange[column][0].strip())]
            remedies = [f"under 'items' write {decimal_key(column, mark)}" for mark in fits]
            raise UserError(
                f"{uri}: column '{column}' has '{strange[column][0]}', which is no number; "
                f"{remedies[0] if remedies else 'name another column'}"
            )
    return value


def _as_text(rows: pl.DataFrame, column: str, uri: str) -> pl.Expr:
    dtype = rows.schema[column]
    value = pl.col(column)
    if isinstance(dtype, pl.List):
        value = value.cast(pl.List(pl.String)).list.join(" ", ignore_nulls=True)
    elif isinstance(dtype, pl.Struct):
        raise UserError(f"{uri}: column '{column}' is {dtype}, not text; name another column in the source file")
    else:
        value = value.cast(pl.String)
    value = value.str.strip_chars()
    return pl.when(value != "").then(value)


def _check_texts(config: Any, keys: tuple[str, ...], where: str = "") -> None:
    for key in keys:
        if not isinstance(getattr(config, key), str):
            raise ValueError(f"'{where}{key}' is {getattr(config, key)!r}, not text; write it in quotes")
