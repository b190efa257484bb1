"""The base class of actions models, which predict what a user does with an item.

Shapes: `N` candidates, `K` tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar

from torch import Tensor

from models.actions import metrics
from models.actions.batch import ActionsBatch
from models.actions.catalogue import ActionsCatalogue
from models.actions.requests import ACTIONS, ActionsRequests
from models.model import Model, Ranked


class ActionsModel(Model):
    """A model that scores each task for a user's candidates by `score(batch)`."""

    kind = ACTIONS
    requests_class = ActionsRequests
    catalogue_class = ActionsCatalogue
    extra_inputs: ClassVar[Mapping[str, bool]] = {"text": False}
    example_unit = "user"
    eval_unit = "user"
    ranks: ClassVar[Ranked] = "candidates"
    metrics_module: ClassVar[ModuleType] = metrics

    def score(self, batch: ActionsBatch) -> Tensor:
        """Return (N, K) logits of the valid candidates of all users, row by row."""
        raise NotImplementedError

    def measure(
        self, batch: ActionsBatch, by_user: int = 0, **options: Any
    ) -> dict[str, Any]:
        """Return sums over a batch (`models/actions/metrics.py`)."""
        return metrics.measure(self, batch, by_user)
