"""Conversion of raw rows to rows of a table: SQL expressions, then checks per column.

All steps are vectorised over a frame. A row that breaks the schema goes to the rejects
with its first reason, which names the log's column.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import polars as pl
import pyarrow as pa

from models.config import pluralize
from models.item_ids import UNCLEAN_ID, clean_id
from models.storage.tables import LARGEST_NUMBER, UserError
from pipelines.data.reading.read import (
    MAX_QUOTED_CHARS,
    ROW,
    Broken,
    FilePart,
    root_columns,
)
from pipelines.data.reading.times import Time, parse_times, reject_future, suggest_unit
from pipelines.data.schemas import REJECTS

MAX_EXPLODED_ROWS = 1 << 18
"""Rows per block after lists are exploded."""
MAX_INT32 = 2**31 - 1
MAX_TRIES = 2000
"""Most evaluations of an expression in search of values that it cannot read."""
VALUE, READ = "__value", "__read"
WORD = r"[^{}\[\]\":,\s\\]+"
"""Text without blanks, escapes or structural characters of JSON."""
PLAIN_LIST = rf'^\{{"x":\[(?:"{WORD}"(?:,"{WORD}")*|[-+.\deE]+(?:,[-+.\deE]+)*)?\]\}}$'
"""JSON of a list of words or of a list of numbers."""
TEXT_WITH_POINT = r'"[^"]*\d\.0'
"""JSON with a text such as v1.0, which is not a whole number."""
# values by name, and masks of the values that a `cast` could not read, with the reason
Evaluated = tuple[pl.DataFrame, list[tuple[pl.Series, str]]]


@dataclass(frozen=True)
class Block:
    """A bounded number of rows of a raw log, or of the files of a section."""

    rows: pa.Table
    """Valid rows."""
    rejects: pa.Table
    """Rows that break the schema and lines that are no rows, as `tables.REJECTS`."""
    rows_read: int
    """Number of rows after lists are exploded, valid or rejected."""
    missing: dict[str, str] = field(default_factory=dict)
    """Columns that do not exist, each with a hint at the nearest. It is an error if no
    block of the log has one."""


@dataclass
class RejectCounts:
    """Number of read and rejected rows, by reason."""

    rows_read: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    """First rejected row of each reason: location and content."""

    @classmethod
    def from_block(cls, block: Block) -> RejectCounts:
        counts = cls(block.rows_read, Counter(block.rejects["reason"].to_pylist()))
        if not counts.reasons:
            return counts
        rejects = pl.DataFrame(block.rejects)
        first = rejects.unique("reason", keep="first", maintain_order=True)
        for row in first.to_dicts():
            piece = f" of the piece at {row['piece']:,}" if row["piece"] else ""
            counts.examples[row["reason"]] = (
                f"{row['file']} row {row['row']:,}{piece} "
                f"(from 0, without header and blank lines): {row['source'][:200]}"
            )
        return counts

    def add(self, other: RejectCounts) -> None:
        """Add the counts of `other`. The result does not depend on the order."""
        self.rows_read += other.rows_read
        self.reasons.update(other.reasons)
        for reason, example in other.examples.items():
            self.examples[reason] = min(example, self.examples.get(reason, example))

    @property
    def rejects(self) -> int:
        return self.reasons.total()

    def lines(self) -> Iterator[str]:
        """Yield a line per reason."""
        for reason, rows in self.reasons.most_common():
            yield f"{pluralize(rows, 'row')}, {reason}; such as {self.examples[reason]}"

    def check(self, max_rejects: float, of: str = "", least: float = 0.0) -> None:
        """Raise a UserError if too many rows break the schema.

        Args:
            max_rejects: Largest allowed share of rejected rows.
            of: Description of the rows, for the message.
            least: Share that is always allowed.
        """
        if self.rejects > max(max_rejects, least) * self.rows_read:
            (reason, _), *_ = self.reasons.most_common()
            example = ""
            if reason in self.examples:
                example = f", such as {self.examples[reason]}"
            share = self.rejects / self.rows_read
            raise UserError(
                f"{self.rejects:,} of {self.rows_read:,} rows{of} ({share:.2%}) break "
                f"the schema, over the limit max_rejects {max_rejects:.2%}; most often "
                f"{reason}{example}; fix the source file or the log, or raise "
                f"--max_rejects"
            )


def common_missing(missing: Iterable[dict[str, str]]) -> dict[str, str]:
    """Return the columns, with hints, that are missing in all of several blocks."""
    blocks = list(missing)
    if not blocks:
        return {}
    return {
        name: hint
        for name, hint in blocks[0].items()
        if all(name in block for block in blocks)
    }


def check_missing(missing: dict[str, str], what: str, input_uri: str) -> None:
    """Raise a UserError if `missing` names a column, which then no file has."""
    for name, hint in missing.items():
        raise UserError(
            f"no {what} file of {input_uri} has a column '{name}'; {hint}; correct the "
            f"source file"
        )


class Rows:
    """Rows of a frame being converted: values by column, and reasons of rejects."""

    def __init__(self, raw: pl.DataFrame, wanted: dict[str, str], uri: str) -> None:
        """Evaluate the expressions.

        Args:
            raw: Rows of the file.
            wanted: SQL expressions by target column.
            uri: File, for messages.
        """
        self.raw, self.expressions, self.uri = raw, wanted, uri
        self.evaluated, bad = evaluate(raw, wanted, uri)
        self.values: dict[str, pl.Series] = {}
        self.reasons: list[pl.Series] = []
        for where, reason in bad:
            self.reject(where, reason)

    def reject(self, where: pl.Series, reason: str) -> None:
        """Reject the rows at which `where` is true."""
        if where.any():
            self.reasons.append(
                pl.select(pl.when(where).then(pl.lit(reason))).to_series()
            )

    def _type_error(self, target: str, need: str) -> UserError:
        text, kind = self.expressions[target], self.evaluated[target].dtype
        return UserError(
            f"{self.uri}: '{text}' is {kind}, not {need}; convert it in the log, or by "
            f"an expression of SQL"
        )

    def ids(self, target: str, missing: str = "missing") -> None:
        """Store a column as ids; null words are missing.

        Args:
            target: Column to store.
            missing: Reason for rejecting rows without an id.
        """
        values, what = self.evaluated[target], self.expressions[target]
        if values.dtype.is_nested() or values.dtype.is_temporal():
            remedy = (
                "name a field of it"
                if isinstance(values.dtype, pl.Struct)
                else "explode lists of items"
            )
            raise UserError(
                f"{self.uri}: '{what}' is {values.dtype}, not text or integers; "
                f"{remedy}"
            )
        self.values[target] = ids = clean_ids(values)
        if ids.null_count():
            blank = values.is_null()
            if values.dtype == pl.String:
                blank = blank | (values.str.strip_chars() == "")
            self.reject(ids.is_null() & blank.fill_null(True), f"{what}: {missing}")
            self.reject(
                ids.is_null(),
                f"{what}: missing, written as text such as nan or null, infinite, or "
                f"no text",
            )

    def text(self, target: str) -> None:
        """Store a column as text; lists are joined by blanks, empty text is null.

        A list that is a category becomes JSON if an element has a blank, so that
        different lists stay different.
        """
        values = self.evaluated[target]
        if isinstance(values.dtype, pl.List):
            lists = values.cast(pl.List(pl.String))
            values = lists.list.join(" ", ignore_nulls=True)
            if target.startswith("cat_"):
                blank = lists.list.eval(pl.element().str.contains(r"\s")).list.any()
                values = pl.select(
                    pl.when(blank).then(as_text(lists)).otherwise(values)
                ).to_series()
        elif values.dtype.is_nested() or values.dtype == pl.Binary:
            raise self._type_error(target, "text")
        if values.dtype.is_float():
            values = _format_floats(values)
        values = values.cast(pl.String)
        if target.startswith("text_"):
            values = values.str.strip_chars()
        self.values[target] = pl.select(pl.when(values != "").then(values)).to_series()

    def time(
        self, target: str, time: Time, number: int = 0, *, past: bool = False
    ) -> None:
        """Store times as milliseconds.

        Args:
            target: Column to store.
            time: Column and notation. Without a column, the time is the position of the
                row.
            number: Index of the piece in the log, for times that are positions.
            past: Whether to reject times in the future.
        """
        if time.column is None:
            self.values[target] = self.raw[ROW] + (number << 40)
            return
        try:
            self.values[target], reason = parse_times(
                self.evaluated[target], time, time.column
            )
        except TypeError:
            unread = pl.repeat(None, len(self.raw), dtype=pl.Int64, eager=True)
            hint = suggest_unit(self.evaluated[target], time, unread)
            raise self._type_error(target, f"times as {time.notation}{hint}") from None
        if past:
            reason = reject_future(self.values[target], reason, time, time.column)
        if reason.null_count() < len(reason):
            self.reasons.append(reason)

    def known(self, name: str, time: Time | None, delay_minutes: float | None) -> None:
        """Store the time from which a label is known, null for rows without the label.

        Args:
            name: Name of the label.
            time: Column and notation of the time.
            delay_minutes: Delay after the event if there is no column.
        """
        value, stamp = self.values[f"label_{name}"], self.values["timestamp_ms"]
        target = f"known_{name}"
        is_set = value if value.dtype == pl.Boolean else value.is_not_null()
        if time is None:
            moment = stamp + round((delay_minutes or 0) * 60_000)
        else:
            moment, reason = parse_times(self.evaluated[target], time, str(time.column))
            reason = reject_future(moment, reason, time, str(time.column))
            named_reason = pl.when(is_set.fill_null(False)).then(
                reason + f" (time of the label {name})"
            )
            self.reasons.append(pl.select(named_reason).to_series())
            early = (is_set & (moment < stamp)).fill_null(False)
            self.reject(
                early, f"{time.column}: before its event, check labels.{name}.time"
            )
        self.values[target] = pl.select(pl.when(is_set).then(moment)).to_series()

    def integer(self, target: str) -> None:
        """Store a column as non-negative int32."""
        values, what = self.evaluated[target], self.expressions[target]
        number = (
            values.str.strip_chars() if values.dtype == pl.String else values
        ).cast(pl.Int64, strict=False)
        self.reject(number.is_null(), f"{what}: missing or not an integer")
        self.reject(
            ((number < 0) | (number > MAX_INT32)).fill_null(False),
            f"{what}: negative, or more than int32 holds",
        )
        self.values[target] = number.cast(pl.Int32, strict=False)

    def number(self, target: str, span: list[float] | None = None) -> None:
        """Store a column as float32 within `span`; missing values are null.

        Rows with numbers that are not finite, or whose squares are not, are rejected.
        """
        values, what = self.evaluated[target], self.expressions[target]
        if not (
            values.dtype in (pl.String, pl.Boolean, pl.Null)
            or values.dtype.is_numeric()
        ):
            raise self._type_error(target, "numbers")
        if values.dtype == pl.String:
            values = values.str.strip_chars()
            values = pl.select(pl.when(values != "").then(values)).to_series()
        self.values[target] = number = values.cast(pl.Float32, strict=False)
        remedy = f"write try_cast({what} as double) for none, cast(replace({what}, ',', '.') as double) for 12,50"
        self.reject(
            values.is_not_null() & number.is_null(), f"{what}: not a number; {remedy}"
        )
        self.reject(~number.is_finite().fill_null(True), f"{what}: not finite")
        self.reject(
            (number.abs() > LARGEST_NUMBER).fill_null(False),
            f"{what}: over {LARGEST_NUMBER:g}, which stands for none; write case when "
            f"abs(cast({what} as double)) < 1e18 then cast({what} as double) end",
        )
        if span is not None:
            out = ((number < span[0]) | (number > span[1])).fill_null(False)
            self.reject(out, f"{what}: outside {span[0]:g} to {span[1]:g}")

    def flag(self, target: str) -> None:
        """Store a column of bools, 0, 1, true or false; missing values are null."""
        values, what = self.evaluated[target], self.expressions[target]
        if not (
            values.dtype in (pl.String, pl.Boolean, pl.Null)
            or values.dtype.is_numeric()
        ):
            raise self._type_error(target, "0, 1, true or false")
        if values.dtype in (pl.Boolean, pl.Null):
            self.values[target] = values.cast(pl.Boolean)
            return
        raw = values.cast(pl.String).str.to_lowercase()
        yes, no = raw.is_in(["1", "true", "1.0"]), raw.is_in(["0", "false", "0.0"])
        bad = ~(yes | no) & raw.is_not_null() & (raw != "")
        self.reject(
            bad, f"{what}: not a bool, compare it, such as cast({what} as double) > 0"
        )
        self.values[target] = pl.select(pl.when(yes | no).then(yes)).to_series()

    def join(self, users: pa.Table | None) -> None:
        """Store the columns of the user files for the user of each row."""
        if users is None:
            return
        attributes = pl.DataFrame(users)
        ids = self.values["user_id"].to_frame("user_id")
        joined = ids.join(attributes, on="user_id", how="left", maintain_order="left")
        self.values |= {
            name: joined[name] for name in attributes.columns if name != "user_id"
        }

    def block(
        self,
        broken: Broken,
        missing: dict[str, str],
        file: str,
        piece: FilePart | None,
        schema: pa.Schema,
        unset: dict[str, Any] | None = None,
    ) -> Block:
        """Return the valid rows as a table, and the rejects.

        Args:
            broken: Lines that are no rows.
            missing: Missing columns, with hints.
            file: File, for the rejects.
            piece: Part of the file, or None.
            schema: Schema of the table.
            unset: Values of columns that the log does not have, other than null.
        """
        start = piece.start if piece else 0
        rejects = [_broken_rejects(broken, file, start)]
        defaults = {name: pl.lit(value) for name, value in (unset or {}).items()}
        values = {
            f.name: self.values.get(f.name, defaults.get(f.name, pl.lit(None)))
            for f in schema
        }
        table = self.raw.select(ROW).with_columns(**values).select(schema.names)
        if self.reasons:
            no_reason = pl.lit(None, pl.String)
            reason = pl.select(pl.coalesce(*self.reasons, no_reason)).to_series()
            is_rejected = reason.is_not_null()
            if is_rejected.any():
                rejects.append(self._row_rejects(is_rejected, reason, file, start))
                table = table.filter(~is_rejected)
        return Block(
            table.to_arrow().cast(schema),
            pa.concat_tables(rejects),
            len(self.raw) + len(broken),
            missing,
        )

    def _row_rejects(
        self, is_rejected: pl.Series, reason: pl.Series, file: str, start: int
    ) -> pa.Table:
        """Return the rejected rows as rows of `REJECTS`."""
        names = [name for name in self.raw.columns if not name.startswith("__")]
        source = pl.struct(names).struct.json_encode().str.slice(0, MAX_QUOTED_CHARS)
        rejects = self.raw.filter(is_rejected).select(
            pl.lit(file).alias("file"),
            pl.lit(start, pl.Int64).alias("piece"),
            pl.col(ROW).alias("row"),
            reason.filter(is_rejected).alias("reason"),
            source.alias("source"),
        )
        return rejects.to_arrow().cast(REJECTS)


def _broken_rejects(broken: Broken, file: str, start: int) -> pa.Table:
    """Return lines that are no rows as rows of `REJECTS`."""
    lines = [
        (file, start, number, why, json.dumps({"line": text}))
        for number, why, text in broken
    ]
    columns = zip(*lines, strict=True) if lines else [[]] * len(REJECTS)
    arrays = [pa.array(c, f.type) for c, f in zip(columns, REJECTS, strict=True)]
    return pa.table(arrays, schema=REJECTS)


def split_rows(rows: pl.DataFrame, name: str | None) -> Iterator[pl.DataFrame]:
    """Yield slices of rows with about MAX_EXPLODED_ROWS elements in a list column."""
    elements = int(rows[name].list.len().sum() or 0) if name else 0
    size = max(1, len(rows) * MAX_EXPLODED_ROWS // max(elements, MAX_EXPLODED_ROWS))
    yield from rows.iter_slices(size) if len(rows) else [rows]


def _format_floats(values: pl.Series) -> pl.Series:
    """Format floats as text, whole numbers without a point."""
    whole = values.cast(pl.Int64, strict=False)
    same = (whole.cast(values.dtype) == values) & (values.abs() < 2**53)
    text = (
        pl.when(same)
        .then(whole.cast(pl.String))
        .when(values.is_finite())
        .then(values.cast(pl.String))
    )
    return pl.select(text).to_series()


def clean_ids(values: pl.Series) -> pl.Series:
    """Normalise ids by `clean_id`, called once per value that it may change."""
    if values.dtype.is_integer():
        return values.cast(pl.String)
    if values.dtype.is_float():
        text = _format_floats(values)
    else:
        text = values.cast(pl.String, strict=False)
    is_unclean = text.str.contains(UNCLEAN_ID).fill_null(False)
    if not is_unclean.any():
        return text
    unclean = text.filter(is_unclean)
    cleaned = {value: clean_id(value) for value in unclean.unique().to_list()}
    replaced = unclean.replace_strict(cleaned, return_dtype=pl.String)
    return text.scatter(is_unclean.arg_true(), replaced)


def as_text(values: pl.Series) -> pl.Series:
    """Return texts that are equal only for equal values, whatever their types.

    1, 1.0 and, in a list, "1" have one text, as have a null field and an absent one.
    Nested values become JSON. A list of words without blanks or characters of JSON
    becomes its words, separated by blanks.
    """
    if values.dtype.is_temporal():
        return values.cast(pl.String).fill_null("")
    if not values.dtype.is_nested():
        return clean_ids(values).fill_null("")
    encoded = pl.DataFrame({"x": values}).select(pl.struct("x").struct.json_encode())
    text = encoded.to_series()
    plain = text.str.contains(PLAIN_LIST) & ~text.str.contains(TEXT_WITH_POINT)
    words = text.str.replace_all(r"(\d)\.0+\b", "$1").str.replace_all(
        r'[{}\[\]":,]+', " "
    )
    others = {each: _canonical_text(each) for each in text.filter(~plain).unique()}
    nested = text.replace_strict(others, default=None, return_dtype=pl.String)
    return pl.select(pl.when(plain).then(words).otherwise(nested)).to_series()


def _canonical_text(encoded: str) -> str:
    """Return the text of the value of `encoded`, which is JSON of {"x": value}."""
    value = _stringify_leaves(json.loads(encoded).get("x"))
    if value is None:
        return " "
    words = all(isinstance(word, str) and re.fullmatch(WORD, word) for word in value)
    if isinstance(value, list) and words:
        return " ".join([" x", *value, ""])
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _stringify_leaves(value: Any) -> Any:
    """Return a nested value with text leaves and without null fields."""
    if isinstance(value, dict):
        return {
            key: _stringify_leaves(each)
            for key, each in value.items()
            if each is not None
        }
    if isinstance(value, list):
        return [_stringify_leaves(each) for each in value]
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value)
    return re.sub(r"^(-?\d+)\.0+$", r"\1", text)


def evaluate_list(rows: pl.DataFrame, text: str, key: str, uri: str) -> pl.Series:
    """Evaluate an expression that must be a list.

    Args:
        rows: Rows of the file.
        text: Column or SQL expression.
        key: Key of the mapping, for the message.
        uri: File, for the message.

    Raises:
        UserError: If it is not a list.
    """
    evaluated, _ = evaluate(rows, {"list": text}, uri)
    values = evaluated["list"]
    if not isinstance(values.dtype, pl.List | pl.Null):
        raise UserError(
            f"{uri}: {key} is {values.dtype}, not a list; split text, such as "
            f"string_to_array({text}, ' ')"
        )
    return values.cast(pl.List(pl.String)) if values.dtype == pl.Null else values


def evaluate(rows: pl.DataFrame, wanted: dict[str, str], uri: str) -> Evaluated:
    """Evaluate SQL expressions.

    Args:
        rows: Rows of the file.
        wanted: Columns or SQL expressions, by name.
        uri: File, for messages.

    Returns:
        Values by name, null if an expression (such as a `cast`) cannot read a value,
        and masks of these values with reasons.
    """
    expressions = {
        name: _to_expression(text, rows.columns).alias(name)
        for name, text in wanted.items()
    }
    try:
        return rows.with_columns(**expressions).select(wanted.keys()), []
    except pl.exceptions.PolarsError as error:
        if len(wanted) == 1:
            return _evaluate_one(rows, *wanted.items(), uri=uri, error=error)
    results = [evaluate(rows, {name: text}, uri) for name, text in wanted.items()]
    frame = pl.concat([values for values, _ in results], how="horizontal")
    return frame, [unread for _, masks in results for unread in masks]


def _evaluate_one(
    rows: pl.DataFrame, named: tuple[str, str], *, uri: str, error: Exception
) -> Evaluated:
    """Evaluate an expression that polars cannot evaluate on all rows.

    The distinct values that it cannot read are located by bisection.
    """
    name, text = named
    expression = _to_expression(text, rows.columns).alias(VALUE)
    roots = dict.fromkeys(root_columns(text, rows.columns))
    names = [root for root in roots if root in rows.columns]
    lacks_field = isinstance(error, pl.exceptions.StructFieldNotFoundError)
    if lacks_field or pl.Null in rows.select(names).dtypes:
        nulls = pl.repeat(None, len(rows), dtype=pl.Null, eager=True)
        return pl.DataFrame({name: nulls}), []
    reason = re.split("This error occurred|You might want", str(error))[0]
    reason = " ".join(reason.split())[:200]
    refusal = UserError(
        f"{uri}: '{text}' cannot be worked out ({reason}); correct the source file, "
        f"such as by try_cast(... as double)"
    )
    try:
        rows.clear().select(expression)  # whether the types fit
        distinct = rows.select(names).unique()
    except pl.exceptions.PolarsError:
        raise refusal from None
    unread = _locate_unreadable(distinct, expression)
    if unread is None:
        raise refusal from None
    readable = distinct.with_row_index(READ).filter(~pl.col(READ).is_in(unread))
    values = rows.select(names).join(
        readable.with_columns(expression),
        on=names,
        how="left",
        nulls_equal=True,
        maintain_order="left",
    )
    why = f"{text}: a value that it cannot read; write try_cast where it may be empty"
    return values.select(pl.col(VALUE).alias(name)), [(values[READ].is_null(), why)]


def _locate_unreadable(rows: pl.DataFrame, expression: pl.Expr) -> list[int] | None:
    """Return the rows that an expression cannot read, or None for too many."""
    todo, unread, tries = [(0, len(rows))], list[int](), 0
    while todo:
        start, size = todo.pop()
        tries += 1
        try:
            rows.slice(start, size).select(expression)
        except pl.exceptions.PolarsError:
            if tries > MAX_TRIES:
                return None
            half = size // 2
            if half:
                todo += [(start, half), (start + half, size - half)]
            else:
                unread.append(start)
    return unread


def _to_expression(text: str, columns: list[str]) -> pl.Expr:
    """Return the column with this name, otherwise the SQL expression."""
    return pl.col(text) if text in columns else pl.sql_expr(text)


def check_sql(expressions: Iterable[str]) -> None:
    """Raise a ValueError for text that is neither a column nor a row expression."""
    for text in expressions:
        try:
            meta = pl.sql_expr(text).meta
        except pl.exceptions.PolarsError as error:
            if re.fullmatch(r"[^()'\"|]+", text):  # a column named like an SQL keyword
                continue
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"'{text}' is no SQL expression ({reason}); correct it, odd names in "
                f"double quotes"
            ) from error
        try:
            is_per_row = meta.is_length_preserving() or meta.is_literal()
        except pl.exceptions.PolarsError:  # `in` needs columns
            is_per_row = True
        if not is_per_row or re.search(r"(?i)\bover\s*\(", text):
            raise ValueError(
                f"'{text}' is no expression of one row, as sums are none; write one of "
                f"the columns of a row"
            )
