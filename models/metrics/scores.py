"""A check that scores are finite, because a ranking by NaN looks like a valid one.

check_finite(model.score(batch))
"""

from __future__ import annotations

from torch import Tensor

from core.errors import UserError


def check_finite(scores: Tensor, tail: bool = False) -> Tensor:
    """Return the scores unchanged if all are finite.

    The check waits for the GPU.

    Args:
        scores: Scores of any shape.
        tail: Whether -inf is allowed, as the padding of short rankings.
    """
    valid = scores.isfinite()
    if tail:
        valid = valid | scores.isneginf()
    num_invalid = int((~valid).sum())
    if num_invalid:
        raise UserError(
            f"the model gives {num_invalid} of {scores.numel()} scores that are not "
            f"finite"
        )
    return scores
