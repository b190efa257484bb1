"""Run the training loop in a worker, and save, report and log what it yields.

All ranks report a checkpoint at the same events of the loop. Before that, rank 0 saves
the checkpoint; it also logs to MLflow and sends progress to the driver.
"""

from __future__ import annotations

import math
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray import train
from ray.exceptions import RayError
from ray.train.torch import get_device

from core.errors import pluralize
from core.files import join
from core.schemas import RunRef
from models.loaded_model import check_hashes
from models.metrics.ranking_metrics import format_metric
from models.training import attempts, checkpoint
from models.training.attempts import UNNUMBERED, Attempt
from models.training.checkpoint import Checkpoint
from models.training.loop import (
    ASK,
    CONTINUE,
    STOP,
    Report,
    best_fields,
    describe,
    drop_undefined,
    fit,
)
from models.training_run import TrainingRun
from pipelines import tracking
from pipelines.training.config import TrainConfig
from pipelines.training.fencing import worker_attempt
from pipelines.training.stop import STOP_REQUEST


@ray.remote(num_cpus=0)
class Progress:
    """Actor that exchanges messages between the workers of a training and the driver.

    Workers send lines of progress and heartbeats; the driver sends a request to stop.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.last_heartbeat = -math.inf
        self.trains = self.stopping = self.saved = False

    def say(self, line: str) -> None:
        """Add a line for the driver to print."""
        self.lines.append(line)

    def lines_after(self, num_lines: int) -> list[str]:
        """Return all lines but the first `num_lines`."""
        return self.lines[num_lines:]

    def record_heartbeat(self, trains: bool) -> bool:
        """Record a heartbeat of a worker.

        Args:
            trains: Whether the worker's training loop has begun.

        Returns:
            Whether the worker is to save a checkpoint and stop.
        """
        self.trains |= trains
        self.last_heartbeat = time.monotonic()
        return self.stopping

    def stop(self) -> bool:
        """Request that the workers save a checkpoint and stop.

        Returns:
            False if no training loop has begun, so that there is nothing to save.
        """
        self.stopping = True
        return self.trains

    def mark_saved(self) -> None:
        """Record that a stopped training has saved its checkpoint."""
        self.saved = True

    def is_saved(self) -> bool:
        """Return whether a stopped training has saved its checkpoint."""
        return self.saved

    def is_alive(self) -> bool:
        """Return whether a worker sent a heartbeat in the last `ALIVE_S` seconds."""
        return time.monotonic() - self.last_heartbeat < ALIVE_S


class Heartbeat:
    """Thread of a worker that sends heartbeats and receives a stop request.

    Args:
        progress: Handle of a `Progress` actor.
    """

    def __init__(self, progress: Any) -> None:
        self.progress = progress
        self.trains = self.stopping = False
        threading.Thread(target=self._send, daemon=True, name="heartbeat").start()

    def _send(self) -> None:
        while True:
            stopping = self.progress.record_heartbeat.remote(self.trains)
            with suppress(RayError):  # the actor is lost; the training continues
                self.stopping = ray.get(stopping)
            time.sleep(HEARTBEAT_S)


HEARTBEAT_S = 0.5
"""Seconds between two heartbeats. A stop request arrives with one, and by default Ray
kills a stopped job 3 seconds later, even if it is saving a checkpoint."""

ALIVE_S = 20.0
"""Seconds for which a worker counts as alive after a heartbeat."""

NOTICE_S = 2.0
"""Seconds between two checks for preemption notices of nodes."""


@dataclass
class Task:
    """A checked training, as the driver sends it to its workers."""

    config: TrainConfig
    """Options of the training, in which the model's own defaults are resolved."""
    hashes: dict[str, str]
    """Hashes of the tables that the driver checked."""
    run: RunRef | None
    """The MLflow run."""
    attempt: str = str(UNNUMBERED)
    """Number of this attempt at the training (`models/training/attempts.py`)."""


def threads_per_worker(option: int, local_world_size: int) -> int:
    """Return the number of threads that PyTorch uses in a worker.

    Ray starts workers with OMP_NUM_THREADS=1, which would leave other cores idle.

    Args:
        option: Value of `ray.threads`; 0 divides the machine's cores among its workers.
        local_world_size: Number of workers on this machine.
    """
    return option or max(1, len(os.sched_getaffinity(0)) // local_world_size)


@dataclass
class WorkerContext:
    """Rank, device and reporting callbacks of one training worker."""

    rank: int
    """Number of the worker, from 0."""
    world_size: int
    """Number of workers."""
    device: torch.device
    """Device of the worker's model."""
    local_world_size: int
    """Number of workers on this machine, which share its cores."""
    report: Callable[[Checkpoint], Any]
    """Called with every checkpoint, on every rank."""
    say: Callable[[str], Any]
    """Send a line of progress to the driver; called by rank 0."""
    heartbeat: Heartbeat | None = None
    """Thread that receives stop requests; None if the driver is this process."""
    uploads: checkpoint.Uploads = field(default_factory=checkpoint.Uploads)
    """Thread that uploads checkpoints to a remote storage."""
    has_new_notice: Callable[[], bool] | None = None
    """Return whether a node of the training has received a new preemption notice. The
    call is a collective of all workers. None if nodes are never preempted."""


class PreemptionNotices:
    """Preemption notices of Ray Train, of which each node's is reported once."""

    def __init__(self) -> None:
        self.preempted_nodes: set[str] = set()

    def has_new(self) -> bool:
        """Return whether a further node has received a notice."""
        info = train.get_preemption_info()
        new_nodes = set(info.preempted_node_ids if info else [])
        new_nodes -= self.preempted_nodes
        self.preempted_nodes |= new_nodes
        return bool(new_nodes)


def report_to_ray(saved: Checkpoint) -> None:
    """Report a checkpoint's position and metrics to Ray Train."""
    train.report({"epoch": saved.epoch, "step": saved.step, **saved.metrics})


def run_worker(config: dict[str, Any]) -> None:
    """Run a worker of Ray Train.

    Args:
        config: `task` is a pickled `Task`; unpickled it would make Ray Train's
            controller import PyTorch and MLflow. `progress` is the handle of a
            `Progress` actor, and `watch` says whether nodes may be preempted.
    """
    task: Task = pickle.loads(config["task"])
    task.attempt = worker_attempt()
    ray_context = train.get_context()
    heartbeat = Heartbeat(config["progress"])
    context = WorkerContext(
        rank=ray_context.get_world_rank(),
        world_size=ray_context.get_world_size(),
        device=get_device(),
        local_world_size=ray_context.get_local_world_size(),
        report=report_to_ray,
        say=config["progress"].say.remote,
        heartbeat=heartbeat,
        has_new_notice=PreemptionNotices().has_new if config["watch"] else None,
    )
    run_task(task, context)
    if heartbeat.stopping and context.rank == 0:
        ray.get(config["progress"].mark_saved.remote())


def run_task(task: Task, worker: WorkerContext) -> None:
    """Train from the run's last checkpoint to the end, or until a stop is requested."""
    config = task.config
    threads = threads_per_worker(config.ray.threads, worker.local_world_size)
    torch.set_num_threads(threads)
    last = find_last_checkpoint(config.folder, worker)
    run = TrainingRun.build(
        config.model,
        config.fit,
        config.inputs,
        device=worker.device,
        rank=worker.rank,
        world=worker.world_size,
        last=last,
        init=config.init,
    )
    run.check_metric()
    check_hashes(run.catalogue.versions, task.hashes)
    state = run.resume(config.folder, last) if last else None
    if worker.rank == 0:
        for line in describe_run(run, worker, config.ray.num_workers, last, state):
            worker.say(line)
    with ExitStack() as stack:
        stack.callback(worker.uploads.wait)  # also if a sweep stops the training
        logger = None
        if worker.rank == 0 and task.run:
            logger = open_logger(task, task.run, run, worker, last)
            stack.enter_context(
                tracking.log_system_metrics(task.run, logger.check_attempt)
            )
        if run.model.trains_by_gradient:
            try:
                with STOP_REQUEST.defer_to_loop():
                    train_sgd(run, task, state, last, worker, logger)
            except SystemExit:  # a sweep stops the training
                if logger:
                    with suppress(attempts.SupersededError):
                        logger.flush()
                raise
        elif last is None:
            fit_in_one_pass(run, task, worker, logger)
        is_stopping = StopRequests(worker).should_stop()
        timeout_s = tracking.STOP_PATIENCE_S if is_stopping else None
        flush_seconds = logger.flush(timeout_s) if logger else 0.0
        if flush_seconds >= 1:
            worker.say(f"waited {flush_seconds:.0f} s for MLflow to store the metrics")


def describe_run(
    run: TrainingRun,
    worker: WorkerContext,
    num_workers: int,
    last: Checkpoint | None,
    state: dict[str, Any] | None,
) -> Iterator[str]:
    """Yield messages about a training before its first step.

    Args:
        run: Model and data of the training.
        worker: Context of rank 0.
        num_workers: Number of workers that the options request.
        last: Checkpoint that the training continues from, or None.
        state: State of the training loop in that checkpoint, or None.
    """
    workers = pluralize(num_workers, "worker")
    if worker.world_size < num_workers:
        workers = f"{worker.world_size} of {workers}"
    yield (
        f"{workers} on {worker.device.type}, "
        f"{pluralize(torch.get_num_threads(), 'thread')} each; "
        f"{pluralize(count_parameters(run), 'parameter')}"
    )
    num_train, num_val = (
        dataset.num_requests - dataset.num_without_history
        for dataset in (run.train.dataset, run.val)
    )
    yield (
        f"{num_train:,} training and {num_val:,} validation "
        f"{run.val.request_unit} here, "
        f"{pluralize(run.train.steps(0), 'step')} per epoch"
    )
    yield from run.messages
    parts = run.model.parameter_counts()
    if parts:
        counts = ", ".join(f"{name} {number:,}" for name, number in parts.items())
        yield f"parameters: {counts}"
    if last is not None:
        is_within_epoch = bool(state and state["position"]["step_in_epoch"])
        preposition = "in" if is_within_epoch else "after"
        yield f"continuing {preposition} epoch {last.epoch}, step {last.step}"


def count_parameters(run: TrainingRun) -> int:
    """Return the number of the model's parameters."""
    return sum(parameter.numel() for parameter in run.model.parameters())


def open_logger(
    task: Task,
    mlflow_run: RunRef,
    run: TrainingRun,
    worker: WorkerContext,
    last: Checkpoint | None,
) -> tracking.Logger:
    """Open the logger of the MLflow run, and log the model's size and the hardware.

    Args:
        task: The training, for the run's folder and attempt number.
        mlflow_run: The MLflow run.
        run: Model and data of the training.
        worker: Context of rank 0.
        last: Checkpoint that the training continues from, whose curves the logger
            takes over, or None.
    """
    folder = task.config.folder
    tracking.mark_reachable(mlflow_run.uri)
    is_gpu = worker.device.type == "cuda"
    gpu = torch.cuda.get_device_name(worker.device) if is_gpu else ""
    curves = tracking.read_curves(join(folder, last.folder)) if last else None
    attempt = Attempt.parse(task.attempt)
    with tracking.warn_if_slow(mlflow_run.uri, worker.say):
        logger = tracking.Logger(
            mlflow_run, curves, partial(attempts.require_current, folder, attempt)
        )
        gpus = f"{worker.world_size} x {gpu}" if gpu else ""
        logger.tag(hardware=tracking.describe_hardware(gpus))
    parts = run.model.parameter_counts()
    sizes = {f"parameters/{name}": number for name, number in parts.items()}
    logger.log({"train/parameters": count_parameters(run), **sizes}, 0)
    return logger


def find_last_checkpoint(folder: str, worker: WorkerContext) -> Checkpoint | None:
    """Return the run's last checkpoint, which rank 0 reads and broadcasts."""
    last = [checkpoint.last(folder) if worker.rank == 0 else None]
    if worker.world_size > 1:
        dist.broadcast_object_list(last, device=worker.device)
    return last[0]


class StopRequests:
    """Requests to stop a training loop or to save a checkpoint at once.

    A signal or the driver requests a stop, a preemption notice a checkpoint.
    """

    def __init__(self, worker: WorkerContext) -> None:
        self.worker = worker
        self.checked_at = -math.inf

    def should_stop(self) -> bool:
        """Return whether a signal or the driver has requested a stop."""
        heartbeat = self.worker.heartbeat
        return STOP_REQUEST.requested or bool(heartbeat and heartbeat.stopping)

    def next_action(self) -> int:
        """Return the action of the training loop before its next step.

        Returns:
            STOP if a stop is requested, ASK on rank 0 every `NOTICE_S` seconds, for all
            workers to call `check_notices`, else CONTINUE.
        """
        if self.should_stop():
            return STOP
        now = time.monotonic()
        is_early = now - self.checked_at < NOTICE_S
        if self.worker.has_new_notice is None or self.worker.rank != 0 or is_early:
            return CONTINUE
        self.checked_at = now
        return ASK

    def check_notices(self) -> bool:
        """Return whether a node has received a preemption notice.

        The call is a collective of all workers.
        """
        is_new = bool(self.worker.has_new_notice and self.worker.has_new_notice())
        if is_new and self.worker.rank == 0:
            self.worker.say("a node will be preempted: saving a checkpoint")
        return is_new


def train_sgd(
    run: TrainingRun,
    task: Task,
    state: dict[str, Any] | None,
    last: Checkpoint | None,
    worker: WorkerContext,
    logger: tracking.Logger | None,
) -> None:
    """Run the training loop; print, log and save what its events report.

    Args:
        run: Model and data of the training.
        task: Settings of the training, as the driver sent them.
        state: State of the loop to continue from, or None.
        last: Checkpoint to continue from, or None.
        worker: Context of this worker.
        logger: Logger of the MLflow run; None except on rank 0.
    """
    timing = {"train_seconds": 0.0, "eval_seconds": 0.0}
    if last:
        timing = dict(last.timing)
    if worker.heartbeat:
        worker.heartbeat.trains = True
    requests = StopRequests(worker)
    run.should_stop = requests.should_stop
    config = task.config
    for report in fit(
        run.model,
        run.train,
        run.validate,
        config.fit,
        means=run.means,
        lr_multipliers=run.lr_multipliers,
        shard=config.ray.shard,
        state=state,
        device=run.device,
        rank=worker.rank,
        world=worker.world_size,
        next_action=requests.next_action,
        has_notice=requests.check_notices,
    ):
        if worker.rank == 0:
            for line in describe_report(report, run):
                worker.say(line)
        if logger and report.points:
            logger.log(report.points, report.step)
        if not report.state:
            continue
        timing["eval_seconds"] += report.eval_seconds
        if report.ends_epoch:
            timing["train_seconds"] += report.seconds
            timing["examples_per_s"] = report.examples_per_s
        new_checkpoint = run.checkpoint(
            epoch=report.epoch,
            step=report.step,
            metrics=drop_undefined(report.metrics),
            best=best_fields(report.state),
            timing=timing,
            tracking=asdict(task.run) if task.run else {},
            attempt=task.attempt,
        )
        new_checkpoint.set_best_folder(last)
        last = new_checkpoint
        save_and_report(run, task, new_checkpoint, report.state, worker, logger)


def describe_report(report: Report, run: TrainingRun) -> Iterator[str]:
    """Yield lines about an epoch, or about progress within an epoch."""
    if report.ends_epoch or not (report.points or report.state):
        yield describe(report, run.fit, run.progress_unit)
    if report.interrupted:
        yield f"stopping: saving a checkpoint of step {report.step}"


def fit_in_one_pass(
    run: TrainingRun, task: Task, worker: WorkerContext, logger: tracking.Logger | None
) -> None:
    """Fit a model that is not trained by gradient, and save it.

    Args:
        run: Model and data of the training.
        task: Settings of the training, as the driver sent them.
        worker: Context of this worker.
        logger: Logger of the MLflow run; None except on rank 0.
    """
    began = time.perf_counter()
    run.fit_in_one_pass()
    seconds = time.perf_counter() - began
    sums, count = run.validate(run.model)
    metrics = run.means(sums) if count else {}
    if run.model.ranks_by:
        worker.say(f"ranks by {run.model.ranks_by}")
    if logger:
        if run.model.ranks_by:
            logger.tag(**{tracking.RANKS_BY_TAG: run.model.ranks_by})
        logger.log({f"val/{name}": value for name, value in metrics.items()}, 1)
        logger.log({"val/examples": count, "train/seconds": seconds}, 1)
    value = metrics.get(run.fit.metric)
    worker.say(
        f"counted in {seconds:.1f} s  val {run.fit.metric} {format_metric(value)}"
    )
    new_checkpoint = run.checkpoint(
        epoch=1,
        step=1,
        metrics=drop_undefined(metrics),
        best={"value": value, "epoch": 1, "step": 1},
        timing={"train_seconds": seconds},
        tracking=asdict(task.run) if task.run else {},
        attempt=task.attempt,
    )
    new_checkpoint.set_best_folder(None)
    save_and_report(run, task, new_checkpoint, None, worker, logger)


def save_and_report(
    run: TrainingRun,
    task: Task,
    new_checkpoint: Checkpoint,
    state: dict[str, Any] | None,
    worker: WorkerContext,
    logger: tracking.Logger | None,
) -> None:
    """Save a checkpoint, with the curves up to it, and report it.

    Rank 0 saves the checkpoint and removes outdated ones. The upload may finish after
    the report.

    Args:
        run: Model and data of the training.
        task: Settings of the training, as the driver sent them.
        new_checkpoint: Position, metrics and timing of the checkpoint.
        state: State of the training loop, or None for a model without one.
        worker: Context of this worker.
        logger: Logger of the MLflow run; None except on rank 0.
    """
    folder = task.config.folder
    curves = {}
    if logger:
        curves[tracking.CURVES] = tracking.curves_to_bytes(logger.curves)
    if worker.rank == 0:
        checkpoint.keep(
            folder, run.model, new_checkpoint, state, worker.uploads, curves
        )
    worker.report(new_checkpoint)
