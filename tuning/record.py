"""What a sweep notes in its folder: its trials, whether it is finished, and where MLflow has it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from models.tables import UserError, join
from models.uri import absolute, read_json, write_file
from pipelines.tracking import RunRef
from tuning.grid import Trial

SWEEP = "sweep.json"
"""In a sweep's folder: its record."""

NO_BEST = "no trial of the sweep {} has a value; mend what failed, then run it with --resume --options.again true"


def read_sweep(folder: str) -> dict[str, Any] | None:
    """`sweep.json`, or None for a folder that is no sweep's."""
    try:
        if (found := read_json(join(folder, SWEEP))) is None:
            return None
        noted = dict(found)
        if noted["status"] == "opening":  # killed before its MLflow run was made, and so before its trials were noted
            return {"status": "opening", "opening": dict(noted["opening"])}
        RunRef(**noted["tracking"])
        names = [one["name"] for one in noted["trials"]]
        if not all(isinstance(name, str) for name in names) or (noted["status"] == "finished" and "best" not in noted):
            raise ValueError("it does not name the sweep's trials, or the best of them")
    except (ValueError, TypeError, KeyError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(
            f"{join(folder, SWEEP)} is damaged ({what}); remove the folder {folder} and start "
            f"the sweep again, or choose another --name"
        ) from error
    return noted


def write_sweep(folder: str, content: dict[str, Any]) -> None:
    write_file(join(folder, SWEEP), json.dumps(content, indent=2, sort_keys=True).encode())


def best_checkpoint(folder: str) -> str:
    """The best trial's checkpoint of a finished sweep, for a folder that is one; any other path as it is."""
    noted = read_sweep(absolute(folder)) if folder else None
    if noted is None:
        return folder
    if noted["status"] != "finished":
        raise UserError(f"the sweep {folder} is not finished, so it has no best trial yet; run it with --resume")
    if not noted["best"]:
        raise UserError(NO_BEST.format(folder))
    return join(absolute(folder), noted["best"])


def check_same(before: dict[str, Any], trials: list[Trial], name: str, storage: str, resume: bool) -> None:
    """Refuses a sweep that is there already, unless it is resumed with the same trials."""
    if not resume:
        raise UserError(f"the sweep '{name}' is in {storage} already; give --resume, or choose another --name")
    old = {one["name"]: one for one in before["trials"]}
    now = {trial.name: json.loads(json.dumps(asdict(trial))) for trial in trials}
    for key in [*old, *now]:
        if old.get(key) != now.get(key):
            what = "was started with other settings" if key in old and key in now else "is not in both"
            raise UserError(
                f"the sweep '{name}' in {storage} has other trials ({key} {what}); resume it with the line that "
                f"started it, or choose another --name"
            )


def check_tables(before: dict[str, Any], hashes: dict[str, str], name: str) -> None:
    """Refuses to go on with other tables than those that the sweep was started with."""
    for table, value in before.get("hashes", hashes).items():
        if hashes.get(table) != value:
            raise UserError(
                f"the sweep '{name}' was started with another table '{table}'; give the tables that it was started "
                f"with, or choose another --name"
            )
