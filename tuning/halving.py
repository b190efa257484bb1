"""Which trials are stopped early: Ray's ASHA, which goes on after a kill as it would have without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, TrialScheduler

from models.storage import checkpoint
from models.storage.tables import join
from pipelines import tracking
from pipelines.training.record import read_record
from tuning.grid import Scheduler
from tuning.trial import EPOCH, TRIAL, VALUE, Plan


class Halving(AsyncHyperBandScheduler):
    """Ray's ASHA, its rungs keyed by the trial's own name where Ray's ids change with every start of Tune."""

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        super().on_trial_add(tune_controller, named(trial))

    def on_trial_result(
        self, tune_controller: Any, trial: Any, result: dict[str, Any]
    ) -> str:
        return super().on_trial_result(tune_controller, named(trial), result)

    def on_trial_complete(
        self, tune_controller: Any, trial: Any, result: dict[str, Any]
    ) -> None:
        super().on_trial_complete(tune_controller, named(trial), result)

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        super().on_trial_remove(tune_controller, named(trial))


def name_of(trial: Any) -> str:
    """What Tune calls a trial."""
    return str(trial.config[TRIAL])


def named(trial: Any) -> Any:
    """What the scheduler sees of a trial: its name in place of Ray's id."""
    return SimpleNamespace(trial_id=name_of(trial))


def make_scheduler(scheduler: Scheduler, max_epochs: int) -> TrialScheduler:
    """Ray's scheduler for what the grid says."""
    if scheduler.name == "none":
        return FIFOScheduler()
    return Halving(
        time_attr=EPOCH,
        metric=VALUE,
        mode="max",
        max_t=max(max_epochs, scheduler.grace),
        grace_period=scheduler.grace,
        reduction_factor=scheduler.reduction,
        stop_last_trials=False,
    )


def replay(
    scheduler: TrialScheduler, past: list[tuple[int, int, float, str]]
) -> set[str]:
    """Tells the scheduler what trials reported before an interruption, (milliseconds, epoch, value, name), in order of
    time; returns the names of those that it stops."""
    stopped = set()
    for name in {name for *_, name in past}:
        scheduler.on_trial_add(None, SimpleNamespace(config={TRIAL: name}))  # type: ignore[arg-type]
    for _, epoch, value, name in sorted(past):
        if name in stopped:
            continue
        trial = SimpleNamespace(config={TRIAL: name})
        result = {EPOCH: epoch, VALUE: value}
        decision = scheduler.on_trial_result(None, trial, result)  # type: ignore[arg-type]
        if decision == TrialScheduler.STOP:
            stopped.add(name)
    return stopped


def past_reports(plan: Plan) -> list[tuple[int, int, float, str]]:
    """What the trials reported before this call, up to the checkpoints that they go on from."""
    found = []
    for name in plan.trials:
        folder = join(plan.folder, name)
        if not read_record(folder) or not (last := checkpoint.last(folder)):
            continue
        curves = tracking.read_curves(join(folder, last.folder))
        ends = [step for step, *_ in curves.get("epoch", [])]
        for step, value, time_ms in curves.get(f"val/{plan.metric}", []):
            found.append((time_ms, 1 + sum(end < step for end in ends), value, name))
    return found
