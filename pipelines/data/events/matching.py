"""Count the ids of the events that have a row in the item or user files.

If events have `786022008` and item files `0786022008`, all rows are valid and no item
has a text. Only these counts reveal the error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from core.errors import UserError

WARN_BELOW = 0.9
"""Share of matched ids below which a warning is printed."""


@dataclass
class Match:
    """Counts of distinct ids and their events with a row in item or user files."""

    ids: int = 0
    ids_matched: int = 0
    events: int = 0
    events_matched: int = 0
    unmatched: list[str] = field(default_factory=list)
    """The first ids of the events without a row."""
    others: list[str] = field(default_factory=list)
    """The first ids of the files."""

    @property
    def share(self) -> float:
        """The smaller of the matched shares of ids and of events, 1 without ids."""
        if not self.ids:
            return 1.0
        of_ids = self.ids_matched / max(self.ids, 1)
        of_events = self.events_matched / max(self.events, 1)
        return min(of_ids, of_events)

    @property
    def is_low(self) -> bool:
        """Whether the share is so low that a warning is printed."""
        return self.share < WARN_BELOW

    def add(self, other: Match) -> None:
        """Add the counts of `other`, whose ids are different ones."""
        self.ids += other.ids
        self.ids_matched += other.ids_matched
        self.events += other.events
        self.events_matched += other.events_matched
        self.unmatched = sorted([*self.unmatched, *other.unmatched])[:2]

    def to_info(self) -> dict[str, Any]:
        """Return the counts as an entry of a manifest's `info`."""
        return asdict(self)


def check_matched(
    match: Match, noun: str, min_matched: float, report: Callable[[str], None]
) -> None:
    """Warn if few ids of the events have a row in their files.

    Args:
        match: Counts of ids.
        noun: Kind of the ids: `item` or `user`.
        min_matched: Minimum share of ids, and of events, with a row.
        report: Prints a line.

    Raises:
        UserError: if the share is below `min_matched`.
    """
    if match.share >= max(min_matched, WARN_BELOW) or not match.ids:
        return
    share_of_ids = match.ids_matched / match.ids
    share_of_events = match.events_matched / max(match.events, 1)
    line = (
        f"{match.ids_matched:,} of {match.ids:,} {noun}s ({share_of_ids:.1%}), with "
        f"{share_of_events:.1%} of the events, have a row in the {noun} files: events "
        f"have {', '.join(map(repr, match.unmatched)) or 'none'}, the {noun} files "
        f"{', '.join(map(repr, match.others)) or 'none'}"
    )
    if match.share < min_matched:
        raise UserError(f"{line}, below --min_matched {min_matched:g}")
    report(f"warning: {line}")
