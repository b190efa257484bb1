"""Words of messages."""

from __future__ import annotations


def number_of(number: int, thing: str) -> str:
    """`1 row`, `2,000 rows`, `0 queries`, `2 searches`."""
    if number == 1:
        return f"1 {thing}"
    many = f"{thing[:-1]}ies" if thing.endswith("y") else f"{thing}es" if thing.endswith("ch") else f"{thing}s"
    return f"{number:,} {many}"
