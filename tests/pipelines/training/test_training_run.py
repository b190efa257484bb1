"""Training on Ray: workers together, runs that go on, are finished or are not the same,
and what MLflow gets.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
import pytest
import ray
import torch
from transformers import AutoConfig, AutoModel

from models.build import load_model
from models.retrieval.data import Catalogue, HistoryBatch
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import UserError
from models.training.fit import FitConfig, StepEvent, fit
from pipelines import tracking
from pipelines.comparison.load import load_rows
from pipelines.comparison.runs import select
from pipelines.serving.registered_model import register
from pipelines.training.config import RayOptions
from pipelines.training.run import TrainingResult, stream_progress
from tests.fixtures.batches import fill_batch
from tests.fixtures.search_tables import ITEM_MODEL, write_search
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


def in_place(about: checkpoint.Checkpoint) -> None:
    """Ignore a checkpoint; given to a training so that it runs in this process."""


@dataclass
class World:
    """A training with two workers, and what it was made from."""

    folder: Path
    tables: str
    sids: str
    lines: list[str]
    trained: TrainingResult

    def again(self, **changes: Any) -> TrainingResult:
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


@pytest.fixture(scope="module")
def world(
    ray_local: None,
    small: tuple[str, str],
    new_store: Callable[[Path], str],
    tmp_path_factory: pytest.TempPathFactory,
) -> World:
    folder = tmp_path_factory.mktemp("training")
    tables, sids = small
    new_store(folder / "runs")
    made = World(folder, tables, sids, [], None)  # type: ignore[arg-type]
    made.trained = made.again()
    return made


def test_two_workers_follow_one(world: World) -> None:
    """The losses and weights of a run by one process, up to the order of sums."""
    setup = build_training(SASREC, FIT, Inputs(world.tables))
    events = fit(setup.model, setup.train, setup.validate, FIT, means=setup.means)
    expected = [(e.step, e.loss) for e in events if isinstance(e, StepEvent)]
    history = tracking.connect(world.trained.run.uri).get_metric_history(
        world.trained.run.run_id, "train/loss"
    )
    assert [point.step for point in history] == [step for step, _ in expected]
    assert [point.value for point in history] == pytest.approx(
        [loss for _, loss in expected], rel=1e-4
    )
    last = max(Path(world.folder / "runs/two").glob("step-*"))
    for name, value in checkpoint.safetensors.torch.load_file(
        last / "model.safetensors"
    ).items():
        torch.testing.assert_close(
            value, setup.model.state_dict()[name], rtol=1e-2, atol=1e-3
        )


def test_validation_counts_every_user_once(world: World) -> None:
    client = tracking.connect(world.trained.run.uri)
    counts = client.get_metric_history(world.trained.run.run_id, "val/examples")
    assert [point.value for point in counts] == [60] * FIT.max_epochs


def test_progress_is_shown_and_the_best_kept(world: World) -> None:
    assert any("2 workers on cpu, 1 thread each" in line for line in world.lines)
    assert sum(line.startswith("epoch") for line in world.lines) == FIT.max_epochs
    run = Path(world.folder / "runs/two")
    kept = [checkpoint.read(folder) for folder in sorted(run.glob("step-*"))]
    assert 1 <= len(kept) <= 2  # the best and the last
    history = tracking.connect(world.trained.run.uri).get_metric_history(
        world.trained.run.run_id, "val/ndcg_at_10"
    )
    values = [point.value for point in history]
    best = checkpoint.read(run / "best")
    assert best.metrics["ndcg@10"] == max(values) == best.best["value"]
    assert best.epoch == values.index(max(values)) + 1
    assert best.step in {about.step for about in kept}
    assert kept[-1].epoch == FIT.max_epochs


def test_the_mlflow_run_tells_what_was_done(world: World) -> None:
    client = tracking.connect(world.trained.run.uri)
    run = client.get_run(world.trained.run.run_id)
    assert world.trained.run.experiment == "retrieval/small"
    assert run.info.status == "FINISHED"
    assert run.data.params["model.name"] == "sasrec"
    assert run.data.params["fit.lr"] == "0.01"
    assert run.data.params["ray.num_workers"] == "2"
    assert run.data.tags["table.sequences"] == world.trained.best.hashes["sequences"]
    assert run.data.tags["command"]
    assert {
        "train/loss",
        "train/lr",
        "train/data_wait",
        "train/parameters",
        "val/recall_at_5",
    } <= set(run.data.metrics)
    artifacts = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    assert {"config.yaml", "curves.csv", "curves.png"} <= artifacts


def test_the_logged_model_ranks_as_the_checkpoint(world: World) -> None:
    logged = (
        tracking.connect(world.trained.run.uri)
        .get_run(world.trained.run.run_id)
        .data.tags["model"]
    )
    assert (
        "MLFLOW_TRACKING_URI" not in os.environ
    )  # logging a model leaves nothing behind for later runs
    mlflow.set_tracking_uri(world.trained.run.uri)
    try:
        served = mlflow.pyfunc.load_model(logged)
        folder = Path(mlflow.artifacts.download_artifacts(logged))
    finally:
        mlflow.set_tracking_uri(None)
    histories = [
        ["item-001", "item-008"],
        ["item-005", "not in the catalogue", "item-004", "item-023"],
        [],
    ]
    ranked = served.predict(pd.DataFrame({"history": histories}), params={"k": 4})
    nobody = served.unwrap_python_model().predict(
        None, pd.DataFrame({"history": [], "user_id": []})
    )
    assert nobody.empty
    assert nobody.columns.tolist() == [
        "item_id",
        "score",
        "unknown_items",
        "note",
    ]
    model, _ = load_model(world.trained.checkpoint, Catalogue.load(world.tables))
    history = torch.tensor([[1, 8, -1], [5, 4, 23]])
    items, scores = model.recommend(
        fill_batch(
            HistoryBatch, {}, history=history, history_length=torch.tensor([2, 3])
        ),
        4,
    )
    for row in range(2):
        assert ranked["item_id"][row] == [
            f"item-{item:03d}" for item in items[row].tolist()
        ]
        assert ranked["score"][row] == pytest.approx(scores[row].tolist())
    assert ranked["item_id"][2] == []
    assert not [
        path for path in folder.rglob("*") if path.suffix in (".pkl", ".pickle", ".pt")
    ]
    assert served.metadata.signature.inputs.input_names() == ["history", "user_id"]


def test_a_finished_run_is_left_alone(world: World) -> None:
    before = {
        path: path.stat().st_mtime_ns
        for path in Path(world.folder / "runs/two").rglob("*")
    }
    again = world.again()
    assert again.was_finished
    assert again.checkpoint == world.trained.checkpoint
    assert {
        path: path.stat().st_mtime_ns
        for path in Path(world.folder / "runs/two").rglob("*")
    } == before


def test_a_name_stands_for_one_run(world: World) -> None:
    with pytest.raises(
        UserError,
        match=r"of the model 'sasrec', not 'popularity'; choose another --name",
    ):
        world.again(model={"name": "popularity"})
    with pytest.raises(
        UserError, match=r"started with fit\.lr 0\.01, not 0\.5; choose another --name"
    ):
        world.again(fit=FitConfig(**{**vars(FIT), "lr": 0.5}))
    with pytest.raises(UserError, match=r"started with model\.dim 16, not 8"):
        world.again(model={**SASREC, "dim": 8})
    tables, _ = write_tables(world.folder / "other", seed=1)
    with pytest.raises(UserError, match="with another table"):
        world.again(inputs=Inputs(tables))
    assert world.again(
        fit=FitConfig(**{**vars(FIT), "log_every_steps": 99})
    ).was_finished  # changes nothing that counts


def test_what_cannot_work_is_refused_before_training(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    both = Inputs(world.tables, world.sids)
    refused: list[tuple[str, dict[str, Any]]] = [
        (
            "16 does not divide by 3",
            {"ray": RayOptions(num_workers=3, cpus_per_worker=0.1)},
        ),
        (
            "need 200 CPUs, .*the cluster has 2",
            {"ray": RayOptions(num_workers=2, cpus_per_worker=100)},
        ),
        (
            "need 2 CPUs, 2 GPUs, .*the cluster has 2 CPUs, 0",
            {"ray": RayOptions(num_workers=2, use_gpu=True)},
        ),
        (
            "ray.use_gpu is true, and this machine has no GPU",
            {"ray": RayOptions(use_gpu=True)},
        ),
        (
            "fit.eval_options has 'beem', which is not an option of .* 'tiger'.* the nearest is 'beam'",
            {
                "model": {"name": "tiger"},
                "inputs": both,
                "fit": replace(FIT, eval_options={"beem": 3}),
            },
        ),
        (
            "fit.eval_options has 'beam', which is not an option of .* 'sasrec'.* takes unseen",
            {"fit": replace(FIT, eval_options={"beam": 3})},
        ),
        ("is not a table", {"inputs": Inputs(str(world.folder))}),
        ("names a folder", {"name": "a/b"}),
        (
            "is a folder, which MLflow no longer supports",
            {"tracking_uri": f"file:{world.folder}/mlruns"},
        ),
        ("is relative", {"tracking_uri": "sqlite:///mlflow.db"}),
        (
            "cannot reach MLflow at http://127.0.0.1:9",
            {"tracking_uri": "http://127.0.0.1:9"},
        ),
        (
            "cannot write to",
            {"storage": "/proc/nowhere", "tracking_uri": world.trained.run.uri},
        ),
        ("SQLite cannot be used in s3://bucket", {"storage": "s3://bucket"}),
    ]
    for message, changes in refused:
        with pytest.raises(UserError, match=message):
            world.again(**{"name": "refused", **changes})
    assert not (world.folder / "runs/refused/run.json").exists()
    with pytest.raises(
        UserError, match=r"a file, and the cluster has 2 nodes; start a tracking server"
    ):
        tracking.check_nodes("sqlite:////shared/mlflow.db", 2)


def test_a_run_is_trained_by_one_process_at_a_time(world: World) -> None:
    with open(world.folder / "runs/.two.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(
            UserError, match=r"the run 'two' in .* is being trained by another process"
        ):
            world.again()
    assert world.again().was_finished


def test_overwrite_leaves_foreign_folders_alone(world: World) -> None:
    foreign = world.folder / "runs/mine"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("dear to me")
    with pytest.raises(UserError, match="not the folder of a run"):
        world.again(name="mine", overwrite=True)
    assert (foreign / "thesis.txt").read_text() == "dear to me"


def test_killed_after_training_it_is_only_finished(world: World) -> None:
    run = Path(world.folder / "runs/two")
    best = (run / "best/model.safetensors").read_bytes()
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "status": "running"}))
    (run / "best/config.json").unlink()
    lines: list[str] = []
    again = world.again(
        say=lines.append, ray=RayOptions(threads=1), on_checkpoint=in_place
    )
    assert not again.was_finished
    assert not [line for line in lines if line.startswith("epoch")]
    assert again.best == world.trained.best
    assert (run / "best/model.safetensors").read_bytes() == best


def test_an_overwritten_run_counts_no_more(world: World) -> None:
    counted: dict[str, Any] = {
        "model": {"name": "popularity"},
        "fit": FitConfig(),
        "name": "anew",
        "log_model": False,
        "on_checkpoint": in_place,
    }
    first, second = world.again(**counted), world.again(**counted, overwrite=True)
    runs = [
        run.id
        for row in load_rows(select(second.run.uri, [second.run.experiment]))
        for run in row.runs
    ]
    assert second.run.run_id in runs
    assert first.run.run_id not in runs
    assert not [line for line in world.lines if line.startswith("note:")]
    with pytest.raises(
        UserError,
        match=rf"of the MLflow run {second.run.run_id}, not of 'anew' \({first.run.run_id}\)",
    ):
        register(first.run, "small")

    place = world.folder / "runs/anew/run.json"
    record = json.loads(place.read_text())
    elsewhere = {**record["tracking"], "uri": "http://127.0.0.1:9"}
    place.write_text(json.dumps({**record, "tracking": elsewhere}))
    assert not world.again(**counted, overwrite=True).was_finished
    (note,) = [line for line in world.lines if line.startswith("note:")]
    assert (
        f"the MLflow run {second.run.run_id} of the overwritten training cannot be deleted"
        in note
    )

    place.write_text('{"stat')
    world.lines.clear()
    with pytest.raises(
        UserError, match=r"anew/run.json is damaged .* train again with --overwrite"
    ):
        world.again(**counted)
    assert not world.again(**counted, overwrite=True).was_finished
    (note,) = [line for line in world.lines if line.startswith("note:")]
    assert (
        "run.json is damaged and does not name the MLflow run, which stays in comparisons"
        in note
    )


def test_lost_progress_is_no_lost_training(ray_local: None) -> None:
    lines: list[str] = []
    with stream_progress(lines.append) as progress:
        ray.kill(progress)
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(progress.lines_after.remote(0))
    assert lines == [
        "note: no more progress is shown, as the actor that reports it is lost (ActorDiedError)"
    ]


SOME_GPUS = """
import ray
from models.storage.tables import UserError
from pipelines.evaluation.checks import Workers
from pipelines.training.config import RayOptions
from pipelines.training.run import check_cluster, wants_gpu

ray.init(address="local", num_cpus=4, num_gpus=2, include_dashboard=False, log_to_driver=False)
print(wants_gpu(RayOptions()), wants_gpu(RayOptions(use_gpu=False)), Workers().needs_gpu(2), Workers(device="cpu").needs_gpu(4))
for ask in (lambda: check_cluster(RayOptions(), 4, wants_gpu(RayOptions())), lambda: Workers().needs_gpu(4)):
    try:
        print(ask())
    except UserError as error:
        print(error)
"""


@pytest.mark.long
def test_too_few_gpus_are_not_passed_over_in_silence() -> None:
    said = subprocess.run(
        [sys.executable, "-c", SOME_GPUS], capture_output=True, text=True
    )
    assert said.returncode == 0, said.stderr
    answers, training, inference = said.stdout.splitlines()
    assert answers == "True False True False"
    assert (
        "4 workers need 4 CPUs, 4 GPUs, 1 CPU and 1 GPU for each on one node; the cluster has 4 CPUs, 2"
        in training
    )
    assert "or give --ray.use_gpu false, or start more nodes" in training
    assert (
        "4 workers need 4 GPUs, 1 GPU for each on one node; the cluster has 2 GPUs"
        in inference
    )
    assert "lower --shards or use --device cpu" in inference


def test_encoders_are_found_from_the_folder_of_the_command(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables, text = write_search(world.folder / "search", users=20)
    AutoModel.from_config(AutoConfig.for_model(**ITEM_MODEL)).save_pretrained(
        world.folder / "search/bert"
    )
    monkeypatch.chdir(world.folder / "search")
    trained = world.again(
        model={
            "name": "hllm",
            "pretrained": "bert",
            "item_tower": "bert",
            "max_history": 8,
        },
        fit=FitConfig(batch_size=16, max_epochs=1, metric="gauc"),
        ray=RayOptions(threads=1),
        inputs=Inputs(tables, text=text),
        name="hllm",
        log_model=False,
        on_checkpoint=in_place,
    )
    folder = str(world.folder / "search/bert")
    assert (trained.best.model["pretrained"], trained.best.model["item_tower"]) == (
        folder,
        folder,
    )


def test_an_error_of_the_users_in_a_worker_ends_the_run_at_once(world: World) -> None:
    said: list[str] = []
    with pytest.raises(UserError, match=r"the loss is .* lower fit\.lr"):
        world.again(
            name="lost",
            fit=replace(FIT, lr=1e30, clip_norm=0.0, warmup_share=0.0),
            say=said.append,
            ray=RayOptions(threads=1),
        )
    assert sum("parameters" in line for line in said) == 1  # one attempt
    assert not [line for line in said if line.startswith("note:")]
