"""Open the checkpoint of an evaluation, check its options, and run its shards.

checked = open_evaluation(EvaluateConfig(checkpoint="runs/sasrec", tables="tables"))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
import torch

from core.errors import UserError
from core.options import build
from core.tables import Table
from models import own_code, registry
from models.loaded_model import read_versions
from models.training import checkpoint
from models.training.checkpoint import Checkpoint
from pipelines import cluster
from pipelines.evaluation.config import EvaluateConfig
from pipelines.start import start_ray
from pipelines.training.record import find_checkpoint

Result = TypeVar("Result")


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


def open_evaluation(config: EvaluateConfig) -> CheckedEvaluation:
    """Open the checkpoint and the tables of an evaluation."""
    uri = find_checkpoint(config.checkpoint)
    saved = checkpoint.read(uri)
    own_code.accept_code(saved.code, uri, config.trust_code)
    # raises for an option that the model does not have
    build(registry.find(saved.name).options_class, config.recommend_options())
    versions = read_versions(saved.name, config.inputs)
    checkpoint.check(saved, uri, versions, extending=True)
    return CheckedEvaluation(uri, saved, versions)


def run_shards(
    work: Callable[..., Result], config: EvaluateConfig, in_ray: bool, *arguments: Any
) -> list[Result]:
    """Return the results of `work(*arguments, rank)` for the rank of each shard.

    A single shard runs in this process, unless `in_ray` is true. The others are Ray
    tasks with one thread each, and a GPU each if the cluster has one.
    """
    if not in_ray and config.shards == 1:
        return [work(*arguments, 0)]
    start_ray()
    has_gpu = config.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0
    takes_gpu = config.device == "cuda" or has_gpu
    cluster.check_room(1, {"GPU": 1} if takes_gpu else {"CPU": 1})

    def run_alone(rank: int) -> Result:
        torch.set_num_threads(1)
        return work(*arguments, rank)

    # the placement group of a trial has no CPU, so tasks are scheduled outside it
    remote = ray.remote(
        num_cpus=1, num_gpus=int(takes_gpu), scheduling_strategy="DEFAULT"
    )(run_alone)
    return ray.get([remote.remote(rank) for rank in range(config.shards)])


def resolve_device(option: str) -> torch.device:
    """Return the device for the option `cpu`, `cuda` or `auto`.

    `auto` is a GPU if this machine has one.
    """
    has_gpu = torch.cuda.is_available()
    if option == "auto":
        return torch.device("cuda" if has_gpu else "cpu")
    if option == "cuda" and not has_gpu:
        raise UserError("device is cuda, but PyTorch sees no GPU here")
    return torch.device(option)
