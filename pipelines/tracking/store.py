"""Resolve the tracking URI of MLflow, and connect to its store.

    client = connect(resolve_uri(option, storage))

The store is a SQLite file or a tracking server.
"""

from __future__ import annotations

import logging
import math
import os
import shlex
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.utils.credentials import get_default_host_creds
from mlflow.utils.rest_utils import http_request, verify_rest_response
from sqlalchemy.exc import SQLAlchemyError

from core.errors import UserError, one_line
from core.files import hold_lock
from core.options import refuse_secrets

for logger_name in ("mlflow", "alembic"):
    logging.getLogger(logger_name).setLevel(logging.WARNING)
# it logs the traceback of exceptions that it also raises
logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)

SQLITE = "sqlite:///"
"""Beginning of the URI of a SQLite store; the path of its file follows."""

SERVER_ERROR = "error responses"
"""Part of MLflow's message about a server that answers with a status of 500 or
above."""

SLOW_S = 5.0
"""Seconds after which a message reports that MLflow is slow."""

_reachable: set[str] = set()
"""URIs of servers that were reached before. If one of them fails, requests are retried
for minutes instead of seconds."""


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


def connect(uri: str) -> MlflowClient:
    """Return a client of a store, after checking that the store can be reached.

    A SQLite file is created if needed. User and password of a server are taken from
    MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD. A SQLite file may name any
    address of artifacts, so these variables are removed from the environment.
    """
    refuse_secrets(uri, "the tracking URI")
    file = sqlite_file(uri)
    for name in ("USERNAME", "PASSWORD", "TOKEN") if file else ():
        os.environ.pop(f"MLFLOW_TRACKING_{name}", None)
    if not file and uri in _reachable:
        return MlflowClient(uri)
    try:
        # our own lock: under MLflow's, two processes could each create some of the
        # tables
        with hold_lock(f"{file}.lock", "", math.inf) if file else nullcontext():
            if file and not Path(file).exists():
                create_store(file)
            client = MlflowClient(uri)
            contact_store(client, uri)
        mark_reachable(uri)
        return client
    except (MlflowException, OSError, ImportError, SQLAlchemyError) as error:
        problem = "cannot reach MLflow"
        if SERVER_ERROR in str(error):
            problem = "MLflow answers with errors"
        raise UserError(f"{problem} at {uri} ({one_line(error)})") from error


def create_store(file: str) -> None:
    """Create a SQLite store under a temporary name, and rename it when it is complete.

    MLflow cannot use the incomplete file that a killed process would leave.
    """
    temporary = Path(f"{file}.new")
    temporary.unlink(missing_ok=True)
    temporary.parent.mkdir(parents=True, exist_ok=True)
    MlflowClient(sqlite_uri(temporary)).search_experiments(max_results=1)
    os.replace(temporary, file)


def contact_store(client: MlflowClient, uri: str) -> None:
    """Request an experiment from a store.

    If a server answers with an error, the request is repeated with MLflow's retries. If
    it does not answer, the request fails in seconds.

    Raises:
        MlflowException: If the store does not answer, or keeps answering with errors.
    """
    try:
        if uri.startswith(("http://", "https://")):
            contact_server(uri)
        else:
            client.search_experiments(max_results=1)
    except MlflowException as error:
        if SERVER_ERROR not in str(error):
            raise
        client.search_experiments(max_results=1)


def contact_server(uri: str) -> None:
    """Request an experiment from a server with few retries.

    With a wrong address the request fails in seconds.

    Raises:
        MlflowException: If the server does not answer, or answers with an error.
    """
    endpoint = "/api/2.0/mlflow/experiments/search"
    response = http_request(
        get_default_host_creds(uri),
        endpoint,
        "POST",
        max_retries=int(os.environ.get("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")),
        timeout=int(os.environ.get("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")),
        json={"max_results": 1},
    )
    verify_rest_response(response, endpoint)


def mark_reachable(uri: str) -> None:
    """Record that a server was reached, so that later requests are retried longer."""
    _reachable.add(uri)


@contextmanager
def warn_if_slow(uri: str, say: Callable[[str], Any]) -> Iterator[None]:
    """Report that MLflow is slow if the block takes longer than `SLOW_S`.

    Args:
        uri: Tracking URI, for the message.
        say: Called with the message.
    """
    timer = threading.Timer(SLOW_S, say, [f"waiting for MLflow at {uri}"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
