"""Load a comparison from MLflow: one row per model and settings, best first.

comparison = compare(select(uri, ["retrieval/DATASET"]))
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from models import registry
from models.config import did_you_mean, flatten
from models.storage.tables import UserError
from models.training.fit import FitConfig
from pipelines import tracking
from pipelines.comparison.rows import (
    Comparison,
    EvaluationOptions,
    Row,
    Run,
    leading_ranking,
    lower_is_better,
)
from pipelines.comparison.runs import Selection
from pipelines.evaluation.record import read_fresh_log, read_options

PARAMS_WITHOUT_EFFECT = {
    "model.name",
    "model.teacher",
    "model.teacher_cache",
    "fit.seed",
    "fit.fold",
    "fit.log_every_steps",
    "fit.eval_batch_size",
    "fit.checkpoint_every_steps",
}
"""Params in which runs of one row may differ; teachers are told apart by their hash."""


def compare(selection: Selection, metric: str | None = None) -> Comparison:
    """Group the selected runs into rows, best first.

    Args:
        selection: the runs.
        metric: the metric that rows are compared by, without its split; by default the
            sweep's, gauc or mean/normalised_entropy where runs have it, or ndcg@10.

    Raises:
        UserError: if no run has the metric, or no run is finished.
    """
    rows = load_rows(selection)
    if not any(run.finished for row in rows for run in row.runs) and not any(
        row.measured() for row in rows
    ):
        raise UserError(
            f"no run of {selection.title} at {selection.uri} is finished; wait for one, "
            f"or train one"
        )
    metric = choose_metric(selection, rows, metric)
    teachers = []
    if selection.teachers:
        teachers = load_rows(replace(selection, runs=selection.teachers))
    return Comparison(selection, sort_rows(rows, metric), metric, teachers)


def choose_metric(selection: Selection, rows: Sequence[Row], metric: str | None) -> str:
    """Return the metric that rows are compared by (see `compare`)."""
    measured = {name.split("/", 1)[1] for row in rows for name in row.measured()}
    if metric is not None and metric not in measured:
        near = did_you_mean(metric, sorted(measured), "none is evaluated yet")
        raise UserError(
            f"no run of {selection.title} has the metric '{metric}' on val or test; {near}"
        )
    if metric is None and selection.sweep is not None:
        metric = selection.sweep.data.tags.get("sweep.metric", "").split("/", 1)[-1]
    if metric:
        return metric
    defaults = [
        name for name in ("gauc", "mean/normalised_entropy") if name in measured
    ]
    return defaults[0] if defaults else "ndcg@10"


def sort_rows(rows: Sequence[Row], metric: str) -> list[Row]:
    """Sort rows by the metric on test, then on val, best first.

    Rows of fresh logs come last, after those with the ranking that does not fit the
    log.
    """
    sign = 1 if lower_is_better(metric) else -1
    leading = leading_ranking(rows)

    def rank(row: Row) -> tuple[str, bool, float, float]:
        test, val = (sign * row.mean(f"{split}/{metric}") for split in ("test", "val"))
        return (
            row.options.fresh_log,
            row.ranking != leading,
            test if math.isfinite(test) else math.inf,
            val if math.isfinite(val) else math.inf,
        )

    return sorted(rows, key=rank)


def load_rows(selection: Selection) -> list[Row]:
    """Group the selected runs into rows."""
    rows: dict[tuple[Any, ...], Row] = {}
    for training in selection.runs:
        for row in split_evaluations(selection, training):
            key = (row.experiment, row.model, row.options, *sorted(row.params.items()))
            rows.setdefault(key, replace(row, runs=[])).runs += row.runs
    for row in rows.values():
        others = [
            other.params
            for other in rows.values()
            if (other.model, other.experiment) == (row.model, row.experiment)
        ]
        for name in sorted({name for params in others for name in params}):
            if len({params.get(name) for params in others}) > 1:
                row.settings[name] = row.params.get(name, "none")
    return list(rows.values())


def split_evaluations(selection: Selection, training: Any) -> list[Row]:
    """Return a row with one run for each way in which a training was evaluated."""
    tags = training.data.tags
    # tags hold values of a training that was continued, as params never change
    continued = {key: value for key, value in tags.items() if key.startswith("fit.")}
    params = {
        **default_params(training.data.params),
        **training.data.params,
        **continued,
    }
    row = Row(
        params["model.name"],
        experiment=selection.experiments[training.info.experiment_id],
        params=read_identity(params, tags),
        simulated=tracking.SIMULATED_TAG in tags,
    )
    run = Run(
        training.info.run_id,
        training.info.run_name,
        params.get("fit.seed", ""),
        training.info.status == "FINISHED",
        tags.get(tracking.WEIGHTS_TAG, ""),
        params.get("model.teacher_hash", ""),
        {},
        Path(params.get("sids", "")).name,
        selection.uri,
        training.info.run_id,
        fold=read_fold(params),
    )
    metrics = read_metrics(training)
    of_training = {
        name: value
        for name, value in metrics.items()
        if not name.startswith(("val/", "test/")) or name == "val/epoch"
    }
    runs = {EvaluationOptions(): replace(run, metrics=dict(metrics))}
    for evaluation in selection.evaluations.get(training.info.run_id, []):
        options = EvaluationOptions.of(
            read_options(evaluation, training), read_fresh_log(evaluation, training)
        )
        before = runs.get(options, replace(run, metrics=of_training))
        runs[options] = add_evaluation(before, evaluation)
    plain = runs[EvaluationOptions()].metrics
    plain |= {name: value for name, value in metrics.items() if name.startswith("val/")}
    return [replace(row, options=options, runs=[run]) for options, run in runs.items()]


def add_evaluation(run: Run, evaluation: Any) -> Run:
    """Return a run with the metrics of an evaluation."""
    measured = {
        tracking.shown_name(name): value
        for name, value in evaluation.data.metrics.items()
    }
    metrics = {**run.metrics, **measured}
    if evaluation.data.params["split"] != "test":
        return replace(run, metrics=metrics)
    return replace(run, metrics=metrics, evaluation_id=evaluation.info.run_id)


def read_metrics(training: Any) -> dict[str, float]:
    """Return the metrics of a training; `val/` is measured at the best epoch.

    Trials that measure a checkpoint have metrics on test of their own.
    """
    metrics, best = {}, {}
    for logged_name, value in training.data.metrics.items():
        name = tracking.shown_name(logged_name)
        if name.startswith("best/"):
            best[f"val/{name.removeprefix('best/')}"] = value
        else:
            metrics[name] = value
    return metrics | best


def read_identity(params: dict[str, str], tags: dict[str, str]) -> dict[str, str]:
    """Return the params and table hashes that runs of one row share."""
    without = set(PARAMS_WITHOUT_EFFECT)
    if "model.encoder_hash" in params:  # the encoder of SID-MLP++ is a checkpoint
        without.add("model.encoder")
    identity = {
        name: value
        for name, value in params.items()
        if name.startswith(("model.", "fit.", "evaluate.")) and name not in without
    }
    identity |= {
        name: value for name, value in tags.items() if name.startswith("table.")
    }
    if "split.folds" in params:  # a fold is known by its number and theirs
        identity["split.folds"] = params["split.folds"]
    if "evaluate.batch_size" in params:  # a trial that measures a checkpoint
        identity["checkpoint"] = params.get("checkpoint", "")
    return identity


def read_fold(params: Mapping[str, str]) -> str:
    """Return the number of the fold of a training, or an empty text for tables without folds."""
    fold = params.get("fit.fold", "")
    return fold if fold.isdigit() else ""


def default_params(params: dict[str, str]) -> dict[str, str]:
    """Return options that are newer than a run, at their defaults, which change nothing.

    With them a run stands in one row with seeds of a later version.
    """
    configs = {
        name.removesuffix("name"): registry.find(model).config_class
        for name, model in params.items()
        if name.startswith("model.")
        and name.endswith(".name")
        and model in registry.MODELS
    }
    if any(name.startswith("fit.") for name in params):
        configs["fit."] = FitConfig
    defaults: dict[str, str] = {}
    for prefix, config in configs.items():
        values = {
            f.name: f.default if f.default_factory is MISSING else f.default_factory()
            for f in fields(config)
        }
        known = {name: value for name, value in values.items() if value is not MISSING}
        defaults |= flatten(known, prefix)
    parents = {
        name.rsplit(".", depth)[0]
        for name in params
        for depth in range(1, name.count(".") + 1)
    }
    return {
        name: value
        for name, value in defaults.items()
        if name not in params and name not in parents
    }


def find_best_run(comparison: Comparison) -> Run:
    """Return the finished run that is best on validation.

    With folds it is a run of the last one that was trained on, as it has the newest
    training requests.

    Raises:
        UserError: if no finished run has the metric.
    """
    metric = f"val/{comparison.metric}"
    runs = [
        run
        for row in comparison.rows
        if not row.options
        for run in row.runs
        if run.finished and metric in run.metrics
    ]
    if not runs:
        raise UserError(
            f"no finished run of {comparison.selection.title} has {metric}; train one, or "
            f"choose another --metric"
        )
    last_fold = max(int(run.fold or 0) for run in runs)
    newest = [run for run in runs if int(run.fold or 0) == last_fold]
    return min(newest, key=lambda run: comparison.sign * run.metrics[metric])
