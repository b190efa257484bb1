"""Ids of two sides that do not match: how many, and what would make them alike."""

from __future__ import annotations

import pyarrow as pa
import pytest

from models.tables import UserError
from pipelines.data.matching import TRIED, Match, check_matched, compare, sample


@pytest.mark.parametrize(
    ("ours", "theirs", "spelling"),
    [
        ("786022{:03}", "0786022{:03}", "leading zeros"),
        ("{}.0", "{}", "a trailing .0"),
        ("b00{:03}x", "B00{:03}X", "upper and lower case"),
        ("a{}", '"a{}"', "white space and quotes"),
        ("B00{:03}X", "https://shop/dp/B00{:03}X/", "what stands before the last word"),
        ("{}", "item{}", "all but the last number"),
        ("a{}.0", "00A{}", "zeros, a trailing .0, case, white space and quotes"),
    ],
)
def test_what_would_make_ids_match_is_found(ours: str, theirs: str, spelling: str) -> None:
    ids = [ours.format(n) for n in range(1, 40)]
    match = Match(ids=40, ids_matched=1, events=400, events_matched=10)
    blocks = [pa.array([theirs.format(n) for n in some]) for some in (range(1, 20), range(20, 35), [99])]
    match.explain(ids, compare(ids, blocks))
    assert (match.spelling, match.tried, match.alike) == (spelling, 39, 34)
    number = next(n for n in range(1, 40) if ours.format(n) == match.unmatched[0])
    assert match.others == [theirs.format(number)]
    with pytest.raises(UserError) as caught:
        check_matched(match, "item", 0.5, print)
    assert str(caught.value) == (
        f"1 of 40 items (2.5%), with 2.5% of the events, have a row in the item files: events have "
        f"'{match.unmatched[0]}', the item files '{match.others[0]}'; but for {spelling}, 34 of 39 tried would match: "
        f"write both sides alike, or accept it with --min_matched 0 (now 0.5)"
    )


def test_ids_that_have_nothing_in_common_are_shown() -> None:
    match, lines = Match(ids=4, ids_matched=3, events=100, events_matched=80), []
    match.explain(["x"], compare(["x"], [pa.array(["p", "q", "r"])]))
    check_matched(match, "user", 0.5, lines.append)
    assert lines == [
        "warning: 3 of 4 users (75.0%), with 80.0% of the events, have a row in the user files: events have 'x', the "
        "user files 'p', 'q'; check that users.user names the column with the ids of the events"
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
def test_shares_by_ids_and_by_events(matched: int, events: int, least: float, outcome: str) -> None:
    match, lines = Match(10, matched, 100, events), []
    if outcome == "error":
        with pytest.raises(UserError, match="--min_matched 0"):
            check_matched(match, "item", least, lines.append)
    else:
        check_matched(match, "item", least, lines.append)
        assert bool(lines) == (outcome == "warning")


def test_a_log_without_item_files_matches() -> None:
    check_matched(Match(), "item", 1, pytest.fail)


def test_the_sample_is_bounded_and_from_all_over() -> None:
    ids = pa.array([f"{n:05}" for n in range(5 * TRIED)])
    some = sample(ids)
    assert len(some) == len(set(some)) == TRIED
    assert (some[0], some[-1]) == ("00000", f"{5 * TRIED - 1:05}")
    assert sample(pa.array([], pa.string())) == []
