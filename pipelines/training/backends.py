"""What a training worker runs in: the job's process, or Ray Train with other workers.

A backend keeps the last and the best checkpoint in the folder of the run, both in the
same format, so a run can continue in the other one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from core.errors import UserError
from core.files import join
from models.training import checkpoint
from models.training.checkpoint import Checkpoint, State
from pipelines.training.config import RayOptions
from pipelines.training.stop import STOP_REQUEST


class Backend(Protocol):
    """A worker's ways to the run's folder, the other workers and the user."""

    rank: int
    world: int
    device: torch.device
    threads: int
    """Number of cores of this machine per worker."""

    def find_last(self) -> Checkpoint | None:
        """Return the run's last complete checkpoint."""

    def keep(self, model: nn.Module, saved: Checkpoint, state: State | None) -> None:
        """Keep a checkpoint, and remove others but the best; all ranks call it."""

    def say(self, line: str) -> None:
        """Print a line of progress; called by rank 0."""

    def should_stop(self) -> bool:
        """Return whether a single worker is to save a checkpoint and stop."""

    def is_preempted(self) -> bool:
        """Return whether a further node will be lost soon; all ranks call it."""


class LocalBackend:
    """A single worker in the process of the job or of a sweep's trial.

    Args:
        folder: Folder of the run.
        device: Device of the model.
        say: Called with lines of progress.
        report: Called with every checkpoint.
    """

    rank = 0
    world = 1

    def __init__(
        self,
        folder: str,
        device: torch.device,
        say: Callable[[str], Any],
        report: Callable[[Checkpoint], Any] | None = None,
    ) -> None:
        self.folder, self.device, self.say, self.report = folder, device, say, report
        self.threads = len(os.sched_getaffinity(0))

    def find_last(self) -> Checkpoint | None:
        """Return the run's last complete checkpoint."""
        return checkpoint.last(self.folder)

    def keep(self, model: nn.Module, saved: Checkpoint, state: State | None) -> None:
        """Keep a checkpoint, and remove others but the best."""
        checkpoint.save(join(self.folder, saved.folder), model, saved, state)
        checkpoint.remove_steps(self.folder, saved)
        if self.report:
            self.report(saved)

    def should_stop(self) -> bool:
        """Return whether a signal has requested a stop."""
        return STOP_REQUEST.requested

    def is_preempted(self) -> bool:
        """Return False: the job ends with its node."""
        return False


def wants_gpu(options: RayOptions) -> bool:
    """Return whether workers take GPUs.

    With `use_gpu: auto` they do if the cluster has GPUs, or without Ray this machine. A
    cluster may get GPUs later; without one, `use_gpu: true` needs a GPU here.
    """
    ray = sys.modules.get("ray")  # a training in this process does not import it
    has_gpu = torch.cuda.is_available()
    if ray and ray.is_initialized():
        has_gpu = bool(ray.cluster_resources().get("GPU", 0))
    if options.use_gpu is True and not (has_gpu or os.environ.get("RAY_ADDRESS")):
        raise UserError(
            "ray.use_gpu is true, and this machine has no GPU that PyTorch finds"
        )
    return has_gpu if options.use_gpu == "auto" else options.use_gpu
