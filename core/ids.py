"""Normalisation of ids in raw logs and served requests, and hashes of ids.

clean_id(" 12.0 ")   # "12"
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal
from numbers import Integral
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

BLANKS = (
    " \t\r\n\v\f\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004"
    "\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000\u200b\u2060\ufeff"
)
"""White space and zero-width characters."""

MAX_SERVED_ID = 1000
"""Longest item id of a served request in characters."""
MAX_DIGITS = 40
"""Longest whole number in scientific notation that is written out as an id."""

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
"""Words that tools write for missing values. As ids they would merge unrelated users or
items."""

WHOLE_NUMBER = re.compile(r"[+-]?\d+(\.0*|\.\d+[eE]\+?\d{1,3}|[eE]\+\d{1,3})")
"""Pattern of whole numbers that tools have stored as floats: `12.0`, `1.2e1`."""

UNCLEAN_ID = (
    rf"[^!-~]|^$|^(?i:{'|'.join(map(re.escape, NULL_WORDS))})$|^{WHOLE_NUMBER.pattern}$"
)
"""Pattern of ids that `clean_id` may change; all other ids are already normalised."""


def clean_id(text: str) -> str | None:
    """Normalise an id to NFC without surrounding blanks and trailing decimals.

    Returns:
        The id, or None if the text is empty or one of `NULL_WORDS`.
    """
    text = unicodedata.normalize("NFC", text).strip(BLANKS)
    if WHOLE_NUMBER.fullmatch(text):
        whole, _, fraction = text.partition(".")
        if not fraction.strip("0") and "e" not in text.lower():
            return whole
        number = Decimal(text)
        if number.adjusted() < MAX_DIGITS and number == number.to_integral_value():
            text = format(number.to_integral_value(), "f")
    if not text or text.lower() in NULL_WORDS:
        return None
    return text


def parse_item_id(value: Any) -> str:
    """Normalise the item id of a served request like the ids of the catalogue.

    Args:
        value: A string or an integer.

    Raises:
        ValueError: If the value is of another type or too long.
    """
    if isinstance(value, bool) or not isinstance(value, str | Integral):
        raise ValueError(
            f"{value!r:.200} is no item id, which is a string, as in the log, or an "
            "integer"
        )
    text = value if isinstance(value, str) else str(int(value))
    if len(text) > MAX_SERVED_ID:
        raise ValueError(
            f"an id has {len(text):,} characters, the limit is {MAX_SERVED_ID:,}"
        )
    return clean_id(text) or text


FNV_PRIME = 0x100000001B3
"""Base of the polynomial in `hash_strings`, which wraps at 64 bits."""


def hash_strings(strings: pa.Array) -> NDArray[np.int64]:
    """Return a stable, non-negative 63-bit hash of each string.

    The hash is a polynomial over the string's bytes, mixed by the finaliser of
    SplitMix64.
    """
    binary = strings.cast(pa.large_binary())
    if len(binary) == 0:
        return np.zeros(0, np.int64)
    _, offset_buffer, data_buffer = binary.buffers()
    first, last = binary.offset, binary.offset + len(binary)
    offsets = np.frombuffer(offset_buffer, np.int64)[first : last + 1]
    if offsets[-1] == offsets[0]:
        return np.zeros(len(binary), np.int64)
    # (n,) bytes of all strings, end to end
    data = np.frombuffer(data_buffer, np.uint8)[offsets[0] : offsets[-1]]
    offsets = offsets - offsets[0]
    lengths = np.diff(offsets)
    powers = np.cumprod(np.full(int(lengths.max()), FNV_PRIME, np.uint64))
    position = np.arange(len(data)) - np.repeat(offsets[:-1], lengths)
    terms = (data.astype(np.uint64) + np.uint64(1)) * powers[position]
    totals = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms)])
    value = totals[offsets[1:]] - totals[offsets[:-1]]  # (strings,)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    value = value ^ (value >> np.uint64(31))
    return (value >> np.uint64(1)).astype(np.int64)
