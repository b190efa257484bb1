"""jobs.train as users run it: killed at any moment and run again, it ends as if it had
not been.
"""

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
from jobs.train import describe_late_best, describe_no_gain
from models import registry
from models.retrieval.sasrec import SASRecConfig
from models.storage import checkpoint
from models.training.fit import FitConfig
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


def test_a_run_whose_best_epoch_is_its_last_says_so() -> None:
    fit = FitConfig(max_epochs=10, eval_every_epochs=5)
    assert "--fit.max_epochs 20 continues" in describe_late_best(10, 10, fit)
    assert describe_late_best(5, 10, fit) == ""
    assert (
        describe_late_best(5, 5, fit) == ""
    )  # patience ended it, or another run's epochs
    assert (
        describe_late_best(10, 10, FitConfig(max_epochs=10, eval_every_epochs=10)) == ""
    )  # the only one measured


def test_a_training_that_is_no_better_than_without_training_says_so() -> None:
    fit = FitConfig(max_epochs=10, lr=0.01)
    for found, floor, told in (
        (
            {"ndcg@10": 0.1},
            ("own_items", 0.2),
            "(ndcg@10 0.1000, own_items 0.2000): train longer, --fit.max_epochs 30 continues",
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
    ):
        assert told in describe_no_gain(found, fit, floor)
    for found in (
        {"ndcg@10": 0.2},
        {"mean/rig": 0.01, "mean/normalised_entropy": 0.99},
        {"gauc": 0.52, "normalised_entropy": 0.98},
        {"gauc": math.nan, "normalised_entropy": math.nan},
    ):
        assert describe_no_gain(found, fit, ("ease", 0.2)) == ""
    counted = describe_no_gain({"gauc": 0.5}, fit, trains_by_gradient=False)
    assert counted.endswith(
        "(gauc 0.5000, chance 0.5): give the model more days or other features\n"
    )


@pytest.mark.exhaustive
def test_killed_and_run_again_equals_undisturbed(
    small: tuple[str, str],
    new_store: Callable[[Path], str],
    in_ray: dict[str, str],
    tmp_path: Path,
) -> None:
    tables, _ = small
    store = new_store(tmp_path / "runs")
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(CONFIG))

    command = [
        sys.executable,
        "-m",
        "jobs.train",
        "--config",
        str(config),
        "--tables",
        tables,
        "--storage",
        str(tmp_path / "runs"),
        "--name",
        "killed",
        "--ray.threads",
        "1",
        "--log_model",
        "false",
    ]
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RAY_", "MLFLOW_"))
    }
    environment["OMP_NUM_THREADS"] = "1"
    # The undisturbed run: the same loop without Ray. In a process of its own, as
    # oneDNN's choice of kernels depends on what a process has computed before.
    alone = [
        sys.executable,
        "-m",
        "models.train",
        "--config",
        str(config),
        "--tables",
        tables,
    ]
    subprocess.run(
        [*alone, "--output", str(tmp_path / "undisturbed")],
        cwd=ROOT,
        env=environment,
        check=True,
    )
    run = tmp_path / "runs/killed"
    with open(tmp_path / "first.log", "w") as log:
        first = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        while not checkpoint.last(str(run)) and first.poll() is None:
            time.sleep(0.05)
        time.sleep(random.uniform(0, 0.1))  # of less than a second
        first.send_signal(signal.SIGKILL)
        first.wait()
    killed_at = sorted(folder.name for folder in run.glob("step-*"))
    assert killed_at, (tmp_path / "first.log").read_text()
    assert not (run / "best").exists()

    # Its Ray was killed with it; another one goes on, here the one that is there.
    joined = {**in_ray, "OMP_NUM_THREADS": "1"}
    second = subprocess.run(
        command, cwd=ROOT, env=joined, capture_output=True, text=True
    )
    assert second.returncode == 0, second.stdout + second.stderr
    assert "continuing " in second.stdout
    assert "next        python -m jobs.evaluate" in second.stdout
    assert ("note: the best epoch is the last" in second.stdout) == (
        checkpoint.read(run / "best").epoch == 10
    )
    ours, expected = run / "best", tmp_path / "undisturbed/best"
    for name, value in load_file(expected / "model.safetensors").items():
        assert torch.equal(load_file(ours / "model.safetensors")[name], value), (
            name,
            killed_at,
        )
    assert checkpoint.read(ours).metrics == checkpoint.read(expected).metrics
    last = max(run.glob("step-*"))
    for name, value in load_file(
        max((tmp_path / "undisturbed").glob("step-*")) / "model.safetensors"
    ).items():
        assert torch.equal(load_file(last / "model.safetensors")[name], value), (
            name,
            killed_at,
        )

    client = tracking.connect(store)
    experiment = client.get_experiment_by_name("retrieval/small")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert [run.info.status for run in runs] == [
        "FINISHED"
    ]  # one run in spite of two starts
    steps = [
        point.step
        for point in client.get_metric_history(runs[0].info.run_id, "train/loss")
    ]
    assert len(steps) == len(set(steps))
    assert max(steps) == checkpoint.read(last).step


def test_the_config_names_the_model_and_its_options(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(CONFIG))
    line = ["--config", str(config), "--tables", "t", "--storage", "s", "--name", "n"]
    parsed = cli.config_from_words(
        job,
        [*line, "--model.num_layers", "3", "--fit.lr", "0.5", "--ray.num_workers", "2"],
    )
    assert isinstance(parsed.model, SASRecConfig)
    assert (parsed.model.dim, parsed.model.num_layers) == (16, 3)
    assert (parsed.fit.lr, parsed.fit.max_epochs, parsed.ray.num_workers) == (
        0.5,
        10,
        2,
    )


@pytest.mark.parametrize(
    "name", ["sasrec", "tiger", "popularity", "own_items", "item_knn", "ease"]
)
def test_shipped_configs_are_valid(name: str) -> None:
    line = ["--tables", "t", "--storage", "s", "--name", "n"]
    config = ["--config", str(ROOT / f"jobs/configs/{name}.yaml")]
    parsed = cli.config_from_words(job, [*config, *line])
    assert registry.find_by_config(parsed.model).name == name
