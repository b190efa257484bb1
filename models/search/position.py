"""Where a result was shown: it explains clicks of the log, and is not known yet when results are ranked.

In training it may be read (`dropout`) or learned apart, as a term that is added to the logits (`bias`). What is ranked
never has it, unless it is asked for to see what it would have added.

Shapes: `N` candidates, `R` requests, `F` columns of features, `U` unknown ones among them, `K` labels.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

Mode = Literal["hidden", "dropout", "bias"]
WIDTH = 16
"""Inner width of the bias."""


class Position(nn.Module):
    """What a ranker reads of features that are unknown when it ranks."""

    known: Tensor
    """(F,) bool: what is known of a result before it is shown."""
    unknown: Tensor
    """(U,) the places of what is not."""

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
                nn.Linear(count, WIDTH), nn.ReLU(), nn.Linear(WIDTH, labels)
            )

    def hide(
        self, features: Tensor, request: Tensor, requests: int, shown: bool
    ) -> Tensor:
        """(N, F): scaled features, those that are unknown at their mean, 0. `request` (N,) is that of each candidate,
        of so many `requests`.

        With `shown` the mode `dropout` leaves them; in training then of a share `dropout_p` of requests alone not.
        """
        if not shown or self.mode != "dropout":
            return features * self.known
        if not self.training:
            return features
        left = torch.rand(requests, device=features.device) >= self.dropout_p
        return torch.where(self.known | left[request][:, None], features, 0)

    def term(self, features: Tensor, shown: bool) -> Tensor | float:
        """(N, K) that is added to the logits where results were `shown`: 0 at the mean place."""
        if self.bias is None or not shown:
            return 0.0
        place = features[:, self.unknown]
        return self.bias(place) - self.bias(torch.zeros_like(place[:1]))
