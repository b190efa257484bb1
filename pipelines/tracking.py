"""MLflow: one run per training, in the experiment `family/dataset`, at a URI that is always explicit.

The driver opens the run and hands its id and URI to rank 0 of the training, which alone logs to it; a
training that is continued continues its run. Whenever it was killed, a name has one run and a run has each point once:
what opens a run writes down a key before, by which a run of an opening that was cut short is found, and what logs
reads first what is there. MLflow takes no `@` in a metric's name, so `ndcg@10` is logged as `ndcg_at_10`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import re
import shlex
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault(
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true"
)  # jobs say where their runs are

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.utils.credentials import get_default_host_creds
from mlflow.utils.rest_utils import http_request, verify_rest_response
from sqlalchemy.exc import SQLAlchemyError

from models.config import flattened, hint
from models.storage.locks import hold_lock
from models.storage.tables import UserError, code_version, git, join, submission_id
from models.storage.uri import read_json, refuse_secrets

for chatty in ("mlflow", "alembic"):
    logging.getLogger(chatty).setLevel(logging.WARNING)
logging.getLogger("mlflow.store.db.utils").setLevel(
    logging.CRITICAL
)  # a traceback of what is raised anyway

BATCH, PARAMS = 1000, 100
"""Metrics and params per request; MLflow takes no more."""

COMMIT_TAG = "mlflow.source.git.commit"
"""MLflow's own tag with the git commit."""

CODE_TAG = "trieline.code"
"""Tag with the versions of the code that made the run, one after the other (`code_version`)."""

SUBMISSION_TAG = "ray.submission_id"
"""Tag with the ids of the Ray jobs that made the run, one after the other."""

WEIGHTS_TAG = "checkpoint.weights"
"""Tag with the SHA-256 of the weights that were evaluated, by which a student's teacher is found."""

SIMULATED_TAG = "simulated"
"""Tag of runs on a simulated log, which stand beside no paper's figures."""

VIEW = {"mlflow.experimentKind": "custom_model_development"}
"""Tag of experiments by which MLflow's page opens them in the view for trainings."""

KIND_TAG, TRIAL_TAG, POINT_TAG = "trieline.kind", "sweep.trial", "sweep.point"
"""Tags of sweeps: whether a run is a `sweep` or its `trial`; of a trial its stable id and its values."""

BEST_TAG, INCOMPLETE_TAG = "sweep.best", "sweep.incomplete"
"""Tags of a sweep: the run of its best trial, and how many trials have no result, so that the best is of an incomplete
grid; empty where all have one."""

SMOKE_TAG = "sweep.smoke"
"""Tag of a sweep of a grid's small variant, which shows that it runs and nothing more."""


FOLDER_TAG = "trieline.folder"
"""Tag with the folder of a training or a sweep, beside which is its lock."""

CUTOFF = re.compile(r"@([0-9]+)\Z")
"""End of a metric's name: the rank at which it is measured."""

LOGGED_CUTOFF = re.compile(r"_at_(_*)([0-9]+)\Z")
"""The same in MLflow; more underscores are of a name that has no cutoff."""

KEY_TAG = "trieline.key"
"""Tag with what its opener wrote down before the run was made."""


@dataclass(frozen=True)
class RunRef:
    """Where a run is."""

    uri: str
    """Tracking URI."""
    experiment: str
    """Name of the experiment."""
    run_id: str
    """Id of the run."""

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def resolve_uri(option: str | None, storage: str) -> str:
    """The tracking URI: the option, else MLFLOW_TRACKING_URI, else SQLite in the storage folder, absolute."""
    uri = option or os.environ.get("MLFLOW_TRACKING_URI", "")
    refuse_secrets(uri, "the tracking URI")
    if not uri:
        if "://" in storage:
            raise UserError(
                f"there is no tracking URI, and SQLite cannot live in {storage}; give --tracking_uri or set "
                f"MLFLOW_TRACKING_URI to a tracking server"
            )
        return sqlite_uri(Path(storage).expanduser() / "mlflow.db")
    if uri.startswith("file:") or "://" not in uri:
        raise UserError(
            f"the tracking URI {uri} is a folder, which MLflow no longer writes; use sqlite:///ABSOLUTE/PATH/mlflow.db "
            f"or a tracking server"
        )
    if uri.startswith("sqlite:///") and not uri.startswith("sqlite:////"):
        raise UserError(
            f"the tracking URI {uri} is relative, so workers elsewhere would write other files; use "
            f"{sqlite_uri(Path(sqlite_file(uri)))}"
        )
    return uri


SQLITE = "sqlite:///"
"""What the URI of a SQLite store begins with; the path of its file follows."""


def sqlite_uri(file: Path) -> str:
    """Return the URI of a SQLite store.

    SQLAlchemy decodes `%20` in it and takes `?` for the beginning of options, so only `%` and `?` are encoded: MLflow
    makes a folder, which stays empty, of the encoded name.
    """
    return SQLITE + str(file.absolute()).replace("%", "%25").replace("?", "%3F")


def sqlite_file(uri: str) -> str:
    """Return the path of the file of a SQLite store, or an empty text for another store."""
    if not uri.startswith(SQLITE):
        return ""
    return unquote(uri.removeprefix(SQLITE).partition("?")[0])


def named_store(option: str | None) -> str:
    """The tracking URI of the option, the environment, or this folder; UserError where there is none, or no store."""
    uri = option or os.environ.get("MLFLOW_TRACKING_URI", "")
    if not uri and not Path("runs/mlflow.db").is_file():
        raise UserError(
            "no MLflow store is named; give --tracking_uri, as jobs.train prints it"
        )
    uri = resolve_uri(uri or sqlite_uri(Path("runs/mlflow.db")), ".")
    file = sqlite_file(uri)
    if file and not Path(file).is_file():  # MLflow would make it
        raise UserError(
            f"there is no MLflow store at {uri}; give the --tracking_uri that jobs.train prints"
        )
    return uri


def unknown(what: str, name: str, uri: str, known: Iterable[str]) -> str:
    """What is said of a name that is not in the store, where `known` are."""
    known = sorted(set(known) - {"Default"})
    if what == "experiment":
        there = f"there are {', '.join(known)}" if known else "no experiment is there"
        return f"the experiment '{name}' is not at {uri}; {there}" + (
            f"; {hint(name, known)}" if known[1:] else ""
        )
    return f"there is no {what} '{name}' at {uri}; {hint(name, known)}"


def settings_of(point: dict[str, Any]) -> str:
    """A trial's values but for its seed: trials with the same are one setting."""
    return json.dumps(
        {key: value for key, value in point.items() if key != "fit.seed"},
        sort_keys=True,
    )


def viewer(uri: str, mlflow: str = "mlflow") -> str:
    """What shows a store: its own address, or a command of the program `mlflow` where it is no server."""
    return (
        uri
        if uri.startswith(("http://", "https://"))
        else f"{mlflow} ui --backend-store-uri {shlex.quote(uri)}"
    )


def metric_name(name: str) -> str:
    """Return a metric's name as MLflow takes it, which has no `@`: `val/ndcg@10` as `val/ndcg_at_10`.

    A name that ends so by itself gets one more underscore, so that `shown_name` is the inverse for all names.
    """
    if CUTOFF.search(name):
        return CUTOFF.sub(r"_at_\1", name)
    return LOGGED_CUTOFF.sub(r"_at__\1\2", name)


def shown_name(name: str) -> str:
    """Return the name that `metric_name` was given."""
    found = LOGGED_CUTOFF.search(name)
    if found is None:
        return name
    more, cutoff = found.groups()
    return name[: found.start()] + (f"_at_{more[1:]}{cutoff}" if more else f"@{cutoff}")


def check_nodes(uri: str, nodes: int) -> None:
    """Refuses a SQLite file for a cluster of several nodes: each would write its own, or corrupt a shared one."""
    if uri.startswith("sqlite") and nodes > 1:
        raise UserError(
            f"the tracking URI {uri} is a file, and the cluster has {nodes} nodes; start a tracking server "
            f"(mlflow server) and give its address with --tracking_uri or MLFLOW_TRACKING_URI"
        )


def connect(uri: str) -> MlflowClient:
    """A client of a tracking store that is there; a SQLite one is created if need be. UserError if it is not, and where
    a server goes on answering with errors for as long as MLflow is patient.

    User and password of a server are MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD.
    """
    file = sqlite_file(uri)
    if not file and uri in _reached:
        return MlflowClient(uri)
    try:
        # Of several that start together one makes the tables of a file: MLflow's own lock leaves some out.
        with hold_lock(f"{file}.lock", "", math.inf) if file else nullcontext():
            if file and not Path(file).exists():
                make_store(file)
            client = MlflowClient(uri)
            try:
                if uri.startswith(("http://", "https://")):
                    _contact(uri)
                else:
                    client.search_experiments(max_results=1)
            except MlflowException as error:
                if FAILING not in str(error):
                    raise
                client.search_experiments(max_results=1)  # it is there
        expect(uri)
        return client
    except (MlflowException, OSError, SQLAlchemyError) as error:
        first = " ".join(str(error).split())[:200]
        what = (
            "MLflow answers with errors"
            if FAILING in str(error)
            else "cannot reach MLflow"
        )
        raise UserError(
            f"{what} at {uri} ({first}); start it or give another --tracking_uri"
        ) from error


def make_store(file: str) -> None:
    """Makes a SQLite store under another name first: MLflow goes on from no half-made one, as a kill leaves it."""
    Path(new := f"{file}.new").unlink(missing_ok=True)
    Path(new).parent.mkdir(parents=True, exist_ok=True)
    MlflowClient(sqlite_uri(Path(new))).search_experiments(max_results=1)
    os.replace(new, file)


FAILING = "error responses"
"""What MLflow says of a server that answers with a status of 500 or above."""

_reached: set[str] = set()
"""Servers that this process, or the one that has started it, has reached: one that is gone for a while comes back."""


def expect(uri: str) -> None:
    """Notes that a server is there, so that it is waited for with MLflow's patience, some minutes."""
    _reached.add(uri)


def _contact(uri: str) -> None:
    """Ask a server for an experiment, with few retries: a server that is not there is reported within seconds.

    Later requests have MLflow's patience. Raises: MlflowException: if the server does not answer, or with an error.
    """
    endpoint = "/api/2.0/mlflow/experiments/search"
    answer = http_request(
        get_default_host_creds(uri),
        endpoint,
        "POST",
        max_retries=int(os.environ.get("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")),
        timeout=int(os.environ.get("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")),
        json={"max_results": 1},
    )
    verify_rest_response(answer, endpoint)


@contextmanager
def said(uri: str, say: Callable[[str], Any]) -> Iterator[None]:
    """Says that MLflow is waited for, where that takes long."""
    timer = threading.Timer(LONG, say, [f"waiting for MLflow at {uri}"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


LONG = 5.0
"""Seconds after which it is said that MLflow is waited for."""


def _experiment(client: MlflowClient, uri: str, name: str, storage: str) -> str:
    """Id of the experiment, made where it is not there."""
    found = client.get_experiment_by_name(name)
    if found is None:
        place = artifacts_in(storage) if uri.startswith("sqlite") else None
        try:
            return str(
                client.create_experiment(name, artifact_location=place, tags=VIEW)
            )
        except MlflowException:  # made by another run meanwhile
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    if found.lifecycle_stage == "deleted":
        raise UserError(
            f"the experiment '{name}' is deleted in MLflow; restore it or choose another --experiment"
        )
    return str(found.experiment_id)


def artifacts_in(storage: str) -> str:
    """Where the runs' artifacts are, of a store that is a file: in the storage folder, which may be a URI."""
    if "://" in storage:
        return f"{storage.rstrip('/')}/mlartifacts"
    place = Path(storage).expanduser().absolute() / "mlartifacts"
    return place.as_uri()  # MLflow decodes a path with % as it does a URI


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
    """Makes a run with its params, tags and the config as an artifact.

    Every value of `config` is a param; `hashes` of tables, the git commit, the command and `tags` are tags.
    `parent` makes it the child of a sweep's run; a child of the same `sweep.trial` tag that is there already,
    since its trial was killed before it could note it, is taken up again.
    """
    client = connect(uri)
    labels = {
        "mlflow.source.name": Path(sys.argv[0]).name,
        "mlflow.source.type": "JOB",
        "command": command(),
        CODE_TAG: code_version(),
        **{f"table.{table}": value for table, value in hashes.items()},
        **(tags or {}),
    }
    if commit := git("rev-parse", "HEAD"):
        labels[COMMIT_TAG] = commit
    if submission := submission_id():
        labels[SUBMISSION_TAG] = submission
    if parent:
        labels["mlflow.parentRunId"] = parent
    place = _experiment(client, uri, experiment, storage)
    run = _trial_run(client, place, labels) or client.create_run(
        place, run_name=name, tags=labels
    )
    params = [Param(key, value[:6000]) for key, value in flattened(config).items()]
    for start in range(0, len(params), PARAMS):
        client.log_batch(run.info.run_id, params=params[start : start + PARAMS])
    try:
        client.log_dict(run.info.run_id, config, "config.yaml")
    except (MlflowException, OSError, ImportError) as error:
        client.delete_run(run.info.run_id)
        first = " ".join(str(error).split())[:200]
        raise UserError(
            f"cannot write to {run.info.artifact_uri} ({first}), where the experiment '{experiment}' keeps its "
            f"artifacts; make that work, or give another --experiment or a tracking server as --tracking_uri"
        ) from error
    return RunRef(uri, experiment, run.info.run_id)


def opening(uri: str, experiment: str) -> dict[str, str]:
    """What is written down before a run is made, with the key that its tag `KEY_TAG` holds; UserError where the store
    is not there."""
    connect(uri)
    return {"uri": uri, "experiment": experiment, "key": uuid.uuid4().hex}


def discard(opening: dict[str, str]) -> None:
    """Deletes what an opening that was cut short has made: `uri`, `experiment` and `key`, written down before it."""
    client = connect(opening["uri"])
    if place := client.get_experiment_by_name(opening["experiment"]):
        for run in client.search_runs(
            [place.experiment_id], f"tags.`{KEY_TAG}` = '{opening['key']}'"
        ):
            client.delete_run(run.info.run_id)


def _trial_run(client: MlflowClient, experiment_id: str, tags: dict[str, str]) -> Any:
    """The run of the same trial of the same sweep, if there is one."""
    if "mlflow.parentRunId" not in tags or TRIAL_TAG not in tags:
        return None
    found = client.search_runs(
        [experiment_id], f"tags.`{TRIAL_TAG}` = '{tags[TRIAL_TAG]}'"
    )
    return next(
        (
            run
            for run in found
            if run.data.tags.get("mlflow.parentRunId") == tags["mlflow.parentRunId"]
        ),
        None,
    )


def reopen(run: RunRef) -> None:
    """Marks a run as running again; UserError where it is not there any more."""
    client = connect(run.uri)
    try:
        client.update_run(run.run_id, status="RUNNING")
    except MlflowException as error:
        raise UserError(
            f"the MLflow run {run.run_id} of this training is not at {run.uri}; give the --tracking_uri that it was "
            f"started with, or start anew with --overwrite"
        ) from error


def lock_of(folder: str) -> str:
    """The lock of the training or sweep in the folder."""
    storage, _, name = folder.rpartition("/")
    return f"{storage}/.{name}.lock"


def end_trials(run: RunRef, failed: Collection[str | None]) -> None:
    """Ends those runs of a sweep's trials that say RUNNING: as FAILED where they are in `failed`, else as KILLED."""
    client = connect(run.uri)
    wanted = (
        f"tags.`mlflow.parentRunId` = '{run.run_id}' and attributes.status = 'RUNNING'"
    )
    for cut in client.search_runs(
        [client.get_run(run.run_id).info.experiment_id], wanted
    ):
        client.set_terminated(
            cut.info.run_id, "FAILED" if cut.info.run_id in failed else "KILLED"
        )


def end_dead(client: MlflowClient, runs: Iterable[Any]) -> None:
    """End those runs as KILLED that say RUNNING while nobody holds their folder.

    The lock of a folder at a URI has to be watched for some seconds, all of them at once. A local folder is one of
    this machine, or its lock would say nothing.
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


def command() -> str:
    """The command line of this process."""
    return " ".join([f"python -m jobs.{Path(sys.argv[0]).stem}", *sys.argv[1:]])[:5000]


def hardware(gpu: str = "") -> str:
    """This machine's processor, as its maker calls it, with its cores, and `gpu` before it."""
    name = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(
            line.split(":", 1)[1].strip()
            for line in lines
            if line.startswith("model name")
        )
    return (
        f"{gpu}; {name}, {os.cpu_count()} cores"
        if gpu
        else f"{name}, {os.cpu_count()} cores"
    )


def delete(run: RunRef) -> None:
    """Marks a run as deleted, so that no comparison counts it; UserError where it cannot be."""
    try:
        connect(run.uri).delete_run(run.run_id)
    except (MlflowException, UserError) as error:
        first = " ".join(str(error).split())[:200]
        raise UserError(
            f"the MLflow run {run.run_id} of what was there before cannot be deleted at {run.uri} ({first}); delete it "
            f"there with mlflow runs delete, or comparisons count it too"
        ) from error


Curves = dict[str, list[tuple[int, float, int]]]
"""By metric its points: step, value and time in milliseconds."""


class Logger:
    """Logs the metrics of one run; used by rank 0 alone. What the run has already is not logged again.

    Metrics are sent by a thread while the training goes on, all that have come together in one request, and `flush`
    waits for them. (MLflow's own queue has a request for every two seconds, whatever one takes.) A checkpoint has the
    curves up to it (`CURVES`), so that a run that goes on from it sends what a kill kept back.
    """

    def __init__(
        self,
        run: RunRef,
        curves: Curves | None = None,
        check_attempt: Callable[[], None] = lambda: None,
    ) -> None:
        """Read what the run has already, and send what it lacks of `curves`.

        Args:
            run: Run to log to.
            curves: Curves up to the checkpoint that the run goes on from.
            check_attempt: Called before metrics are sent; raises where a newer attempt logs to the run.
        """
        self.run, self.curves = run, curves or {}
        self.check_attempt = check_attempt
        self.client = connect(run.uri)
        there = self.client.get_run(run.run_id).data
        self.tags = there.tags
        self._thread, self._lock, self._pending = (
            ThreadPoolExecutor(1),
            threading.Lock(),
            list[Metric](),
        )
        self._sending: Future[None] | None = None
        self._last: dict[
            str, tuple[int, float]
        ] = {  # of each metric the point of the last step
            point.key: (point.step, point.value) for point in there.to_proto().metrics
        }
        self._send(
            {
                name: [p for p in points if p[0] > self._step(name)]
                for name, points in self.curves.items()
            }
        )

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Logs `metrics` at `step`, those not yet logged before an interruption. Does not wait for MLflow."""
        now = int(time.time() * 1000)
        finite = {
            name: (step, float(value), now)
            for name, value in metrics.items()
            if math.isfinite(value)
        }
        for name, point in finite.items():
            self.curves.setdefault(name, []).append(point)
        self._send(
            {name: [point] for name, point in finite.items() if self._step(name) < step}
        )

    def update(self, figures: dict[str, float], step: int) -> None:
        """Logs figures of the run as a whole at `step`; of those logged before the ones that have changed, after it."""
        now = int(time.time() * 1000)
        changed = {
            name: value
            for name, value in figures.items()
            if math.isfinite(value) and self._value(name) != float(value)
        }
        self._send(
            {
                name: [(max(step, self._step(name) + 1), value, now)]
                for name, value in changed.items()
            }
        )
        self.flush()

    def flush(self) -> float:
        """Waits until MLflow has all metrics; the seconds that took. Raises MlflowException where it does not take
        them."""
        began = time.monotonic()
        if self._sending:
            self._thread.submit(self._drain).result()
        return time.monotonic() - began

    def _step(self, name: str) -> int:
        return self._last.get(metric_name(name), (-1, 0.0))[0]

    def _value(self, name: str) -> float | None:
        return self._last.get(metric_name(name), (-1, None))[1]

    def _send(self, curves: Curves) -> None:
        fresh = [
            Metric(metric_name(name), value, time_ms, step)
            for name, points in curves.items()
            for step, value, time_ms in points
        ]
        with self._lock:
            self._pending += fresh
        if self._sending is None or self._sending.done():
            self._sending = self._thread.submit(self._drain)
        self._last.update({point.key: (point.step, point.value) for point in fresh})

    def _drain(self) -> None:
        """Sends what is pending; what MLflow does not take stays so."""
        while batch := self._pending[:BATCH]:
            self.check_attempt()
            self.client.log_batch(self.run.run_id, metrics=batch)
            with self._lock:
                del self._pending[: len(batch)]

    def tag(self, **tags: str) -> None:
        self.client.log_batch(
            self.run.run_id, tags=[RunTag(name, value) for name, value in tags.items()]
        )

    def end(self, status: str = "FINISHED") -> None:
        """FINISHED; or FAILED or KILLED, but for a run that has ended: a stopped trial loses its workers after that."""
        self.flush()
        if (
            status == "FINISHED"
            or self.client.get_run(self.run.run_id).info.status == "RUNNING"
        ):
            self.client.set_terminated(self.run.run_id, status)


@contextmanager
def system_metrics(run: RunRef) -> Iterator[None]:
    """Logs this machine's CPU, memory, disk, network and GPU to the run while the block runs."""
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
        monitor.finish()


CURVES = "curves.json"
"""File of a checkpoint with the curves of its run up to it."""


def curves_to_bytes(curves: Curves) -> bytes:
    """Return the content of `CURVES`."""
    return json.dumps(curves).encode()


def read_curves(checkpoint: str) -> Curves:
    """Return the curves of a run up to the checkpoint in the folder, none where it has no `CURVES`."""
    content = read_json(join(checkpoint, CURVES)) or {}
    return {
        name: [tuple(point) for point in points] for name, points in content.items()
    }


def log_curves(run: RunRef, curves: Curves) -> None:
    """Logs training and validation metrics as `curves.csv` and, drawn, as `curves.png`."""
    client = connect(run.uri)
    curves = {
        name: points
        for name, points in sorted(curves.items())
        if name.startswith(("train/", "val/"))
    }
    if not curves:
        return
    lines = [
        "metric,step,value",
        *(f"{name},{s},{v}" for name, points in curves.items() for s, v, _ in points),
    ]
    client.log_text(run.run_id, "\n".join(lines) + "\n", "curves.csv")
    from pipelines.figures import new_figure

    figure, panels = new_figure(2, width=5.5, height=4)
    at_10 = [key for key in curves if key.startswith("val/") and key.endswith("@10")]
    for axes, keys in zip(panels, (["train/loss"], at_10), strict=True):
        drawn = [key for key in keys if key in curves]
        for key in drawn:
            steps, values, _ = zip(*curves[key], strict=True)
            axes.plot(steps, values, label=key, marker=".")
        axes.set_xlabel("optimizer step")
        axes.grid(alpha=0.3)
        if drawn:
            axes.legend()
    with tempfile.TemporaryDirectory() as folder:
        figure.savefig(f"{folder}/curves.png", dpi=110)
        client.log_artifact(run.run_id, f"{folder}/curves.png")


def log_json(run: RunRef, content: Any, name: str) -> None:
    """Logs JSON-like content as an artifact."""
    connect(run.uri).log_text(
        run.run_id, json.dumps(content, indent=2, sort_keys=True), name
    )


def log_yaml(run: RunRef, content: dict[str, Any], name: str) -> None:
    """Logs a mapping as an artifact; `name` ends in .yaml."""
    connect(run.uri).log_dict(run.run_id, content, name)
