"""Even codes: the least cost of all even assignments, and fewer items with equal codes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from models.retrieval.tokenizers.residual import encode, finished
from models.retrieval.tokenizers.rqvae import RqvaeConfig, fit
from models.retrieval.tokenizers.sinkhorn import spread, transport


@pytest.mark.parametrize("seed", range(4))
def test_the_plan_is_that_of_plain_sinkhorn(seed: int) -> None:
    draw = np.random.default_rng(seed)
    points, centres = draw.normal(size=(30, 3)), draw.normal(size=(8, 3))
    cost = ((points[:, None] - centres[None]) ** 2).sum(2)
    plan = np.exp(-(2 * (cost - cost.min()) / (cost.max() - cost.min()) - 1) / 0.05)
    for _ in range(50):
        plan /= plan.sum(0) * 8
        plan /= plan.sum(1, keepdims=True) * 30
    assert transport(torch.tensor(points), torch.tensor(centres), 0.05).tolist() == plan.argmax(1).tolist()


def test_the_last_codes_that_differ_cost_the_least() -> None:
    generator = torch.Generator().manual_seed(3)
    codebooks = torch.randn(2, 6, 3, generator=generator)
    vectors = codebooks[0, 0] + 0.3 * torch.randn(4, 3, generator=generator)
    codes = spread(vectors, codebooks, torch.zeros(4, 2, dtype=torch.long))
    cost = torch.cdist((vectors - codebooks[0, 0]).double(), codebooks[1].double()).square()
    least = min(sum(float(cost[i, k]) for i, k in enumerate(some)) for some in itertools.permutations(range(6), 4))
    assert float(cost[torch.arange(4), codes[:, 1]].sum()) == pytest.approx(least)


def test_codes_are_used_evenly_where_the_nearest_is_the_same_for_all() -> None:
    generator = torch.Generator().manual_seed(0)
    points = 5 + 0.1 * torch.randn(64, 4, generator=generator)
    centres = torch.randn(16, 4, generator=generator)
    assert torch.bincount(transport(points, centres, 0.003), minlength=16).tolist() == pytest.approx([4] * 16, abs=2)


def test_items_with_equal_codes_are_spread_and_others_stay() -> None:
    generator = torch.Generator().manual_seed(1)
    codebooks = torch.stack([10 * torch.randn(8, 4, generator=generator), torch.randn(8, 4, generator=generator)])
    vectors = codebooks[0][torch.arange(18) % 3] + 0.2 * torch.randn(18, 4, generator=generator)
    codes, _ = encode(vectors, codebooks)
    assert len(codes.unique(dim=0)) < 18
    after = spread(vectors, codebooks, codes)
    assert len(after.unique(dim=0)) == 18
    assert torch.equal(after[:, 0], codes[:, 0])
    again = spread(vectors, codebooks, after)
    assert torch.equal(again, after)


def test_a_tokenizer_with_even_last_codes_has_fewer_collisions() -> None:
    generator = torch.Generator().manual_seed(2)
    centres = torch.randn(12, 8, generator=generator)
    vectors = centres[torch.arange(240) % 12] + 0.05 * torch.randn(240, 8, generator=generator)
    settings = {"levels": 3, "codebook_size": 16, "latent": 4, "hidden": [16], "epochs": 20, "batch_size": 120}
    plain, even = (
        finished(fit(vectors, RqvaeConfig(**settings, sinkhorn=epsilon))).codes for epsilon in (0.0, 0.003)
    )  # fmt: skip
    assert len(plain.unique(dim=0)) < 200
    assert len(even.unique(dim=0)) > len(plain.unique(dim=0)) + 20
    with pytest.raises(ValueError, match=r"rqvae.sinkhorn is -1; it must be 0 \(off\) or more"):
        RqvaeConfig(sinkhorn=-1)
