"""Metrics of predicted probabilities, defined once: AUC, GAUC, log loss, normalised entropy, calibration.

    sums = ranking_sums(logits, labels, request)     # of a batch; sums of batches and workers add up
    metrics = ranking_means(sums)

What is meant, since public libraries differ:

* AUC of one request (or of all candidates together): the share of (positive, negative) pairs in which the
  positive has the higher score, ties counted as half. Equal scores throughout give 0.5, and count.
* `gauc`: the plain mean of AUC over requests that have both labels (the QGS paper's). Requests of one class are
  left out of it, and counted in `requests_one_class`. `gauc_by_impressions` weights the same requests by
  their number of candidates.
* `auc`: all candidates together, from a histogram of logits, so that sums of any size add up. It is exact, and
  `auc_error` 0, for up to `EXACT` distinct logits. Beyond, neighbouring ones share a bin and count as tied;
  `auc_error` is the most by which that can differ from the exact AUC.
* `log_loss` in nats; `normalised_entropy` is it divided by the entropy of the base rate; `calibration` is the
  sum of predicted probabilities by the number of positives, and `calibration_uncorrected` the same before what is added
  to logits of a model that learns from a share of the negatives (`models/label_loss.py`).
* NaN, with a warning that says why, where nothing is valid: null in JSON, no point in MLflow, a dash in tables.

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

EXACT = 1 << 20
"""Distinct logits, of a label and of all workers together, up to which `auc` is exact: 24 bytes each."""

CHUNKS = 256
"""Batches whose logits are kept side by side before they are merged."""

CHANCE = 0.51
"""GAUC below which a model ranks as chance does."""

EXAMPLES = "examples"

NAMES = (
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
"""What `ranking_means` gives."""


def format_metric(value: float | None) -> str:
    """Return a metric with four decimals, or a dash where it is not defined."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.4f}"


def below_chance(metrics: Mapping[str, float]) -> str:
    """Return the figure by which a model ranks no better than the base rates or chance, or nothing."""
    for name in ("mean/normalised_entropy", "normalised_entropy"):
        if metrics.get(name, 0.0) >= 1:
            return f"{name} {metrics[name]:.4f}, the base rates 1"
    if metrics.get("gauc", 1.0) < CHANCE:
        return f"gauc {metrics['gauc']:.4f}, chance 0.5"
    return ""


def request_auc(
    scores: Tensor, labels: Tensor, request: Tensor
) -> tuple[Tensor, Tensor]:
    """AUC of every request, (R,) float64, ties half; and (R,) bool, whether it has both labels, so that it is defined.

    `scores` (N,), `labels` (N,) true or false, `request` (N,) the request of each candidate, numbered from 0; a
    number without candidates is a request without an AUC.
    """
    count = int(request.max()) + 1 if len(request) else 0
    scores, labels = scores.double(), labels.double()
    order = scores.argsort(stable=True)
    order = order[request[order].argsort(stable=True)]  # by request, then by score
    scores, labels, request = scores[order], labels[order], request[order]
    size = torch.bincount(request, minlength=count)
    place = torch.arange(len(order), device=order.device)
    new = torch.ones_like(request, dtype=torch.bool)
    new[1:] = (request[1:] != request[:-1]) | (scores[1:] != scores[:-1])
    tie = new.cumsum(0) - 1  # number of the run of equal scores
    runs = torch.bincount(tie) if len(tie) else tie
    first = place[new]
    middle = (first + (runs - 1) / 2)[tie]  # mean place of a run of equal scores
    rank = middle - (size.cumsum(0) - size)[request]  # from 0, within the request
    zeros = torch.zeros(count, dtype=torch.float64, device=scores.device)
    positives = zeros.index_add(0, request, labels)
    negatives = size - positives
    below = zeros.index_add(0, request, labels * rank) - positives * (positives - 1) / 2
    valid = (positives > 0) & (negatives > 0)
    return torch.where(
        valid, below / (positives * negatives).clamp(min=1), torch.nan
    ), valid


@dataclass(frozen=True)
class Histogram:
    """Negatives and positives by logit: what adds up, over batches and workers in any order, to the same AUC.

    A bin is a logit as long as there are at most `EXACT` of them. Of more, as many low bits of the floating-point
    numbers are dropped as leave no more bins than that: those that are near each other are joined, at any scale.
    """

    chunks: tuple[tuple[Tensor, Tensor, int], ...]
    """Each: (n,) int64, the logits' bits in the order of their values, without the lowest; (2, n) float64, negatives
    and positives; the number of bits dropped."""

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor) -> Self:
        """Of candidates with `logits` (N,), no NaN among them, and `labels` (N,) true or false."""
        bits = (logits.double() + 0.0).view(torch.int64)  # -0 is 0
        positive = labels.double()
        return cls(
            (
                (
                    bits ^ (bits >> 63 & 0x7FFF_FFFF_FFFF_FFFF),
                    torch.stack([1 - positive, positive]),
                    0,
                ),
            )
        )

    def __add__(self, other: Histogram | float) -> Histogram:
        if not isinstance(other, Histogram):  # the 0 that a sum begins with
            return self
        joined = Histogram((*self.chunks, *other.chunks))
        held = sum(len(key) for key, _, _ in joined.chunks)
        return (
            joined.merged()
            if held > 2 * EXACT or len(joined.chunks) > CHUNKS
            else joined
        )

    __radd__ = __add__

    def cpu(self) -> Histogram:
        """The same in the memory of the CPU."""
        return Histogram(
            tuple(
                (key.cpu(), counts.cpu(), dropped)
                for key, counts, dropped in self.chunks
            )
        )

    def merged(self) -> Histogram:
        """The same as one chunk of at most `EXACT` bins, ascending."""
        dropped = max(bits for _, _, bits in self.chunks)
        key = torch.cat([key >> (dropped - bits) for key, _, bits in self.chunks])
        key, place = key.unique(return_inverse=True)
        more = 0
        while (
            bool(len(key))
            and int(((key[1:] >> more) != (key[:-1] >> more)).sum()) >= EXACT
        ):
            more += 1
        if more:
            key, bin_ = (key >> more).unique_consecutive(return_inverse=True)
            place = bin_[place]
        counts = torch.cat([counts for _, counts, _ in self.chunks], 1)
        return Histogram(
            (
                (
                    key,
                    counts.new_zeros(2, len(key)).index_add(1, place, counts),
                    dropped + more,
                ),
            )
        )

    def auc(self) -> tuple[float, float]:
        """(AUC, the most by which it can be off); NaN where a label is missing."""
        ((_, (negative, positive), dropped),) = self.merged().chunks
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
    """Sums over a batch of whole requests that `ranking_means` turns into metrics; names begin with `prefix`.

    `logits` (N,), `labels` (N,) true or false, `request` (N,) the request of each candidate. `correction` is what was
    added to the logits, of a model that corrects them. Raises UserError where a logit is not finite.
    """
    logits, labels = check_finite(logits.double()), labels.double()
    auc, valid = request_auc(logits, labels, request)
    size = torch.bincount(request, minlength=len(auc)).double()
    sums: dict[str, Any] = {
        "request_auc": auc[valid].sum(),
        "requests_both": valid.sum(),
        "impression_auc": (auc * size)[valid].sum(),
        "impressions_both": size[valid].sum(),
        "requests": (size > 0).sum(),
        "candidates": torch.tensor(len(logits)),
        "positives": labels.sum(),
        "predicted": torch.sigmoid(logits).sum(),
        "loss": functional.binary_cross_entropy_with_logits(
            logits, labels, reduction="sum"
        ),
    }
    if correction:
        sums["predicted_uncorrected"] = torch.sigmoid(logits - correction).sum()
    sums = {name: value.double() for name, value in sums.items()} | {
        "histogram": Histogram.of(logits, labels)
    }
    return {prefix + name: value for name, value in sums.items()}


def ranking_means(sums: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Metrics from the sums whose names begin with `prefix`, under that prefix too."""

    def total(name: str) -> float:
        return float(sums[prefix + name])

    undefined: dict[str, list[str]] = {}

    def ratio(name: str, above: float, below: float, why: str) -> float:
        if below > 0:
            return above / below
        undefined.setdefault(why, []).append(prefix + name)
        return math.nan

    one_class, same = "no request has both labels", "all labels are the same"
    both = total("impressions_both")
    count, positives = total("candidates"), total("positives")
    rate = positives / count if count else 0.0
    entropy = (
        -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)
        if 0 < rate < 1
        else 0.0
    )
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
        said = "; ".join(
            f"{', '.join(names)}: {why}" for why, names in undefined.items()
        )
        warnings.warn(f"not defined: {said}", stacklevel=2)
    if prefix + "predicted_uncorrected" in sums and positives:
        metrics["calibration_uncorrected"] = total("predicted_uncorrected") / positives
    return {prefix + name: value for name, value in metrics.items()}


def summary(
    found: dict[str, float], kinds: Sequence[str], who: str = "requests"
) -> list[str]:
    """Two lines per label: its metrics of these `kinds`, with its calibration, and of how many of `who` all labels are
    the same."""
    kinds = (*kinds, "calibration", "calibration_uncorrected")
    prefixes = sorted(
        name.removesuffix("requests_one_class")
        for name in found
        if name.endswith("requests_one_class")
    )
    width = max(10, *(len(prefix) + 1 for prefix in prefixes))
    lines = []
    for prefix in prefixes:
        there = (name for name in kinds if prefix + name in found)
        lines.append(
            f"  {prefix:<{width}}"
            + "  ".join(
                f"{name} {format_metric(found[prefix + name])}" for name in there
            )
        )
        one, all_ = (
            int(found[prefix + name]) for name in ("requests_one_class", "requests")
        )
        lines.append(
            f"  {'':<{width}}{one:,} of {all_:,} {who} have one class and no part in gauc"
        )
    return lines
