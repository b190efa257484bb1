"""Decoded columns: equal to the table, written once per node, removed when unused."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from core.tables import commit, write_part
from models.dataset.dataset import open_columns

PARTS = ([1, 2], [300], [], [0.5, 4.0])
"""Values of each part, whose narrowest types differ."""


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """The folder of an empty cache."""
    monkeypatch.setenv("TRIELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "columns"


@pytest.fixture
def table(tmp_path) -> str:
    """URI of a table of `PARTS`."""
    schema = pa.schema([pa.field("value", pa.float32(), nullable=False)])
    uri = str(tmp_path / "table")
    parts = [
        write_part(uri, pa.table({"value": pa.array(values, pa.float32())}, schema))
        for values in PARTS
    ]
    return commit(uri, "values", schema, parts, config={}, inputs={})


def decode(table: pa.Table) -> dict[str, np.ndarray]:
    """Return the values in the narrowest type of the part, and pairs of values."""
    values = table["value"].to_numpy()
    narrow = values.astype(np.uint8)
    if not np.array_equal(narrow, values):
        narrow = values.astype(np.float32)
    return {"value": narrow, "pair": np.stack([values, -values], 1)}


def test_columns_are_the_concatenated_parts_in_a_type_that_holds_all(cache, table):
    expected = list(itertools.chain.from_iterable(PARTS))

    columns = open_columns(table, "test", ["value"], decode)

    assert columns["value"].tolist() == expected
    assert columns["value"].dtype == np.float32
    assert columns["pair"].tolist() == [[value, -value] for value in expected]
    with pytest.raises(ValueError, match="read-only"):
        columns["value"][0] = 7


def list_entries(cache: Path) -> list[Path]:
    """Return the folders of a cache."""
    return [path for path in cache.iterdir() if path.is_dir()]


def test_a_table_is_decoded_once_and_again_for_other_settings(cache, table):
    part_sizes = []

    def record_and_decode(part: pa.Table) -> dict[str, np.ndarray]:
        part_sizes.append(part.num_rows)
        return decode(part)

    for _ in range(3):
        open_columns(table, "test", ["value"], record_and_decode)
    assert len(part_sizes) == len(PARTS)

    settings = {"labels": ["click"]}
    open_columns(
        table,
        "test",
        ["value"],
        record_and_decode,
        settings=settings,
    )
    assert len(part_sizes) == 2 * len(PARTS)
    assert len(list_entries(cache)) == 2


def test_a_failed_decode_leaves_nothing_in_the_cache(cache, table):
    def fail_on_second(part: pa.Table) -> dict[str, np.ndarray]:
        if part.num_rows == 1:
            raise RuntimeError("broken part")
        return decode(part)

    with pytest.raises(RuntimeError, match="broken part"):
        open_columns(table, "test", ["value"], fail_on_second)
    assert list_entries(cache) == []
    assert len(open_columns(table, "test", ["value"], decode)["value"]) == 5
