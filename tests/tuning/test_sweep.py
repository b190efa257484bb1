"""Sweeps on a real local Ray and MLflow: what the trials make, what is stopped, lost or
refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
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

from jobs import cli
from jobs import sweep as job
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import UserError
from models.training.fit import FitConfig
from pipelines import tracking
from pipelines.evaluation.ranking import evaluate
from pipelines.evaluation.record import load_test_metrics
from pipelines.training.config import RayOptions
from tests.fixtures.training_tables import write_tables
from tests.fixtures.trainings import build_training, make_sweep
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
TIGER = {
    "name": "tiger",
    "d_model": 16,
    "d_ff": 32,
    "num_heads": 2,
    "d_kv": 8,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
}
FIT = {
    "batch_size": 16,
    "max_epochs": 4,
    "log_every_steps": 2,
    "patience": 0,
    "seed": 3,
}


@dataclass
class World:
    """Tables, and a sweep under successive halving with one trial at a time."""

    folder: Path
    tables: str
    lines: list[str]
    swept: SweepResult

    def sweep(self, grid: Grid, **changes: Any) -> SweepResult:
        say = changes.pop("say", self.lines.append)
        settings: dict[str, Any] = {
            "inputs": Inputs(self.tables),
            "storage": str(self.folder / "runs"),
            "name": "halved",
            "ray": RayOptions(threads=1),
            "options": Options(concurrency=1),
        }
        config = make_sweep(**{**settings, **changes})
        return run_sweep(grid, grid.trials(), config, say=say)

    def children(self, swept: SweepResult) -> dict[str, Any]:
        """MLflow runs of the sweep's trials, by the point's JSON."""
        client = tracking.connect(swept.run.uri)
        experiment = client.get_experiment_by_name(swept.run.experiment)
        found = client.search_runs(
            [experiment.experiment_id],
            f"tags.`mlflow.parentRunId` = '{swept.run.run_id}'",
        )
        assert len({run.data.tags[tracking.TRIAL_TAG] for run in found}) == len(found)
        return {run.data.tags[tracking.POINT_TAG]: run for run in found}


def grid(
    model: dict[str, Any] = MODEL,
    fit: dict[str, Any] = FIT,
    fixed: Point | None = None,
    **fields: Any,
) -> Grid:
    settings = {**flatten_sections({"model": model, "fit": fit}), **(fixed or {})}
    axes = {"fit.lr": [0.03, 0.01, 0.0001]}
    return Grid(
        **{"name": "g", "source": "a test", "fixed": settings, "axes": axes, **fields}
    )


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
    # In a process of its own, as oneDNN's choice of kernels depends on what a process
    # has computed before.
    command = [
        sys.executable,
        "-m",
        "models.train",
        "--config",
        str(config),
        "--tables",
        world.tables,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, "--output", str(alone)], cwd=ROOT, env=environment, check=True
    )
    assert best.value == pytest.approx(
        checkpoint.read(alone / "best").metrics["ndcg@10"], abs=1e-6
    )
    last = max((world.folder / "runs/halved" / best.name).glob("step-*"))
    expected = checkpoint.safetensors.torch.load_file(
        max(alone.glob("step-*")) / "model.safetensors"
    )
    for name, value in checkpoint.safetensors.torch.load_file(
        last / "model.safetensors"
    ).items():
        torch.testing.assert_close(value, expected[name])


@pytest.mark.exhaustive
def test_trials_stopped_early_keep_their_best(world: World) -> None:
    found = [(outcome.status, outcome.epochs) for outcome in world.swept.trials]
    assert found == [
        ("finished", 4),
        ("stopped", 2),
        ("stopped", 1),
    ]  # 0.01 is ahead after one epoch, not after two
    for outcome in world.swept.trials[1:]:
        about = checkpoint.read(str(outcome.checkpoint))
        assert about.epoch == outcome.epochs
        assert about.metrics["ndcg@10"] == outcome.value
    assert not (world.folder / "runs/halved/tune").exists()


def test_the_axes_are_tunes_own_parameters(world: World) -> None:
    found = world.swept.results
    assert found is not None
    shown = {
        result.config["trial"]: (result.config["fit.lr"], result.metrics["epoch"])
        for result in found
    }  # type: ignore[index]
    names = [outcome.name for outcome in world.swept.trials]
    assert shown == dict(zip(names, [(0.03, 4), (0.01, 2), (0.0001, 1)], strict=True))


def test_mlflow_has_the_sweep_and_its_trials(world: World) -> None:
    client = tracking.connect(world.swept.run.uri)
    parent = client.get_run(world.swept.run.run_id)
    tags = parent.data.tags
    assert parent.info.status == "FINISHED"
    assert (tags["trieline.kind"], tags["sweep.grid"], tags["sweep.metric"]) == (
        "sweep",
        "g",
        "val/ndcg@10",
    )
    assert json.loads(tags["sweep.axes"]) == ["fit.lr"]
    assert world.swept.best is not None
    assert tags["sweep.best"] == world.swept.best.run_id
    assert parent.data.metrics["best/ndcg_at_10"] == pytest.approx(
        world.swept.best.value
    )
    assert {"grid.yaml", "trials.json"} <= {
        a.path for a in client.list_artifacts(parent.info.run_id)
    }
    children = world.children(world.swept)
    assert set(children) == {json.dumps({"fit.lr": lr}) for lr in (0.03, 0.01, 0.0001)}
    for point, run in children.items():
        assert run.info.status == "FINISHED"
        assert run.data.tags["trieline.kind"] == "trial"
        assert run.data.params["fit.lr"] == str(json.loads(point)["fit.lr"])
        epochs = next(
            o.epochs for o in world.swept.trials if o.run_id == run.info.run_id
        )
        assert (
            len(client.get_metric_history(run.info.run_id, "val/ndcg_at_10")) == epochs
        )
        training = tracking.RunRef(world.swept.run.uri, "", run.info.run_id)
        is_measured = bool(load_test_metrics(training))
        assert is_measured == (epochs == 4)  # stopped trials are not measured


def test_the_same_line_again_finds_the_sweep_finished(world: World) -> None:
    other, _ = write_tables(world.folder / "others", items=20)
    with pytest.raises(
        UserError, match=r"was started with another table '(items|sequences)'"
    ):
        world.sweep(HALVED, inputs=Inputs(other))
    again = world.sweep(HALVED)
    assert again.results is None
    assert (again.run, again.best, again.trials) == (
        world.swept.run,
        world.swept.best,
        world.swept.trials,
    )
    assert len(world.children(again)) == 3
    with pytest.raises(
        UserError, match=r"was started with model\.dim 16, not 8; choose another --name"
    ):
        world.sweep(grid(fixed={"model.dim": 8}))
    assert resolve_best_trial(str(world.folder / "runs/halved")) == str(
        world.folder / "runs/halved" / again.best.name
    )
    assert resolve_best_trial("runs/elsewhere") == "runs/elsewhere"


@pytest.mark.exhaustive
def test_a_trial_that_was_told_to_stop_and_killed_does_not_go_on(world: World) -> None:
    record = world.folder / "runs/halved" / world.swept.trials[1].name / "run.json"
    noted = json.loads(record.read_text())
    record.write_text(json.dumps({**noted, "status": "running", "stopped": False}))
    again = world.sweep(HALVED)
    assert again.results is None
    assert again.trials == world.swept.trials


def kill_holder(lock: Path) -> None:
    """SIGKILL to the process that holds a trial's lock: the one that runs it."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and str(lock) in {
                file.path for file in process.open_files()
            }:
                return process.send_signal(signal.SIGKILL)
    raise AssertionError(f"nobody holds {lock}")


@pytest.mark.exhaustive
def test_lost_trials_are_continued_and_lost_ones_recorded(world: World) -> None:
    kills: list[str] = []

    def watch(line: str) -> None:
        name = line.split()[0]
        often = {"lr-0.03": 1, "lr-0.01": 2}.get(name.rsplit("-", 1)[0], 0)
        if "epoch" in line and kills.count(name) < often:
            kills.append(name)
            kill_holder(world.folder / f"runs/killed/.{name}.lock")

    three = grid(axes={"fit.lr": [0.03, 0.01, 1e30]})
    swept = world.sweep(
        three,
        name="killed",
        ray=RayOptions(threads=1, max_failures=1),
        say=watch,
    )
    first, second, third = swept.trials
    assert len(kills) == 3
    assert first.status == "finished"
    assert first.value == pytest.approx(
        world.swept.trials[0].value
    )  # as if nothing had happened
    assert second.status == "failed"
    assert third.status == "failed"
    assert "the loss is" in str(third.error)
    children = world.children(swept)
    assert len(children) == 3
    client = tracking.connect(swept.run.uri)
    history = client.get_metric_history(str(first.run_id), "val/ndcg_at_10")
    assert len({point.step for point in history}) == len(history) == 4  # no step twice
    for outcome in (second, third):
        assert client.get_run(str(outcome.run_id)).info.status == "FAILED"
    assert client.get_run(swept.run.run_id).info.status == "FAILED"

    assert [o.status for o in world.sweep(three, name="killed").trials] == [
        "finished",
        "finished",
        "failed",
    ]
    again = world.children(swept)
    assert {run.info.run_id for run in again.values()} == {
        run.info.run_id for run in children.values()
    }
    healed = again[json.dumps({"fit.lr": 0.01})]
    assert healed.info.status == "FINISHED"
    assert len(client.get_metric_history(healed.info.run_id, "val/ndcg_at_10")) == 4


@pytest.mark.exhaustive
def test_the_best_is_of_seeds_that_settings_share_where_a_trial_failed(
    world: World,
) -> None:
    killed: list[str] = []

    def kill_first_seed(line: str) -> None:
        name = line.split()[0]
        if "epoch" in line and name.startswith("lr-0.03-seed-1-") and not killed:
            killed.append(name)
            kill_holder(world.folder / f"runs/seeds/.{name}.lock")

    seeds = grid(
        fit={**FIT, "max_epochs": 2},
        axes={"fit.lr": [0.03, 0.0001], "fit.seed": [1, 2]},
    )
    once = RayOptions(threads=1, max_failures=0)

    swept = world.sweep(seeds, name="seeds", ray=once, say=kill_first_seed)

    assert [o.status for o in swept.trials] == ["failed", *["finished"] * 3]
    assert swept.best.point == {"fit.lr": 0.03, "fit.seed": 2}
    client = tracking.connect(swept.run.uri)
    parent = client.get_run(swept.run.run_id)
    assert parent.info.status == "FAILED"
    assert parent.data.tags["sweep.incomplete"] == "1 of 4 trials have no result"
    assert parent.data.tags["sweep.best"] == swept.best.run_id
    written = json.loads((world.folder / "runs/seeds/trials.json").read_text())
    assert (written["complete"], written["best"]) == (False, swept.best.name)
    with pytest.raises(
        UserError, match=r"1 of 4 trials of the sweep .* lr-0.03-seed-1"
    ):
        resolve_best_trial(str(world.folder / "runs/seeds"))

    before = len(world.lines)
    again = world.sweep(seeds, name="seeds", ray=once)

    told = [line for line in world.lines[before:] if "  epoch " in line]
    assert told
    assert all(line.split()[0] == killed[0] for line in told)  # it does only that trial
    assert not again.failed
    parent = client.get_run(swept.run.run_id)
    assert parent.info.status == "FINISHED"
    assert parent.data.tags["sweep.incomplete"] == ""
    assert parent.data.metrics["trials/failed"] == 0
    assert resolve_best_trial(str(world.folder / "runs/seeds")) == str(
        world.folder / "runs/seeds" / again.best.name
    )


@pytest.mark.exhaustive
def test_the_command_says_last_that_trials_failed(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = flatten_sections({"model": MODEL, "fit": {**FIT, "max_epochs": 1}})
    content = {
        "source": "a test",
        "fixed": settings,
        "axes": {"fit.lr": [0.03, 1e30]},
    }
    (world.folder / "fails.yaml").write_text(json.dumps(content))
    words = ["--grid", str(world.folder / "fails.yaml"), "--tables", world.tables]
    words += ["--storage", str(world.folder / "runs"), "--options.test", "false"]

    with pytest.raises(
        UserError,
        match=r"1 of 2 trials failed \(lr-1e\+30-\w+: the loss is .*incomplete grid",
    ):
        job.run(cli.config_from_words(job, words))

    assert re.search(
        r"best  +lr-0.03-.* \(of an incomplete grid\)", capsys.readouterr().out
    )


@pytest.mark.exhaustive
def test_a_sweep_without_a_value_fails_and_is_taken_up_again(world: World) -> None:
    tables, sids = write_tables(world.folder / "taught")
    teacher, away = world.folder / "tiger", world.folder / "away"
    setup = build_training(TIGER, FitConfig(batch_size=16), Inputs(tables, sids))
    checkpoint.save(teacher / "best", setup.model, setup.checkpoint(epoch=1))
    student = {"name": "sid_mlp", "head_width": 16, "teacher": str(teacher)}
    one = grid(model=student, fit={**FIT, "max_epochs": 1}, axes={"fit.lr": [0.01]})
    asked: dict[str, Any] = {"name": "lost", "inputs": Inputs(tables, sids)}

    def lose(line: str) -> None:
        if (
            "trial of g" in line
        ):  # what the look before has found is gone when the trial starts
            teacher.rename(away)

    with pytest.raises(
        UserError,
        match=r"no trial of .*/lost has a value; fix what failed .* \(lr-0.01-\w+: the teacher",
    ):
        world.sweep(one, **asked, say=lose)
    with pytest.raises(UserError, match=r"the teacher .* is neither a checkpoint"):
        world.sweep(one, **asked)
    away.rename(teacher)
    swept = world.sweep(one, **asked)
    (run,) = world.children(swept).values()
    assert [(o.status, o.run_id) for o in swept.trials] == [
        ("finished", run.info.run_id)
    ]
    assert run.data.params["model.teacher"] == str(
        teacher / "best"
    )  # which the grid's own line does not say


def measured(world: World, **fields: Any) -> Grid:
    """A grid that measures the first trial's checkpoint."""
    axes = {
        "checkpoint": [str(world.folder / "runs/halved" / world.swept.trials[0].name)],
        **fields.pop("axes", {}),
    }
    return Grid(
        **{"name": "g", "source": "a test", "kind": "evaluate", "axes": axes, **fields}
    )


@pytest.mark.exhaustive
def test_trials_of_several_workers_are_stopped_early(world: World) -> None:
    asha = Scheduler(name="asha", grace=1, reduction=2)
    two = grid(
        axes={"fit.lr": [0.03, 0.0001]}, scheduler=asha, fit={**FIT, "max_epochs": 9}
    )
    swept = world.sweep(
        two,
        name="halved_workers",
        ray=RayOptions(num_workers=2, cpus_per_worker=0.5),
    )
    ahead, behind = swept.trials
    assert (ahead.status, ahead.epochs, behind.status) == ("finished", 9, "stopped")
    assert behind.epochs < 9  # its workers go on until they are ended
    for run in world.children(swept).values():
        assert run.info.status == "FINISHED"
        assert run.data.params["ray.num_workers"] == "2"
        training = tracking.RunRef(swept.run.uri, "", run.info.run_id)
        is_measured = bool(load_test_metrics(training))  # by a task of its own
        assert is_measured == (run.info.run_id == ahead.run_id)
    history = tracking.connect(swept.run.uri).get_metric_history(
        str(ahead.run_id), "val/ndcg_at_10"
    )
    assert len(history) == 9
    assert max(point.value for point in history) == pytest.approx(ahead.value)


@pytest.mark.exhaustive
def test_a_trial_refuses_tables_that_were_replaced_after_the_check(
    ray_local: None, tmp_path: Path, new_store: Callable[[Path], str]
) -> None:
    tables, _ = write_tables(tmp_path / "small")
    other, _ = write_tables(tmp_path / "other", parts=3)
    new_store(tmp_path / "runs")

    def replace_tables() -> None:
        for source in Path(other, "sequences").iterdir():
            shutil.copy(source, Path(tables, "sequences"))

    config = make_sweep(
        inputs=Inputs(tables),
        storage=str(tmp_path / "runs"),
        name="replaced",
        ray=RayOptions(threads=1),
        options=Options(concurrency=1),
    )

    with pytest.raises(UserError, match="'sequences' was replaced since this job"):
        run_sweep(grid(), grid().trials(), config, start=replace_tables)

    assert not list((tmp_path / "runs/replaced").glob("*/step-*"))


@pytest.mark.exhaustive
def test_a_checkpoint_is_measured_at_every_point(world: World) -> None:
    each = measured(world, metric="test/ndcg@10", axes={"evaluate.batch_size": [8, 32]})
    swept = world.sweep(each, name="measured", smoke=True)
    assert (
        tracking.SMOKE_TAG
        in tracking.connect(swept.run.uri).get_run(swept.run.run_id).data.tags
    )
    found, _ = evaluate(str(each.axes["checkpoint"][0]), Inputs(world.tables))  # type: ignore[index]
    assert [outcome.value for outcome in swept.trials] == pytest.approx(
        [found.metrics["ndcg@10"]] * 2
    )
    for run in world.children(swept).values():
        assert {"test/ndcg_at_10", "test/users_per_s", "test/peak_memory_mb"} <= set(
            run.data.metrics
        )
    with pytest.raises(UserError, match="was measured with other options"):
        world.sweep(
            measured(
                world,
                metric="test/ndcg@10",
                axes={"evaluate.batch_size": [8]},
                fixed={"evaluate.unseen": True},
            ),
            name="measured",
        )
    with pytest.raises(
        UserError, match="the model 'sasrec' has no option --beams when recommending"
    ):
        world.sweep(
            measured(world, metric="test/ndcg@10", axes={"evaluate.beams": [1]}),
            name="refused",
        )


def test_what_no_trial_could_do_is_refused_before_any_starts(world: World) -> None:
    refused: list[tuple[str, Grid, dict[str, Any]]] = [
        (
            "fit.metric is 'recall@7', which the model 'sasrec' does not measure; .*recall@5",
            grid(metric="val/recall@7"),
            {},
        ),
        (
            "cannot reach MLflow at http://127.0.0.1:9",
            grid(),
            {"tracking_uri": "http://127.0.0.1:9"},
        ),
        ("is not a table", grid(), {"inputs": Inputs(str(world.folder))}),
        ("needs semantic IDs; give --sids", grid(model={"name": "tiger"}), {}),
        (
            "needs 100 CPUs, .*the cluster has 2",
            grid(),
            {"ray": RayOptions(cpus_per_worker=100)},
        ),
        (
            "fit.batch_size 9 does not divide by 2 workers; choose a multiple of 2",
            grid(axes={"fit.batch_size": [8, 9]}),
            {"ray": RayOptions(num_workers=2, cpus_per_worker=0.5)},
        ),
        ("names a folder", grid(), {"name": "a/b"}),
        (
            "is test/recall@7, which is not measured; .*users_per_s",
            measured(world, metric="test/recall@7"),
            {},
        ),
    ]
    for message, one, changes in refused:
        with pytest.raises(UserError, match=message):
            world.sweep(one, **{"name": "refused", **changes})
    assert not (world.folder / "runs/refused").exists()


def test_the_best_settings_are_those_of_the_best_mean_over_shared_seeds() -> None:
    def trial(name: str, alpha: float, seed: int, value: float | None) -> TrialResult:
        return TrialResult(
            name, name, {"model.alpha": alpha, "fit.seed": seed}, "finished", value
        )

    lucky = [trial("a", 0.5, 1, 0.9), trial("b", 0.5, 2, 0.1)]
    steady = [trial("c", 0.7, 1, 0.6), trial("d", 0.7, 2, 0.7)]
    better_on_seed_2 = [trial("e", 1.0, 1, None), trial("f", 1.0, 2, 0.95)]
    worse_on_seed_1 = [trial("g", 2.0, 1, 0.7), trial("h", 2.0, 2, None)]
    without_value = [trial("i", 3.0, 1, None), trial("j", 3.0, 2, None)]
    other_seed = [trial("k", 4.0, 3, 0.65)]

    assert find_best([*lucky, *steady]) is steady[1]
    assert find_best([*lucky, *steady, *better_on_seed_2]) is better_on_seed_2[1]
    assert find_best([*lucky, *worse_on_seed_1]) is lucky[0]  # 0.9 on seed 1
    assert find_best([*steady, *without_value]) is steady[1]
    assert find_best([*lucky, *other_seed]) is other_seed[0]  # no seed is shared
    assert find_best(without_value) is None
