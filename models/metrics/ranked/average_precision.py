"""Mean average precision, which equals MRR where requests have one target."""

from __future__ import annotations

import torch
from torch import Tensor

from models.metrics.metric import Ranking, RequestMetric


class AveragePrecision(RequestMetric):
    """Mean over the relevant items of the precision at their ranks."""

    name = "map"
    is_printed = False

    def values(self, ranking: Ranking, k: int) -> Tensor:
        """Return the average precision (B,)."""
        items, target = ranking.items[:, :k], ranking.target[:, None]
        hits = ((items == target) & (items >= 0)).double()  # (B, k)
        precision = hits.cumsum(1) / torch.arange(1, items.shape[1] + 1)
        return (precision * hits).sum(1)
