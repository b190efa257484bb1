"""Test trainings and a sweep on two nodes with all storage at `s3://`.

The storage is behind a proxy that can delay and refuse requests.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event

import psutil
import pytest
from pyarrow import fs

from models.storage import checkpoint
from models.storage.attempts import Attempt
from models.storage.tables import open_uri
from pipelines.training.record import read_record
from tests import faults
from tests.fixtures.s3_proxy import S3Proxy, s3_proxy
from tests.fixtures.training_tables import write_tables

pytestmark = [pytest.mark.long, pytest.mark.exhaustive]

HOLD_CPUS = """
import sys, ray

@ray.remote(num_cpus=2)
class Holder:
    def has_started(self):
        return True

ray.init()
holders = [Holder.remote() for _ in range(2)]
ray.get([holder.has_started.remote() for holder in holders])
print("started", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def proxy(s3: str) -> Iterator[S3Proxy]:
    """Start a proxy of the S3 server; the environment points to the proxy."""
    with s3_proxy() as proxy:
        yield proxy


@pytest.fixture(scope="module")
def deployment(proxy: S3Proxy) -> Iterator[faults.Deployment]:
    """Start a cluster whose head runs no workers, and an MLflow server."""
    with faults.open_deployment(head_cpus=0) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def tables(deployment: faults.Deployment) -> str:
    """Write the tables of a small log; return their folder."""
    return write_tables(deployment.folder / "tables")[0]


def build_train_command(
    tables: str, storage: str, name: str, *options: str
) -> list[str]:
    """Return a command that trains with one worker on each of two nodes."""
    model = [f"--model.{key}={value}" for key, value in faults.MODEL.items()]
    line = ["jobs.train", *model, "--fit.batch_size=8", "--fit.patience=0"]
    line += ["--tables", tables, "--storage", storage, "--name", name]
    workers = ["--ray.num_workers=2", "--ray.placement_strategy=SPREAD"]
    return [*line, *workers, "--log_model=false", *options]


def list_folders(run: str) -> list[str]:
    """Return the names of the files and folders directly below a run."""
    filesystem, path = open_uri(run)
    infos = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
    return [info.base_name for info in infos]


def find_process(port: int) -> int | None:
    """Return the id of the process that has a connection from a local port."""
    for connection in psutil.net_connections("tcp"):
        if connection.laddr.port == port and connection.status == "ESTABLISHED":
            return connection.pid
    return None


def list_node_processes(
    deployment: faults.Deployment, pid: int
) -> list[psutil.Process]:
    """Return the processes of the node that runs a process, the raylet last."""
    for node in deployment.nodes:
        (raylet,) = node.all_processes["raylet"]
        parent = psutil.Process(raylet.process.pid)
        children = parent.children(recursive=True)
        if pid in [child.pid for child in children]:
            return [*children, parent]
    raise AssertionError(f"process {pid} runs on no node")


def send_signal(processes: list[psutil.Process], number: int) -> None:
    """Send a signal to the processes that still exist."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def test_a_paused_node_that_resumes_removes_no_checkpoint_of_the_new_attempt(
    deployment: faults.Deployment, proxy: S3Proxy, tables: str, s3: str
) -> None:
    run = f"{s3}/runs/paused"
    paused: list[psutil.Process] = []
    uploader: list[int] = []
    is_paused, is_resumed, has_written = Event(), Event(), Event()

    def pause_rank_0(line: str, port: int) -> None:
        """Pause the node of rank 0 while it uploads the weights of a later checkpoint."""
        if is_resumed.is_set():
            if not has_written.is_set() and find_process(port) == uploader[0]:
                has_written.set()
        elif re.match(r"(PUT|POST) /.*/step-\d+-a1\.1/model", line):
            if len(list_folders(run)) < 4 or is_paused.is_set():
                return
            pid = find_process(port)
            assert pid is not None
            uploader.append(pid)
            paused.extend(list_node_processes(deployment, pid))
            send_signal(paused, signal.SIGSTOP)
            is_paused.set()

    command = build_train_command(tables, f"{s3}/runs", "paused", "--fit.max_epochs=40")
    proxy.on_request = pause_rank_0
    training = deployment.start(command)
    try:
        lines = []
        for line in training.stdout or []:
            lines.append(line)
            output_of_new_attempt = "".join(lines).partition("continuing ")[2]
            num_epochs = output_of_new_attempt.count("\nepoch")
            if num_epochs >= 2 and not is_resumed.is_set():
                is_resumed.set()
                # The workers resume before their raylet, which may end them.
                send_signal(paused[:-1], signal.SIGCONT)
                assert has_written.wait(60)
                send_signal(paused, signal.SIGCONT)
        assert training.wait() == 0, "".join(lines[-20:])
    finally:
        proxy.on_request = lambda line, port: None
        send_signal(paused, signal.SIGCONT)
        training.kill()

    assert is_paused.is_set()
    assert "continuing from the last checkpoint, 1 of 2 times" in "".join(lines)
    record = read_record(run)
    assert record is not None
    assert (record["status"], record["epochs"]) == ("finished", 40)
    last = checkpoint.last(run)
    assert last is not None
    assert Attempt.parse(last.attempt) > Attempt(1, 1)
    for folder in (last.folder, last.best_folder, checkpoint.BEST):
        checkpoint.read(f"{run}/{folder}")


def test_tables_replaced_while_a_training_waits_for_nodes_are_refused(
    deployment: faults.Deployment, s3: str, tmp_path: Path
) -> None:
    tables, _ = write_tables(deployment.folder / "small")
    other, _ = write_tables(tmp_path / "other", parts=3)
    deployment.replace_lost_nodes()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_CPUS],
        env=deployment.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        while holder.stdout.readline() != "started\n":
            assert holder.poll() is None
        command = build_train_command(tables, f"{s3}/runs", "replaced")
        training = deployment.start(command)
        lines = []
        for line in training.stdout or []:
            lines.append(line)
            if line.startswith("waiting for 2 x {CPU: 1}"):
                for source in Path(other, "sequences").iterdir():
                    shutil.copy(source, Path(tables, "sequences"))
                holder.kill()
        code = training.wait()
    finally:
        holder.kill()
        holder.wait()

    assert code == 1
    (error,) = [line for line in lines if line.startswith("error: ")]
    assert "the table 'sequences' was replaced since this job checked it" in error
    folders = list_folders(f"{s3}/runs/replaced")
    assert not [name for name in folders if "step-" in name]


def test_a_training_survives_half_a_minute_of_status_503(
    deployment: faults.Deployment, proxy: S3Proxy, tables: str, s3: str
) -> None:
    deployment.replace_lost_nodes()
    command = build_train_command(tables, f"{s3}/runs", "busy", "--fit.max_epochs=20")

    training = deployment.start(command)
    lines = []
    for line in training.stdout or []:
        lines.append(line)
        if line.startswith("epoch") and " 2/20" in line:
            refused_before = proxy.refused
            proxy.busy_until = time.monotonic() + 30

    assert training.wait() == 0, "".join(lines[-20:])
    assert proxy.refused > refused_before + 2
    # An interrupted answer may cost one restart, a refused request none.
    assert not [line for line in lines if "2 of 2 times" in line]


def test_a_sweep_with_a_failed_trial_marks_its_best_as_of_an_incomplete_grid(
    deployment: faults.Deployment, tables: str, s3: str, tmp_path: Path
) -> None:
    deployment.replace_lost_nodes()
    grid = tmp_path / "grid.yaml"
    content = {
        "source": "a test",
        "config": str(faults.ROOT / "jobs/configs/sasrec.yaml"),
        "axes": {"fit.lr": [0.002, 1e30]},
        "fixed": {"fit.max_epochs": 1, "fit.batch_size": 8, "model.dim": 16},
        "metric": "val/ndcg@10",
    }
    grid.write_text(json.dumps(content))
    command = ["jobs.sweep", "--grid", str(grid), "--tables", tables]
    command += ["--storage", f"{s3}/runs", "--name", "incomplete"]

    sweep = deployment.start(command)
    output, _ = sweep.communicate()

    assert sweep.returncode == 1, output[-2000:]
    (error,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "1 of 2 trials failed" in error
    assert "an incomplete grid" in error
    filesystem, path = open_uri(f"{s3}/runs/incomplete/trials.json")
    with filesystem.open_input_stream(path) as file:
        result = json.loads(file.read())
    assert not result["complete"]
    statuses = {trial["name"]: trial["status"] for trial in result["trials"]}
    assert sorted(statuses.values()) == ["failed", "finished"]
    assert statuses[result["best"]] == "finished"
