"""Actions: what will this user do with this item?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from models.actions import metrics
from models.actions.base import ActionsModel
from models.actions.batch import ActionsCatalogue
from models.actions.data import ActionsExamples
from models.actions.requests import ActionsRequests
from models.actions.shuffled import shuffles
from models.family import Family
from models.inputs import Inputs
from models.shuffles import Shuffle


class Actions(Family):
    """Models that foresee what a user does with each candidate."""

    name = "actions"
    examples = ActionsExamples
    eval_unit = "user"
    reads: ClassVar[Mapping[str, bool]] = {"text": False}
    measured = metrics
    ranks = "candidates"
    requests = ActionsRequests

    def catalogue(self, inputs: Inputs) -> ActionsCatalogue:
        return ActionsCatalogue.load(inputs.tables, inputs.text)

    def hashes(self, inputs: Inputs) -> dict[str, str]:
        return ActionsCatalogue.hashes_of(inputs.tables, inputs.text)

    def parts(self, model: nn.Module) -> dict[str, int]:
        assert isinstance(model, ActionsModel), "as all of the family are"
        return model.parameter_counts()

    def shuffles(self, model: Any, catalogue: ActionsCatalogue) -> dict[str, Shuffle]:
        return shuffles(model, catalogue)


ACTIONS = Actions()
