"""Sweep over a documented grid: every trial is a training run of its own, beside the others in MLflow.

    python -m jobs.sweep --grid tuning/grids/sid_mlp_alpha.yaml --tables TABLES --sids SIDS --storage runs \\
        --name alpha --model.teacher runs/tiger

Any setting of all trials can be given as --model.KEY or --fit.KEY, other values of an axis as --axes.KEY '[A, B]';
--axes.fit.seed '[42, 43, 44]' repeats any grid over seeds.
--smoke takes the grid's variant of about a minute, --dry-run prints the trials. The same command finds what is
finished and goes on with the rest, trials that failed too; with failed trials the command ends with exit code 1. Pass
the folder of a finished sweep to use its best trial, as in --model.encoder runs/STAGE_1.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from jobs import cli
from models.config import path_fields, pluralize
from models.storage.input_folders import require_folders
from models.storage.inputs import Inputs
from models.storage.tables import UserError
from models.storage.uri import absolute, check_writable, join
from pipelines.training.config import FEWER, RayOptions, TrackingOptions
from tuning.options import Options, SweepConfig

if TYPE_CHECKING:
    from tuning.grid import Grid, Trial
    from tuning.sweep import SweepResult

TRAINED = ("model.teacher", "model.encoder", "checkpoint")
"""Settings that name a trained model, and so can name a sweep."""

MAX_SHOWN = 20
"""Largest number of trials that are printed."""


@dataclass
class Config:
    """Options of jobs.sweep."""

    grid: str
    """Grid file, such as tuning/grids/sid_mlp_alpha.yaml."""
    tables: str | None = None
    """TABLES: the folder that jobs.prepare made."""
    storage: str | None = None
    """Folder for all runs: checkpoints, and MLflow's SQLite store where no other is
    named."""
    name: str | None = None
    """Name of this sweep; by default that of the grid."""
    sids: str | None = None
    """SIDS: the folder that jobs.tokenize made, for models that use semantic IDs."""
    text: str | None = None
    """TEXT: the folder that jobs.encode made, for search models; models of actions can
    do without."""
    smoke: bool = False
    """Take the grid's small variant, whose trials the tables of the experiment leave
    out."""
    dry_run: bool = False
    """Print the trials, and do nothing."""
    samples: int | None = None
    """Draw this many points of the grid; by default as the grid says."""
    model: dict[str, Any] = field(default_factory=dict)
    """Settings of the model of all trials, such as --model.teacher."""
    fit: dict[str, Any] = field(default_factory=dict)
    """Settings of the training of all trials, such as --fit.max_epochs."""
    evaluate: dict[str, Any] = field(default_factory=dict)
    """Options of jobs.evaluate for all trials of a grid that evaluates."""
    axes: dict[str, list[Any]] = field(default_factory=dict)
    """Values of an axis, such as --axes.fit.seed '[42, 43, 44]'."""
    options: Options = field(default_factory=Options)
    """How the sweep is run."""
    ray: RayOptions = field(default_factory=RayOptions)
    """Workers and resources of each trial."""
    tracking_uri: str | None = None
    """MLflow; by default MLFLOW_TRACKING_URI, else a SQLite file in the storage
    folder."""
    experiment: str | None = None
    """MLflow experiment; by default family/dataset."""

    def __post_init__(self) -> None:
        if self.dry_run:
            return
        for name in ("tables", "storage"):
            if getattr(self, name) is None:
                raise ValueError(f"--{name} is not given; only --dry_run does without")


def read_trials(config: Config) -> tuple[Grid, list[Trial]]:
    """Return the grid with the values of the command line, and its trials."""
    from tuning.grid import load_grid
    from tuning.sweep import resolve_best_trial

    axes = dict(config.axes)
    for key in TRAINED:
        if key in axes:
            axes[key] = [resolve_best_trial(value) for value in axes[key]]
    grid = load_grid(config.grid).vary(config.smoke, axes)
    if config.samples is not None:
        if config.samples < 1:
            raise UserError(f"--samples is {config.samples}, it must be at least 1")
        grid.samples = config.samples
    sections = {"model": config.model, "fit": config.fit, "evaluate": config.evaluate}
    sets = {
        f"{name}.{key}": value
        for name, section in sections.items()
        for key, value in section.items()
    }
    for key in TRAINED:
        if isinstance(sets.get(key), str):
            sets[key] = resolve_best_trial(sets[key])
    trials = grid.trials(sets)
    if config.dry_run or not all(takes_cache(trial.model) for trial in trials):
        return grid, trials
    cache = join(absolute(str(config.storage)), "teacher_cache")
    return grid, [
        replace(trial, model=replace(trial.model, teacher_cache=cache))
        for trial in trials
    ]


def takes_cache(model: Any) -> bool:
    """Return whether all trials can share a cache of the teacher's outputs.

    Args:
        model: Config of a trial's model; None in a grid that evaluates.
    """
    if model is None or "teacher_cache" not in path_fields(type(model), "folder"):
        return False
    is_end_to_end = vars(model).get("end_to_end", False)
    return model.has_fixed_outputs and not (model.teacher_cache or is_end_to_end)


def run(config: Config) -> SweepResult | None:
    """Run the sweep and print its result, or print the trials alone."""
    cli.say_loading("torch", "ray", "mlflow")
    from tuning.sweep import run_sweep

    grid, trials = read_trials(config)
    if config.dry_run:
        print_trials(grid, trials)
        return None
    require_folders(tables=config.tables, sids=config.sids, text=config.text)
    check_writable(str(config.storage))
    workers = config.ray.num_workers if grid.kind == "train" else 1
    cli.check_cpus(workers, config.ray.cpus_per_worker, FEWER)

    def start() -> None:
        cli.preflight(
            tables=config.tables,
            sids=config.sids,
            text=config.text,
            storage=config.storage,
        )
        cli.start_ray()

    try:
        settings = SweepConfig(
            inputs=Inputs(str(config.tables), config.sids, config.text),
            storage=str(config.storage),
            name=config.name or grid.name,
            ray=config.ray,
            options=config.options,
            tracking=TrackingOptions(config.tracking_uri, config.experiment),
            command=" ".join(["python -m jobs.sweep", *sys.argv[1:]]),
            smoke=config.smoke,
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    swept = run_sweep(
        grid, trials, settings, say=partial(print, flush=True), start=start
    )
    print_result(config, grid, swept)
    if failed := swept.failed:
        raise UserError(
            f"{len(failed)} of {pluralize(len(trials), 'trial')} failed ({failed[0].name}: {failed[0].error}), so the "
            f"best is of an incomplete grid; fix what failed, then the same command runs only that"
        )
    return swept


def print_result(config: Config, grid: Grid, swept: SweepResult) -> None:
    """Print the ranked trials of a sweep, the best one, and the command to run next."""
    from pipelines import tracking

    ranked = sorted(
        swept.trials,
        key=lambda trial: -math.inf if trial.value is None else trial.value,
        reverse=True,
    )
    for trial in ranked[:MAX_SHOWN]:
        value = "        -" if trial.value is None else f"{trial.value:9.4f}"
        error = f"  ({trial.error})" if trial.error else ""
        print(f"{value}  {trial.status:<9} {trial.name}{error}")
    if len(ranked) > MAX_SHOWN:
        print(f"           and {len(ranked) - MAX_SHOWN} more in trials.json")
    print(
        f"Swept {pluralize(len(swept.trials), 'trial')} of {grid.name} in {swept.seconds:.0f} s."
    )
    incomplete = " (of an incomplete grid)" if swept.failed else ""
    print(
        f"  best        {swept.best.name}: {grid.metric} {swept.best.value:.4f}{incomplete}"
    )
    print(f"  checkpoint  {swept.best.checkpoint}")
    print(f"  MLflow run  {swept.run.run_id} in {swept.run.experiment}")
    print(f"  look at it  {tracking.view_command(swept.run.uri)}")
    options = {"experiment": swept.run.experiment}
    if config.smoke:
        options = {"sweep": swept.name}
    compare = cli.command_line("jobs.compare", **options, tracking_uri=swept.run.uri)
    print(f"  next        {compare}")


def print_trials(grid: Grid, trials: list[Trial]) -> None:
    """Print the trials, and the findings of the paper."""
    print(f"{grid.name}: {grid.source}")
    notes = [f"the paper: {finding}" for finding in grid.findings]
    if grid.notes:
        notes.append(f"here: {grid.notes}")
    for note in notes:
        print(f"  {' '.join(note.split())}")
    for trial in trials:
        print(
            f"  {trial.name}  "
            + "  ".join(f"{key} {value}" for key, value in trial.point.items())
        )
    size = pluralize(len(grid.list_points()), "point")
    print(
        f"{len(trials)} of {size}; metric {grid.metric}; scheduler {grid.scheduler.name}"
    )


if __name__ == "__main__":
    cli.main(run, Config)
