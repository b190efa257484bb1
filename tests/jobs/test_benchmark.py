"""The benchmarks' command line."""

from __future__ import annotations

import sys

import pytest

from jobs import benchmark
from models.tables import UserError


def test_the_name_stands_first_and_mistakes_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["benchmark", "decode", "--runs", "2"])
    config = benchmark.parse("benchmark")
    assert (config.name, config.runs, config.json) == ("decode", 2, None)
    monkeypatch.setattr(sys, "argv", ["benchmark", "decod"])
    with pytest.raises(UserError, match="unknown benchmark 'decod'; the nearest is 'decode'"):
        benchmark.parse("benchmark")
    with pytest.raises(UserError, match="choose another --json"):
        benchmark.run(benchmark.Config("decode", json=str(tmp_path / "missing" / "rows.jsonl")))
