"""Faults of the machines in one line: what a full disk or a lost storage says through
each library.
"""

from __future__ import annotations

import os
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
from pyarrow import fs
from ray.train import WorkerGroupError

from models.storage.tables import UserError
from pipelines.faults import explain, find_user_error, is_permanent

ROOT = Path(__file__).parents[2]
WIDE = torch.zeros(1 << 20)


def sqlite_full(folder: Path) -> None:
    store = sqlite3.connect(folder / "store.db")
    store.execute("PRAGMA max_page_count = 4")
    store.execute("CREATE TABLE t (x)")
    store.execute("INSERT INTO t VALUES (zeroblob(1000000))")


def arrow_full(folder: Path) -> None:
    with fs.LocalFileSystem().open_output_stream(str(folder / "x.parquet")) as stream:
        pq.write_table(
            pa.table({"x": np.random.default_rng(0).random(1 << 19)}), stream
        )


@contextmanager
def no_room() -> Iterator[None]:
    """Files of this process end at 1 MB: not /dev/full, which some libraries replace by
    a file where they may.
    """
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


@pytest.mark.parametrize(
    "fill",
    [
        lambda folder: (folder / "x").write_bytes(bytes(1 << 21)),
        lambda folder: torch.save({"w": WIDE}, folder / "x.pt"),
        lambda folder: torch.save({"w": WIDE}, (folder / "x.pt").open("wb")),
        lambda folder: safetensors.torch.save_file(
            {"w": WIDE}, folder / "x.safetensors"
        ),
        sqlite_full,
        arrow_full,
    ],
)
def test_a_full_disk_is_told_by_every_library(
    fill: Callable[[Path], object], tmp_path: Path
) -> None:
    with no_room(), pytest.raises(Exception) as caught:  # noqa: PT011
        fill(tmp_path)
    assert str(explain(caught.value)).startswith("the disk is full (")
    assert "free some space, then run the same command again" in str(
        explain(caught.value)
    )
    assert is_permanent(caught.value)


def test_a_full_disk_is_told_with_node_and_path_where_the_error_has_them() -> None:
    setup = RuntimeError(
        "Training failed due to controller error:\nFailed to set up the runtime environment.\n"
        "[Node 192.0.2.7] OSError: [Errno 28] No space left on device: '/tmp/ray/2/x'"
    )
    task = OSError(28, "No space left on device", "/mnt/spill/part")
    task.__cause__ = RuntimeError("ray::read() (pid=41, ip=192.0.2.8)")

    line, of_task = str(explain(setup)), str(explain(task))

    assert line.startswith(
        "the disk is full on node 192.0.2.7 at /tmp/ray/2/x ([Node 192.0.2.7] OSError: [Errno 28] No space"
    )
    assert of_task.startswith(
        "the disk is full on node 192.0.2.8 at /mnt/spill/part ([Errno 28] No space left"
    )


def test_a_lost_storage_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file") as caught:
        (tmp_path / "gone/run.json").read_bytes()
    line = str(explain(caught.value))
    assert f"{tmp_path}/gone/run.json: No such file or directory" in line
    assert not is_permanent(caught.value)


def test_a_worker_that_others_wait_for_is_named() -> None:
    said = RuntimeError(
        "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:31432: Connection reset "
        "by peer. This is typically caused by a remote worker hanging or bugs in the application."
    )
    line = str(explain(said))
    assert line.startswith(
        "a training worker lost another one (Read error [127.0.0.1]:31432: Connection reset by peer);"
    )
    assert not is_permanent(said)


def test_an_s3_that_mlflow_cannot_reach_is_a_line() -> None:
    from botocore.exceptions import EndpointConnectionError

    line = str(
        explain(
            EndpointConnectionError(
                endpoint_url="http://127.0.0.1:9/bucket", error="refused"
            )
        )
    )
    assert line.startswith(
        'S3 fails (Could not connect to the endpoint URL: "http://127.0.0.1:9/bucket"); see that'
    )


def test_defects_keep_their_tracebacks() -> None:
    def defect() -> None:
        try:
            os.stat("/nowhere")
        except OSError:
            _ = {}["defect"]

    with pytest.raises(KeyError) as caught:
        defect()
    assert explain(caught.value) is None  # what was being handled is not why
    assert find_user_error(caught.value) is None
    assert explain(ValueError("no disk is meant")) is None
    assert is_permanent(UserError("lower fit.lr"))


JOB = """
from dataclasses import dataclass
from jobs import cli

@dataclass
class Config:
    "A job."
    place: str = "/dev/full"

def run(config):
    with open(config.place, "w") as file:
        file.write("x")

cli.main(run, Config)
"""


@pytest.mark.long
def test_a_job_ends_with_one_line_and_keeps_the_traceback(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{tmp_path}",
        "TMPDIR": str(tmp_path),
    }
    line = [sys.executable, "-m", "job"]
    ended = subprocess.run(line, env=environment, capture_output=True, text=True)
    assert ended.returncode == 1
    (said,) = ended.stderr.splitlines()
    assert said.startswith(
        "error: the disk is full ([Errno 28] No space left on device); free some space, then"
    )
    kept = Path(said.rpartition("traceback in ")[2].rstrip(")"))
    assert "Traceback (most recent call last)" in kept.read_text()


def test_memory_that_does_not_suffice_is_told_and_not_tried_again() -> None:
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(1 << 50, dtype=torch.uint8)
    with pytest.raises(MemoryError) as of_numpy:
        np.empty(1 << 60, dtype=np.uint8)
    of_gpu = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    of_worker = WorkerGroupError("Training failed", {1: of_torch.value})

    lines = [
        explain(error) for error in (of_torch.value, of_numpy.value, of_gpu, of_worker)
    ]

    assert [str(line).partition(" (")[0] for line in lines] == [
        "the memory does not suffice",
        "the memory does not suffice",
        "the GPU's memory does not suffice",
        "the memory does not suffice",
    ]
    assert all("use smaller batches" in str(line) for line in lines)
    assert all(map(is_permanent, (of_torch.value, of_numpy.value, of_gpu, of_worker)))


def test_a_lost_peer_of_nccl_is_told() -> None:
    error = torch.distributed.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp")

    assert str(explain(error)).startswith("a training worker lost another one (NCCL")
    assert not is_permanent(error)
