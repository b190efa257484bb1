"""Resolve the tracking URI of MLflow, connect to its store, and name tags and metrics.

    client = connect(resolve_uri(option, storage))

The store is a SQLite file or a tracking server. MLflow is imported when a store is
opened, which takes seconds.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from core.errors import UserError, did_you_mean, one_line
from core.files import hold_lock
from core.options import refuse_secrets

if TYPE_CHECKING:
    from mlflow import MlflowClient

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

SQLITE = "sqlite:///"
"""Beginning of the URI of a SQLite store; the path of its file follows."""


def resolve_uri(option: str | None, storage: str) -> str:
    """Return the tracking URI.

    Args:
        option: Value of `--tracking_uri`; by default MLFLOW_TRACKING_URI, else a SQLite
            file in the storage folder.
        storage: Folder of the runs.
    """
    uri = option or os.environ.get("MLFLOW_TRACKING_URI", "")
    if not uri:
        if "://" in storage:
            raise UserError(
                f"there is no tracking URI, and SQLite cannot be used in {storage}",
                "tracking",
            )
        return sqlite_uri(Path(storage).expanduser() / "mlflow.db")
    if uri.startswith("file:") or "://" not in uri:
        raise UserError(
            f"the tracking URI {uri} is a folder, which MLflow no longer supports"
        )
    if uri.startswith(SQLITE) and not uri.startswith("sqlite:////"):
        raise UserError(
            f"the tracking URI {uri} is relative, so workers elsewhere would write "
            f"other files"
        )
    return uri


def sqlite_uri(file: Path) -> str:
    """Return the URI of a SQLite store.

    SQLAlchemy decodes `%20` in the URI, and options follow a `?`. Only `%` and `?` are
    encoded, because MLflow creates an empty folder with the encoded name.
    """
    return SQLITE + str(file.absolute()).replace("%", "%25").replace("?", "%3F")


def sqlite_file(uri: str) -> str:
    """Return the file of a SQLite store, or an empty string for another store."""
    if not uri.startswith(SQLITE):
        return ""
    return unquote(uri.removeprefix(SQLITE).partition("?")[0])


def find_store(option: str | None) -> str:
    """Return the tracking URI of an existing store.

    MLflow would create the missing file of a SQLite store.

    Args:
        option: Value of `--tracking_uri`; by default MLFLOW_TRACKING_URI, else
            `runs/mlflow.db` in the working directory.
    """
    uri = option or os.environ.get("MLFLOW_TRACKING_URI", "")
    if not uri and not Path("runs/mlflow.db").is_file():
        raise UserError("no MLflow store is named", "tracking")
    uri = resolve_uri(uri or sqlite_uri(Path("runs/mlflow.db")), ".")
    file = sqlite_file(uri)
    if file and not Path(file).is_file():
        raise UserError(f"there is no MLflow store at {uri}")
    return uri


def view_command(uri: str, mlflow: str = "mlflow") -> str:
    """Return the command that shows a store, or the address of a server.

    Args:
        uri: Tracking URI.
        mlflow: Name or path of the program `mlflow`.
    """
    if uri.startswith(("http://", "https://")):
        return uri
    return f"{mlflow} ui --backend-store-uri {shlex.quote(uri)}"


def lock_path(folder: str) -> str:
    """Return the path of the lock file for the folder of a training or a sweep."""
    storage, _, name = folder.rpartition("/")
    return f"{storage}/.{name}.lock"


def connect(uri: str) -> MlflowClient:
    """Return a client of a store, after checking that the store can be reached.

    A SQLite file is created if needed. A server's user and password, or token, are in
    MLFLOW_TRACKING_USERNAME, _PASSWORD and _TOKEN. A SQLite file may name any address
    of artifacts, so for it these variables are removed from the environment.
    """
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    quieten_mlflow()
    refuse_secrets(uri, "the tracking URI")
    try:
        if file := sqlite_file(uri):
            for name in ("USERNAME", "PASSWORD", "TOKEN"):
                os.environ.pop(f"MLFLOW_TRACKING_{name}", None)
            # our own lock: under MLflow's, two processes could each create some of the
            # tables
            with hold_lock(f"{file}.lock", "", math.inf):
                if not Path(file).exists():
                    create_store(file)
        client = MlflowClient(uri)
        with few_retries():
            client.search_experiments(max_results=1)
        return client
    except (MlflowException, OSError, ImportError, SQLAlchemyError) as error:
        raise UserError(f"cannot reach MLflow at {uri} ({one_line(error)})") from error


def quieten_mlflow() -> None:
    """Hide MLflow's notes, and tracebacks of exceptions that it also raises."""
    for name in ("mlflow", "alembic"):  # importing mlflow sets other levels
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)


def create_store(file: str) -> None:
    """Create a SQLite store as a copy of an empty one, which the user's cache keeps.

    MLflow's migrations take seconds. The empty store has no experiment, whose artifacts
    would be where it was made. The copy is renamed when it is complete, as MLflow
    cannot use the incomplete file that a killed process would leave.
    """
    from mlflow.db import upgrade
    from mlflow.version import VERSION

    from models.dataset.dataset import cache_folder

    empty = cache_folder().with_name("mlflow") / f"{VERSION}.db"
    if not empty.exists():
        empty.parent.mkdir(parents=True, exist_ok=True)
        made = Path(f"{empty}.{os.getpid()}")
        upgrade.main([sqlite_uri(made)], standalone_mode=False)
        made.replace(empty)
    temporary = Path(f"{file}.new")
    temporary.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(empty, temporary)
    temporary.replace(file)


@contextmanager
def few_retries() -> Iterator[None]:
    """Let requests to a server fail within seconds while the block runs."""
    names = ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT")
    before = {name: os.environ.get(name) for name in names}
    for name, few in zip(names, ("1", "10"), strict=True):
        os.environ.setdefault(name, few)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)


def to_mlflow_name(name: str) -> str:
    """Return the name of a metric in MLflow: `val/ndcg@10` becomes `val/ndcg_at_10`."""
    return re.sub("@([0-9]+)$", r"_at_\1", name)


def from_mlflow_name(name: str) -> str:
    """Return the name of a metric by its name in MLflow."""
    return re.sub("_at_([0-9]+)$", r"@\1", name)


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
