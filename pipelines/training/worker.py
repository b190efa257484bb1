"""Run the training loop in a worker, and turn its events into checkpoints, reports and metrics.

Every rank reports at the same events. Rank 0 saves the checkpoint before, logs to
MLflow and sends progress to the driver.
"""

from __future__ import annotations

import math
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray import train
from ray.exceptions import RayError
from ray.train.torch import get_device

from models import registry
from models.config import pluralize
from models.loaded_model import require_tables
from models.metrics.ranking_metrics import format_metric
from models.storage import attempts, checkpoint
from models.storage.attempts import UNNUMBERED, Attempt
from models.storage.checkpoint import Checkpoint
from models.storage.uri import join
from models.training.fit import (
    ASK,
    CONTINUE,
    STOP,
    EpochEvent,
    Event,
    HeartbeatEvent,
    StepEvent,
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
    """Lines and heartbeats of a training's workers, and the driver's request to stop."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.last_heartbeat = -math.inf
        self.trains = self.stopping = self.saved = False

    def say(self, line: str) -> None:
        """Add a line for the driver to print."""
        self.lines.append(line)

    def since(self, seen: int) -> list[str]:
        """Return the lines after the first `seen` ones."""
        return self.lines[seen:]

    def note_heartbeat(self, trains: bool) -> bool:
        """Note that a worker lives, and whether its training loop has begun.

        Return whether the training is to save a checkpoint and stop.
        """
        self.trains |= trains
        self.last_heartbeat = time.monotonic()
        return self.stopping

    def stop(self) -> bool:
        """Ask the workers to save a checkpoint and stop.

        Return False if no training loop has begun, so that nothing will be saved.
        """
        self.stopping = True
        return self.trains

    def note_saved(self) -> None:
        """Note that a stopped training has saved its checkpoint."""
        self.saved = True

    def is_saved(self) -> bool:
        """Return whether a stopped training has saved its checkpoint."""
        return self.saved

    def is_alive(self) -> bool:
        """Return whether a worker sent a heartbeat within the last `ALIVE_S` seconds."""
        return time.monotonic() - self.last_heartbeat < ALIVE_S


class Heartbeat:
    """A thread that tells the driver that this worker lives, and learns from it of a stop."""

    def __init__(self, progress: Any) -> None:
        self.progress = progress
        self.trains = self.stopping = False
        threading.Thread(target=self._beat, daemon=True, name="heartbeat").start()

    def _beat(self) -> None:
        while True:
            beat = self.progress.note_heartbeat.remote(self.trains)
            with suppress(RayError):  # the actor is lost; the training continues
                self.stopping = ray.get(beat)
            time.sleep(HEARTBEAT_S)


HEARTBEAT_S = 0.5
"""Seconds between two heartbeats: by default Ray kills a stopped job, checkpoint
included, after 3 seconds."""

ALIVE_S = 20.0
"""Seconds for which a worker counts as alive after a heartbeat."""

NOTICE_S = 2.0
"""Seconds between two questions whether a node is to be taken away."""


@dataclass
class Task:
    """A training as the driver hands it to its workers, which trust it."""

    config: TrainConfig
    """The checked training."""
    hashes: dict[str, str]
    """Hashes of the tables that the driver checked."""
    run: tracking.RunRef | None
    """The MLflow run."""
    attempt: str = str(UNNUMBERED)
    """Number of this attempt at the training (`models/storage/attempts.py`)."""


def threads_per_worker(option: int, workers_here: int) -> int:
    """Return the number of PyTorch's threads.

    Ray starts workers with OMP_NUM_THREADS=1, which idles the other cores.

    Args:
        option: The given number; 0 divides the machine's cores among its workers.
        workers_here: Number of workers on this machine.
    """
    return option or max(1, len(os.sched_getaffinity(0)) // workers_here)


@dataclass
class WorkerContext:
    """Rank, device and reporting callbacks of one training worker."""

    rank: int
    """Number of the worker, from 0."""
    world: int
    """Number of workers."""
    device: torch.device
    """Device of the worker's model."""
    workers_here: int
    """Workers on this machine, which share its cores."""
    report: Callable[[Checkpoint], Any]
    """Called with every checkpoint, on every rank."""
    say: Callable[[str], Any]
    """Send a line of progress to the driver; called by rank 0."""
    heartbeat: Heartbeat | None = None
    """Learns from the driver of a stop, if the driver is another process."""
    uploads: checkpoint.Uploads = field(default_factory=checkpoint.Uploads)
    """Takes checkpoints to a storage elsewhere."""
    has_new_notice: Callable[[], bool] | None = None
    """Return whether there is a new notice that a node of the training is to be taken
    away; a collective of all workers. None if nodes are not taken away with notice."""


def worker(config: dict[str, Any]) -> None:
    """Run a worker of Ray Train.

    Args:
        config: `task` is a pickled `Task`, as Ray's controller reads the values too and
            would load PyTorch and MLflow
            for a `Task`; `progress` is an actor; `watch` says whether nodes may be taken away with notice.
    """
    task: Task = pickle.loads(config["task"])
    task.attempt = worker_attempt()
    ray_context = train.get_context()
    leaving: list[str] = []

    def report(about: Checkpoint) -> None:
        train.report({"epoch": about.epoch, "step": about.step, **about.metrics})

    def has_new_notice() -> bool:
        info = train.get_preemption_info()
        nodes = info.preempted_node_ids if info else []
        new = [node for node in nodes if node not in leaving]
        leaving.extend(new)
        return bool(new)

    heartbeat = Heartbeat(config["progress"])
    context = WorkerContext(
        rank=ray_context.get_world_rank(),
        world=ray_context.get_world_size(),
        device=get_device(),
        workers_here=ray_context.get_local_world_size(),
        report=report,
        say=config["progress"].say.remote,
        heartbeat=heartbeat,
        has_new_notice=has_new_notice if config["watch"] else None,
    )
    perform(task, context)
    if heartbeat.stopping and context.rank == 0:
        ray.get(config["progress"].note_saved.remote())


def perform(task: Task, worker: WorkerContext) -> None:
    """Train from the run's last checkpoint, to the end or until a stop is requested."""
    config = task.config
    threads = threads_per_worker(config.ray.threads, worker.workers_here)
    torch.set_num_threads(threads)
    name = registry.find_by_config(config.model).name
    require_tables(name, config.inputs, task.hashes)
    last = find_last_checkpoint(config.folder, worker)
    run = TrainingRun.build(
        config.model,
        config.fit,
        config.inputs,
        device=worker.device,
        rank=worker.rank,
        world=worker.world,
        last=last,
        init=config.init,
    )
    run.check_metric()
    # again: both the hashes and the tables may have changed while they were read
    require_tables(name, config.inputs, task.hashes)
    state = run.resume(config.folder, last) if last else None
    if worker.rank == 0:
        for line in describe_run(run, worker, last, state):
            worker.say(line)
    with ExitStack() as stack:
        stack.callback(worker.uploads.wait)  # also if a sweep stops the training
        logger = None
        if worker.rank == 0 and task.run:
            logger = open_logger(task, task.run, run, worker, last)
            stack.enter_context(tracking.system_metrics(task.run))
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
            fit_counts(run, task, worker, logger)
        waited_s = logger.flush() if logger else 0.0
        if waited_s >= 1:
            worker.say(f"waited {waited_s:.0f} s for MLflow to take the metrics")


def describe_run(
    run: TrainingRun,
    worker: WorkerContext,
    last: Checkpoint | None,
    state: dict[str, Any] | None,
) -> Iterator[str]:
    """Yield lines about a training before its first step.

    Args:
        run: The training.
        worker: Its first worker.
        last: The checkpoint that it continues from, or None.
        state: State of that checkpoint, or None.
    """
    yield (
        f"{pluralize(worker.world, 'worker')} on {worker.device.type}, "
        f"{pluralize(torch.get_num_threads(), 'thread')} each; "
        f"{pluralize(count_parameters(run), 'parameter')}"
    )
    in_training, in_validation = (
        dataset.num_requests - dataset.num_without_history
        for dataset in (run.train.dataset, run.val)
    )
    requests = f"{in_training:,} training and {in_validation:,} validation {run.val.request_unit} here"
    yield f"{requests}, {pluralize(run.train.steps(0), 'step')} per epoch"
    yield from run.messages
    parts = run.model.parameter_counts()
    if parts:
        counts = ", ".join(f"{name} {number:,}" for name, number in parts.items())
        yield f"parameters: {counts}"
    if last is not None:
        in_epoch = bool(state and state["cursor"]["step_in_epoch"])
        where = "in" if in_epoch else "after"
        yield f"continuing {where} epoch {last.epoch}, step {last.step}"


def count_parameters(run: TrainingRun) -> int:
    """Return the number of the model's parameters."""
    return sum(parameter.numel() for parameter in run.model.parameters())


def open_logger(
    task: Task,
    mlflow_run: tracking.RunRef,
    run: TrainingRun,
    worker: WorkerContext,
    last: Checkpoint | None,
) -> tracking.Logger:
    """Open the logger of the MLflow run, with the curves up to the last checkpoint."""
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
        gpus = f"{worker.world} x {gpu}" if gpu else ""
        logger.tag(hardware=tracking.hardware(gpus))
    parts = run.model.parameter_counts()
    sizes = {f"parameters/{name}": number for name, number in parts.items()}
    logger.log({"train/parameters": count_parameters(run), **sizes}, 0)
    return logger


def find_last_checkpoint(folder: str, worker: WorkerContext) -> Checkpoint | None:
    """Return the run's last checkpoint as rank 0 finds it, the same for all workers."""
    last = [checkpoint.last(folder) if worker.rank == 0 else None]
    if worker.world > 1:
        dist.broadcast_object_list(last, device=worker.device)
    return last[0]


class StopRequests:
    """Requests to stop a training loop, from a signal, the driver or a node that is taken away."""

    def __init__(self, worker: WorkerContext) -> None:
        self.worker = worker
        self.asked_at = -math.inf

    def should_stop(self) -> bool:
        """Return whether the job is to stop."""
        heartbeat = self.worker.heartbeat
        return STOP_REQUEST.requested or bool(heartbeat and heartbeat.stopping)

    def next_action(self) -> int:
        """Return STOP, CONTINUE, or on rank 0 ASK if it is time to ask for notices about nodes."""
        if self.should_stop():
            return STOP
        now = time.monotonic()
        is_early = now - self.asked_at < NOTICE_S
        if self.worker.has_new_notice is None or self.worker.rank != 0 or is_early:
            return CONTINUE
        self.asked_at = now
        return ASK

    def ask_for_notice(self) -> bool:
        """Ask for a new notice that a node is to be taken away; all workers ask together."""
        is_new = bool(self.worker.has_new_notice and self.worker.has_new_notice())
        if is_new and self.worker.rank == 0:
            self.worker.say("a node is to be taken away: saving a checkpoint")
        return is_new


def train_sgd(
    run: TrainingRun,
    task: Task,
    state: dict[str, Any] | None,
    last: Checkpoint | None,
    worker: WorkerContext,
    logger: tracking.Logger | None,
) -> None:
    """Run the training loop to its end, and turn its events into checkpoints, metrics and lines."""
    timing = {"train_seconds": 0.0, "eval_seconds": 0.0}
    if last:
        timing = dict(last.timing)
    if worker.heartbeat:
        worker.heartbeat.trains = True
    requests = StopRequests(worker)
    run.should_stop = requests.should_stop
    for event in fit(
        run.model,
        run.train,
        run.validate,
        run.fit,
        means=run.means,
        lr_multipliers=run.lr_multipliers,
        blocks=run.model.fsdp_blocks() if task.config.ray.fsdp else [],
        state=state,
        device=run.device,
        rank=worker.rank,
        world=worker.world,
        next_action=requests.next_action,
        ask_for_notice=requests.ask_for_notice,
    ):
        if worker.rank == 0:
            for line in describe_event(event, run):
                worker.say(line)
        if isinstance(event, HeartbeatEvent):
            continue
        if logger and not event.interrupted:
            log_event(logger, event)
        if not event.state:
            continue
        timing["eval_seconds"] += event.eval_seconds
        if isinstance(event, EpochEvent):
            timing["train_seconds"] += event.seconds
            timing["examples_per_s"] = event.examples_per_s
        about = run.checkpoint(
            epoch=event.epoch,
            step=event.step,
            metrics=drop_undefined(event.metrics),
            best=best_fields(event.state),
            timing=timing,
            tracking=task.run.to_dict() if task.run else {},
            attempt=task.attempt,
        )
        about.set_best_folder(last)
        last = about
        save_and_report(run, task, about, event.state, worker, logger)


def describe_event(event: Event | HeartbeatEvent, run: TrainingRun) -> Iterator[str]:
    """Yield lines of progress about an event of the training loop."""
    if isinstance(event, HeartbeatEvent):
        yield describe(event, run.fit, run.progress_unit)
        return
    if not event.state:
        return
    if event.metrics or isinstance(event, EpochEvent):
        yield describe(event, run.fit, run.progress_unit)
    if event.interrupted:
        yield f"stopping: saving a checkpoint of step {event.step}"


def fit_counts(
    run: TrainingRun, task: Task, worker: WorkerContext, logger: tracking.Logger | None
) -> None:
    """Fit a model without gradients in one pass over the training data, and save it."""
    began = time.perf_counter()
    run.fit_counts()
    seconds = time.perf_counter() - began
    sums, count = run.validate(run.model)
    metrics = run.means(sums) if count else {}
    if logger:
        logger.log({f"val/{name}": value for name, value in metrics.items()}, 1)
        logger.log({"val/examples": count, "train/seconds": seconds}, 1)
    value = metrics.get(run.fit.metric)
    worker.say(
        f"counted in {seconds:.1f} s  val {run.fit.metric} {format_metric(value)}"
    )
    about = run.checkpoint(
        epoch=1,
        step=1,
        metrics=drop_undefined(metrics),
        best={"value": value, "epoch": 1, "step": 1},
        timing={"train_seconds": seconds},
        tracking=task.run.to_dict() if task.run else {},
        attempt=task.attempt,
    )
    about.set_best_folder(None)
    save_and_report(run, task, about, None, worker, logger)


def save_and_report(
    run: TrainingRun,
    task: Task,
    about: Checkpoint,
    state: dict[str, Any] | None,
    worker: WorkerContext,
    logger: tracking.Logger | None,
) -> None:
    """Save a checkpoint, with the curves up to it, and report it.

    Rank 0 saves the checkpoint and removes outdated ones. If the model is sharded,
    every rank writes its shard first. The upload may finish after the report.
    """
    folder = task.config.folder
    curves = {}
    if logger:
        curves[tracking.CURVES] = tracking.curves_to_bytes(logger.curves)
    shards: list[checkpoint.WrittenFile] = []
    if state and "weights" in state:
        shards = checkpoint.write_shards(folder, about, state, worker.rank)
    if worker.rank == 0:
        checkpoint.keep(folder, run.model, about, state, worker.uploads, shards, curves)
    worker.report(about)


def log_event(logger: tracking.Logger, event: Event) -> None:
    """Log the metrics of an event of the training loop."""
    if isinstance(event, StepEvent):
        logger.log(step_metrics(event), event.step)
    elif isinstance(event, EpochEvent):
        logger.log(epoch_metrics(event), event.step)
    logger.log(validation_metrics(event), event.step)


def step_metrics(event: StepEvent) -> dict[str, float]:
    """Return the metrics that are logged every `log_every_steps`."""
    return {
        "train/loss": event.loss,
        "train/lr": event.lr,
        "train/grad_norm": event.grad_norm,
        "train/examples_per_s": event.examples_per_s,
        "train/data_wait": event.data_wait,
        **{f"train/{name}": value for name, value in event.parts.items()},
    }


def epoch_metrics(event: EpochEvent) -> dict[str, float]:
    """Return the metrics that are logged at the end of an epoch."""
    return {
        "epoch": event.epoch,
        "train/epoch_loss": event.loss,
        "train/epoch_seconds": event.seconds,
    }


def validation_metrics(event: Event) -> dict[str, float]:
    """Return the metrics of a validation; nothing for an event without one."""
    if not event.metrics:
        return {}
    return {
        **{f"val/{name}": value for name, value in event.metrics.items()},
        "val/examples": event.examples,
        "val/seconds": event.eval_seconds,
    }
