"""The MLflow store: several runs at once, and what was logged before an interruption is not logged twice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from models.tables import UserError
from pipelines import tracking
from pipelines.training.run import figures

ROOT = Path(__file__).parents[3]

WRITER = """
import sys
from pipelines import tracking
from pipelines.training.run import figures
uri, storage, name = sys.argv[1:]
run = tracking.open_run(uri, "retrieval/x", name, storage, config={"model": {"name": name}}, hashes={})
logger = tracking.Logger(run)
for step in range(30):
    logger.log({"train/loss": float(step), "val/ndcg@10": 0.5}, step)
logger.end()
"""


def test_runs_that_start_together_share_one_new_store(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, uri, str(tmp_path), f"run{i}"], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        for i in range(3)
    ]
    for writer in writers:
        _, errors = writer.communicate(timeout=200)
        assert writer.returncode == 0, errors
        assert errors == ""  # nothing of the store's migrations on the terminal
    client = tracking.connect(uri)
    experiment = client.get_experiment_by_name("retrieval/x")
    assert experiment is not None
    assert experiment.artifact_location == f"{tmp_path}/mlartifacts"
    runs = client.search_runs([experiment.experiment_id])
    assert len(runs) == 3
    for run in runs:
        assert len(client.get_metric_history(run.info.run_id, "val/ndcg_at_10")) == 30


def test_a_continued_run_logs_each_step_once(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    run = tracking.open_run(uri, "retrieval/x", "a", str(tmp_path), config={"fit": {"lr": 1}}, hashes={"items": "h"})
    first = tracking.Logger(run)
    for step in (1, 2, 3):
        first.log({"train/loss": float(step)}, step)
    again = tracking.Logger(run, resumed=True)
    for step in (2, 3, 4, 5):
        again.log({"train/loss": float(step), "train/nan": float("nan")}, step)
    history = tracking.connect(uri).get_metric_history(run.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(i, float(i)) for i in range(1, 6)]


def test_a_run_that_is_gone_is_named(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    with pytest.raises(UserError, match=r"run 0123 of this training is not at .*--overwrite"):
        tracking.reopen(tracking.RunRef(uri, "retrieval/x", "0123"))


def test_the_tracking_uri_is_explicit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert tracking.resolve_uri(None, str(tmp_path)) == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server:5000")
    assert tracking.resolve_uri(None, str(tmp_path)) == "http://server:5000"
    assert tracking.resolve_uri("sqlite:////a/b.db", str(tmp_path)) == "sqlite:////a/b.db"


def test_the_numbers_of_a_manifest_become_metrics() -> None:
    levels = [{"use": 1.0}, {"use": 0.5}]
    info = {"collision_rate": 0.25, "levels": levels, "tokenizer": "rqvae", "conflict_level": True}
    expected = {"sids/collision_rate": 0.25, "sids/levels/0/use": 1.0, "sids/levels/1/use": 0.5}
    assert figures(info, "sids") == {**expected, "sids/conflict_level": 1.0}
