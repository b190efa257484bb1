"""MLflow's stores by their URI: what is known of one without MLflow, whose import takes seconds."""

from __future__ import annotations

import os
from pathlib import Path

from models.tables import UserError
from models.uri import hide


def resolve_uri(option: str | None, storage: str) -> str:
    """The tracking URI: the option, else MLFLOW_TRACKING_URI, else SQLite in the storage folder, absolute; masked."""
    if given := os.environ.get("MLFLOW_TRACKING_URI"):
        hide(given)  # known, also to what was recorded with it
    uri = hide(option or given)
    if not uri:
        if "://" in storage:
            raise UserError(
                f"there is no tracking URI, and SQLite cannot live in {storage}; give --tracking_uri or set "
                f"MLFLOW_TRACKING_URI to a tracking server"
            )
        return f"sqlite:///{Path(storage).expanduser().absolute()}/mlflow.db"
    if uri.startswith("file:") or "://" not in uri:
        raise UserError(
            f"the tracking URI {uri} is a folder, which MLflow no longer writes; use sqlite:///ABSOLUTE/PATH/mlflow.db "
            f"or a tracking server"
        )
    if uri.startswith("sqlite:///") and not uri.startswith("sqlite:////"):
        raise UserError(
            f"the tracking URI {uri} is relative, so workers elsewhere would write other files; use "
            f"sqlite:///{Path(uri.removeprefix('sqlite:///')).absolute()}"
        )
    return uri
