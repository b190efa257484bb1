"""The fast path finds the items of the plain path in the same order."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.loaded_model import build_model
from models.retrieval.data import Catalogue, HistoryBatch
from models.retrieval.distillation.student import Student
from models.retrieval.sid_mlp.sid_mlp import SidMlp
from tests.fixtures import small_retrieval
from tests.fixtures.search_problems import catalogues
from tests.fixtures.trainings import CASES

make_requests = partial(small_retrieval.make_requests, longest=20)
TOLERANCE = 1e-4
"""Maximum difference of the scores of the two paths, by rounding. Items whose plain
scores differ by less may swap."""


def check_paths_agree(
    model: SidMlp, batch: HistoryBatch, k: int, beam: int, scores: str
) -> None:
    """Assert that the fast and the plain path rank alike up to rounding."""
    options = {"beam": beam, "scores": scores}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SidMlp, "search", Student.search)
        items, plain_scores = model.recommend(batch, k, **options)
    fast_items, fast_scores = model.recommend(batch, k, **options)

    torch.testing.assert_close(
        fast_scores, plain_scores, rtol=TOLERANCE, atol=TOLERANCE
    )
    assert ((fast_items == -1) == (items == -1)).all()
    gaps = plain_scores.diff().abs()  # (B, k - 1), between neighbouring ranks
    for row, rank in (items != fast_items).nonzero().tolist():
        neighbours = gaps[row, max(rank - 1, 0) : rank + 1].tolist()
        # the item after the last rank is not ranked, and may tie with the last one
        assert rank == k - 1 or min(neighbours) < TOLERANCE, (
            f"rank {rank} differs, but its score has no tie: {neighbours}"
        )


@settings(max_examples=60)
@given(
    catalogues(),
    st.sampled_from(["children", "codebook"]),
    st.integers(1, 12),
    st.sampled_from([1, 2, 3, 5, 10, 50]),
    st.integers(0, 5),
)
@pytest.mark.exhaustive
def test_paths_agree_on_any_trie(problem, scores, k, beam, seed):
    sizes, codes = problem
    torch.manual_seed(seed)
    catalogue = Catalogue.from_codes(torch.tensor(codes), sizes)
    model: Any = build_model(CASES["sid_mlp"], catalogue).eval()
    for parameter in model.decoder.heads.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.5)
    batch = make_requests(5, len(codes), seed, longest=4)
    check_paths_agree(model, batch, k, beam, scores)
