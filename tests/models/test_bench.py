"""The decode benchmark: its catalogue is like the paper's, and its rows are complete."""

from __future__ import annotations

import json

import pytest
import torch

from models import bench
from models.retrieval.decoding.trie import Trie


def test_the_catalogue_branches_like_the_papers():
    codes = bench.random_codes(25_000, torch.Generator().manual_seed(0))
    trie = Trie.from_codes(codes, (256, 256, 256, 256))
    assert trie.num_items == 25_000
    assert trie.branching() == pytest.approx(bench.MEAN_BRANCHING, rel=0.05)
    lengths = [len(h) for h in bench.random_histories(1024, 25_000, torch.Generator().manual_seed(0))]
    assert sum(lengths) / 1024 == pytest.approx(9, abs=0.8)
    assert lengths == sorted(lengths)


def test_rows_are_json_lines_with_all_that_is_promised(tmp_path):
    rows = bench.decode(runs=2, threads=1, batch=2, beam=4, items=500, variants=["hf", "tiger_shared_kv"])
    written = bench.write_rows(rows, str(tmp_path / "rows.jsonl"))
    assert [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == written
    assert [row["variant"] for row in written] == ["hf", "tiger_shared_kv"]
    for row in written:
        assert set(row) == {
            "benchmark", "variant", "params", "runs", "median_s", "min_s", "max_s", "items_per_s", "peak_memory_mb",
        }  # fmt: skip
        assert row["params"]["batch"] == 2
        assert row["runs"] == 2
        assert 0 < row["min_s"] <= row["median_s"] <= row["max_s"]
        assert row["items_per_s"] == pytest.approx(2 / row["median_s"], rel=0.01)
        assert row["peak_memory_mb"] >= 0
