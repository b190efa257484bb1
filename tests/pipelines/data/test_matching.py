"""Ids of events that item or user files do not have: when they are an error, when a
warning, and what the message advises.
"""

from __future__ import annotations

import pytest

from models.storage.tables import UserError
from pipelines.data.events.matching import Match, check_matched


@pytest.mark.parametrize(
    ("ids_matched", "unmatched", "others", "advice"),
    [
        (3, ["108", "9"], ["10", "11"], "so the user files lack the others"),
        (3, ["u9"], ["u10"], "so the user files lack the others"),
        (
            3,
            ["108775015"],
            ["0108775044"],
            "such as with lpad, lower or regexp_replace",
        ),
        (3, ["SKU1"], ["sku2"], "such as with lpad, lower or regexp_replace"),
        (3, ["a-1"], ["a1"], "such as with lpad, lower or regexp_replace"),
        (0, ["x"], ["y"], "or check that users.user names the column with the ids"),
    ],
)
def test_the_advice_fits_how_ids_are_written(
    ids_matched: int, unmatched: list[str], others: list[str], advice: str
) -> None:
    match = Match(4, ids_matched, 100, 80, unmatched, others)
    lines: list[str] = []

    check_matched(match, "user", 0, lines.append)

    (line,) = lines
    assert line.startswith(f"warning: {ids_matched} of 4 users")
    assert f"events have {', '.join(map(repr, unmatched))}, the user files" in line
    assert advice in line


@pytest.mark.parametrize(
    ("ids_matched", "events_matched", "min_matched", "outcome"),
    [
        (10, 100, 0.5, "no message"),
        (9, 90, 0.5, "no message"),
        (10, 89, 0.5, "warning"),  # popular items do not match
        (8, 100, 0.5, "warning"),
        (4, 99, 0.5, "error"),
        (10, 49, 0.5, "error"),
        (0, 0, 0, "warning"),
        (9, 90, 0.95, "error"),
    ],
)
def test_the_share_of_ids_and_of_events_decides_between_error_and_warning(
    ids_matched: int, events_matched: int, min_matched: float, outcome: str
) -> None:
    match = Match(10, ids_matched, 100, events_matched)
    lines: list[str] = []

    if outcome == "error":
        remedy = (
            r"`prepare: \{min_matched: 0\}` in the source file, or pass --min_matched 0"
        )
        with pytest.raises(UserError, match=remedy):
            check_matched(match, "item", min_matched, lines.append)
    else:
        check_matched(match, "item", min_matched, lines.append)
        assert bool(lines) == (outcome == "warning")


def test_a_log_without_item_files_has_no_message() -> None:
    check_matched(Match(), "item", 1, pytest.fail)
