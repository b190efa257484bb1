"""Select the MLflow runs of a comparison: of experiments, of a sweep, or named one by one.

    selection = select(uri, ["retrieval/DATASET"])

An experiment shows each sweep as the best settings with all their seeds, and leaves
smoke sweeps out; a sweep asked for by name shows all its trials. An experiment with
nothing but a sweep whose best trial is unknown, as while it runs, shows all trials too.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlflow import MlflowClient

from models.config import pluralize
from models.storage.tables import UserError
from pipelines import tracking
from pipelines.evaluation.record import group_evaluations
from pipelines.tracking import PARENT_TAG

os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")


@dataclass
class Selection:
    """The runs of a comparison, oldest first."""

    uri: str
    """Tracking URI."""
    title: str
    """Heading, such as the name of the experiment."""
    runs: list[Any]
    """MLflow runs of trainings."""
    experiments: dict[str, str]
    """Names of the experiments by id."""
    sweep: Any = None
    """MLflow run of the sweep whose trials are compared."""
    notes: list[str] = field(default_factory=list)
    """Notes on runs that were left out."""
    teachers: list[Any] = field(default_factory=list)
    """MLflow runs of the teachers of a sweep's trials."""
    evaluations: dict[str, list[Any]] = field(default_factory=dict)
    """MLflow runs of evaluations, oldest first, by the id of their training."""

    @property
    def client(self) -> MlflowClient:
        """A client of the store."""
        return tracking.connect(self.uri)


def select(
    uri: str,
    experiments: Sequence[str] = (),
    sweep: str | None = None,
    runs: Sequence[str] = (),
) -> Selection:
    """Select the trainings of experiments, the trials of a sweep, or single runs.

    Args:
        uri: tracking URI.
        experiments: names of the experiments to search; by default all.
        sweep: name or run id of a sweep.
        runs: names or ids of runs.

    Raises:
        UserError: if a name is not in the store, or nothing is left to compare.
    """
    client = tracking.connect(uri)
    names = find_experiments(client, uri, experiments)
    found = search_runs(client, list(names))
    tracking.end_dead(client, found)
    if sweep:
        selection = select_sweep(uri, names, found, sweep)
    elif runs:
        selection = select_named(uri, names, found, runs)
    else:
        selection = select_trainings(uri, names, found, ", ".join(experiments))
    selection.evaluations = group_evaluations(found)
    return selection


def find_experiments(
    client: MlflowClient, uri: str, names: Sequence[str]
) -> dict[str, str]:
    """Return the names of the given experiments by id; of all without names.

    Raises:
        UserError: if an experiment is not in the store, or deleted.
    """
    ids = {e.name: str(e.experiment_id) for e in client.search_experiments()}
    for name in names:
        if name in ids:
            continue
        if client.get_experiment_by_name(name):  # MLflow finds deleted experiments too
            raise UserError(
                f"the experiment '{name}' is deleted at {uri}; restore it with mlflow "
                f"experiments restore"
            )
        raise UserError(tracking.unknown("experiment", name, uri, ids))
    return {ids[name]: name for name in names or ids}


def select_sweep(
    uri: str, experiments: dict[str, str], runs: Sequence[Any], name: str
) -> Selection:
    """Select the trials of a sweep and the trainings that taught them."""
    sweep = find_run([run for run in runs if is_sweep(run)], name, "sweep", uri)
    trials = [
        run
        for run in trainings(runs)
        if run.data.tags.get(PARENT_TAG) == sweep.info.run_id
    ]
    if not trials:
        raise UserError(
            f"the sweep '{name}' at {uri} has no trials yet; start it with jobs.sweep"
        )
    taught = {run.data.params.get("model.teacher_hash") for run in trials} - {None}
    teachers = [
        run
        for run in trainings(runs)
        if run.data.tags.get(tracking.WEIGHTS_TAG) in taught
    ]
    experiment = experiments[sweep.info.experiment_id]
    return Selection(
        uri,
        f"{experiment}: {sweep.info.run_name}",
        trials,
        experiments,
        sweep,
        notes=describe_incomplete(sweep),
        teachers=teachers,
    )


def select_named(
    uri: str, experiments: dict[str, str], runs: Sequence[Any], names: Sequence[str]
) -> Selection:
    """Select single trainings by name or id."""
    chosen = [find_run(trainings(runs), name, "run", uri) for name in names]
    title = ", ".join(run.info.run_name for run in chosen)
    if len(chosen) > 3:
        homes = dict.fromkeys(experiments[run.info.experiment_id] for run in chosen)
        title = f"{', '.join(homes)}: {pluralize(len(chosen), 'run')}"
    return Selection(uri, title, chosen, experiments)


def select_trainings(
    uri: str, experiments: dict[str, str], runs: Sequence[Any], title: str
) -> Selection:
    """Select the trainings of experiments, with the best settings of each sweep."""
    title = title or "all experiments"
    smoke = {
        run.info.run_id: run.info.run_name
        for run in runs
        if tracking.SMOKE_TAG in run.data.tags
    }
    chosen = [
        run for run in trainings(runs) if run.data.tags.get(PARENT_TAG) not in smoke
    ]
    sweeps = [run for run in runs if is_sweep(run) and run.info.run_id not in smoke]
    best, notes = keep_best_trials(chosen, sweeps, runs)
    if chosen and not best:
        best = chosen
        notes = ["the best settings are not known yet: all trials of sweeps are here"]
    notes += [
        f"{name}: a smoke sweep, left out; its trials: --sweep {name}"
        for name in smoke.values()
    ]
    if not best:
        told = "".join(f"; {note}" for note in notes)
        raise UserError(
            f"the experiment '{title}' at {uri} has no runs; train one with jobs.train{told}"
        )
    return Selection(uri, title, best, experiments, notes=notes)


def search_runs(client: MlflowClient, experiment_ids: list[str]) -> list[Any]:
    """Return all runs of experiments, oldest first."""
    if not experiment_ids:
        return []
    runs: list[Any] = []
    token: str | None = None
    while True:
        page = client.search_runs(
            experiment_ids, order_by=["attributes.start_time ASC"], page_token=token
        )
        runs += page
        token = page.token
        if not token:
            return runs


def trainings(runs: Sequence[Any]) -> list[Any]:
    """Return the runs of trainings and trials, without sweeps, evaluations and pages."""
    return [
        run for run in runs if "model.name" in run.data.params and not is_sweep(run)
    ]


def is_sweep(run: Any) -> bool:
    """Return whether an MLflow run is a sweep."""
    return bool(run.data.tags.get(tracking.KIND_TAG) == "sweep")


def keep_best_trials(
    runs: Sequence[Any], sweeps: Sequence[Any], all_runs: Sequence[Any]
) -> tuple[list[Any], list[str]]:
    """Leave out the trials of sweeps, except for the best settings with all their seeds.

    Args:
        runs: trainings and trials.
        sweeps: the sweeps.
        all_runs: all runs of the experiments, with the best trial of each sweep.

    Returns:
        The runs that are left, and a note per sweep.
    """
    by_id = {run.info.run_id: run for run in all_runs}
    best_settings = {
        sweep.info.run_id: read_settings(
            by_id.get(sweep.data.tags.get(tracking.BEST_TAG))
        )
        for sweep in sweeps
    }
    kept = []
    num_trials, num_kept = Counter[str](), Counter[str]()
    for run in runs:
        sweep_id = run.data.tags.get(PARENT_TAG)
        if sweep_id in best_settings:
            num_trials[sweep_id] += 1
            settings = best_settings[sweep_id]
            if settings is None or read_settings(run) != settings:
                continue
            num_kept[sweep_id] += 1
        kept.append(run)
    notes = []
    for sweep in sweeps:
        count, total = num_kept[sweep.info.run_id], num_trials[sweep.info.run_id]
        notes += describe_incomplete(sweep)
        if count < total:
            notes.append(describe_left_out(sweep.info.run_name, count, total))
    return kept, notes


def describe_left_out(sweep: str, count: int, total: int) -> str:
    """Return a note that `count` of the `total` trials of a sweep are compared."""
    what = f"the {count} of the best settings are here"
    if count == 0:
        what = "none is here"
    if count == 1:
        what = "the best is here"
    return (
        f"{sweep}: of its {pluralize(total, 'trial')} {what}; all of them: "
        f"--sweep {sweep}"
    )


def describe_incomplete(sweep: Any) -> list[str]:
    """Return a note that a sweep has trials without a result, or nothing."""
    incomplete = sweep.data.tags.get(tracking.INCOMPLETE_TAG)
    if not incomplete:
        return []
    return [
        f"{sweep.info.run_name}: {incomplete}, so its best is of an incomplete grid; "
        f"the sweep's line again does what failed"
    ]


def read_settings(trial: Any) -> str | None:
    """Return a trial's values of the sweep's axes, without the seed, as text."""
    if trial is None:
        return None
    point: Mapping[str, Any] = json.loads(trial.data.tags[tracking.POINT_TAG])
    return tracking.settings_of(dict(point))


def find_run(runs: Sequence[Any], name: str, what: str, uri: str) -> Any:
    """Return the one run with this id or name.

    Args:
        runs: runs to search.
        name: id or name.
        what: `run` or `sweep`, for messages.
        uri: tracking URI, for messages.

    Raises:
        UserError: if there is no such run, or several.
    """
    matches = [run for run in runs if name in (run.info.run_id, run.info.run_name)]
    if len(matches) > 1:
        ids = ", ".join(run.info.run_id for run in matches)
        raise UserError(
            f"{len(matches)} {what}s at {uri} are called '{name}'; give the id of one: {ids}"
        )
    if not matches:
        names = [run.info.run_name for run in runs]
        raise UserError(tracking.unknown(what, name, uri, names))
    return matches[0]
