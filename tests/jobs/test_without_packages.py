"""A command in a shell whose Python has not the packages of .venv."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import venv
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


@pytest.mark.long
@pytest.mark.parametrize("bare", [True, False])
def test_an_unfinished_environment_is_named_with_its_remedy(bare: bool, tmp_path: Path) -> None:
    """A .venv beside the jobs, whose setup was broken off, is not to be activated; another one does not mind it."""
    shutil.copytree(ROOT / "jobs", tmp_path / "jobs", ignore=shutil.ignore_patterns("configs", "__pycache__"))
    venv.create(tmp_path / ".venv", with_pip=False)
    (tmp_path / ".venv/.unfinished").touch()
    site = next((tmp_path / ".venv/lib").glob("python*")) / "site-packages"
    for name in jobs.NEEDED[: 0 if bare else None]:  # all have been unpacked, and perhaps not to the end
        (site / name).mkdir()

    def said(python: Path | str, *flags: str) -> str:
        line = [str(python), *flags, "-m", "jobs.prepare", "--help"]
        environment = {**os.environ, "PYTHONPATH": ""}
        return subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True).stderr

    remedy = f"{tmp_path}/.venv is unfinished, as its setup was broken off or is at work; run `make setup`, which goes"
    assert said(tmp_path / ".venv/bin/python").endswith(f"{remedy} on with it, then the same line again\n")
    assert remedy + " on with it, and `source .venv/bin/activate`, then" in said(sys.executable, "-S")
    assert "unfinished" not in said(sys.executable)


def test_setup_says_each_step_and_marks_what_is_unfinished(tmp_path: Path) -> None:
    """The lines of `make -n`, which runs nothing."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    said = subprocess.run(["make", "-n", "setup"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    steps = ["touch .venv/.unfinished", "[1/3]", "-m venv", "[2/3]", "torch", "[3/3]", "rm .venv/.unfinished", "ready"]
    places = [said.index(step) for step in steps]
    assert places == sorted(places)


def test_all_dependencies_are_looked_for() -> None:
    words = {"scikit-learn": "sklearn", "pyyaml": "yaml"}
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = [line.split(">=")[0].split("[")[0] for line in declared]
    assert sorted(words.get(name, name) for name in names) == sorted(jobs.NEEDED)
