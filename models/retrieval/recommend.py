"""What holds for every model's `recommend`, whatever it searches with.

    @recommender
    def recommend(self, batch, k, beam=None): ...

An empty batch gets an empty answer, of a history longer than `max_history` the latest
items are read, known items are left out and items kept to a set where that is asked
for, and a model whose scores are not finite is refused.

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
from typing import Any

import torch
from torch import Tensor

from models.cpu.derived import cache_until_changed
from models.cpu.matmul import matmul_precision
from models.dataset.batch import bucket_size
from models.metrics.scores import check_finite
from models.retrieval.data import HistoryBatch
from models.retrieval.search.topk import top_k
from models.training.cuda_graphs import CudaGraphs, compiled

Ranked = tuple[Tensor, Tensor]
"""(items, scores), each (B, k)."""


WHOLE = 2**31 - 1
"""Behaviours of a history of any length."""


def recommender(search: Callable[..., Ranked]) -> Callable[..., Ranked]:
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
        *args: Any,
        allowed: Tensor | None = None,
        unseen: bool | None = None,
        precision: str | None = None,
        compile: bool | None = None,
        **options: Any,
    ) -> Ranked:
        device = batch.device
        if not len(batch.history):
            return nothing(k, device)
        more = batch.history.shape[1] if unseen else 0  # as many as can be left out
        if device.type == "cuda":
            more = bucket_size(more)  # for few graphs
        read = latest(batch, self.config.max_history)
        read = replace(read, allowed=allowed)

        def found(given: HistoryBatch) -> Ranked:
            return search(self, given, k + more, *args, **options)

        if device.type == "cuda":
            asked = f"graphs of {k + more} {args} {sorted(options.items())} {precision} {compile}"
            items, scores = _replay(
                self, asked, read, found, precision or "highest", bool(compile)
            )
        else:
            items, scores = found(read)
            check_finite(scores, tail=True)
        return leave_out(items, scores, batch, k) if unseen else (items, scores)

    return torch.no_grad()(recommend)


ONE = threading.Lock()
"""Held from the copy of a batch to that of its answer: requests that are served by
several threads share the graphs."""


def _replay(
    model: Any,
    asked: str,
    batch: HistoryBatch,
    search: Callable[[HistoryBatch], Ranked],
    precision: str,
    fused: bool,
) -> Ranked:
    """Search on a GPU by the CUDA graph of the batch's shape, if one was captured."""
    given = batch.histories.pad_to_buckets(model.config.max_history, ("B", "T"))

    def make() -> CudaGraphs[Ranked]:
        search(
            given
        )  # makes what is derived of the weights, which is no part of a graph
        run = compiled(search) if fused else search

        def with_precision(given: HistoryBatch) -> Ranked:
            with matmul_precision(precision):
                return run(given)

        return CudaGraphs(with_precision, batch.history.device)

    rows = len(batch.history)
    with ONE:
        items, scores = cache_until_changed(model, asked, make)(given)
        items, scores = items[:rows].clone(), scores[:rows].clone()
    check_finite(scores, tail=True)
    return items, scores


def nothing(k: int, device: torch.device) -> Ranked:
    """The answer to no request."""
    return torch.zeros((0, k), dtype=torch.long, device=device), torch.zeros(
        (0, k), device=device
    )


def history_to_give(longest: int, options: Mapping[str, Any]) -> int:
    """Return how many behaviours a request needs for a `recommend` that reads
    `longest`.

    All behaviours are needed to leave out known items.
    """
    return WHOLE if options.get("unseen") else longest


def best_allowed(scores: Tensor, k: int, batch: HistoryBatch) -> Ranked:
    """The k highest `scores` (B, N) of a whole catalogue, or of the items that the batch allows; the tail is -1 and
    -inf. The scores are changed."""
    if (allowed := batch.allowed) is None:
        return top_k(scores, k)
    items, scores = top_k(scores.add_(allowed), k)
    return items.masked_fill(scores == -torch.inf, -1), scores


def leave_out(items: Tensor, scores: Tensor, batch: HistoryBatch, k: int) -> Ranked:
    """The first k of the ranked items (B, K) that are not in the histories (B, T); the tail is -1 and -inf."""
    history = batch.history
    places = torch.arange(history.shape[1], device=history.device)
    known = (
        history.masked_fill(places >= batch.history_length[:, None], -1).sort(1).values
    )
    place = torch.searchsorted(known, items.contiguous()).clamp(max=known.shape[1] - 1)
    seen = (known.gather(1, place) == items) & (items >= 0)
    order = seen.int().sort(dim=1, stable=True).indices[:, :k]
    gone = seen.gather(1, order)
    return items.gather(1, order).masked_fill(gone, -1), scores.gather(
        1, order
    ).masked_fill(gone, -torch.inf)


def latest(batch: HistoryBatch, longest: int) -> HistoryBatch:
    """The batch with each history cut to its latest `longest` items; as it is where none is longer."""
    history = batch.history
    if history.shape[1] <= longest:
        return batch
    length = batch.history_length
    first = (length - longest).clamp(min=0).unsqueeze(1)
    cut = history.gather(
        1, first + torch.arange(longest, device=history.device)
    )  # (B, longest)
    return replace(batch, history=cut, history_length=length.clamp(max=longest))
