"""A run knows the code that trained it, and says so where it goes on with other code."""

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
from models.storage.tables import RAY_PACKAGE, code_hash

ROOT = Path(__file__).parents[2]
MODEL = ("--model.name", "sasrec", "--model.dim", "16", "--model.max_history", "12")


def unpack(folder: Path, name: str) -> Path:
    """The project's code in a folder as Ray's, which names it by its hash."""
    assert RAY_PACKAGE.fullmatch(name)
    for package in ("models", "pipelines", "tuning", "jobs"):
        shutil.copytree(ROOT / package, folder / name / package)
    return folder / name


@pytest.mark.long
def test_a_run_that_goes_on_with_other_code_says_so(
    small: tuple[str, str], tmp_path: Path, new_store: Callable[[Path], str]
) -> None:
    store = new_store(tmp_path)
    first, second = (unpack(tmp_path, f"_ray_pkg_{digit * 16}") for digit in "ab")
    with (second / "models/training/fit.py").open("a") as source:
        source.write("\n# another version\n")

    def train(package: Path, epochs: int, submission: str) -> str:
        job = {"metadata": {"job_submission_id": submission}}
        environment = {
            **os.environ,
            "PYTHONPATH": str(package),
            "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job),
        }
        line = ["--tables", small[0], "--storage", str(tmp_path / "runs")]
        line += ["--name", "one", "--tracking_uri", store, "--log_model", "false"]
        line += ["--fit.max_epochs", str(epochs), "--fit.batch_size", "8", *MODEL]
        done = subprocess.run(
            [sys.executable, "-m", "jobs.train", *line],
            cwd=package,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    before = train(first, 1, "raysubmit_1")
    after = train(second, 2, "raysubmit_2")

    assert "note: this run was trained by the code" not in before
    (note,) = [line for line in after.splitlines() if "continues with" in line]
    assert "_ray_pkg_aaaa" in note.partition("continues with")[0]
    assert "_ray_pkg_bbbb" in note.partition("continues with")[2]
    record = json.loads((tmp_path / "runs/one/run.json").read_text())
    assert record["code"].endswith(second.name)
    assert record["submission_id"] == "raysubmit_2"
    assert checkpoint.read(tmp_path / "runs/one/best").code in (
        record["code"],
        record["code"].replace(second.name, first.name),
    )
    tags = MlflowClient(store).get_run(record["tracking"]["run_id"]).data.tags
    assert [one.split()[-1] for one in tags["trieline.code"].split(", ")] == [
        first.name,
        second.name,
    ]
    assert tags["ray.submission_id"] == "raysubmit_1, raysubmit_2"


def test_the_hash_of_the_code_is_that_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = unpack(tmp_path, "_ray_pkg_0")
    monkeypatch.setattr(
        "models.storage.tables.__file__", str(package / "models/storage/tables.py")
    )
    copied = code_hash()
    (package / "models/new.py").write_text("")
    changed = code_hash()
    monkeypatch.undo()

    assert copied == code_hash()
    assert changed != copied
