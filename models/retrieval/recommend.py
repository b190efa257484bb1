"""What holds for every model's `recommend`, whatever it searches with.

    @recommender
    def recommend(self, batch, k, beam=None): ...

An empty batch gets an empty answer, of a history longer than `max_history` the latest items are read, known items are
left out where that is asked for, and a model whose scores are not finite is refused.

Shapes: `B` requests, `T` items of the longest history.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.config import check_least
from models.scores import check_finite

Ranked = tuple[Tensor, Tensor]
"""(items, scores), each (B, k)."""


WHOLE = 2**31 - 1
"""Behaviours of a history of any length."""


@dataclass
class RecommendOptions:
    """Options of every `recommend`."""

    unseen: bool | None = None
    """true: leave out the items of the user's history; in validations of a training, of its max_history latest."""


@dataclass
class BeamOptions(RecommendOptions):
    """Options of a `recommend` by beam search; left out they are those of the model's config."""

    beam: int | None = None
    """Beams, of models that decode semantic IDs."""
    constrained: bool | None = None
    """Whether decoding semantic IDs keeps to the catalogue's trie."""

    def __post_init__(self) -> None:
        check_least(self, ["beam"], 1, "--")


def recommender(search: Callable[..., Ranked]) -> Callable[..., Ranked]:
    """The method `search(self, batch, k, ...)` as a model's `recommend`; it takes the same arguments, and `unseen`."""

    @functools.wraps(search)
    def recommend(
        self: Any, batch: dict[str, Tensor], k: int, *args: Any, unseen: bool | None = None, **options: Any
    ) -> Ranked:
        if not len(batch["history"]):
            return nothing(k, batch["history"].device)
        more = batch["history"].shape[1] if unseen else 0  # as many as can be left out
        items, scores = search(self, latest(batch, self.config.max_history), k + more, *args, **options)
        if unseen:
            items, scores = leave_out(items, scores, batch, k)
        return items, check_finite(scores, tail=True)

    return torch.no_grad()(recommend)


def nothing(k: int, device: torch.device) -> Ranked:
    """The answer to no request."""
    return torch.zeros((0, k), dtype=torch.long, device=device), torch.zeros((0, k), device=device)


def history_to_give(longest: int, options: Mapping[str, Any]) -> int:
    """How many behaviours a request is to have for a `recommend` that reads `longest`: all, where known items are left
    out."""
    return WHOLE if options.get("unseen") else longest


def leave_out(items: Tensor, scores: Tensor, batch: dict[str, Tensor], k: int) -> Ranked:
    """The first k of the ranked items (B, K) that are not in the histories (B, T); the tail is -1 and -inf."""
    history = batch["history"]
    places = torch.arange(history.shape[1], device=history.device)
    known = history.masked_fill(places >= batch["history_length"][:, None], -1)
    seen = ((items[:, :, None] == known[:, None, :]) & (items >= 0)[:, :, None]).any(2)
    order = seen.int().sort(dim=1, stable=True).indices[:, :k]
    gone = seen.gather(1, order)
    return items.gather(1, order).masked_fill(gone, -1), scores.gather(1, order).masked_fill(gone, -torch.inf)


def latest(batch: dict[str, Tensor], longest: int) -> dict[str, Tensor]:
    """The batch with each history cut to its latest `longest` items; as it is where none is longer."""
    history = batch["history"]
    if history.shape[1] <= longest:
        return batch
    length = batch["history_length"]
    first = (length - longest).clamp(min=0).unsqueeze(1)
    cut = history.gather(1, first + torch.arange(longest, device=history.device))  # (B, longest)
    return batch | {"history": cut, "history_length": length.clamp(max=longest)}
