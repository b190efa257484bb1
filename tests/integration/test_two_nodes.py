"""Test trainings and a sweep on two nodes with all storage at `s3://`.

The storage is behind a proxy that can delay and refuse requests.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import suppress
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
