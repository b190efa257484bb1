"""The fast path finds the items of the plain path in the same order."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_trie import catalogues
from torch import Tensor

from benchmarks.decode import random_codes
from models.cpu import kernels
from models.retrieval.data import Catalogue, HistoryBatch
from models.retrieval.decoders.sid_mlp import SidMlpConfig
from models.retrieval.students.sid_mlp import SidMlp
from models.retrieval.tokenizers.codes import add_conflict_levels
from models.retrieval.tokenizers.published import read_published
from tests.fixtures import small_retrieval

SHARED = Path(__file__).parents[4] / "../shared/data"

TEACHER = {
    "d_model": 16,
    "d_ff": 24,
    "num_heads": 2,
    "d_kv": 8,
    "num_encoder_layers": 2,
    "num_decoder_layers": 1,
    "n_user_tokens": 2,
}
SMALL = {"attention_heads": 2, "attention_width": 24, "ffn_width": 32, "head_width": 20}
requests = partial(small_retrieval.make_requests, longest=20)
CLOSE = 1e-4
"""Scores of the two paths differ by rounding alone; two items whose plain scores are
nearer than this may swap."""


def student(
    codes: Tensor, sizes: tuple[int, ...], seed: int = 0, **options: Any
) -> SidMlp:
    """Build a student with random weights whose scores are far from uniform."""
    torch.manual_seed(seed)
    config = SidMlpConfig(**{"teacher_model": TEACHER, **SMALL, **options})
    model = SidMlp(config, Catalogue.from_codes(codes, sizes))
    for name, parameter in model.named_parameters():
        if name.startswith("decoder.heads") and parameter.dim() == 2:
            torch.nn.init.normal_(parameter.data, std=0.5)
    return model.eval()


def same(model: SidMlp, batch: HistoryBatch, k: int, beam: int, scores: str) -> None:
    """Scores equal by rank up to rounding; items equal in order, but where scores by
    rank leave it to rounding.
    """
    items, plain = model.recommend(batch, k, beam=beam, path="plain", scores=scores)
    found, fast = model.recommend(batch, k, beam=beam, path="fast", scores=scores)
    torch.testing.assert_close(fast, plain, rtol=CLOSE, atol=CLOSE)
    assert ((found == -1) == (items == -1)).all()
    for row in (items != found).any(1).nonzero().flatten().tolist():
        gap = plain[row].diff().abs()
        for at in (items[row] != found[row]).nonzero().flatten().tolist():
            near = [
                float(gap[other]) for other in (at - 1, at) if 0 <= other < len(gap)
            ]
            assert at == k - 1 or min(near) < CLOSE, (
                f"rank {at} differs and its score stands alone: {near}"
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
def test_any_trie(catalogue, scores, k, beam, seed):
    sizes, codes = catalogue
    model, batch = (
        student(torch.tensor(codes), sizes, seed),
        requests(5, len(codes), seed, longest=4),
    )
    same(model, batch, k, beam, scores)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "library", lambda: None)
        same(model, batch, k, beam, scores)


def table_7(items: int) -> Tensor:
    """Return codes that branch like published catalogues.

    There are 256 first codes; prefixes mostly have one child from the third level on.
    """
    return random_codes(items, torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def real_shape() -> SidMlp:
    return student(table_7(6000), (256, 256, 256, 256))


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("scores", ["children", "codebook"])
@pytest.mark.parametrize(("k", "beam"), [(10, 1), (10, 10), (50, 50), (70, 20)])
def test_the_shape_of_a_real_catalogue(
    real_shape, scores, k, beam, compiled, monkeypatch
):
    if not compiled:
        monkeypatch.setattr(kernels, "library", lambda: None)
    same(real_shape, requests(40, 6000), k, beam, scores)


@pytest.mark.skipif(not SHARED.is_dir(), reason="real logs are not on this machine")
@pytest.mark.parametrize(
    "published",
    [
        "amazon18_instruments/Instruments.index.json.gz",
        "amazon14_beauty_llm_sids/index_rqvae.json.gz",
        "amazon14_beauty_llm_sids/index_rqkmeans.json.gz",
    ],
)
def test_real_catalogues(published):
    """Use published semantic IDs with a conflict code."""
    codes = np.array(list(read_published(str(SHARED / published))[0].values()))
    if len(np.unique(codes, axis=0)) < len(codes):
        codes = add_conflict_levels(codes)
    model = student(
        torch.from_numpy(codes), tuple(int(size) for size in codes.max(0) + 1)
    )
    for scores, k, beam in (("children", 50, 50), ("codebook", 10, 20)):
        same(model, requests(30, len(codes)), k, beam, scores)


@pytest.mark.long
def test_a_trained_student():
    """Train a hundred steps towards the first item of the history."""
    model = student(table_7(500), (256, 256, 256, 256), alpha=0.0)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], 3e-3, fused=True
    )
    for step in range(60):
        batch = requests(64, 500, seed=100 + step, longest=5)
        model.train()
        optimizer.zero_grad()
        model(replace(batch, target=batch.history[:, 0]))["loss"].backward()
        optimizer.step()
        model.eval()
        if step % 30 == 0:
            model.recommend(
                batch, 10
            )  # a search with these weights, which the next steps leave behind
    for k, beam in ((10, 50), (50, 50), (5, 3)):
        for scores in ("children", "codebook"):
            same(model, requests(40, 500), k, beam, scores)


@pytest.mark.parametrize("scores", ["children", "codebook"])
def test_equal_scores_are_broken_alike(scores):
    """Zero heads give scores that tie to the last bit for equal numbers of children."""
    model = student(table_7(300), (256, 256, 256, 256))
    for head in model.decoder.heads:
        torch.nn.init.zeros_(head[-1].weight)
        torch.nn.init.zeros_(head[-1].bias)
    model.eval()
    batch = requests(6, 300)
    for k, beam in ((10, 50), (50, 7), (300, 300)):
        items, plain = model.recommend(batch, k, beam=beam, path="plain", scores=scores)
        found, fast = model.recommend(batch, k, beam=beam, path="fast", scores=scores)
        torch.testing.assert_close(fast, plain, rtol=0, atol=1e-5)
        assert found.tolist() == items.tolist()


def test_one_item_and_bad_sizes():
    model = student(torch.tensor([[3, 0, 1]]), (4, 2, 2))
    items, scores = model.recommend(requests(3, 1, longest=2), 2, beam=5)
    assert items.tolist() == [[0, -1]] * 3
    assert scores[:, 1].tolist() == [-torch.inf] * 3
    with pytest.raises(ValueError, match="k 0 and beam 5 need to be at least 1"):
        model.recommend(requests(3, 1, longest=2), 0, beam=5)
    model.trie = Catalogue.from_codes(torch.tensor([[0, 0]]), (2, 2)).trie
    with pytest.raises(
        ValueError,
        match=r"scores \[4, 2, 2\] codes by level, the trie has \[2, 2\]; give",
    ):
        model.recommend(requests(3, 1, longest=2), 2)


def test_without_counting_it_is_the_same_search(real_shape, monkeypatch):
    """No shape depends on values, as on a GPU and in an exported program."""
    batch = requests(20, 6000)
    expected = {
        scores: real_shape.recommend(batch, 10, scores=scores)
        for scores in ("children", "codebook")
    }
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for scores, (items, values) in expected.items():
        found, others = real_shape.recommend(batch, 10, scores=scores)
        torch.testing.assert_close(others, values, rtol=CLOSE, atol=CLOSE)
        assert found.tolist() == items.tolist()


def test_what_is_kept_is_not_of_an_autocast_precision(real_shape):
    batch = requests(4, 500)
    before = real_shape.recommend(batch, 10)
    for model in (
        real_shape,
        real_shape.backbone,
    ):  # the student's tables and the encoder's
        model.eval()  # forgets them
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough, _ = real_shape.recommend(batch, 10)
    assert rough.shape == (4, 10)
    for ours, first in zip(real_shape.recommend(batch, 10), before, strict=True):
        assert torch.equal(ours, first)
