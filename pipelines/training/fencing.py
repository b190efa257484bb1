"""Attempt numbers for the worker groups of Ray Train, so that a newer group fences off an older one.

    TorchTrainer(worker, torch_config=FencedTorchConfig("gloo", folder=run_folder, attempt=str(attempt)))

Ray Train's controller starts a worker group after each change of the nodes. Its hook
`Backend.on_start` runs before the workers of a group begin.
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
"""Environment variable with the attempt number of a training worker."""


@dataclass
class FencedTorchConfig(TorchConfig):
    """Settings of PyTorch's process group, and of the training whose worker groups are numbered."""

    folder: str = ""
    """Folder of the run."""
    attempt: str = "0.0"
    """Number of the training job (`attempts.begin`)."""

    @property
    def backend_cls(self) -> type[Backend]:
        """Backend class that Ray Train's controller creates."""
        return FencedBackend


class FencedBackend(Backend):
    """PyTorch's backend of Ray Train that numbers each worker group."""

    share_cuda_visible_devices = True

    def __init__(self) -> None:
        self.torch = TorchConfig().backend_cls()

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Claim the next attempt number, set it in all workers, and start PyTorch's process group."""
        job = Attempt.parse(backend_config.attempt)
        attempt = attempts.start(backend_config.folder, job)
        worker_group.execute(set_worker_attempt, str(attempt))
        self.torch.on_start(worker_group, backend_config)

    def on_training_start(self, worker_group: Any, backend_config: Any) -> None:
        """Call the hook of PyTorch's backend."""
        self.torch.on_training_start(worker_group, backend_config)

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """Call the hook of PyTorch's backend."""
        self.torch.on_shutdown(worker_group, backend_config)


def set_worker_attempt(number: str) -> None:
    """Set the attempt number of this training worker."""
    os.environ[ATTEMPT] = number


def worker_attempt() -> str:
    """Return the attempt number of this training worker."""
    return os.environ[ATTEMPT]
