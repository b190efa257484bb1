"""Test the decisions of successive halving, also in a continued sweep."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import fs
from ray.tune.schedulers import TrialScheduler

from tuning.grid import Scheduler
from tuning.halving import make_scheduler
from tuning.trial import EPOCH, VALUE

ASHA = Scheduler(name="asha", grace=1, reduction=2)

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


def decide_anew(scheduler: TrialScheduler, reports: Reports) -> list[str]:
    """Return the decisions of a new sweep."""
    trials = {name: build_trial(name) for name, _, _ in reports}
    add_trials(scheduler, trials)
    return decide(scheduler, trials, reports)


def test_the_lower_half_stops_at_each_rung() -> None:
    reports = [
        ("a", 1, 0.5),
        ("b", 1, 0.4),
        ("c", 1, 0.6),
        ("a", 2, 0.5),
        ("c", 2, 0.4),
        ("a", 3, 0.1),
        ("a", 8, 0.1),
    ]

    stops = ["CONTINUE"] * len(reports)
    stops[1] = stops[4] = "STOP"
    assert decide_anew(make_scheduler(ASHA, 8), reports) == stops


def test_no_trial_is_stopped_in_its_grace_period_or_after_its_last_epoch() -> None:
    scheduler = make_scheduler(Scheduler(name="asha", grace=3, reduction=2), 4)
    reports = [("a", 1, 0.9), ("b", 1, 0.1), ("b", 2, 0.1), ("a", 4, 0.9)]

    assert decide_anew(scheduler, reports) == ["CONTINUE"] * 4


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_continued_sweep_decides_as_an_undisturbed_one(
    tmp_path_factory: Any, data: st.DataObject
) -> None:
    turns = data.draw(st.permutations(["a", "b", "c", "d"] * 6))
    scheduler = make_scheduler(ASHA, 6)
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

    continued = make_scheduler(ASHA, 6)
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
