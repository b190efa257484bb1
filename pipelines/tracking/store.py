"""The tracking store: its URI, a SQLite file or a server, and whether it can be reached.

client = connect(resolve_uri(option, storage))
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

from models.storage.locks import hold_lock
from models.storage.tables import UserError
from models.storage.uri import refuse_secrets

for chatty in ("mlflow", "alembic"):
    logging.getLogger(chatty).setLevel(logging.WARNING)
# it logs the traceback of an exception that it raises anyway
logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)

SQLITE = "sqlite:///"
"""Beginning of the URI of a SQLite store; the path of its file follows."""

SERVER_ERROR = "error responses"
"""What MLflow says of a server that answers with a status of 500 or above."""

SLOW_S = 5.0
"""Seconds after which a user is told that MLflow is waited for."""

_reached: set[str] = set()
"""Servers that were reached before, so that a server that is gone for a while is waited
for."""


def resolve_uri(option: str | None, storage: str) -> str:
    """Return the tracking URI: the option, MLFLOW_TRACKING_URI, or SQLite in the storage folder.

    Raises:
        UserError: for a URI that workers elsewhere cannot use, or that MLflow cannot
            write.
    """
    uri = option or os.environ.get("MLFLOW_TRACKING_URI", "")
    refuse_secrets(uri, "the tracking URI")
    if not uri:
        if "://" in storage:
            raise UserError(
                f"there is no tracking URI, and SQLite cannot live in {storage}; give "
                f"--tracking_uri or set MLFLOW_TRACKING_URI to a tracking server"
            )
        return sqlite_uri(Path(storage).expanduser() / "mlflow.db")
    if uri.startswith("file:") or "://" not in uri:
        raise UserError(
            f"the tracking URI {uri} is a folder, which MLflow no longer writes; use "
            f"sqlite:///ABSOLUTE/PATH/mlflow.db or a tracking server"
        )
    if uri.startswith(SQLITE) and not uri.startswith("sqlite:////"):
        raise UserError(
            f"the tracking URI {uri} is relative, so workers elsewhere would write other "
            f"files; use {sqlite_uri(Path(sqlite_file(uri)))}"
        )
    return uri


def sqlite_uri(file: Path) -> str:
    """Return the URI of a SQLite store.

    SQLAlchemy decodes `%20` in it and takes `?` for the beginning of options, so only
    `%` and `?` are encoded: MLflow makes a folder, which stays empty, of the encoded
    name.
    """
    return SQLITE + str(file.absolute()).replace("%", "%25").replace("?", "%3F")


def sqlite_file(uri: str) -> str:
    """Return the path of the file of a SQLite store, or an empty text for another store."""
    if not uri.startswith(SQLITE):
        return ""
    return unquote(uri.removeprefix(SQLITE).partition("?")[0])


def named_store(option: str | None) -> str:
    """Return the URI of an existing store: of the option, the environment, or this folder.

    Raises:
        UserError: if no store is named, or the named SQLite file does not exist.
    """
    uri = option or os.environ.get("MLFLOW_TRACKING_URI", "")
    if not uri and not Path("runs/mlflow.db").is_file():
        raise UserError(
            "no MLflow store is named; give --tracking_uri, as jobs.train prints it"
        )
    uri = resolve_uri(uri or sqlite_uri(Path("runs/mlflow.db")), ".")
    file = sqlite_file(uri)
    if file and not Path(file).is_file():  # MLflow would make it
        raise UserError(
            f"there is no MLflow store at {uri}; give the --tracking_uri that jobs.train "
            f"prints"
        )
    return uri


def viewer(uri: str, mlflow: str = "mlflow") -> str:
    """Return the address of a server, or the command that shows another store.

    Args:
        uri: the store.
        mlflow: the program.
    """
    if uri.startswith(("http://", "https://")):
        return uri
    return f"{mlflow} ui --backend-store-uri {shlex.quote(uri)}"


def check_nodes(uri: str, nodes: int) -> None:
    """Refuse a SQLite file on several nodes, which would write files of their own.

    Raises:
        UserError: if the store is a file and there is more than one node.
    """
    if uri.startswith("sqlite") and nodes > 1:
        raise UserError(
            f"the tracking URI {uri} is a file, and the cluster has {nodes} nodes; start a "
            f"tracking server (mlflow server) and give its address with --tracking_uri or "
            f"MLFLOW_TRACKING_URI"
        )


def connect(uri: str) -> MlflowClient:
    """Return a client of a store that can be reached; a SQLite file is made if needed.

    User and password of a server are MLFLOW_TRACKING_USERNAME and
    MLFLOW_TRACKING_PASSWORD.

    Raises:
        UserError: if the store cannot be reached, or goes on answering with errors.
    """
    file = sqlite_file(uri)
    if not file and uri in _reached:
        return MlflowClient(uri)
    try:
        # one of several processes makes the tables of a file: MLflow's lock leaves some
        # out
        with hold_lock(f"{file}.lock", "", math.inf) if file else nullcontext():
            if file and not Path(file).exists():
                make_store(file)
            client = MlflowClient(uri)
            contact_patiently(client, uri)
        mark_reachable(uri)
        return client
    except (MlflowException, OSError, SQLAlchemyError) as error:
        first = " ".join(str(error).split())[:200]
        what = "cannot reach MLflow"
        if SERVER_ERROR in str(error):
            what = "MLflow answers with errors"
        raise UserError(
            f"{what} at {uri} ({first}); start it or give another --tracking_uri"
        ) from error


def make_store(file: str) -> None:
    """Make a SQLite store under another name, then rename it.

    MLflow cannot go on from a half-made file, as a kill leaves it.
    """
    Path(new := f"{file}.new").unlink(missing_ok=True)
    Path(new).parent.mkdir(parents=True, exist_ok=True)
    MlflowClient(sqlite_uri(Path(new))).search_experiments(max_results=1)
    os.replace(new, file)


def contact_patiently(client: MlflowClient, uri: str) -> None:
    """Ask a store for an experiment, with MLflow's patience once a server answers at all.

    Raises:
        MlflowException: if the store does not answer, or goes on answering with errors.
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
    """Ask a server for an experiment, with few retries: a wrong address fails in seconds.

    Raises:
        MlflowException: if the server does not answer, or answers with an error.
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


def mark_reachable(uri: str) -> None:
    """Record that a server was reached, so that later requests wait for it for minutes."""
    _reached.add(uri)


@contextmanager
def warn_if_slow(uri: str, say: Callable[[str], Any]) -> Iterator[None]:
    """Say that MLflow is waited for if the block takes longer than `SLOW_S`."""
    timer = threading.Timer(SLOW_S, say, [f"waiting for MLflow at {uri}"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
