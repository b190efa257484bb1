"""The loss over labels equals a loop over labels and rows."""

from __future__ import annotations

import math

import pytest
import torch

from models.model import (
    label_loss,
    resolve_weights,
)

LABELS = ("click", "purchase", "share")


def compute_loss_by_loop(
    logits: torch.Tensor,
    labels: torch.Tensor,
    weights: dict[str, float],
    selected: torch.Tensor,
) -> float:
    """Return the weighted sum of the mean cross-entropies of all labels."""
    total = 0.0
    for column, name in enumerate(LABELS):
        terms = []
        for row in selected.nonzero().flatten().tolist():
            chance = 1 / (1 + math.exp(-float(logits[row, column])))
            terms.append(-math.log(chance if labels[row, column] else 1 - chance))
        if terms:
            total += weights.get(name, 1.0) * sum(terms) / len(terms)
    return total


@pytest.mark.parametrize("share", [1.0, 0.3, 0.0])
@pytest.mark.parametrize(
    "weights", [{}, {"click": 0.5, "share": 3.0}, {"purchase": 0.0}]
)
def test_the_loss_equals_a_loop_over_labels_and_rows(share, weights):
    torch.manual_seed(0)
    logits, labels = torch.randn(40, 3), torch.rand(40, 3) < 0.4
    selected = torch.rand(40) < share

    loss = label_loss(
        logits,
        labels,
        resolve_weights(LABELS, weights),
        None if share == 1 else selected,
    )

    expected = compute_loss_by_loop(logits, labels, weights, selected)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
