"""Names in MLflow: tags of runs, and metrics, whose names cannot contain `@`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from core.errors import did_you_mean

PARENT_TAG = "mlflow.parentRunId"
"""MLflow's tag with the id of a child run's parent."""

COMMIT_TAG = "mlflow.source.git.commit"
"""MLflow's tag with the git commit."""

CODE_TAG = "trieline.code"
"""Tag with the versions of the code that made the run, oldest first
(`code_version`)."""

SUBMISSION_TAG = "ray.submission_id"
"""Tag with the ids of the Ray jobs that made the run, oldest first."""

WEIGHTS_TAG = "checkpoint.weights"
"""Tag with the SHA-256 of the evaluated weights, which identifies a student's
teacher."""

SIMULATED_TAG = "simulated"
"""Tag of runs on a simulated log, which are not compared with figures of papers."""

KIND_TAG = "trieline.kind"
"""Tag with the kind of a run: `sweep`, `trial`, `evaluation` or `compare`. Trainings do
not have the tag."""

EVALUATION = "evaluation"
"""Value of `KIND_TAG` for an evaluation, a child run of its training."""

RANKS_BY_TAG = "model.ranks_by"
"""Tag with the column by which a baseline ranks, and the direction."""

POINT_TAG = "sweep.point"
"""Tag of a trial with its values of the sweep's axes, as JSON."""

BEST_TAG = "sweep.best"
"""Tag of a sweep with the run id of its best trial."""

COMPLETE_TAG = "sweep.complete"
"""Tag of a sweep: `true` if each of its trials has a result, else how many have
none."""

SMOKE_TAG = "sweep.smoke"
"""Tag of a sweep that is a smoke test."""

FOLDER_TAG = "trieline.folder"
"""Tag with the folder of a training or a sweep; the lock file is beside the folder."""

FORMAT_TAG = "trieline.format"
"""Tag of a training with the version of its `run.json`."""

CUTOFF = re.compile(r"@([0-9]+)\Z")
"""End of a metric's name: the rank at which it is measured."""

MLFLOW_CUTOFF = re.compile(r"_at_(_*)([0-9]+)\Z")
"""End of a metric's name in MLflow. Further underscores mark a name that has no cutoff
but ends like one with a cutoff."""


def to_mlflow_name(name: str) -> str:
    """Return the name of a metric in MLflow: `val/ndcg@10` becomes `val/ndcg_at_10`.

    A name that already ends in `_at_10` gets a further underscore, so that
    `from_mlflow_name` is the inverse for all names.
    """
    if CUTOFF.search(name):
        return CUTOFF.sub(r"_at_\1", name)
    return MLFLOW_CUTOFF.sub(r"_at__\1\2", name)


def from_mlflow_name(name: str) -> str:
    """Return the name of a metric by its name in MLflow."""
    match = MLFLOW_CUTOFF.search(name)
    if match is None:
        return name
    underscores, cutoff = match.groups()
    end = f"_at_{underscores[1:]}{cutoff}" if underscores else f"@{cutoff}"
    return name[: match.start()] + end


def settings_key(point: dict[str, Any]) -> str:
    """Return a text that is equal for trials that differ only in their seed.

    Args:
        point: Values of the sweep's axes.
    """
    settings = {key: value for key, value in point.items() if key != "fit.seed"}
    return json.dumps(settings, sort_keys=True)


def describe_unknown(kind: str, name: str, uri: str, available: Iterable[str]) -> str:
    """Return the error message for a name that is not in the store.

    Args:
        kind: `experiment`, `sweep` or `run`.
        name: Unknown name.
        uri: Tracking URI of the store.
        available: Names in the store.
    """
    names = sorted(set(available) - {"Default"})
    return f"there is no {kind} '{name}' at {uri}; {did_you_mean(name, names)}"
