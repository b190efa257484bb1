"""Strict speculative search equals beam search; relaxed search samples the target."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import compress, permutations, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.retrieval.atspeed.speculative import (
    Speculation,
    SpeculativeResult,
    Tree,
    speculative_search,
)
from models.retrieval.search import Trie, beam_search
from tests.fixtures.search_problems import (
    Codes,
    TableScorer,
    draw_subset,
    search_problems,
)


@dataclass
class TableTarget:
    """The target of a `TableScorer`, which records the rows of each pass."""

    scorer: TableScorer
    passes: list[list[int]] = field(default_factory=list)
    """Rows of the requests of each pass."""

    def __call__(self, rows: Tensor, tree: Tree, first: int) -> list[Tensor]:
        """Return the log-probabilities of the tree's levels from `first` on."""
        tables = self.scorer.tables
        self.passes.append(rows.tolist())
        prefix = torch.zeros((len(rows), 1), dtype=torch.long)
        log_probs = [tables[0][rows][:, :1]]
        for level, (parents, codes) in enumerate(tree):
            size = tables[level].shape[2]
            prefix = prefix.gather(1, parents) * size + codes
            log_probs.append(tables[level + 1][rows.unsqueeze(1), prefix])
        return log_probs[first:]


def search(
    target: TableScorer,
    draft: TableScorer,
    trie: Trie,
    k: int,
    speculation: Speculation,
    keys: Tensor | None = None,
) -> tuple[SpeculativeResult, list[list[int]]]:
    """Run a speculative search.

    Returns:
        The result, and the rows of the requests of each pass of the target.
    """
    verifier = TableTarget(target)
    users = len(target.tables[0])
    result = speculative_search(
        verifier, draft.select_rows, trie, users, k, speculation, keys
    )
    return result, verifier.passes


def add_noise(
    target: TableScorer, generator: torch.Generator, closeness: float
) -> TableScorer:
    """Return a draft: the target's tables with noise, none for a closeness of 1."""
    std = (1 - closeness) * 50
    return TableScorer(
        [
            table + std * torch.randn(table.shape, generator=generator)
            for table in target.tables
        ]
    )


@given(
    problem=search_problems(),
    k=st.integers(1, 6),
    beam=st.integers(1, 5),
    draft_beam=st.integers(1, 8),
    steps=st.integers(0, 4),
    children=st.booleans(),
    closeness=st.sampled_from([0.0, 0.9, 1.0]),
    subset_seed=st.none() | st.integers(0, 9),
)
@settings(max_examples=100)
@pytest.mark.exhaustive
def test_strict_search_equals_beam_search_with_any_draft(
    problem, k, beam, draft_beam, steps, children, closeness, subset_seed
):
    """Targets have ties and scores of -inf; the search covers all or some items."""
    scorer, trie, codes = problem
    allowed = None
    if subset_seed is not None:
        allowed = trie.mark_edges(draw_subset(codes, subset_seed)[0])
    if any(table.isinf().any() for table in scorer.tables):
        children = False  # a node whose children are all -inf has no distribution
    draft = add_noise(scorer, torch.Generator().manual_seed(0), closeness)
    speculation = Speculation(beam, draft_beam, steps, children, allowed=allowed)

    result, passes = search(scorer, draft, trie, k, speculation)

    items, scores = beam_search(scorer, trie, k, beam, children, allowed)
    assert result.items.tolist() == items.tolist()
    assert result.scores.tolist() == scores.tolist()
    assert result.passes.sum() == sum(map(len, passes))
    # requests whose beams have the same length share a pass
    assert len(passes) <= trie.levels
    assert bool((result.accepted <= result.drafted).all())
    # each pass verifies the accepted steps and adds one step
    assert bool((result.passes + result.accepted == trie.levels).all())


CODES = [
    codes for codes in product(range(3), range(3), range(2)) if sum(codes) % 4 != 0
]
"""Codes of 14 items of the 18 possible ones."""
TRIE = Trie(torch.tensor(CODES), (3, 3, 2))
SAMPLES = 40_000
IS_ALLOWED = [True, False, True] * 4 + [True, True]
ALLOWED = TRIE.mark_edges(torch.tensor(IS_ALLOWED))


def draw_tables(seed: int, spread: float = 1.0) -> list[Tensor]:
    """Return the log-probabilities of one request by prefix, for each level."""
    generator = torch.Generator().manual_seed(seed)
    tables = []
    for num_prefixes, size in ((1, 3), (3, 3), (9, 2)):
        logits = spread * torch.randn(1, num_prefixes, size, generator=generator)
        tables.append(logits.log_softmax(-1))
    return tables


def repeat_request(tables: list[Tensor], count: int) -> TableScorer:
    """Return the scorer of `count` requests with equal tables."""
    return TableScorer([table.expand(count, -1, -1) for table in tables])


def enumerate_outcomes(
    target: list[Tensor], beam: int, codes: list[tuple[int, int, int]]
) -> dict[frozenset[Codes], float]:
    """Return the probability of each set of items under the target.

    Every step samples `beam` pairs without replacement from the softmax over all pairs
    of a beam and a code in `codes`.
    """
    scorer = TableScorer(target)
    outcomes: dict[frozenset[Codes], float] = {frozenset({()}): 1.0}
    for level in range(3):
        following: Counter[frozenset[Codes]] = Counter()
        for beams, probability in outcomes.items():
            pairs = sorted({c[: level + 1] for c in codes if c[:level] in beams})
            weights = {pair: math.exp(scorer.prefix_score(0, pair)) for pair in pairs}
            for order in permutations(pairs, min(beam, len(pairs))):
                order_probability, remaining = probability, sum(weights.values())
                for pair in order:
                    order_probability *= weights[pair] / remaining
                    remaining -= weights[pair]
                following[frozenset(order)] += order_probability
        outcomes = dict(following)
    return outcomes


def chi_square_excess(
    target: list[Tensor], draft: list[Tensor], speculation: Speculation, seed: int = 0
) -> float:
    """Return by how many standard deviations chi-square exceeds its expectation.

    Chi-square compares `SAMPLES` searches with the probabilities of the target.
    """
    keys = torch.arange(SAMPLES) + seed * SAMPLES
    result, _ = search(
        repeat_request(target, SAMPLES),
        repeat_request(draft, SAMPLES),
        TRIE,
        speculation.beam,
        speculation,
        keys,
    )
    assert bool((result.passes + result.accepted == 3).all())
    counts: Counter[frozenset[Codes]] = Counter()
    for row in result.items.tolist():
        counts[frozenset(CODES[item] for item in row if item >= 0)] += 1

    codes = CODES
    if speculation.allowed is not None:
        codes = list(compress(CODES, IS_ALLOWED))
    probabilities = enumerate_outcomes(target, speculation.beam, codes)
    assert set(counts) <= set(probabilities)
    chi_square, num_cells = 0.0, 0
    for items, probability in probabilities.items():
        mean = probability * SAMPLES
        if mean > 5:
            chi_square += (counts[items] - mean) ** 2 / mean
            num_cells += 1
    return (chi_square - num_cells) / (2 * num_cells) ** 0.5


def name_case(value: Any) -> str:
    """Return the id of a parameter: the options of a speculation, "" for a draft."""
    if isinstance(value, list):
        return ""
    name = f"{value.beam}-{value.draft_beam}-{value.steps}"
    return name if value.allowed is None else f"{name}-some"


@pytest.mark.parametrize(
    ("speculation", "draft"),
    [
        (Speculation(1, 1, 4), draw_tables(2)),
        (Speculation(1, 1, 2), draw_tables(3, spread=3)),
        (Speculation(2, 4, 0), draw_tables(2)),
        (Speculation(2, 4, 0, allowed=ALLOWED), draw_tables(2)),
        (Speculation(1, 1, 4, allowed=ALLOWED), draw_tables(2)),
    ],
    ids=name_case,
)
def test_relaxed_search_samples_the_distribution_of_the_target(speculation, draft):
    """The published rule does so for one beam, and without drafts for all."""
    assert abs(chi_square_excess(draw_tables(1), draft, speculation)) < 4
