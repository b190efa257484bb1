"""Sweeps on a real local Ray and MLflow: what the trials make, what is stopped, lost or refused."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from training_tables import write_tables

from models import checkpoint
from models.fit import FitConfig
from models.setup import set_up
from models.tables import UserError
from pipelines import tracking
from pipelines.evaluation.ranking import evaluate
from pipelines.training.options import RayOptions
from tuning.grid import Grid, Scheduler
from tuning.outcome import Outcome, best_of
from tuning.record import best_checkpoint
from tuning.sweep import Options, Swept, sweep

ROOT = Path(__file__).parents[2]

MODEL = {"name": "sasrec", "dim": 16, "num_layers": 1, "dropout": 0.0, "max_history": 12}
TIGER = {"name": "tiger", "d_model": 16, "d_ff": 32, "num_heads": 2, "d_kv": 8, "num_encoder_layers": 1,
         "num_decoder_layers": 1}  # fmt: skip
FIT = {"batch_size": 16, "max_epochs": 4, "log_every_steps": 2, "patience": 0, "seed": 3}


@dataclass
class World:
    """Tables, and a sweep under successive halving with one trial at a time."""

    folder: Path
    tables: str
    lines: list[str]
    swept: Swept

    def sweep(self, grid: Grid, **changes: Any) -> Swept:
        arguments: dict[str, Any] = {
            "tables": self.tables, "extra": None, "storage": str(self.folder / "runs"), "name": "halved",
            "ray_options": RayOptions(threads=1), "options": Options(concurrency=1), "say": self.lines.append,
        }  # fmt: skip
        return sweep(grid, grid.trials(), **{**arguments, **changes})

    def children(self, swept: Swept) -> dict[str, Any]:
        """MLflow runs of the sweep's trials, by the point's JSON."""
        client = tracking.connect(swept.run.uri)
        experiment = client.get_experiment_by_name(swept.run.experiment)
        found = client.search_runs(
            [experiment.experiment_id], f"tags.`mlflow.parentRunId` = '{swept.run.run_id}'"
        )  # fmt: skip
        assert len({run.data.tags[tracking.TRIAL_TAG] for run in found}) == len(found)
        return {run.data.tags[tracking.POINT_TAG]: run for run in found}


def grid(**fields: Any) -> Grid:
    axes = {"fit.lr": [0.03, 0.01, 0.0001]}
    return Grid(**{"name": "g", "source": "a test", "base": {"model": MODEL, "fit": FIT}, "axes": axes, **fields})


HALVED = grid(scheduler=Scheduler(name="asha", grace=1, reduction=2))


@pytest.fixture(scope="module")
def world(
    ray_local: None,
    small: tuple[str, str],
    new_store: Callable[[Path], str],
    tmp_path_factory: pytest.TempPathFactory,
) -> World:
    folder = tmp_path_factory.mktemp("sweep")
    new_store(folder / "runs")
    made = World(folder, small[0], [], None)  # type: ignore[arg-type]
    made.swept = made.sweep(HALVED)
    return made


def test_trials_train_as_jobs_train_does(world: World) -> None:
    best = world.swept.best
    assert best is not None
    assert best.point == {"fit.lr": 0.03}
    config, alone = world.folder / "config.yaml", world.folder / "alone"
    config.write_text(json.dumps({"model": MODEL, "fit": {**FIT, "lr": 0.03}}))
    # In a process of its own, as oneDNN's choice of kernels depends on what a process has computed before.
    command = [sys.executable, "-m", "models.train", "--config", str(config), "--tables", world.tables]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--output", str(alone)], cwd=ROOT, env=environment, check=True)
    assert best.value == pytest.approx(checkpoint.read(alone / "best").metrics["ndcg@10"], abs=1e-6)
    last = max((world.folder / "runs/halved" / best.name).glob("step-*"))
    expected = checkpoint.safetensors.torch.load_file(max(alone.glob("step-*")) / "model.safetensors")
    for name, value in checkpoint.safetensors.torch.load_file(last / "model.safetensors").items():
        torch.testing.assert_close(value, expected[name])


def test_trials_stopped_early_keep_their_best(world: World) -> None:
    found = [(outcome.status, outcome.epochs) for outcome in world.swept.outcomes]
    assert found == [("finished", 4), ("stopped", 2), ("stopped", 1)]  # 0.01 is ahead after one epoch, not after two
    for outcome in world.swept.outcomes[1:]:
        about = checkpoint.read(str(outcome.checkpoint))
        assert about.epoch == outcome.epochs
        assert about.metrics["ndcg@10"] == outcome.value
    assert not (world.folder / "runs/halved/tune").exists()


def test_the_axes_are_tunes_own_parameters(world: World) -> None:
    table = world.swept.table
    assert table is not None
    names = [outcome.name for outcome in world.swept.outcomes]
    shown = {row["config/trial"]: (row["config/fit.lr"], row["epoch"]) for _, row in table.iterrows()}
    assert shown == dict(zip(names, [(0.03, 4), (0.01, 2), (0.0001, 1)], strict=True))


def test_mlflow_has_the_sweep_and_its_trials(world: World) -> None:
    client = tracking.connect(world.swept.run.uri)
    parent = client.get_run(world.swept.run.run_id)
    tags = parent.data.tags
    assert parent.info.status == "FINISHED"
    assert (tags["trieline.kind"], tags["sweep.grid"], tags["sweep.metric"]) == ("sweep", "g", "val/ndcg@10")
    assert json.loads(tags["sweep.axes"]) == ["fit.lr"]
    assert world.swept.best is not None
    assert tags["sweep.best"] == world.swept.best.run_id
    assert parent.data.metrics["best/ndcg_at_10"] == pytest.approx(world.swept.best.value)
    assert {"grid.yaml", "trials.json"} <= {a.path for a in client.list_artifacts(parent.info.run_id)}
    children = world.children(world.swept)
    assert set(children) == {json.dumps({"fit.lr": lr}) for lr in (0.03, 0.01, 0.0001)}
    for point, run in children.items():
        assert run.info.status == "FINISHED"
        assert run.data.tags["trieline.kind"] == "trial"
        assert run.data.params["fit.lr"] == str(json.loads(point)["fit.lr"])
        epochs = next(o.epochs for o in world.swept.outcomes if o.run_id == run.info.run_id)
        assert len(client.get_metric_history(run.info.run_id, "val/ndcg_at_10")) == epochs
        assert ("test/ndcg_at_10" in run.data.metrics) == (epochs == 4)  # those that were stopped are not measured


def test_a_sweep_of_the_name_is_resumed_or_refused(world: World) -> None:
    with pytest.raises(UserError, match=r"the sweep 'halved' is in .* already; give --resume"):
        world.sweep(HALVED)
    other, _ = write_tables(world.folder / "others", items=20)
    with pytest.raises(UserError, match="the sweep 'halved' was started with another table 'items'"):
        world.sweep(HALVED, resume=True, tables=other)
    again = world.sweep(HALVED, resume=True)
    assert again.already
    assert again.best == world.swept.best
    assert len(world.children(again)) == 3
    with pytest.raises(UserError, match=r"has other trials .*was started with other settings"):
        world.sweep(grid(fixed={"model.dim": 8}), resume=True)
    assert best_checkpoint(str(world.folder / "runs/halved")) == str(world.folder / "runs/halved" / again.best.name)  # type: ignore[union-attr]
    assert best_checkpoint("runs/elsewhere") == "runs/elsewhere"


def kill_holder(lock: Path) -> None:
    """SIGKILL to the process that holds a trial's lock: the one that runs it."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and str(lock) in {file.path for file in process.open_files()}:
                return process.send_signal(signal.SIGKILL)
    raise AssertionError(f"nobody holds {lock}")


def test_lost_trials_are_continued_and_lost_ones_recorded(world: World) -> None:
    kills: list[str] = []

    def watch(line: str) -> None:
        name = line.split()[0]
        often = {"lr-0.03": 1, "lr-0.01": 2}.get(name.rsplit("-", 1)[0], 0)
        if "epoch" in line and kills.count(name) < often:
            kills.append(name)
            kill_holder(world.folder / f"runs/killed/.{name}.lock")

    three = grid(axes={"fit.lr": [0.03, 0.01, 1e30]})
    swept = world.sweep(three, name="killed", options=Options(concurrency=1, retries=1), say=watch)
    first, second, third = swept.outcomes
    assert len(kills) == 3
    assert first.status == "finished"
    assert first.value == pytest.approx(world.swept.outcomes[0].value)  # as if nothing had happened
    assert second.status == "failed"
    assert third.status == "failed"
    assert "the loss is" in str(third.error)
    children = world.children(swept)
    assert len(children) == 3
    client = tracking.connect(swept.run.uri)
    history = client.get_metric_history(str(first.run_id), "val/ndcg_at_10")
    assert len({point.step for point in history}) == len(history) == 4  # no step twice
    for outcome in (second, third):
        run = client.get_run(str(outcome.run_id))
        assert run.info.status == "FAILED"
        assert run.data.tags[tracking.ERROR_TAG] == outcome.error
    assert client.get_run(swept.run.run_id).info.status == "FINISHED"

    changes: dict[str, Any] = {"name": "killed", "resume": True, "options": Options(concurrency=1, again=True)}
    with pytest.raises(UserError, match="the sweep 'killed' was started with another table 'items'"):
        world.sweep(three, **changes, tables=write_tables(world.folder / "other", items=20)[0])
    assert [o.status for o in world.sweep(three, **changes).outcomes] == ["finished", "finished", "failed"]
    again = world.children(swept)
    assert {run.info.run_id for run in again.values()} == {run.info.run_id for run in children.values()}
    healed = again[json.dumps({"fit.lr": 0.01})]
    assert healed.info.status == "FINISHED"
    assert tracking.ERROR_TAG not in healed.data.tags
    assert len(client.get_metric_history(healed.info.run_id, "val/ndcg_at_10")) == 4


def test_a_sweep_without_a_value_fails_and_is_taken_up_again(world: World) -> None:
    tables, sids = write_tables(world.folder / "taught")
    teacher, away = world.folder / "tiger", world.folder / "away"
    setup = set_up(TIGER, FitConfig(batch_size=16), tables, sids)
    checkpoint.save(teacher / "best", setup.model, setup.checkpoint(epoch=1))
    student = {"name": "sid_mlp", "head_width": 16, "teacher": str(teacher)}
    one = grid(base={"model": student, "fit": {**FIT, "max_epochs": 1}}, axes={"fit.lr": [0.01]})
    asked: dict[str, Any] = {"name": "lost", "tables": tables, "extra": sids}

    def lose(line: str) -> None:
        if "trial of g" in line:  # what a look at the trials has found is gone when they start
            teacher.rename(away)

    again = (
        r"no trial of the sweep .*/lost has a value; mend what failed, then run it with --resume --options.again true"
    )
    with pytest.raises(UserError, match=rf"{again} \(lr-0.01-\w+: the teacher .* is neither a checkpoint"):
        world.sweep(one, **asked, say=lose)
    away.rename(teacher)
    with pytest.raises(UserError, match=again):
        world.sweep(one, **asked, resume=True)
    with pytest.raises(UserError, match=again):
        best_checkpoint(str(world.folder / "runs/lost"))
    swept = world.sweep(one, **asked, resume=True, options=Options(concurrency=1, again=True))
    (run,) = world.children(swept).values()
    assert [(o.status, o.run_id) for o in swept.outcomes] == [("finished", run.info.run_id)]
    assert run.data.params["model.teacher"] == str(teacher / "best")  # which the grid's own line does not say

    # It was measured on test, but the figures did not reach MLflow: they are measured anew.
    (outcome,) = swept.outcomes
    place = world.folder / "runs/lost" / outcome.name
    noted = json.loads((place / "run.json").read_text())
    (place / "run.json").write_text(json.dumps({**noted, "status": "failed", "error": "no MLflow"}))
    tracking.Logger(tracking.RunRef(**noted["tracking"])).tag(**{tracking.ERROR_TAG: "no MLflow"})
    measured = json.loads((place / "best/evaluation-test.json").read_text())
    (place / "best/evaluation-test.json").write_text("{}")
    (healed,) = world.sweep(one, **asked, resume=True, options=Options(concurrency=1, again=True)).outcomes
    assert healed.status == "finished"
    assert json.loads((place / "best/evaluation-test.json").read_text())["metrics"] == measured["metrics"]


def test_conditions_and_budgets_end_trials(world: World) -> None:
    one = grid(stop={"epoch": 2}, axes={"fit.lr": [0.03]})
    with pytest.raises(UserError, match="stopped with 1 of 1 trials to do; the same line with --resume goes on"):
        world.sweep(one, name="cut", options=Options(budget_hours=1e-7))
    swept = world.sweep(one, name="cut", resume=True)
    assert [(outcome.status, outcome.epochs) for outcome in swept.outcomes] == [("stopped", 2)]
    assert [run.info.status for run in world.children(swept).values()] == ["FINISHED"]


def measured(world: World, **fields: Any) -> Grid:
    """A grid that measures the first trial's checkpoint."""
    axes = {"checkpoint": [str(world.folder / "runs/halved" / world.swept.outcomes[0].name)], **fields.pop("axes", {})}
    return Grid(**{"name": "g", "source": "a test", "kind": "evaluate", "axes": axes, **fields})


def test_trials_of_several_workers_are_stopped_early(world: World) -> None:
    asha = Scheduler(name="asha", grace=1, reduction=2)
    two = grid(axes={"fit.lr": [0.03, 0.0001]}, scheduler=asha, base={"model": MODEL, "fit": {**FIT, "max_epochs": 9}})
    swept = world.sweep(two, name="halved_workers", ray_options=RayOptions(num_workers=2, cpus_per_worker=0.5))
    ahead, behind = swept.outcomes
    assert (ahead.status, ahead.epochs, behind.status) == ("finished", 9, "stopped")
    assert behind.epochs < 9  # its workers go on until they are ended
    reports = json.loads((Path(swept.folder) / ahead.name / "reports.json").read_text())
    assert [epoch for epoch, _ in reports] == list(range(1, 10))
    assert max(value for _, value in reports) == pytest.approx(ahead.value)
    for run in world.children(swept).values():
        assert run.info.status == "FINISHED"
        assert run.data.params["ray.num_workers"] == "2"
    first = world.children(swept)[json.dumps({"fit.lr": 0.03})]
    assert first.data.metrics["val/ndcg_at_10"] == pytest.approx(reports[-1][1])


def test_a_checkpoint_is_measured_at_every_point(world: World) -> None:
    each = measured(world, metric="test/ndcg@10", axes={"evaluate.batch_size": [8, 32]})
    swept = world.sweep(each, name="measured")
    found, _ = evaluate(str(each.axes["checkpoint"][0]), world.tables)  # type: ignore[index]
    assert [outcome.value for outcome in swept.outcomes] == pytest.approx([found.metrics["ndcg@10"]] * 2)
    for run in world.children(swept).values():
        assert {"test/ndcg_at_10", "test/users_per_s", "test/peak_memory_mb"} <= set(run.data.metrics)
    with pytest.raises(UserError, match=r"has the axis .evaluate\.beams., which the model 'sasrec' does not have"):
        world.sweep(measured(world, metric="test/ndcg@10", axes={"evaluate.beams": [1]}), name="refused")


def test_what_no_trial_could_do_is_refused_before_any_starts(world: World) -> None:
    refused: list[tuple[str, Grid, dict[str, Any]]] = [
        ("is val/recall@7, which no trial reports; choose val/ and one of .*recall@5", grid(metric="val/recall@7"), {}),
        ("cannot reach MLflow at http://127.0.0.1:9", grid(), {"tracking_uri": "http://127.0.0.1:9"}),
        ("is not a table", grid(), {"tables": str(world.folder)}),
        ("needs semantic IDs; give --sids", grid(base={"model": {"name": "tiger"}, "fit": FIT}), {}),
        ("needs 100 CPUs, .*the cluster has 2", grid(), {"ray_options": RayOptions(cpus_per_worker=100)}),
        (
            "fit.batch_size 9 does not divide by 2 workers; choose a multiple of 2",
            grid(axes={"fit.batch_size": [8, 9]}),
            {"ray_options": RayOptions(num_workers=2, cpus_per_worker=0.5)},
        ),
        ("names a folder", grid(), {"name": "a/b"}),
        ("stops by 'val/ndgc', which no trial reports; choose epoch, seconds or", grid(stop={"val/ndgc": 1}), {}),
        (
            "is test/recall@7, which no trial reports; choose test/ and one of .*users_per_s",
            measured(world, metric="test/recall@7"),
            {},
        ),
    ]
    for message, one, changes in refused:
        with pytest.raises(UserError, match=message):
            world.sweep(one, **{"name": "refused", **changes})
    assert not (world.folder / "runs/refused").exists()


def test_the_best_settings_are_those_of_the_best_mean() -> None:
    def trial(name: str, alpha: float, seed: int, value: float | None) -> Outcome:
        return Outcome(name, name, {"model.alpha": alpha, "fit.seed": seed}, "finished", value)

    lucky = [trial("a", 0.5, 1, 0.9), trial("b", 0.5, 2, 0.1)]
    steady = [trial("c", 0.7, 1, 0.6), trial("d", 0.7, 2, 0.7)]
    assert best_of([*lucky, *steady]) is steady[1]
    alone = [trial("e", 1.0, 1, 0.95), trial("f", 1.0, 2, None)]  # its other seed failed
    assert best_of([*lucky, *steady, *alone]) is steady[1]
    assert best_of([trial("g", 1.0, 1, None)]) is None
