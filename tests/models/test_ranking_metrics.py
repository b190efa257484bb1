"""Ranking metrics equal brute force and scikit-learn."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from core.errors import UserError
from models.metrics import per_user_metrics
from models.metrics.ranking_metrics import (
    Histogram,
    ranking_means,
    ranking_sums,
    request_auc,
)


def draw_requests(
    seed: int, requests: int = 40
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw scores with many ties, labels that follow them, and request numbers."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 9, requests)
    request = rng.permutation(np.repeat(np.arange(requests), sizes))
    scores = rng.integers(-3, 4, len(request)) / 2
    labels = rng.random(len(request)) < 1 / (1 + np.exp(-scores))
    return torch.tensor(scores), torch.tensor(labels), torch.tensor(request)


def test_auc_within_groups_counts_the_pairs_of_one_group_over_all_batches():
    scores, labels, group = draw_requests(3)
    batches = [
        Histogram.from_batch(scores[rows], labels[rows], group[rows] % 5)
        for rows in torch.arange(len(scores)).chunk(4)
    ]
    pairs = [
        (scores[a] > scores[b]) + 0.5 * (scores[a] == scores[b])
        for a in labels.nonzero()
        for b in (~labels).nonzero()
        if group[a] % 5 == group[b] % 5
    ]

    auc = sum(batches).auc(min_groups=2)

    assert auc == pytest.approx(float(torch.cat(pairs).mean()))
    copied = Histogram.from_batch(group % 5 * 1.0, labels, group % 5)
    assert copied.auc(min_groups=2) == 0.5
    one_group = Histogram.from_batch(scores, labels, torch.zeros_like(group))
    assert math.isnan(one_group.auc(min_groups=2))


@settings(max_examples=50)
@given(st.integers(0, 10_000))
def test_auc_of_a_request_is_the_share_of_ordered_pairs(seed):
    scores, labels, request = draw_requests(seed, 6)

    auc, valid = request_auc(scores, labels, request)

    for r in range(6):
        rows = request == r
        assert bool(valid[r]) == (len(labels[rows].unique()) == 2)
        if valid[r]:
            expected = roc_auc_score(labels[rows], scores[rows])
            assert float(auc[r]) == pytest.approx(expected)


@pytest.fixture
def untied_requests() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores without ties, labels and request numbers of 200 requests."""
    scores, labels, request = draw_requests(3, 200)
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(len(scores), generator=generator, dtype=torch.float64)
    return scores + noise, labels, request


def test_metrics_equal_those_of_scikit_learn(untied_requests):
    scores, labels, request = untied_requests

    metrics = ranking_means(ranking_sums(scores[:, None], labels[:, None], request))

    assert metrics["auc"] == pytest.approx(roc_auc_score(labels, scores), rel=1e-12)
    probability = torch.sigmoid(scores)
    assert metrics["log_loss"] == pytest.approx(log_loss(labels, probability))
    rates = np.full(len(labels), float(labels.double().mean()))
    entropy = metrics["log_loss"] / log_loss(labels, rates)
    assert metrics["normalised_entropy"] == pytest.approx(entropy)
    calibration = float(probability.sum() / labels.sum())
    assert metrics["calibration"] == pytest.approx(calibration)


@pytest.mark.parametrize("sizes", [[1000] * 4, [1, 2999, 1000], [100] * 40])
@pytest.mark.parametrize(
    ("deviation", "offset"), [(30, 0), (2e-3, 0), (1e-3, 1000), (1e30, 0), (2, -7)]
)
def test_auc_is_exact_at_any_scale_and_over_batches_and_workers(
    monkeypatch, deviation, offset, sizes
):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(4000, generator=generator) * deviation + offset
    chance = torch.sigmoid((scores - offset) / deviation)
    labels = torch.rand(4000, generator=generator) < chance
    monkeypatch.setattr(per_user_metrics, "MAX_CHUNKS", 3)

    parts = [
        Histogram.from_batch(*part, None)
        for part in zip(scores.split(sizes), labels.split(sizes), strict=True)
    ]

    auc = sum(parts).auc()
    assert auc == pytest.approx(roc_auc_score(labels, scores), rel=1e-12)
    assert sum(parts[::-1]).auc() == auc
    middle = len(parts) // 2
    from_other_worker = pickle.loads(pickle.dumps(sum(parts[:middle])))
    assert (from_other_worker + sum(parts[middle:])).auc() == auc


@pytest.mark.parametrize(
    ("labels", "undefined"),
    [
        ([False, True], ["gauc"]),
        ([False] * 2, ["auc", "calibration"]),
        ([], ["log_loss"]),
    ],
)
def test_metrics_that_are_not_defined_are_nan_with_a_warning(labels, undefined):
    count = len(labels)
    scores, request = torch.rand(count), torch.arange(count)
    label = torch.tensor(labels, dtype=torch.bool)
    sums = ranking_sums(scores[:, None], label[:, None], request)
    with pytest.warns(UserWarning, match=undefined[0]) as warned:
        metrics = ranking_means(sums)
    assert all(math.isnan(metrics[name]) for name in undefined)
    text = "".join(str(warning.message) for warning in warned)
    assert all(f"{name}: " in text for name in undefined)


def test_a_score_of_nan_is_rejected():
    scores, labels = torch.tensor([[math.nan]]), torch.tensor([[True]])
    with pytest.raises(UserError, match="finite"):
        ranking_sums(scores, labels, torch.tensor([0]))
