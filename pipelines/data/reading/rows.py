"""Rows of a raw file to rows of a table: SQL expressions, then what each column must be, vectorised over a frame.

A row that breaks the schema goes to the rejects with its first reason, which names the log's own column.
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
from pipelines.data.reading.read import LONGEST_QUOTE, ROW, Broken, FilePart, roots
from pipelines.data.reading.times import Time, moments, reject_future, suggest_unit
from pipelines.data.schemas import REJECTS

EXPLODED_ROWS = 1 << 18  # rows per block after lists are exploded
LAST_INT32 = 2**31 - 1
MOST_TRIES = 2000  # of a block, in search of values that an expression cannot read
VALUE, READ = "__value", "__read"
WORD = r"[^{}\[\]\":,\s\\]+"
"""Text without blanks, escapes or the characters that structure JSON."""
PLAIN_LIST = rf'^\{{"x":\[(?:"{WORD}"(?:,"{WORD}")*|[-+.\deE]+(?:,[-+.\deE]+)*)?\]\}}$'
"""JSON of a list of words or of numbers."""
TEXT_WITH_POINT = r'"[^"]*\d\.0'
"""JSON with a text such as v1.0, whose end is not a whole number's."""
Evaluated = tuple[pl.DataFrame, list[tuple[pl.Series, str]]]
"""Values by name, and where a `cast` could not read one, with the reason."""


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
    """Counts of the rows that were read and rejected, with reasons."""

    rows_read: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    """The first rejected row of each reason: where and what."""

    @classmethod
    def from_block(cls, block: Block) -> Rejected:
        found = cls(block.rows_read, Counter(block.rejects["reason"].to_pylist()))
        if found.reasons:
            for row in (
                pl.DataFrame(block.rejects)
                .unique("reason", keep="first", maintain_order=True)
                .to_dicts()
            ):
                piece = f" of the piece at {row['piece']:,}" if row["piece"] else ""
                place = f"{row['file']} row {row['row']:,}{piece} (from 0, without header and blank lines)"
                found.examples[row["reason"]] = f"{place}: {row['source'][:200]}"
        return found

    def add(self, other: Rejected) -> None:
        """Add the counts of `other`; the result does not depend on the order."""
        self.rows_read += other.rows_read
        self.reasons.update(other.reasons)
        for reason, example in other.examples.items():
            self.examples[reason] = min(example, self.examples.get(reason, example))

    @property
    def rejects(self) -> int:
        return self.reasons.total()

    def lines(self) -> Iterator[str]:
        """Yield one line per reason."""
        for reason, rows in self.reasons.most_common():
            yield f"{pluralize(rows, 'row')}, {reason}; such as {self.examples[reason]}"

    def check(self, max_rejects: float, of: str = "", least: float = 0.0) -> None:
        """Raise UserError if more than a share `max_rejects` and more than `least` rows
        were rejected.

        Args:
            of: Name of the rows in messages.
        """
        if self.rejects > max(max_rejects, least) * self.rows_read:
            (reason, _), *_ = self.reasons.most_common()
            raise UserError(
                f"{self.rejects:,} of {self.rows_read:,} rows{of} ({self.rejects / self.rows_read:.2%}) break the "
                f"schema, over the limit max_rejects {max_rejects:.2%}; most often {reason}"
                f"{', such as ' * (reason in self.examples)}{self.examples.get(reason, '')}; fix the source file or "
                f"the log, or raise --max_rejects"
            )


def common(missing: Iterable[dict[str, str]]) -> dict[str, str]:
    """Return the columns that are missing in all files."""
    every = list(missing)
    return (
        {
            name: hint
            for name, hint in every[0].items()
            if all(name in each for each in every)
        }
        if every
        else {}
    )


def check_missing(missing: dict[str, str], what: str, input_uri: str) -> None:
    """Raise UserError for a column that no file has."""
    for name, hint in missing.items():
        raise UserError(
            f"no {what} file of {input_uri} has a column '{name}'; {hint}; correct the source file"
        )


class Rows:
    """Rows of a frame on their way to a table: values by target column, and why rows are rejected. `wanted` are the
    expressions by target."""

    def __init__(self, raw: pl.DataFrame, wanted: dict[str, str], uri: str) -> None:
        self.raw, self.wanted, self.uri = raw, wanted, uri
        self.made, bad = evaluate(raw, wanted, uri)
        self.values: dict[str, pl.Series] = {}
        self.reasons: list[pl.Series] = []
        for where, reason in bad:
            self.reject(where, reason)

    def reject(self, where: pl.Series, reason: str) -> None:
        if where.any():
            self.reasons.append(
                pl.select(pl.when(where).then(pl.lit(reason))).to_series()
            )

    def _refuse(self, target: str, need: str) -> UserError:
        text, kind = self.wanted[target], self.made[target].dtype
        return UserError(
            f"{self.uri}: '{text}' is {kind}, not {need}; convert it in the log, or by an expression of SQL"
        )

    def ids(self, target: str, missing: str = "missing") -> None:
        """Add an id as text; words for missing values become null.

        Args:
            missing: Reason for rejecting a row without the id.
        """
        values, what = self.made[target], self.wanted[target]
        if values.dtype.is_nested() or values.dtype.is_temporal():
            remedy = (
                "name a field of it"
                if isinstance(values.dtype, pl.Struct)
                else "explode lists of items"
            )
            raise UserError(
                f"{self.uri}: '{what}' is {values.dtype}, not text or integers; {remedy}"
            )
        self.values[target] = made = clean_ids(values)
        if made.null_count():
            blank = (
                values.is_null() | (values.str.strip_chars() == "")
                if values.dtype == pl.String
                else values.is_null()
            )
            self.reject(made.is_null() & blank.fill_null(True), f"{what}: {missing}")
            self.reject(
                made.is_null(),
                f"{what}: missing, written as text such as nan or null, infinite, or no text",
            )

    def text(self, target: str) -> None:
        """Store a column as text, of lists the elements joined by blanks; empty text is null.

        A list that is a category becomes JSON where an element has a blank, so that other elements are another value.
        """
        values = self.made[target]
        if isinstance(values.dtype, pl.List):
            lists = values.cast(pl.List(pl.String))
            values = lists.list.join(" ", ignore_nulls=True)
            if target.startswith("cat_"):
                blank = lists.list.eval(pl.element().str.contains(r"\s")).list.any()
                values = pl.select(
                    pl.when(blank).then(as_text(lists)).otherwise(values)
                ).to_series()
        elif values.dtype.is_nested() or values.dtype == pl.Binary:
            raise self._refuse(target, "text")
        values = (_floats(values) if values.dtype.is_float() else values).cast(
            pl.String
        )
        values = values.str.strip_chars() if target.startswith("text_") else values
        self.values[target] = pl.select(pl.when(values != "").then(values)).to_series()

    def time(
        self, target: str, time: Time, number: int = 0, *, past: bool = False
    ) -> None:
        """Store times as milliseconds.

        Without a column the time is the place of the row in the piece `number`. `past`: times in the future are
        rejected, as those of events.
        """
        if time.column is None:
            self.values[target] = self.raw[ROW] + (number << 40)
            return
        try:
            self.values[target], reason = moments(self.made[target], time, time.column)
        except TypeError:
            unread = pl.repeat(None, len(self.raw), dtype=pl.Int64, eager=True)
            hint = suggest_unit(self.made[target], time, unread)
            raise self._refuse(target, f"times as {time.written}{hint}") from None
        if past:
            reason = reject_future(self.values[target], reason, time, time.column)
        if reason.null_count() < len(reason):
            self.reasons.append(reason)

    def known(self, name: str, time: Time | None, delay_minutes: float | None) -> None:
        """Add the time from which a label is known, null where the label is not set."""
        value, stamp, target = (
            self.values[f"label_{name}"],
            self.values["timestamp_ms"],
            f"known_{name}",
        )
        set_ = value if value.dtype == pl.Boolean else value.is_not_null()
        if time is None:
            moment = stamp + round((delay_minutes or 0) * 60_000)
        else:
            moment, reason = moments(self.made[target], time, str(time.column))
            reason = reject_future(moment, reason, time, str(time.column))
            said = pl.when(set_.fill_null(False)).then(
                reason + f" (time of the label {name})"
            )
            self.reasons.append(pl.select(said).to_series())
            early = (set_ & (moment < stamp)).fill_null(False)
            self.reject(
                early, f"{time.column}: before its event, check labels.{name}.time"
            )
        self.values[target] = pl.select(pl.when(set_).then(moment)).to_series()

    def integer(self, target: str) -> None:
        values, what = self.made[target], self.wanted[target]
        number = (
            values.str.strip_chars() if values.dtype == pl.String else values
        ).cast(pl.Int64, strict=False)
        self.reject(number.is_null(), f"{what}: missing or not an integer")
        self.reject(
            ((number < 0) | (number > LAST_INT32)).fill_null(False),
            f"{what}: negative, or more than int32 holds",
        )
        self.values[target] = number.cast(pl.Int32, strict=False)

    def number(self, target: str, span: list[float] | None = None) -> None:
        """Store a column as float32 within `span`, null where the log has none.

        Rows with numbers that are not finite, or whose squares are not, are rejected.
        """
        values, what = self.made[target], self.wanted[target]
        if not (
            values.dtype in (pl.String, pl.Boolean, pl.Null)
            or values.dtype.is_numeric()
        ):
            raise self._refuse(target, "numbers")
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
        """Add a bool read from bool, 0, 1, true or false; null if the log has none."""
        values, what = self.made[target], self.wanted[target]
        if not (
            values.dtype in (pl.String, pl.Boolean, pl.Null)
            or values.dtype.is_numeric()
        ):
            raise self._refuse(target, "0, 1, true or false")
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
        """Join the columns of the user files."""
        if users is not None:
            known, mine = (
                pl.DataFrame(users),
                self.values["user_id"].to_frame("user_id"),
            )
            found = mine.join(known, on="user_id", how="left", maintain_order="left")
            self.values |= {
                name: found[name] for name in known.columns if name != "user_id"
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
        """Return the rows as a table of the schema, and the rejects.

        Args:
            unset: Value of columns without values.
        """
        start, rows = piece.start if piece else 0, len(self.raw)
        lines = [
            (file, start, number, why, json.dumps({"line": text}))
            for number, why, text in broken
        ]
        columns = zip(*lines, strict=True) if lines else [[]] * len(REJECTS)
        rejects = [
            pa.table(
                [pa.array(c, f.type) for c, f in zip(columns, REJECTS, strict=True)],
                schema=REJECTS,
            )
        ]
        nothing = {name: pl.lit(value) for name, value in (unset or {}).items()}
        values = {
            f.name: self.values.get(f.name, nothing.get(f.name, pl.lit(None)))
            for f in schema
        }
        made = self.raw.select(ROW).with_columns(**values).select(schema.names)
        reason = (
            pl.select(pl.coalesce(*self.reasons, pl.lit(None, pl.String))).to_series()
            if self.reasons
            else None
        )
        if reason is not None and reason.null_count() < rows:
            lost, names = (
                reason.is_not_null(),
                [name for name in self.raw.columns if not name.startswith("__")],
            )
            said = self.raw.filter(lost).select(
                pl.lit(file).alias("file"),
                pl.lit(start, pl.Int64).alias("piece"),
                pl.col(ROW).alias("row"),
                reason.filter(lost).alias("reason"),
                pl.struct(names)
                .struct.json_encode()
                .str.slice(0, LONGEST_QUOTE)
                .alias("source"),
            )
            rejects.append(said.to_arrow().cast(REJECTS))
            made = made.filter(~lost)
        return Block(
            made.to_arrow().cast(schema),
            pa.concat_tables(rejects),
            rows + len(broken),
            missing,
        )


def slices(rows: pl.DataFrame, name: str | None) -> Iterator[pl.DataFrame]:
    """Yield slices of rows whose lists have about EXPLODED_ROWS elements in all."""
    elements = int(rows[name].list.len().sum() or 0) if name else 0
    size = max(1, len(rows) * EXPLODED_ROWS // max(elements, EXPLODED_ROWS))
    yield from rows.iter_slices(size) if len(rows) else [rows]


def _floats(values: pl.Series) -> pl.Series:
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
    """Apply `clean_id` once per distinct value."""
    if values.dtype.is_integer():
        return values.cast(pl.String)
    text = (
        _floats(values)
        if values.dtype.is_float()
        else values.cast(pl.String, strict=False)
    )
    odd = text.str.contains(UNCLEAN_ID).fill_null(False)
    if not odd.any():
        return text
    strange = text.filter(odd)
    known = {value: clean_id(value) for value in strange.unique().to_list()}
    return text.scatter(
        odd.arg_true(), strange.replace_strict(known, return_dtype=pl.String)
    )


def as_text(values: pl.Series) -> pl.Series:
    """Return texts that are equal only for equal values, whatever types a file gives the values.

    1, 1.0 and, in a list, "1" have one text, as have a null field and an absent one. Nested values become JSON. A list
    of words without blanks or characters of JSON becomes its words, separated by blanks.
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
    others = {each: _canonical(each) for each in text.filter(~plain).unique()}
    nested = text.replace_strict(others, default=None, return_dtype=pl.String)
    return pl.select(pl.when(plain).then(words).otherwise(nested)).to_series()


def _canonical(encoded: str) -> str:
    """Return the text of the value of `encoded`, which is JSON of {"x": value}."""
    value = _as_texts(json.loads(encoded).get("x"))
    if value is None:
        return " "
    words = all(isinstance(word, str) and re.fullmatch(WORD, word) for word in value)
    if isinstance(value, list) and words:
        return " ".join([" x", *value, ""])
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _as_texts(value: Any) -> Any:
    """Return a nested value with its leaves as text and without null fields."""
    if isinstance(value, dict):
        return {key: _as_texts(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_as_texts(each) for each in value]
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value)
    return re.sub(r"^(-?\d+)\.0+$", r"\1", text)


def evaluate_list(rows: pl.DataFrame, text: str, key: str, uri: str) -> pl.Series:
    """Evaluate an expression as lists.

    Raises:
        UserError: names the `key` of an expression without lists.
    """
    made, _ = evaluate(rows, {"list": text}, uri)
    kind = made["list"].dtype
    if not isinstance(kind, pl.List | pl.Null):
        raise UserError(
            f"{uri}: {key} is {kind}, not a list; split text, such as string_to_array({text}, ' ')"
        )
    return made["list"].cast(pl.List(pl.String)) if kind == pl.Null else made["list"]


def evaluate(rows: pl.DataFrame, wanted: dict[str, str], uri: str) -> Evaluated:
    """Evaluate expressions by name; values that fail, in a `cast` for instance, are
    null with a reason.
    """
    made = {
        name: _expression(text, rows.columns).alias(name)
        for name, text in wanted.items()
    }
    try:
        return rows.with_columns(**made).select(wanted.keys()), []
    except pl.exceptions.PolarsError as error:
        if len(wanted) == 1:
            return _evaluate_one(rows, *wanted.items(), uri=uri, error=error)
    each = [evaluate(rows, {name: text}, uri) for name, text in wanted.items()]
    return pl.concat([found for found, _ in each], how="horizontal"), [
        why for _, bad in each for why in bad
    ]


def _evaluate_one(
    rows: pl.DataFrame, named: tuple[str, str], *, uri: str, error: Exception
) -> Evaluated:
    """Evaluate an expression that fails on some rows, finding the failing values by
    bisection.
    """
    name, text = named
    made = _expression(text, rows.columns).alias(VALUE)
    names = [
        root
        for root in dict.fromkeys(roots(text, rows.columns))
        if root in rows.columns
    ]
    if (
        isinstance(error, pl.exceptions.StructFieldNotFoundError)
        or pl.Null in rows.select(names).dtypes
    ):
        return pl.DataFrame(
            {name: pl.repeat(None, len(rows), dtype=pl.Null, eager=True)}
        ), []
    reason = " ".join(
        re.split("This error occurred|You might want", str(error))[0].split()
    )[:200]
    refusal = UserError(
        f"{uri}: '{text}' cannot be worked out ({reason}); correct the source file, such as by try_cast(... as double)"
    )
    try:
        rows.clear().select(made)  # whether the types fit
        different = rows.select(names).unique()
    except pl.exceptions.PolarsError:
        raise refusal from None
    todo, bad, tries = [(0, len(different))], list[int](), 0
    while todo:
        start, size = todo.pop()
        tries += 1
        try:
            different.slice(start, size).select(made)
        except pl.exceptions.PolarsError:
            if tries > MOST_TRIES:
                raise refusal from None
            half = size // 2
            todo += [(start, half), (start + half, size - half)] if half else []
            bad += [] if half else [start]
    known = (
        different.with_row_index(READ)
        .filter(~pl.col(READ).is_in(bad))
        .with_columns(made)
    )
    found = rows.select(names).join(
        known, on=names, how="left", nulls_equal=True, maintain_order="left"
    )
    why = f"{text}: a value that it cannot read; write try_cast where it may be empty"
    return found.select(pl.col(VALUE).alias(name)), [(found[READ].is_null(), why)]


def _expression(text: str, columns: list[str]) -> pl.Expr:
    """Return the column of that name, or else the SQL expression."""
    return pl.col(text) if text in columns else pl.sql_expr(text)


def check_sql(expressions: Iterable[str]) -> None:
    """Raise ValueError for text that is neither a column name nor a row-wise
    expression.
    """
    for text in expressions:
        try:
            meta = pl.sql_expr(text).meta
        except pl.exceptions.PolarsError as error:
            if re.fullmatch(
                r"[^()'\"|]+", text
            ):  # a column with the name of a word of SQL
                continue
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"'{text}' is no SQL expression ({reason}); correct it, odd names in double quotes"
            ) from error
        try:
            of_rows = meta.is_length_preserving() or meta.is_literal()
        except pl.exceptions.PolarsError:  # `in` asks for columns
            of_rows = True
        if not of_rows or re.search(r"(?i)\bover\s*\(", text):
            raise ValueError(
                f"'{text}' is no expression of one row, as sums are none; write one of the columns of a row"
            )
