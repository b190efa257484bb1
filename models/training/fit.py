"""The training loop, in PyTorch only: a generator of events.

`pipelines/training` turns its events into reports, checkpoints and metrics.

A run can be stopped at any step and resumed. The random numbers of a step depend on
(seed, rank, step) alone, and the batches of an epoch on (seed, epoch) alone. So the
weights, the optimizer and the cursor in `Event.state` are the whole state of a run, and
a resumed run ends with the same weights as an uninterrupted one.

Under DDP every rank calls `fit` with its share of each batch. Each step averages the
ranks' gradients. Losses are means over the global batch
(`models/training/distributed.py`), so the average is the gradient of the global batch.
A run may therefore resume with another number of workers and ends with the same
weights, up to the order of sums, unless its model draws random numbers (dropout) or
compares the examples of one worker's batch with each other (InfoNCE).
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from core.errors import UserError, format_duration
from models.dataset.batch import Batch
from models.training import fsdp
from models.training.cuda_graphs import CudaGraphs, compile_per_shape
from models.training.distributed import set_workers
from models.training.fit_config import FitConfig
from models.training.optimizers import (
    make_optimizer,
    optimizer_state,
    set_learning_rate,
)

FIRST_PROGRESS_S, PROGRESS_S = 5.0, 30.0
"""Seconds without another event until the first heartbeat event, and between later
ones."""

PACE_STEPS = 3
"""Number of timed steps from which the remaining time is estimated."""

CONTINUE, ASK, SAVE, STOP = 0, 1, 2, 3
"""Values of `next_action` after a step: continue; let all ranks call `has_notice`;
save a state within the epoch and continue; save a state and end."""

State = dict[str, Any]
Sums = dict[str, Any]
"""Sums from which metrics are computed: numbers, tensors or histograms, which can be
added over batches and workers."""


class TrainBatches(Protocol):
    """The training batches of one worker."""

    def steps(self, epoch: int) -> int:
        """Return the number of batches in the epoch."""

    def __call__(self, epoch: int, skip: int) -> Iterator[Batch]:
        """Yield the epoch's batches from number `skip` on, equal in every call."""


Validate = Callable[[nn.Module], tuple[Sums, int]]
"""Return the sums over this rank's validation rows, and the number of rows."""

Means = Callable[[Sums], dict[str, float]]
"""Return the metrics from the sums of all ranks."""


class ValidationStopped(Exception):
    """Raised by `Validate` between two batches when the run is to stop."""


@dataclass(frozen=True)
class Event:
    """The position of a run, and the result of a validation if one ran."""

    step: int
    """Number of completed optimizer steps."""
    epoch: int
    """Number of completed epochs; of an event within an epoch, the number of that
    epoch, from 1."""
    loss: float
    """Mean training loss over ranks, since the last point of the curves or over the
    epoch."""
    examples_per_s: float
    """Training examples per second, all ranks together."""
    data_wait: float
    """Share of the time spent waiting for data."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Validation metrics; empty without a validation."""
    eval_seconds: float = 0.0
    """Duration of the validation."""
    examples: int = 0
    """Number of validated rows."""
    is_best: bool = False
    """Whether `fit.metric` is better than in every earlier validation."""
    stop: bool = False
    """Whether the run ends with this event."""
    stop_reason: str = ""
    """Why the run ends before its last epoch; empty otherwise."""
    steps_in_epoch: int = 0
    """Number of steps of the epoch, for progress."""
    seconds_left: float | None = None
    """Estimated time until the last planned step, including validations once one was
    timed; None until `PACE_STEPS` steps were timed."""
    interrupted: bool = False
    """Whether the generator ends because `next_action` returned STOP; the run resumes
    from `state`."""
    is_point: bool = True
    """Whether the event is a point of the curves; false if an uninterrupted run would
    not yield it. The next point then averages over the steps before and after it."""
    state: State = field(default_factory=dict)
    """State to save in a checkpoint beside the weights; empty if no checkpoint is due.
    It holds live tensors, so save it before the next event is requested. For a sharded
    model it also has the full `weights`; only rank 0 has them and the optimizer state.
    """


@dataclass(frozen=True)
class StepEvent(Event):
    """Progress within an epoch, averaged over the steps since the last point."""

    lr: float = 0.0
    """Learning rate of the last step, before `lr_multipliers`."""
    grad_norm: float = 0.0
    """Global norm of the last step's gradient before clipping."""
    parts: dict[str, float] = field(default_factory=dict)
    """The model's outputs beside the loss, such as terms of the loss, averaged like the
    loss."""


@dataclass(frozen=True)
class HeartbeatEvent(Event):
    """Progress of this rank, yielded after `PROGRESS_S` seconds without an event."""


@dataclass(frozen=True)
class EpochEvent(Event):
    """The end of an epoch."""

    seconds: float = 0.0
    """Duration of the epoch's steps, without validation."""


def learning_rate(config: FitConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of a step.

    Args:
        config: Learning rate, warm-up and schedule.
        step: Number of the step, from 0.
        total_steps: Number of steps of the training.
    """
    warmup = min(config.warmup_steps, int(config.warmup_share * total_steps))
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return config.lr * 0.5 * (1 + math.cos(math.pi * progress))


def step_seed(seed: int, rank: int, step: int) -> int:
    """Return the seed of one step on one rank.

    Seeds are distinct for ranks below 1024 and steps below 2^40.
    """
    return (seed * 0x9E3779B97F4A7C15 + (step << 10) + rank) % 2**63


def autocast(precision: str, device: torch.device) -> Any:
    """Return the autocast context manager of a forward pass.

    Args:
        precision: `bf16`, `fp32`, or `auto`: bf16 on a GPU that supports it, otherwise
            fp32.
        device: Device of the model.
    """
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(
        including_emulation=False
    )
    if precision != "bf16" and not (precision == "auto" and has_bf16):
        return nullcontext()
    # A CUDA graph must not read casts of weights that another graph has cached.
    use_cache = device.type != "cuda"
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=use_cache)


def uses_cuda_graphs(config: FitConfig, device: torch.device, world: int) -> bool:
    """Return whether steps run as CUDA graphs.

    Graphs need a GPU and one worker: DDP would need eleven warm-up steps per shape.
    """
    return device.type == "cuda" and world == 1 and config.cuda_graphs == "auto"


def prefetch(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield the batches, collated and pinned by a thread while the GPU is busy."""
    buffer: queue.Queue[Any] = queue.Queue(4)
    end, closed = object(), threading.Event()

    def put(value: Any) -> None:
        while not closed.is_set():
            try:
                buffer.put(value, timeout=0.2)
                return
            except queue.Full:
                continue

    def fill_buffer() -> None:
        try:
            for batch in batches:
                put(batch.map(Tensor.pin_memory))
                if closed.is_set():
                    return
            put(end)
        except BaseException as error:
            put(error)

    threading.Thread(target=fill_buffer, daemon=True, name="prefetch").start()
    try:
        while (item := buffer.get()) is not end:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        closed.set()


def all_reduce(
    values: list[float], world: int, device: torch.device, op: Any = None
) -> list[float]:
    """Reduce each value over the ranks; all ranks get the same result.

    Args:
        values: Values of this rank, equally many on every rank.
        world: Number of ranks.
        device: Device that the process group communicates on.
        op: `dist.ReduceOp`; None for the sum.
    """
    if world == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op or dist.ReduceOp.SUM)
    return tensor.tolist()


@dataclass
class Window:
    """Sums over the steps since the last point of the curves."""

    steps: int = 0
    """Number of steps."""
    loss: float = 0.0
    """Loss, averaged over ranks."""
    seconds: float = 0.0
    """Duration of the steps."""
    examples: float = 0.0
    """Number of examples, all ranks together."""
    waited: float = 0.0
    """Seconds spent waiting for data, averaged over ranks."""
    parts: dict[str, float] = field(default_factory=dict)
    """The model's outputs beside the loss, averaged over ranks."""
    lr: float = 0.0
    """Learning rate of the last step."""
    grad_norm: float = 0.0
    """Norm of the gradient of the last step."""

    def to_fields(self) -> dict[str, Any]:
        """Return the fields of a step event: means over the steps."""
        return {
            "loss": self.loss / self.steps,
            "examples_per_s": self.examples / self.seconds,
            "data_wait": self.waited / self.seconds,
            "parts": {name: part / self.steps for name, part in self.parts.items()},
            "lr": self.lr,
            "grad_norm": self.grad_norm,
        }


@dataclass
class Cursor:
    """The position of a run; with weights and optimizer, the whole state of a run."""

    epoch: int = 0
    """Number of completed epochs."""
    step_in_epoch: int = 0
    """Number of completed steps of the current epoch."""
    step: int = 0
    """Number of completed optimizer steps."""
    best: float | None = None
    """Best value of the validation metric so far."""
    best_epoch: int = 0
    """Epoch of the best validation, from 1."""
    best_step: int = 0
    """Number of steps completed at the best validation."""
    waiting: int = 0
    """Number of validations since the best one."""
    stopped: bool = False
    """Whether the run has ended."""
    loss: float = 0.0
    """Training loss of the current epoch, summed over steps and averaged over ranks."""
    seconds: float = 0.0
    """Duration of the steps of the current epoch."""
    examples: float = 0.0
    """Number of examples of the current epoch, all ranks together."""
    waited: float = 0.0
    """Seconds of the current epoch spent waiting for data, averaged over ranks."""
    window: Window = field(default_factory=Window)
    """Steps since the last point of the curves. A run that was stopped between two
    points adds its next steps to them."""

    @classmethod
    def from_state(cls, fields: dict[str, Any]) -> Self:
        """Load the cursor of a checkpoint."""
        return cls(**{**fields, "window": Window(**fields["window"])})

    def epoch_means(self) -> dict[str, Any]:
        """Return the event fields that average over the current epoch."""
        return {
            "loss": self.loss / self.step_in_epoch,
            "examples_per_s": self.examples / self.seconds,
            "data_wait": self.waited / self.seconds,
        }

    def record_metric(self, value: float) -> bool:
        """Record a validation metric and return whether it is the best so far."""
        if self.best is not None and value <= self.best:
            self.waiting += 1
            return False
        self.best = value
        self.best_epoch = self.epoch + 1
        self.best_step = self.step
        self.waiting = 0
        return True

    def early_stop_reason(self, config: FitConfig) -> str:
        """Return why the run stops early, or an empty string if it continues."""
        if not 0 < config.patience <= self.waiting:
            return ""
        return (
            f"stopped: no better val {config.metric} in {self.waiting} validations "
            f"(fit.patience), best {self.best:.4f} in epoch {self.best_epoch}"
        )

    def end_epoch(self, stop: bool) -> dict[str, Any]:
        """Move to the next epoch and return the event fields of the ended epoch.

        Args:
            stop: Whether the run ends too.
        """
        fields = {**self.epoch_means(), "seconds": self.seconds}
        self.epoch += 1
        self.step_in_epoch = 0
        self.stopped = stop
        self.loss = self.seconds = self.examples = self.waited = 0.0
        return fields


class Pace:
    """Seconds per step and per validation, to estimate the remaining time of a run."""

    def __init__(self, config: FitConfig, total_steps: int) -> None:
        self.config, self.total_steps = config, total_steps
        self.eval_seconds = 0.0
        self._epoch_steps, self._epoch_seconds = 0, 0.0

    def record_epoch(self, cursor: Cursor) -> None:
        """Record the pace of the ending epoch for the first steps of the next one."""
        self._epoch_steps, self._epoch_seconds = cursor.step_in_epoch, cursor.seconds

    def seconds_left(self, cursor: Cursor, unread: float = 0.0) -> float | None:
        """Estimate the seconds that the remaining steps and validations take.

        Args:
            cursor: Position of the run, with the seconds of the epoch's steps.
            unread: Seconds of the latest steps, which `cursor.seconds` does not contain
                yet.

        Returns:
            The seconds, or None if fewer than `PACE_STEPS` steps were timed.
        """
        steps = self._epoch_steps + cursor.step_in_epoch
        if steps < PACE_STEPS:
            return None
        seconds = self._epoch_seconds + cursor.seconds + unread
        config = self.config
        validations = math.ceil(config.max_epochs / config.eval_every_epochs)
        validations -= cursor.epoch // config.eval_every_epochs
        steps_left = self.total_steps - cursor.step
        return steps_left * seconds / steps + validations * self.eval_seconds


class Agreement:
    """The largest action over all ranks, once per step.

    With several ranks the actions of one step are exchanged in the background and read
    after the next step. So no step waits for the exchange, and nothing is copied from a
    GPU.
    """

    def __init__(self, world: int) -> None:
        self._group = dist.new_group(backend="gloo") if world > 1 else None
        self._action = torch.zeros(1, dtype=torch.int32)
        self._exchange: Any = None

    def max_action(self, action: int) -> int:
        """Submit this rank's action and return the maximum that was exchanged last.

        All ranks get the same maximum. With several ranks it is the maximum of the
        actions that were submitted in the previous call.
        """
        if self._group is None:
            return action
        maximum = CONTINUE
        if self._exchange:
            self._exchange.wait()
            maximum = int(self._action)
        self._action = torch.tensor([action], dtype=torch.int32)
        self._exchange = dist.all_reduce(
            self._action, dist.ReduceOp.MAX, group=self._group, async_op=True
        )
        return maximum


class Meter:
    """Loss, time and examples since the last event."""

    def __init__(self, device: torch.device, world: int) -> None:
        self.device, self.world = device, world
        self.clear()

    def clear(self) -> None:
        """Start a new measurement."""
        self.loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self.parts: dict[str, Tensor] = {}
        self.steps = self.examples = 0
        self.waited = 0.0
        self.began = time.perf_counter()

    def next_batch(self, batches: Iterator[Batch]) -> Batch:
        """Return the next batch; count its examples and the time waited for it."""
        began = time.perf_counter()
        batch = next(batches)
        self.waited += time.perf_counter() - began
        if not batch.is_stand_in:
            self.examples += batch.num_rows
        return batch

    def add_step(self, outputs: dict[str, Tensor]) -> None:
        """Add the loss and the other outputs of one step."""
        self.steps += 1
        self.loss += outputs["loss"]
        for name in outputs.keys() - {"loss"}:
            self.parts[name] = self.parts.get(name, 0.0) + outputs[name].double()

    @property
    def seconds(self) -> float:
        """Seconds since the measurement began."""
        return max(1e-9, time.perf_counter() - self.began)

    def heartbeat(
        self, cursor: Cursor, steps_in_epoch: int, seconds_left: float | None
    ) -> HeartbeatEvent:
        """Return the progress of this rank, without communication between ranks.

        Args:
            cursor: Position of the training.
            steps_in_epoch: Number of steps of the epoch.
            seconds_left: Estimated seconds until the end of the training, or None.
        """
        seconds = self.seconds
        return HeartbeatEvent(
            step=cursor.step,
            epoch=cursor.epoch + 1,
            loss=self.loss.item() / max(1, self.steps),
            steps_in_epoch=steps_in_epoch,
            seconds_left=seconds_left,
            examples_per_s=self.examples / seconds * self.world,
            data_wait=self.waited / seconds,
        )

    def add_to(self, cursor: Cursor) -> None:
        """Add the measured steps to the sums of the epoch and of the window.

        A collective call, which waits for the device.

        Args:
            cursor: Position of the training, which changes in place.
        """
        names = sorted(self.parts)
        values = [
            self.loss.item(),
            self.examples,
            self.waited,
            *(self.parts[name].item() for name in names),
        ]
        totals = all_reduce(values, self.world, self.device)
        total_loss, examples, total_waited, *total_parts = totals
        seconds = time.perf_counter() - self.began
        sums: Cursor | Window
        for sums in (cursor, cursor.window):
            sums.loss += total_loss / self.world
            sums.seconds += seconds
            sums.examples += examples
            sums.waited += total_waited / self.world
        cursor.window.steps += self.steps
        parts = cursor.window.parts
        for name, total in zip(names, total_parts, strict=True):
            parts[name] = parts.get(name, 0.0) + total / self.world


TrainStep = Callable[[Batch], tuple[dict[str, Tensor], Tensor]]
"""Take one step with a batch. Return the model's outputs, and the () norm of the
gradient before clipping."""


def make_step(
    model: nn.Module,
    optimizer: Any,
    config: FitConfig,
    device: torch.device,
    world: int,
    shards: fsdp.Shards | None,
) -> tuple[Any, TrainStep]:
    """Wrap a model by DDP, compile it if configured, and build its training step.

    Args:
        model: The model, on its device.
        optimizer: Optimizer of the model.
        config: Options of the training loop.
        device: Device of the model.
        world: Number of workers.
        shards: The shards of the model; None if each worker holds the whole model.

    Returns:
        The wrapped model, and the step, which takes batches on the device.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    module: Any = model
    if world > 1 and not shards:
        module = DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            broadcast_buffers=False,
        )
    if config.compile and device.type == "cuda":
        module = compile_per_shape(module)
    max_norm = config.clip_norm or math.inf
    clip_gradient = shards.clip_gradient if shards else nn.utils.clip_grad_norm_

    def step_on(batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        try:
            workers = set_workers(world, batch.is_stand_in)
            with autocast(config.precision, device), workers:
                outputs = module(batch)
            outputs["loss"].backward()
            norm = clip_gradient(parameters, max_norm)
            optimizer.step()
        finally:
            optimizer.zero_grad(set_to_none=True)
        return {name: value.detach() for name, value in outputs.items()}, norm

    return module, step_on


@dataclass(frozen=True)
class _StepActions:
    """Actions after an optimizer step."""

    saves: bool
    """Whether the event has a state to save."""
    is_point: bool
    """Whether to yield a step event that is a point of the curves."""
    stops: bool
    """Whether `next_action` of a rank returned STOP."""


@dataclass
class _Loop:
    """The loop of one call of `fit`: the steps, validations and events of a run."""

    model: nn.Module
    """The model without wrappers."""
    module: Any
    """The model as `make_step` has wrapped it."""
    optimizer: torch.optim.Optimizer
    factors: Sequence[float]
    """Factor on the learning rate of each parameter group."""
    take_step: TrainStep
    """The training step, which moves batches to the device."""
    shards: fsdp.Shards | None
    """Shards of the model; None if each worker holds the whole model."""
    train_batches: TrainBatches
    validate: Validate
    means: Means | None
    config: FitConfig
    cursor: Cursor
    device: torch.device
    rank: int
    world: int
    clock: Callable[[], float]
    next_action: Callable[[], int]
    has_notice: Callable[[], bool]

    def __post_init__(self) -> None:
        self.total_steps = self._count_steps(0) * self.config.max_epochs
        self.pace = Pace(self.config, self.total_steps)
        self.last_event_s = self.clock()
        self.silence_s = FIRST_PROGRESS_S
        self.meter = Meter(self.device, self.world)
        self.agreement = Agreement(self.world)

    def run(self) -> Iterator[StepEvent | HeartbeatEvent | EpochEvent]:
        """Yield the events of all epochs that are left."""
        for epoch in range(self.cursor.epoch, self.config.max_epochs):
            yield from self._run_epoch(epoch)

    def _run_epoch(
        self, epoch: int
    ) -> Iterator[StepEvent | HeartbeatEvent | EpochEvent]:
        """Yield the events of the epoch in progress, number `epoch` from 0."""
        cursor = self.cursor
        steps = self._count_steps(epoch)
        self.module.train()
        batches: Iterator[Batch] = self.train_batches(epoch, cursor.step_in_epoch)
        if self.device.type == "cuda":
            batches = prefetch(batches)
        self.meter.clear()
        while cursor.step_in_epoch < steps:
            yield from self._run_step(batches, steps)
        yield self._end_epoch()

    def _run_step(
        self, batches: Iterator[Batch], steps: int
    ) -> Iterator[StepEvent | HeartbeatEvent]:
        """Take one step and yield its events, if any."""
        config, cursor = self.config, self.cursor
        batch = self.meter.next_batch(batches)
        torch.manual_seed(step_seed(config.seed, self.rank, cursor.step))
        lr = learning_rate(config, cursor.step, self.total_steps)
        set_learning_rate(self.optimizer, self.factors, lr)
        outputs, norm = self.take_step(batch)
        self.meter.add_step(outputs)
        cursor.step += 1
        cursor.step_in_epoch += 1
        is_last = cursor.step_in_epoch == steps
        actions = self._choose_actions(is_last)
        if not is_last and not actions.saves:
            heartbeat = self._make_heartbeat(steps)
            if heartbeat:
                yield heartbeat
                self.last_event_s, self.silence_s = self.clock(), PROGRESS_S
        if actions.is_point or actions.saves:
            yield self._make_step_event(actions, steps, lr, norm)
            self.meter.clear()

    def _choose_actions(self, is_last: bool) -> _StepActions:
        """Decide what follows a step; all ranks decide the same."""
        config, step = self.config, self.cursor.step
        action = self.agreement.max_action(self.next_action())
        if action == ASK:
            action = SAVE if self.has_notice() else CONTINUE
        stops = action == STOP
        saves_by_plan = not is_last and is_due(config.checkpoint_every_steps, step)
        saves_by_request = not is_last and action == SAVE
        saves = stops or saves_by_plan or saves_by_request
        is_point = is_last or saves_by_plan or is_due(config.log_every_steps, step)
        return _StepActions(saves, is_point, stops)

    def _make_heartbeat(self, steps: int) -> HeartbeatEvent | None:
        """Return a heartbeat event if none of this rank's events was recent."""
        silent_s = self.clock() - self.last_event_s
        if silent_s < self.silence_s:
            return None
        seconds_left = self.pace.seconds_left(self.cursor, self.meter.seconds)
        if seconds_left is None and silent_s < PROGRESS_S:
            return None
        return self.meter.heartbeat(self.cursor, steps, seconds_left)

    def _make_step_event(
        self, actions: _StepActions, steps: int, lr: float, norm: Tensor
    ) -> StepEvent:
        """Read the measurements since the last point and report."""
        cursor = self.cursor
        self.meter.add_to(cursor)
        cursor.window.lr, cursor.window.grad_norm = lr, float(norm)
        means = cursor.window.to_fields()
        loss = means["loss"]
        if not math.isfinite(loss):
            raise UserError(f"the loss is {loss} at step {cursor.step}")
        if actions.is_point:
            cursor.window = Window()
        return StepEvent(
            step=cursor.step,
            epoch=cursor.epoch + 1,
            steps_in_epoch=steps,
            **means,
            interrupted=actions.stops,
            is_point=actions.is_point,
            seconds_left=self.pace.seconds_left(cursor),
            state=self._snapshot() if actions.saves else {},
        )

    def _end_epoch(self) -> StepEvent | EpochEvent:
        """Validate if due and move to the next epoch."""
        config, cursor = self.config, self.cursor
        epoch = cursor.epoch + 1
        is_last = epoch == config.max_epochs
        validates = is_last or is_due(config.eval_every_epochs, epoch)
        validation = self._validate(is_last) if validates else {}
        if validation is None:
            return self._make_interrupted_event()
        self.pace.record_epoch(cursor)
        stops = is_last or bool(validation.get("stop_reason"))
        measured = cursor.end_epoch(stops)
        self.last_event_s, self.silence_s = self.clock(), PROGRESS_S
        return EpochEvent(
            step=cursor.step,
            epoch=cursor.epoch,
            **measured,
            **validation,
            stop=cursor.stopped,
            seconds_left=self.pace.seconds_left(cursor),
            state=self._snapshot(),
        )

    def _validate(self, is_last: bool = False) -> dict[str, Any] | None:
        """Validate and return event fields, or None if the validation was stopped."""
        began = time.perf_counter()
        with self.shards.gather_weights() if self.shards else nullcontext():
            result = run_validation(
                self.model,
                self.validate,
                self.means,
                self.config,
                self.world,
            )
        if result is None:
            return None
        metrics, count = result
        is_best = self.cursor.record_metric(metrics[self.config.metric])
        reason = "" if is_last else self.cursor.early_stop_reason(self.config)
        self.pace.eval_seconds = time.perf_counter() - began
        return {
            "metrics": metrics,
            "examples": count,
            "eval_seconds": self.pace.eval_seconds,
            "is_best": is_best,
            "stop_reason": reason,
        }

    def _make_interrupted_event(self) -> StepEvent:
        """Return the event of a run that was stopped during a validation."""
        return StepEvent(
            step=self.cursor.step,
            epoch=self.cursor.epoch + 1,
            **self.cursor.epoch_means(),
            interrupted=True,
            is_point=False,
            state=self._snapshot(),
        )

    def _snapshot(self) -> State:
        """Return the state of `Event.state`; a collective call if sharded."""
        cursor = {"cursor": asdict(self.cursor)}
        if self.shards:
            return cursor | self.shards.full_state(self.optimizer)
        return cursor | {"optimizer": optimizer_state(self.optimizer)}

    def _count_steps(self, epoch: int) -> int:
        """Return the number of steps of an epoch: the fewest batches of any rank."""
        steps = self.train_batches.steps(epoch)
        if self.world > 1:
            (fewest,) = all_reduce([steps], self.world, self.device, dist.ReduceOp.MIN)
            steps = int(fewest)
        if steps == 0:
            raise UserError("the training split gives a worker no batch")
        return steps


def fit(
    model: nn.Module,
    train_batches: TrainBatches,
    validate: Validate,
    config: FitConfig,
    *,
    means: Means | None = None,
    lr_multipliers: Mapping[str, float] | None = None,
    shard: bool = False,
    state: State | None = None,
    device: torch.device | str = "cpu",
    rank: int = 0,
    world: int = 1,
    clock: Callable[[], float] = time.monotonic,
    next_action: Callable[[], int] = lambda: CONTINUE,
    has_notice: Callable[[], bool] = lambda: False,
) -> Iterator[StepEvent | HeartbeatEvent | EpochEvent]:
    """Train a model and yield events.

    With `world` above 1 the default process group must exist. All ranks yield the same
    step and epoch events; heartbeat events follow each rank's clock.

    Args:
        model: The model, on `device`. `model(batch)` returns a mapping with the () mean
            `loss` of the batch, and further values to report.
        train_batches: This rank's training batches.
        validate: Measures this rank's validation rows.
        config: Options of the training loop.
        means: Computes metrics from the sums of all ranks; None divides the sums by the
            number of rows.
        lr_multipliers: Factors on the learning rate, by prefix of parameter names.
        shard: Whether several workers shard the model (`models/training/fsdp.py`).
        state: State of the event from which the run resumes; the caller has loaded the
            weights.
        device: Device of the model.
        rank: Rank of this worker.
        world: Number of workers.
        clock: Returns the time in seconds, for heartbeat events.
        next_action: Called after every step; returns CONTINUE, ASK, SAVE or STOP. Ranks
            may return different actions. The largest action of all ranks counts.
        has_notice: Called by all ranks after the same step if the largest action is
            ASK, so it may be a collective. It returns the same on all ranks, and a
            state is saved if it returns true.

    Raises:
        UserError: If the loss or `fit.metric` is not finite, a worker has no training
            batch, or the validation split is empty.
    """
    device = torch.device(device)
    shards = None
    if shard and world > 1:
        shards = fsdp.shard(model, device, rank, world)
    optimizer, factors = make_optimizer(
        model, config.optimizer, config.weight_decay, lr_multipliers or {}
    )
    cursor = Cursor()
    if state is not None:
        if shards:
            shards.load(optimizer, state["optimizer"])
        else:
            optimizer.load_state_dict(state["optimizer"])
        cursor = Cursor.from_state(state["cursor"])
    if cursor.stopped:
        return
    module, step_on = make_step(model, optimizer, config, device, world, shards)

    def move_and_step(batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        return step_on(batch.to(device))

    take_step: TrainStep = move_and_step
    if uses_cuda_graphs(config, device, world):
        take_step = CudaGraphs(step_on, device)
    loop = _Loop(
        model=model,
        module=module,
        optimizer=optimizer,
        factors=factors,
        take_step=take_step,
        shards=shards,
        train_batches=train_batches,
        validate=validate,
        means=means,
        config=config,
        cursor=cursor,
        device=device,
        rank=rank,
        world=world,
        clock=clock,
        next_action=next_action,
        has_notice=has_notice,
    )
    for event in loop.run():
        yield event
        if event.stop or event.interrupted:
            return


def is_due(every: int, step: int) -> bool:
    """Return whether an action of every `every`-th step is due; 0 is never."""
    return every > 0 and step % every == 0


def run_validation(
    model: nn.Module,
    validate: Validate,
    means: Means | None,
    config: FitConfig,
    world: int,
) -> tuple[dict[str, float], int] | None:
    """Validate on all ranks; a collective call with the same result on every rank.

    Args:
        model: The model; it is left in training mode.
        validate: Measures this rank's validation rows.
        means: Computes metrics from the sums of all ranks; None divides the sums by the
            number of rows.
        config: Options of the training loop.
        world: Number of ranks.

    Returns:
        The metrics and the number of rows, or None if ValidationStopped was raised on a
        rank.

    Raises:
        UserError: If no rank has a row, or `fit.metric` is not finite.
    """
    rank_result: tuple[Sums, int] | None = None
    model.eval()
    with torch.no_grad(), suppress(ValidationStopped):
        rank_result = validate(model)
    model.train()
    results: list[Any] = [rank_result]
    if world > 1:
        results = [None] * world
        dist.all_gather_object(results, rank_result)
    if any(result is None for result in results):
        return None
    count = sum(rows for _, rows in results)
    if count == 0:
        raise UserError("the validation split has no request")
    total: Sums = {}
    for sums, _ in results:  # by rank, so that the sum is bit-identical on every rank
        for name, value in sums.items():
            total[name] = total.get(name, 0.0) + value
    if means:
        metrics = means(total)
    else:
        metrics = {name: float(value) / count for name, value in total.items()}
    if not math.isfinite(metrics[config.metric]):
        raise UserError(
            f"fit.metric is {config.metric}, which is not defined on the {count:,} "
            "rows of the validation split, so no checkpoint can be the best"
        )
    return metrics, count


def drop_undefined(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics whose value is finite."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def best_fields(state: State) -> dict[str, Any]:
    """Return value, epoch and step of the best validation up to a state."""
    cursor = state["cursor"]
    return {
        "value": cursor["best"],
        "epoch": cursor["best_epoch"],
        "step": cursor["best_step"],
    }


@dataclass(frozen=True)
class ProgressUnit:
    """The unit in which throughput is printed.

    A training example may be a window that serves many requests.
    """

    per_example: float = 1.0
    """Units per training example."""
    name: str = "requests"
    """Name of the unit."""


REQUESTS = ProgressUnit()


def describe(event: Event, config: FitConfig, unit: ProgressUnit = REQUESTS) -> str:
    """Describe an event in one line; a second line says why a run stops early.

    Args:
        event: An epoch, a validation, or progress within an epoch.
        config: Options of the training loop.
        unit: Unit of the throughput.
    """
    metrics = {
        name: event.metrics[name]
        for name in (config.metric, "recall@10")
        if name in event.metrics
    }
    line = (
        f"epoch {event.epoch:>3}/{config.max_epochs}  step {event.step:>6}  "
        f"loss {event.loss:.4f}"
    )
    line += "".join(f"  val {name} {value:.4f}" for name, value in metrics.items())
    line += " *" if event.is_best else ""
    rate = event.examples_per_s * unit.per_example
    line += f"  {rate:,.0f} {unit.name}/s  data wait {event.data_wait:.0%}"
    if isinstance(event, EpochEvent):
        line += f"  {event.seconds:.0f} s + {event.eval_seconds:.0f} s"
    elif event.steps_in_epoch:
        line += f"  {event.steps_in_epoch:,} steps per epoch"
    if event.stop:
        if isinstance(event, EpochEvent):
            line += "  done"
        return f"{line}\n{event.stop_reason}" if event.stop_reason else line
    if event.seconds_left is None:
        return line
    return f"{line}  at most {format_duration(event.seconds_left)} left"
