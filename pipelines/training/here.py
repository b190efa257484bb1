"""A training by one worker in the calling process, with no trainer of Ray Train around it: what a sweep's trials do.

The run's folder is the same as that of a `TorchTrainer` run: checkpoints `step-*`, the last one and the best one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from pyarrow import fs
from torch import nn

from models import checkpoint
from models.checkpoint import Checkpoint
from models.setup import Setup
from models.tables import UserError, join, open_uri
from pipelines.training.worker import Place, Task, perform, step_name

Heard = Callable[[Checkpoint], None]
"""Called after every checkpoint with what it says."""


def carry_out(task: Task, folder: str, use_gpu: bool, heard: Heard, say: Callable[[str], None]) -> Checkpoint:
    """Trains to the end, from the folder's last whole checkpoint; returns what the last one says."""

    def report(setup: Setup, about: Checkpoint, state: dict[str, Any] | None, score: float) -> None:
        keep(join(folder, step_name(about.step)), setup.model, about, state)
        prune(folder, {step_name(about.step), step_name(about.best["step"])})
        heard(about)

    place = Place(0, 1, torch.device("cuda" if use_gpu else "cpu"), 1, report, say)
    latest = last_whole(folder)
    with checkpoint.local(latest) if latest else nullcontext() as local:
        perform(task, place, nullcontext(str(local) if local else None))
    made = last_whole(folder)
    if made is None:
        raise RuntimeError(f"the run in {folder} ended without a checkpoint")
    return checkpoint.read(made)


def keep(uri: str, model: nn.Module, about: Checkpoint, state: dict[str, Any] | None) -> None:
    """Writes a checkpoint to a path or URI, `config.json` last; one that is there already is replaced."""
    filesystem, path = open_uri(uri)
    if filesystem.get_file_info(path).type != fs.FileType.NotFound:
        filesystem.delete_dir(path)
    filesystem.create_dir(path, recursive=True)
    if isinstance(filesystem, fs.LocalFileSystem):
        checkpoint.write(path, model, about, state)
        return
    with checkpoint.scratch() as made:
        checkpoint.write(made, model, about, state)
        for name in (*about.files, checkpoint.CONFIG):
            fs.copy_files(
                str(made / name), f"{path}/{name}",
                source_filesystem=fs.LocalFileSystem(), destination_filesystem=filesystem,
            )  # fmt: skip


def steps(folder: str) -> list[str]:
    """Names of the folder's checkpoints, whole or not, the newest first."""
    filesystem, path = open_uri(folder)
    found = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
    return sorted((info.base_name for info in found if info.base_name.startswith("step-")), reverse=True)


def last_whole(folder: str) -> str | None:
    """The newest checkpoint that was written to its end."""
    for name in steps(folder):
        try:
            checkpoint.read(join(folder, name))
            return join(folder, name)
        except UserError:  # it was being written when the run was killed: the one before it counts
            continue
    return None


def prune(folder: str, wanted: set[str]) -> None:
    """Removes all checkpoints but those of the `wanted` names."""
    filesystem, path = open_uri(folder)
    for name in steps(folder):
        if name not in wanted:
            filesystem.delete_dir(f"{path}/{name}")
