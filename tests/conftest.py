"""Fixtures that several folders of tests share, and the mark of long tests."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# An example may take long once on a busy machine.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")
os.environ.setdefault("RAY_AUTH_MODE", "token")
# Ray listens only on loopback, as jobs.cli sets it.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TRIELINE_CACHE", tempfile.mkdtemp(prefix="trieline-test-cache-"))
os.environ.setdefault("RAY_worker_niceness", "0")
# Also for processes that join the shared Ray.
os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
# With it, each process that a test starts would compile the project anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Workers without Ray Train are forked from a process that has imported the loop. It
# starts with the first of them.
multiprocessing.set_forkserver_preload(
    [
        "pipelines.training.worker",
        "models.retrieval.tiger.tiger",
        "models.actions.fusions",
    ]
)

LONG_FIXTURES = {"ray_local", "trained", "taught", "s3"}
"""Fixtures that start Ray or a server, or train. Tests that use one, also through other
fixtures, are long."""

SHARED = Path(__file__).parents[2] / "shared"
"""Public logs beside the checkout."""

running_fast_test: list[pytest.Item] = []
"""The fast test that runs or is set up, if any."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add marks to tests, and sort files with long tests first.

    Tests are long by their fixtures or as exhaustive. Tests of the logs beside the
    checkout are skipped without the logs. With the long files first, the workers of
    pytest-xdist end at about the same time.
    """
    for item in items:
        if item.get_closest_marker("shared_data") and not SHARED.is_dir():
            item.add_marker(pytest.mark.skip(f"{SHARED} does not exist"))
        uses_long = LONG_FIXTURES & set(getattr(item, "fixturenames", ()))
        if uses_long or item.get_closest_marker("exhaustive"):
            item.add_marker("long")
    files = {item.path for item in items if item.get_closest_marker("long")}
    items.sort(key=lambda item: item.path not in files)


def refuse_processes(event: str, arguments: tuple[Any, ...]) -> None:
    """Raise an error if a fast test starts Python, Ray or MLflow.

    Compilers and git are allowed.
    """
    if event != "subprocess.Popen" or not running_fast_test:
        return
    program = os.fsdecode(arguments[0])
    if Path(program).name.startswith(("python", "ray", "mlflow")) or "/ray/" in program:
        raise RuntimeError(
            f"{running_fast_test[0].nodeid} starts {program} and is not marked as long; mark it with pytest.mark.long, or let "
            f"it use the shared Ray of the fixture ray_local"
        )


sys.addaudithook(refuse_processes)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Record the running test if it is fast."""
    running_fast_test[:] = [] if item.get_closest_marker("long") else [item]
    try:
        return (yield)
    finally:
        running_fast_test.clear()


@pytest.fixture(scope="session", autouse=True)
def threads() -> int:
    """Return the number of PyTorch's threads at the start."""
    import torch

    return torch.get_num_threads()


@pytest.fixture(autouse=True)
def same_threads(threads) -> Iterator[None]:
    """Restore the number of PyTorch's threads, which benchmarks change.

    Sums by another number of threads differ in their last digits.
    """
    import torch

    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def ray_local() -> Iterator[None]:
    """Start a local Ray for all tests of the process, as starting one takes seconds."""
    import ray

    from pipelines.start import start_ray

    start_ray(num_cpus=2)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> tuple[str, str]:
    """Write the data set `small`; return its folders of tables and of semantic IDs.

    Tests must not change them.
    """
    from tests.fixtures.training_tables import write_tables

    return write_tables(tmp_path_factory.mktemp("tables") / "small")


@pytest.fixture(scope="session")
def new_store() -> Callable[[Path], str]:
    """Return a function that creates an empty MLflow store in a folder."""
    from pipelines import tracking

    def create(folder: Path) -> str:
        """Create a store, and return its URI."""
        uri = f"sqlite:///{folder}/mlflow.db"
        tracking.connect(uri)
        return uri

    return create


@pytest.fixture(scope="session")
def in_ray(ray_local) -> dict[str, str]:
    """Return the environment of a command that joins the shared Ray."""
    import ray

    return {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """Start a local S3 server; return the URI of a bucket.

    The environment of this process and of its children points to the server.
    """
    import socket
    import uuid

    import boto3
    from moto.server import ThreadedMotoServer

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    server = ThreadedMotoServer("127.0.0.1", port, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # a line per request
    server.start()
    # A new name, as a process checks each bucket only once.
    bucket = f"bucket-{uuid.uuid4().hex[:8]}"
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
