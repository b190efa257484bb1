"""Item ids of a served request, as the catalogue has them."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any

from models.tables import UserError


def item_ids(column: str, values: Iterable[Any]) -> list[str]:
    """The ids as strings, an integer that of its digits. UserError for an entry that is neither, and for no list."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise UserError(f"{column} is {values!r}; give a list of item ids, [] for none")
    return [value if type(value) is str else digits(column, value) for value in values]


def digits(column: str, value: Any) -> str:
    """The string of an integer id."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise UserError(f"{column} has {value!r}; an item id is a string, as in the log, or an integer")
    return str(int(value))
