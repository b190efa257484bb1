"""Sums and means of the metrics of rankings, over all and over first-time requests.

Metrics are sums with a count of examples, so that batches and workers add up exactly.
The metrics are the classes of `models/metrics/ranked`.

Shapes: `B` requests, `K` ranked items, `N` items of the catalogue.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from models.dataset.batch import PAD
from models.metrics.metric import (
    CUTOFFS,
    TOP,
    CatalogueMetric,
    Ranking,
    RequestMetric,
    find_metrics,
)
from models.metrics.per_user_metrics import PER_USER_PREFIX, PerUserValues
from models.metrics.ranking_metrics import format_metric
from models.retrieval.data import RequestBatch

EXAMPLES = "examples"
"""Name of the number of examples."""

LEFT_OUT = " left out"
"""End of the name of a metric's number of requests without a value."""

LIMIT = "recall_limit"
"""Name of the mean share of a basket's targets that K items can hold."""

FIRST_PREFIX = "first/"
"""Prefix of metrics over first-time requests, such as `first/ndcg@10`: requests whose
target is not among all of the user's earlier behaviours, whatever part of them a model
reads."""

NEW_PREFIX = "new/"
"""Prefix of metrics over the requests whose target has no training behaviours; of a
basket, only such targets count."""


def shown() -> tuple[str, ...]:
    """Return the metrics that training prints for its best epoch."""
    kinds = [kind for kind in find_metrics(RequestMetric) if kind.by_user]
    return tuple(f"{metric.name}@{TOP}" for metric in kinds)


def rank_targets(items: Tensor, targets: Tensor) -> Ranking:
    """Return the ranking with the hits of sets of `targets` (B, M) in `items` (B, K).

    The rank is at least `max(CUTOFFS)` if no target is ranked or known. -1 is padding
    of both.
    """
    hits = torch.zeros_like(items, dtype=torch.bool)
    for target in targets.unbind(1):  # in the memory of one (B, K)
        hits |= items == target[:, None]
    hits &= items >= 0
    missing = max(items.shape[1], *CUTOFFS)
    rank = torch.where(hits.any(1), hits.long().argmax(1), missing)
    return Ranking(items, hits, (targets >= 0).sum(1).clamp(min=1), rank)


def count_shown(shown: Tensor, items: Tensor) -> None:
    """Count the items of each top 10.

    Args:
        shown: (N,) int64 number of top 10 lists that contain each item, updated in
            place.
        items: (B, K) ranked items, -1 at padding.
    """
    top = items[:, :TOP].flatten()
    shown.scatter_add_(0, top.clamp(min=0), (top >= 0).to(shown.dtype))


def exposure(shown: Tensor, trained: Tensor) -> dict[str, float]:
    """Return the metrics of all top 10 lists together.

    Args:
        shown: Number of top 10 lists that contain each item (N,).
        trained: Number of training behaviours of each item (N,).
    """
    metrics = find_metrics(CatalogueMetric)
    return {f"{metric.name}@{TOP}": metric.value(shown, trained) for metric in metrics}


def names(catalogue: Any) -> list[str]:
    """Return the metric names of `means`, which do not depend on the catalogue."""
    metrics = find_metrics(RequestMetric)
    at_cutoffs = [f"{metric.name}@{k}" for metric in metrics for k in CUTOFFS]
    return [*at_cutoffs, *(FIRST_PREFIX + name for name in [*at_cutoffs, EXAMPLES])]


def measure_ranking(
    items: Tensor,
    batch: RequestBatch,
    by_user: int = 0,
    shown: Tensor | None = None,
    trained: Tensor | None = None,
) -> dict[str, Any]:
    """Sum metrics over all requests, and over two slices of the requests.

    Args:
        items: Ranked items (B, K), with K at least the largest of `CUTOFFS`.
        batch: Requests with their targets.
        by_user: Also return metrics of every `by_user`-th user; 0 for none.
        shown: As in `count_shown`; None to not count.
        trained: As in `exposure`, on the CPU; None without metrics of `NEW_PREFIX`.
    """
    if shown is not None:
        count_shown(shown, items)
    # on the CPU, so that the many sums do not wait for a GPU one by one
    items, batch = items.cpu(), batch.to("cpu")
    targets = batch.target[:, None] if batch.targets is None else batch.targets
    ranking, is_first = rank_targets(items, targets), batch.repeats == 0
    requests = {"": torch.ones_like(is_first), FIRST_PREFIX: is_first}
    rankings = {"": ranking, FIRST_PREFIX: ranking}
    if trained is not None:
        is_new = (trained[targets.clamp(min=0)] == 0) & (targets >= 0)
        requests[NEW_PREFIX] = is_new.any(1)
        new_targets = targets.masked_fill(~is_new, PAD)
        rankings[NEW_PREFIX] = rank_targets(items, new_targets)
    sums: dict[str, Any] = {
        prefix + EXAMPLES: float(counted.sum()) for prefix, counted in requests.items()
    }
    for k in () if batch.targets is None else CUTOFFS:
        sums[f"{LIMIT}@{k}"] = float((k / ranking.size.double()).clamp(max=1).sum())
    for metric in find_metrics(RequestMetric):
        for k in CUTOFFS:
            name = f"{metric.name}@{k}"
            for prefix, counted in requests.items():
                values = metric.values(rankings[prefix], k)[counted]
                sums[prefix + name] = float(values.nansum())
                sums[prefix + name + LEFT_OUT] = float(values.isnan().sum())
                if by_user and k == TOP and prefix in metric.by_user:
                    sums[PER_USER_PREFIX + prefix + name] = PerUserValues.from_batch(
                        batch.user_row[counted], values, by_user
                    )
    return sums


def means(sums: dict[str, float]) -> dict[str, float]:
    """Return the means per example from sums.

    Metrics with a prefix are means over its requests. If there are none, they are NaN
    for `FIRST_PREFIX`, and left out for `NEW_PREFIX`, as most logs have no new target.
    The number of requests, such as `first/examples`, stays a count.
    """
    if not sums.get(EXAMPLES):
        raise ValueError("no examples were evaluated, so there is no mean")
    averages: dict[str, float] = {}
    for name, value in sums.items():
        prefix = name[: name.rfind("/") + 1]
        count = float(sums[prefix + EXAMPLES])
        if name.endswith(LEFT_OUT) or (prefix == NEW_PREFIX and not count):
            continue
        count -= float(sums.get(name + LEFT_OUT, 0))
        if name == prefix + EXAMPLES:
            averages[name] = count
        else:
            averages[name] = float(value) / count if count else math.nan
    del averages[EXAMPLES]
    return averages


def summary(metrics: dict[str, float]) -> list[str]:
    """Return a table of the metrics by cutoff, and lines of the other metrics."""
    printed = [metric for metric in find_metrics(RequestMetric) if metric.is_printed]
    width = max(8, *(len(metric.name) for metric in printed))
    lines = [f"  {'K':<{width}}" + "".join(f"{k:>9}" for k in CUTOFFS)]
    rows = [(metric.name, metric.name, "") for metric in printed]
    if f"{LIMIT}@{TOP}" in metrics:
        rows.append(("fits", LIMIT, "  share of a basket that fits into K items"))
    for label, name, note in rows:
        values = [format_metric(metrics[f"{name}@{k}"]) for k in CUTOFFS]
        cells = "".join(f"{value:>9}" for value in values)
        lines.append(f"  {label:<{width}}{cells}{note}")
    exposures = [
        f"{metric.label} {format_metric(metrics[f'{metric.name}@{TOP}'])}"
        for metric in find_metrics(CatalogueMetric)
        if f"{metric.name}@{TOP}" in metrics
    ]
    if exposures:
        lines.append(f"  top {TOP}  {', '.join(exposures)}")
    for prefix, place in ((FIRST_PREFIX, "history"), (NEW_PREFIX, "training")):
        if prefix + EXAMPLES in metrics:
            values = [
                f", {name} {format_metric(metrics[prefix + name])}"
                for name in (f"recall@{TOP}", f"ndcg@{TOP}")
            ]
            lines.append(
                f"  {prefix[:-1]:<5}  {metrics[prefix + EXAMPLES]:,.0f} requests whose "
                f"target is not in the {place}{''.join(values)}"
            )
    return lines
