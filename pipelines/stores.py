"""MLflow's stores by their URI: what is known of one without MLflow, whose import takes seconds."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import quote

from models.config import hint
from models.tables import UserError
from models.uri import refuse_secrets

SQLITE = "sqlite:///"

NAMES = {
    "experiment": "SELECT name FROM experiments WHERE lifecycle_stage = 'active'",
    "sweep": "SELECT name, run_uuid FROM runs JOIN tags USING (run_uuid) WHERE lifecycle_stage = 'active' "
    "AND key = 'trieline.kind' AND value = 'sweep'",
    "run": "SELECT name, run_uuid FROM runs JOIN params USING (run_uuid) WHERE lifecycle_stage = 'active' "
    "AND key = 'model.name'",
    "metric": "SELECT DISTINCT substr(key, instr(key, '/') + 1) FROM latest_metrics "
    "WHERE key GLOB 'val*/*' OR key GLOB 'test*/*' OR key GLOB 'best/*'",
}
"""By option, what MLflow's tables in a SQLite file name: the first column is the name, others are as good."""


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


def named_stores(options: Sequence[str], new: bool = False) -> list[str]:
    """The tracking URIs of the options, the environment, or this folder; UserError where there is none, or, unless it
    may be a `new` one, no store."""
    uris = list(options) or [os.environ.get("MLFLOW_TRACKING_URI", "")]
    if uris == [""]:
        if not Path("runs/mlflow.db").is_file():
            raise UserError("no MLflow store is named; give --tracking_uri, as jobs.train prints it")
        uris = [f"{SQLITE}{Path('runs/mlflow.db').absolute()}"]
    found = list(dict.fromkeys(resolve_uri(uri, ".") for uri in uris))
    for uri in [] if new else found:  # MLflow would make it
        if uri.startswith(SQLITE) and not Path(uri.removeprefix(SQLITE)).is_file():
            raise UserError(f"there is no MLflow store at {uri}; give the --tracking_uri that jobs.train prints")
    return found


def check_named(uris: Sequence[str], **names: Iterable[str]) -> None:
    """UserError for a name, by its option (`NAMES`), that is in none of the stores: SQLite files are asked themselves.
    Where a store is none or cannot be read so, MLflow finds out."""
    for what, given in names.items():
        if not (given := list(given)):
            continue
        try:
            rows = [row for uri in uris for row in _rows(uri, NAMES[what])]
        except sqlite3.Error:
            return
        known = {str(name).replace("_at_", "@") for row in rows for name in row}
        for name in given:
            if name not in known:
                raise UserError(unknown(what, name, uris, [str(row[0]).replace("_at_", "@") for row in rows]))


def _rows(uri: str, query: str) -> list[tuple[str, ...]]:
    if not uri.startswith(SQLITE):
        raise sqlite3.NotSupportedError(f"{uri} is no file")
    with closing(sqlite3.connect(f"file:{quote(uri.removeprefix(SQLITE))}?mode=ro", uri=True, timeout=5)) as database:
        return database.execute(query).fetchall()


def unknown(what: str, name: str, uris: Sequence[str], known: Iterable[str]) -> str:
    """What is said of a name that is in none of the stores, where `known` are."""
    known, place = sorted(set(known) - {"Default"}), ", ".join(uris)
    if what == "experiment":
        there = f"there are {', '.join(known)}" if known else "no experiment is there"
        return f"the experiment '{name}' is not at {place}; {there}" + (f"; {hint(name, known)}" if known[1:] else "")
    if what == "metric":
        return f"no run at {place} has the metric '{name}' on val or test; {hint(name, known, 'none is evaluated yet')}"
    return f"there is no {what} '{name}' at {place}; {hint(name, known)}"
