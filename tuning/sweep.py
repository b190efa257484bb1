"""Run the trials of a grid through Ray Tune, as child runs of one MLflow run.

    python -m jobs.sweep --grid tuning/grids/sid_mlp.yaml --name alpha ...

`STORAGE/NAME/` holds a folder per trial (`tuning/trial.py`), named by its values. A
repeated command reads from there which trials are finished, and what the scheduler
needs to know of the others (`tuning/halving.py`). `trials.json` lists the trials and
the best one. Tune's own folder is never read, and is removed when the sweep has ended.
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
from dataclasses import asdict, dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from core.schemas import RunRef

# MLflow has the metrics, so Tune need not write them to files.
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
# Time for a stopped trial to leave its process, which runs the next trial.
os.environ.setdefault("TUNE_FUNCTION_THREAD_TIMEOUT_S", "30")
# Tune's handler of SIGINT would end an interrupted sweep like a finished one.
os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")
# `TrialReporter` prints the progress instead of Tune.
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")

import ray
from pyarrow import fs
from ray import cloudpickle, tune
from ray.exceptions import RayActorError
from ray.tune import Callback

from core.errors import UserError, pluralize
from core.files import absolute, join, open_uri, write_file
from core.options import check_known
from models import registry
from models.loaded_model import load_catalogue
from models.metrics.ranking_metrics import format_metric
from models.training import checkpoint
from models.training.checkpoint import BEST
from pipelines import cluster, tracking
from pipelines.evaluation.checks import check_evaluation
from pipelines.evaluation.record import load_test_metrics
from pipelines.ray_inside import has_autoscaler
from pipelines.training.record import read_record
from pipelines.training.run import (
    check_cluster,
    check_continues,
    dataset_name,
    lock_run,
    wants_gpu,
    worker_resources,
)
from pipelines.training.settings import CheckedTraining, check_training
from tuning.grid import Grid, Trial
from tuning.halving import (
    Halving,
    load_past_reports,
    make_scheduler,
    replay_reports,
    trial_name,
)
from tuning.options import SweepConfig
from tuning.trial import (
    EPOCH,
    ERROR,
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
    """The result of a trial, as `trials.json` lists it."""

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


class TrialReporter(Callback):
    """Callback of Tune that prints progress, ends stopped trials and collects errors.

    Args:
        spec: The sweep.
        num_done: Number of trials that were done before this call.
        say: Called with lines of progress.
    """

    def __init__(
        self, spec: SweepSpec, num_done: int, say: Callable[[str], None]
    ) -> None:
        self.spec, self.num_done, self.say = spec, num_done, say
        self.errors: dict[str, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return a state that Tune can pickle, without the function `say`."""
        return {**self.__dict__, "say": None}

    def on_trial_result(
        self, iteration: int, trials: list, trial: Any, result: dict, **info: Any
    ) -> None:
        """Print a validation of a trial, or collect its error."""
        if ERROR in result:
            self.errors[trial_name(trial)] = result[ERROR]
        elif VALUE in result:
            self.say(
                f"  {trial_name(trial)}  epoch {result[EPOCH]:>3}  "
                f"{self.spec.grid.metric} {format_metric(result[VALUE])}"
            )

    def on_trial_complete(
        self, iteration: int, trials: list, trial: Any, **info: Any
    ) -> None:
        """Finish a trial that Tune has ended, and print its result."""
        planned = self.spec.trials[trial_name(trial)]
        if planned.name not in self.errors:
            # fails while its workers still write checkpoints; the sweep then does it
            with suppress(UserError, OSError):
                stop_trial(planned, self.spec)
        self.print_result(planned)

    def on_trial_recover(
        self, iteration: int, trials: list, trial: Any, **info: Any
    ) -> None:
        """Print why a trial has failed that Tune starts again."""
        self.say(
            f"note: {trial_name(trial)} failed ({describe_failure(trial)}); it "
            f"continues from its last checkpoint, {trial.num_failures} of "
            f"{self.spec.ray.max_failures} times"
        )

    def on_trial_error(
        self, iteration: int, trials: list, trial: Any, **info: Any
    ) -> None:
        """Collect the error of a trial that Tune no longer retries, and print it."""
        planned = self.spec.trials[trial_name(trial)]
        self.errors[planned.name] = describe_failure(trial)
        self.print_result(planned)

    def print_result(self, trial: Trial) -> None:
        """Print the result of a trial that has ended."""
        self.num_done += 1
        result = collect_result(trial, self.spec, self.errors)
        value = ""
        if result.value is not None:
            value = f"  {self.spec.grid.metric} {result.value:.4f}"
        error = f": {result.error}" if result.error else ""
        self.say(
            f"[{self.num_done}/{len(self.spec.trials)}] {result.name} "
            f"{result.status}{value}{error}"
        )


def describe_failure(trial: Any) -> str:
    """Return the last line of the latest error of a trial of Tune.

    The error is read from Tune's local folder: the storage has it only after Tune has
    called the callbacks.
    """
    error = None
    if trial.pickled_error_file:
        error = cloudpickle.loads(Path(trial.pickled_error_file).read_bytes())
    if error is None or isinstance(error, RayActorError):
        return "the process of the trial was lost"
    return str(error).strip().splitlines()[-1].strip()


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
    spec = check_spec(make_spec(grid, trials, config), config)
    pending = [trial for trial in trials if not is_done(trial, spec)]
    num_done = len(trials) - len(pending)
    tracking.connect(spec.uri)
    with lock_run(config.storage, config.name, LOCK_TIMEOUT_S):
        if pending:
            start()
            check_resources(spec)
        run = open_run(spec, config)
        spec = replace(spec, parent=run.run_id)
        if pending:  # `trials.json` names no best trial until the sweep has ended
            write_trials(spec.folder, collect_results(spec, {}))
        reporter = TrialReporter(spec, num_done, say)
        with finish_interrupted(spec, run, reporter):
            say(
                f"{pluralize(len(trials), 'trial')} of {grid.name}, {num_done} done "
                f"before; metric {grid.metric}"
            )
            if pending:
                concurrency = config.options.concurrency
                run_pending(spec, pending, concurrency, reporter)
                for trial in pending:
                    if trial.name not in reporter.errors:
                        stop_trial(trial, spec)
            results = collect_results(spec, reporter.errors)
            best = finish_sweep(spec, run, results)
    return SweepResult(
        name=config.name,
        folder=spec.folder,
        run=run,
        trials=results,
        best=require_best(best, results, config),
        seconds=time.monotonic() - began,
    )


def check_resources(spec: SweepSpec) -> None:
    """Raise UserError if the cluster can never hold a trial or use the MLflow store."""
    tracking.check_nodes(spec.uri, sum(node["Alive"] for node in ray.nodes()))
    check_cluster(spec.ray, spec.num_workers, wants_gpu(spec.ray))


@contextmanager
def finish_interrupted(
    spec: SweepSpec, run: RunRef, reporter: TrialReporter
) -> Iterator[None]:
    """End the trials and the sweep's MLflow run if the block is interrupted or raises.

    On KeyboardInterrupt the results so far are written.
    """
    try:
        yield
    except KeyboardInterrupt:
        ray.shutdown()  # ends the trials
        tracking.end_stopped(run)  # before the requests for results
        reporter.say(
            "trials that were running continue from their last checkpoint: the end of "
            "an epoch, or fit.checkpoint_every_steps"
        )
        finish_sweep(spec, run, collect_results(spec, reporter.errors))
        raise
    except BaseException:
        tracking.Logger(run).end("FAILED")
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


def check_spec(spec: SweepSpec, config: SweepConfig) -> SweepSpec:
    """Check the trials of a sweep, without writing anything.

    Returns:
        The specification with its experiment, its checked trainings and the hashes of
        its tables.
    """
    if spec.grid.job == "train":
        first = next(iter(spec.trials.values()))
        kind = registry.find(first.model.name).kind
    else:
        kind, hashes = prepare_evaluations(spec)
        spec = replace(spec, hashes=hashes)
    experiment = find_experiment(spec, config.tracking.experiment)
    new_experiment = f"{kind}/{dataset_name(spec.inputs.tables)}"
    spec = replace(spec, experiment=experiment or new_experiment)
    if spec.grid.job == "evaluate":
        return spec
    trainings = prepare_trainings(spec)
    hashes = {name: training.hashes for name, training in trainings.items()}
    return replace(spec, trainings=trainings, hashes=hashes)


def prepare_trainings(spec: SweepSpec) -> dict[str, CheckedTraining]:
    """Return the checked trainings of a grid, without writing anything.

    The catalogue of a model is loaded once for all trials.

    Returns:
        The trainings by name of the trial.
    """
    load = cache(load_catalogue)
    trainings = {}
    for name, trial in spec.trials.items():
        training = check_training(spec.train_config(trial), load)
        record = read_record(training.config.folder)
        if record and record.status != "opening":
            check_continues(training, record)
        trainings[name] = training
    return trainings


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
        record = read_record(join(spec.folder, trial.name))
        if record and record.evaluate != trial.evaluate:
            raise UserError(
                f"{trial.name} was measured with other options in {spec.folder}", "name"
            )
        kind = registry.find(evaluated.name).kind
        hashes[trial.name] = evaluated.hashes
    return kind, hashes


def find_experiment(spec: SweepSpec, option: str | None) -> str | None:
    """Return the MLflow experiment of the sweep's trials.

    Args:
        spec: The sweep.
        option: Value of `--experiment`, which is returned if no trial has a run yet.
    """
    records = [read_record(join(spec.folder, name)) for name in spec.trials]
    for record in records:
        if not record or record.status == "opening":
            continue
        run = record.run
        if run.uri != spec.uri or option not in (None, run.experiment):
            raise UserError(
                f"the trials in {spec.folder} are in the experiment {run.experiment} "
                f"at {run.uri}, not in {option or run.experiment} at {spec.uri}"
            )
        return run.experiment
    return option


def open_run(spec: SweepSpec, config: SweepConfig) -> RunRef:
    """Reopen the MLflow run of the sweep in this folder, or open a new one."""
    key = sha256(spec.folder.encode()).hexdigest()
    run = reopen_run(spec, key)
    if run:
        return run
    grid = spec.grid
    tags = {
        tracking.KIND_TAG: "sweep",
        "sweep.grid": grid.name,
        "sweep.axes": json.dumps(grid.keys),
        "sweep.metric": grid.metric,
        "command": spec.command,
        "mlflow.source.name": "jobs.sweep",
        tracking.KEY_TAG: key,
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
    shared = set.intersection(*(set(hashes.items()) for hashes in spec.hashes.values()))
    return tracking.open_run(
        spec.uri,
        spec.experiment,
        config.name,
        config.storage,
        config=params,
        hashes=dict(sorted(shared)),
        tags=tags,
    )


def reopen_run(spec: SweepSpec, key: str) -> RunRef | None:
    """Reopen the MLflow run of a sweep that an earlier call began.

    Args:
        spec: The sweep.
        key: Value of the run's tag `tracking.KEY_TAG`.

    Returns:
        The run, or None if the sweep is new or its folder was removed.
    """
    client = tracking.connect(spec.uri)
    has_trials = any(read_record(join(spec.folder, name)) for name in spec.trials)
    experiment = client.get_experiment_by_name(spec.experiment)
    if not experiment:
        return None
    query = f"tags.`{tracking.KEY_TAG}` = '{key}'"
    for run in client.search_runs([experiment.experiment_id], query):
        if not run.data.params:  # the sweep was killed while the run was opened
            client.delete_run(run.info.run_id)
            continue
        # a finished run without trials belongs to a folder that was removed since
        if has_trials or run.info.status != "FINISHED":
            reference = RunRef(spec.uri, spec.experiment, run.info.run_id)
            tracking.reopen(reference)
            return reference
    return None


def run_pending(
    spec: SweepSpec,
    pending: list[Trial],
    concurrency: int,
    reporter: TrialReporter,
) -> None:
    """Run the trials that are not done through Tune.

    Args:
        spec: The sweep.
        pending: Trials that are not done.
        concurrency: Largest number of trials that run at once, or 0 for as many as the
            cluster holds.
        reporter: Callback that prints and collects the results.
    """
    epochs = max(trial.fit.max_epochs for trial in spec.trials.values())
    scheduler = make_scheduler(spec.grid.scheduler, epochs)
    if isinstance(scheduler, Halving):
        pending = stop_losing_trials(spec, pending, scheduler)
    if not pending:
        return
    trainable = tune.with_parameters(run_trial, spec=spec)
    tune.Tuner(
        tune.with_resources(trainable, trial_resources(spec)),
        param_space={TRIAL: tune.grid_search([trial.name for trial in pending])},
        tune_config=tune.TuneConfig(
            scheduler=scheduler,
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
            callbacks=[reporter],
            failure_config=tune.FailureConfig(max_failures=spec.ray.max_failures),
        ),
    ).fit()
    filesystem, path = open_uri(join(spec.folder, "tune"))
    if filesystem.get_file_info(path).type == fs.FileType.Directory:
        filesystem.delete_dir(path)


DRIVER_TRIAL_BYTES = 1 << 30
"""Memory of a process that drives the workers of a trial: PyTorch, Ray and MLflow."""

MIN_QUEUED_TRIALS = 16
"""Trials of several workers that run or wait at once on a cluster with an autoscaler,
unless the cluster holds more."""


def stop_losing_trials(
    spec: SweepSpec, pending: list[Trial], scheduler: Halving
) -> list[Trial]:
    """Replay earlier reports to the scheduler, and stop the trials that it rejects.

    An earlier call of the sweep may have been killed before it stopped them.

    Args:
        spec: The sweep.
        pending: Trials that have not ended.
        scheduler: Scheduler of this call.

    Returns:
        The pending trials that continue.
    """
    stopped = replay_reports(scheduler, load_past_reports(spec))
    for trial in pending:
        if trial.name in stopped:
            stop_trial(trial, spec)
    return [trial for trial in pending if trial.name not in stopped]


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
    return max(room, MIN_QUEUED_TRIALS if has_autoscaler() else 1)


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
    if error:
        result.status = "failed"
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


TRIALS = "trials.json"
"""Name of a file in the sweep's folder, and of an artifact of its MLflow run, with the
keys `complete`, `best` (name of the best trial) and `trials`."""


def describe_trials(results: list[TrialResult]) -> dict[str, Any]:
    """Return the content of `trials.json`."""
    best = find_best(results)
    complete = all(result.status in ("finished", "stopped") for result in results)
    return {
        "complete": complete,
        "best": best.name if best else None,
        "trials": [asdict(result) for result in results],
    }


def write_trials(folder: str, results: list[TrialResult]) -> None:
    """Write `trials.json` into the sweep's folder."""
    content = json.dumps(describe_trials(results), indent=2)
    write_file(join(folder, TRIALS), content.encode())


def resolve_best_trial(path: str) -> str:
    """Return the folder of the best trial if `path` is the folder of a sweep.

    Any other path is returned unchanged.
    """
    if not path:
        return path
    sweep_folder = absolute(path)
    filesystem, trials_path = open_uri(join(sweep_folder, TRIALS))
    if filesystem.get_file_info(trials_path).type == fs.FileType.NotFound:
        return path
    with filesystem.open_input_file(trials_path) as file:
        content = json.loads(file.read())
    without_result = [
        trial["name"]
        for trial in content["trials"]
        if trial["status"] in ("failed", "unfinished")
    ]
    if without_result:
        raise UserError(
            f"{len(without_result)} of {len(content['trials'])} trials of the sweep "
            f"{path} are not finished, such as {without_result[0]}"
        )
    return join(sweep_folder, content["best"])


def finish_sweep(
    spec: SweepSpec, run: RunRef, results: list[TrialResult]
) -> TrialResult | None:
    """Write the results to MLflow and the sweep's folder, and end the sweep's run.

    Returns:
        The best trial, or None if no trial has a value.
    """
    write_trials(spec.folder, results)
    tracking.log_yaml(run, asdict(spec.grid), "grid.yaml")
    tracking.log_json(run, describe_trials(results), TRIALS)
    logger = tracking.Logger(run)
    best = find_best(results)
    if best and best.run_id and best.value is not None:
        values = load_best_metrics(run, best.run_id)
        logger.update(values | {spec.grid.metric: best.value}, len(results))
        logger.tag(**{tracking.BEST_TAG: best.run_id})
    counts = Counter(result.status for result in results)
    num_missing = counts["failed"] + counts["unfinished"]
    incomplete = ""
    if num_missing:
        incomplete = f"{num_missing} of {len(results)} trials have no result"
    logger.tag(**{tracking.INCOMPLETE_TAG: incomplete})
    # zeros too, as they replace the counts of an earlier call
    statuses = ("finished", "stopped", "failed", "unfinished")
    logger.update(
        {f"trials/{status}": counts[status] for status in statuses}, len(results)
    )
    # MLflow finds the runs by their parent, even of trials killed before they wrote
    # `run.json`
    failed_ids = {result.run_id for result in results if result.status == "failed"}
    tracking.end_trials(run, failed_ids)
    logger.end(run_status(counts, best))
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


def run_status(counts: Counter[str], best: TrialResult | None) -> str:
    """Return MLflow's status of a sweep that ended.

    Args:
        counts: Number of trials by status.
        best: The best trial, or None if no trial has a value.
    """
    if counts["unfinished"]:
        return "KILLED"
    if counts["failed"] or best is None:
        return "FAILED"
    return "FINISHED"
