"""Run a training under a fixed storage folder and name, so that it can be continued.

Ray Train's `TorchTrainer` starts the workers. A single worker without a cluster trains
in this process, as starting Ray and a trainer takes 30 s of processor time.

`STORAGE/NAME/` holds `run.json` (settings and status), the checkpoints to resume from
(`step-*`, the last one and the best one) and, once the run is finished, the best
weights in `best/`.
"""

from __future__ import annotations

import math
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
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

from core.errors import UserError, one_line, pluralize
from core.files import hold_lock, join, open_uri
from core.schemas import EventsInfo, Inputs, JobRef, RunRecord, RunRef, SidsInfo
from core.tables import find_table, open_table
from models import registry
from models.training import attempts, checkpoint
from models.training.attempts import Attempt
from models.training.checkpoint import BEST, Checkpoint
from pipelines import cluster, faults, tracking
from pipelines.serving import package
from pipelines.training.config import RayOptions, TrainConfig
from pipelines.training.fencing import FencedTorchConfig
from pipelines.training.record import (
    RUN,
    check_same,
    is_longer,
    read_record,
    write_record,
)
from pipelines.training.settings import CheckedTraining
from pipelines.training.stop import STOP_REQUEST
from pipelines.training.worker import (
    Progress,
    Task,
    WorkerContext,
    run_task,
    run_worker,
)
from pipelines.version import code_version, submission_id

# How often Ray Train's controller polls its workers. A worker that reports waits for
# the next poll: by default up to 2 s, which is longer than many epochs.
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")

WATCH_PREEMPTION = "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"
"""Environment variable that starts Ray Train's process for notices of preemption."""
# The node of a local Ray is never preempted, so the process would be useless.
os.environ.setdefault(WATCH_PREEMPTION, "1" if os.environ.get("RAY_ADDRESS") else "0")

UNRESPONSIVE_S = "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S"
"""Environment variable with the seconds after which Ray Train ends an unresponsive
worker."""

RAY_TRAIN_FILES = (".validate_storage_marker", "checkpoint_manager_snapshot.json")
"""Files that Ray Train writes into the folder of a run."""

RETRY_PAUSE_S = 5.0
"""Seconds between the loss of workers and their next start."""

PENDING_CHECK_S = 5.0
"""Seconds between two checks whether workers wait for resources."""

PENDING_REPEAT_S = 30.0
"""Seconds between two messages about the resources that workers wait for."""


@dataclass
class TrainingResult:
    """The result of a training: its best checkpoint and its MLflow run."""

    name: str
    """Name of the run."""
    checkpoint: str
    """Folder with the best weights."""
    best: Checkpoint
    """The best checkpoint's config, metrics and timing."""
    run: RunRef
    """The MLflow run."""
    epochs: int
    """Number of epochs that the run was trained for."""
    seconds: float
    """Duration of this call."""
    was_finished: bool = False
    """Whether an earlier call finished the run, so that this one did nothing."""


@dataclass(frozen=True)
class TrialContext:
    """Settings that a sweep adds to the training of a trial.

    The defaults are for a training outside of a sweep.
    """

    parent_run: str | None = None
    """Id of the sweep's MLflow run, which becomes the parent of the trial's run."""
    tags: dict[str, str] = field(default_factory=dict)
    """Further tags of the MLflow run."""
    on_checkpoint: Callable[[Checkpoint], Any] | None = None
    """Called with every checkpoint. A single worker then trains in this process even
    on a cluster. If the function raises SystemExit, the training ends and the run
    stays open, so that it can be continued or finished later."""
    callbacks: Sequence[UserCallback] = ()
    """Callbacks for Ray Train, used if the training has several workers."""
    lock_timeout_s: float = 0
    """Seconds to wait for another process that holds the run's lock."""


def run_training(
    training: CheckedTraining,
    *,
    say: Callable[[str], None] = print,
    start: Callable[[], None] | None = None,
    trial: TrialContext = TrialContext(),
) -> TrainingResult:
    """Train a model, or continue the run of this name, or return its result.

    A single worker trains in this process unless the job was submitted to a cluster.

    Args:
        training: Training whose settings have been checked.
        say: Called with lines of progress.
        start: Start Ray; called only if workers need it. None if Ray runs already.
        trial: Settings that a sweep adds.
    """
    began = time.monotonic()
    config = training.config
    with lock_run(config.storage, config.name, trial.lock_timeout_s):
        record = find_record(training)
        if record and is_complete(record, config.fit.max_epochs):
            return load_finished(config, record)
        in_process = trains_in_process(config.ray, trial)
        if start and not in_process:
            start_cluster(str(config.tracking_uri), start, say)
        use_gpu = wants_gpu(config.ray) and training.model_class.trains_by_gradient
        check_resources(training, in_process, use_gpu, trial)
        record = prepare_run(training, record, trial, say)
        run = record.run
        attempt = attempts.begin(config.folder)
        task = Task(config, training.hashes, run)
        with end_failed_run(run):
            if in_process:
                train_in_process(task, attempt, use_gpu, trial.on_checkpoint, say)
            else:
                run_workers(task, attempt, use_gpu, say, trial.callbacks)
            last = require_last_checkpoint(config.folder, attempt)
            log_model = config.log_model
            if log_model and training.model_class.logs_every_run:
                say("logging the model to MLflow")
            best = finish_run(config.folder, record, last, log_model)
    return TrainingResult(
        name=config.name,
        checkpoint=join(config.folder, BEST),
        best=best,
        run=run,
        epochs=last.epoch,
        seconds=time.monotonic() - began,
    )


def find_record(training: CheckedTraining) -> RunRecord | None:
    """Return the `run.json` of the run to continue, or None if a new run begins."""
    if training.config.overwrite:
        return None
    config = training.config
    record = read_record(config.folder, str(config.tracking_uri))
    if record and record.status != "opening":
        check_continues(training, record)
    return record


def is_complete(record: RunRecord, max_epochs: int) -> bool:
    """Return whether a run is finished and `max_epochs` asks for no further epochs."""
    return record.status == "finished" and not is_longer(record, max_epochs)


def check_continues(training: CheckedTraining, record: RunRecord) -> None:
    """Raise UserError if a run was begun with other settings, tables or experiment."""
    check_same(record, training.identity, training.hashes)
    config = training.config
    experiment = record.run.experiment
    if config.experiment not in (None, "", experiment):
        raise UserError(
            f"the run '{config.name}' is in the experiment {experiment}, not "
            f"{config.experiment}",
            "name",
        )


def trains_in_process(options: RayOptions, trial: TrialContext) -> bool:
    """Return whether the only worker of a training runs in this process."""
    is_submitted = bool(os.environ.get("RAY_ADDRESS"))
    return options.num_workers == 1 and bool(trial.on_checkpoint or not is_submitted)


def prepare_run(
    training: CheckedTraining,
    record: RunRecord | None,
    trial: TrialContext,
    say: Callable[[str], None],
) -> RunRecord:
    """Open or reopen the MLflow run of a training, after deleting an overwritten run.

    Args:
        training: Training whose settings have been checked.
        record: `run.json` of the run to continue, or None for a new run.
        trial: Settings that a sweep adds.
        say: Called with lines of progress.

    Returns:
        The content of `run.json`.
    """
    if training.config.overwrite:
        delete_run(training.config, say)
    if record is None or record.status == "opening":
        return open_run(training, record, trial, say)
    return reopen_run(training, record, say)


@contextmanager
def end_failed_run(run: RunRef) -> Iterator[None]:
    """End the MLflow run as FAILED or KILLED if the block raises.

    A run is marked as KILLED while its last checkpoint is saved, as a stopped job may
    be killed before the checkpoint is complete. The run stays open on SystemExit, by
    which a sweep stops a trial, and on SupersededError, after which another job trains
    the run.
    """
    marking = threading.Thread(target=tracking.end_stopped, args=[run], daemon=True)
    try:
        with STOP_REQUEST.call_on_request(marking.start):
            yield
    except (SystemExit, attempts.SupersededError):
        raise
    except KeyboardInterrupt:
        if marking.ident is None:  # not raised by the signal handler of `jobs.cli`
            marking.start()
        marking.join()
        raise
    except BaseException:
        tracking.Logger(run).end("FAILED")
        raise


def require_last_checkpoint(folder: str, attempt: Attempt) -> Checkpoint:
    """Return the last checkpoint of a run that this job has trained to its end.

    Raises:
        SupersededError: If another job has continued the run meanwhile.
    """
    attempts.require_job(folder, attempt)
    last = checkpoint.last(folder)
    if last is None:
        raise RuntimeError(f"the run in {folder} ended without a checkpoint")
    return last


def load_finished(config: TrainConfig, record: RunRecord) -> TrainingResult:
    """Return the result of a run that an earlier call finished."""
    best = join(config.folder, BEST)
    return TrainingResult(
        name=config.name,
        checkpoint=best,
        best=checkpoint.read(best),
        run=record.run,
        epochs=record.epochs,
        seconds=0.0,
        was_finished=True,
    )


def start_cluster(
    tracking_uri: str, start: Callable[[], None], say: Callable[[str], None]
) -> None:
    """Start Ray, and connect to MLflow meanwhile.

    Creating a new MLflow store takes about as long as starting Ray.
    """
    with ThreadPoolExecutor(1) as thread:
        is_running = ray.is_initialized()
        store = None if is_running else thread.submit(tracking.connect, tracking_uri)
        start()
    if store:
        with tracking.warn_if_slow(tracking_uri, say):
            store.result()


def check_resources(
    training: CheckedTraining, in_process: bool, use_gpu: bool, trial: TrialContext
) -> None:
    """Check that the workers fit the cluster or machine and can reach MLflow.

    Args:
        training: Training whose settings have been checked.
        in_process: Whether the only worker runs in this process, without Ray.
        use_gpu: Whether workers use a GPU.
        trial: Settings that a sweep adds; the cluster is not checked again for a trial.
    """
    config = training.config
    if not in_process:
        if trial.parent_run is None:  # the sweep has checked the cluster already
            check_cluster(config.ray, config.ray.num_workers, use_gpu)
        nodes = sum(node["Alive"] for node in ray.nodes())
        tracking.check_nodes(str(config.tracking_uri), nodes)
    elif use_gpu and not torch.cuda.is_available():
        raise UserError(
            "ray.use_gpu is true, and this machine has no GPU that PyTorch finds"
        )


def open_run(
    training: CheckedTraining,
    opening: RunRecord | None,
    trial: TrialContext,
    say: Callable[[str], None],
) -> RunRecord:
    """Open the MLflow run of a new training, and write `run.json`.

    Args:
        training: Training whose settings have been checked.
        opening: `run.json` of an earlier job that was killed while it opened the MLflow
            run, whose run is discarded; None if there is none.
        trial: Settings that a sweep adds.
        say: Called with lines of progress.

    Returns:
        The content of `run.json`.
    """
    config, identity = training.config, training.identity
    if opening:
        tracking.discard_opening(opening.opening)
    inputs, uri = config.inputs, str(config.tracking_uri)
    dataset = f"{training.model_class.kind}/{dataset_name(inputs.tables)}"
    experiment = config.experiment or dataset
    opened = tracking.make_opening(uri, experiment)
    write_record(config.folder, RunRecord(status="opening", opening=opened))
    tags = {
        **trial.tags,
        tracking.KEY_TAG: opened["key"],
        tracking.FOLDER_TAG: config.folder,
    }
    if is_simulated(inputs.tables):
        tags[tracking.SIMULATED_TAG] = "true"
    with tracking.warn_if_slow(uri, say):
        run = tracking.open_run(
            uri,
            experiment,
            config.name,
            config.storage,
            config={**identity, **inputs.folders(), "ray": asdict(config.ray)},
            hashes=training.hashes,
            parent=trial.parent_run,
            tags=tags,
        )
    if inputs.sids:  # log the tokenizer's metrics beside the model's
        info = open_table(join(inputs.sids, "sids"), SidsInfo).info
        content = {**asdict(info), **info.measures, "measures": {}}
        tracking.Logger(run).update(collect_numbers(content, "sids"), 0)
    record = RunRecord(
        status="running",
        run=run,
        config=identity,
        given=training.model_class.config_to_dict(training.given_model),
        hashes=training.hashes,
        inputs=inputs.folders(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        jobs=[describe_job()],
    )
    write_record(config.folder, record)
    return record


def describe_job() -> JobRef:
    """Return the version of the code and the Ray submission id of this job."""
    return JobRef(code_version(), submission_id())


def reopen_run(
    training: CheckedTraining, record: RunRecord, say: Callable[[str], None]
) -> RunRecord:
    """Continue the MLflow run of a training, and update `run.json`.

    Returns:
        The content of `run.json`.
    """
    config, run = training.config, record.run
    tracking.reopen(run)
    if is_longer(record, config.fit.max_epochs):
        epochs = config.fit.max_epochs
        say(
            f"note: {config.name} continues to epoch {epochs}, from here with the "
            "learning rates of the longer schedule"
        )
        record = replace(record, config=training.identity, status="running")
        write_record(config.folder, record)
        # MLflow's params cannot change, so a tag has the new value. Without its tags
        # the model is logged and measured again.
        tags = {
            "fit.max_epochs": str(epochs),
            "model": "",
            tracking.WEIGHTS_TAG: "",
        }
        tracking.Logger(run).tag(**tags)
    record = replace(record, inputs=config.inputs.folders())  # tables may have moved
    return record_code(config.folder, record, run, say)


def train_in_process(
    task: Task,
    attempt: Attempt,
    use_gpu: bool,
    on_checkpoint: Callable[[Checkpoint], Any] | None,
    say: Callable[[str], None],
) -> None:
    """Train with one worker in this process.

    Args:
        task: The training, as workers get it.
        attempt: The attempt, which is recorded in the folder of the run.
        use_gpu: Whether to train on the GPU.
        on_checkpoint: Called with the metadata of each new checkpoint, or None.
        say: Called with lines of progress.

    Raises:
        KeyboardInterrupt: If the job was asked to stop, after a checkpoint was saved.
    """
    task.attempt = str(attempts.start(task.config.folder, attempt))
    context = WorkerContext(
        rank=0,
        world_size=1,
        device=torch.device("cuda" if use_gpu else "cpu"),
        local_world_size=1,
        report=on_checkpoint or (lambda new_checkpoint: None),
        say=say,
    )
    run_task(task, context)
    if STOP_REQUEST.requested:
        raise KeyboardInterrupt


def record_code(
    folder: str,
    record: RunRecord,
    run: RunRef,
    say: Callable[[str], None],
) -> RunRecord:
    """Add the version of the code and the job that continue a run to its record.

    If the code has changed since, a note reports it. `run.json` and MLflow's tags keep
    all versions and jobs, as the results come from all of them.

    Args:
        folder: Folder of the run.
        record: Content of `run.json`.
        run: The MLflow run.
        say: Called with lines of progress.

    Returns:
        The new content of `run.json`, which is written already.
    """
    job = describe_job()
    latest = record.jobs[-1]
    if job.code != latest.code:
        say(
            f"note: this run was trained by the code {latest.code}, and continues with "
            f"{job.code}"
        )
    if job != latest:
        record = replace(record, jobs=[*record.jobs, job])
    write_record(folder, record)
    logger = tracking.Logger(run)
    tags = {
        tracking.CODE_TAG: job.code,
        tracking.SUBMISSION_TAG: job.submission_id,
    }
    for tag, value in tags.items():
        values = [part for part in logger.tags.get(tag, "").split(", ") if part]
        if value and value not in values[-1:]:
            logger.tag(**{tag: ", ".join([*values, value])})
    return record


def finish_run(
    folder: str,
    record: RunRecord,
    last: Checkpoint,
    log_model: bool = False,
    stopped: bool = False,
) -> Checkpoint:
    """Publish the best checkpoint of a run, and log its results to MLflow.

    The status in `run.json` becomes `finished` last.

    Args:
        folder: The run's folder.
        record: The content of `run.json`.
        last: The run's last checkpoint.
        log_model: Whether to store the best model in MLflow.
        stopped: Whether the scheduler of a sweep stopped the run early.

    Returns:
        The best checkpoint's `config.json`.
    """
    run = record.run
    best_folder = join(folder, BEST)
    best = checkpoint.read(checkpoint.publish(folder, last))
    curves = tracking.read_curves(join(folder, last.folder))
    # given the curves, the logger also sends points that a stopped trial did not send
    logger = tracking.Logger(run, curves)
    eval_seconds = last.timing.get("eval_seconds", 0.0)
    values = {
        "best/epoch": last.best["epoch"],
        **{f"best/{name}": value for name, value in best.metrics.items()},
        "train/steps": last.step,
        "train/total_seconds": last.timing["train_seconds"] + eval_seconds,
    }
    logger.update(values, last.step)
    logger.tag(checkpoint=best_folder)
    is_served = registry.find(best.name).logs_every_run
    if log_model and is_served and not logger.tags.get("model"):
        inputs = Inputs(**record.inputs)
        logger.tag(model=package.log_model(run, best_folder, inputs))
    logger.end()
    finished = replace(record, status="finished", epochs=last.epoch, stopped=stopped)
    write_record(folder, finished)
    return best


def run_workers(
    task: Task,
    attempt: Attempt,
    use_gpu: bool,
    say: Callable[[str], None],
    callbacks: Sequence[UserCallback] = (),
) -> None:
    """Train with workers of Ray Train, and start them again when workers are lost.

    Args:
        task: Settings of the training, which are sent to the workers.
        attempt: Attempt number of this job.
        use_gpu: Whether each worker has a GPU.
        say: Called with lines of progress.
        callbacks: Callbacks for Ray Train.

    Raises:
        TrainingFailedError: If workers were lost more than `ray.max_failures` times
            without a new checkpoint in between, or for a reason that will not go away.
    """
    options, folder = task.config.ray, task.config.folder
    needs = worker_resources(options, use_gpu)
    os.environ[UNRESPONSIVE_S] = str(options.hang_minutes * 60)
    failures, furthest_step = 0, -1
    while True:
        # Ray Train would retry user errors too, so its retries are off. Each try has a
        # new actor for the progress, as the last one may be lost with its node.
        with stream_progress(
            say, lambda: pending_resources(options.num_workers, needs)
        ) as progress:
            say(f"starting {pluralize(options.num_workers, 'worker')}")
            trainer = make_trainer(task, attempt, use_gpu, progress, callbacks)
            # in the main thread, Ray Train would replace the handler of SIGINT
            thread = ThreadPoolExecutor(1)
            training = thread.submit(trainer.fit)
            try:
                training.result()
                return
            except KeyboardInterrupt:
                save_before_stop(progress, training)
                raise
            except TrainingFailedError as error:
                user_error = faults.find_user_error(error)
                if user_error:
                    raise user_error from error
                step = last_step(folder)
                failures = 1 if step > furthest_step else failures + 1
                furthest_step = max(step, furthest_step)
                if failures > options.max_failures or faults.is_permanent(error):
                    raise
                reason = one_line(list(faults.iter_causes(error))[-1])
                say(
                    f"note: {reason}; continuing from the last checkpoint, "
                    f"{failures} of {options.max_failures} times"
                )
                time.sleep(RETRY_PAUSE_S)
            finally:
                thread.shutdown(wait=False)


def make_trainer(
    task: Task,
    attempt: Attempt,
    use_gpu: bool,
    progress: Any,
    callbacks: Sequence[UserCallback],
) -> TorchTrainer:
    """Return Ray's trainer of a training.

    Args:
        task: Settings of the training, which are sent to the workers.
        attempt: Attempt number of this job.
        use_gpu: Whether each worker has a GPU.
        progress: Handle of a `Progress` actor.
        callbacks: Callbacks for Ray Train.
    """
    config, options = task.config, task.config.ray
    workers, fewest = options.num_workers, options.fewest_workers
    return TorchTrainer(
        run_worker,
        train_loop_config={
            "task": pickle.dumps(task),
            "progress": progress,
            "watch": os.environ[WATCH_PREEMPTION] != "0",
        },
        torch_config=FencedTorchConfig(
            "nccl" if use_gpu else "gloo",
            timeout_s=round(options.hang_minutes * 60),
            folder=config.folder,
            attempt=str(attempt),
        ),
        # mypy reads the class of Train V1, which has no `label_selector` and no range
        scaling_config=ScalingConfig(  # type: ignore[call-arg]
            num_workers=(fewest, workers) if fewest < workers else workers,  # type: ignore[arg-type]
            use_gpu=use_gpu,
            resources_per_worker=worker_resources(options, use_gpu),
            placement_strategy=options.placement_strategy,
            accelerator_type=options.accelerator_type or None,
            label_selector=options.label_selector or None,
        ),
        run_config=RunConfig(
            name=config.name,
            storage_path=config.storage,
            failure_config=FailureConfig(max_failures=0),
            callbacks=list(callbacks),  # type: ignore[arg-type]  # the type of Train V1
        ),
    )


def save_before_stop(progress: Any, training: Future[Any]) -> None:
    """Stop the workers and wait until their last checkpoint is saved.

    Return at once if the training loop has not begun, as there is nothing to save.

    Args:
        progress: Handle of a `Progress` actor.
        training: The running call of `TorchTrainer.fit`.
    """
    with suppress(RayError):
        if not ray.get(progress.stop.remote()):
            return
        while not training.done() and not ray.get(progress.is_saved.remote()):
            time.sleep(0.1)


def last_step(folder: str) -> int:
    """Return the step of the run's last checkpoint.

    The step is 0 without a checkpoint, and -1 if the storage cannot be read.
    """
    try:
        last = checkpoint.last(folder)
    except (OSError, UserError):
        return -1
    return last.step if last else 0


def pending_resources(workers: int, needs: dict[str, float]) -> str | None:
    """Describe the resources that the workers wait for.

    Args:
        workers: Number of workers.
        needs: Resources of one worker, such as {"CPU": 1}.

    Returns:
        A message, or None if the workers do not wait or Ray does not answer.
    """
    bundle = {kind: float(need) for kind, need in needs.items() if need}
    try:
        groups = ray.util.placement_group_table().values()
        pending = [
            list(group["bundles"].values())
            for group in groups
            if group["state"] in ("PENDING", "RESCHEDULING")
        ]
        if [bundle] * workers not in pending:
            return None
        total, free = ray.cluster_resources(), ray.available_resources()
    except RayError:
        return None
    capacity = ", ".join(
        f"{total.get(kind, 0):g} {kind}s, of which {free.get(kind, 0):g} are free"
        for kind in bundle
    )
    demand = ", ".join(f"{kind}: {need:g}" for kind, need in bundle.items())
    return f"waiting for {workers} x {{{demand}}}; the cluster has {capacity}"


def lock_run(
    storage: str, name: str, timeout_s: float = 0
) -> AbstractContextManager[None]:
    """Hold the lock of a run.

    Args:
        storage: Folder of all runs.
        name: Name of the run.
        timeout_s: Seconds to wait for another process that holds the lock.
    """
    busy = f"the run '{name}' in {storage} is being trained by another process"
    return hold_lock(tracking.lock_path(join(storage, name)), busy, timeout_s)


def wants_gpu(options: RayOptions) -> bool:
    """Return whether workers take GPUs.

    With `use_gpu: auto` they do if the cluster has GPUs, or without Ray this machine.
    """
    if options.use_gpu != "auto":
        return options.use_gpu
    if ray.is_initialized():
        return bool(ray.cluster_resources().get("GPU", 0))
    return torch.cuda.is_available()


def worker_resources(options: RayOptions, use_gpu: bool) -> dict[str, float]:
    """Return the resources that Ray reserves for each worker."""
    needs: dict[str, float] = {"CPU": options.cpus_per_worker}
    if use_gpu:
        needs["GPU"] = 1
    if options.memory_gb:
        needs["memory"] = options.memory_gb * 2**30
    if options.accelerator_type:  # as ScalingConfig does for `accelerator_type`
        needs[f"{cluster.ACCELERATOR}{options.accelerator_type}"] = 0.001
    return needs


def check_cluster(options: RayOptions, workers: int, use_gpu: bool) -> None:
    """Raise UserError if the cluster can never hold the workers."""
    fewest = min(options.min_workers or workers, workers)
    cluster.check_room(fewest, worker_resources(options, use_gpu))


def is_simulated(tables: str) -> bool:
    """Return whether the log's mapping file declares it as simulated."""
    uri = join(tables, "events")
    events = find_table(uri, EventsInfo)
    return bool(events and events.config.get("source", {}).get("simulated"))


def dataset_name(tables: str) -> str:
    """Return the name of the folder, or of its parent if it is called `tables`."""
    parts = [part for part in tables.rstrip("/").split("/") if part]
    return parts[-2] if parts[-1] == "tables" and len(parts) > 1 else parts[-1]


def collect_numbers(content: Any, name: str) -> dict[str, float]:
    """Return the numbers in nested content by their path, such as `sids/loss/0`.

    Args:
        content: Dictionaries and lists of any depth; other values are skipped.
        name: First part of each path.
    """
    if isinstance(content, int | float):
        return {name: float(content)}
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(content, dict):
        pairs = content.items()
    elif isinstance(content, list):
        pairs = enumerate(content)
    numbers: dict[str, float] = {}
    for key, value in pairs:
        numbers |= collect_numbers(value, f"{name}/{key}")
    return numbers


def delete_run(config: TrainConfig, say: Callable[[str], None]) -> None:
    """Delete the files of a run that trainings write, and its MLflow run.

    The file with the attempt number stays, as a worker of the last attempt may still be
    alive.
    """
    filesystem, path = open_uri(config.folder)
    entries = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
    record = read_record(config.folder, str(config.tracking_uri))
    if record is None:
        if any(entry.base_name != attempts.ATTEMPT for entry in entries):
            raise UserError(f"{config.folder} is not the folder of a run", "name")
        return
    try:
        if record.status == "opening":
            tracking.discard_opening(record.opening)
        else:
            tracking.delete(record.run)
    except UserError as error:
        say(f"note: {error}")
    for entry in entries:
        if entry.type == fs.FileType.Directory:
            if checkpoint.FOLDER.fullmatch(entry.base_name):
                filesystem.delete_dir(entry.path)
        elif entry.base_name in RAY_TRAIN_FILES:
            filesystem.delete_file(entry.path)
    # deleted last: a killed deletion leaves the folder of a run, not an unknown folder
    filesystem.delete_file(f"{path}/{RUN}")


class ProgressReader:
    """Reader of a `Progress` actor that prints its lines on the driver.

    Args:
        progress: Handle of the actor.
        say: Called with each line.
        describe_pending: Return a message about resources that the workers wait for, or
            None if they do not wait.
    """

    def __init__(
        self,
        progress: Any,
        say: Callable[[str], None],
        describe_pending: Callable[[], str | None],
    ) -> None:
        self.progress, self.say = progress, say
        self.describe_pending = describe_pending
        self.num_lines, self.is_lost = 0, False
        self.stopped = threading.Event()

    def read(self, timeout_s: float | None = None) -> None:
        """Print the new lines; a lost actor is reported once."""
        if self.is_lost:
            return
        try:
            new_lines = self.progress.lines_after.remote(self.num_lines)
            lines = ray.get(new_lines, timeout=timeout_s)
        except RayError as error:
            self.is_lost = True
            self.say(
                "note: no more progress is shown, as the actor that reports it is lost "
                f"({type(error).__name__})"
            )
            return
        for line in lines:
            self.num_lines += 1
            self.say(line)

    def run(self) -> None:
        """Print lines, and resources that workers wait for, until `stopped` is set."""
        checked_at, reported_at = time.monotonic(), -math.inf
        while not self.stopped.wait(0.5):
            self.read()
            now = time.monotonic()
            if self.is_lost or now - checked_at < PENDING_CHECK_S:
                continue
            checked_at = now
            if now - reported_at < PENDING_REPEAT_S or self.is_alive():
                continue
            message = self.describe_pending()
            if message:
                reported_at = now
                self.say(message)

    def is_alive(self) -> bool:
        """Return whether a worker is alive; True if Ray does not answer."""
        try:
            return bool(ray.get(self.progress.is_alive.remote(), timeout=60))
        except RayError:
            return True


@contextmanager
def stream_progress(
    say: Callable[[str], None],
    describe_pending: Callable[[], str | None] = lambda: None,
) -> Iterator[Any]:
    """Start a `Progress` actor for rank 0's lines, and a thread that prints them.

    The actor runs on the driver's node, whose loss ends the training anyway. If only
    the actor is lost, the training continues without lines of progress.

    Args:
        say: Called with each line.
        describe_pending: Return a message about resources that the workers wait for, or
            None if they do not wait.

    Yields:
        The handle of the actor.
    """
    node = ray.get_runtime_context().get_node_id()
    on_this_node = NodeAffinitySchedulingStrategy(node, soft=False)
    progress = Progress.options(scheduling_strategy=on_this_node).remote()  # type: ignore[attr-defined]
    reader = ProgressReader(progress, say, describe_pending)
    thread = threading.Thread(target=reader.run, daemon=True, name="progress")
    thread.start()
    try:
        yield progress
    finally:
        reader.stopped.set()
        thread.join(timeout=10)
        reader.read(timeout_s=60)
        ray.kill(progress)
