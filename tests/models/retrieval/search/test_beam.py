"""Beam search equals brute force on random tries, with ties."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from models.retrieval.search import beam_search
from tests.fixtures.search_problems import (
    Codes,
    TableScorer,
    draw_subset,
    search_problems,
)

Ranking = tuple[list[int], list[float]]
"""Items and scores of one request, best first."""


def search_by_definition(
    scorer: TableScorer,
    codes: list[Codes],
    user: int,
    k: int,
    beam: int,
    allowed: list[Codes] | None = None,
) -> Ranking:
    """Return the ranking of a beam search in plain Python.

    Ties go to the lexicographically first prefix.

    Args:
        scorer: The scorer.
        codes: Codes of all items.
        user: Row of the request.
        k: Number of items.
        beam: Number of prefixes that each level but the last keeps.
        allowed: Codes of the items to search, by default all.
    """
    candidates = codes if allowed is None else allowed
    beams: list[Codes] = [()]
    levels = len(codes[0])
    for level in range(levels):
        prefixes = sorted({c[: level + 1] for c in candidates if c[:level] in beams})
        scored = [(-scorer.prefix_score(user, prefix), prefix) for prefix in prefixes]
        possible = sorted(pair for pair in scored if pair[0] != math.inf)
        is_last = level == levels - 1
        beams = [prefix for _, prefix in possible[: k if is_last else beam]]
    items = [codes.index(prefix) for prefix in beams]
    scores = [scorer.prefix_score(user, prefix) for prefix in beams]
    missing = k - len(items)
    return items + [-1] * missing, scores + [-math.inf] * missing


def check_rankings(ranked, scorer, codes, k, beam, allowed=None):
    """Assert that items and scores (B, k) are those of `search_by_definition`."""
    items, scores = ranked
    for user in range(len(items)):
        expected = search_by_definition(scorer, codes, user, k, beam, allowed)
        assert (items[user].tolist(), scores[user].tolist()) == expected


@settings(max_examples=150)
@given(search_problems(), st.integers(1, 12), st.integers(1, 12))
def test_any_beam_keeps_the_best_prefixes_and_breaks_ties_by_code(problem, k, beam):
    scorer, trie, codes = problem
    check_rankings(beam_search(scorer, trie, k, beam), scorer, codes, k, beam)


@settings(max_examples=150)
@given(search_problems(), st.integers(1, 12), st.integers(1, 12), st.integers(0, 2**20))
def test_a_restricted_search_is_the_search_of_a_trie_of_the_allowed_items(
    problem, k, beam, seed
):
    scorer, trie, codes = problem
    is_allowed, allowed = draw_subset(codes, seed)
    edges = trie.mark_edges(is_allowed)

    ranked = beam_search(scorer, trie, k, beam, allowed=edges)
    check_rankings(ranked, scorer, codes, k, beam, allowed)
