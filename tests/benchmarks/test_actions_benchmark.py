"""The benchmark of models of actions yields complete rows with attention counts."""

from __future__ import annotations

import pytest

from benchmarks import actions


def test_rows_count_the_attention_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        actions, "in_fresh_process", lambda function, *given: function(*given)
    )  # in this process
    rows = list(
        actions.actions(
            runs=1,
            threads=1,
            events=16,
            candidates=3,
            width=8,
            layers=2,
            heads=2,
            lengths=(8,),
            variants=("interleaved", "attn_lfa", "genrank"),
            modes=("train", "forward"),
        )
    )
    assert [(row["variant"], row["params"]["mode"]) for row in rows] == [
        (variant, mode)
        for mode in ("train", "forward")
        for variant in ("interleaved", "attn_lfa", "genrank")
    ]
    found = {
        (row["params"]["mode"], row["variant"]): row["attention_flops"] for row in rows
    }
    each = (
        2 * 4 * 8
    )  # of 2 users and one pair: two products of width 8, two operations each
    causal = {n: n * (n + 1) // 2 for n in (4, 7, 8, 16)}
    assert found["train", "interleaved"] == 2 * causal[16] * each
    assert found["train", "attn_lfa"] == (2 * causal[8] + causal[7]) * each
    assert found["train", "genrank"] == 2 * (causal[4] + 4 * 5) * each
    assert found["forward", "interleaved"] == 2 * (causal[16] + 3 * 17) * each
    assert all(row["items_per_s"] > 0 and row["peak_memory_mb"] >= 0 for row in rows)
