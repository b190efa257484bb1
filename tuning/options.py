"""The configuration of a sweep, without Ray, so that a command line is parsed before its import."""

from __future__ import annotations

from dataclasses import dataclass, field

from models.config import check_least
from models.storage.inputs import Inputs
from models.storage.tables import join
from models.storage.uri import absolute
from pipelines.training.config import RayOptions, TrackingOptions, check_run_name


@dataclass
class Options:
    """Concurrency and test measurements of a sweep."""

    concurrency: int = 0
    """Trials at once at most; 0: as many as the cluster has room for. Trials of several
    workers: as many as its nodes had room for at the start, and with an autoscaler at
    least 16, whose workers make it start nodes."""
    test: bool = True
    """Measure each finished trial on the test split too; the best is chosen on val all
    the same."""

    def __post_init__(self) -> None:
        check_least(self, ["concurrency"], 0, "options.")


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Tables, storage and resources of a sweep."""

    inputs: Inputs
    """Tables of the trials; a point can name other SIDS or TEXT."""
    storage: str
    """Folder for all runs."""
    name: str
    """Name of the sweep."""
    ray: RayOptions = field(default_factory=RayOptions)
    """Workers of each trial."""
    options: Options = field(default_factory=Options)
    """Concurrency and test measurements."""
    tracking: TrackingOptions = field(default_factory=TrackingOptions)
    """MLflow."""
    command: str = ""
    """Command line of the sweep, for MLflow."""
    smoke: bool = False
    """Whether comparisons of the experiment leave the trials out."""

    def __post_init__(self) -> None:
        check_run_name(self.name)
        object.__setattr__(self, "storage", absolute(self.storage))

    @property
    def folder(self) -> str:
        """The sweep's folder."""
        return join(self.storage, self.name)
