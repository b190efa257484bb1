"""Jobs on a real Ray cluster with token authentication, submitted by `ray job submit`.

The cluster has its own ports and folder, and one node; for the last test a second node
under another host name, as on another machine.
"""

from __future__ import annotations

import os
import random
import re
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
from pipelines.data.audit.rules import audit
from tests.fixtures.training_tables import write_tables

pytestmark = [pytest.mark.long, pytest.mark.exhaustive]

ROOT = Path(__file__).parents[2]
RAY = Path(sys.executable).with_name("ray")
WORKERS = 40  # ports for worker processes

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
    gcs: str
    """Port by which other nodes join."""
    folder: Path
    """Its own folder."""

    def submit(self, *command: str) -> str:
        """Submit a command as a user does and return its output. Retry until the job
        agent listens.
        """
        done = self._submit(*command)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    def submit_refused(self, *commands: list[str]) -> list[str]:
        """Submit commands as one job, and return the one line with which each command
        ends.
        """
        *others, last = (shlex.join(command) for command in commands)
        done = self._submit(
            "sh", "-c", " && ".join([*(f"! {other}" for other in others), last])
        )
        assert done.returncode != 0, done.stdout[-3000:]
        assert "Traceback" not in done.stdout
        lines = list(
            dict.fromkeys(
                line for line in done.stdout.splitlines() if line.startswith("error: ")
            )
        )
        assert len(lines) == len(commands)
        return lines

    def _submit(self, *command: str) -> subprocess.CompletedProcess:
        line = [
            RAY,
            "job",
            "submit",
            "--address",
            self.address,
            "--working-dir",
            ".",
            "--runtime-env",
        ]
        while True:
            done = subprocess.run(
                [*line, "runtime_env.yaml", "--", *command],
                cwd=ROOT,
                env=self.env,
                capture_output=True,
                text=True,
            )
            if "No available agent" not in done.stdout + done.stderr:
                return done
            time.sleep(1)


def free_ports(count: int) -> list[str]:
    """Return different ports that nobody listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("", 0))
        return [str(one.getsockname()[1]) for one in sockets]


def http_status(address: str, token: str | None) -> int:
    """Return the HTTP status of the list of jobs, or 0 if nobody answers."""
    request = urllib.request.Request(
        f"{address}/api/jobs/",
        headers={"Authorization": f"Bearer {token}"} if token else {},
    )
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    folder = Path(
        tempfile.mkdtemp(prefix="r", dir="/tmp")
    )  # short: socket paths end at 107 bytes
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
    names = [
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
    ports = free_ports(len(names) + WORKERS)
    line = [
        str(RAY),
        "start",
        "--head",
        "--block",
        "--num-cpus",
        "2",
        "--object-store-memory",
        "200000000",
    ]
    line += [
        "--temp-dir",
        str(folder),
        "--disable-usage-stats",
        "--worker-port-list",
        ",".join(ports[len(names) :]),
    ]
    line += [
        word
        for name, port in zip(names, ports, strict=False)
        for word in (f"--{name}", port)
    ]
    with open(folder / "head.log", "w") as log:
        head = subprocess.Popen(
            line, env=env, stdout=log, stderr=log, start_new_session=True
        )
    address = f"http://127.0.0.1:{ports[1]}"
    token = (folder / "home/.ray/auth_token").read_text()
    try:
        while http_status(address, token) != 200:
            said = (folder / "head.log").read_text()[-2000:]
            assert head.poll() is None, said
            time.sleep(0.3)
        yield Cluster(address, env, ports[0], folder)
    finally:
        head.terminate()  # with --block the head ends what it started
        try:
            head.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(
                head.pid, signal.SIGKILL
            )  # its own session: nobody else's processes
            head.wait()
        shutil.rmtree(folder, ignore_errors=True)


def raw_log(folder: Path) -> int:
    """Write a log of 60 users who walk along a ring of 20 items, and return its number
    of rows.
    """
    draw = random.Random(0)
    rows = [
        (
            f"u{user:02}",
            f"i{(start + step) % 20:02}",
            1_700_000_000 + 86_400 * step + user,
        )
        for user, start in ((user, draw.randrange(20)) for user in range(60))
        for step in range(draw.randrange(5, 9))
    ]
    draw.shuffle(rows)
    folder.mkdir()
    (folder / "log.csv").write_text(
        "\n".join(["user,item,seconds", *(f"{u},{i},{t}" for u, i, t in rows)]) + "\n"
    )
    (folder / "source.yaml").write_text(SOURCE)
    return len(rows)


def test_client_without_the_token_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    assert http_status(cluster.address, None) == 401
    assert http_status(cluster.address, "0" * 64) == 403
    stranger = {**cluster.env, "HOME": str(tmp_path), "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(
        [RAY, "job", "submit", "--address", cluster.address, "--", "true"],
        env=stranger,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "Missing authentication token" in done.stdout + done.stderr


def test_job_runs_the_submitted_code_on_the_cluster(cluster: Cluster) -> None:
    """Driver and tasks import the uploaded folder, and `start_ray` joins the cluster of
    the job.
    """
    program = (
        "import os, ray, jobs; from jobs import cli; cli.start_ray(); "
        "where = ray.remote(lambda: __import__('models').__file__); "
        "print('driver', jobs.__file__, 'task', ray.get(where.remote()), ray.cluster_resources()['CPU'])"
    )
    said = next(
        line
        for line in cluster.submit("python", "-c", program).splitlines()
        if line.startswith("driver")
    )
    _, driver, _, task, cpus = said.split()
    assert "working_dir_files/_ray_pkg_" in driver
    assert Path(driver).parents[1] == Path(task).parents[1]
    assert cpus == "2.0"


def test_prepare_and_train_on_the_cluster(
    cluster: Cluster, new_store: Callable[[Path], str], tmp_path: Path
) -> None:
    rows = raw_log(tmp_path / "raw")
    tables, runs = tmp_path / "tables", tmp_path / "runs"
    source = [
        "--source",
        str(tmp_path / "raw/source.yaml"),
        "--input",
        str(tmp_path / "raw"),
    ]
    uri = new_store(tmp_path)
    config = [
        *[
            "--config",
            "jobs/configs/sasrec.yaml",
            "--fit.max_epochs",
            "2",
            "--fit.batch_size",
            "16",
        ],
        "--tables",
        str(tables),
    ]
    place = [
        "--storage",
        str(runs),
        "--name",
        "ring",
        "--tracking_uri",
        uri,
        "--experiment",
        "retrieval/ring",
    ]
    prepare = ["python", "-m", "jobs.prepare", *source, "--output", str(tables)]
    train = ["python", "-m", "jobs.train", *config, *place]
    said = cluster.submit("sh", "-c", f"{shlex.join(prepare)} && {shlex.join(train)}")
    assert f"next: python -m jobs.audit --tables {tables}" in said
    assert read_table(str(tables / "events"), "events").num_rows == rows
    sequences = read_manifest(str(tables / "sequences"), "sequences")
    assert sequences.rows == 60
    assert sequences.info["requests"] == {"train": rows - 120, "val": 60, "test": 60}
    assert [rule.name for rule in audit(str(tables)) if rule.violations] == []

    assert "Trained sasrec for 2 epochs" in said
    assert (runs / "ring/best/model.safetensors").is_file()

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("retrieval/ring")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id in said
    assert run.info.status == "FINISHED"
    assert run.data.params["model.name"] == "sasrec"
    assert run.data.tags["table.sequences"] == sequences.hash
    steps = [
        point.step
        for point in client.get_metric_history(run.info.run_id, "val/ndcg_at_10")
    ]
    assert len(steps) == 2
    assert steps == sorted(set(steps))


def test_what_the_cluster_cannot_give_or_keep_is_refused(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Too many workers for the cluster, and an output in the working folder of the job."""
    tables, _ = write_tables(tmp_path)
    store = f"sqlite:///{tmp_path}/mlflow.db"
    line = [
        "python",
        "-m",
        "jobs.train",
        "--config",
        "jobs/configs/sasrec.yaml",
        "--tables",
        tables,
    ]
    line += [
        "--storage",
        str(tmp_path / "runs"),
        "--name",
        "n",
        "--tracking_uri",
        store,
        "--fit.batch_size",
        "256",
    ]
    raw_log(tmp_path / "raw")
    prepare = [
        "python",
        "-m",
        "jobs.prepare",
        "--source",
        str(tmp_path / "raw/source.yaml"),
    ]
    prepare += ["--input", str(tmp_path / "raw"), "--output", "tables"]
    said, kept = cluster.submit_refused([*line, "--ray.num_workers", "4"], prepare)
    assert (
        "4 workers need 4 CPUs, 1 CPU for each on one node; the cluster has 2 CPUs on 1 node, room for 2"
        in said
    )
    assert "no autoscaler to start more; lower --ray.num_workers" in said
    assert not (tmp_path / "runs/n").exists()
    assert "--output is tables, which lies in the job's own working folder" in kept


@pytest.fixture
def elsewhere(cluster: Cluster) -> Iterator[None]:
    """Start a second node of the cluster with another host name."""
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True).returncode:
        pytest.skip("another host name takes the right to unshare")
    names = [
        "node-manager-port",
        "object-manager-port",
        "dashboard-agent-listen-port",
        "dashboard-agent-grpc-port",
        "runtime-env-agent-port",
        "metrics-export-port",
    ]
    ports = free_ports(len(names) + WORKERS)
    line = [
        str(RAY),
        "start",
        "--address",
        f"{local_address(cluster)}:{cluster.gcs}",
        "--block",
        "--num-cpus",
        "1",
    ]
    line += ["--object-store-memory", "100000000", "--disable-usage-stats"]
    line += [
        "--temp-dir",
        str(cluster.folder / "2"),
    ]  # two nodes in one folder would unpack the same code over each other
    line += ["--worker-port-list", ",".join(ports[len(names) :])]
    line += [
        word
        for name, port in zip(names, ports, strict=False)
        for word in (f"--{name}", port)
    ]
    with open(cluster.folder / "node.log", "w") as log:
        node = subprocess.Popen(
            [
                "unshare",
                "--uts",
                "sh",
                "-c",
                'hostname elsewhere && exec "$@"',
                "sh",
                *line,
            ],
            env=cluster.env,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        while "Ray runtime started" not in (cluster.folder / "node.log").read_text():
            assert node.poll() is None, (cluster.folder / "node.log").read_text()[
                -2000:
            ]
            time.sleep(0.3)
        yield
    finally:
        node.terminate()
        try:
            node.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(node.pid, signal.SIGKILL)
            node.wait()


def local_address(cluster: Cluster) -> str:
    """Return the address at which the head tells nodes to join."""
    found = re.search(
        r"Local node IP.*?(\d+\.\d+\.\d+\.\d+)",
        (cluster.folder / "head.log").read_text(),
    )
    assert found
    return found[1]


def test_a_local_path_is_refused_on_two_machines_unless_it_is_shared(
    cluster: Cluster, elsewhere: None, tmp_path: Path
) -> None:
    raw_log(tmp_path / "raw")
    job = [
        "python",
        "-m",
        "jobs.prepare",
        "--source",
        str(tmp_path / "raw/source.yaml"),
        "--dry_run",
    ]
    job += ["--input", str(tmp_path / "raw"), "--output", str(tmp_path / "tables")]
    shared = ["env", f"TRIELINE_SHARED=/mnt:{tmp_path}", *job]
    both = cluster.submit("sh", "-c", f"! {shlex.join(job)} && {shlex.join(shared)}")
    assert "Traceback" not in both
    (said,) = {line for line in both.splitlines() if line.startswith("error: ")}
    assert (
        f"--input is {tmp_path}/raw, on the disk of one machine, and the cluster has 2"
        in said
    )
    assert f"TRIELINE_SHARED={tmp_path} in the env_vars of runtime_env.yaml" in said
    assert "makes the tables" in both
