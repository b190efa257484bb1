"""Fixtures that more than one folder of tests uses."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(scope="session")
def ray_local() -> Iterator[None]:
    """One local Ray for the whole test run: starting one takes seconds."""
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level=logging.WARNING, log_to_driver=False)
    yield
    ray.shutdown()
