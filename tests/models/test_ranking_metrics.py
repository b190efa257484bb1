"""Ranking metrics equal brute force and scikit-learn, also added over batches."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from models.metrics import ranking_metrics
from models.metrics.ranking_metrics import (
    METRIC_NAMES,
    Histogram,
    ranking_means,
    ranking_sums,
    request_auc,
)
from models.storage.tables import UserError


def pairs_auc(scores: list[float], labels: list[int]) -> float:
    """Compute the share of (positive, negative) pairs in order; ties count as half."""
    won = [
        (a > b) + 0.5 * (a == b)
        for a, p in zip(scores, labels, strict=True)
        if p
        for b, n in zip(scores, labels, strict=True)
        if not n
    ]
    return sum(won) / len(won) if won else math.nan


def random_requests(
    seed: int, requests: int = 40
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    request = rng.permutation(
        np.repeat(np.arange(requests), rng.integers(1, 9, requests))
    )
    scores = rng.integers(-3, 4, len(request)) / 2  # many ties
    labels = rng.random(len(request)) < 1 / (1 + np.exp(-scores))
    return torch.tensor(scores), torch.tensor(labels), torch.tensor(request)


@settings(max_examples=50)
@given(st.integers(0, 10_000))
def test_auc_of_a_request_is_the_share_of_ordered_pairs(seed):
    scores, labels, request = random_requests(seed, 6)
    auc, valid = request_auc(scores, labels, request)
    for r in range(6):
        mine = request == r
        want = pairs_auc(scores[mine].tolist(), labels[mine].tolist())
        assert bool(valid[r]) == (not math.isnan(want))
        if valid[r]:
            assert float(auc[r]) == pytest.approx(want)
            assert float(auc[r]) == pytest.approx(
                roc_auc_score(labels[mine], scores[mine])
            )


def test_constant_scores_are_half_and_requests_of_one_class_are_counted_out():
    scores = torch.tensor([1.0, 1.0, 1.0, 0.2, 0.9, 0.5, 0.5, 3.0])
    labels = torch.tensor([1, 0, 0, 0, 1, 1, 1, 0]).bool()
    request = torch.tensor([0, 0, 0, 1, 1, 2, 2, 3])
    auc, valid = request_auc(scores, labels, request)
    assert valid.tolist() == [True, True, False, False]
    assert auc[:2].tolist() == [0.5, 1.0]
    metrics = ranking_means(ranking_sums(scores, labels, request))
    assert metrics["gauc"] == pytest.approx(0.75)
    assert metrics["gauc_by_impressions"] == pytest.approx((3 * 0.5 + 2 * 1.0) / 5)
    assert metrics["requests"] == 4
    assert metrics["requests_one_class"] == 2


def test_sums_of_batches_add_up_to_the_whole_and_match_scikit_learn():
    scores, labels, request = random_requests(3, 200)
    scores = scores + torch.randn(
        len(scores), generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    whole = ranking_means(ranking_sums(scores, labels, request))
    assert tuple(whole) == METRIC_NAMES
    total: dict[str, Any] = {}
    for begin in range(0, 200, 37):
        mine = (request >= begin) & (request < begin + 37)
        for name, value in ranking_sums(
            scores[mine], labels[mine], request[mine] - begin
        ).items():
            total[name] = total.get(name, 0) + value
    parts = ranking_means(total)
    assert parts == pytest.approx(whole, rel=1e-12)
    exact = roc_auc_score(labels, scores)
    assert whole["auc"] == pytest.approx(exact, rel=1e-12)
    assert whole["auc_error"] == 0
    probability = torch.sigmoid(scores)
    assert whole["log_loss"] == pytest.approx(log_loss(labels, probability))
    rate = float(labels.double().mean())
    assert whole["normalised_entropy"] == pytest.approx(
        whole["log_loss"] / log_loss(labels, np.full(len(labels), rate))
    )
    assert whole["calibration"] == pytest.approx(
        float(probability.sum() / labels.sum())
    )


def test_calibration_before_and_after_what_is_added_to_logits():
    scores, labels, request = random_requests(5)
    added = math.log(0.1)
    whole = ranking_sums(scores + added, labels, request, "like/", added)
    parts = [
        ranking_sums(scores[m] + added, labels[m], request[m], "like/", added)
        for m in (request < 9, request > 8)
    ]
    found = ranking_means(whole, "like/")
    for name, logits in (
        ("calibration", scores + added),
        ("calibration_uncorrected", scores),
    ):
        chances = [1 / (1 + math.exp(-logit)) for logit in logits.tolist()]
        assert found[f"like/{name}"] == pytest.approx(sum(chances) / int(labels.sum()))
    together = ranking_means(
        {name: parts[0][name] + parts[1][name] for name in whole}, "like/"
    )
    assert together["like/calibration_uncorrected"] == pytest.approx(
        found["like/calibration_uncorrected"]
    )
    (told, _) = ranking_metrics.summarize(found, ("auc",))
    assert told.split()[-4::2] == ["calibration", "calibration_uncorrected"]


def clicks(
    deviation: float, count: int = 4000, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits with this deviation that predict the labels weakly."""
    generator = torch.Generator().manual_seed(0)
    scores = (
        torch.randn(count, generator=generator, dtype=torch.float64) * deviation
        + offset
    )
    labels = torch.rand(count, generator=generator) < torch.sigmoid(
        (scores - offset) / deviation
    )
    return scores, labels


@pytest.mark.parametrize(
    ("deviation", "offset"), [(30, 0), (2e-3, 0), (1e-3, 1000), (1e30, 0), (2, -7)]
)
def test_auc_is_exact_at_any_scale(deviation: float, offset: float):
    scores, labels = clicks(deviation, offset=offset)
    auc, error = Histogram.from_logits(scores, labels).auc()
    assert error == 0
    assert auc == pytest.approx(roc_auc_score(labels, scores), rel=1e-12)
    zeros = Histogram.from_logits(
        torch.tensor([-0.0, 0.0]), torch.tensor([True, False])
    )
    assert zeros.auc() == (0.5, 0.0)


@pytest.mark.parametrize(
    ("deviation", "offset"), [(30, 0), (2e-3, 0), (1e-3, 1000), (1e30, 0), (2, -7)]
)
def test_beyond_memory_the_bound_holds_and_is_tight(
    monkeypatch: pytest.MonkeyPatch, deviation: float, offset: float
):
    scores, labels = clicks(deviation, offset=offset)
    monkeypatch.setattr(ranking_metrics, "MAX_EXACT_LOGITS", 256)
    whole = Histogram.from_logits(scores, labels)
    auc, error = whole.auc()
    assert len(whole.merge().chunks[0].keys) <= 256
    assert abs(auc - roc_auc_score(labels, scores)) <= error
    assert 0 < error < 0.02
    monkeypatch.setattr(ranking_metrics, "MAX_CHUNKS", 3)
    for sizes in ([1000] * 4, [1, 2999, 1000], [100] * 40):
        parts = [
            Histogram.from_logits(*part)
            for part in zip(scores.split(sizes), labels.split(sizes), strict=True)
        ]
        assert sum(parts).auc() == (auc, error)  # in whatever parts it came
        assert sum(parts[::-1]).auc() == (auc, error)
        first, second = sum(parts[: len(parts) // 2]), sum(parts[len(parts) // 2 :])
        assert (pickle.loads(pickle.dumps(first)) + second).auc() == (
            auc,
            error,
        )  # of two workers


def test_nothing_valid_is_nan_with_a_message():
    scores, request = torch.tensor([0.1, 0.4]), torch.tensor([0, 1])
    with pytest.warns(UserWarning, match="no request has both labels"):
        metrics = ranking_means(
            ranking_sums(scores, torch.tensor([False, True]), request)
        )
    assert math.isnan(metrics["gauc"])
    assert metrics["auc"] == 1.0
    with pytest.warns(
        UserWarning, match="auc, normalised_entropy: all labels are the same"
    ):
        metrics = ranking_means(
            ranking_sums(scores, torch.tensor([False, False]), request)
        )
    assert math.isnan(metrics["auc"])
    assert math.isnan(metrics["calibration"])
    empty = torch.zeros(0)
    with pytest.warns(UserWarning, match="there are no candidates"):
        metrics = ranking_means(ranking_sums(empty, empty.bool(), empty.long()))
    assert math.isnan(metrics["log_loss"])


def test_a_score_that_is_no_number_is_refused():
    with pytest.raises(UserError, match="not finite"):
        ranking_sums(
            torch.tensor([float("nan")]), torch.tensor([True]), torch.tensor([0])
        )
