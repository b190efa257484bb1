"""The loss of binary labels of candidates, with label weights and negative sampling.

With a `negative_rate` below 1, a label is learned from a random sample of the negative
candidates. This raises the odds by 1 / rate, so log(rate) is added to the logits to
make the probabilities refer to all candidates.

Shapes: `N` candidates, `K` labels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import field

import torch
from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import functional

from core.options import STRICT, NamedConfig, Share, check_known
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
    negative_rate: Share = 1.0
    """Fraction of the negative candidates of a label that the label is learned from.
    Logits are corrected by log(rate), so that probabilities refer to all candidates."""

    def __post_init__(self) -> None:
        for name, mask in self.label_masks.items():
            if name == mask:
                raise ValueError(f"label_masks has '{name}' for itself")

    @property
    def correction(self) -> float:
        """Value to add to the logits."""
        return math.log(self.negative_rate)


def resolve_masks(labels: Sequence[str], masks: Mapping[str, str]) -> list[int | None]:
    """Return the index of each label's mask label, None without a mask."""
    check_known([*masks, *masks.values()], labels, "label_masks")
    return [labels.index(masks[name]) if name in masks else None for name in labels]


def resolve_weights(labels: Sequence[str], weights: Mapping[str, float]) -> list[float]:
    """Return the weight of each label."""
    check_known(weights, labels, "label_weights")
    return [weights.get(name, 1.0) for name in labels]


def select_measured(labels: Tensor, masks: Sequence[int | None]) -> Tensor:
    """Return an (N, K) mask of the candidates on which each label is measured.

    Args:
        labels: (N, K) labels.
        masks: (K,) index of the mask label of each label, from `resolve_masks`.
    """
    selected = torch.ones_like(labels, dtype=torch.bool)
    for label, mask in enumerate(masks):
        if mask is not None:
            selected[:, label] = labels[:, mask] > 0
    return selected


def sample_learned(
    labels: Tensor, masks: Sequence[int | None], rate: float
) -> Tensor | None:
    """Sample the candidates that each label is learned from in one step.

    Args:
        labels: (N, K) labels.
        masks: (K,) index of the mask label of each label, from `resolve_masks`.
        rate: Fraction of the negative candidates to sample. All labels of a candidate
            share one random number.

    Returns:
        An (N, K) mask, or None if every label is learned from all candidates.
    """
    if rate == 1 and not any(mask is not None for mask in masks):
        return None
    sampled = torch.rand(len(labels), 1, device=labels.device) < rate
    return select_measured(labels, masks) & ((labels > 0) | sampled)


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
        selected: (N, K) mask from `sample_learned`; None for all candidates. A label
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
