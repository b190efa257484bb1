"""What an id is: text without blanks around it, a whole number without a point, and no word for nothing.

`clean_id` decides it for the logs that jobs.prepare reads and for the requests that are served.
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
"""White space, and what has no width."""

NOTHING = (
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
"""How tools write that there is no value, which as ids would make one user or item of many."""

WHOLE = re.compile(r"[+-]?\d+(\.0*|\.\d+[eE]\+?\d+|[eE]\+\d+)")
"""What may be a whole number, as tools write those that have been floats: `12.0`, `1.2e1`, `1e+16`."""

ODD = rf"[^!-~]|^$|^(?i:{'|'.join(map(re.escape, NOTHING))})$|^{WHOLE.pattern}$"
"""Ids that `clean_id` may change; all others are clean."""

_AROUND = re.compile(f"^[{BLANKS}]+|[{BLANKS}]+$")


def clean_id(text: str) -> str | None:
    """The id, None where the text is a word for nothing: NFC, without blanks around it."""
    text = _AROUND.sub("", unicodedata.normalize("NFC", text))
    if WHOLE.fullmatch(text):
        whole, _, rest = text.partition(".")
        if not rest.strip("0") and "e" not in text.lower():
            return whole
        number = Decimal(text)
        text = (
            format(number.to_integral_value(), "f")
            if number == number.to_integral_value()
            else text
        )
    return None if not text or text.lower() in NOTHING else text


WITHOUT_ALLOWED = "leave it out to rank all items"
"""How a request sets no `allowed`."""


def item_ids(
    column: str, values: Iterable[Any], without: str = "[] for none"
) -> list[str]:
    """Return the ids of a served request as the catalogue has them.

    Args:
        column: Name of the column or param of the request.
        values: Its value, a list of ids.
        without: Half a sentence on how to request nothing.

    Raises:
        UserError: If `values` is no list, or has an entry that is no id.
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise UserError(f"{column} is {values!r}; give a list of item ids, {without}")
    return [item_id(column, value) for value in values]


def allowed_ids(values: Iterable[Any]) -> list[str]:
    """Return the ids of the param `allowed` as the catalogue has them."""
    return item_ids("allowed", values, f"or {WITHOUT_ALLOWED}")


def item_id(column: str, value: Any) -> str:
    """One id as the catalogue has it: a string, or the digits of an integer."""
    if isinstance(value, bool) or not isinstance(value, str | Integral):
        raise UserError(
            f"{column} has {value!r}; an item id is a string, as in the log, or an integer"
        )
    text = value if isinstance(value, str) else str(int(value))
    return clean_id(text) or text
