"""Successive halving: which trials go on, and that an interrupted sweep decides as an
undisturbed one.
"""

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


def trial(name: str, id_: str = "") -> Any:
    return SimpleNamespace(config={TRIAL: name}, trial_id=id_ or name)


def decisions(
    halving: TrialScheduler, reports: list[tuple[str, int, float]], ids: str = ""
) -> list[str]:
    made = []
    for name in dict.fromkeys(name for name, _, _ in reports):
        halving.on_trial_add(None, trial(name, ids + name))  # type: ignore[arg-type]
    for name, epoch, value in reports:
        told: Any = {EPOCH: epoch, VALUE: value}
        made.append(halving.on_trial_result(None, trial(name, ids + name), told))  # type: ignore[arg-type]
    return made


def test_the_lower_half_stops_at_each_rung() -> None:
    halving = make_scheduler(ASHA, 8)
    reports = [
        ("a", 1, 0.5),
        ("b", 1, 0.4),
        ("c", 1, 0.6),
        ("a", 2, 0.5),
        ("c", 2, 0.4),
        ("a", 3, 0.1),
        ("a", 8, 0.1),
    ]
    assert decisions(halving, reports) == [
        "CONTINUE",
        "STOP",
        "CONTINUE",
        "CONTINUE",
        "STOP",
        "CONTINUE",
        "CONTINUE",
    ]


def test_every_trial_gets_its_grace_and_the_last_epoch_is_the_trials_own_end() -> None:
    halving = make_scheduler(Scheduler(name="asha", grace=3, reduction=2), 4)
    assert (
        decisions(halving, [("a", 1, 0.9), ("b", 1, 0.1), ("b", 2, 0.1), ("a", 4, 0.9)])
        == ["CONTINUE"] * 4
    )


@settings(max_examples=60)
@given(st.data())
def test_an_interrupted_sweep_decides_as_an_undisturbed_one(
    data: st.DataObject,
) -> None:
    names = ["a", "b", "c", "d"]
    turns = data.draw(st.permutations([name for name in names for _ in range(6)]))
    values = data.draw(
        st.lists(st.floats(0, 1), min_size=len(turns), max_size=len(turns))
    )
    done, stopped, halving = dict.fromkeys(names, 0), set(), make_scheduler(ASHA, 6)
    reports, whole = [], []
    for name, value in zip(turns, values, strict=True):
        if name not in stopped:
            done[name] += 1
            reports.append((name, done[name], value))
            whole += decisions(halving, reports[-1:])
            stopped |= {name} if whole[-1] == "STOP" else set()
    cut = data.draw(st.integers(0, len(reports)))
    again = make_scheduler(ASHA, 6)
    past = [
        Report(at, epoch, value, name)
        for at, (name, epoch, value) in enumerate(reports[:cut])
    ]
    told = {
        name
        for (name, _, _), decision in zip(reports[:cut], whole, strict=False)
        if decision == "STOP"
    }
    assert (
        replay_reports(again, data.draw(st.permutations(past))) == told
    )  # MLflow is asked trial by trial
    assert decisions(again, reports[cut:], ids="new-") == whole[cut:]
