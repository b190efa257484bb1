"""The configuration of a training, without PyTorch, Ray or MLflow, so that a command line is parsed before their import.

config = TrainConfig(inputs=Inputs("tables"), model=SASRecConfig(dim=64),
storage="runs", name="sasrec")
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from models.config import check_choices, check_least
from models.storage.inputs import Inputs
from models.storage.tables import join
from models.storage.uri import absolute
from models.training.fit_config import FitConfig, check_replay

FEWER = "lower --ray.num_workers or --ray.cpus_per_worker"
"""Remedy if there is no room for the workers."""


@dataclass(frozen=True)
class RayOptions:
    """Workers of a training and their resources."""

    num_workers: int = 1
    """Training processes; each gets an equal part of `fit.batch_size`. On GPUs one per
    GPU. One alone, without a cluster, is the job's own process, to which options about
    lost workers do not apply."""
    min_workers: int = 0
    """Number of workers with which a training continues while nodes are lost or not
    there yet; it takes the others in when their nodes are back. 0: all of them, so that
    it waits."""
    use_gpu: bool | Literal["auto"] = "auto"
    """Whether each worker takes a GPU; auto: if the cluster has any, then one for
    each."""
    cpus_per_worker: float = 1
    """CPUs that Ray reserves for each worker."""
    memory_gb: float = 0
    """GiB of memory that Ray reserves for each worker, so that it starts only as many
    on a node as fit; 0: Ray counts CPUs and GPUs alone."""
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = (
        "PACK"
    )
    """Whether the workers share nodes (PACK) or have different ones (SPREAD); STRICT_:
    they wait until that is so."""
    accelerator_type: str = ""
    """Type of GPU by Ray's name, such as A100; empty: any."""
    label_selector: dict[str, str] = field(default_factory=dict)
    """Labels of the nodes that workers run on, such as {ray.io/node-group: trainer}."""
    threads: int = 0
    """PyTorch threads per worker; 0 divides the machine's cores among its workers."""
    max_failures: int = 2
    """How often a run continues by itself when workers are lost and it has made no
    progress since the last loss; a new checkpoint counts as progress, so that nodes may
    come and go for days."""
    hang_minutes: float = 10
    """Minutes after which the workers are started again from the last checkpoint if one
    of them does not answer, or if the others wait for it to exchange gradients. A
    single worker that still answers is not ended."""
    fsdp: bool = False
    """Cut weights, gradients and the optimizer's state over the workers (FSDP2), for
    language models whose training does not fit on one device."""

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

    @property
    def fewest_workers(self) -> int:
        """Smallest number of workers with which a training continues."""
        return self.min_workers or self.num_workers


@dataclass(frozen=True)
class TrackingOptions:
    """Options of MLflow."""

    tracking_uri: str | None = None
    """MLflow; by default MLFLOW_TRACKING_URI, else a SQLite file in the storage
    folder."""
    experiment: str | None = None
    """MLflow experiment; by default family/dataset."""
    log_model: bool = True
    """Store the best model in MLflow, with the tables that it needs to be served."""


def check_run_name(name: str) -> None:
    """Raise ValueError for a name that cannot be a folder's."""
    if name in ("", ".", "..", "mlartifacts") or "/" in name:
        raise ValueError(
            f"the run's name is '{name}'; it names a folder, so give a word without '/'"
        )


class ModelConfigs(Mapping[str, type]):
    """The config dataclasses of the models by name, each imported when it is looked up."""

    def __getitem__(self, name: str) -> type:
        from models import registry

        if name not in registry.MODELS:
            raise KeyError(name)
        return registry.find(name).config_class

    def __iter__(self) -> Iterator[str]:
        from models import registry

        return iter(registry.MODELS)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training: a model, the tables that it reads, and where its results go."""

    inputs: Inputs = field(metadata={"inline": True})
    """Folders of tables."""
    storage: str
    """Folder for all runs: checkpoints, and MLflow's SQLite store where no other is
    named."""
    name: str
    """Name of this run; the same name again continues it."""
    model: Any = field(metadata={"variants": ModelConfigs()})
    """Config of the model: an instance of its config dataclass."""
    fit: FitConfig = field(default_factory=FitConfig)
    """The training loop."""
    ray: RayOptions = field(default_factory=RayOptions)
    """Workers and their resources."""
    tracking: TrackingOptions = field(
        default_factory=TrackingOptions, metadata={"inline": True}
    )
    """MLflow."""
    init: str | None = None
    """A run, or its checkpoint, whose weights it begins with, of tables that these may
    extend: it continues with another day. `fit.replay_fraction` then says how much of
    the days before is trained on again."""
    overwrite: bool = False
    """Delete the results of the run of this name, and train anew."""

    def __post_init__(self) -> None:
        check_run_name(self.name)
        check_replay(self.fit, self.init)
        object.__setattr__(self, "storage", absolute(self.storage))

    @property
    def folder(self) -> str:
        """The run's folder."""
        return join(self.storage, self.name)
