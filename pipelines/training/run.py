"""Run a training under a fixed storage folder and name, so that it can be continued.

Workers are those of a `TorchTrainer`. A single worker that is not on a cluster trains
in this process, as starting Ray and a trainer takes 30 s of processor time.

`STORAGE/NAME/` holds `run.json` (settings and status), the checkpoints to resume from
(`step-*`, the last one and the best one) and, when the run is finished, `best/`: the
weights to use.
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
from dataclasses import asdict, dataclass, field
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
from pipelines import cluster, faults, tracking
from pipelines.serving import package
from pipelines.training.config import FEWER, RayOptions, TrainConfig
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
from pipelines.training.worker import Progress, Task, WorkerContext, perform, worker

# How often Ray Train's controller asks for reports. A worker that has one waits until
# it is asked: by default up to 2 s, which is longer than many an epoch.
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
WATCH = "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"
# A local Ray's node is not taken away with notice: one process fewer.
os.environ.setdefault(WATCH, "1" if os.environ.get("RAY_ADDRESS") else "0")

UNRESPONSIVE_S = "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S"
"""Variable with the seconds after which Ray Train ends a worker that does not
answer."""

RETRY_PAUSE_S = 5.0
"""Seconds between the loss of workers and their next start."""

PENDING_CHECK_S, PENDING_REPEAT_S = 5.0, 30.0
"""Seconds between two checks whether workers wait for resources, and between two lines
about it."""


@dataclass
class Trained:
    """The result of a training."""

    name: str
    """Name of the run."""
    checkpoint: str
    """Folder with the best weights."""
    about: Checkpoint
    """The best checkpoint's config, metrics and timing."""
    run: tracking.RunRef
    """The MLflow run."""
    epochs: int
    """Epochs of the run."""
    seconds: float
    """Time of this call."""
    already: bool = False
    """Whether the run was finished before, so that nothing was done."""


@dataclass(frozen=True)
class TrialContext:
    """Settings of a training that is a trial of a sweep; the defaults are for any other training."""

    parent_run: str | None = None
    """Id of the sweep's MLflow run, whose child the trial's run is."""
    tags: dict[str, str] = field(default_factory=dict)
    """Further tags of the MLflow run."""
    on_checkpoint: Callable[[Checkpoint], Any] | None = None
    """Called with every checkpoint. One worker then trains in this process on a cluster
    too. A SystemExit that the function raises leaves the run as it is, to be continued
    or concluded."""
    callbacks: Sequence[UserCallback] = ()
    """Ray Train's callbacks of a training with several workers."""
    lock_timeout_s: float = 0
    """Seconds to wait for another process that holds the run."""


def run_training(
    training: CheckedTraining,
    *,
    say: Callable[[str], None] = print,
    start: Callable[[], None] | None = None,
    trial: TrialContext = TrialContext(),
) -> Trained:
    """Train a model, continue the run of this name, or find that it is finished.

    One worker trains in this process unless the job was submitted to a cluster.

    Args:
        training: The training.
        say: Called with lines of progress.
        start: Start Ray if workers need it; by default Ray runs already.
        trial: Settings of a trial of a sweep.

    Raises:
        UserError: for what the user can correct, if possible before anything is started
            or written.
    """
    began = time.monotonic()
    config = training.config
    for note in training.notes:
        say(f"note: {note}")
    with lock_run(config.storage, config.name, trial.lock_timeout_s):
        record = None if config.overwrite else read_record(config.folder)
        if record and record["status"] != "opening":
            check_continues(training, record)
            if record["status"] == "finished" and not is_longer(
                record, config.fit.max_epochs
            ):
                return load_finished(config, record)
        in_process = config.ray.num_workers == 1 and bool(
            trial.on_checkpoint or not os.environ.get("RAY_ADDRESS")
        )
        if start and not in_process:
            start_cluster(str(config.tracking.tracking_uri), start, say)
        use_gpu = wants_gpu(config.ray) and training.model_class.trains_by_gradient
        check_resources(training, in_process, use_gpu, trial)
        if config.overwrite:
            delete_run(config.folder, say)
        if record is None or record["status"] == "opening":
            record = open_run(training, record, trial, say)
        else:
            record = reopen_run(training, record, say)
        run = tracking.RunRef(**record["tracking"])
        attempt = attempts.begin(config.folder)
        task = Task(config, training.hashes, run)
        try:
            if in_process:
                train_here(task, attempt, use_gpu, trial.on_checkpoint, say)
            else:
                run_workers(task, attempt, use_gpu, say, trial.callbacks)
            attempts.require_job(config.folder, attempt)
            last = checkpoint.last(config.folder)
            if last is None:
                raise RuntimeError(
                    f"the run in {config.folder} ended without a checkpoint"
                )
            log_model = config.tracking.log_model
            if log_model and training.model_class.logs_every_run:
                say("logging the model to MLflow")
            about = conclude(config.folder, record, last, log_model)
        except (SystemExit, attempts.SupersededError):
            raise  # a sweep stops the trial where it stands, or another job has the run
        except KeyboardInterrupt:
            tracking.end_stopped(run)
            raise
        except BaseException:
            tracking.Logger(run).end("FAILED")
            raise
    best = join(config.folder, BEST)
    seconds = time.monotonic() - began
    return Trained(config.name, best, about, run, last.epoch, seconds)


def check_continues(training: CheckedTraining, record: dict[str, Any]) -> None:
    """Raise UserError if a run was begun with other settings, tables or experiment."""
    check_same(record, training.identity, training.hashes, training.remedy)
    config, before = training.config, record["tracking"]["experiment"]
    if config.tracking.experiment not in (None, "", before):
        raise UserError(
            f"the run '{config.name}' is in the experiment {before}, not {config.tracking.experiment}; leave out "
            f"--experiment, or {training.remedy}"
        )


def load_finished(config: TrainConfig, record: dict[str, Any]) -> Trained:
    """Return the result of a run that was finished before."""
    best = join(config.folder, BEST)
    return Trained(
        name=config.name,
        checkpoint=best,
        about=checkpoint.read(best),
        run=tracking.RunRef(**record["tracking"]),
        epochs=record["epochs"],
        seconds=0.0,
        already=True,
    )


def start_cluster(
    tracking_uri: str, start: Callable[[], None], say: Callable[[str], None]
) -> None:
    """Start Ray, and meanwhile MLflow's store: making a new one takes as long."""
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
    """Raise UserError if the workers can never have their resources."""
    config = training.config
    if not in_process:
        if trial.parent_run is None:  # the sweep has checked the cluster already
            check_cluster(config.ray, config.ray.num_workers, use_gpu)
        nodes = sum(node["Alive"] for node in ray.nodes())
        tracking.check_nodes(str(config.tracking.tracking_uri), nodes)
    elif use_gpu and not torch.cuda.is_available():
        raise UserError(
            "ray.use_gpu is true, and this machine has no GPU that PyTorch finds; leave it out"
        )


def open_run(
    training: CheckedTraining,
    opening: dict[str, Any] | None,
    trial: TrialContext,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Open the MLflow run of a new training, and write `run.json`.

    Args:
        training: The training.
        opening: `run.json` of a run that was killed while its MLflow run was opened.
        trial: Settings of a trial of a sweep.
        say: Called with lines of progress.

    Returns:
        The content of `run.json`.
    """
    config, identity = training.config, training.identity
    if opening:
        tracking.discard(opening["opening"])
    inputs, uri = config.inputs, str(config.tracking.tracking_uri)
    dataset = f"{training.model_class.family}/{dataset_name(inputs.tables)}"
    experiment = config.tracking.experiment or dataset
    opened = tracking.opening(uri, experiment)
    write_record(config.folder, {"status": "opening", "opening": opened})
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
    if inputs.sids:  # metrics of the tokenizer stand beside those of the model
        info = read_manifest(join(inputs.sids, "sids"), "sids").info
        tracking.Logger(run).update(collect_numbers(info, "sids"), 0)
    record = {
        "config": identity,
        "hashes": training.hashes,
        "tracking": run.to_dict(),
        "status": "running",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "inputs": inputs.folders(),
        "given": training.model_class.config_to_dict(training.given_model),
        "code": code_version(),
        "submission_id": submission_id(),
    }
    write_record(config.folder, record)
    return record


def reopen_run(
    training: CheckedTraining, record: dict[str, Any], say: Callable[[str], None]
) -> dict[str, Any]:
    """Continue the MLflow run of a training, and update `run.json`.

    Returns:
        The content of `run.json`.
    """
    config, run = training.config, tracking.RunRef(**record["tracking"])
    if is_longer(record, config.fit.max_epochs):
        epochs = config.fit.max_epochs
        say(
            f"note: {config.name} goes on to epoch {epochs}, with the learning rates of that schedule from here"
        )
        record = {**record, "config": training.identity, "status": "running"}
        write_record(config.folder, record)
        # MLflow's params never change; the model is logged and measured anew
        tags = {
            "fit.max_epochs": str(epochs),
            "model": "",
            tracking.WEIGHTS_TAG: "",
        }
        tracking.Logger(run).tag(**tags)
    tracking.reopen(run)
    record = {**record, "inputs": config.inputs.folders()}  # tables may have moved
    return record_code(config.folder, record, run, say)


def train_here(
    task: Task,
    attempt: Attempt,
    use_gpu: bool,
    on_checkpoint: Callable[[Checkpoint], Any] | None,
    say: Callable[[str], None],
) -> None:
    """Train with one worker in this process."""
    task.attempt = str(attempts.start(task.config.folder, attempt))
    device = torch.device("cuda" if use_gpu else "cpu")
    report = on_checkpoint or (lambda about: None)
    perform(task, WorkerContext(0, 1, device, 1, report, say))
    if STOP_REQUEST.requested:
        raise KeyboardInterrupt


def record_code(
    folder: str,
    record: dict[str, Any],
    run: tracking.RunRef,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Return the record of a continued run with the code and the job that continue it.

    A run that continues with other code says so, also in MLflow: its results are those
    of no single version.
    """
    before, code = record.get("code", "unknown"), code_version()
    if code != before:
        say(f"note: this run was trained by the code {before}, and goes on with {code}")
    record = {**record, "code": code, "submission_id": submission_id()}
    write_record(folder, record)
    logger = tracking.Logger(run)
    tags = {tracking.CODE_TAG: code, tracking.SUBMISSION_TAG: submission_id()}
    for tag, value in tags.items():
        values = [part for part in logger.tags.get(tag, "").split(", ") if part]
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
    """End a run: publish its best checkpoint, log the result to MLflow, and finish `run.json`.

    Args:
        folder: The run's folder.
        record: The content of `run.json`.
        last: The run's last checkpoint.
        log_model: Whether to store the best model in MLflow.
        more: Further values for `run.json`.

    Returns:
        The best checkpoint's `config.json`.
    """
    run, best = tracking.RunRef(**record["tracking"]), join(folder, BEST)
    about = checkpoint.read(checkpoint.publish(folder, last))
    curves = tracking.read_curves(join(folder, last.folder))
    logger = tracking.Logger(run, curves)  # a trial that was stopped may owe points
    eval_seconds = last.timing.get("eval_seconds", 0.0)
    values = {
        "best/epoch": last.best["epoch"],
        **{f"best/{name}": value for name, value in about.metrics.items()},
        "train/steps": last.step,
        "train/total_seconds": last.timing["train_seconds"] + eval_seconds,
    }
    logger.update(values, last.step)
    logger.tag(checkpoint=best)
    tracking.log_curves(run, curves)
    is_served = registry.find(about.name).logs_every_run
    if log_model and is_served and not logger.tags.get("model"):
        logger.tag(model=package.log_model(run, best, Inputs(**record["inputs"])))
    logger.end()
    write_record(folder, {**record, "status": "finished", "epochs": last.epoch, **more})
    return about


def run_workers(
    task: Task,
    attempt: Attempt,
    use_gpu: bool,
    say: Callable[[str], None],
    callbacks: Sequence[UserCallback] = (),
) -> None:
    """Train with workers of Ray Train, which continue after losses."""
    options, folder = task.config.ray, task.config.folder
    needs = worker_resources(options, use_gpu)
    os.environ[UNRESPONSIVE_S] = str(options.hang_minutes * 60)
    failures, furthest_step = 0, -1
    while True:
        # Ray would repeat an error of the user, so losses are retried here. The actor
        # of the progress is new each time, as it may have been lost too.
        with stream_progress(
            say, lambda: pending_resources(options.num_workers, needs)
        ) as progress:
            trainer = make_trainer(task, attempt, use_gpu, progress, callbacks)
            # in the main thread, Ray Train would take SIGINT for itself
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
                say(describe_retry(error, failures, options.max_failures))
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
        task: The training.
        attempt: Number of the job.
        use_gpu: Whether each worker has a GPU.
        progress: Actor of the class `Progress`.
        callbacks: Ray Train's callbacks.
    """
    config, options = task.config, task.config.ray
    workers, fewest = options.num_workers, options.fewest_workers
    return TorchTrainer(
        worker,
        train_loop_config={
            "task": pickle.dumps(task),
            "progress": progress,
            "watch": os.environ[WATCH] != "0",
        },
        torch_config=FencedTorchConfig(
            "nccl" if use_gpu else "gloo",
            timeout_s=round(options.hang_minutes * 60),
            folder=config.folder,
            attempt=str(attempt),
        ),
        scaling_config=ScalingConfig(  # type: ignore[call-arg]  # label_selector is of version 2
            num_workers=(fewest, workers) if fewest < workers else workers,  # type: ignore[arg-type]  # the class of version 1 has no range
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
            callbacks=list(callbacks),  # type: ignore[arg-type]  # Ray names those of its version 1
        ),
    )


def describe_retry(error: BaseException, failures: int, max_failures: int) -> str:
    """Return a note on a loss of workers after which the training continues."""
    cause = list(faults.iter_causes(error))[-1]
    why = faults.explain(error) or faults.first_line(cause)
    tries = f"{failures} of {max_failures} times"
    return f"note: {why.partition(';')[0]}; going on from the last checkpoint, {tries}"


def save_before_stop(progress: Any, training: Future[Any]) -> None:
    """Let workers that train save a checkpoint, and wait for it; return at once if none of them trains yet."""
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


def pending_resources(workers: int, needs: dict[str, float]) -> str | None:
    """Describe the resources that the workers wait for.

    Args:
        workers: Number of workers.
        needs: Resources of each of them.

    Returns:
        A line, or None if they do not wait or Ray does not answer.
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
    has = ", ".join(
        f"{total.get(kind, 0):g} {kind}s, of which {free.get(kind, 0):g} are free"
        for kind in bundle
    )
    each = ", ".join(f"{kind}: {need:g}" for kind, need in bundle.items())
    return f"waiting for {workers} x {{{each}}}; the cluster has {has}"


def lock_run(
    storage: str, name: str, timeout_s: float = 0
) -> AbstractContextManager[None]:
    """Hold the lock of a run, and refuse if another process holds it."""
    busy = f"the run '{name}' in {storage} is being trained by another process; wait for it or choose another --name"
    return hold_lock(tracking.lock_of(join(storage, name)), busy, timeout_s)


def wants_gpu(options: RayOptions) -> bool:
    """Return whether workers take GPUs; auto: if the cluster has any, or without Ray this machine."""
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
    if options.accelerator_type:  # ScalingConfig's `accelerator_type` adds the same
        needs[f"{cluster.ACCELERATOR}{options.accelerator_type}"] = 0.001
    return needs


def check_cluster(options: RayOptions, workers: int, use_gpu: bool) -> None:
    """Raise UserError if the cluster never has room for the workers, which would wait for ever."""
    remedy = f"{FEWER}, or give --ray.use_gpu false" if use_gpu else FEWER
    fewest = min(options.min_workers or workers, workers)
    cluster.check_room(fewest, worker_resources(options, use_gpu), remedy)


def is_simulated(tables: str) -> bool:
    """Return whether the mapping file says that the log is simulated."""
    uri = join(tables, "events")
    return has_manifest(uri) and bool(
        read_manifest(uri, "events").config.get("source", {}).get("simulated")
    )


def dataset_name(tables: str) -> str:
    """Return the dataset's name from the manifest of the sequences, else the folder's name."""
    manifest = read_manifest(join(tables, "sequences"), "sequences")
    for content in (manifest.info, manifest.config):
        if isinstance(content.get("dataset"), str):
            return str(content["dataset"])
    parts = [part for part in tables.rstrip("/").split("/") if part]
    return parts[-2] if parts[-1] == "tables" and len(parts) > 1 else parts[-1]


def collect_numbers(content: Any, name: str) -> dict[str, float]:
    """Return the numbers in nested content, each under the path to it."""
    if isinstance(content, int | float):
        return {name: float(content)}
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(content, dict):
        pairs = content.items()
    elif isinstance(content, list):
        pairs = enumerate(content)
    numbers: dict[str, float] = {}
    for key, part in pairs:
        numbers |= collect_numbers(part, f"{name}/{key}")
    return numbers


def delete_run(folder: str, say: Callable[[str], None]) -> None:
    """Delete the content of a run's folder, and its MLflow run.

    The number of its last attempt stays, as a worker of that attempt may still be
    alive.

    Raises:
        UserError: if the folder holds something else.
    """
    filesystem, path = open_uri(folder)
    infos = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
    entries = [info for info in infos if info.base_name != attempts.ATTEMPT]
    record: dict[str, Any] | None
    try:
        record = read_record(folder)
    except UserError:  # a damaged record is still that of a run
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
    for entry in entries:  # run.json last, as it marks the folder as a run's
        if entry.type == fs.FileType.Directory:
            filesystem.delete_dir(entry.path)
        elif entry.base_name != RUN:
            filesystem.delete_file(entry.path)
    if record is not None:
        filesystem.delete_file(f"{path}/{RUN}")


class ProgressReader:
    """Hands the lines of a `Progress` actor on to the driver's output."""

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
        """Hand on the new lines."""
        if self.is_lost:
            return
        try:
            new = self.progress.since.remote(self.num_lines)
            lines = ray.get(new, timeout=timeout_s)
        except RayError as error:
            self.is_lost = True
            self.say(
                f"note: no more progress is shown, as the actor that tells it is lost ({type(error).__name__})"
            )
            return
        for line in lines:
            self.num_lines += 1
            self.say(line)

    def run(self) -> None:
        """Hand on lines until `stopped` is set, and name resources that the workers wait for."""
        checked_at, said_at = time.monotonic(), -math.inf
        while not self.stopped.wait(0.5):
            self.read()
            now = time.monotonic()
            if self.is_lost or now - checked_at < PENDING_CHECK_S:
                continue
            checked_at = now
            if now - said_at < PENDING_REPEAT_S or self.is_alive():
                continue
            line = self.describe_pending()
            if line:
                said_at = now
                self.say(line)

    def is_alive(self) -> bool:
        """Return whether a worker is alive; true if Ray does not answer."""
        try:
            return bool(ray.get(self.progress.is_alive.remote(), timeout=60))
        except RayError:
            return True


@contextmanager
def stream_progress(
    say: Callable[[str], None],
    describe_pending: Callable[[], str | None] = lambda: None,
) -> Iterator[Any]:
    """Start an actor for rank 0's lines of progress, and a thread that hands them on.

    The actor is on the driver's node, whose loss ends the training anyway. If only the
    actor is lost, its lines are.

    Args:
        say: Called with each line.
        describe_pending: Return a line about resources that workers wait for, or None.

    Yields:
        The actor, of the class `Progress`.
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
