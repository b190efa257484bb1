"""MLflow runs side by side: one row per model and settings, seeds together, best first.

    compare(select(uri, ["retrieval/DATASET"])).rows

An evaluation with other options than the checkpoint's own, such as the teacher without the trie, is a row of its
own. What is shown of them: `tables.py`, `plots.py` and the page.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Collection, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from mlflow import MlflowClient

from models import registry
from models.config import flattened, hint
from models.storage.tables import UserError
from models.training.fit import FitConfig
from pipelines import tracking
from pipelines.comparison.runs import Selection

OTHER = {
    "model.name",
    "model.teacher",
    "model.teacher_cache",
    "fit.seed",
    "fit.log_every_steps",
    "fit.eval_batch_size",
    "fit.checkpoint_every_steps",
}
"""Params in which runs of one row may differ; a teacher or an encoder is told by the hash of its weights."""

OF_TEACHER = ("model.teacher_hash", "model.encoder_hash")
"""Params in which students differ that have learned from different runs of one row."""

SEEDED = re.compile(r"[-_]?seed[-_]?\d*$")
"""What names of a row's runs end with where they begin to differ."""

EVALUATION = re.compile(r"(?P<split>val|test)(?:-(?P<options>.+?))?/(?P<metric>.+)")
"""`test/ndcg@10`, or `test-beam-20/ndcg@10` where options were other than the checkpoint's."""

FRESH = re.compile(r"(?:^|-)fresh-([0-9a-f]{8})$")
"""What the options of an evaluation end with that was on another log than that of the training."""

UNSEEN = re.compile(r"(?:^|-)unseen-True(?:-|$)")
"""What is in the options of an evaluation that left out the items that users know."""


ALL_ITEMS, KNOWN_LEFT_OUT = "all items", "known items left out"
"""Which items an evaluation ranks."""

CANDIDATES = "candidates"
"""What an evaluation of a model of search or actions ranks."""

REPEATS = 0.05
"""Share of test requests for an item of the history above which repeats belong to the task."""


@dataclass
class Run:
    """One training and one way of evaluating it."""

    id: str
    """Id of the MLflow run."""
    name: str
    """Name of the MLflow run."""
    seed: str
    """Seed of the training."""
    finished: bool
    """Whether it has ended well."""
    weights: str
    """SHA-256 of the weights that were evaluated, or nothing."""
    teacher: str
    """SHA-256 of its teacher's weights, or nothing."""
    metrics: dict[str, float]
    """Metrics by name; validation is at the best epoch."""
    sids: str = ""
    """Name of the folder of its semantic IDs, or nothing."""
    uri: str = ""
    """Tracking URI of its store."""


@dataclass
class Row:
    """Runs that differ in their seed alone, evaluated alike."""

    model: str
    """Name in the registry."""
    options: str
    """Options of the evaluation that differ from the checkpoint's, such as `beam-20`."""
    runs: list[Run] = field(default_factory=list)
    """Its runs, oldest first."""
    settings: dict[str, str] = field(default_factory=dict)
    """Params in which it differs from other rows of the same model."""
    experiment: str = ""
    """Name of the experiment."""
    params: dict[str, str] = field(default_factory=dict)
    """Params of model and training, and hashes of tables, which its runs share."""
    simulated: bool = False
    """Whether its log is simulated, so that it stands beside no paper's figures."""

    @property
    def name(self) -> str:
        """What the names of the runs share, and the options of the evaluation."""
        name = self.runs[0].name
        for run in self.runs[1:]:
            name = shared_name(name, run.name)
        name = f"{self.model}*" if name == "*" else name
        return f"{name} [{self.options}]" if self.options else name

    @property
    def beam(self) -> int:
        """Beams that it was evaluated with, or 0."""
        asked = (
            self.options.removeprefix("beam-")
            if self.options.startswith("beam-")
            else ""
        )
        beam = (
            asked
            or self.params.get("evaluate.beam", "")
            or self.params.get("model.beam", "")
        )
        return int(beam) if beam.isdigit() and (asked or not self.options) else 0

    def measured(self) -> set[str]:
        """Names of its metrics on val and test."""
        return {
            name
            for run in self.runs
            for name in run.metrics
            if name.startswith(("val/", "test/"))
        }

    def values(self, metric: str) -> list[float]:
        """One value per run that has the metric."""
        return [run.metrics[metric] for run in self.runs if metric in run.metrics]

    def by_seed(self, metric: str) -> dict[str, float]:
        """One value per seed: the newest run's; of what has no seed, as benchmarks, one per run."""
        return {
            run.seed or run.id: run.metrics[metric]
            for run in self.runs
            if metric in run.metrics
        }

    def mean(self, metric: str) -> float:
        """Mean over the seeds, or NaN."""
        values = self.by_seed(metric).values()
        return statistics.fmean(values) if values else math.nan

    def deviation(self, metric: str) -> float:
        """Sample standard deviation over the seeds, or NaN for one seed."""
        values = self.by_seed(metric).values()
        return statistics.stdev(values) if len(values) > 1 else math.nan

    @property
    def log(self) -> tuple[str, ...]:
        """Experiment, items and sequences, and what is asked: rows that differ in them do not compare."""
        trained = (
            self.params.get(f"table.{table}", "") for table in ("items", "sequences")
        )
        return self.experiment, *trained, *self.asked

    @property
    def asked(self) -> tuple[str, str]:
        """The fresh log that it was evaluated on, and whether without the items that users know."""
        return self.fresh, "unseen" if UNSEEN.search(self.options) else ""

    @property
    def ranking(self) -> str:
        """Which items the evaluation ranks."""
        return KNOWN_LEFT_OUT if UNSEEN.search(self.options) else ALL_ITEMS

    @property
    def fresh(self) -> str:
        """The hash of the fresh log that it was evaluated on, or nothing: it was on the log of the training."""
        found = FRESH.search(self.options)
        return found[1] if found else ""

    @property
    def place(self) -> str:
        """The experiment, with the folder of its semantic IDs."""
        return (
            f"{self.experiment}, {self.runs[0].sids}"
            if "table.trie" in self.params
            else self.experiment
        )

    def unlike(self, other: Row) -> str:
        """How its trainings differ from the other row's in steps, batch or seeds; of what is not trained by steps,
        nothing."""
        told = []
        for row in (self, other):
            if (
                row.model in registry.MODELS
                and not registry.find(row.model).trains_by_gradient
            ):
                return ""
            steps = row.mean("train/steps")
            seeds = ", ".join(sorted({run.seed for run in row.runs}))
            told.append(
                (
                    "" if math.isnan(steps) else f"{steps:,.0f}",
                    row.params.get("fit.batch_size", ""),
                    seeds,
                )
            )
        pairs = zip(("steps", "batch", "seeds"), *told, strict=True)
        return "; ".join(
            f"{name} {mine} / {its}"
            for name, mine, its in pairs
            if mine != its and mine and its
        )

    def alike(self, but: Collection[str] = ()) -> tuple[Any, ...]:
        """What tells the row from others, params in `but` left out."""
        told = sorted(
            (name, value) for name, value in self.params.items() if name not in but
        )
        return *self.log, self.model, self.options, *told


def rows_of(selection: Selection) -> list[Row]:
    """The selected runs, grouped."""
    rows: dict[tuple, Row] = {}
    for run in selection.runs:
        tags = run.data.tags
        longer = {
            key: value for key, value in tags.items() if key.startswith("fit.")
        }  # of runs that were continued
        given = {**later_options(run.data.params), **run.data.params, **longer}
        told = {
            key: value
            for key, value in given.items()
            if key.startswith(("model.", "fit.", "evaluate."))
        }
        apart = OTHER | (
            {"model.encoder"} if "model.encoder_hash" in given else set()
        )  # SID-MLP++'s is a checkpoint
        alike = {key: value for key, value in told.items() if key not in apart}
        alike |= {key: value for key, value in tags.items() if key.startswith("table.")}
        experiment = selection.experiments[run.info.experiment_id]
        if (
            "evaluate.batch_size" in given
        ):  # one of several evaluations of a checkpoint, a run of its own
            alike["checkpoint"] = given.get("checkpoint", "")
        for options, metrics in evaluations(run.data.metrics).items():
            key = (experiment, given["model.name"], *sorted(alike.items()), options)
            simulated = tracking.SIMULATED_TAG in tags
            made = Row(
                given["model.name"],
                options,
                experiment=experiment,
                params=alike,
                simulated=simulated,
            )
            row = rows.setdefault(key, made)
            row.runs.append(
                Run(
                    run.info.run_id,
                    run.info.run_name,
                    given.get("fit.seed", ""),
                    run.info.status == "FINISHED",
                    tags.get(tracking.WEIGHTS_TAG, ""),
                    given.get("model.teacher_hash", ""),
                    metrics,
                    Path(given.get("sids", "")).name,
                    selection.uri,
                )
            )
    for row in rows.values():
        kin = (row.model, row.experiment)
        others = [
            other.params
            for other in rows.values()
            if (other.model, other.experiment) == kin
        ]
        for name in sorted({name for params in others for name in params}):
            if len({params.get(name) for params in others}) > 1:
                row.settings[name] = row.params.get(name, "none")
    return list(rows.values())


def repeat_share(rows: Sequence[Row]) -> float:
    """Return the share of test requests for an item of the history, NaN if not measured."""
    for row in rows:
        requests = row.mean("test/examples")
        first = row.mean("test/first/examples")
        if requests > 0 and math.isfinite(first) and not row.fresh:
            return 1 - first / requests
    return math.nan


def leading_ranking(rows: Sequence[Row]) -> str:
    """Return the ranking that fits the log: all items where users come back to items."""
    return KNOWN_LEFT_OUT if repeat_share(rows) < REPEATS else ALL_ITEMS


def later_options(given: dict[str, str]) -> dict[str, str]:
    """Options that models and training have learned after a run with the params `given`, at their defaults, which
    change nothing. So its other seeds may be of a later version."""
    configs = {
        name.removesuffix("name"): registry.find(model).config_class
        for name, model in given.items()
        if name.startswith("model.")
        and name.endswith(".name")
        and model in registry.MODELS
    }
    if any(name.startswith("fit.") for name in given):
        configs["fit."] = FitConfig
    found: dict[str, str] = {}
    for prefix, config in configs.items():
        values = {
            f.name: f.default if f.default_factory is MISSING else f.default_factory()
            for f in fields(config)
        }
        found |= flattened(
            {name: value for name, value in values.items() if value is not MISSING},
            prefix,
        )
    parents = {
        name.rsplit(".", count)[0]
        for name in given
        for count in range(1, name.count(".") + 1)
    }
    return {
        name: value
        for name, value in found.items()
        if name not in given and name not in parents
    }


def evaluations(logged: dict[str, float]) -> dict[str, dict[str, float]]:
    """The metrics of a run for each set of options that it was evaluated with; '' are the checkpoint's own."""
    found: dict[str, dict[str, float]] = {"": {}}
    training: dict[str, float] = {}
    for logged_name, value in logged.items():
        name = tracking.shown_name(logged_name)
        if evaluated := EVALUATION.fullmatch(name):
            options = evaluated["options"] or ""
            found.setdefault(options, {})[
                f"{evaluated['split']}/{evaluated['metric']}"
            ] = value
        elif not name.startswith("best/"):
            training[name] = value
    best = {
        name.removeprefix("best/"): value
        for name, value in logged.items()
        if name.startswith("best/")
    }
    found[""] |= {
        f"val/{tracking.shown_name(name)}": value for name, value in best.items()
    }
    if "epoch" in best:
        training["val/epoch"] = best["epoch"]
    return {options: {**training, **metrics} for options, metrics in found.items()}


def shared_name(first: str, second: str) -> str:
    """What two names begin with, as `tiger*` of `tiger-seed-42` and `tiger-seed-43`."""
    if first == second:
        return first
    common = Path(first.rstrip("*")).name
    while not second.startswith(common):
        common = common[:-1]
    return f"{SEEDED.sub('', common)}*"


@dataclass
class Comparison:
    """Rows of a selection, best first."""

    selection: Selection
    """Where they are from."""
    rows: list[Row]
    """Best first by the metric on test, then on val."""
    metric: str
    """The metric that they are compared by."""
    teachers: list[Row] = field(default_factory=list)
    """Of a sweep's trials, which have taught them and are not among the rows."""

    def history(self, run: Run, metric: str) -> list[tuple[float, float]]:
        """(step, value) of everything that the run logged of the metric, in order of the steps."""
        points = client_of(run.uri).get_metric_history(
            run.id, tracking.metric_name(metric)
        )
        return sorted((point.step, point.value) for point in points)


@lru_cache
def client_of(uri: str) -> MlflowClient:
    """A client that all runs of a store share."""
    return tracking.connect(uri)


def compare(selection: Selection, metric: str | None = None) -> Comparison:
    """The rows, best first. UserError for a metric that no run has, and where no run has ended well.

    The metric is, left out: the sweep's own; gauc or mean/normalised_entropy where runs have it; else ndcg@10.
    """
    rows = rows_of(selection)
    if not any(run.finished for row in rows for run in row.runs) and not any(
        row.measured() for row in rows
    ):
        raise UserError(
            f"no run of {selection.title} at {selection.uri} is finished; wait for one, or train one"
        )
    if metric is None and selection.sweep is not None:
        metric = (
            selection.sweep.data.tags.get("sweep.metric", "").split("/", 1)[-1] or None
        )
    found = {name.split("/", 1)[1] for row in rows for name in row.measured()}
    if metric is None:
        metric = next(
            (name for name in ("gauc", "mean/normalised_entropy") if name in found),
            "ndcg@10",
        )
    elif metric not in found:
        near = hint(metric, sorted(found), "none is evaluated yet")
        raise UserError(
            f"no run of {selection.title} has the metric '{metric}' on val or test; {near}"
        )
    sign = 1 if lower_is_better(metric) else -1

    leading = leading_ranking(rows)

    def rank(row: Row) -> tuple[str, bool, float, float]:
        test, val = (sign * row.mean(f"{split}/{metric}") for split in ("test", "val"))
        return (
            row.fresh,
            row.ranking != leading,
            test if math.isfinite(test) else math.inf,
            val if math.isfinite(val) else math.inf,
        )

    teachers = (
        rows_of(replace(selection, runs=selection.teachers))
        if selection.teachers
        else []
    )
    return Comparison(selection, sorted(rows, key=rank), metric, teachers)


def best_run(comparison: Comparison) -> Run:
    """The finished run that is best on validation; UserError where none has the metric there."""
    name, sign = (
        f"val/{comparison.metric}",
        1 if lower_is_better(comparison.metric) else -1,
    )
    runs = [
        run
        for row in comparison.rows
        if not row.options
        for run in row.runs
        if run.finished
    ]
    there = [run for run in runs if name in run.metrics]
    if not there:
        title = comparison.selection.title
        raise UserError(
            f"no finished run of {title} has {name}; train one, or choose another --metric"
        )
    return min(there, key=lambda run: sign * run.metrics[name])


def lower_is_better(metric: str) -> bool:
    """Whether a smaller value of the metric is the better one."""
    last = metric.rsplit("/", 1)[-1]
    return last in ("mse", "median_s") or last.endswith(
        ("entropy", "entropy_train", "loss", "seconds", "memory_mb")
    )


def ratio(value: float, base: float) -> float:
    """value / base; NaN where the base is 0, so that there is nothing to be relative to."""
    return value / base if base else math.nan
