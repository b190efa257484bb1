"""Numbers the worker groups of a training under Ray Train, so that a newer group fences off an older one.

Ray Train's controller starts worker groups by itself: after a loss, and where nodes come or go. `Backend.on_start` is
its hook that runs before the workers of each group begin.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ray.train.backend import Backend
from ray.train.torch import TorchConfig

from models.storage import attempts
from models.storage.attempts import Attempt

ATTEMPT = "TRIELINE_ATTEMPT"
"""Environment variable of a training worker with the number of its attempt."""


@dataclass
class FencedTorchConfig(TorchConfig):
    """Settings of PyTorch's process group in a training whose worker groups are numbered."""

    folder: str = ""
    """The run's folder."""
    attempt: str = "0.0"
    """Number of the job that trains (`attempts.begin`)."""

    @property
    def backend_cls(self) -> type[Backend]:
        """Class that Ray Train's controller calls."""
        return FencedBackend


class FencedBackend(Backend):
    """PyTorch's backend of Ray Train, with a number for each worker group."""

    share_cuda_visible_devices = True

    def __init__(self) -> None:
        self.torch = TorchConfig().backend_cls()

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Claim the next attempt and tell the workers its number."""
        job = Attempt.parse(backend_config.attempt)
        attempt = attempts.start(backend_config.folder, job)
        worker_group.execute(set_worker_attempt, str(attempt))
        self.torch.on_start(worker_group, backend_config)

    def on_training_start(self, worker_group: Any, backend_config: Any) -> None:
        """Pass on the hook."""
        self.torch.on_training_start(worker_group, backend_config)

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """Pass on the hook."""
        self.torch.on_shutdown(worker_group, backend_config)


def set_worker_attempt(number: str) -> None:
    """Note the number of the attempt that this process is a training worker of."""
    os.environ[ATTEMPT] = number


def worker_attempt() -> str:
    """Return the number of the attempt that this process is a training worker of."""
    return os.environ[ATTEMPT]
