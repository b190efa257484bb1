"""Test trainings on Ray: several workers, continued and finished runs, and MLflow."""

from __future__ import annotations

import fcntl
import json
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlflow
import psutil
import pytest
import torch
from ray.train import TrainingFailedError
from safetensors.torch import load_file

from core.errors import UserError
from core.schemas import Inputs
from jobs import cli
from models.loaded_model import load_model
from models.retrieval.data import Catalogue
from models.training import checkpoint
from models.training.fit_config import FitConfig
from pipelines import tracking
from pipelines.comparison.compare import compare
from pipelines.faults import explain
from pipelines.serving import package
from pipelines.serving.registered_model import register
from pipelines.training.config import RayOptions
from pipelines.training.run import TrainingResult
from tests.fixtures.training_tables import write_tables
from tests.fixtures.trainings import SASREC, train

FIT = FitConfig(
    batch_size=16,
    max_epochs=15,
    lr=0.003,
    log_every_steps=2,
    checkpoint_every_steps=8,
    patience=0,
    seed=3,
)
ONE_WORKER, TWO_WORKERS = (RayOptions(num, threads=1) for num in (1, 2))


@dataclass
class Training:
    """A training with two workers, and its inputs."""

    folder: Path
    """Folder of the runs; that of the training is `two`."""
    tables: str
    lines: list[str] = field(default_factory=list)
    """Output of the trainings."""

    def train(self, name: str = "two", **changes: Any) -> TrainingResult:
        """Train with the same options but for the changes."""
        options: dict[str, Any] = {
            "model": SASREC,
            "fit": FIT,
            "ray": TWO_WORKERS,
            "inputs": Inputs(self.tables),
            "say": self.lines.append,
        }
        return train(name=name, storage=str(self.folder), **options | changes)

    def check_same_weights(self, name: str) -> None:
        """Check that a run has the last weights of `two`, up to the order of sums."""
        last = checkpoint.list_steps(f"{self.folder}/two")[0]
        expected, tensors = (
            load_file(self.folder / run / last / checkpoint.WEIGHTS)
            for run in ("two", name)
        )
        assert tensors.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(tensors[name], value, rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def training(ray_local, small, new_store, tmp_path_factory) -> Training:
    """Train SASRec with two workers."""
    training = Training(tmp_path_factory.mktemp("training"), small[0])
    new_store(training.folder)
    training.train()
    return training


def read_history(result: TrainingResult, metric: str) -> list[tuple[int, float]]:
    """Return step and value of the points of a metric in MLflow."""
    client = tracking.connect(result.run.uri)
    points = client.get_metric_history(result.run.run_id, metric)
    return [(point.step, point.value) for point in points]


def test_two_workers_train_as_one_process(training):
    one, two = training.train("one", ray=ONE_WORKER), training.train()

    assert read_history(two, "train/loss") == [
        (step, pytest.approx(loss, rel=1e-3))
        for step, loss in read_history(one, "train/loss")
    ]
    # every user is validated once
    counts = [count for _, count in read_history(two, "val/examples")]
    assert counts == [60] * FIT.max_epochs
    training.check_same_weights("one")


def kill_workers(run: Path, first_step: int) -> threading.Thread:
    """Kill Ray's training workers after the checkpoint of a step, in a thread."""

    def watch() -> None:
        while not (last := checkpoint.last(str(run))) or last.step < first_step:
            time.sleep(0.02)
        for process in psutil.Process().children(recursive=True):
            if process.name().startswith("ray::RayTrainWo"):
                process.kill()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


@pytest.mark.exhaustive
def test_a_run_killed_with_two_workers_and_continued_by_one_has_the_same_weights(
    training, monkeypatch
):
    """The two workers are lost together, the one that continues is lost once."""
    run = training.folder / "cut"
    killing = kill_workers(run, 1)
    with pytest.raises(TrainingFailedError) as error:
        training.train("cut", ray=replace(TWO_WORKERS, max_failures=0))
    killing.join()
    assert explain(error.value) or "gloo" in str(error.value)
    last = checkpoint.last(str(run))
    assert last

    # On a cluster, a single worker is Ray's too.
    monkeypatch.setenv("RAY_ADDRESS", "local")
    training.lines.clear()
    killing = kill_workers(run, last.step + 1)
    continued = training.train("cut", ray=ONE_WORKER)
    killing.join()

    assert sum("a worker is lost" in line for line in training.lines) == 1
    assert sum("continuing " in line for line in training.lines) == 2
    undisturbed = training.train()
    assert continued.best.step == undisturbed.best.step
    expected = undisturbed.best.metrics
    assert continued.best.metrics == pytest.approx(expected, rel=1e-3, abs=1e-4)
    training.check_same_weights("cut")
    logged = tracking.connect(continued.run.uri).get_run(continued.run.run_id)
    assert logged.info.status == "FINISHED"
    # Steps that were lost before the first checkpoint are not logged twice either.
    for metric in logged.data.metrics:
        steps = [step for step, _ in read_history(continued, metric)]
        assert len(steps) == len(set(steps)), metric


def test_a_finished_run_is_not_started_again(training):
    files = {path: path.stat().st_mtime_ns for path in training.folder.glob("two/**/*")}
    training.lines.clear()

    finished = training.train()

    assert finished.was_finished
    assert "nothing to do" in training.lines[0]
    assert files == {path: path.stat().st_mtime_ns for path in files}
    steps, values = zip(*read_history(finished, "val/ndcg_at_10"), strict=True)
    best_step = steps[values.index(max(values))]
    assert finished.best.metrics["ndcg@10"] == max(values)
    kept = checkpoint.list_steps(f"{training.folder}/two")
    assert set(kept) == {f"step-{step:08}" for step in (best_step, steps[-1])}


def test_the_mlflow_run_has_options_tags_metrics_and_a_model(training):
    result = training.train()
    run = tracking.connect(result.run.uri).get_run(result.run.run_id)
    assert result.run.experiment == "retrieval/small"
    assert run.info.status == "FINISHED"
    params = {"model.name": "sasrec", "fit.lr": "0.003", "ray.num_workers": "2"}
    assert params.items() <= run.data.params.items()
    assert run.data.tags["table.sequences"] == result.best.hashes["sequences"]
    assert {"train/lr", "val/recall_at_5"} <= run.data.metrics.keys()
    with package.use_store(result.run.uri):
        model = mlflow.artifacts.download_artifacts(run.data.tags["model"])
    suffixes = {path.suffix for path in Path(model).rglob("*")}
    assert ".safetensors" in suffixes
    assert not suffixes & {".pkl", ".pickle", ".pt"}


def test_a_name_belongs_to_one_run_of_one_process(training):
    other_tables, _ = write_tables(training.folder / "other", seed=1)
    refused: list[tuple[str, dict[str, Any]]] = [
        ("sasrec, not popularity", {"model": {"name": "popularity"}}),
        (r"fit\.lr 0\.003, not 0\.5", {"fit": replace(FIT, lr=0.5)}),
        ("another table", {"inputs": Inputs(other_tables)}),
    ]
    for message, changes in refused:
        with pytest.raises(UserError, match=message):
            training.train(**changes)
    with open(training.folder / ".two.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process"):
            training.train()

    # Options without influence on the result may change.
    assert training.train(fit=replace(FIT, log_every_steps=99)).was_finished


@pytest.mark.exhaustive
def test_errors_in_two_workers_are_not_tried_again(training, capsys):
    """A mistake of the user ends in one line, any other error in one traceback."""

    def stop(saved: checkpoint.Checkpoint) -> None:
        raise SystemExit

    with pytest.raises(SystemExit):
        training.train("bug", ray=ONE_WORKER, on_checkpoint=stop)
    (step,) = (training.folder / "bug").glob("step-*")
    model, saved = load_model(step, Catalogue.load(Inputs(training.tables)))
    state = {"position": {"step_in_epoch": 0}, "optimizer": {}}
    checkpoint.save(step, model, saved, state)
    diverging = replace(FIT, lr=1e30, clip_norm=0.0, warmup_share=0.0)

    for name, options, cause in (
        ("mistake", diverging, "the loss is"),
        ("bug", FIT, "KeyError: 'param_groups'"),
    ):
        lines: list[str] = []
        with pytest.raises(Exception, match=cause) as raised:
            training.train(name, fit=options, say=lines.append)
        with pytest.raises(SystemExit):
            cli.exit_with_error(raised.value)

        output = capsys.readouterr().err
        assert output.count(cause) == 1
        assert ("Traceback" in output) == (name == "bug")
        assert sum("parameters" in line for line in lines) == 1  # one attempt
        assert not [line for line in lines if line.startswith("note:")]


def test_a_run_killed_after_its_last_epoch_only_writes_its_best_checkpoint(training):
    run = training.folder / "two"
    best = (run / "best/model.safetensors").read_bytes()
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "status": "running"}))
    (run / "best/config.json").unlink()
    training.lines.clear()

    continued = training.train(ray=ONE_WORKER)

    assert not continued.was_finished
    assert not [line for line in training.lines if line.startswith("epoch")]
    assert (run / "best/model.safetensors").read_bytes() == best
    assert training.train().best == continued.best


@pytest.mark.exhaustive
def test_a_finished_run_continues_for_more_epochs(training):
    first = training.train("longer", ray=ONE_WORKER, fit=replace(FIT, max_epochs=2))

    longer = training.train("longer", ray=ONE_WORKER)

    assert longer.run == first.run
    run = tracking.connect(longer.run.uri).get_run(longer.run.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.tags["fit.max_epochs"] == "15"
    steps = {step for step, _ in read_history(longer, "val/ndcg_at_10")}
    assert len(steps) == FIT.max_epochs
    with pytest.raises(UserError, match=r"fit\.max_epochs 15, not 3"):
        training.train("longer", fit=replace(FIT, max_epochs=3))


def test_a_finished_choice_of_options_is_not_made_again(training):
    model = {"name": "ease", "l2": [20, 50]}
    assert not training.train("ease", model=model).was_finished
    assert training.train("ease", model=model).was_finished
    with pytest.raises(UserError, match=r"model\.l2 \[20\.0, 50\.0\], not \[20\.0\]"):
        training.train("ease", model={"name": "ease", "l2": 20})


def test_an_overwritten_run_is_left_out_of_comparisons_and_the_registry(training):
    model = {"name": "popularity"}
    thesis = training.folder / "anew/thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("dear to me")
    with pytest.raises(UserError, match="not the folder of a run"):
        training.train("anew", model=model, overwrite=True)
    first = training.train("anew", model=model)

    second = training.train("anew", model=model, overwrite=True)

    assert thesis.read_text() == "dear to me"
    run_ids = compare(second.run.uri, second.run.experiment).runs["training"]
    assert second.run.run_id in run_ids
    assert first.run.run_id not in run_ids
    with pytest.raises(UserError, match=second.run.run_id):
        register(first.run, "small")
