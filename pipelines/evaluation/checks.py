"""Check an evaluation before it is started: its checkpoint, its options and its devices.

checked = check_evaluation("runs/sasrec", Inputs(tables), {"unseen": True})
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
import torch

from models import registry
from models.loaded_model import accept_other_log, evaluation_fold, read_versions
from models.storage import checkpoint
from models.storage.checkpoint import Checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import UserError, read_manifest, table_hashes
from pipelines import cluster
from pipelines.training.record import find_checkpoint


@dataclass(frozen=True)
class CheckedEvaluation:
    """A checkpoint that fits its tables, with valid options."""

    uri: str
    """Folder of the checkpoint."""
    about: Checkpoint
    """Config of the checkpoint."""
    options: dict[str, Any]
    """Options of `recommend`."""
    hashes: dict[str, str]
    """Hashes of the tables."""


def check_evaluation(
    uri: str, inputs: Inputs, options: dict[str, Any]
) -> CheckedEvaluation:
    """Check that a checkpoint can be evaluated on tables with options of `recommend`.

    Args:
        uri: folder of a checkpoint, or of a run, whose best checkpoint is taken.
        inputs: the tables.
        options: options of `recommend`; None values are left out.

    Raises:
        UserError: if the checkpoint takes other tables, or its model refuses an option.
    """
    uri = find_checkpoint(uri)
    about = checkpoint.read(uri)
    chosen = check_options(about.name, options)
    versions = read_versions(about.name, inputs)
    checkpoint.check(about, uri, accept_other_log(versions, about), extending=True)
    sequences = read_manifest(inputs.sequences, "sequences")
    evaluation_fold(about, sequences.info, inputs.sequences)
    return CheckedEvaluation(uri, about, chosen, table_hashes(versions))


def check_options(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `recommend` that are not None.

    Raises:
        UserError: if the model has no such option, or refuses its value.
    """
    chosen = {key: value for key, value in options.items() if value is not None}
    known = registry.find(name).recommend_options()
    for key in chosen:
        if key not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise UserError(
                f"the model '{name}' has no option --{key} when recommending; {takes}"
            )
    options_class = registry.find(name).options_class
    if options_class:
        try:
            options_class(**chosen)
        except ValueError as error:
            raise UserError(str(error)) from error
    return chosen


@dataclass(frozen=True)
class Workers:
    """The processes and devices of an evaluation."""

    shards: int = 1
    """Number of Ray tasks or actors; 1 stays in this process unless `remote` is set."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto` for a GPU where there is one."""
    remote: bool = False
    """Whether a single shard is a Ray task too, as the GPUs of a cluster need it."""

    @property
    def use_ray(self) -> bool:
        """Whether Ray runs the shards."""
        return self.remote or self.shards > 1

    @property
    def num_threads(self) -> int:
        """Threads of PyTorch per shard; 0 leaves PyTorch's own number."""
        return 1 if self.use_ray else 0

    def needs_gpu(self, num_tasks: int) -> bool:
        """Return whether `num_tasks` Ray tasks or actors take a GPU each.

        A cluster's GPUs count, as the machine of a job may have none.

        Raises:
            UserError: if the cluster has too few GPUs and no autoscaler.
        """
        has_gpu = self.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0
        if self.device != "cuda" and not has_gpu:
            return False
        remedy = "lower --shards or use --device cpu"
        cluster.check_room(num_tasks, {"GPU": 1}, remedy)
        return True


def resolve_device(option: str) -> torch.device:
    """Return the device of `cpu`, `cuda` or `auto`, a GPU of this machine if it has one.

    Raises:
        UserError: for `cuda` on a machine without a GPU.
    """
    if option == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if option == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda, but PyTorch sees no GPU here; use --device cpu")
    return torch.device(option)
