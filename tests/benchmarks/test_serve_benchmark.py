"""The benchmark of serving: what it asks for, and its lines."""

from __future__ import annotations

import pandas as pd
import pytest

from benchmarks import serve as benchmark


def test_it_times_whole_histories_and_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "REQUESTS_PER_RUN", 2)
    rows = list(
        benchmark.serve(
            runs=1,
            threads=1,
            lengths=[20],
            variants=["attn_mvp_whole", "attn_mvp_state"],
        )
    )
    assert [row["variant"] for row in rows] == ["attn_mvp_whole", "attn_mvp_state"]
    for row in rows:
        assert row["runs"] == 2
        assert 0 < row["min_s"] <= row["median_s"] <= row["p99_s"] <= row["max_s"]
        assert {
            "model": "attn_mvp",
            "history": 20,
            "candidates": 300,
            "threads": 1,
        }.items() <= row["params"].items()
        assert row["params"]["state_mb"] > 0


@pytest.mark.parametrize("name", ["qgs", "attn_mvp"])
def test_a_state_takes_requests_that_bring_the_latest_behaviour_alone(
    name: str,
) -> None:
    model = benchmark.served(name, 5)
    whole = benchmark.request(name, 5, "whole", 0)
    assert (len(whole["history"]), len(whole["candidates"])) == (
        5,
        benchmark.CANDIDATES,
    )
    model.predict(None, pd.DataFrame([{**whole, "history_from": 0}]))
    for number in range(2):
        latest = benchmark.request(name, 5, "state", number)
        assert (len(latest["history"]), latest["history_from"]) == (1, 5 + number)
        (ranked,) = model.predict(None, pd.DataFrame([latest])).to_dict("records")
        assert sorted(ranked["item_id"]) == sorted(latest["candidates"])
        kept = model.users.get("u")
        assert kept is not None
        assert kept.end == 6 + number
