"""What an evaluation found, in lines: of models that rank the catalogue, that score candidates, or do neither."""

from __future__ import annotations

from typing import Protocol

from models.retrieval.metrics import CUTOFFS


class Measured(Protocol):
    """What is told of an evaluation."""

    metrics: dict[str, float]
    skipped: int
    """Requests without a history, left out."""
    users_per_s: float
    """Requests per second."""
    device: str


def catalogue_lines(found: Measured) -> list[str]:
    """Recall and NDCG by K, also of new items, and how fast the catalogue was ranked."""
    lines = ["  K       " + "".join(f"{k:>9}" for k in CUTOFFS)]
    for metric in ("recall", "ndcg"):
        lines.append(f"  {metric:<8}" + "".join(f"{found.metrics[f'{metric}@{k}']:9.4f}" for k in CUTOFFS))
    left_out = f"{found.skipped:,} requests without history left out"
    speed = f"  {found.users_per_s:,.0f} requests/s on {found.device}; {left_out}"
    return [*lines, *new_item_lines(found.metrics), speed]


def new_item_lines(metrics: dict[str, float]) -> list[str]:
    """A line for each subset of new items."""
    lines = []
    for name in sorted(key.split("/")[0] for key in metrics if key.endswith("/examples")):
        line = f"{metrics[f'{name}/examples']:,.0f} requests"
        if f"{name}/ndcg@10" in metrics:
            line += "".join(f", {metric} {metrics[f'{name}/{metric}']:.4f}" for metric in ("recall@10", "ndcg@10"))
        lines.append(f"  {name}  {line}")
    return lines


def candidate_lines(found: Measured) -> list[str]:
    """How candidates of searches were scored, label by label."""
    return _by_label(found.metrics, ("gauc", "auc", "log_loss", "normalised_entropy"), "requests")


def task_lines(found: Measured) -> list[str]:
    """How a user's actions were foretold, task by task; all candidates of a user are one request."""
    metrics = found.metrics
    kinds = ("gauc", "auc", "log_loss", "normalised_entropy", "calibration")
    both = (
        f"{metrics['mean/normalised_entropy']:.4f} ({metrics['mean/normalised_entropy_train']:.4f} by training rates)"
    )
    loss = f"  loss over tasks {metrics['eval_loss']:.4f}, mean normalised entropy {both}"
    return [*_by_label(metrics, kinds, "users"), loss]


def plain_lines(found: Measured) -> list[str]:
    """All figures in a line: of what is no recommender yet, such as an encoder."""
    return ["  " + "  ".join(f"{name} {value:.6g}" for name, value in found.metrics.items())]


def _by_label(metrics: dict[str, float], kinds: tuple[str, ...], who: str) -> list[str]:
    end = "requests_one_class"
    prefixes = sorted(name.removesuffix(end) for name in metrics if name.endswith(end))
    width = max(10, *(len(prefix) + 1 for prefix in prefixes))
    lines = []
    for prefix in prefixes:
        lines.append(f"  {prefix:<{width}}" + "  ".join(f"{name} {metrics[prefix + name]:.4f}" for name in kinds))
        one, all_ = (int(metrics[prefix + name]) for name in (end, "requests"))
        lines.append(f"  {'':<{width}}{one:,} of {all_:,} {who} have one class and no part in gauc")
    return lines
