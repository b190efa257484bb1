"""Metrics of search models: the ranking metrics of every label.

    sums = measure(model, batch)
    means(sums)["gauc"], means(sums)["purchase/gauc"]

Metrics of the first label have plain names; names of other labels' metrics begin with
the label.

An evaluation also has `gauc_within_positions`, which compares the candidates of all
searches that were shown at the same position. The shown order has 0.5. It is absent if
the log has no positions.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from models.metrics import ranking_metrics
from models.metrics.per_user_metrics import PER_USER_PREFIX, PerUserValues
from models.metrics.ranking_metrics import (
    EXAMPLES,
    METRIC_NAMES,
    Histogram,
    ranking_means,
    ranking_sums,
    request_auc,
)
from models.search.requests import SearchBatch

WITHIN_POSITIONS = "gauc_within_positions"
"""Metric, and key of the sums from which it is computed."""


def shown() -> tuple[str, ...]:
    """Return the metrics that training prints for its best epoch."""
    return ("gauc", "auc")


def measure(model: Any, batch: SearchBatch, by_user: int = 0) -> dict[str, Any]:
    """Return sums over the requests of a batch, from which `means` computes metrics.

    Args:
        model: Search model.
        batch: Batch of the evaluated split.
        by_user: Also return the GAUC of every `by_user`-th user, and the sums of
            `gauc_within_positions`; 0 for none.
    """
    sums: dict[str, Any] = {
        EXAMPLES: torch.tensor(float(len(batch.request_row)), dtype=torch.float64)
    }
    logits, request = model.score(batch).float(), batch.candidate_request
    prefixes = ["", *(f"{label}/" for label in model.labels[1:])]
    labels = batch.labels[:, : len(prefixes)]
    sums |= ranking_sums(logits, labels, request, prefixes)
    if by_user:
        position = batch.candidate_position.clamp(min=0)
        score, label = logits[:, 0], labels[:, 0]
        sums[WITHIN_POSITIONS] = Histogram.from_batch(score, label, position)
        auc, _ = request_auc(score, label, request)
        user = batch.user_row[batch.request_row[: len(auc)]]
        sums[f"{PER_USER_PREFIX}gauc"] = PerUserValues.from_batch(user, auc, by_user)
    return sums


def names(catalogue: Any) -> list[str]:
    """Return the metric names of `means` for the labels of a catalogue."""
    metric_names = list(METRIC_NAMES)
    for label in catalogue.labels[1:]:
        metric_names += [f"{label}/{name}" for name in METRIC_NAMES]
    return metric_names


def means(sums: dict[str, Any]) -> dict[str, float]:
    """Compute the metrics from sums over all batches and workers."""
    prefixes = [
        name.removesuffix("histogram") for name in sums if name.endswith("histogram")
    ]
    metrics: dict[str, float] = {}
    for prefix in prefixes:
        metrics |= ranking_means(sums, prefix)
    if WITHIN_POSITIONS in sums:
        within = sums[WITHIN_POSITIONS].auc(min_groups=2)
        if not math.isnan(within):
            metrics[WITHIN_POSITIONS] = within
    return metrics


def summary(metrics: dict[str, float]) -> list[str]:
    """Format the metrics of every label."""
    return ranking_metrics.summarize(
        metrics, ("gauc", WITHIN_POSITIONS, "auc", "log_loss", "normalised_entropy")
    )
