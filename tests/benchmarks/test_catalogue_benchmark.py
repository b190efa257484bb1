"""The benchmark of catalogues: a line per step, or its error."""

from __future__ import annotations

import pytest

from benchmarks import catalogue as benchmark


@pytest.mark.long
def test_there_is_a_line_per_step() -> None:
    lines = list(benchmark.catalogue([600]))
    assert [line["variant"] for line in lines] == ["tokenize", "load", "decode"]
    assert all(line["median_s"] > 0 and line["items_per_s"] > 0 and line["cpu_s"] > 0 for line in lines)
    assert lines[0]["codebook_sizes"][:3] == [256, 256, 256]
    assert lines[0]["trie_bytes_per_item"] > 0


@pytest.mark.long
def test_a_step_that_fails_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "STEPS", ["load", "decode"])  # of codes that no step before has made
    (failed,) = benchmark.catalogue([100])
    assert failed["variant"] == "load"
    assert "sids" in failed["error"]
