"""Load a comparison from MLflow: one row per model and settings, best first.

comparison = compare(select(uri, ["retrieval/DATASET"]))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from core.errors import UserError
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
    "fit.log_every_steps",
    "fit.eval_batch_size",
    "fit.checkpoint_every_steps",
}
"""Params in which the runs of one row may differ. Teachers differ if their hashes do,
whatever their folders."""


def compare(selection: Selection, metric: str | None = None) -> Comparison:
    """Group the selected runs into rows, best first.

    Args:
        selection: Runs to compare.
        metric: Metric that sorts the rows, without its split. By default the metric of
            the sweep, else gauc, mean/normalised_entropy or ndcg@10, whichever of them
            the runs have first.
    """
    rows = load_rows(selection)
    if not any(run.finished for row in rows for run in row.runs) and not any(
        row.metric_names() for row in rows
    ):
        raise UserError(f"no run of {selection.title} at {selection.uri} is finished")
    metric = choose_metric(selection, rows, metric)
    teachers = []
    if selection.teachers:
        teachers = load_rows(replace(selection, runs=selection.teachers))
    return Comparison(selection, sort_rows(rows, metric), metric, teachers)


def choose_metric(selection: Selection, rows: Sequence[Row], metric: str | None) -> str:
    """Return the metric that sorts the rows.

    Args:
        selection: Runs to compare.
        rows: Rows of the compared runs.
        metric: Metric that the user gave, or None for the default (see `compare`).
    """
    measured = {name.split("/", 1)[1] for row in rows for name in row.metric_names()}
    if metric is not None and metric not in measured:
        raise UserError(
            f"no run of {selection.title} has the metric '{metric}' on val or test"
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

    Rows whose ranking does not fit the log (see `leading_ranking`) come after the
    others, then diagnostics, which are never the best; rows of fresh logs come last.
    """
    sign = 1 if lower_is_better(metric) else -1
    leading = leading_ranking(rows)

    def sort_key(row: Row) -> tuple[str, bool, bool, float, float]:
        test, val = (sign * row.mean(f"{split}/{metric}") for split in ("test", "val"))
        return (
            row.options.fresh_log,
            row.is_diagnostic,
            row.ranking != leading,
            test if math.isfinite(test) else math.inf,
            val if math.isfinite(val) else math.inf,
        )

    return sorted(rows, key=sort_key)


def load_rows(selection: Selection) -> list[Row]:
    """Group the selected runs into rows, with the settings in which the rows differ."""
    rows: dict[tuple[Any, ...], Row] = {}
    for training in selection.runs:
        for row in split_evaluations(selection, training):
            key = (row.experiment, row.model, row.options, *sorted(row.params.items()))
            rows.setdefault(key, replace(row, runs=[])).runs += row.runs
    params_by_model: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in rows.values():
        model = (row.model, row.experiment)
        params_by_model.setdefault(model, []).append(row.params)
    for row in rows.values():
        row_params = params_by_model[row.model, row.experiment]
        for name in sorted({name for params in row_params for name in params}):
            if len({params.get(name) for params in row_params}) > 1:
                row.settings[name] = row.params.get(name, "none")
    return list(rows.values())


def split_evaluations(selection: Selection, training: Any) -> list[Row]:
    """Return a row of one run for each set of options of a training's evaluations.

    Args:
        selection: The compared runs, with their evaluations.
        training: MLflow run of the training.
    """
    tags = training.data.tags
    # params cannot change, so what a training adds or changes later are tags
    added = {
        key: value
        for key, value in tags.items()
        if key.startswith(("fit.", tracking.RANKS_BY_TAG))
    }
    params = {**training.data.params, **added}
    row = Row(
        model=params["model.name"],
        experiment=selection.experiments[training.info.experiment_id],
        params=read_identity(params, tags),
        simulated=tracking.SIMULATED_TAG in tags,
    )
    run = Run(
        id=training.info.run_id,
        name=training.info.run_name,
        seed=params.get("fit.seed", ""),
        finished=training.info.status == "FINISHED",
        weights=tags.get(tracking.WEIGHTS_TAG, ""),
        teacher=params.get("model.teacher_hash", ""),
        metrics={},
        sids=Path(params.get("sids", "")).name,
        uri=selection.uri,
        evaluation_id=training.info.run_id,
    )
    metrics = read_metrics(training)
    training_metrics = {
        name: value
        for name, value in metrics.items()
        if not name.startswith(("val/", "test/")) or name == "val/epoch"
    }
    no_options = EvaluationOptions()
    runs = {no_options: replace(run, metrics=dict(metrics))}
    for evaluation in selection.evaluations.get(training.info.run_id, []):
        options = EvaluationOptions.from_values(
            read_options(evaluation, training), read_fresh_log(evaluation, training)
        )
        earlier = runs.get(options, replace(run, metrics=training_metrics))
        runs[options] = add_evaluation(earlier, evaluation)
    # the training's own validation replaces the one of an evaluation without options
    validation = {
        name: value for name, value in metrics.items() if name.startswith("val/")
    }
    runs[no_options].metrics.update(validation)
    return [replace(row, options=options, runs=[run]) for options, run in runs.items()]


def add_evaluation(run: Run, evaluation: Any) -> Run:
    """Return a run with the metrics of an evaluation added.

    An evaluation on test also replaces the `evaluation_id`. Evaluations are added
    oldest first, so the metrics per user are those of the latest evaluation on test.

    Args:
        run: Run of the training, with the metrics of earlier evaluations.
        evaluation: MLflow run of the evaluation.
    """
    measured = {
        tracking.from_mlflow_name(name): value
        for name, value in evaluation.data.metrics.items()
    }
    run = replace(run, metrics={**run.metrics, **measured})
    if evaluation.data.params["split"] == "test":
        run = replace(run, evaluation_id=evaluation.info.run_id)
    return run


def read_metrics(training: Any) -> dict[str, float]:
    """Return the metrics of a training or of a trial that evaluates a checkpoint.

    Metrics that begin with `val/` are taken at the best epoch.
    """
    metrics, best = {}, {}
    for logged_name, value in training.data.metrics.items():
        name = tracking.from_mlflow_name(logged_name)
        if name.startswith("best/"):
            best[f"val/{name.removeprefix('best/')}"] = value
        else:
            metrics[name] = value
    return metrics | best


def read_identity(params: dict[str, str], tags: dict[str, str]) -> dict[str, str]:
    """Return the params and table hashes that runs of one row share."""
    ignored = set(PARAMS_WITHOUT_EFFECT)
    if "model.encoder_hash" in params:  # the encoder of SID-MLP++ is a checkpoint
        ignored.add("model.encoder")
    identity = {
        name: value
        for name, value in params.items()
        if name.startswith(("model.", "fit.", "evaluate.")) and name not in ignored
    }
    identity |= {
        name: value for name, value in tags.items() if name.startswith("table.")
    }
    if "evaluate.batch_size" in params:  # a trial that evaluates a checkpoint
        identity["checkpoint"] = params.get("checkpoint", "")
    return identity


def find_best_run(comparison: Comparison) -> Run:
    """Return the finished run that is best on validation."""
    metric = f"val/{comparison.metric}"
    runs = [
        run
        for row in comparison.rows
        if not row.options and not row.is_diagnostic
        for run in row.runs
        if run.finished and metric in run.metrics
    ]
    if not runs:
        raise UserError(f"no finished run of {comparison.selection.title} has {metric}")
    return min(runs, key=lambda run: comparison.sign * run.metrics[metric])
