"""Models are trained and loaded without Ray, MLflow and polars."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.training_tables import write_tables

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys

HIDDEN = ("ray", "mlflow", "polars", "pandas", "plotly", "pipelines", "tuning", "jobs")

class HidingFinder:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        hidden = name.split(".")[0] in HIDDEN
        return None if hidden else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [HidingFinder(finder) for finder in sys.meta_path]

import benchmarks.decode, benchmarks.train
from models.loaded_model import load_model
from models.registry import build_model_config
from models.loaded_model import load_catalogue
from models.training import checkpoint
from core.schemas import Inputs
from models.training.fit_config import FitConfig
from models.training.loop import fit
from models.training_run import TrainingRun

tables, folder = sys.argv[1:]
config = build_model_config({"name": "sasrec", "dim": 8, "num_layers": 1})
options = FitConfig(max_epochs=1, batch_size=4)
inputs = Inputs(tables)
run = TrainingRun.build(config, options, inputs)
for event in fit(run.model, run.train, run.validate, run.fit):
    if event.stop:
        saved = run.checkpoint(epoch=event.epoch, metrics=event.metrics)
        checkpoint.save(folder, run.model, saved, event.state)
_, loaded = load_model(folder, load_catalogue("sasrec", inputs))
assert loaded.metrics["ndcg@10"] > 0
"""
"""Program that trains a model with some packages hidden from imports."""


@pytest.mark.long
def test_a_model_is_trained_with_pytorch_alone(tmp_path: Path) -> None:
    tables, _ = write_tables(tmp_path, users=12)

    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, tables, str(tmp_path / "last")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )

    assert process.returncode == 0, process.stderr[-2000:]
