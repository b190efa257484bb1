"""Read the runs of an MLflow store as a frame, and select the runs to compare.

    runs = read_runs(uri, ["retrieval/DATASET"])
    trainings, notes = select_trainings(runs)

Of each sweep in an experiment only the best settings are selected, with all their
seeds; smoke sweeps are left out. All trials are selected if the sweep is named, or if
the experiment has nothing else, as while its first sweep runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import polars as pl

from core.errors import UserError, pluralize
from core.schemas import RunRecord
from models.retrieval.options import AtSpeedOptions
from pipelines import tracking
from pipelines.tracking import PARENT_TAG, WEIGHTS_TAG

MAX_RUNS = 50_000
"""Largest number of runs that MLflow returns at once."""

OPTIONS = sorted(field.name for field in fields(AtSpeedOptions))
"""Options of evaluations, which are params of their runs."""

TEXTS = (
    "id",
    "name",
    "experiment",
    "status",
    "artifacts",
    *OPTIONS,
    *(f"model.{name}" for name in OPTIONS),
    "model.name",
    "model.teacher_hash",
    "model.encoder",
    "model.encoder_hash",
    "fit.seed",
    "evaluate.batch_size",
    "checkpoint",
    "split",
    "table.items",
    "table.sequences",
    "sweep.metric",
    PARENT_TAG,
    WEIGHTS_TAG,
    tracking.KIND_TAG,
    tracking.RANKS_BY_TAG,
    tracking.POINT_TAG,
    tracking.BEST_TAG,
    tracking.COMPLETE_TAG,
    tracking.SMOKE_TAG,
    tracking.FORMAT_TAG,
)
"""Fields, params and tags that the frame of runs always has as columns."""

NUMBERS = (
    "train/parameters",
    "train/total_seconds",
    "test/examples",
    "test/first/examples",
    "test/requests_per_s",
)
"""Metrics that the frame of runs always has as columns."""

OF_EVALUATION = ("split", "artifacts", "table.sequences", "^(val|test)/.*$")
"""Columns of evaluations, as a regular expression for the metrics."""


def search_runs(
    uri: str, experiments: Sequence[str] = ()
) -> tuple[list[Any], dict[str, str]]:
    """Return the MLflow runs of experiments, oldest first, and the names by id.

    Args:
        uri: Tracking URI.
        experiments: Names of the experiments; empty for all.
    """
    client = tracking.connect(uri)
    found = client.search_experiments(max_results=MAX_RUNS)
    ids = {experiment.name: experiment.experiment_id for experiment in found}
    for name in experiments:
        if name not in ids:
            raise UserError(tracking.describe_unknown("experiment", name, uri, ids))
    names = {ids[name]: name for name in experiments or ids}
    order = ["attributes.start_time ASC"]
    runs = client.search_runs(list(names), max_results=MAX_RUNS, order_by=order)
    return list(runs), names


def read_runs(uri: str, experiments: Sequence[str] = ()) -> pl.DataFrame:
    """Read the runs of experiments, oldest first, and end runs whose process is dead.

    Args:
        uri: Tracking URI.
        experiments: Names of the experiments; empty for all.

    Returns:
        A line per run: `id`, `name`, `experiment`, `status`, `artifacts`, params, tags
        and metrics. A tag replaces the param of its name, as params cannot change.
        Metrics under `val/` are measured at the best epoch.
    """
    runs, names = search_runs(uri, experiments)
    tracking.end_dead_runs(tracking.connect(uri), runs)
    lines = []
    for run in runs:
        # in reversed order, the best epoch comes after the last one
        metrics = {
            re.sub("^best/", "val/", tracking.from_mlflow_name(name)): value
            for name, value in sorted(run.data.metrics.items(), reverse=True)
        }
        line = {
            **run.data.params,
            **run.data.tags,
            **metrics,
            "id": run.info.run_id,
            "name": run.info.run_name,
            "experiment": names[run.info.experiment_id],
            "status": run.info.status,
            "artifacts": run.info.artifact_uri,
        }
        lines.append(line)
    schema = dict.fromkeys(TEXTS, pl.String) | dict.fromkeys(NUMBERS, pl.Float64)
    tables = [
        pl.DataFrame(schema=schema),
        pl.DataFrame(lines, infer_schema_length=None),
    ]
    return pl.concat(tables, how="diagonal_relaxed").fill_nan(None)


def read_evaluations(runs: pl.DataFrame) -> pl.DataFrame:
    """Return a line per finished evaluation of current weights, oldest first.

    If a training was evaluated, continued and evaluated again, the evaluations of the
    earlier weights are left out, as are evaluations on another log.

    Returns:
        `training`, `split`, `options` (those that differ
        from the model's config, as text), `is_unseen` and the metrics.
    """
    trained = runs.select(
        WEIGHTS_TAG,
        *(f"model.{name}" for name in OPTIONS),
        "table.sequences",
        training="id",
    )
    evaluations = (
        runs.filter(pl.col(tracking.KIND_TAG) == tracking.EVALUATION, status="FINISHED")
        .rename({PARENT_TAG: "training"})
        .select("training", WEIGHTS_TAG, *OPTIONS, *OF_EVALUATION)
        .join(
            trained,
            on=["training", WEIGHTS_TAG, "table.sequences"],
            nulls_equal=True,
            maintain_order="left",
        )
    )
    texts = []
    for name in OPTIONS:
        text = pl.format(f"{name} {{}}", name).str.replace(" True$", "")
        is_changed = pl.col(name) != pl.col(f"model.{name}").fill_null("")
        texts.append(pl.when(is_changed).then(text))
    return evaluations.select(
        "training",
        *OF_EVALUATION,
        options=pl.concat_str(texts, separator=", ", ignore_nulls=True),
        is_unseen=pl.col("unseen").eq_missing("True"),
    )


def filter_sweeps(runs: pl.DataFrame) -> pl.DataFrame:
    """Return the runs of sweeps."""
    return runs.filter(pl.col(tracking.KIND_TAG) == "sweep")


def filter_trainings(runs: pl.DataFrame) -> pl.DataFrame:
    """Return the runs of trainings, trials included, without earlier formats."""
    is_sweep = pl.col(tracking.KIND_TAG).eq_missing("sweep")
    is_current = pl.col(tracking.FORMAT_TAG) == str(RunRecord.version)
    return runs.filter(pl.col("model.name").is_not_null() & ~is_sweep & is_current)


def select_trainings(runs: pl.DataFrame) -> tuple[pl.DataFrame, list[str]]:
    """Return the trainings to compare, and notes on runs that are left out.

    Of a sweep only the trainings with the best settings are compared.
    """
    trainings = filter_trainings(runs)
    is_earlier = pl.col(tracking.FORMAT_TAG).ne_missing(str(RunRecord.version))
    earlier = runs.filter(pl.col("model.name").is_not_null() & is_earlier)
    settings = pl.col(tracking.POINT_TAG).map_elements(
        lambda point: tracking.settings_key(json.loads(point)), return_dtype=pl.String
    )
    trainings = trainings.with_columns(settings=settings)
    smoke = runs.filter(pl.col(tracking.SMOKE_TAG).is_not_null())
    is_smoke = pl.col(PARENT_TAG).fill_null("").is_in(smoke["id"].to_list())
    trainings = trainings.filter(~is_smoke)
    selected, notes = trainings, []
    sweeps = filter_sweeps(runs).filter(pl.col(tracking.SMOKE_TAG).is_null())
    for sweep in sweeps.iter_rows(named=True):
        is_trial = pl.col(PARENT_TAG).eq_missing(sweep["id"])
        best = pl.col("settings").filter(
            pl.col("id") == (sweep[tracking.BEST_TAG] or "")
        )
        selected = selected.filter(~is_trial | (pl.col("settings") == best.first()))
        total, count = (len(table.filter(is_trial)) for table in (trainings, selected))
        notes += describe_incomplete(sweep)
        if count < total:
            notes.append(f"{sweep['name']}: {count} of {total} trials here")
    if len(trainings) and selected.is_empty():
        selected = trainings
        notes = ["the best settings are not known yet: all trials of sweeps are here"]
    notes += [f"{name}: a smoke sweep, left out" for name in smoke["name"]]
    if len(earlier):
        notes.append(f"{pluralize(len(earlier), 'run')} of earlier formats, left out")
    return selected, notes


def describe_incomplete(sweep: dict[str, Any]) -> list[str]:
    """Return a note on the trials of a sweep that have no result, or []."""
    incomplete = sweep[tracking.COMPLETE_TAG]
    if incomplete in (None, "", "true"):
        return []
    return [f"{sweep['name']}: {incomplete}, so its best is of an incomplete grid"]


def find_run(runs: pl.DataFrame, name: str, kind: str, uri: str) -> dict[str, Any]:
    """Return the run with an id or name.

    Args:
        runs: Runs to search.
        name: Id or name.
        kind: `run` or `sweep`, for messages.
        uri: Tracking URI, for messages.
    """
    matches = runs.filter((pl.col("id") == name) | (pl.col("name") == name))
    if len(matches) > 1:
        ids = ", ".join(matches["id"])
        raise UserError(f"{len(matches)} {kind}s at {uri} are called '{name}': {ids}")
    if matches.is_empty():
        raise UserError(tracking.describe_unknown(kind, name, uri, runs["name"]))
    return matches.row(0, named=True)
