"""The quickstart's trainings and evaluations within a stated time: real steps of each model are timed first.

    probes = {"sasrec": probe(options_of_jobs_train), ...}
    schedule, lines = make_schedule(probes, most_epochs, sizes, others=4, elapsed_s=90)

Every model gets the same time. What a model does not need for its most epochs goes to
the others. Where less than an epoch fits, a model is trained on a share of the training
requests. Where the test split takes too long, every n-th user is measured, the same
users for all models.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from models.config import format_duration
from models.storage.uri import read_json, write_file

if TYPE_CHECKING:
    from models.training_run import TrainingRun
    from pipelines.training.config import TrainConfig

BUDGET_S = 600.0
"""Seconds that the whole quickstart is to take on this machine."""

TRAINING_SHARE = 0.5
"""Share of the budget that trainings get at least, however long the tables have
taken."""

EVALUATION_SHARE = 0.2
"""Share of the budget that evaluations on test take at most."""

EVALUATIONS = 2
"""Evaluations of each model on test: of all items, and with known items left out."""

LEAST_USERS = 200
"""Users that an evaluation on test measures at least."""

COMPARISON_S = 15.0
"""Seconds of the comparison at the end."""

PROBE_S = 3.0
"""Seconds for which the steps of a model are timed, after its first ones."""

WARM_UP_STEPS, TIMED_STEPS = 2, 3
"""Steps that are not timed, as they allocate and compile; steps that are timed at
least."""

PROBED_REQUESTS = 256
"""Requests of validation that a probe ranks."""

EVAL_EXAMPLES = 2_000
"""Requests that each validation of a larger split ranks at most."""

START_S = 4.0
"""Seconds of a training and an evaluation beside reading tables and computing: MLflow,
checkpoints."""


@dataclass(frozen=True)
class Probe:
    """Measured speed of one model on this machine."""

    setup_s: float
    """Seconds to read the tables and build the model."""
    step_s: float
    """Seconds per training step."""
    steps_per_epoch: int
    """Steps of an epoch."""
    examples: int
    """Training examples of an epoch, which may be windows of several requests."""
    request_s: float
    """Seconds to rank one request."""
    val_requests: int
    """Requests of a validation."""

    @property
    def epoch_s(self) -> float:
        """Seconds of an epoch and its validation."""
        return self.steps_per_epoch * self.step_s + self.validation_s

    @property
    def validation_s(self) -> float:
        """Seconds of a validation."""
        return min(self.val_requests, EVAL_EXAMPLES) * self.request_s

    @property
    def fixed_s(self) -> float:
        """Seconds of a training and an evaluation that do not depend on the number of epochs."""
        return START_S + 2 * self.setup_s


@dataclass(frozen=True)
class SplitSizes:
    """Sizes of the tables."""

    users: int
    """Users of the tables."""
    train: int
    """Training requests, of a feed impressions."""
    test: int
    """Requests of test, of a feed impressions."""


@dataclass(frozen=True)
class Plan:
    """Epochs and examples of a model's training."""

    epochs: int
    """Most epochs."""
    share: float
    """Share of the training examples in each of them."""
    examples: int
    """Training examples that are drawn; 0: all."""
    seconds: float
    """Estimated seconds of all epochs."""

    def options(self, val_requests: int) -> dict[str, dict[str, int]]:
        """Return the options of jobs.train."""
        fit = {"max_epochs": self.epochs}
        if val_requests > EVAL_EXAMPLES:
            fit["eval_examples"] = EVAL_EXAMPLES
        if self.examples:
            fit["train_examples"] = self.examples
        return {"fit": fit}

    def describe(self) -> str:
        """Describe the plan in the words of its user."""
        epochs = f"{self.epochs} epoch{'s' if self.epochs > 1 else ''}"
        if self.examples:
            return f"{epochs} of {self.share:.0%} of the training requests"
        return f"at most {epochs}"


def probe(config: TrainConfig, save: str | None = None) -> Probe:
    """Time real training steps and one batch of validation.

    Args:
        config: The training.
        save: Folder for a checkpoint of the model, which stands in for the teacher of a
            model that is timed later.
    """
    import torch

    from models.evaluation import measure_examples
    from models.storage import checkpoint
    from models.training_run import TrainingRun, resolve_training
    from pipelines.training.worker import threads_per_worker

    threads = torch.get_num_threads()
    torch.set_num_threads(threads_per_worker(config.ray.threads, 1))
    try:
        began = time.perf_counter()
        fit = replace(config.fit, train_examples=0, log_every_steps=1)
        model, inputs = resolve_training(config.model, fit, config.inputs)
        setup = TrainingRun.build(model, fit, inputs)
        setup_s = time.perf_counter() - began
        if save:
            checkpoint.save(save, setup.model, setup.checkpoint())
        step_s = time_steps(setup)
        examples = setup.val
        began = time.perf_counter()
        result = measure_examples(
            setup.model,
            examples,
            batch_size=fit.eval_batch_size,
            device=setup.device,
            limit=PROBED_REQUESTS,
            options=fit.eval_options,
        )
        seconds = time.perf_counter() - began
        request_s = seconds / max(1, result.num_examples)
    finally:
        torch.set_num_threads(threads)
    return Probe(
        setup_s,
        step_s,
        setup.train.steps(0),
        len(setup.train.dataset),
        request_s,
        len(examples),
    )


def time_steps(setup: TrainingRun) -> float:
    """Return the seconds per training step of a model that is thrown away."""
    from models.training.fit import StepEvent, fit

    moments = []
    for event in fit(
        setup.model,
        setup.train,
        setup.validate,
        setup.fit,
        means=setup.means,
        lr_multipliers=setup.lr_multipliers,
    ):
        if not isinstance(event, StepEvent):
            break
        moments.append(time.perf_counter())
        timed = moments[WARM_UP_STEPS:]
        if len(timed) > TIMED_STEPS and timed[-1] - timed[0] > PROBE_S:
            break
    timed = moments[WARM_UP_STEPS:] if len(moments) > WARM_UP_STEPS + 1 else moments
    return (timed[-1] - timed[0]) / max(1, len(timed) - 1)


def share_out(
    probes: Sequence[Probe], most_epochs: Sequence[int], seconds: float
) -> list[Plan]:
    """Plan the trainings of several models within `seconds`, with the same largest share for every model.

    Time that a model does not need for its most epochs goes to the others.
    """
    needed = [
        probe.epoch_s * epochs
        for probe, epochs in zip(probes, most_epochs, strict=True)
    ]
    given = [0.0] * len(probes)
    left = max(0.0, seconds)
    by_need = sorted(range(len(probes)), key=needed.__getitem__)
    for rank, index in enumerate(by_need):
        given[index] = min(needed[index], left / (len(probes) - rank))
        left -= given[index]
    return [
        plan(probe, epochs, time_s)
        for probe, epochs, time_s in zip(probes, most_epochs, given, strict=True)
    ]


def plan(probe: Probe, most_epochs: int, seconds: float) -> Plan:
    """Plan one training within `seconds`: whole epochs, or one epoch of a share of the examples."""
    epochs = min(most_epochs, round(seconds / probe.epoch_s, 6) // 1)
    if epochs >= 1:
        return Plan(int(epochs), 1.0, 0, epochs * probe.epoch_s)
    training_s = probe.steps_per_epoch * probe.step_s
    share = min(1.0, max(0.0, seconds - probe.validation_s) / training_s)
    examples = max(1, int(share * probe.examples))
    share = examples / probe.examples
    return Plan(1, share, examples, share * training_s + probe.validation_s)


@dataclass(frozen=True)
class Schedule:
    """Options of a flow's trainings and evaluations that fit its time budget."""

    training: dict[str, dict[str, Any]]
    """Options of jobs.train, by name of the run."""
    evaluation: dict[str, Any] = field(default_factory=dict)
    """Options of jobs.evaluate, the same for all models."""

    @classmethod
    def read(cls, file: str, tables: str) -> Self | None:
        """Read the schedule of an earlier start for tables of this hash, or None."""
        content = read_json(file)
        if content is None or content["tables"] != tables:
            return None
        return cls(content["training"], content["evaluation"])

    def write(self, file: str, tables: str) -> None:
        """Write the schedule for tables of this hash, so that the same command continues with it."""
        content = {"tables": tables, **asdict(self)}
        write_file(file, json.dumps(content, indent=2).encode())


def make_schedule(
    probes: Mapping[str, Probe],
    most_epochs: Sequence[int],
    sizes: SplitSizes,
    *,
    others: int,
    elapsed_s: float,
) -> tuple[Schedule, list[str]]:
    """Choose epochs and measured users for `BUDGET_S`.

    Args:
        probes: Measured speed of each model that is trained, by the name of its run.
        most_epochs: Most epochs of each of them.
        sizes: Sizes of the tables.
        others: Number of models without training.
        elapsed_s: Seconds that the flow has taken so far.

    Returns:
        The schedule, and lines that describe it to the user.
    """
    speeds = list(probes.values())
    # models without training are about as fast to evaluate as the fastest of the others
    ranking_s = sum(probe.request_s for probe in speeds)
    ranking_s += others * min(probe.request_s for probe in speeds)
    whole_s = EVALUATIONS * sizes.test * ranking_s
    stride = math.ceil(whole_s / (EVALUATION_SHARE * BUDGET_S))
    stride = max(1, min(stride, sizes.users // LEAST_USERS))
    fixed_s = sum(probe.fixed_s for probe in speeds)
    fixed_s += others * (START_S + 2 * max(probe.setup_s for probe in speeds))
    fixed_s += COMPARISON_S + whole_s / stride
    left_s = max(BUDGET_S - elapsed_s - fixed_s, TRAINING_SHARE * BUDGET_S)
    plans = share_out(speeds, most_epochs, left_s)
    total_s = elapsed_s + fixed_s + sum(plan.seconds for plan in plans)
    lines = [
        f"the whole takes some {format_duration(total_s)} on this machine, of which {format_duration(elapsed_s)} are over; "
        f"--epochs N chooses otherwise"
    ]
    for name, plan in zip(probes, plans, strict=True):
        lines.append(
            f"  {name:<12}  {plan.describe()}, {format_duration(plan.seconds)}"
        )
    if any(probe.val_requests > EVAL_EXAMPLES for probe in speeds):
        lines.append(f"  validation    {EVAL_EXAMPLES:,} requests, the same each time")
    evaluation: dict[str, Any] = {}
    if stride > 1:
        evaluation = {"user_stride": stride}
        measured = sizes.test // stride
        lines.append(
            f"  test          every {stride}-th user, some {measured:,} of {sizes.test:,} requests"
        )
    training = {
        name: plan.options(probe.val_requests)
        for (name, probe), plan in zip(probes.items(), plans, strict=True)
    }
    return Schedule(training, evaluation), lines
