"""Recall, NDCG, MRR and MAP of requests with one target or a set of targets.

Of n targets, the first k items can hold min(n, k): recall is the share of these that
are hit, and NDCG divides by the DCG of min(n, k) hits. With one target, from rank 0,
NDCG is 1 / log2(2 + rank) and MRR is 1 / (1 + rank); all are 0 from rank k on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.metrics.metric import Ranking, RequestMetric


class Recall(RequestMetric):
    """Share of the targets, of at most k, that are among the first k."""

    name = "recall"
    by_user = ("",)
    compared = (5, 10)

    def values(self, ranking: Ranking, k: int) -> Tensor:
        """Return the recall (B,)."""
        hits = ranking.hits[:, :k].double().sum(1)
        return hits / ranking.size.clamp(max=k)


class NDCG(RequestMetric):
    """Normalised discounted cumulative gain."""

    name = "ndcg"
    by_user = ("", "first/")
    compared = (5, 10)

    def values(self, ranking: Ranking, k: int) -> Tensor:
        """Return the NDCG (B,)."""
        hits = ranking.hits[:, :k].double()
        rank = torch.arange(k, dtype=torch.float64, device=hits.device)
        gain = 1 / torch.log2(rank + 2)
        ideal = gain.cumsum(0)[ranking.size.clamp(max=k) - 1]
        return (hits * gain[: hits.shape[1]]).sum(1) / ideal


class MRR(RequestMetric):
    """Mean reciprocal rank."""

    name = "mrr"

    def values(self, ranking: Ranking, k: int) -> Tensor:
        """Return the reciprocal rank (B,)."""
        return torch.where(ranking.rank < k, 1 / (ranking.rank.double() + 1), 0.0)


class AveragePrecision(RequestMetric):
    """Mean over the relevant items of the precision at their ranks.

    It equals MRR where requests have one target.
    """

    name = "map"
    is_printed = False

    def values(self, ranking: Ranking, k: int) -> Tensor:
        """Return the average precision (B,)."""
        hits = ranking.hits[:, :k].double()
        precision = hits.cumsum(1) / torch.arange(1, hits.shape[1] + 1)
        return (precision * hits).sum(1) / ranking.size.clamp(max=k)
