"""Check the checkpoint, the options and the devices of an evaluation before its start.

checked = check_evaluation(EvaluateConfig(checkpoint="runs/sasrec", tables="tables"))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
import torch

from core.errors import UserError
from core.options import build, check_known
from core.tables import Table
from models import own_code, registry
from models.loaded_model import (
    read_versions,
    replace_sequences_version,
)
from models.training import checkpoint
from models.training.checkpoint import Checkpoint
from pipelines import cluster
from pipelines.evaluation.config import EvaluateConfig
from pipelines.training.record import find_checkpoint


@dataclass(frozen=True)
class CheckedEvaluation:
    """A checkpoint that fits its tables and the options of `recommend`."""

    uri: str
    """Folder of the checkpoint."""
    checkpoint: Checkpoint
    """Content of the checkpoint's `config.json`."""
    versions: dict[str, Table[Any]]
    """Tables of the evaluation, by name."""

    def __reduce__(self) -> Any:
        """Pickle the code of the checkpoint too, which this process runs already."""
        return own_code.pickle_with_code(self)


def check_evaluation(config: EvaluateConfig) -> CheckedEvaluation:
    """Open the checkpoint and the tables of an evaluation."""
    uri = find_checkpoint(config.checkpoint)
    saved = checkpoint.read(uri)
    own_code.accept_code(saved.code, uri, config.trust_code)
    options = config.recommend_options()
    options_class = registry.find(saved.name).options_class
    if options_class:
        build(options_class, options)
    else:
        check_known(options, (), f"the options of '{saved.name}'")
    versions = read_versions(saved.name, config.inputs)
    checkpoint.check(
        saved, uri, replace_sequences_version(versions, saved), extending=True
    )
    return CheckedEvaluation(uri, saved, versions)


def takes_gpu(device: str, num_tasks: int) -> bool:
    """Return whether `num_tasks` Ray tasks or actors take a GPU each.

    The GPUs of the cluster decide, as this machine may have none.
    """
    has_gpu = device == "auto" and ray.cluster_resources().get("GPU", 0) > 0
    if device != "cuda" and not has_gpu:
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
