"""Retrieval: which item comes next, out of the whole catalogue?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.family import Family
from models.inputs import Inputs
from models.retrieval import metrics
from models.retrieval.data import Catalogue, Examples
from models.retrieval.requests import RetrievalRequests


class Retrieval(Family):
    """Models that rank all items after a history."""

    name = "retrieval"
    examples = Examples
    measured = metrics
    ranks = "catalogue"
    requests = RetrievalRequests
    logged = True

    def catalogue(self, inputs: Inputs) -> Catalogue:
        return Catalogue.load(inputs.tables, inputs.sids)

    def hashes(self, inputs: Inputs) -> dict[str, str]:
        return Catalogue.hashes_of(inputs.tables, inputs.sids)

    def unread(self, info: Mapping[str, Any]) -> list[str]:
        """What a log says of events beside which items a user took and in which order."""
        of_event = {
            "numbers": info.get("numbers") or [],
            "categories": info.get("categories") or [],
            "labels": [name for name in info.get("labels") or {} if name != info.get("behaviour")],
        }
        return [f"{kind} {', '.join(names)}" for kind, names in of_event.items() if names]


RETRIEVAL = Retrieval()
