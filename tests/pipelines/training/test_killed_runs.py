"""Test that a run killed between its writes has one MLflow run and each point once.

The kills come where the MLflow store and the folder of the run disagree.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import UserError
from models.training.fit import FitConfig
from pipelines import tracking
from pipelines.comparison.load import load_rows
from pipelines.comparison.runs import select
from pipelines.training.config import RayOptions
from pipelines.training.run import TrainingResult
from tests.fixtures.trainings import train

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).parents[3]
MODEL = {
    "name": "sasrec",
    "dim": 16,
    "num_layers": 1,
    "dropout": 0.0,
    "max_history": 12,
}
FIT = {"batch_size": 8, "max_epochs": 2, "log_every_steps": 2, "patience": 0, "seed": 3}

DRIVER = """
import importlib, json, os, signal, sys

import matplotlib.pyplot, mlflow.pyfunc, mlflow.store.tracking.sqlalchemy_store  # imported once, before the forks
import ray
from models.build import parse_options
from models.training.fit import FitConfig
from models.storage.inputs import Inputs
from pipelines.training.config import RayOptions, TrainConfig
from pipelines.training.run import TrialContext, run_training
from pipelines.training.settings import check_training
from tuning.grid import Grid, flatten_sections
from tuning.options import Options, SweepConfig
from tuning.sweep import run_sweep

address, tables, storage, job, kills, model, fit = sys.argv[1:]
model, fit = json.loads(model), json.loads(fit)


def kill_before(function_path, call):
    "Let this process kill itself just before a call, counted from 1, of a function."
    module, _, path = function_path.partition(":")
    *parents, name = path.split(".")
    owner = importlib.import_module(module)
    for parent in parents:
        owner = getattr(owner, parent)
    function = getattr(owner, name)
    calls_left = [call]

    def kill_or_call(*arguments, **options):
        calls_left[0] -= 1
        if calls_left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    setattr(owner, name, kill_or_call)


def start():
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    options = RayOptions(threads=1)
    if job == "run":
        config = TrainConfig(inputs=Inputs(tables), storage=storage, name="one", ray=options,
                             model=parse_options(model)[1], fit=FitConfig(**fit))
        in_process = TrialContext(on_checkpoint=lambda saved: None, lock_timeout_s=600)
        run_training(check_training(config), trial=in_process)
    else:
        fixed = flatten_sections({"model": model, "fit": fit})
        grid = Grid("g", "a test", fixed=fixed, axes={"fit.lr": [0.01]})
        config = SweepConfig(inputs=Inputs(tables), storage=storage, name="swept", ray=options,
                             options=Options(concurrency=1, test=False))
        run_sweep(grid, grid.trials(), config)


for function_path, call in json.loads(kills):  # each start is a fork, which saves the imports
    child = os.fork()
    if child == 0:
        kill_before(function_path, call)
        start()
        os._exit(3)
    if os.waitpid(child, 0)[1] != signal.SIGKILL:
        sys.exit(f"it was not killed at {function_path}")
start()
"""


@pytest.fixture
def tables(small: tuple[str, str]) -> str:
    """Return the folder of the tables of the data set `small`."""
    return small[0]


@pytest.fixture
def storage(tmp_path: Path, new_store: Callable[[Path], str]) -> Path:
    """Create a folder for runs with an empty MLflow store."""
    new_store(tmp_path)
    return tmp_path


def run_with_kills(
    tables: str, storage: Path, job: str, kills: list[tuple[str, int]]
) -> None:
    """Start a job once per kill, and once more to its end.

    Args:
        tables: Folder of the tables.
        storage: Folder of the runs.
        job: `run` or `sweep`.
        kills: Functions and the number of the call before which the job is killed.
    """
    command = [
        sys.executable,
        "-c",
        DRIVER,
        ray.get_runtime_context().gcs_address,
        tables,
        str(storage),
        job,
        json.dumps(kills),
        json.dumps(MODEL),
        json.dumps(FIT),
    ]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr


def read_points(storage: Path) -> dict[str, set[tuple[str, int]]]:
    """Return the points (metric, step) of each MLflow run, by the run's name.

    Check that each name has one run, which is finished, and each point is logged once.
    """
    client = tracking.connect(f"sqlite:///{storage}/mlflow.db")
    experiments = [
        experiment.experiment_id for experiment in client.search_experiments()
    ]
    points_by_run: dict[str, set[tuple[str, int]]] = {}
    for run in client.search_runs(experiments):
        name = str(run.info.run_name)
        assert name not in points_by_run, f"two runs are named {name}"
        assert run.info.status == "FINISHED"
        points_by_run[name] = set()
        for metric in run.data.metrics:
            history = client.get_metric_history(run.info.run_id, metric)
            steps = [point.step for point in history]
            assert len(steps) == len(set(steps)), f"{name} has {metric} twice at a step"
            points_by_run[name] |= {(metric, step) for step in steps}
    return points_by_run


def test_a_finished_run_continues_for_more_epochs(
    ray_local: None, tables: str, storage: Path
) -> None:
    lines: list[str] = []

    def train_epochs(epochs: int, **fit: Any) -> TrainingResult:
        return train(
            model=MODEL,
            fit=FitConfig(**{**FIT, **fit, "max_epochs": epochs}),
            ray=RayOptions(threads=1),
            inputs=Inputs(tables),
            storage=str(storage),
            name="one",
            on_checkpoint=lambda saved: None,
            say=lines.append,
        )

    first = train_epochs(2)
    assert train_epochs(2).was_finished
    with pytest.raises(UserError, match=r"was started with fit\.lr"):
        train_epochs(4, lr=0.5)

    longer = train_epochs(4)

    assert longer.epochs == 4
    assert longer.best.epoch > 2
    assert longer.run == first.run
    assert any(line.startswith("note: one continues to epoch 4") for line in lines)
    run = tracking.connect(longer.run.uri).get_run(longer.run.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.tags["fit.max_epochs"] == "4"
    assert run.data.tags["model"]
    (row, *_) = load_rows(select(longer.run.uri, ["retrieval/small"]))
    assert row.params["fit.max_epochs"] == "4"

    last = checkpoint.last(f"{storage}/one")
    assert last
    curves = tracking.read_curves(f"{storage}/one/{last.folder}")
    epoch_ends = [step for step, *_ in curves["epoch"]]
    points = read_points(storage)["one"]
    assert sorted(step for name, step in points if name == "epoch") == epoch_ends
    with pytest.raises(UserError, match=r"was started with fit\.max_epochs 4, not 3"):
        train_epochs(3)


def test_a_killed_run_logs_each_point_once(
    ray_local: None, tables: str, storage: Path
) -> None:
    kills = [
        # The MLflow run exists, without its params.
        ("mlflow:MlflowClient.log_batch", 1),
        # The MLflow run is complete, and run.json does not name it.
        ("pipelines.training.run:write_record", 2),
        # Steps are logged, and there is no checkpoint to continue from.
        ("models.storage.checkpoint:save", 1),
        # The metrics of the best checkpoint are logged.
        ("pipelines.serving.package:log_model", 1),
        # Everything is written, and run.json still says running.
        ("pipelines.training.run:write_record", 1),
    ]

    run_with_kills(tables, storage, "run", kills)

    points = read_points(storage)
    assert set(points) == {"one"}
    metrics = [metric for metric, _ in points["one"]]
    assert metrics.count("val/ndcg_at_10") == FIT["max_epochs"]
    assert metrics.count("best/epoch") == 1


def test_a_sweep_with_killed_drivers_has_one_run(
    ray_local: None, tables: str, storage: Path
) -> None:
    kills = [
        # The sweep's MLflow run exists, without its params.
        ("mlflow:MlflowClient.log_batch", 1),
        # The trial is finished, and not yet recorded in the sweep.
        ("tuning.sweep:finish_sweep", 1),
        # Everything is logged, and the MLflow run is not ended.
        ("pipelines.tracking:Logger.end", 1),
    ]

    run_with_kills(tables, storage, "sweep", kills)

    points = read_points(storage)
    assert len(points) == 2
    assert ("best/ndcg_at_10", 1) in points["swept"]
