"""Check the checkpoint, the options and the devices of an evaluation before its start.

checked = check_evaluation("runs/sasrec", Inputs(tables), {"unseen": True})
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
import torch

from core.errors import UserError
from core.options import build, check_known
from core.schemas import Inputs
from core.tables import Table
from models import registry
from models.loaded_model import (
    read_versions,
    replace_sequences_version,
)
from models.training import checkpoint
from models.training.checkpoint import Checkpoint
from pipelines import cluster
from pipelines.training.record import find_checkpoint


@dataclass(frozen=True)
class CheckedEvaluation:
    """A checkpoint that fits its tables, with valid options."""

    uri: str
    """Folder of the checkpoint."""
    checkpoint: Checkpoint
    """Content of the checkpoint's `config.json`."""
    options: dict[str, Any]
    """Options of `recommend`, without None values."""
    versions: dict[str, Table[Any]]
    """Tables of the evaluation, by name."""


def check_evaluation(
    uri: str, inputs: Inputs, options: dict[str, Any]
) -> CheckedEvaluation:
    """Resolve the checkpoint, options and tables of an evaluation.

    The checkpoint must fit the tables and the options of `recommend`.

    Args:
        uri: Folder of a checkpoint, or of a run, whose best checkpoint is used.
        inputs: Folders of the tables, semantic IDs and text embeddings.
        options: Options of `recommend`; None values are ignored.
    """
    uri = find_checkpoint(uri)
    saved = checkpoint.read(uri)
    given_options = {key: value for key, value in options.items() if value is not None}
    options_class = registry.find(saved.name).options_class
    if options_class:
        build(options_class, given_options)
    else:
        check_known(given_options, (), f"the options of '{saved.name}'")
    versions = read_versions(saved.name, inputs)
    checkpoint.check(
        saved, uri, replace_sequences_version(versions, saved), extending=True
    )
    return CheckedEvaluation(uri, saved, given_options, versions)


@dataclass(frozen=True)
class Workers:
    """Processes and devices of an evaluation."""

    shards: int = 1
    """Number of Ray tasks or actors. A single shard runs in this process unless
    `remote` is set."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto` for a GPU if there is one."""
    remote: bool = False
    """Whether a single shard is a Ray task too, which can use the GPUs of a cluster."""

    @property
    def use_ray(self) -> bool:
        """Whether Ray runs the shards."""
        return self.remote or self.shards > 1

    @property
    def num_threads(self) -> int:
        """Threads of PyTorch per shard; 0 leaves PyTorch's default."""
        return 1 if self.use_ray else 0

    def needs_gpu(self, num_tasks: int) -> bool:
        """Return whether `num_tasks` Ray tasks or actors take a GPU each.

        The GPUs of the cluster decide, as this machine may have none.
        """
        has_gpu = self.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0
        if self.device != "cuda" and not has_gpu:
            cluster.check_room(1, {"CPU": 1})
            return False
        cluster.check_room(num_tasks, {"GPU": 1})
        return True


def resolve_device(option: str) -> torch.device:
    """Return the device for the option `cpu`, `cuda` or `auto`.

    `auto` is a GPU if this machine has one.
    """
    if option == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if option == "cuda" and not torch.cuda.is_available():
        raise UserError("device is cuda, but PyTorch sees no GPU here")
    return torch.device(option)
