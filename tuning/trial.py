"""Run one trial of a sweep: an ordinary run with its own folder, in the process that Tune gives it.

`run.json` and the checkpoints in the folder hold its state, and MLflow its metrics. So
a trial that is started again, by Tune or by the same command of jobs.sweep, continues
or is finished already.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from ray import tune
from ray.tune.integration.ray_train import TuneReportCallback

from models.storage import attempts, checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import UserError, join
from models.training.fit import drop_undefined
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
from pipelines.training.config import RayOptions, TrackingOptions, TrainConfig
from pipelines.training.record import is_longer, read_record, write_record
from pipelines.training.run import TrialContext, conclude, run_training, wants_gpu
from pipelines.training.settings import CheckedTraining
from pipelines.training.worker import threads_per_worker
from tuning.grid import Grid, Trial

EPOCH, VALUE, ERROR = "epoch", "value", "error"
"""Keys of the values that trials report to Tune."""

TRIAL = "trial"
"""Key of the trial's name in Tune's config."""

LOCK_TIMEOUT_S = 60.0
"""Seconds that a trial waits for a process of an interrupted sweep to release its
folder."""


@dataclass(frozen=True)
class SweepSpec:
    """Grid, tables and resources that the trials of a sweep share."""

    grid: Grid
    """The grid that the sweep tries."""
    trials: dict[str, Trial]
    """All trials, by name."""
    inputs: Inputs
    """Tables of the trials; a point can name other SIDS or TEXT."""
    folder: str
    """The sweep's folder."""
    uri: str
    """MLflow."""
    ray: RayOptions
    """Workers of each trial."""
    test: bool
    """Whether finished trials are measured on the test split too."""
    command: str
    """Command line of the sweep."""
    experiment: str = ""
    """MLflow experiment."""
    parent: str = ""
    """Id of the sweep's MLflow run, once it is open."""
    hashes: dict[str, dict[str, str]] = field(default_factory=dict)
    """Hashes of the tables that each trial reads, by trial, as the sweep checked
    them."""
    trainings: dict[str, CheckedTraining] = field(default_factory=dict)
    """The trials' trainings as the driver checked them, by name."""

    @property
    def metric(self) -> str:
        """Metric that ranks the trials, by its name in a validation."""
        return self.grid.metric.removeprefix("val/")

    @property
    def workers(self) -> int:
        """Number of workers of a trial."""
        return 1 if self.grid.kind == "evaluate" else self.ray.num_workers

    @property
    def device(self) -> str:
        """Device of a trial's model."""
        return "cuda" if wants_gpu(self.ray) else "cpu"

    def train_config(self, trial: Trial) -> TrainConfig:
        """Return the configuration of a trial's training."""
        return TrainConfig(
            inputs=trial.inputs(self.inputs),
            storage=self.folder,
            name=trial.name,
            model=trial.model,
            fit=trial.fit,
            ray=self.ray,
            tracking=TrackingOptions(self.uri, self.experiment, log_model=False),
        )

    def tags(self, trial: Trial) -> dict[str, str]:
        """Return the tags of the trial's MLflow run."""
        return {
            tracking.KIND_TAG: "trial",
            tracking.TRIAL_TAG: trial.id,
            tracking.POINT_TAG: json.dumps(trial.point),
            "command": self.command,
            "mlflow.source.name": "jobs.sweep",
        }


def run_trial(config: dict[str, Any], spec: SweepSpec) -> None:
    """Run a trial in Tune's process. Report a UserError instead of raising it, so that Tune does not retry."""
    trial = spec.trials[config[TRIAL]]
    tracking.mark_reachable(spec.uri)
    try:
        if spec.grid.kind == "evaluate":
            measure_checkpoint(trial, spec)
        else:
            train_trial(trial, spec)
    except UserError as error:
        tune.report({EPOCH: 0, VALUE: math.nan, ERROR: str(error)})


def train_trial(trial: Trial, spec: SweepSpec) -> None:
    """Train and report every validation to Tune; then measure on test if the spec says so.

    A trial of several workers is measured by a Ray task, as its own process holds
    neither a GPU nor a CPU.
    """

    def report(about: checkpoint.Checkpoint) -> None:
        if spec.metric in about.metrics:
            tune.report(
                {EPOCH: about.epoch, VALUE: about.metrics[spec.metric], **about.metrics}
            )

    context = TrialContext(
        parent_run=spec.parent,
        tags=spec.tags(trial),
        on_checkpoint=report,
        callbacks=[ToTune(spec.metric)] if spec.workers > 1 else (),
        lock_timeout_s=LOCK_TIMEOUT_S,
    )
    training = spec.trainings[trial.name]
    trained = run_training(training, say=ignore_line, trial=context)
    if not is_done(trial, spec):
        result, about = evaluate(
            trained.checkpoint,
            training.config.inputs,
            batch_size=trial.fit.eval_batch_size,
            workers=Workers(device=spec.device, remote=spec.workers > 1),
        )
        record_result(result, about)


class ToTune(TuneReportCallback):
    """A callback in the controller of Ray Train that reports every validation of several workers to Tune."""

    def __init__(self, metric: str) -> None:
        super().__init__()
        self.metric = metric

    def after_report(
        self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any
    ) -> None:
        """Report the metrics of rank 0; all ranks have the same."""
        if self.metric in metrics[0]:
            super().after_report(
                run_context, [{**metrics[0], VALUE: metrics[0][self.metric]}], None
            )


def measure_checkpoint(trial: Trial, spec: SweepSpec) -> None:
    """Measure a checkpoint on test with the options of the trial's point."""
    folder = join(spec.folder, trial.name)
    options = dict(trial.evaluate)
    batch_size = int(options.pop("batch_size", 256))
    torch.set_num_threads(threads_per_worker(spec.ray.threads, 1))
    result, about = evaluate(
        trial.folders["checkpoint"],
        trial.inputs(spec.inputs),
        batch_size=batch_size,
        options=options,
        workers=Workers(device=spec.device),
    )
    config = {
        "model": about.model,
        "fit": about.fit,
        "evaluate": result.options,
        "checkpoint": result.checkpoint,
    }
    run = tracking.open_run(
        spec.uri,
        spec.experiment,
        trial.name,
        spec.folder,
        config=config,
        hashes=about.hashes,
        parent=spec.parent,
        tags=spec.tags(trial),
    )
    peak = (
        torch.cuda.max_memory_allocated() / 2**20
        if spec.device == "cuda"
        else resident_peak_mb()
    )
    values = drop_undefined(result.to_metrics()) | {"test/peak_memory_mb": peak}
    logger = tracking.Logger(run)
    logger.update(values, about.step)
    logger.tag(
        **{tracking.WEIGHTS_TAG: checkpoint.weights_hash(result.checkpoint)}
    )  # students find their teacher
    tracking.log_text(run, to_json(result), artifact_name("test"))
    logger.end()
    record = {
        "status": "finished",
        "tracking": run.to_dict(),
        "evaluate": trial.evaluate,
        "values": values,
    }
    write_record(folder, record)
    tune.report({EPOCH: 1, VALUE: values.get(spec.metric, math.nan), **values})


def stop_trial(trial: Trial, spec: SweepSpec) -> None:
    """End a trial that the scheduler stopped at its last checkpoint."""
    folder = join(spec.folder, trial.name)
    run = read_record(folder)
    if not run or run["status"] != "running":
        return
    attempts.begin(folder)  # its workers may continue for a while
    last = checkpoint.last(folder)
    if last:
        conclude(folder, run, last, stopped=True)


def is_done(trial: Trial, spec: SweepSpec) -> bool:
    """Return whether a trial is finished, and measured on test if the sweep measures its trials."""
    record = read_record(join(spec.folder, trial.name))
    if record is None or record["status"] != "finished":
        return False
    if record.get("stopped"):
        return True
    if spec.grid.kind == "train" and is_longer(record, trial.fit.max_epochs):
        return False
    if not spec.test:
        return True
    run = tracking.RunRef(**record["tracking"])
    if spec.grid.kind == "evaluate":  # the run is its own evaluation
        measured = tracking.connect(run.uri).get_run(run.run_id).data
        return bool(measured.tags.get(tracking.WEIGHTS_TAG))
    return bool(load_test_metrics(run))


def ignore_line(line: str) -> None:
    """Print nothing, as trials run side by side."""
