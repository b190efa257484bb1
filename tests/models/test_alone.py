"""Models on a bare machine: training and the benchmarks run where Ray, MLflow and
polars are not installed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.training_tables import write_tables

ROOT = Path(__file__).parents[2]

HIDDEN = (
    "ray",
    "mlflow",
    "polars",
    "pandas",
    "matplotlib",
    "pipelines",
    "tuning",
    "jobs",
)

PROGRAM = f"""
import runpy, sys

class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in {HIDDEN} else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
train = sys.argv[1:]
sys.argv = ["benchmarks", "--help"]
try:
    runpy.run_module("benchmarks", run_name="__main__")
except SystemExit as ended:
    assert ended.code == 0
import benchmarks.actions, benchmarks.decode, benchmarks.search_encoder
sys.argv = ["models.train", *train]
runpy.run_module("models.train", run_name="__main__")
"""


@pytest.mark.long
def test_training_and_benchmarks_need_pytorch_and_no_ray(tmp_path: Path) -> None:
    tables, _ = write_tables(tmp_path, users=12)
    config = {
        "model": {"name": "sasrec", "dim": 8, "num_layers": 1},
        "fit": {"max_epochs": 1, "batch_size": 4},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    line = [
        "--config",
        str(tmp_path / "config.yaml"),
        "--tables",
        tables,
        "--output",
        str(tmp_path / "run"),
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *line], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "run/best/model.safetensors").is_file()
