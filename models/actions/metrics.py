"""Metrics of actions models: the ranking metrics of every task, over candidates.

    sums = measure(model, batch)
    means(sums)["like/normalised_entropy"], means(sums)["mean/normalised_entropy"]

- A request is a user, so GAUC is the mean of the users' AUC.
- `eval_loss` is the training loss over candidates.
- `normalised_entropy` (NE) is the log loss divided by the entropy of the base rate
  among the evaluated candidates.
- `normalised_entropy_train` divides the log loss by the log loss of always predicting
  the training rate; it needs a known training rate.
- `mean/...` are means over tasks. A task whose candidates all have the same label has
  no NE (NaN, with a warning) and is left out of the mean.
- `mean/rig` is the relative information gain 1 - NE. Checkpoints are selected by it;
  larger is better.

Shapes: `B` users, `C` candidates of a user, `N` valid candidates, `K` tasks.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from models.actions.requests import ActionsBatch
from models.metrics import ranking_metrics
from models.metrics.per_user_metrics import PER_USER_PREFIX, PerUserValues
from models.metrics.ranking_metrics import (
    EXAMPLES,
    METRIC_NAMES,
    format_metric,
    ranking_means,
    ranking_sums,
)

AVERAGED = ("normalised_entropy", "normalised_entropy_train", "auc", "gauc")
"""Metrics whose mean over tasks is reported."""


def shown() -> tuple[str, ...]:
    """Return the metrics that training prints for its best epoch."""
    return ("eval_loss", "mean/normalised_entropy", "mean/auc")


def measure(model: Any, batch: ActionsBatch, by_user: int = 0) -> dict[str, Any]:
    """Return sums over the candidates of a batch, from which `means` computes metrics.

    Args:
        model: Actions model.
        batch: Batch of the evaluated split.
        by_user: Also return the loss of every `by_user`-th user; 0 for none.
    """
    logits = model.score(batch).float()  # (N, K)
    valid = batch.candidate_valid  # (B, C)
    label = batch.candidate_label[valid]  # (N, K)
    row = torch.arange(len(valid), device=valid.device)  # (B,)
    user = row[:, None].expand_as(valid)[valid]  # (N,)
    sums: dict[str, Any] = {
        EXAMPLES: torch.tensor(float(len(valid)), dtype=torch.float64)
    }
    sums |= ranking_sums(logits, label, user, [f"{name}/" for name in model.labels])
    for name, task_label, rate in zip(
        model.labels, label.double().T, model.train_rates, strict=False
    ):  # not strict: the rates are empty if they are unknown
        sums[f"{name}/constant_loss"] = constant_loss(task_label, rate)
    if by_user:
        loss = functional.binary_cross_entropy_with_logits(
            logits.double(), label.double(), reduction="none"
        ).sum(1)
        sums[f"{PER_USER_PREFIX}eval_loss"] = PerUserValues.from_batch(
            batch.user_row[user], loss, by_user
        )
    return sums


def names(catalogue: Any) -> list[str]:
    """Return the metric names of `means` for the tasks of a catalogue."""
    task_names = []
    for task in catalogue.labels:
        task_names += [f"{task}/{name}" for name in METRIC_NAMES]
        task_names.append(f"{task}/normalised_entropy_train")
    mean_names = [f"mean/{name}" for name in AVERAGED]
    return [*task_names, "eval_loss", *mean_names, "mean/rig"]


def means(sums: dict[str, Any]) -> dict[str, float]:
    """Compute the metrics from sums over all batches and workers.

    Means over tasks leave out tasks whose metric is NaN.
    """
    tasks = [
        name.removesuffix("/histogram") for name in sums if name.endswith("/histogram")
    ]
    metrics: dict[str, float] = {}
    for task in tasks:
        metrics |= ranking_means(sums, f"{task}/")
        constant_sum = float(sums.get(f"{task}/constant_loss", math.nan))
        entropy = math.nan
        if constant_sum:
            entropy = float(sums[f"{task}/loss"]) / constant_sum
        metrics[f"{task}/normalised_entropy_train"] = entropy
    metrics["eval_loss"] = sum(metrics[f"{task}/log_loss"] for task in tasks)
    for name in AVERAGED:
        by_task = [metrics[f"{task}/{name}"] for task in tasks]
        defined = [value for value in by_task if not math.isnan(value)]
        metrics[f"mean/{name}"] = statistics.fmean(defined) if defined else math.nan
    metrics["mean/rig"] = 1 - metrics["mean/normalised_entropy"]
    return metrics


def constant_loss(label: Tensor, rate: float) -> Tensor:
    """Return the summed log loss in nats of predicting the same rate for all.

    Args:
        label: (N,) labels.
        rate: Predicted probability; 0 and 1 give NaN.
    """
    if not 0 < rate < 1:
        return torch.full((), math.nan, dtype=torch.float64)
    return -(label.sum() * math.log(rate) + (1 - label).sum() * math.log(1 - rate))


def summary(metrics: dict[str, float]) -> list[str]:
    """Format the metrics of every task, and their mean."""
    kinds = ("gauc", "auc", "log_loss", "normalised_entropy")
    loss = format_metric(metrics["eval_loss"])
    entropy = format_metric(metrics["mean/normalised_entropy"])
    entropy_train = format_metric(metrics["mean/normalised_entropy_train"])
    return [
        *ranking_metrics.summarize(metrics, kinds, "users"),
        f"  loss over tasks {loss}, mean normalised entropy {entropy} "
        f"({entropy_train} by training rates)",
    ]
