"""Test that benchmarks measure what their lines say."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.__main__ import main
from tests.fixtures.training_tables import write_tables


@pytest.mark.long
def test_a_line_has_the_time_and_memory_of_training_steps(tmp_path, monkeypatch):
    tables, _ = write_tables(tmp_path, users=12)
    (tmp_path / "sasrec.yaml").write_text(
        "{model: {name: sasrec, num_layers: 1}, fit: {batch_size: 4}}"
    )
    words = f"train --config {tmp_path}/sasrec.yaml --tables {tables} --model.dim 8 --steps 9 --skipped 4"
    monkeypatch.setattr(
        sys, "argv", ["benchmarks", *words.split(), "--json", f"{tmp_path}/lines.jsonl"]
    )
    main()
    line = json.loads((tmp_path / "lines.jsonl").read_text())
    assert (line["variant"], line["runs"], line["params"]["model.dim"]) == (
        "sasrec plain",
        5,
        8,
    )
    assert line["items_per_s"] == pytest.approx(4 / line["median_s"], rel=0.01)
    assert line["peak_memory_mb"] > 0


def test_an_unknown_mode_is_refused(monkeypatch):
    words = (
        "train --config jobs/configs/retrieval/sasrec.yaml --tables x --modes [fast]"
    )
    monkeypatch.setattr(sys, "argv", ["benchmarks", *words.split()])
    with pytest.raises(SystemExit, match="unknown 'fast' in modes"):
        main()
