"""Options of a training on a cluster, without Ray, so that a command line is parsed before it is imported."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from models.config import check_choices, check_least

FEWER = "lower --ray.num_workers or --ray.cpus_per_worker"
"""What to do where there is no room for the workers."""


@dataclass
class RayOptions:
    """How a training is spread over the cluster."""

    num_workers: int = 1
    """Training processes; each gets an equal part of `fit.batch_size`. On GPUs one per GPU. One alone, without a
    cluster, is the job's own process, to which options about lost workers do not apply."""
    min_workers: int = 0
    """With how many of them a training goes on while nodes are lost or not there yet; when they are back it takes them
    in again. 0: all of them, so that it waits."""
    use_gpu: bool | Literal["auto"] = "auto"
    """Whether each worker takes a GPU; auto: if the cluster has any, then one for each."""
    cpus_per_worker: float = 1
    """CPUs that Ray reserves for each worker."""
    memory_gb: float = 0
    """GiB of memory that Ray reserves for each worker, so that it starts only as many on a node as fit; 0: Ray counts
    CPUs and GPUs alone."""
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = (
        "PACK"
    )
    """Whether the workers share nodes (PACK) or have different ones (SPREAD); STRICT_: they wait until that is so."""
    accelerator_type: str = ""
    """Type of GPU by Ray's name, such as A100; empty: any."""
    label_selector: dict[str, str] = field(default_factory=dict)
    """Labels of the nodes that workers run on, such as {ray.io/node-group: trainer}."""
    threads: int = 0
    """PyTorch threads per worker; 0 shares out the machine's cores among its workers."""
    max_failures: int = 2
    """How often a run is continued by itself when workers are lost and it has not come further since the last time; a
    new checkpoint counts as further, so that nodes may come and go for days."""
    hang_minutes: float = 10
    """Minutes after which the workers are started again from the last checkpoint if one of them does not answer, or if
    the others wait for it to exchange gradients. A single worker that still answers is not ended."""
    fsdp: bool = False
    """Cut weights, gradients and the optimizer's state over the workers (FSDP2), for language models whose training
    does not fit on one device."""

    def __post_init__(self) -> None:
        check_least(self, ["num_workers"], 1, "ray.")
        check_least(self, ["hang_minutes"], 0.1, "ray.")
        least_0 = ["min_workers", "threads", "max_failures"]
        check_least(self, [*least_0, "memory_gb"], 0, "ray.")
        check_choices(self, "ray.")
        if self.min_workers > self.num_workers:
            raise ValueError(
                f"ray.min_workers is {self.min_workers}, it must be at most {self.num_workers}, as ray.num_workers is"
            )
        if self.use_gpu not in (True, False, "auto"):
            raise ValueError(
                f"ray.use_gpu is {self.use_gpu!r}, it must be true, false or auto"
            )

    def least(self, workers: int) -> int:
        """With how many of the workers a training goes on."""
        return min(self.min_workers or workers, workers)
