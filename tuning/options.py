"""The configuration of a sweep.

The module does not import Ray, so that a command line is parsed before that import.
"""

from __future__ import annotations

from dataclasses import field

from pydantic import NonNegativeInt
from pydantic.dataclasses import dataclass

from core.files import absolute, join
from core.options import STRICT
from core.schemas import Inputs
from pipelines.training.config import RayOptions, TrackingOptions, check_run_name


@dataclass(config=STRICT)
class Options:
    """Number of concurrent trials of a sweep, and whether to evaluate them on test."""

    concurrency: NonNegativeInt = 0
    """Largest number of trials that run at once; 0: as many as the cluster holds. For
    trials of several workers that number is taken from the nodes at the start, and is
    at least 16 on a cluster, so that waiting trials make an autoscaler start nodes."""
    test: bool = True
    """Evaluate each finished trial on the test split too. The best trial is chosen on
    the validation split in any case."""


@dataclass(config=STRICT, frozen=True, kw_only=True)
class SweepConfig:
    """Tables, storage and resources of a sweep."""

    inputs: Inputs
    """Tables of the trials; a trial's point can replace `sids` and `text`."""
    storage: str
    """Folder for all runs."""
    name: str
    """Name of the sweep."""
    ray: RayOptions = field(default_factory=RayOptions)
    """Workers of each trial."""
    options: Options = field(default_factory=Options)
    """Concurrency and test measurements."""
    tracking: TrackingOptions = field(default_factory=TrackingOptions)
    """Options of MLflow."""
    command: str = ""
    """Command line of the sweep, which MLflow shows."""
    smoke: bool = False
    """Whether this is a smoke test, which comparisons of the experiment leave out."""

    def __post_init__(self) -> None:
        check_run_name(self.name)
        object.__setattr__(self, "storage", absolute(self.storage))

    @property
    def folder(self) -> str:
        """Folder of the sweep."""
        return join(self.storage, self.name)
