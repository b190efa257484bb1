"""The training loop, in PyTorch only: a generator of reports.

`pipelines/training` turns its reports into checkpoints, metrics and lines of progress.

The random numbers of a step depend on (seed, rank, step) alone, and the batches of an
epoch on (seed, epoch) alone. So the weights, the optimizer and the position in
`Report.state` are the whole state of a run, and a resumed run ends with the same
weights as an uninterrupted one.

Under DDP every rank calls `fit` with its share of each batch. Each step averages the
ranks' gradients. Losses are means over the global batch
(`models/training/distributed.py`), so the average is the gradient of the global batch.
A run may therefore resume with another number of workers and ends with the same
weights, up to the order of sums, unless its model draws random numbers (dropout) or
compares the examples of one worker's batch with each other (InfoNCE).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from core.errors import UserError, format_duration
from models.dataset.batch import Batch
from models.dataset.dataset import Dataset
from models.training import fsdp
from models.training.checkpoint import Best, State
from models.training.cuda_graphs import CudaGraphs
from models.training.distributed import set_workers
from models.training.fit_config import FitConfig
from models.training.optimizers import make_optimizer, optimizer_state

FIRST_PROGRESS_S, PROGRESS_S = 5.0, 30.0
"""Seconds without another report until the first report of progress, and between later
ones."""

PACE_STEPS = 3
"""Number of timed steps from which the remaining time is estimated."""

PREFETCHED_BATCHES = 4
"""Batches that a thread collates ahead of a GPU."""

Validate = Callable[[nn.Module], tuple[dict[str, float], int]]
"""Return the metrics of all ranks' validation rows, and the number of rows; a
collective call with the same result on every rank."""


class ValidationStopped(Exception):
    """Raised by `Validate` between two batches when a single worker is to stop."""


@dataclass
class Position:
    """The position of a run; with weights and optimizer, its whole state."""

    epoch: int = 0
    """Number of completed epochs."""
    step_in_epoch: int = 0
    """Number of completed steps of the current epoch."""
    step: int = 0
    """Number of completed optimizer steps."""
    loss: float = 0.0
    """Training loss of the current epoch, summed over steps and averaged over ranks."""
    best: Best = field(default_factory=lambda: Best(value=None, epoch=0, step=0))
    waiting: int = 0
    """Number of validations since the best one."""
    stopped: bool = False
    """Whether the run has ended."""

    def record_metric(self, value: float) -> bool:
        """Record a validation metric and return whether it is the best so far."""
        self.waiting += 1
        best_value = self.best["value"]
        if best_value is not None and value <= best_value:
            return False
        self.best = {"value": value, "epoch": self.epoch + 1, "step": self.step}
        self.waiting = 0
        return True


@dataclass(frozen=True, kw_only=True)
class Report:
    """Progress of a run, a point of its curves, or a checkpoint that is due."""

    step: int
    """Number of completed optimizer steps."""
    epoch: int
    """Number of the epoch, from 1."""
    loss: float
    """Mean training loss over ranks, since the last point or over the epoch."""
    steps_in_epoch: int
    examples_per_s: float
    """Training examples per second since the last point or in the epoch, all ranks
    together."""
    data_wait: float
    """Share of the time spent waiting for data."""
    seconds: float
    """Duration of the training since the last point or in the epoch."""
    seconds_left: float | None = None
    """Estimated time until the last planned step; None until `PACE_STEPS` steps were
    timed."""
    points: dict[str, float] = field(default_factory=dict)
    """Points of the curves at `step`, by name."""
    ends_epoch: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    """Validation metrics; empty without a validation."""
    eval_seconds: float = 0.0
    is_best: bool = False
    """Whether `fit.metric` is better than in every earlier validation."""
    stop: bool = False
    """Whether the run ends with this report."""
    stop_reason: str = ""
    """Why the run ends before its last epoch; empty otherwise."""
    interrupted: bool = False
    """Whether the generator ends because the run is to stop; it resumes from
    `state`."""
    state: State = field(default_factory=State)
    """State to save in a checkpoint beside the weights; empty if no checkpoint is due.
    It holds live tensors, so save it before the next report is requested. For a sharded
    model it also has the full `weights`; only rank 0 has them and the optimizer state.
    """


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


def set_learning_rate(
    optimizer: torch.optim.Optimizer, factors: Sequence[float], lr: float
) -> None:
    """Set the learning rate of each parameter group to `lr` times the group's factor.

    On a GPU the learning rate is a tensor, so that a CUDA graph reads its current
    value.

    Args:
        optimizer: Optimizer from `make_optimizer`.
        factors: Factor of each parameter group.
        lr: Learning rate of a factor of 1.
    """
    for group, factor in zip(optimizer.param_groups, factors, strict=True):
        device = group["params"][0].device
        if "capturable" in group:  # a loaded state may come from another device
            group["capturable"] = device.type == "cuda"
        if device.type != "cuda":
            group["lr"] = lr * factor
        elif isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr * factor)
        else:  # a new optimizer, or a loaded state
            group["lr"] = torch.tensor(lr * factor, device=device)


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
    iterator = iter(batches)

    def pin_next() -> Batch | None:
        batch = next(iterator, None)
        return batch and batch.map(Tensor.pin_memory)

    with ThreadPoolExecutor(1, "prefetch") as pool:
        waiting = deque(pool.submit(pin_next) for _ in range(PREFETCHED_BATCHES))
        while (batch := waiting.popleft().result()) is not None:
            waiting.append(pool.submit(pin_next))
            yield batch


def sum_over_ranks(
    values: list[float], world: int, device: torch.device
) -> list[float]:
    """Return the sum of each value over the ranks; a collective call."""
    if world == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return tensor.tolist()


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
) -> TrainStep:
    """Build the training step of a model, by DDP with several workers.

    Args:
        model: The model, on its device.
        optimizer: Optimizer of the model.
        config: Options of the training loop.
        device: Device of the model.
        world: Number of workers.
        shards: The shards of the model; None if each worker holds the whole model.

    Returns:
        The step, which moves batches to the device.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    module: Any = model
    if world > 1 and not shards:
        module = DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            broadcast_buffers=False,
        )
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

    if uses_cuda_graphs(config, device, world):
        return CudaGraphs(step_on, device)
    return lambda batch: step_on(batch.to(device))


def fit(
    model: Any,
    train: Dataset,
    validate: Validate,
    config: FitConfig,
    *,
    shard: bool = False,
    state: State | None = None,
    device: torch.device | str = "cpu",
    rank: int = 0,
    world: int = 1,
    should_stop: Callable[[], bool] = lambda: False,
    should_save: Callable[[], bool] = lambda: False,
) -> Iterator[Report]:
    """Train a model and yield reports.

    With `world` above 1 the default process group must exist. All ranks yield reports
    with points of the curves or with a state at the same steps. When they yield reports
    with neither, which show progress, depends on each rank's clock.

    Args:
        model: The model, on `device`. `model(batch)` returns a mapping with the () mean
            `loss` of the batch, and further values to report. `model.lr_multipliers()`
            returns factors on the learning rate, by prefix of parameter names.
        train: Training examples, and this rank's share of them.
        validate: Measures the model.
        config: Options of the training loop.
        shard: Whether several workers shard the model (`models/training/fsdp.py`).
        state: State of the report from which the run resumes; the caller has loaded the
            weights.
        device: Device of the model.
        rank: Rank of this worker.
        world: Number of workers.
        should_stop: Called after every step of a single worker; if it returns true, a
            state is saved and the generator ends.
        should_save: Called by all ranks at every point of the curves, so it may be a
            collective. If it returns true on any rank, a state is saved.
    """
    device = torch.device(device)
    shards = fsdp.shard(model, device, rank, world) if shard and world > 1 else None
    optimizer, factors = make_optimizer(
        model, config.optimizer, config.weight_decay, model.lr_multipliers()
    )
    at = Position()
    if state is not None:
        at = Position(**state["position"])
        if shards:
            shards.load(optimizer, state["optimizer"])
        else:
            optimizer.load_state_dict(state["optimizer"])
    if at.stopped:
        return

    def save() -> State:
        state: State = (
            shards.gather_state(optimizer)
            if shards
            else {"optimizer": optimizer_state(optimizer)}
        )
        state["position"] = asdict(at)
        return state

    take_step = make_step(model, optimizer, config, device, world, shards)
    steps = train.num_steps(config.batch_size)
    total_steps, first_step = steps * config.max_epochs, at.step
    began = reported = time.perf_counter()
    silence, stops = FIRST_PROGRESS_S, False

    def report(
        loss: float, examples: float, waited: float, seconds: float, **fields: Any
    ) -> Report:
        num_timed = at.step - first_step
        per_step = (time.perf_counter() - began) / max(1, num_timed)
        left = per_step * (total_steps - at.step)
        return Report(
            step=at.step,
            epoch=epoch + 1,
            steps_in_epoch=steps,
            loss=loss,
            examples_per_s=examples / seconds,
            data_wait=waited / seconds,
            seconds=seconds,
            seconds_left=left if num_timed >= PACE_STEPS else None,
            **fields,
        )

    load_epoch = partial(
        train.epoch,
        config.batch_size,
        seed=config.seed,
        pad_to_buckets=uses_cuda_graphs(config, device, world),
    )
    for epoch in range(at.epoch, config.max_epochs):
        batches = load_epoch(epoch=epoch, skip=at.step_in_epoch)
        if device.type == "cuda":
            batches = prefetch(batches)
        model.train()
        points: dict[str, float] = {}
        epoch_examples, epoch_waited, epoch_began = 0.0, 0.0, time.perf_counter()
        # since the last point of the curves
        sums: dict[str, Any] = {}
        num_steps, examples, waited, interval_began = 0, 0.0, 0.0, epoch_began
        while at.step_in_epoch < steps and not stops:
            asked = time.perf_counter()
            batch = next(batches)
            waited += time.perf_counter() - asked
            examples += 0 if batch.is_stand_in else batch.num_rows
            torch.manual_seed(step_seed(config.seed, rank, at.step))
            lr = learning_rate(config, at.step, total_steps)
            set_learning_rate(optimizer, factors, lr)
            outputs, norm = take_step(batch)
            for name, value in outputs.items():
                sums[name] = sums.get(name, 0.0) + value.double()
            num_steps += 1
            at.step += 1
            at.step_in_epoch += 1
            ends = at.step_in_epoch == steps
            stops = world == 1 and should_stop()
            is_planned = is_due(config.checkpoint_every_steps, at.step)
            is_point = ends or is_planned or is_due(config.log_every_steps, at.step)
            if not (is_point or stops):
                if time.perf_counter() - reported >= silence:
                    loss = sums["loss"].item() / num_steps
                    seconds = time.perf_counter() - interval_began
                    yield report(loss, examples * world, waited, seconds)
                    reported, silence = time.perf_counter(), PROGRESS_S
                continue
            wants_state = stops or is_planned or should_save()
            values = [value.item() for value in sums.values()]
            *values, examples, waited, num_saving = sum_over_ranks(
                [*values, examples, waited, wants_state], world, device
            )
            waited /= world
            seconds = time.perf_counter() - interval_began
            means = {
                name: value / world / num_steps
                for name, value in zip(sums, values, strict=True)
            }
            loss = means["loss"]
            if not math.isfinite(loss):
                raise UserError(f"the loss is {loss} at step {at.step}")
            at.loss += loss * num_steps
            if is_point:
                points = {f"train/{name}": value for name, value in means.items()}
                points |= {"train/lr": lr, "train/grad_norm": float(norm)}
                points["train/examples_per_s"] = examples / seconds
                points["train/data_wait"] = waited / seconds
            if not (ends or stops):
                work = loss, examples, waited, seconds
                yield report(*work, points=points, state=save() if num_saving else {})
                points = {}
            epoch_examples += examples
            epoch_waited += waited
            sums, num_steps, examples, waited = {}, 0, 0.0, 0.0
            interval_began = time.perf_counter()
        seconds = max(1e-9, time.perf_counter() - epoch_began)
        loss = at.loss / at.step_in_epoch
        work = loss, epoch_examples, epoch_waited, seconds
        is_last = epoch + 1 == config.max_epochs
        end: dict[str, Any] = {"ends_epoch": True}
        if not stops and (is_last or is_due(config.eval_every_epochs, epoch + 1)):
            validation_began = time.perf_counter()
            try:
                with shards.gather_weights() if shards else nullcontext():
                    metrics, count = validate(model)
                if not count:
                    raise UserError("the validation split has no request")
                end["metrics"] = metrics
                end["eval_seconds"] = time.perf_counter() - validation_began
                end["is_best"] = at.record_metric(metrics[config.metric])
                end["stop_reason"] = "" if is_last else early_stop_reason(at, config)
                points |= {f"val/{name}": value for name, value in metrics.items()}
                points |= {"val/examples": count, "val/seconds": end["eval_seconds"]}
            except ValidationStopped:
                stops = True
        if stops:
            yield report(*work, points=points, interrupted=True, state=save())
            return
        points |= {"epoch": epoch + 1, "train/epoch_loss": loss}
        points["train/epoch_seconds"] = seconds
        at.epoch, at.step_in_epoch, at.loss = epoch + 1, 0, 0.0
        at.stopped = is_last or bool(end.get("stop_reason"))
        yield report(*work, points=points, stop=at.stopped, state=save(), **end)
        reported, silence = time.perf_counter(), PROGRESS_S
        if at.stopped:
            return


def is_due(every: int, step: int) -> bool:
    """Return whether an action of every `every`-th step is due; 0 is never."""
    return every > 0 and step % every == 0


def early_stop_reason(at: Position, config: FitConfig) -> str:
    """Return why the run stops early, or an empty string if it continues."""
    if not 0 < config.patience <= at.waiting:
        return ""
    return (
        f"stopped: no better val {config.metric} in {at.waiting} validations "
        f"(fit.patience), best {at.best['value']:.4f} in epoch {at.best['epoch']}"
    )


def drop_undefined(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics whose value is finite."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def describe(report: Report, config: FitConfig, per_example: float, unit: str) -> str:
    """Describe a report in one line; a second line says why a run stops early.

    Args:
        report: An epoch, or progress within an epoch.
        config: Options of the training loop.
        per_example: Units of the throughput per example, such as the number of requests
            of a window.
        unit: Name of the unit.
    """
    metrics = {
        name: report.metrics[name]
        for name in (config.metric, "recall@10")
        if name in report.metrics
    }
    line = (
        f"epoch {report.epoch:>3}/{config.max_epochs}  step {report.step:>6}  "
        f"loss {report.loss:.4f}"
    )
    line += "".join(f"  val {name} {value:.4f}" for name, value in metrics.items())
    line += " *" if report.is_best else ""
    rate = report.examples_per_s * per_example
    line += f"  {rate:,.0f} {unit}/s  data wait {report.data_wait:.0%}"
    if report.ends_epoch:
        line += f"  {report.seconds:.0f} s + {report.eval_seconds:.0f} s"
    else:
        line += f"  {report.steps_in_epoch:,} steps per epoch"
    if report.stop:
        return f"{line}  done\n{report.stop_reason}".rstrip()
    if report.seconds_left is None:
        return line
    return f"{line}  at most {format_duration(report.seconds_left)} left"
