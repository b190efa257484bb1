"""Recall@K, NDCG@K and MRR@K of ranked items with one target each, over the full catalogue.

With one target MAP@K equals MRR@K, and precision@K is recall@K / K, so neither is
measured.

Metrics are kept as sums with a count of examples, so that batches and workers add up
exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from models.metrics.per_user_metrics import PER_USER_PREFIX, PerUserValues
from models.metrics.ranking_metrics import format_metric
from models.retrieval.data import RequestBatch

CUTOFFS = (1, 5, 10, 20)
"""Ranks K at which the metrics are measured."""

METRICS = ("recall", "ndcg", "mrr")
"""Metrics that are measured at each of the ranks."""

EXAMPLES = "examples"

SHOWN: tuple[str, ...] = ("recall@10", "ndcg@10")
"""Metrics of a training's best epoch that are printed."""

FIRST = "first/"
"""What metrics begin with that are of the requests whose target is not among the user's
behaviours before them, as `first/ndcg@10`: the others repeat an item. All models have
the same ones, whatever part of the history they read."""


def hit_rank(items: Tensor, target: Tensor) -> Tensor:
    """(B,) int64: the place of `target` (B,) in the ranked `items` (B, K), from 0; K where it is absent.

    What is ranked and what is asked for are items: -1, where nothing is, hits nothing.
    """
    hits = (items == target[:, None]) & (items >= 0)
    return torch.where(hits.any(1), hits.long().argmax(1), items.shape[1])


def metric_sums(
    items: Tensor, target: Tensor, cutoffs: Sequence[int] = CUTOFFS
) -> dict[str, float]:
    """Sum `recall@k`, `ndcg@k` and `mrr@k` over the batch, and count its `examples`.

    With one target the ideal DCG is 1: NDCG is 1 / log2(2 + rank), and MRR, which
    equals MAP, 1 / (1 + rank), each 0 below rank k.

    Args:
        items: Ranked items (B, K).
        target: Target items (B,).
    """
    if not 1 <= min(cutoffs) <= max(cutoffs) <= items.shape[1]:
        raise ValueError(
            f"cutoffs {cutoffs} are not within the {items.shape[1]} ranked items; rank more of them"
        )
    rank = hit_rank(items, target).double()
    gain = 1 / torch.log2(rank + 2)
    sums = {f"recall@{k}": float((rank < k).double().sum()) for k in cutoffs}
    sums |= {
        f"ndcg@{k}": float(torch.where(rank < k, gain, 0.0).sum()) for k in cutoffs
    }
    reciprocal = 1 / (rank + 1)
    sums |= {
        f"mrr@{k}": float(torch.where(rank < k, reciprocal, 0.0).sum()) for k in cutoffs
    }
    return {**sums, EXAMPLES: float(len(target))}


def count_shown(shown: Tensor, items: Tensor) -> None:
    """Adds to `shown` (N,) int64 how often each item is in a top 10 of the ranked `items` (B, K), where that is."""
    top = items[:, :10].flatten()
    shown.scatter_add_(0, top.clamp(min=0), (top >= 0).to(shown.dtype))


def exposure(shown: Tensor, trained: Tensor) -> dict[str, float]:
    """Return coverage, the share of new items, and the Gini coefficient of a ranking.

    Coverage is the share of the catalogue in any top 10. New items have no training
    behaviours. Gini is 0 if all items are shown equally often, and 1 - 1 / N if only
    one is.

    Args:
        shown: Number of top 10 lists that contain each item (N,).
        trained: Number of training behaviours of each item (N,).
    """
    counts = shown.double().sort().values
    places, total = torch.arange(1, len(counts) + 1, dtype=torch.float64), counts.sum()
    return {
        "coverage@10": float((counts > 0).double().mean()),
        "new_items@10": float(shown[trained == 0].sum() / total),
        "gini@10": float(
            2 * (places @ counts) / (len(counts) * total)
            - (len(counts) + 1) / len(counts)
        ),
    }


def names(catalogue: Any) -> list[str]:
    """Return the metric names of `means`, which do not depend on the catalogue."""
    every = [f"{metric}@{k}" for metric in METRICS for k in CUTOFFS]
    return [*every, *(FIRST + name for name in [*every, EXAMPLES])]


def measure_ranking(
    items: Tensor,
    batch: RequestBatch,
    by_user: int = 0,
    shown: Tensor | None = None,
) -> dict[str, Any]:
    """Return `ranking_sums` of the ranked items (B, K), and count them in `shown` (N,) if given."""
    if shown is not None:
        count_shown(shown, items)
    # on the CPU, where none of the many sums waits for a GPU
    return ranking_sums(items.cpu(), batch.to("cpu"), by_user)


def ranking_sums(
    items: Tensor, batch: RequestBatch, by_user: int = 0
) -> dict[str, Any]:
    """Sum metrics over all requests, and over requests that repeat no item (`FIRST`).

    Args:
        items: Ranked items (B, K).
        by_user: Also return recall@10 and ndcg@10 of every `by_user`-th user; 0 for
            none.
    """
    target, first = batch.target, batch.repeats == 0
    of_first = {
        FIRST + name: value
        for name, value in metric_sums(items[first], target[first]).items()
    }
    sums: dict[str, Any] = metric_sums(items, target) | of_first
    if by_user:
        rank = hit_rank(items, target)
        ndcg = torch.where(rank < 10, 1 / torch.log2(rank + 2.0), 0.0)
        values = {"recall@10": (rank < 10).double(), "ndcg@10": ndcg}
        values[f"{FIRST}ndcg@10"] = torch.where(first, ndcg, torch.nan)
        sums |= {
            PER_USER_PREFIX + name: PerUserValues.from_batch(
                batch.user_row, value, by_user
            )
            for name, value in values.items()
        }
    return sums


def add_sums(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    """The sums of several batches or workers together."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total


def means(sums: dict[str, float]) -> dict[str, float]:
    """Return the means per example from sums.

    Metrics of `FIRST` are means over the requests that repeat no item, whose number is
    among them; NaN where there is no such request.
    """
    count = sums.get(EXAMPLES, 0.0)
    if not count:
        raise ValueError(
            "no examples were evaluated, so there is no mean; check the split"
        )
    first = float(sums.get(FIRST + EXAMPLES, 0.0))
    found: dict[str, float] = {}
    for name, value in sums.items():
        if name.startswith(FIRST):
            found[name] = float(value) / first if first else math.nan
        else:
            found[name] = float(value) / float(count)
    del found[EXAMPLES]
    if FIRST + EXAMPLES in sums:
        found[FIRST + EXAMPLES] = first
    return found


def summary(metrics: dict[str, float]) -> list[str]:
    """A line of cutoffs, one of each metric at them, and one of `exposure` where that is measured."""
    lines = ["  K       " + "".join(f"{k:>9}" for k in CUTOFFS)]
    lines += [
        f"  {metric:<8}"
        + "".join(f"{format_metric(metrics[f'{metric}@{k}']):>9}" for k in CUTOFFS)
        for metric in METRICS
    ]
    told = {"coverage@10": "coverage", "new_items@10": "new items", "gini@10": "Gini"}
    if found := [
        f"{words} {format_metric(metrics[name])}"
        for name, words in told.items()
        if name in metrics
    ]:
        lines.append(f"  top 10  {', '.join(found)}")
    return lines
