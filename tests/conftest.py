"""Fixtures that more than one folder of tests uses."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # on loopback alone, as jobs.cli has it
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


LONG = ("tests/tuning/test_sweep", "tests/pipelines/training", "tests/integration", "tests/jobs")
"""Tests that start clusters, trainings and commands."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long ones come first, so that several workers end at about the same time."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


@pytest.fixture(scope="session", autouse=True)
def threads() -> int:
    """PyTorch's threads at the start."""
    import torch

    return torch.get_num_threads()


@pytest.fixture(autouse=True)
def same_threads(threads: int) -> Iterator[None]:
    """Benchmarks set their own, and sums by another number of threads differ in their last digits."""
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
