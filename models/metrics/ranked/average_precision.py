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
        hits = ranking.hits[:, :k].double()
        precision = hits.cumsum(1) / torch.arange(1, hits.shape[1] + 1)
        return (precision * hits).sum(1) / ranking.size.clamp(max=k)
