"""Recall, NDCG and MRR of requests with one target.

With one target the ideal DCG is 1. For ranks from 0, NDCG is 1 / log2(2 + rank) and MRR
is 1 / (1 + rank); all are 0 from rank k on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.metrics.metric import Ranking, RequestMetric


class Recall(RequestMetric):
    """Share of requests whose target is among the first k."""

    name = "recall"
    by_user = ("",)
    is_shown_in_training = True
    compared = (5, 10)

    def values(self, ranking: Ranking, k: int) -> Tensor:
        """Return the recall (B,)."""
        return (ranking.rank < k).double()


class NDCG(RequestMetric):
    """Normalised discounted cumulative gain."""

    name = "ndcg"
    by_user = ("", "first/")
    is_shown_in_training = True
    compared = (5, 10)

    def values(self, ranking: Ranking, k: int) -> Tensor:
        """Return the NDCG (B,)."""
        gain = 1 / torch.log2(ranking.rank.double() + 2)
        return torch.where(ranking.rank < k, gain, 0.0)


class MRR(RequestMetric):
    """Mean reciprocal rank."""

    name = "mrr"

    def values(self, ranking: Ranking, k: int) -> Tensor:
        """Return the reciprocal rank (B,)."""
        return torch.where(ranking.rank < k, 1 / (ranking.rank.double() + 1), 0.0)
