"""The configuration of a sweep.

The module does not import Ray, so that a command line is parsed before that import.
"""

from __future__ import annotations

from dataclasses import field

from pydantic import NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from core.files import absolute
from core.options import STRICT, Free
from pipelines.training.config import RayOptions


@dataclass(config=STRICT, frozen=True, kw_only=True)
class SweepConfig:
    """Options of jobs.sweep."""

    grid: str
    """Grid file, such as tuning/grids/sid_mlp_alpha.yaml."""
    tables: str = ""
    """TABLES: the folder that jobs.prepare made."""
    storage: str = ""
    """Folder for all runs: checkpoints, and MLflow's SQLite store unless tracking_uri
    names another store."""
    name: str = ""
    """Name of this sweep; by default the name of the grid."""
    sids: str | None = None
    """SIDS: the folder that jobs.tokenize made, for models that use semantic IDs."""
    text: str | None = None
    """TEXT: the folder that jobs.encode made, for search models; optional for models of
    actions."""
    smoke: bool = False
    """Run the grid's small variant. Comparisons of the experiment exclude its
    trials."""
    dry_run: bool = False
    """Print the trials without running them."""
    samples: PositiveInt | None = None
    """Number of points drawn from the grid; by default the grid's setting."""
    model: dict[str, Free] = field(default_factory=dict)
    """Model options of all trials, such as --model.teacher."""
    fit: dict[str, Free] = field(default_factory=dict)
    """Training options of all trials, such as --fit.max_epochs."""
    evaluate: dict[str, Free] = field(default_factory=dict)
    """Options of jobs.evaluate of all trials, for a grid of evaluations."""
    axes: dict[str, list[Free]] = field(default_factory=dict)
    """Values of an axis, such as --axes.fit.seed '[42, 43, 44]'; may add an axis."""
    concurrency: NonNegativeInt = 0
    """Largest number of trials that run at once; 0: as many as the cluster holds. For
    trials of several workers that number is taken from the nodes at the start, and is
    at least 16 on a cluster, so that waiting trials make an autoscaler start nodes."""
    test: bool = True
    """Evaluate each finished trial on the test split too. The best trial is chosen on
    the validation split in any case."""
    ray: RayOptions = field(default_factory=RayOptions)
    """Workers and resources of each trial."""
    trust_code: bool = False
    """Whether to run code that a checkpoint contains; by default only code equal to a
    file that the sweep names runs."""
    tracking_uri: str | None = None
    """MLflow tracking URI; by default MLFLOW_TRACKING_URI, else a SQLite file in the
    storage folder."""
    experiment: str | None = None
    """MLflow experiment; by default KIND/DATASET."""

    def __post_init__(self) -> None:
        for name in ("tables", "storage"):
            if not (self.dry_run or getattr(self, name)):
                raise ValueError(
                    f"--{name} is missing; it is required without --dry_run"
                )
        object.__setattr__(self, "storage", absolute(self.storage))
