"""Test logging to MLflow: concurrent runs, interruptions, a lost server and names."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from core.errors import UserError
from pipelines import tracking
from pipelines.tracking import runs as runs_module

ROOT = Path(__file__).parents[3]


@pytest.fixture
def uri(tmp_path, new_store) -> str:
    """Create a store without runs; return its URI."""
    return new_store(tmp_path)


WRITERS = """
import os, sys
from pipelines import tracking
from pipelines.tracking import runs as runs_module
uri, storage = sys.argv[1:]

def write(name):
    run = tracking.open_run(uri, "retrieval/x", name, storage, config={"model": {"name": name}}, hashes={})
    logger = tracking.Logger(run)
    for step in range(10):
        logger.log({"train/loss": float(step), "val/ndcg@10": 0.5}, step)
    logger.end()

children = []
for i in range(4):  # forked, so that each child need not import anew
    children.append(os.fork())
    if children[-1] == 0:
        write(f"run{i}")
        os._exit(0)
sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""


@pytest.mark.long
def test_runs_that_start_together_share_one_new_store(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    process = subprocess.run(
        [sys.executable, "-c", WRITERS, uri, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr

    client = tracking.connect(uri)
    experiment = client.get_experiment_by_name("retrieval/x")
    assert experiment is not None
    assert experiment.artifact_location == f"file://{tmp_path}/mlartifacts"
    runs = client.search_runs([experiment.experiment_id])
    assert len(runs) == 4
    for run in runs:
        assert len(client.get_metric_history(run.info.run_id, "val/ndcg_at_10")) == 10


def find_deleted(uri: str, *runs: tracking.RunRef) -> list[tracking.RunRef]:
    """Return the runs that are deleted."""
    client = tracking.connect(uri)
    stages = [client.get_run(run.run_id).info.lifecycle_stage for run in runs]
    return [run for run, stage in zip(runs, stages, strict=True) if stage == "deleted"]


def test_a_run_whose_opening_was_killed_is_deleted(tmp_path, uri):
    def open_run(folder: str) -> tracking.RunRef:
        tags = {tracking.FOLDER_TAG: folder}
        return tracking.open_run(
            uri, "retrieval/x", "a", str(tmp_path), config={}, hashes={}, tags=tags
        )

    killed, other = open_run("/runs/a's"), open_run("/runs/b")
    opened = open_run("/runs/a's")

    assert find_deleted(uri, killed, other, opened) == [killed]


def test_an_evaluation_that_was_killed_is_deleted_when_it_is_repeated(uri):
    training = tracking.open_run(uri, "x", "a", "/runs", config={}, hashes={})

    def open_child(name: str) -> tracking.RunRef:
        return tracking.open_child(training, name, params={}, hashes={}, tags={})

    ended = open_child("test")
    tracking.Logger(ended).end()
    killed, other, repeated = open_child("test"), open_child("val"), open_child("test")

    assert find_deleted(uri, ended, killed, other, repeated) == [killed]


@contextmanager
def run_server(store: str, port: int, folder: Path) -> Iterator[str]:
    """Run an MLflow server while the block runs; provide its address."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--workers", "1", "--backend-store-uri", store]
    command += ["--artifacts-destination", f"{folder}/artifacts"]
    # MLflow's job execution would start seven more processes.
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    # In its own process group, so that its workers end with it.
    server = subprocess.Popen(command, env=environment, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            assert server.poll() is None
            with suppress(OSError), urllib.request.urlopen(f"{address}/health"):
                break
            time.sleep(0.2)
        yield address
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.mark.long
def test_points_wait_while_mlflow_is_away_and_arrive_once(uri, tmp_path, monkeypatch):
    for name in ("SEND_EVERY_S", "PAUSE_S"):  # send at once
        monkeypatch.setattr(runs_module, name, 0.0)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    lines: list[str] = []
    with run_server(uri, port, tmp_path) as address:
        run = tracking.open_run(
            address, "retrieval/x", "away", str(tmp_path), config={}, hashes={}
        )
        logger = tracking.Logger(run, say=lines.append)
        logger.log({"train/loss": 1.0}, 1)

    logger.log({"train/loss": 2.0, "val/ndcg@10": 0.5}, 2)
    assert "2 points wait" in lines[-1]
    with pytest.raises(UserError, match="takes no metrics"):
        logger.end()
    saved = list(logger.unsent)  # as a checkpoint has them

    with run_server(uri, port, tmp_path):
        continued = tracking.Logger(run, [("train/loss", 9.0, 10, 1), *saved])
        for step in (1, 2, 3):  # the first ones are repeated
            continued.log({"train/loss": float(step), "train/nan": float("nan")}, step)
        continued.end()
    client = tracking.connect(uri)
    points = client.get_metric_history(run.run_id, "train/loss")
    assert [(point.step, point.value) for point in points] == [(1, 1), (2, 2), (3, 3)]
    assert len(client.get_metric_history(run.run_id, "val/ndcg_at_10")) == 1
    assert client.get_run(run.run_id).info.status == "FINISHED"
