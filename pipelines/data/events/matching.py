"""Count the ids of the events that have a row in the item or user files.

If events have `786022008` and item files `0786022008`, all rows are valid and no item
has a text. Only these counts reveal the error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from models.storage.tables import UserError

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
        f"{', '.join(map(repr, match.others)) or 'none'}; {suggest_remedy(match, noun)}"
    )
    if match.share < min_matched:
        raise UserError(
            f"{line}; to accept this, set `prepare: {{min_matched: 0}}` in the source "
            f"file, or pass --min_matched 0 to jobs.prepare (now {min_matched:g})"
        )
    report(f"warning: {line}")


def suggest_remedy(match: Match, noun: str) -> str:
    """Return a remedy for ids without a row, depending on the format of the ids."""
    if match.ids_matched and not differ_in_format(match.unmatched, match.others):
        return f"both have the same format, so the {noun} files lack the others"
    return (
        f"convert them to one format, such as with lpad, lower or regexp_replace, or "
        f"check that {noun}s.{noun} names the column with the ids of the events"
    )


def differ_in_format(ids: list[str], others: list[str]) -> bool:
    """Return whether the ids of two lists have different kinds of characters.

    An empty list differs from no other list.
    """
    kinds = {kind for text in ids for kind in character_kinds(text)}
    other_kinds = {kind for text in others for kind in character_kinds(text)}
    return bool(kinds) and bool(other_kinds) and kinds != other_kinds


def character_kinds(text: str) -> set[str]:
    """Return the kinds of characters of an id.

    The kinds are digits, lower-case letters, capital letters, every other character,
    and zeros that lead a number.
    """
    kinds = set()
    for character in text:
        if character.isdigit():
            kinds.add("0")
        elif character.islower():
            kinds.add("a")
        elif character.isupper():
            kinds.add("A")
        else:
            kinds.add(character)
    if text.startswith("0") and len(text) > 1 and text.isdigit():
        kinds.add("leading zeros")
    return kinds
