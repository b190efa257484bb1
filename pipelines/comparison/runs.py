"""Select the MLflow runs of a comparison: of experiments, of a sweep, or by name.

    selection = select(uri, ["retrieval/DATASET"])

Of each sweep in an experiment only the best settings are selected, with all their
seeds; smoke sweeps are left out. All trials are selected if the sweep is named, or if
the experiment has nothing else, as while its first sweep runs.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlflow import MlflowClient
from mlflow.utils import get_results_from_paginated_fn

from core.errors import UserError, pluralize
from core.schemas import RunRecord
from pipelines import tracking
from pipelines.evaluation.record import group_evaluations
from pipelines.tracking import PARENT_TAG

PAGE_SIZE = 1000
"""Experiments or runs that MLflow returns at once."""

os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")


@dataclass
class Selection:
    """MLflow runs of a comparison, oldest first."""

    uri: str
    """Tracking URI."""
    title: str
    """Heading, such as the name of the experiment."""
    runs: list[Any]
    """MLflow runs of trainings."""
    experiments: dict[str, str]
    """Names of the experiments by id."""
    sweep: Any = None
    """MLflow run of the sweep whose trials are compared, or None."""
    notes: list[str] = field(default_factory=list)
    """Notes on runs that were left out."""
    teachers: list[Any] = field(default_factory=list)
    """MLflow runs of the teachers of a sweep's trials."""
    evaluations: dict[str, list[Any]] = field(default_factory=dict)
    """MLflow runs of evaluations, oldest first, by the id of their training."""

    @property
    def client(self) -> MlflowClient:
        """MLflow client of the store."""
        return tracking.connect(self.uri)


def select(
    uri: str,
    experiments: Sequence[str] = (),
    sweep: str | None = None,
    runs: Sequence[str] = (),
) -> Selection:
    """Select the trainings of experiments, the trials of a sweep, or single runs.

    Args:
        uri: Tracking URI.
        experiments: Names of the experiments to search; empty for all.
        sweep: Name or run id of the sweep whose trials are selected.
        runs: Names or ids of the selected runs, if no sweep is given.
    """
    client = tracking.connect(uri)
    names = find_experiments(client, uri, experiments)
    all_runs = search_runs(client, list(names))
    tracking.end_dead_runs(client, all_runs)
    if sweep:
        selection = select_sweep(uri, names, all_runs, sweep)
    elif runs:
        selection = select_named(uri, names, all_runs, runs)
    else:
        selection = select_trainings(uri, names, all_runs, ", ".join(experiments))
    selection.evaluations = group_evaluations(all_runs)
    return selection


def find_experiments(
    client: MlflowClient, uri: str, names: Sequence[str]
) -> dict[str, str]:
    """Return the names of experiments by id.

    Args:
        client: MLflow client of the store.
        uri: Tracking URI, for messages.
        names: Names of the experiments; empty for all.
    """
    id_by_name = {
        experiment.name: str(experiment.experiment_id)
        for experiment in get_results_from_paginated_fn(
            lambda count, token: client.search_experiments(
                max_results=count, page_token=token
            ),
            PAGE_SIZE,
        )
    }
    for name in names:
        if name in id_by_name:
            continue
        if client.get_experiment_by_name(name):  # MLflow finds deleted experiments too
            raise UserError(f"the experiment '{name}' is deleted at {uri}")
        raise UserError(tracking.describe_unknown("experiment", name, uri, id_by_name))
    return {id_by_name[name]: name for name in names or id_by_name}


def select_sweep(
    uri: str, experiments: dict[str, str], runs: Sequence[Any], name: str
) -> Selection:
    """Select the trials of a sweep, with the trainings of their teachers.

    Args:
        uri: Tracking URI.
        experiments: Names of the experiments by id.
        runs: All runs of the experiments.
        name: Name or run id of the sweep.
    """
    sweep = find_run([run for run in runs if is_sweep(run)], name, "sweep", uri)
    trainings = filter_trainings(runs)
    trials = [
        run for run in trainings if run.data.tags.get(PARENT_TAG) == sweep.info.run_id
    ]
    if not trials:
        raise UserError(f"the sweep '{name}' at {uri} has no trials yet")
    hashes = {run.data.params.get("model.teacher_hash") for run in trials} - {None}
    teachers = [
        run for run in trainings if run.data.tags.get(tracking.WEIGHTS_TAG) in hashes
    ]
    experiment = experiments[sweep.info.experiment_id]
    return Selection(
        uri=uri,
        title=f"{experiment}: {sweep.info.run_name}",
        runs=trials,
        experiments=experiments,
        sweep=sweep,
        notes=describe_incomplete(sweep),
        teachers=teachers,
    )


def select_named(
    uri: str, experiments: dict[str, str], runs: Sequence[Any], names: Sequence[str]
) -> Selection:
    """Select single trainings by name or id.

    Args:
        uri: Tracking URI.
        experiments: Names of the experiments by id.
        runs: All runs of the experiments.
        names: Names or ids of the selected runs.
    """
    trainings = filter_trainings(runs)
    selected = [find_run(trainings, name, "run", uri) for name in names]
    title = ", ".join(run.info.run_name for run in selected)
    if len(selected) > 3:
        parents = dict.fromkeys(experiments[run.info.experiment_id] for run in selected)
        title = f"{', '.join(parents)}: {pluralize(len(selected), 'run')}"
    return Selection(uri, title, selected, experiments)


def select_trainings(
    uri: str, experiments: dict[str, str], runs: Sequence[Any], title: str
) -> Selection:
    """Select the trainings of experiments, with the best settings of each sweep.

    Args:
        uri: Tracking URI.
        experiments: Names of the experiments by id.
        runs: All runs of the experiments.
        title: Names of the experiments for the heading; empty for all.
    """
    title = title or "all experiments"
    smoke_sweeps = {
        run.info.run_id: run.info.run_name
        for run in runs
        if tracking.SMOKE_TAG in run.data.tags
    }
    trainings = [
        run
        for run in filter_trainings(runs)
        if run.data.tags.get(PARENT_TAG) not in smoke_sweeps
    ]
    sweeps = [run for run in runs if is_sweep(run)]
    sweeps = [run for run in sweeps if run.info.run_id not in smoke_sweeps]
    selected, notes = keep_best_trials(trainings, sweeps, runs)
    if trainings and not selected:
        selected = trainings
        notes = ["the best settings are not known yet: all trials of sweeps are here"]
    notes += [f"{name}: a smoke sweep, left out" for name in smoke_sweeps.values()]
    num_earlier = sum(is_training(run) and not has_format(run) for run in runs)
    if num_earlier:
        notes.append(f"{pluralize(num_earlier, 'run')} of earlier formats, left out")
    if not selected:
        details = "".join(f"; {note}" for note in notes)
        raise UserError(f"the experiment '{title}' at {uri} has no runs{details}")
    return Selection(uri, title, selected, experiments, notes=notes)


def search_runs(client: MlflowClient, experiment_ids: list[str]) -> list[Any]:
    """Return all runs of experiments, oldest first."""
    if not experiment_ids:
        return []
    return list(
        get_results_from_paginated_fn(
            lambda count, token: client.search_runs(
                experiment_ids,
                order_by=["attributes.start_time ASC"],
                max_results=count,
                page_token=token,
            ),
            PAGE_SIZE,
        )
    )


def filter_trainings(runs: Sequence[Any]) -> list[Any]:
    """Return the runs of trainings, trials included, among all MLflow runs.

    Trainings of earlier formats are left out.
    """
    return [run for run in runs if is_training(run) and has_format(run)]


def is_training(run: Any) -> bool:
    """Return whether an MLflow run is a training or a trial."""
    return "model.name" in run.data.params and not is_sweep(run)


def has_format(run: Any) -> bool:
    """Return whether a training was logged in the format of this version."""
    return bool(run.data.tags.get(tracking.FORMAT_TAG) == str(RunRecord.version))


def is_sweep(run: Any) -> bool:
    """Return whether an MLflow run is a sweep."""
    return bool(run.data.tags.get(tracking.KIND_TAG) == "sweep")


def keep_best_trials(
    runs: Sequence[Any], sweeps: Sequence[Any], all_runs: Sequence[Any]
) -> tuple[list[Any], list[str]]:
    """Drop the trials of sweeps, except for the best settings with all their seeds.

    Args:
        runs: Trainings and trials.
        sweeps: Runs of the sweeps.
        all_runs: All runs of the experiments, with the best trial of each sweep.

    Returns:
        The remaining runs, and notes on dropped trials and incomplete sweeps.
    """
    by_id = {run.info.run_id: run for run in all_runs}
    best_settings = {
        sweep.info.run_id: read_settings(
            by_id.get(sweep.data.tags.get(tracking.BEST_TAG))
        )
        for sweep in sweeps
    }
    selected = []
    num_trials, num_selected = Counter[str](), Counter[str]()
    for run in runs:
        sweep_id = run.data.tags.get(PARENT_TAG)
        if sweep_id in best_settings:
            num_trials[sweep_id] += 1
            settings = best_settings[sweep_id]
            if settings is None or read_settings(run) != settings:
                continue
            num_selected[sweep_id] += 1
        selected.append(run)
    notes = []
    for sweep in sweeps:
        count, total = num_selected[sweep.info.run_id], num_trials[sweep.info.run_id]
        notes += describe_incomplete(sweep)
        if count < total:
            name = sweep.info.run_name
            notes.append(f"{name}: {count} of {total} trials here")
    return selected, notes


def describe_incomplete(sweep: Any) -> list[str]:
    """Return a note on the trials of a sweep that have no result.

    The list is empty if all trials have a result.
    """
    incomplete = sweep.data.tags.get(tracking.INCOMPLETE_TAG)
    if not incomplete:
        return []
    return [
        f"{sweep.info.run_name}: {incomplete}, so its best is of an incomplete grid"
    ]


def read_settings(trial: Any) -> str | None:
    """Return the sweep's axes with a trial's values as text, without the seed.

    None has no settings.
    """
    if trial is None:
        return None
    point: Mapping[str, Any] = json.loads(trial.data.tags[tracking.POINT_TAG])
    return tracking.settings_key(dict(point))


def find_run(runs: Sequence[Any], name: str, kind: str, uri: str) -> Any:
    """Return the run with an id or name.

    Args:
        runs: Runs to search.
        name: Id or name.
        kind: `run` or `sweep`, for messages.
        uri: Tracking URI, for messages.
    """
    matches = [run for run in runs if name in (run.info.run_id, run.info.run_name)]
    if len(matches) > 1:
        ids = ", ".join(run.info.run_id for run in matches)
        raise UserError(f"{len(matches)} {kind}s at {uri} are called '{name}': {ids}")
    if not matches:
        names = [run.info.run_name for run in runs]
        raise UserError(tracking.describe_unknown(kind, name, uri, names))
    return matches[0]
