"""Run one trial of a sweep in a process of Ray Tune.

A trial is an ordinary run with its own folder, which holds `run.json` and checkpoints.
If Tune or the same `jobs.sweep` command starts the trial again, it continues from its
last checkpoint, or returns its result if it is finished.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

import torch
from ray import tune
from ray.tune.integration.ray_train import TuneReportCallback

from core.errors import one_line
from core.files import join
from core.options import as_base
from core.schemas import Inputs, RunRecord
from models import registry
from models.training import checkpoint
from models.training.loop import drop_undefined
from models.training.memory import resident_peak_mb
from pipelines import tracking
from pipelines.evaluation.checks import Workers
from pipelines.evaluation.ranking import evaluate
from pipelines.evaluation.record import (
    artifact_name,
    load_test_metrics,
    record_result,
    to_json,
)
from pipelines.training.config import TrainConfig
from pipelines.training.ray_train import is_lost
from pipelines.training.record import read_record, write_record
from pipelines.training.run import TrialContext, finish_run, run_training
from tuning.grid import Evaluation, Sweep

EPOCH = "epoch"
"""Key of the epoch in the results that trials report to Tune, beside metrics."""

ERROR, IS_LOST = "error", "is_lost"
"""Keys of a failure: its message, and whether another try may succeed."""

TRIAL = "trial"
"""Key of the trial's name in Tune's config."""

LOCK_TIMEOUT_S = 60.0
"""Seconds that a trial waits until a process of an interrupted sweep releases the lock
of the trial's folder."""


def run_trial(config: dict[str, Any], sweep: Sweep) -> None:
    """Run a trial in Tune's process.

    Args:
        config: Tune's config, with the name of the trial under `TRIAL`.
        sweep: The sweep.
    """
    trial = sweep.trials[config[TRIAL]]
    tags = {
        tracking.FOLDER_TAG: join(sweep.folder, trial.name),
        tracking.KIND_TAG: "trial",
        tracking.POINT_TAG: json.dumps(trial.point),
        "command": sweep.command,
        "mlflow.source.name": "jobs.sweep",
    }
    try:
        if isinstance(trial.config, TrainConfig):
            train(trial.config, sweep, tags)
        else:
            measure(trial.name, trial.config, sweep, tags)
    except Exception as error:
        # before Tune decides whether to start the trial again
        tune.report({ERROR: one_line(error), IS_LOST: is_lost(error)})
        raise


def train(config: TrainConfig, sweep: Sweep, tags: dict[str, str]) -> None:
    """Train a model, and evaluate it on the test split if the sweep requests that.

    If the trial has several workers, a Ray task evaluates, as the trial's own process
    has no GPU and no CPU.
    """
    has_workers = sweep.num_workers > 1
    context = TrialContext(
        parent_run=sweep.run.run_id,
        tags=tags,
        on_checkpoint=lambda saved: tune.report({EPOCH: saved.epoch, **saved.metrics}),
        callbacks=[TuneReportCallback()] if has_workers else (),
        lock_timeout_s=LOCK_TIMEOUT_S,
    )
    config = replace(config, experiment=sweep.run.experiment)
    # lines of concurrent trials would mix
    trained = run_training(config, say=lambda line: None, trial=context)
    if is_done(config.name, sweep):
        return
    name = config.model.name
    result, best = evaluate(
        trained.checkpoint,
        config.inputs.select(name, registry.find(name).extra_inputs),
        batch_size=config.fit.eval_batch_size,
        workers=Workers(device=sweep.device, remote=has_workers),
    )
    record_result(result, best, sweep.run.uri)


def measure(name: str, config: Evaluation, sweep: Sweep, tags: dict[str, str]) -> None:
    """Evaluate a checkpoint on the test split, as an MLflow run of the sweep."""
    options = dict(config.evaluate)
    batch_size = int(options.pop("batch_size", 256))
    torch.set_num_threads(sweep.config.ray.threads or len(os.sched_getaffinity(0)))
    result, evaluated = evaluate(
        config.checkpoint,
        as_base(config, Inputs),
        batch_size=batch_size,
        options=options,
        workers=Workers(device=sweep.device),
    )
    run = tracking.open_run(
        sweep.run.uri,
        sweep.run.experiment,
        name,
        sweep.folder,
        config={
            "model": evaluated.model,
            "fit": evaluated.fit,
            "evaluate": result.options,
            "checkpoint": result.checkpoint,
        },
        hashes=evaluated.hashes,
        parent=sweep.run.run_id,
        tags=tags,
    )
    peak_mb = resident_peak_mb()
    if sweep.device == "cuda":
        peak_mb = torch.cuda.max_memory_allocated() / 2**20
    values = drop_undefined(result.to_metrics()) | {"test/peak_memory_mb": peak_mb}
    logger = tracking.Logger(run)
    logger.update(values, evaluated.step)
    # comparisons find the run of a student's teacher by its weights
    logger.tag(**{tracking.WEIGHTS_TAG: checkpoint.weights_hash(result.checkpoint)})
    tracking.log_text(run, to_json(result), artifact_name("test"))
    logger.end()
    record = RunRecord(status="finished", run=run, values=values)
    write_record(join(sweep.folder, name), record)
    tune.report({EPOCH: 1, **values})


def stop_trial(name: str, sweep: Sweep) -> None:
    """Finish the run of a trial that the scheduler stopped, at its last checkpoint."""
    folder = join(sweep.folder, name)
    record = read_record(folder, sweep.run.uri)
    last = checkpoint.last(folder)
    if record and record.status == "running" and last:
        finish_run(folder, record, last, stopped=True)


def is_done(name: str, sweep: Sweep) -> bool:
    """Return whether a trial needs no further work.

    It was stopped early, or it is finished and evaluated on the test split if the sweep
    requests that.
    """
    record = read_record(join(sweep.folder, name), sweep.run.uri)
    if record is None or record.status != "finished":
        return False
    if record.stopped or sweep.grid.job == "evaluate" or not sweep.config.test:
        return True
    return bool(load_test_metrics(record.run))
