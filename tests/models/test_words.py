"""Numbers of things in messages."""

from __future__ import annotations

from models.words import number_of


def test_one_is_singular_and_others_are_not() -> None:
    assert number_of(1, "row") == "1 row"
    assert number_of(0, "row") == "0 rows"
    assert number_of(2000, "query") == "2,000 queries"
    assert number_of(1, "query") == "1 query"
    assert number_of(3, "search") == "3 searches"
    assert number_of(2, "epoch") == "2 epochs"
    assert number_of(2, "encoder actor") == "2 encoder actors"
