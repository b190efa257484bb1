"""The position at which a result was shown: it explains clicks, but is unknown at ranking time.

Training may read it (`dropout`), or learn it as a term that is added to the logits
(`bias`). Ranking never reads it, unless asked to for metrics with the position.

Shapes: `N` candidates, `R` requests, `F` columns of features, `U` unknown ones among
them, `K` labels.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

Mode = Literal["hidden", "dropout", "bias"]
BIAS_WIDTH = 16
"""Inner width of the bias network."""


class Position(nn.Module):
    """Hides features that are unknown at ranking time, or learns a bias from them."""

    known: Tensor
    """(F,) bool: features that are known before a result is shown."""
    unknown: Tensor
    """(U,) indices of the other features."""

    def __init__(
        self,
        mode: Mode,
        dropout_p: float,
        features: tuple[str, ...],
        unknown: tuple[str, ...],
        labels: int,
    ):
        super().__init__()
        self.mode, self.dropout_p = mode, dropout_p
        known = torch.tensor(
            [name not in unknown for name in features], dtype=torch.bool
        )
        self.register_buffer("known", known, persistent=False)
        self.register_buffer("unknown", (~known).nonzero().flatten(), persistent=False)
        count = len(self.unknown)
        self.reads = mode != "hidden" and count > 0
        self.bias = None
        if mode == "bias" and count:
            self.bias = nn.Sequential(
                nn.Linear(count, BIAS_WIDTH), nn.ReLU(), nn.Linear(BIAS_WIDTH, labels)
            )

    def hide(
        self, features: Tensor, request: Tensor, requests: int, shown: bool
    ) -> Tensor:
        """Return (N, F) scaled features with the unknown ones at their mean, 0.

        With `shown` the mode `dropout` keeps them. In training they are hidden for a
        fraction `dropout_p` of requests.

        Args:
            features: (N, F) scaled features.
            request: (N,) request of each candidate.
            requests: Number of requests R.
            shown: Whether to read the positions at which results were shown.
        """
        if not shown or self.mode != "dropout":
            return features * self.known
        if not self.training:
            return features
        is_kept = torch.rand(requests, device=features.device) >= self.dropout_p  # (R,)
        return torch.where(self.known | is_kept[request][:, None], features, 0)

    def term(self, features: Tensor, shown: bool) -> Tensor | float:
        """Return (N, K) to add to the logits if positions were `shown`; 0 at the mean position."""
        if self.bias is None or not shown:
            return 0.0
        position = features[:, self.unknown]  # (N, U)
        return self.bias(position) - self.bias(torch.zeros_like(position[:1]))
