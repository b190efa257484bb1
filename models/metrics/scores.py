"""Scores that a model gives are finite numbers, or the model is refused: a ranking by NaN looks like any other.

check_finite(model.score(batch))
"""

from __future__ import annotations

from torch import Tensor

from models.storage.tables import UserError

DAMAGED = "its training diverged or its weights are damaged: train with a lower fit.lr, or use another checkpoint"


def check_finite(scores: Tensor, tail: bool = False) -> Tensor:
    """`scores` as they are. UserError where one is NaN or infinite; with `tail` -inf is what stands where nothing is
    ranked. Waits for a GPU."""
    right = scores.isfinite()
    if count := int((~(right | scores.isneginf() if tail else right)).sum()):
        raise UserError(
            f"the model gives {count} of {scores.numel()} scores that are not finite; {DAMAGED}"
        )
    return scores
