"""Metrics of predicted probabilities: AUC, GAUC, log loss, entropy, calibration.

    sums = ranking_sums(logits, labels, request)  # sums of batches and workers add up
    metrics = ranking_means(sums)

Public libraries differ in their definitions. Here:

- AUC of a request, or of all candidates together, is the share of (positive, negative)
  pairs in which the positive has the higher score. Ties count as half, so equal scores
  throughout give 0.5.
- `gauc` is the unweighted mean of AUC over the requests that have both labels, as in
  the QGS paper. `requests_one_class` counts the other requests. `gauc_by_impressions`
  weights the same requests by their number of candidates.
- `auc` covers all candidates, computed from a histogram of logits that can be added up.
  It is exact (`auc_error` 0) for up to `MAX_EXACT_LOGITS` distinct logits. Beyond,
  neighbouring logits share a bin and count as tied; `auc_error` bounds the difference
  from the exact AUC.
- `log_loss` is in nats. `normalised_entropy` is the log loss divided by the entropy of
  the base rate. `calibration` is the sum of predicted probabilities divided by the
  number of positives. `calibration_uncorrected` is the calibration before the
  correction of logits for sampled negatives (`models/label_loss.py`).
- An undefined metric is NaN, and a warning says why. NaN becomes null in JSON, no point
  in MLflow, and a dash in tables.

Shapes: `N` candidates of `R` requests.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from models.metrics.scores import check_finite

MAX_EXACT_LOGITS = 1 << 20
"""Distinct logits of a label, over all workers, up to which `auc` is exact (24 bytes
each)."""

MAX_CHUNKS = 256
"""Number of chunks in a histogram above which they are merged."""

CHANCE_GAUC = 0.51
"""GAUC below which a model is reported to rank no better than chance."""

EXAMPLES = "examples"

METRIC_NAMES = (
    "gauc",
    "gauc_by_impressions",
    "auc",
    "auc_error",
    "log_loss",
    "normalised_entropy",
    "calibration",
    "requests",
    "requests_one_class",
    "candidates",
    "positives",
)
"""Names of the metrics from `ranking_means`."""


def format_metric(value: float | None) -> str:
    """Return a metric with four decimals, or a dash if it is not defined."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.4f}"


def describe_chance_level(metrics: Mapping[str, float]) -> str:
    """Describe the metric that shows no gain over the base rates or chance, if any.

    Returns:
        Half a sentence, or an empty string if the model is better than chance.
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
        request: (N,) request of each candidate, numbered from 0. A number without
            candidates is a request without an AUC.

    Returns:
        (R,) float64 AUCs, and (R,) bool: whether the request has both labels, so that
        its AUC is defined.
    """
    count = int(request.max()) + 1 if len(request) else 0
    scores, labels = scores.double(), labels.double()
    order = scores.argsort(stable=True)
    order = order[request[order].argsort(stable=True)]  # by request, then by score
    scores, labels, request = scores[order], labels[order], request[order]
    size = torch.bincount(request, minlength=count)
    starts_run = torch.ones_like(request, dtype=torch.bool)
    starts_run[1:] = (request[1:] != request[:-1]) | (scores[1:] != scores[:-1])
    run = starts_run.cumsum(0) - 1  # (N,) index of the run of equal scores
    run_length = torch.bincount(run) if len(run) else run
    run_start = torch.arange(len(order), device=order.device)[starts_run]
    mean_index = (run_start + (run_length - 1) / 2)[run]
    request_start = size.cumsum(0) - size
    rank = mean_index - request_start[request]  # from 0, within the request
    zeros = torch.zeros(count, dtype=torch.float64, device=scores.device)
    positives = zeros.index_add(0, request, labels)
    negatives = size - positives
    rank_sum = zeros.index_add(0, request, labels * rank)
    ordered_pairs = rank_sum - positives * (positives - 1) / 2
    valid = (positives > 0) & (negatives > 0)
    auc = ordered_pairs / (positives * negatives).clamp(min=1)
    return torch.where(valid, auc, torch.nan), valid


@dataclass(frozen=True)
class Histogram:
    """Counts of negatives and positives by logit, which can be added in any order.

    With at most `MAX_EXACT_LOGITS` distinct logits each has its own bin. With more, the
    low bits of the floating-point numbers are dropped until no more bins are left, so
    nearby logits of any scale share a bin.
    """

    chunks: tuple[tuple[Tensor, Tensor, int], ...]
    """Tuples of keys, counts and dropped bits. Keys (n,) int64 are the bits of the
    logits, mapped so that they rise with the logit, without the dropped low bits.
    Counts (2, n) float64 are negatives and positives."""

    @classmethod
    def from_logits(cls, logits: Tensor, labels: Tensor) -> Self:
        """Count the candidates of a batch.

        Args:
            logits: (N,) logits without NaN.
            labels: (N,) labels, true or false.
        """
        bits = (logits.double() + 0.0).view(torch.int64)  # -0 becomes 0
        # Negative numbers are stored as sign and magnitude: flip the magnitude.
        key = bits ^ (bits >> 63 & 0x7FFF_FFFF_FFFF_FFFF)
        positive = labels.double()
        counts = torch.stack([1 - positive, positive])
        return cls(((key, counts, 0),))

    def __add__(self, other: Histogram | float) -> Histogram:
        if not isinstance(other, Histogram):
            return self  # the 0 that `sum` starts with
        joined = Histogram((*self.chunks, *other.chunks))
        num_keys = sum(len(key) for key, _, _ in joined.chunks)
        if num_keys > 2 * MAX_EXACT_LOGITS or len(joined.chunks) > MAX_CHUNKS:
            return joined.merge()
        return joined

    __radd__ = __add__

    def cpu(self) -> Histogram:
        """Copy the counts to CPU memory."""
        return Histogram(
            tuple(
                (key.cpu(), counts.cpu(), dropped)
                for key, counts, dropped in self.chunks
            )
        )

    def merge(self) -> Histogram:
        """Merge all chunks into one with at most `MAX_EXACT_LOGITS` ascending keys."""
        dropped = max(bits for _, _, bits in self.chunks)
        key = torch.cat([key >> (dropped - bits) for key, _, bits in self.chunks])
        key, index = key.unique(return_inverse=True)
        more = 0
        while len(key) and _count_distinct(key >> more) > MAX_EXACT_LOGITS:
            more += 1
        if more:
            key, bin_index = (key >> more).unique_consecutive(return_inverse=True)
            index = bin_index[index]
        all_counts = torch.cat([counts for _, counts, _ in self.chunks], 1)
        counts = all_counts.new_zeros(2, len(key)).index_add(1, index, all_counts)
        return Histogram(((key, counts, dropped + more),))

    def auc(self) -> tuple[float, float]:
        """Return the AUC and a bound on its binning error; NaN if only one class is present."""
        ((_, (negative, positive), dropped),) = self.merge().chunks
        pairs = float(negative.sum() * positive.sum())
        if not pairs:
            return math.nan, math.nan
        tied = float((negative * positive).sum())
        below = float((positive * (negative.cumsum(0) - negative)).sum())
        return (below + tied / 2) / pairs, tied / 2 / pairs if dropped else 0.0


def ranking_sums(
    logits: Tensor,
    labels: Tensor,
    request: Tensor,
    prefix: str = "",
    correction: float = 0.0,
) -> dict[str, Any]:
    """Compute the sums over a batch of whole requests for `ranking_means`.

    Args:
        logits: (N,) logits.
        labels: (N,) labels, true or false.
        request: (N,) request of each candidate.
        prefix: Prefix of the names of the sums.
        correction: Value that was added to the logits to correct them for sampled
            negatives, 0 for none.

    Raises:
        UserError: If a logit is not finite.
    """
    logits, labels = check_finite(logits.double()), labels.double()
    auc, valid = request_auc(logits, labels, request)
    size = torch.bincount(request, minlength=len(auc)).double()
    loss = functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    sums: dict[str, Any] = {
        "request_auc": auc[valid].sum(),
        "requests_both": valid.sum(),
        "impression_auc": (auc * size)[valid].sum(),
        "impressions_both": size[valid].sum(),
        "requests": (size > 0).sum(),
        "candidates": torch.tensor(len(logits)),
        "positives": labels.sum(),
        "predicted": torch.sigmoid(logits).sum(),
        "loss": loss,
    }
    if correction:
        sums["predicted_uncorrected"] = torch.sigmoid(logits - correction).sum()
    sums = {name: value.double() for name, value in sums.items()}
    sums["histogram"] = Histogram.from_logits(logits, labels)
    return {prefix + name: value for name, value in sums.items()}


def ranking_means(sums: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Turn sums into metrics.

    Args:
        sums: Sums of `ranking_sums`, added over batches and workers.
        prefix: Prefix of the names in `sums` and of the returned names.
    """
    undefined: dict[str, list[str]] = {}

    def total(name: str) -> float:
        return float(sums[prefix + name])

    def ratio(name: str, numerator: float, denominator: float, reason: str) -> float:
        if denominator > 0:
            return numerator / denominator
        undefined.setdefault(reason, []).append(prefix + name)
        return math.nan

    one_class, same = "no request has both labels", "all labels are the same"
    both = total("impressions_both")
    count, positives = total("candidates"), total("positives")
    entropy = _binary_entropy(positives / count) if count else 0.0
    auc, error = sums[prefix + "histogram"].auc()
    if math.isnan(auc):
        undefined.setdefault(same, []).append(f"{prefix}auc")
    loss = ratio("log_loss", total("loss"), count, "there are no candidates")
    metrics = {
        "gauc": ratio("gauc", total("request_auc"), total("requests_both"), one_class),
        "gauc_by_impressions": ratio(
            "gauc_by_impressions", total("impression_auc"), both, one_class
        ),
        "auc": auc,
        "auc_error": error,
        "log_loss": loss,
        "normalised_entropy": ratio("normalised_entropy", loss, entropy, same),
        "calibration": ratio(
            "calibration", total("predicted"), positives, "there is no positive"
        ),
        "requests": total("requests"),
        "requests_one_class": total("requests") - total("requests_both"),
        "candidates": count,
        "positives": positives,
    }
    if undefined:
        reasons = [f"{', '.join(names)}: {why}" for why, names in undefined.items()]
        warnings.warn(f"not defined: {'; '.join(reasons)}", stacklevel=2)
    if prefix + "predicted_uncorrected" in sums and positives:
        metrics["calibration_uncorrected"] = total("predicted_uncorrected") / positives
    return {prefix + name: value for name, value in metrics.items()}


def _binary_entropy(rate: float) -> float:
    """Return the entropy in nats of a label with this base rate."""
    if not 0 < rate < 1:
        return 0.0
    return -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)


def _count_distinct(ascending: Tensor) -> int:
    """Count the distinct values of a non-empty ascending tensor (n,)."""
    return int((ascending[1:] != ascending[:-1]).sum()) + 1


def summarize(
    metrics: dict[str, float], names: Sequence[str], unit: str = "requests"
) -> list[str]:
    """Format the metrics of all labels, two lines per label.

    The second line counts the requests or users whose labels are all the same.

    Args:
        metrics: Metrics of `ranking_means` for one or more prefixes.
        names: Metrics to show, in this order, followed by the calibration.
        unit: What AUC groups by: "requests" or "users".
    """
    names = (*names, "calibration", "calibration_uncorrected")
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
