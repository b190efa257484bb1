"""Test reading a set of allowed items from text and Parquet files."""

from __future__ import annotations

import gzip

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core.schemas import ItemsInfo
from core.tables import open_table
from pipelines.evaluation.allowed import read_allowed
from tests.fixtures.commands import read_column
from tests.fixtures.training_tables import write_tables


@pytest.fixture(scope="module")
def tables(tmp_path_factory) -> str:
    """Write the tables of a log with 24 items; return their folder."""
    return write_tables(tmp_path_factory.mktemp("allowed"))[0]


def test_every_layout_is_read_as_the_same_set(tables, tmp_path):
    items = read_column(tables, "items", "item_id")
    text = f"{items[7]}\n \n\n {items[2]} \r\n{items[7]}\n"
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "b.csv").write_text(f"\ufeffitem_id\n{items[2]}\n{items[7]}\n")
    pq.write_table(
        pa.table({"item_id": [items[2], items[7]], "stock": [3, 1]}),
        tmp_path / "c.parquet",
    )

    catalogue = open_table(f"{tables}/items", ItemsInfo)
    sets = [read_allowed(str(path), catalogue) for path in sorted(tmp_path.iterdir())]

    expected_mask = [index in (2, 7) for index in range(len(items))]
    assert [mask.tolist() for mask, _ in sets] == [expected_mask] * 4
    # The hash of a.txt does not depend on its compression.
    assert len({sha256 for _, sha256 in sets}) == 3
