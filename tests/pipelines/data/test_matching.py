"""Ids of two sides that do not match: how many, and what is said of them."""

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
    match, lines = Match(4, ids_matched, 100, 80, unmatched, others), []
    check_matched(match, "user", 0, lines.append)
    (line,) = lines
    assert line.startswith(f"warning: {ids_matched} of 4 users")
    assert f"events have {', '.join(map(repr, unmatched))}, the user files" in line
    assert advice in line


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
        remedy = (
            r"`prepare: \{min_matched: 0\}` in the source file, or pass --min_matched 0"
        )
        with pytest.raises(UserError, match=remedy):
            check_matched(match, "item", least, lines.append)
    else:
        check_matched(match, "item", least, lines.append)
        assert bool(lines) == (outcome == "warning")


def test_a_log_without_item_files_matches() -> None:
    check_matched(Match(), "item", 1, pytest.fail)
