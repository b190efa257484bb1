"""Jobs and an MLflow server: many trials that log at once, and an address with a password."""

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
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pipelines import tracking

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


def free_address() -> str:
    """Where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


@dataclass
class Server:
    """An `mlflow server` on a SQLite file."""

    address: str
    folder: Path
    """Where its store and its artifacts are."""
    store: str
    """URI of the store."""

    def start(self) -> None:
        """Until it answers."""
        # Without the processes for jobs of its own, of which it starts seven and which nothing here asks for.
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with open(self.folder / "server.log", "a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1",
                 "--port", self.address.rpartition(":")[2], "--workers", "1", "--backend-store-uri", self.store,
                 "--artifacts-destination", str(self.folder / "artifacts")],
                env=environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        while True:
            try:
                urllib.request.urlopen(f"{self.address}/health", timeout=60).close()
                return
            except (urllib.error.URLError, OSError):
                assert self.process.poll() is None, (self.folder / "server.log").read_text()
                time.sleep(0.2)

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)  # its own session: nobody else's processes
        self.process.wait()


@pytest.fixture(scope="module")
def server(new_store: Callable[[Path], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    made = Server(free_address(), folder, new_store(folder))
    try:
        made.start()
        yield made
    finally:
        made.stop()


def test_a_server_that_is_gone_for_a_while_is_waited_for_once_it_was_reached(server: Server, tmp_path: Path) -> None:
    code = f"""
from pipelines import tracking
tracking.expect({server.address!r})   # as a trial does, whose sweep has reached it
run = tracking.open_run({server.address!r}, "retrieval/gone", "r", {str(tmp_path)!r}, config={{}}, hashes={{}})
tracking.Logger(run).end()
"""
    server.stop()
    waiting = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    time.sleep(8)  # longer than a first contact tries
    assert waiting.poll() is None
    server.start()
    assert waiting.wait() == 0
    found = tracking.connect(server.address).get_experiment_by_name("retrieval/gone")
    assert found is not None
    assert found.tags["mlflow.experimentKind"] == "custom_model_development"
    server.stop()
    first = subprocess.run(
        [sys.executable, "-c", code.replace("tracking.expect", "str")], cwd=ROOT, capture_output=True
    )
    server.start()
    assert b"cannot reach MLflow" in first.stderr


def test_trials_of_a_sweep_log_at_once_to_a_server(server: Server, tmp_path: Path) -> None:
    uri = server.address
    parent = tracking.open_run(uri, "retrieval/x", "sweep", str(tmp_path), config={"sweep": {}}, hashes={})

    def trial(i: int) -> str:
        tags = {tracking.KIND_TAG: "trial", tracking.TRIAL_TAG: f"id{i}"}
        run = tracking.open_run(
            uri, "retrieval/x", f"run{i}", str(tmp_path), config={"model": {"name": f"m{i}"}}, hashes={},
            parent=parent.run_id, tags=tags,
        )  # fmt: skip
        logger = tracking.Logger(run)
        for step in range(10):
            logger.log({"train/loss": float(step), "val/ndcg@10": 0.5}, step)
        logger.end()
        return run.run_id

    with ThreadPoolExecutor(8) as threads:
        runs = list(threads.map(trial, range(8)))
    client = tracking.connect(uri)
    assert len(set(runs)) == 8
    for run_id in runs:
        assert len(client.get_metric_history(run_id, "train/loss")) == 10
        assert client.get_run(run_id).data.tags["mlflow.parentRunId"] == parent.run_id


class Slow(BaseHTTPRequestHandler):
    """Passes every request on, after a while; the first ones after `failing` was set are answered with 500."""

    to, seconds, failing, asked = "", 0.5, 0, Counter[str]()

    def pass_on(self) -> None:
        time.sleep(self.seconds)
        self.asked[self.path.rpartition("/")[2].partition("?")[0]] += 1
        if Slow.failing:
            Slow.failing -= 1
            self.send_error(500)
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        asked = urllib.request.Request(f"{self.to}{self.path}", body or None, dict(self.headers), method=self.command)
        try:
            answer = urllib.request.urlopen(asked)
        except urllib.error.HTTPError as error:  # of what is not there
            answer = error
        with answer:
            content = answer.read()
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.headers["Content-Type"])
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_PATCH = pass_on

    def log_message(self, *_: object) -> None:
        """Not on the terminal."""


def test_a_server_that_is_slow_or_fails_for_a_while_holds_nothing(server: Server, tmp_path: Path) -> None:
    Slow.to = server.address
    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        Slow.failing = 3  # at the first contact already: it is there
        uri = f"http://127.0.0.1:{proxy.server_port}"
        run = tracking.open_run(uri, "retrieval/slow", "a", str(tmp_path), config={}, hashes={})
        logger = tracking.Logger(run)
        Slow.failing = 2
        for step in range(50):
            logger.log({"train/loss": float(step)}, step)
            if step < 3:  # so that some are on their way
                time.sleep(0.1)
        logger.flush()
        proxy.shutdown()
    assert not Slow.failing
    assert Slow.asked["log-batch"] <= 6  # one under way, tried three times, and all that had come together meanwhile
    history = tracking.connect(server.address).get_metric_history(run.run_id, "train/loss")
    assert [point.step for point in history] == list(range(50))


def test_an_address_with_a_password_is_refused(small: tuple[str, str], tmp_path: Path) -> None:
    line = [sys.executable, "-m", "jobs.train", "--config", "jobs/configs/sasrec.yaml", "--tables", small[0]]
    line += ["--storage", str(tmp_path / "runs"), "--name", "one"]
    address = "http://me-the-user:pa55%2Fw0rd@127.0.0.1:5000"
    for options, environment in (["--tracking_uri", address], {}), ([], {"MLFLOW_TRACKING_URI": address}):
        done = subprocess.run(
            line + options, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
        )
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert "holds a user, password or key; leave it out and set MLFLOW_TRACKING_USERNAME" in done.stderr
        assert "me-the-user" not in done.stdout + done.stderr
        assert "pa55" not in done.stdout + done.stderr
    assert not (tmp_path / "runs").exists()
