"""One trial of a sweep: an ordinary run with a folder of its own, in the process that Tune gives it.

`run.json` and the checkpoints in the folder say where it stands, and MLflow has what it measured. So a trial that is
started again, by Tune or by the same line of jobs.sweep, goes on or is found finished.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from ray import tune
from ray.tune.integration.ray_train import TuneReportCallback

from models.loaded_model import require_tables
from models.storage import attempts, checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import UserError, join
from models.training.fit import FitConfig, defined
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
from pipelines.training.record import is_longer, read_record, write_record
from pipelines.training.run import conclude, train, wants_gpu
from pipelines.training.settings import RayOptions
from pipelines.training.worker import threads_per_worker
from tuning.grid import Grid, Trial

EPOCH, VALUE, ERROR = "epoch", "value", "error"
"""What trials report to Tune."""

TRIAL = "trial"
"""The key of Tune's config that names the trial."""

PATIENCE = 60.0
"""Seconds that a trial waits for a process of an interrupted sweep to let go of its folder."""


@dataclass(frozen=True)
class Plan:
    """What the trials of a sweep share."""

    grid: Grid
    """What they vary, and what they are ranked by."""
    trials: dict[str, Trial]
    """All of them, by name."""
    inputs: Inputs
    """What trials work on whose point names no SIDS or TEXT."""
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
    """Hashes of the tables that each trial reads, by trial, as the sweep checked them."""

    @property
    def metric(self) -> str:
        """What trials are ranked by, as a validation calls it."""
        return self.grid.metric.removeprefix("val/")

    @property
    def device(self) -> str:
        """Where a trial's model runs."""
        return "cuda" if wants_gpu(self.ray) else "cpu"

    def tags(self, trial: Trial) -> dict[str, str]:
        """Tags of the trial's MLflow run."""
        return {
            tracking.KIND_TAG: "trial",
            tracking.TRIAL_TAG: trial.id,
            tracking.POINT_TAG: json.dumps(trial.point),
            "command": self.command,
            "mlflow.source.name": "jobs.sweep",
        }


def run_trial(config: dict[str, Any], plan: Plan) -> None:
    """What Tune runs. It is told of a UserError, which would come again, and does not try again."""
    trial = plan.trials[config[TRIAL]]
    tracking.mark_reachable(plan.uri)
    try:
        if plan.grid.kind == "evaluate":
            measure(trial, plan)
        else:
            fit(trial, plan)
    except UserError as error:
        tune.report({EPOCH: 0, VALUE: math.nan, ERROR: str(error)})


def fit(trial: Trial, plan: Plan) -> None:
    """Train and report every validation to Tune; then measure on test if the plan says so.

    A trial of several workers is measured by a Ray task, as its own process holds neither a GPU nor a CPU.
    """

    def heard(about: checkpoint.Checkpoint) -> None:
        if plan.metric in about.metrics:
            tune.report(
                {EPOCH: about.epoch, VALUE: about.metrics[plan.metric], **about.metrics}
            )

    inputs = trial.inputs(plan.inputs)
    require_tables(trial.model["name"], inputs, plan.hashes[trial.name])
    trained = train(
        model=trial.model,
        fit=FitConfig(**trial.fit),
        ray_options=plan.ray,
        inputs=inputs,
        storage=plan.folder,
        name=trial.name,
        tracking_uri=plan.uri,
        experiment=plan.experiment,
        parent_run=plan.parent,
        log_model=False,
        say=quiet,
        tags=plan.tags(trial),
        heard=heard,
        callbacks=[ToTune(plan.metric)] if plan.ray.num_workers > 1 else (),
        wait=PATIENCE,
    )
    if not is_done(trial, plan):
        result, about = evaluate(
            trained.checkpoint,
            inputs,
            batch_size=FitConfig(**trial.fit).eval_batch_size,
            workers=Workers(device=plan.device, remote=plan.ray.num_workers > 1),
        )
        record_result(result, about)


class ToTune(TuneReportCallback):
    """Tells Tune of every validation of several workers; it runs in the controller of Ray Train."""

    def __init__(self, metric: str) -> None:
        super().__init__()
        self.metric = metric

    def after_report(
        self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any
    ) -> None:
        """`metrics` of the workers by rank, which all say the same."""
        if self.metric in metrics[0]:
            super().after_report(
                run_context, [{**metrics[0], VALUE: metrics[0][self.metric]}], None
            )


def measure(trial: Trial, plan: Plan) -> None:
    """Measures a checkpoint on test with the options of the point."""
    folder = join(plan.folder, trial.name)
    options = dict(trial.evaluate)
    batch_size = int(options.pop("batch_size", 256))
    torch.set_num_threads(threads_per_worker(plan.ray.threads, 1))
    result, about = evaluate(
        trial.folders["checkpoint"],
        trial.inputs(plan.inputs),
        batch_size=batch_size,
        options=options,
        workers=Workers(device=plan.device),
    )
    config = {
        "model": about.model,
        "fit": about.fit,
        "evaluate": result.options,
        "checkpoint": result.checkpoint,
    }
    run = tracking.open_run(
        plan.uri,
        plan.experiment,
        trial.name,
        plan.folder,
        config=config,
        hashes=about.hashes,
        parent=plan.parent,
        tags=plan.tags(trial),
    )
    peak = (
        torch.cuda.max_memory_allocated() / 2**20
        if plan.device == "cuda"
        else resident_peak_mb()
    )
    values = defined(result.to_metrics()) | {"test/peak_memory_mb": peak}
    logger = tracking.Logger(run)
    logger.update(values, about.step)
    logger.tag(
        **{tracking.WEIGHTS_TAG: checkpoint.weights_hash(result.checkpoint)}
    )  # students find their teacher
    tracking.log_text(run, to_json(result), artifact_name("test"))
    logger.end()
    noted = {
        "status": "finished",
        "tracking": run.to_dict(),
        "evaluate": trial.evaluate,
        "values": values,
    }
    write_record(folder, noted)
    tune.report({EPOCH: 1, VALUE: values.get(plan.metric, math.nan), **values})


def stop(trial: Trial, plan: Plan) -> None:
    """Ends a trial that was told to stop at its last checkpoint."""
    folder = join(plan.folder, trial.name)
    noted = read_record(folder)
    if not noted or noted["status"] != "running":
        return
    attempts.begin(folder)  # its workers may go on for a while
    last = checkpoint.last(folder)
    if last:
        conclude(folder, noted, last, stopped=True)


def is_done(trial: Trial, plan: Plan) -> bool:
    """Whether nothing is left to do for the trial; MLflow has what it did on test."""
    noted = read_record(join(plan.folder, trial.name))
    if noted is None or noted["status"] != "finished":
        return False
    if noted.get("stopped"):
        return True
    if plan.grid.kind == "train" and is_longer(
        noted, {"fit": asdict(FitConfig(**trial.fit))}
    ):
        return False
    if not plan.test:
        return True
    run = tracking.RunRef(**noted["tracking"])
    if plan.grid.kind == "evaluate":  # the run is its own evaluation
        measured = tracking.connect(run.uri).get_run(run.run_id).data
        return bool(measured.tags.get(tracking.WEIGHTS_TAG))
    return bool(load_test_metrics(run))


def quiet(line: str) -> None:
    """Trials run side by side: what one would say of itself is in its metrics."""
