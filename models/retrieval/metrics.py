"""Recall@K and NDCG@K of ranked items with one target each, over the full catalogue.

Metrics are kept as sums with a count of examples, so that batches and workers add up exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from models.by_user import PREFIX, ByUser

CUTOFFS = (1, 5, 10, 20)
"""Ranks K at which Recall@K and NDCG@K are measured."""

EXAMPLES = "examples"

SHOWN: tuple[str, ...] = ("recall@10", "ndcg@10")
"""Metrics of a training's best epoch that are printed."""

FIRST = "first/"
"""What metrics begin with that are of the requests whose target is not among the user's behaviours before them, as
`first/ndcg@10`: the others repeat an item. All models have the same ones, whatever part of the history they read."""


def hit_rank(items: Tensor, target: Tensor) -> Tensor:
    """(B,) int64: the place of `target` (B,) in the ranked `items` (B, K), from 0; K where it is absent.

    What is ranked and what is asked for are items: -1, where nothing is, hits nothing.
    """
    hits = (items == target[:, None]) & (items >= 0)
    return torch.where(hits.any(1), hits.long().argmax(1), items.shape[1])


def recall_at_k(items: Tensor, target: Tensor, k: int) -> Tensor:
    """(B,) float64: 1 where the target is among the first k of the ranked items (B, K)."""
    _check_cutoff(items, k)
    return (hit_rank(items, target) < k).double()


def ndcg_at_k(items: Tensor, target: Tensor, k: int) -> Tensor:
    """(B,) float64: 1 / log2(2 + rank) of the target among the first k, else 0; the ideal DCG is 1."""
    _check_cutoff(items, k)
    rank = hit_rank(items, target).double()
    return torch.where(rank < k, 1 / torch.log2(rank + 2), 0.0)


def _check_cutoff(items: Tensor, k: int) -> None:
    if not 1 <= k <= items.shape[1]:
        raise ValueError(f"cutoff {k} is not within the {items.shape[1]} ranked items; rank more of them")


def metric_sums(items: Tensor, target: Tensor, cutoffs: Sequence[int] = CUTOFFS) -> dict[str, float]:
    """Sums over the batch of `recall@k` and `ndcg@k` for each cutoff, and `examples`, the count."""
    sums = {f"recall@{k}": float(recall_at_k(items, target, k).sum()) for k in cutoffs}
    sums |= {f"ndcg@{k}": float(ndcg_at_k(items, target, k).sum()) for k in cutoffs}
    return {**sums, EXAMPLES: float(len(target))}


def names(catalogue: Any) -> list[str]:
    """Names of what `means` gives, on any catalogue."""
    every = [f"{metric}@{k}" for metric in ("recall", "ndcg") for k in CUTOFFS]
    return [*every, *(FIRST + name for name in [*every, EXAMPLES])]


def measure(model: Any, batch: dict[str, Tensor], by_user: int = 0, **options: Any) -> dict[str, Any]:
    """`ranking_sums` of the model's ranking of the full catalogue; `options` go to its `recommend`."""
    items, _ = model.recommend(batch, max(CUTOFFS), **options)
    read = {name: value.cpu() for name, value in batch.items() if name in ("target", "repeats", "user_row")}
    return ranking_sums(items.cpu(), read, by_user)  # where each of the many sums waits for nothing


def ranking_sums(items: Tensor, batch: dict[str, Tensor], by_user: int = 0) -> dict[str, Any]:
    """`metric_sums` of the ranked items (B, K), those of the requests that repeat no item (`FIRST`), and with `by_user`
    recall@10 and ndcg@10 of every so-manieth user."""
    target = batch["target"]
    first = is_first(batch)
    of_first = {FIRST + name: value for name, value in metric_sums(items[first], target[first]).items()}
    return metric_sums(items, target) | of_first | user_sums(items, batch, by_user)


def is_first(batch: dict[str, Tensor]) -> Tensor:
    """(B,) bool: whether the target is not in the user's whole history (`Examples.collate`)."""
    return batch["repeats"] == 0


def user_sums(items: Tensor, batch: dict[str, Tensor], stride: int) -> dict[str, ByUser]:
    """recall@10 and ndcg@10 of every `stride`th user, of none for 0, from the ranked items (B, K); ndcg@10 of requests
    that repeat no item too."""
    if not stride:
        return {}
    rank = hit_rank(items, batch["target"])
    ndcg = torch.where(rank < 10, 1 / torch.log2(rank + 2.0), 0.0)
    first = torch.where(is_first(batch), ndcg, torch.nan)
    values = {"recall@10": (rank < 10).double(), "ndcg@10": ndcg, f"{FIRST}ndcg@10": first}
    return {PREFIX + name: ByUser.of(batch["user_row"], value, stride) for name, value in values.items()}


def add_sums(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    """The sums of several batches or workers together."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total


def means(sums: dict[str, float]) -> dict[str, float]:
    """Means per example from sums. Those of `FIRST` are per example of theirs, whose number stays; 0 where none is."""
    count = sums.get(EXAMPLES, 0.0)
    if not count:
        raise ValueError("no examples were evaluated, so there is no mean; check the split")
    first = max(1.0, sums.get(FIRST + EXAMPLES, 0.0))
    found = {name: float(value / (first if name.startswith(FIRST) else count)) for name, value in sums.items()}
    del found[EXAMPLES]
    return found | {name: float(sums[name]) for name in [FIRST + EXAMPLES] if name in sums}


def summary(metrics: dict[str, float]) -> list[str]:
    """A line of cutoffs, and one of each metric at them."""
    lines = ["  K       " + "".join(f"{k:>9}" for k in CUTOFFS)]
    for metric in ("recall", "ndcg"):
        lines.append(f"  {metric:<8}" + "".join(f"{metrics[f'{metric}@{k}']:9.4f}" for k in CUTOFFS))
    return lines
