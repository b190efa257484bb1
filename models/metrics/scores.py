"""A check that scores are finite: a ranking by NaN looks like any other ranking.

check_finite(model.score(batch))
"""

from __future__ import annotations

from torch import Tensor

from models.storage.tables import UserError

DAMAGED_MODEL = (
    "its training diverged or its weights are damaged: train with a lower fit.lr, "
    "or use another checkpoint"
)


def check_finite(scores: Tensor, tail: bool = False) -> Tensor:
    """Return `scores` if all are finite. Waits for a GPU.

    Args:
        scores: Scores of any shape.
        tail: Whether -inf is allowed, as padding of rankings that are too short.

    Raises:
        UserError: If a score is NaN or infinite.
    """
    valid = scores.isfinite()
    if tail:
        valid = valid | scores.isneginf()
    if count := int((~valid).sum()):
        raise UserError(
            f"the model gives {count} of {scores.numel()} scores that are not finite; "
            f"{DAMAGED_MODEL}"
        )
    return scores
