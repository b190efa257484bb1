"""Fixtures that more than one folder of tests uses, and what tells the long tests from
the fast ones.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile(
    "tests", deadline=None
)  # a busy machine takes longer for an example, once
settings.load_profile("tests")
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault(
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0"
)  # on loopback alone, as jobs.cli has it
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TRIELINE_CACHE", tempfile.mkdtemp(prefix="trieline-test-cache-"))
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault(
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0"
)  # also in what joins the shared Ray
os.environ.pop(
    "PYTHONDONTWRITEBYTECODE", None
)  # else each process that a test starts compiles the project anew

# Workers without Ray Train are forked from a process that has imported the loop,
# started when first asked for.
multiprocessing.set_forkserver_preload(
    ["pipelines.training.worker", "models.retrieval.tiger", "models.actions.fusions"]
)

LONG = {"ray_local", "trained", "taught", "s3"}
"""Fixtures that start Ray or a server, or train for long: who takes one, also by way of
others, is long."""

running: list[pytest.Item] = []
"""The fast test that runs, with its set-up, or none."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests as long by their fixtures or as exhaustive, and sort their files first.

    The longest files come first so that all workers end at about the same time.
    """
    for item in items:
        takes_long = LONG & set(getattr(item, "fixturenames", ()))
        if takes_long or item.get_closest_marker("exhaustive"):
            item.add_marker("long")
    files = {item.path for item in items if item.get_closest_marker("long")}
    items.sort(key=lambda item: item.path not in files)


def refuse_processes(event: str, arguments: tuple[Any, ...]) -> None:
    """A fast test starts no Python, Ray or MLflow; compilers and git are no matter."""
    if event != "subprocess.Popen" or not running:
        return
    program = os.fsdecode(arguments[0])
    if Path(program).name.startswith(("python", "ray", "mlflow")) or "/ray/" in program:
        raise RuntimeError(
            f"{running[0].nodeid} starts {program} and is not marked as long; mark it with pytest.mark.long, or let "
            f"it use the shared Ray of the fixture ray_local"
        )


sys.addaudithook(refuse_processes)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    running[:] = [] if item.get_closest_marker("long") else [item]
    try:
        return (yield)
    finally:
        running.clear()


@pytest.fixture(scope="session", autouse=True)
def threads() -> int:
    """PyTorch's threads at the start."""
    import torch

    return torch.get_num_threads()


@pytest.fixture(autouse=True)
def same_threads(threads: int) -> Iterator[None]:
    """Benchmarks set their own, and sums by another number of threads differ in their
    last digits.
    """
    import torch

    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def ray_local() -> Iterator[None]:
    """One local Ray for the whole test run: starting one takes seconds."""
    import ray

    from jobs import cli

    cli.start_ray(num_cpus=2)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """(TABLES, SIDS) of the data set `small`, to be read alone."""
    from tests.fixtures.training_tables import write_tables

    return write_tables(tmp_path_factory.mktemp("tables") / "small")


@pytest.fixture(scope="session")
def new_store(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], str]:
    """Puts an empty MLflow store `mlflow.db` into a folder and gives its URI: a copy,
    as making one takes seconds.
    """
    from pipelines import tracking

    template = tmp_path_factory.mktemp("store") / "mlflow.db"
    tracking.connect(f"sqlite:///{template}")

    def copy(folder: Path) -> str:
        folder.mkdir(parents=True, exist_ok=True)
        with (
            sqlite3.connect(template) as source,
            sqlite3.connect(folder / "mlflow.db") as target,
        ):
            source.backup(target)
        return f"sqlite:///{folder}/mlflow.db"

    return copy


@pytest.fixture(scope="session")
def in_ray(ray_local: None) -> dict[str, str]:
    """Environment of a command that joins this Ray, instead of starting one of its own."""
    import ray

    return {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A bucket of a local S3 server; the environment says where it is, to this process
    and those that it starts.
    """
    import socket
    import uuid

    import boto3
    from moto.server import ThreadedMotoServer

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = ThreadedMotoServer("127.0.0.1", port, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # a line per request
    server.start()
    bucket = (
        f"bucket-{uuid.uuid4().hex[:8]}"  # of its own: a process greets a bucket once
    )
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }.items():
            environment.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket=bucket)
        yield f"s3://{bucket}"
    server.stop()
