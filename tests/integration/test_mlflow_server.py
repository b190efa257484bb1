"""An MLflow server while many trials log at once, and while it is slow or gone."""

from __future__ import annotations

import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pipelines import tracking
from tests import faults

pytestmark = pytest.mark.long


class Server:
    """An `mlflow server` on a SQLite file, with its artifacts beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.address = folder, faults.free_address()
        self.start()

    def start(self) -> None:
        self.process = faults.start_mlflow(self.address, self.folder)

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def server(
    new_store: Callable[[Path], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    new_store(folder)
    made = Server(folder)
    yield made
    made.stop()


def test_trials_of_a_sweep_log_at_once_to_a_server(
    server: Server, tmp_path: Path
) -> None:
    uri = server.address
    parent = tracking.open_run(
        uri, "retrieval/x", "sweep", str(tmp_path), config={"sweep": {}}, hashes={}
    )

    def trial(i: int) -> str:
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
        runs = list(threads.map(trial, range(8)))
    client = tracking.connect(uri)
    assert len(set(runs)) == 8
    for run_id in runs:
        assert len(client.get_metric_history(run_id, "train/loss")) == 10
        assert client.get_run(run_id).data.tags["mlflow.parentRunId"] == parent.run_id


class Slow(BaseHTTPRequestHandler):
    """A server that passes every request on late, and answers the first ones after
    `failing` was set with 500.
    """

    to, seconds, failing, asked = "", 0.5, 0, Counter[str]()

    def pass_on(self) -> None:
        time.sleep(self.seconds)
        self.asked[self.path.rpartition("/")[2].partition("?")[0]] += 1
        if Slow.failing:
            Slow.failing -= 1
            self.send_error(500)
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        asked = urllib.request.Request(
            f"{self.to}{self.path}",
            body or None,
            dict(self.headers),
            method=self.command,
        )
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
        """Print nothing for a request."""


def test_a_server_that_is_slow_or_fails_for_a_while_holds_nothing(
    server: Server, tmp_path: Path
) -> None:
    Slow.to = server.address
    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        Slow.failing = 3  # at the first contact already: it is there
        uri = f"http://127.0.0.1:{proxy.server_port}"
        run = tracking.open_run(
            uri, "retrieval/slow", "a", str(tmp_path), config={}, hashes={}
        )
        logger = tracking.Logger(run)
        Slow.failing = 2
        for step in range(50):
            logger.log({"train/loss": float(step)}, step)
            if step < 3:  # so that some are on their way
                time.sleep(0.1)
        logger.flush()
        proxy.shutdown()
    assert not Slow.failing
    assert (
        Slow.asked["log-batch"] <= 6
    )  # one under way, tried three times, and all that had come together meanwhile
    history = tracking.connect(server.address).get_metric_history(
        run.run_id, "train/loss"
    )
    assert [point.step for point in history] == list(range(50))


@pytest.mark.exhaustive
def test_a_server_that_is_gone_for_a_while_is_waited_for_once_it_was_reached(
    server: Server, tmp_path: Path
) -> None:
    tracking.mark_reachable(
        server.address
    )  # as a trial does, whose sweep has reached it
    server.stop()
    with ThreadPoolExecutor(1) as thread:
        opening = thread.submit(
            tracking.open_run,
            server.address,
            "retrieval/gone",
            "r",
            str(tmp_path),
            config={},
            hashes={},
        )
        time.sleep(8)  # longer than a first contact tries
        assert not opening.done()
        server.start()
        tracking.Logger(opening.result()).end()
    found = tracking.connect(server.address).get_experiment_by_name("retrieval/gone")
    assert found is not None
    assert found.tags["mlflow.experimentKind"] == "custom_model_development"
