"""The configuration of a training.

    config = TrainConfig(
        tables="tables",
        model=SASRecConfig(name="sasrec", dim=64),
        storage="runs",
        name="sasrec",
    )

The module imports neither PyTorch nor Ray nor MLflow, so that a command line is parsed
before their import.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from core.errors import UserError
from core.files import join
from core.options import STRICT, AbsoluteFolder
from models import own_code, registry
from models.registry import ModelSection
from models.training.fit_config import FitConfig, check_replay
from pipelines import tracking

if TYPE_CHECKING:
    from core.schemas import Inputs


@dataclass(config=STRICT, frozen=True)
class RayOptions:
    """Workers of a training and their resources."""

    num_workers: PositiveInt = 1
    """Number of training processes, one per GPU; each gets an equal part of
    `fit.batch_size`. Without a cluster, a single worker runs in the job's process, and
    options about lost workers do not apply."""
    min_workers: NonNegativeInt = 0
    """Smallest number of workers to train with while nodes are missing; further workers
    join when their nodes are back. 0: `num_workers`, so that the training waits for
    missing nodes."""
    use_gpu: bool | Literal["auto"] = "auto"
    """Whether each worker takes one GPU; auto: if the cluster has any."""
    cpus_per_worker: PositiveFloat = 1
    """CPUs that Ray reserves for each worker."""
    memory_gb: NonNegativeFloat = 0
    """GiB of memory that Ray reserves for each worker, which limits the workers per
    node; 0: Ray places workers by CPUs and GPUs alone."""
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = (
        "PACK"
    )
    """Whether workers are placed on as few nodes as possible (PACK) or on different
    nodes (SPREAD); with STRICT_ they wait until all of them can be."""
    accelerator_type: str = ""
    """Type of GPU by Ray's name, such as A100; empty: any type."""
    label_selector: dict[str, str] = field(default_factory=dict)
    """Labels of the nodes that workers run on, such as {ray.io/node-group: trainer}."""
    threads: NonNegativeInt = 0
    """PyTorch threads per worker; 0 divides the machine's cores among its workers."""
    max_failures: NonNegativeInt = 3
    """Number of times that Ray starts lost workers again, in one job; losses by
    preemption do not count. In a sweep, the number for each trial."""
    hang_minutes: PositiveFloat = 10
    """Minutes after which an unresponsive worker, or one that the others wait for in a
    gradient exchange, is considered lost: all workers start again from the last
    checkpoint. A single worker that responds is never ended."""
    shard: bool = False
    """Shard weights, gradients and the optimizer's state over the workers, for language
    models whose training does not fit on one device."""

    def __post_init__(self) -> None:
        if self.min_workers > self.num_workers:
            raise ValueError(
                f"ray.min_workers is {self.min_workers}, it must be at most "
                f"{self.num_workers}, the value of ray.num_workers"
            )

    @property
    def fewest_workers(self) -> int:
        """Smallest number of workers to train with."""
        return self.min_workers or self.num_workers


def check_run_name(name: str) -> None:
    """Raise UserError if a run's folder cannot have this name."""
    if name in ("", ".", "..", "mlartifacts") or "/" in name:
        raise UserError(f"the run's name is '{name}', which names no folder")


@dataclass(config=STRICT, frozen=True, kw_only=True)
class TrainConfig:
    """Configuration of a training: model, input tables, training loop and storage."""

    tables: AbsoluteFolder
    """Output folder of jobs.prepare."""
    sids: AbsoluteFolder | None = None
    """Output folder of jobs.tokenize, for models that use semantic IDs."""
    text: AbsoluteFolder | None = None
    """Output folder of jobs.encode, required by HLLM and optional for other models of
    search and of actions."""
    storage: AbsoluteFolder
    """Folder for all runs: their checkpoints, and MLflow's SQLite store unless
    tracking_uri is given."""
    name: str
    """Name of this run; the same name again continues it."""
    model: ModelSection
    """Config of the model, with its name."""
    fit: FitConfig = field(default_factory=FitConfig)
    """Options of the training loop."""
    ray: RayOptions = field(default_factory=RayOptions)
    """Workers and their resources."""
    init: str | None = None
    """A run, or one of its checkpoints, whose weights the training starts from. The
    tables may be extended ones with newer days; `fit.replay_fraction` is then the
    fraction of older examples that are trained on again."""
    tracking_uri: str | None = None
    """URI of the MLflow store; by default MLFLOW_TRACKING_URI, else a SQLite file in
    the storage folder."""
    experiment: str | None = None
    """MLflow experiment; by default KIND/DATASET."""
    log_model: bool = True
    """Store the best model in MLflow, with the tables that it needs to be served."""
    trust_code: bool = False
    """Whether to run code that a checkpoint contains; by default only code equal to a
    file that is named here runs."""
    overwrite: bool = False
    """Delete the results of an earlier run of this name, and start again."""

    def __post_init__(self) -> None:
        check_run_name(self.name)
        check_replay(self.fit, self.init)
        tracking.resolve_uri(self.tracking_uri, self.storage)
        batch_size = self.fit.batch_size
        if registry.find(self.model.name).trains_by_gradient:
            for workers in range(self.ray.fewest_workers, self.ray.num_workers + 1):
                if batch_size % workers:
                    raise ValueError(
                        f"fit.batch_size {batch_size} does not divide by {workers} "
                        "workers"
                    )

    def __reduce__(self) -> Any:
        """Pickle the user's own code too, which workers need."""
        return own_code.pickle_with_code(self)

    @property
    def inputs(self) -> Inputs:
        """Folders of tables."""
        from core.schemas import Inputs  # takes longer than a first line may

        return Inputs(self.tables, self.sids, self.text)

    @property
    def folder(self) -> str:
        """Folder of the run."""
        return join(self.storage, self.name)
