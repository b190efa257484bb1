"""A run that two workers began and one goes on with ends with the weights of an undisturbed one, of each family."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from actions_tables import write_actions
from ray.train import TrainingFailedError
from safetensors.torch import load_file
from search_tables import write_search
from training_tables import write_tables

from models import checkpoint
from models.fit import FitConfig
from models.shares import shards_of
from models.tables import join, read_manifest
from pipelines.training.run import RayOptions, Trained, train

MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "retrieval": ({"name": "sasrec", "dim": 16, "num_layers": 1, "dropout": 0.0, "max_history": 6}, {}),
    "search": ({"name": "qgs", "width": 16, "num_layers": 1, "dropout": 0.0, "infonce_weight": 0.0, "max_history": 8},
               {"metric": "gauc"}),
    "actions": ({"name": "attn_mvp", "width": 16, "num_layers": 1, "num_heads": 2, "ffn": 24, "expert_width": 8,
                 "tower_width": 6, "dropout": 0.0, "max_history": 10}, {"metric": "mean/rig"}),
}  # fmt: skip
"""By family: a model without random numbers and without negatives out of its batch, and options of its training."""

FIT = {"batch_size": 16, "max_epochs": 5, "lr": 0.01, "patience": 0, "seed": 3, "checkpoint_every_steps": 2,
       "shard_mb": 0.0005, "eval_examples": 31}  # fmt: skip


def tables_of(family: str, folder: Path) -> tuple[str, str | None]:
    """(TABLES, the folder beside them) of six parts."""
    if family == "retrieval":
        return write_tables(folder, parts=6)[0], None
    return write_search(folder, parts=6) if family == "search" else (write_actions(folder, parts=6), None)


def kill_a_worker_after(folder: Path, step: int) -> threading.Thread:
    """SIGKILL to the newest of Ray's training workers when the run has a checkpoint that late."""

    def watch() -> None:
        while not any(int(made.name[5:]) >= step for made in folder.glob("step-*")):
            time.sleep(0.02)
        workers = [p for p in psutil.Process().children(recursive=True) if p.name().startswith("ray::RayTrainWo")]
        max(workers, key=lambda process: process.create_time()).kill()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("family", MODELS)
def test_killed_with_two_workers_and_continued_with_one(
    family: str, ray_local: None, new_store: Callable[[Path], str], tmp_path: Path
) -> None:
    tables, extra = tables_of(family, tmp_path / "made")
    storage = tmp_path / "runs"
    new_store(storage)
    model, more = MODELS[family]
    fit = FitConfig(**{**FIT, **more})
    assert shards_of(read_manifest(join(tables, "sequences")), fit.shard_mb, fit.batch_size) > 2
    lines: list[str] = []

    def run(name: str, workers: int, **options: Any) -> Trained:
        ray_options = RayOptions(num_workers=workers, threads=1, cpus_per_worker=0.5, max_failures=0)
        return train(
            model=model, fit=fit, ray_options=ray_options, tables=tables, extra=extra, storage=str(storage), name=name,
            log_model=False, say=lines.append, **options,
        )  # fmt: skip

    whole = run("whole", 1, heard=lambda about: None)
    last = max((storage / "whole").glob("step-*"))
    steps = checkpoint.read(str(last)).step // fit.max_epochs
    watch = kill_a_worker_after(storage / "cut", steps + 1)  # in the second epoch
    with pytest.raises(TrainingFailedError):
        run("cut", 2)
    watch.join()
    assert any("2 workers" in line for line in lines)
    assert not (storage / "cut" / last.name).exists()
    lines.clear()
    # In a process of Ray Train for one family; for the others here, where the same loop needs no start.
    again = run("cut", 1) if family == "retrieval" else run("cut", 1, heard=lambda about: None)
    assert any("1 worker on" in line for line in lines)
    assert any("continuing after epoch" in line for line in lines)
    assert again.about.step == whole.about.step
    assert again.about.metrics == pytest.approx(whole.about.metrics, rel=1e-3, abs=1e-4)
    ours, expected = (load_file(storage / name / last.name / "model.safetensors") for name in ("cut", "whole"))
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-3, atol=1e-4)
