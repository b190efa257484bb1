"""Steps warn of a log whose histories are sorted by item id."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.steps import warn_of_id_order
from tests.fixtures.training_tables import change_sequences, write_tables


def test_histories_that_ascend_by_item_id_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables, _ = write_tables(tmp_path, users=200)
    warn_of_id_order(tables)
    assert capsys.readouterr().out == ""

    change_sequences(
        tables, lambda row: {**row, "item_index": sorted(row["item_index"])}
    )
    warn_of_id_order(tables)
    assert "100% of adjacent behaviours" in capsys.readouterr().out
