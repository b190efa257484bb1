"""Test logging to MLflow: concurrent runs, interruptions and names."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import UserError
from core.schemas import RunRef
from pipelines import tracking
from pipelines.tracking import from_mlflow_name, resolve_uri, to_mlflow_name
from pipelines.training.run import collect_numbers

ROOT = Path(__file__).parents[3]


@pytest.fixture
def uri(tmp_path: Path, new_store: Callable[[Path], str]) -> str:
    """Create a store without runs; return its URI."""
    return new_store(tmp_path)


NAMES = st.one_of(
    st.from_regex(r"[a-z_]{0,5}(_at_){0,2}_{0,3}@?[0-9]{1,3}", fullmatch=True),
    st.from_regex(r"(val/)?(looked_at_it/)?[a-z_]{1,5}(@[0-9]{1,2})?", fullmatch=True),
    st.text("a_t/019-", min_size=1, max_size=12),
)


@given(NAMES)
def test_metric_names_survive_the_way_to_mlflow_and_back(name: str) -> None:
    logged = to_mlflow_name(name)
    assert "@" not in logged
    assert from_mlflow_name(logged) == name


@given(NAMES, NAMES)
def test_different_metrics_have_different_names_in_mlflow(
    first: str, second: str
) -> None:
    is_same = to_mlflow_name(first) == to_mlflow_name(second)
    assert is_same == (first == second)


WRITERS = """
import os, sys
from pipelines import tracking
uri, storage = sys.argv[1:]

def write(name):
    run = tracking.open_run(uri, "retrieval/x", name, storage, config={"model": {"name": name}}, hashes={})
    logger = tracking.Logger(run)
    for step in range(10):
        logger.log({"train/loss": float(step), "val/ndcg@10": 0.5}, step)
    logger.end()

children = []
for i in range(4):  # forked, so that each child need not import anew
    children.append(os.fork())
    if children[-1] == 0:
        write(f"run{i}")
        os._exit(0)
sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""


@pytest.mark.long
def test_runs_that_start_together_share_one_new_store(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    process = subprocess.run(
        [sys.executable, "-c", WRITERS, uri, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""  # no log of the store's migrations

    client = tracking.connect(uri)
    experiment = client.get_experiment_by_name("retrieval/x")
    assert experiment is not None
    assert experiment.artifact_location == f"file://{tmp_path}/mlartifacts"
    runs = client.search_runs([experiment.experiment_id])
    assert len(runs) == 4
    for run in runs:
        assert len(client.get_metric_history(run.info.run_id, "val/ndcg_at_10")) == 10


def test_a_storage_whose_name_mlflow_would_decode_is_refused(
    tmp_path: Path, uri: str
) -> None:
    storage = str(tmp_path / "100%41")
    with pytest.raises(UserError, match="decodes"):
        tracking.open_run(uri, "retrieval/y", "a", storage, config={}, hashes={})


def test_a_database_without_its_driver_is_one_line() -> None:
    with pytest.raises(UserError, match="No module named 'pg8000'"):
        tracking.connect("postgresql+pg8000://host/db")


def test_a_run_whose_opening_was_killed_is_deleted(tmp_path: Path, uri: str) -> None:
    def open_run(folder: str) -> str:
        tags = {tracking.FOLDER_TAG: folder}
        return tracking.open_run(
            uri, "retrieval/x", "a", str(tmp_path), config={}, hashes={}, tags=tags
        ).run_id

    killed, other = open_run("/runs/a's"), open_run("/runs/b")
    opened = open_run("/runs/a's")

    client = tracking.connect(uri)
    stages = [
        client.get_run(run).info.lifecycle_stage for run in (killed, other, opened)
    ]
    assert stages == ["deleted", "active", "active"]


def test_points_lost_by_a_kill_are_logged_from_the_last_checkpoint(
    tmp_path: Path, uri: str
) -> None:
    run = tracking.open_run(
        uri, "retrieval/x", "a", str(tmp_path), config={}, hashes={}
    )
    killed = tracking.Logger(run)
    killed.log({"train/loss": 1.0}, 1)
    killed.flush()
    unsent = [
        ("train/loss", 1.0, 10, 1),
        ("train/loss", 2.0, 20, 2),
        ("val/ndcg_at_10", 0.5, 20, 2),
    ]

    continued = tracking.Logger(run, unsent)
    continued.log({"train/loss": 3.5}, 3)
    continued.flush()

    losses = continued.client.get_metric_history(run.run_id, "train/loss")
    points = sorted((point.step, point.value) for point in losses)
    assert points == [(1, 1.0), (2, 2.0), (3, 3.5)]
    validation = continued.client.get_metric_history(run.run_id, "val/ndcg_at_10")
    assert [point.timestamp for point in validation] == [20]


def test_a_continued_run_logs_each_step_once(tmp_path: Path, uri: str) -> None:
    run = tracking.open_run(
        uri,
        "retrieval/x",
        "a",
        str(tmp_path),
        config={"fit": {"lr": 1}},
        hashes={"items": "h"},
    )
    interrupted = tracking.Logger(run)
    for step in (1, 2, 3):
        interrupted.log({"train/loss": float(step)}, step)
    interrupted.flush()

    continued = tracking.Logger(run)
    for step in (2, 3, 4, 5):
        continued.log({"train/loss": float(step), "train/nan": float("nan")}, step)
    continued.flush()

    history = tracking.connect(uri).get_metric_history(run.run_id, "train/loss")
    points = [(point.step, point.value) for point in history]
    assert points == [(i, float(i)) for i in range(1, 6)]


def test_a_missing_run_is_reported_by_its_id(tmp_path: Path, uri: str) -> None:
    with pytest.raises(UserError, match="0123"):
        tracking.reopen(RunRef(uri, "retrieval/x", "0123"))


def test_the_tracking_uri_is_the_option_the_environments_or_in_the_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert resolve_uri(None, str(tmp_path)) == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server:5000")
    assert resolve_uri(None, str(tmp_path)) == "http://server:5000"
    assert resolve_uri("sqlite:////a/b.db", str(tmp_path)) == "sqlite:////a/b.db"


def test_the_numbers_of_a_manifest_become_metrics() -> None:
    info = {
        "collision_rate": 0.25,
        "levels": [{"use": 1.0}, {"use": 0.5}],
        "tokenizer": "rqvae",
        "conflict_level": True,
    }
    expected = {
        "sids/collision_rate": 0.25,
        "sids/levels/0/use": 1.0,
        "sids/levels/1/use": 0.5,
        "sids/conflict_level": 1.0,
    }
    assert collect_numbers(info, "sids") == expected
