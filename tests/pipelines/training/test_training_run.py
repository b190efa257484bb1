"""Test trainings on Ray: several workers, continued and finished runs, and MLflow."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
import pytest
import torch

from core.errors import UserError
from core.schemas import Inputs, RunRecord, RunRef
from models.build import load_model
from models.retrieval.data import Catalogue, HistoryBatch
from models.training import checkpoint
from models.training.fit_config import FitConfig
from models.training.loop import fit
from pipelines import tracking
from pipelines.comparison.compare import compare
from pipelines.serving import package
from pipelines.serving.registered_model import register
from pipelines.training.config import RayOptions
from pipelines.training.record import is_longer
from pipelines.training.run import TrainingResult
from tests.fixtures.batches import fill_batch
from tests.fixtures.training_tables import write_tables
from tests.fixtures.trainings import build_training, train

SASREC = {
    "name": "sasrec",
    "dim": 16,
    "num_layers": 1,
    "dropout": 0.0,
    "max_history": 12,
}
FIT = FitConfig(
    batch_size=16,
    max_epochs=4,
    lr=0.01,
    log_every_steps=2,
    checkpoint_every_steps=3,
    patience=0,
    seed=3,
)


def ignore_checkpoint(saved: checkpoint.Checkpoint) -> None:
    """Ignore a checkpoint; with a callback, a training runs in this process."""


@dataclass
class Training:
    """A finished training with two workers, and its inputs."""

    folder: Path
    tables: str
    sids: str
    lines: list[str]
    """Output of the trainings."""
    result: TrainingResult

    @property
    def run_folder(self) -> Path:
        """Folder of the finished run."""
        return self.folder / "runs/two"

    def train(self, **changes: Any) -> TrainingResult:
        """Train again with the same options but for the changes."""
        arguments: dict[str, Any] = {
            "model": SASREC,
            "fit": FIT,
            "ray": RayOptions(num_workers=2, threads=1),
            "inputs": Inputs(self.tables),
            "storage": str(self.folder / "runs"),
            "name": "two",
            "say": self.lines.append,
        }
        return train(**{**arguments, **changes})

    def read_history(self, metric: str) -> list[Any]:
        """Return the points of a metric that the run logged to MLflow."""
        run = self.result.run
        return tracking.connect(run.uri).get_metric_history(run.run_id, metric)

    def read_change_times(self) -> dict[Path, int]:
        """Return the time of change of all files of the run."""
        paths = self.run_folder.rglob("*")
        return {path: path.stat().st_mtime_ns for path in paths}


@pytest.fixture(scope="module")
def training(
    ray_local: None,
    small: tuple[str, str],
    new_store: Callable[[Path], str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Training:
    """Train SASRec with two workers."""
    folder = tmp_path_factory.mktemp("training")
    tables, sids = small
    new_store(folder / "runs")
    training = Training(folder, tables, sids, [], None)  # type: ignore[arg-type]
    training.result = training.train()
    return training


def test_two_workers_train_as_one_process(training: Training) -> None:
    """Losses and weights differ only by the order of sums."""
    setup = build_training(SASREC, FIT, Inputs(training.tables))
    events = fit(setup.model, setup.train, setup.validate, FIT, means=setup.means)
    step_events = [event for event in events if "train/loss" in event.points]

    history = training.read_history("train/loss")
    assert [point.step for point in history] == [event.step for event in step_events]
    assert [point.value for point in history] == pytest.approx(
        [event.points["train/loss"] for event in step_events], rel=1e-4
    )
    last = max(training.run_folder.glob("step-*"))
    tensors = checkpoint.safetensors.torch.load_file(last / "model.safetensors")
    expected = setup.model.state_dict()
    for name, value in tensors.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-2, atol=1e-3)


def test_validation_counts_every_user_once(training: Training) -> None:
    counts = training.read_history("val/examples")
    assert [point.value for point in counts] == [60] * FIT.max_epochs
    epochs = [line for line in training.lines if line.startswith("epoch")]
    assert len(epochs) == FIT.max_epochs


def test_the_best_and_the_last_checkpoint_are_kept(training: Training) -> None:
    folders = sorted(training.run_folder.glob("step-*"))
    saved = [checkpoint.read(folder) for folder in folders]
    values = [point.value for point in training.read_history("val/ndcg_at_10")]

    assert 1 <= len(saved) <= 2
    best = checkpoint.read(training.run_folder / "best")
    assert best.metrics["ndcg@10"] == max(values) == best.best["value"]
    assert best.epoch == values.index(max(values)) + 1
    assert best.step in {about.step for about in saved}
    assert saved[-1].epoch == FIT.max_epochs


def test_the_mlflow_run_has_options_tags_metrics_and_artifacts(
    training: Training,
) -> None:
    result = training.result
    client = tracking.connect(result.run.uri)
    run = client.get_run(result.run.run_id)
    assert result.run.experiment == "retrieval/small"
    assert run.info.status == "FINISHED"
    assert run.data.params["model.name"] == "sasrec"
    assert run.data.params["fit.lr"] == "0.01"
    assert run.data.params["ray.num_workers"] == "2"
    assert run.data.tags["table.sequences"] == result.best.hashes["sequences"]
    assert run.data.tags["command"]
    assert {
        "train/loss",
        "train/lr",
        "train/data_wait",
        "train/parameters",
        "val/recall_at_5",
    } <= set(run.data.metrics)
    artifacts = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    assert "config.yaml" in artifacts


def test_the_logged_model_ranks_as_the_checkpoint(training: Training) -> None:
    # Logging a model changes no setting of later runs.
    assert "MLFLOW_TRACKING_URI" not in os.environ
    run = training.result.run
    uri = tracking.connect(run.uri).get_run(run.run_id).data.tags["model"]
    with package.use_store(run.uri):
        served = mlflow.pyfunc.load_model(uri)
        folder = Path(mlflow.artifacts.download_artifacts(uri))
    histories = [
        ["item-001", "item-008"],
        ["item-005", "not in the catalogue", "item-004", "item-023"],
        [],
    ]

    ranked = served.predict(pd.DataFrame({"history": histories}), params={"k": 4})

    catalogue = Catalogue.load(training.tables)
    model, _ = load_model(training.result.checkpoint, catalogue)
    batch = fill_batch(
        HistoryBatch,
        {},
        history=torch.tensor([[1, 8, -1], [5, 4, 23]]),
        history_length=torch.tensor([2, 3]),
    )
    items, scores = model.recommend(batch, 4)
    for row in range(2):
        item_ids = [f"item-{item:03d}" for item in items[row].tolist()]
        assert ranked["item_id"][row] == item_ids
        assert ranked["score"][row] == pytest.approx(scores[row].tolist())
    assert ranked["item_id"][2] == []
    assert served.metadata.signature.inputs.input_names() == ["history", "user_id"]
    pickled = (".pkl", ".pickle", ".pt")
    assert not [path for path in folder.rglob("*") if path.suffix in pickled]


def test_a_finished_run_is_not_trained_again(training: Training) -> None:
    change_times = training.read_change_times()

    repeated = training.train()

    assert repeated.was_finished
    assert repeated.checkpoint == training.result.checkpoint
    assert training.read_change_times() == change_times


def test_a_run_is_only_longer_with_more_epochs() -> None:
    run = RunRef("", "", "")
    record = RunRecord(status="finished", run=run, config={"fit": {"max_epochs": 4}})
    assert [is_longer(record, epochs) for epochs in (3, 4, 5)] == [False, False, True]


def test_a_name_belongs_to_one_run(training: Training) -> None:
    with pytest.raises(
        UserError,
        match="sasrec, not popularity",
    ):
        training.train(model={"name": "popularity"})
    with pytest.raises(UserError, match=r"started with fit\.lr 0\.01, not 0\.5"):
        training.train(fit=replace(FIT, lr=0.5))
    with pytest.raises(UserError, match=r"started with model\.dim 16, not 8"):
        training.train(model={**SASREC, "dim": 8})
    tables, _ = write_tables(training.folder / "other", seed=1)
    with pytest.raises(UserError, match="with another table"):
        training.train(inputs=Inputs(tables))

    # Options without influence on the result may change.
    assert training.train(fit=replace(FIT, log_every_steps=99)).was_finished


def test_impossible_options_are_refused_before_training(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    inputs_with_sids = Inputs(training.tables, training.sids)
    refused: list[tuple[str, dict[str, Any]]] = [
        (
            "16 does not divide by 3",
            {"ray": RayOptions(num_workers=3, cpus_per_worker=0.1)},
        ),
        (
            "do not fit",
            {"ray": RayOptions(num_workers=2, cpus_per_worker=100)},
        ),
        (
            "'beem'",
            {
                "model": {"name": "tiger"},
                "inputs": inputs_with_sids,
                "fit": replace(FIT, eval_options={"beem": 3}),
            },
        ),
        (
            "is a folder",
            {"tracking_uri": f"file:{training.folder}/mlruns"},
        ),
        ("is relative", {"tracking_uri": "sqlite:///mlflow.db"}),
        ("SQLite cannot be used in s3://bucket", {"storage": "s3://bucket"}),
    ]
    for message, changes in refused:
        with pytest.raises(UserError, match=message):
            training.train(**{"name": "refused", **changes})
    assert not (training.folder / "runs/refused/run.json").exists()


def test_a_sqlite_store_on_a_cluster_of_several_nodes_is_refused() -> None:
    with pytest.raises(UserError, match=r"a file, and the cluster has 2 nodes"):
        tracking.check_nodes("sqlite:////shared/mlflow.db", 2)


def test_a_run_is_trained_by_one_process_at_a_time(training: Training) -> None:
    with open(training.folder / "runs/.two.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="is being trained by another process"):
            training.train()
    assert training.train().was_finished


def test_overwrite_refuses_a_folder_that_is_no_run(training: Training) -> None:
    folder = training.folder / "runs/mine"
    folder.mkdir()
    (folder / "thesis.txt").write_text("dear to me")

    with pytest.raises(UserError, match="not the folder of a run"):
        training.train(name="mine", overwrite=True)

    assert (folder / "thesis.txt").read_text() == "dear to me"


def test_a_run_killed_after_its_last_epoch_only_writes_its_best_checkpoint(
    training: Training,
) -> None:
    run = training.run_folder
    best = (run / "best/model.safetensors").read_bytes()
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "status": "running"}))
    (run / "best/config.json").unlink()
    lines: list[str] = []

    continued = training.train(
        say=lines.append, ray=RayOptions(threads=1), on_checkpoint=ignore_checkpoint
    )

    assert not continued.was_finished
    assert not [line for line in lines if line.startswith("epoch")]
    assert continued.best == training.result.best
    assert (run / "best/model.safetensors").read_bytes() == best


@pytest.mark.exhaustive
def test_a_finished_run_continues_for_more_epochs(training: Training) -> None:
    options: dict[str, Any] = {
        "name": "longer",
        "ray": RayOptions(threads=1),
        "on_checkpoint": ignore_checkpoint,
    }
    first = training.train(**options, fit=replace(FIT, max_epochs=2))

    longer = training.train(**options)

    assert (first.epochs, longer.epochs) == (2, 4)
    assert longer.run == first.run
    client = tracking.connect(longer.run.uri)
    run = client.get_run(longer.run.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.tags["fit.max_epochs"] == "4"
    history = client.get_metric_history(longer.run.run_id, "val/ndcg_at_10")
    steps = [point.step for point in history]
    assert len(steps) == len(set(steps)) == 4
    with pytest.raises(UserError, match=r"fit\.max_epochs 4, not 3"):
        training.train(**options, fit=replace(FIT, max_epochs=3))


POPULARITY: dict[str, Any] = {
    "model": {"name": "popularity"},
    "fit": FitConfig(),
    "log_model": False,
    "on_checkpoint": ignore_checkpoint,
}


def test_an_overwritten_run_is_left_out_of_comparisons_and_the_registry(
    training: Training,
) -> None:
    training.lines.clear()
    first = training.train(**POPULARITY, name="anew")
    thesis = training.folder / "runs/anew/thesis.txt"
    thesis.write_text("dear to me")
    second = training.train(**POPULARITY, name="anew", overwrite=True)
    assert thesis.read_text() == "dear to me"

    run_ids = compare(second.run.uri, [second.run.experiment]).runs["training"]
    assert second.run.run_id in run_ids
    assert first.run.run_id not in run_ids
    assert not [line for line in training.lines if line.startswith("note:")]
    with pytest.raises(
        UserError,
        match=second.run.run_id,
    ):
        register(first.run, "small")


def test_a_user_error_in_a_worker_ends_the_run_without_a_retry(
    training: Training,
) -> None:
    lines: list[str] = []

    with pytest.raises(UserError, match="the loss is"):
        training.train(
            name="lost",
            fit=replace(FIT, lr=1e30, clip_norm=0.0, warmup_share=0.0),
            say=lines.append,
            ray=RayOptions(threads=1),
        )

    assert sum("parameters" in line for line in lines) == 1  # one attempt
    assert not [line for line in lines if line.startswith("note:")]
