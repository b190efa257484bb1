"""Standardisation of features by mean and deviation over the training examples.

scale = Standardised(mean, std, names)
scale(features)     # (..., F)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

MAX_DEVIATIONS = 5.0
"""Standardised features are clipped to this many deviations from the mean."""


class Standardised(nn.Module):
    """Standardise features (..., F) and clip them at `MAX_DEVIATIONS`.

    A feature that did not vary in training has deviation 0. Nothing can be learned
    about it, so all its values become 0, including later ones.

    Args:
        mean: (F,) means over the training examples.
        std: (F,) deviations over the training examples.
        names: (F,) names of the features, for messages.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor, std: Tensor, names: Sequence[str] = ()) -> None:
        super().__init__()
        self.register_buffer("mean", mean.float().clone())
        spread = std.float()
        # inf maps every value of a constant feature to 0
        self.register_buffer("std", torch.where(spread > 0, spread, torch.inf))
        self.feature_names = tuple(names)

    def forward(self, features: Tensor) -> Tensor:
        """Return the standardised features (..., F); missing values stay NaN."""
        return ((features - self.mean) / self.std).clamp(
            -MAX_DEVIATIONS, MAX_DEVIATIONS
        )

    def replace_constant_scales(self, mean: Tensor, std: Tensor) -> list[str]:
        """Replace the mean and deviation of features that were constant before.

        A feature is constant if it has a single value, or none, in the training
        examples; its deviation is inf. A feature is replaced if it was constant in the
        training of the checkpoint and varies in the examples of this module.

        Args:
            mean: (F,) means of the checkpoint, changed in place.
            std: (F,) deviations of the checkpoint, changed in place; inf if constant.

        Returns:
            Names of the replaced features.
        """
        is_new = std.isinf() & self.std.isfinite()
        mean[is_new], std[is_new] = self.mean[is_new], self.std[is_new]
        return [
            self.feature_names[index] for index in is_new.nonzero().flatten().tolist()
        ]
