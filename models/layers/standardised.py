"""Numbers by their mean and deviation over training.

scale = Standardised(mean, std, names)
scale(features)     # (..., F)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

MOST = 5.0
"""Deviations from the mean at which numbers are cut."""


class Standardised(nn.Module):
    """Features by their mean and deviation over training, both (F,), cut at `MOST` deviations.

    A feature without spread in training has a deviation of 0. Nothing can be learned of it, so all its values become 0,
    also those that come later.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor, std: Tensor, names: Sequence[str] = ()) -> None:
        super().__init__()
        self.register_buffer("mean", mean.float().clone())
        spread = std.float()
        self.register_buffer("std", torch.where(spread > 0, spread, torch.inf))
        self.feature_names = tuple(names)
        """(F,) names, for messages."""

    def forward(self, features: Tensor) -> Tensor:
        """(..., F) of (..., F); NaN where there is none."""
        return ((features - self.mean) / self.std).clamp(-MOST, MOST)

    def keep_new_scales(self, mean: Tensor, std: Tensor) -> list[str]:
        """Replace, in the scale (F,) of a checkpoint, what had no spread by the scale of this module.

        Returns:
            The names of the features that are replaced.
        """
        new = std.isinf() & self.std.isfinite()
        mean[new], std[new] = self.mean[new], self.std[new]
        return [self.feature_names[place] for place in new.nonzero().flatten().tolist()]
