"""Steps warn of a log whose histories are sorted by item id."""

from pathlib import Path

import pytest

from pipelines.steps import warn_of_id_order
from tests.fixtures.training_tables import change_sequences, write_tables


def test_histories_that_ascend_by_item_id_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables, _ = write_tables(tmp_path, users=200)
    manifest = Path(tables, "sequences/manifest.json")
    without_clock = manifest.read_text().replace('"clock": true', '"clock": false')
    manifest.write_text(without_clock)
    warn_of_id_order(tables)
    change_sequences(
        tables, lambda row: {**row, "item_index": sorted(row["item_index"])}
    )
    warn_of_id_order(tables)
    assert capsys.readouterr().out.count("100% of adjacent behaviours") == 1
