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

import time
from typing import TYPE_CHECKING

from core.errors import UserError, pluralize
from jobs import cli
from pipelines.start import start_ray
from tuning.grid import SweepConfig

if TYPE_CHECKING:
    import polars as pl

    from core.schemas import RunRef
    from tuning.grid import Sweep

Config = SweepConfig

MAX_PRINTED_TRIALS = 20
"""Largest number of trials that are printed."""


def run(config: SweepConfig) -> pl.DataFrame | None:
    """Run the sweep and print its result; with `--dry_run`, only print the trials."""
    from tuning.grid import load_sweep
    from tuning.sweep import run_sweep

    began = time.monotonic()
    sweep = load_sweep(config)
    if config.dry_run:
        print_trials(sweep)
        return None

    def start() -> None:
        cli.preflight(config)
        start_ray()

    mlflow_run, results = run_sweep(sweep, start)
    print_results(sweep, mlflow_run, results)
    print(
        f"Swept {pluralize(len(results), 'trial')} of {sweep.grid.name} in "
        f"{time.monotonic() - began:.0f} s."
    )
    missing = results.filter(results["value"].is_null())
    if len(missing):
        raise UserError(
            f"{len(missing)} of {pluralize(len(results), 'trial')} failed "
            f"({missing['name'][0]}: {missing['error'][0]}), so the best trial is the "
            f"best of an incomplete grid"
        )
    return results


def print_results(sweep: Sweep, mlflow_run: RunRef, results: pl.DataFrame) -> None:
    """Print the ranked trials of a sweep, the best trial, and the next command."""
    from models.metrics.ranking_metrics import format_metric
    from pipelines import tracking
    from tuning.sweep import find_best

    ranked = results.sort("value", descending=True, nulls_last=True)
    for trial in ranked[:MAX_PRINTED_TRIALS].iter_rows(named=True):
        error = f"  ({trial['error']})" if trial["error"] else ""
        value = format_metric(trial["value"])
        print(f"{value:>9}  {trial['status']:<10} {trial['name']}{error}")
    if len(ranked) > MAX_PRINTED_TRIALS:
        print(f"           and {len(ranked) - MAX_PRINTED_TRIALS} more")
    if best := find_best(results):
        print(
            f"  best        {best.name}: {sweep.grid.metric} {best.value:.4f}\n"
            f"  checkpoint  {best.checkpoint}"
        )
    options = {"experiment": mlflow_run.experiment}
    if sweep.config.smoke:
        options = {"sweep": sweep.config.name}
    compare = cli.command_line("jobs.compare", **options, tracking_uri=mlflow_run.uri)
    print(
        f"  MLflow run  {mlflow_run.run_id} in {mlflow_run.experiment}\n"
        f"  look at it  {tracking.view_command(mlflow_run.uri)}\n"
        f"  next        {compare}"
    )


def print_trials(sweep: Sweep) -> None:
    """Print the points of the trials, and the paper's findings on the grid."""
    grid = sweep.grid
    print(f"{grid.name}: {grid.source}")
    notes = [f"the paper: {finding}" for finding in grid.findings]
    if grid.notes:
        notes.append(f"note: {grid.notes}")
    for note in notes:
        print(f"  {' '.join(note.split())}")
    for name, point in sweep.points.items():
        values = [f"{key} {value}" for key, value in point.items()]
        print(f"  {name}  {'  '.join(values)}")
    size = pluralize(len(grid.list_points()), "point")
    print(
        f"{len(sweep.trials)} of {size}; metric {grid.metric}; scheduler "
        f"{grid.scheduler.name}"
    )


if __name__ == "__main__":
    cli.main(run)
