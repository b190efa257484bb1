"""A sweep: the trials of a grid through Ray Tune, as child runs of one MLflow run. `jobs.sweep` is its command.

`STORAGE/NAME/` holds a folder per trial (`tuning/trial.py`), named by its values; finished trials and the reports that
the scheduler needs (`tuning/halving.py`) are read from there. `trials.json` beside them lists the trials of the last
call and the best one. Tune's own folder is never read, and removed when the sweep has ended.
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
)  # the ledger below says what there is to say

import ray
from pyarrow import fs
from ray import tune
from ray.tune import Callback
from ray.tune.search import BasicVariantGenerator

from models import registry
from models.config import hint, pluralize
from models.metrics.ranking_metrics import format_metric
from models.storage import checkpoint
from models.storage.checkpoint import BEST
from models.storage.inputs import Inputs
from models.storage.tables import UserError, join, open_uri
from models.storage.uri import absolute, write_file
from models.training.fit import FitConfig
from pipelines import cluster, tracking
from pipelines.evaluation.checks import check_evaluation
from pipelines.evaluation.record import load_test_metrics
from pipelines.ray_inside import has_autoscaler
from pipelines.training.record import read_record
from pipelines.training.run import (
    check_cluster,
    dataset_name,
    held,
    resources,
    wants_gpu,
)
from pipelines.training.settings import RayOptions, check_name
from pipelines.training.settings import check as check_training
from tuning.grid import Grid, Trial
from tuning.halving import Halving, make_scheduler, name_of, past_reports, replay
from tuning.options import Options
from tuning.trial import (
    EPOCH,
    ERROR,
    PATIENCE,
    TRIAL,
    VALUE,
    Plan,
    is_done,
    run_trial,
    stop,
)

logging.getLogger("ray.tune.analysis.experiment_analysis").setLevel(
    logging.ERROR
)  # misses the files left out above


@dataclass
class Outcome:
    """A trial, as `trials.json` lists it."""

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
class Swept:
    """What a sweep made."""

    name: str
    """Name of the sweep."""
    folder: str
    """Its folder."""
    run: tracking.RunRef
    """Its MLflow run."""
    outcomes: list[Outcome]
    """All trials, in the grid's order."""
    best: Outcome
    """The best of those that have a value; of an incomplete grid where trials failed."""
    seconds: float
    """Time of this call."""
    results: tune.ResultGrid | None = None
    """Tune's of the trials that ran in this call; None where the sweep was finished before."""

    @property
    def failed(self) -> list[Outcome]:
        """Trials that failed, so that the grid is incomplete."""
        return [outcome for outcome in self.outcomes if outcome.status == "failed"]


class Ledger(Callback):
    """Follows the trials: says how they come on, ends those that are stopped, notes the errors of those that fail."""

    def __init__(self, plan: Plan, done: int, say: Callable[[str], None]) -> None:
        self.plan, self.done, self.say = plan, done, say
        self.errors: dict[str, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Tune writes its callbacks down, to read them where it resumes, which is not done here."""
        return {**self.__dict__, "say": None}

    def on_trial_result(
        self, iteration: int, trials: list, trial: Any, result: dict, **info: Any
    ) -> None:
        if ERROR in result:
            self.errors[name_of(trial)] = result[ERROR]
        elif VALUE in result:
            self.say(
                f"  {name_of(trial)}  epoch {result[EPOCH]:>3}  {self.plan.grid.metric} "
                f"{format_metric(result[VALUE])}"
            )

    def on_trial_complete(
        self, iteration: int, trials: list, trial: Any, **info: Any
    ) -> None:
        one = self.plan.trials[name_of(trial)]
        if one.name not in self.errors:
            with suppress(
                UserError, OSError
            ):  # its workers go on, and replace their checkpoints: else at the end
                stop(one, self.plan)
        self.count(one)

    def on_trial_error(
        self, iteration: int, trials: list, trial: Any, **info: Any
    ) -> None:
        one = self.plan.trials[name_of(trial)]
        lines = str(trial.get_pickled_error() or "").strip().splitlines()
        self.errors[one.name] = (
            lines[-1].strip() if lines else "the process of the trial was lost"
        )
        self.count(one)

    def count(self, trial: Trial) -> None:
        """Says what has become of a trial that ended."""
        self.done += 1
        found = outcome(trial, self.plan, self.errors)
        value = (
            f"  {self.plan.grid.metric} {found.value:.4f}"
            if found.value is not None
            else ""
        )
        why = f": {found.error}" if found.error else ""
        self.say(
            f"[{self.done}/{len(self.plan.trials)}] {found.name} {found.status}{value}{why}"
        )


def sweep(
    grid: Grid,
    trials: list[Trial],
    *,
    inputs: Inputs,
    storage: str,
    name: str,
    ray_options: RayOptions,
    options: Options,
    tracking_uri: str | None = None,
    experiment: str | None = None,
    command: str = "",
    smoke: bool = False,
    say: Callable[[str], None] = print,
    start: Callable[[], None] = lambda: None,
) -> Swept:
    """Run the trials of the grid that are not finished.

    Ray must be started, or `start` starts it where trials are to run. Comparisons of the experiment leave the trials of
    a `smoke` sweep out. Failed trials are in the result (`Swept.failed`), which does not raise for them.

    Raises:
        UserError: before anything is started, if tables, models or settings do not fit, the metric is not measured, or
            MLflow does not answer; at the end, if no trial has a value.
    """
    began = time.monotonic()
    check_name(name)
    storage = absolute(storage)
    workers, test = (
        (1, False)
        if grid.kind == "evaluate"
        else (ray_options.num_workers, options.test)
    )
    threads = ray_options.threads or (
        0 if grid.kind == "evaluate" else max(1, int(ray_options.cpus_per_worker))
    )
    plan = Plan(
        grid,
        {t.name: t for t in trials},
        inputs,
        join(storage, name),
        tracking.resolve_uri(tracking_uri, storage),
        replace(ray_options, threads=threads),
        test,
        command,
    )
    family, hashes = check(plan)
    plan = replace(
        plan,
        experiment=experiment_of(plan, experiment)
        or f"{family}/{dataset_name(inputs.tables)}",
        hashes=hashes,
    )
    pending = [trial for trial in trials if not is_done(trial, plan)]
    tracking.connect(plan.uri)
    with held(storage, name, PATIENCE):
        if pending:
            start()
            tracking.check_nodes(plan.uri, sum(node["Alive"] for node in ray.nodes()))
            check_cluster(ray_options, workers, wants_gpu(ray_options))
        run = open_run(plan, options, smoke)
        plan = replace(plan, parent=run.run_id)
        if pending:  # the folder stands for no best trial until the sweep has ended
            write_trials(plan.folder, [outcome(trial, plan, {}) for trial in trials])
        ledger, results = Ledger(plan, len(trials) - len(pending), say), None
        try:
            say(
                f"{pluralize(len(trials), 'trial')} of {grid.name}, {len(trials) - len(pending)} done before; metric "
                f"{grid.metric}"
            )
            if pending:
                results = run_pending(
                    plan, pending, options.concurrency, workers, ledger
                )
                for trial in pending:
                    if trial.name not in ledger.errors:
                        stop(trial, plan)
            found = [outcome(trial, plan, ledger.errors) for trial in trials]
            best = close(plan, run, found)
        except KeyboardInterrupt:
            ray.shutdown()  # ends the trials
            say(
                "trials that were running continue from their last checkpoint: the end of an epoch, or "
                "fit.checkpoint_every_steps"
            )
            close(plan, run, [outcome(trial, plan, ledger.errors) for trial in trials])
            raise
        except BaseException:
            tracking.Logger(run).end("FAILED")
            raise
    if left := sum(o.status == "unfinished" for o in found):
        raise UserError(
            f"the sweep '{name}' stopped with {left} of {len(trials)} trials to do; the same line goes on"
        )
    if best is None:
        why = next((f" ({o.name}: {o.error})" for o in found if o.error), "")
        raise UserError(
            f"no trial of the sweep {plan.folder} has a value; mend what failed, then run the same line, or with other "
            f"settings another --name{why}"
        )
    return Swept(name, plan.folder, run, found, best, time.monotonic() - began, results)


def check(plan: Plan) -> tuple[str, dict[str, dict[str, str]]]:
    """Return the family of the models, and by trial the hashes of the tables that it reads. Nothing is written.

    Raises:
        UserError: if a trial cannot run with its settings and tables.
    """
    family, hashes = "", {}
    for trial in plan.trials.values():
        own = trial.inputs(plan.inputs)
        if plan.grid.kind == "train":
            checked = check_training(
                model=trial.model,
                fit=FitConfig(**trial.fit),
                ray_options=plan.ray,
                inputs=own,
                storage=plan.folder,
                name=trial.name,
                tracking_uri=plan.uri,
                remedy=f"choose another --name, or remove {plan.folder}/{trial.name} to begin this trial anew",
            )
            family = checked.model_class.family
            hashes[trial.name] = checked.hashes
            continue
        options = {
            key: value for key, value in trial.evaluate.items() if key != "batch_size"
        }
        about = check_evaluation(trial.folders["checkpoint"], own, options).about
        known, metric = (
            [*about.metrics, "users_per_s", "peak_memory_mb"],
            plan.grid.metric.removeprefix("test/"),
        )
        if metric not in known:
            raise UserError(
                f"the metric of the grid {plan.grid.name} is {plan.grid.metric}, which is not measured; "
                f"{hint(metric, known)}; known are {', '.join(known)}"
            )
        if (noted := read_record(join(plan.folder, trial.name))) and noted.get(
            "evaluate"
        ) != trial.evaluate:
            raise UserError(
                f"{trial.name} was measured with other options in {plan.folder}; choose another --name"
            )
        family = registry.find(about.name).family
        hashes[trial.name] = about.hashes
    return family, hashes


def experiment_of(plan: Plan, given: str | None) -> str | None:
    """The experiment that the sweep's trials are in, or for a new one the given one; UserError where it is another one,
    or at another place."""
    noted = [read_record(join(plan.folder, name)) for name in plan.trials]
    for run in (
        tracking.RunRef(**record["tracking"])
        for record in noted
        if record and "tracking" in record
    ):
        if run.uri != plan.uri or given not in (None, run.experiment):
            raise UserError(
                f"the trials in {plan.folder} are in the experiment {run.experiment} at {run.uri}, not in "
                f"{given or run.experiment} at {plan.uri}; give --tracking_uri and --experiment as before, or choose "
                f"another --name"
            )
        return run.experiment
    return given


def open_run(plan: Plan, options: Options, smoke: bool = False) -> tracking.RunRef:
    """Return the MLflow run of the sweep in this folder, or open a new one."""
    key, client, grid = (
        sha256(plan.folder.encode()).hexdigest(),
        tracking.connect(plan.uri),
        plan.grid,
    )
    begun = any(read_record(join(plan.folder, name)) for name in plan.trials)
    place = client.get_experiment_by_name(plan.experiment)
    there = (
        client.search_runs(
            [place.experiment_id], f"tags.`{tracking.KEY_TAG}` = '{key}'"
        )
        if place
        else []
    )
    for found in there:
        if not found.data.params:  # it was being made when the sweep was killed
            client.delete_run(found.info.run_id)
        elif (
            begun or found.info.status != "FINISHED"
        ):  # else the folder of a sweep that ended is gone
            run = tracking.RunRef(plan.uri, plan.experiment, found.info.run_id)
            tracking.reopen(run)
            return run
    tags = {
        tracking.KIND_TAG: "sweep",
        "sweep.grid": grid.name,
        "sweep.axes": json.dumps(grid.keys),
        "sweep.metric": grid.metric,
        "command": plan.command,
        "mlflow.source.name": "jobs.sweep",
        tracking.KEY_TAG: key,
        tracking.FOLDER_TAG: plan.folder,
        **({tracking.SMOKE_TAG: "true"} if smoke else {}),
    }
    config = {
        "sweep": {"grid": grid.name, "source": grid.source, "trials": len(plan.trials)},
        "tables": plan.inputs.tables,
        "ray": asdict(plan.ray),
        "options": asdict(options),
    }
    shared = set.intersection(*(set(read.items()) for read in plan.hashes.values()))
    storage, _, name = plan.folder.rpartition("/")
    return tracking.open_run(
        plan.uri,
        plan.experiment,
        name,
        storage,
        config=config,
        hashes=dict(sorted(shared)),
        tags=tags,
    )


def run_pending(
    plan: Plan, pending: list[Trial], concurrency: int, workers: int, ledger: Ledger
) -> tune.ResultGrid | None:
    """Runs the trials that are not done through Tune."""
    epochs = max(int(trial.fit.get("max_epochs", 1)) for trial in plan.trials.values())
    scheduler = make_scheduler(plan.grid.scheduler, epochs)
    if isinstance(scheduler, Halving):
        stopped = replay(scheduler, past_reports(plan))
        for trial in pending:
            if trial.name in stopped:  # and was killed before it heard
                stop(trial, plan)
        pending = [trial for trial in pending if trial.name not in stopped]
    if not pending:
        return None
    each = resources(plan.ray, wants_gpu(plan.ray))
    needs = tune.PlacementGroupFactory([each])
    if plan.ray.label_selector:
        selectors = [plan.ray.label_selector]
        needs = tune.PlacementGroupFactory([each], bundle_label_selector=selectors)
    if plan.grid.kind == "evaluate":
        concurrency = 1  # it measures how fast they are
    if workers > 1:  # the trial's own process waits for its workers
        needs = tune.PlacementGroupFactory([{"memory": WAITING_TRIAL_BYTES}])
        concurrency = concurrency or waiting_trials(each, workers)
    points = [
        {TRIAL: t.name} | {key: t.point.get(key) for key in plan.grid.keys}
        for t in pending
    ]
    results = tune.Tuner(
        tune.with_resources(tune.with_parameters(run_trial, plan=plan), needs),
        param_space={
            key: tune.choice([point[key] for point in points]) for key in points[0]
        },
        tune_config=tune.TuneConfig(
            scheduler=scheduler,
            # one process for many trials, but not where a trial waits for workers, which end with its process
            reuse_actors=plan.grid.kind == "train" and workers == 1,
            search_alg=BasicVariantGenerator(points, max_concurrent=concurrency),
            num_samples=len(points),
            trial_name_creator=name_of,
            trial_dirname_creator=name_of,
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=plan.folder,
            verbose=0,
            callbacks=[ledger],
            failure_config=tune.FailureConfig(max_failures=plan.ray.max_failures),
        ),
    ).fit()
    filesystem, path = open_uri(join(plan.folder, "tune"))
    if filesystem.get_file_info(path).type == fs.FileType.Directory:
        filesystem.delete_dir(path)
    return results


WAITING_TRIAL_BYTES = 1 << 30
"""Memory of a trial's own process while its workers train: PyTorch, Ray and MLflow."""

WAITING_TRIALS = 16
"""Trials of several workers that run or wait at once on a cluster with an autoscaler, by default."""


def waiting_trials(each: dict[str, float], workers: int) -> int:
    """Return how many trials of several workers to start at once.

    Ray reserves the workers of a trial together, so trials beyond the room of the cluster wait, and an autoscaler
    starts nodes for them.
    """
    room = cluster.count_room(cluster.alive_nodes(), each) // workers
    return max(room, WAITING_TRIALS if has_autoscaler() else 1)


def outcome(trial: Trial, plan: Plan, errors: dict[str, str]) -> Outcome:
    """What has become of a trial; `errors` are those of this call."""
    folder = join(plan.folder, trial.name)
    noted = read_record(folder)
    made = Outcome(
        trial.id, trial.name, trial.point, "unfinished", error=errors.get(trial.name)
    )
    made.run_id = noted["tracking"]["run_id"] if noted and "tracking" in noted else None
    if made.error:
        made.status = "failed"
    elif noted and noted["status"] == "finished":
        made.status = "stopped" if noted.get("stopped") else "finished"
        if plan.grid.kind == "evaluate":
            made.value, made.checkpoint = (
                noted["values"].get(plan.grid.metric),
                trial.folders["checkpoint"],
            )
        else:
            made.checkpoint, made.epochs = join(folder, BEST), noted["epochs"]
            made.value = checkpoint.read(made.checkpoint).metrics.get(plan.metric)
    return made


def find_best(outcomes: list[Outcome]) -> Outcome | None:
    """Return the best trial of the settings with the largest mean, or None if no trial has a value.

    Settings are compared over the seeds that all of them have a value for, so that a failed seed neither helps nor
    harms its settings. Settings without any value are left out. Where no seed is common to the others, as in a grid
    that draws seeds at random, each setting's mean is over its own seeds.
    """
    with_value = [outcome for outcome in outcomes if outcome.value is not None]
    values: dict[str, dict[Any, float]] = {}
    for outcome in with_value:
        seeds = values.setdefault(tracking.settings_of(outcome.point), {})
        seeds[outcome.point.get("fit.seed")] = outcome.value or 0.0
    if not values:
        return None
    shared = set.intersection(*(set(seeds) for seeds in values.values()))

    def rank(outcome: Outcome) -> tuple[float, float]:
        seeds = values[tracking.settings_of(outcome.point)]
        mean = statistics.fmean(seeds[seed] for seed in shared or seeds)
        return mean, outcome.value or 0.0

    return max(with_value, key=rank)


TRIALS = "trials.json"
"""File of a sweep's folder, and artifact of its MLflow run: `complete`, the name of the `best` trial, and `trials`."""


def describe_trials(outcomes: list[Outcome]) -> dict[str, Any]:
    """Return the content of `trials.json`."""
    best = find_best(outcomes)
    return {
        "complete": all(o.status in ("finished", "stopped") for o in outcomes),
        "best": best.name if best else None,
        "trials": [asdict(outcome) for outcome in outcomes],
    }


def write_trials(folder: str, outcomes: list[Outcome]) -> None:
    """Write `trials.json` into the sweep's folder."""
    content = json.dumps(describe_trials(outcomes), indent=2)
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


def close(plan: Plan, run: tracking.RunRef, outcomes: list[Outcome]) -> Outcome | None:
    """Write the outcomes to MLflow and the sweep's folder, and end the sweep's run.

    Returns:
        The best trial, or None if no trial has a value.
    """
    write_trials(plan.folder, outcomes)
    tracking.log_yaml(run, asdict(plan.grid), "grid.yaml")
    tracking.log_json(run, describe_trials(outcomes), TRIALS)
    logger, best = tracking.Logger(run), find_best(outcomes)
    counts = Counter(outcome.status for outcome in outcomes)
    if best and best.run_id and best.value is not None:
        best_run = tracking.RunRef(run.uri, run.experiment, best.run_id)
        logged = tracking.connect(run.uri).get_run(best.run_id).data.metrics
        logged = {**logged, **load_test_metrics(best_run)}
        names = [name for name in logged if name.startswith(("best/", "test/"))]
        values = {
            f"best/{tracking.shown_name(name).removeprefix('best/')}": logged[name]
            for name in names
        }
        logger.update(values | {plan.grid.metric: best.value}, len(outcomes))
        logger.tag(**{tracking.BEST_TAG: best.run_id})
    incomplete = counts["failed"] + counts["unfinished"]
    told = (
        f"{incomplete} of {len(outcomes)} trials have no result" if incomplete else ""
    )
    logger.tag(**{tracking.INCOMPLETE_TAG: told})
    # every status, as one of an earlier call may be of no trial any more
    statuses = ("finished", "stopped", "failed", "unfinished")
    logger.update(
        {f"trials/{status}": counts[status] for status in statuses}, len(outcomes)
    )
    # found by their parent: a trial that was killed may not have noted its run yet
    tracking.end_trials(run, {o.run_id for o in outcomes if o.status == "failed"})
    failed = counts["failed"] or best is None
    status = "FAILED" if failed else "FINISHED"
    logger.end("KILLED" if counts["unfinished"] else status)
    return best
