"""The base class of search models, which rank the candidates of a query.

Shapes: `N` candidates, `K` labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar

from torch import Tensor

from core.schemas import SearchInfo
from models.model import Model, Ranked
from models.search import metrics
from models.search.catalogue import SearchCatalogue
from models.search.requests import (
    SEARCH,
    SearchBatch,
    SearchRequests,
    SearchSelection,
)


class SearchModel(Model):
    """A model that scores the candidates of requests by `score(batch)`."""

    kind = SEARCH
    requests_class = SearchRequests
    catalogue_class = SearchCatalogue
    extra_inputs: ClassVar[Mapping[str, bool]] = {"text": False}
    ranks: ClassVar[Ranked] = "candidates"
    metrics_module: ClassVar[ModuleType] = metrics
    reads_first_label: ClassVar[bool] = False
    """Whether the model uses only the first label of the log."""

    reads_times: bool = False
    """Whether the model reads the times of behaviours."""
    reads_history_queries: bool = False
    """Whether the model reads the text of behaviours' queries or pairs."""

    def selection(self, catalogue: Any, split: str, **fields: Any) -> SearchSelection:
        """Return the examples to load, with the text that the model reads."""
        text = {
            "text": catalogue.text,
            "reads_history_queries": self.reads_history_queries,
        }
        return super().selection(catalogue, split, **(text | fields))

    @classmethod
    def describe_requests(cls, info: SearchInfo) -> dict[str, Any]:
        """Return the names that requests refer to, with the labels of this model."""
        description = super().describe_requests(info)
        if cls.reads_first_label:
            description["labels"] = description["labels"][:1]
        return description

    def score(self, batch: SearchBatch) -> Tensor:
        """Return (N, K) logits of the candidates."""
        raise NotImplementedError

    def measure(
        self, batch: SearchBatch, by_user: int = 0, **options: Any
    ) -> dict[str, Any]:
        """Return sums over a batch (`models/search/metrics.py`)."""
        return metrics.measure(self, batch, by_user)
