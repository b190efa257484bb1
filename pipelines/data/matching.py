"""Whether two sides of a log mean the same ids: events with `786022008` and item files with `0786022008` are both
valid, and nothing else would tell that no item has a text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from models.tables import UserError

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
        f"{', '.join(map(repr, match.others)) or 'none'}; write both alike, such as with lpad, lower or "
        f"regexp_replace, or check that {what}s.{what} names the column with the ids of the events"
    )
    if match.share < least:
        raise UserError(f"{line}; --min_matched 0 accepts it (now {least:g})")
    say(f"warning: {line}")
