"""Test the rows and attention counts of the benchmark of models of actions."""

from __future__ import annotations

import pytest

from benchmarks import actions


def test_rows_count_the_operations_of_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        actions, "in_fresh_process", lambda function, *arguments: function(*arguments)
    )
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
    flops = {
        (row["params"]["mode"], row["variant"]): row["attention_flops"] for row in rows
    }
    # Of one pair, for 2 users: two products of width 8, two operations each.
    per_pair = 2 * 4 * 8
    causal = {n: n * (n + 1) // 2 for n in (4, 7, 8, 16)}
    assert flops["train", "interleaved"] == 2 * causal[16] * per_pair
    assert flops["train", "attn_lfa"] == (2 * causal[8] + causal[7]) * per_pair
    assert flops["train", "genrank"] == 2 * (causal[4] + 4 * 5) * per_pair
    assert flops["forward", "interleaved"] == 2 * (causal[16] + 3 * 17) * per_pair
    assert all(row["items_per_s"] > 0 and row["peak_memory_mb"] >= 0 for row in rows)
