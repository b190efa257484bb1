"""Run the trials of a grid through Ray Tune, as child runs of one MLflow run. `jobs.sweep` is the command.

`STORAGE/NAME/` holds a folder per trial (`tuning/trial.py`), named by its values;
finished trials and the reports that the scheduler needs (`tuning/halving.py`) are read
from there. `trials.json` beside them lists the trials of the last call and the best
one. Tune's own folder is never read, and is removed when the sweep has ended.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from hashlib import sha256
from typing import Any

os.environ.setdefault(
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1"
)  # MLflow has the metrics; no files beside it
os.environ.setdefault(
    "TUNE_FUNCTION_THREAD_TIMEOUT_S", "30"
)  # a stopped trial leaves its process to the next one
os.environ.setdefault(
    "TUNE_DISABLE_SIGINT_HANDLER", "1"
)  # it would end a sweep as if it were done
os.environ.setdefault(
    "RAY_AIR_NEW_OUTPUT", "0"
)  # the reporter below says what there is to say

import ray
from pyarrow import fs
from ray import tune
from ray.tune import Callback
from ray.tune.search import BasicVariantGenerator

from models import registry
from models.config import did_you_mean, pluralize
from models.loaded_model import load_catalogue
from models.metrics.ranking_metrics import format_metric
from models.storage import checkpoint
from models.storage.checkpoint import BEST
from models.storage.tables import UserError, join, open_uri
from models.storage.uri import absolute, write_file
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
from tuning.halving import Halving, make_scheduler, past_reports, replay, trial_name
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

logging.getLogger("ray.tune.analysis.experiment_analysis").setLevel(
    logging.ERROR
)  # misses the files left out above


@dataclass
class TrialResult:
    """The result of a trial, as `trials.json` lists it."""

    trial: str
    """Stable id."""
    name: str
    """Folder and MLflow name."""
    point: dict[str, Any]
    """Values of the axes."""
    status: str
    """finished, stopped (early, by the scheduler), failed, or unfinished."""
    value: float | None = None
    """The sweep's metric: of the best epoch, or of the evaluation."""
    epochs: int | None = None
    """Epochs done."""
    run_id: str | None = None
    """MLflow run."""
    checkpoint: str | None = None
    """Folder of the best weights."""
    error: str | None = None
    """Why it failed."""


@dataclass
class SweepResult:
    """The result of a sweep."""

    name: str
    """Name of the sweep."""
    folder: str
    """The sweep's folder."""
    run: tracking.RunRef
    """The sweep's MLflow run."""
    trials: list[TrialResult]
    """All trials, in the grid's order."""
    best: TrialResult
    """The best trial with a value; if trials failed, the best of an incomplete grid."""
    seconds: float
    """Time of this call."""
    results: tune.ResultGrid | None = None
    """Tune's results of the trials that ran in this call; None if the sweep was
    finished before."""

    @property
    def failed(self) -> list[TrialResult]:
        """Trials that failed, so that the grid is incomplete."""
        return [trial for trial in self.trials if trial.status == "failed"]


class TrialReporter(Callback):
    """Prints the progress of trials, ends stopped trials, and collects the errors of failed trials."""

    def __init__(self, spec: SweepSpec, done: int, say: Callable[[str], None]) -> None:
        self.spec, self.done, self.say = spec, done, say
        self.errors: dict[str, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return a state without the function `say`, as Tune saves its callbacks."""
        return {**self.__dict__, "say": None}

    def on_trial_result(
        self, iteration: int, trials: list, trial: Any, result: dict, **info: Any
    ) -> None:
        """Print a validation of a trial, or collect its error."""
        if ERROR in result:
            self.errors[trial_name(trial)] = result[ERROR]
        elif VALUE in result:
            self.say(
                f"  {trial_name(trial)}  epoch {result[EPOCH]:>3}  {self.spec.grid.metric} "
                f"{format_metric(result[VALUE])}"
            )

    def on_trial_complete(
        self, iteration: int, trials: list, trial: Any, **info: Any
    ) -> None:
        """End a trial that Tune has ended."""
        one = self.spec.trials[trial_name(trial)]
        if one.name not in self.errors:
            # its workers may still replace checkpoints; if so, it ends with the sweep
            with suppress(UserError, OSError):
                stop_trial(one, self.spec)
        self.print_result(one)

    def on_trial_error(
        self, iteration: int, trials: list, trial: Any, **info: Any
    ) -> None:
        """Collect the error of a trial that Tune gave up."""
        one = self.spec.trials[trial_name(trial)]
        lines = str(trial.get_pickled_error() or "").strip().splitlines()
        self.errors[one.name] = (
            lines[-1].strip() if lines else "the process of the trial was lost"
        )
        self.print_result(one)

    def print_result(self, trial: Trial) -> None:
        """Print the result of a trial that ended."""
        self.done += 1
        result = collect_result(trial, self.spec, self.errors)
        value = ""
        if result.value is not None:
            value = f"  {self.spec.grid.metric} {result.value:.4f}"
        why = f": {result.error}" if result.error else ""
        self.say(
            f"[{self.done}/{len(self.spec.trials)}] {result.name} {result.status}{value}{why}"
        )


def sweep(
    grid: Grid,
    trials: list[Trial],
    config: SweepConfig,
    *,
    say: Callable[[str], None] = print,
    start: Callable[[], None] = lambda: None,
) -> SweepResult:
    """Run the trials of a grid that are not finished.

    Failed trials are in the result (`SweepResult.failed`), which does not raise for
    them.

    Args:
        grid: The grid.
        trials: Its trials.
        config: Tables, storage and resources of the trials.
        say: Called with lines of progress.
        start: Start Ray if trials are to run; by default Ray runs already.

    Raises:
        UserError: before anything is started, if tables, models or settings do not fit,
            the metric is not measured, or
            MLflow does not answer; at the end, if no trial has a value.
    """
    began = time.monotonic()
    spec = check_spec(make_spec(grid, trials, config), config)
    pending = [trial for trial in trials if not is_done(trial, spec)]
    tracking.connect(spec.uri)
    with lock_run(config.storage, config.name, LOCK_TIMEOUT_S):
        if pending:
            start()
            tracking.check_nodes(spec.uri, sum(node["Alive"] for node in ray.nodes()))
            workers = 1 if grid.kind == "evaluate" else config.ray.num_workers
            check_cluster(config.ray, workers, wants_gpu(config.ray))
        run = open_run(spec, config)
        spec = replace(spec, parent=run.run_id)
        if pending:  # the folder has no best trial until the sweep has ended
            results = [collect_result(trial, spec, {}) for trial in trials]
            write_trials(spec.folder, results)
        num_done = len(trials) - len(pending)
        reporter = TrialReporter(spec, num_done, say)
        tune_results = None
        try:
            say(
                f"{pluralize(len(trials), 'trial')} of {grid.name}, {num_done} done before; metric {grid.metric}"
            )
            if pending:
                tune_results = run_pending(
                    spec, pending, config.options.concurrency, reporter
                )
                for trial in pending:
                    if trial.name not in reporter.errors:
                        stop_trial(trial, spec)
            results = [collect_result(one, spec, reporter.errors) for one in trials]
            best = close(spec, run, results)
        except KeyboardInterrupt:
            ray.shutdown()  # ends the trials
            tracking.end_stopped(run)  # before the requests for results
            say(
                "trials that were running continue from their last checkpoint: the end of an epoch, or "
                "fit.checkpoint_every_steps"
            )
            results = [collect_result(one, spec, reporter.errors) for one in trials]
            close(spec, run, results)
            raise
        except BaseException:
            tracking.Logger(run).end("FAILED")
            raise
    best = require_best(best, results, config)
    seconds = time.monotonic() - began
    return SweepResult(
        config.name, spec.folder, run, results, best, seconds, tune_results
    )


def require_best(
    best: TrialResult | None, results: list[TrialResult], config: SweepConfig
) -> TrialResult:
    """Return the best trial, or raise UserError if trials are left or none has a value."""
    num_unfinished = sum(result.status == "unfinished" for result in results)
    if num_unfinished:
        raise UserError(
            f"the sweep '{config.name}' stopped with {num_unfinished} of {len(results)} trials unfinished; "
            f"run the same command again to continue"
        )
    if best is None:
        errors = [
            f" ({result.name}: {result.error})" for result in results if result.error
        ]
        raise UserError(
            f"no trial of the sweep {config.folder} has a value; fix what failed and run the same command again, or with "
            f"other settings another --name{''.join(errors[:1])}"
        )
    return best


def make_spec(grid: Grid, trials: list[Trial], config: SweepConfig) -> SweepSpec:
    """Return the specification of a sweep, before it is checked."""
    threads = config.ray.threads
    if not threads and grid.kind == "train":
        threads = max(1, int(config.ray.cpus_per_worker))
    return SweepSpec(
        grid=grid,
        trials={trial.name: trial for trial in trials},
        inputs=config.inputs,
        folder=config.folder,
        uri=tracking.resolve_uri(config.tracking.tracking_uri, config.storage),
        ray=replace(config.ray, threads=threads),
        test=config.options.test and grid.kind == "train",
        command=config.command,
    )


def check_spec(spec: SweepSpec, config: SweepConfig) -> SweepSpec:
    """Check the trials of a sweep, and return it with its experiment and checked trainings.

    Nothing is written.

    Raises:
        UserError: if a trial cannot run with its settings and tables.
    """
    if spec.grid.kind == "train":
        first = next(iter(spec.trials.values()))
        family = registry.find_by_config(first.model).family
    else:
        family, hashes = check_evaluations(spec)
        spec = replace(spec, hashes=hashes)
    experiment = find_experiment(spec, config.tracking.experiment)
    new_experiment = f"{family}/{dataset_name(spec.inputs.tables)}"
    spec = replace(spec, experiment=experiment or new_experiment)
    if spec.grid.kind == "evaluate":
        return spec
    trainings = check_trainings(spec)
    hashes = {name: training.hashes for name, training in trainings.items()}
    return replace(spec, trainings=trainings, hashes=hashes)


def check_trainings(spec: SweepSpec) -> dict[str, CheckedTraining]:
    """Check the trials of a grid that trains, and return their trainings by name.

    Nothing is written. The catalogue of a model is loaded once for all trials.

    Raises:
        UserError: if a trial could not train.
    """
    load = cache(load_catalogue)
    trainings = {}
    for name, trial in spec.trials.items():
        remedy = f"choose another --name, or remove {spec.folder}/{name} to begin this trial anew"
        training = check_training(spec.train_config(trial), remedy, load)
        record = read_record(training.config.folder)
        if record and record["status"] != "opening":
            check_continues(training, record)
        trainings[name] = training
    return trainings


def check_evaluations(spec: SweepSpec) -> tuple[str, dict[str, dict[str, str]]]:
    """Check the trials of a grid that evaluates checkpoints. Nothing is written.

    Returns:
        The family of the models, and by trial the hashes of the tables that it reads.

    Raises:
        UserError: if a trial could not be measured.
    """
    family, hashes = "", {}
    metric = spec.grid.metric.removeprefix("test/")
    for trial in spec.trials.values():
        options = dict(trial.evaluate)
        options.pop("batch_size", None)
        inputs = trial.inputs(spec.inputs)
        checkpoint_ = trial.folders["checkpoint"]
        about = check_evaluation(checkpoint_, inputs, options).about
        known = [*about.metrics, "users_per_s", "peak_memory_mb"]
        if metric not in known:
            raise UserError(
                f"the metric of the grid {spec.grid.name} is {spec.grid.metric}, which is not measured; "
                f"{did_you_mean(metric, known)}; known are {', '.join(known)}"
            )
        record = read_record(join(spec.folder, trial.name))
        if record and record.get("evaluate") != trial.evaluate:
            raise UserError(
                f"{trial.name} was measured with other options in {spec.folder}; choose another --name"
            )
        family = registry.find(about.name).family
        hashes[trial.name] = about.hashes
    return family, hashes


def find_experiment(spec: SweepSpec, given: str | None) -> str | None:
    """Return the experiment of the sweep's trials, or the given one for a new sweep.

    Raises:
        UserError: if the trials are in another experiment, or at another tracking URI.
    """
    records = [read_record(join(spec.folder, name)) for name in spec.trials]
    for record in records:
        if not record or "tracking" not in record:
            continue
        run = tracking.RunRef(**record["tracking"])
        if run.uri != spec.uri or given not in (None, run.experiment):
            raise UserError(
                f"the trials in {spec.folder} are in the experiment {run.experiment} at {run.uri}, not in "
                f"{given or run.experiment} at {spec.uri}; give --tracking_uri and --experiment as before, or choose "
                f"another --name"
            )
        return run.experiment
    return given


def open_run(spec: SweepSpec, config: SweepConfig) -> tracking.RunRef:
    """Return the MLflow run of the sweep in this folder, or open a new one."""
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
    shared = set.intersection(*(set(read.items()) for read in spec.hashes.values()))
    return tracking.open_run(
        spec.uri,
        spec.experiment,
        config.name,
        config.storage,
        config=params,
        hashes=dict(sorted(shared)),
        tags=tags,
    )


def reopen_run(spec: SweepSpec, key: str) -> tracking.RunRef | None:
    """Return the MLflow run of a sweep that was begun before, or None.

    Args:
        spec: The sweep.
        key: Value of the run's tag `tracking.KEY_TAG`.
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
        elif has_trials or run.info.status != "FINISHED":
            reference = tracking.RunRef(spec.uri, spec.experiment, run.info.run_id)
            tracking.reopen(reference)
            return reference
        # else the folder of a sweep that ended was removed
    return None


def run_pending(
    spec: SweepSpec,
    pending: list[Trial],
    concurrency: int,
    reporter: TrialReporter,
) -> tune.ResultGrid | None:
    """Run the trials that are not done through Tune."""
    epochs = max(trial.fit.max_epochs for trial in spec.trials.values())
    scheduler = make_scheduler(spec.grid.scheduler, epochs)
    if isinstance(scheduler, Halving):
        stopped = replay(scheduler, past_reports(spec))
        for trial in pending:
            if trial.name in stopped:  # it was killed before it was told
                stop_trial(trial, spec)
        pending = [trial for trial in pending if trial.name not in stopped]
    if not pending:
        return None
    each = worker_resources(spec.ray, wants_gpu(spec.ray))
    needs = tune.PlacementGroupFactory([each])
    if spec.ray.label_selector:
        selectors = [spec.ray.label_selector]
        needs = tune.PlacementGroupFactory([each], bundle_label_selector=selectors)
    if spec.grid.kind == "evaluate":
        concurrency = 1  # it measures how fast they are
    workers = spec.workers
    if workers > 1:  # the trial's own process waits for its workers
        needs = tune.PlacementGroupFactory([{"memory": WAITING_TRIAL_BYTES}])
        concurrency = concurrency or waiting_trials(each, workers)
    points = [
        {TRIAL: t.name} | {key: t.point.get(key) for key in spec.grid.keys}
        for t in pending
    ]
    results = tune.Tuner(
        tune.with_resources(tune.with_parameters(run_trial, spec=spec), needs),
        param_space={
            key: tune.choice([point[key] for point in points]) for key in points[0]
        },
        tune_config=tune.TuneConfig(
            scheduler=scheduler,
            # one process for many trials, but not where a trial waits for workers,
            # which end with its process
            reuse_actors=spec.grid.kind == "train" and workers == 1,
            search_alg=BasicVariantGenerator(points, max_concurrent=concurrency),
            num_samples=len(points),
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
    return results


WAITING_TRIAL_BYTES = 1 << 30
"""Memory of a trial's own process while its workers train: PyTorch, Ray and MLflow."""

WAITING_TRIALS = 16
"""Trials of several workers that run or wait at once on a cluster with an autoscaler,
by default."""


def waiting_trials(each: dict[str, float], workers: int) -> int:
    """Return how many trials of several workers to start at once.

    Ray reserves the workers of a trial together, so trials beyond the room of the
    cluster wait, and an autoscaler starts nodes for them.
    """
    room = cluster.count_room(cluster.alive_nodes(), each) // workers
    return max(room, WAITING_TRIALS if has_autoscaler() else 1)


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
    if record and "tracking" in record:
        result.run_id = record["tracking"]["run_id"]
    if error:
        result.status = "failed"
        return result
    if not record or record["status"] != "finished":
        return result
    result.status = "stopped" if record.get("stopped") else "finished"
    if spec.grid.kind == "evaluate":
        result.value = record["values"].get(spec.grid.metric)
        result.checkpoint = trial.folders["checkpoint"]
    else:
        result.checkpoint, result.epochs = join(folder, BEST), record["epochs"]
        result.value = checkpoint.read(result.checkpoint).metrics.get(spec.metric)
    return result


def find_best(results: list[TrialResult]) -> TrialResult | None:
    """Return the best trial of the settings with the largest mean, or None if no trial has a value.

    Settings are compared over the seeds and folds that all of them have a value for, so
    that a failed seed neither helps nor harms its settings. Settings without any value
    are left out. Where no seed is common to the others, as in a grid that draws seeds
    at random, each setting's mean is over its own seeds. Of the folds of the best
    settings the last one's trial is the best, as it has the newest training requests.
    """
    with_value = [result for result in results if result.value is not None]
    values: dict[str, dict[Any, float]] = {}
    for result in with_value:
        seeds = values.setdefault(tracking.settings_of(result.point), {})
        repeat = (result.point.get("fit.seed"), result.point.get("fit.fold"))
        seeds[repeat] = result.value or 0.0
    if not values:
        return None
    shared = set.intersection(*(set(seeds) for seeds in values.values()))

    def rank(result: TrialResult) -> tuple[float, int, float]:
        seeds = values[tracking.settings_of(result.point)]
        mean = statistics.fmean(seeds[seed] for seed in shared or seeds)
        return mean, result.point.get("fit.fold") or 0, result.value or 0.0

    return max(with_value, key=rank)


TRIALS = "trials.json"
"""File of a sweep's folder, and artifact of its MLflow run: `complete`, the name of the
`best` trial, and `trials`."""


def describe_trials(results: list[TrialResult]) -> dict[str, Any]:
    """Return the content of `trials.json`."""
    best = find_best(results)
    return {
        "complete": all(o.status in ("finished", "stopped") for o in results),
        "best": best.name if best else None,
        "trials": [asdict(result) for result in results],
    }


def write_trials(folder: str, results: list[TrialResult]) -> None:
    """Write `trials.json` into the sweep's folder."""
    content = json.dumps(describe_trials(results), indent=2)
    write_file(join(folder, TRIALS), content.encode())


def best_trial(folder: str) -> str:
    """Return the folder of the best trial for the folder of a sweep, and any other path as it is.

    Raises:
        UserError: if trials of the sweep failed or are not finished.
    """
    if not folder:
        return folder
    place = absolute(folder)
    filesystem, path = open_uri(join(place, TRIALS))
    if filesystem.get_file_info(path).type == fs.FileType.NotFound:
        return folder
    with filesystem.open_input_file(path) as file:
        swept = json.loads(file.read())
    left = [
        trial["name"]
        for trial in swept["trials"]
        if trial["status"] in ("failed", "unfinished")
    ]
    if left:
        raise UserError(
            f"{len(left)} of {len(swept['trials'])} trials of the sweep {folder} are not finished, such as {left[0]}; "
            f"run the sweep's line again, or give the folder of a trial"
        )
    return join(place, swept["best"])


def close(
    spec: SweepSpec, run: tracking.RunRef, results: list[TrialResult]
) -> TrialResult | None:
    """Write the results to MLflow and the sweep's folder, and end the sweep's run.

    Returns:
        The best trial, or None if no trial has a value.
    """
    write_trials(spec.folder, results)
    tracking.log_yaml(run, asdict(spec.grid), "grid.yaml")
    tracking.log_json(run, describe_trials(results), TRIALS)
    logger, best = tracking.Logger(run), find_best(results)
    counts = Counter(result.status for result in results)
    if best and best.run_id and best.value is not None:
        best_run = tracking.RunRef(run.uri, run.experiment, best.run_id)
        logged = tracking.connect(run.uri).get_run(best.run_id).data.metrics
        logged = {**logged, **load_test_metrics(best_run)}
        names = [name for name in logged if name.startswith(("best/", "test/"))]
        values = {
            f"best/{tracking.shown_name(name).removeprefix('best/')}": logged[name]
            for name in names
        }
        logger.update(values | {spec.grid.metric: best.value}, len(results))
        logger.tag(**{tracking.BEST_TAG: best.run_id})
    incomplete = counts["failed"] + counts["unfinished"]
    told = f"{incomplete} of {len(results)} trials have no result" if incomplete else ""
    logger.tag(**{tracking.INCOMPLETE_TAG: told})
    # every status, as one of an earlier call may be of no trial any more
    statuses = ("finished", "stopped", "failed", "unfinished")
    logger.update(
        {f"trials/{status}": counts[status] for status in statuses}, len(results)
    )
    # found by their parent: a trial that was killed may not have noted its run yet
    tracking.end_trials(run, {o.run_id for o in results if o.status == "failed"})
    failed = counts["failed"] or best is None
    status = "FAILED" if failed else "FINISHED"
    logger.end("KILLED" if counts["unfinished"] else status)
    return best
