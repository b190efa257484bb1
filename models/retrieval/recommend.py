"""The wrapper of every model's `recommend`.

    @recommender
    def recommend(self, batch, k, beam=None): ...

The wrapper handles empty batches, cuts histories to the latest `max_history` items,
drops items of the history (`unseen`), restricts items to a set (`allowed`), and raises
UserError if scores are not finite. On a GPU it replays CUDA graphs.

    allowed = model.encode_allowed(in_stock)  # once per set: (N,) bool, by item_index
    items, scores = model.recommend(batch, k, allowed=allowed)

Shapes: `B` requests, `T` items of the longest history, `N` items, `E` edges of the
trie.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from models.cpu.weights import cache_until_changed, matmul_precision
from models.dataset.batch import bucket_size
from models.model import check_finite
from models.retrieval.data import HistoryBatch
from models.retrieval.search import top_k
from models.training.cuda_graphs import CudaGraphs

Ranked = tuple[Tensor, Tensor]
"""Items and scores, (B, k) both, best first."""

Found = TypeVar("Found", bound=tuple[Tensor, ...])
"""Items and scores, (B, k) both, and further results by request."""

UNLIMITED_HISTORY = 2**31 - 1
"""A `max_history` that no history exceeds."""


def recommender(search: Callable[..., Found]) -> Callable[..., Found]:
    """Wrap `search(self, batch, k, ...)` as a model's `recommend`.

    The wrapper takes the same arguments, the options of `RecommendOptions`, and
    `allowed`, a set of items made by `encode_allowed` that restricts the search for all
    requests of the batch.
    """

    @functools.wraps(search)
    def recommend(
        self: Any,
        batch: HistoryBatch,
        k: int,
        *,
        allowed: Tensor | None = None,
        unseen: bool | None = None,
        precision: str | None = None,
        **options: Any,
    ) -> Any:
        device = batch.device
        if not len(batch.history):
            items = torch.zeros((0, k), dtype=torch.long, device=device)
            return items, items.float()
        # rank as many further items as `unseen` can drop
        max_dropped = batch.history.shape[1] if unseen else 0
        if device.type == "cuda":
            max_dropped = bucket_size(max_dropped)  # fewer shapes, fewer graphs
        num_items = k + max_dropped
        latest = truncate_history(batch, self.config.max_history)
        latest = replace(latest, allowed=allowed)

        def run_search(histories: HistoryBatch) -> Any:
            return search(self, histories, num_items, **options)

        if device.type == "cuda":
            graphs_name = f"graphs of {num_items} {sorted(options.items())} {precision}"
            items, scores, *others = _search_by_graph(
                self, graphs_name, latest, run_search, precision or "highest"
            )
        else:
            items, scores, *others = run_search(latest)
        check_finite(scores, tail=True)
        if unseen:
            items, scores = drop_history_items(items, scores, batch, k)
        return items, scores, *others

    return torch.no_grad()(recommend)


GRAPH_LOCK = threading.Lock()
"""Held while a graph's inputs and outputs are in use, as all serving threads share the
graphs."""


def _search_by_graph(
    model: Any,
    name: str,
    batch: HistoryBatch,
    search: Callable[[HistoryBatch], Any],
    precision: str,
) -> list[Tensor]:
    """Run a search on a GPU through a CUDA graph of the batch's shape."""
    padded = batch.histories.pad_to_buckets(model.config.max_history, ("B", "T"))

    def make_graphs() -> CudaGraphs[Any]:
        # the first run computes tensors derived from the weights outside of a graph
        search(padded)

        def run_with_precision(histories: HistoryBatch) -> Any:
            with matmul_precision(precision):
                return search(histories)

        return CudaGraphs(run_with_precision, batch.history.device)

    rows = len(batch.history)
    with GRAPH_LOCK:
        found = cache_until_changed(model, name, make_graphs)(padded)
        return [values[:rows].clone() for values in found]


def required_history(max_history: int, options: Mapping[str, Any]) -> int:
    """Return the number of latest behaviours that `recommend` needs per request.

    Args:
        max_history: Behaviours that the model reads.
        options: Options of `recommend`; `unseen` needs all behaviours.
    """
    return UNLIMITED_HISTORY if options.get("unseen") else max_history


def best_allowed(scores: Tensor, k: int, batch: HistoryBatch) -> Ranked:
    """Return the k items with the highest `scores` (B, N), and their scores.

    Only items of `batch.allowed` are returned, if it is set; then `scores` is
    overwritten. If there are fewer than k items, the tail is item -1 with score -inf.

    Args:
        scores: (B, N) scores of all items.
        k: Number of items.
        batch: Requests; `allowed` has 0 for allowed items and -inf for other items.
    """
    allowed = batch.allowed
    if allowed is None:
        return top_k(scores, k)
    items, scores = top_k(scores.add_(allowed), k)
    return items.masked_fill(scores == -torch.inf, -1), scores


def drop_history_items(
    items: Tensor, scores: Tensor, batch: HistoryBatch, k: int
) -> Ranked:
    """Return the first k ranked items that are not in the histories, and their scores.

    If there are fewer, the tail is item -1 with score -inf.

    Args:
        items: (B, K) ranked items.
        scores: (B, K) scores.
        batch: Histories (B, T).
        k: Number of items to return.
    """
    history = batch.history
    position = torch.arange(history.shape[1], device=history.device)
    is_padding = position >= batch.history_length[:, None]
    sorted_history = history.masked_fill(is_padding, -1).sort(1).values
    index = torch.searchsorted(sorted_history, items.contiguous())
    index = index.clamp(max=sorted_history.shape[1] - 1)
    in_history = (sorted_history.gather(1, index) == items) & (items >= 0)
    # (B, k): a stable sort moves items of the history to the end
    order = in_history.int().sort(dim=1, stable=True).indices[:, :k]
    is_dropped = in_history.gather(1, order)
    top_items = items.gather(1, order).masked_fill(is_dropped, -1)
    return top_items, scores.gather(1, order).masked_fill(is_dropped, -torch.inf)


def truncate_history(batch: HistoryBatch, max_history: int) -> HistoryBatch:
    """Return the batch with each history cut to its latest `max_history` items."""
    history = batch.history
    if history.shape[1] <= max_history:
        return batch
    length = batch.history_length
    first = (length - max_history).clamp(min=0).unsqueeze(1)
    index = first + torch.arange(max_history, device=history.device)
    return replace(
        batch,
        history=history.gather(1, index),  # (B, max_history)
        history_length=length.clamp(max=max_history),
    )
