"""Raw rows to events and rejects: one vectorised pass over a frame, no Python call per row.

Each target column is an expression for its value and a list of (condition, reason) for what breaks the
schema; a row goes to the rejects with its first reason.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import polars as pl
import pyarrow as pa

from models.tables import UserError
from pipelines.data.sources.base import Block
from pipelines.data.sources.readers import LONGEST_QUOTE, ROW
from pipelines.data.sources.transforms import DECIMALS, REFUSED, TEXT, Transform, decimal_key, elements
from pipelines.data.tables import LABEL_TYPES, REJECTS

UNITS = {"s": (1000, 1), "ms": (1, 1), "us": (1, 1000), "ns": (1, 1_000_000), "iso": (1, 1), "order": (1, 1)}
"""Units of time: factor and divisor to milliseconds."""
FIRST_MS = 315_532_800_000  # 1980: an earlier clock time is a wrong unit
LAST_MS = 4_102_444_799_999  # the end of year 2099: a later time is a wrong unit, or stands for none
TOO_LATE = "after the year 2099, check time.unit"
DAY_MS = 86_400_000
LAST_INT32 = 2**31 - 1
MOST_MINUTES = 60 * 24 * 3660  # ten years: a longer delay is a wrong unit
EXPLODED_ROWS = 1 << 18  # rows per block after lists are exploded
LOG_ROW, POSITION, UNEQUAL, REQUEST = "__log_row", "__position", "__unequal", "__request"
PLACE = "__place"
"""Column with the row's place in the log, for times that are the order of lines."""

NO_ID = ("nan", "NaN", "NAN", "null", "Null", "NULL", "none", "None", "NONE", "<NA>")
"""How tools write that there is no value, which as ids would make one user or item of many."""
WRITTEN = "missing, written as text such as nan or null"

OPERATORS = {">": "gt", ">=": "ge", "<": "lt", "<=": "le", "==": "eq", "!=": "ne"}


@dataclass(frozen=True)
class Time:
    """When an event happened."""

    column: str | None = None
    """Raw column. Without it the unit is `order`: events are in the order of the lines, files in the order of their
    names."""
    unit: str | None = None
    """s, ms, us, ns (integers since 1970), iso (ISO 8601 text, UTC if it has no offset), or order (an integer that
    orders the events of a log without clock times). For typed Parquet timestamps write `iso`."""
    format: str | None = None
    """Format of the time's text in the notation of `strptime`, such as '%d.%m.%Y %H:%M'; UTC if it has no `%z`.
    Replaces `unit`."""

    def __post_init__(self) -> None:
        if self.format is not None:
            if self.unit is not None:
                raise ValueError(f"time has both unit '{self.unit}' and format '{self.format}'; give one of them")
            _check_format(self.format)
        elif self.unit is None:
            raise ValueError("'time.unit' is missing; add such as 'unit: ms'")
        elif self.unit not in UNITS:
            raise ValueError(f"time.unit is '{self.unit}'; it must be one of {', '.join(UNITS)}")
        if self.column is None and self.clock:
            raise ValueError(
                "'time.column' is missing; add such as 'column: time_ms', or 'unit: order' for that of lines"
            )

    @property
    def clock(self) -> bool:
        return self.unit != "order"

    @property
    def written(self) -> str:
        """The unit or the format."""
        return self.unit or f"as {self.format}"

    @property
    def origin(self) -> str:
        """What it is in the raw file."""
        return f"{self.column}, {self.written}" if self.column else "the row's place"


def _check_format(written: str) -> None:
    """ValueError for a format of times that cannot be read, or that lacks the year, the month or the day."""
    moment = datetime(2019, 11, 15, 20, 55, 22, tzinfo=UTC)
    try:
        text = moment.strftime(written)
        read = pl.select(_parse_written(pl.lit(text), written)).item()
    except (pl.exceptions.PolarsError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"time.format is '{written}', which cannot be read ({reason[:200]}); correct it") from error
    if read is None or not 0 <= moment.timestamp() * 1000 - read < DAY_MS:
        raise ValueError(
            f"time.format is '{written}', by which a time such as '{text}' cannot be read; it needs the year, month "
            f"and the day, such as '%Y-%m-%d' or '%d.%m.%Y %H:%M:%S'"
        )


@dataclass(frozen=True)
class Label:
    """What a user did with an item."""

    column: str | None = None
    """Raw column of the label; or give `member_of`."""
    type: str = "bool"
    """bool or float32."""
    true_when: str | None = None
    """bool: a comparison such as `> 0`, `>= 4` or `== buy`; None: the column holds 0, 1, true or false."""
    member_of: str | None = None
    """bool: a list column, such as clicked_item_ids; the label is true if the row's item is in it."""
    time: Any = None
    """Column with the time at which the label was known, or {column, unit}; without a unit, that of the log's time.
    None: it is known with the event, or after `delay_minutes`."""
    delay_minutes: float | None = None
    """Minutes after the event until the label is known, such as 60; None: at once, or by `time`."""
    range: list[float] | None = None
    """float32: the smallest and the largest value, such as [0.5, 5]; rows outside are rejected. None: any number."""

    def __post_init__(self) -> None:
        if self.type not in LABEL_TYPES:
            raise ValueError(f"a label's type is '{self.type}'; it must be one of {', '.join(LABEL_TYPES)}")
        if (self.column is None) == (self.member_of is None):
            raise ValueError("a label needs either 'column' or 'member_of'; give exactly one of them")
        if self.type != "bool" and (self.true_when or self.member_of):
            raise ValueError(f"'true_when' and 'member_of' make bool labels, not {self.type}; set type to bool")
        if self.late and self.member_of:
            self._check_member()
        if self.time is not None and self.delay_minutes is not None:
            raise ValueError("a label has both 'time' and 'delay_minutes'; give the one that says when it is known")
        delay = self.delay_minutes
        if delay is not None and not (isinstance(delay, int | float) and 0 < delay <= MOST_MINUTES):
            raise ValueError(f"delay_minutes is {delay!r}; give minutes from above 0 to {MOST_MINUTES:,}, such as 60")
        if self.range is not None:
            if self.type != "float32":
                raise ValueError(f"'range' is of float32 labels, this one is {self.type}; leave it out")
            check_range(self.range)
        if self.true_when is not None:
            if self.column is None:
                raise ValueError("'true_when' compares a column; give 'column' and not 'member_of'")
            comparison(self.true_when)

    @property
    def origin(self) -> str:
        """What it is in the raw file."""
        return f"item in {self.member_of}" if self.member_of else f"{self.column} {self.true_when or ''}".strip()

    def _check_member(self) -> None:
        if self.time is not None:
            raise ValueError("'member_of' has no time of each member; give 'delay_minutes', or a 'column' with 'time'")

    @property
    def known_from(self) -> str:
        """What says from when on it is known."""
        if self.time:
            return str(self.time.origin)
        return f"{self.delay_minutes:g} minutes after its event"

    @property
    def late(self) -> bool:
        """Whether the label is known later than its event."""
        return self.time is not None or self.delay_minutes is not None


def check_range(span: object) -> None:
    """ValueError unless `span` is [low, high]."""
    numbers = isinstance(span, list) and len(span) == 2
    numbers = numbers and all(isinstance(end, int | float) and math.isfinite(end) for end in span)  # type: ignore
    if not numbers or not span[0] < span[1]:  # type: ignore[index]
        raise ValueError(f"range is {span!r}; give the least and the largest value, such as [0.5, 5]")


@dataclass(frozen=True)
class Explode:
    """One raw row holds several impressions, as lists."""

    columns: list[str]
    """List columns of equal length that become one row per element; the item column must be one of them."""
    separator: str | None = None
    """Text between two elements of a list that is written as text; None: real lists (JSON, Parquet)."""

    def __post_init__(self) -> None:
        if not isinstance(self.columns, list) or not self.columns:
            raise ValueError(f"explode.columns is {self.columns!r}; name at least the item column, as a list")
        if self.separator == "":
            raise ValueError("explode.separator is empty; give the text between two elements, such as ' '")


@dataclass(frozen=True)
class Columns:
    """Where the columns of `events` come from."""

    user: str
    item: str
    time: Time
    query: str | None
    request: str | None
    position: str | None
    labels: dict[str, Label]
    numbers: dict[str, str]
    categories: dict[str, str]
    explode: Explode | None
    elements: dict[str, Transform] = field(default_factory=dict)
    """What is done to the elements of lists, by column."""

    @property
    def absent(self) -> frozenset[str]:
        """As `Source.absent`; a row whose lists are exploded is a request."""
        of_list = self.request or self.explode, self.position or self.explode
        given = dict(zip(("query", "request_id", "position"), (self.query, *of_list), strict=True))
        return frozenset(name for name, column in given.items() if not column)


def comparison(text: str) -> tuple[str, float | str]:
    """The polars method and the operand of a `true_when` rule. A number compares as a number."""
    match = re.fullmatch(r"\s*(>=|<=|==|!=|>|<)\s*(.+?)\s*", str(text))
    if not match:
        raise ValueError(f"true_when is '{text}'; write an operator and a value, such as '> 0' or '== buy'")
    operator, operand = match.groups()
    try:
        return OPERATORS[operator], float(operand)
    except ValueError:
        if operator not in ("==", "!="):
            raise ValueError(f"true_when is '{text}'; {operator} needs a number") from None
        return OPERATORS[operator], operand


class _Row:
    """Collects the expressions of one frame's target columns and the reasons for rejects, by the log's own columns."""

    def __init__(self, raw: pl.DataFrame, uri: str) -> None:
        self.schema = raw.schema
        self.uri = uri
        self.values: list[pl.Expr] = []
        self.reasons: list[tuple[pl.Expr, str]] = []

    def refuse(self, column: str, need: str) -> UserError:
        return UserError(
            f"{self.uri}: column '{column}' is {self.schema[column]}, not {need}; convert it in the log or name "
            f"another column in the source file"
        )

    def text(self, target: str, column: str, *, required: bool) -> None:
        """An id (`required`; without the white space around it), query or category as text; empty text is no value."""
        dtype = self.schema[column]
        if not (dtype in TEXT or dtype.is_integer() or dtype in (pl.Null, pl.Boolean)):
            raise self.refuse(column, "text or integers")
        value = _bare(column) if required else pl.col(column).cast(pl.String)
        if dtype in TEXT:
            value = pl.when(value != "").then(value)
        self.values.append(value.alias(target))
        if required:
            self.reasons.append((value.is_null(), f"{column}: missing"))
            if dtype in TEXT:
                self.reasons.append((value.is_in(NO_ID), f"{column}: {WRITTEN}"))

    def _integer(self, column: str) -> tuple[pl.Expr, list[tuple[pl.Expr, str]]]:
        dtype = self.schema[column]
        if not (dtype == pl.String or dtype.is_integer() or dtype == pl.Null):
            raise self.refuse(column, "integers")
        raw = pl.col(column)
        number = raw.cast(pl.Int64, strict=False)
        missing = (raw.is_null() | (raw == "")) if dtype == pl.String else raw.is_null()
        return number, [
            (missing, f"{column}: missing"),
            (number.is_null(), f"{column}: not an integer"),
            (number < 0, f"{column}: negative"),
        ]

    def time(self, time: Time) -> None:
        """When the event happened."""
        self.stamp, reasons = self._moment(time)
        self.reasons += reasons
        self.values.append(self.stamp.alias("timestamp_ms"))

    def known(self, name: str, label: Label) -> None:
        """From when on the label of `values[-1]` is known, where it is set; null elsewhere."""
        target, value = f"known_{name}", self.values[-1]
        set_ = value.fill_null(False) if label.type == "bool" else value.is_not_null()
        if label.delay_minutes is not None:
            moment = self.stamp + round(label.delay_minutes * 60_000)
        else:
            moment, reasons = self._moment(label.time)
            reasons = [(bad, f"{reason} (time of the label {name})") for bad, reason in reasons]
            reasons.append((moment < self.stamp, f"{label.time.column}: before its event, check labels.{name}.time"))
            self.reasons += [(set_ & bad.fill_null(False), reason) for bad, reason in reasons]
        self.values.append(pl.when(set_).then(moment).alias(target))

    def _moment(self, time: Time) -> tuple[pl.Expr, list[tuple[pl.Expr, str]]]:
        """Milliseconds as int64, from integers, ISO text or typed timestamps, never through a float; and what breaks
        them."""
        reasons: list[tuple[pl.Expr, str]]
        if time.column is None:
            return pl.col(PLACE), []
        column, dtype = time.column, self.schema[time.column]
        if dtype.is_temporal() and dtype in (pl.Datetime, pl.Date) and time.clock:
            value = pl.col(column).cast(pl.Datetime("us")).dt.timestamp("us").floordiv(1000)
            reasons = [(pl.col(column).is_null(), f"{column}: missing"), (value < 0, f"{column}: negative")]
        elif time.unit == "iso" or time.format is not None:
            if dtype not in (pl.String, pl.Null):
                needs = f"text, as time.format '{time.format}' needs" if time.format else "ISO 8601 text or a timestamp"
                raise self.refuse(column, needs)
            raw = pl.col(column).cast(pl.String)
            value = _parse_written(raw, time.format) if time.format else _parse_iso(raw)
            reasons = [
                (raw.is_null() | (raw == ""), f"{column}: missing"),
                (value.is_null(), f"{column}: not {f'a time as {time.format}' if time.format else 'an ISO 8601 time'}"),
            ]
            if not time.format:
                reasons.append((value < 0, f"{column}: negative"))
        else:
            number, reasons = self._integer(column)
            factor, divisor = UNITS[str(time.unit)]
            if time.clock:  # before it is multiplied, which could overflow
                reasons.append((number > LAST_MS // factor * divisor, f"{column}: {TOO_LATE}"))
            value = number * factor if factor > 1 else number.floordiv(divisor) if divisor > 1 else number
        if time.clock:
            check = "time.format (%y reads a year of two digits)" if time.format else "time.unit"
            reasons.append((value < FIRST_MS, f"{column}: before 1980, check {check}"))
            reasons.append((value > LAST_MS, f"{column}: {TOO_LATE}"))
        return value.cast(pl.Int64), reasons

    def position(self, column: str) -> None:
        number, reasons = self._integer(column)
        self.reasons += [*reasons, (number > LAST_INT32, f"{column}: more than int32 holds")]
        self.values.append(number.cast(pl.Int32, strict=False).alias("position"))

    def number(self, target: str, column: str, span: list[float] | None = None) -> None:
        """A finite float32 within `span`, or null where the log has none."""
        value, reasons = self._float(column, pl.Float32)
        self.values.append(value.alias(target))
        self.reasons += reasons
        if span is not None:
            low, high = span
            self.reasons.append(((value < low) | (value > high), f"{column}: outside {low:g} to {high:g}"))

    def _float(self, column: str, kind: type) -> tuple[pl.Expr, list[tuple[pl.Expr, str]]]:
        dtype = self.schema[column]
        if not (dtype == pl.String or dtype.is_numeric() or dtype in (pl.Boolean, pl.Null)):
            raise self.refuse(column, "numbers")
        raw = pl.col(column)
        if dtype == pl.String:
            raw = pl.when(raw != "").then(raw)
        value = raw.cast(kind, strict=False)
        bad = raw.is_not_null() & value.is_null()
        reasons: list[tuple[pl.Expr, str]] = []
        for mark, number in DECIMALS.items() if dtype == pl.String else ():
            found = pl.when(bad).then(raw).str.contains(number)  # it costs little where nothing is bad
            reasons.append((found, f"{column}: not a plain number, {decimal_key(column, mark)}"))
        reasons.append((bad, f"{column}: not a number"))
        if dtype == pl.String or dtype.is_float() or dtype.is_decimal():
            reasons.append((~value.is_finite(), f"{column}: not finite"))
        return value, reasons

    def flag(self, target: str, column: str, true_when: str | None) -> None:
        """A bool, by a comparison or as 0, 1, true, false; null where the log has none."""
        dtype = self.schema[column]
        if true_when is not None:
            method, operand = comparison(true_when)
            if isinstance(operand, str):
                if not (dtype in TEXT or dtype == pl.Null):
                    raise self.refuse(column, f"text, as true_when '{true_when}' needs")
                value = pl.col(column).cast(pl.String)
                value = pl.when(value != "").then(value)
            else:
                value, reasons = self._float(column, pl.Float64)
                self.reasons += reasons
            self.values.append(getattr(value, method)(operand).alias(target))
            return
        if dtype in (pl.Boolean, pl.Null):
            self.values.append(pl.col(column).cast(pl.Boolean).alias(target))
            return
        if not (dtype == pl.String or dtype.is_numeric()):
            raise self.refuse(column, "0, 1, true or false")
        raw = pl.col(column).cast(pl.String).str.to_lowercase()
        value = (
            pl.when(raw.is_in(["1", "true", "1.0"]))
            .then(pl.lit(True))
            .when(raw.is_in(["0", "false", "0.0"]))
            .then(pl.lit(False))
        )
        self.values.append(value.alias(target))
        refused = raw.is_not_null() & (raw != "") & value.is_null()
        self.reasons.append((refused, f'{column}: not a bool, compare it as in true_when: "> 0"'))


def _parse_iso(raw: pl.Expr) -> pl.Expr:
    text = raw.str.strip_chars().str.replace(" ", "T", literal=True).str.replace(r"[Zz]$", "+00:00")
    moment = pl.Datetime("us", "UTC")
    parsed = pl.coalesce(
        text.str.to_datetime("%Y-%m-%dT%H:%M:%S%.f%z", time_unit="us", time_zone="UTC", strict=False),
        text.str.to_datetime("%Y-%m-%dT%H:%M:%S%.f", time_unit="us", strict=False).dt.replace_time_zone("UTC"),
        text.str.to_date("%Y-%m-%d", strict=False).cast(pl.Datetime("us")).dt.replace_time_zone("UTC"),
    )
    return parsed.cast(moment).dt.timestamp("us").floordiv(1000)


def _parse_written(raw: pl.Expr, written: str) -> pl.Expr:
    """Milliseconds of times as the format says, UTC where it has no offset; null for what is not."""
    parsed = raw.str.strip_chars().str.to_datetime(written, time_unit="us", strict=False)
    return parsed.dt.timestamp("us").floordiv(1000)


def blocks(
    raw: pl.DataFrame,
    broken: list[tuple[int, str, str]],
    columns: Columns,
    schema: pa.Schema,
    *,
    uri: str,
    file: str,
    first_log_row: int,
) -> Iterator[Block]:
    """Events and rejects of one frame; `schema` is the source's `block_schema`."""
    pending = broken
    for piece, members in _explode(raw, columns, uri):
        piece = piece.with_columns(pl.int_range(first_log_row, first_log_row + pl.len()).alias(LOG_ROW))
        first_log_row += len(piece)
        yield _block(piece, members, columns, schema, pending, uri, file)
        pending = []
    if pending:
        yield Block(schema.empty_table(), _rejects(pending, file), len(pending))


def _explode(raw: pl.DataFrame, columns: Columns, uri: str) -> Iterator[tuple[pl.DataFrame, dict[str, pl.DataFrame]]]:
    """Frames of one row per impression, and per `member_of` column its pairs of (ROW, item)."""
    lists = {label.member_of for label in columns.labels.values() if label.member_of}
    if columns.explode is None and not lists:
        yield raw, {}
        return
    exploded = columns.explode.columns if columns.explode else []
    separator = columns.explode.separator if columns.explode else None
    if exploded and not columns.request:
        raw = raw.with_columns(_digests(raw))
    for name in {*lists, *exploded}:
        raw = raw.with_columns(as_list(raw, name, separator, uri))
    if exploded:
        length = pl.col(columns.item).list.len().fill_null(0)
        raw = raw.with_columns(pl.int_ranges(0, length, dtype=pl.Int32).alias(POSITION))
        exploded = [*exploded, POSITION]
        # A row with no items, or whose lists differ in length, stays one row without an item, and is rejected.
        fits = pl.all_horizontal(pl.col(name).list.len().fill_null(0) == length for name in exploded)
        raw = raw.with_columns((~fits).alias(UNEQUAL)).with_columns(
            pl.when(fits & (length > 0)).then(pl.col(name)) for name in exploded
        )
    for piece in slices(raw, columns.item) if exploded else [raw]:
        pairs = {name: elements_of(piece.select(ROW, name).explode(name), [name], columns, uri) for name in lists}
        members = {
            name: found.select(ROW, pl.col(name).alias("__item")).with_columns(_bare("__item")).drop_nulls().unique()
            for name, found in pairs.items()
        }
        rows = piece.drop(lists - set(exploded))
        rows = elements_of(rows.explode(exploded), exploded, columns, uri) if exploded else rows
        for found in pairs.values():
            rows = _also_refused(rows, found)
        yield rows, members


def elements_of(rows: pl.DataFrame, names: Iterable[str], columns: Columns, uri: str) -> pl.DataFrame:
    """The rows, one for each element of these lists, with the elements transformed."""
    mine = {name: columns.elements[name] for name in names if name in columns.elements}
    return elements(rows, mine, uri) if mine else rows


def _also_refused(rows: pl.DataFrame, members: pl.DataFrame) -> pl.DataFrame:
    """The rows, refused too where one of their members is."""
    if REFUSED not in members.columns:
        return rows
    bad = members.filter(pl.col(REFUSED).is_not_null()).unique(ROW, keep="first", maintain_order=True)
    rows = rows.join(bad.select(ROW, pl.col(REFUSED).alias("__of_member")), on=ROW, how="left", maintain_order="left")
    before = [pl.col(REFUSED)] if REFUSED in rows.columns else []
    return rows.with_columns(pl.coalesce(*before, "__of_member").alias(REFUSED)).drop("__of_member")


def _bare(column: str) -> pl.Expr:
    """Ids as text without the white space around them."""
    return pl.col(column).cast(pl.String).str.strip_chars()


def _digests(raw: pl.DataFrame) -> pl.Series:
    """A hash of what each raw row holds, the same in whatever file, block or process it is read: the same row in two
    files is one request. Hashes of polars change with its version."""
    content = pl.struct(sorted(name for name in raw.columns if name != ROW)).struct.json_encode()
    texts = raw.select(content).to_series()
    return pl.Series(REQUEST, [hashlib.blake2b(text.encode(), digest_size=8).hexdigest() for text in texts], pl.String)


def as_list(raw: pl.DataFrame, name: str, separator: str | None, uri: str, key: str = "explode.separator") -> pl.Expr:
    """The column as lists of text; UserError, which names the `key` of a separator, for one that is none."""
    dtype = raw.schema[name]
    if isinstance(dtype, pl.List | pl.Null):
        return pl.col(name).cast(pl.List(pl.String))
    if dtype == pl.String and separator is not None:
        parts = pl.col(name).str.strip_chars().str.split(separator)
        return parts.list.eval(pl.element().filter(pl.element() != ""))
    remedy = f"set {key}" if dtype == pl.String else "name a column of lists"
    raise UserError(f"{uri}: column '{name}' is {dtype}, not a list; {remedy} in the source file")


def moments(raw: pl.DataFrame, time: Time, uri: str) -> pl.Expr:
    """Milliseconds of the rows' times, null where a row breaks the schema by its time."""
    value, reasons = _Row(raw, uri)._moment(time)
    return pl.when(~pl.any_horizontal(bad.fill_null(False) for bad, _ in reasons)).then(value)


def milliseconds(text: str) -> int | None:
    """Of an ISO 8601 time; None for what is none."""
    found: int | None = pl.select(_parse_iso(pl.lit(text))).item()
    return found


def slices(raw: pl.DataFrame, item: str) -> Iterator[pl.DataFrame]:
    """Slices of rows whose lists come to about EXPLODED_ROWS elements, so that blocks stay bounded."""
    piece = raw.select((pl.col(item).list.len().fill_null(1).cum_sum() // EXPLODED_ROWS).alias("piece"))["piece"]
    yield from raw.with_columns(piece).partition_by("piece", maintain_order=True, include_key=False)


def _block(
    raw: pl.DataFrame,
    members: dict[str, pl.DataFrame],
    columns: Columns,
    schema: pa.Schema,
    broken: list[tuple[int, str, str]],
    uri: str,
    file: str,
) -> Block:
    row = _Row(raw, uri)
    row.text("user_id", columns.user, required=True)
    if columns.explode:
        row.reasons.append((pl.col(UNEQUAL), f"{columns.item}: lists of unequal length"))
    row.text("item_id", columns.item, required=True)
    row.time(columns.time)
    if columns.query:
        row.text("query", columns.query, required=False)
    else:
        row.values.append(pl.lit(None, pl.String).alias("query"))
    if columns.request:
        row.text("request_id", columns.request, required=True)
    elif columns.explode:  # a raw row is a request
        row.values.append(pl.col(REQUEST).alias("request_id"))
    else:
        row.values.append(pl.lit("").alias("request_id"))
    if columns.position:
        row.position(columns.position)
    elif columns.explode:
        row.values.append(pl.col(POSITION).alias("position"))
    else:
        row.values.append(pl.lit(0, pl.Int32).alias("position"))
    for name, label in columns.labels.items():
        target = f"label_{name}"
        if label.member_of:
            pairs = members[label.member_of].with_columns(pl.lit(True).alias(f"__{target}"))
            raw = raw.with_columns(_bare(columns.item).alias("__item"))  # members are text too
            raw = raw.join(pairs, on=[ROW, "__item"], how="left", maintain_order="left")
            row.values.append(pl.col(f"__{target}").fill_null(False).alias(target))
        elif label.column and label.type == "bool":
            row.flag(target, label.column, label.true_when)
        elif label.column:
            row.number(target, label.column, label.range)
        if label.late:
            row.known(name, label)
    for name, column in columns.numbers.items():
        row.number(f"num_{name}", column)
    for name, column in columns.categories.items():
        row.text(f"cat_{name}", column, required=False)

    refused = [pl.col(REFUSED)] if REFUSED in raw.columns else []
    reason = pl.coalesce(*refused, *(pl.when(bad).then(pl.lit(text)) for bad, text in row.reasons))
    made = raw.select(*row.values, pl.col(LOG_ROW).alias("log_row"), reason.alias("__reason"))
    rejects = rejected(raw, made["__reason"], broken, file)
    events = made.filter(pl.col("__reason").is_null()).select(schema.names).to_arrow().cast(schema)
    return Block(events, rejects, len(raw) + len(broken))


def rejected(raw: pl.DataFrame, reason: pl.Series, broken: list[tuple[int, str, str]], file: str) -> pa.Table:
    """The lines that are no rows, then the rows that have a reason, as `REJECTS`."""
    rejects, refused = _rejects(broken, file), reason.is_not_null()
    if not refused.any():
        return rejects
    kept = [name for name in raw.columns if not name.startswith("__")]
    source = raw.filter(refused).select(
        pl.lit(file).alias("file"),
        pl.col(ROW).alias("row"),
        reason.filter(refused).alias("reason"),
        pl.struct(kept).struct.json_encode().str.slice(0, LONGEST_QUOTE).alias("source"),
    )
    return pa.concat_tables([rejects, source.to_arrow().cast(REJECTS)])


def _rejects(broken: list[tuple[int, str, str]], file: str) -> pa.Table:
    rows = [
        {"file": file, "row": n, "reason": why, "source": pl.DataFrame({"line": [text]}).write_ndjson().strip()}
        for n, why, text in broken
    ]
    return pa.Table.from_pylist(rows, REJECTS)
