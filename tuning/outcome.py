"""What has become of a sweep's trials, and which is the best."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

from models import checkpoint
from models.tables import join
from pipelines import tracking
from pipelines.training.record import BEST, read_record
from tuning.grid import Grid, Trial


@dataclass
class Outcome:
    """A trial, as `trials.json` lists it."""

    trial: str
    """Stable id."""
    name: str
    """Folder and MLflow name."""
    point: dict[str, Any]
    """Values of the axes."""
    status: str
    """finished, stopped (early, by the scheduler or a stop condition), failed, or unfinished."""
    value: float | None = None
    """The sweep's metric: of the best epoch, or of the evaluation."""
    epochs: int | None = None
    """Epochs done."""
    run_id: str | None = None
    """MLflow run."""
    checkpoint: str | None = None
    """Folder of the best weights."""
    error: str | None = None
    """Why it failed."""


def outcome(trial: Trial, sweep_folder: str, grid: Grid) -> Outcome:
    """What has become of the trial, read from its folder."""
    folder = join(sweep_folder, trial.name)
    noted = read_record(folder)
    made = Outcome(trial.id, trial.name, trial.point, "unfinished")
    if noted is None or "tracking" not in noted:
        return made
    made.run_id = noted["tracking"]["run_id"]
    if noted["status"] == "failed":
        made.status, made.error = "failed", noted["error"]
    elif noted["status"] == "finished":
        made.status = "stopped" if noted.get("stopped") else "finished"
        if grid.kind == "evaluate":
            made.value, made.checkpoint = noted["values"].get(grid.metric), trial.folders["checkpoint"]
            return made
        about = checkpoint.read(join(folder, BEST))
        made.value = about.metrics.get(grid.metric.removeprefix("val/"))
        made.epochs, made.checkpoint = noted["epochs"], join(folder, BEST)
    return made


def best_of(outcomes: list[Outcome]) -> Outcome | None:
    """The best trial of the settings with the most seeds, and of those with the largest mean over their seeds."""
    seeds: dict[str, list[float]] = {}
    for o in outcomes:
        seeds.setdefault(tracking.settings_of(o.point), []).extend([] if o.value is None else [o.value])

    def rank(one: Outcome) -> tuple[float, ...]:
        values = seeds[tracking.settings_of(one.point)]
        return len(values), statistics.fmean(values), one.value or 0.0

    return max((o for o in outcomes if o.value is not None), key=rank, default=None)


def best_metrics(run: tracking.RunRef, best: Outcome, grid: Grid) -> dict[str, float]:
    """The best trial's own metrics, under `best/`, for the sweep's run."""
    logged = tracking.connect(run.uri).get_run(str(best.run_id)).data.metrics
    values = {tracking.shown_name(key): value for key, value in logged.items()}
    wanted = {key.removeprefix("best/"): value for key, value in values.items() if key.startswith("best/")}
    wanted |= {key: value for key, value in values.items() if key.startswith("test/")}
    return {f"best/{key}": value for key, value in wanted.items()} | {grid.metric: float(best.value or math.nan)}
