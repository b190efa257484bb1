"""What a sweep adds to the trainings in it.

    python -m benchmarks sweep --histories TABLES

`training` is the bare loop with its checkpoints, in this process; `sweep` the same as trials of a sweep, one at a time,
each with its MLflow run, process and bookkeeping; `trainer` a run of jobs.train, which has a `TorchTrainer` around
it. The overhead of a trial is (sweep - training) / trials; with one trial it holds all that a sweep does once.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Row, paired
from jobs import cli
from models import checkpoint
from models.fit import FitConfig, best_of, fit
from models.inputs import Inputs
from models.memory import resident_peak_mb
from models.setup import set_up
from models.tables import UserError
from models.uri import absolute
from pipelines.training.run import train
from pipelines.training.settings import RayOptions
from tuning import sweep as tuned
from tuning.grid import Grid
from tuning.trial import quiet

MODEL: dict[str, Any] = {"name": "sasrec", "dim": 64, "num_layers": 2}
FIT: dict[str, Any] = {"batch_size": 64, "max_epochs": 3, "patience": 0}
TRIALS = 4


def sweep(histories: str | None = None, runs: int = 5, threads: int = 2) -> Iterator[Row]:
    """Rows of `training`, `sweep` and `trainer` for one training, then of `training` and `sweep` for several."""
    if histories is None:
        raise UserError("the benchmark sweep trains on tables; give --histories with a folder that jobs.prepare made")
    tables = absolute(histories)
    cli.start_ray()
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        options = RayOptions(threads=threads)

        def bare(trials: int, run: int) -> None:
            for trial in range(trials):
                train_bare(tables, Path(folder) / f"bare-{trials}-{run}-{trial}", seed=trial)

        def swept(trials: int, run: int) -> None:
            grid = Grid(
                "bench", "a benchmark", base={"model": MODEL, "fit": FIT}, axes={"fit.seed": list(range(trials))}
            )
            tuned.sweep(
                grid, grid.trials(), inputs=Inputs(tables), storage=folder, name=f"sweep-{trials}-{run}",
                ray_options=options, options=tuned.Options(concurrency=1, test=False), say=quiet,
            )  # fmt: skip

        def trainer(run: int) -> None:
            train(
                model=MODEL, fit=FitConfig(**FIT), ray_options=options, inputs=Inputs(tables), storage=folder,
                name=f"trainer-{run}", log_model=False, say=quiet,
            )  # fmt: skip

        swept(1, -1)  # the first one makes the store
        for trials in (1, TRIALS):
            calls: dict[str, Callable[[int], Any]] = {
                "training": partial(bare, trials),
                "sweep": partial(swept, trials),
            }
            if trials == 1:
                calls["trainer"] = trainer
            params: Row = {"trials": trials, "threads": threads, "runs": runs, **MODEL, **FIT}
            memory = dict.fromkeys(calls, resident_peak_mb())
            rows = list(paired("sweep", calls, params, trials, memory))
            plain, ours = (next(row for row in rows if row["variant"] == name) for name in ("training", "sweep"))
            each = (ours["median_s"] - plain["median_s"]) / trials
            print(f"overhead of each of {trials} trials: {each:.2f} s above bare training", file=sys.stderr)
            yield from rows


def train_bare(tables: str, folder: Path, seed: int) -> None:
    """One training with nothing around it but its checkpoints."""
    setup = set_up(MODEL, FitConfig(**FIT, seed=seed), Inputs(tables))
    for event in fit(setup.model, setup.train, setup.validate, setup.fit, means=setup.means):
        if event.state:
            about = setup.checkpoint(
                epoch=event.epoch, step=event.step, metrics=event.metrics, best=best_of(event.state)
            )
            checkpoint.keep(str(folder), setup.model, about, event.state)
