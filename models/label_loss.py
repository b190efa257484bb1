"""The loss of binary labels of candidates, with weights and masks of labels.

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
    label_masks: dict[str, str] = field(default_factory=dict)
    """Condition of a label: another label that must be true for candidates on which the
    label is learned and measured. {purchase: click} learns the probability of a
    purchase given a click."""

    def __post_init__(self) -> None:
        for name, mask in self.label_masks.items():
            if name == mask:
                raise ValueError(f"label_masks has '{name}' for itself")


def resolve_masks(labels: Sequence[str], masks: Mapping[str, str]) -> list[int | None]:
    """Return the index of each label's mask label, None without a mask."""
    check_known([*masks, *masks.values()], labels, "label_masks")
    return [labels.index(masks[name]) if name in masks else None for name in labels]


def resolve_weights(labels: Sequence[str], weights: Mapping[str, float]) -> list[float]:
    """Return the weight of each label."""
    check_known(weights, labels, "label_weights")
    return [weights.get(name, 1.0) for name in labels]


def select_learned(labels: Tensor, masks: Sequence[int | None]) -> Tensor:
    """Return an (N, K) mask of the candidates on which labels are learned and measured.

    Args:
        labels: (N, K) labels.
        masks: (K,) index of the mask label of each label, from `resolve_masks`.
    """
    selected = torch.ones_like(labels, dtype=torch.bool)
    for label, mask in enumerate(masks):
        if mask is not None:
            selected[:, label] = labels[:, mask] > 0
    return selected


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
        selected: (N, K) mask from `select_learned`; None for all candidates. A label
            without candidates contributes 0.
    """
    terms = functional.binary_cross_entropy_with_logits(
        logits.float(), labels.float(), reduction="none"
    )  # (N, K)
    if selected is None:
        sums = terms.sum(0)
        total = torch.stack([w * s for w, s in zip(weights, sums, strict=True)]).sum()
        return global_mean(total / max(1, len(terms)), len(terms))
    counts = selected.sum(0)
    means = global_mean((terms * selected).sum(0) / counts.clamp(min=1), counts)
    return torch.stack([w * m for w, m in zip(weights, means, strict=True)]).sum()
