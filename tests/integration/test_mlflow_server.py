"""Test logging to an MLflow server that is busy, slow, failing or down for a while."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

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


class SlowProxy(BaseHTTPRequestHandler):
    """A proxy that delays every request, and answers the next ones with status 500."""

    server_address = ""
    delay_s = 0.5
    remaining_failures = 0
    """Number of coming requests to answer with status 500."""
    request_counts: ClassVar = Counter[str]()
    """Number of requests by the last word of their path."""

    def forward(self) -> None:
        """Pass the request on to the server and its answer back to the client."""
        time.sleep(self.delay_s)
        self.request_counts[self.path.rpartition("/")[2].partition("?")[0]] += 1
        if SlowProxy.remaining_failures:
            SlowProxy.remaining_failures -= 1
            self.send_error(500)
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = urllib.request.Request(
            f"{self.server_address}{self.path}",
            body or None,
            dict(self.headers),
            method=self.command,
        )
        try:
            answer = urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:  # such as a missing experiment
            answer = error
        with answer:
            content = answer.read()
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.headers["Content-Type"])
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_PATCH = forward

    def log_message(self, *_: object) -> None:
        """Print nothing for a request."""


@pytest.mark.exhaustive
def test_logging_survives_a_slow_and_temporarily_failing_server(
    server: str, tmp_path: Path
) -> None:
    SlowProxy.server_address = server
    with ThreadingHTTPServer(("127.0.0.1", 0), SlowProxy) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        SlowProxy.remaining_failures = 3  # already at the first contact
        uri = f"http://127.0.0.1:{proxy.server_port}"
        run = tracking.open_run(
            uri, "retrieval/slow", "a", str(tmp_path), config={}, hashes={}
        )
        logger = tracking.Logger(run)
        SlowProxy.remaining_failures = 2
        for step in range(50):
            logger.log({"train/loss": float(step)}, step)
            if step < 3:  # so that a request is under way when the next points come
                time.sleep(0.1)
        logger.flush()
        proxy.shutdown()

    assert not SlowProxy.remaining_failures
    # The first request is tried three times; the points since then share few requests.
    assert SlowProxy.request_counts["log-batch"] <= 6
    history = tracking.connect(server).get_metric_history(run.run_id, "train/loss")
    assert [point.step for point in history] == list(range(50))
