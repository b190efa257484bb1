"""Read the runs of an MLflow store as frames, and select the runs to compare.

    store = read_store(uri, ["retrieval/DATASET"])
    trainings, notes = select_trainings(store)

Of each sweep in an experiment only the best settings are selected, with all their
seeds; smoke sweeps are left out. All trials are selected if the sweep is named, or if
the experiment has nothing else, as while its first sweep runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
from mlflow import MlflowClient

from core.errors import UserError, pluralize
from core.schemas import RunRecord
from pipelines import tracking
from pipelines.evaluation.record import (
    group_evaluations,
    read_fresh_log,
    read_options,
)
from pipelines.tracking import PARENT_TAG

MAX_RUNS = 50_000
"""Largest number of runs that MLflow returns at once."""

EXPECTED = (
    "model.name",
    "model.teacher_hash",
    "model.encoder",
    "model.encoder_hash",
    "fit.seed",
    "fit.batch_size",
    "fit.max_epochs",
    "fit.train_examples",
    "fit.eval_options.unseen",
    "fit.eval_examples",
    "evaluate.batch_size",
    "checkpoint",
    "table.items",
    "table.sequences",
    "sweep.axes",
    "sweep.metric",
    PARENT_TAG,
    tracking.KIND_TAG,
    tracking.WEIGHTS_TAG,
    tracking.RANKS_BY_TAG,
    tracking.POINT_TAG,
    tracking.BEST_TAG,
    tracking.COMPLETE_TAG,
    tracking.SMOKE_TAG,
    tracking.FORMAT_TAG,
)
"""Params and tags that the frame of runs always has as columns."""

os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")


@dataclass
class Store:
    """The runs of some experiments, oldest first."""

    uri: str
    """Tracking URI."""
    experiments: dict[str, str]
    """Names of the experiments by id."""
    runs: pl.DataFrame
    """A line per run: `id`, `name`, `experiment`, `status`, params and tags. A tag
    replaces the param of its name, as params cannot change."""
    metrics: pl.DataFrame
    """`id`, `metric` and `value`; `val/` is measured at the best epoch."""
    evaluations: pl.DataFrame
    """A line per current evaluation: `id`, `training`, `split`, `options`, `is_unseen`
    and `fresh_log`, the hash of the log if it is not the log of the training."""


def read_store(uri: str, experiments: Sequence[str] = ()) -> Store:
    """Read the runs of experiments, and end runs whose process is dead.

    Args:
        uri: Tracking URI.
        experiments: Names of the experiments; empty for all.
    """
    client = tracking.connect(uri)
    names = find_experiments(client, uri, experiments)
    runs = search_runs(client, list(names))
    tracking.end_dead_runs(client, runs)
    return Store(
        uri,
        names,
        to_frame(runs, names),
        to_metrics(runs),
        read_evaluations(runs),
    )


def find_experiments(
    client: MlflowClient, uri: str, names: Sequence[str]
) -> dict[str, str]:
    """Return the names of experiments by id; no names select all experiments."""
    experiments = client.search_experiments(max_results=MAX_RUNS)
    id_by_name = {item.name: str(item.experiment_id) for item in experiments}
    for name in names:
        if name in id_by_name:
            continue
        if client.get_experiment_by_name(name):  # MLflow finds deleted experiments too
            raise UserError(f"the experiment '{name}' is deleted at {uri}")
        raise UserError(tracking.describe_unknown("experiment", name, uri, id_by_name))
    return {id_by_name[name]: name for name in names or id_by_name}


def search_runs(client: MlflowClient, experiment_ids: list[str]) -> list[Any]:
    """Return all runs of experiments, oldest first."""
    if not experiment_ids:
        return []
    order = ["attributes.start_time ASC"]
    return list(
        client.search_runs(experiment_ids, "", max_results=MAX_RUNS, order_by=order)
    )


def to_frame(runs: Sequence[Any], experiments: dict[str, str]) -> pl.DataFrame:
    """Return a line per run with its params and tags (see `Store.runs`)."""
    lines = [
        {
            **dict.fromkeys(EXPECTED),
            **run.data.params,
            **run.data.tags,
            "id": run.info.run_id,
            "name": run.info.run_name,
            "experiment": experiments[run.info.experiment_id],
            "status": run.info.status,
        }
        for run in runs
    ]
    names = dict.fromkeys([*EXPECTED, "id", "name", "experiment", "status"])
    for line in lines:
        names |= line
    return pl.DataFrame(lines, dict.fromkeys(names, pl.String))


def to_metrics(runs: Sequence[Any]) -> pl.DataFrame:
    """Return the defined metrics of all runs (see `Store.metrics`)."""
    lines = [
        (run.info.run_id, tracking.from_mlflow_name(name), value)
        for run in runs
        for name, value in sorted(run.data.metrics.items(), reverse=True)
    ]
    schema = {"id": pl.String, "metric": pl.String, "value": pl.Float64}
    metrics = pl.DataFrame(lines, schema, orient="row")
    # names are in reversed order, so the best epoch comes after the last one
    metrics = metrics.with_columns(pl.col("metric").str.replace("^best/", "val/"))
    metrics = metrics.filter(pl.col("value").is_not_nan())
    return metrics.unique(["id", "metric"], keep="last", maintain_order=True)


def read_evaluations(runs: Sequence[Any]) -> pl.DataFrame:
    """Return a line per finished evaluation of current weights, oldest first."""
    by_id = {run.info.run_id: run for run in runs}
    lines = []
    for training, evaluations in group_evaluations(runs).items():
        for evaluation in evaluations if training in by_id else []:
            options = read_options(evaluation, by_id[training])
            fresh_log = read_fresh_log(evaluation, by_id[training])
            words = [
                name if value == "True" else f"{name} {value}"
                for name, value in options.items()
            ]
            words += [f"log {fresh_log[:8]}"] if fresh_log else []
            lines.append(
                {
                    "id": evaluation.info.run_id,
                    "training": training,
                    "split": evaluation.data.params["split"],
                    "options": ", ".join(words),
                    "is_unseen": options.get("unseen") == "True",
                    "fresh_log": fresh_log,
                }
            )
    names = ("id", "training", "split", "options", "is_unseen", "fresh_log")
    schema = dict.fromkeys(names, pl.String) | {"is_unseen": pl.Boolean}
    return pl.DataFrame(lines, schema)


def select_sweep(store: Store, sweep: dict[str, Any]) -> tuple[pl.DataFrame, list[str]]:
    """Return the trials of a sweep and their teachers, and notes."""
    trainings = filter_trainings(store)
    trials = trainings.filter(pl.col(PARENT_TAG) == sweep["id"])
    if trials.is_empty():
        raise UserError(f"the sweep '{sweep['name']}' at {store.uri} has no trials yet")
    is_teacher = pl.col(tracking.WEIGHTS_TAG).is_in(
        trials["model.teacher_hash"].drop_nulls().to_list()
    )
    teachers = trainings.filter(is_teacher).with_columns(is_teacher=pl.lit(True))
    return pl.concat([trials, teachers]), describe_incomplete(sweep)


def select_trainings(store: Store) -> tuple[pl.DataFrame, list[str]]:
    """Return trainings, of each sweep those with the best settings, and notes."""
    trainings = filter_trainings(store)
    smoke = store.runs.filter(pl.col(tracking.SMOKE_TAG).is_not_null())
    parent = pl.col(PARENT_TAG).fill_null("")
    trainings = trainings.filter(~parent.is_in(smoke["id"].to_list()))
    sweeps = filter_sweeps(store).join(
        smoke, on="id", how="anti", maintain_order="left"
    )
    settings = pl.col(tracking.POINT_TAG).map_elements(
        lambda point: tracking.settings_key(json.loads(point)), return_dtype=pl.String
    )
    best = store.runs.select(settings.alias("best"), pl.col("id").alias("trial"))
    sweeps = sweeps.join(best, left_on=tracking.BEST_TAG, right_on="trial", how="left")
    best_by_sweep = dict(sweeps.select("id", "best").iter_rows())
    is_best = settings == parent.replace_strict(best_by_sweep, default=None)
    is_trial = parent.is_in(sweeps["id"].to_list())
    selected = trainings.filter(~is_trial | is_best)
    notes = []
    for sweep in sweeps.iter_rows(named=True):
        of_sweep, name = pl.col(PARENT_TAG) == sweep["id"], sweep["name"]
        total, count = (len(table.filter(of_sweep)) for table in (trainings, selected))
        notes += describe_incomplete(sweep)
        if count < total:
            notes.append(f"{name}: {count} of {total} trials here")
    if len(trainings) and selected.is_empty():
        selected = trainings
        notes = ["the best settings are not known yet: all trials of sweeps are here"]
    notes += [f"{name}: a smoke sweep, left out" for name in smoke["name"]]
    num_earlier = len(all_trainings(store)) - len(filter_trainings(store))
    if num_earlier:
        notes.append(f"{pluralize(num_earlier, 'run')} of earlier formats, left out")
    return selected, notes


def filter_sweeps(store: Store) -> pl.DataFrame:
    """Return the runs of sweeps."""
    return store.runs.filter(pl.col(tracking.KIND_TAG) == "sweep")


def all_trainings(store: Store) -> pl.DataFrame:
    """Return the runs of trainings, trials included."""
    is_sweep = pl.col(tracking.KIND_TAG).eq_missing("sweep")
    return store.runs.filter(pl.col("model.name").is_not_null() & ~is_sweep)


def filter_trainings(store: Store) -> pl.DataFrame:
    """Return the runs of trainings, without those of earlier formats."""
    trainings = all_trainings(store).with_columns(is_teacher=pl.lit(False))
    return trainings.filter(pl.col(tracking.FORMAT_TAG) == str(RunRecord.version))


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
