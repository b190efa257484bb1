"""Metrics of predicted probabilities: AUC, GAUC, log loss, entropy, calibration.

    sums = ranking_sums(logits, labels, request)   # to be added over batches, workers
    metrics = ranking_means(sums)

Public libraries differ in their definitions. Here:

- AUC of a request, or of all candidates together, is the share of (positive, negative)
  pairs in which the positive has the higher score. Ties count as half, so equal scores
  throughout give 0.5.
- `gauc` is the unweighted mean of AUC over the requests that have both labels, as in
  the QGS paper. `requests_one_class` counts the other requests.
- `auc` covers all candidates, computed from histograms of logits in single precision
  that can be added. Each distinct logit takes 24 bytes.
- `log_loss` is in nats. `normalised_entropy` is the log loss divided by the entropy of
  the base rate. `calibration` is the sum of predicted probabilities divided by the
  number of positives.
- An undefined metric is NaN, and a warning says why. NaN becomes null in JSON, no point
  in MLflow, and a dash in tables.

Shapes: `N` candidates of `R` requests.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from models.metrics.per_user_metrics import KeyedSums
from models.model import check_finite

CHANCE_GAUC = 0.51
"""GAUC below which a model is reported to rank no better than chance."""

EXAMPLES = "examples"

METRIC_NAMES = (
    "gauc",
    "auc",
    "log_loss",
    "normalised_entropy",
    "calibration",
    "requests",
    "requests_one_class",
    "candidates",
    "positives",
)
"""Names of the metrics from `ranking_means`."""

UNDEFINED = {
    "gauc": "no request has both labels",
    "auc": "all labels are the same",
    "log_loss": "there are no candidates",
    "normalised_entropy": "all labels are the same",
    "calibration": "there is no positive",
}
"""Reasons why metrics are not defined."""


def format_metric(value: float | None) -> str:
    """Return a metric with four decimals, or a dash if it is not defined."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.4f}"


def describe_chance_level(metrics: Mapping[str, float]) -> str:
    """Return a clause on the metric that is no better than base rates or chance.

    The clause is empty if the model is better than both.
    """
    for name in ("mean/normalised_entropy", "normalised_entropy"):
        if metrics.get(name, 0.0) >= 1:
            return f"{name} {metrics[name]:.4f}, the base rates 1"
    if metrics.get("gauc", 1.0) < CHANCE_GAUC:
        return f"gauc {metrics['gauc']:.4f}, chance 0.5"
    return ""


def request_auc(
    scores: Tensor, labels: Tensor, request: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the AUC of every request; ties count as half.

    Args:
        scores: (N,) scores.
        labels: (N,) labels, true or false.
        request: (N,) index of each candidate's request, from 0. An index without
            candidates is a request without an AUC.

    Returns:
        (R,) float64 AUCs, and a (R,) bool mask of the requests with both labels, for
        which AUC is defined.
    """
    count = int(request.max()) + 1 if len(request) else 0
    labels = labels.double()
    rank = rank_in_request(scores.double(), request)
    size = torch.bincount(request, minlength=count)
    zeros = torch.zeros(count, dtype=torch.float64, device=scores.device)
    positives = zeros.index_add(0, request, labels)
    negatives = size - positives
    rank_sum = zeros.index_add(0, request, labels * rank)
    ordered_pairs = rank_sum - positives * (positives - 1) / 2
    valid = (positives > 0) & (negatives > 0)
    auc = ordered_pairs / (positives * negatives).clamp(min=1)
    return torch.where(valid, auc, torch.nan), valid


def rank_in_request(values: Tensor, request: Tensor) -> Tensor:
    """Return the (N,) ranks of values within their requests, from 0, ascending.

    Equal values share their mean rank.

    Args:
        values: (N,) values. NaN ranks last.
        request: (N,) index of each value's request.
    """
    by_value = values.argsort(stable=True)
    order = by_value[request[by_value].argsort(stable=True)]  # by request, then value
    values, request = values[order], request[order]
    starts_run = torch.ones_like(request, dtype=torch.bool)
    starts_run[1:] = (request[1:] != request[:-1]) | (values[1:] != values[:-1])
    run = starts_run.cumsum(0) - 1  # (N,) index of the run of equal values
    run_length = torch.bincount(run) if len(run) else run
    run_start = torch.arange(len(order), device=order.device)[starts_run]
    mean_index = (run_start + (run_length - 1) / 2)[run]
    size = torch.bincount(request)
    request_start = size.cumsum(0) - size
    rank = torch.empty_like(mean_index)
    rank[order] = mean_index - request_start[request]
    return rank


class Histogram(KeyedSums):
    """Counts of negatives and positives by group and logit in single precision."""

    @classmethod
    def from_batch(cls, logits: Tensor, labels: Tensor, group: Tensor | None) -> Self:
        """Count the candidates of a batch.

        Args:
            logits: (N,) logits without NaN, which are compared in single precision.
            labels: (N,) labels, true or false.
            group: (N,) numbers of the groups, from 0; None for a single group.
        """
        bits = (logits.float() + 0.0).view(torch.int32)  # -0 becomes 0
        # The bits of negative floats are a sign and a magnitude, so they descend with
        # the logit. Flipping the magnitude makes them ascend.
        ascending = bits ^ (bits >> 31 & 0x7FFF_FFFF)
        keys = ascending.long() + (0 if group is None else group << 32)
        positive = labels.double()
        return cls(((keys, torch.stack([1 - positive, positive])),))

    def auc(self, min_groups: int = 1) -> float:
        """Return the share of ordered pairs among the pairs of one group.

        Ties count as half. The share is NaN for fewer groups than `min_groups`, or
        without a pair of a positive and a negative.
        """
        keys, counts = self.merge_chunks()
        negatives, positives = counts  # (n,) each, by group, then by logit
        _, index = (keys + (1 << 31) >> 32).unique_consecutive(return_inverse=True)
        negatives_below = negatives.cumsum(0) - negatives
        # of each group's first logit
        begin = torch.searchsorted(index, index)
        negatives_below = negatives_below - negatives_below[begin]
        num_groups = int(index.max()) + 1 if len(index) else 0
        totals = negatives.new_zeros(2, num_groups).index_add(1, index, counts)
        num_pairs = float((totals[0] * totals[1]).sum())
        if num_groups < min_groups or not num_pairs:
            return math.nan
        ordered_pairs = (positives * (negatives_below + negatives / 2)).sum()
        return float(ordered_pairs) / num_pairs


def ranking_sums(
    logits: Tensor,
    labels: Tensor,
    request: Tensor,
    prefixes: Sequence[str] = ("",),
) -> dict[str, Any]:
    """Compute the sums over a batch from which `ranking_means` computes metrics.

    Args:
        logits: (N, K) logits of each label.
        labels: (N, K) labels, true or false.
        request: (N,) index of each candidate's request. The batch has all candidates of
            its requests.
        prefixes: (K,) prefix of the names of each label's sums.
    """
    logits = check_finite(logits.double()).T.contiguous()
    labels = labels.double().T.contiguous()
    size = torch.bincount(request)
    by_label = torch.arange(len(labels), device=request.device)[:, None]
    auc, valid = request_auc(
        logits.flatten(), labels.flatten(), (by_label * len(size) + request).flatten()
    )
    sums: dict[str, Any] = {}
    for k, prefix in enumerate(prefixes):
        of_label = slice(k * len(size), (k + 1) * len(size))
        values = {
            "request_auc": auc[of_label][valid[of_label]].sum(),
            "requests_both": valid[of_label].sum(),
            "requests": (size > 0).sum(),
            "candidates": torch.tensor(len(request)),
            "positives": labels[k].sum(),
            "predicted": torch.sigmoid(logits[k]).sum(),
            "loss": functional.binary_cross_entropy_with_logits(
                logits[k], labels[k], reduction="sum"
            ),
        }
        sums |= {prefix + name: value.double() for name, value in values.items()}
        sums[f"{prefix}histogram"] = Histogram.from_batch(logits[k], labels[k], None)
    return sums


def ranking_means(sums: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Compute metrics from sums, and warn about metrics that are not defined.

    Args:
        sums: Sums from `ranking_sums`, added over batches and workers.
        prefix: Prefix of the names in `sums` and of the returned names.

    Returns:
        The metrics by name (`METRIC_NAMES`); a metric that is not defined is NaN.
    """

    def total(name: str) -> float:
        return float(sums[prefix + name])

    def ratio(numerator: float, denominator: float) -> float:
        return numerator / denominator if denominator > 0 else math.nan

    count, positives = total("candidates"), total("positives")
    loss = ratio(total("loss"), count)
    rate = ratio(positives, count)
    entropy = 0.0
    if 0 < rate < 1:  # in nats
        entropy = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)
    metrics = {
        "gauc": ratio(total("request_auc"), total("requests_both")),
        "auc": sums[prefix + "histogram"].auc(),
        "log_loss": loss,
        "normalised_entropy": ratio(loss, entropy),
        "calibration": ratio(total("predicted"), positives),
        "requests": total("requests"),
        "requests_one_class": total("requests") - total("requests_both"),
        "candidates": count,
        "positives": positives,
    }
    undefined = [
        f"{prefix}{name}: {reason}"
        for name, reason in UNDEFINED.items()
        if math.isnan(metrics[name])
    ]
    if undefined:
        warnings.warn(f"not defined: {'; '.join(undefined)}", stacklevel=2)
    return {prefix + name: value for name, value in metrics.items()}


def summarize(
    metrics: dict[str, float], names: Sequence[str], unit: str = "requests"
) -> list[str]:
    """Format the metrics of all labels, two lines per label.

    The second line counts the requests or users whose labels are all equal.

    Args:
        metrics: Metrics from `ranking_means`, with one prefix per label.
        names: Metrics to show, in order; the calibration is shown after them.
        unit: Groups over which `gauc` averages: "requests" or "users".
    """
    names = (*names, "calibration")
    prefixes = sorted(
        name.removesuffix("requests_one_class")
        for name in metrics
        if name.endswith("requests_one_class")
    )
    width = max(10, *(len(prefix) + 1 for prefix in prefixes))
    lines = []
    for prefix in prefixes:
        values = [
            f"{name} {format_metric(metrics[prefix + name])}"
            for name in names
            if prefix + name in metrics
        ]
        lines.append(f"  {prefix:<{width}}" + "  ".join(values))
        one_class = int(metrics[prefix + "requests_one_class"])
        total = int(metrics[prefix + "requests"])
        lines.append(
            f"  {'':<{width}}{one_class:,} of {total:,} {unit} have one class and no "
            f"part in gauc"
        )
    return lines
