"""Whether two sides of a log mean the same ids: how many match, and what would make the others match.

Events with `786022008` and item files with `0786022008` are both valid, and nothing else would tell that no item
has a text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from models.tables import UserError

Say = Callable[[str], None]

MOST_MATCH = 0.9
"""A smaller share of matched ids is said."""

TRIED = 1000
"""Unmatched ids that the spellings are tried on."""

SPELLINGS: dict[str, Callable[[pl.Expr], pl.Expr]] = {
    "leading zeros": lambda ids: ids.str.strip_chars_start("0"),
    "a trailing .0": lambda ids: ids.str.replace(r"\.0+$", ""),
    "upper and lower case": lambda ids: ids.str.to_lowercase(),
    "white space and quotes": lambda ids: ids.str.replace_all("[\\s\"'\u200b\ufeff]", ""),
    "what stands before the last word": lambda ids: ids.str.extract(r"([A-Za-z0-9]+)\W*$"),
    "all but the last number": lambda ids: ids.str.extract(r"0*(\d+)\D*$"),
    "zeros, a trailing .0, case, white space and quotes": lambda ids: (
        ids.str.replace_all("[\\s\"'\u200b\ufeff]", "")
        .str.to_lowercase()
        .str.replace(r"\.0+$", "")
        .str.strip_chars_start("0")
    ),
}
"""What ids may differ in, each with what makes them alike."""


@dataclass
class Compared:
    """Unmatched ids beside those of the other side."""

    pairs: dict[str, dict[str, str]] = field(default_factory=lambda: {name: {} for name in SPELLINGS})
    """Per spelling the ids that it matches, with their partners."""
    others: list[str] = field(default_factory=list)
    """The first ids of the other side."""

    def add(self, other: Compared) -> None:
        for name, found in other.pairs.items():
            self.pairs[name] = found | self.pairs[name]
        self.others = (self.others + other.others)[:2]


def compare(ids: list[str], blocks: Iterable[pa.Array | pa.ChunkedArray]) -> Compared:
    """Which of `ids` each spelling matches with those of `blocks`."""
    found, mine = Compared(), pl.DataFrame({"id": ids}, schema={"id": pl.String})
    for block in blocks:
        theirs = pl.DataFrame({"other": pl.Series(block, dtype=pl.String)}).drop_nulls()
        pairs = {}
        for name, alike in SPELLINGS.items():
            keyed = theirs.select("other", key=alike(pl.col("other"))).unique("key", keep="first", maintain_order=True)
            both = mine.select("id", key=alike(pl.col("id"))).join(keyed, on="key")
            pairs[name] = dict(both.select("id", "other").rows())
        found.add(Compared(pairs, theirs["other"].head(2).to_list()))
    return found


def sample(ids: pa.Array) -> list[str]:
    """At most TRIED of the ids, from all over."""
    places = np.unique(np.linspace(0, len(ids) - 1, min(TRIED, len(ids))).astype(np.int64))
    return list(ids.take(pa.array(places)).to_pylist()) if len(ids) else []


@dataclass
class Match:
    """How many ids of the events have a row in the files that describe them, as manifests record it."""

    ids: int = 0
    ids_matched: int = 0
    events: int = 0
    """Events of those ids."""
    events_matched: int = 0
    unmatched: list[str] = field(default_factory=list)
    """The first ids without a row."""
    others: list[str] = field(default_factory=list)
    """The ids of the files that they could mean, or the first ones."""
    spelling: str = ""
    """What the two sides differ in, of SPELLINGS."""
    tried: int = 0
    alike: int = 0
    """Unmatched ids that the spelling was tried on, and those that it matches."""

    @property
    def share(self) -> float:
        """The smaller of the shares of ids and of events."""
        return min(self.ids_matched / max(self.ids, 1), self.events_matched / max(self.events, 1)) if self.ids else 1.0

    @property
    def doubtful(self) -> bool:
        """Whether it is to be said."""
        return self.share < MOST_MATCH

    def add(self, other: Match) -> None:
        """Adds the counts of other ids."""
        self.ids += other.ids
        self.ids_matched += other.ids_matched
        self.events += other.events
        self.events_matched += other.events_matched

    def explain(self, ids: list[str], compared: Compared) -> None:
        """Says what the two sides differ in, where a spelling matches a tenth of the sampled `ids`."""
        best = max(SPELLINGS, key=lambda name: len(compared.pairs[name]))  # of equal ones the first
        pairs = dict(sorted(compared.pairs[best].items()))
        self.tried, self.unmatched, self.others = len(ids), ids[:2], compared.others
        if 10 * len(pairs) >= len(ids) > 0:
            self.spelling, self.alike = best, len(pairs)
            self.unmatched, self.others = list(pairs)[:1], list(pairs.values())[:1]

    def record(self) -> dict[str, Any]:
        """As the manifest holds it."""
        return asdict(self)


def _quoted(ids: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in ids) or "none"


def check_matched(match: Match, what: str, least: float, say: Say) -> None:
    """Says that few ids of the events are described; UserError where their share is below `least`. what: item, user"""
    if match.share >= max(least, MOST_MATCH) or not match.ids:
        return
    line = (
        f"{match.ids_matched:,} of {match.ids:,} {what}s ({match.ids_matched / match.ids:.1%}), with "
        f"{match.events_matched / max(match.events, 1):.1%} of the events, have a row in the {what} files: events have "
        f"{_quoted(match.unmatched)}, the {what} files {_quoted(match.others)}"
    )
    if match.spelling:
        line += (
            f"; but for {match.spelling}, {match.alike:,} of {match.tried:,} tried would match: write both sides alike"
        )
    else:
        line += f"; check that {what}s.{what} names the column with the ids of the events"
    if match.share < least:
        raise UserError(f"{line}, or accept it with --min_matched 0 (now {least:g})")
    say(f"warning: {line}")
