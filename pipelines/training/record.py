"""What a training notes in its run's folder: what it is, whether it is finished, and where MLflow has it."""

from __future__ import annotations

import json
from typing import Any

from models.config import flattened
from models.storage.checkpoint import BEST
from models.storage.tables import UserError, join
from models.storage.uri import absolute, read_json, write_file

RUN = "run.json"
"""In a run's folder: its record."""

MAY_CHANGE = {
    "log_every_steps",
    "eval_batch_size",
    "checkpoint_every_steps",
    "ray.num_workers",
}
"""Options, of `fit` where nothing else is named, that a continued run may change: what it ends with stays the same."""


def read_record(folder: str) -> dict[str, Any] | None:
    """`run.json`, or None for a name that has no run."""
    try:
        if (found := read_json(join(folder, RUN))) is None:
            return None
        record = dict(found)
        status = record.get("status")
        if not isinstance(status, str) or not isinstance(
            record.get("opening" if status == "opening" else "tracking"), dict
        ):
            raise ValueError("it does not say the run's status and its MLflow run")
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{folder}/{RUN} is damaged ({error}); train again with --overwrite, or remove that folder"
        ) from error
    return record


def find_checkpoint(uri: str) -> str:
    """The checkpoint at `uri`, or the best one of the run whose folder it is."""
    uri = absolute(uri).rstrip("/")
    record = read_record(uri)
    if record is None:
        return uri
    if record["status"] != "finished":
        raise UserError(
            f"the run {uri} is not finished ({RUN}); run its jobs.train line again, which continues it"
        )
    return join(uri, BEST)


def write_record(folder: str, record: dict[str, Any]) -> None:
    write_file(join(folder, RUN), json.dumps(record, indent=2, sort_keys=True).encode())


def is_longer(record: dict[str, Any], config: dict[str, Any]) -> bool:
    """Whether a finished run is to go on for more epochs."""
    return (
        record["status"] == "finished"
        and config["fit"]["max_epochs"] > record["config"]["fit"]["max_epochs"]
    )


def check_same(
    record: dict[str, Any], config: dict[str, Any], hashes: dict[str, str], remedy: str
) -> None:
    """Refuses to continue a run with other settings or tables; `remedy` is what the user can do then."""
    model, wanted = record["config"]["model"]["name"], config["model"]["name"]
    if model != wanted:
        raise UserError(f"the run is of the model '{model}', not '{wanted}'; {remedy}")
    before, now = flattened(record["config"]), flattened(config)
    if is_longer(record, config):
        before["fit.max_epochs"] = now["fit.max_epochs"]
    for key in sorted(before.keys() | now.keys()):
        if key.removeprefix("fit.") not in MAY_CHANGE and (was := before.get(key)) != (
            given := now.get(key)
        ):
            raise UserError(
                f"the run was started with {key} {was}, not {given}; {remedy}"
            )
    for table, value in hashes.items():
        if record["hashes"].get(table) != value:
            raise UserError(
                f"the run was started with another table '{table}'; {remedy}"
            )
