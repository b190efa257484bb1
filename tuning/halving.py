"""Stop trials early by Ray's ASHA, which continues after a kill as it would have without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, TrialScheduler

from models.storage import checkpoint
from models.storage.tables import join
from pipelines import tracking
from pipelines.training.record import read_record
from tuning.grid import Scheduler
from tuning.trial import EPOCH, TRIAL, VALUE, SweepSpec


class Halving(AsyncHyperBandScheduler):
    """Ray's ASHA with rungs keyed by the trial's name, as Ray's ids change with every start of Tune."""

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        """Add a trial."""
        super().on_trial_add(tune_controller, with_stable_id(trial))

    def on_trial_result(
        self, tune_controller: Any, trial: Any, result: dict[str, Any]
    ) -> str:
        """Decide on a trial after a report."""
        return super().on_trial_result(tune_controller, with_stable_id(trial), result)

    def on_trial_complete(
        self, tune_controller: Any, trial: Any, result: dict[str, Any]
    ) -> None:
        """Note the last report of a trial."""
        super().on_trial_complete(tune_controller, with_stable_id(trial), result)

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        """Remove a trial."""
        super().on_trial_remove(tune_controller, with_stable_id(trial))


def trial_name(trial: Any) -> str:
    """Return the name of Tune's trial."""
    return str(trial.config[TRIAL])


def with_stable_id(trial: Any) -> Any:
    """Return a trial for the scheduler, with its name as its id."""
    return SimpleNamespace(trial_id=trial_name(trial))


def make_scheduler(scheduler: Scheduler, max_epochs: int) -> TrialScheduler:
    """Return Ray's scheduler for that of a grid.

    Args:
        scheduler: The grid's scheduler.
        max_epochs: Epochs of a trial that is not stopped.
    """
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
    """Report results from before an interruption to the scheduler, in order of time.

    Args:
        scheduler: The scheduler.
        past: Reports: milliseconds, epoch, value, and name of the trial.

    Returns:
        Names of the trials that the scheduler stops.
    """
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


def past_reports(spec: SweepSpec) -> list[tuple[int, int, float, str]]:
    """Return the reports of trials before this call, up to the checkpoints that they continue from."""
    reports = []
    for name in spec.trials:
        folder = join(spec.folder, name)
        if not read_record(folder) or not (last := checkpoint.last(folder)):
            continue
        curves = tracking.read_curves(join(folder, last.folder))
        ends = [step for step, *_ in curves.get("epoch", [])]
        for step, value, time_ms in curves.get(f"val/{spec.metric}", []):
            reports.append((time_ms, 1 + sum(end < step for end in ends), value, name))
    return reports
