"""Item ids of a served request, as the catalogue has them."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any

from models.tables import UserError


def item_ids(column: str, values: Iterable[Any]) -> list[str]:
    """The ids as strings; an integer is the string of its digits. UserError for an entry that is neither."""
    return [value if type(value) is str else digits(column, value) for value in values]


def digits(column: str, value: Any) -> str:
    """The string of an integer id."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise UserError(f"{column} has {value!r}; an item id is a string, as in the log, or an integer")
    return str(int(value))
