"""A model sharded over two CPU processes is trained as by one worker."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file

from core.schemas import Inputs
from models.training import checkpoint
from models.training.fit_config import FitConfig
from models.training.loop import fit
from tests.fixtures.training_tables import write_tables
from tests.fixtures.trainings import CASES, build_training

MODEL = {**CASES["lc_rec"], "tasks": ["next"], "max_history": 4}


def train_to(
    epochs: int, folder: Path, inputs: Inputs, rank: int = 0, world: int = 1
) -> None:
    """Train from the last checkpoint in a folder up to a number of epochs."""
    last = checkpoint.last(str(folder))
    options = FitConfig(
        batch_size=16,
        max_epochs=epochs,
        lr=0.003,
        warmup_share=0.0,
        schedule="constant",
    )
    run = build_training(MODEL, options, inputs, rank=rank, world=world, last=last)
    for event in fit(
        run.model,
        run.train,
        run.validate,
        options,
        state=run.resume(str(folder), last) if last else None,
        shard=world > 1,
        rank=rank,
        world=world,
    ):
        if world > 1:
            parameters = list(run.model.parameters())
            num_local = sum(p.to_local().numel() for p in parameters)
            assert num_local <= 0.55 * sum(p.numel() for p in parameters)
        if event.state and rank == 0:
            saved = run.checkpoint(epoch=event.epoch, step=event.step)
            checkpoint.save(folder / saved.folder, run.model, saved, event.state)


def train_as_one_of_two(rank: int, epochs: int, folder: Path, inputs: Inputs) -> None:
    """Train as one of two workers that share the model."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}.meeting"
    dist.init_process_group("gloo", meeting, rank=rank, world_size=2)
    train_to(epochs, folder, inputs, rank, world=2)
    dist.destroy_process_group()


@pytest.mark.long
def test_two_workers_with_shards_train_the_weights_of_one(tmp_path):
    inputs = Inputs(*write_tables(tmp_path / "made", parts=6))
    whole, shared = tmp_path / "whole", tmp_path / "shared"
    train_to(3, whole, inputs)

    train_to(1, shared, inputs)
    arguments = (2, shared, inputs)
    mp.start_processes(
        train_as_one_of_two, arguments, nprocs=2, start_method="forkserver"
    )
    train_to(3, shared, inputs)

    last = checkpoint.list_steps(str(whole))[0]
    expected, tensors = (
        load_file(folder / last / "model.safetensors") for folder in (whole, shared)
    )
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(tensors[name], value, rtol=1e-3, atol=1e-4)
