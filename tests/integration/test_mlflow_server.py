"""Test logging by several processes at once to an MLflow server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from core.errors import UserError
from pipelines import tracking
from pipelines.tracking import logger as logger_module

pytestmark = pytest.mark.long


def find_free_address() -> str:
    """Return the HTTP address of a free local port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


@dataclass
class Server:
    """An MLflow server that can be stopped and started again."""

    store: str
    address: str
    folder: Path

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"]
        command += ["--port", self.address.rpartition(":")[2], "--workers", "1"]
        command += ["--backend-store-uri", self.store]
        command += ["--artifacts-destination", f"{self.folder}/artifacts"]
        # MLflow's job execution would start seven more processes.
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        # In its own process group, so that its workers end with it.
        self.process = subprocess.Popen(
            command, env=environment, start_new_session=True
        )
        while True:
            assert self.process.poll() is None
            with (
                suppress(OSError),
                urllib.request.urlopen(f"{self.address}/health", timeout=60),
            ):
                break
            time.sleep(0.2)

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def server(
    new_store: Callable[[Path], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Start an MLflow server on an empty store."""
    folder = tmp_path_factory.mktemp("server")
    server = Server(new_store(folder), find_free_address(), folder)
    server.start()
    yield server
    server.stop()


def test_trials_of_a_sweep_log_at_once_to_a_server(
    server: Server, tmp_path: Path
) -> None:
    uri = server.address
    parent = tracking.open_run(
        uri, "retrieval/x", "sweep", str(tmp_path), config={"sweep": {}}, hashes={}
    )

    def log_trial(i: int) -> str:
        tags = {tracking.KIND_TAG: "trial"}
        run = tracking.open_run(
            uri,
            "retrieval/x",
            f"run{i}",
            str(tmp_path),
            config={"model": {"name": f"m{i}"}},
            hashes={},
            parent=parent.run_id,
            tags=tags,
        )
        logger = tracking.Logger(run)
        for step in range(10):
            logger.log({"train/loss": float(step), "val/ndcg@10": 0.5}, step)
        logger.end()
        return run.run_id

    with ThreadPoolExecutor(8) as threads:
        runs = list(threads.map(log_trial, range(8)))

    client = tracking.connect(uri)
    assert len(set(runs)) == 8
    for run_id in runs:
        assert len(client.get_metric_history(run_id, "train/loss")) == 10
        assert client.get_run(run_id).data.tags["mlflow.parentRunId"] == parent.run_id


def test_points_wait_while_mlflow_is_away_and_arrive_once(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SEND_EVERY_S", "PAUSE_S"):  # send at once
        monkeypatch.setattr(logger_module, name, 0.0)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    run = tracking.open_run(
        server.address, "retrieval/x", "away", str(tmp_path), config={}, hashes={}
    )
    lines: list[str] = []
    logger = tracking.Logger(run, say=lines.append)
    logger.log({"train/loss": 1.0}, 1)
    server.stop()
    logger.log({"train/loss": 2.0, "val/ndcg@10": 0.5}, 2)
    assert "2 points wait" in lines[-1]
    with pytest.raises(UserError, match="takes no metrics"):
        logger.end()
    saved = list(logger.unsent)  # as a checkpoint has them

    server.start()
    continued = tracking.Logger(run, saved)
    continued.log({"train/loss": 3.0}, 3)
    continued.end()

    client = tracking.connect(server.address)
    points = client.get_metric_history(run.run_id, "train/loss")
    assert [(point.step, point.value) for point in points] == [(1, 1), (2, 2), (3, 3)]
    assert len(client.get_metric_history(run.run_id, "val/ndcg_at_10")) == 1
    assert client.get_run(run.run_id).info.status == "FINISHED"
