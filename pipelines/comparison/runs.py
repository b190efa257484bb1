"""Which MLflow runs are compared: those of experiments, of a sweep, or named one by one.

In the view of an experiment a sweep is its best settings, on all of their seeds, and a smoke sweep nothing; asked for
by name it is all trials.
So it is where nothing else is there and the best is not known, as while it runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlflow import MlflowClient

from models.config import pluralize
from models.storage.tables import UserError
from pipelines import tracking
from pipelines.tracking import unknown

os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")

KIND, PARENT = "trieline.kind", "mlflow.parentRunId"
"""Tags: what a run is (sweep, trial, compare, or nothing: a training), and its sweep."""


@dataclass
class Selection:
    """Runs to be compared, oldest first."""

    uri: str
    """Tracking URI."""
    title: str
    """What they are, such as the experiment's name."""
    runs: list[Any]
    """Trainings, as MLflow gives them."""
    experiments: dict[str, str]
    """Name of the experiment of each id."""
    sweep: Any = None
    """The sweep's own run, where the runs are its trials."""
    notes: list[str] = field(default_factory=list)
    """What was left out."""
    teachers: list[Any] = field(default_factory=list)
    """Of a sweep: the runs that have taught its trials."""

    @property
    def client(self) -> MlflowClient:
        return tracking.connect(self.uri)


def select(
    uri: str,
    experiments: Sequence[str] = (),
    sweep: str | None = None,
    runs: Sequence[str] = (),
) -> Selection:
    """The trainings of `experiments`, the trials of `sweep` (name or run id), or `runs` (names or ids).

    A sweep or runs are looked for in the experiments, in all where none is named. UserError with the nearest
    name for what is not there, and where nothing is left to compare.
    """
    client = tracking.connect(uri)
    known = {e.name: str(e.experiment_id) for e in client.search_experiments()}
    for name in experiments:
        if name not in known:
            if client.get_experiment_by_name(name):  # as deleted ones are found
                raise UserError(
                    f"the experiment '{name}' is deleted at {uri}; restore it with mlflow experiments restore"
                )
            raise UserError(unknown("experiment", name, uri, known))
    chosen = {known[name]: name for name in experiments or known}
    there = search(client, list(chosen))
    tracking.end_dead(client, there)
    if sweep:
        sweeps = [run for run in there if is_sweep(run)]
        parent = only(sweeps, sweep, "sweep", uri)
        trials = [
            run for run in there if run.data.tags.get(PARENT) == parent.info.run_id
        ]
        if not (trials := trainings(trials)):
            raise UserError(
                f"the sweep '{sweep}' at {uri} has no trials yet; start it with jobs.sweep"
            )
        taught = {run.data.params.get("model.teacher_hash") for run in trials} - {None}
        teachers = [
            run
            for run in trainings(there)
            if run.data.tags.get(tracking.WEIGHTS_TAG) in taught
        ]
        title = f"{chosen[parent.info.experiment_id]}: {parent.info.run_name}"
        return Selection(
            uri,
            title,
            trials,
            chosen,
            parent,
            notes=describe_incomplete(parent),
            teachers=teachers,
        )
    if runs:
        found = [only(trainings(there), name, "run", uri) for name in runs]
        homes = ", ".join(
            dict.fromkeys(chosen[run.info.experiment_id] for run in found)
        )
        names = ", ".join(run.info.run_name for run in found)
        return Selection(
            uri,
            names if len(found) < 4 else f"{homes}: {pluralize(len(found), 'run')}",
            found,
            chosen,
        )
    smoke = {
        run.info.run_id: run.info.run_name
        for run in there
        if tracking.SMOKE_TAG in run.data.tags
    }
    found = [run for run in trainings(there) if run.data.tags.get(PARENT) not in smoke]
    there = [run for run in there if run.info.run_id not in smoke]
    kept, notes = without_trials(found, there)
    title = ", ".join(experiments) or "all experiments"
    if found and not kept:
        kept, notes = (
            found,
            ["the best settings are not known yet: all trials of sweeps are here"],
        )
    notes += [
        f"{name}: a smoke sweep, left out; its trials: --sweep {name}"
        for name in smoke.values()
    ]
    if not kept:
        told = "".join(f"; {note}" for note in notes)
        raise UserError(
            f"the experiment '{title}' at {uri} has no runs; train one with jobs.train{told}"
        )
    return Selection(uri, title, kept, chosen, notes=notes)


def search(client: MlflowClient, ids: list[str]) -> list[Any]:
    """All runs of the experiments, oldest first."""
    runs: list[Any] = []
    token: str | None = None
    while ids:
        page = client.search_runs(
            ids, order_by=["attributes.start_time ASC"], page_token=token
        )
        runs += page
        token = page.token
        if not token:
            break
    return runs


def trainings(runs: Sequence[Any]) -> list[Any]:
    """Those of a model: neither the run of a sweep nor that of a page."""
    return [
        run for run in runs if "model.name" in run.data.params and not is_sweep(run)
    ]


def without_trials(
    runs: Sequence[Any], everything: Sequence[Any]
) -> tuple[list[Any], list[str]]:
    """The runs with each sweep's trials left out but for the best settings', on all their seeds, and a note for each
    sweep."""
    named = {run.info.run_id: run for run in everything}
    best = {
        id: settled(named.get(run.data.tags.get(tracking.BEST_TAG)))
        for id, run in named.items()
        if is_sweep(run)
    }
    kept, here, all_of = [], dict.fromkeys(best, 0), dict.fromkeys(best, 0)
    for run in runs:
        parent = run.data.tags.get(PARENT)
        if parent in best:
            all_of[parent] += 1
            if best[parent] is None or settled(run) != best[parent]:
                continue
            here[parent] += 1
        kept.append(run)
    notes = []
    for parent, count in here.items():
        notes += describe_incomplete(named[parent])
        if count < all_of[parent]:
            what = {0: "none is here", 1: "the best is here"}.get(
                count, f"the {count} of the best settings are here"
            )
            name = named[parent].info.run_name
            notes.append(
                f"{name}: of its {pluralize(all_of[parent], 'trial')} {what}; all of them: --sweep {name}"
            )
    return kept, notes


def describe_incomplete(sweep: Any) -> list[str]:
    """Return a note that the sweep's best trial is of an incomplete grid, or nothing if all trials have a result."""
    told = sweep.data.tags.get(tracking.INCOMPLETE_TAG)
    if not told:
        return []
    return [
        f"{sweep.info.run_name}: {told}, so its best is of an incomplete grid; the sweep's line again does what failed"
    ]


def is_sweep(run: Any) -> bool:
    return bool(run.data.tags.get(KIND) == "sweep")


def settled(trial: Any) -> str | None:
    """The trial's values of the sweep's axes, but for the seed."""
    if trial is None:
        return None
    return tracking.settings_of(json.loads(trial.data.tags[tracking.POINT_TAG]))


def only(runs: Sequence[Any], name: str, what: str, uri: str) -> Any:
    """The one run of this id or name; UserError where there is none, or more than one."""
    found = [run for run in runs if name in (run.info.run_id, run.info.run_name)]
    if len(found) > 1:
        ids = ", ".join(run.info.run_id for run in found)
        raise UserError(
            f"{len(found)} {what}s at {uri} are called '{name}'; give the id of one: {ids}"
        )
    if not found:
        raise UserError(unknown(what, name, uri, [run.info.run_name for run in runs]))
    return found[0]
