"""Run the trials of a grid through Ray Tune, as child runs of one MLflow run.

    python -m jobs.sweep --grid tuning/grids/sid_mlp.yaml --name alpha ...

`STORAGE/NAME/` holds `run.json`, Tune's folder, and a folder per trial
(`tuning/trial.py`), named by its values. A repeated command restores Tune, which runs
the trials that are unfinished or failed.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from core.schemas import RunRecord, RunRef

# Of Tune's files of results only the one that `Halving` reads is written.
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
# Time for a stopped trial to leave its process, which runs the next trial.
os.environ.setdefault("TUNE_FUNCTION_THREAD_TIMEOUT_S", "30")
# Tune's handler of SIGINT would end an interrupted sweep like a finished one.
os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")
# `TrialReporter` prints the progress instead of Tune.
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")

import ray
from ray import cloudpickle, tune
from ray.exceptions import RayActorError
from ray.tune import Callback
from ray.tune.logger import JsonLoggerCallback

from core.errors import UserError, pluralize
from core.files import absolute, join, open_uri
from core.options import check_known, flatten
from models import registry
from models.loaded_model import load_catalogue
from models.metrics.ranking_metrics import format_metric
from models.training import checkpoint
from models.training.checkpoint import BEST
from pipelines import cluster, faults, tracking
from pipelines.evaluation.checks import check_evaluation
from pipelines.evaluation.record import load_test_metrics
from pipelines.training.ray_train import check_cluster, wants_gpu, worker_resources
from pipelines.training.record import check_equal, read_record, write_record
from pipelines.training.run import (
    check_continues,
    dataset_name,
    lock_run,
    resolve_training,
)
from tuning.grid import Grid, Trial
from tuning.halving import make_scheduler
from tuning.options import SweepConfig
from tuning.trial import (
    EPOCH,
    LOCK_TIMEOUT_S,
    TRIAL,
    VALUE,
    SweepSpec,
    is_done,
    run_trial,
    stop_trial,
)

# `TrialReporter` prints the failures of trials in a line each, without tracebacks.
logging.getLogger("ray.tune").setLevel(logging.CRITICAL)


@dataclass
class TrialResult:
    """The result of a trial."""

    trial: str
    """Id of the trial, a hash of `point`."""
    name: str
    """Name of the trial's folder and MLflow run."""
    point: dict[str, Any]
    """Values of the axes."""
    status: str
    """finished, stopped (early, by the scheduler), failed, or unfinished."""
    value: float | None = None
    """Value of the sweep's metric: of the best epoch, or of the evaluation."""
    epochs: int | None = None
    """Number of epochs that the trial was trained for."""
    run_id: str | None = None
    """Id of the MLflow run."""
    checkpoint: str | None = None
    """Folder of the best weights."""
    error: str | None = None
    """Error message of a failed trial."""


@dataclass
class SweepResult:
    """The result of a sweep: its trials and the best one."""

    name: str
    """Name of the sweep."""
    folder: str
    """Folder of the sweep."""
    run: RunRef
    """MLflow run of the sweep."""
    trials: list[TrialResult]
    """All trials, in the grid's order."""
    best: TrialResult
    """The best trial with a value; if trials failed, the best of an incomplete grid."""
    seconds: float
    """Duration of this call."""

    @property
    def failed_trials(self) -> list[TrialResult]:
        """Trials that failed, without which the grid is incomplete."""
        return [trial for trial in self.trials if trial.status == "failed"]


@dataclass
class Progress:
    """The progress of a call of a sweep."""

    spec: SweepSpec
    """The sweep."""
    num_done: int
    """Number of trials that have ended, in earlier calls too."""
    say: Callable[[str], None]
    """Called with lines of progress."""
    errors: dict[str, str] = field(default_factory=dict)
    """Errors of the trials that failed in this call, by name."""


class TrialReporter(Callback):
    """Callback of Tune that prints progress, ends stopped trials and collects errors.

    Tune restores the callback of an earlier call, so it holds nothing itself.
    """

    progress: ClassVar[Progress]
    """Progress of this process's sweep."""

    def on_trial_result(
        self, iteration: int, trials: list, trial: Any, result: dict, **info: Any
    ) -> None:
        """Print a validation of a trial."""
        if VALUE in result:
            self.progress.say(
                f"  {trial_name(trial)}  epoch {result[EPOCH]:>3}  "
                f"{self.progress.spec.grid.metric} {format_metric(result[VALUE])}"
            )

    def on_trial_complete(
        self, iteration: int, trials: list, trial: Any, **info: Any
    ) -> None:
        """Finish a trial that Tune has ended, and print its result."""
        planned = self.progress.spec.trials[trial_name(trial)]
        # fails while its workers still write checkpoints; the sweep then does it
        with suppress(UserError, OSError):
            stop_trial(planned, self.progress.spec)
        self.print_result(planned)

    def on_trial_recover(
        self, iteration: int, trials: list, trial: Any, **info: Any
    ) -> None:
        """Print why a trial is started again; only a lost process is tried again."""
        record = read_record(join(self.progress.spec.folder, trial_name(trial)))
        if record and record.failed_in == self.progress.spec.call:
            trial.max_failures = 0
            return
        self.progress.say(
            f"note: {trial_name(trial)} failed ({describe_failure(trial)}); it "
            f"continues from its last checkpoint, {trial.num_failures} of "
            f"{self.progress.spec.ray.max_failures} times"
        )

    def on_trial_error(
        self, iteration: int, trials: list, trial: Any, **info: Any
    ) -> None:
        """Collect the error of a trial that Tune no longer retries, and print it."""
        planned = self.progress.spec.trials[trial_name(trial)]
        self.progress.errors[planned.name] = describe_failure(trial)
        self.print_result(planned)

    def print_result(self, trial: Trial) -> None:
        """Print the result of a trial that has ended."""
        self.progress.num_done += 1
        result = collect_result(trial, self.progress.spec, self.progress.errors)
        value = ""
        if result.value is not None:
            value = f"  {self.progress.spec.grid.metric} {result.value:.4f}"
        error = f": {result.error}" if result.error else ""
        done = f"{self.progress.num_done}/{len(self.progress.spec.trials)}"
        self.progress.say(f"[{done}] {result.name} {result.status}{value}{error}")


def trial_name(trial: Any) -> str:
    """Return the name of one of Tune's trials."""
    return str(trial.config[TRIAL])


def describe_failure(trial: Any) -> str:
    """Return the latest error of a trial of Tune in a line.

    The error is read from Tune's local folder: the storage has it only after Tune has
    called the callbacks.
    """
    error = None
    if trial.pickled_error_file:
        error = cloudpickle.loads(Path(trial.pickled_error_file).read_bytes())
    if error is None or isinstance(error, RayActorError):
        return "the process of the trial was lost"
    cause = faults.find_user_error(error)
    return str(cause or error).strip().splitlines()[-1].strip()


def run_sweep(
    grid: Grid,
    trials: list[Trial],
    config: SweepConfig,
    *,
    say: Callable[[str], None] = print,
    start: Callable[[], None] = lambda: None,
) -> SweepResult:
    """Run the trials of a grid that are not finished.

    Failed trials do not raise; `SweepResult.failed_trials` lists them.

    Args:
        grid: The grid.
        trials: The grid's trials, as `Grid.trials` returns them.
        config: Tables, storage and resources of the trials.
        say: Called with lines of progress.
        start: Start Ray; called only if trials are to run. By default Ray runs already.
    """
    began = time.monotonic()
    spec = make_spec(grid, trials, config)
    record = read_record(spec.folder, spec.uri)
    spec, hashes = check_spec(spec, config, record)
    pending = [trial for trial in trials if not is_done(trial, spec)]
    num_done = len(trials) - len(pending)
    tracking.connect(spec.uri)
    with lock_run(config.storage, config.name, LOCK_TIMEOUT_S):
        if pending:
            start()
            check_resources(spec)
        record = open_run(spec, config, record, hashes)
        spec = replace(spec, parent=record.run.run_id)
        TrialReporter.progress = progress = Progress(spec, num_done, say)
        with finish_interrupted(record, progress):
            say(
                f"{pluralize(len(trials), 'trial')} of {grid.name}, {num_done} done "
                f"before; metric {grid.metric}"
            )
            if pending:
                run_pending(spec, config.options.concurrency)
                for trial in pending:
                    if trial.name not in progress.errors:
                        stop_trial(trial, spec)
            results = collect_results(spec, progress.errors)
            best = finish_sweep(spec, record, results)
    return SweepResult(
        name=config.name,
        folder=spec.folder,
        run=record.run,
        trials=results,
        best=require_best(best, results, config),
        seconds=time.monotonic() - began,
    )


def check_resources(spec: SweepSpec) -> None:
    """Raise UserError if the cluster can never hold a trial or use the MLflow store."""
    tracking.check_nodes(spec.uri, sum(node["Alive"] for node in ray.nodes()))
    check_cluster(spec.ray, spec.num_workers, wants_gpu(spec.ray))


@contextmanager
def finish_interrupted(record: RunRecord, progress: Progress) -> Iterator[None]:
    """End the trials and the sweep's MLflow run if the block is interrupted or raises.

    On KeyboardInterrupt the results so far are written.
    """
    try:
        yield
    except KeyboardInterrupt:
        ray.shutdown()  # ends the trials
        tracking.end_run(record.run, "KILLED")  # before the requests for results
        progress.say(
            "trials that were running continue from their last checkpoint: the end of "
            "an epoch, or fit.checkpoint_every_minutes"
        )
        results = collect_results(progress.spec, progress.errors)
        finish_sweep(progress.spec, record, results)
        raise
    except BaseException:
        tracking.end_run(record.run, "FAILED")
        raise


def require_best(
    best: TrialResult | None, results: list[TrialResult], config: SweepConfig
) -> TrialResult:
    """Return the best trial of a sweep that has ended."""
    num_unfinished = sum(result.status == "unfinished" for result in results)
    if num_unfinished:
        raise UserError(
            f"the sweep '{config.name}' stopped with {num_unfinished} of "
            f"{len(results)} trials unfinished"
        )
    if best is None:
        errors = [
            f" ({result.name}: {result.error})" for result in results if result.error
        ]
        raise UserError(
            f"no trial of the sweep {config.folder} has a value{''.join(errors[:1])}"
        )
    return best


def make_spec(grid: Grid, trials: list[Trial], config: SweepConfig) -> SweepSpec:
    """Return the specification of a sweep, before it is checked."""
    threads = config.ray.threads
    if not threads and grid.job == "train":
        threads = max(1, int(config.ray.cpus_per_worker))
    return SweepSpec(
        grid=grid,
        trials={trial.name: trial for trial in trials},
        inputs=config.inputs,
        folder=config.folder,
        uri=tracking.resolve_uri(config.tracking.tracking_uri, config.storage),
        ray=replace(config.ray, threads=threads),
        test=config.options.test and grid.job == "train",
        command=config.command,
    )


def check_spec(
    spec: SweepSpec, config: SweepConfig, record: RunRecord | None
) -> tuple[SweepSpec, dict[str, str]]:
    """Check the trials of a sweep, without writing anything.

    Args:
        spec: The sweep.
        config: Its configuration.
        record: `run.json` of the sweep, or None if it begins.

    Returns:
        The specification with its experiment, and the hashes of the tables that all
        trials read.
    """
    if record:
        check_equal(flatten(record.config), flatten(identify(spec)))
    if spec.grid.job == "evaluate":
        kind, hashes = prepare_evaluations(spec)
    else:
        first = next(iter(spec.trials.values()))
        kind, hashes = registry.find(first.model.name).kind, prepare_trainings(spec)
    option, experiment = config.tracking.experiment, config.tracking.experiment
    if record:
        experiment = record.run.experiment
        if record.run.uri != spec.uri or option not in (None, experiment):
            raise UserError(
                f"the sweep in {spec.folder} is in the experiment {experiment} at "
                f"{record.run.uri}, not in {option or experiment} at {spec.uri}",
                "name",
            )
    new_experiment = f"{kind}/{dataset_name(spec.inputs.tables)}"
    shared = set.intersection(*(set(each.items()) for each in hashes.values()))
    spec = replace(spec, experiment=experiment or new_experiment)
    return spec, dict(sorted(shared))


def identify(spec: SweepSpec) -> dict[str, Any]:
    """Return the settings of a sweep that a repeated command must share.

    Tune runs the trials that it knows from the first command.
    """
    trials = {}
    for name, trial in spec.trials.items():
        model = trial.model
        content = model and registry.find(model.name).config_to_dict(model)
        others = {"folders": trial.folders, "evaluate": trial.evaluate}
        trials[name] = {"model": content, "fit": asdict(trial.fit), **others}
    return {
        "metric": spec.grid.metric,
        "scheduler": asdict(spec.grid.scheduler),
        "test": spec.test,
        "trials": trials,
    }


def prepare_trainings(spec: SweepSpec) -> dict[str, dict[str, str]]:
    """Check the trainings of a grid, without writing anything.

    The catalogue of a model is loaded once for all trials.

    Returns:
        The hashes of each trial's tables, by name of the trial.
    """
    load, hashes = cache(load_catalogue), {}
    for name, trial in spec.trials.items():
        config, hashes[name] = resolve_training(spec.train_config(trial), load)
        record = read_record(config.folder)
        if record:
            check_continues(config, hashes[name], record)
    return hashes


def prepare_evaluations(spec: SweepSpec) -> tuple[str, dict[str, dict[str, str]]]:
    """Return the kind and table hashes of a grid that evaluates checkpoints.

    Nothing is written.

    Returns:
        The kind of the models, and the hashes of each trial's tables by name of the
        trial.
    """
    kind, hashes = "", {}
    metric = spec.grid.metric.removeprefix("test/")
    for trial in spec.trials.values():
        options = dict(trial.evaluate)
        options.pop("batch_size", None)
        inputs = trial.inputs(spec.inputs)
        checkpoint_folder = trial.folders["checkpoint"]
        evaluated = check_evaluation(checkpoint_folder, inputs, options).checkpoint
        available = [*evaluated.metrics, "users_per_s", "peak_memory_mb"]
        check_known([metric], available, f"metric of the grid {spec.grid.name}")
        kind = registry.find(evaluated.name).kind
        hashes[trial.name] = evaluated.hashes
    return kind, hashes


def open_run(
    spec: SweepSpec,
    config: SweepConfig,
    record: RunRecord | None,
    hashes: dict[str, str],
) -> RunRecord:
    """Reopen the MLflow run of the sweep in this folder, or open a new one.

    Args:
        spec: The sweep.
        config: Its configuration.
        record: `run.json` of the sweep, or None if it begins.
        hashes: Hashes of the tables that all trials read.

    Returns:
        The content of `run.json`.
    """
    if record:
        tracking.reopen(record.run)
        return record
    grid = spec.grid
    tags = {
        tracking.KIND_TAG: "sweep",
        "sweep.grid": grid.name,
        "sweep.axes": json.dumps(grid.keys),
        "sweep.metric": grid.metric,
        "command": spec.command,
        "mlflow.source.name": "jobs.sweep",
        tracking.FOLDER_TAG: spec.folder,
    }
    if config.smoke:
        tags[tracking.SMOKE_TAG] = "true"
    params = {
        "sweep": {"grid": grid.name, "source": grid.source, "trials": len(spec.trials)},
        "tables": spec.inputs.tables,
        "ray": asdict(spec.ray),
        "options": asdict(config.options),
    }
    run = tracking.open_run(
        spec.uri,
        spec.experiment,
        config.name,
        config.storage,
        config=params,
        hashes=hashes,
        tags=tags,
    )
    record = RunRecord(status="running", run=run, config=identify(spec))
    write_record(spec.folder, record)
    return record


def run_pending(spec: SweepSpec, concurrency: int) -> None:
    """Run the trials that are not done through Tune.

    Args:
        spec: The sweep.
        concurrency: Largest number of trials that run at once, or 0 for as many as the
            cluster holds.
    """
    trainable = tune.with_resources(
        tune.with_parameters(run_trial, spec=spec), trial_resources(spec)
    )
    filesystem, path = open_uri(join(spec.folder, "tune"))
    if tune.Tuner.can_restore(path, storage_filesystem=filesystem):
        tuner = tune.Tuner.restore(
            path, trainable, restart_errored=True, storage_filesystem=filesystem
        )
        tuner.fit()
        return
    epochs = max(trial.fit.max_epochs for trial in spec.trials.values())
    tune.Tuner(
        trainable,
        param_space={TRIAL: tune.grid_search(list(spec.trials))},
        tune_config=tune.TuneConfig(
            scheduler=make_scheduler(spec.grid.scheduler, epochs),
            # A process runs many trials, unless a trial has workers of its own, which
            # must end with the process.
            reuse_actors=spec.grid.job == "train" and spec.num_workers == 1,
            max_concurrent_trials=limit_concurrency(spec, concurrency) or None,
            trial_name_creator=trial_name,
            trial_dirname_creator=trial_name,
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=spec.folder,
            verbose=0,
            callbacks=[TrialReporter(), JsonLoggerCallback()],
            failure_config=tune.FailureConfig(max_failures=spec.ray.max_failures),
        ),
    ).fit()


DRIVER_TRIAL_BYTES = 1 << 30
"""Memory of a process that drives the workers of a trial: PyTorch, Ray and MLflow."""

MIN_QUEUED_TRIALS = 16
"""Trials of several workers that run or wait at once on a cluster, which may grow,
unless it holds more."""


def trial_resources(spec: SweepSpec) -> tune.PlacementGroupFactory:
    """Return the resources of the process that Tune starts for a trial.

    If a trial has several workers, Ray Train reserves their resources separately.
    """
    if spec.num_workers > 1:
        return tune.PlacementGroupFactory([{"memory": DRIVER_TRIAL_BYTES}])
    needs = worker_resources(spec.ray, wants_gpu(spec.ray))
    if not spec.ray.label_selector:
        return tune.PlacementGroupFactory([needs])
    return tune.PlacementGroupFactory(
        [needs], bundle_label_selector=[spec.ray.label_selector]
    )


def limit_concurrency(spec: SweepSpec, concurrency: int) -> int:
    """Return the largest number of trials that Tune runs at once; 0 is no limit.

    Evaluations run one by one, as their speed is measured. Ray reserves the workers of
    a trial together, so trials beyond the capacity of the cluster wait, and an
    autoscaler starts nodes for them.

    Args:
        spec: The sweep.
        concurrency: The limit that the user set, or 0.
    """
    if spec.grid.job == "evaluate":
        return 1
    if concurrency or spec.num_workers == 1:
        return concurrency
    needs = worker_resources(spec.ray, wants_gpu(spec.ray))
    room = cluster.count_room(needs) // spec.num_workers
    return max(room, MIN_QUEUED_TRIALS if cluster.may_grow() else 1)


def collect_results(spec: SweepSpec, errors: dict[str, str]) -> list[TrialResult]:
    """Return the results of all trials so far, in the grid's order.

    Args:
        spec: The sweep.
        errors: Errors of the trials that failed in this call, by name.
    """
    return [collect_result(trial, spec, errors) for trial in spec.trials.values()]


def collect_result(
    trial: Trial, spec: SweepSpec, errors: dict[str, str]
) -> TrialResult:
    """Return the result of a trial so far.

    Args:
        trial: The trial.
        spec: The sweep.
        errors: Errors of the trials that failed in this call, by name.
    """
    folder = join(spec.folder, trial.name)
    record = read_record(folder)
    error = errors.get(trial.name)
    result = TrialResult(trial.id, trial.name, trial.point, "unfinished", error=error)
    if record:
        result.run_id = record.run.run_id or None
    if error or (record and record.status == "failed"):
        result.status = "failed"
        result.error = error or (record.error if record else None)
        return result
    if not record or record.status != "finished":
        return result
    result.status = "stopped" if record.stopped else "finished"
    if spec.grid.job == "evaluate":
        result.value = record.values.get(spec.grid.metric)
        result.checkpoint = trial.folders["checkpoint"]
    else:
        result.checkpoint, result.epochs = join(folder, BEST), record.epochs
        result.value = checkpoint.read(result.checkpoint).metrics.get(spec.metric)
    return result


def find_best(results: list[TrialResult]) -> TrialResult | None:
    """Return the best trial of the settings with the largest mean over their seeds.

    The mean is over the seeds for which all settings have a value, so that a failed
    trial neither helps nor harms its settings. Settings without any value are left out.
    If no seed is common to all settings, as in a grid with random seeds, each mean is
    over all seeds of its settings. None if no trial has a value.
    """
    measured = [
        (result, result.value) for result in results if result.value is not None
    ]
    values_by_settings: dict[str, dict[Any, float]] = {}
    for result, value in measured:
        settings = tracking.settings_key(result.point)
        seed = result.point.get("fit.seed")
        values_by_settings.setdefault(settings, {})[seed] = value
    if not measured:
        return None
    shared_seeds = set.intersection(*map(set, values_by_settings.values()))

    def sort_key(candidate: tuple[TrialResult, float]) -> tuple[float, float]:
        result, value = candidate
        values = values_by_settings[tracking.settings_key(result.point)]
        return statistics.fmean(values[seed] for seed in shared_seeds or values), value

    best, _ = max(measured, key=sort_key)
    return best


def resolve_best_trial(path: str) -> str:
    """Return the folder of the best trial if `path` is the folder of a sweep.

    Any other path is returned unchanged.
    """
    if not path:
        return path
    folder = absolute(path)
    record = read_record(folder)
    if record is None or "trials" not in record.config:
        return path
    if record.status != "finished":
        raise UserError(
            f"the sweep {path} is {record.status} ({record.error})", "resume"
        )
    return join(folder, record.best)


def finish_sweep(
    spec: SweepSpec, record: RunRecord, results: list[TrialResult]
) -> TrialResult | None:
    """Write the results to MLflow and the sweep's folder, and end the sweep's run.

    Returns:
        The best trial, or None if no trial has a value.
    """
    run, best = record.run, find_best(results)
    counts = Counter(result.status for result in results)
    without = [
        result.name for result in results if result.status in ("failed", "unfinished")
    ]
    complete = "true"
    if without:
        complete = (
            f"{len(without)} of {len(results)} trials have no result, such as "
            f"{without[0]}"
        )
    record.best, record.error = best.name if best else "", complete
    record.status = "failed" if without or not best else "finished"
    write_record(spec.folder, record)
    tracking.log_yaml(run, asdict(spec.grid), "grid.yaml")
    logger = tracking.Logger(run)
    if best and best.run_id and best.value is not None:
        values = load_best_metrics(run, best.run_id)
        logger.update(values | {spec.grid.metric: best.value}, len(results))
        logger.tag(**{tracking.BEST_TAG: best.run_id})
    logger.tag(**{tracking.COMPLETE_TAG: complete})
    client = logger.client
    experiment_id = client.get_run(run.run_id).info.experiment_id
    query = f"tags.`{tracking.PARENT_TAG}` = '{run.run_id}'"
    running = f"{query} and attributes.status = 'RUNNING'"
    tracking.end_dead_runs(client, client.search_runs([experiment_id], running))
    status = "FAILED" if counts["failed"] or best is None else "FINISHED"
    client.set_terminated(run.run_id, "KILLED" if counts["unfinished"] else status)
    return best


def load_best_metrics(run: RunRef, best_id: str) -> dict[str, float]:
    """Return the metrics of the best trial, as the sweep's MLflow run shows them.

    Args:
        run: The sweep's MLflow run.
        best_id: Id of the best trial's MLflow run.
    """
    best_run = RunRef(run.uri, run.experiment, best_id)
    metrics = tracking.connect(run.uri).get_run(best_id).data.metrics
    metrics = {**metrics, **load_test_metrics(best_run)}
    names = [name for name in metrics if name.startswith(("best/", "test/"))]
    return {
        f"best/{tracking.from_mlflow_name(name).removeprefix('best/')}": metrics[name]
        for name in names
    }
