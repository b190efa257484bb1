"""The fast path finds the items of the plain path in the same order."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.cpu import kernels
from models.retrieval.data import Catalogue, HistoryBatch
from models.retrieval.distillation.student import Student
from models.retrieval.students.sid_mlp import SidMlp
from models.retrieval.tokenizers.codes import add_conflict_levels
from models.retrieval.tokenizers.published import read_published
from tests.fixtures import small_retrieval
from tests.fixtures.search_problems import catalogues
from tests.fixtures.small_students import SIZES, build_student, draw_published_codes

SHARED = Path(__file__).parents[4] / "../shared/data"

make_requests = partial(small_retrieval.make_requests, longest=20)
TOLERANCE = 1e-4
"""Maximum difference of the scores of the two paths, by rounding. Items whose plain
scores differ by less may swap."""


def check_paths_agree(
    model: SidMlp, batch: HistoryBatch, k: int, beam: int, scores: str
) -> None:
    """Assert that the fast and the plain path rank alike up to rounding."""
    options = {"beam": beam, "scores": scores}
    items, plain_scores = Student.recommend(model, batch, k, **options)
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
@pytest.mark.long
def test_paths_agree_on_any_trie(catalogue, scores, k, beam, seed):
    sizes, codes = catalogue
    model = build_student(torch.tensor(codes), sizes, seed)
    batch = make_requests(5, len(codes), seed, longest=4)
    check_paths_agree(model, batch, k, beam, scores)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "library", lambda: None)
        check_paths_agree(model, batch, k, beam, scores)


@pytest.fixture(scope="module")
def large_student() -> SidMlp:
    """A student of 6000 items."""
    return build_student(draw_published_codes(6000), SIZES)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("scores", ["children", "codebook"])
@pytest.mark.parametrize(("k", "beam"), [(10, 1), (10, 10), (50, 50), (70, 20)])
def test_paths_agree_on_a_catalogue_of_realistic_shape(
    large_student, scores, k, beam, compiled, monkeypatch
):
    if not compiled:
        monkeypatch.setattr(kernels, "library", lambda: None)
    check_paths_agree(large_student, make_requests(40, 6000), k, beam, scores)


@pytest.mark.shared_data
@pytest.mark.parametrize(
    "published",
    [
        "amazon18_instruments/Instruments.index.json.gz",
        "amazon14_beauty_llm_sids/index_rqvae.json.gz",
        "amazon14_beauty_llm_sids/index_rqkmeans.json.gz",
    ],
)
def test_paths_agree_on_published_semantic_ids(published):
    codes_by_item, *_ = read_published(str(SHARED / published))
    codes = np.array(list(codes_by_item.values()))
    if len(np.unique(codes, axis=0)) < len(codes):
        codes = add_conflict_levels(codes)
    sizes = tuple(int(size) for size in codes.max(0) + 1)
    model = build_student(torch.from_numpy(codes), sizes)
    for scores, k, beam in (("children", 50, 50), ("codebook", 10, 20)):
        check_paths_agree(model, make_requests(30, len(codes)), k, beam, scores)


@pytest.mark.long
def test_paths_agree_after_training():
    """Train 60 steps towards the first item of the history."""
    model = build_student(draw_published_codes(500), SIZES, alpha=0.0)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, 3e-3, fused=True)
    for step in range(60):
        batch = make_requests(64, 500, seed=100 + step, longest=5)
        model.train()
        optimizer.zero_grad()
        model(replace(batch, target=batch.history[:, 0]))["loss"].backward()
        optimizer.step()
        model.eval()
        if step % 30 == 0:
            # cache tables of these weights, which the next steps make stale
            model.recommend(batch, 10)

    for k, beam in ((10, 50), (50, 50), (5, 3)):
        for scores in ("children", "codebook"):
            check_paths_agree(model, make_requests(40, 500), k, beam, scores)


@pytest.mark.parametrize("scores", ["children", "codebook"])
def test_both_paths_break_ties_alike(scores):
    """Zero heads give exactly equal scores for equal numbers of children."""
    model = build_student(draw_published_codes(300), SIZES)
    for head in model.decoder.heads:
        torch.nn.init.zeros_(head[-1].weight)
        torch.nn.init.zeros_(head[-1].bias)
    model.eval()
    batch = make_requests(6, 300)
    for k, beam in ((10, 50), (50, 7), (300, 300)):
        options = {"beam": beam, "scores": scores}
        items, plain_scores = Student.recommend(model, batch, k, **options)
        fast_items, fast_scores = model.recommend(batch, k, **options)
        torch.testing.assert_close(fast_scores, plain_scores, rtol=0, atol=1e-5)
        assert fast_items.tolist() == items.tolist()


def test_a_catalogue_of_one_item_is_searched():
    model = build_student(torch.tensor([[3, 0, 1]]), (4, 2, 2))
    items, scores = model.recommend(make_requests(3, 1, longest=2), 2, beam=5)
    assert items.tolist() == [[0, -1]] * 3
    assert scores[:, 1].tolist() == [-torch.inf] * 3


def test_a_search_for_no_items_and_a_trie_of_other_levels_are_rejected():
    model = build_student(torch.tensor([[3, 0, 1]]), (4, 2, 2))
    batch = make_requests(3, 1, longest=2)
    with pytest.raises(ValueError, match="k 0 and beam 5 need to be at least 1"):
        model.recommend(batch, 0, beam=5)
    model.trie = Catalogue.from_codes(torch.tensor([[0, 0]]), (2, 2)).trie
    message = r"scores \[4, 2, 2\] codes by level, the trie has \[2, 2\]"
    with pytest.raises(ValueError, match=message):
        model.recommend(batch, 2)


def test_cached_tables_do_not_have_the_precision_of_an_autocast(large_student):
    batch = make_requests(4, 500)
    before = large_student.recommend(batch, 10)
    # `eval` clears the student's tables and the encoder's
    large_student.eval()
    large_student.backbone.eval()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough_items, _ = large_student.recommend(batch, 10)

    assert rough_items.shape == (4, 10)
    items, scores = large_student.recommend(batch, 10)
    assert torch.equal(items, before[0])
    assert torch.equal(scores, before[1])
