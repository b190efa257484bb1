"""Trainings from the options that a config file has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from models.build import parse_options
from models.storage.checkpoint import Checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import UserError
from models.training.fit_config import FitConfig, check_replay
from models.training_run import TrainingRun, resolve_training
from pipelines.training.config import RayOptions, TrackingOptions, TrainConfig
from pipelines.training.run import TrainingResult, TrialContext, run_training
from pipelines.training.settings import check_training
from tuning.options import SweepConfig


def build_training(
    model: dict[str, Any],
    fit: FitConfig,
    inputs: Inputs,
    *,
    init: str | None = None,
    **options: Any,
) -> TrainingRun:
    """Check and build a training of one model with PyTorch alone.

    Args:
        model: The model's `name` and options.
        fit: Options of the training loop.
        inputs: Where the tables are.
        init: URI of a checkpoint whose weights a new run begins with.
        options: Further arguments of `TrainingRun.build`.
    """
    try:
        check_replay(fit, init)
    except ValueError as error:
        raise UserError(str(error)) from error
    _, config = parse_options(model)
    config, inputs = resolve_training(config, fit, inputs, init)
    return TrainingRun.build(config, fit, inputs, init=init, **options)


def make_config(
    model: dict[str, Any],
    fit: FitConfig,
    inputs: Inputs,
    storage: str,
    name: str,
    **options: Any,
) -> TrainConfig:
    """Build the configuration of a training, with one thread per worker by default."""
    tracking = {
        key: options.pop(key)
        for key in ("tracking_uri", "experiment", "log_model")
        if key in options
    }
    options = {"ray": RayOptions(threads=1), **options}
    try:
        return TrainConfig(
            inputs=inputs,
            storage=storage,
            name=name,
            model=parse_options(model)[1],
            fit=fit,
            tracking=TrackingOptions(**tracking),
            **options,
        )
    except ValueError as error:
        raise UserError(str(error)) from error


def make_sweep(**options: Any) -> SweepConfig:
    """Build the configuration of a sweep, with `tracking_uri` and `experiment` as
    options.
    """
    tracking = {
        key: options.pop(key)
        for key in ("tracking_uri", "experiment")
        if key in options
    }
    try:
        return SweepConfig(tracking=TrackingOptions(**tracking), **options)
    except ValueError as error:
        raise UserError(str(error)) from error


def train(
    *,
    say: Callable[[str], None] = print,
    on_checkpoint: Callable[[Checkpoint], Any] | None = None,
    lock_timeout_s: float = 0,
    **options: Any,
) -> TrainingResult:
    """Train as jobs.train does; other options are arguments of `make_config`.

    With `on_checkpoint`, one worker trains in this process.
    """
    trial = TrialContext(on_checkpoint=on_checkpoint, lock_timeout_s=lock_timeout_s)
    training = check_training(make_config(**options))
    return run_training(training, say=say, trial=trial)
