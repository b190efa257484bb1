"""Training and benchmarks run without Ray, MLflow and polars."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.training_tables import write_tables

ROOT = Path(__file__).parents[2]

HIDDEN_PACKAGES = (
    "ray",
    "mlflow",
    "polars",
    "pandas",
    "matplotlib",
    "pipelines",
    "tuning",
    "jobs",
)

# trains by the command line in `sys.argv`, with the packages hidden from imports
PROGRAM = f"""
import runpy, sys

class HidingFinder:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in {HIDDEN_PACKAGES} else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [HidingFinder(finder) for finder in sys.meta_path]
arguments = sys.argv[1:]
sys.argv = ["benchmarks", "--help"]
try:
    runpy.run_module("benchmarks", run_name="__main__")
except SystemExit as error:
    assert error.code == 0
import benchmarks.actions, benchmarks.decode, benchmarks.search_encoder
sys.argv = ["models.train", *arguments]
runpy.run_module("models.train", run_name="__main__")
"""


@pytest.mark.long
def test_training_and_benchmarks_run_without_ray(tmp_path: Path) -> None:
    tables, _ = write_tables(tmp_path, users=12)
    config = {
        "model": {"name": "sasrec", "dim": 8, "num_layers": 1},
        "fit": {"max_epochs": 1, "batch_size": 4},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    arguments = ["--config", str(tmp_path / "config.yaml"), "--tables", tables]
    arguments += ["--output", str(tmp_path / "run")]

    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )

    assert process.returncode == 0, process.stderr[-2000:]
    assert (tmp_path / "run/best/model.safetensors").is_file()
