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
from pathlib import Path

import pytest

from pipelines import tracking

pytestmark = pytest.mark.long


def find_free_address() -> str:
    """Return the HTTP address of a free local port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture(scope="module")
def server(
    new_store: Callable[[Path], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Start an MLflow server on an empty store; return its address."""
    folder = tmp_path_factory.mktemp("server")
    store, address = new_store(folder), find_free_address()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"]
    command += ["--port", address.rpartition(":")[2], "--workers", "1"]
    command += ["--backend-store-uri", store]
    command += ["--artifacts-destination", f"{folder}/artifacts"]
    # MLflow's job execution would start seven more processes.
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    # In its own process group, so that its workers end with it.
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    while True:
        assert process.poll() is None
        with suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=60):
            break
        time.sleep(0.2)
    yield address
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_trials_of_a_sweep_log_at_once_to_a_server(server: str, tmp_path: Path) -> None:
    uri = server
    parent = tracking.open_run(
        uri, "retrieval/x", "sweep", str(tmp_path), config={"sweep": {}}, hashes={}
    )

    def log_trial(i: int) -> str:
        tags = {tracking.KIND_TAG: "trial", tracking.TRIAL_TAG: f"id{i}"}
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
