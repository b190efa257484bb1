r"""Train one model per point of a grid, each as a child run of the sweep in MLflow.

    python -m jobs.sweep --grid tuning/grids/sid_mlp_alpha.yaml --tables TABLES \
        --sids SIDS --storage runs --name alpha --model.teacher runs/tiger

--model.KEY and --fit.KEY set an option of all trials; --axes.KEY '[A, B]' replaces the
values of an axis. --axes.fit.seed '[42, 43, 44]' repeats any grid with several seeds.
--smoke runs a small variant of the grid, of about a minute; --dry-run only prints the
trials. The same command again runs the trials that are unfinished or failed. The exit
code is 1 if a trial failed. An option that names a trained model, such as
--model.encoder, also accepts the folder of a finished sweep and takes its best trial.
"""

from __future__ import annotations

import math
import sys
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from core.errors import UserError, pluralize
from core.files import absolute, join
from core.options import STRICT, Free, path_fields
from core.schemas import Inputs
from jobs import cli
from pipelines.training.config import RayOptions, TrackingOptions
from tuning.options import Options, SweepConfig

if TYPE_CHECKING:
    from tuning.grid import Grid, Trial
    from tuning.sweep import SweepResult

CHECKPOINT_OPTIONS = ("model.teacher", "model.encoder", "checkpoint")
"""Options that name a checkpoint; a sweep in its place stands for its best trial."""

MAX_PRINTED_TRIALS = 20
"""Largest number of trials that are printed."""


@dataclass(config=STRICT)
class Config:
    """Options of jobs.sweep."""

    grid: str
    """Grid file, such as tuning/grids/sid_mlp_alpha.yaml."""
    tables: str | None = None
    """TABLES: the folder that jobs.prepare made."""
    storage: str | None = None
    """Folder for all runs: checkpoints, and MLflow's SQLite store unless tracking_uri
    names another store."""
    name: str | None = None
    """Name of this sweep; by default the name of the grid."""
    sids: str | None = None
    """SIDS: the folder that jobs.tokenize made, for models that use semantic IDs."""
    text: str | None = None
    """TEXT: the folder that jobs.encode made, for search models; optional for models of
    actions."""
    smoke: bool = False
    """Run the grid's small variant. Comparisons of the experiment exclude its
    trials."""
    dry_run: bool = False
    """Print the trials without running them."""
    samples: PositiveInt | None = None
    """Number of points drawn from the grid; by default the grid's setting."""
    model: dict[str, Free] = field(default_factory=dict)
    """Model options of all trials, such as --model.teacher."""
    fit: dict[str, Free] = field(default_factory=dict)
    """Training options of all trials, such as --fit.max_epochs."""
    evaluate: dict[str, Free] = field(default_factory=dict)
    """Options of jobs.evaluate of all trials, for a grid of evaluations."""
    axes: dict[str, list[Free]] = field(default_factory=dict)
    """Values of an axis, such as --axes.fit.seed '[42, 43, 44]'; may add an axis."""
    options: Options = field(default_factory=Options)
    """Scheduling of the trials."""
    ray: RayOptions = field(default_factory=RayOptions)
    """Workers and resources of each trial."""
    tracking_uri: str | None = None
    """MLflow tracking URI; by default MLFLOW_TRACKING_URI, else a SQLite file in the
    storage folder."""
    experiment: str | None = None
    """MLflow experiment; by default KIND/DATASET."""

    def __post_init__(self) -> None:
        if self.dry_run:
            return
        for name in ("tables", "storage"):
            if getattr(self, name) is None:
                raise ValueError(
                    f"--{name} is missing; it is required without --dry_run"
                )


def read_trials(config: Config) -> tuple[Grid, list[Trial]]:
    """Return the grid, changed by the options of the command line, and its trials."""
    from tuning.grid import load_grid
    from tuning.sweep import resolve_best_trial

    axes = dict(config.axes)
    for key in CHECKPOINT_OPTIONS:
        if key in axes:
            axes[key] = [resolve_best_trial(value) for value in axes[key]]
    grid = load_grid(config.grid).vary(config.smoke, axes)
    if config.samples is not None:
        grid.samples = config.samples
    sections = {"model": config.model, "fit": config.fit, "evaluate": config.evaluate}
    overrides = {}
    for name, section in sections.items():
        for key, value in section.items():
            overrides[f"{name}.{key}"] = value
    for key in CHECKPOINT_OPTIONS:
        if isinstance(overrides.get(key), str):
            overrides[key] = resolve_best_trial(overrides[key])
    trials = grid.trials(overrides)
    if config.dry_run or not all(has_teacher_cache(trial.model) for trial in trials):
        return grid, trials
    cache = join(absolute(str(config.storage)), "teacher_cache")
    return grid, [
        replace(trial, model=replace(trial.model, teacher_cache=cache))
        for trial in trials
    ]


def has_teacher_cache(model: Any) -> bool:
    """Return whether a trial can read the teacher's outputs from a shared cache.

    Args:
        model: Config of the trial's model; None in a grid of evaluations.
    """
    if model is None or "teacher_cache" not in path_fields(type(model), "folder"):
        return False
    is_end_to_end = vars(model).get("end_to_end", False)
    return model.has_fixed_outputs and not (model.teacher_cache or is_end_to_end)


def run(config: Config) -> SweepResult | None:
    """Run the sweep and print its result; with `--dry_run`, only print the trials."""
    cli.say_loading("torch", "ray", "mlflow")
    from tuning.sweep import run_sweep

    grid, trials = read_trials(config)
    if config.dry_run:
        print_trials(grid, trials)
        return None

    def start() -> None:
        cli.preflight(
            tables=config.tables,
            sids=config.sids,
            text=config.text,
            storage=config.storage,
        )
        cli.start_ray()

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
    result = run_sweep(
        grid, trials, settings, say=partial(print, flush=True), start=start
    )
    print_result(config, grid, result)
    failed = result.failed_trials
    if failed:
        raise UserError(
            f"{len(failed)} of {pluralize(len(trials), 'trial')} failed "
            f"({failed[0].name}: {failed[0].error}), so the best trial is the best of "
            f"an incomplete grid"
        )
    return result


def print_result(config: Config, grid: Grid, result: SweepResult) -> None:
    """Print the ranked trials of a sweep, the best trial, and the next command."""
    from pipelines import tracking

    ranked = sorted(
        result.trials,
        key=lambda trial: -math.inf if trial.value is None else trial.value,
        reverse=True,
    )
    for trial in ranked[:MAX_PRINTED_TRIALS]:
        value = "        -" if trial.value is None else f"{trial.value:9.4f}"
        error = f"  ({trial.error})" if trial.error else ""
        print(f"{value}  {trial.status:<9} {trial.name}{error}")
    if len(ranked) > MAX_PRINTED_TRIALS:
        print(f"           and {len(ranked) - MAX_PRINTED_TRIALS} more")
    print(
        f"Swept {pluralize(len(result.trials), 'trial')} of {grid.name} in "
        f"{result.seconds:.0f} s."
    )
    best = result.best
    incomplete = " (of an incomplete grid)" if result.failed_trials else ""
    print(f"  best        {best.name}: {grid.metric} {best.value:.4f}{incomplete}")
    print(f"  checkpoint  {best.checkpoint}")
    print(f"  MLflow run  {result.run.run_id} in {result.run.experiment}")
    print(f"  look at it  {tracking.view_command(result.run.uri)}")
    options = {"experiment": result.run.experiment}
    if config.smoke:
        options = {"sweep": result.name}
    compare = cli.command_line("jobs.compare", **options, tracking_uri=result.run.uri)
    print(f"  next        {compare}")


def print_trials(grid: Grid, trials: list[Trial]) -> None:
    """Print the points of the trials, and the paper's findings on the grid."""
    print(f"{grid.name}: {grid.source}")
    notes = [f"the paper: {finding}" for finding in grid.findings]
    if grid.notes:
        notes.append(f"note: {grid.notes}")
    for note in notes:
        print(f"  {' '.join(note.split())}")
    for trial in trials:
        print(
            f"  {trial.name}  "
            + "  ".join(f"{key} {value}" for key, value in trial.point.items())
        )
    size = pluralize(len(grid.list_points()), "point")
    print(
        f"{len(trials)} of {size}; metric {grid.metric}; scheduler "
        f"{grid.scheduler.name}"
    )


if __name__ == "__main__":
    cli.main(run)
