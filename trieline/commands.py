"""Commands whose functions return more than their jobs print."""

from __future__ import annotations

from typing import Any

import polars as pl

from core.tables import Table
from pipelines.evaluation.config import EvaluateConfig
from pipelines.evaluation.inference import infer_all
from pipelines.evaluation.nearest import write_nearest
from pipelines.evaluation.ranking import measure_checkpoint
from pipelines.evaluation.result import Result
from pipelines.start import start_ray
from tuning.grid import SweepConfig, load_sweep
from tuning.sweep import run_sweep


def evaluate(config: EvaluateConfig) -> Result | Table[Any]:
    """Measure a checkpoint; or write its rankings or nearest items, and return them."""
    if config.batch_inference:
        return infer_all(config)[0]
    if config.nearest:
        return write_nearest(config)
    return measure_checkpoint(config)


def sweep(config: SweepConfig) -> pl.DataFrame:
    """Run the trials of a sweep that are not finished, and return a row per trial.

    A failed trial has no `value`; `error` says why.
    """
    return run_sweep(load_sweep(config), start_ray)[1]
