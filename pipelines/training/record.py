"""Read and write `run.json`, the record of a run with its settings and its status."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, replace
from typing import Any

from core.errors import UserError
from core.files import absolute, join, read_json, write_file
from core.options import find_difference
from core.schemas import RunRecord, parse_record
from models.training.checkpoint import BEST

RUN = "run.json"
"""Name of the record in a run's folder."""

MAY_CHANGE = {
    "fit.log_every_steps",
    "fit.eval_batch_size",
    "fit.checkpoint_every_steps",
    "fit.checkpoint_every_minutes",
    "ray.num_workers",
}
"""Options that a continued run may change without changing its results."""


def read_record(folder: str, tracking_uri: str = "") -> RunRecord | None:
    """Return the record of the run in a folder, or None if the folder has no record.

    Args:
        folder: Folder of the run.
        tracking_uri: URI to use instead of the record's. MLflow sends credentials to
            it, and anybody who can write the folder can change the record.
    """
    uri = join(folder, RUN)
    content = read_json(uri)
    if content is None:
        return None
    record = parse_record(RunRecord, content, uri)
    if tracking_uri:
        record.run = replace(record.run, uri=tracking_uri)
    return record


def find_checkpoint(uri: str) -> str:
    """Return the folder of a checkpoint, or of the best checkpoint of a finished run.

    An unfinished run is refused, while `checkpoint.locate` accepts its `best/`.
    """
    uri = absolute(uri).rstrip("/")
    record = read_record(uri)
    if record is None:
        return uri
    if record.status != "finished":
        raise UserError(f"the run {uri} is not finished", "resume")
    return join(uri, BEST)


def write_record(folder: str, record: RunRecord) -> None:
    """Write the record of the run in a folder."""
    content = json.dumps(asdict(record), indent=2, sort_keys=True)
    write_file(join(folder, RUN), content.encode())


def is_longer(record: RunRecord, max_epochs: int) -> bool:
    """Return whether `max_epochs` exceeds the epochs that a run was finished with."""
    return (
        record.status == "finished" and max_epochs > record.config["fit"]["max_epochs"]
    )


def check_equal(
    before: dict[str, Any], now: dict[str, Any], may_change: Collection[str] = ()
) -> None:
    """Raise UserError if a setting of a run differs, unless it may change."""
    if difference := find_difference(before, now, may_change):
        raise UserError(f"the run was started with {difference}", "name")
