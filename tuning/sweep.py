"""Run the trials of a grid through Ray Tune, as child runs of one MLflow run.

    python -m jobs.sweep --grid tuning/grids/sid_mlp.yaml --name alpha ...

`STORAGE/NAME/` holds `run.json`, Tune's folder, a folder per trial, named by its
values, and `best/`, a copy of the best trial's weights if every trial has a result.

A trial is an ordinary run. A repeated command restores Tune, which runs the trials that
are unfinished or failed; they continue from their last checkpoints.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from typing import Any, ClassVar, NamedTuple

# Of Tune's files of results only the one that `Halving` reads is written.
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
# Time for a stopped trial to leave its process, which runs the next trial.
os.environ.setdefault("TUNE_FUNCTION_THREAD_TIMEOUT_S", "30")
# Tune's handler of SIGINT would end an interrupted sweep like a finished one.
os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")
# Seconds between stores of results, which ASHA reads in a continued sweep.
os.environ.setdefault("TUNE_GLOBAL_CHECKPOINT_S", "2")
# `TrialReporter` prints the progress instead of Tune.
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
# Failures, and checkpoints within an epoch, are reported without the metric.
os.environ.setdefault("TUNE_DISABLE_STRICT_METRIC_CHECKING", "1")

import polars as pl
import ray
import torch
from pyarrow.fs import FileSelector
from ray import tune
from ray.tune import Callback
from ray.tune.integration.ray_train import TuneReportCallback
from ray.tune.logger import JsonLoggerCallback
from ray.tune.schedulers import AsyncHyperBandScheduler

from core.errors import UserError, one_line, pluralize
from core.files import join, open_uri
from core.options import check_known
from core.schemas import RunRecord, RunRef
from models import registry
from models.loaded_model import load_catalogue
from models.metrics.ranking_metrics import format_metric
from models.training import checkpoint
from models.training.checkpoint import BEST
from models.training.loop import drop_undefined
from models.training.memory import resident_peak_mb
from pipelines import cluster, tracking
from pipelines.evaluation.checks import open_evaluation
from pipelines.evaluation.config import EvaluateConfig
from pipelines.evaluation.ranking import evaluate
from pipelines.evaluation.result import (
    artifact_name,
    load_test_metrics,
    record_result,
    to_json,
)
from pipelines.training.backends import wants_gpu
from pipelines.training.config import TrainConfig
from pipelines.training.ray_train import check_cluster, is_lost, worker_resources
from pipelines.training.record import check_equal, read_record, write_record
from pipelines.training.run import (
    TrialContext,
    check_continues,
    copy_weights,
    dataset_name,
    end_failed_run,
    finish_run,
    lock_run,
    resolve_training,
    run_training,
)
from tuning.grid import Sweep

# `TrialReporter` prints the failures of trials in a line each, without tracebacks.
logging.getLogger("ray.tune").setLevel(logging.CRITICAL)

EPOCH = "epoch"
"""Key of the epoch in the results that trials report to Tune, beside metrics."""

ERROR, IS_LOST = "error", "is_lost"
"""Keys of a failure: its message, and whether another try may succeed."""

TRIAL = "trial"
"""Key of the trial's name in Tune's config."""

LOCK_TIMEOUT_S = 60.0
"""Seconds that a trial waits until a process of an interrupted sweep releases the lock
of the trial's folder."""

LOST = "the process of the trial was lost"

DRIVER_TRIAL_BYTES = 1 << 30
"""Memory of a process that drives the workers of a trial: PyTorch, Ray and MLflow."""

MIN_QUEUED_TRIALS = 16
"""Trials of several workers that run or wait at once on a cluster, which may grow,
unless it holds more."""


class TrialReporter(Callback):
    """Callback of Tune that prints progress and finishes stopped trials.

    Tune restores the callback of an earlier call, so it holds nothing itself.
    """

    sweep: ClassVar[Sweep]
    """This process's sweep."""

    def on_trial_result(
        self, iteration: int, trials: list, trial: Any, result: dict, **info: Any
    ) -> None:
        """Print a validation, and set the retries: none after an error in the code."""
        if self.sweep.metric in result:
            print(
                f"  {trial_name(trial)}  epoch {result[EPOCH]:>3}  "
                f"{self.sweep.grid.metric} {format_metric(result[self.sweep.metric])}"
            )
        may_retry = result.get(IS_LOST, True)
        trial.max_failures = self.sweep.config.ray.max_failures if may_retry else 0

    def on_trial_complete(
        self, iteration: int, trials: list, trial: Any, **info: Any
    ) -> None:
        """Finish a trial that Tune has ended, and print its result."""
        # fails while its workers still write checkpoints; the sweep then does it
        with suppress(UserError, OSError):
            stop_trial(trial_name(trial), self.sweep)
        record = read_record(join(self.sweep.folder, trial_name(trial)))
        value = format_metric(record.values.get(self.sweep.metric) if record else None)
        self.print_end(trial, trials, f"{self.sweep.grid.metric} {value}")

    def on_trial_recover(
        self, iteration: int, trials: list, trial: Any, **info: Any
    ) -> None:
        """Print why a trial is started again."""
        print(
            f"note: {trial_name(trial)} failed ({trial.last_result.get(ERROR, LOST)}); "
            f"it continues from its last checkpoint, {trial.num_failures} of "
            f"{trial.max_failures} times"
        )

    def on_trial_error(
        self, iteration: int, trials: list, trial: Any, **info: Any
    ) -> None:
        """Print the error of a trial that Tune no longer retries."""
        error = trial.last_result.get(ERROR, LOST)
        where = f"; traceback in {trial.error_file}" if trial.error_file else ""
        self.print_end(trial, trials, f"failed: {error}{where}")

    def print_end(self, trial: Any, trials: list, outcome: str) -> None:
        """Print how a trial has ended, and how many have."""
        ended = {trial, *(other for other in trials if other.is_finished())}
        print(f"[{len(ended)}/{len(self.sweep.trials)}] {trial_name(trial)} {outcome}")


def trial_name(trial: Any) -> str:
    """Return the name of one of Tune's trials."""
    return str(trial.config[TRIAL])


def run_sweep(
    sweep: Sweep, start: Callable[[], None] = lambda: None
) -> tuple[RunRef, pl.DataFrame]:
    """Run the trials of a sweep that are not finished.

    Failed trials do not raise; their results have no value.

    Args:
        sweep: The sweep, as `load_sweep` returns it.
        start: Start Ray; called only if trials are to run. By default Ray runs already.

    Returns:
        The MLflow run, and the results (`collect_results`).
    """
    config, grid = sweep.config, sweep.grid
    documents = ("name", "source", "config", "published", "findings", "notes", "smoke")
    settings = {"test": config.test, **asdict(grid)}
    identity = {name: settings[name] for name in settings if name not in documents}
    record = read_record(sweep.folder, sweep.run.uri)
    if record:
        check_equal(record.config, identity)
    kind = resolve_trials(sweep)
    pending = [name for name in sweep.trials if not is_done(name, sweep)]
    tracking.connect(sweep.run.uri)
    with lock_run(config.storage, config.name, LOCK_TIMEOUT_S):
        if pending:
            start()
            use_gpu = wants_gpu(config.ray)
            check_cluster(config.ray, sweep.num_workers, use_gpu, sweep.run.uri)
        if record:
            tracking.reopen(record.run)
        else:
            tags = {
                tracking.KIND_TAG: "sweep",
                "sweep.grid": grid.name,
                "sweep.axes": json.dumps(grid.keys),
                "sweep.metric": grid.metric,
                tracking.FOLDER_TAG: sweep.folder,
            }
            if config.smoke:
                tags[tracking.SMOKE_TAG] = "true"
            run = tracking.open_run(
                sweep.run.uri,
                config.experiment or f"{kind}/{dataset_name(config.tables)}",
                config.name,
                config.storage,
                config=asdict(config),
                hashes={},  # the trials have them
                tags=tags,
            )
            record = RunRecord(status="running", run=run, config=identity)
            write_record(sweep.folder, record)
        TrialReporter.sweep = sweep = sweep._replace(run=record.run)
        errors: dict[str, str] = {}
        with end_failed_run(record.run):
            try:
                print(
                    f"{pluralize(len(sweep.trials), 'trial')} of {grid.name}, "
                    f"{len(sweep.trials) - len(pending)} done before; metric "
                    f"{grid.metric}"
                )
                if pending:
                    errors = run_pending(sweep)
                for name in pending:
                    if name not in errors:
                        stop_trial(name, sweep)
            except KeyboardInterrupt:
                ray.shutdown()  # ends the trials
                print(
                    "trials that were running continue from their last checkpoint: the "
                    "end of an epoch, or fit.checkpoint_every_minutes"
                )
                finish_sweep(sweep, record, errors)
                raise
            return record.run, finish_sweep(sweep, record, errors)


def resolve_trials(sweep: Sweep) -> str:
    """Resolve the trials of a sweep without writing files, and return their kind.

    The catalogue of a model is loaded once for all trials.
    """
    load = cache(load_catalogue)
    for trial in sweep.trials.values():
        if isinstance(trial, TrainConfig):
            resolved, hashes = resolve_training(trial, load)
            name = trial.model.name
            if record := read_record(trial.folder):
                check_continues(resolved, hashes, record)
        else:
            evaluated = open_evaluation(trial)
            name = evaluated.checkpoint.name
            known = [*evaluated.checkpoint.metrics, "requests_per_s", "peak_memory_mb"]
            check_known(
                [sweep.metric.removeprefix("test/")],
                known,
                f"metric of the grid {sweep.grid.name}",
            )
    return registry.find(name).kind.name


def run_pending(sweep: Sweep) -> dict[str, str]:
    """Run the trials that are not done through Tune, and return errors by trial."""
    options = sweep.config.ray
    has_workers = sweep.num_workers > 1
    needs = worker_resources(options, wants_gpu(options))
    bundle = needs
    labels = [options.label_selector] if options.label_selector else None
    if has_workers:  # Ray Train reserves their resources separately
        bundle, labels = {"memory": DRIVER_TRIAL_BYTES}, None
    trainable = tune.with_resources(
        tune.with_parameters(run_trial, sweep=sweep),
        tune.PlacementGroupFactory([bundle], bundle_label_selector=labels),  # type: ignore[arg-type]
    )
    filesystem, path = open_uri(join(sweep.folder, "tune"))
    # Tune writes its state after the file that `Tuner.can_restore` looks for
    stored = filesystem.get_file_info(FileSelector(path, allow_not_found=True))
    if any("experiment_state" in file.base_name for file in stored):
        tuner = tune.Tuner.restore(
            path, trainable, restart_errored=True, storage_filesystem=filesystem
        )
    else:
        # Ray reserves the workers of a trial together, so trials beyond the capacity of
        # the cluster wait, and an autoscaler starts nodes for them.
        concurrency = sweep.config.concurrency
        if sweep.grid.job == "evaluate":
            concurrency = 1  # as their speed is measured
        elif has_workers and not concurrency:
            fewest = MIN_QUEUED_TRIALS if cluster.may_grow() else 1
            concurrency = max(cluster.count_room(needs) // sweep.num_workers, fewest)
        rule, scheduler = sweep.grid.scheduler, None
        if rule.name == "asha":
            epochs = [
                trial.fit.max_epochs
                for trial in sweep.trials.values()
                if isinstance(trial, TrainConfig)
            ]
            scheduler = Halving(
                time_attr=EPOCH,
                metric=sweep.metric,
                mode="max",
                max_t=max(rule.grace, *epochs),
                grace_period=rule.grace,
                reduction_factor=rule.reduction,
                stop_last_trials=False,
            )
        tuner = tune.Tuner(
            trainable,
            param_space={TRIAL: tune.grid_search(list(sweep.trials))},
            tune_config=tune.TuneConfig(
                scheduler=scheduler,
                # A process runs many trials, unless a trial has workers of its own,
                # which must end with the process.
                reuse_actors=sweep.grid.job == "train" and not has_workers,
                max_concurrent_trials=concurrency or None,
                trial_name_creator=trial_name,
                trial_dirname_creator=trial_name,
            ),
            run_config=tune.RunConfig(
                name="tune",
                storage_path=sweep.folder,
                verbose=0,
                callbacks=[TrialReporter(), JsonLoggerCallback()],
                failure_config=tune.FailureConfig(max_failures=options.max_failures),
            ),
        )
    return {
        str(result.config[TRIAL]): (result.metrics or {}).get(ERROR, LOST)
        for result in tuner.fit()  # type: ignore[attr-defined]
        if result.error
    }


def collect_results(sweep: Sweep, errors: dict[str, str]) -> pl.DataFrame:
    """Return a row per trial, in the grid's order.

    Args:
        sweep: The sweep.
        errors: Errors of the trials that failed in this call, by name.

    Returns:
        Columns `name`; `settings`, equal for trials that differ only in their seed;
        `seed`; `status` (finished, stopped, failed or unfinished); `value` of the
        sweep's metric: of the best epoch, or of the evaluation, or null; `run_id` in
        MLflow; `checkpoint` and `error`.
    """
    rows = []
    for name, trial in sweep.trials.items():
        point = sweep.points[name]
        record, error = read_record(join(sweep.folder, name)), errors.get(name)
        status, value = "failed" if error else "unfinished", None
        if record and record.status == "finished" and not error:
            status = "stopped" if record.stopped else "finished"
            value = record.values.get(sweep.metric)
        saved = join(sweep.folder, f"{name}/{BEST}")
        if isinstance(trial, EvaluateConfig):
            saved = trial.checkpoint
        rows.append(
            {
                "name": name,
                "settings": tracking.settings_key(point),
                "seed": str(point.get("fit.seed")),
                "status": status,
                "value": value,
                "run_id": record and record.run.run_id,
                "checkpoint": saved,
                "error": error,
            }
        )
    return pl.DataFrame(rows, schema_overrides={"value": pl.Float64})


class BestTrial(NamedTuple):
    """The best trial of a sweep."""

    name: str
    value: float
    """Value of the sweep's metric."""
    run_id: str
    """Id of the MLflow run."""
    checkpoint: str


def find_best(results: pl.DataFrame) -> BestTrial | None:
    """Return the best trial of the settings with the largest mean over their seeds.

    The mean is over the seeds for which all settings have a value, so that a failed
    trial neither helps nor harms its settings. Settings without any value are left out.
    If no seed is common to all settings, as in a grid with random seeds, each mean is
    over all seeds of its settings. None if no trial has a value.
    """
    measured = results.drop_nulls("value")
    settings = pl.col("settings").n_unique()
    shared = measured.filter(settings.over("seed") == settings)
    groups = (measured if shared.is_empty() else shared).group_by("settings")
    means = groups.agg(mean=pl.col("value").mean())
    ranked = measured.join(means, on="settings", maintain_order="left")
    ranked = ranked.sort("mean", "value", descending=True, maintain_order=True)
    rows = ranked.select(BestTrial._fields).iter_rows()
    return next((BestTrial(*row) for row in rows), None)


def finish_sweep(
    sweep: Sweep, record: RunRecord, errors: dict[str, str]
) -> pl.DataFrame:
    """Write the results to MLflow and the sweep's folder, and end the sweep's run."""
    results = collect_results(sweep, errors)
    best = find_best(results)
    missing = results.filter(pl.col("value").is_null())["name"]
    logger = tracking.Logger(record.run)
    client, run_id = logger.client, record.run.run_id
    complete, status = "true", "FINISHED"
    if len(missing):
        complete = (
            f"{len(missing)} of {len(results)} trials have no result, such as "
            f"{missing[0]}"
        )
        status = "FAILED" if errors else "KILLED"
    elif sweep.grid.job == "train" and best:
        copy_weights(best.checkpoint, join(sweep.folder, BEST))
    record.status = "failed" if len(missing) else "finished"
    write_record(sweep.folder, record)
    client.log_dict(run_id, asdict(sweep.grid), "grid.yaml")
    if best:
        logger.update({f"best/{sweep.metric}": best.value}, len(results))
        logger.tag(**{tracking.BEST_TAG: best.run_id})
    logger.tag(**{tracking.COMPLETE_TAG: complete})
    experiment_id = client.get_run(run_id).info.experiment_id
    trials = client.search_runs(
        [experiment_id], f"tags.`{tracking.PARENT_TAG}` = '{run_id}'"
    )
    tracking.end_dead_runs(client, trials)
    client.set_terminated(run_id, status)
    return results


def run_trial(config: dict[str, Any], sweep: Sweep) -> None:
    """Run a trial in Tune's process.

    Args:
        config: Tune's config, with the name of the trial under `TRIAL`.
        sweep: The sweep.
    """
    name = config[TRIAL]
    trial = sweep.trials[name]
    tags = {
        tracking.FOLDER_TAG: join(sweep.folder, name),
        tracking.KIND_TAG: "trial",
        tracking.PARENT_TAG: sweep.run.run_id,
        tracking.POINT_TAG: json.dumps(sweep.points[name]),
        "command": sweep.command,
        "mlflow.source.name": "jobs.sweep",
    }
    try:
        if isinstance(trial, EvaluateConfig):
            measure(name, trial, sweep, tags)
        else:
            train(trial, sweep, tags)
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
    evaluation = EvaluateConfig(
        checkpoint=trained.checkpoint,
        **vars(config.inputs),
        batch_size=config.fit.eval_batch_size,
        device=sweep.device,
    )
    result, checked = evaluate(evaluation, in_ray=has_workers)
    record_result(result, checked.checkpoint, sweep.run.uri)


def measure(
    name: str, config: EvaluateConfig, sweep: Sweep, tags: dict[str, str]
) -> None:
    """Evaluate a checkpoint on the test split, as an MLflow run of the sweep."""
    torch.set_num_threads(sweep.config.ray.threads or len(os.sched_getaffinity(0)))
    result, checked = evaluate(replace(config, device=sweep.device))
    evaluated = checked.checkpoint
    run = tracking.open_run(
        sweep.run.uri,
        sweep.run.experiment,
        name,
        sweep.folder,
        config={
            "model": evaluated.model,
            "fit": asdict(evaluated.fit),
            "evaluate": result.options,
            "checkpoint": result.checkpoint,
        },
        hashes=evaluated.hashes,
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
    needs_no_test = sweep.grid.job == "evaluate" or not sweep.config.test
    return record.stopped or needs_no_test or bool(load_test_metrics(record.run))


class Halving(AsyncHyperBandScheduler):
    """Ray's ASHA scheduler, which in a continued sweep knows the earlier results."""

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        """Add a trial, with the results that Tune has stored of it."""
        super().on_trial_add(tune_controller, trial)
        if EPOCH not in trial.last_result:  # it is new
            return
        filesystem = trial.storage.storage_filesystem
        with filesystem.open_input_stream(f"{trial.path}/result.json") as stream:
            for line in stream.read().splitlines():
                super().on_trial_result(tune_controller, trial, json.loads(line))
