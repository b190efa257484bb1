"""Trainings whose workers fail or have to wait: what is tried again, and what is said.
Those that are lost: `test_other_number_of_workers.py`."""

from __future__ import annotations

import os
import subprocess
import sys
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
from pipelines import cluster
from pipelines.faults import explain
from pipelines.ray_inside import has_autoscaler
from pipelines.training import run as runs
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


@pytest.fixture(autouse=True)
def as_on_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one worker is one of Ray Train too."""
    monkeypatch.setenv("RAY_ADDRESS", "local")


@pytest.fixture
def tables(small: tuple[str, str]) -> str:
    return small[0]


def trained(tables: str, storage: Path, **changes: Any) -> TrainingResult:
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
    """Has both CPUs."""

    def there(self) -> bool:
        return True


def test_a_training_of_counts_that_waits_says_for_what(
    ray_local: None,
    tables: str,
    tmp_path: Path,
    new_store: Callable[[Path], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    new_store(tmp_path)
    monkeypatch.setattr(runs, "PENDING_CHECK_S", 0.5)
    holder: Any = Holder.remote()  # type: ignore[attr-defined]
    assert ray.get(holder.there.remote())
    waits, said = threading.Event(), []

    def say(line: str) -> None:
        if line.startswith("waiting"):
            said.append(line)
            waits.set()

    def let_go() -> None:
        waits.wait()
        ray.kill(holder)

    releaser = threading.Thread(target=let_go, daemon=True)
    releaser.start()
    try:
        counted = trained(tables, tmp_path, model={"name": "popularity"}, say=say)
    finally:
        waits.set()  # else the CPUs are held from all tests after this one
        releaser.join()
    assert (
        said[0]
        == "waiting for 1 x {CPU: 1}; the cluster has 2 CPUs, of which 0 are free"
    )
    assert (counted.epochs, counted.best.name) == (1, "popularity")
    assert counted.best.metrics["recall@20"] > 0
    assert trained(tables, tmp_path, model={"name": "popularity"}).was_finished


def test_what_the_cluster_can_never_give_is_refused(ray_local: None) -> None:
    said = "4 workers need 4 CPUs, 1 CPU for each on one node; the cluster has 2 CPUs on 1 node, room for 2, and no"
    with pytest.raises(runs.UserError, match=said):
        runs.check_cluster(RayOptions(num_workers=4), 4, False)
    with pytest.raises(
        runs.UserError, match="1 worker needs 3 CPUs, 3 CPU for each on one node"
    ):
        runs.check_cluster(RayOptions(cpus_per_worker=3), 1, False)
    with pytest.raises(
        runs.UserError,
        match=r"1 worker needs 1 CPUs, 1 GPUs, .* 2 CPUs, 0 GPUs on 1 node, room for 0",
    ):
        runs.check_cluster(RayOptions(), 1, True)
    runs.check_cluster(RayOptions(num_workers=4, min_workers=2), 4, False)


def test_a_node_group_of_kuberay_is_no_autoscaler(ray_local: None) -> None:
    """As KubeRay labels all its pods, a job that never fits would wait for ever."""
    here = {
        "NodeManagerHostname": "a",
        "NodeManagerAddress": "10.0.0.1",
        "Labels": {"ray.io/node-group": "trainer"},
        "Resources": {"CPU": 3.0},
    }
    there = {**here, "NodeManagerHostname": "b"}

    assert not has_autoscaler()
    assert (
        cluster.count_machines([here, here]),
        cluster.count_machines([here, there]),
    ) == (1, 2)
    assert (
        cluster.count_room([here, there], {"CPU": 2, "GPU": 0}) == 2
    )  # a worker is on one node
    assert cluster.count_room([here, there], {"CPU": 1, "GPU": 1}) == 0


@pytest.mark.long
def test_workers_start_again_if_one_does_not_answer(
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

    watch = threading.Thread(target=pause_worker, daemon=True)
    watch.start()
    options = RayOptions(threads=1, hang_minutes=0.5)
    made = trained(
        tables, tmp_path, ray=options, say=lines.append, fit={"max_epochs": 30}
    )
    watch.join()

    (note,) = [line for line in lines if line.startswith("note:")]
    assert "health check has been hanging for 3" in note
    assert note.endswith("continuing from the last checkpoint, 1 of 2 times")
    assert any("continuing " in line for line in lines)
    assert made.epochs == 30


WITHOUT_RAYLET = """
import psutil, ray
from jobs import cli

cli.start_ray(num_cpus=1)
signal = ray.remote(lambda: __import__("time").sleep(10000)).remote()
(raylet,) = [child for child in psutil.Process().children() if child.name() == "raylet"]
raylet.kill()
try:
    ray.get(signal)
except Exception as error:
    print(cli.explain(error))
"""


@pytest.mark.long
def test_a_job_without_its_raylet_ends_with_one_line() -> None:
    """Ray itself ends a driver without its GCS, after a minute."""
    environment = {
        name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"
    }
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_RAYLET],
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    (said,) = [
        line
        for line in ended.stdout.splitlines()
        if line.startswith("a process of Ray was lost (")
    ]
    assert "raylet died" in said


def test_a_storage_that_goes_away_ends_a_training_with_a_line(
    ray_local: None, tables: str, tmp_path: Path, new_store: Callable[[Path], str]
) -> None:
    store, storage, file = new_store(tmp_path), tmp_path / "away", tmp_path / "file"
    (tmp_path / "folder").mkdir()
    storage.symlink_to(tmp_path / "folder")
    file.write_text("another file")
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if line.startswith("epoch") and " 2/" in line:
            file.replace(
                storage
            )  # in one go: a folder that is removed while a worker writes may come again

    with pytest.raises(OSError, match="Not a directory") as caught:
        trained(tables, storage, fit={"max_epochs": 400}, say=say, tracking_uri=store)
    said = str(explain(caught.value))
    assert "\n" not in said
    assert (
        "see that the storage is there and may be written, then run the same command again"
        in said
    )
    assert storage.read_text() == "another file"
    assert not any("400/400" in line for line in lines)


def test_a_full_disk_ends_a_training_at_once(
    ray_local: None, tables: str, tmp_path: Path, new_store: Callable[[Path], str]
) -> None:
    store = new_store(tmp_path)
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(small)],
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip("a small disk can only be mounted by root")
    lines: list[str] = []
    try:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            trained(tables, small, say=lines.append, tracking_uri=store)
    finally:
        subprocess.run(["umount", "--lazy", str(small)], check=True)
    assert str(explain(caught.value)).startswith("the disk is full (")
    assert sum("parameters" in line for line in lines) == 1  # not tried again
