"""Read the files of a log: events in blocks, and the rows of items, users and features.

for block in read_events(log, "raw", "log.csv"):
    block.rows, block.rejects
items = read_section(log.items, "raw", log.item_files("raw")).rows

`Rows` evaluates SQL expressions and checks each column.

All steps are vectorised over a frame. A row that breaks the schema becomes a reject
with its first reason, which names the column of the log.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote

import polars as pl

from core.errors import MAX_REASON_CHARS, UserError, pluralize
from core.files import join
from core.ids import UNCLEAN_ID, clean_id
from core.schemas import REJECTS
from core.tables import LARGEST_NUMBER
from pipelines.prepare.reading.log import AsOf, Log, Section, Session
from pipelines.prepare.reading.read import (
    MAX_QUOTED_CHARS,
    ROW,
    FilePart,
    ParsedRows,
    parse_sql,
    read_frames,
    root_columns,
)
from pipelines.prepare.reading.times import Time, parse_times

LOG_ROW = "log_row"
"""Column with the number of an event in its piece, after lists are exploded."""
NO_REJECTS = pl.DataFrame(schema=pl.Schema(REJECTS))
# temporary columns of a frame while lists are exploded
ELEMENT, REQUEST, UNEQUAL, LIST = "__element", "__request", "__unequal", "__list"
MAX_EXPLODED_ROWS = 1 << 18
"""Approximate maximum number of rows per block after lists are exploded."""
MAX_INT32 = 2**31 - 1
MAX_EVALUATIONS = 2000
"""Maximum number of evaluations of an expression to locate unreadable values."""
VALUE, READ = "__value", "__read"
Evaluated = tuple[pl.DataFrame, list[tuple[pl.Series, str]]]
"""Values by name, and pairs of a mask of unreadable rows and a reason."""


@dataclass(frozen=True)
class Block:
    """A bounded number of rows of a raw log, or of the files of a section."""

    rows: pl.DataFrame
    """Valid rows, with the columns that the log has."""
    rejects: pl.DataFrame
    """Rejected rows and unparsable lines, in the schema `REJECTS`."""
    counts: RejectCounts


@dataclass
class RejectCounts:
    """Numbers of rows that were read, and of rejected rows by reason."""

    rows_read: int = 0
    """Number of valid and rejected rows, after lists are exploded."""
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    """Location and content of the first rejected row, by reason."""
    left_out: int = 0
    """Number of rows that `where` leaves out, which are not among the read ones."""
    missing: dict[str, str] | None = None
    """Columns that no block has, each with a hint at a similar name; None without a
    block. A column that is missing in all blocks of the log is an error."""

    def count(self, rejects: pl.DataFrame) -> None:
        """Count the rejects of a block."""
        self.reasons.update(rejects["reason"])
        first = rejects.unique("reason", keep="first", maintain_order=True)
        for row in first.to_dicts():
            piece = f" of the piece at {row['piece']:,}" if row["piece"] else ""
            self.examples[row["reason"]] = (
                f"{row['file']} row {row['row']:,}{piece} "
                f"(from 0, without header and blank lines): {row['source'][:200]}"
            )

    def add(self, other: RejectCounts) -> None:
        """Add other counts; the sum does not depend on the order of additions."""
        if self.missing is None:
            self.missing = other.missing
        elif other.missing is not None:
            missing = self.missing.items()
            self.missing = {n: hint for n, hint in missing if n in other.missing}
        self.rows_read += other.rows_read
        self.left_out += other.left_out
        self.reasons.update(other.reasons)
        for reason, example in other.examples.items():
            self.examples[reason] = min(example, self.examples.get(reason, example))

    @property
    def rejects(self) -> int:
        """Number of rejected rows."""
        return self.reasons.total()

    def lines(self) -> Iterator[str]:
        """Yield a line for users per reason, the most frequent first."""
        for reason, rows in self.reasons.most_common():
            yield f"{pluralize(rows, 'row')}, {reason}; such as {self.examples[reason]}"

    def check(self, max_rejects: float, rows: str = "") -> None:
        """Raise a UserError if too many rows are rejected.

        Args:
            max_rejects: Maximum share of rejected rows.
            rows: Description of the rows that follows the word "rows" in the message.
        """
        if self.rejects > max_rejects * self.rows_read:
            [(reason, _)] = self.reasons.most_common(1)
            share = self.rejects / self.rows_read
            raise UserError(
                f"{self.rejects:,} of {self.rows_read:,} rows{rows} ({share:.2%}) "
                f"break the schema, over the limit max_rejects {max_rejects:.2%}; most "
                f"often {reason}, such as {self.examples[reason]}"
            )


def check_missing(missing: dict[str, str] | None, what: str, input_uri: str) -> None:
    """Raise a UserError for a column that no file has.

    Args:
        missing: Hints by missing column, if a block was read.
        what: Kind of the files, for the message.
        input_uri: Input folder, for the message.
    """
    for name, hint in (missing or {}).items():
        raise UserError(f"no {what} file of {input_uri} has a column '{name}'; {hint}")


class Rows:
    """Rows of a frame that are converted column by column.

    Each method converts one column of `values`, and appends a series of reasons to
    `reasons` if it rejects rows.
    """

    def __init__(
        self, raw: pl.DataFrame, expressions: dict[str, str], uri: str
    ) -> None:
        """Evaluate the expressions.

        Args:
            raw: Rows of the file.
            expressions: Columns or SQL expressions, by column of the table.
            uri: File, for messages.
        """
        self.raw, self.expressions, self.uri = raw, dict(expressions), uri
        self.values, unreadable = evaluate(raw, expressions, uri)
        self.reasons: list[pl.Series] = []
        for mask, reason in unreadable:
            self.reject(mask, reason)

    def store(self, target: str, values: pl.Series) -> None:
        """Set a column."""
        self.values = self.values.with_columns(values.alias(target))

    def reject(self, mask: pl.Series, reason: str) -> None:
        """Reject the rows at which the mask is true."""
        if mask.any():
            self.reasons.append(choose(mask, pl.lit(reason)))

    def _type_error(self, target: str, expected: str) -> UserError:
        text, kind = self.expressions[target], self.values[target].dtype
        return UserError(f"{self.uri}: '{text}' is {kind}, not {expected}")

    def _get_numbers(self, target: str, expected: str) -> pl.Series:
        """Return values that are text, bools, numbers or null."""
        kind = self.values[target].dtype
        if kind not in (pl.String, pl.Boolean, pl.Null) and not kind.is_numeric():
            raise self._type_error(target, expected)
        return self.values[target]

    def parse_ids(self, target: str, missing: str = "missing") -> None:
        """Store a column as ids; the texts nan and null count as missing.

        Args:
            target: Column to store.
            missing: Reason for rejecting rows without an id.
        """
        values, what = self.values[target], self.expressions[target]
        if values.dtype.is_nested() or values.dtype.is_temporal():
            raise self._type_error(target, "text or integers")
        ids = clean_ids(values)
        self.store(target, ids)
        if ids.null_count():
            blank = values.is_null()
            if values.dtype == pl.String:
                blank = blank | (values.str.strip_chars() == "")
            self.reject(ids.is_null() & blank.fill_null(True), f"{what}: {missing}")
            self.reject(
                ids.is_null(),
                f"{what}: missing, written as text such as nan or null, a float too "
                f"large to be exact, or no text",
            )

    def parse_text(self, target: str) -> None:
        """Store a column as text; empty text becomes null.

        Lists are joined by blanks. In a column `cat_*`, the elements of a list with a
        blank in an element are quoted, so that different lists remain different.
        Columns `text_*` are stripped.
        """
        values = self.values[target]
        if isinstance(values.dtype, pl.List):
            lists = values.cast(pl.List(pl.String))
            values = lists.list.join(" ", ignore_nulls=True)
            if target.startswith("cat_"):
                has_blank = lists.list.eval(pl.element().str.contains(r"\s")).list.any()
                quoted = '["' + lists.list.join('", "', ignore_nulls=True) + '"]'
                values = choose(has_blank, quoted, values)
        elif values.dtype.is_nested() or values.dtype == pl.Binary:
            raise self._type_error(target, "text")
        if values.dtype.is_float():
            values = _format_floats(values)
        values = values.cast(pl.String)
        if target.startswith("text_"):
            values = values.str.strip_chars()
        self.store(target, choose(values != "", values))

    def parse_time(
        self, target: str, time: Time, piece_index: int = 0, *, past: bool = False
    ) -> None:
        """Store a column as epoch ms, or ordinals.

        Args:
            target: Column to store.
            time: Column and notation. Without a column, the time is the index of the
                row.
            piece_index: Index of the piece in the log, for times that are indices
                of rows.
            past: Whether to reject times in the future.
        """
        if time.column is None:
            self.store(target, self.raw[ROW] + (piece_index << 40))
            return
        try:
            moments, reason = parse_times(
                self.values[target], time, time.column, past=past
            )
        except TypeError:
            raise self._type_error(target, f"times as {time.notation}") from None
        self.store(target, moments)
        if reason.null_count() < len(reason):
            self.reasons.append(reason)

    def store_known_time(
        self, name: str, time: Time | None, delay_minutes: float | None
    ) -> None:
        """Store the time from which a label is known; null if the label is not set.

        Args:
            name: Name of the label.
            time: Column and notation of the time, or None.
            delay_minutes: Delay after the event if `time` is None.
        """
        value, event_time = self.values[f"label_{name}"], self.values["timestamp_ms"]
        target = f"known_{name}"
        is_set = value if value.dtype == pl.Boolean else value.is_not_null()
        if time is None:
            known_ms = event_time + round((delay_minutes or 0) * 60_000)
        else:
            known_ms, reason = parse_times(
                self.values[target], time, str(time.column), past=True
            )
            named_reason = reason + f" (time of the label {name})"
            self.reasons.append(choose(is_set.fill_null(False), named_reason))
            is_early = (is_set & (known_ms < event_time)).fill_null(False)
            self.reject(
                is_early, f"{time.column}: before its event, check labels.{name}.time"
            )
        self.store(target, choose(is_set, known_ms))

    def parse_integer(self, target: str) -> None:
        """Store a column as int32; rows without a non-negative integer are rejected."""
        what = self.expressions[target]
        values = self._get_numbers(target, "integers")
        if values.dtype == pl.String:
            values = values.str.strip_chars()
        number = values.cast(pl.Int64, strict=False)
        self.reject(number.is_null(), f"{what}: missing or not an integer")
        self.reject(
            ((number < 0) | (number > MAX_INT32)).fill_null(False),
            f"{what}: negative, or more than int32 holds",
        )
        self.store(target, number.cast(pl.Int32, strict=False))

    def parse_number(self, target: str, span: list[float] | None = None) -> None:
        """Store a column as float32; missing values are null.

        Rows are rejected if their number is not finite, above LARGEST_NUMBER in
        absolute value, or outside of `span`.

        Args:
            target: Column to store.
            span: Smallest and largest allowed value, or None.
        """
        what = self.expressions[target]
        values = self._get_numbers(target, "numbers")
        if values.dtype == pl.String:
            values = values.str.strip_chars()
            values = choose(values != "", values)
        number = values.cast(pl.Float32, strict=False)
        self.store(target, number)
        self.reject(
            values.is_not_null() & number.is_null(),
            f"{what}: not a number, which try_cast({what} as double) makes missing",
        )
        self.reject(~number.is_finite().fill_null(True), f"{what}: not finite")
        self.reject(
            (number.abs() > LARGEST_NUMBER).fill_null(False),
            f"{what}: over {LARGEST_NUMBER:g}",
        )
        if span is not None:
            is_outside = (number < span[0]) | (number > span[1])
            self.reject(
                is_outside.fill_null(False),
                f"{what}: outside {span[0]:g} to {span[1]:g}",
            )

    def parse_bool(self, target: str) -> None:
        """Store a column of 0, 1, true or false as bools; missing values are null."""
        what = self.expressions[target]
        values = self._get_numbers(target, "0, 1, true or false")
        if values.dtype in (pl.Boolean, pl.Null):
            self.store(target, values.cast(pl.Boolean))
            return
        text = values.cast(pl.String).str.to_lowercase()
        is_true = text.is_in(["1", "true", "1.0"])
        is_bool = is_true | text.is_in(["0", "false", "0.0"])
        self.reject(
            ~is_bool & text.is_not_null() & (text != ""),
            f"{what}: not a bool, compare it, such as cast({what} as double) > 0",
        )
        self.store(target, choose(is_bool, is_true))

    def join(self, users: pl.DataFrame | None) -> None:
        """Store the attributes of each row's user, from the rows of the user files."""
        if users is not None:
            self.values = self.values.join(
                users, on="user_id", how="left", maintain_order="left"
            )

    def block(
        self,
        frame: ParsedRows,
        file: str,
        piece: FilePart | None,
        types: pl.Schema,
    ) -> Block:
        """Return the valid rows, and the rejects.

        Args:
            frame: Frame of the rows, whose broken lines are rejects too.
            file: File, for the rejects.
            piece: Part of the file, or None.
            types: Types of the columns by name; those that the log lacks are left out.
        """
        present = [name for name in types if name in self.values.columns]
        valid = self.values.select(pl.col(name).cast(types[name]) for name in present)
        rejects = [NO_REJECTS]
        if frame.broken:
            broken = [
                (row, why, json.dumps({"line": x})) for row, why, x in frame.broken
            ]
            columns = ["row", "reason", "source"]
            rejects.append(pl.DataFrame(broken, columns, orient="row"))
        if self.reasons:
            reason = pl.select(pl.coalesce(self.reasons)).to_series()
            is_rejected = reason.is_not_null()
            names = [name for name in self.raw.columns if not name.startswith("__")]
            source = pl.struct(names).struct.json_encode()
            rows = self.raw.filter(is_rejected).select(
                pl.col(ROW).alias("row"),
                reason.filter(is_rejected).alias("reason"),
                source.str.slice(0, MAX_QUOTED_CHARS).alias("source"),
            )
            rejects.append(rows)
            valid = valid.filter(~is_rejected)
        located = pl.concat(rejects, how="diagonal_relaxed").with_columns(
            file=pl.lit(file), piece=pl.lit(piece.start if piece else 0, pl.Int64)
        )
        num_rows = len(self.raw) + len(frame.broken)
        counts = RejectCounts(num_rows, left_out=frame.left_out, missing=frame.missing)
        counts.count(located)
        return Block(valid, located, counts)


def take_rows(frame: ParsedRows, condition: str | None, uri: str) -> ParsedRows:
    """Return the rows at which a condition is true, and count the others.

    A row whose condition cannot be evaluated is broken.
    """
    if condition is None:
        return frame
    rows = frame.with_missing
    values, unreadable = evaluate(rows, {"where": condition}, uri)
    is_taken = values["where"]
    if is_taken.dtype not in (pl.Boolean, pl.Null):
        raise UserError(
            f"{uri}: where is '{condition}', which is {is_taken.dtype}, not true or "
            f"false"
        )
    is_taken = is_taken.cast(pl.Boolean).fill_null(False)
    broken = list(frame.broken)
    for mask, reason in unreadable:
        for row in rows.filter(mask).to_dicts():
            number = row.pop(ROW)
            line = json.dumps(row, default=str)[:MAX_QUOTED_CHARS]
            broken.append((number, reason, line))
    left_out = len(rows) - int(is_taken.sum()) - len(broken) + len(frame.broken)
    return ParsedRows(frame.rows.filter(is_taken), broken, frame.missing, left_out)


def choose(
    mask: pl.Series, values: pl.Series | pl.Expr, others: pl.Series | None = None
) -> pl.Series:
    """Return `values` where the mask is true, and elsewhere `others` or null."""
    return pl.select(pl.when(mask).then(values).otherwise(others)).to_series()


def split_rows(rows: pl.DataFrame, name: str | None) -> Iterator[pl.DataFrame]:
    """Yield slices of rows that explode to about MAX_EXPLODED_ROWS rows at most.

    Args:
        rows: Rows of a file.
        name: List column that will be exploded, or None.
    """
    elements = int(rows[name].list.len().sum() or 0) if name else 0
    size = max(1, len(rows) * MAX_EXPLODED_ROWS // max(elements, MAX_EXPLODED_ROWS))
    yield from rows.iter_slices(size) if len(rows) else [rows]


def _format_floats(values: pl.Series) -> pl.Series:
    """Format floats as text, integers without a point; not finite becomes null."""
    whole = values.cast(pl.Int64, strict=False)
    is_whole = (whole.cast(values.dtype) == values) & (values.abs() < 2**53)
    text = (
        pl.when(is_whole)
        .then(whole.cast(pl.String))
        .when(values.is_finite())
        .then(values.cast(pl.String))
    )
    return pl.select(text).to_series()


def clean_ids(values: pl.Series) -> pl.Series:
    """Convert values to ids with `clean_id`; null for values that are no ids."""
    if values.dtype.is_integer():
        return values.cast(pl.String)
    if values.dtype.is_float():
        largest = 2**24 if values.dtype == pl.Float32 else 2**53
        values = _format_floats(choose(values.abs() < largest, values))
    text = values.cast(pl.String, strict=False)
    is_unclean = text.str.contains(UNCLEAN_ID).fill_null(False)
    if not is_unclean.any():
        return text
    unclean = text.filter(is_unclean)
    cleaned = {value: clean_id(value) for value in unclean.unique().to_list()}
    replaced = unclean.replace_strict(cleaned, return_dtype=pl.String)
    return text.scatter(is_unclean.arg_true(), replaced)


def evaluate_list(rows: pl.DataFrame, text: str, key: str, uri: str) -> pl.Series:
    """Evaluate an expression whose values must be lists.

    Args:
        rows: Rows of the file.
        text: Column or SQL expression.
        key: Key of the mapping, for the message.
        uri: File, for the message.
    """
    evaluated, _ = evaluate(rows, {"list": text}, uri)
    values = evaluated["list"]
    if not isinstance(values.dtype, pl.List | pl.Null):
        raise UserError(
            f"{uri}: {key} is {values.dtype}, not a list, such as "
            f"string_to_array({text}, ' ')"
        )
    return values.cast(pl.List(pl.String)) if values.dtype == pl.Null else values


def evaluate(rows: pl.DataFrame, expressions: dict[str, str], uri: str) -> Evaluated:
    """Evaluate SQL expressions.

    Args:
        rows: Rows of the file.
        expressions: Columns or SQL expressions, by name.
        uri: File, for messages.

    Returns:
        Values by name, null for values that an expression (such as a `cast`) cannot
        read, and pairs of a mask of these values and a reason.
    """
    polars_expressions = {
        name: _to_expression(text, rows.columns).alias(name)
        for name, text in expressions.items()
    }
    try:
        return rows.with_columns(**polars_expressions).select(expressions.keys()), []
    except pl.exceptions.PolarsError as error:
        if len(expressions) == 1:
            [(name, text)] = expressions.items()
            return _evaluate_readable(rows, name, text, uri, error)
    results = [evaluate(rows, {name: text}, uri) for name, text in expressions.items()]
    frame = pl.concat([values for values, _ in results], how="horizontal")
    unreadable = []
    for _, masks in results:
        unreadable += masks
    return frame, unreadable


def _evaluate_readable(
    rows: pl.DataFrame, name: str, text: str, uri: str, error: Exception
) -> Evaluated:
    """Evaluate an expression that polars cannot evaluate on all rows."""
    expression = _to_expression(text, rows.columns).alias(VALUE)
    roots = dict.fromkeys(root_columns(text, rows.columns))
    names = [root for root in roots if root in rows.columns]
    lacks_field = isinstance(error, pl.exceptions.StructFieldNotFoundError)
    if lacks_field or pl.Null in rows.select(names).dtypes:
        nulls = pl.repeat(None, len(rows), dtype=pl.Null, eager=True)
        return pl.DataFrame({name: nulls}), []
    reason = re.split("This error occurred|You might want", str(error))[0]
    reason = " ".join(reason.split())[:MAX_REASON_CHARS]
    user_error = UserError(f"{uri}: '{text}' cannot be evaluated ({reason})")
    try:
        rows.clear().select(expression)  # raises if the types do not fit
        distinct = rows.select(names).unique()
    except pl.exceptions.PolarsError:
        raise user_error from None
    unreadable = _locate_unreadable(distinct, expression)
    if unreadable is None:
        raise user_error from None
    readable = distinct.with_row_index(READ).filter(~pl.col(READ).is_in(unreadable))
    values = rows.select(names).join(
        readable.with_columns(expression),
        on=names,
        how="left",
        nulls_equal=True,
        maintain_order="left",
    )
    reason = (
        f"{text}: a value that it cannot read; write try_cast where it may be empty"
    )
    return values.select(pl.col(VALUE).alias(name)), [(values[READ].is_null(), reason)]


def _locate_unreadable(rows: pl.DataFrame, expression: pl.Expr) -> list[int] | None:
    """Locate by bisection the rows that an expression cannot evaluate."""
    ranges = [(0, len(rows))]
    unreadable: list[int] = []
    evaluations = 0
    while ranges:
        start, size = ranges.pop()
        evaluations += 1
        try:
            rows.slice(start, size).select(expression)
        except pl.exceptions.PolarsError:
            if evaluations > MAX_EVALUATIONS:
                return None
            half = size // 2
            if half:
                ranges += [(start, half), (start + half, size - half)]
            else:
                unreadable.append(start)
    return unreadable


def _to_expression(text: str, columns: list[str]) -> pl.Expr:
    """Return the column with this name, or else the SQL expression."""
    return pl.col(text) if text in columns else parse_sql(text)


def read_section(
    section: Section, input_uri: str, files: list[str]
) -> tuple[pl.DataFrame, RejectCounts]:
    """Read files of a section, given relative to the input folder, in their order."""
    blocks = [pl.DataFrame(schema=pl.Schema(section.schema))]
    rejected = RejectCounts()
    for file in files:
        for block in read_section_file(section, input_uri, file):
            blocks.append(block.rows)
            rejected.add(block.counts)
    check_missing(rejected.missing, section.key.removesuffix("_id"), input_uri)
    return pl.concat(blocks), rejected


def read_section_file(section: Section, input_uri: str, file: str) -> Iterator[Block]:
    """Yield the rows of a file of a section in blocks."""
    uri = join(input_uri, file)
    types = pl.Schema(section.schema)
    texts = [*section.columns.values(), *filter(None, [section.where])]
    for frame in read_frames(uri, section, texts):
        parsed = take_rows(frame, section.where, uri)
        rows = Rows(parsed.with_missing, section.columns, uri)
        for name in types:
            if name in ("user_id", "item_id"):
                rows.parse_ids(name)
            elif isinstance(section, AsOf | Session) and name == "timestamp_ms":
                rows.parse_time(name, section.time)
            elif name.startswith("num_"):
                rows.parse_number(name)
            else:
                rows.parse_text(name)
        yield rows.block(parsed, file, None, types)


def read_events(
    log: Log,
    input_uri: str,
    file: str,
    users: pl.DataFrame | None = None,
    piece: FilePart | None = None,
    piece_index: int = 0,
) -> Iterator[Block]:
    """Yield the events of a file, or of a piece of it, in bounded blocks.

    Events are in the order of the file. Their rows also have the column LOG_ROW,
    which ascends within the piece, after lists are exploded.

    Args:
        log: Mapping of the log.
        input_uri: Input folder.
        file: File, relative to the input folder.
        users: Rows of the user files, one per user, or None.
        piece: Part of the file; None for the whole file.
        piece_index: Index of the piece in the log, for times that are the
            order of rows.
    """
    uri = join(input_uri, file)
    types = pl.Schema(log.schema)
    types[LOG_ROW] = pl.Int64()
    parser = EventParser(log, uri, users, piece_index)
    # values of columns in the names of folders, such as `country=se`
    named = [folder.partition("=") for folder in file.split("/")[:-1]]
    folders = {
        key: None if value == "__HIVE_DEFAULT_PARTITION__" else unquote(value)
        for key, _, value in named
        if value
    }
    derived = [*log.explode, *folders]
    # names that `explode` gives, and that its lists do not read themselves
    exploded = {*log.explode}
    for text in log.lists:
        exploded -= {*root_columns(text, derived)}
    first_row = 0
    texts = [*log.lists, *log.columns.values(), *filter(None, [log.where])]
    required = [log.user, log.item, log.sequence, log.event_time.column, log.where]
    required += log.explode.values()
    for index, frame in enumerate(read_frames(uri, log, texts, piece)):
        missing = {n: hint for n, hint in frame.missing.items() if n not in derived}
        for text in filter(None, required):
            for name in root_columns(text, derived) if index == 0 else ():
                if name in missing:
                    raise UserError(f"{uri} has no column '{name}'; {missing[name]}")
        rows = frame.rows.drop(exploded & {*frame.rows.columns}).with_columns(
            pl.lit(value, pl.String).alias(key) for key, value in folders.items()
        )
        frame = take_rows(replace(frame, rows=rows, missing=missing), log.where, uri)
        for events in parser.parse(frame.with_missing):
            end_row = first_row + len(events.raw)
            events.store(LOG_ROW, pl.int_range(first_row, end_row, eager=True))
            yield events.block(frame, file, piece, types)
            first_row = end_row
            # broken and left out rows are counted with the first block of the frame
            frame = replace(frame, broken=[], left_out=0)


@dataclass(frozen=True)
class EventParser:
    """Converts raw rows of a file to rows of events."""

    log: Log
    uri: str
    """File, for messages."""
    users: pl.DataFrame | None
    piece_index: int

    def parse(self, rows: pl.DataFrame) -> Iterator[Rows]:
        """Yield converted rows, one per event."""
        log = self.log
        if log.sequence:
            yield from self._parse_sequences(rows, log.sequence)
            return
        with_lists = self._add_lists(rows) if log.explode else rows
        for piece in split_rows(with_lists, next(iter(log.explode), None)):
            if log.explode:
                columns = [*log.explode, ELEMENT]
                piece = piece.explode(columns, empty_as_null=True, keep_nulls=True)
            yield self._parse_rows(piece)

    def _parse_rows(self, piece: pl.DataFrame) -> Rows:
        """Convert raw rows, whose lists are exploded, to columns of events."""
        log = self.log
        rows = Rows(piece, log.columns, self.uri)
        rows.parse_ids("user_id")
        if log.explode:
            rows.reject(piece[UNEQUAL], f"{log.item}: lists of unequal length")
            rows.store("request_id", piece[REQUEST])
            rows.store("position", piece[ELEMENT].fill_null(0).cast(pl.Int32))
        rows.parse_ids("item_id")
        rows.parse_time("timestamp_ms", log.event_time, self.piece_index, past=True)
        if log.query:
            rows.parse_text("query")
        if log.request:
            rows.parse_ids("request_id")
        if log.position:
            rows.parse_integer("position")
        for name, label in log.labels.items():
            if label.type == "bool":
                rows.parse_bool(f"label_{name}")
            else:
                rows.parse_number(f"label_{name}", label.range)
            if label.is_late:
                rows.store_known_time(name, label.time, label.delay_minutes)
        for name in log.numbers:
            rows.parse_number(f"num_{name}")
        for name in log.categories:
            rows.parse_text(f"cat_{name}")
        for name in log.texts:
            rows.parse_text(f"text_{name}")
        rows.join(self.users)
        return rows

    def _add_lists(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Add the lists to explode, their elements' positions, and request ids."""
        lists = {
            name: evaluate_list(rows, text, f"explode.{name}", self.uri)
            for name, text in self.log.explode.items()
        }
        lengths = pl.DataFrame(
            {name: values.list.len().fill_null(0) for name, values in lists.items()}
        )
        is_unequal = lengths.select(~pl.all_horizontal(pl.all() == pl.nth(0)))
        first_length = lengths.to_series(0)
        is_usable = ~is_unequal.to_series() & (first_length > 0)
        positions = pl.int_ranges(0, first_length, dtype=pl.Int32, eager=True)
        usable = {
            name: pl.when(is_usable).then(values)
            for name, values in {**lists, ELEMENT: positions}.items()
        }
        # pages that differ in any column are different requests
        content = pl.struct(sorted({*rows.columns} - {ROW})).struct.json_encode()
        request = content.hash(seed=0).cast(pl.String)
        extra: dict[str, Any] = {REQUEST: request, UNEQUAL: is_unequal.to_series()}
        return rows.with_columns(**usable, **extra)

    def _parse_sequences(self, rows: pl.DataFrame, sequence: str) -> Iterator[Rows]:
        """Yield the rows of events from lists of items, one row per item."""
        items = evaluate_list(rows, sequence, "sequence", self.uri).fill_null([])
        if self.log.item:  # an item after the list
            items = items.cast(pl.List(pl.String))
            evaluated, _ = evaluate(rows, {"last": self.log.item}, self.uri)
            last_item = clean_ids(evaluated["last"])
            with_last = pl.concat_list(items, last_item)
            joined = pl.when(last_item.is_null()).then(items).otherwise(with_last)
            items = pl.select(joined).to_series()
        index = pl.select(pl.int_ranges(0, items.list.len())).to_series()
        rows = rows.with_columns(items.alias(LIST), index.alias(ELEMENT))
        for piece in split_rows(rows, LIST):
            piece = piece.explode(LIST, ELEMENT, empty_as_null=True, keep_nulls=True)
            events = Rows(piece, {"user_id": self.log.user, "item_id": LIST}, self.uri)
            events.expressions["item_id"] = sequence  # for messages
            events.parse_ids("user_id")
            events.parse_ids(
                "item_id",
                "missing or empty; of text with blanks in a row split "
                "regexp_replace(..., '\\s+', ' ')",
            )
            events.store("timestamp_ms", piece[ELEMENT].fill_null(0))
            events.join(self.users)
            yield events
