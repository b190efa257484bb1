"""Speculative search: strict is beam search whatever the draft says, relaxed draws what the target gives."""

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
from test_beam import TableScorer, problems
from torch import Tensor

from models.retrieval.search.beam import beam_search
from models.retrieval.search.speculative import Found, Speculation, Tree, speculative_search
from models.retrieval.search.trie import Trie


@dataclass
class TableTarget:
    """The target of a `TableScorer`; counts its passes and what they cover."""

    scorer: TableScorer
    passes: list[tuple[list[int], int, int]] = field(default_factory=list)

    def __call__(self, rows: Tensor, tree: Tree, first: int) -> list[Tensor]:
        tables = self.scorer.tables
        self.passes.append((rows.tolist(), first, len(tree.codes)))
        prefix = torch.zeros((len(rows), 1), dtype=torch.long)
        found = [tables[0][rows][:, :1]]
        for level, (parents, codes) in enumerate(zip(tree.parents, tree.codes, strict=True)):
            prefix = prefix.gather(1, parents) * tables[level].shape[2] + codes
            found.append(tables[level + 1][rows.unsqueeze(1), prefix])
        return found[first:]


def search(
    target: TableScorer, draft: TableScorer, trie: Trie, k: int, how: Speculation, keys: Tensor | None = None
) -> tuple[Found, TableTarget]:
    verifier = TableTarget(target)

    def drafts(rows: Tensor) -> TableScorer:
        return TableScorer([table[rows] for table in draft.tables])

    return speculative_search(verifier, drafts, trie, len(target.tables[0]), k, how, keys), verifier


def random_tables(like: TableScorer, generator: torch.Generator, closeness: float) -> TableScorer:
    """A draft: the target's tables but for noise."""
    noisy = [t + (1 - closeness) * 50 * torch.randn(t.shape, generator=generator) for t in like.tables]
    return TableScorer(noisy)


@given(
    problem=problems(), k=st.integers(1, 6), beam=st.integers(1, 5), draft_beam=st.integers(1, 8),
    steps=st.integers(0, 4), children=st.booleans(), closeness=st.sampled_from([0.0, 0.9, 1.0]),
)  # fmt: skip
@settings(max_examples=400, deadline=None)
def test_strict_is_beam_search_with_any_draft(
    problem: Any, k: int, beam: int, draft_beam: int, steps: int, children: bool, closeness: float
) -> None:
    """Items, scores and ties, of targets with many equal scores and some that are -inf."""
    scorer, trie, _ = problem
    if children and any(table.isinf().any() for table in scorer.tables):
        children = False  # a node whose children are all -inf has no distribution
    draft = random_tables(scorer, torch.Generator().manual_seed(0), closeness)
    how = Speculation(beam, draft_beam, steps, children)
    found, verifier = search(scorer, draft, trie, k, how)
    items, scores = beam_search(scorer, trie, k, beam, children=children)
    assert found.items.tolist() == items.tolist()
    assert found.scores.tolist() == scores.tolist()
    assert found.passes.sum() == sum(len(rows) for rows, _, _ in verifier.passes)
    assert len(verifier.passes) <= trie.levels  # requests that stand at one length go on together
    assert bool((found.accepted <= found.drafted).all())
    assert bool((found.passes + found.accepted == trie.levels).all())  # a pass gets a step further than the draft
