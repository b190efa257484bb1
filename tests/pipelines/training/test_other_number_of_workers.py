"""Test that a run begun by two workers and continued by one has undisturbed weights.

The two workers are lost together, and the single worker that continues is lost twice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from ray.train import TrainingFailedError
from safetensors.torch import load_file

from core.schemas import Inputs
from models.training import checkpoint
from models.training.fit_config import FitConfig
from pipelines import tracking
from pipelines.faults import explain
from pipelines.training.config import RayOptions
from pipelines.training.run import TrainingResult
from tests.fixtures.training_tables import write_tables
from tests.fixtures.trainings import train

pytestmark = pytest.mark.exhaustive

MODEL = {
    "name": "sasrec",
    "dim": 16,
    "num_layers": 1,
    "dropout": 0.0,
    "max_history": 6,
}
"""A model that draws no random numbers and takes no negatives from its batch."""

FIT = {
    "batch_size": 16,
    "max_epochs": 15,
    "lr": 0.003,
    "patience": 0,
    "seed": 3,
    "log_every_steps": 2,
    "checkpoint_every_steps": 8,
    "eval_examples": 31,
}


def find_newest_step(folder: Path) -> int:
    """Return the step of the run's newest complete checkpoint, or 0."""
    configs = folder.glob(f"step-*/{checkpoint.CONFIG}")
    return max((int(config.parent.name[5:13]) for config in configs), default=0)


def find_same_step(folder: Path, other: Path) -> Path:
    """Return the run's checkpoint at the step of another run's checkpoint."""
    (same_step,) = folder.glob(f"{other.name[:13]}*")
    return same_step


def kill_workers(
    folder: Path, count: int, first_step: int, times: int = 1
) -> threading.Thread:
    """Kill Ray's newest training workers in a thread.

    Args:
        folder: Folder of the run.
        count: Number of workers to kill at a time.
        first_step: Step of the checkpoint after which workers are killed.
        times: Number of kills; each further one follows a newer checkpoint.
    """

    def watch() -> None:
        step = first_step
        for _ in range(times):
            while find_newest_step(folder) < step:
                time.sleep(0.02)
            workers = [
                process
                for process in psutil.Process().children(recursive=True)
                if process.name().startswith("ray::RayTrainWo")
            ]
            workers.sort(key=lambda process: process.create_time())
            for worker in workers[-count:]:
                worker.kill()
            step = find_newest_step(folder) + 1

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def check_same_weights(run: Path, expected_run: Path, last: Path) -> None:
    """Check that two runs have the same weights at a step, up to the order of sums."""
    tensors, expected = (
        load_file(find_same_step(folder, last) / "model.safetensors")
        for folder in (run, expected_run)
    )
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(tensors[name], value, rtol=1e-3, atol=1e-4)


@dataclass
class Trainings:
    """Trainings of one model with any number of workers."""

    model: dict[str, Any]
    fit: FitConfig
    inputs: Inputs
    storage: Path
    lines: list[str] = field(default_factory=list)
    """Output of the trainings."""

    def train(
        self, name: str, workers: int, failures: int = 0, **options: Any
    ) -> TrainingResult:
        """Train or continue the run `name`, with so many failures allowed."""
        ray_options = RayOptions(
            num_workers=workers, threads=1, cpus_per_worker=0.5, max_failures=failures
        )
        return train(
            model=self.model,
            fit=self.fit,
            ray=ray_options,
            inputs=self.inputs,
            storage=str(self.storage),
            name=name,
            log_model=False,
            say=self.lines.append,
            **options,
        )

    def train_in_process(self, name: str) -> TrainingResult:
        """Train or continue the run `name` in this process, which starts faster."""
        return self.train(name, 1, on_checkpoint=lambda saved: None)


def lose_both_ray_workers(trainings: Trainings, first_step: int) -> None:
    """Train the run `cut` with two Ray workers until they are killed."""
    killing = kill_workers(trainings.storage / "cut", 2, first_step)
    with pytest.raises(TrainingFailedError) as error:
        trainings.train("cut", 2)
    killing.join()
    assert explain(error.value) or "gloo" in str(error.value)


def continue_with_a_worker_lost_twice(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch
) -> TrainingResult:
    """Continue the run `cut` with one Ray worker that is killed twice."""
    # On a cluster, a single worker is Ray's too.
    monkeypatch.setenv("RAY_ADDRESS", "local")
    folder = trainings.storage / "cut"
    killing = kill_workers(folder, 1, find_newest_step(folder) + 1, times=2)
    result = trainings.train("cut", 1, failures=2)
    killing.join()
    notes = [line for line in trainings.lines if "a worker is lost" in line]
    assert len(notes) == 2
    return result


def test_a_run_killed_with_two_workers_and_continued_by_one_has_the_same_weights(
    ray_local: None,
    new_store: Callable[[Path], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = Inputs(write_tables(tmp_path / "made", parts=6)[0])
    storage = tmp_path / "runs"
    store = new_store(storage)
    trainings = Trainings(MODEL, FitConfig(**FIT), inputs, storage)
    undisturbed = trainings.train_in_process("whole")
    last = max((storage / "whole").glob("step-*"))
    steps_per_epoch = checkpoint.read(str(last)).step // trainings.fit.max_epochs
    kill_step = steps_per_epoch + 1  # in the second epoch

    lose_both_ray_workers(trainings, kill_step)
    assert find_newest_step(storage / "cut") >= kill_step
    assert find_newest_step(storage / "cut") < find_newest_step(storage / "whole")

    trainings.lines.clear()
    continued = continue_with_a_worker_lost_twice(trainings, monkeypatch)

    assert any("1 worker on" in line for line in trainings.lines)
    assert any("continuing " in line for line in trainings.lines)
    assert continued.best.step == undisturbed.best.step
    assert continued.best.metrics == pytest.approx(
        undisturbed.best.metrics, rel=1e-3, abs=1e-4
    )
    check_same_weights(storage / "cut", storage / "whole", last)

    client = tracking.connect(store)
    experiment = client.get_run(continued.run.run_id).info.experiment_id
    runs = client.search_runs([experiment])
    (run,) = [run for run in runs if run.info.run_name == "cut"]
    assert run.info.status == "FINISHED"
    # Steps that were lost before the first checkpoint are not logged twice either.
    for metric in run.data.metrics:
        history = client.get_metric_history(run.info.run_id, metric)
        steps = [point.step for point in history]
        assert len(steps) == len(set(steps)), metric
