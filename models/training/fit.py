"""The training loop, PyTorch only: a generator that yields what happens, step by step and epoch by epoch.

`python -m models.train` drives it with PyTorch alone; under Ray, `pipelines/training`
turns its events into reports, checkpoints and metrics.

A run can be stopped anywhere and continued: the random numbers of a step depend on
(seed, rank, step) alone, the batches of an epoch on (seed, epoch) alone, so weights,
optimizer and the cursor in `state` are all there is to keep, and the continued run ends
with the weights of an undisturbed one.

Under DDP every rank calls `fit` with its own share of each batch. Each step averages
the ranks' gradients, which is the gradient of the whole batch, as losses are means over
it (`models/training/distributed.py`). So a run may go on with another number of
workers, and ends with the same weights up to the order of sums, unless its model draws
random numbers (dropout) or compares the examples of one worker's batch with each other
(InfoNCE).
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from models.config import format_duration
from models.dataset.batch import Batch
from models.storage.tables import UserError
from models.training import fsdp
from models.training.cuda_graphs import Graphs, compiled
from models.training.distributed import set_workers
from models.training.fit_config import FitConfig
from models.training.optimizers import (
    make_optimizer,
    optimizer_state,
    set_learning_rate,
)

FIRST_PROGRESS_S, PROGRESS_S = 5.0, 30.0
"""Seconds without another event until the first line of progress, and between the lines
after it."""

PACE_STEPS = 3
"""Timed steps from which the time left is estimated."""

CONTINUE, ASK, SAVE, STOP = 0, 1, 2, 3
"""Answers of `wanted`: train on; have all ranks ask `warned`; save a state within the
epoch and train on; save a state and end."""

State = dict[str, Any]
Sums = dict[str, Any]
"""What metrics are made of: numbers, tensors or histograms, which add up over batches
and workers."""


class TrainBatches(Protocol):
    """The training batches of one worker."""

    def steps(self, epoch: int) -> int:
        """Number of batches in the epoch."""

    def __call__(self, epoch: int, skip: int) -> Iterator[Batch]:
        """The epoch's batches from number `skip` on, the same ones each time."""


Validate = Callable[[nn.Module], tuple[Sums, int]]
"""Sums over this rank's validation rows, and their number."""

Means = Callable[[Sums], dict[str, float]]
"""Metrics from the sums of all ranks."""


class ValidationStopped(Exception):
    """Raised by `Validate` between two batches where the run is to stop."""


@dataclass(frozen=True)
class Event:
    """The position of a run, and the result of a validation if one ran."""

    step: int
    """Optimizer steps so far."""
    epoch: int
    """Epochs done; of a step event the epoch in progress, from 1."""
    loss: float
    """Mean training loss, over ranks, since the last step event or of the whole
    epoch."""
    examples_per_s: float
    """Training examples per second, all ranks together."""
    data_wait: float
    """Share of the time spent waiting for data."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Validation metrics; empty where nothing was validated."""
    eval_seconds: float = 0.0
    """Time of the validation."""
    examples: int = 0
    """Rows validated."""
    is_best: bool = False
    """Whether `metric` is better than at every validation before."""
    stop: bool = False
    """Whether the run ends here."""
    why: str = ""
    """Why it ends here, where that is before the last epoch."""
    steps_in_epoch: int = 0
    """Steps of this epoch, for progress."""
    seconds_left: float | None = None
    """Time until the last planned step, validations included once one was timed; None
    before the pace is measured."""
    interrupted: bool = False
    """Whether the generator ends here because `wanted` answered STOP; `state` then
    continues the run."""
    state: State = field(default_factory=dict)
    """What a checkpoint needs beside the weights, where one is due: live tensors, to be
    saved before the generator goes on. Of a sharded model also `weights`, the whole
    ones, on rank 0, and on each rank its shard of the optimizer's state
    (`checkpoint.write_shards`)."""


@dataclass(frozen=True)
class StepEvent(Event):
    """Steps were taken; values are means over steps since the last event, and over
    ranks.
    """

    lr: float = 0.0
    """Learning rate of the last step, before `lr_multipliers`."""
    grad_norm: float = 0.0
    """Global norm of the last step's gradient before clipping."""
    parts: dict[str, float] = field(default_factory=dict)
    """What else the model gave beside its loss, such as the parts of it, averaged as
    the loss is."""


@dataclass(frozen=True)
class StillEvent(Event):
    """Progress of this rank, yielded when no other event came for `PROGRESS_S` seconds."""


@dataclass(frozen=True)
class EpochEvent(Event):
    """An epoch ended."""

    seconds: float = 0.0
    """Time of the epoch's steps, without validation."""


def learning_rate(config: FitConfig, step: int, total_steps: int) -> float:
    """Learning rate of step number `step` (from 0) in a run of `total_steps`."""
    rising = min(config.warmup_steps, int(config.warmup_share * total_steps))
    if step < rising:
        return config.lr * (step + 1) / rising
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - rising) / max(1, total_steps - rising))
    return config.lr * 0.5 * (1 + math.cos(math.pi * progress))


def step_seed(seed: int, rank: int, step: int) -> int:
    """Seed of one step on one rank: distinct for ranks below 1024 and steps below 2^40."""
    return (seed * 0x9E3779B97F4A7C15 + (step << 10) + rank) % 2**63


def autocast(precision: str, device: torch.device) -> Any:
    """The context in which a model runs forward in training."""
    there = device.type == "cuda" and torch.cuda.is_bf16_supported(
        including_emulation=False
    )
    bf16 = precision == "bf16" or (precision == "auto" and there)
    if not bf16:
        return nullcontext()
    cached = device.type != "cuda"  # what a CUDA graph makes is no other one's to read
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=cached)


def uses_cuda_graphs(config: FitConfig, device: torch.device, world: int) -> bool:
    """Return whether steps are CUDA graphs: with one worker on a GPU.

    DDP would need eleven warm-up steps per shape.
    """
    return device.type == "cuda" and world == 1 and config.cuda_graphs == "auto"


def prefetch(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield the batches, collated and pinned in a thread while the GPU is busy."""
    made: queue.Queue[Any] = queue.Queue(4)
    end, closed = object(), threading.Event()

    def put(value: Any) -> None:
        while not closed.is_set():
            try:
                made.put(value, timeout=0.2)
                return
            except queue.Full:
                continue

    def work() -> None:
        try:
            for batch in batches:
                put(batch.map(Tensor.pin_memory))
                if closed.is_set():
                    return
            put(end)
        except BaseException as error:
            put(error)

    threading.Thread(target=work, daemon=True, name="prefetch").start()
    try:
        while (item := made.get()) is not end:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        closed.set()


def reduce(
    values: list[float], world: int, device: torch.device, op: Any = None
) -> list[float]:
    """`values` summed (or as `op` says) over the ranks; the same on every rank."""
    if world == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op or dist.ReduceOp.SUM)
    return tensor.tolist()


@dataclass
class Cursor:
    """The position of a run; together with weights and optimizer its whole state."""

    epoch: int = 0
    """Epochs done."""
    step_in_epoch: int = 0
    """Steps of the epoch in progress."""
    step: int = 0
    """Optimizer steps so far."""
    best: float | None = None
    """The best value of the validation metric so far."""
    best_epoch: int = 0
    """In which epoch that was, from 1."""
    best_step: int = 0
    """After which step that was."""
    waiting: int = 0
    """Validations since then."""
    validated: int = 0
    """Step of the last validation; a run that was stopped in a validation does it
    again."""
    stopped: bool = False
    """Whether the run has ended."""
    loss: float = 0.0
    """Of the epoch in progress: loss, summed over steps and averaged over ranks."""
    seconds: float = 0.0
    """Likewise: time of its steps."""
    examples: float = 0.0
    """Likewise: examples of all ranks."""
    waited: float = 0.0
    """Likewise: seconds waited for data."""

    @classmethod
    def from_state(cls, fields: dict[str, Any]) -> Self:
        """Load the cursor of a checkpoint; older checkpoints, without `validated`, owe no validation."""
        return cls(**{"validated": fields["step"], **fields})

    def owes_validation(self, config: FitConfig) -> bool:
        """Return whether the run was stopped before a validation within the epoch."""
        return (
            self.step_in_epoch > 0
            and due(config.eval_every_steps, self.step)
            and self.validated < self.step
        )

    def means(self) -> dict[str, Any]:
        """Return the fields of an event that average over the epoch in progress."""
        return {
            "loss": self.loss / self.step_in_epoch,
            "examples_per_s": self.examples / self.seconds,
            "data_wait": self.waited / self.seconds,
        }

    def note(self, value: float) -> bool:
        """Record a validation metric and return whether it is the best so far."""
        self.validated = self.step
        if self.best is not None and value <= self.best:
            self.waiting += 1
            return False
        self.best, self.best_epoch, self.best_step, self.waiting = (
            value,
            self.epoch + 1,
            self.step,
            0,
        )
        return True

    def impatient(self, config: FitConfig) -> str:
        """Why the run ends after a validation that was not better; empty where it goes on."""
        if not 0 < config.patience <= self.waiting:
            return ""
        return (
            f"stopped: no better val {config.metric} in {self.waiting} validations (fit.patience), best "
            f"{self.best:.4f} in epoch {self.best_epoch}"
        )

    def next_epoch(self, stop: bool) -> dict[str, Any]:
        """End the current epoch, and with `stop` the run; return the fields of its
        event.
        """
        said = {**self.means(), "seconds": self.seconds}
        self.epoch, self.step_in_epoch, self.stopped = self.epoch + 1, 0, stop
        self.loss = self.seconds = self.examples = self.waited = 0.0
        return said


class Pace:
    """Seconds per step and per validation, from which the time left of the whole run is estimated."""

    def __init__(self, config: FitConfig, total_steps: int) -> None:
        self.config, self.total_steps = config, total_steps
        self.eval_seconds = 0.0
        self._epoch_steps, self._epoch_seconds = 0, 0.0

    def note_epoch(self, cursor: Cursor) -> None:
        """Keep the pace of the epoch that ends, for the first steps of the next one."""
        self._epoch_steps, self._epoch_seconds = cursor.step_in_epoch, cursor.seconds

    def seconds_left(self, cursor: Cursor, unread: float = 0.0) -> float | None:
        """Estimate the seconds until the last planned step, or return None while fewer than `PACE_STEPS` were timed.

        Args:
            cursor: Position of the run and the time of the epoch's steps.
            unread: Seconds of steps that the cursor does not contain yet.
        """
        steps = self._epoch_steps + cursor.step_in_epoch
        if steps < PACE_STEPS:
            return None
        seconds = self._epoch_seconds + cursor.seconds + unread
        config = self.config
        validations = -(-config.max_epochs // config.eval_every_epochs)
        validations -= cursor.epoch // config.eval_every_epochs
        steps_left = self.total_steps - cursor.step
        if config.eval_every_steps:
            validations += steps_left // config.eval_every_steps
        return steps_left * seconds / steps + validations * self.eval_seconds


class Agreement:
    """The largest answer of all ranks to a question of every step.

    With several ranks the answers of one step are exchanged in the background and read
    after the next step, so no step waits for them and nothing is copied from a GPU.
    """

    def __init__(self, world: int) -> None:
        self._group = dist.new_group(backend="gloo") if world > 1 else None
        self._answer = torch.zeros(1, dtype=torch.int32)
        self._exchange: Any = None

    def largest(self, answer: int) -> int:
        """Hand in this rank's answer and return the largest known one, the same on every rank."""
        if self._group is None:
            return answer
        known = CONTINUE
        if self._exchange:
            self._exchange.wait()
            known = int(self._answer)
        self._answer = torch.tensor([answer], dtype=torch.int32)
        self._exchange = dist.all_reduce(
            self._answer, dist.ReduceOp.MAX, group=self._group, async_op=True
        )
        return known


class Meter:
    """Loss, time and examples since the last reading."""

    def __init__(self, device: torch.device, world: int) -> None:
        self.device, self.world = device, world
        self.clear()

    def clear(self) -> None:
        self.loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self.parts: dict[str, Tensor] = {}
        self.steps = self.examples = 0
        self.waited = 0.0
        self.began = time.perf_counter()

    def take(self, batches: Iterator[Batch]) -> Batch:
        """Return the next batch and count its examples and the time waited for it."""
        began = time.perf_counter()
        batch = next(batches)
        self.waited += time.perf_counter() - began
        if not batch.is_stand_in:
            self.examples += batch.num_rows
        return batch

    def add(self, found: dict[str, Tensor]) -> None:
        """Notes the losses of one step."""
        self.steps += 1
        self.loss += found["loss"]
        for name in found.keys() - {"loss"}:
            self.parts[name] = self.parts.get(name, 0.0) + found[name].double()

    @property
    def seconds(self) -> float:
        """Seconds since the last reading."""
        return max(1e-9, time.perf_counter() - self.began)

    def still(
        self, cursor: Cursor, steps: int, seconds_left: float | None
    ) -> StillEvent:
        """Return the progress of this rank alone."""
        seconds = self.seconds
        return StillEvent(
            step=cursor.step,
            epoch=cursor.epoch + 1,
            loss=self.loss.item() / max(1, self.steps),
            steps_in_epoch=steps,
            seconds_left=seconds_left,
            examples_per_s=self.examples / seconds * self.world,
            data_wait=self.waited / seconds,
        )

    def read(self, cursor: Cursor) -> dict[str, Any]:
        """Add the steps since the last reading to the epoch; return the fields of an
        event.
        """
        names = sorted(self.parts)
        values = [
            self.loss.item(),
            self.examples,
            self.waited,
            *(self.parts[name].item() for name in names),
        ]
        loss, examples, waited, *parts = reduce(values, self.world, self.device)
        mean = {
            name: part / self.world / self.steps
            for name, part in zip(names, parts, strict=True)
        }
        loss, waited, seconds = (
            loss / self.world,
            waited / self.world,
            time.perf_counter() - self.began,
        )
        cursor.loss, cursor.seconds = cursor.loss + loss, cursor.seconds + seconds
        cursor.examples, cursor.waited = (
            cursor.examples + examples,
            cursor.waited + waited,
        )
        return {
            "loss": loss / self.steps,
            "examples_per_s": examples / seconds,
            "data_wait": waited / seconds,
            "parts": mean,
        }


def make_step(
    model: nn.Module,
    optimizer: Any,
    config: FitConfig,
    device: torch.device,
    world: int,
    sharded: bool,
) -> tuple[Any, Callable[..., tuple[dict[str, Tensor], Tensor]]]:
    """Return the wrapped model and a function that takes one step with a batch on the
    device.

    The model is wrapped by DDP and compiled as configured. The function returns the
    model's outputs and the gradient norm before clipping.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    module: Any = model
    if world > 1 and not sharded:
        module = DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            broadcast_buffers=False,
        )
    if config.compile and device.type == "cuda":
        module = compiled(module)

    def step_on(batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        try:
            workers = set_workers(world, batch.is_stand_in)
            with autocast(config.precision, device), workers:
                found = module(batch)
            found["loss"].backward()
            norm = fsdp.gather(
                nn.utils.clip_grad_norm_(parameters, config.clip_norm or math.inf)
            )
            optimizer.step()
        finally:
            optimizer.zero_grad(set_to_none=True)
        return {name: value.detach() for name, value in found.items()}, norm

    return module, step_on


def fit(
    model: nn.Module,
    train_batches: TrainBatches,
    validate: Validate,
    config: FitConfig,
    *,
    means: Means | None = None,
    lr_multipliers: Mapping[str, float] | None = None,
    blocks: Sequence[nn.Module] = (),
    state: State | None = None,
    device: torch.device | str = "cpu",
    rank: int = 0,
    world: int = 1,
    clock: Callable[[], float] = time.monotonic,
    wanted: Callable[[], int] = lambda: CONTINUE,
    warned: Callable[[], bool] = lambda: False,
) -> Iterator[StepEvent | StillEvent | EpochEvent]:
    """Trains `model`, which is on `device` already, and yields events; by `clock`, not all ranks the same StillEvents.

    `model(batch)` gives {"loss": mean loss of the batch, ...}. With `world` above 1 the
    default process group must exist. `means` makes metrics of the sums of all ranks;
    left out, they are divided by the number of rows. `lr_multipliers` are factors on
    the learning rate by the beginning of parameters' names. `blocks` are parts of a
    model that is to be cut over the ranks (`models/training/fsdp.py`). `state` is that
    of the event at which an earlier run was saved; the caller has loaded the weights.
    `wanted` is asked after every step for CONTINUE, ASK, SAVE or STOP; ranks may answer
    differently, the largest answer counts. After ASK all ranks call `warned` in the
    same step, which may be a collective and returns the same on all ranks, and save a
    state where it is true. Raises UserError where the loss or the metric stops being a
    number.
    """
    device = torch.device(device)
    sharded = bool(blocks) and world > 1
    if sharded:
        fsdp.shard(model, blocks, device, world)
    optimizer, factors = make_optimizer(
        model, config.optimizer, config.lr, config.weight_decay, lr_multipliers or {}
    )
    cursor = Cursor()
    if state is not None:
        fsdp.load_optimizer(optimizer, state["optimizer"])
        cursor = Cursor.from_state(state["cursor"])
    if cursor.stopped:
        return
    module, step_on = make_step(model, optimizer, config, device, world, sharded)
    graphs = (
        Graphs(step_on, device) if uses_cuda_graphs(config, device, world) else None
    )

    def snapshot() -> State:
        state = {"optimizer": optimizer_state(optimizer), "cursor": vars(cursor).copy()}
        if sharded:
            state["optimizer"]["state"] = fsdp.take_share(
                state["optimizer"]["state"], rank, world
            )
            state["weights"] = fsdp.gather_state_dict(model, keep=rank == 0)
        return state

    def fewest(epoch: int) -> int:
        steps = int(
            reduce(
                [train_batches.steps(epoch)],
                world,
                device,
                dist.ReduceOp.MIN if world > 1 else None,
            )[0]
        )
        if steps == 0:
            raise UserError(
                "the training split gives a worker no batch; use fewer workers or a smaller fit.batch_size"
            )
        return steps

    def run_validation(last: bool = False) -> dict[str, Any] | None:
        """Validate, and return the fields of an event; None if it was interrupted."""
        began = time.perf_counter()
        with fsdp.gather_weights(model):
            found = validation(model, validate, means, config, device, world)
        if found is None:
            return None
        metrics, count = found
        is_best = cursor.note(metrics[config.metric])
        why = "" if last else cursor.impatient(config)
        seconds = pace.eval_seconds = time.perf_counter() - began
        return {
            "metrics": metrics,
            "examples": count,
            "eval_seconds": seconds,
            "is_best": is_best,
            "why": why,
        }

    def stop_event() -> StepEvent:
        """Return the event of a stopped run."""
        return StepEvent(
            step=cursor.step,
            epoch=cursor.epoch + 1,
            **cursor.means(),
            interrupted=True,
            state=snapshot(),
        )

    total_steps = fewest(0) * config.max_epochs
    pace = Pace(config, total_steps)
    told, silence = clock(), FIRST_PROGRESS_S
    meter = Meter(device, world)
    agreement = Agreement(world)
    for epoch in range(cursor.epoch, config.max_epochs):
        steps = fewest(epoch)
        module.train()
        batches: Iterator[Batch] = train_batches(epoch, cursor.step_in_epoch)
        if device.type == "cuda":
            batches = prefetch(batches)
        meter.clear()
        owed = cursor.step_in_epoch < steps and cursor.owes_validation(config)
        if owed and (measured := run_validation()) is not None:
            cursor.stopped = bool(measured["why"])
            yield StepEvent(
                step=cursor.step,
                epoch=epoch + 1,
                steps_in_epoch=steps,
                **cursor.means(),
                **measured,
                stop=cursor.stopped,
                state=snapshot(),
            )
            if cursor.stopped:
                return
            meter.clear()
        elif owed:
            yield stop_event()
            return
        for i in range(cursor.step_in_epoch, steps):
            batch = meter.take(batches)
            torch.manual_seed(step_seed(config.seed, rank, cursor.step))
            lr = learning_rate(config, cursor.step, total_steps)
            set_learning_rate(optimizer, factors, lr)
            found, norm = graphs(batch) if graphs else step_on(batch.to(device))
            meter.add(found)
            cursor.step, cursor.step_in_epoch = cursor.step + 1, i + 1
            answer = agreement.largest(wanted())
            if answer == ASK:
                answer = SAVE if warned() else CONTINUE
            stop = answer == STOP
            inside = i + 1 < steps
            check = inside and not stop and due(config.eval_every_steps, cursor.step)
            logs = due(config.log_every_steps, cursor.step)
            planned = inside and due(config.checkpoint_every_steps, cursor.step)
            save = check or planned or stop or (inside and answer == SAVE)
            if inside and not save and (waited := clock() - told) >= silence:
                left = pace.seconds_left(cursor, meter.seconds)
                if left is not None or waited >= PROGRESS_S:
                    yield meter.still(cursor, steps, left)
                    told, silence = clock(), PROGRESS_S
            if inside and not (save or logs):
                continue
            said = meter.read(cursor)  # waits for the device
            if not math.isfinite(loss := said["loss"]):
                raise UserError(
                    f"the loss is {loss} at step {cursor.step}; lower fit.lr ({config.lr}) or set fit.clip_norm to 1"
                )
            measured = run_validation() if check else {}
            if measured is None:
                yield stop_event()
                return
            cursor.stopped = bool(measured.get("why"))
            told = clock() if check else told
            yield StepEvent(
                step=cursor.step,
                epoch=epoch + 1,
                steps_in_epoch=steps,
                lr=lr,
                grad_norm=float(norm),
                **said,
                **measured,
                stop=cursor.stopped,
                interrupted=stop,
                seconds_left=pace.seconds_left(cursor),
                state=snapshot() if save else {},
            )
            if cursor.stopped or stop:
                return
            meter.clear()

        ended = epoch + 1 == config.max_epochs
        check = ended or (epoch + 1) % config.eval_every_epochs == 0
        measured = run_validation(last=ended) if check else {}
        if measured is None:
            yield stop_event()
            return
        pace.note_epoch(cursor)
        said = cursor.next_epoch(stop=ended or bool(measured.get("why")))
        told, silence = clock(), PROGRESS_S
        yield EpochEvent(
            step=cursor.step,
            epoch=cursor.epoch,
            **said,
            **measured,
            stop=cursor.stopped,
            seconds_left=pace.seconds_left(cursor),
            state=snapshot(),
        )
        if cursor.stopped:
            return


def due(every: int, step: int) -> bool:
    """Whether something that happens every so many steps (0: never) happens after `step` steps."""
    return every > 0 and step % every == 0


def validation(
    model: nn.Module,
    validate: Validate,
    means: Means | None,
    config: FitConfig,
    device: torch.device,
    world: int,
) -> tuple[dict[str, float], int] | None:
    """Validation metrics over the rows of all ranks, and the number of rows; equal on every rank. None on every rank
    where one of them raised ValidationStopped."""
    mine: tuple[Sums, int] | None = None
    model.eval()
    with torch.no_grad(), suppress(ValidationStopped):
        mine = validate(model)
    model.train()
    parts: list[Any] = [mine]
    if world > 1:
        parts = [None] * world
        dist.all_gather_object(parts, mine)
    if any(part is None for part in parts):
        return None
    count = sum(rows for _, rows in parts)
    if count == 0:
        raise UserError(
            "the validation split has no request; check the split in the tables' manifest"
        )
    total: Sums = {}
    for (
        sums,
        _,
    ) in parts:  # in the order of ranks, so that every rank gets the very same
        for name, value in sums.items():
            total[name] = total.get(name, 0.0) + value
    metrics = (
        means(total)
        if means
        else {name: float(value) / count for name, value in total.items()}
    )
    if not math.isfinite(metrics[config.metric]):
        raise UserError(
            f"fit.metric is {config.metric}, which is not defined on the {count:,} rows of the validation, so no "
            f"checkpoint is the best; choose another fit.metric, or validate on more (fit.eval_examples)"
        )
    return metrics, count


def drop_undefined(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that have a value."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def best_fields(state: State) -> dict[str, Any]:
    """Return the best epoch's fields of a state."""
    cursor = state["cursor"]
    return {
        "value": cursor["best"],
        "epoch": cursor["best_epoch"],
        "step": cursor["best_step"],
    }


@dataclass(frozen=True)
class Counted:
    """The unit in which progress is shown: a training example may be a window that serves many requests."""

    per_example: float = 1.0
    """Requests, of a feed events, per training example."""
    unit: str = "requests"
    """Name of the unit."""


REQUESTS = Counted()


def describe(event: Event, config: FitConfig, counted: Counted = REQUESTS) -> str:
    """Describe an epoch, a validation or the progress within an epoch in one line; a run that ends early says why in
    another line."""
    metrics = {
        name: event.metrics[name]
        for name in (config.metric, "recall@10")
        if name in event.metrics
    }
    line = f"epoch {event.epoch:>3}/{config.max_epochs}  step {event.step:>6}  loss {event.loss:.4f}"
    line += "".join(f"  val {name} {value:.4f}" for name, value in metrics.items())
    line += " *" if event.is_best else ""
    rate = event.examples_per_s * counted.per_example
    line += f"  {rate:,.0f} {counted.unit}/s  data wait {event.data_wait:.0%}"
    if isinstance(event, EpochEvent):
        line += f"  {event.seconds:.0f} s + {event.eval_seconds:.0f} s"
    elif event.steps_in_epoch:
        line += f"  {event.steps_in_epoch:,} steps per epoch"
    if event.stop:
        done = f"{line}  done" if isinstance(event, EpochEvent) else line
        return f"{done}\n{event.why}" if event.why else done
    if event.seconds_left is None:
        return line
    return f"{line}  at most {format_duration(event.seconds_left)} left"
