"""Fit the quickstart's trainings and evaluations into a time budget.

    probes = {"sasrec": probe(train_config), ...}
    schedule, lines = make_schedule(probes, max_epochs, sizes, others=4, elapsed_s=90)

Each model is timed for a few steps first. All models get the same share of the time;
time that a model does not need for its largest number of epochs is divided among the
others. If less than an epoch fits, the model is trained on a share of the training
requests. If evaluation on the test split takes too long, only every n-th user is
measured, the same users for all models.
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
"""Seconds that the whole quickstart may take on this machine."""

TRAINING_SHARE = 0.5
"""Smallest share of the budget for trainings, however long the tables have taken."""

EVALUATION_SHARE = 0.2
"""Largest share of the budget for evaluations on test."""

EVALUATIONS = 2
"""Evaluations of each model on test: all items, and items not in the history."""

MIN_TEST_USERS = 200
"""Smallest number of users that an evaluation on test measures."""

COMPARISON_S = 15.0
"""Seconds of the comparison at the end."""

PROBE_S = 3.0
"""Seconds for which the steps of a model are timed, after the warm-up."""

WARM_UP_STEPS = 2
"""Steps before the timing starts, in which the model allocates and compiles."""

MIN_TIMED_STEPS = 3
"""Smallest number of timed steps."""

PROBED_REQUESTS = 256
"""Requests of the validation split that a probe ranks."""

EVAL_EXAMPLES = 2_000
"""Largest number of requests that each validation ranks."""

START_S = 4.0
"""Seconds of a training and an evaluation for MLflow and checkpoints, without reading
tables and computing."""


@dataclass(frozen=True)
class Probe:
    """Measured speed of one model on this machine."""

    setup_s: float
    """Seconds to read the tables and build the model."""
    step_s: float
    """Seconds per training step."""
    steps_per_epoch: int
    """Training steps per epoch."""
    examples: int
    """Training examples per epoch; an example may be a window of several requests."""
    request_s: float
    """Seconds to rank one request."""
    val_requests: int
    """Requests of the validation split."""

    @property
    def epoch_s(self) -> float:
        """Seconds per epoch, with its validation."""
        return self.steps_per_epoch * self.step_s + self.validation_s

    @property
    def validation_s(self) -> float:
        """Seconds per validation."""
        return min(self.val_requests, EVAL_EXAMPLES) * self.request_s

    @property
    def fixed_s(self) -> float:
        """Seconds of a training and an evaluation apart from its epochs and ranking."""
        return START_S + 2 * self.setup_s


@dataclass(frozen=True)
class SplitSizes:
    """Sizes of the tables."""

    users: int
    """Number of users."""
    train: int
    """Number of training requests; impressions of an actions log."""
    test: int
    """Number of test requests; impressions of an actions log."""


@dataclass(frozen=True)
class Plan:
    """Epochs and examples of a model's training."""

    epochs: int
    """Largest number of epochs."""
    share: float
    """Share of the training examples in each epoch."""
    examples: int
    """Number of training examples that are drawn; 0: all."""
    seconds: float
    """Estimated seconds of all epochs."""

    def options(self, val_requests: int) -> dict[str, dict[str, int]]:
        """Return the plan as options of jobs.train.

        Args:
            val_requests: Requests of the validation split.
        """
        fit = {"max_epochs": self.epochs}
        if val_requests > EVAL_EXAMPLES:
            fit["eval_examples"] = EVAL_EXAMPLES
        if self.examples:
            fit["train_examples"] = self.examples
        return {"fit": fit}

    def describe(self) -> str:
        """Return the plan as text, such as `at most 20 epochs`."""
        epochs = f"{self.epochs} epoch{'s' if self.epochs > 1 else ''}"
        if self.examples:
            return f"{epochs} of {self.share:.0%} of the training requests"
        return f"at most {epochs}"


def probe(config: TrainConfig, save: str | None = None) -> Probe:
    """Time real training steps and one batch of validation.

    Args:
        config: Configuration of the training.
        save: Folder for a checkpoint of the untrained model, which serves as the
            teacher of a model that is timed later; None saves no checkpoint.
    """
    import torch

    from models.evaluation import measure_examples
    from models.storage import checkpoint
    from models.training_run import TrainingRun, resolve_training
    from pipelines.training.worker import threads_per_worker

    threads = torch.get_num_threads()
    torch.set_num_threads(threads_per_worker(config.ray.threads, 1))
    try:
        start_s = time.perf_counter()
        fit = replace(config.fit, train_examples=0, log_every_steps=1)
        model, inputs = resolve_training(config.model, fit, config.inputs)
        run = TrainingRun.build(model, fit, inputs)
        setup_s = time.perf_counter() - start_s
        if save:
            checkpoint.save(save, run.model, run.checkpoint())
        step_s = time_steps(run)
        start_s = time.perf_counter()
        result = measure_examples(
            run.model,
            run.val,
            batch_size=fit.eval_batch_size,
            device=run.device,
            limit=PROBED_REQUESTS,
            options=fit.eval_options,
        )
        seconds = time.perf_counter() - start_s
        request_s = seconds / max(1, result.num_examples)
    finally:
        torch.set_num_threads(threads)
    return Probe(
        setup_s=setup_s,
        step_s=step_s,
        steps_per_epoch=run.train.steps(0),
        examples=len(run.train.dataset),
        request_s=request_s,
        val_requests=len(run.val),
    )


def time_steps(run: TrainingRun) -> float:
    """Return the mean seconds per training step. The model is trained meanwhile."""
    from models.training.fit import StepEvent, fit

    step_ends = []
    for event in fit(
        run.model,
        run.train,
        run.validate,
        run.fit,
        means=run.means,
        lr_multipliers=run.lr_multipliers,
    ):
        if not isinstance(event, StepEvent):
            break
        step_ends.append(time.perf_counter())
        timed = step_ends[WARM_UP_STEPS:]
        if len(timed) > MIN_TIMED_STEPS and timed[-1] - timed[0] > PROBE_S:
            break
    timed = step_ends
    if len(step_ends) > WARM_UP_STEPS + 1:
        timed = step_ends[WARM_UP_STEPS:]
    return (timed[-1] - timed[0]) / max(1, len(timed) - 1)


def plan_trainings(
    probes: Sequence[Probe], max_epochs: Sequence[int], seconds: float
) -> list[Plan]:
    """Plan the trainings of several models within a total time.

    All models get the same time. Time that a model does not need for its largest number
    of epochs is divided among the others.

    Args:
        probes: Measured speed of each model.
        max_epochs: Largest number of epochs of each model.
        seconds: Total time of all trainings.
    """
    needed_s = [
        probe.epoch_s * epochs for probe, epochs in zip(probes, max_epochs, strict=True)
    ]
    planned_s = [0.0] * len(probes)
    remaining_s = max(0.0, seconds)
    # Models that need the least time come first, as they may leave some for the others.
    by_need = sorted(range(len(probes)), key=needed_s.__getitem__)
    for rank, index in enumerate(by_need):
        equal_share_s = remaining_s / (len(probes) - rank)
        planned_s[index] = min(needed_s[index], equal_share_s)
        remaining_s -= planned_s[index]
    return [
        plan_training(probe, epochs, training_s)
        for probe, epochs, training_s in zip(probes, max_epochs, planned_s, strict=True)
    ]


def plan_training(probe: Probe, max_epochs: int, seconds: float) -> Plan:
    """Plan one training: whole epochs, or one epoch of a share of the examples.

    Args:
        probe: Measured speed of the model.
        max_epochs: Largest number of epochs.
        seconds: Time of the training.
    """
    # Rounded, so that a time of exactly n epochs gives n in spite of float errors.
    epochs = min(max_epochs, math.floor(round(seconds / probe.epoch_s, 6)))
    if epochs >= 1:
        return Plan(epochs, 1.0, 0, epochs * probe.epoch_s)
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
        """Read a schedule, or return None if there is none for the tables.

        Args:
            file: JSON file, written by `write`.
            tables: Hash of the table `sequences`.
        """
        content = read_json(file)
        if content is None or content["tables"] != tables:
            return None
        return cls(content["training"], content["evaluation"])

    def write(self, file: str, tables: str) -> None:
        """Write the schedule to a file, for the next start of the same command.

        Args:
            file: JSON file.
            tables: Hash of the table `sequences`.
        """
        content = {"tables": tables, **asdict(self)}
        write_file(file, json.dumps(content, indent=2).encode())


def make_schedule(
    probes: Mapping[str, Probe],
    max_epochs: Sequence[int],
    sizes: SplitSizes,
    *,
    others: int,
    elapsed_s: float,
) -> tuple[Schedule, list[str]]:
    """Choose the epochs of each model and the measured users to fit into `BUDGET_S`.

    Args:
        probes: Measured speed of each trained model, by the name of its run.
        max_epochs: Largest number of epochs of each of these models, in this order.
        sizes: Sizes of the tables.
        others: Number of models without training.
        elapsed_s: Seconds that the quickstart has taken so far.

    Returns:
        The schedule, and lines that describe the schedule to the user.
    """
    speeds = list(probes.values())
    # models without training are about as fast as the fastest trained model
    request_s = sum(probe.request_s for probe in speeds)
    request_s += others * min(probe.request_s for probe in speeds)
    full_evaluation_s = EVALUATIONS * sizes.test * request_s
    stride = math.ceil(full_evaluation_s / (EVALUATION_SHARE * BUDGET_S))
    stride = max(1, min(stride, sizes.users // MIN_TEST_USERS))
    fixed_s = sum(probe.fixed_s for probe in speeds)
    fixed_s += others * (START_S + 2 * max(probe.setup_s for probe in speeds))
    fixed_s += COMPARISON_S + full_evaluation_s / stride
    training_s = max(BUDGET_S - elapsed_s - fixed_s, TRAINING_SHARE * BUDGET_S)
    plans = plan_trainings(speeds, max_epochs, training_s)
    total_s = elapsed_s + fixed_s + sum(plan.seconds for plan in plans)
    lines = [
        f"the quickstart takes about {format_duration(total_s)} on this machine, of "
        f"which {format_duration(elapsed_s)} have passed; --epochs N overrides the "
        "epochs"
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
            f"  test          every {stride}-th user, about {measured:,} of "
            f"{sizes.test:,} requests"
        )
    training = {
        name: plan.options(probe.val_requests)
        for (name, probe), plan in zip(probes.items(), plans, strict=True)
    }
    return Schedule(training, evaluation), lines
