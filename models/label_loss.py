"""Several yes-or-no labels of one result: what each weighs, which results it is learned from, and their loss.

With a `negative_rate` below 1 a label is learned from that share of the results without it. The odds are higher by
1 / rate there, so log(rate) is added to logits for the chances to be those of all results.

Shapes: `N` results, `K` labels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from models.config import hint
from models.storage.tables import UserError
from models.training.distributed import whole_mean


@dataclass
class LabelOptions:
    """What a model of several labels is told of them."""

    label_weights: dict[str, float] = field(default_factory=dict)
    """Weight of a label's loss, 1 where none is given."""
    label_masks: dict[str, str] = field(default_factory=dict)
    """Label -> another label that must be true where this one is learned and measured: {purchase: click} learns the
    chance of a purchase of what was clicked."""
    negative_rate: float = 1.0
    """Share of the results without a label that a label is learned from; its logits are corrected for it by log(rate),
    so that chances stay those of all results."""

    def __post_init__(self) -> None:
        for name, weight in self.label_weights.items():
            if not weight >= 0:
                raise ValueError(
                    f"label_weights has {weight} for '{name}'; give a number from 0 on"
                )
        for name, mask in self.label_masks.items():
            if name == mask:
                raise ValueError(
                    f"label_masks has '{name}' for itself; name the label that must be true first"
                )
        if not 0 < self.negative_rate <= 1:
            raise ValueError(
                f"negative_rate {self.negative_rate} is not in (0, 1]; give a share, 1 for all"
            )

    @property
    def correction(self) -> float:
        """What is added to logits."""
        return math.log(self.negative_rate)


def mask_places(labels: Sequence[str], masks: Mapping[str, str]) -> list[int | None]:
    """(K,) of each label, the place of the one that must be true; UserError for a name that is no label."""
    for name in (*masks, *masks.values()):
        check_label(name, labels, "label_masks")
    return [labels.index(masks[name]) if name in masks else None for name in labels]


def weights_of(labels: Sequence[str], weights: Mapping[str, float]) -> list[float]:
    """(K,) the weight of each label; UserError for a name that is no label."""
    for name in weights:
        check_label(name, labels, "label_weights")
    return [weights.get(name, 1.0) for name in labels]


def check_label(name: str, labels: Sequence[str], option: str) -> None:
    if name not in labels:
        raise UserError(
            f"{option} names '{name}', which is no label of the tables; {hint(name, list(labels))}"
        )


def counted(labels: Tensor, masks: Sequence[int | None]) -> Tensor:
    """(N, K) bool: of which results each of the `labels` (N, K) is learned."""
    kept = torch.ones_like(labels, dtype=torch.bool)
    for place, mask in enumerate(masks):
        if mask is not None:
            kept[:, place] = labels[:, mask] > 0
    return kept


def drawn(labels: Tensor, masks: Sequence[int | None], rate: float) -> Tensor | None:
    """(N, K) bool: of which results each of the `labels` (N, K) is learned in this step, `rate` of those without it, by
    one draw for all labels of a result; None for all of all."""
    if rate == 1 and not any(mask is not None for mask in masks):
        return None
    some = torch.rand(len(labels), 1, device=labels.device) < rate
    return counted(labels, masks) & ((labels > 0) | some)


def label_loss(
    logits: Tensor, labels: Tensor, weights: Sequence[float], kept: Tensor | None = None
) -> Tensor:
    """The weighted sum over labels of the mean binary cross-entropy of `logits` (N, K) over the results `kept`
    (N, K), or over all. 0 for a label without any."""
    terms = functional.binary_cross_entropy_with_logits(
        logits.float(), labels.float(), reduction="none"
    )  # (N, K)
    if kept is None:
        total = torch.stack(
            [weight * term for weight, term in zip(weights, terms.sum(0), strict=True)]
        ).sum()
        return whole_mean(total / max(1, len(terms)), len(terms))
    counts = kept.sum(0)
    means = whole_mean((terms * kept).sum(0) / counts.clamp(min=1), counts)
    return torch.stack(
        [weight * mean for weight, mean in zip(weights, means, strict=True)]
    ).sum()
