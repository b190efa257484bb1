"""Recall@K, NDCG@K and MRR@K over the full catalogue, for requests with one target.

With one target, MAP@K equals MRR@K and precision@K is recall@K / K, so neither is
measured.

Metrics are sums with a count of examples, so that batches and workers add up exactly.

Shapes: `B` requests, `K` ranked items, `N` items of the catalogue.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
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
"""Name of the number of examples."""

SHOWN: tuple[str, ...] = ("recall@10", "ndcg@10")
"""Metrics that training prints for its best epoch."""

FIRST_PREFIX = "first/"
"""Prefix of metrics over first-time requests, such as `first/ndcg@10`: requests whose
target is not among all of the user's earlier behaviours, whatever part of them a model
reads."""

EXPOSURE_LABELS = {
    "coverage@10": "coverage",
    "new_items@10": "new items",
    "gini@10": "Gini",
}
"""Labels of the metrics of `exposure` in a summary."""


def hit_rank(items: Tensor, target: Tensor) -> Tensor:
    """Return the rank (B,) of each `target` (B,) in `items` (B, K), from 0.

    The rank is K if the target is not ranked, or unknown (-1). A ranked -1 is padding.
    """
    hits = (items == target[:, None]) & (items >= 0)
    return torch.where(hits.any(1), hits.long().argmax(1), items.shape[1])


def metric_sums(
    items: Tensor, target: Tensor, cutoffs: Sequence[int] = CUTOFFS
) -> dict[str, float]:
    """Sum `recall@k`, `ndcg@k` and `mrr@k` over the batch, and count its `examples`.

    With one target the ideal DCG is 1. For ranks from 0, NDCG is 1 / log2(2 + rank)
    and MRR is 1 / (1 + rank); both are 0 from rank k on.

    Args:
        items: Ranked items (B, K).
        target: Target items (B,).
        cutoffs: Values of k, at most K.
    """
    if not 1 <= min(cutoffs) <= max(cutoffs) <= items.shape[1]:
        raise ValueError(
            f"cutoffs {cutoffs} are not within the {items.shape[1]} ranked items; "
            "rank more items"
        )
    rank = hit_rank(items, target).double()
    values = {
        "recall": torch.ones_like(rank),
        "ndcg": 1 / torch.log2(rank + 2),
        "mrr": 1 / (rank + 1),
    }
    sums = {}
    for name, value in values.items():
        for k in cutoffs:
            sums[f"{name}@{k}"] = float(torch.where(rank < k, value, 0.0).sum())
    return {**sums, EXAMPLES: float(len(target))}


def count_shown(shown: Tensor, items: Tensor) -> None:
    """Count the items of each top 10.

    Args:
        shown: (N,) int64 number of top 10 lists that contain each item, updated in
            place.
        items: (B, K) ranked items, -1 at padding.
    """
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
    num_items, total = len(counts), counts.sum()
    rank = torch.arange(1, num_items + 1, dtype=torch.float64)
    gini = 2 * (rank @ counts) / (num_items * total) - (num_items + 1) / num_items
    return {
        "coverage@10": float((counts > 0).double().mean()),
        "new_items@10": float(shown[trained == 0].sum() / total),
        "gini@10": float(gini),
    }


def names(catalogue: Any) -> list[str]:
    """Return the metric names of `means`, which do not depend on the catalogue."""
    pairs = itertools.product(METRICS, CUTOFFS)
    at_cutoffs = [f"{metric}@{k}" for metric, k in pairs]
    return [*at_cutoffs, *(FIRST_PREFIX + name for name in [*at_cutoffs, EXAMPLES])]


def measure_ranking(
    items: Tensor,
    batch: RequestBatch,
    by_user: int = 0,
    shown: Tensor | None = None,
) -> dict[str, Any]:
    """Sum metrics over all requests, and over first-time requests (`FIRST_PREFIX`).

    Args:
        items: Ranked items (B, K).
        batch: Requests with their targets.
        by_user: Also return recall@10 and ndcg@10 of every `by_user`-th user; 0 for
            none.
        shown: As in `count_shown`; None to not count.
    """
    if shown is not None:
        count_shown(shown, items)
    # on the CPU, so that the many sums do not wait for a GPU one by one
    items, batch = items.cpu(), batch.to("cpu")
    target, is_first = batch.target, batch.repeats == 0
    sums: dict[str, Any] = metric_sums(items, target)
    for name, value in metric_sums(items[is_first], target[is_first]).items():
        sums[FIRST_PREFIX + name] = value
    if not by_user:
        return sums
    rank = hit_rank(items, target)
    ndcg = torch.where(rank < 10, 1 / torch.log2(rank + 2.0), 0.0)
    request_metrics = {
        "recall@10": (rank < 10).double(),
        "ndcg@10": ndcg,
        f"{FIRST_PREFIX}ndcg@10": torch.where(is_first, ndcg, torch.nan),
    }
    for name, values in request_metrics.items():
        sums[PER_USER_PREFIX + name] = PerUserValues.from_batch(
            batch.user_row, values, by_user
        )
    return sums


def means(sums: dict[str, float]) -> dict[str, float]:
    """Return the means per example from sums.

    Metrics with `FIRST_PREFIX` are means over the first-time requests, NaN if there are
    none. `first/examples` stays a count.
    """
    count = float(sums.get(EXAMPLES, 0.0))
    if not count:
        raise ValueError("no examples were evaluated, so there is no mean")
    first_count = float(sums.get(FIRST_PREFIX + EXAMPLES, 0.0))
    averages: dict[str, float] = {}
    for name, value in sums.items():
        if name == EXAMPLES:
            continue
        if name == FIRST_PREFIX + EXAMPLES:
            averages[name] = first_count
        elif name.startswith(FIRST_PREFIX):
            averages[name] = float(value) / first_count if first_count else math.nan
        else:
            averages[name] = float(value) / count
    return averages


def summary(metrics: dict[str, float]) -> list[str]:
    """Return a table of the metrics by cutoff, and a line of `exposure` if measured."""
    lines = ["  K       " + "".join(f"{k:>9}" for k in CUTOFFS)]
    for metric in METRICS:
        values = [format_metric(metrics[f"{metric}@{k}"]) for k in CUTOFFS]
        lines.append(f"  {metric:<8}" + "".join(f"{value:>9}" for value in values))
    exposures = [
        f"{label} {format_metric(metrics[name])}"
        for name, label in EXPOSURE_LABELS.items()
        if name in metrics
    ]
    if exposures:
        lines.append(f"  top 10  {', '.join(exposures)}")
    return lines
