"""Both variants of the sequences benchmark make the same rows; errors become lines."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest

from benchmarks import sequences as benchmark
from models.storage.tables import read_table


def test_both_variants_make_the_same_rows(tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    benchmark.simulate_retrieval(log, benchmark.Settings(150, 40, 3000, 1))
    benchmark.run_trieline(log, str(tmp_path / "ours"))
    benchmark.run_polars(log, str(tmp_path / "bare"))
    ours = read_table(str(tmp_path / "ours" / "sequences"), "sequences").sort_by(
        "user_id"
    )
    bare = (
        pl.read_parquet(tmp_path / "bare" / "sequences.parquet")
        .to_arrow()
        .sort_by("user_id")
    )
    assert ours.num_rows == 150
    assert pa.Table.from_pylist(bare.to_pylist(), ours.schema).equals(ours)


@pytest.mark.long
def test_a_failed_variant_is_a_line_with_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        benchmark, "simulate_retrieval", lambda log, settings: Path(log).mkdir()
    )  # of nothing
    monkeypatch.setattr(
        benchmark, "VARIANTS", {"polars": benchmark.run_polars}
    )  # which starts no Ray
    (line,) = benchmark.sequences([2000], runs=1)
    assert line["error"]
    assert "median_s" not in line
