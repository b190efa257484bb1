"""Rows of a comparison: trainings that differ in their seed or fold alone, evaluated alike.

`load.py` groups MLflow runs into rows. A training that was evaluated with several
options, such as all items and known items left out, has a row for each.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from mlflow import MlflowClient

from models import registry
from pipelines import tracking
from pipelines.comparison.runs import Selection

TEACHER_PARAMS = ("model.teacher_hash", "model.encoder_hash")
"""Params in which students of one teacher's seeds differ."""

SEED_SUFFIX = re.compile(r"[-_]?(seed|fold)[-_]?\d*$")
"""End of the common prefix of run names that differ in their seed or fold."""

ALL_ITEMS, KNOWN_LEFT_OUT = "all items", "known items left out"
"""Which items a ranking of the catalogue has."""

CANDIDATES = "candidates"
"""What models of search and actions rank."""

REPEATS = 0.05
"""Share of test requests for an item of the history above which repeats count."""


@dataclass(frozen=True)
class EvaluationOptions:
    """Options of an evaluation that differ from its checkpoint's own options."""

    values: tuple[tuple[str, str], ...] = ()
    """Names and values, sorted by name."""
    fresh_log: str = ""
    """Hash of the evaluated log if it is not the log of the training."""

    @classmethod
    def of(cls, values: Mapping[str, str], fresh_log: str = "") -> Self:
        """Return the options of a mapping."""
        return cls(tuple(sorted(values.items())), fresh_log)

    def __bool__(self) -> bool:
        return bool(self.values or self.fresh_log)

    def __str__(self) -> str:
        words = [
            name if value == "True" else f"{name} {value}"
            for name, value in self.values
        ]
        if self.fresh_log:
            words.append(f"log {self.fresh_log[:8]}")
        return ", ".join(words)

    @property
    def unseen(self) -> bool:
        """Whether items of the history were left out of the rankings."""
        return ("unseen", "True") in self.values

    @property
    def names(self) -> list[str]:
        """Names of the options."""
        return [name for name, _ in self.values]


@dataclass
class Run:
    """A training, with the metrics of one way of evaluating it."""

    id: str
    """Id of the training's MLflow run."""
    name: str
    """Name of the training's MLflow run."""
    seed: str
    """Seed of the training."""
    finished: bool
    """Whether the training is finished."""
    weights: str
    """SHA-256 of the evaluated weights, or an empty text."""
    teacher: str
    """SHA-256 of the teacher's weights, or an empty text."""
    metrics: dict[str, float]
    """Metrics by name; `val/` is measured at the best epoch."""
    sids: str = ""
    """Name of the folder of semantic IDs, or an empty text."""
    uri: str = ""
    """Tracking URI of the store."""
    evaluation_id: str = ""
    """Id of the MLflow run with the metrics per user on test."""
    fold: str = ""
    """Number of the fold, or an empty text for tables without folds."""

    @property
    def repeat(self) -> str:
        """The seed, with the fold if there are folds: by it two rows are paired."""
        seed = self.seed or self.id
        return f"{seed} of fold {self.fold}" if self.fold else seed


@dataclass
class Row:
    """Runs that differ in their seed or fold alone, evaluated alike."""

    model: str
    """Name in the registry."""
    options: EvaluationOptions = field(default_factory=EvaluationOptions)
    """Options of the evaluation."""
    runs: list[Run] = field(default_factory=list)
    """The runs, oldest first."""
    settings: dict[str, str] = field(default_factory=dict)
    """Params in which the row differs from other rows of its model."""
    experiment: str = ""
    """Name of the experiment."""
    params: dict[str, str] = field(default_factory=dict)
    """Params of model and training, and hashes of tables, shared by the runs."""
    simulated: bool = False
    """Whether the log is simulated."""

    @property
    def name(self) -> str:
        """The common prefix of the runs' names, and the options of the evaluation."""
        name = self.runs[0].name
        for run in self.runs[1:]:
            name = shared_name(name, run.name)
        name = f"{self.model}*" if name == "*" else name
        return f"{name} [{self.options}]" if self.options else name

    @property
    def label(self) -> str:
        """The name, after the model's name if it does not begin with that."""
        return (
            self.name
            if self.name.startswith(self.model)
            else f"{self.model}: {self.name}"
        )

    @property
    def beam(self) -> int:
        """Beams of the evaluation; 0 if unknown or if other options differ too."""
        if self.options.fresh_log or self.options.names not in ([], ["beam"]):
            return 0
        beam = dict(self.options.values).get("beam")
        beam = beam or self.params.get("evaluate.beam") or self.params.get("model.beam")
        return int(beam) if beam and beam.isdigit() else 0

    def measured(self) -> set[str]:
        """Return the names of the metrics on val and test."""
        return {
            name
            for run in self.runs
            for name in run.metrics
            if name.startswith(("val/", "test/"))
        }

    def values(self, metric: str) -> list[float]:
        """Return the metric of each run that has it."""
        return [run.metrics[metric] for run in self.runs if metric in run.metrics]

    def by_seed(self, metric: str) -> dict[str, float]:
        """Return the metric of the newest run of each seed, and of each fold if there are folds.

        Runs without a seed, such as timings, count one by one.
        """
        return {
            run.repeat: run.metrics[metric]
            for run in self.runs
            if metric in run.metrics
        }

    def mean(self, metric: str) -> float:
        """Return the mean over seeds and folds, or NaN."""
        values = self.by_seed(metric).values()
        return statistics.fmean(values) if values else math.nan

    def deviation(self, metric: str) -> float:
        """Return the sample standard deviation over seeds and folds, or NaN for one value."""
        values = self.by_seed(metric).values()
        return statistics.stdev(values) if len(values) > 1 else math.nan

    @property
    def log(self) -> tuple[str, ...]:
        """Experiment, items, sequences and task; rows of different ones do not compare."""
        tables = [
            self.params.get(f"table.{name}", "") for name in ("items", "sequences")
        ]
        return self.experiment, *tables, *self.task

    @property
    def task(self) -> tuple[str, str]:
        """The fresh log of the evaluation, and the items that it ranks."""
        return self.options.fresh_log, self.ranking

    @property
    def ranking(self) -> str:
        """Which items the evaluation ranks."""
        return KNOWN_LEFT_OUT if self.options.unseen else ALL_ITEMS

    @property
    def place(self) -> str:
        """The experiment, with the folder of semantic IDs."""
        if "table.trie" in self.params:
            return f"{self.experiment}, {self.runs[0].sids}"
        return self.experiment

    def describe_training_difference(self, other: Row) -> str:
        """Return the difference to another row's training in steps, batch, seeds and folds.

        It is empty beside a model that is not trained by steps.
        """
        if not (self.is_trained_by_steps() and other.is_trained_by_steps()):
            return ""
        pairs = zip(
            ("steps", "batch", "seeds", "folds"),
            self.describe_training(),
            other.describe_training(),
            strict=True,
        )
        return "; ".join(
            f"{name} {mine} / {theirs}"
            for name, mine, theirs in pairs
            if mine != theirs and mine and theirs
        )

    def is_trained_by_steps(self) -> bool:
        """Return whether the model is trained by gradient steps, or unknown."""
        if self.model not in registry.MODELS:
            return True
        return registry.find(self.model).trains_by_gradient

    @property
    def folds(self) -> list[str]:
        """Numbers of the folds, ascending; none for tables without folds."""
        return sorted({run.fold for run in self.runs if run.fold}, key=int)

    def describe_training(self) -> tuple[str, str, str, str]:
        """Return steps, batch size, seeds and folds as texts, empty where unknown."""
        steps = self.mean("train/steps")
        seeds = ", ".join(sorted({run.seed for run in self.runs}))
        batch = self.params.get("fit.batch_size", "")
        folds = ", ".join(self.folds)
        return "" if math.isnan(steps) else f"{steps:,.0f}", batch, seeds, folds

    def identity(self, without: Collection[str] = ()) -> tuple[Any, ...]:
        """Return the key of a row, without some of its params."""
        params = [item for item in self.params.items() if item[0] not in without]
        return *self.log, self.model, self.options, *sorted(params)


def shared_name(first: str, second: str) -> str:
    """Return the common prefix of two names: `tiger*` for two seeds."""
    if first == second:
        return first
    common = Path(first.rstrip("*")).name
    while not second.startswith(common):
        common = common[:-1]
    return f"{SEED_SUFFIX.sub('', common)}*"


@dataclass
class Comparison:
    """The rows of a selection, best first."""

    selection: Selection
    """The compared runs."""
    rows: list[Row]
    """Rows, best first by the metric on test, then on val."""
    metric: str
    """The metric that rows are compared by."""
    teachers: list[Row] = field(default_factory=list)
    """Rows of the teachers of a sweep's trials."""

    def history(self, run: Run, metric: str) -> list[tuple[float, float]]:
        """Return the (step, value) points of a run's metric in order of the steps."""
        points = connect_once(run.uri).get_metric_history(
            run.id, tracking.metric_name(metric)
        )
        return sorted((point.step, point.value) for point in points)

    @property
    def sign(self) -> int:
        """1 if a smaller value of the metric is better, else -1."""
        return 1 if lower_is_better(self.metric) else -1


@lru_cache
def connect_once(uri: str) -> MlflowClient:
    """Return the client that all runs of a store share."""
    return tracking.connect(uri)


def lower_is_better(metric: str) -> bool:
    """Return whether a smaller value of the metric is better."""
    last = metric.rsplit("/", 1)[-1]
    return last in ("mse", "median_s") or last.endswith(
        ("entropy", "entropy_train", "loss", "seconds", "memory_mb")
    )


def repeat_share(rows: Sequence[Row]) -> float:
    """Return the share of test requests for an item of the history, NaN if not measured."""
    for row in rows:
        requests = row.mean("test/examples")
        first = row.mean("test/first/examples")
        if requests > 0 and math.isfinite(first) and not row.options.fresh_log:
            return 1 - first / requests
    return math.nan


def leading_ranking(rows: Sequence[Row]) -> str:
    """Return the ranking that fits the log: all items where users come back to items."""
    return KNOWN_LEFT_OUT if repeat_share(rows) < REPEATS else ALL_ITEMS


def ratio(value: float, base: float) -> float:
    """Return value / base, or NaN if the base is 0."""
    return value / base if base else math.nan
