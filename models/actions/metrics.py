"""Metrics of the actions family: those of `models/ranking_metrics.py` for every task, over candidates alone.

    sums = measure(model, batch)
    means(sums)["like/normalised_entropy"], means(sums)["mean/normalised_entropy"]

A request is a user: GAUC is the mean of AUC over users. `eval_loss` is the training loss over candidates. Normalised
entropy has two forms: `normalised_entropy` by the entropy of the evaluated candidates' own base rate, and, where
`train_rates` are given, `normalised_entropy_train` by the log loss of always predicting the training rate; the
constant predictor of either rate has 1.

Shapes: `N` candidates, `K` tasks.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
from torch import Tensor

from models.ranking_metrics import EXAMPLES, ranking_means, ranking_sums


def measure(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sums over a batch's candidates. `model.score(batch)` gives logits (N, K), `model.labels` the tasks' names."""
    logits, valid = model.score(batch), batch["candidate_valid"]
    label = batch["candidate_label"][valid]
    user = torch.arange(len(valid), device=valid.device)[:, None].expand_as(valid)[valid]
    sums = {EXAMPLES: torch.tensor(float(len(valid)), dtype=torch.float64)}
    for i, name in enumerate(model.labels):
        sums |= ranking_sums(logits[:, i], label[:, i], user, f"{name}/")
    return sums


def means(sums: dict[str, Any], train_rates: dict[str, float] | None = None) -> dict[str, float]:
    """Metrics from the sums of all batches and workers; `train_rates` are tasks' shares of positives in training."""
    tasks = [name.removesuffix("/histogram") for name in sums if name.endswith("/histogram")]
    found: dict[str, float] = {}
    for task in tasks:
        found |= ranking_means(sums, f"{task}/")
        if train_rates is not None:
            constant = constant_loss(found[f"{task}/positives"], found[f"{task}/candidates"], train_rates[task])
            found[f"{task}/normalised_entropy_train"] = found[f"{task}/log_loss"] / constant
    found["eval_loss"] = sum(found[f"{task}/log_loss"] for task in tasks)
    known = [value for task in tasks if not math.isnan(value := found[f"{task}/normalised_entropy"])]
    found["mean/normalised_entropy"] = statistics.fmean(known) if known else math.nan
    return found


def constant_loss(positives: float, candidates: float, rate: float) -> float:
    """Log loss in nats of predicting `rate` for all candidates; NaN where a rate of 0 or 1 is contradicted or
    there are none."""
    if not candidates or not 0 < rate < 1:
        return math.nan
    return -(positives * math.log(rate) + (candidates - positives) * math.log(1 - rate)) / candidates
