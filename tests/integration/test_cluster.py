"""Test jobs on a real Ray cluster with token authentication, by `ray job submit`.

The cluster has its own ports and folder, and one node.
"""

from __future__ import annotations

import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from mlflow import MlflowClient

from models.storage.tables import read_manifest, read_table
from pipelines import tracking
from pipelines.data.audit.rules import audit

pytestmark = [pytest.mark.long, pytest.mark.exhaustive]

ROOT = Path(__file__).parents[2]
RAY = Path(sys.executable).with_name("ray")
NUM_WORKER_PORTS = 40
PORTS = [
    "port",
    "dashboard-port",
    "ray-client-server-port",
    "node-manager-port",
    "object-manager-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "runtime-env-agent-port",
    "metrics-export-port",
]
"""Options of `ray start` for ports."""

SOURCE = """\
files: log.csv
user: user
item: item
time: {column: seconds, unit: s}
prepare: {core: 2, split: {kind: leave_last_out}}
"""


@dataclass
class Cluster:
    """A running cluster and the settings of its clients."""

    address: str
    """URL of the job server."""
    env: dict[str, str]
    """Environment of a client that has the token."""

    def submit(self, *command: str) -> str:
        """Submit a command as a user does; return its output."""
        submit = [RAY, "job", "submit", "--address", self.address]
        submit += ["--working-dir", ".", "--runtime-env", "runtime_env.yaml"]
        while True:
            job = subprocess.run(
                [*submit, "--", *command],
                cwd=ROOT,
                env=self.env,
                capture_output=True,
                text=True,
            )
            # The job agent does not listen at once.
            if "No available agent" not in job.stdout + job.stderr:
                assert job.returncode == 0, job.stdout[-3000:] + job.stderr[-3000:]
                return job.stdout
            time.sleep(1)


def find_free_ports(count: int) -> list[str]:
    """Return different ports that no process listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("", 0))
        return [str(listener.getsockname()[1]) for listener in sockets]


def get_http_status(address: str, token: str | None) -> int:
    """Return the HTTP status of the list of jobs, or 0 if no server answers."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"{address}/api/jobs/", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Start a cluster of one node with 2 CPUs."""
    # Short, as paths of sockets have at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RAY_", "MLFLOW_"))
    }
    env |= {
        "HOME": str(folder / "home"),
        "RAY_AUTH_MODE": "token",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }
    env["PATH"] = f"{RAY.parent}:{env['PATH']}"
    Path(env["HOME"]).mkdir()
    subprocess.run(
        [RAY, "get-auth-token", "--generate"], env=env, check=True, capture_output=True
    )
    token = (folder / "home/.ray/auth_token").read_text()
    free = find_free_ports(len(PORTS) + NUM_WORKER_PORTS)
    ports = dict(zip(PORTS, free, strict=False))
    port_options = [f"--{name}={port}" for name, port in ports.items()]
    port_options += ["--worker-port-list", ",".join(free[len(PORTS) :])]
    command = [str(RAY), "start", "--head", "--block", "--num-cpus", "2"]
    command += ["--object-store-memory", "200000000", "--disable-usage-stats"]
    command += ["--temp-dir", str(folder), *port_options]
    address = f"http://127.0.0.1:{ports['dashboard-port']}"
    with open(folder / "head.log", "w") as log:
        head = subprocess.Popen(
            command, env=env, stdout=log, stderr=log, start_new_session=True
        )
    try:
        while get_http_status(address, token) != 200:
            log_text = (folder / "head.log").read_text()
            assert head.poll() is None, log_text[-2000:]
            time.sleep(0.3)
        yield Cluster(address, env)
    finally:
        head.terminate()  # with --block the node ends the processes that it started
        try:
            head.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(head.pid, signal.SIGKILL)
            head.wait()
        shutil.rmtree(folder, ignore_errors=True)


def write_log(folder: Path) -> int:
    """Write a log of 60 users who walk along a ring of 20 items; return its number of
    rows.
    """
    draw = random.Random(0)
    starts = [draw.randrange(20) for _ in range(60)]
    rows = []
    for user, start in enumerate(starts):
        for step in range(draw.randrange(5, 9)):
            seconds = 1_700_000_000 + 86_400 * step + user
            rows.append(f"u{user:02},i{(start + step) % 20:02},{seconds}")
    draw.shuffle(rows)
    folder.mkdir()
    (folder / "log.csv").write_text("\n".join(["user,item,seconds", *rows]) + "\n")
    (folder / "source.yaml").write_text(SOURCE)
    return len(rows)


def test_a_submitted_job_prepares_and_trains_on_the_cluster(
    cluster: Cluster, new_store: Callable[[Path], str], tmp_path: Path
) -> None:
    num_rows = write_log(tmp_path / "raw")
    tables, runs = tmp_path / "tables", tmp_path / "runs"
    uri = new_store(tmp_path)
    raw = str(tmp_path / "raw")
    prepare = ["python", "-m", "jobs.prepare", "--source", f"{raw}/source.yaml"]
    prepare += ["--input", raw, "--output", str(tables)]
    train = ["python", "-m", "jobs.train", "--config", "jobs/configs/sasrec.yaml"]
    train += ["--fit.max_epochs", "2", "--fit.batch_size", "16"]
    train += ["--tables", str(tables), "--storage", str(runs), "--name", "ring"]
    train += ["--tracking_uri", uri, "--experiment", "retrieval/ring"]

    output = cluster.submit("sh", "-c", f"{shlex.join(prepare)} && {shlex.join(train)}")

    assert get_http_status(cluster.address, None) == 401
    assert f"next: python -m jobs.audit --tables {tables}" in output
    assert read_table(str(tables / "events"), "events").num_rows == num_rows
    sequences = read_manifest(str(tables / "sequences"), "sequences")
    assert [rule.name for rule in audit(str(tables)) if rule.violations] == []

    assert (runs / "ring/best/model.safetensors").is_file()
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("retrieval/ring")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id in output
    assert run.info.status == "FINISHED"
    assert run.data.tags["table.sequences"] == sequences.hash
    # Driver and tasks run the submitted code.
    assert "_ray_pkg_" in run.data.tags[tracking.CODE_TAG]
    assert run.data.tags[tracking.SUBMISSION_TAG].startswith("raysubmit_")
