"""A worker that was only paused when it counted as lost, and wakes up while another
attempt trains the run.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
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
from tests.fixtures.training_tables import write_tables
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


def run_worker(task: Task, ended: Queue[str], reported: Any, resume: Path) -> None:
    """Train like a worker of Ray, without a lock.

    After its first checkpoint the worker waits for the file `resume`, so that it cannot
    end before it is paused.
    """

    def report(about: checkpoint.Checkpoint) -> None:
        reported.set()
        while not resume.exists():
            time.sleep(0.01)

    place = WorkerContext(0, 1, torch.device("cpu"), 1, report, lambda line: None)
    try:
        run_task(task, place)
    except UserError as error:
        ended.put(str(error))
    else:
        ended.put("trained to the end")


def is_locked(store: Path) -> bool:
    """Return whether a process that may be paused holds the lock of the SQLite file."""
    with closing(sqlite3.connect(store, timeout=0)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return True
        connection.rollback()
        return False


def points(run: tracking.RunRef) -> Counter[tuple[str, int]]:
    """How often MLflow has each point of the run's metrics."""
    client = tracking.connect(run.uri)
    keys = client.get_run(run.run_id).data.metrics
    return Counter(
        (key, point.step)
        for key in keys
        if not key.startswith("system/")
        for point in client.get_metric_history(run.run_id, key)
    )


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_worker_that_was_paused_wakes_up_and_changes_nothing(
    small: tuple[str, str],
    tmp_path: Path,
    new_store: Callable[[Path], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    new_store(tmp_path)
    context = multiprocessing.get_context("forkserver")
    ended: Queue[str] = context.Queue()
    reported = context.Event()
    resume = tmp_path / "resume"
    workers = []

    def pause_worker(task: Task, place: WorkerContext) -> None:
        """Train in another process, and lose it after its first checkpoint."""
        worker = context.Process(
            target=run_worker, args=(task, ended, reported, resume)
        )
        worker.start()
        workers.append(worker)
        assert reported.wait(600)
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGSTOP)
        while is_locked(tmp_path / "mlflow.db"):
            os.kill(worker.pid, signal.SIGCONT)
            time.sleep(0.05)
            os.kill(worker.pid, signal.SIGSTOP)
        raise RuntimeError("the worker is lost")

    def trained(name: str) -> TrainingResult:
        return train(
            model=MODEL,
            fit=FitConfig(**FIT),
            ray=RayOptions(threads=1),
            inputs=Inputs(small[0]),
            storage=str(tmp_path),
            name=name,
            log_model=False,
            say=lambda line: None,
            on_checkpoint=lambda about: None,
        )

    with monkeypatch.context() as patch:
        patch.setattr(runs, "run_task", pause_worker)
        with pytest.raises(RuntimeError, match="the worker is lost"):
            trained("one")
    again = trained("one")
    files, logged = content(tmp_path / "one"), points(again.run)

    (worker,) = workers
    assert worker.pid is not None
    resume.touch()
    os.kill(worker.pid, signal.SIGCONT)
    words = ended.get(timeout=600)
    worker.join()

    assert "attempt 2.1 trains the run in" in words
    assert "so attempt 1.1 ends without changing it" in words
    left = content(tmp_path / "one")
    assert files.items() <= left.items()
    assert not any(
        name.endswith(checkpoint.CONFIG) for name in left.keys() - files.keys()
    )
    assert points(again.run) == logged
    assert max(logged.values()) == 1
    whole = trained("undisturbed")
    ours, expected = (
        load_file(Path(run.checkpoint) / checkpoint.WEIGHTS) for run in (again, whole)
    )
    assert all(torch.equal(ours[key], value) for key, value in expected.items())


def test_tables_replaced_after_the_check_are_refused_in_one_line(
    tmp_path: Path, new_store: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tables, _ = write_tables(tmp_path / "small")
    other, _ = write_tables(tmp_path / "other", parts=3)
    new_store(tmp_path)
    lines: list[str] = []

    def replace_then_run(task: Task, place: WorkerContext) -> None:
        """Train after another job has replaced the tables."""
        for source in Path(other, "sequences").iterdir():
            shutil.copy(source, Path(tables, "sequences"))
        run_task(task, place)

    monkeypatch.setattr(runs, "run_task", replace_then_run)
    with pytest.raises(UserError) as caught:
        train(
            model=MODEL,
            fit=FitConfig(**FIT),
            ray=RayOptions(threads=1),
            inputs=Inputs(tables),
            storage=str(tmp_path),
            name="one",
            say=lines.append,
        )

    words = str(caught.value)
    assert words.startswith("the table 'sequences' was replaced since this job checked")
    assert words.endswith("choose another --name to train on the new tables")
    assert not list((tmp_path / "one").glob("step-*"))
    assert not any("epoch" in line for line in lines)
