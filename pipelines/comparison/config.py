"""Options of jobs.compare; MLflow is not imported, to parse command lines quickly."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from core.options import STRICT

ModelName = Annotated[str, Field(pattern="^[^/:]+$")]
"""Name that MLflow's model registry accepts."""


@dataclass(config=STRICT)
class CompareConfig:
    """Options of jobs.compare."""

    experiment: str | None = None
    """MLflow experiment whose runs are compared: KIND/DATASET."""
    sweep: str | None = None
    """Sweep whose trials are compared: its name or the id of its MLflow run."""
    run: list[str] = field(default_factory=list)
    """Run to compare: its name or MLflow id; may be repeated."""
    tracking_uri: str | None = None
    """MLflow tracking URI; by default MLFLOW_TRACKING_URI, else runs/mlflow.db in the
    working directory."""
    metric: str | None = None
    """Metric by which rows are sorted, on test, or on val without an evaluation on
    test; by default the sweep's metric, gauc if runs have it, or ndcg@10."""
    all: bool = False
    """Print all rows of tables with more than 20 rows."""
    html: str | None = None
    """Also write the tables and plots to this HTML file."""
    trust_code: bool = False
    """Whether to run code that a checkpoint contains, to register
    it."""
    register: ModelName | None = None
    """Register the checkpoint with the best validation metric under this name in
    MLflow's model registry."""

    def __post_init__(self) -> None:
        if not (self.experiment or self.sweep or self.run):
            raise ValueError("no experiment, sweep or run is given, so no runs")
        if self.sweep and self.run:
            raise ValueError(f"both sweep {self.sweep} and run {self.run[0]} are given")
