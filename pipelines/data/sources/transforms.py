"""What a mapping file does to the values of a column before anything else reads them.

transforms:
  article_id: {pad: 10}                               # 108775015 becomes 0108775015
  title: {html: true}                                 # <b>Tea</b> &amp; Milk becomes Tea & Milk
  brand: {strip: true, lower: true}
  price: {decimal: ","}                               # 1.234,50 becomes 1234.50
  year: {column: title, regex: '\\((\\d{4})\\)$'}        # a column of its own, from a part of another
  market: {constant: se}                              # a column that the log does not have

Each is one polars expression for a whole frame. A value that it cannot read leaves its row to the rejects.
"""

from __future__ import annotations

import html
import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import polars as pl

from models.config import hint
from models.tables import UserError
from pipelines.data.sources.load import build

REFUSED = "__refused"
"""Column with why a transform could not read a row; null where all could."""

DECIMALS = {
    mark: rf"^[+-]?((\d+|[1-9]\d{{0,2}}([{thousands}]\d{{3}})+)([{mark}]\d*)?|[{mark}]\d+)([eE][+-]?\d+)?$"
    for mark, thousands in {",": ". '\u00a0\u202f", ".": ", '\u00a0\u202f"}.items()
}
"""What a number is by the mark before its decimals: thousands in groups of three, or all digits in one.
No group follows a zero: 0.999 is no 999."""


def decimal_key(column: str, mark: str) -> str:
    """How a mapping file says that a column's numbers have this mark."""
    return f'transforms: {{{json.dumps(column, ensure_ascii=False)}: {{decimal: "{mark}"}}}}'


TAG = r"(?s)<!--.*?-->|</?[A-Za-z][^>]*>"
"""What HTML marks text up with; not the < of a comparison."""

TEXT = (pl.String, pl.Categorical, pl.Enum)


@dataclass(frozen=True)
class Transform:
    """One column's values, made in the order of these keys."""

    column: str | None = None
    """The raw column to read; None: COLUMN itself, whose values are replaced."""
    constant: str | None = None
    """One value for all rows, instead of a raw column."""
    html: bool = False
    """true: text without HTML; each tag becomes a space, &amp; becomes &, and of white space one space is left."""
    strip: bool | str = False
    """true removes white space at both ends; a text such as `'"'` removes its characters there."""
    lower: bool = False
    """true: lower case."""
    regex: str | None = None
    """A regular expression with one group; the group of its first match is the new value. A row without a match is
    rejected."""
    decimal: str | None = None
    """The mark before the decimals of numbers: `,` reads 12,50 and 1.234,50, and `.` reads 1,234.50. A row with another
    value is rejected."""
    pad: int | None = None
    """Length to which the value is filled with zeros in front, for ids that a spreadsheet has shortened. A row with a
    longer value is rejected."""
    optional: bool = False
    """true: a value that `regex`, `decimal` or `pad` cannot read becomes empty, and its row is kept."""

    def __post_init__(self) -> None:
        can_fail = any(step is not None for step in (self.regex, self.decimal, self.pad))
        steps = self.html or self.strip or self.lower or can_fail
        if self.constant is not None and (self.column is not None or steps or self.optional):
            raise ValueError("'constant' stands for every row; give it alone, without another key")
        if self.constant is None and self.column is None and not steps:
            raise ValueError("it does nothing; give html, strip, lower, regex, decimal, pad, column or constant")
        if self.strip == "":
            raise ValueError("'strip' is empty; give the characters to leave out, or true for white space")
        if self.optional and not can_fail:
            raise ValueError("'optional' is of 'regex', 'decimal' and 'pad', which can fail; take it out")
        if self.decimal is not None and self.decimal not in DECIMALS:
            raise ValueError(
                f"decimal is '{self.decimal}'; it is ',' for numbers such as 1.234,50, or '.' for 1,234.50"
            )
        if self.pad is not None and not 1 <= self.pad <= 1000:
            raise ValueError(f"pad is {self.pad}; it is a number of characters from 1 to 1000")
        if self.regex is not None:
            groups = _groups(self.regex)
            if groups != 1:
                raise ValueError(
                    f"regex is '{self.regex}', which has {groups} groups; put one pair of brackets around what is to "
                    f"be kept, and write (?:...) for others"
                )

    def of(self, value: pl.Expr, where: str) -> tuple[pl.Expr, list[tuple[pl.Expr, str]]]:
        """The new text of a text, null and empty ones unchanged, and what it cannot read with the reason."""
        reasons: list[tuple[pl.Expr, str]] = []
        if self.html:
            value = value.str.replace_all(TAG, " ").map_elements(html.unescape, pl.String)
            value = value.str.replace_all(r"\s+", " ").str.strip_chars()
        if self.strip:
            value = value.str.strip_chars(self.strip if isinstance(self.strip, str) else None)
        if self.lower:
            value = value.str.to_lowercase()
        if self.regex is not None:
            found, empty = value.str.extract(self.regex, 1), (value == "")
            # an optional group that takes no part in a match is null too: no value
            reasons.append((~value.str.contains(self.regex) & ~empty, f"{where}: no match of regex {self.regex}"))
            value = pl.when(empty).then(value).otherwise(found)
        if self.decimal is not None:
            number = value.str.strip_chars()
            bad = ~number.str.contains(DECIMALS[self.decimal]) & (number != "")
            reasons.append((bad, f"{where}: no number with decimal '{self.decimal}'"))
            value = number.str.replace_all(rf"[^\d{self.decimal}eE+-]", "").str.replace(self.decimal, ".", literal=True)
        if self.pad is not None:
            reasons.append((value.str.len_chars() > self.pad, f"{where}: longer than pad {self.pad}"))
            value = pl.when(value == "").then(value).otherwise(value.str.pad_start(self.pad, "0"))
        if self.optional:
            value = pl.when(~pl.any_horizontal(bad.fill_null(False) for bad, _ in reasons)).then(value)
            reasons = []
        return value, reasons


def _groups(regex: str) -> int:
    """Groups of a regular expression; ValueError for one that cannot be read."""
    try:
        made = pl.select(pl.lit("").str.extract_groups(regex)).to_series().dtype
    except pl.exceptions.PolarsError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"regex is '{regex}', which cannot be read ({reason[:200]}); correct it") from error
    assert isinstance(made, pl.Struct)
    return len(made.fields)


def read_transforms(content: Any, where: str = "") -> dict[str, Transform]:
    """The transforms by the column that each makes, from a source file's plain values; ValueError for what they are
    not."""
    if not isinstance(content, dict):
        raise ValueError(f"'{where}transforms' is {content!r}; write column: {{strip: true}}")
    made = {}
    for name, value in content.items():
        key = f"{where}transforms.{name}"
        if not isinstance(name, str) or not isinstance(value, dict | Transform):
            raise ValueError(f"'{key}' is {value!r}; write column: {{strip: true}}, with the column's name in quotes")
        try:
            made[name] = value if isinstance(value, Transform) else build(Transform, value, f"{key}.")
        except ValueError as error:
            raise ValueError(str(error) if key in str(error) else f"'{key}': {error}") from error
    return made


def check_transforms(transforms: dict[str, Transform], read: Collection[str], where: str = "") -> None:
    """ValueError for a transform that makes no column which the mapping reads, or reads what another makes."""
    for name, transform in transforms.items():
        if name not in read:
            raise ValueError(
                f"'{where}transforms.{name}' makes a column that nothing reads; {hint(name, sorted(read))}"
            )
        if transform.column in transforms and transform.column != name and _is_new(transform.column, transforms):
            raise ValueError(
                f"'{where}transforms.{name}' reads '{transform.column}', which another transform makes; read the raw "
                f"column that it is made of"
            )


def _is_new(name: str, transforms: dict[str, Transform]) -> bool:
    """Whether a transform's column is no raw one."""
    transform = transforms[name]
    return transform.constant is not None or transform.column not in (None, name)


def raw_columns(names: Iterable[str], transforms: dict[str, Transform]) -> tuple[str, ...]:
    """The raw columns that the columns of these names are made of, each once."""
    made = ((name, transforms.get(name)) for name in names)
    raw = ((t.column if t and t.column else name) for name, t in made if t is None or t.constant is None)
    return tuple(dict.fromkeys(raw))


def transformed(
    rows: pl.DataFrame, transforms: dict[str, Transform], uri: str, each: Collection[str] = ()
) -> pl.DataFrame:
    """The rows with the columns that the transforms make, and with REFUSED. Of lists, which `each` names, it only makes
    copies: their elements are for `elements`."""
    if not transforms:
        return rows
    rows = rows.with_columns(
        pl.lit(transform.constant, pl.String).alias(name)
        if transform.constant is not None
        else pl.col(transform.column or name).alias(name)
        for name, transform in transforms.items()
    )
    return elements(rows, {name: t for name, t in transforms.items() if name not in each}, uri)


def elements(rows: pl.DataFrame, transforms: dict[str, Transform], uri: str) -> pl.DataFrame:
    """The rows with the values of these columns transformed. A value that cannot be read stays; REFUSED says why."""
    made: dict[str, pl.Expr] = {}
    reasons: list[tuple[pl.Expr, str]] = []
    for name, transform in transforms.items():
        if transform.constant is not None or name not in rows.columns:
            continue
        text = _text(rows, name, transform.column or name, uri)
        value, bad = transform.of(text, name)
        if bad:
            value = pl.when(pl.any_horizontal(is_bad.fill_null(False) for is_bad, _ in bad)).then(text).otherwise(value)
        made[name] = value
        reasons += bad
    before = [pl.col(REFUSED)] if REFUSED in rows.columns else []
    refused = pl.coalesce(
        *before, *(pl.when(bad).then(pl.lit(reason)) for bad, reason in reasons), pl.lit(None, pl.String)
    )
    return rows.with_columns(refused.alias(REFUSED), **made)


def _text(rows: pl.DataFrame, name: str, column: str, uri: str) -> pl.Expr:
    """The column as text; UserError with a value of it for one that is neither text nor integers."""
    dtype: Any = rows.schema[name]
    if not (dtype in TEXT or dtype.is_integer() or dtype in (pl.Null, pl.Boolean)):
        known = rows[name].drop_nulls()
        value = f", such as {known[0]!r}" if len(known) else ""
        raise UserError(
            f"{uri}: column '{column}' is {dtype}{value}, and transforms are of text and integers; take "
            f"'transforms.{name}' out of the source file, or name a column of text"
        )
    return pl.col(name).cast(pl.String)
