"""A command in a shell whose Python has not the packages of .venv."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import jobs

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.parametrize("job", ["quickstart", "prepare", "train"])
def test_it_says_how_to_get_them(job: str) -> None:
    bare = [sys.executable, "-S", "-m", f"jobs.{job}", "--help"]  # -S: without site-packages
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(bare, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        f"error: {sys.executable} has no package jsonargparse and {len(jobs.NEEDED) - 1} more, which this command "
        f"needs; run `source .venv/bin/activate` (or `make setup` first, which makes .venv), then the same line again\n"
    )


@pytest.mark.long
def test_one_alone_is_named_and_no_other_error_is_taken_for_it(tmp_path: Path) -> None:
    for name in jobs.NEEDED[1:]:
        (tmp_path / name).mkdir()
    bare = [sys.executable, "-S", "-m", "jobs.prepare"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(bare, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "has no package jsonargparse, which" in done.stderr
    (tmp_path / "jsonargparse").mkdir()
    done = subprocess.run(bare, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_all_dependencies_are_looked_for() -> None:
    words = {"scikit-learn": "sklearn", "pyyaml": "yaml"}
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = [line.split(">=")[0].split("[")[0] for line in declared]
    assert sorted(words.get(name, name) for name in names) == sorted(jobs.NEEDED)
