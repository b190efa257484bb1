"""Number the worker groups of Ray Train, so that a newer group fences off an older one.

    config = FencedTorchConfig("gloo", folder=run_folder, attempt=str(attempt))
    TorchTrainer(run_worker, torch_config=config)

Ray Train's controller starts a new worker group whenever nodes are lost or join. Its
hook `Backend.on_start` runs before the workers of the group begin.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ray.train.backend import Backend
from ray.train.torch import TorchConfig

from models.training import attempts
from models.training.attempts import Attempt

ATTEMPT = "TRIELINE_ATTEMPT"
"""Environment variable with the attempt number of a training worker."""


@dataclass
class FencedTorchConfig(TorchConfig):
    """Settings of PyTorch's process group for numbered worker groups."""

    folder: str = ""
    """Folder of the run."""
    attempt: str = "0.0"
    """Attempt number of the training job (`attempts.begin`)."""

    @property
    def backend_cls(self) -> type[Backend]:
        """Backend class that Ray Train's controller creates."""
        return FencedBackend


class FencedBackend(Backend):
    """Ray Train's PyTorch backend, which numbers the worker groups of a run."""

    share_cuda_visible_devices = True

    def __init__(self) -> None:
        self.torch = TorchConfig().backend_cls()

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Start PyTorch's process group, after numbering the worker group."""
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
