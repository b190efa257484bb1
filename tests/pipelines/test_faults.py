"""Test that errors of disks, storage, memory and lost processes become one line."""

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
from ray.exceptions import RuntimeEnvSetupError
from ray.train import ControllerError, WorkerGroupError

from models.storage.tables import UserError
from pipelines.faults import explain, find_user_error, is_permanent

ROOT = Path(__file__).parents[2]
LARGE = torch.zeros(1 << 20)


def fill_sqlite(folder: Path) -> None:
    """Write more to an SQLite file than its maximal number of pages."""
    store = sqlite3.connect(folder / "store.db")
    store.execute("PRAGMA max_page_count = 4")
    store.execute("CREATE TABLE t (x)")
    store.execute("INSERT INTO t VALUES (zeroblob(1000000))")


def write_large_parquet(folder: Path) -> None:
    """Write a Parquet file of 4 MB."""
    table = pa.table({"x": np.random.default_rng(0).random(1 << 19)})
    with fs.LocalFileSystem().open_output_stream(str(folder / "x.parquet")) as stream:
        pq.write_table(table, stream)


@contextmanager
def limit_file_size() -> Iterator[None]:
    """Limit the files of this process to 1 MB.

    /dev/full is no substitute: some libraries replace it by a new file.
    """
    _, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard_limit))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard_limit, hard_limit))


@pytest.mark.parametrize(
    "fill",
    [
        lambda folder: (folder / "x").write_bytes(bytes(1 << 21)),
        lambda folder: torch.save({"w": LARGE}, folder / "x.pt"),
        lambda folder: torch.save({"w": LARGE}, (folder / "x.pt").open("wb")),
        lambda folder: safetensors.torch.save_file(
            {"w": LARGE}, folder / "x.safetensors"
        ),
        fill_sqlite,
        write_large_parquet,
    ],
)
def test_a_full_disk_is_recognised_in_the_error_of_every_library(
    fill: Callable[[Path], object], tmp_path: Path
) -> None:
    with limit_file_size(), pytest.raises(Exception) as error:  # noqa: PT011
        fill(tmp_path)

    line = str(explain(error.value))
    assert line.startswith("the disk is full (")
    assert "free some space, then run the same command again" in line
    assert is_permanent(error.value)


def test_a_full_disk_is_reported_with_the_node_and_path_of_the_error() -> None:
    setup_error = RuntimeError(
        "Training failed due to controller error:\nFailed to set up the runtime environment.\n"
        "[Node 192.0.2.7] OSError: [Errno 28] No space left on device: '/tmp/ray/2/x'"
    )
    task_error = OSError(28, "No space left on device", "/mnt/spill/part")
    task_error.__cause__ = RuntimeError("ray::read() (pid=41, ip=192.0.2.8)")

    assert str(explain(setup_error)).startswith(
        "the disk is full on node 192.0.2.7 at /tmp/ray/2/x ([Node 192.0.2.7] OSError: [Errno 28] No space"
    )
    assert str(explain(task_error)).startswith(
        "the disk is full on node 192.0.2.8 at /mnt/spill/part ([Errno 28] No space left"
    )


def test_a_full_temporary_folder_of_ray_is_reported_with_its_remedy() -> None:
    error = ControllerError(
        RuntimeEnvSetupError(
            "Could not create the actor because its associated runtime env failed to "
            "be created.\n[Node 192.0.2.7] Traceback (most recent call last):\n"
            "OSError: [Errno 28] No space left on device"
        )
    )

    assert str(explain(error)).startswith(
        "the disk is full on node 192.0.2.7 in Ray's temporary folder (OSError: [Errno "
        "28] No space left on device); free some space and restart Ray on that node, "
        "which else repeats the error, then run the same command again"
    )
    assert is_permanent(error)


def test_a_missing_file_of_the_storage_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file") as error:
        (tmp_path / "gone/run.json").read_bytes()

    line = str(explain(error.value))
    assert f"{tmp_path}/gone/run.json: No such file or directory" in line
    assert not is_permanent(error.value)


def test_a_lost_peer_of_gloo_is_reported() -> None:
    error = RuntimeError(
        "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:31432: Connection reset "
        "by peer. This is typically caused by a remote worker hanging or bugs in the application."
    )
    line = str(explain(error))
    assert line.startswith(
        "a training worker lost another one (Read error [127.0.0.1]:31432: Connection reset by peer);"
    )
    assert not is_permanent(error)


def test_an_s3_server_that_mlflow_cannot_reach_is_reported() -> None:
    from botocore.exceptions import EndpointConnectionError

    error = EndpointConnectionError(
        endpoint_url="http://127.0.0.1:9/bucket", error="refused"
    )

    assert str(explain(error)).startswith(
        'S3 fails (Could not connect to the endpoint URL: "http://127.0.0.1:9/bucket"); see that'
    )


def test_defects_are_not_explained() -> None:
    def raise_defect_while_handling() -> None:
        try:
            os.stat("/nowhere")
        except OSError:
            _ = {}["defect"]

    with pytest.raises(KeyError) as error:
        raise_defect_while_handling()

    # The error that was being handled is not the cause.
    assert explain(error.value) is None
    assert find_user_error(error.value) is None
    assert explain(ValueError("no disk is meant")) is None


def test_user_errors_are_permanent() -> None:
    assert is_permanent(UserError("lower fit.lr"))


JOB = """
from dataclasses import dataclass
from jobs import cli

@dataclass
class Config:
    "A job."
    path: str = "/dev/full"

def run(config):
    with open(config.path, "w") as file:
        file.write("x")

cli.main(run, Config)
"""


@pytest.mark.long
def test_a_job_ends_with_one_line_and_writes_the_traceback_to_a_file(
    tmp_path: Path,
) -> None:
    (tmp_path / "job.py").write_text(JOB)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{tmp_path}",
        "TMPDIR": str(tmp_path),
    }

    process = subprocess.run(
        [sys.executable, "-m", "job"], env=environment, capture_output=True, text=True
    )

    assert process.returncode == 1
    (line,) = process.stderr.splitlines()
    assert line.startswith(
        "error: the disk is full ([Errno 28] No space left on device); free some space, then"
    )
    log = Path(line.rpartition("traceback in ")[2].rstrip(")"))
    assert "Traceback (most recent call last)" in log.read_text()


def test_a_lack_of_memory_is_reported_and_permanent() -> None:
    with pytest.raises(RuntimeError) as torch_error:
        torch.empty(1 << 50, dtype=torch.uint8)
    with pytest.raises(MemoryError) as numpy_error:
        np.empty(1 << 60, dtype=np.uint8)
    errors = [
        torch_error.value,
        numpy_error.value,
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        WorkerGroupError("Training failed", {1: torch_error.value}),
    ]

    lines = [str(explain(error)) for error in errors]

    assert [line.partition(" (")[0] for line in lines] == [
        "the memory does not suffice",
        "the memory does not suffice",
        "the GPU's memory does not suffice",
        "the memory does not suffice",
    ]
    assert all("use smaller batches" in line for line in lines)
    assert all(map(is_permanent, errors))


def test_a_lost_peer_of_nccl_is_reported() -> None:
    error = torch.distributed.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp")

    assert str(explain(error)).startswith("a training worker lost another one (NCCL")
    assert not is_permanent(error)
