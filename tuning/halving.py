"""Stop trials early by Ray's ASHA scheduler, which survives a kill of the sweep.

A restarted sweep replays the earlier reports of its trials, so that the scheduler
decides as it would have without the kill.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, TrialScheduler

from core.files import join
from models.training import checkpoint
from pipelines import tracking
from pipelines.training.record import read_record
from tuning.grid import Scheduler
from tuning.trial import EPOCH, TRIAL, VALUE, SweepSpec


class Halving(AsyncHyperBandScheduler):
    """Ray's ASHA scheduler with trials identified by name.

    The ids that Ray gives to trials change with every start of Tune.
    """

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        """Add a trial."""
        super().on_trial_add(tune_controller, with_stable_id(trial))

    def on_trial_result(
        self, tune_controller: Any, trial: Any, result: dict[str, Any]
    ) -> str:
        """Return whether a trial continues or stops after a report."""
        return super().on_trial_result(tune_controller, with_stable_id(trial), result)

    def on_trial_complete(
        self, tune_controller: Any, trial: Any, result: dict[str, Any]
    ) -> None:
        """Record the last report of a trial."""
        super().on_trial_complete(tune_controller, with_stable_id(trial), result)

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        """Remove a trial."""
        super().on_trial_remove(tune_controller, with_stable_id(trial))


def trial_name(trial: Any) -> str:
    """Return the name of one of Tune's trials."""
    return str(trial.config[TRIAL])


def with_stable_id(trial: Any) -> Any:
    """Return a stand-in for one of Tune's trials, whose id is the trial's name."""
    return SimpleNamespace(trial_id=trial_name(trial))


def make_scheduler(config: Scheduler, max_epochs: int) -> TrialScheduler:
    """Return Ray's scheduler for a grid.

    Args:
        config: Scheduler section of the grid file.
        max_epochs: Epochs of a trial that is not stopped.
    """
    if config.name == "none":
        return FIFOScheduler()
    return Halving(
        time_attr=EPOCH,
        metric=VALUE,
        mode="max",
        max_t=max(max_epochs, config.grace),
        grace_period=config.grace,
        reduction_factor=config.reduction,
        stop_last_trials=False,
    )


class Report(NamedTuple):
    """A report of a trial to the scheduler. Reports sort by time."""

    time_ms: int
    """Time of the validation, in milliseconds since 1970."""
    epoch: int
    """Number of the epoch, from 1."""
    value: float
    """Value of the sweep's metric."""
    trial: str
    """Name of the trial."""


def replay_reports(scheduler: TrialScheduler, reports: list[Report]) -> set[str]:
    """Replay reports from before an interruption to the scheduler, in order of time.

    Args:
        scheduler: A new scheduler.
        reports: Reports of all trials, in any order.

    Returns:
        Names of the trials that the scheduler stops.
    """
    stopped = set()
    for name in {report.trial for report in reports}:
        scheduler.on_trial_add(None, SimpleNamespace(config={TRIAL: name}))  # type: ignore[arg-type]
    for report in sorted(reports):
        if report.trial in stopped:
            continue
        trial = SimpleNamespace(config={TRIAL: report.trial})
        result = {EPOCH: report.epoch, VALUE: report.value}
        decision = scheduler.on_trial_result(None, trial, result)  # type: ignore[arg-type]
        if decision == TrialScheduler.STOP:
            stopped.add(report.trial)
    return stopped


def load_past_reports(spec: SweepSpec) -> list[Report]:
    """Return the reports of an earlier call, up to each trial's last checkpoint."""
    reports = []
    for name in spec.trials:
        folder = join(spec.folder, name)
        last = checkpoint.last(folder) if read_record(folder) else None
        if not last:
            continue
        curves = tracking.read_curves(join(folder, last.folder))
        last_steps = [step for step, *_ in curves.get("epoch", [])]
        for step, value, time_ms in curves.get(f"val/{spec.metric}", []):
            epoch = 1 + sum(last_step < step for last_step in last_steps)
            reports.append(Report(time_ms, epoch, value, name))
    return reports
