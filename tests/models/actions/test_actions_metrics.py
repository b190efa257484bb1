"""Metrics over candidates alone: both forms of normalised entropy, GAUC per user, the
loss.
"""

from __future__ import annotations

import math

import pytest
import torch

from models.actions import metrics
from models.actions.batch import ActionsBatch
from tests.fixtures.batches import fill_batch

LABELS = ("like", "share")


class Known:
    """Gives fixed logits for the valid candidates."""

    labels = LABELS
    masks = (None,) * len(LABELS)
    correction = 0.0

    def __init__(
        self, logits: torch.Tensor, train_rates: tuple[float, ...] = ()
    ) -> None:
        self.logits, self.train_rates = logits, train_rates

    def score(self, batch):
        return self.logits[batch.candidate_valid]


@pytest.fixture
def candidates():
    torch.manual_seed(0)
    valid = torch.arange(9) < torch.tensor([[9], [4], [6]])
    return fill_batch(
        ActionsBatch,
        {"B": 3},
        candidate_valid=valid,
        candidate_label=(torch.rand(3, 9, 2) < 0.4).float(),
    )


def test_the_constant_predictor_has_a_normalised_entropy_of_one(candidates):
    label = candidates.candidate_label[candidates.candidate_valid]
    own = torch.logit(label.mean(0).double()).expand(3, 9, 2)
    train = (0.1, 0.7)
    of_train = torch.logit(torch.tensor(train, dtype=torch.float64)).expand(3, 9, 2)
    found = metrics.means(metrics.measure(Known(own, train), candidates))
    for task in LABELS:
        assert found[f"{task}/normalised_entropy"] == pytest.approx(1)
        assert found[f"{task}/normalised_entropy_train"] < 1
    assert found["mean/normalised_entropy"] == pytest.approx(1)
    assert found["mean/rig"] == pytest.approx(0, abs=1e-6)
    found = metrics.means(metrics.measure(Known(of_train, train), candidates))
    assert all(
        found[f"{task}/normalised_entropy_train"] == pytest.approx(1) for task in LABELS
    )


def test_sums_of_batches_add_up_and_the_loss_is_that_of_training(candidates):
    logits = torch.randn(3, 9, 2)
    train = (0.3, 0.3)
    whole = metrics.measure(Known(logits, train), candidates)
    parts = [
        metrics.measure(
            Known(logits[rows], train),
            candidates.select("B", rows),
        )
        for rows in (slice(0, 1), slice(1, 3))
    ]
    found = metrics.means(whole)
    assert sorted(found) == sorted(metrics.names(Known(logits)))
    assert metrics.means(
        {name: parts[0][name] + parts[1][name] for name in whole}
    ) == pytest.approx(found)
    valid = candidates.candidate_valid
    cost = torch.nn.functional.binary_cross_entropy_with_logits(
        logits[valid], candidates.candidate_label[valid], reduction="none"
    )
    assert found["eval_loss"] == pytest.approx(cost.sum(1).mean().item(), rel=1e-6)
    assert whole["examples"] == 3


def test_a_task_of_one_class_is_not_a_number(candidates):
    candidates.candidate_label[..., 1] = 0
    with pytest.warns(UserWarning, match="share/"):
        found = metrics.means(
            metrics.measure(Known(torch.zeros(3, 9, 2), (0.5, 0.0)), candidates)
        )
    assert math.isnan(found["share/normalised_entropy"])
    assert math.isnan(found["share/normalised_entropy_train"])
    assert found["mean/normalised_entropy"] == found["like/normalised_entropy"]
    assert found["mean/rig"] == 1 - found["like/normalised_entropy"]
