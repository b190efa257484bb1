"""Runs that are killed at the places where MLflow and the folder disagree: one run per
name, and each point once.
"""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
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
from tests.fixtures.trainings import make_sweep, train
from tuning.grid import Grid
from tuning.options import Options
from tuning.sweep import run_sweep

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

import matplotlib.pyplot, mlflow.pyfunc, mlflow.store.tracking.sqlalchemy_store  # else each of the processes does it
import ray
from models.build import parse_options
from models.training.fit import FitConfig
from models.storage.inputs import Inputs
from pipelines.training.config import RayOptions, TrainConfig
from pipelines.training.run import TrialContext, run_training
from pipelines.training.settings import check_training
from tuning.grid import Grid
from tuning.options import Options, SweepConfig
from tuning.sweep import run_sweep

address, tables, storage, what, places, model, fit = sys.argv[1:]
model, fit = json.loads(model), json.loads(fit)


def kill_at(place, call):
    "The process kills itself just before that call of that function."
    module, _, path = place.partition(":")
    *parents, name = path.split(".")
    owner = importlib.import_module(module)
    for parent in parents:
        owner = getattr(owner, parent)
    function, left = getattr(owner, name), [call]

    def killed(*arguments, **options):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    setattr(owner, name, killed)


def start():
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    options = RayOptions(threads=1)
    if what == "run":
        config = TrainConfig(inputs=Inputs(tables), storage=storage, name="one", ray=options,
                             model=parse_options(model)[1], fit=FitConfig(**fit))
        in_process = TrialContext(on_checkpoint=lambda about: None, lock_timeout_s=600)
        run_training(check_training(config), trial=in_process)
    else:
        fixed = {f"{of}.{key}": value for of, some in (("model", model), ("fit", fit)) for key, value in some.items()}
        grid = Grid("g", "a test", fixed=fixed, axes={"fit.lr": [0.01]})
        config = SweepConfig(inputs=Inputs(tables), storage=storage, name="swept", ray=options,
                             options=Options(concurrency=1, test=False))
        run_sweep(grid, grid.trials(), config)


for place, call in json.loads(places):  # each start is a process of its own, forked to spare the imports
    child = os.fork()
    if child == 0:
        kill_at(place, call)
        start()
        os._exit(3)
    if os.waitpid(child, 0)[1] != signal.SIGKILL:
        sys.exit(f"it was not killed at {place}")
start()
"""


@pytest.fixture
def tables(small: tuple[str, str]) -> str:
    return small[0]


@pytest.fixture
def storage(tmp_path: Path, new_store: Callable[[Path], str]) -> Path:
    """A folder of runs with an MLflow store that has none."""
    new_store(tmp_path)
    return tmp_path


def start(tables: str, storage: Path, what: str, places: list[tuple[str, int]]) -> None:
    """Starts the same again and again, killed at one place after the other, and once to
    the end.
    """
    line = [
        sys.executable,
        "-c",
        DRIVER,
        ray.get_runtime_context().gcs_address,
        tables,
        str(storage),
        what,
    ]
    words = [json.dumps(places), json.dumps(MODEL), json.dumps(FIT)]
    done = subprocess.run([*line, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def points_once(storage: Path) -> dict[str, Counter[tuple[str, int]]]:
    """Of each run's name the points of its only run, each of which is there once."""
    client = tracking.connect(f"sqlite:///{storage}/mlflow.db")
    found: dict[str, Counter[tuple[str, int]]] = {}
    for run in client.search_runs(
        [e.experiment_id for e in client.search_experiments()]
    ):
        assert run.info.run_name not in found, f"two runs are named {run.info.run_name}"
        points = Counter(
            (key, point.step)
            for key in run.data.metrics
            for point in client.get_metric_history(run.info.run_id, key)
        )
        assert not [point for point, times in points.items() if times > 1]
        assert run.info.status == "FINISHED"
        found[str(run.info.run_name)] = points
    return found


def test_a_finished_run_goes_on_for_more_epochs(
    ray_local: None, tables: str, storage: Path
) -> None:
    lines: list[str] = []

    def trained(epochs: int, **fit: Any) -> TrainingResult:
        return train(
            model=MODEL,
            fit=FitConfig(**{**FIT, **fit, "max_epochs": epochs}),
            ray=RayOptions(threads=1),
            inputs=Inputs(tables),
            storage=str(storage),
            name="one",
            on_checkpoint=lambda about: None,
            say=lines.append,
        )

    first = trained(2)
    assert trained(2).was_finished
    with pytest.raises(UserError, match=r"was started with fit\.lr"):
        trained(4, lr=0.5)
    longer = trained(4)
    assert (longer.epochs, longer.best.epoch > 2, longer.run) == (4, True, first.run)
    assert any(line.startswith("note: one continues to epoch 4") for line in lines)
    found = tracking.connect(longer.run.uri).get_run(longer.run.run_id)
    assert (found.info.status, found.data.tags["fit.max_epochs"]) == ("FINISHED", "4")
    assert found.data.tags["model"]
    assert (
        load_rows(select(longer.run.uri, ["retrieval/small"]))[0].params[
            "fit.max_epochs"
        ]
        == "4"
    )
    last = checkpoint.last(f"{storage}/one")
    assert last
    curves = tracking.read_curves(f"{storage}/one/{last.folder}")
    ends = [step for step, *_ in curves["epoch"]]
    assert (
        sorted(step for name, step in points_once(storage)["one"] if name == "epoch")
        == ends
    )
    with pytest.raises(UserError, match=r"was started with fit\.max_epochs 4, not 3"):
        trained(3)


def test_a_run_has_each_point_once_wherever_it_was_killed(
    ray_local: None, tables: str, storage: Path
) -> None:
    places = [
        ("mlflow:MlflowClient.log_batch", 1),  # the run is made, its params are not
        (
            "pipelines.training.run:write_record",
            2,
        ),  # all of it, but run.json does not name it
        (
            "models.storage.checkpoint:save",
            1,
        ),  # steps are logged, and no checkpoint is there to go on from
        (
            "pipelines.serving.package:log_model",
            1,
        ),  # what the best checkpoint measured is logged
        (
            "pipelines.training.run:write_record",
            1,
        ),  # all is done but for run.json, which says running
    ]
    start(tables, storage, "run", places)
    points = points_once(storage)
    assert set(points) == {"one"}
    assert sum(key == "val/ndcg_at_10" for key, _ in points["one"]) == FIT["max_epochs"]
    assert sum(key == "best/epoch" for key, _ in points["one"]) == 1


def test_a_sweep_has_one_run_wherever_its_driver_was_killed(
    ray_local: None, tables: str, storage: Path
) -> None:
    places = [
        (
            "mlflow:MlflowClient.log_batch",
            1,
        ),  # the sweep's run is made, its params are not
        ("tuning.sweep:finish_sweep", 1),  # its trial is done, and nothing said of it
        ("pipelines.tracking:Logger.end", 1),  # all is logged, and its run goes on
    ]
    start(tables, storage, "sweep", places)
    points = points_once(storage)
    assert len(points) == 2
    assert ("best/ndcg_at_10", 1) in points["swept"]


def once_logged(storage: Path, kill: Callable[[], None]) -> threading.Thread:
    """Kills once when the first training step is in the store."""

    def watch() -> None:
        while True:
            try:
                with sqlite3.connect(
                    f"file:{storage}/mlflow.db?mode=ro", uri=True
                ) as store:
                    if store.execute(
                        "SELECT 1 FROM metrics WHERE key = 'train/loss'"
                    ).fetchone():
                        return kill()
            except sqlite3.OperationalError:  # not there yet
                pass
            time.sleep(0.01)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def kill_process(named: str) -> None:
    """SIGKILL to the newest process of Ray's that runs under this name."""
    there = [
        p
        for p in psutil.Process().children(recursive=True)
        if p.name().startswith(named)
    ]
    max(there, key=lambda process: process.create_time()).send_signal(signal.SIGKILL)


def test_a_trial_lost_before_its_first_checkpoint_logs_nothing_twice(
    ray_local: None, tables: str, storage: Path
) -> None:
    watch = once_logged(storage, lambda: kill_process("ray::ImplicitFu"))
    fixed = {
        f"{of}.{key}": value
        for of, options in (("model", MODEL), ("fit", FIT))
        for key, value in options.items()
    }
    grid = Grid("g", "a test", fixed=fixed, axes={"fit.lr": [0.01]})
    config = make_sweep(
        inputs=Inputs(tables),
        storage=str(storage),
        name="swept",
        ray=RayOptions(threads=1),
        options=Options(concurrency=1, test=False),
    )
    swept = run_sweep(grid, grid.trials(), config)
    watch.join()
    assert [outcome.status for outcome in swept.trials] == ["finished"]
    assert len(points_once(storage)) == 2
