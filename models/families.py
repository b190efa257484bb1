"""The families of models: all that differs between them, declared.

RETRIEVAL, SEARCH, ACTIONS
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from models import summaries
from models.actions import batch as actions_batch
from models.actions import metrics as actions_metrics
from models.actions.data import ActionsExamples
from models.fit import Sums
from models.retrieval import data as retrieval_data
from models.retrieval import metrics as retrieval_metrics
from models.retrieval.data import Examples
from models.search import data as search_data
from models.search import metrics as search_metrics
from models.search.data import SearchExamples
from models.summaries import Measured
from models.tables import UserError, join, read_manifest


@dataclass(frozen=True)
class Extra:
    """A folder that models need beside the tables."""

    name: str
    """Its option on a command line."""
    words: str
    """What it holds."""
    job: str
    """What makes it."""


SIDS = Extra("sids", "semantic IDs", "jobs.tokenize")
TEXT = Extra("text", "text embeddings", "jobs.encode")


@dataclass(frozen=True)
class Measures:
    """How models are measured."""

    measure: Callable[..., Sums]
    """`measure(model, batch, **options)`: sums over a batch that add up to the metrics."""
    means: Callable[[Sums], dict[str, float]]
    """Metrics from the sums of all batches and workers."""
    names: Callable[[Any], list[str]]
    """`names(catalogue)`: names of what `means` gives."""
    summary: Callable[[Measured], list[str]]
    """Lines that tell what an evaluation found."""


@dataclass(frozen=True)
class Family:
    """What the models of one family share."""

    name: str
    """Folder under `models/`."""
    catalogue: Any
    """`catalogue.load(tables, extra)` gives what models are built on."""
    hashes: Callable[[str, str | None], dict[str, str]]
    """`hashes(tables, extra)`: the hashes of such a catalogue, from manifests alone; UserError where the tables do
    not belong together."""
    examples: Any
    """`examples.load(sequences, split, unit=, max_history=)` gives the batches."""
    measures: Measures
    """How its models are measured, but for those that have their own (`Entry.own_measures`)."""
    extra: Extra | None = None
    """The folder that its models may need beside the tables."""
    every_extra: bool = False
    """Whether all of them need it, and not those alone whose entry says so."""
    eval_unit: str = "request"
    """What a row of an evaluation batch is."""
    bounded: bool = False
    """Whether rows of like size make a batch: `examples.bounded(order, batch_size)` cuts batches of any order, and
    `examples.padded_share(batch_size, seed)` tells how much of an epoch is padding."""
    scores: bool = False
    """Whether its models score candidates: `score(batch)` gives (N, K) logits. Others rank the catalogue, those that
    have options for it (`Entry.recommends`)."""
    replayed: bool = False
    """Whether logged requests can be replayed under its models (`pipelines/evaluation/replay.py`)."""
    served: bool = True
    """Whether every training logs its model to MLflow; those of others are logged when they are registered."""


def retrieval_hashes(tables: str, sids: str | None) -> dict[str, str]:
    """Those of `Catalogue.load(tables, sids)`."""
    items, sequences = (read_manifest(join(tables, name), name) for name in ("items", "sequences"))
    _check_made_from(f"the sequences of {tables}", sequences.inputs, "items", items.hash, "jobs.prepare")
    found = {"sequences": sequences.hash, "items": items.hash}
    if sids is None:
        return found
    codes, trie = (read_manifest(join(sids, name), name) for name in ("sids", "trie"))
    _check_made_from(f"the sids of {sids}", codes.inputs, "items", items.hash, "jobs.tokenize")
    _check_made_from(f"the trie of {sids}", trie.inputs, "sids", codes.hash, "jobs.tokenize")
    return {**found, "sids": codes.hash, "trie": trie.hash}


def _check_made_from(what: str, inputs: dict[str, str], table: str, expected: str, job: str) -> None:
    if inputs.get(table) != expected:
        raise UserError(f"{what} were made from other {table}; point at tables that belong together or run {job} again")


RETRIEVAL = Family(
    "retrieval",
    retrieval_data.Catalogue,
    retrieval_hashes,
    Examples,
    Measures(
        retrieval_metrics.measure, retrieval_metrics.metric_means, retrieval_metrics.names, summaries.catalogue_lines
    ),
    extra=SIDS,
)
SEARCH = Family(
    "search",
    search_data.SearchCatalogue,
    search_data.hashes,
    SearchExamples,
    Measures(search_metrics.measure, search_metrics.means, search_metrics.names, summaries.candidate_lines),
    extra=TEXT,
    every_extra=True,
    scores=True,
    replayed=True,
    served=False,
)
ACTIONS = Family(
    "actions",
    actions_batch.ActionsCatalogue,
    actions_batch.hashes,
    ActionsExamples,
    Measures(actions_metrics.measure, actions_metrics.means, actions_metrics.names, summaries.task_lines),
    eval_unit="user",
    bounded=True,
    scores=True,
    served=False,
)
