"""Open, reopen, end and delete runs in MLflow, and log their metrics once.

run = open_run(uri, "retrieval/x", "sasrec", storage, config=config, hashes=hashes)
Logger(run).log({"train/loss": 2.1}, step=100)
"""

from __future__ import annotations

import math
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from core.errors import UserError, one_line
from core.files import hold_lock
from core.options import flatten
from core.schemas import RunRecord, RunRef
from pipelines.tracking.store import (
    CODE_TAG,
    COMMIT_TAG,
    FOLDER_TAG,
    FORMAT_TAG,
    PARENT_TAG,
    SUBMISSION_TAG,
    connect,
    few_retries,
    lock_path,
    to_mlflow_name,
)
from pipelines.version import code_version, run_git, submission_id

MAX_METRICS = 1000
"""Largest number of metrics that MLflow accepts in one request."""

MAX_PARAMS = 100
"""Largest number of params that MLflow accepts in one request."""

MAX_PARAM_LENGTH = 6000
"""Largest number of characters of a param."""

MAX_COMMAND_LENGTH = 5000
"""Largest number of characters of the tag with the command line."""

SEND_EVERY_S, PAUSE_S = 5.0, 30.0
"""Seconds between two requests to MLflow, and after a request that failed."""

STOP_PATIENCE_S = 3.0
"""Seconds that the end of a training waits for system metrics."""

Point = tuple[str, float, int, int]
"""Metric by MLflow's name, value, time in milliseconds, and step."""

TRAINING_VIEW = {"mlflow.experimentKind": "custom_model_development"}
"""Tag of an experiment for which MLflow's page shows the view for trainings."""


def open_run(
    uri: str,
    experiment: str,
    name: str,
    storage: str,
    *,
    config: dict[str, Any],
    hashes: dict[str, str],
    tags: dict[str, str] | None = None,
) -> RunRef:
    """Open a run with its params and tags, and its config as an artifact.

    The caller holds the lock of the folder in the tag `FOLDER_TAG`. So a running run
    with this tag is of a process that was killed before it wrote `run.json`, and is
    deleted.

    Args:
        uri: Tracking URI.
        experiment: Name of the experiment, which is created if needed.
        name: Name of the run.
        storage: Folder of the runs; artifacts of a SQLite store are below it.
        config: Nested config; each value becomes a param.
        hashes: Hashes of the tables, by table name.
        tags: Additional tags, besides the tags with the run's origin.
    """
    client = connect(uri)
    all_tags = {**origin_tags(hashes), **(tags or {})}
    all_tags[FORMAT_TAG] = str(RunRecord.version)
    experiment_id = get_or_create_experiment(client, uri, experiment, storage)
    if folder := all_tags.get(FOLDER_TAG):
        quote = '"' if "'" in folder else "'"
        query = f"tags.`{FOLDER_TAG}` = {quote}{folder}{quote}"
        query += " and attributes.status = 'RUNNING'"
        for orphan in client.search_runs([experiment_id], query):
            client.delete_run(orphan.info.run_id)
    run = client.create_run(experiment_id, run_name=name, tags=all_tags)
    log_params(client, run.info.run_id, config)
    try:
        client.log_dict(run.info.run_id, config, "config.yaml")
    except (MlflowException, OSError, ImportError) as error:
        client.delete_run(run.info.run_id)
        raise UserError(
            f"cannot write to {run.info.artifact_uri} ({one_line(error)}), the "
            f"artifact store of the experiment '{experiment}'"
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

    Children of this name that are still running were interrupted, and are deleted.

    Args:
        parent: MLflow run of the training.
        name: Name of the child.
        params: Params of the child.
        hashes: Hashes of the tables that the child reads, by table name.
        tags: Additional tags, besides the tags with the run's origin.
    """
    client = connect(parent.uri)
    parent_info = client.get_run(parent.run_id).info
    if parent_info.lifecycle_stage == "deleted":
        raise UserError("the run of the training is deleted")
    filter_text = f"tags.`{PARENT_TAG}` = '{parent.run_id}'"
    for run in client.search_runs([parent_info.experiment_id], filter_text):
        if run.info.run_name == name and run.info.status == "RUNNING":
            client.delete_run(run.info.run_id)
    all_tags = {**origin_tags(hashes), **tags, PARENT_TAG: parent.run_id}
    child = client.create_run(parent_info.experiment_id, run_name=name, tags=all_tags)
    log_params(client, child.info.run_id, params)
    return RunRef(parent.uri, parent.experiment, child.info.run_id)


def origin_tags(hashes: dict[str, str]) -> dict[str, str]:
    """Return the tags with a run's origin: command, code, Ray job and tables."""
    tags = {
        "mlflow.source.name": Path(sys.argv[0]).name,
        "mlflow.source.type": "JOB",
        "command": command_line(),
        CODE_TAG: code_version(),
        **{f"table.{table}": value for table, value in hashes.items()},
    }
    commit = run_git("rev-parse", "HEAD")
    if commit:
        tags[COMMIT_TAG] = commit
    submission = submission_id()
    if submission:
        tags[SUBMISSION_TAG] = submission
    return tags


def command_line() -> str:
    """Return the command line of this job, at most `MAX_COMMAND_LENGTH` characters."""
    spec = sys.modules["__main__"].__spec__
    module = spec.name if spec else f"jobs.{Path(sys.argv[0]).stem}"
    return " ".join([f"python -m {module}", *sys.argv[1:]])[:MAX_COMMAND_LENGTH]


def log_params(client: MlflowClient, run_id: str, config: dict[str, Any]) -> None:
    """Log every value of a nested config as a param of a run."""
    params = [
        Param(key, value[:MAX_PARAM_LENGTH]) for key, value in flatten(config).items()
    ]
    for start in range(0, len(params), MAX_PARAMS):
        client.log_batch(run_id, params=params[start : start + MAX_PARAMS])


def get_or_create_experiment(
    client: MlflowClient, uri: str, name: str, storage: str
) -> str:
    """Return the id of an experiment, and create the experiment if needed.

    Args:
        client: MLflow client of the store.
        uri: Tracking URI.
        name: Name of the experiment.
        storage: Folder of the runs; artifacts of a SQLite store are below it.
    """
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        location = artifact_location(storage) if uri.startswith("sqlite") else None
        try:
            experiment_id = client.create_experiment(
                name, artifact_location=location, tags=TRAINING_VIEW
            )
            return str(experiment_id)
        except MlflowException:  # another process has created it meanwhile
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                raise
    if experiment.lifecycle_stage == "deleted":
        raise UserError(f"the experiment '{name}' is deleted at {uri}")
    return str(experiment.experiment_id)


def artifact_location(storage: str) -> str:
    """Return the URI for the artifacts of a SQLite store, below the storage folder."""
    if "://" in storage:
        return f"{storage.rstrip('/')}/mlartifacts"
    folder = Path(storage).expanduser().absolute() / "mlartifacts"
    if re.search("%[0-9A-Fa-f]{2}", str(folder)):
        raise UserError(
            f"MLflow cannot keep artifacts in {folder}, as it decodes the %"
        )
    return folder.as_uri()  # MLflow decodes a % in paths too, as in URIs


def reopen(run: RunRef) -> None:
    """Mark a run as running again."""
    client = connect(run.uri)
    try:
        client.update_run(run.run_id, status="RUNNING")
    except MlflowException as error:
        raise UserError(
            f"the MLflow run {run.run_id} of this training is not at {run.uri}"
        ) from error


def delete(run: RunRef) -> None:
    """Delete a run, so that comparisons no longer include it."""
    try:
        connect(run.uri).delete_run(run.run_id)
    except MlflowException as error:
        raise UserError(
            f"the MLflow run {run.run_id} of the overwritten training cannot be "
            f"deleted at {run.uri} ({one_line(error)})"
        ) from error


def end_run(run: RunRef, status: str) -> None:
    """End a run as FAILED or KILLED, unless it has ended."""
    client = connect(run.uri)
    if client.get_run(run.run_id).info.status == "RUNNING":
        client.set_terminated(run.run_id, status)


def end_dead_runs(client: MlflowClient, runs: Iterable[Any]) -> None:
    """End running runs as KILLED if no process holds the locks of their folders.

    A run in a local folder of another machine is left alone, as its lock cannot be
    read. Locks at URIs are watched for some seconds each, so all locks are checked in
    parallel.

    Args:
        client: MLflow client of the store.
        runs: MLflow runs; runs that do not have the status RUNNING are ignored.
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
        # a live run holds its lock
        with suppress(UserError), hold_lock(lock_path(folder), "it is alive"):
            client.set_terminated(run_id, "KILLED")

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(end, folders))


def describe_hardware(gpu: str = "") -> str:
    """Return the GPU and this machine's processor as text.

    Args:
        gpu: Text about the GPUs, which comes first; empty for none.
    """
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    cpu = f"{name}, {os.cpu_count()} cores"
    return f"{gpu}; {cpu}" if gpu else cpu


def log_text(run: RunRef, text: str, name: str) -> None:
    """Log text as an artifact."""
    connect(run.uri).log_text(run.run_id, text, name)


class Logger:
    """Logger of metrics and tags of a run.

    The points that MLflow has not taken are in `unsent`, for the next checkpoint. So a
    training that continues from the checkpoint sends them, and a step that is repeated
    after a kill is not logged twice.
    """

    def __init__(
        self,
        run: RunRef,
        unsent: Iterable[Point] = (),
        say: Callable[[str], object] = print,
    ) -> None:
        """Read the last points of a run.

        Args:
            run: Run to log to.
            unsent: Points of a checkpoint that MLflow may not have.
            say: Called with a line when MLflow does not take points.
        """
        self.run, self.say = run, say
        self.client = connect(run.uri)
        logged = self.client.get_run(run.run_id).data
        self.tags = logged.tags
        # step and value of each metric's last point
        self._last = {
            point.key: (point.step, point.value) for point in logged.to_proto().metrics
        }
        self._send_at = 0.0
        self.unsent = [
            point for point in unsent if point[3] > self._last.get(point[0], (-1,))[0]
        ]
        self._last |= {key: (step, value) for key, value, _, step in self.unsent}

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Log metrics at a step, in a request every few seconds.

        A metric that was logged at this step or a later one is not logged again. NaN
        and infinity are not logged.
        """
        now = int(time.time() * 1000)
        for name, value in metrics.items():
            key = to_mlflow_name(name)
            if math.isfinite(value) and step > self._last.get(key, (-1,))[0]:
                self.unsent.append((key, float(value), now, step))
                self._last[key] = (step, float(value))
        if time.monotonic() >= self._send_at:
            try:
                with few_retries():
                    self._send()
                self._send_at = time.monotonic() + SEND_EVERY_S
            except MlflowException as error:
                self._send_at = time.monotonic() + PAUSE_S
                self.say(
                    f"note: MLflow takes no metrics ({one_line(error)}); "
                    f"{len(self.unsent)} points wait"
                )

    def update(self, metrics: dict[str, float], step: int) -> None:
        """Log metrics that describe the whole run.

        A metric that was logged before is logged at a later step if its value has
        changed.
        """
        for name, value in metrics.items():
            last_step, last_value = self._last.get(to_mlflow_name(name), (-1, math.nan))
            if last_value != float(value):
                self.log({name: value}, max(step, last_step + 1))
        self.flush()

    def flush(self) -> None:
        """Send all points, with the retries of MLflow."""
        try:
            self._send()
        except MlflowException as error:
            raise UserError(
                f"MLflow at {self.run.uri} takes no metrics ({one_line(error)})",
                "resume",
            ) from error

    def tag(self, **tags: str) -> None:
        """Set tags of the run."""
        pairs = [RunTag(name, value) for name, value in tags.items()]
        self.client.log_batch(self.run.run_id, tags=pairs)

    def end(self) -> None:
        """Send all points, and end the run as FINISHED."""
        self.flush()
        self.client.set_terminated(self.run.run_id)

    def _send(self) -> None:
        """Send the points to MLflow, and keep the points that it does not take."""
        while batch := self.unsent[:MAX_METRICS]:
            self.client.log_batch(self.run.run_id, [Metric(*point) for point in batch])
            del self.unsent[: len(batch)]


@contextmanager
def log_system_metrics(run: RunRef) -> Iterator[None]:
    """Log the use of this machine's CPU, memory, disk, network and GPU in the block."""
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    monitor = SystemMetricsMonitor(
        run.run_id,
        sampling_interval=10,
        resume_logging=True,
        tracking_uri=run.uri,
        samples_before_logging=1,
    )
    monitor.start()
    try:
        yield
    finally:
        ending = threading.Thread(target=monitor.finish, daemon=True)
        ending.start()
        ending.join(STOP_PATIENCE_S)
