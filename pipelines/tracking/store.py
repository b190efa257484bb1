"""Resolve the tracking URI of MLflow, and connect to its store.

    client = connect(resolve_uri(option, storage))

The store is a SQLite file or a tracking server. MLflow is imported when a store is
opened, which takes seconds.
"""

from __future__ import annotations

import logging
import math
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from core.errors import UserError, one_line
from core.files import hold_lock
from core.options import refuse_secrets

if TYPE_CHECKING:
    from mlflow import MlflowClient

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

    Args:
        option: Value of `--tracking_uri`; by default MLFLOW_TRACKING_URI, else
            `runs/mlflow.db` in the working directory.
    """
    uri = option or os.environ.get("MLFLOW_TRACKING_URI", "")
    if not uri and not Path("runs/mlflow.db").is_file():
        raise UserError("no MLflow store is named", "tracking")
    uri = resolve_uri(uri or sqlite_uri(Path("runs/mlflow.db")), ".")
    check_store(uri)
    return uri


def check_store(uri: str) -> None:
    """Raise UserError if MLflow does not support a tracking URI or its file is missing.

    MLflow would create the missing file of a SQLite store.
    """
    file = sqlite_file(resolve_uri(uri, "."))
    if file and not Path(file).is_file():
        raise UserError(f"there is no MLflow store at {uri}")


def view_command(uri: str, mlflow: str = "mlflow") -> str:
    """Return the command that shows a store, or the address of a server.

    Args:
        uri: Tracking URI.
        mlflow: Name or path of the program `mlflow`.
    """
    if uri.startswith(("http://", "https://")):
        return uri
    return f"{mlflow} ui --backend-store-uri {shlex.quote(uri)}"


def check_nodes(uri: str, nodes: int) -> None:
    """Raise UserError if a cluster of several nodes would use a SQLite file.

    Each node would write a file of its own.

    Args:
        uri: Tracking URI.
        nodes: Number of nodes.
    """
    if uri.startswith("sqlite") and nodes > 1:
        raise UserError(
            f"the tracking URI {uri} is a file, and the cluster has {nodes} nodes",
            "tracking",
        )


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
    """Create a SQLite store under a temporary name, and rename it when it is complete.

    MLflow cannot use the incomplete file that a killed process would leave.
    """
    from mlflow import MlflowClient

    temporary = Path(f"{file}.new")
    temporary.unlink(missing_ok=True)
    temporary.parent.mkdir(parents=True, exist_ok=True)
    MlflowClient(sqlite_uri(temporary)).search_experiments(max_results=1)
    os.replace(temporary, file)


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
