"""Base rates of actions: models without gradient training that others have to clear.

    python -m jobs.train --config jobs/configs/actions/item_rate.yaml --tables TABLES --storage runs --name item_rate

With n_i the training events of item i, p_ik those in which task k was done, and r_k the
share of all training events in which it was done:

    base_rate:  P(k | i) = r_k
    item_rate:  P(k | i) = (p_ik + strength * r_k) / (n_i + strength)

Events of val and test come after the training window, so no rate counts what it
predicts. A feed has no column for the position at which an item was shown, so no model
ranks by it.

Shapes: `N` candidates, `I` items, `K` tasks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from models.actions.batch import ActionsBatch
from models.actions.catalogue import ActionsCatalogue
from models.actions.model import ActionsModel
from models.config import check_least, check_positive
from models.layers.standardised import Standardised


@dataclass
class BaseRateConfig:
    """Base rate: predicts each task's share in training, for every item."""

    max_history: int = 1024
    """Events of a training row, as for every model; rates read no history."""

    window_overlap: ClassVar[float] = 0.5

    def __post_init__(self) -> None:
        check_positive(self, ["max_history"])


@dataclass
class ItemRateConfig(BaseRateConfig):
    """Item rate: predicts each task's share in the training events of the item."""

    strength: float = 20.0
    """Events of an item that the base rate weighs as much as."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, ["strength"], 1e-3)


class BaseRate(ActionsModel):
    """Log-odds of each task's share of the training events."""

    name = "base_rate"
    config_class = BaseRateConfig
    trains_by_gradient = False
    is_floor = True
    config: BaseRateConfig
    events: Tensor
    done: Tensor

    def __init__(self, config: BaseRateConfig, catalogue: ActionsCatalogue) -> None:
        super().__init__(config, catalogue)
        self.labels = catalogue.labels
        self.train_rates = catalogue.train_rates
        self.masks = [None] * len(self.labels)
        # what a served request's missing features are filled with
        self.features = Standardised(catalogue.feature_mean, catalogue.feature_std)
        items = catalogue.num_items
        zeros = torch.zeros(items, len(self.labels), dtype=torch.float64)
        self.register_buffer("events", zeros[:, 0].clone())  # (I,)
        self.register_buffer("done", zeros)  # (I, K)

    def fit_counts(self, batches: Iterable[ActionsBatch]) -> None:
        """Count the training events of each item, and its positive events per task."""
        events, done = torch.zeros_like(self.events), torch.zeros_like(self.done)
        events, done = events.cpu(), done.cpu()
        for batch in batches:
            learn = batch.learn.cpu()
            item = batch.item.cpu()[learn]
            events += torch.bincount(item, minlength=len(events))
            done.index_add_(0, item, batch.label.cpu()[learn].double())
        self.events.copy_(events)
        self.done.copy_(done)

    def rates(self, item: Tensor) -> Tensor:
        """Return (N, K) chances of the tasks for `item` (N,)."""
        total = self.events.sum().clamp(min=1)
        return (self.done.sum(0) / total).expand(len(item), -1)

    def score(self, batch: ActionsBatch) -> Tensor:
        """Return (N, K) log-odds for the candidates, row by row without padding."""
        item = batch.candidate_item[batch.candidate_valid]
        return self.rates(item).logit(eps=1e-6)


class ItemRate(BaseRate):
    """Log-odds of each task's smoothed share of the item's training events."""

    name = "item_rate"
    config_class = ItemRateConfig
    config: ItemRateConfig

    def rates(self, item: Tensor) -> Tensor:
        """Return (N, K) chances; an item without training events has the base rates."""
        base, strength = super().rates(item), self.config.strength
        known = item < len(self.events)  # items beyond are new ones of a served request
        row = item.clamp(max=len(self.events) - 1)
        events = (self.events[row] * known)[:, None]
        done = self.done[row] * known[:, None]
        return (done + strength * base) / (events + strength)
