"""The benchmark of catalogues: a line per step."""

from __future__ import annotations

import pytest

from benchmarks import catalogue as benchmark


@pytest.mark.long
def test_there_is_a_line_per_step() -> None:
    lines = list(benchmark.catalogue([600]))
    assert [line["variant"] for line in lines] == ["tokenize", "load", "decode"]
    assert all(
        line["median_s"] > 0 and line["items_per_s"] > 0 and line["cpu_s"] > 0
        for line in lines
    )
    assert lines[0]["codebook_sizes"][:3] == [256, 256, 256]
    assert lines[0]["trie_bytes_per_item"] > 0
