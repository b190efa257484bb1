"""Test that a run records the code that trained it, and reports a change of code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow import MlflowClient

from models.storage import checkpoint
from models.storage.tables import RAY_PACKAGE

ROOT = Path(__file__).parents[2]
MODEL = ("--model.name", "sasrec", "--model.dim", "16", "--model.max_history", "12")


def copy_code(folder: Path, name: str) -> Path:
    """Copy the project's code to a folder named by a hash, as Ray unpacks it."""
    assert RAY_PACKAGE.fullmatch(name)
    for package in ("models", "pipelines", "tuning", "jobs"):
        shutil.copytree(ROOT / package, folder / name / package)
    return folder / name


@pytest.mark.exhaustive
def test_a_run_that_continues_with_other_code_reports_it(
    small: tuple[str, str], tmp_path: Path, new_store: Callable[[Path], str]
) -> None:
    store = new_store(tmp_path)
    first, second = (copy_code(tmp_path, f"_ray_pkg_{digit * 16}") for digit in "ab")
    with (second / "models/training/fit.py").open("a") as source:
        source.write("\n# another version\n")

    def train(package: Path, epochs: int, submission: str) -> str:
        job = {"metadata": {"job_submission_id": submission}}
        environment = {
            **os.environ,
            "PYTHONPATH": str(package),
            "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job),
        }
        words = ["--tables", small[0], "--storage", str(tmp_path / "runs")]
        words += ["--name", "one", "--tracking_uri", store, "--log_model", "false"]
        words += ["--fit.max_epochs", str(epochs), "--fit.batch_size", "8", *MODEL]
        process = subprocess.run(
            [sys.executable, "-m", "jobs.train", *words],
            cwd=package,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout

    first_output = train(first, 1, "raysubmit_1")
    second_output = train(second, 2, "raysubmit_2")

    assert "note: this run was trained by the code" not in first_output
    (note,) = [line for line in second_output.splitlines() if "continues with" in line]
    old_code, _, new_code = note.partition("continues with")
    assert "_ray_pkg_aaaa" in old_code
    assert "_ray_pkg_bbbb" in new_code
    record = json.loads((tmp_path / "runs/one/run.json").read_text())
    assert record["code"].endswith(second.name)
    assert record["submission_id"] == "raysubmit_2"
    assert [job["code"].split()[-1] for job in record["jobs"]] == [
        first.name,
        second.name,
    ]
    assert [job["submission_id"] for job in record["jobs"]] == [
        "raysubmit_1",
        "raysubmit_2",
    ]
    assert checkpoint.read(tmp_path / "runs/one/best").code in (
        record["code"],
        record["code"].replace(second.name, first.name),
    )
    tags = MlflowClient(store).get_run(record["tracking"]["run_id"]).data.tags
    versions = tags["trieline.code"].split(", ")
    packages = [version.split()[-1] for version in versions]
    assert packages == [first.name, second.name]
    assert tags["ray.submission_id"] == "raysubmit_1, raysubmit_2"
