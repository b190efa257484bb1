"""The shown position of a result, which explains clicks but is unknown at ranking time.

Training may read the position as a feature (`dropout`), or learn a term of it that is
added to the logits (`bias`). Ranking reads it only for the metrics `with_position/`.

Shapes: `N` candidates, `R` requests, `F` columns of features, `U` columns that are
unknown at ranking time, `K` labels.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

Mode = Literal["hidden", "dropout", "bias"]
BIAS_WIDTH = 16
"""Inner width of the bias network."""


class Position(nn.Module):
    """Hide features that are unknown at ranking time, or learn a bias from them.

    Args:
        mode: How training treats features that are unknown when a request is
                served (`RankerConfig.position`).
        dropout_p: Share of requests whose unknown features are hidden in training, in
            the mode `dropout`.
        features: (F,) names of the columns.
        unknown: Names of features that are unknown at ranking time.
        num_labels: Number K of labels.
    """

    known: Tensor
    """(F,) bool: columns that are known before a result is shown."""
    unknown: Tensor
    """(U,) indices of the other columns."""

    def __init__(
        self,
        mode: Mode,
        dropout_p: float,
        features: tuple[str, ...],
        unknown: tuple[str, ...],
        num_labels: int,
    ):
        super().__init__()
        self.mode, self.dropout_p = mode, dropout_p
        is_known = torch.tensor(
            [name not in unknown for name in features], dtype=torch.bool
        )
        unknown_index = (~is_known).nonzero().flatten()
        self.register_buffer("known", is_known, persistent=False)
        self.register_buffer("unknown", unknown_index, persistent=False)
        num_unknown = len(self.unknown)
        self.reads = mode != "hidden" and num_unknown > 0
        self.bias = None
        if mode == "bias" and num_unknown:
            self.bias = nn.Sequential(
                nn.Linear(num_unknown, BIAS_WIDTH),
                nn.ReLU(),
                nn.Linear(BIAS_WIDTH, num_labels),
            )

    def hide(
        self, features: Tensor, request: Tensor, num_requests: int, shown: bool
    ) -> Tensor:
        """Replace unknown features by 0, the mean of scaled features.

        With `shown` in the mode `dropout`, unknown features stay, except for a random
        share `dropout_p` of the requests in training.

        Args:
            features: (N, F) scaled features.
            request: (N,) request of each candidate.
            num_requests: Number R of requests.
            shown: Whether to read the positions at which results were shown.

        Returns:
            (N, F) features.
        """
        if not shown or self.mode != "dropout":
            return features * self.known
        if not self.training:
            return features
        reads_position = (
            torch.rand(num_requests, device=features.device) >= self.dropout_p
        )
        return torch.where(self.known | reads_position[request][:, None], features, 0)

    def compute_bias(self, features: Tensor, shown: bool) -> Tensor | float:
        """Return the bias (N, K) to add to the logits, or 0 if there is none.

        The bias is relative to the mean position, where it is 0.

        Args:
            features: (N, F) scaled features.
            shown: Whether to read the positions at which results were shown.
        """
        if self.bias is None or not shown:
            return 0.0
        position = features[:, self.unknown]  # (N, U)
        return self.bias(position) - self.bias(torch.zeros_like(position[:1]))
