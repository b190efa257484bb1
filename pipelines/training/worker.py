"""Run the training loop in a worker, and save, log and print what it reports."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict

import torch

from core.errors import pluralize
from core.schemas import RunRef
from models.metrics.ranking_metrics import format_metric
from models.training.checkpoint import Checkpoint, State
from models.training.loop import describe, drop_undefined, fit
from models.training_run import TrainingRun
from pipelines import tracking
from pipelines.training.backends import Backend
from pipelines.training.config import TrainConfig
from pipelines.training.stop import STOP_REQUEST


def train_worker(config: TrainConfig, mlflow_run: RunRef, backend: Backend) -> None:
    """Train from the run's last checkpoint to the end, or until a stop is requested.

    Rank 0 logs to MLflow and saves. A checkpoint contains the points of the curves that
    MLflow has not taken, so a training that continues from it sends them.

    Args:
        config: Options of the training, resolved.
        mlflow_run: The MLflow run.
        backend: Keeps checkpoints, and knows the other workers.
    """
    torch.set_num_threads(config.ray.threads or backend.threads)
    last = backend.find_last()
    run = TrainingRun.build(
        config.model,
        config.fit,
        config.inputs,
        device=backend.device,
        rank=backend.rank,
        world=backend.world,
        last=last,
        init=config.init,
    )
    run.should_stop = backend.should_stop
    state = run.resume(config.folder, last) if last else None
    with ExitStack() as stack:
        logger = None
        if backend.rank == 0:
            for line in describe_run(run, backend, config.ray.num_workers, last, state):
                backend.say(line)
            logger = open_logger(mlflow_run, run, backend, last)
            stack.enter_context(tracking.log_system_metrics(mlflow_run))
        if not run.model.trains_by_gradient:
            if last is None:
                fit_in_one_pass(run, mlflow_run, backend, logger)
        else:
            with STOP_REQUEST.defer_to_loop():
                train_by_gradient(config, run, state, last, mlflow_run, backend, logger)
        if logger and not backend.should_stop():
            logger.flush()


def train_by_gradient(
    config: TrainConfig,
    run: TrainingRun,
    state: State | None,
    last: Checkpoint | None,
    mlflow_run: RunRef,
    backend: Backend,
    logger: tracking.Logger | None,
) -> None:
    """Run the training loop; print, log and save its reports.

    Args:
        config: Options of the training.
        run: Model and data of the training.
        state: State of the loop to continue from, or None.
        last: Checkpoint to continue from, or None.
        mlflow_run: The MLflow run.
        backend: Keeps checkpoints.
        logger: Logger of the MLflow run; None except on rank 0.
    """
    timing = {"train_seconds": 0.0, "eval_seconds": 0.0} | (last.timing if last else {})
    saved_at = time.monotonic()

    def should_save() -> bool:
        is_preempted = backend.is_preempted()
        if is_preempted and backend.rank == 0:
            backend.say("a node will be preempted: saving a checkpoint")
        every_s = 60 * config.fit.checkpoint_every_minutes
        is_due = 0 < every_s <= time.monotonic() - saved_at
        return is_preempted or (is_due and backend.rank == 0)

    for report in fit(
        run.model,
        run.train,
        run.validate,
        config.fit,
        shard=config.ray.shard,
        state=state,
        device=run.device,
        rank=backend.rank,
        world=backend.world,
        should_stop=backend.should_stop,
        should_save=should_save,
    ):
        if logger:
            logger.log(report.points, report.step)
            if report.ends_epoch or not (report.points or report.state):
                line = describe(
                    report,
                    run.fit,
                    run.learned_per_example,
                    run.model.kind.learned_unit,
                )
                backend.say(line)
            if report.interrupted:
                backend.say(f"stopping: saving a checkpoint of step {report.step}")
        if not report.state:
            continue
        timing["eval_seconds"] += report.eval_seconds
        if report.ends_epoch:
            timing["train_seconds"] += report.seconds
            timing["examples_per_s"] = report.examples_per_s
        saved = run.checkpoint(
            epoch=report.epoch,
            step=report.step,
            metrics=drop_undefined(report.metrics),
            best=report.state["position"]["best"],
            timing=timing,
            tracking=asdict(mlflow_run),
            unsent=logger.unsent if logger else [],
        )
        backend.keep(run.model, saved, report.state)
        saved_at = time.monotonic()


def fit_in_one_pass(
    run: TrainingRun,
    mlflow_run: RunRef,
    backend: Backend,
    logger: tracking.Logger | None,
) -> None:
    """Fit a model that is not trained by gradient, and save it."""
    began = time.perf_counter()
    run.fit_in_one_pass()
    seconds = time.perf_counter() - began
    metrics, count = run.validate(run.model)
    if run.model.ranks_by:
        backend.say(f"ranks by {run.model.ranks_by}")
    if run.model.choice:
        backend.say(f"chosen on validation: {run.model.choice}")
    value = metrics.get(run.fit.metric)
    backend.say(
        f"counted in {seconds:.1f} s  val {run.fit.metric} {format_metric(value)}"
    )
    unsent = []
    if logger:
        if run.model.ranks_by:
            logger.tag(**{tracking.RANKS_BY_TAG: run.model.ranks_by})
        if run.model.choice:
            logger.tag(**{"model.choice": run.model.choice})
        logger.log({f"val/{name}": value for name, value in metrics.items()}, 1)
        logger.log({"val/examples": count, "train/seconds": seconds}, 1)
        unsent = logger.unsent
    saved = run.checkpoint(
        epoch=1,
        step=1,
        metrics=drop_undefined(metrics),
        best={"value": value, "epoch": 1, "step": 1},
        timing={"train_seconds": seconds},
        tracking=asdict(mlflow_run),
        unsent=unsent,
    )
    backend.keep(run.model, saved, None)


def describe_run(
    run: TrainingRun,
    backend: Backend,
    num_workers: int,
    last: Checkpoint | None,
    state: State | None,
) -> Iterator[str]:
    """Yield messages about a training before its first step.

    Args:
        run: Model and data of the training.
        backend: Backend of rank 0.
        num_workers: Number of workers that the options request.
        last: Checkpoint that the training continues from, or None.
        state: State of the training loop in that checkpoint, or None.
    """
    workers = pluralize(num_workers, "worker")
    if backend.world < num_workers:
        workers = f"{backend.world} of {workers}"
    yield (
        f"{workers} on {backend.device.type}, "
        f"{pluralize(torch.get_num_threads(), 'thread')} each; "
        f"{pluralize(count_parameters(run), 'parameter')}"
    )
    num_train, num_val = (
        dataset.examples.num_requests for dataset in (run.train, run.val)
    )
    yield (
        f"{num_train:,} training and {num_val:,} validation "
        f"{run.model.kind.request_unit} here, "
        f"{pluralize(run.train.num_steps(run.fit.batch_size), 'step')} per epoch"
    )
    yield from run.messages
    if last is not None:
        is_within_epoch = bool(state and state["position"]["step_in_epoch"])
        preposition = "in" if is_within_epoch else "after"
        yield f"continuing {preposition} epoch {last.epoch}, step {last.step}"


def count_parameters(run: TrainingRun) -> int:
    """Return the number of the model's parameters."""
    return sum(parameter.numel() for parameter in run.model.parameters())


def open_logger(
    mlflow_run: RunRef, run: TrainingRun, backend: Backend, last: Checkpoint | None
) -> tracking.Logger:
    """Open the logger of the MLflow run, and log the model's size and the hardware."""
    is_gpu = backend.device.type == "cuda"
    gpu = torch.cuda.get_device_name(backend.device) if is_gpu else ""
    logger = tracking.Logger(mlflow_run, last.unsent if last else [], backend.say)
    gpus = f"{backend.world} x {gpu}" if gpu else ""
    logger.tag(hardware=tracking.describe_hardware(gpus))
    logger.log({"train/parameters": count_parameters(run)}, 0)
    return logger
