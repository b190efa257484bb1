"""Test that benchmarks measure what their lines say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import polars as pl
import pytest

from benchmarks import prepare
from benchmarks.__main__ import main
from pipelines.prepare.kinds.simulation import Settings, draw_interactions, write_log
from tests.fixtures.commands import read_table
from tests.fixtures.training_tables import write_tables


@pytest.mark.long
def test_a_line_has_the_time_and_memory_of_training_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.long
def test_polars_writes_the_rows_of_jobs_prepare(tmp_path: Path) -> None:
    log = f"{tmp_path}/log"
    write_log(log, "retrieval", Settings(150, 40, 3000, 1), draw_interactions)
    job = f"jobs.prepare --source {prepare.SOURCE} --input {log} --output {tmp_path}/tables"
    assert prepare.run_module(job.split())["cpu_s"] > 0
    prepare.run_polars(log, f"{tmp_path}/polars")
    table = read_table(f"{tmp_path}/tables/sequences").sort_by("user_id")
    rows = table.to_pylist()
    for row in rows:
        for request in row["requests"]:
            del request["split"]
    frame = pl.read_parquet(f"{tmp_path}/polars/sequences.parquet").sort("user_id")
    assert frame.select(table.column_names).to_dicts() == rows
