"""How many ids of the events have a row in the item or user files.

Events with `786022008` and item files with `0786022008` are both valid, and nothing
else would show that no item has a text.
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
    """Counts of ids of the events with a row in the files that describe them, as manifests record them."""

    ids: int = 0
    ids_matched: int = 0
    events: int = 0
    """Events of these ids."""
    events_matched: int = 0
    unmatched: list[str] = field(default_factory=list)
    """The first ids without a row."""
    others: list[str] = field(default_factory=list)
    """The first ids of the files."""

    @property
    def share(self) -> float:
        """The smaller of the matched shares of ids and of events."""
        if not self.ids:
            return 1.0
        of_ids = self.ids_matched / max(self.ids, 1)
        of_events = self.events_matched / max(self.events, 1)
        return min(of_ids, of_events)

    @property
    def is_low(self) -> bool:
        """Whether a warning is printed."""
        return self.share < WARN_BELOW

    def add(self, other: Match) -> None:
        """Add the counts of other ids."""
        self.ids += other.ids
        self.ids_matched += other.ids_matched
        self.events += other.events
        self.events_matched += other.events_matched
        self.unmatched = sorted([*self.unmatched, *other.unmatched])[:2]

    def to_info(self) -> dict[str, Any]:
        """Return the entry of a manifest's `info`."""
        return asdict(self)


def check_matched(
    match: Match, noun: str, min_matched: float, report: Callable[[str], None]
) -> None:
    """Warn if few ids of the events are described.

    Args:
        match: Counts of ids.
        noun: Kind of the ids: `item` or `user`.
        min_matched: Least share of ids, and of events, with a row.
        report: Prints a line.

    Raises:
        UserError: if the share is below `min_matched`.
    """
    if match.share >= max(min_matched, WARN_BELOW) or not match.ids:
        return
    of_events = match.events_matched / max(match.events, 1)
    line = (
        f"{match.ids_matched:,} of {match.ids:,} {noun}s ({match.ids_matched / match.ids:.1%}), with "
        f"{of_events:.1%} of the events, have a row in the {noun} files: events have "
        f"{', '.join(map(repr, match.unmatched)) or 'none'}, the {noun} files "
        f"{', '.join(map(repr, match.others)) or 'none'}; {advise(match, noun)}"
    )
    if match.share < min_matched:
        raise UserError(
            f"{line}; `prepare: {{min_matched: 0}}` in the source file, or --min_matched 0 of jobs.prepare, accepts it "
            f"(now {min_matched:g})"
        )
    report(f"warning: {line}")


def advise(match: Match, noun: str) -> str:
    """Return the remedy for ids without a row, by how both sides are written."""
    column = f"check that {noun}s.{noun} names the column with the ids of the events"
    if match.ids_matched and not differ_in_writing(match.unmatched, match.others):
        return f"both write ids alike, so the {noun} files lack the others"
    return f"write both alike, such as with lpad, lower or regexp_replace, or {column}"


def differ_in_writing(ids: list[str], others: list[str]) -> bool:
    """Return whether one side has capitals, letters, leading zeros or characters that the other side lacks."""
    first = {kind for text in ids for kind in character_kinds(text)}
    second = {kind for text in others for kind in character_kinds(text)}
    return bool(first) and bool(second) and first != second


def character_kinds(text: str) -> set[str]:
    """Return the kinds of characters of an id; zeros that lead a number are one kind."""
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
