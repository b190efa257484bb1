"""Scores that a model gives are finite numbers, or the model is refused: a ranking by NaN looks like any other.

check_finite(model.score(batch))
"""

from __future__ import annotations

from torch import Tensor

from models.tables import UserError

DAMAGED = "its training diverged or its weights are damaged: train with a lower fit.lr, or use another checkpoint"


def check_finite(scores: Tensor, tail: bool = False) -> Tensor:
    """`scores` as they are. UserError where one is NaN or infinite; with `tail` -inf is what stands where nothing is
    ranked. Waits for a GPU."""
    check_none(wrong_of(scores, tail), scores)
    return scores


def wrong_of(scores: Tensor, tail: bool = False) -> Tensor:
    """How many of the scores `check_finite` refuses, a number on their device."""
    right = scores.isfinite()
    return (~(right | scores.isneginf() if tail else right)).sum()


def check_none(wrong: Tensor, scores: Tensor) -> None:
    """UserError where any of the scores is `wrong_of` them. Waits for a GPU."""
    if count := int(wrong):
        raise UserError(f"the model gives {count} of {scores.numel()} scores that are not finite; {DAMAGED}")
