"""Sweep over a documented grid: every trial is a training run of its own, beside the others in MLflow.

    python -m jobs.sweep --grid tuning/grids/sid_mlp_alpha.yaml --tables TABLES --sids SIDS --storage runs \\
        --name alpha --model.teacher runs/tiger

Any setting of all trials can be given as --model.KEY or --fit.KEY, other values of an axis as --axes.KEY '[A, B]';
--axes.fit.seed '[42, 43, 44]' repeats any grid over seeds.
--smoke takes the grid's variant of about a minute, --dry-run prints the trials. The same line again finds what is
finished and goes on with the rest, trials that failed too; with failed trials the command ends with exit code 1. Pass
the folder of a finished sweep to use its best trial, as in --model.encoder runs/STAGE_1.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from jobs import cli
from models.config import naming, pluralize
from models.storage.input_folders import require_folders
from models.storage.inputs import Inputs
from models.storage.tables import UserError
from models.storage.uri import check_writable
from pipelines.training.ray_options import FEWER, RayOptions
from tuning.options import Options

if TYPE_CHECKING:
    from tuning.grid import Grid, Trial
    from tuning.sweep import Swept

TRAINED = ("model.teacher", "model.encoder", "checkpoint")
"""Settings that name a trained model, and so can name a sweep."""


@dataclass
class Config:
    """Options."""

    grid: str
    """Grid file, such as tuning/grids/sid_mlp_alpha.yaml."""
    tables: str | None = None
    """TABLES: the folder that jobs.prepare made."""
    storage: str | None = None
    """Folder for all runs: checkpoints, and MLflow's SQLite store where no other is named."""
    name: str | None = None
    """Name of this sweep; by default that of the grid."""
    sids: str | None = None
    """SIDS: the folder that jobs.tokenize made, for models that use semantic IDs."""
    text: str | None = None
    """TEXT: the folder that jobs.encode made, for search models; models of actions can do without."""
    smoke: bool = False
    """Take the grid's small variant, whose trials the tables of the experiment leave out."""
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
    """MLflow; by default MLFLOW_TRACKING_URI, else a SQLite file in the storage folder."""
    experiment: str | None = None
    """MLflow experiment; by default family/dataset."""

    def __post_init__(self) -> None:
        if self.dry_run:
            return
        for name in ("tables", "storage"):
            if getattr(self, name) is None:
                raise ValueError(f"--{name} is not given; only --dry_run does without")


def read(config: Config) -> tuple[Grid, list[Trial]]:
    """The grid with what the command line says, and its trials."""
    from tuning.grid import load
    from tuning.sweep import best_trial

    axes = dict(config.axes)
    for key in TRAINED:
        if key in axes:
            axes[key] = [best_trial(value) for value in axes[key]]
    grid = load(config.grid).varied(config.smoke, axes)
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
            sets[key] = best_trial(sets[key])
    trials = grid.trials(sets)
    if (
        config.storage
        and not config.dry_run
        and all(takes_cache(trial.model) for trial in trials)
    ):
        trials = grid.trials(
            {
                **sets,
                "model.teacher_cache": f"{config.storage.rstrip('/')}/teacher_cache",
            }
        )
    return grid, trials


def takes_cache(model: dict[str, Any]) -> bool:
    """Whether the model can keep what its teacher says, for all trials, and is not told otherwise."""
    from models import registry

    kind: Any = registry.find(str(model["name"])).config_class if model else None
    if kind is None or "teacher_cache" not in naming(kind, "folder"):
        return False
    return kind.has_fixed_outputs and not (
        model.get("teacher_cache") or model.get("end_to_end")
    )


def run(config: Config) -> Swept | None:
    """Runs the sweep and prints its outcome, or the trials alone."""
    cli.say_loading("torch", "ray", "mlflow")
    from pipelines import tracking
    from tuning.sweep import sweep

    grid, trials = read(config)
    if config.dry_run:
        show(grid, trials)
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

    swept = sweep(
        grid,
        trials,
        inputs=Inputs(str(config.tables), config.sids, config.text),
        storage=str(config.storage),
        name=config.name or grid.name,
        ray_options=config.ray,
        options=config.options,
        tracking_uri=config.tracking_uri,
        experiment=config.experiment,
        command=" ".join(["python -m jobs.sweep", *sys.argv[1:]]),
        smoke=config.smoke,
        say=partial(print, flush=True),
        start=start,
    )
    ranked = sorted(
        swept.outcomes,
        key=lambda o: -math.inf if o.value is None else o.value,
        reverse=True,
    )
    for found in ranked[:20]:
        value = "        -" if found.value is None else f"{found.value:9.4f}"
        print(
            f"{value}  {found.status:<9} {found.name}"
            + (f"  ({found.error})" if found.error else "")
        )
    if len(ranked) > 20:
        print(f"           and {len(ranked) - 20} more in trials.json")
    print(
        f"Swept {pluralize(len(trials), 'trial')} of {grid.name} in {swept.seconds:.0f} s."
    )
    incomplete = " (of an incomplete grid)" if swept.failed else ""
    print(
        f"  best        {swept.best.name}: {grid.metric} {swept.best.value:.4f}{incomplete}"
    )
    print(f"  checkpoint  {swept.best.checkpoint}")
    print(f"  MLflow run  {swept.run.run_id} in {swept.run.experiment}")
    print(f"  look at it  {tracking.viewer(swept.run.uri)}")
    shown = (
        {"sweep": swept.name} if config.smoke else {"experiment": swept.run.experiment}
    )
    compare = cli.line("jobs.compare", **shown, tracking_uri=swept.run.uri)
    print(f"  next        {compare}")
    if failed := swept.failed:
        raise UserError(
            f"{len(failed)} of {pluralize(len(trials), 'trial')} failed ({failed[0].name}: {failed[0].error}), so the "
            f"best is of an incomplete grid; mend what failed, then the same line does only that"
        )
    return swept


def show(grid: Grid, trials: list[Trial]) -> None:
    """Prints the trials, and what the paper found with them."""
    print(f"{grid.name}: {grid.source}")
    for said in [
        *(f"the paper: {line}" for line in grid.findings),
        *([f"here: {grid.notes}"] if grid.notes else []),
    ]:
        print(f"  {' '.join(said.split())}")
    for trial in trials:
        print(
            f"  {trial.name}  "
            + "  ".join(f"{key} {value}" for key, value in trial.point.items())
        )
    size = pluralize(len(grid.all_points()), "point")
    print(
        f"{len(trials)} of {size}; metric {grid.metric}; scheduler {grid.scheduler.name}"
    )


if __name__ == "__main__":
    cli.main(run, Config)
