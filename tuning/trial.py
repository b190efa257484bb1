"""One trial of a sweep: an ordinary training run with a folder of its own, in the process that Tune gives it.

The folder is what lasts: `run.json` says whether the trial is done, the checkpoints where it stands, `reports.json`
what it told the scheduler. So a trial that is started again, by Tune or by the next sweep, goes on or is found
finished.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from pyarrow import fs
from ray import tune
from ray.tune.integration.ray_train import TuneReportCallback

from models.checkpoint import Checkpoint, weights_hash
from models.fit import FitConfig
from models.memory import resident_peak_mb
from models.tables import UserError, join, open_uri
from models.uri import masked
from pipelines import tracking
from pipelines.data.tables import check_writable, read_json, write_file
from pipelines.evaluation.ranking import evaluate, record
from pipelines.training import run as runs
from pipelines.training.options import RayOptions
from pipelines.training.record import BEST, RUN, read_record, write_record
from pipelines.training.run import train
from pipelines.training.worker import threads_per_worker
from tuning.grid import EPOCH, TRIAL, VALUE, Trial

REPORTS = "reports.json"

TEST = "evaluation-test.json"
"""What the trial did on test, beside its best checkpoint."""

PATIENCE = 60.0
"""Seconds that a trial waits for a process of an interrupted sweep to let go of its folder."""


@dataclass(frozen=True)
class Plan:
    """What the trials of a sweep share."""

    trials: dict[str, Trial]
    """All of them, by name."""
    kind: str
    """train or evaluate."""
    metric: str
    """What they are ranked by, such as `val/ndcg@10`."""
    tables: str
    """TABLES."""
    extra: str | None
    """SIDS or TEXT, for trials whose point names none."""
    folder: str
    """The sweep's folder."""
    uri: str
    """MLflow."""
    experiment: str
    """MLflow experiment."""
    parent: str
    """The sweep's MLflow run."""
    ray: RayOptions
    """Workers of each trial."""
    test: bool
    """Whether finished trials are measured on the test split too."""
    command: str
    """Command line of the sweep."""

    def tags(self, trial: Trial) -> dict[str, str]:
        """Tags of the trial's MLflow run."""
        return {
            tracking.KIND_TAG: "trial", tracking.TRIAL_TAG: trial.id, tracking.POINT_TAG: json.dumps(trial.point),
            "command": self.command, "mlflow.source.name": "jobs.sweep",
        }  # fmt: skip


def run_trial(config: dict[str, Any], plan: Plan) -> None:
    """What Tune runs. A UserError, which would come again, is noted and not retried."""
    trial = plan.trials[config[TRIAL]]
    tracking.expect(plan.uri)
    try:
        if plan.kind == "evaluate":
            measure(trial, plan)
        else:
            fit(trial, plan)
    except UserError as error:
        fail(trial, plan, masked(str(error)))


def fit(trial: Trial, plan: Plan) -> None:
    """Trains, telling Tune of every validation; then measures on test where the plan says so."""
    folder, metric = join(plan.folder, trial.name), plan.metric.removeprefix("val/")
    said = Said(folder, metric, time.time())

    def heard(about: Checkpoint) -> None:
        if report := said.report({EPOCH: about.epoch, **about.metrics}):
            tune.report(report)

    train(
        model=trial.model, fit=FitConfig(**trial.fit), ray_options=plan.ray, tables=plan.tables,
        extra=trial.extra(plan.extra), storage=plan.folder, name=trial.name, tracking_uri=plan.uri,
        experiment=plan.experiment, parent_run=plan.parent, log_model=False, say=quiet, tags=plan.tags(trial),
        heard=heard, callbacks=[ToTune(said)] if plan.ray.num_workers > 1 else (), wait=PATIENCE,
    )  # fmt: skip
    if plan.test and not tested(folder):
        result, about = evaluate(
            join(folder, BEST), plan.tables, trial.extra(plan.extra), device=device(plan.ray),
            batch_size=FitConfig(**trial.fit).eval_batch_size,
        )  # fmt: skip
        record(result, about)


@dataclass(frozen=True)
class Said:
    """What a trial tells the scheduler of its validations, kept in its folder too."""

    folder: str
    """The trial's."""
    metric: str
    """What trials are ranked by, as a validation calls it."""
    began: float
    """When this start of the trial began, seconds of the clock."""

    def report(self, found: dict[str, Any]) -> dict[str, Any] | None:
        """Of the epoch and the metrics of a checkpoint: what Tune is told, None where nothing was measured."""
        if self.metric not in found:
            return None
        epoch, value = found[EPOCH], found[self.metric]
        reports = [*(past for past in read_reports(self.folder) if past[0] < epoch), [epoch, value]]
        write_file(join(self.folder, REPORTS), json.dumps(reports).encode())
        return {VALUE: value, "seconds": time.time() - self.began, **found}


class ToTune(TuneReportCallback):
    """Brings what several workers report to Ray Train to Tune; it runs in the controller of the trainer."""

    def __init__(self, said: Said) -> None:
        super().__init__()
        self.said = said

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        """`metrics` of the workers by rank, which all say the same."""
        if report := self.said.report(metrics[0]):
            super().after_report(run_context, [report], None)


def measure(trial: Trial, plan: Plan) -> None:
    """Measures a checkpoint on test with the options of the point."""
    folder = join(plan.folder, trial.name)
    check_writable(folder)
    options = dict(trial.evaluate)
    batch_size = int(options.pop("batch_size", 256))
    torch.set_num_threads(threads_per_worker(plan.ray.threads, 1))
    result, about = evaluate(
        trial.folders["checkpoint"], plan.tables, trial.extra(plan.extra), batch_size=batch_size, options=options,
        device=device(plan.ray),
    )  # fmt: skip
    config = {"model": about.model, "fit": about.fit, "evaluate": result.options, "checkpoint": result.checkpoint}
    run = tracking.open_run(
        plan.uri, plan.experiment, trial.name, plan.folder, config=config, hashes=about.hashes, parent=plan.parent,
        tags=plan.tags(trial),
    )  # fmt: skip
    on_gpu = device(plan.ray) == "cuda"
    peak = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else resident_peak_mb()
    values = {f"test/{name}": value for name, value in result.metrics.items()}
    values |= {
        "test/users_per_s": result.users_per_s,
        "test/peak_memory_mb": peak,
        "test/examples": float(result.examples),
        "test/users": float(result.users),
    }
    logger = tracking.Logger(run)
    logger.update(values, about.step)
    logger.tag(**{tracking.WEIGHTS_TAG: weights_hash(result.checkpoint)})  # students find their teacher by it
    tracking.log_json(run, asdict(result), "evaluation-test.json")
    logger.end()
    write_record(folder, {"status": "finished", "tracking": run.to_dict(), "values": values})
    tune.report({EPOCH: 1, VALUE: values.get(plan.metric, float("nan")), **values})


def fail(trial: Trial, plan: Plan, error: str) -> None:
    """Notes that the trial failed, in its folder and in MLflow; its run is made where there was none yet."""
    folder = join(plan.folder, trial.name)
    check_writable(folder)
    noted = read_record(folder) or {}
    if "tracking" not in noted:
        config = {"model": trial.model, "fit": trial.fit}
        run = tracking.open_run(
            plan.uri, plan.experiment, trial.name, plan.folder, config=config, hashes={}, parent=plan.parent,
            tags=plan.tags(trial),
        )  # fmt: skip
        noted["tracking"] = run.to_dict()
    logger = tracking.Logger(tracking.RunRef(**noted["tracking"]))
    logger.tag(**{tracking.ERROR_TAG: error[:5000]})
    logger.end("FAILED")
    write_record(folder, {**noted, "status": "failed", "error": error})


def forgive(trial: Trial, plan: Plan) -> None:
    """Lets a trial that failed go on from its last checkpoint; one that failed before its training began starts anew.

    Such a one's MLflow run has the params of the grid, which cannot become those that the training finds. What was
    measured on test is measured again, as it may have failed to reach MLflow.
    """
    folder = join(plan.folder, trial.name)
    noted = read_record(folder)
    if noted is None or noted["status"] != "failed":
        return
    run = tracking.RunRef(**noted["tracking"])
    if "config" in noted:
        tracking.connect(run.uri).delete_tag(run.run_id, tracking.ERROR_TAG)
        filesystem, path = open_uri(join(folder, BEST, TEST))
        if filesystem.get_file_info(path).type == fs.FileType.File:
            filesystem.delete_file(path)
        write_record(folder, {key: value for key, value in noted.items() if key != "error"} | {"status": "running"})
    else:
        tracking.delete(run)
        filesystem, path = open_uri(join(folder, RUN))
        filesystem.delete_file(path)


def stop(trial: Trial, plan: Plan) -> None:
    """Ends a trial that was told to stop at its last checkpoint."""
    folder = join(plan.folder, trial.name)
    noted, last = read_record(folder), runs.here.last_whole(folder)
    if noted and noted["status"] == "running" and last:
        runs.conclude(folder, noted, runs.checkpoint.read(last), stopped=True)


def read_reports(folder: str) -> list[list[float]]:
    """(epoch, value) of every validation that the trial reported."""
    try:
        found = read_json(join(folder, REPORTS))
        return [] if found is None else [[int(epoch), float(value)] for epoch, value in found]
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{join(folder, REPORTS)} is damaged ({error}); remove the folder {folder} and give --resume, which runs "
            f"the trial again"
        ) from error


def tested(folder: str) -> bool:
    """Whether the trial was measured on test."""
    filesystem, path = open_uri(join(folder, BEST, TEST))
    return bool(filesystem.get_file_info(path).type == fs.FileType.File)


def device(options: RayOptions) -> str:
    """Where a trial's model runs."""
    return "cuda" if runs.wants_gpu(options, 1) else "cpu"


def quiet(line: str) -> None:
    """Trials run side by side: what one would say of itself is in its metrics."""
