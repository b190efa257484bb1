"""What models of actions share: what will this user do with this item?

Shapes: `N` candidates, `K` tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar

from torch import Tensor

from models.actions import metrics
from models.actions.batch import ActionsBatch
from models.actions.catalogue import TABLES, ActionsCatalogue
from models.actions.data import ActionsDataset
from models.actions.requests import ActionsRequests
from models.model import Model, Ranked
from models.storage.inputs import Inputs


class ActionsModel(Model):
    """A model that scores the tasks of a user's candidates, by `score(batch)`."""

    family = "actions"
    dataset_class = ActionsDataset
    requests_class = ActionsRequests
    catalogue_tables = TABLES
    extra_inputs: ClassVar[Mapping[str, bool]] = {"text": False}
    example_unit = "user"
    eval_unit = "user"
    ranks: ClassVar[Ranked] = "candidates"
    metrics_module: ClassVar[ModuleType] = metrics
    shown_metrics = metrics.SHOWN

    wants_ids: bool = False
    """Whether every item has had an id in training."""

    @classmethod
    def load_catalogue(
        cls,
        inputs: Inputs,
        *,
        scales: Mapping[str, Any] | None = None,
        manifest_only: bool = False,
    ) -> ActionsCatalogue:
        return ActionsCatalogue.load(inputs.tables, inputs.text, scales)

    def score(self, batch: ActionsBatch) -> Tensor:
        """Return (N, K) logits of the candidates of all users, row by row without padding."""
        raise NotImplementedError

    def measure(
        self, batch: ActionsBatch, by_user: int = 0, **options: Any
    ) -> dict[str, Any]:
        return metrics.measure(self, batch, by_user)
