"""A sweep: the trials of a grid through Ray Tune, as child runs of one MLflow run. `jobs.sweep` is its command.

`STORAGE/NAME/` holds `sweep.json` (the trials and the MLflow run), a folder per trial (`tuning/trial.py`) and Tune's
own. What is done is read from the trials' folders alone: Tune writes its state now and then, and a driver
that is killed in between would lose trials or run them twice.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from models.words import number_of

os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")  # MLflow has the metrics; no files beside it
os.environ.setdefault("TUNE_FUNCTION_THREAD_TIMEOUT_S", "30")  # a stopped trial leaves its process to the next one
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # the ledger below says what there is to say

import pandas as pd
import ray
from pyarrow import fs
from ray import tune
from ray.tune import Callback
from ray.tune.search import BasicVariantGenerator

from models.tables import UserError, join, open_uri
from pipelines import tracking
from pipelines.training.options import RayOptions
from pipelines.training.record import read_record
from pipelines.training.run import check_cluster, dataset_name, held, resources, wants_gpu
from tuning.checked import Checked, check
from tuning.grid import EPOCH, TRIAL, VALUE, Grid, Trial
from tuning.halving import Halving, make
from tuning.options import Options
from tuning.outcome import Outcome, best_metrics, best_of, outcome
from tuning.probe import check_models
from tuning.record import NO_BEST, write_sweep
from tuning.trial import PATIENCE, Plan, fail, forgive, read_reports, run_trial, stop, tested

logging.getLogger("ray.tune.analysis.experiment_analysis").setLevel(logging.ERROR)  # misses the files left out above

TUNE = "tune"
"""In a sweep's folder: what Tune writes for itself."""


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
    """The best of those that have a value."""
    seconds: float
    """Time of this call."""
    already: bool = False
    """Whether it was finished before."""
    table: pd.DataFrame | None = None
    """Tune's of the trials that ran in this call: what each last told, and its value on each axis (`config/...`)."""


class Ledger(Callback):
    """Follows the trials: says how they come on, ends those that are stopped, notes those that failed for good."""

    def __init__(self, grid: Grid, plan: Plan, done: int, until: float, say: Callable[[str], None]) -> None:
        self.grid, self.plan, self.done, self.until, self.say = grid, plan, done, until, say

    def __getstate__(self) -> dict[str, Any]:
        """Tune writes its callbacks down, to read them where it resumes, which is not done here."""
        return {**self.__dict__, "say": None}

    def on_trial_result(self, iteration: int, trials: list, trial: Any, result: dict, **info: Any) -> None:
        if VALUE in result:
            name = trial.config[TRIAL]
            self.say(f"  {name}  epoch {result[EPOCH]:>3}  {self.plan.metric} {result[VALUE]:.4f}")

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        one = self.plan.trials[trial.config[TRIAL]]
        if time.monotonic() < self.until:
            stop(one, self.plan)
        found = outcome(one, self.plan.folder, self.grid)
        if found.status != "unfinished":
            self._count(found)

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        one = self.plan.trials[trial.config[TRIAL]]
        lines = str(trial.get_pickled_error() or "").strip().splitlines()
        fail(one, self.plan, lines[-1].strip() if lines else "the process of the trial was lost")
        self._count(outcome(one, self.plan.folder, self.grid))

    def _count(self, found: Outcome) -> None:
        self.done += 1
        value = f"  {self.plan.metric} {found.value:.4f}" if found.value is not None else ""
        why = f": {found.error}" if found.error else ""
        self.say(f"[{self.done}/{len(self.plan.trials)}] {found.name} {found.status}{value}{why}")


def sweep(
    grid: Grid,
    trials: list[Trial],
    *,
    tables: str,
    extra: str | None,
    storage: str,
    name: str,
    ray_options: RayOptions,
    options: Options,
    tracking_uri: str | None = None,
    experiment: str | None = None,
    resume: bool = False,
    command: str = "",
    say: Callable[[str], None] = print,
    start: Callable[[], None] | None = None,
) -> Swept:
    """Runs the trials of the grid, or with `resume` those that a sweep of this name has not done. Ray must be started,
    or `start` starts it once all is checked that can be without it.

    Raises UserError before anything is started for what no trial could do: tables, models or settings that do not
    fit, a metric that is not measured, an MLflow that is not there; and at the end where no trial has a value.
    """
    checked = check(
        grid, trials, tables=tables, extra=extra, storage=storage, name=name, ray_options=ray_options,
        options=options, tracking_uri=tracking_uri, resume=resume,
    )  # fmt: skip
    return carry_on(checked, experiment=experiment, command=command, say=say, start=start)


def carry_on(
    checked: Checked,
    *,
    experiment: str | None = None,
    command: str = "",
    say: Callable[[str], None] = print,
    start: Callable[[], None] | None = None,
) -> Swept:
    """`sweep`, of what was checked."""
    began, folder, uri = time.monotonic(), checked.folder, checked.uri
    grid, trials, name, storage, options = checked.grid, checked.trials, checked.name, checked.storage, checked.options
    tables, extra, ray_options, workers = checked.tables, checked.extra, checked.ray, checked.workers
    before, opened = checked.begun, checked.opened
    if before and before["status"] == "finished":
        run, found = tracking.RunRef(**before["tracking"]), [outcome(t, folder, grid) for t in trials]
        if not (options.again and any(o.status == "failed" for o in found)):
            return Swept(name, folder, run, found, chosen(best_of(found), folder, found), 0.0, already=True)
    tracking.connect(uri)
    if start:
        start()
    tracking.check_nodes(uri, sum(node["Alive"] for node in ray.nodes()))
    gpu = wants_gpu(ray_options, workers)
    check_cluster(ray_options, workers, gpu)
    threads = ray_options.threads or (0 if grid.kind == "evaluate" else max(1, int(ray_options.cpus_per_worker)))
    ray_options = replace(ray_options, threads=threads)
    if grid.kind == "train":
        check_models(trials, tables, extra, max(1, threads), say)
    with held(storage, name, PATIENCE if checked.resume else 0):
        if opened:
            tracking.discard(opened["opening"])
        noted = before or begin(
            grid, trials, folder, uri, experiment or f"{checked.family}/{dataset_name(tables)}", command=command,
            hashes=checked.hashes,
            settings={"tables": tables, "ray": asdict(ray_options), "options": asdict(options)},
        )  # fmt: skip
        run = tracking.RunRef(**noted["tracking"])
        plan = Plan(
            {t.name: t for t in trials}, grid.kind, grid.metric, tables, extra, folder, run.uri, run.experiment,
            run.run_id, ray_options, options.test and grid.kind == "train", command,
        )  # fmt: skip
        if options.again:
            for trial in trials:
                forgive(trial, plan)
            write_sweep(folder, {**noted, "status": "running"})
        pending, table = [t for t in trials if not is_done(t, plan)], None
        tracking.reopen(run)
        say(
            f"{number_of(len(trials), 'trial')} of {grid.name}, {len(trials) - len(pending)} done before; metric "
            f"{grid.metric}"
        )
        try:
            if pending:
                table = table_of(run_pending(grid, plan, pending, options, workers, gpu, say))
            found = [outcome(t, folder, grid) for t in trials]
            best = close(grid, run, found)
        except BaseException as error:
            tracking.Logger(run).end("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
            raise
        if left := sum(o.status == "unfinished" for o in found):
            raise UserError(
                f"the sweep '{name}' stopped with {left} of {len(trials)} trials to do; the same line with --resume "
                f"goes on"
            )
        forget_tune(folder)
        write_sweep(folder, {**noted, "status": "finished", "best": best.name if best else None})
    return Swept(
        name, folder, run, found, chosen(best, folder, found), time.monotonic() - began, table=table
    )  # fmt: skip


def begin(
    grid: Grid,
    trials: list[Trial],
    folder: str,
    uri: str,
    experiment: str,
    *,
    hashes: dict[str, str],
    command: str,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Opens the sweep's MLflow run and writes `sweep.json`, which is returned."""
    tags = {
        tracking.KIND_TAG: "sweep", "sweep.grid": grid.name, "sweep.axes": json.dumps(grid.keys),
        "sweep.metric": grid.metric, "sweep.mode": grid.mode, "command": command, "mlflow.source.name": "jobs.sweep",
    }  # fmt: skip
    about = {"sweep": {"grid": grid.name, "source": grid.source, "trials": len(trials)}, **settings}
    storage, _, name = folder.rpartition("/")
    opening = tracking.opening(uri, experiment)
    write_sweep(folder, {"status": "opening", "opening": opening})
    tags[tracking.KEY_TAG] = opening["key"]
    run = tracking.open_run(uri, experiment, name, storage, config=about, hashes=hashes, tags=tags)
    tracking.log_yaml(run, asdict(grid), "grid.yaml")
    noted = {
        "grid": grid.name, "trials": [asdict(t) for t in trials], "tracking": run.to_dict(), "status": "running",
        "hashes": hashes,
    }  # fmt: skip
    write_sweep(folder, noted)
    return noted


def close(grid: Grid, run: tracking.RunRef, outcomes: list[Outcome]) -> Outcome | None:
    """Tells MLflow what became of the trials, and ends the sweep's run; returns the best trial."""
    tracking.log_json(run, [asdict(o) for o in outcomes], "trials.json")
    logger, best, counts = tracking.Logger(run), best_of(outcomes), Counter(o.status for o in outcomes)
    if best is not None and best.run_id:
        logger.update(best_metrics(run, best, grid), len(outcomes))
        logger.tag(**{"sweep.best": best.run_id})
    logger.update({f"trials/{status}": count for status, count in counts.items()}, len(outcomes))
    for cut in outcomes:
        if cut.status == "unfinished" and cut.run_id:
            tracking.Logger(tracking.RunRef(run.uri, run.experiment, cut.run_id)).end("KILLED")
    logger.end("KILLED" if counts["unfinished"] else "FINISHED" if best else "FAILED")
    return best


def run_pending(
    grid: Grid, plan: Plan, pending: list[Trial], options: Options, workers: int, gpu: bool,
    say: Callable[[str], None],
) -> tune.ResultGrid:  # fmt: skip
    """Runs the trials that are not done through Tune."""
    scheduler = make(grid.scheduler, max((int(t.fit.get("max_epochs", 1)) for t in plan.trials.values()), default=1))
    if isinstance(scheduler, Halving):
        for trial in plan.trials.values():
            scheduler.replay(trial.name, read_reports(join(plan.folder, trial.name)))
    forget_tune(plan.folder)
    each = resources(plan.ray, gpu)
    room = min(int(ray.cluster_resources().get(kind, 0) / (need * workers)) for kind, need in each.items() if need)
    at_once = 1 if grid.kind == "evaluate" else min(options.concurrency or room, room)
    budget = options.budget_hours * 3600
    # A trial of several workers only waits for them: all CPUs are theirs, and Tune wants its trials to need something.
    needs: dict[str, float] = {kind.lower(): need for kind, need in each.items()} if workers == 1 else {"memory": 1}
    ledger = Ledger(grid, plan, len(plan.trials) - len(pending), time.monotonic() + (budget or math.inf), say)
    stopped = {key.removeprefix("val/"): value for key, value in grid.stop.items()}
    points = [point_of(trial, grid.keys) for trial in pending]
    return tune.Tuner(
        tune.with_resources(tune.with_parameters(run_trial, plan=plan), needs),
        param_space={key: tune.choice(list(dict.fromkeys(point[key] for point in points))) for key in points[0]},
        tune_config=tune.TuneConfig(
            scheduler=scheduler, time_budget_s=budget or None,
            # one process for many trials, but not where a trial waits for workers, which end with its process
            reuse_actors=grid.kind == "train" and workers == 1,
            search_alg=BasicVariantGenerator(points, max_concurrent=max(1, at_once)), num_samples=len(points),
            trial_name_creator=name_of, trial_dirname_creator=name_of,
        ),
        run_config=tune.RunConfig(
            name=TUNE, storage_path=plan.folder, stop=stopped or None, verbose=0,
            failure_config=tune.FailureConfig(max_failures=options.retries),
            callbacks=[ledger],
        ),
    ).fit()  # fmt: skip


def table_of(results: tune.ResultGrid) -> pd.DataFrame:
    """A row per trial, made of what Tune has in memory: its own files are not kept."""
    found = [results[i] for i in range(len(results))]
    return pd.json_normalize([{**(each.metrics or {}), "config": each.config} for each in found], sep="/")


def point_of(trial: Trial, keys: list[str]) -> dict[str, Any]:
    """The trial in Tune's parameter space: its name, and its value on each axis, None where it has none."""
    shown = {key: trial.point.get(key) for key in keys}
    plain = (str, int, float, bool, type(None))
    return {TRIAL: trial.name} | {
        key: value if isinstance(value, plain) else json.dumps(value) for key, value in shown.items()
    }


def name_of(trial: Any) -> str:
    """What Tune calls a trial."""
    return str(trial.config[TRIAL])


def is_done(trial: Trial, plan: Plan) -> bool:
    """Whether there is nothing left to do for the trial."""
    folder = join(plan.folder, trial.name)
    noted = read_record(folder)
    if noted is None or noted["status"] not in ("finished", "failed"):
        return False
    return noted["status"] == "failed" or not plan.test or bool(noted.get("stopped")) or tested(folder)


def chosen(best: Outcome | None, folder: str, outcomes: list[Outcome]) -> Outcome:
    """The best trial; UserError where none has a value."""
    if best is None:
        why = next((f" ({o.name}: {o.error})" for o in outcomes if o.error), "")
        raise UserError(f"{NO_BEST.format(folder)}{why}")
    return best


def forget_tune(folder: str) -> None:
    """Removes what Tune wrote for itself: nothing of it is read again."""
    filesystem, path = open_uri(join(folder, TUNE))
    if filesystem.get_file_info(path).type == fs.FileType.Directory:
        filesystem.delete_dir(path)
