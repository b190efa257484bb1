"""Asynchronous successive halving that remembers trials by their name, so that a resumed sweep decides as before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, TrialScheduler

from tuning.grid import EPOCH, TRIAL, VALUE, Scheduler


class Halving(AsyncHyperBandScheduler):
    """Ray's ASHA, its rungs keyed by the trial's own name where Ray's ids change with every start of Tune."""

    def __init__(self, scheduler: Scheduler, max_epochs: int) -> None:
        super().__init__(
            time_attr=EPOCH, metric=VALUE, mode="max", max_t=max(max_epochs, scheduler.grace),
            grace_period=scheduler.grace, reduction_factor=scheduler.reduction, stop_last_trials=False,
        )  # fmt: skip

    def replay(self, name: str, reports: list[list[float]]) -> None:
        """Enters what a trial reported before the sweep was interrupted: (epoch, value), in order."""
        past: Any = SimpleNamespace(config={TRIAL: name})
        self.on_trial_add(None, past)  # type: ignore[arg-type]
        for epoch, value in reports:
            self.on_trial_result(None, past, {EPOCH: epoch, VALUE: value})  # type: ignore[arg-type]

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        super().on_trial_add(tune_controller, named(trial))

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        return super().on_trial_result(tune_controller, named(trial), result)

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        super().on_trial_complete(tune_controller, named(trial), result)

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        super().on_trial_remove(tune_controller, named(trial))


def named(trial: Any) -> Any:
    """What the scheduler sees of a trial: its name in place of Ray's id."""
    return SimpleNamespace(trial_id=trial.config[TRIAL])


def make(scheduler: Scheduler, max_epochs: int) -> TrialScheduler:
    """Ray's scheduler for what the grid says."""
    return Halving(scheduler, max_epochs) if scheduler.name == "asha" else FIFOScheduler()
