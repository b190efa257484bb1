"""Search: which of these candidates will this user click for this query?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from models.family import Family
from models.inputs import Inputs
from models.search import metrics
from models.search.data import SearchCatalogue, SearchExamples
from models.search.requests import SearchRequests
from models.search.shuffled import shuffles
from models.shuffles import Shuffle


class Search(Family):
    """Models that rank what a search found."""

    name = "search"
    examples = SearchExamples
    reads: ClassVar[Mapping[str, bool]] = {"text": True}
    measured = metrics
    ranks = "candidates"
    requests = SearchRequests

    def catalogue(self, inputs: Inputs) -> SearchCatalogue:
        return SearchCatalogue.load(inputs.tables, str(inputs.text))

    def served_catalogue(self, inputs: Inputs) -> SearchCatalogue:
        """Without the scale of features, which the checkpoint brings."""
        return SearchCatalogue.load(inputs.tables, str(inputs.text), scale=False)

    def hashes(self, inputs: Inputs) -> dict[str, str]:
        return SearchCatalogue.hashes_of(inputs.tables, str(inputs.text))

    def accompany(self, catalogue: SearchCatalogue, examples: Iterable[Any], config: Any) -> SearchCatalogue:
        """Without text of pairs, so that none is on the device but a batch's."""
        return catalogue.leave_pairs_to(examples, config)

    def shuffles(self, model: Any, catalogue: SearchCatalogue) -> dict[str, Shuffle]:
        return shuffles(model, catalogue)


SEARCH = Search()
