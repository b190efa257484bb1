"""Test that early stopping in a continued sweep knows the earlier results."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import fs

from tuning.sweep import EPOCH, Halving

TRIALS = "abcd"

Report = tuple[str, dict[str, float]]
"""Trial and result."""


def start_halving(folder: Path, earlier: list[Report]) -> tuple[Halving, dict]:
    """Return a scheduler of the best half at epochs 1, 2 and 4, and its trials.

    Earlier results are written as Tune does, a line each.
    """
    halving = Halving(
        time_attr=EPOCH,
        metric="ndcg@10",
        mode="max",
        max_t=6,
        grace_period=1,
        reduction_factor=2,
        stop_last_trials=False,
    )
    storage = SimpleNamespace(storage_filesystem=fs.LocalFileSystem())
    trials: dict[str, Any] = {}
    for name in TRIALS:
        results = [result for trial, result in earlier if trial == name]
        path = folder / name
        path.mkdir(exist_ok=True)
        lines = [json.dumps(result) + "\n" for result in results]
        (path / "result.json").write_text("".join(lines))
        last = {} if not results else results[-1]
        trials[name] = SimpleNamespace(
            trial_id=name, path=str(path), storage=storage, last_result=last
        )
        halving.on_trial_add(None, trials[name])
    return halving, trials


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_continued_sweep_decides_as_an_undisturbed_one(tmp_path_factory, data):
    epochs = dict.fromkeys(TRIALS, 0)
    reports: list[Report] = []
    for name in data.draw(st.permutations(TRIALS * 6)):
        epochs[name] += 1
        value = data.draw(st.floats(0, 1))
        reports.append((name, {EPOCH: epochs[name], "ndcg@10": value}))
    cut = data.draw(st.integers(0, len(reports)))
    folder = tmp_path_factory.mktemp("tune")

    def decide(earlier: list[Report], later: list[Report]) -> list[str]:
        halving, trials = start_halving(folder, earlier)
        return [halving.on_trial_result(None, trials[n], result) for n, result in later]  # type: ignore[arg-type]

    assert decide(reports[:cut], reports[cut:]) == decide([], reports)[cut:]
