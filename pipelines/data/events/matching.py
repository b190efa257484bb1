"""Whether two sides of a log mean the same ids: events with `786022008` and item files with `0786022008` are both
valid, and nothing else would tell that no item has a text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from models.storage.tables import UserError

MOST_MATCH = 0.9
"""A smaller share of matched ids is said."""


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
    """The first ids of the files."""

    @property
    def share(self) -> float:
        """The smaller of the shares of ids and of events."""
        return (
            min(
                self.ids_matched / max(self.ids, 1),
                self.events_matched / max(self.events, 1),
            )
            if self.ids
            else 1.0
        )

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
        self.unmatched = sorted([*self.unmatched, *other.unmatched])[:2]

    def record(self) -> dict[str, Any]:
        """As the manifest holds it."""
        return asdict(self)


def check_matched(
    match: Match, what: str, least: float, say: Callable[[str], None]
) -> None:
    """Says that few ids of the events are described; UserError where their share is below `least`. what: item, user"""
    if match.share >= max(least, MOST_MATCH) or not match.ids:
        return
    line = (
        f"{match.ids_matched:,} of {match.ids:,} {what}s ({match.ids_matched / match.ids:.1%}), with "
        f"{match.events_matched / max(match.events, 1):.1%} of the events, have a row in the {what} files: events have "
        f"{', '.join(map(repr, match.unmatched)) or 'none'}, the {what} files "
        f"{', '.join(map(repr, match.others)) or 'none'}; {advise(match, what)}"
    )
    if match.share < least:
        raise UserError(
            f"{line}; `prepare: {{min_matched: 0}}` in the source file, or --min_matched 0 of jobs.prepare, accepts it "
            f"(now {least:g})"
        )
    say(f"warning: {line}")


def advise(match: Match, what: str) -> str:
    """Return what to do about ids without a row, by how both sides are written."""
    column = f"check that {what}s.{what} names the column with the ids of the events"
    if match.ids_matched and not differ_in_writing(match.unmatched, match.others):
        return f"both write ids alike, so the {what} files lack the others"
    return f"write both alike, such as with lpad, lower or regexp_replace, or {column}"


def differ_in_writing(ids: list[str], others: list[str]) -> bool:
    """Return whether ids of two sides are written differently.

    They are where one side has capitals, letters, leading zeros or other characters
    that the other does not have.
    """
    first, second = (
        {kind for each in side for kind in kinds(each)} for side in (ids, others)
    )
    return bool(first) and bool(second) and first != second


def kinds(text: str) -> set[str]:
    """Return the kinds of characters of an id; zeros that lead a number are one kind."""
    found = {
        "0" if c.isdigit() else "a" if c.islower() else "A" if c.isupper() else c
        for c in text
    }
    zeros = text.startswith("0") and len(text) > 1 and text.isdigit()
    return found | ({"leading zeros"} if zeros else set())
