"""The mark `long`: who may start processes, and that nobody else does."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "program", [sys.executable, "ray", "/bin/mlflow", "/somewhere/ray/core/src/ray/gcs/gcs_server"], ids=range(4)
)
def test_a_test_that_is_not_long_starts_no_python_and_no_server(program: str) -> None:
    with pytest.raises(RuntimeError, match=rf"server\[\d\] starts {program} and is not marked as long; mark it with"):
        subprocess.run([program, "--version"])


def test_it_may_ask_other_programs() -> None:
    assert subprocess.run(["true"]).returncode == 0


@pytest.mark.long
def test_a_long_one_starts_what_it_needs() -> None:
    assert subprocess.run([sys.executable, "-c", ""]).returncode == 0


def test_who_takes_the_shared_ray_is_long(request: pytest.FixtureRequest) -> None:
    users = [item for item in request.session.items if "ray_local" in getattr(item, "fixturenames", ())]
    assert [item.nodeid for item in users if item.get_closest_marker("long") is None] == []
