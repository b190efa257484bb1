"""Strict speculative search equals beam search; relaxed search samples the target."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_beam import TableScorer, problems, subset
from torch import Tensor

from models.retrieval.search.beam import beam_search
from models.retrieval.search.speculative import (
    Speculation,
    SpeculativeResult,
    Tree,
    speculative_search,
)
from models.retrieval.search.trie import Trie


@dataclass
class TableTarget:
    """The target of a `TableScorer`, which counts its passes and their prefixes."""

    scorer: TableScorer
    passes: list[tuple[list[int], int, int]] = field(default_factory=list)

    def __call__(self, rows: Tensor, tree: Tree, first: int) -> list[Tensor]:
        tables = self.scorer.tables
        self.passes.append((rows.tolist(), first, len(tree.codes)))
        prefix = torch.zeros((len(rows), 1), dtype=torch.long)
        found = [tables[0][rows][:, :1]]
        for level, (parents, codes) in enumerate(
            zip(tree.parents, tree.codes, strict=True)
        ):
            prefix = prefix.gather(1, parents) * tables[level].shape[2] + codes
            found.append(tables[level + 1][rows.unsqueeze(1), prefix])
        return found[first:]


def search(
    target: TableScorer,
    draft: TableScorer,
    trie: Trie,
    k: int,
    how: Speculation,
    keys: Tensor | None = None,
) -> tuple[SpeculativeResult, TableTarget]:
    verifier = TableTarget(target)

    def drafts(rows: Tensor) -> TableScorer:
        return TableScorer([table[rows] for table in draft.tables])

    return speculative_search(
        verifier, drafts, trie, len(target.tables[0]), k, how, keys
    ), verifier


def random_tables(
    like: TableScorer, generator: torch.Generator, closeness: float
) -> TableScorer:
    """Return a draft: the target's tables with noise."""
    noisy = [
        t + (1 - closeness) * 50 * torch.randn(t.shape, generator=generator)
        for t in like.tables
    ]
    return TableScorer(noisy)


@given(
    problem=problems(),
    k=st.integers(1, 6),
    beam=st.integers(1, 5),
    draft_beam=st.integers(1, 8),
    steps=st.integers(0, 4),
    children=st.booleans(),
    closeness=st.sampled_from([0.0, 0.9, 1.0]),
    some=st.none() | st.integers(0, 9),
)
@settings(max_examples=100)
@pytest.mark.long
def test_strict_is_beam_search_with_any_draft(
    problem: Any,
    k: int,
    beam: int,
    draft_beam: int,
    steps: int,
    children: bool,
    closeness: float,
    some: int | None,
) -> None:
    """Targets have ties and scores of -inf; the search covers all or some items."""
    scorer, trie, codes = problem
    allowed = None if some is None else trie.mark_edges(subset(codes, some)[0])
    if children and any(table.isinf().any() for table in scorer.tables):
        children = False  # a node whose children are all -inf has no distribution
    draft = random_tables(scorer, torch.Generator().manual_seed(0), closeness)
    how = Speculation(beam, draft_beam, steps, children, allowed=allowed)
    found, verifier = search(scorer, draft, trie, k, how)
    items, scores = beam_search(scorer, trie, k, beam, children, allowed)
    assert found.items.tolist() == items.tolist()
    assert found.scores.tolist() == scores.tolist()
    assert found.passes.sum() == sum(len(rows) for rows, _, _ in verifier.passes)
    assert (
        len(verifier.passes) <= trie.levels
    )  # requests that stand at one length go on together
    assert bool((found.accepted <= found.drafted).all())
    assert bool(
        (found.passes + found.accepted == trie.levels).all()
    )  # a pass gets a step further than the draft


CODES = [
    (a, b, c) for a in range(3) for b in range(3) for c in range(2) if (a + b + c) % 4
]
TINY = Trie(torch.tensor(CODES), (3, 3, 2))
SAMPLES = 40_000
SOME = [True, False, True] * (len(CODES) // 3) + [True] * (len(CODES) % 3)
AMONG = TINY.mark_edges(torch.tensor(SOME))


def tables(seed: int, spread: float = 1.0) -> list[Tensor]:
    """Return log-probabilities of one request by prefix."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((1, 3), (3, 3), (9, 2))
    return [
        (spread * torch.randn(1, *shape, generator=generator)).log_softmax(-1)
        for shape in shapes
    ]


def law(
    of: list[Tensor], beam: int, codes: list[tuple[int, int, int]]
) -> dict[frozenset[tuple[int, ...]], float]:
    """Enumerate the probability of each set of items under the target.

    Every step samples `beam` pairs without replacement from the softmax over all pairs
    of a beam and a code in `codes`.
    """
    scorer = TableScorer(of)
    states = {frozenset({()}): 1.0}
    for level in range(3):
        after: Counter[frozenset[tuple[int, ...]]] = Counter()
        for beams, chance in states.items():
            pairs = sorted(
                {code[: level + 1] for code in codes if code[:level] in beams}
            )
            weights = {pair: math.exp(scorer.prefix_scores(0, pair)) for pair in pairs}
            for order in permutations(pairs, min(beam, len(pairs))):
                left, total = chance, sum(weights.values())
                for pair in order:
                    left, total = left * weights[pair] / total, total - weights[pair]
                after[frozenset(order)] += left
        states = dict(after)
    return states


def deviation(
    target: list[Tensor], draft: list[Tensor], how: Speculation, seed: int = 0
) -> float:
    """Return by how many standard deviations chi-square exceeds its expectation."""
    many = [
        TableScorer([table.expand(SAMPLES, -1, -1) for table in of])
        for of in (target, draft)
    ]
    keys = torch.arange(SAMPLES) + seed * SAMPLES
    found, _ = search(many[0], many[1], TINY, how.beam, how, keys)
    assert bool((found.passes + found.accepted == 3).all())
    seen = Counter(
        frozenset(CODES[item] for item in row if item >= 0)
        for row in found.items.tolist()
    )
    expected = law(
        target,
        how.beam,
        [
            code
            for code, there in zip(CODES, SOME, strict=True)
            if there or how.allowed is None
        ],
    )
    assert set(seen) <= set(expected)
    cells = [
        (seen[items], chance * SAMPLES)
        for items, chance in expected.items()
        if chance * SAMPLES > 5
    ]
    chi = sum((count - mean) ** 2 / mean for count, mean in cells)
    return (chi - len(cells)) / (2 * len(cells)) ** 0.5


@pytest.mark.parametrize(
    ("how", "draft"),
    [
        (Speculation(2, 2, 4, rule="exact"), tables(2)),
        (Speculation(2, 4, 4, rule="exact"), tables(2)),
        (Speculation(2, 5, 1, rule="exact"), tables(2, spread=3)),
        (Speculation(3, 4, 4, rule="exact"), tables(1)),
        (Speculation(2, 9, 2, rule="exact"), tables(3)),
        (Speculation(1, 1, 4, rule="exact"), tables(2)),
        (Speculation(1, 1, 4, rule="published"), tables(2)),
        (Speculation(1, 1, 2, rule="published"), tables(3, spread=3)),
        (Speculation(2, 4, 0, rule="published"), tables(2)),
        (Speculation(2, 4, 4, rule="exact", allowed=AMONG), tables(2)),
        (Speculation(1, 1, 4, rule="published", allowed=AMONG), tables(2)),
    ],
    ids=lambda value: (
        ""
        if isinstance(value, list)
        else f"{value.rule}-{value.beam}-{value.draft_beam}-{value.steps}{'-some' * (value.allowed is not None)}"
    ),
)
def test_relaxed_follows_the_law_of_the_target(
    how: Speculation, draft: list[Tensor]
) -> None:
    """All drafts follow it by the exact rule, one beam also by the published rule."""
    assert abs(deviation(tables(1), draft, how)) < 4


def test_the_published_rule_is_no_draw_from_the_target() -> None:
    """Four drafts for two beams: the accepted pairs do not follow the target."""
    assert deviation(tables(1), tables(2), Speculation(2, 4, 4, rule="published")) > 20
    assert (
        deviation(tables(1), tables(2), Speculation(2, 4, 4, rule="exact"), seed=1) < 4
    )


@pytest.mark.parametrize("rule", ["published", "exact"])
def test_a_draft_that_equals_the_target_is_accepted_more_often(rule: Any) -> None:
    accepted = []
    for draft in (tables(1), tables(2, spread=3)):
        many = [
            TableScorer([table.expand(500, -1, -1) for table in of])
            for of in (tables(1), draft)
        ]
        found, _ = search(
            many[0], many[1], TINY, 2, Speculation(2, 4, rule=rule), torch.arange(500)
        )
        accepted.append(float(found.accepted.sum() / found.drafted.sum()))
    assert accepted[0] > max(0.6, accepted[1] + 0.1), accepted


@given(
    problem=problems(),
    keyed=st.booleans(),
    rule=st.sampled_from(["published", "exact"]),
    k=st.integers(1, 5),
)
@settings(max_examples=25)
def test_rows_do_not_see_each_other(
    problem: Any, keyed: bool, rule: Any, k: int
) -> None:
    """A request gets the same results alone and in a batch, without repeated items."""
    scorer, trie, codes = problem
    draft = random_tables(scorer, torch.Generator().manual_seed(1), 0.9)
    users = len(scorer.tables[0])
    keys = torch.arange(users) * 7 + 3 if keyed else None
    how = Speculation(3, 4, rule=rule)
    found, _ = search(scorer, draft, trie, k, how, keys)
    for row in range(users):
        one, other = (
            TableScorer([table[row : row + 1] for table in x.tables])
            for x in (scorer, draft)
        )
        alone, _ = search(
            one, other, trie, k, how, None if keys is None else keys[row : row + 1]
        )
        assert alone.items[0].tolist() == found.items[row].tolist()
        assert alone.scores[0].tolist() == found.scores[row].tolist()
        items = [item for item in found.items[row].tolist() if item >= 0]
        assert len(set(items)) == len(items)
        for item, score in zip(items, found.scores[row].tolist(), strict=False):
            assert score == scorer.prefix_scores(row, codes[item])


def test_what_cannot_be_searched_is_refused() -> None:
    one = TableScorer(tables(1))
    for how in (Speculation(0), Speculation(1, 0), Speculation(1, steps=-1)):
        with pytest.raises(ValueError, match="need to be at least"):
            search(one, one, TINY, 1, how)
    other = Trie(torch.tensor([(a, b) for a in range(2) for b in range(2)]), (2, 2))
    with pytest.raises(ValueError, match="scores 3 codes at level 0, the trie has 2"):
        search(one, one, other, 1, Speculation(1))
