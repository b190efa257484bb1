"""Test sweeps on a local Ray with MLflow: trials, early stopping, losses, refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import UserError
from core.schemas import Inputs, RunRef
from models.training import checkpoint
from pipelines import tracking
from pipelines.evaluation.ranking import evaluate
from pipelines.evaluation.record import load_test_metrics
from pipelines.training.config import RayOptions
from tests.fixtures.trainings import make_sweep
from tuning.grid import Grid, Point, Scheduler, flatten_sections
from tuning.options import Options
from tuning.sweep import (
    SweepResult,
    TrialResult,
    find_best,
    resolve_best_trial,
    run_sweep,
)

ROOT = Path(__file__).parents[2]

MODEL = {
    "name": "sasrec",
    "dim": 16,
    "num_layers": 1,
    "dropout": 0.0,
    "max_history": 12,
}
FIT = {
    "batch_size": 16,
    "max_epochs": 4,
    "log_every_steps": 2,
    "patience": 0,
    "seed": 3,
}


@dataclass
class HalvedSweep:
    """A finished sweep under successive halving, with one trial at a time."""

    folder: Path
    tables: str
    lines: list[str]
    """Output of the sweeps."""
    result: SweepResult

    @property
    def sweep_folder(self) -> Path:
        """Folder of the sweep's runs."""
        return self.folder / "runs/halved"

    def run(self, grid: Grid, **changes: Any) -> SweepResult:
        """Run a sweep with the same options but for the changes."""
        say = changes.pop("say", self.lines.append)
        settings: dict[str, Any] = {
            "inputs": Inputs(self.tables),
            "storage": str(self.folder / "runs"),
            "tracking_uri": f"sqlite:///{self.folder}/store/mlflow.db",
            "name": "halved",
            "ray": RayOptions(threads=1),
            "options": Options(concurrency=1),
        }
        config = make_sweep(**{**settings, **changes})
        return run_sweep(grid, grid.trials(), config, say=say)

    def find_trial_runs(self, swept: SweepResult) -> dict[str, Any]:
        """Return the MLflow runs of a sweep's trials, by the point as JSON."""
        client = tracking.connect(swept.run.uri)
        experiment = client.get_experiment_by_name(swept.run.experiment)
        runs = client.search_runs(
            [experiment.experiment_id],
            f"tags.`mlflow.parentRunId` = '{swept.run.run_id}'",
        )
        assert len({run.data.tags[tracking.TRIAL_TAG] for run in runs}) == len(runs)
        return {run.data.tags[tracking.POINT_TAG]: run for run in runs}


def build_grid(
    model: dict[str, Any] = MODEL,
    fit: dict[str, Any] = FIT,
    fixed: Point | None = None,
    **fields: Any,
) -> Grid:
    """Build a grid over three learning rates, unless fields say otherwise."""
    defaults = {
        "name": "g",
        "source": "a test",
        "fixed": {**flatten_sections({"model": model, "fit": fit}), **(fixed or {})},
        "axes": {"fit.lr": [0.03, 0.01, 0.0001]},
    }
    return Grid(**{**defaults, **fields})


SHOWN = {"fit.eval_options": {"unseen": False}}
HALVED = build_grid(
    axes={"fit.lr": [0.03, 0.01, 0.0001], "fit.eval_options": [{"unseen": False}]},
    scheduler=Scheduler(name="asha", grace=1, reduction=2),
)


@pytest.fixture(scope="module")
def halved(
    ray_local: None,
    small: tuple[str, str],
    new_store: Callable[[Path], str],
    tmp_path_factory: pytest.TempPathFactory,
) -> HalvedSweep:
    """Run a sweep over three learning rates under successive halving."""
    folder = tmp_path_factory.mktemp("sweep")
    new_store(folder / "store")
    halved = HalvedSweep(folder, small[0], [], None)  # type: ignore[arg-type]
    halved.result = halved.run(HALVED)
    return halved


def test_a_trial_trains_as_jobs_train_does(halved: HalvedSweep) -> None:
    best = halved.result.best
    assert best is not None
    assert best.point == {"fit.lr": 0.03, **SHOWN}
    config, output = halved.folder / "config.yaml", halved.folder / "runs/alone"
    config.write_text(json.dumps({"model": MODEL, "fit": {**FIT, "lr": 0.03}}))
    command = [sys.executable, "-m", "jobs.train", "--config", str(config)]
    command += ["--tables", halved.tables, "--storage", str(output.parent)]
    command += ["--name", "alone", "--log_model", "false", "--ray.threads", "1"]
    # A process for this training alone, as oneDNN's choice of kernels depends on what
    # a process has computed before.
    subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True
    )

    value = checkpoint.read(output / "best").metrics["ndcg@10"]
    assert best.value == pytest.approx(value, abs=1e-6)

    def load_last(run: Path) -> dict[str, torch.Tensor]:
        file = max(run.glob("step-*")) / "model.safetensors"
        return checkpoint.safetensors.torch.load_file(file)

    expected = load_last(output)
    for name, tensor in load_last(halved.sweep_folder / best.name).items():
        torch.testing.assert_close(tensor, expected[name])


def test_trials_stopped_early_keep_their_best_checkpoint(halved: HalvedSweep) -> None:
    trials = halved.result.trials
    # 0.01 is ahead of 0.0001 after one epoch, and behind 0.03 after two.
    outcomes = [(trial.status, trial.epochs) for trial in trials]
    assert outcomes == [("finished", 4), ("stopped", 2), ("stopped", 1)]
    for trial in trials[1:]:
        saved = checkpoint.read(str(trial.checkpoint))
        assert saved.epoch == trial.epochs
        assert saved.metrics["ndcg@10"] == trial.value


def test_mlflow_has_the_sweep(halved: HalvedSweep) -> None:
    swept = halved.result
    client = tracking.connect(swept.run.uri)
    run = client.get_run(swept.run.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.tags["trieline.kind"] == "sweep"
    assert run.data.tags["sweep.grid"] == "g"
    assert run.data.tags["sweep.metric"] == "val/ndcg@10"
    assert json.loads(run.data.tags["sweep.axes"]) == ["fit.lr", "fit.eval_options"]
    assert swept.best is not None
    assert run.data.tags["sweep.best"] == swept.best.run_id
    assert run.data.metrics["best/ndcg_at_10"] == pytest.approx(swept.best.value)
    artifacts = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    assert "grid.yaml" in artifacts
    assert run.data.tags["sweep.complete"] == "true"


def test_mlflow_has_the_trials(halved: HalvedSweep) -> None:
    swept = halved.result
    client = tracking.connect(swept.run.uri)
    runs = halved.find_trial_runs(swept)
    points = [{"fit.lr": lr, **SHOWN} for lr in (0.03, 0.01, 0.0001)]
    assert set(runs) == set(map(json.dumps, points))
    trials = {trial.run_id: trial for trial in swept.trials}
    for point, run in runs.items():
        assert run.info.status == "FINISHED"
        assert run.data.tags["trieline.kind"] == "trial"
        assert run.data.params["fit.lr"] == str(json.loads(point)["fit.lr"])
        epochs = trials[run.info.run_id].epochs
        history = client.get_metric_history(run.info.run_id, "val/ndcg_at_10")
        assert len(history) == epochs
        training = RunRef(swept.run.uri, "", run.info.run_id)
        is_measured = bool(load_test_metrics(training))
        assert is_measured == (epochs == 4)  # stopped trials are not measured


def test_a_finished_sweep_is_not_run_again(halved: HalvedSweep) -> None:
    repeated = halved.run(HALVED)

    assert repeated.run == halved.result.run
    assert repeated.best == halved.result.best
    assert repeated.trials == halved.result.trials
    assert len(halved.find_trial_runs(repeated)) == 3


def test_a_sweeps_folder_stands_for_its_best_trial(halved: HalvedSweep) -> None:
    assert halved.result.best is not None
    best = halved.sweep_folder / halved.result.best.name
    assert resolve_best_trial(str(halved.sweep_folder)) == str(best)
    assert resolve_best_trial("runs/elsewhere") == "runs/elsewhere"


def build_evaluation_grid(halved: HalvedSweep, **fields: Any) -> Grid:
    """Build a grid that evaluates the checkpoint of the first trial."""
    trial = halved.sweep_folder / halved.result.trials[0].name
    axes = {"checkpoint": [str(trial)], **fields.pop("axes", {})}
    defaults = {"name": "g", "source": "a test", "job": "evaluate", "axes": axes}
    return Grid(**{**defaults, **fields})


@pytest.mark.exhaustive
def test_a_checkpoint_is_evaluated_at_every_point(halved: HalvedSweep) -> None:
    grid = build_evaluation_grid(
        halved, metric="test/ndcg@10", axes={"evaluate.batch_size": [8, 32]}
    )

    swept = halved.run(grid, name="measured", smoke=True)

    parent = tracking.connect(swept.run.uri).get_run(swept.run.run_id)
    assert tracking.SMOKE_TAG in parent.data.tags
    (path,) = grid.axes["checkpoint"]  # type: ignore[misc]
    result, _ = evaluate(str(path), Inputs(halved.tables))
    expected = [result.metrics["ndcg@10"]] * 2
    assert [trial.value for trial in swept.trials] == pytest.approx(expected)
    logged = {"test/ndcg_at_10", "test/users_per_s", "test/peak_memory_mb"}
    for run in halved.find_trial_runs(swept).values():
        assert logged <= set(run.data.metrics)

    other_options = build_evaluation_grid(
        halved,
        metric="test/ndcg@10",
        axes={"evaluate.batch_size": [8]},
        fixed={"evaluate.unseen": True},
    )
    with pytest.raises(UserError, match="was started with trials"):
        halved.run(other_options, name="measured")


def test_impossible_trials_are_refused_before_any_starts(halved: HalvedSweep) -> None:
    refused: list[tuple[str, Grid, dict[str, Any]]] = [
        (
            "recall@7",
            build_grid(metric="val/recall@7"),
            {},
        ),
        (
            "fit.batch_size 9",
            build_grid(axes={"fit.batch_size": [8, 9]}),
            {"ray": RayOptions(num_workers=2, cpus_per_worker=0.5)},
        ),
        (
            "recall@7",
            build_evaluation_grid(halved, metric="test/recall@7"),
            {},
        ),
    ]
    for message, grid, changes in refused:
        with pytest.raises(UserError, match=message):
            halved.run(grid, **{"name": "refused", **changes})
    assert not (halved.folder / "runs/refused").exists()


def test_the_best_settings_have_the_best_mean_over_shared_seeds() -> None:
    def build_trial(
        name: str, alpha: float, seed: int, value: float | None
    ) -> TrialResult:
        point = {"model.alpha": alpha, "fit.seed": seed}
        return TrialResult(name, name, point, "finished", value)

    lucky = [build_trial("a", 0.5, 1, 0.9), build_trial("b", 0.5, 2, 0.1)]
    steady = [build_trial("c", 0.7, 1, 0.6), build_trial("d", 0.7, 2, 0.7)]
    better_on_seed_2 = [build_trial("e", 1.0, 1, None), build_trial("f", 1.0, 2, 0.95)]
    worse_on_seed_1 = [build_trial("g", 2.0, 1, 0.7), build_trial("h", 2.0, 2, None)]
    without_value = [build_trial("i", 3.0, 1, None), build_trial("j", 3.0, 2, None)]
    other_seed = [build_trial("k", 4.0, 3, 0.65)]

    assert find_best([*lucky, *steady]) is steady[1]
    assert find_best([*lucky, *steady, *better_on_seed_2]) is better_on_seed_2[1]
    assert find_best([*lucky, *worse_on_seed_1]) is lucky[0]  # 0.9 on seed 1
    assert find_best([*steady, *without_value]) is steady[1]
    assert find_best([*lucky, *other_seed]) is other_seed[0]  # no seed is shared
    assert find_best(without_value) is None
