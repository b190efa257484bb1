"""Test jobs.train: its notes on the result, its config, and a killed run."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from jobs import cli
from jobs import train as job
from jobs.train import describe_no_gain
from models.retrieval.sasrec import SASRecConfig
from models.training import checkpoint
from pipelines import tracking

ROOT = Path(__file__).parents[2]

CONFIG = {
    "model": {
        "name": "sasrec",
        "dim": 16,
        "num_layers": 1,
        "dropout": 0.5,
        "max_history": 12,
    },
    "fit": {
        "batch_size": 8,
        "max_epochs": 10,
        "patience": 0,
        "lr": 0.01,
        "log_every_steps": 4,
        "checkpoint_every_steps": 5,
        "seed": 5,
    },
}


@pytest.mark.parametrize(
    ("metrics", "baseline", "message"),
    [
        (
            {"ndcg@10": 0.1},
            ("own_items", 0.2),
            "(ndcg@10 0.1000, own_items 0.2000)",
        ),
        (
            {"mean/rig": -0.01, "mean/normalised_entropy": 1.01},
            None,
            "1.0100, the base rates 1",
        ),
        ({"gauc": 0.501, "auc": 0.6}, None, "(gauc 0.5010, chance 0.5)"),
        (
            {"gauc": 0.6, "normalised_entropy": 1.06},
            None,
            "(normalised_entropy 1.0600, the base rates 1)",
        ),
    ],
)
def test_a_note_reports_a_model_no_better_than_without_training(
    metrics: dict[str, float], baseline: tuple[str, float] | None, message: str
) -> None:
    assert message in describe_no_gain(metrics, "ndcg@10", baseline)


@pytest.mark.parametrize(
    "metrics",
    [
        {"ndcg@10": 0.2},
        {"mean/rig": 0.01, "mean/normalised_entropy": 0.99},
        {"gauc": 0.52, "normalised_entropy": 0.98},
        {"gauc": math.nan, "normalised_entropy": math.nan},
    ],
)
def test_no_note_reports_a_model_better_than_without_training(
    metrics: dict[str, float],
) -> None:
    assert describe_no_gain(metrics, "ndcg@10", ("ease", 0.2)) == ""


def load_last_weights(run: Path) -> dict[str, torch.Tensor]:
    """Load the weights of the run's last checkpoint."""
    return load_file(max(run.glob("step-*")) / "model.safetensors")


def kill_after_a_checkpoint(
    command: list[str], environment: dict[str, str], run: Path
) -> list[str]:
    """Start a training and kill it soon after its first checkpoint.

    Return the names of the checkpoints.
    """
    log_file = run.with_suffix(".log")
    with open(log_file, "w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        while not checkpoint.last(str(run)) and process.poll() is None:
            time.sleep(0.05)
        time.sleep(random.uniform(0, 0.1))  # the whole training takes less than 1 s
        process.send_signal(signal.SIGKILL)
        process.wait()
    checkpoints = sorted(folder.name for folder in run.glob("step-*"))
    assert checkpoints, log_file.read_text()
    assert not (run / "best").exists()
    return checkpoints


@pytest.mark.exhaustive
def test_a_killed_and_repeated_run_equals_an_undisturbed_one(
    small: tuple[str, str],
    new_store: Callable[[Path], str],
    in_ray: dict[str, str],
    tmp_path: Path,
) -> None:
    tables, _ = small
    store = new_store(tmp_path / "runs")
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(CONFIG))
    inputs = ["--config", str(config), "--tables", tables]
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RAY_", "MLFLOW_"))
    }
    environment["OMP_NUM_THREADS"] = "1"

    train = [sys.executable, "-m", "jobs.train", *inputs, "--ray.threads", "1"]
    train += ["--log_model", "false", "--storage"]
    undisturbed = tmp_path / "quiet/undisturbed"
    first = [*train, str(tmp_path / "quiet"), "--name", "undisturbed"]
    subprocess.run(first, cwd=ROOT, env=environment, check=True)
    command = [*train, str(tmp_path / "runs"), "--name", "killed"]
    run = tmp_path / "runs/killed"
    killed_at = kill_after_a_checkpoint(command, environment, run)

    # The kill ended the job's Ray too. The repeated run joins the tests' shared Ray.
    repeated = subprocess.run(
        command,
        cwd=ROOT,
        env={**in_ray, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )

    assert repeated.returncode == 0, repeated.stdout + repeated.stderr
    assert "continuing " in repeated.stdout
    assert "next        python -m jobs.evaluate" in repeated.stdout
    best, expected_best = (
        checkpoint.read(folder / "best") for folder in (run, undisturbed)
    )
    has_note = "note: the best epoch is the last" in repeated.stdout
    assert has_note == (best.epoch == 10)
    assert best.metrics == expected_best.metrics
    best_weights = load_file(run / "best/model.safetensors")
    for name, value in load_file(undisturbed / "best/model.safetensors").items():
        assert torch.equal(best_weights[name], value), (name, killed_at)
    last_weights = load_last_weights(run)
    for name, value in load_last_weights(undisturbed).items():
        assert torch.equal(last_weights[name], value), (name, killed_at)

    client = tracking.connect(store)
    experiment = client.get_experiment_by_name("retrieval/small")
    assert experiment is not None
    (logged_run,) = client.search_runs([experiment.experiment_id])
    assert logged_run.info.status == "FINISHED"
    history = client.get_metric_history(logged_run.info.run_id, "train/loss")
    steps = [point.step for point in history]
    assert len(steps) == len(set(steps))
    assert max(steps) == checkpoint.read(max(run.glob("step-*"))).step


def test_options_override_the_config_of_the_model_and_the_training(
    tmp_path: Path,
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(CONFIG))
    words = ["--config", str(config), "--tables", "t", "--storage", "s", "--name", "n"]
    words += ["--model.num_layers", "3", "--fit.lr", "0.5", "--ray.num_workers", "2"]

    parsed = cli.config_from_words(job, words)

    assert isinstance(parsed.model, SASRecConfig)
    assert (parsed.model.dim, parsed.model.num_layers) == (16, 3)
    assert (parsed.fit.lr, parsed.fit.max_epochs) == (0.5, 10)
    assert parsed.ray.num_workers == 2


@pytest.mark.parametrize(
    "name", ["sasrec", "tiger", "popularity", "own_items", "item_knn", "ease"]
)
def test_the_shipped_configs_are_valid(name: str) -> None:
    words = ["--tables", "t", "--storage", "s", "--name", "n"]
    config = ["--config", str(ROOT / f"jobs/configs/retrieval/{name}.yaml")]
    parsed = cli.config_from_words(job, [*config, *words])
    assert parsed.model.name == name
