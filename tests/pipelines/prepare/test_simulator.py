"""Simulated logs have exact sizes, and depend on their settings alone."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from core.errors import UserError
from pipelines.prepare.kinds.registry import KINDS
from pipelines.prepare.kinds.simulation import write_log
from pipelines.prepare.settings.simulation import Settings


def draw_log(folder: Path, kind: str, settings: Settings) -> pl.DataFrame:
    """Write a log, and return its rows with the columns of their items."""
    assert write_log(str(folder), kind, settings, KINDS[kind].draw_log)
    log = pl.read_parquet(folder / "events-*.parquet")
    items = pl.read_parquet(folder / "items.parquet")
    assert items["item_id"].n_unique() == settings.items
    return log.join(items, on="item_id", maintain_order="left")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(200, 60, 2000), (1, 36, 1), (50, 1000, 50)])
def test_sizes_are_exact_and_equal_settings_give_equal_rows(tmp_path, kind, sizes):
    settings = Settings(*sizes, seed=1, files=3)
    log = draw_log(tmp_path / "a", kind, settings)

    assert not write_log(str(tmp_path / "a"), kind, settings, KINDS[kind].draw_log)
    assert log.equals(draw_log(tmp_path / "b", kind, settings))
    assert not log.equals(draw_log(tmp_path / "c", kind, Settings(*sizes, seed=2)))
    assert log["timestamp_ms"].is_sorted()
    assert log["user_id"].n_unique() == sizes[0]
    assert len(log) == sizes[2] * (10 if kind == "search" else 1)


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="holds other files"):
        draw_log(tmp_path, "retrieval", Settings())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
