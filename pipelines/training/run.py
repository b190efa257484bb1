"""A training run under a fixed storage folder and name, so that it can be continued.

Workers are those of a `TorchTrainer`; one worker that is not on a cluster trains in this process, as starting Ray and a
trainer costs 30 s of processor time whatever it trains.

`STORAGE/NAME/` holds `run.json` (what the run is and whether it is finished), the checkpoints to resume
from (`step-*`, the last one and the best one) and, when it is done, `best/`: the weights to use.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import ray
import torch
from pyarrow import fs
from ray.exceptions import RayError
from ray.train import (
    FailureConfig,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    UserCallback,
)
from ray.train.torch import TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from models import registry
from models.storage import attempts, checkpoint
from models.storage.attempts import Attempt
from models.storage.checkpoint import BEST, Checkpoint
from models.storage.inputs import Inputs
from models.storage.locks import hold_lock
from models.storage.tables import (
    UserError,
    code_version,
    has_manifest,
    join,
    open_uri,
    read_manifest,
    submission_id,
)
from models.training.fit import FitConfig
from pipelines import cluster, faults, tracking
from pipelines.serving import package
from pipelines.training.fencing import FencedTorchConfig
from pipelines.training.ray_options import FEWER, RayOptions
from pipelines.training.record import (
    RUN,
    check_same,
    is_longer,
    read_record,
    write_record,
)
from pipelines.training.settings import Checked, check
from pipelines.training.stop import STOP_REQUEST
from pipelines.training.worker import Progress, Task, WorkerContext, perform, worker

# How often Ray Train's controller asks for reports. A worker that has one waits until it is asked: by default up to
# 2 s, which is longer than many an epoch.
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
WATCH = "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"
# A local Ray's node is not taken away with notice: one process fewer.
os.environ.setdefault(WATCH, "1" if os.environ.get("RAY_ADDRESS") else "0")

UNRESPONSIVE_S = "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S"
"""Variable with the seconds after which Ray Train ends a worker that does not answer."""

RETRY_PAUSE_S = 5.0
"""Seconds between the loss of workers and their next start."""

LOOK, WORD = 5.0, 30.0
"""Seconds after which it is looked again whether a training waits for a node, and after which it is said again."""


@dataclass
class Trained:
    """What a run made."""

    name: str
    """Name of the run."""
    checkpoint: str
    """Folder with the best weights."""
    about: Checkpoint
    """The best checkpoint's config, metrics and timing."""
    run: tracking.RunRef
    """The MLflow run."""
    epochs: int
    """Epochs done."""
    seconds: float
    """Time of this call."""
    already: bool = False
    """Whether the run was finished before, so that nothing was done."""


def train(
    *,
    model: dict[str, Any],
    fit: FitConfig,
    ray_options: RayOptions,
    inputs: Inputs,
    storage: str,
    name: str,
    tracking_uri: str | None = None,
    overwrite: bool = False,
    **how: Any,
) -> Trained:
    """`run_training` with what `check` makes of the settings."""
    checked = check(
        model=model,
        fit=fit,
        ray_options=ray_options,
        inputs=inputs,
        storage=storage,
        name=name,
        tracking_uri=tracking_uri,
        overwrite=overwrite,
    )
    return run_training(checked, **how)


def run_training(
    checked: Checked,
    *,
    experiment: str | None = None,
    parent_run: str | None = None,
    log_model: bool = True,
    say: Callable[[str], None] = print,
    tags: dict[str, str] | None = None,
    heard: Callable[[Checkpoint], Any] | None = None,
    callbacks: Sequence[UserCallback] = (),
    wait: float = 0,
    start: Callable[[], None] | None = None,
) -> Trained:
    """Trains one model, or continues or finds finished the run of this name. One worker trains in this process, but on
    a cluster (RAY_ADDRESS); for others Ray must be started, or `start` starts it.

    Raises UserError for what the user can mend, before anything is started or written where that is possible.
    `parent_run` is a sweep's MLflow run; `log_model` also stores the best model there, with the tables that it needs to
    be served.

    With `heard` one worker trains in this process on a cluster too. It is told of every checkpoint; a SystemExit that
    it raises leaves the run as it is, to be continued or concluded. `callbacks` are Ray Train's, of other runs. `tags`
    are further tags of the MLflow run. A run that another process holds is waited for that many seconds.
    """
    began = time.monotonic()
    model_class, ray_options, config, hashes = (
        checked.model_class,
        checked.ray,
        checked.config,
        checked.hashes,
    )
    name, storage, folder = checked.name, checked.storage, checked.folder
    inputs, uri, workers = checked.inputs, checked.uri, checked.workers
    here = workers == 1 and bool(heard or not os.environ.get("RAY_ADDRESS"))
    for note in checked.notes:
        say(f"note: {note}")
    with held(storage, name, wait):
        record = None if checked.overwrite else read_record(folder)
        if record and record["status"] != "opening":
            check_same(record, config, hashes, checked.remedy)
            run = tracking.RunRef(**record["tracking"])
            if experiment and experiment != run.experiment:
                raise UserError(
                    f"the run '{name}' is in the experiment {run.experiment}, not {experiment}; leave out "
                    f"--experiment, or {checked.remedy}"
                )
            if record["status"] == "finished" and not is_longer(record, config):
                about = checkpoint.read(join(folder, BEST))
                return Trained(
                    name,
                    join(folder, BEST),
                    about,
                    run,
                    record["epochs"],
                    0.0,
                    already=True,
                )
        if start and not here:
            with ThreadPoolExecutor(
                1
            ) as thread:  # to make a new store takes as long as to start a local Ray
                reached = (
                    None
                    if ray.is_initialized()
                    else thread.submit(tracking.connect, uri)
                )
                start()
            if reached:
                with tracking.warn_if_slow(uri, say):
                    reached.result()
        use_gpu = wants_gpu(ray_options) and model_class.trains_by_gradient
        if not here:
            if parent_run is None:  # the sweep has looked already
                check_cluster(ray_options, workers, use_gpu)
            tracking.check_nodes(uri, sum(node["Alive"] for node in ray.nodes()))
        elif use_gpu and not torch.cuda.is_available():
            raise UserError(
                "ray.use_gpu is true, and this machine has no GPU that PyTorch finds; leave it out"
            )
        if checked.overwrite:
            remove(folder, say)
        if record is None or record["status"] == "opening":
            if record:
                tracking.discard(record["opening"])
            experiment = (
                experiment or f"{model_class.family}/{dataset_name(inputs.tables)}"
            )
            opening = tracking.opening(uri, experiment)
            write_record(folder, {"status": "opening", "opening": opening})
            settings = {**config, **inputs.given(), "ray": asdict(ray_options)}
            labels = {
                **(tags or {}),
                tracking.KEY_TAG: opening["key"],
                tracking.FOLDER_TAG: folder,
            }
            labels |= (
                {tracking.SIMULATED_TAG: "true"} if is_simulated(inputs.tables) else {}
            )
            with tracking.warn_if_slow(uri, say):
                run = tracking.open_run(
                    uri,
                    experiment,
                    name,
                    storage,
                    config=settings,
                    hashes=hashes,
                    parent=parent_run,
                    tags=labels,
                )
            if inputs.sids:  # what the tokenizer measured stands beside what a model makes of its codes
                tracking.Logger(run).update(
                    figures(
                        read_manifest(join(inputs.sids, "sids"), "sids").info, "sids"
                    ),
                    0,
                )
            created = datetime.now(UTC).isoformat(timespec="seconds")
            record = {
                "config": config,
                "hashes": hashes,
                "tracking": run.to_dict(),
                "status": "running",
                "created": created,
                "inputs": inputs.given(),
                "given": checked.given,
                "code": code_version(),
                "submission_id": submission_id(),
            }
            write_record(folder, record)
        else:
            if is_longer(record, config):
                epochs = config["fit"]["max_epochs"]
                say(
                    f"note: {name} goes on to epoch {epochs}, with the learning rates of that schedule from here"
                )
                record = {**record, "config": config, "status": "running"}
                write_record(folder, record)
                again = {
                    "model": "",
                    tracking.WEIGHTS_TAG: "",
                }  # logged and measured anew
                tracking.Logger(run).tag(
                    **{"fit.max_epochs": str(epochs), **again}
                )  # params never change
            tracking.reopen(run)
            record = {**record, "inputs": inputs.given()}  # tables may have moved
            record = note_code(folder, record, run, say)

        attempt = attempts.begin(folder)
        task = Task(
            config["model"],
            config["fit"],
            folder,
            inputs.given(),
            run.to_dict(),
            ray_options.threads,
            checked.init,
            ray_options.fsdp,
            hashes,
        )
        try:
            if here:
                task.attempt = str(attempts.start(folder, attempt))
                device = torch.device("cuda" if use_gpu else "cpu")
                report = heard or (lambda about: None)
                perform(task, WorkerContext(0, 1, device, 1, report, say))
                if STOP_REQUEST.requested:
                    raise KeyboardInterrupt
            else:
                run_workers(
                    task,
                    attempt,
                    storage,
                    name,
                    workers,
                    use_gpu,
                    ray_options,
                    say,
                    callbacks,
                )
            attempts.require_job(folder, attempt)
            if (last := checkpoint.last(folder)) is None:
                raise RuntimeError(f"the run in {folder} ended without a checkpoint")
            if log_model and model_class.logs_every_run:
                say("logging the model to MLflow")
            about = conclude(folder, record, last, log_model)
        except SystemExit:  # told to stop where it stands
            raise
        except attempts.SupersededError:  # the other job has the MLflow run
            raise
        except BaseException as error:
            tracking.Logger(run).end(
                "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
            )
            raise
    return Trained(
        name, join(folder, BEST), about, run, last.epoch, time.monotonic() - began
    )


def note_code(
    folder: str,
    record: dict[str, Any],
    run: tracking.RunRef,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Return the record of a run that goes on, with the code and the job that it goes on with.

    A run that goes on with other code says so, also in MLflow: its results are those of no single version.
    """
    before, code = record.get("code", "unknown"), code_version()
    if code != before:
        say(f"note: this run was trained by the code {before}, and goes on with {code}")
    record = {**record, "code": code, "submission_id": submission_id()}
    write_record(folder, record)
    logger = tracking.Logger(run)
    for tag, value in (
        (tracking.CODE_TAG, code),
        (tracking.SUBMISSION_TAG, submission_id()),
    ):
        values = [one for one in logger.tags.get(tag, "").split(", ") if one]
        if value and value not in values[-1:]:
            logger.tag(**{tag: ", ".join([*values, value])})
    return record


def conclude(
    folder: str,
    record: dict[str, Any],
    last: Checkpoint,
    log_model: bool = False,
    **more: Any,
) -> Checkpoint:
    """Ends the run at its checkpoint `last`: its best one is published, MLflow told, and `run.json` says finished.

    `more` is noted in `run.json` too. Returns what the best checkpoint says.
    """
    run = tracking.RunRef(**record["tracking"])
    about = checkpoint.read(checkpoint.publish(folder, last))
    curves = tracking.read_curves(join(folder, last.folder))
    logger = tracking.Logger(run, curves)  # a trial that was stopped may owe points
    values = {
        "best/epoch": last.best["epoch"],
        **{f"best/{name}": v for name, v in about.metrics.items()},
    }
    values["train/steps"] = last.step
    values["train/total_seconds"] = last.timing["train_seconds"] + last.timing.get(
        "eval_seconds", 0.0
    )
    logger.update(values, last.step)
    logger.tag(checkpoint=join(folder, BEST))
    tracking.log_curves(run, curves)
    if (
        log_model
        and registry.find(about.name).logs_every_run
        and not logger.tags.get("model")
    ):
        logger.tag(
            model=package.log_model(run, join(folder, BEST), Inputs(**record["inputs"]))
        )
    logger.end()
    write_record(folder, {**record, "status": "finished", "epochs": last.epoch, **more})
    return about


def run_workers(
    task: Task,
    attempt: Attempt,
    storage: str,
    name: str,
    workers: int,
    use_gpu: bool,
    options: RayOptions,
    say: Callable[[str], None],
    callbacks: Sequence[UserCallback] = (),
) -> None:
    """Runs the workers to the end."""
    fewest = options.least(workers)
    each = resources(options, use_gpu)
    os.environ[UNRESPONSIVE_S] = str(options.hang_minutes * 60)
    failures, reached = 0, -1
    while True:
        # Ray would try an error of the user's again; what is lost is tried again here, where it can be said. Lines come
        # by an actor anew, as it may have been lost too.
        with shown(say, lambda: waiting(workers, each)) as progress:
            trainer = TorchTrainer(
                worker,
                train_loop_config={
                    "task": asdict(task),
                    "progress": progress,
                    "watch": os.environ[WATCH] != "0",
                },
                torch_config=FencedTorchConfig(
                    "nccl" if use_gpu else "gloo",
                    timeout_s=round(options.hang_minutes * 60),
                    folder=task.folder,
                    attempt=str(attempt),
                ),
                scaling_config=ScalingConfig(  # type: ignore[call-arg]  # label_selector is of version 2
                    num_workers=(fewest, workers) if fewest < workers else workers,  # type: ignore[arg-type]  # the class of version 1 has no range
                    use_gpu=use_gpu,
                    resources_per_worker=each,
                    placement_strategy=options.placement_strategy,
                    accelerator_type=options.accelerator_type or None,
                    label_selector=options.label_selector or None,
                ),
                run_config=RunConfig(
                    name=name,
                    storage_path=storage,
                    failure_config=FailureConfig(max_failures=0),
                    callbacks=list(callbacks),  # type: ignore[arg-type]  # Ray names those of its version 1
                ),
            )
            thread = ThreadPoolExecutor(
                1
            )  # in the main one, Ray Train would take SIGINT for itself
            training = thread.submit(trainer.fit)
            try:
                training.result()
                return
            except KeyboardInterrupt:
                save_before_stop(progress, training)
                raise
            except TrainingFailedError as error:
                if mistake := faults.find_user_error(error):
                    raise mistake from error
                step = last_step(task.folder)
                failures = 1 if step > reached else failures + 1
                reached = max(step, reached)
                if failures > options.max_failures or faults.is_permanent(error):
                    raise
                why = faults.explain(error) or faults.first_line(
                    list(faults.iter_causes(error))[-1]
                )
                tries = f"{failures} of {options.max_failures} times"
                say(
                    f"note: {why.partition(';')[0]}; going on from the last checkpoint, {tries}"
                )
                time.sleep(RETRY_PAUSE_S)
            finally:
                thread.shutdown(wait=False)


def save_before_stop(progress: Any, training: Future[Any]) -> None:
    """Let workers that train save a checkpoint, and wait for it; return at once where none of them trains yet."""
    with suppress(RayError):
        if not ray.get(progress.stop.remote()):
            return
        while not training.done() and not ray.get(progress.is_saved.remote()):
            time.sleep(0.1)


def last_step(folder: str) -> int:
    """Return the step of the run's last checkpoint, -1 while its storage cannot be read."""
    try:
        last = checkpoint.last(folder)
    except (OSError, UserError):
        return -1
    return last.step if last else 0


def waiting(workers: int, each: dict[str, float]) -> str | None:
    """What the workers wait for, while the cluster has not room for them all; None also where Ray does not answer."""
    ours = [{kind: float(need) for kind, need in each.items() if need}] * workers
    try:
        groups = ray.util.placement_group_table().values()
        waits = [
            group for group in groups if group["state"] in ("PENDING", "RESCHEDULING")
        ]
        if not any(list(group["bundles"].values()) == ours for group in waits):
            return None
        there, free = ray.cluster_resources(), ray.available_resources()
    except RayError:
        return None
    has = ", ".join(
        f"{there.get(kind, 0):g} {kind}s, of which {free.get(kind, 0):g} are free"
        for kind in ours[0]
    )
    asked = ", ".join(f"{kind}: {need:g}" for kind, need in ours[0].items())
    return f"waiting for {workers} x {{{asked}}}; the cluster has {has}"


def held(storage: str, name: str, wait: float = 0) -> AbstractContextManager[None]:
    """Keeps other processes from the run (`hold_lock`)."""
    busy = f"the run '{name}' in {storage} is being trained by another process; wait for it or choose another --name"
    return hold_lock(tracking.lock_of(join(storage, name)), busy, wait)


def wants_gpu(options: RayOptions) -> bool:
    """Whether workers take GPUs; auto: if the cluster has any, or without one this machine."""
    if options.use_gpu != "auto":
        return options.use_gpu
    return (
        bool(ray.cluster_resources().get("GPU", 0))
        if ray.is_initialized()
        else torch.cuda.is_available()
    )


def resources(options: RayOptions, use_gpu: bool) -> dict[str, float]:
    """Return the resources that Ray reserves for each worker."""
    needs: dict[str, float] = {"CPU": options.cpus_per_worker}
    if use_gpu:
        needs["GPU"] = 1
    if options.memory_gb:
        needs["memory"] = options.memory_gb * 2**30
    if options.accelerator_type:  # ScalingConfig's `accelerator_type` adds the same
        needs[f"{cluster.ACCELERATOR}{options.accelerator_type}"] = 0.001
    return needs


def check_cluster(options: RayOptions, workers: int, use_gpu: bool) -> None:
    """Refuses what the cluster can never give, where it would be waited for for ever."""
    remedy = f"{FEWER}, or give --ray.use_gpu false" if use_gpu else FEWER
    cluster.check_room(options.least(workers), resources(options, use_gpu), remedy)


def is_simulated(tables: str) -> bool:
    """Whether the mapping file says that the log is simulated."""
    uri = join(tables, "events")
    return has_manifest(uri) and bool(
        read_manifest(uri, "events").config.get("source", {}).get("simulated")
    )


def dataset_name(tables: str) -> str:
    """Name of the dataset: what the sequences' manifest says, else the folder's name."""
    manifest = read_manifest(join(tables, "sequences"), "sequences")
    for content in (manifest.info, manifest.config):
        if isinstance(content.get("dataset"), str):
            return str(content["dataset"])
    parts = [part for part in tables.rstrip("/").split("/") if part]
    return parts[-2] if parts[-1] == "tables" and len(parts) > 1 else parts[-1]


def figures(content: Any, name: str) -> dict[str, float]:
    """The numbers in nested content, each under the path to it."""
    if isinstance(content, int | float):
        return {name: float(content)}
    pairs = (
        content.items()
        if isinstance(content, dict)
        else enumerate(content)
        if isinstance(content, list)
        else ()
    )
    return {
        path: value
        for key, part in pairs
        for path, value in figures(part, f"{name}/{key}").items()
    }


def remove(folder: str, say: Callable[[str], None]) -> None:
    """Remove what a run's folder holds, and its MLflow run from comparisons.

    The number of its last attempt stays, as a worker of that attempt may still be alive. Raises UserError for a folder
    that holds something else.
    """
    filesystem, path = open_uri(folder)
    there = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
    entries = [entry for entry in there if entry.base_name != attempts.ATTEMPT]
    record: dict[str, Any] | None
    try:
        record = read_record(folder)
    except UserError:  # damaged, so a run's all the same
        record = {}
        say(
            f"note: {folder}/{RUN} is damaged and does not tell the MLflow run, which stays in comparisons"
        )
    if record is None and entries:
        raise UserError(
            f"{folder} is not the folder of a run, so --overwrite leaves it alone; choose another --name"
        )
    if record:
        try:
            if record["status"] == "opening":
                tracking.discard(record["opening"])
            else:
                tracking.delete(tracking.RunRef(**record["tracking"]))
        except UserError as error:
            say(f"note: {error}")
    for entry in entries:  # run.json last, or what is left is nobody's
        if entry.type == fs.FileType.Directory:
            filesystem.delete_dir(entry.path)
        elif entry.base_name != RUN:
            filesystem.delete_file(entry.path)
    if record is not None:
        filesystem.delete_file(f"{path}/{RUN}")


@contextmanager
def shown(
    say: Callable[[str], None],
    waits: Callable[[], str | None] = lambda: None,
) -> Iterator[Any]:
    """An actor to which rank 0 tells its progress, and a thread here that hands it on to `say`.

    What the workers wait for, which `waits` tells, is said too.
    The actor is on the driver's node, whose loss ends the training anyway; where it is lost all the same, only its
    lines are.
    """
    on_this_node = NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    progress = Progress.options(scheduling_strategy=on_this_node).remote()  # type: ignore[attr-defined]
    done = threading.Event()
    seen, lost = 0, False

    def pump(timeout: float | None = None) -> None:
        nonlocal seen, lost
        if lost:
            return
        try:
            lines = ray.get(progress.since.remote(seen), timeout=timeout)
        except RayError as error:
            lost = True
            say(
                f"note: no more progress is shown, as the actor that tells it is lost ({type(error).__name__})"
            )
            return
        for line in lines:
            seen += 1
            say(line)

    def work() -> None:
        looked, said = time.monotonic(), -math.inf
        while not done.wait(0.5):
            pump()
            now = time.monotonic()
            if not lost and now - looked >= LOOK:
                looked = now
                line = "" if now - said < WORD or is_alive() else waits()
                if line:
                    said = now
                    say(line)

    def is_alive() -> bool:
        try:
            return bool(ray.get(progress.is_alive.remote(), timeout=60))
        except RayError:
            return True  # nothing is known, so nothing is said

    thread = threading.Thread(target=work, daemon=True, name="progress")
    thread.start()
    try:
        yield progress
    finally:
        done.set()
        thread.join(timeout=10)
        pump(timeout=60)
        ray.kill(progress)
