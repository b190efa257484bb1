"""Test logging to MLflow: concurrent runs, interruptions and names."""

from __future__ import annotations

import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.storage import attempts, locks
from models.storage.tables import UserError
from models.storage.uri import write_file
from pipelines import tracking
from pipelines.tracking import from_mlflow_name, resolve_uri, to_mlflow_name
from pipelines.tracking.runs import artifact_location
from pipelines.training import run as runs
from pipelines.training.run import collect_numbers, end_failed_run
from pipelines.training.stop import StopRequest

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


def test_only_a_cutoff_at_the_end_of_a_name_is_replaced() -> None:
    assert to_mlflow_name("val/ndcg@10") == "val/ndcg_at_10"
    assert to_mlflow_name("test/looked_at_it/gauc") == "test/looked_at_it/gauc"
    assert from_mlflow_name("test/looked_at_it/gauc") == "test/looked_at_it/gauc"


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


def test_a_repeated_trial_continues_its_mlflow_run(tmp_path: Path, uri: str) -> None:
    def open_run(name: str, trial: str = "", parent: str | None = None) -> str:
        tags = {tracking.TRIAL_TAG: trial} if parent else {}
        run = tracking.open_run(
            uri,
            "retrieval/x",
            name,
            str(tmp_path),
            config={"fit": {"lr": 1}},
            hashes={},
            parent=parent,
            tags=tags,
        )
        return run.run_id

    sweep, other_sweep = open_run("one"), open_run("other")
    trial = open_run("t", "id", sweep)

    assert open_run("t", "id", sweep) == trial
    assert open_run("t", "other id", sweep) != trial
    assert open_run("t", "id", other_sweep) != trial


def test_points_lost_by_a_kill_are_logged_from_the_last_checkpoint(
    tmp_path: Path, uri: str
) -> None:
    run = tracking.open_run(
        uri, "retrieval/x", "a", str(tmp_path), config={}, hashes={}
    )
    killed = tracking.Logger(run)
    killed.log({"train/loss": 1.0}, 1)
    killed.flush()
    curves = {
        "train/loss": [(1, 1.0, 10), (2, 2.0, 20)],
        "val/ndcg@10": [(2, 0.5, 20)],
    }
    (tmp_path / tracking.CURVES).write_bytes(tracking.curves_to_bytes(curves))
    assert tracking.read_curves(str(tmp_path)) == curves

    continued = tracking.Logger(run, tracking.read_curves(str(tmp_path)))
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


LOCK = """
import sqlite3, sys
store = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=60)
store.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.readline()
store.execute("COMMIT")
"""


@contextmanager
def lock_store(store: Path) -> Iterator[Callable[[], None]]:
    """Lock a store by another process; yield a function that unlocks it."""
    command = [sys.executable, "-c", LOCK, str(store)]
    holder = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "locked\n"

    def unlock() -> None:
        holder.communicate("\n")

    try:
        yield unlock
    finally:
        holder.kill()
        holder.wait()


@pytest.mark.long
def test_logging_waits_for_a_locked_store(tmp_path: Path, uri: str) -> None:
    run = tracking.open_run(
        uri, "retrieval/x", "a", str(tmp_path), config={"fit": {"lr": 1}}, hashes={}
    )
    logger = tracking.Logger(run)

    def log_loss() -> None:
        logger.log({"train/loss": 0.5}, 1)
        logger.flush()

    def open_other_run() -> None:
        tracking.open_run(uri, "new", "b", str(tmp_path), config={}, hashes={})

    with (
        lock_store(tmp_path / "mlflow.db") as unlock,
        ThreadPoolExecutor(2) as threads,
    ):
        writers = [threads.submit(log_loss), threads.submit(open_other_run)]
        while not all(writer.running() for writer in writers):
            time.sleep(0.01)
        time.sleep(2)
        assert not any(writer.done() for writer in writers)
        unlock()
        for writer in writers:
            writer.result()

    history = logger.client.get_metric_history(run.run_id, "train/loss")
    assert [point.step for point in history] == [1]


def test_artifacts_are_written_to_a_storage_given_by_path_or_uri(
    tmp_path: Path, uri: str
) -> None:
    assert artifact_location("s3://bucket/runs/") == "s3://bucket/runs/mlartifacts"
    run = tracking.open_run(
        uri, "x", "a", f"file://{tmp_path}/runs", config={"fit": {"lr": 1}}, hashes={}
    )
    config = tmp_path / f"runs/mlartifacts/{run.run_id}/artifacts/config.yaml"
    assert "lr: 1" in config.read_text()


def test_no_run_is_opened_when_its_artifacts_cannot_be_written(
    tmp_path: Path, uri: str
) -> None:
    file = tmp_path / "file"
    file.write_text("no folder")

    with pytest.raises(
        UserError,
        match=rf"cannot write to file://{file}/.*experiment 'y'",
    ):
        tracking.open_run(uri, "y", "b", str(file), config={}, hashes={})

    client = tracking.connect(uri)
    experiments = [
        experiment.experiment_id for experiment in client.search_experiments()
    ]
    assert client.search_runs(experiments) == []


def test_changed_metrics_of_a_finished_run_are_logged_at_a_later_step(
    tmp_path: Path, uri: str
) -> None:
    run = tracking.open_run(uri, "x", "a", str(tmp_path), config={}, hashes={})

    for value in (0.5, 0.5, 0.25):
        tracking.Logger(run).update({"test/ndcg@10": value, "best/epoch": 3}, 7)

    client = tracking.connect(uri)
    history = client.get_metric_history(run.run_id, "test/ndcg_at_10")
    assert [(point.step, point.value) for point in history] == [(7, 0.5), (8, 0.25)]
    assert client.get_run(run.run_id).data.metrics == {
        "test/ndcg_at_10": 0.25,
        "best/epoch": 3,
    }


def test_a_missing_run_is_reported_by_its_id(tmp_path: Path, uri: str) -> None:
    with pytest.raises(
        UserError, match=r"run 0123 of this training is not at .*--overwrite"
    ):
        tracking.reopen(tracking.RunRef(uri, "retrieval/x", "0123"))


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


@pytest.mark.parametrize(
    "name", ["a%20b", "what?", "a#b", "a b", "a'b", "a&b;c", "ü", "a%2Fb"]
)
def test_a_storage_folder_of_any_name_contains_its_store_and_artifacts(
    name: str, tmp_path: Path
) -> None:
    storage = tmp_path / name

    uri = tracking.resolve_uri(None, str(storage))
    run = tracking.open_run(
        uri, "retrieval/small", "one", str(storage), config={"a": 1}, hashes={}
    )

    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all(path.is_relative_to(storage) for path in files)
    assert (storage / "mlflow.db").is_file()
    assert len(list(storage.glob(f"mlartifacts/{run.run_id}/artifacts/*"))) == 1
    assert tracking.sqlite_file(uri) == str(storage / "mlflow.db")
    assert tracking.find_store(uri) == uri
    assert shlex.split(tracking.view_command(uri))[-1] == uri


def test_a_run_at_s3_without_a_live_job_is_marked_as_killed(
    s3: str, tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "HEARTBEAT_S", 0.5)
    monkeypatch.setattr(locks, "EXPIRES_S", 5.0)
    client = tracking.connect(uri)
    runs = {
        name: tracking.open_run(
            uri,
            "retrieval/x",
            name,
            str(tmp_path),
            config={},
            hashes={},
            tags={tracking.FOLDER_TAG: f"{s3}/runs/{name}"},
        ).run_id
        for name in ("alive", "killed", "gone")
    }
    write_file(tracking.lock_path(f"{s3}/runs/killed"), b"process 1 on a lost node")

    with locks.hold_lock(tracking.lock_path(f"{s3}/runs/alive"), "it is alive"):
        tracking.end_dead_runs(client, [client.get_run(run) for run in runs.values()])

    states = {name: client.get_run(run).info.status for name, run in runs.items()}
    assert states == {"alive": "RUNNING", "killed": "KILLED", "gone": "KILLED"}


def test_ending_a_stopped_run_takes_a_single_request(
    tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tracking.open_run(
        uri, "retrieval/x", "one", str(tmp_path), config={}, hashes={}
    )
    requests: list[str] = []
    client = tracking.connect(uri)
    store = type(client._tracking_client.store)
    for name in ("get_run", "update_run_info", "log_batch", "search_runs"):
        send = getattr(store, name)

        def record(*args: Any, send: Any = send, name: str = name, **more: Any) -> Any:
            requests.append(name)
            return send(*args, **more)

        monkeypatch.setattr(store, name, record)

    tracking.end_stopped(run)

    assert requests == ["update_run_info"]
    assert client.get_run(run.run_id).info.status == "KILLED"


def test_a_stopped_run_is_killed_in_mlflow_while_its_checkpoint_is_saved(
    tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tracking.open_run(
        uri, "retrieval/x", "one", str(tmp_path), config={}, hashes={}
    )
    client = tracking.connect(uri)
    stop_request = StopRequest()
    monkeypatch.setattr(runs, "STOP_REQUEST", stop_request)

    def read_status() -> str:
        return str(client.get_run(run.run_id).info.status)

    def save_checkpoint() -> None:
        deadline_s = time.monotonic() + 120
        while read_status() == "RUNNING" and time.monotonic() < deadline_s:
            time.sleep(0.05)

    statuses = []

    def train() -> None:
        with end_failed_run(run):
            stop_request.request()
            save_checkpoint()
            statuses.append(read_status())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()

    assert statuses == ["KILLED"]


def test_a_checkpoint_is_saved_while_mlflow_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    is_saved = threading.Event()

    def answer_late(run: tracking.RunRef) -> None:
        is_saved.wait(120)
        events.append("killed")

    stop_request = StopRequest()
    monkeypatch.setattr(runs, "STOP_REQUEST", stop_request)
    monkeypatch.setattr(tracking, "end_stopped", answer_late)

    def train() -> None:
        with end_failed_run(tracking.RunRef("", "", "")):
            stop_request.request()
            events.append("saved")
            is_saved.set()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()

    assert events == ["saved", "killed"]  # once


def test_a_run_interrupted_without_a_signal_handler_is_killed_in_mlflow(
    tmp_path: Path, uri: str
) -> None:
    run = tracking.open_run(
        uri, "retrieval/x", "one", str(tmp_path), config={}, hashes={}
    )

    with pytest.raises(KeyboardInterrupt), end_failed_run(run):
        raise KeyboardInterrupt

    assert tracking.connect(uri).get_run(run.run_id).info.status == "KILLED"


def test_system_metrics_end_when_a_newer_attempt_trains_the_run(
    tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.05")
    run = tracking.open_run(
        uri, "retrieval/x", "one", str(tmp_path), config={}, hashes={}
    )
    client = tracking.connect(uri)
    folder = str(tmp_path / "one")
    attempt = attempts.begin(folder)
    metric = "system/cpu_utilization_percentage"

    def count_points() -> int:
        return len(client.get_metric_history(run.run_id, metric))

    check_attempt = partial(attempts.require_current, folder, attempt)
    with tracking.log_system_metrics(run, check_attempt):
        (monitor,) = [
            thread
            for thread in threading.enumerate()
            if thread.name == "SystemMetricsMonitor"
        ]
        while not count_points():
            assert monitor.is_alive()
            time.sleep(0.05)
        attempts.begin(folder)
        monitor.join(120)
        assert not monitor.is_alive()
        num_points = count_points()

    assert count_points() == num_points


def test_a_stopped_training_does_not_wait_for_a_slow_server(
    tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tracking.open_run(
        uri, "retrieval/x", "one", str(tmp_path), config={}, hashes={}
    )
    logger = tracking.Logger(run)
    is_answered = threading.Event()
    send = logger.client.log_batch

    def answer_late(*args: Any, **more: Any) -> None:
        is_answered.wait(60)
        send(*args, **more)

    monkeypatch.setattr(logger.client, "log_batch", answer_late)
    logger.log({"loss": 1.0}, 1)

    assert 0.1 <= logger.flush(timeout_s=0.1) < 30
    is_answered.set()
    logger.flush()
    assert logger.client.get_run(run.run_id).data.metrics == {"loss": 1.0}
