"""What a training worker runs in: the job's process, or Ray Train with other workers.

A backend keeps the last and the best checkpoint in the folder of the run, both in the
same format, so a run can continue in the other one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
import torch.distributed as dist
from ray import train
from ray.exceptions import RayError
from ray.train.torch import get_device
from ray.util.queue import Queue
from torch import nn

from core.files import join
from models.training import checkpoint
from models.training.checkpoint import Checkpoint
from pipelines.training.stop import STOP_REQUEST

State = dict[str, Any]


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


class RayBackend:
    """A worker of Ray Train, which uploads the checkpoints and removes old ones.

    Args:
        folder: Folder of the run.
        lines: Queue of lines that the driver prints.
        watches: Whether nodes may be preempted.
    """

    def __init__(self, folder: str, lines: Queue, watches: bool) -> None:
        self.folder, self.lines, self.watches = folder, lines, watches
        context = train.get_context()
        self.rank, self.world = context.get_world_rank(), context.get_world_size()
        self.device = get_device()
        num_cores = len(os.sched_getaffinity(0))
        self.threads = max(1, num_cores // context.get_local_world_size())
        self.preempted_nodes: set[str] = set()

    def find_last(self) -> Checkpoint | None:
        """Return the run's last complete checkpoint, as rank 0 finds it."""
        last = [checkpoint.last(self.folder) if self.rank == 0 else None]
        if self.world > 1:
            dist.broadcast_object_list(last, device=self.device)
        return last[0]

    def keep(self, model: nn.Module, saved: Checkpoint, state: State | None) -> None:
        """Report a checkpoint to Ray Train; every rank reports."""
        # so the score of a checkpoint that is the best is above all earlier ones
        is_best = saved.best["step"] == saved.step
        metrics = {"score": saved.step if is_best else -1, "epoch": saved.epoch}
        with TemporaryDirectory() as folder:
            files = None
            if self.rank == 0:
                checkpoint.save(folder, model, saved, state)
                files = train.Checkpoint.from_directory(folder)
            train.report(
                metrics | saved.metrics,
                checkpoint=files,
                checkpoint_dir_name=saved.folder,
            )

    def say(self, line: str) -> None:
        """Send a line to the driver; the training goes on if the queue is lost."""
        with suppress(RayError):
            self.lines.put(line)

    def should_stop(self) -> bool:
        """Return False: a stopped job loses the work since the last checkpoint."""
        return False

    def is_preempted(self) -> bool:
        """Return whether a further node has received a notice; all ranks call it."""
        if not self.watches:
            return False
        info = train.get_preemption_info()
        new = set(info.preempted_node_ids if info else []) - self.preempted_nodes
        self.preempted_nodes |= new
        return bool(new)
