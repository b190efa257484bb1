"""Test the decisions of successive halving, also in an interrupted sweep."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from ray.tune.schedulers import TrialScheduler

from tuning.grid import Scheduler
from tuning.halving import Report, make_scheduler, replay_reports
from tuning.trial import EPOCH, TRIAL, VALUE

ASHA = Scheduler(name="asha", grace=1, reduction=2)


def build_trial(name: str, trial_id: str = "") -> Any:
    """Build a trial with the attributes that a scheduler reads."""
    return SimpleNamespace(config={TRIAL: name}, trial_id=trial_id or name)


def collect_decisions(
    scheduler: TrialScheduler,
    reports: list[tuple[str, int, float]],
    id_prefix: str = "",
) -> list[str]:
    """Return the scheduler's decision on each report (trial, epoch, value)."""
    names = dict.fromkeys(name for name, _, _ in reports)
    trials = {name: build_trial(name, id_prefix + name) for name in names}
    for trial in trials.values():
        scheduler.on_trial_add(None, trial)  # type: ignore[arg-type]
    decisions = []
    for name, epoch, value in reports:
        result: Any = {EPOCH: epoch, VALUE: value}
        decisions.append(scheduler.on_trial_result(None, trials[name], result))  # type: ignore[arg-type]
    return decisions


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

    decisions = collect_decisions(make_scheduler(ASHA, 8), reports)

    assert decisions == [
        "CONTINUE",
        "STOP",
        "CONTINUE",
        "CONTINUE",
        "STOP",
        "CONTINUE",
        "CONTINUE",
    ]


def test_no_trial_is_stopped_in_its_grace_period_or_after_its_last_epoch() -> None:
    scheduler = make_scheduler(Scheduler(name="asha", grace=3, reduction=2), 4)
    reports = [("a", 1, 0.9), ("b", 1, 0.1), ("b", 2, 0.1), ("a", 4, 0.9)]

    assert collect_decisions(scheduler, reports) == ["CONTINUE"] * 4


def run_undisturbed(
    turns: list[str], values: list[float]
) -> tuple[list[tuple[str, int, float]], list[str]]:
    """Let trials report by turns until they are stopped.

    Args:
        turns: Name of the trial whose turn it is.
        values: Value that the trial reports.

    Returns:
        The reports (trial, epoch, value) and the decisions.
    """
    scheduler = make_scheduler(ASHA, 6)
    epochs = dict.fromkeys(turns, 0)
    stopped: set[str] = set()
    reports, decisions = [], []
    for name, value in zip(turns, values, strict=True):
        if name in stopped:
            continue
        epochs[name] += 1
        reports.append((name, epochs[name], value))
        decisions += collect_decisions(scheduler, reports[-1:])
        if decisions[-1] == "STOP":
            stopped.add(name)
    return reports, decisions


@settings(max_examples=60)
@given(st.data())
def test_an_interrupted_sweep_decides_as_an_undisturbed_one(
    data: st.DataObject,
) -> None:
    turns = data.draw(st.permutations(["a", "b", "c", "d"] * 6))
    values = data.draw(
        st.lists(st.floats(0, 1), min_size=len(turns), max_size=len(turns))
    )
    reports, decisions = run_undisturbed(turns, values)
    cut = data.draw(st.integers(0, len(reports)))
    past = [
        Report(position, epoch, value, name)
        for position, (name, epoch, value) in enumerate(reports[:cut])
    ]
    past = data.draw(st.permutations(past))  # MLflow returns them trial by trial

    continued = make_scheduler(ASHA, 6)
    stopped = replay_reports(continued, past)

    expected_stopped = set()
    for (name, _, _), decision in zip(reports[:cut], decisions, strict=False):
        if decision == "STOP":
            expected_stopped.add(name)
    assert stopped == expected_stopped
    later = collect_decisions(continued, reports[cut:], id_prefix="new-")
    assert later == decisions[cut:]
