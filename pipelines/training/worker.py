"""What each training worker runs: the loop of `models.training.fit`, its events turned into checkpoints, reports and metrics.

Every rank reports at the same events. Rank 0 has saved the checkpoint before, logs to MLflow and tells the driver of
its progress.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
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

from models.config import pluralize
from models.loaded_model import require_tables
from models.metrics.ranking_metrics import format_metric
from models.storage import attempts, checkpoint
from models.storage.attempts import UNNUMBERED, Attempt
from models.storage.checkpoint import Checkpoint
from models.storage.inputs import Inputs
from models.storage.uri import join
from models.training.fit import (
    ASK,
    CONTINUE,
    STOP,
    EpochEvent,
    Event,
    FitConfig,
    StepEvent,
    StillEvent,
    best_of,
    defined,
    describe,
    fit,
)
from models.training_run import TrainingRun
from pipelines import tracking
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
        """Request that the workers save a checkpoint and stop. Return whether they train, so that they will."""
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
"""Seconds between two heartbeats: by default Ray kills a stopped job, checkpoint included, after 3 seconds."""

ALIVE_S = 20.0
"""Seconds for which a worker counts as alive after a heartbeat."""

NOTICE_S = 2.0
"""Seconds between two questions whether a node is to be taken away."""


@dataclass
class Task:
    """What the driver tells the workers."""

    model: dict[str, Any]
    """`name` and fields of the model's config."""
    fit: dict[str, Any]
    """Fields of `FitConfig`."""
    folder: str
    """The run's folder, absolute or a URI: its checkpoints, from the last of which it goes on."""
    inputs: dict[str, str]
    """Fields of `Inputs`."""
    tracking: dict[str, str] | None
    """The MLflow run as `RunRef` fields."""
    threads: int
    """Threads per worker; 0 shares out the machine's cores among its workers."""
    init: str | None = None
    """The checkpoint whose weights it begins with."""
    fsdp: bool = False
    """Whether the model is cut over the workers."""
    hashes: dict[str, str] = field(default_factory=dict)
    """Hashes of the tables that the driver checked."""
    attempt: str = str(UNNUMBERED)
    """Number of this attempt at the training (`models/storage/attempts.py`)."""


def threads_per_worker(option: int, workers_here: int) -> int:
    """Threads for PyTorch. Ray starts workers with OMP_NUM_THREADS=1, which idles the other cores."""
    return option or max(1, len(os.sched_getaffinity(0)) // workers_here)


@dataclass
class WorkerContext:
    """Where a worker stands among the others, and whom it tells."""

    rank: int
    """Its number, from 0."""
    world: int
    """Number of workers."""
    device: torch.device
    """Where its model is."""
    workers_here: int
    """Workers on this machine, which share its cores."""
    report: Callable[[Checkpoint], Any]
    """Hears of every checkpoint, on every rank."""
    say: Callable[[str], Any]
    """Tells the driver of the progress; called by rank 0."""
    heartbeat: Heartbeat | None = None
    """Learns from the driver of a stop, if the driver is another process."""
    uploads: checkpoint.Uploads = field(default_factory=checkpoint.Uploads)
    """Takes checkpoints to a storage elsewhere."""
    warned: Callable[[], bool] | None = None
    """Return whether there is a new notice that a node of the training is to be taken away; a collective of all
    workers. None where nodes are not taken away with notice."""


def worker(config: dict[str, Any]) -> None:
    """A worker of Ray Train. `config` is {"task": fields of a Task, "progress": actor, "watch": whether nodes may be
    taken away with notice}: plain values, as Ray's controller reads them too, and a Task would have it load this module
    with all of PyTorch and MLflow."""
    task = Task(**config["task"])
    task.attempt = worker_attempt()
    context = train.get_context()
    leaving: list[str] = []

    def report(about: Checkpoint) -> None:
        train.report({"epoch": about.epoch, "step": about.step, **about.metrics})

    def warned() -> bool:
        found = train.get_preemption_info()
        fresh = [
            node
            for node in (found.preempted_node_ids if found else [])
            if node not in leaving
        ]
        leaving.extend(fresh)
        return bool(fresh)

    heartbeat = Heartbeat(config["progress"])
    place = WorkerContext(
        context.get_world_rank(),
        context.get_world_size(),
        get_device(),
        context.get_local_world_size(),
        report,
        config["progress"].say.remote,
        heartbeat,
        warned=warned if config["watch"] else None,
    )
    perform(task, place)
    if heartbeat.stopping and place.rank == 0:
        ray.get(config["progress"].note_saved.remote())


def perform(task: Task, place: WorkerContext) -> None:
    """Train, from the last checkpoint in the run's folder where there is one, to the end or until
    a stop is requested."""
    torch.set_num_threads(threads_per_worker(task.threads, place.workers_here))
    inputs = Inputs(**task.inputs)
    require_tables(task.model["name"], inputs, task.hashes)
    about = find_last_checkpoint(task.folder, place)
    setup = TrainingRun.build(
        task.model,
        FitConfig(**task.fit),
        inputs,
        device=place.device,
        rank=place.rank,
        world=place.world,
        last=about,
        init=task.init,
    )
    setup.check_metric()
    # again: both the hashes and the tables may have changed while they were read
    require_tables(task.model["name"], inputs, task.hashes)
    state = setup.resume(task.folder, about) if about else None
    if place.rank == 0:
        parameters = sum(p.numel() for p in setup.model.parameters())
        place.say(
            f"{pluralize(place.world, 'worker')} on {place.device.type}, "
            f"{pluralize(torch.get_num_threads(), 'thread')} each; "
            f"{pluralize(parameters, 'parameter')}"
        )
        train, val = (
            dataset.num_requests - dataset.num_without_history
            for dataset in (setup.train.dataset, setup.val)
        )
        requests = f"{train:,} training and {val:,} validation {setup.val.counted} here"
        place.say(f"{requests}, {pluralize(setup.train.steps(0), 'step')} per epoch")
        for message in setup.messages:
            place.say(message)
        parts = setup.model.parameter_counts()
        if parts:
            place.say(
                "parameters: "
                + ", ".join(f"{name} {number:,}" for name, number in parts.items())
            )
        if about is not None:
            inside = bool(state and state["cursor"]["step_in_epoch"])
            where = "in" if inside else "after"
            place.say(f"continuing {where} epoch {about.epoch}, step {about.step}")
    with ExitStack() as stack:
        stack.callback(place.uploads.wait)  # also where a sweep stops the training
        log = None
        if place.rank == 0 and task.tracking:
            run = tracking.RunRef(**task.tracking)
            tracking.mark_reachable(run.uri)
            gpu = (
                torch.cuda.get_device_name(place.device)
                if place.device.type == "cuda"
                else ""
            )
            with tracking.warn_if_slow(run.uri, place.say):
                log = tracking.Logger(
                    run,
                    tracking.read_curves(join(task.folder, about.folder))
                    if about
                    else None,
                    partial(
                        attempts.require_current,
                        task.folder,
                        Attempt.parse(task.attempt),
                    ),
                )
                log.tag(
                    hardware=tracking.hardware(f"{place.world} x {gpu}" if gpu else "")
                )
            stack.enter_context(tracking.system_metrics(run))
            log.log(
                {
                    "train/parameters": parameters,
                    **{f"parameters/{name}": n for name, n in parts.items()},
                },
                0,
            )
        if setup.model.trains_by_gradient:
            try:
                with STOP_REQUEST.awaited():
                    by_gradient(setup, task, state, about, place, log)
            except SystemExit:  # a sweep stops the training
                if log:
                    with suppress(attempts.SupersededError):
                        log.flush()
                raise
        elif about is None:
            by_counts(setup, task, place, log)
        if log and (waited := log.flush()) >= 1:
            place.say(f"waited {waited:.0f} s for MLflow to take the metrics")


def find_last_checkpoint(folder: str, place: WorkerContext) -> Checkpoint | None:
    """Return the checkpoint that all workers go on from: the last one that rank 0 finds."""
    last = [checkpoint.last(folder) if place.rank == 0 else None]
    if place.world > 1:
        dist.broadcast_object_list(last, device=place.device)
    return last[0]


def by_gradient(
    setup: TrainingRun,
    task: Task,
    state: dict[str, Any] | None,
    before: Checkpoint | None,
    place: WorkerContext,
    log: tracking.Logger | None,
) -> None:
    """Runs `fit` to its end."""
    blocks = setup.model.fsdp_blocks() if task.fsdp else []
    spent = (
        dict(before.timing) if before else {"train_seconds": 0.0, "eval_seconds": 0.0}
    )
    heartbeat = place.heartbeat
    asked_at = -math.inf
    if heartbeat:
        heartbeat.trains = True

    def stopping() -> bool:
        return STOP_REQUEST.requested or bool(heartbeat and heartbeat.stopping)

    def wanted() -> int:
        """Return STOP for a stop, on rank 0 ASK where it is time to ask for notices about nodes, else CONTINUE."""
        nonlocal asked_at
        if stopping():
            return STOP
        now = time.monotonic()
        if place.warned is None or place.rank != 0 or now - asked_at < NOTICE_S:
            return CONTINUE
        asked_at = now
        return ASK

    def warned() -> bool:
        """Ask all workers for a new notice that a node is to be taken away."""
        is_new = bool(place.warned and place.warned())
        if is_new and place.rank == 0:
            place.say("a node is to be taken away: saving a checkpoint")
        return is_new

    setup.should_stop = stopping
    for event in fit(
        setup.model,
        setup.train,
        setup.validate,
        setup.fit,
        means=setup.means,
        lr_multipliers=setup.lr_multipliers,
        blocks=blocks,
        state=state,
        device=setup.device,
        rank=place.rank,
        world=place.world,
        wanted=wanted,
        warned=warned,
    ):
        if isinstance(event, StillEvent):
            if place.rank == 0:
                place.say(describe(event, setup.fit, setup.counted))
            continue
        if log and not event.interrupted:
            log.log(
                step_metrics(event)
                if isinstance(event, StepEvent)
                else epoch_metrics(event),
                event.step,
            )
            log.log(validation_metrics(event), event.step)
        if not event.state:
            continue
        spent["eval_seconds"] += event.eval_seconds
        if isinstance(event, EpochEvent):
            spent["train_seconds"] += event.seconds
            spent["examples_per_s"] = event.examples_per_s
        if place.rank == 0 and (event.metrics or isinstance(event, EpochEvent)):
            place.say(describe(event, setup.fit, setup.counted))
        if place.rank == 0 and event.interrupted:
            place.say(f"stopping: saving a checkpoint of step {event.step}")
        about = setup.checkpoint(
            epoch=event.epoch,
            step=event.step,
            metrics=defined(event.metrics),
            best=best_of(event.state),
            timing=spent,
            tracking=task.tracking or {},
            attempt=task.attempt,
        )
        about.follow(before)
        before = about
        hand_in(setup, task, about, event.state, place, log)


def by_counts(
    setup: TrainingRun, task: Task, place: WorkerContext, log: tracking.Logger | None
) -> None:
    """One pass over the training data for a model without gradients."""
    began = time.perf_counter()
    setup.fit_counts()
    seconds = time.perf_counter() - began
    sums, count = setup.validate(setup.model)
    metrics = setup.means(sums) if count else {}
    if log:
        log.log({f"val/{name}": value for name, value in metrics.items()}, 1)
        log.log({"val/examples": count, "train/seconds": seconds}, 1)
    place.say(
        f"counted in {seconds:.1f} s  val {setup.fit.metric} {format_metric(metrics.get(setup.fit.metric))}"
    )
    best = {"value": metrics.get(setup.fit.metric), "epoch": 1, "step": 1}
    about = setup.checkpoint(
        epoch=1,
        step=1,
        metrics=defined(metrics),
        best=best,
        timing={"train_seconds": seconds},
        tracking=task.tracking or {},
        attempt=task.attempt,
    )
    about.follow(None)
    hand_in(setup, task, about, None, place, log)


def hand_in(
    setup: TrainingRun,
    task: Task,
    about: Checkpoint,
    state: dict[str, Any] | None,
    place: WorkerContext,
    log: tracking.Logger | None,
) -> None:
    """Save the checkpoint, with the curves up to it, and report it.

    Rank 0 saves; of a sharded model the other ranks write their shards. The checkpoint may still be on its way to the
    storage when every rank reports it.
    """
    curves = {tracking.CURVES: tracking.curves_to_bytes(log.curves)} if log else {}
    shards: list[checkpoint.WrittenFile] = []
    if state and "weights" in state:
        shards = checkpoint.write_shards(task.folder, about, state, place.rank)
    if place.rank == 0:
        checkpoint.keep(
            task.folder, setup.model, about, state, place.uploads, shards, curves
        )
    place.report(about)


def step_metrics(event: StepEvent) -> dict[str, float]:
    """What is logged every `log_every_steps`."""
    return {
        "train/loss": event.loss,
        "train/lr": event.lr,
        "train/grad_norm": event.grad_norm,
        "train/examples_per_s": event.examples_per_s,
        "train/data_wait": event.data_wait,
        **{f"train/{name}": value for name, value in event.parts.items()},
    }


def epoch_metrics(event: EpochEvent) -> dict[str, float]:
    """What is logged at the end of an epoch."""
    return {
        "epoch": event.epoch,
        "train/epoch_loss": event.loss,
        "train/epoch_seconds": event.seconds,
    }


def validation_metrics(event: Event) -> dict[str, float]:
    """What a validation found."""
    metrics = {f"val/{name}": value for name, value in event.metrics.items()}
    return (
        {**metrics, "val/examples": event.examples, "val/seconds": event.eval_seconds}
        if metrics
        else {}
    )
