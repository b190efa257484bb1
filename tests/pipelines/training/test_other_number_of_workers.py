"""A run that two workers began and one goes on with ends with the weights of an
undisturbed one, of each family.

Of one family the workers are Ray's, lost together, and twice when one goes on; of the
others they are two processes of the same loop.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ray.train import TrainingFailedError
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule

from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.training.fit import FitConfig
from pipelines import tracking
from pipelines.faults import explain
from pipelines.training.config import RayOptions
from pipelines.training.run import TrainingResult
from pipelines.training.settings import check_training
from pipelines.training.worker import Task, WorkerContext, run_task
from tests.fixtures.actions_tables import write_actions
from tests.fixtures.search_tables import write_search
from tests.fixtures.training_tables import write_tables
from tests.fixtures.trainings import make_config, train

pytestmark = pytest.mark.exhaustive

MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "retrieval": (
        {
            "name": "sasrec",
            "dim": 16,
            "num_layers": 1,
            "dropout": 0.0,
            "max_history": 6,
        },
        {"max_epochs": 15},
    ),
    "search": (
        {
            "name": "qgs",
            "width": 16,
            "num_layers": 1,
            "dropout": 0.0,
            "infonce_weight": 0.0,
            "max_history": 8,
        },
        {"metric": "gauc"},
    ),
    "actions": (
        {
            "name": "attn_mvp",
            "width": 16,
            "num_layers": 1,
            "num_heads": 2,
            "ffn": 24,
            "expert_width": 8,
            "tower_width": 6,
            "dropout": 0.0,
            "max_history": 10,
        },
        {"metric": "mean/rig"},
    ),
    "sharded": (
        {
            "name": "lc_rec",
            "width": 16,
            "num_layers": 2,
            "num_heads": 2,
            "ffn_width": 24,
            "tasks": ["next"],
            "max_history": 4,
        },
        {"max_epochs": 3},
    ),
}
"""By family: a model without random numbers and without negatives out of its batch, and
options of its training. And a language model that is cut over its workers."""

FIT = {
    "batch_size": 16,
    "max_epochs": 5,
    "lr": 0.003,
    "patience": 0,
    "seed": 3,
    "log_every_steps": 2,
    "checkpoint_every_steps": 8,
    "eval_examples": 31,
}


def tables_of(family: str, folder: Path) -> Inputs:
    """Tables of six parts."""
    if family in ("retrieval", "sharded"):
        tables, sids = write_tables(folder, parts=6)
        return Inputs(tables, sids if family == "sharded" else None)
    if family == "search":
        tables, text = write_search(folder, parts=6)
        return Inputs(tables, text=text)
    return Inputs(write_actions(folder, parts=6))


def newest(folder: Path) -> int:
    """The step of the newest checkpoint of the run that is whole."""
    return max(
        (
            int(made.parent.name[5:13])
            for made in folder.glob(f"step-*/{checkpoint.CONFIG}")
        ),
        default=0,
    )


def at_step(folder: Path, other: Path) -> Path:
    """The run's checkpoint at the step of another run's checkpoint."""
    (found,) = folder.glob(f"{other.name[:13]}*")
    return found


def kill_workers(
    folder: Path, count: int, late: int, times: int = 1
) -> threading.Thread:
    """SIGKILL to that many of Ray's training workers once the run has a checkpoint that
    late, and each next time once it has a newer one."""

    def watch() -> None:
        due = late
        for _ in range(times):
            while newest(folder) < due:
                time.sleep(0.02)
            workers = [
                p
                for p in psutil.Process().children(recursive=True)
                if p.name().startswith("ray::RayTrainWo")
            ]
            for worker in sorted(workers, key=lambda process: process.create_time())[
                -count:
            ]:
                worker.kill()
            due = newest(folder) + 1

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def one_of_two(rank: int, task: Task, until: int) -> None:
    """A worker without Ray Train, which is killed after the first checkpoint from that
    step on.
    """
    dist.init_process_group(
        "gloo", f"file://{task.config.folder}.meet", rank=rank, world_size=2
    )

    def report(about: checkpoint.Checkpoint) -> None:
        cut = [
            p
            for module in gc.get_objects()
            if isinstance(module, FSDPModule)
            for p in module.parameters()
        ]
        assert bool(cut) == task.config.ray.fsdp
        assert sum(p.to_local().numel() for p in cut) <= 0.55 * sum(
            p.numel() for p in cut
        )
        dist.barrier()
        if about.step >= until:
            os.kill(os.getpid(), signal.SIGKILL)

    run_task(
        task, WorkerContext(rank, 2, torch.device("cpu"), 2, report, lambda line: None)
    )


def check_same(one: Path, other: Path) -> None:
    """The same weights up to the order of sums."""
    ours, expected = (
        load_file(folder / "model.safetensors") for folder in (one, other)
    )
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", MODELS)
def test_killed_with_two_workers_and_continued_with_one(
    family: str,
    ray_local: None,
    new_store: Callable[[Path], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = tables_of(family, tmp_path / "made")
    storage = tmp_path / "runs"
    store = new_store(storage)
    model, options = MODELS[family]
    fit = FitConfig(**{**FIT, **options})
    lines: list[str] = []

    def run(
        name: str, workers: int, failures: int = 0, **options: Any
    ) -> TrainingResult:
        ray_options = RayOptions(
            num_workers=workers, threads=1, cpus_per_worker=0.5, max_failures=failures
        )
        return train(
            model=model,
            fit=fit,
            ray=ray_options,
            inputs=inputs,
            storage=str(storage),
            name=name,
            log_model=False,
            say=lines.append,
            **options,
        )

    whole = run("whole", 1, on_checkpoint=lambda about: None)
    last = max((storage / "whole").glob("step-*"))
    late = checkpoint.read(str(last)).step // fit.max_epochs + 1  # in the second epoch
    if by_ray := family == "retrieval":
        watch = kill_workers(storage / "cut", 2, late)
        with pytest.raises(TrainingFailedError) as caught:
            run("cut", 2)
        watch.join()
        said = str(explain(caught.value))
        assert said.startswith("a process of Ray was lost (")
        assert said.endswith(
            "then run the same command again, which continues from what is finished"
        )
    else:
        options = RayOptions(threads=1, fsdp=family == "sharded")
        config = make_config(model, fit, inputs, str(storage), "cut", ray=options)
        task = Task(check_training(config).config, hashes={}, run=None)
        with pytest.raises(mp.ProcessExitedException, match="SIGKILL"):
            mp.start_processes(
                one_of_two, (task, late), nprocs=2, start_method="forkserver"
            )
    if family == "sharded":  # and from the same checkpoint by two again
        shutil.copytree(storage / "cut", storage / "two")
        task.config = replace(task.config, name="two")
        mp.start_processes(
            one_of_two, (task, 10**9), nprocs=2, start_method="forkserver"
        )
        check_same(*(at_step(storage / name, last) for name in ("two", "whole")))
    assert newest(storage / "cut") >= late
    assert newest(storage / "cut") < newest(storage / "whole")
    lines.clear()
    # In a process of Ray Train for one family; for the others here, where the same loop
    # needs no start.
    if by_ray:
        monkeypatch.setenv(
            "RAY_ADDRESS", "local"
        )  # as on a cluster, where one worker is Ray's too
        watch = kill_workers(storage / "cut", 1, newest(storage / "cut") + 1, times=2)
        again = run("cut", 1, failures=1)
        watch.join()
        notes = [
            line
            for line in lines
            if line.startswith("note: a process of Ray was lost (")
        ]
        assert (
            len(notes) == 2
        )  # it has come further, so the second loss is a first one again
        assert all(
            note.endswith("continuing from the last checkpoint, 1 of 1 times")
            for note in notes
        )
    else:
        again = run("cut", 1, on_checkpoint=lambda about: None)
    assert any("1 worker on" in line for line in lines)
    assert any("continuing " in line for line in lines)
    assert again.best.step == whole.best.step
    assert again.best.metrics == pytest.approx(whole.best.metrics, rel=1e-3, abs=1e-4)
    check_same(*(at_step(storage / name, last) for name in ("cut", "whole")))

    client = tracking.connect(store)
    experiment = client.get_run(again.run.run_id).info.experiment_id
    (once,) = [
        found
        for found in client.search_runs([experiment])
        if found.info.run_name == "cut"
    ]
    assert once.info.status == "FINISHED"
    for key in (
        once.data.metrics
    ):  # nor is a step there twice that was lost before the first checkpoint
        steps = [
            point.step for point in client.get_metric_history(once.info.run_id, key)
        ]
        assert len(steps) == len(set(steps)), key
