"""Metrics of actions over candidates alone: both forms of normalised entropy, GAUC per
user, and the loss.
"""

from __future__ import annotations

import math

import pytest
import torch

from models.actions import metrics
from models.actions.requests import ActionsBatch
from tests.fixtures.batches import fill_batch

LABELS = ("like", "share")


class FixedModel:
    """A model with fixed logits (B, C, K) of candidates."""

    labels = LABELS

    def __init__(
        self, logits: torch.Tensor, train_rates: tuple[float, ...] = ()
    ) -> None:
        self.logits, self.train_rates = logits, train_rates

    def score(self, batch):
        return self.logits[batch.candidate_valid]


@pytest.fixture
def candidates():
    """A batch of 3 users with 9, 4 and 6 candidates."""
    torch.manual_seed(0)
    valid = torch.arange(9) < torch.tensor([[9], [4], [6]])
    return fill_batch(
        ActionsBatch,
        {"B": 3},
        candidate_valid=valid,
        candidate_label=(torch.rand(3, 9, 2) < 0.4).float(),
    )


def test_the_entropy_of_the_rates_of_the_candidates_is_normalised_to_one(candidates):
    labels = candidates.candidate_label[candidates.candidate_valid]
    logits = torch.logit(labels.mean(0).double()).expand(3, 9, 2)

    model = FixedModel(logits, train_rates=(0.1, 0.7))
    values = metrics.means(metrics.measure(model, candidates))

    for task in LABELS:
        assert values[f"{task}/normalised_entropy"] == pytest.approx(1)
        assert values[f"{task}/normalised_entropy_train"] < 1
    assert values["mean/normalised_entropy"] == pytest.approx(1)
    assert values["mean/rig"] == pytest.approx(0, abs=1e-6)


def test_the_loss_is_that_of_training(candidates):
    logits = torch.randn(3, 9, 2)

    model = FixedModel(logits, train_rates=(0.3, 0.3))
    values = metrics.means(metrics.measure(model, candidates))

    valid = candidates.candidate_valid
    losses = torch.nn.functional.binary_cross_entropy_with_logits(
        logits[valid], candidates.candidate_label[valid], reduction="none"
    )
    expected = losses.sum(1).mean().item()
    assert values["eval_loss"] == pytest.approx(expected, rel=1e-6)


def test_the_entropy_of_a_task_of_one_class_is_nan_and_not_in_the_mean(candidates):
    candidates.candidate_label[..., 1] = 0
    model = FixedModel(torch.zeros(3, 9, 2), train_rates=(0.5, 0.0))

    with pytest.warns(UserWarning, match="share/"):
        values = metrics.means(metrics.measure(model, candidates))

    assert math.isnan(values["share/normalised_entropy"])
    assert math.isnan(values["share/normalised_entropy_train"])
    assert values["mean/normalised_entropy"] == values["like/normalised_entropy"]
    assert values["mean/rig"] == 1 - values["like/normalised_entropy"]
