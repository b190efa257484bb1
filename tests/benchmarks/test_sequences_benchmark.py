"""Test the benchmark of sequences: equal rows of its variants, and failed variants."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest

from benchmarks import sequences as benchmark
from models.storage.tables import read_table


def test_both_variants_write_the_same_rows(tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    settings = benchmark.Settings(150, 40, 3000, 1)
    benchmark.write_log(log, "retrieval", settings, benchmark.draw_interactions)

    benchmark.run_trieline(log, str(tmp_path / "trieline"))
    benchmark.run_polars(log, str(tmp_path / "polars"))

    table = read_table(str(tmp_path / "trieline" / "sequences"), "sequences")
    by_trieline = table.sort_by("user_id")
    frame = pl.read_parquet(tmp_path / "polars" / "sequences.parquet")
    by_polars = frame.to_arrow().sort_by("user_id").to_pylist()
    assert by_trieline.num_rows == 150
    assert pa.Table.from_pylist(by_polars, by_trieline.schema).equals(by_trieline)


@pytest.mark.long
def test_a_failed_variant_is_a_line_with_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(  # an empty log
        benchmark, "write_log", lambda log, *options: Path(log).mkdir()
    )
    # Only the variant that starts no Ray.
    monkeypatch.setattr(benchmark, "VARIANTS", {"polars": benchmark.run_polars})

    (line,) = benchmark.sequences([2000], runs=1)

    assert line["error"]
    assert "median_s" not in line
