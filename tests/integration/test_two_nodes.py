"""Trainings with one worker on each of two nodes and everything at `s3://`, behind a
proxy that fails on request.
"""

from __future__ import annotations

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
    with s3_proxy() as proxy:
        yield proxy


@pytest.fixture(scope="module")
def world(proxy: S3Proxy) -> Iterator[faults.World]:
    with faults.world(head_cpus=0) as world:
        yield world


@pytest.fixture(scope="module")
def tables(world: faults.World) -> str:
    return write_tables(world.folder / "tables")[0]


def train_line(tables: str, storage: str, name: str, *options: str) -> list[str]:
    model = [f"--model.{key}={value}" for key, value in faults.MODEL.items()]
    line = ["jobs.train", *model, "--fit.batch_size=8", "--fit.patience=0"]
    line += ["--tables", tables, "--storage", storage, "--name", name]
    workers = ["--ray.num_workers=2", "--ray.placement_strategy=SPREAD"]
    return [*line, *workers, "--log_model=false", *options]


def folders(run: str) -> list[str]:
    filesystem, path = open_uri(run)
    infos = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
    return [info.base_name for info in infos]


def find_process(port: int) -> int | None:
    """Return the id of the process that has a connection from a local port."""
    for connection in psutil.net_connections("tcp"):
        if connection.laddr.port == port and connection.status == "ESTABLISHED":
            return connection.pid
    return None


def node_processes(world: faults.World, pid: int) -> list[psutil.Process]:
    """Return the workers and then the raylet of the node that a process runs on."""
    for node in world.nodes:
        (raylet,) = node.all_processes["raylet"]
        parent = psutil.Process(raylet.process.pid)
        children = parent.children(recursive=True)
        if pid in [child.pid for child in children]:
            return [*children, parent]
    raise AssertionError(f"process {pid} runs on no node")


def send_signal(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def test_a_paused_node_that_wakes_up_removes_no_checkpoint_of_the_new_attempt(
    world: faults.World, proxy: S3Proxy, tables: str, s3: str
) -> None:
    run = f"{s3}/runs/paused"
    paused: list[psutil.Process] = []
    uploader: list[int] = []
    is_paused, is_awake, has_written = Event(), Event(), Event()

    def pause_rank_0(line: str, port: int) -> None:
        """Pause the node of rank 0 while the weights of a later checkpoint are on their
        way.
        """
        if is_awake.is_set():
            if not has_written.is_set() and find_process(port) == uploader[0]:
                has_written.set()
        elif re.match(r"(PUT|POST) /.*/step-\d+-a1\.1/model", line):
            if len(folders(run)) < 4 or is_paused.is_set():
                return
            pid = find_process(port)
            assert pid is not None
            uploader.append(pid)
            paused.extend(node_processes(world, pid))
            send_signal(paused, signal.SIGSTOP)
            is_paused.set()

    line = train_line(tables, f"{s3}/runs", "paused", "--fit.max_epochs=40")
    proxy.on_request = pause_rank_0
    training = world.start(line)
    try:
        printed = []
        for text in training.stdout or []:
            printed.append(text)
            continued = "".join(printed).partition("continuing ")[2]
            if continued.count("\nepoch") >= 2 and not is_awake.is_set():
                is_awake.set()
                send_signal(paused[:-1], signal.SIGCONT)
                assert has_written.wait(60)
                send_signal(paused, signal.SIGCONT)
        assert training.wait() == 0, "".join(printed[-20:])
    finally:
        proxy.on_request = lambda line, port: None
        send_signal(paused, signal.SIGCONT)
        training.kill()

    assert is_paused.is_set()
    assert "continuing from the last checkpoint, 1 of 2 times" in "".join(printed)
    record = read_record(run)
    assert record is not None
    assert (record["status"], record["epochs"]) == ("finished", 40)
    last = checkpoint.last(run)
    assert last is not None
    assert Attempt.parse(last.attempt) > Attempt(1, 1)
    for folder in (last.folder, last.best_folder, checkpoint.BEST):
        checkpoint.read(f"{run}/{folder}")


def test_tables_replaced_while_a_training_waits_for_nodes_are_refused(
    world: faults.World, s3: str, tmp_path: Path
) -> None:
    tables, _ = write_tables(world.folder / "small")
    other, _ = write_tables(tmp_path / "other", parts=3)
    world.mend()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_CPUS],
        env=world.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        while holder.stdout.readline() != "started\n":
            assert holder.poll() is None
        training = world.start(train_line(tables, f"{s3}/runs", "replaced"))
        printed = []
        for text in training.stdout or []:
            printed.append(text)
            if text.startswith("waiting for 2 x {CPU: 1}"):
                for source in Path(other, "sequences").iterdir():
                    shutil.copy(source, Path(tables, "sequences"))
                holder.kill()
        code = training.wait()
    finally:
        holder.kill()
        holder.wait()

    assert code == 1
    (error,) = [text for text in printed if text.startswith("error: ")]
    assert "the table 'sequences' was replaced since this job checked it" in error
    assert not [name for name in folders(f"{s3}/runs/replaced") if "step-" in name]


def test_a_training_outlives_half_a_minute_of_503(
    world: faults.World, proxy: S3Proxy, tables: str, s3: str
) -> None:
    world.mend()
    line = train_line(tables, f"{s3}/runs", "busy", "--fit.max_epochs=20")

    training = world.start(line)
    printed = []
    for text in training.stdout or []:
        printed.append(text)
        if text.startswith("epoch") and " 2/20" in text:
            refused = proxy.refused
            proxy.busy_until = time.monotonic() + 30

    assert training.wait() == 0, "".join(printed[-20:])
    assert proxy.refused > refused + 2
    # an answer that is cut off midway may cost one restart, a refused request none
    assert not [text for text in printed if "2 of 2 times" in text]
