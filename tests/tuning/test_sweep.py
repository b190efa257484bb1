"""Test sweeps on a local Ray with MLflow: trials, early stopping, losses, refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import pytest
import torch

from core.errors import UserError
from core.options import build
from core.schemas import RunRef
from models.training import checkpoint
from pipelines import tracking
from pipelines.evaluation.config import EvaluateConfig
from pipelines.evaluation.ranking import evaluate
from pipelines.evaluation.result import load_test_metrics
from pipelines.training.record import find_checkpoint
from tests.fixtures.trainings import SASREC
from tuning.grid import SweepConfig, load_sweep
from tuning.sweep import find_best, run_sweep

ROOT = Path(__file__).parents[2]

FIT = {
    "batch_size": 16,
    "max_epochs": 4,
    "log_every_steps": 2,
    "patience": 0,
    "seed": 3,
}
FIXED = {
    **{f"model.{key}": value for key, value in SASREC.items()},
    **{f"fit.{key}": value for key, value in FIT.items()},
}


EVALUATIONS = {"job": "evaluate", "fixed": {"evaluate.unseen": False}}
"""Keys of a grid that evaluates checkpoints."""


@dataclass
class HalvedSweep:
    """A finished sweep under successive halving, with one trial at a time."""

    folder: Path
    tables: str

    @property
    def sweep_folder(self) -> Path:
        """Folder of the sweep's runs."""
        return self.folder / "runs/halved"

    def run(
        self, axes: dict[str, list[Any]], name: str = "halved", **keys: Any
    ) -> tuple[RunRef, pl.DataFrame]:
        """Run a sweep over some axes; `keys` are of the grid or of the command."""
        options = {
            "grid": str(self.folder / "g.yaml"),
            "tables": self.tables,
            "storage": str(self.folder / "runs"),
            "tracking_uri": f"sqlite:///{self.folder}/store/mlflow.db",
            "name": name,
            "ray": {"threads": 1},
            "concurrency": 1,
            **{key: keys.pop(key) for key in ("smoke", "ray") if key in keys},
        }
        grid = {"source": "a test", "fixed": FIXED, "axes": axes, **keys}
        (self.folder / "g.yaml").write_text(json.dumps(grid))
        return run_sweep(load_sweep(build(SweepConfig, options)))

    def run_halved(self) -> tuple[RunRef, pl.DataFrame]:
        """Run the sweep over three learning rates, with early stopping."""
        scheduler = {"name": "asha", "grace": 1, "reduction": 2}
        axes = {"fit.lr": [0.03, 0.01, 0.0001], "fit.eval_options": [{"unseen": False}]}
        return self.run(axes, scheduler=scheduler)

    def find_trial_runs(self, sweep: RunRef) -> dict[str, Any]:
        """Return the MLflow runs of a sweep's trials, by the point as JSON."""
        client = tracking.connect(sweep.uri)
        experiment = client.get_experiment_by_name(sweep.experiment)
        runs = client.search_runs(
            [experiment.experiment_id], f"tags.`mlflow.parentRunId` = '{sweep.run_id}'"
        )
        by_point = {run.data.tags[tracking.POINT_TAG]: run for run in runs}
        assert len(by_point) == len(runs)
        return by_point


@pytest.fixture(scope="module")
def halved(ray_local, small, new_store, tmp_path_factory) -> HalvedSweep:
    """Run a sweep over three learning rates under successive halving."""
    folder = tmp_path_factory.mktemp("sweep")
    new_store(folder / "store")
    halved = HalvedSweep(folder, small[0])
    halved.run_halved()
    return halved


def test_a_trial_trains_as_jobs_train_does(halved):
    config, output = halved.folder / "config.yaml", halved.folder / "runs/alone"
    config.write_text(json.dumps({"model": SASREC, "fit": {**FIT, "lr": 0.03}}))
    command = [sys.executable, "-m", "jobs.train", "--config", str(config)]
    command += ["--tables", halved.tables, "--storage", str(output.parent)]
    command += ["--name", "alone", "--log_model", "false", "--ray.threads", "1"]
    # A process for this training alone, as oneDNN's choice of kernels depends on what
    # a process has computed before.
    subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True
    )

    def load_best(run: Path) -> dict[str, torch.Tensor]:
        return checkpoint.safetensors.torch.load_file(run / "best/model.safetensors")

    expected = load_best(output)
    # the best trial stands for its sweep, as a teacher
    for name, tensor in load_best(halved.sweep_folder).items():
        torch.testing.assert_close(tensor, expected[name])
    assert find_checkpoint(str(halved.sweep_folder)) == f"{halved.sweep_folder}/best"


def test_a_finished_sweep_is_not_run_again(halved):
    """Trials that were stopped early have the best checkpoint until then."""
    _, results = halved.run_halved()

    # 0.01 is ahead of 0.0001 after one epoch, and behind 0.03 after two.
    assert results["status"].to_list() == ["finished", "stopped", "stopped"]
    for trial, epochs in zip(results.iter_rows(named=True), (4, 2, 1), strict=True):
        saved = checkpoint.read(trial["checkpoint"])
        assert (saved.epoch, saved.metrics["ndcg@10"]) == (epochs, trial["value"])


def test_mlflow_has_the_sweep_and_its_trials(halved):
    run, results = halved.run_halved()
    client = tracking.connect(run.uri)
    sweep = client.get_run(run.run_id)
    best = find_best(results)
    assert best is not None
    assert sweep.info.status == "FINISHED"
    tags = {
        "trieline.kind": "sweep",
        "sweep.grid": "g",
        "sweep.metric": "val/ndcg@10",
        "sweep.axes": '["fit.lr", "fit.eval_options"]',
        "sweep.best": best.run_id,
        "sweep.complete": "true",
    }
    assert tags.items() <= sweep.data.tags.items()
    assert sweep.data.metrics["best/ndcg_at_10"] == pytest.approx(best.value)
    artifacts = {artifact.path for artifact in client.list_artifacts(run.run_id)}
    assert "grid.yaml" in artifacts

    epochs = dict(zip(results["run_id"], (4, 2, 1), strict=True))
    runs = halved.find_trial_runs(run)
    assert len(runs) == 3
    for point, trial in runs.items():
        assert trial.info.status == "FINISHED"
        assert trial.data.tags["trieline.kind"] == "trial"
        assert trial.data.params["fit.lr"] == str(json.loads(point)["fit.lr"])
        history = client.get_metric_history(trial.info.run_id, "val/ndcg_at_10")
        assert len(history) == epochs[trial.info.run_id]
        is_measured = bool(load_test_metrics(RunRef(run.uri, "", trial.info.run_id)))
        assert is_measured == (len(history) == 4)  # stopped trials are not measured


@pytest.mark.exhaustive
def test_a_checkpoint_is_evaluated_at_every_point(halved):
    path = str(halved.sweep_folder)
    axes = {"checkpoint": [path], "evaluate.batch_size": [8, 32]}
    keys = {**EVALUATIONS, "name": "measured", "metric": "test/ndcg@10"}

    run, results = halved.run(axes, smoke=True, **keys)

    parent = tracking.connect(run.uri).get_run(run.run_id)
    assert tracking.SMOKE_TAG in parent.data.tags
    result, _ = evaluate(EvaluateConfig(checkpoint=path, tables=halved.tables))
    expected = [result.metrics["ndcg@10"]] * 2
    assert results["value"].to_list() == pytest.approx(expected)
    logged = {"test/ndcg_at_10", "test/requests_per_s", "test/peak_memory_mb"}
    for trial in halved.find_trial_runs(run).values():
        assert logged <= set(trial.data.metrics)

    with pytest.raises(UserError, match="unseen False, not True"):
        halved.run(axes, smoke=True, **keys | {"fixed": {"evaluate.unseen": True}})


@pytest.mark.exhaustive
def test_a_failed_trial_leaves_the_others_alone_and_is_repeated_alone(halved, capsys):
    axes = {"fit.lr": [1e30, 0.01]}  # the loss becomes infinite
    for num_done in (0, 1):
        run, results = halved.run(axes, "failing")

        assert results["status"].to_list() == ["failed", "finished"]
        assert "loss" in results["error"][0]
        sweep = tracking.connect(run.uri).get_run(run.run_id)
        assert sweep.info.status == "FAILED"
        assert sweep.data.tags["sweep.complete"].startswith("1 of 2 trials")
        output = capsys.readouterr().out
        assert f"{num_done} done before" in output
        assert "continues from its last checkpoint" not in output
    assert not (halved.folder / "runs/failing/best").exists()


@pytest.mark.exhaustive
def test_a_trial_whose_process_is_lost_continues_within_the_call(halved, capsys):
    def kill_trial() -> None:
        while not list(halved.folder.glob("runs/lost/*/step-*")):
            time.sleep(0.01)
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if "/max_epochs-100" in process.cwd():
                    process.kill()

    with ThreadPoolExecutor(1) as threads:
        killed = threads.submit(kill_trial)
        _, results = halved.run({"fit.max_epochs": [100]}, "lost")
        killed.result()

    assert results["status"].to_list() == ["finished"]
    assert "continues from its last checkpoint" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_a_trial_has_several_workers(halved, capsys):
    workers = {"num_workers": 2, "cpus_per_worker": 0.5}

    run, results = halved.run({"fit.lr": [0.03]}, "workers", ray=workers)

    assert results["status"].to_list() == ["finished"]
    assert load_test_metrics(RunRef(run.uri, "", results["run_id"][0]))
    assert "epoch   4" in capsys.readouterr().out  # as the workers report to Tune


def test_impossible_trials_are_refused_before_any_starts(halved):
    measured = {**EVALUATIONS, "metric": "test/recall@7"}
    workers = {"num_workers": 2, "cpus_per_worker": 0.5}
    refused: list[tuple[str, dict[str, list[Any]], dict[str, Any]]] = [
        ("recall@7", {"fit.lr": [0.1]}, {"metric": "val/recall@7"}),
        ("fit.batch_size 9", {"fit.batch_size": [8, 9]}, {"ray": workers}),
        ("recall@7", {"checkpoint": [str(halved.sweep_folder)]}, measured),
    ]
    for message, axes, keys in refused:
        with pytest.raises(UserError, match=message):
            halved.run(axes, "refused", **keys)
    assert not (halved.folder / "runs/refused").exists()


def test_the_best_settings_have_the_best_mean_over_shared_seeds():
    lucky = [("a", "0.5", 1, 0.9), ("b", "0.5", 2, 0.1)]
    steady = [("c", "0.7", 1, 0.6), ("d", "0.7", 2, 0.7)]
    better_on_seed_2 = [("e", "1.0", 1, None), ("f", "1.0", 2, 0.95)]
    worse_on_seed_1 = [("g", "2.0", 1, 0.7), ("h", "2.0", 2, None)]
    without_value = [("i", "3.0", 1, None), ("j", "3.0", 2, None)]
    other_seed = [("k", "4.0", 3, 0.65)]

    def find(*trials: tuple[str, str, int, float | None]) -> str | None:
        columns = {
            "name": pl.String,
            "settings": pl.String,
            "seed": pl.Int64,
            "value": pl.Float64,
        }
        frame = pl.DataFrame(trials, columns, orient="row")
        best = find_best(frame.with_columns(run_id=None, checkpoint=None))
        return best and best.name

    assert find(*lucky, *steady) == "d"
    assert find(*lucky, *steady, *better_on_seed_2) == "f"
    assert find(*lucky, *worse_on_seed_1) == "a"  # 0.9 on seed 1
    assert find(*steady, *without_value) == "d"
    assert find(*lucky, *other_seed) == "k"  # no seed is shared
    assert find(*without_value) is None
