"""The loss of binary labels of candidates, with weights of labels.

Shapes: `N` candidates, `K` labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field

import torch
from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import functional

from core.options import STRICT, NamedConfig, check_known
from models.training.distributed import global_mean


@dataclass(config=STRICT)
class LabelOptions(NamedConfig):
    """Options of a model with several labels."""

    label_weights: dict[str, NonNegativeFloat] = field(default_factory=dict)
    """Weight of each label in the loss; 1 for labels that are not listed."""


def resolve_weights(labels: Sequence[str], weights: Mapping[str, float]) -> list[float]:
    """Return the weight of each label."""
    check_known(weights, labels, "model.label_weights")
    return [weights.get(name, 1.0) for name in labels]


def label_loss(
    logits: Tensor,
    labels: Tensor,
    weights: Sequence[float],
    selected: Tensor | None = None,
) -> Tensor:
    """Return the () weighted sum over labels of the mean binary cross-entropy.

    Args:
        logits: (N, K) logits.
        labels: (N, K) labels.
        weights: (K,) weights of the labels.
        selected: (N,) mask of the candidates to learn; None for all.
    """
    terms = functional.binary_cross_entropy_with_logits(
        logits.float(), labels.float(), reduction="none"
    )  # (N, K)
    if selected is None:
        sums = terms.sum(0)
        total = torch.stack([w * s for w, s in zip(weights, sums, strict=True)]).sum()
        return global_mean(total / max(1, len(terms)), len(terms))
    count = selected.sum()
    sums = (terms * selected[:, None]).sum(0)
    means = global_mean(sums / count.clamp(min=1), count)
    return torch.stack([w * m for w, m in zip(weights, means, strict=True)]).sum()
