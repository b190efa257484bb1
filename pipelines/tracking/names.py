"""Names in MLflow: tags of runs, and metrics, whose names take no `@` there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from models.config import did_you_mean

PARENT_TAG = "mlflow.parentRunId"
"""MLflow's own tag of a child run with the id of its parent."""

COMMIT_TAG = "mlflow.source.git.commit"
"""MLflow's own tag with the git commit."""

CODE_TAG = "trieline.code"
"""Tag with the versions of the code that made the run, oldest first
(`code_version`)."""

SUBMISSION_TAG = "ray.submission_id"
"""Tag with the ids of the Ray jobs that made the run, oldest first."""

WEIGHTS_TAG = "checkpoint.weights"
"""Tag with the SHA-256 of the evaluated weights, by which a student's teacher is
found."""

SIMULATED_TAG = "simulated"
"""Tag of runs on a simulated log, which do not compare with figures of papers."""

KIND_TAG = "trieline.kind"
"""Tag with the kind of a run: `sweep`, `trial`, `evaluation` or `compare`; trainings
have none."""

EVALUATION = "evaluation"
"""Value of `KIND_TAG` of an evaluation, a child run of its training."""

TRIAL_TAG, POINT_TAG = "sweep.trial", "sweep.point"
"""Tags of a trial: its stable id, and its values of the sweep's axes."""

BEST_TAG = "sweep.best"
"""Tag of a sweep with the run id of its best trial."""

INCOMPLETE_TAG = "sweep.incomplete"
"""Tag of a sweep with the number of trials without a result, as text; empty for
none."""

SMOKE_TAG = "sweep.smoke"
"""Tag of a sweep of a grid's small variant."""

FOLDER_TAG = "trieline.folder"
"""Tag with the folder of a training or a sweep; its lock is beside the folder."""

KEY_TAG = "trieline.key"
"""Tag with the key that was written down before the run was opened."""

CUTOFF = re.compile(r"@([0-9]+)\Z")
"""End of a metric's name: the rank at which it is measured."""

LOGGED_CUTOFF = re.compile(r"_at_(_*)([0-9]+)\Z")
"""The same in MLflow; more underscores belong to a name without a cutoff."""


def metric_name(name: str) -> str:
    """Return a metric's name in MLflow: `val/ndcg@10` is `val/ndcg_at_10`.

    A name that ends so by itself gets one more underscore, so that `shown_name` is the
    inverse for all names.
    """
    if CUTOFF.search(name):
        return CUTOFF.sub(r"_at_\1", name)
    return LOGGED_CUTOFF.sub(r"_at__\1\2", name)


def shown_name(name: str) -> str:
    """Return the name that `metric_name` was given."""
    match = LOGGED_CUTOFF.search(name)
    if match is None:
        return name
    underscores, cutoff = match.groups()
    end = f"_at_{underscores[1:]}{cutoff}" if underscores else f"@{cutoff}"
    return name[: match.start()] + end


def settings_of(point: dict[str, Any]) -> str:
    """Return a trial's values without its seed and fold, as text; equal texts are one setting."""
    repeats = ("fit.seed", "fit.fold")
    settings = {key: value for key, value in point.items() if key not in repeats}
    return json.dumps(settings, sort_keys=True)


def unknown(what: str, name: str, uri: str, known: Iterable[str]) -> str:
    """Return the message for a name that is not in the store.

    Args:
        what: `experiment`, `sweep` or `run`.
        name: the name.
        uri: the store.
        known: names in the store.
    """
    names = sorted(set(known) - {"Default"})
    if what != "experiment":
        return f"there is no {what} '{name}' at {uri}; {did_you_mean(name, names)}"
    there = f"there are {', '.join(names)}" if names else "no experiment is there"
    near = f"; {did_you_mean(name, names)}" if len(names) > 1 else ""
    return f"the experiment '{name}' is not at {uri}; {there}{near}"
