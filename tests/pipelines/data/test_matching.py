"""Ids of two sides that do not match: how many, and what is said of them."""

from __future__ import annotations

import pytest

from models.tables import UserError
from pipelines.data.matching import Match, check_matched


def test_ids_that_have_nothing_in_common_are_shown() -> None:
    match, lines = Match(4, 3, 100, 80, ["x"], ["p", "q"]), []
    check_matched(match, "user", 0.5, lines.append)
    assert lines == [
        "warning: 3 of 4 users (75.0%), with 80.0% of the events, have a row in the user files: events have 'x', the "
        "user files 'p', 'q'; write both alike, such as with lpad, lower or regexp_replace, or check that users.user "
        "names the column with the ids of the events"
    ]


@pytest.mark.parametrize(
    ("matched", "events", "least", "outcome"),
    [
        (10, 100, 0.5, "quiet"),
        (9, 90, 0.5, "quiet"),
        (10, 89, 0.5, "warning"),  # the popular ones are missing
        (8, 100, 0.5, "warning"),
        (4, 99, 0.5, "error"),
        (10, 49, 0.5, "error"),
        (0, 0, 0, "warning"),
        (9, 90, 0.95, "error"),
    ],
)
def test_shares_by_ids_and_by_events(
    matched: int, events: int, least: float, outcome: str
) -> None:
    match, lines = Match(10, matched, 100, events), []
    if outcome == "error":
        with pytest.raises(UserError, match="--min_matched 0"):
            check_matched(match, "item", least, lines.append)
    else:
        check_matched(match, "item", least, lines.append)
        assert bool(lines) == (outcome == "warning")


def test_a_log_without_item_files_matches() -> None:
    check_matched(Match(), "item", 1, pytest.fail)
