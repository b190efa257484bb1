"""Metrics of the actions family: the metrics of `models/metrics/ranking_metrics.py` for every task, over candidates.

    sums = measure(model, batch)
    means(sums)["like/normalised_entropy"], means(sums)["mean/normalised_entropy"]

A request is a user: GAUC is the mean of AUC over users. `eval_loss` is the training
loss over candidates. Normalised entropy (NE) has two forms: `normalised_entropy` by the
entropy of the evaluated candidates' own base rate, and, where the training rate is
known, `normalised_entropy_train` by the log loss of always predicting that; the
constant predictor of either rate has 1. `mean/...` is over tasks; a task whose
candidates are of one class has no NE (NaN, with a warning) and no part in it.
`mean/rig` is the relative information gain 1 - NE, larger is better, by which
checkpoints are chosen.

Shapes: `N` candidates, `K` tasks.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from models.actions.batch import ActionsBatch
from models.label_loss import select_measured
from models.metrics import ranking_metrics
from models.metrics.per_user_metrics import PER_USER_PREFIX, PerUserValues
from models.metrics.ranking_metrics import (
    EXAMPLES,
    METRIC_NAMES,
    format_metric,
    ranking_means,
    ranking_sums,
)

SHOWN: tuple[str, ...] = ("eval_loss", "mean/normalised_entropy", "mean/auc")
"""Metrics of a training's best epoch that are printed."""

AVERAGED = ("normalised_entropy", "normalised_entropy_train", "auc", "gauc")
"""Metrics whose mean over tasks is reported."""


def measure(model: Any, batch: ActionsBatch, by_user: int = 0) -> dict[str, Any]:
    """Sum the metrics over a batch's candidates.

    Args:
        model: Model whose `score(batch)` gives logits (N, K) of the tasks `labels`.
        by_user: Also sum the loss of every `by_user`-th user; 0 for none. Models with
            label masks skip it, since their tasks count different candidates.
    """
    logits, valid = model.score(batch).float(), batch.candidate_valid
    label = batch.candidate_label[valid]
    kept = select_measured(label, model.masks)
    user = torch.arange(len(valid), device=valid.device)[:, None].expand_as(valid)[
        valid
    ]
    sums: dict[str, Any] = {
        EXAMPLES: torch.tensor(float(len(valid)), dtype=torch.float64)
    }
    for i, name in enumerate(model.labels):
        mine = kept[:, i]
        sums |= ranking_sums(
            logits[mine, i], label[mine, i], user[mine], f"{name}/", model.correction
        )
        # the training rate is not the rate among candidates that a mask keeps
        if model.train_rates and model.masks[i] is None:
            sums[f"{name}/constant_loss"] = constant_loss(
                label[mine, i].double(), model.train_rates[i]
            )
    if by_user and not any(mask is not None for mask in model.masks):
        loss = functional.binary_cross_entropy_with_logits(
            logits.double(), label.double(), reduction="none"
        ).sum(1)
        sums[f"{PER_USER_PREFIX}eval_loss"] = PerUserValues.from_batch(
            batch.user_row[user], loss, by_user
        )
    return sums


def names(catalogue: Any) -> list[str]:
    """Return the metric names of `means` for the tasks of a catalogue."""
    tasks = [
        f"{task}/{name}"
        for task in catalogue.labels
        for name in (*METRIC_NAMES, "normalised_entropy_train")
    ]
    return [*tasks, "eval_loss", *(f"mean/{name}" for name in AVERAGED), "mean/rig"]


def means(sums: dict[str, Any]) -> dict[str, float]:
    """Compute the metrics from sums over all batches and workers.

    The mean over tasks leaves out tasks without a value.
    """
    tasks = [
        name.removesuffix("/histogram") for name in sums if name.endswith("/histogram")
    ]
    metrics: dict[str, float] = {}
    for task in tasks:
        metrics |= ranking_means(sums, f"{task}/")
        constant = float(sums.get(f"{task}/constant_loss", math.nan))
        metrics[f"{task}/normalised_entropy_train"] = (
            float(sums[f"{task}/loss"]) / constant if constant else math.nan
        )
    metrics["eval_loss"] = sum(metrics[f"{task}/log_loss"] for task in tasks)
    for name in AVERAGED:
        by_task = [metrics[f"{task}/{name}"] for task in tasks]
        defined = [value for value in by_task if not math.isnan(value)]
        metrics[f"mean/{name}"] = statistics.fmean(defined) if defined else math.nan
    metrics["mean/rig"] = 1 - metrics["mean/normalised_entropy"]
    return metrics


def constant_loss(label: Tensor, rate: float) -> Tensor:
    """Return the log loss in nats of predicting `rate` for all, summed over `label` (N,); NaN for a rate of 0 or 1."""
    if not 0 < rate < 1:
        return torch.full((), math.nan, dtype=torch.float64)
    return -(label.sum() * math.log(rate) + (1 - label).sum() * math.log(1 - rate))


def summary(metrics: dict[str, float]) -> list[str]:
    """Format the metrics of every task, and their mean."""
    kinds = ("gauc", "auc", "log_loss", "normalised_entropy")
    entropy, by_training = (
        metrics["mean/normalised_entropy"],
        metrics["mean/normalised_entropy_train"],
    )
    return [
        *ranking_metrics.summarize(metrics, kinds, "users"),
        f"  loss over tasks {format_metric(metrics['eval_loss'])}, mean normalised entropy {format_metric(entropy)} "
        f"({format_metric(by_training)} by training rates)",
    ]
