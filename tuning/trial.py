"""Run one trial of a sweep in a process of Ray Tune.

A trial is an ordinary run with its own folder, which holds `run.json` and checkpoints.
If Tune or the same `jobs.sweep` command starts the trial again, it continues from its
last checkpoint, or returns its result if it is finished.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import torch
from ray import tune
from ray.tune.integration.ray_train import TuneReportCallback

from core.errors import UserError, one_line
from core.files import join
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
from pipelines.training.config import RayOptions, TrainConfig
from pipelines.training.ray_train import is_lost, wants_gpu
from pipelines.training.record import read_record, write_record
from pipelines.training.run import TrialContext, finish_run, run_training
from tuning.grid import Grid, Trial

EPOCH, VALUE = "epoch", "value"
"""Keys of the results that trials report to Tune."""

TRIAL = "trial"
"""Key of the trial's name in Tune's config."""

LOCK_TIMEOUT_S = 60.0
"""Seconds that a trial waits until a process of an interrupted sweep releases the lock
of the trial's folder."""


@dataclass(frozen=True)
class SweepSpec:
    """Grid, tables and resources of a sweep, which every trial receives."""

    grid: Grid
    """Kind, metric and scheduler of the sweep; its points are expanded to `trials`."""
    trials: dict[str, Trial]
    """All trials, by name."""
    inputs: Inputs
    """Tables of the trials; a trial's point can replace `sids` and `text`."""
    folder: str
    """Folder of the sweep."""
    uri: str
    """Tracking URI of MLflow."""
    ray: RayOptions
    """Workers of each trial."""
    test: bool
    """Whether finished trainings are also evaluated on the test split."""
    command: str
    """Command line of the sweep."""
    experiment: str = ""
    """MLflow experiment; empty until the spec is checked."""
    parent: str = ""
    """Id of the sweep's MLflow run; empty until the run is open."""
    call: str = field(default_factory=lambda: uuid4().hex)
    """Id of this call of the sweep."""

    @property
    def metric(self) -> str:
        """Metric that ranks the trials, without the prefix `val/`."""
        return self.grid.metric.removeprefix("val/")

    @property
    def num_workers(self) -> int:
        """Number of workers of a trial."""
        return 1 if self.grid.job == "evaluate" else self.ray.num_workers

    @property
    def device(self) -> str:
        """Device type of a trial's model."""
        return "cuda" if wants_gpu(self.ray) else "cpu"

    def train_config(self, trial: Trial) -> TrainConfig:
        """Return the configuration of a trial's training."""
        return TrainConfig(
            **vars(trial.inputs(self.inputs)),
            storage=self.folder,
            name=trial.name,
            model=trial.model,
            fit=trial.fit,
            ray=self.ray,
            tracking_uri=self.uri,
            experiment=self.experiment,
            log_model=False,
        )

    def tags(self, trial: Trial) -> dict[str, str]:
        """Return the tags of the trial's MLflow run."""
        return {
            tracking.FOLDER_TAG: join(self.folder, trial.name),
            tracking.KIND_TAG: "trial",
            tracking.TRIAL_TAG: trial.id,
            tracking.POINT_TAG: json.dumps(trial.point),
            "command": self.command,
            "mlflow.source.name": "jobs.sweep",
        }


def run_trial(config: dict[str, Any], spec: SweepSpec) -> None:
    """Run a trial in Tune's process.

    Tune starts a failed trial again, which is of use only after a lost process: any
    other error is recorded, and raised at once in the next start.

    Args:
        config: Tune's config, with the name of the trial under `TRIAL`.
        spec: Settings and trials of the sweep.
    """
    trial = spec.trials[config[TRIAL]]
    folder = join(spec.folder, trial.name)
    record = read_record(folder, spec.uri)
    if record and record.failed_in == spec.call:
        raise UserError(record.error)
    try:
        if spec.grid.job == "evaluate":
            measure_checkpoint(trial, spec)
        else:
            train_trial(trial, spec)
    except Exception as error:
        record = read_record(folder, spec.uri)
        if record and not is_lost(error):
            record.status, record.error = "failed", one_line(error)
            record.failed_in = spec.call
            write_record(folder, record)
        raise


def train_trial(trial: Trial, spec: SweepSpec) -> None:
    """Train a model, report each validation to Tune, and evaluate on the test split.

    The evaluation is left out if the spec does not request it. If the trial has several
    workers, a Ray task evaluates, as the trial's own process has no GPU and no CPU.
    """

    def report(saved: checkpoint.Checkpoint) -> None:
        metrics = saved.metrics
        if spec.metric in metrics:
            tune.report({EPOCH: saved.epoch, VALUE: metrics[spec.metric], **metrics})

    has_workers = spec.num_workers > 1
    context = TrialContext(
        parent_run=spec.parent,
        tags=spec.tags(trial),
        on_checkpoint=report,
        callbacks=[TuneReporter(spec.metric)] if has_workers else (),
        lock_timeout_s=LOCK_TIMEOUT_S,
    )
    config = spec.train_config(trial)
    trained = run_training(config, say=ignore_line, trial=context)
    if trained.was_finished:
        report(trained.best)
    if not is_done(trial, spec):
        name = config.model.name
        result, best = evaluate(
            trained.checkpoint,
            config.inputs.select(name, registry.find(name).extra_inputs),
            batch_size=trial.fit.eval_batch_size,
            workers=Workers(device=spec.device, remote=has_workers),
        )
        record_result(result, best, spec.uri)


class TuneReporter(TuneReportCallback):
    """Callback of Ray Train's controller that reports the workers' validations to Tune.

    Args:
        metric: Metric that ranks the trials.
    """

    def __init__(self, metric: str) -> None:
        super().__init__()
        self.metric = metric

    def after_report(
        self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any
    ) -> None:
        """Report the metrics of rank 0 to Tune, as all ranks have the same metrics."""
        first = metrics[0]
        if self.metric in first:
            result = {**first, VALUE: first[self.metric]}
            super().after_report(run_context, [result], None)


def measure_checkpoint(trial: Trial, spec: SweepSpec) -> None:
    """Evaluate a checkpoint on the test split, as an MLflow run of the sweep."""
    folder = join(spec.folder, trial.name)
    options = dict(trial.evaluate)
    batch_size = int(options.pop("batch_size", 256))
    torch.set_num_threads(spec.ray.threads or len(os.sched_getaffinity(0)))
    result, evaluated = evaluate(
        trial.folders["checkpoint"],
        trial.inputs(spec.inputs),
        batch_size=batch_size,
        options=options,
        workers=Workers(device=spec.device),
    )
    config = {
        "model": evaluated.model,
        "fit": evaluated.fit,
        "evaluate": result.options,
        "checkpoint": result.checkpoint,
    }
    run = tracking.open_run(
        spec.uri,
        spec.experiment,
        trial.name,
        spec.folder,
        config=config,
        hashes=evaluated.hashes,
        parent=spec.parent,
        tags=spec.tags(trial),
    )
    if spec.device == "cuda":
        peak_mb = torch.cuda.max_memory_allocated() / 2**20
    else:
        peak_mb = resident_peak_mb()
    values = drop_undefined(result.to_metrics()) | {"test/peak_memory_mb": peak_mb}
    logger = tracking.Logger(run)
    logger.update(values, evaluated.step)
    # comparisons find the run of a student's teacher by its weights
    logger.tag(**{tracking.WEIGHTS_TAG: checkpoint.weights_hash(result.checkpoint)})
    tracking.log_text(run, to_json(result), artifact_name("test"))
    logger.end()
    record = RunRecord(
        status="finished", run=run, evaluate=trial.evaluate, values=values
    )
    write_record(folder, record)
    tune.report({EPOCH: 1, VALUE: values.get(spec.metric, math.nan), **values})


def stop_trial(trial: Trial, spec: SweepSpec) -> None:
    """Finish the run of a trial that the scheduler stopped, at its last checkpoint."""
    folder = join(spec.folder, trial.name)
    record = read_record(folder, spec.uri)
    if not record or record.status != "running":
        return
    last = checkpoint.last(folder)
    if last:
        finish_run(folder, record, last, stopped=True)


def is_done(trial: Trial, spec: SweepSpec) -> bool:
    """Return whether a trial needs no further work.

    It was stopped early, or it is finished and evaluated on the test split if the spec
    requests that.
    """
    record = read_record(join(spec.folder, trial.name), spec.uri)
    if record is None or record.status != "finished":
        return False
    if record.stopped:
        return True
    if not spec.test:
        return True
    run = record.run
    if spec.grid.job == "evaluate":  # has no child run, but is itself the evaluation
        data = tracking.connect(run.uri).get_run(run.run_id).data
        return bool(data.tags.get(tracking.WEIGHTS_TAG))
    return bool(load_test_metrics(run))


def ignore_line(line: str) -> None:
    """Discard a line of progress, as the lines of concurrent trials would mix."""
