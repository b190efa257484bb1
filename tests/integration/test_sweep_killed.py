"""Test that a sweep whose driver was killed continues like an undisturbed sweep."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from jobs import cli
from jobs import sweep as job
from models.storage.inputs import Inputs
from models.training.fit import FitConfig, fit
from pipelines import tracking
from tests.fixtures.trainings import build_training
from tuning.grid import Scheduler, flatten_sections
from tuning.halving import make_scheduler
from tuning.trial import EPOCH, TRIAL, VALUE

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).parents[2]
MODEL = {
    "name": "sasrec",
    "dim": 16,
    "num_layers": 1,
    "dropout": 0.0,
    "max_history": 12,
}
FIT: dict[str, Any] = {
    "batch_size": 16,
    "max_epochs": 6,
    "log_every_steps": 2,
    "patience": 0,
    "seed": 3,
}
RATES = [0.03, 0.01, 0.001]
ASHA: dict[str, Any] = {"name": "asha", "grace": 3, "reduction": 2}


def train_undisturbed(tables: str, lr: float) -> list[float]:
    """Return the validation metric of an undisturbed training by epoch."""
    config = FitConfig(**FIT, lr=lr)
    setup = build_training(MODEL, config, Inputs(tables))
    events = fit(setup.model, setup.train, setup.validate, config, means=setup.means)
    return [event.metrics["ndcg@10"] for event in events if event.metrics]


def sweep_undisturbed(tables: str) -> dict[float, list[float]]:
    """Return the validation metrics of each epoch until a trial is stopped, by lr.

    One trial runs after the other.
    """
    halving: Any = make_scheduler(Scheduler(**ASHA), FIT["max_epochs"])
    values_by_lr: dict[float, list[float]] = {}
    for lr in RATES:
        values_by_lr[lr] = []
        trial = SimpleNamespace(config={TRIAL: str(lr)})
        halving.on_trial_add(None, trial)
        for epoch, value in enumerate(train_undisturbed(tables, lr), 1):
            values_by_lr[lr].append(value)
            result = {EPOCH: epoch, VALUE: value}
            if halving.on_trial_result(None, trial, result) == "STOP":
                break
    return values_by_lr


def list_finished_trials(folder: Path) -> list[Path]:
    """Return the folders of the finished trials."""
    return [
        path.parent
        for path in folder.glob("*/run.json")
        if '"status": "finished"' in path.read_text()
    ]


def read_change_times(folders: list[Path]) -> dict[Path, int]:
    """Return the time of change of all files below the folders."""
    paths = [path for folder in folders for path in folder.rglob("*")]
    return {path: path.stat().st_mtime_ns for path in paths}


def kill_in_second_trial(driver: subprocess.Popen[str], folder: Path) -> None:
    """Kill a sweep's driver when a trial is finished and the next one has begun."""
    num_started = 0
    while not list_finished_trials(folder) or num_started < 2:
        assert driver.poll() is None, driver.stderr.read()  # type: ignore[union-attr]
        time.sleep(0.02)
        num_started = len({path.parent for path in folder.glob("*/step-*")})
    driver.send_signal(signal.SIGKILL)
    driver.communicate()


def test_a_killed_sweep_continues_where_it_was(
    in_ray: dict[str, str],
    small: tuple[str, str],
    new_store: Callable[[Path], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tables, _ = small
    store = new_store(tmp_path / "runs")
    grid = {
        "source": "a test",
        "fixed": flatten_sections({"model": MODEL, "fit": FIT}),
        "axes": {"fit.lr": RATES},
        "scheduler": ASHA,
    }
    (tmp_path / "rates.yaml").write_text(yaml.safe_dump(grid))
    words = [
        "--grid",
        str(tmp_path / "rates.yaml"),
        "--tables",
        tables,
        "--storage",
        str(tmp_path / "runs"),
        "--options.concurrency",
        "1",
        "--options.test",
        "false",
    ]
    folder = tmp_path / "runs/rates"
    driver = subprocess.Popen(
        [sys.executable, "-m", "jobs.sweep", *words],
        cwd=ROOT,
        env=in_ray,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    kill_in_second_trial(driver, folder)
    finished = list_finished_trials(folder)
    change_times = read_change_times(finished)

    job.run(cli.config_from_words(job, words))

    assert re.search(r"3 trials of rates, [12] done before", capsys.readouterr().out)
    assert read_change_times(finished) == change_times
    client = tracking.connect(store)
    experiment = client.get_experiment_by_name("retrieval/small")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    trials = [run for run in runs if run.data.tags["trieline.kind"] == "trial"]
    (parent,) = [run for run in runs if run.data.tags["trieline.kind"] == "sweep"]
    assert len(trials) == len(RATES)  # none lost, none run twice
    expected = sweep_undisturbed(tables)
    assert [len(expected[lr]) for lr in RATES] == [6, 3, 3]
    for run in trials:
        assert run.info.status == "FINISHED"
        lr = json.loads(run.data.tags["sweep.point"])["fit.lr"]
        history = client.get_metric_history(run.info.run_id, "val/ndcg_at_10")
        history = sorted(history, key=lambda point: point.step)
        values = [point.value for point in history]
        # Every epoch is logged once, and no epoch is missing or added.
        assert values == pytest.approx(expected[lr], abs=1e-6), lr
    best_lr = max(RATES, key=lambda lr: max(expected[lr]))
    best_run = client.get_run(parent.data.tags["sweep.best"])
    assert json.loads(best_run.data.tags["sweep.point"]) == {"fit.lr": best_lr}
    assert parent.info.status == "FINISHED"
