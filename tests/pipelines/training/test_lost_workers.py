"""Test trainings whose workers hang, wait for resources, or lose Ray or their storage.

`test_other_number_of_workers.py` tests killed workers.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.training.fit import FitConfig
from pipelines.faults import explain
from pipelines.training import run as runs
from pipelines.training.config import RayOptions
from pipelines.training.run import TrainingResult
from tests.fixtures.trainings import train

pytestmark = pytest.mark.exhaustive

MODEL = {
    "name": "sasrec",
    "dim": 16,
    "num_layers": 1,
    "dropout": 0.0,
    "max_history": 12,
}
FIT = {"batch_size": 8, "max_epochs": 2, "log_every_steps": 2, "patience": 0, "seed": 3}


@pytest.fixture(autouse=True)
def ray_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the address of a cluster, so that a single worker also runs in Ray Train."""
    monkeypatch.setenv("RAY_ADDRESS", "local")


@pytest.fixture
def tables(small: tuple[str, str]) -> str:
    """Return the folder of the tables of the data set `small`."""
    return small[0]


def train_small(tables: str, storage: Path, **changes: Any) -> TrainingResult:
    """Train a small SASRec; `fit` changes single options of `FIT`."""
    fit = FitConfig(**{**FIT, **changes.pop("fit", {})})
    arguments: dict[str, Any] = {
        "model": MODEL,
        "fit": fit,
        "ray": RayOptions(threads=1),
        "inputs": Inputs(tables),
        "storage": str(storage),
        "name": "one",
        "log_model": False,
    }
    return train(**{**arguments, **changes})


@ray.remote(num_cpus=2)
class Holder:
    """An actor that occupies both CPUs."""

    def has_started(self) -> bool:
        """Return True once the actor runs."""
        return True


def test_a_training_that_waits_for_resources_reports_them(
    ray_local: None,
    tables: str,
    tmp_path: Path,
    new_store: Callable[[Path], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    new_store(tmp_path)
    monkeypatch.setattr(runs, "PENDING_CHECK_S", 0.5)
    holder: Any = Holder.remote()  # type: ignore[attr-defined]
    assert ray.get(holder.has_started.remote())
    is_waiting = threading.Event()
    waiting_lines: list[str] = []

    def collect_waiting(line: str) -> None:
        if line.startswith("waiting"):
            waiting_lines.append(line)
            is_waiting.set()

    def free_cpus() -> None:
        is_waiting.wait()
        ray.kill(holder)

    freeing = threading.Thread(target=free_cpus, daemon=True)
    freeing.start()
    model = {"name": "popularity"}
    try:
        result = train_small(tables, tmp_path, model=model, say=collect_waiting)
    finally:
        is_waiting.set()  # so that the CPUs are free for the next tests in any case
        freeing.join()

    assert (
        waiting_lines[0]
        == "waiting for 1 x {CPU: 1}; the cluster has 2 CPUs, of which 0 are free"
    )
    assert (result.epochs, result.best.name) == (1, "popularity")
    assert result.best.metrics["recall@20"] > 0
    assert train_small(tables, tmp_path, model=model).was_finished


@pytest.mark.long
def test_workers_are_restarted_when_one_hangs(
    ray_local: None, tables: str, tmp_path: Path, new_store: Callable[[Path], str]
) -> None:
    new_store(tmp_path)
    lines: list[str] = []

    def pause_worker() -> None:
        while not checkpoint.last(str(tmp_path / "one")):
            time.sleep(0.02)
        children = psutil.Process().children(recursive=True)
        workers = [p for p in children if p.name().startswith("ray::RayTrainWo")]
        workers[0].suspend()

    pausing = threading.Thread(target=pause_worker, daemon=True)
    pausing.start()
    options = RayOptions(threads=1, hang_minutes=0.5)
    result = train_small(
        tables, tmp_path, ray=options, say=lines.append, fit={"max_epochs": 30}
    )
    pausing.join()

    (note,) = [line for line in lines if line.startswith("note:")]
    assert "health check has been hanging for 3" in note
    assert note.endswith("continuing from the last checkpoint, 1 of 2 times")
    assert lines.count("starting 1 worker") == 2
    assert any("continuing " in line for line in lines)
    assert result.epochs == 30


def test_a_full_disk_ends_a_training_without_a_retry(
    ray_local: None, tables: str, tmp_path: Path, new_store: Callable[[Path], str]
) -> None:
    store = new_store(tmp_path)
    small_disk = tmp_path / "small"
    small_disk.mkdir()
    mounting = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(small_disk)],
        capture_output=True,
    )
    if mounting.returncode:
        pytest.skip("a small disk can only be mounted by root")
    lines: list[str] = []

    try:
        with pytest.raises(Exception) as error:  # noqa: PT011
            train_small(tables, small_disk, say=lines.append, tracking_uri=store)
    finally:
        subprocess.run(["umount", "--lazy", str(small_disk)], check=True)

    assert "No space left" in str(explain(error.value))
    assert sum("parameters" in line for line in lines) == 1  # one attempt
