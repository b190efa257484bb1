"""Rows of a comparison: trainings that differ only in their seed.

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
from typing import Any, Self

from mlflow import MlflowClient

from models import registry
from pipelines import tracking
from pipelines.comparison.runs import Selection

TEACHER_PARAMS = ("model.teacher_hash", "model.encoder_hash")
"""Params in which students differ if their teachers differ only in their seed."""

SEED_SUFFIX = re.compile(r"[-_]?seed[-_]?\d*$")
"""End of the common prefix of run names that differ in their seed."""

ALL_ITEMS, KNOWN_LEFT_OUT = "all items", "known items left out"
"""Names of the two rankings of the catalogue: with and without items of the history."""

CANDIDATES = "candidates"
"""Name of the ranking by models of search and actions."""

REPEATS = 0.05
"""Share of test requests for an item of the user's history from which the ranking of
all items fits the log."""


@dataclass(frozen=True)
class EvaluationOptions:
    """Options of an evaluation that differ from its checkpoint's own options."""

    values: tuple[tuple[str, str], ...] = ()
    """Names and values, sorted by name."""
    fresh_log: str = ""
    """Hash of the evaluated log if it is not the log of the training."""

    @classmethod
    def from_values(cls, values: Mapping[str, str], fresh_log: str = "") -> Self:
        """Return options by name, and the hash of a fresh log, as options."""
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
    """A training, with its metrics for one set of evaluation options."""

    id: str
    """Id of the training's MLflow run."""
    name: str
    """Name of the training's MLflow run."""
    seed: str
    """Seed of the training."""
    finished: bool
    """Whether the training is finished."""
    weights: str
    """SHA-256 of the evaluated weights, or an empty string."""
    teacher: str
    """SHA-256 of the teacher's weights, or an empty string."""
    metrics: dict[str, float]
    """Metrics by name; `val/` is measured at the best epoch."""
    sids: str = ""
    """Name of the folder of semantic IDs, or an empty string."""
    uri: str = ""
    """Tracking URI of the store."""
    evaluation_id: str = ""
    """Id of the MLflow run with the metrics per user on test."""

    @property
    def repeat(self) -> str:
        """The seed, by which the runs of two rows are paired; the id without one."""
        return self.seed or self.id


@dataclass
class Row:
    """Runs that differ only in their seed, with the same evaluation options."""

    model: str
    """Name of the model in the registry."""
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
        """The name, prefixed by the model's name unless it begins with the model's."""
        if self.name.startswith(self.model):
            return self.name
        return f"{self.model}: {self.name}"

    @property
    def model_label(self) -> str:
        """The name of the model, or the column by which a baseline ranks."""
        return self.params.get(tracking.RANKS_BY_TAG, self.model)

    @property
    def is_diagnostic(self) -> bool:
        """Whether the model reads values that are unknown when ranking."""
        return self.model in registry.MODELS and registry.find(self.model).is_diagnostic

    @property
    def beam(self) -> int:
        """Beam size of the evaluation; 0 if unknown or if other options differ too."""
        if self.options.fresh_log or self.options.names not in ([], ["beam"]):
            return 0
        beam = dict(self.options.values).get("beam")
        beam = beam or self.params.get("evaluate.beam") or self.params.get("model.beam")
        return int(beam) if beam and beam.isdigit() else 0

    def metric_names(self) -> set[str]:
        """Return the names of the metrics on val and test."""
        return {
            name
            for run in self.runs
            for name in run.metrics
            if name.startswith(("val/", "test/"))
        }

    def values(self, metric: str) -> list[float]:
        """Return the values of a metric, without runs that lack the metric."""
        return [run.metrics[metric] for run in self.runs if metric in run.metrics]

    def by_repeat(self, metric: str) -> dict[str, float]:
        """Return the values of a metric by repeat, each of the newest run.

        A run without a seed, such as a timing, has its id as the repeat.
        """
        return {
            run.repeat: run.metrics[metric]
            for run in self.runs
            if metric in run.metrics
        }

    def mean(self, metric: str) -> float:
        """Return the mean of a metric over seeds; NaN if no run has it."""
        values = self.by_repeat(metric).values()
        return statistics.fmean(values) if values else math.nan

    def deviation(self, metric: str) -> float:
        """Return the sample standard deviation over seeds; NaN for one."""
        values = self.by_repeat(metric).values()
        return statistics.stdev(values) if len(values) > 1 else math.nan

    @property
    def log(self) -> tuple[str, ...]:
        """Key that comparable rows share: experiment, hashes of tables, and task."""
        tables = [
            self.params.get(f"table.{name}", "") for name in ("items", "sequences")
        ]
        return self.experiment, *tables, *self.task

    @property
    def task(self) -> tuple[str, str]:
        """Hash of the fresh log of the evaluation, and its ranking."""
        return self.options.fresh_log, self.ranking

    @property
    def ranking(self) -> str:
        """Name of the evaluation's ranking, `ALL_ITEMS` or `KNOWN_LEFT_OUT`."""
        return KNOWN_LEFT_OUT if self.options.unseen else ALL_ITEMS

    @property
    def experiment_and_sids(self) -> str:
        """The experiment, with the folder of semantic IDs if the model has them."""
        if "table.trie" in self.params:
            return f"{self.experiment}, {self.runs[0].sids}"
        return self.experiment

    def describe_training_difference(self, other: Row) -> str:
        """Return in which of steps, batch size and seeds two trainings differ.

        Returns:
            Text such as "steps 1,000 / 2,000; batch 64 / 128", or an empty string if
            the trainings are equal or one of the models is not trained by steps.
        """
        if not (self.is_trained_by_steps() and other.is_trained_by_steps()):
            return ""
        other_training = other.describe_training()
        return "; ".join(
            f"{name} {value} / {other_training[name]}"
            for name, value in self.describe_training().items()
            if value and other_training[name] not in ("", value)
        )

    def is_trained_by_steps(self) -> bool:
        """Return whether the model is trained by gradient steps.

        A model that this version does not have is taken as one that is.
        """
        if self.model not in registry.MODELS:
            return True
        return registry.find(self.model).trains_by_gradient

    def describe_training(self) -> dict[str, str]:
        """Return steps, batch size and seeds as text, empty if unknown."""
        steps = self.mean("train/steps")
        return {
            "steps": "" if math.isnan(steps) else f"{steps:,.0f}",
            "batch": self.params.get("fit.batch_size", ""),
            "seeds": ", ".join(sorted({run.seed for run in self.runs})),
        }

    def identity(self, without: Collection[str] = ()) -> tuple[Any, ...]:
        """Return a key that is equal for rows of equal log, model, options and params.

        Args:
            without: Names of params in which the rows may differ.
        """
        params = [item for item in self.params.items() if item[0] not in without]
        return *self.log, self.model, self.options, *sorted(params)


def shared_name(first: str, second: str) -> str:
    """Return the common prefix of two run names with `*` appended.

    A suffix such as `-seed` is removed: `tiger-seed1` and `tiger-seed2` give `tiger*`.
    Equal names are returned unchanged.
    """
    if first == second:
        return first
    prefix = first.rstrip("*")  # `first` may be the common prefix of earlier names
    while not second.startswith(prefix):
        prefix = prefix[:-1]
    return f"{SEED_SUFFIX.sub('', prefix)}*"


@dataclass
class Comparison:
    """The rows of a selection, best first."""

    selection: Selection
    """Runs to compare, with the title and the notes of the page."""
    rows: list[Row]
    """Rows, best first by the metric on test, then on val."""
    metric: str
    """Metric that sorts the rows, without its split."""
    teachers: list[Row] = field(default_factory=list)
    """Rows of the teachers of a sweep's trials."""

    def history(self, run: Run, metric: str) -> list[tuple[float, float]]:
        """Return the history of a run's metric as (step, value), in order of steps."""
        points = connect_once(run.uri).get_metric_history(
            run.id, tracking.to_mlflow_name(metric)
        )
        return sorted((point.step, point.value) for point in points)

    @property
    def sign(self) -> int:
        """1 if a smaller value of the metric is better, else -1."""
        return 1 if lower_is_better(self.metric) else -1


@lru_cache
def connect_once(uri: str) -> MlflowClient:
    """Return the MLflow client of a store; connect on the first call only."""
    return tracking.connect(uri)


def lower_is_better(metric: str) -> bool:
    """Return whether a smaller value of the metric is better."""
    last = metric.rsplit("/", 1)[-1]
    return last in ("mse", "median_s") or last.endswith(
        ("entropy", "entropy_train", "loss", "seconds", "memory_mb")
    )


def repeat_share(rows: Sequence[Row]) -> float:
    """Return the share of test requests for an item of the history.

    It is NaN if it was not measured on the log of the training.
    """
    for row in rows:
        requests = row.mean("test/examples")
        first = row.mean("test/first/examples")
        if requests > 0 and math.isfinite(first) and not row.options.fresh_log:
            return 1 - first / requests
    return math.nan


def leading_ranking(rows: Sequence[Row]) -> str:
    """Return the ranking that fits the log.

    Known items are left out if fewer than `REPEATS` of the test requests are for an
    item of the user's history.
    """
    return KNOWN_LEFT_OUT if repeat_share(rows) < REPEATS else ALL_ITEMS


def ratio(value: float, base: float) -> float:
    """Return value / base, or NaN if the base is 0."""
    return value / base if base else math.nan
