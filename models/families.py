"""What the models of a family share: how tables become batches, what is measured and how it is told.

    find("tiger").family.catalogue(tables, sids)

Code outside asks these fields and never which family it has. What a single model does otherwise stands in its row of
`models/registry.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from models.actions import metrics as actions_metrics
from models.actions import shuffled as actions_shuffled
from models.actions.base import ActionsModel
from models.actions.batch import ActionsCatalogue
from models.actions.data import ActionsExamples
from models.examples import Sharded
from models.fit import Sums
from models.retrieval import metrics as retrieval_metrics
from models.retrieval.data import Catalogue, Examples, unread_events
from models.search import metrics as search_metrics
from models.search import shuffled as search_shuffled
from models.search.data import SearchCatalogue, SearchExamples
from models.shuffles import Shuffle


@dataclass(frozen=True)
class Extra:
    """A folder that a model needs, or can use, beside the tables."""

    option: str
    """Option of the commands that take it."""
    holds: str
    """What it holds, in words."""
    job: str
    """The job that makes it."""
    optional: bool = False
    """Whether the models do without."""


SIDS = Extra("sids", "semantic IDs", "jobs.tokenize")
TEXT = Extra("text", "text embeddings", "jobs.encode")


@dataclass(frozen=True)
class Measured:
    """What a validation or an evaluation finds."""

    measure: Callable[..., Sums]
    """`measure(model, batch, **options)`: sums over a batch that add up to the metrics."""
    means: Callable[[Sums], dict[str, float]]
    """Metrics from the sums of all batches and workers."""
    names: Callable[[Any], list[str]]
    """`names(catalogue)`: names of what `means` gives."""
    summary: Callable[[dict[str, float]], list[str]]
    """Lines that tell the metrics of an evaluation."""
    shown: tuple[str, ...]
    """Metrics of a training's best epoch that are printed."""
    by_user: bool = False
    """Whether `measure` takes `by_user=stride` and then also keeps a metric of every `stride`th user."""


@dataclass(frozen=True)
class Family:
    """What the models of one family share."""

    name: str
    """Folder under `models/`, and the kind of request of its tables."""
    catalogue: Callable[[str, str | None], Any]
    """`catalogue(tables, extra)` gives what models are built on."""
    hashes: Callable[[str, str | None], dict[str, str]]
    """Hashes of the tables that a catalogue comes from, from their manifests alone."""
    examples: type[Sharded]
    """`examples.load(sequences, split, unit=, max_history=)` gives what batches are made of."""
    measured: Measured
    """What is measured."""
    ranks: Literal["catalogue", "candidates"]
    """What its models rank: all items after a history, or what a request shows (`model.score(batch)`)."""
    eval_unit: str = "request"
    """What a row of an evaluation batch is; `user` where all candidates of a user are one request."""
    extra: Extra | None = None
    """The folder that all its models need, or can use, beside the tables."""
    accompany: Callable[[Any, Iterable[Any], Any], Any] | None = None
    """`accompany(catalogue, examples, config)`: the catalogue without what its batches bring along in training; None
    where the model holds all."""
    parts: Callable[[Any], dict[str, int]] | None = None
    """Learned numbers of a model by part, where a training says them."""
    shuffles: Callable[[Any, Any], dict[str, Shuffle]] | None = None
    """`shuffles(model, catalogue)`: by name, what the model ranks candidates by, and how rows exchange it."""
    unread: Callable[[dict[str, Any]], list[str]] | None = None
    """`unread(info)`: what its models do not read of tables whose sequences have this `info`, said before a training;
    None where they read all."""
    served: bool = False
    """Whether every training logs its model to MLflow; those of others are logged when they are registered."""


RETRIEVAL = Family(
    "retrieval", Catalogue.load, Catalogue.hashes_of, Examples,
    Measured(
        retrieval_metrics.measure, retrieval_metrics.metric_means, retrieval_metrics.names, retrieval_metrics.summary,
        shown=("recall@10", "ndcg@10"), by_user=True,
    ),
    ranks="catalogue", served=True, unread=unread_events,
)  # fmt: skip
SEARCH = Family(
    "search", SearchCatalogue.load, SearchCatalogue.hashes_of, SearchExamples,
    Measured(
        search_metrics.measure, search_metrics.means, search_metrics.names, search_metrics.summary,
        shown=("gauc", "auc"), by_user=True,
    ),
    ranks="candidates", extra=TEXT, accompany=SearchCatalogue.leave_pairs_to,
    shuffles=search_shuffled.shuffles,
)  # fmt: skip
ACTIONS = Family(
    "actions", ActionsCatalogue.load, ActionsCatalogue.hashes_of, ActionsExamples,
    Measured(
        actions_metrics.measure, actions_metrics.means, actions_metrics.names, actions_metrics.summary,
        shown=("eval_loss", "mean/normalised_entropy", "mean/auc"), by_user=True,
    ),
    ranks="candidates", eval_unit="user", extra=replace(TEXT, optional=True), parts=ActionsModel.parameter_counts,
    shuffles=actions_shuffled.shuffles,
)  # fmt: skip
