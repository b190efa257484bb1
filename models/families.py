"""What the models of a family share: how tables become a catalogue and batches, what is measured, how it is served.

    find("tiger").family.catalogue(Inputs(tables, sids))

Code outside asks for these methods and never which family it has. What a single model does otherwise stands in its row
of `models/registry.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

from models.actions import batch as actions_batch
from models.actions import metrics as actions_metrics
from models.actions.base import ActionsModel
from models.actions.batch import ActionsCatalogue
from models.actions.data import ActionsDataset
from models.actions.requests import ActionsRequests
from models.dataset.dataset import RequestDataset
from models.requests import Requests
from models.retrieval import data as retrieval_data
from models.retrieval import metrics as retrieval_metrics
from models.retrieval.data import Catalogue, RetrievalDataset
from models.retrieval.requests import RetrievalRequests
from models.search import data as search_data
from models.search import metrics as search_metrics
from models.search.data import SearchCatalogue, SearchDataset
from models.search.requests import SearchRequests
from models.storage.inputs import Inputs
from models.storage.tables import TableVersion


class Measured(Protocol):
    """What a validation or an evaluation finds: a module with these."""

    SHOWN: tuple[str, ...]
    """Metrics of a training's best epoch that are printed."""
    measure: Callable[..., Any]
    """`measure(model, batch, by_user=stride, **options)`: `Sums` over a batch that add up to the metrics, and a metric
    of every `stride`th user, of none for 0."""
    means: Callable[..., dict[str, float]]
    """`means(sums)`: metrics from the sums of all batches and workers."""
    names: Callable[..., list[str]]
    """`names(catalogue)`: names of what `means` gives."""
    summary: Callable[..., list[str]]
    """`summary(metrics)`: lines that tell the metrics of an evaluation."""


class Family:
    """What the models of one family share."""

    name: str
    """Folder under `models/`, and the kind of request of its tables."""
    tables: Mapping[str, Sequence[str]]
    """Tables that a catalogue comes from, by folder of `Inputs`."""
    dataset: type[RequestDataset]
    """Its `load(sequences, split, unit=, max_history=)` makes batches."""
    eval_unit = "request"
    """What a row of an evaluation batch is; `user` where all candidates of a user are one request."""
    reads: ClassVar[Mapping[str, bool]] = {}
    """Folders of `Inputs` beside the tables that all its models read, and whether they need them."""
    measured: Measured
    """What is measured."""
    ranks: Literal["catalogue", "candidates"]
    """What its models rank: all items after a history, or what a request shows (`model.score(batch)`)."""
    requests: type[Requests]
    """How a request that is served becomes a batch."""
    logged = False
    """Whether every training logs its model to MLflow; those of others are logged when they are registered."""

    def catalogue(
        self,
        inputs: Inputs,
        scale: bool = True,
        scales: Mapping[str, Any] | None = None,
    ) -> Any:
        """What models are built on; without `scale`, which a checkpoint brings, of the manifest of the sequences.
        `scales` are a checkpoint's (`models/warm_start.py`)."""
        raise NotImplementedError

    def versions(self, inputs: Inputs) -> dict[str, TableVersion]:
        """Read the versions of the catalogue's tables from their manifests."""
        return inputs.versions(self.tables)

    def trim_catalogue(
        self, catalogue: Any, examples: Iterable[Any], config: Any
    ) -> Any:
        """The catalogue without what batches of the `examples` bring along in training."""
        return catalogue

    def parts(self, model: Any) -> dict[str, int]:
        """Learned numbers of a model by part, where a training says them."""
        return {}

    def unread(self, info: Mapping[str, Any]) -> list[str]:
        """What its models do not read of tables whose sequences have this `info`, said before a training."""
        return []


class Retrieval(Family):
    """Which item comes next, out of the whole catalogue?"""

    name, tables, dataset, requests = (
        "retrieval",
        retrieval_data.TABLES,
        RetrievalDataset,
        RetrievalRequests,
    )
    measured = retrieval_metrics
    ranks = "catalogue"
    logged = True

    def catalogue(
        self,
        inputs: Inputs,
        scale: bool = True,
        scales: Mapping[str, Any] | None = None,
    ) -> Catalogue:
        return Catalogue.load(inputs.tables, inputs.sids)

    def unread(self, info: Mapping[str, Any]) -> list[str]:
        """What a log says of events beside which items a user took and in which order."""
        labels = [
            name for name in info.get("labels") or {} if name != info.get("behaviour")
        ]
        of_event = {kind: info.get(kind) for kind in ("numbers", "categories")} | {
            "labels": labels
        }
        return [
            f"{kind} {', '.join(names)}" for kind, names in of_event.items() if names
        ]


class Search(Family):
    """Which of these candidates will this user click for this query?"""

    name, tables, dataset, requests = (
        "search",
        search_data.TABLES,
        SearchDataset,
        SearchRequests,
    )
    measured = search_metrics
    ranks = "candidates"
    reads: ClassVar[Mapping[str, bool]] = {"text": True}

    def catalogue(
        self,
        inputs: Inputs,
        scale: bool = True,
        scales: Mapping[str, Any] | None = None,
    ) -> SearchCatalogue:
        return SearchCatalogue.load(inputs.tables, inputs.text, scale, scales)

    def trim_catalogue(
        self, catalogue: SearchCatalogue, examples: Iterable[Any], config: Any
    ) -> SearchCatalogue:
        return catalogue.leave_pairs_to(examples, config)


class Actions(Family):
    """What will this user do with this item?"""

    name, tables, dataset, requests = (
        "actions",
        actions_batch.TABLES,
        ActionsDataset,
        ActionsRequests,
    )
    measured = actions_metrics
    ranks = "candidates"
    eval_unit = "user"
    reads: ClassVar[Mapping[str, bool]] = {"text": False}

    def catalogue(
        self,
        inputs: Inputs,
        scale: bool = True,
        scales: Mapping[str, Any] | None = None,
    ) -> ActionsCatalogue:
        return ActionsCatalogue.load(inputs.tables, inputs.text, scales)

    def parts(self, model: ActionsModel) -> dict[str, int]:
        return model.parameter_counts()


RETRIEVAL, SEARCH, ACTIONS = Retrieval(), Search(), Actions()
