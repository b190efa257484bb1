"""Beam search equals brute force on random tries, with ties."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_trie import catalogues
from torch import Tensor

from models.retrieval.search.beam import beam_search, unconstrained_beam_search
from models.retrieval.search.topk import top_k
from models.retrieval.search.trie import Trie


@dataclass
class TableScorer:
    """A scorer that looks up log-probabilities by prefix.

    The table of level l is (B, prefixes of length l, C_l).
    """

    tables: list[Tensor]
    prefix: Tensor = field(default_factory=lambda: torch.zeros(0))
    level: int = 0

    def start(self) -> Tensor:
        self.prefix, self.level = (
            torch.zeros((len(self.tables[0]), 1), dtype=torch.long),
            0,
        )
        return self.tables[0][:, 0]

    def step(self, parents: Tensor, tokens: Tensor) -> Tensor:
        self.prefix = (
            self.prefix.gather(1, parents) * self.tables[self.level].shape[2] + tokens
        )
        self.level += 1
        rows = torch.arange(len(parents)).unsqueeze(1)
        return self.tables[self.level][rows, self.prefix]

    def prefix_scores(self, user: int, codes: tuple[int, ...]) -> float:
        total, prefix = 0.0, 0
        for level, code in enumerate(codes):
            total += float(self.tables[level][user, prefix, code])
            prefix = prefix * self.tables[level].shape[2] + code
        return total


@st.composite
def problems(draw):
    """Draw (scorer, trie, codes) with integer scores, for exact sums and ties."""
    sizes, codes = draw(catalogues())
    users = draw(st.integers(1, 3))
    values = draw(
        st.sampled_from([(-1, -2), (-1,), tuple(range(-50, 0)), (-1, -2, -math.inf)])
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    tables, prefixes = [], 1
    for size in sizes:
        choice = torch.randint(
            0, len(values), (users, prefixes, size), generator=generator
        )
        tables.append(torch.tensor(values, dtype=torch.float)[choice])
        prefixes *= size
    return TableScorer(tables), Trie(torch.tensor(codes), sizes), codes


def expected_beam(scorer, codes, user, k, beam, among=None):
    """Run beam search in plain Python, over the codes `among` if given.

    Ties go to the lexicographically first prefix.
    """
    among = codes if among is None else among
    kept = [()]
    levels = len(codes[0])
    for level in range(levels):
        prefixes = sorted({c[: level + 1] for c in among if c[:level] in kept})
        scored = [(-scorer.prefix_scores(user, p), p) for p in prefixes]
        scored = sorted(s for s in scored if s[0] != math.inf)
        kept = [p for _, p in scored[: k if level == levels - 1 else beam]]
    items = [codes.index(p) for p in kept]
    scores = [scorer.prefix_scores(user, p) for p in kept]
    return items + [-1] * (k - len(items)), scores + [-math.inf] * (k - len(items))


def subset(codes, seed):
    """Draw a mask (N,) of some items, and their codes."""
    items = torch.rand(len(codes), generator=torch.Generator().manual_seed(seed)) < 0.5
    return items, [
        code for code, there in zip(codes, items.tolist(), strict=True) if there
    ]


def check(found, scorer, codes, k, beam, among=None):
    items, scores = found
    for user in range(len(items)):
        assert (items[user].tolist(), scores[user].tolist()) == expected_beam(
            scorer, codes, user, k, beam, among
        )


@settings(max_examples=150)
@given(problems(), st.integers(1, 30))
def test_as_wide_as_the_catalogue_it_is_brute_force(problem, k):
    scorer, trie, codes = problem
    items, scores = beam_search(scorer, trie, k, beam=len(codes))
    for user in range(len(items)):
        ranked = sorted((-scorer.prefix_scores(user, c), c) for c in codes)
        best = [codes.index(c) for s, c in ranked if s != math.inf][:k]
        assert items[user].tolist() == best + [-1] * (k - len(best))
        assert len(set(best)) == len(best)
        assert scores[user, len(best) :].tolist() == [-math.inf] * (k - len(best))


@settings(max_examples=150)
@given(problems(), st.integers(1, 12), st.integers(1, 12))
def test_any_beam_keeps_the_best_prefixes_and_breaks_ties_by_code(problem, k, beam):
    scorer, trie, codes = problem
    check(beam_search(scorer, trie, k, beam), scorer, codes, k, beam)


@settings(max_examples=150)
@given(problems(), st.integers(1, 12), st.integers(1, 12), st.integers(0, 2**20))
def test_a_search_among_some_items_is_that_of_a_trie_of_these(problem, k, beam, seed):
    scorer, trie, codes = problem
    items, some = subset(codes, seed)
    check(
        beam_search(scorer, trie, k, beam, allowed=trie.mark_edges(items)),
        scorer,
        codes,
        k,
        beam,
        some,
    )
    width = math.prod(table.shape[2] for table in scorer.tables)
    check(
        unconstrained_beam_search(scorer, trie, k, width, trie.mark_edges(items)),
        scorer,
        codes,
        k,
        width,
        some,
    )


@settings(max_examples=60)
@given(problems(), st.integers(1, 12))
def test_without_the_trie_only_items_are_left_in_the_end(problem, k):
    scorer, trie, codes = problem
    width = math.prod(table.shape[2] for table in scorer.tables)
    items, scores = unconstrained_beam_search(scorer, trie, k, beam=width)
    check(
        (items, scores), scorer, codes, k, width
    )  # wide enough to drop nothing, it is the same search


def test_a_tuple_whose_every_bigram_exists_is_not_an_item():
    """A table of bigrams would admit (0, 0, 1), but no item has these codes."""
    codes = [(0, 0, 0), (1, 0, 1)]
    trie = Trie(torch.tensor(codes), (2, 2, 2))
    likes = [torch.full((1, n, 2), -5.0) for n in (1, 2, 4)]
    likes[0][0, 0, 0] = likes[1][0, 0, 0] = likes[2][
        0, 0, 1
    ] = -0.1  # the model wants (0, 0, 1)
    items, scores = beam_search(TableScorer(likes), trie, 3, beam=3)
    assert items.tolist() == [[0, 1, -1]]
    assert scores[0, 0].item() == pytest.approx(-5.2)
    assert trie.lookup(torch.tensor([[0, 0, 1]])).tolist() == [-1]
    items, _ = unconstrained_beam_search(TableScorer(likes), trie, 1, beam=1)
    assert items.tolist() == [
        [-1]
    ]  # unconstrained, the narrow beam ends at a tuple of no item


@settings(max_examples=80)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.integers(1, 50))
def test_top_k_is_a_stable_sort(values, k):
    scores = torch.tensor([values, values[::-1]], dtype=torch.float)
    position, found = top_k(scores, k)
    for row, line in enumerate(scores.tolist()):
        order = sorted(range(len(line)), key=lambda at: (-line[at], at))[:k]
        missing = k - len(order)
        assert position[row].tolist() == order + [-1] * missing
        assert found[row].tolist() == [line[at] for at in order] + [-math.inf] * missing


def test_an_empty_search_is_refused():
    trie = Trie(torch.tensor([[0]]), (1,))
    for search in (beam_search, unconstrained_beam_search):
        with pytest.raises(ValueError, match="need to be at least 1"):
            search(TableScorer([torch.zeros(1, 1, 1)]), trie, 0, 1)
