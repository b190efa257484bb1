"""Test that successive halving in a continued sweep knows the earlier results."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import fs
from ray.tune.schedulers import TrialScheduler

from tuning.sweep import EPOCH, Halving

VALUE = "ndcg@10"

Reports = list[tuple[str, int, float]]
"""Trial, epoch and value."""


def build_trial(name: str, folder: str = "", last: dict | None = None) -> Any:
    """Build a trial with the attributes that a scheduler reads."""
    storage = SimpleNamespace(storage_filesystem=fs.LocalFileSystem())
    path = f"{folder}/{name}"
    return SimpleNamespace(
        trial_id=name, path=path, storage=storage, last_result=last or {}
    )


def decide(
    scheduler: TrialScheduler, trials: dict[str, Any], reports: Reports
) -> list[str]:
    """Return the scheduler's decision on each report."""
    decisions = []
    for name, epoch, value in reports:
        result = {EPOCH: epoch, VALUE: value}
        decisions.append(scheduler.on_trial_result(None, trials[name], result))  # type: ignore[arg-type]
    return decisions


def add_trials(scheduler: TrialScheduler, trials: dict[str, Any]) -> None:
    for trial in trials.values():
        scheduler.on_trial_add(None, trial)  # type: ignore[arg-type]


def make_scheduler() -> Halving:
    """Return a scheduler that stops the lower half of trials at epochs 1, 2 and 4."""
    return Halving(
        time_attr=EPOCH,
        metric=VALUE,
        mode="max",
        max_t=6,
        grace_period=1,
        reduction_factor=2,
        stop_last_trials=False,
    )


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_continued_sweep_decides_as_an_undisturbed_one(
    tmp_path_factory: Any, data: st.DataObject
) -> None:
    turns = data.draw(st.permutations(["a", "b", "c", "d"] * 6))
    scheduler = make_scheduler()
    trials = {name: build_trial(name) for name in "abcd"}
    add_trials(scheduler, trials)
    reports: Reports = []
    decisions: list[str] = []
    epochs, stopped = dict.fromkeys(turns, 0), set()
    for name in turns:
        if name not in stopped:
            epochs[name] += 1
            reports.append((name, epochs[name], data.draw(st.floats(0, 1))))
            decisions += decide(scheduler, trials, reports[-1:])
            if decisions[-1] == "STOP":
                stopped.add(name)
    cut = data.draw(st.integers(0, len(reports)))
    folder = tmp_path_factory.mktemp("tune")
    write_results(folder, reports[:cut])

    continued = make_scheduler()
    last = {name: {EPOCH: epoch} for name, epoch, _ in reports[:cut]}
    trials = {name: build_trial(name, str(folder), last.get(name)) for name in "abcd"}
    add_trials(continued, trials)

    assert decide(continued, trials, reports[cut:]) == decisions[cut:]


def write_results(folder: Path, reports: Reports) -> None:
    """Write results as Tune does, a line each."""
    for name, epoch, value in reports:
        (folder / name).mkdir(exist_ok=True)
        with (folder / name / "result.json").open("a") as file:
            file.write(json.dumps({EPOCH: epoch, VALUE: value}) + "\n")
