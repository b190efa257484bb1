"""Base rates of actions: baselines that trained models should exceed.

    python -m jobs.train --config jobs/configs/actions/item_rate.yaml --tables TABLES
        --storage runs --name item_rate

Let n_i be the number of training events of item i, p_ik the number of these events in
which task k is positive, and r_k the share of all training events in which task k is
positive:

    base_rate:  P(k | i) = r_k
    item_rate:  P(k | i) = (p_ik + strength * r_k) / (n_i + strength)
    user_rate:  P(k | u) = (p_uk + strength * r_k) / (n_u + strength)

where n_u and p_uk count the earlier events of user u in the batch, so that nothing
about a user is stored. Events of val and test come after the training window, so that
no rate counts the events that it predicts. Logs of actions have no column for the
position at which an item was shown, so there is no diagnostic model that ranks by the
position.

Shapes: `B` users, `C` candidates of a user, `N` candidates of all users, `I` items, `K`
tasks.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from pydantic import PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import functional

from core.options import STRICT, NamedConfig
from models.actions.base import ActionsModel
from models.actions.catalogue import ActionsCatalogue
from models.actions.requests import ActionsBatch


@dataclass(config=STRICT)
class BaseRateConfig(NamedConfig):
    """Base rate: predicts each task's share in training, for every item."""

    max_history: PositiveInt = 1024
    """Maximum number of earlier events that `user_rate` counts, and of events of a
    training example."""


@dataclass(config=STRICT)
class SmoothedRateConfig(BaseRateConfig):
    """Item rate, user rate: predict each task's share in events of the item or user."""

    strength: PositiveFloat = 20.0
    """Weight of the base rate, as a number of events."""


class BaseRate(ActionsModel):
    """Log-odds of each task's share of the training events."""

    name = "base_rate"
    config_class = BaseRateConfig
    trains_by_gradient = False
    is_baseline = True
    config: BaseRateConfig
    events: Tensor
    """(I,) number of training events of each item."""
    done: Tensor
    """(I, K) number of training events of each item in which the task is positive."""

    def __init__(self, config: BaseRateConfig, catalogue: ActionsCatalogue) -> None:
        super().__init__(config, catalogue)
        self.labels = catalogue.labels
        self.train_rates = catalogue.train_rates
        shape = catalogue.num_items, len(self.labels)
        self.register_buffer("events", torch.zeros(shape[0], dtype=torch.float64))
        self.register_buffer("done", torch.zeros(shape, dtype=torch.float64))

    def fit_in_one_pass(self, batches: Iterable[ActionsBatch]) -> None:
        """Count the training events of each item, and its positive events per task."""
        num_events = torch.zeros_like(self.events, device="cpu")
        num_positives = torch.zeros_like(self.done, device="cpu")
        for batch in batches:
            is_learned = batch.learn.cpu()
            item = batch.item.cpu()[is_learned]
            num_events += torch.bincount(item, minlength=len(num_events))
            num_positives.index_add_(0, item, batch.label.cpu()[is_learned].double())
        self.events.copy_(num_events)
        self.done.copy_(num_positives)

    def rates(self, item: Tensor) -> Tensor:
        """Return the probabilities (N, K) of the tasks for `item` (N,)."""
        total = self.events.sum().clamp(min=1)
        return (self.done.sum(0) / total).expand(len(item), -1)

    def score(self, batch: ActionsBatch) -> Tensor:
        """Return (N, K) log-odds of the valid candidates of all users, row by row."""
        item = batch.candidate_item[batch.candidate_valid]
        return self.rates(item).logit(eps=1e-6)


class ItemRate(BaseRate):
    """Log-odds of each task's smoothed share of the item's training events."""

    name = "item_rate"
    config_class = SmoothedRateConfig
    config: SmoothedRateConfig

    def rates(self, item: Tensor) -> Tensor:
        """Return the probabilities (N, K) of the tasks for `item` (N,).

        Items without training events have the base rates, as do the new items of served
        requests, which are not in the catalogue.
        """
        base, strength = super().rates(item), self.config.strength
        num_items = len(self.events)
        in_catalogue = item < num_items
        row = item.clamp(max=num_items - 1)
        events = (self.events[row] * in_catalogue)[:, None]
        done = self.done[row] * in_catalogue[:, None]
        return (done + strength * base) / (events + strength)


class UserRate(BaseRate):
    """Log-odds of each task's smoothed share of the user's earlier events."""

    name = "user_rate"
    config_class = SmoothedRateConfig
    config: SmoothedRateConfig

    not_served = "requests do not have the tasks of earlier events"

    def score(self, batch: ActionsBatch) -> Tensor:
        """Return (N, K) log-odds of the valid candidates of all users, row by row."""
        valid = batch.candidate_valid
        earlier = batch.count_earlier()[:, batch.item.shape[1] :]  # (B, C)
        # done[:, n]: number of positives among the first n events
        done = functional.pad(batch.label.double().cumsum(1), (0, 0, 1, 0))
        done = done.take_along_dim(earlier[..., None], 1)[valid]
        strength = self.config.strength
        base = self.rates(batch.candidate_item[valid])
        rates = (done + strength * base) / (earlier[valid][:, None] + strength)
        return rates.logit(eps=1e-6)
