"""Count the ids of the events that have a row in the item or user files.

If events have `786022008` and item files `0786022008`, all rows are valid and no item
has a text. Only these counts reveal the error.
"""

from __future__ import annotations

from collections.abc import Callable

from core.errors import UserError
from core.schemas import Match

WARN_BELOW = 0.9
"""Share of matched ids below which a warning is printed."""


def matched_share(match: Match) -> float:
    """Return the smaller of the matched shares of ids and of events, 1 without ids."""
    if not match.ids:
        return 1.0
    of_ids = match.ids_matched / match.ids
    return min(of_ids, match.events_matched / max(match.events, 1))


def check_matched(
    match: Match, noun: str, min_matched: float, report: Callable[[str], None]
) -> None:
    """Warn if few ids of the events have a row in their files.

    Args:
        match: Counts of ids.
        noun: Kind of the ids: `item` or `user`.
        min_matched: Minimum share of ids, and of events, with a row.
        report: Prints a line.
    """
    share = matched_share(match)
    if share >= max(min_matched, WARN_BELOW) or not match.ids:
        return
    share_of_ids = match.ids_matched / match.ids
    share_of_events = match.events_matched / max(match.events, 1)
    line = (
        f"{match.ids_matched:,} of {match.ids:,} {noun}s ({share_of_ids:.1%}), with "
        f"{share_of_events:.1%} of the events, have a row in the {noun} files: events "
        f"have {', '.join(map(repr, match.unmatched)) or 'none'}, the {noun} files "
        f"{', '.join(map(repr, match.others)) or 'none'}"
    )
    if share < min_matched:
        raise UserError(f"{line}, below min_matched {min_matched:g}")
    report(f"warning: {line}")
