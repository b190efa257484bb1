"""Stop trials early by Ray's ASHA scheduler, also in a sweep that is continued."""

from __future__ import annotations

import json
from typing import Any

from ray.tune.schedulers import AsyncHyperBandScheduler

from tuning.trial import EPOCH


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
