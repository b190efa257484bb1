"""Words of messages."""

from __future__ import annotations


def number_of(number: int, thing: str) -> str:
    """`1 row`, `2,000 rows`, `0 queries`, `2 searches`, `3 epochs`."""
    if number == 1:
        return f"1 {thing}"
    if thing.endswith("y"):
        return f"{number:,} {thing[:-1]}ies"
    return f"{number:,} {thing}{'es' if thing.endswith(('rch', 'tch')) else 's'}"
