"""Stop trials early by Ray's ASHA scheduler, also in a sweep that is continued."""

from __future__ import annotations

import json
from typing import Any

from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, TrialScheduler

from tuning.grid import Scheduler
from tuning.trial import EPOCH, VALUE


class Halving(AsyncHyperBandScheduler):
    """Ray's ASHA scheduler, which in a continued sweep knows the earlier results."""

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        """Add a trial, with the results that Tune has stored of it."""
        super().on_trial_add(tune_controller, trial)
        if EPOCH not in trial.last_result:  # it is new
            return
        filesystem = trial.storage.storage_filesystem
        with filesystem.open_input_stream(f"{trial.path}/result.json") as stream:
            for line in stream.read().splitlines():
                super().on_trial_result(tune_controller, trial, json.loads(line))


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
