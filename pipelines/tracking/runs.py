"""Runs in MLflow: opened with params and tags, taken up again, ended.

run = open_run(uri, "retrieval/x", "sasrec", storage, config=config, hashes=hashes)
"""

from __future__ import annotations

import json
import os
import platform
import sys
import uuid
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Param
from mlflow.exceptions import MlflowException

from models.config import flatten
from models.storage.locks import hold_lock
from models.storage.tables import UserError, code_version, run_git, submission_id
from pipelines.tracking.names import (
    CODE_TAG,
    COMMIT_TAG,
    FOLDER_TAG,
    KEY_TAG,
    PARENT_TAG,
    SUBMISSION_TAG,
    TRIAL_TAG,
)
from pipelines.tracking.store import connect

BATCH, PARAMS = 1000, 100
"""Metrics and params per request, at most."""

MAX_PARAM_LENGTH = 6000
"""Characters of a param, at most."""

MAX_COMMAND_LENGTH = 5000
"""Characters of the tag with the command line, at most."""

TRAINING_VIEW = {"mlflow.experimentKind": "custom_model_development"}
"""Tag of experiments that makes MLflow's page open them in the view for trainings."""


@dataclass(frozen=True)
class RunRef:
    """The address of a run."""

    uri: str
    """Tracking URI."""
    experiment: str
    """Name of the experiment."""
    run_id: str
    """Id of the run."""

    def to_dict(self) -> dict[str, str]:
        """Return the address as a mapping."""
        return asdict(self)


def open_run(
    uri: str,
    experiment: str,
    name: str,
    storage: str,
    *,
    config: dict[str, Any],
    hashes: dict[str, str],
    parent: str | None = None,
    tags: dict[str, str] | None = None,
) -> RunRef:
    """Open a run with its params and tags, and its config as an artifact.

    A trial whose run was opened before, by a process that was killed before it could
    note the run, takes that run up again.

    Args:
        uri: tracking URI.
        experiment: name of the experiment, which is made if needed.
        name: name of the run.
        storage: folder of the runs, where a SQLite store keeps artifacts too.
        config: nested config; every value is a param.
        hashes: hashes of the tables.
        parent: id of the run of the sweep that the run is a trial of.
        tags: tags beside those of the run's origin.

    Raises:
        UserError: if the store cannot be reached, or takes no artifacts.
    """
    client = connect(uri)
    labels = {**origin_tags(hashes), **(tags or {})}
    if parent:
        labels[PARENT_TAG] = parent
    experiment_id = find_or_make_experiment(client, uri, experiment, storage)
    run = find_trial_run(client, experiment_id, labels)
    if run is None:
        run = client.create_run(experiment_id, run_name=name, tags=labels)
    log_params(client, run.info.run_id, config)
    try:
        client.log_dict(run.info.run_id, config, "config.yaml")
    except (MlflowException, OSError, ImportError) as error:
        client.delete_run(run.info.run_id)
        first = " ".join(str(error).split())[:200]
        raise UserError(
            f"cannot write to {run.info.artifact_uri} ({first}), where the experiment "
            f"'{experiment}' keeps its artifacts; make that work, or give another "
            f"--experiment or a tracking server as --tracking_uri"
        ) from error
    return RunRef(uri, experiment, run.info.run_id)


def open_child(
    parent: RunRef,
    name: str,
    *,
    params: dict[str, Any],
    hashes: dict[str, str],
    tags: dict[str, str],
) -> RunRef:
    """Open a child run in the experiment of its parent.

    Args:
        parent: the parent.
        name: name of the child.
        params: its params.
        hashes: hashes of the tables that it reads.
        tags: tags beside those of the run's origin.

    Raises:
        UserError: if the parent is deleted.
    """
    client = connect(parent.uri)
    found = client.get_run(parent.run_id)
    if found.info.lifecycle_stage == "deleted":
        raise UserError("the run is deleted")
    labels = {**origin_tags(hashes), **tags, PARENT_TAG: parent.run_id}
    child = client.create_run(found.info.experiment_id, run_name=name, tags=labels)
    log_params(client, child.info.run_id, params)
    return RunRef(parent.uri, parent.experiment, child.info.run_id)


def origin_tags(hashes: dict[str, str]) -> dict[str, str]:
    """Return the tags that say where a run comes from: command, code, job and tables."""
    tags = {
        "mlflow.source.name": Path(sys.argv[0]).name,
        "mlflow.source.type": "JOB",
        "command": command_line(),
        CODE_TAG: code_version(),
        **{f"table.{table}": value for table, value in hashes.items()},
    }
    if commit := run_git("rev-parse", "HEAD"):
        tags[COMMIT_TAG] = commit
    if submission := submission_id():
        tags[SUBMISSION_TAG] = submission
    return tags


def command_line() -> str:
    """Return the command line of this process."""
    job = f"python -m jobs.{Path(sys.argv[0]).stem}"
    return " ".join([job, *sys.argv[1:]])[:MAX_COMMAND_LENGTH]


def log_params(client: MlflowClient, run_id: str, config: dict[str, Any]) -> None:
    """Log every value of a nested config as a param of a run."""
    params = [
        Param(key, value[:MAX_PARAM_LENGTH]) for key, value in flatten(config).items()
    ]
    for start in range(0, len(params), PARAMS):
        client.log_batch(run_id, params=params[start : start + PARAMS])


def find_or_make_experiment(
    client: MlflowClient, uri: str, name: str, storage: str
) -> str:
    """Return the id of an experiment, which is made if needed.

    Raises:
        UserError: if the experiment is deleted.
    """
    found = client.get_experiment_by_name(name)
    if found is None:
        location = artifacts_in(storage) if uri.startswith("sqlite") else None
        try:
            return str(
                client.create_experiment(
                    name, artifact_location=location, tags=TRAINING_VIEW
                )
            )
        except MlflowException:  # made by another run meanwhile
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    if found.lifecycle_stage == "deleted":
        raise UserError(
            f"the experiment '{name}' is deleted in MLflow; restore it or choose another "
            f"--experiment"
        )
    return str(found.experiment_id)


def artifacts_in(storage: str) -> str:
    """Return the URI of the artifacts of a store that is a file, in the storage folder."""
    if "://" in storage:
        return f"{storage.rstrip('/')}/mlartifacts"
    folder = Path(storage).expanduser().absolute() / "mlartifacts"
    return folder.as_uri()  # MLflow decodes a path with % as it does a URI


def find_trial_run(
    client: MlflowClient, experiment_id: str, tags: dict[str, str]
) -> Any:
    """Return the run of the same trial of the same sweep, or None."""
    if PARENT_TAG not in tags or TRIAL_TAG not in tags:
        return None
    found = client.search_runs(
        [experiment_id], f"tags.`{TRIAL_TAG}` = '{tags[TRIAL_TAG]}'"
    )
    same = [run for run in found if run.data.tags.get(PARENT_TAG) == tags[PARENT_TAG]]
    return same[0] if same else None


def opening(uri: str, experiment: str) -> dict[str, str]:
    """Return the record written before a run is opened, with the value of its
    `KEY_TAG`.

    Raises:
        UserError: if the store cannot be reached.
    """
    connect(uri)
    return {"uri": uri, "experiment": experiment, "key": uuid.uuid4().hex}


def discard(opening: dict[str, str]) -> None:
    """Delete the runs of an opening that was cut short."""
    client = connect(opening["uri"])
    experiment = client.get_experiment_by_name(opening["experiment"])
    if experiment is None:
        return
    for run in client.search_runs(
        [experiment.experiment_id], f"tags.`{KEY_TAG}` = '{opening['key']}'"
    ):
        client.delete_run(run.info.run_id)


def reopen(run: RunRef) -> None:
    """Mark a run as running again.

    Raises:
        UserError: if the run is gone.
    """
    client = connect(run.uri)
    try:
        client.update_run(run.run_id, status="RUNNING")
    except MlflowException as error:
        raise UserError(
            f"the MLflow run {run.run_id} of this training is not at {run.uri}; give the "
            f"--tracking_uri that it was started with, or start anew with --overwrite"
        ) from error


def delete(run: RunRef) -> None:
    """Delete a run, so that no comparison counts it.

    Raises:
        UserError: if it cannot be deleted.
    """
    try:
        connect(run.uri).delete_run(run.run_id)
    except (MlflowException, UserError) as error:
        first = " ".join(str(error).split())[:200]
        raise UserError(
            f"the MLflow run {run.run_id} of what was there before cannot be deleted at "
            f"{run.uri} ({first}); delete it there with mlflow runs delete, or comparisons "
            f"count it too"
        ) from error


def lock_of(folder: str) -> str:
    """Return the lock of the training or sweep in a folder."""
    storage, _, name = folder.rpartition("/")
    return f"{storage}/.{name}.lock"


def end_trials(run: RunRef, failed: Collection[str | None]) -> None:
    """End a sweep's running trials: as FAILED if their ids are in `failed`, else KILLED."""
    client = connect(run.uri)
    is_running = (
        f"tags.`{PARENT_TAG}` = '{run.run_id}' and attributes.status = 'RUNNING'"
    )
    experiment_id = client.get_run(run.run_id).info.experiment_id
    for trial in client.search_runs([experiment_id], is_running):
        status = "FAILED" if trial.info.run_id in failed else "KILLED"
        client.set_terminated(trial.info.run_id, status)


def end_stopped(run: RunRef) -> None:
    """End the run of a stopped job as KILLED, with a single request.

    A stopped job is ended after 25 s, and a slow server may need 10 s per request.
    """
    connect(run.uri).set_terminated(run.run_id, "KILLED")


def end_dead(client: MlflowClient, runs: Iterable[Any]) -> None:
    """End runs as KILLED that are marked as running while no process holds their folder.

    The lock of a folder at a URI has to be watched for some seconds, all of them at
    once. A local folder counts if it is on this machine, or its lock would say nothing.
    """
    folders = {
        run.info.run_id: run.data.tags.get(FOLDER_TAG, "")
        for run in runs
        if run.info.status == "RUNNING"
    }

    def end(run_id: str) -> None:
        folder = folders[run_id]
        if not folder or ("://" not in folder and not Path(folder).is_dir()):
            return
        with suppress(UserError), hold_lock(lock_of(folder), "it is alive"):
            client.set_terminated(run_id, "KILLED")

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(end, folders))


def hardware(gpu: str = "") -> str:
    """Return this machine's processor and cores as text, after `gpu`."""
    name = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("model name"))
        name = line.split(":", 1)[1].strip()
    cpu = f"{name}, {os.cpu_count()} cores"
    return f"{gpu}; {cpu}" if gpu else cpu


def log_text(run: RunRef, text: str, name: str) -> None:
    """Log a text as an artifact."""
    connect(run.uri).log_text(run.run_id, text, name)


def log_json(run: RunRef, content: Any, name: str) -> None:
    """Log JSON-like content as an artifact."""
    log_text(run, json.dumps(content, indent=2, sort_keys=True), name)


def log_yaml(run: RunRef, content: dict[str, Any], name: str) -> None:
    """Log a mapping as an artifact; `name` ends in .yaml."""
    connect(run.uri).log_dict(run.run_id, content, name)
