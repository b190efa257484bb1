"""Normalisation of ids: trimmed text, whole numbers without a point, no null words.

`clean_id` is applied to raw logs by jobs.prepare and to served requests.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from decimal import Decimal
from numbers import Integral
from typing import Any

from models.storage.tables import UserError

BLANKS = " \t\r\n\v\f\x1c-\x1f\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\u200b\u2060\ufeff"
"""White space and zero-width characters, for a regular expression."""

NULL_WORDS = (
    "nan",
    "null",
    "(null)",
    "none",
    "nil",
    "na",
    "n/a",
    "<na>",
    "#n/a",
    "\\n",
    "nat",
    "undefined",
    "-",
    "--",
)
"""Words that tools write for missing values. As ids they would merge many users or
items."""

WHOLE_NUMBER = re.compile(r"[+-]?\d+(\.0*|\.\d+[eE]\+?\d+|[eE]\+\d+)")
"""Whole numbers in the notation of tools that stored them as floats: `12.0`,
`1.2e1`."""

UNCLEAN_ID = (
    rf"[^!-~]|^$|^(?i:{'|'.join(map(re.escape, NULL_WORDS))})$|^{WHOLE_NUMBER.pattern}$"
)
"""Pattern of ids that `clean_id` may change. All other ids are clean."""

_AROUND = re.compile(f"^[{BLANKS}]+|[{BLANKS}]+$")


def clean_id(text: str) -> str | None:
    """Normalise an id: NFC, trimmed, whole numbers without a point.

    Returns:
        The id, or None if the text is empty or a null word.
    """
    text = _AROUND.sub("", unicodedata.normalize("NFC", text))
    if WHOLE_NUMBER.fullmatch(text):
        whole, _, fraction = text.partition(".")
        if not fraction.strip("0") and "e" not in text.lower():
            return whole
        number = Decimal(text)
        if number == number.to_integral_value():
            text = format(number.to_integral_value(), "f")
    if not text or text.lower() in NULL_WORDS:
        return None
    return text


WITHOUT_ALLOWED = "leave it out to rank all items"
"""Remedy in messages about the param `allowed`."""


def parse_item_ids(
    column: str, values: Iterable[Any], without: str = "[] for none"
) -> list[str]:
    """Return the ids of a served request in the form of the catalogue.

    Args:
        column: Name of the column or param of the request.
        values: Its value, a list of ids.
        without: How to request no ids, for the message.

    Raises:
        UserError: If `values` is not a list of ids.
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise UserError(f"{column} is {values!r}; give a list of item ids, {without}")
    return [parse_item_id(column, value) for value in values]


def parse_allowed(values: Iterable[Any]) -> list[str]:
    """Return the ids of the param `allowed` in the form of the catalogue."""
    return parse_item_ids("allowed", values, f"or {WITHOUT_ALLOWED}")


def parse_item_id(column: str, value: Any) -> str:
    """Return an id in the form of the catalogue.

    Args:
        column: Name of the column or param of the request.
        value: A string or an integer.

    Raises:
        UserError: If `value` has another type.
    """
    if isinstance(value, bool) or not isinstance(value, str | Integral):
        raise UserError(
            f"{column} has {value!r}; an item id is a string, as in the log, or an "
            f"integer"
        )
    text = value if isinstance(value, str) else str(int(value))
    return clean_id(text) or text
