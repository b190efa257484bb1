"""Test that a worker which resumes after it was given up changes nothing in its run."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import UserError
from models.training.fit import FitConfig
from pipelines import tracking
from pipelines.training import run as runs
from pipelines.training.config import RayOptions
from pipelines.training.run import TrainingResult
from pipelines.training.worker import Task, WorkerContext, run_task
from tests.fixtures.trainings import train

pytestmark = [pytest.mark.long, pytest.mark.exhaustive]

MODEL = {
    "name": "sasrec",
    "dim": 16,
    "num_layers": 1,
    "dropout": 0.0,
    "max_history": 12,
}
FIT = {"batch_size": 8, "max_epochs": 6, "log_every_steps": 2, "patience": 0, "seed": 3}


def run_worker(
    task: Task, outcomes: Queue[str], has_reported: Any, resume: Path
) -> None:
    """Train as a Ray worker does, without a lock; put the outcome into the queue.

    After its first checkpoint the worker waits for the file `resume`, so that it cannot
    end before it is paused.
    """

    def report(saved: checkpoint.Checkpoint) -> None:
        has_reported.set()
        while not resume.exists():
            time.sleep(0.01)

    worker = WorkerContext(0, 1, torch.device("cpu"), 1, report, lambda line: None)
    try:
        run_task(task, worker)
    except UserError as error:
        outcomes.put(str(error))
    else:
        outcomes.put("trained to the end")


def is_locked(store: Path) -> bool:
    """Return whether a process that may be paused holds the lock of the SQLite file."""
    with closing(sqlite3.connect(store, timeout=0)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return True
        connection.rollback()
        return False


def count_points(run: tracking.RunRef) -> Counter[tuple[str, int]]:
    """Count how often MLflow has each point (metric, step) of a run."""
    client = tracking.connect(run.uri)
    counts: Counter[tuple[str, int]] = Counter()
    for metric in client.get_run(run.run_id).data.metrics:
        if not metric.startswith("system/"):
            history = client.get_metric_history(run.run_id, metric)
            counts.update((metric, point.step) for point in history)
    return counts


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the content of all files below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def train_small(tables: str, storage: Path, name: str) -> TrainingResult:
    """Train a small SASRec in this process."""
    return train(
        model=MODEL,
        fit=FitConfig(**FIT),
        ray=RayOptions(threads=1),
        inputs=Inputs(tables),
        storage=str(storage),
        name=name,
        log_model=False,
        say=lambda line: None,
        on_checkpoint=lambda saved: None,
    )


def test_a_paused_worker_that_resumes_changes_nothing(
    small: tuple[str, str],
    tmp_path: Path,
    new_store: Callable[[Path], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    new_store(tmp_path)
    context = multiprocessing.get_context("forkserver")
    outcomes: Queue[str] = context.Queue()
    has_reported = context.Event()
    resume = tmp_path / "resume"
    workers = []

    def pause_worker(task: Task, worker: WorkerContext) -> None:
        """Train in another process, and give it up after its first checkpoint."""
        process = context.Process(
            target=run_worker, args=(task, outcomes, has_reported, resume)
        )
        process.start()
        workers.append(process)
        assert has_reported.wait(600)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        while is_locked(tmp_path / "mlflow.db"):
            os.kill(process.pid, signal.SIGCONT)
            time.sleep(0.05)
            os.kill(process.pid, signal.SIGSTOP)
        raise RuntimeError("the worker is lost")

    with monkeypatch.context() as patch:
        patch.setattr(runs, "run_task", pause_worker)
        with pytest.raises(RuntimeError, match="the worker is lost"):
            train_small(small[0], tmp_path, "one")
    continued = train_small(small[0], tmp_path, "one")
    files = read_files(tmp_path / "one")
    points = count_points(continued.run)

    (process,) = workers
    assert process.pid is not None
    resume.touch()
    os.kill(process.pid, signal.SIGCONT)
    outcome = outcomes.get(timeout=600)
    process.join()

    assert "attempt 2.1 trains the run in" in outcome
    assert "so attempt 1.1 ends without changing it" in outcome
    files_after = read_files(tmp_path / "one")
    assert files.items() <= files_after.items()
    new_files = files_after.keys() - files.keys()
    assert not any(name.endswith(checkpoint.CONFIG) for name in new_files)
    assert count_points(continued.run) == points
    assert max(points.values()) == 1
    undisturbed = train_small(small[0], tmp_path, "undisturbed")
    tensors = load_file(Path(continued.checkpoint) / checkpoint.WEIGHTS)
    expected = load_file(Path(undisturbed.checkpoint) / checkpoint.WEIGHTS)
    assert all(torch.equal(tensors[name], value) for name, value in expected.items())
