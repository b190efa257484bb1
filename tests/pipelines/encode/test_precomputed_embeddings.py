"""Test embeddings from a user's file: all layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core.tables import Table
from pipelines.encode.config import TokenizeConfig
from pipelines.encode.precomputed import read_precomputed
from pipelines.encode.texts import embed_items
from tests.fixtures.item_tables import read_vectors, write_items

IDS = [f"i{n:04d}" for n in (3, 0, 9, 1, 2)]
VECTORS = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
EXPECTED = np.stack(
    [VECTORS[1], VECTORS[3], VECTORS[4], VECTORS[0], np.zeros(3, np.float32)]
)


LISTS = pa.list_(pa.float64())
LAYOUTS: dict[str, dict[str, Any]] = {
    "lists": {"sku": IDS, "vector": pa.array(VECTORS.tolist(), LISTS), "title": IDS},
    "fixed": {
        "sku": IDS,
        "vector": pa.array(VECTORS.tolist(), pa.list_(pa.float32(), 3)),
    },
    "columns": {"a": VECTORS[:, 0], "sku": IDS, "b": VECTORS[:, 1], "c": VECTORS[:, 2]},
}


@pytest.fixture
def items(tmp_path) -> Table:
    """A table of 5 items."""
    (tmp_path / "items").mkdir()
    return write_items(tmp_path / "items", ["thing"] * 5)


@pytest.mark.parametrize("layout", [*LAYOUTS, "npy"])
def test_each_item_gets_its_row(layout, items, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "pipelines.encode.texts.start_ray", lambda: pytest.fail("Ray starts")
    )
    if layout == "npy":
        file, ids = str(tmp_path / "own.npy"), str(tmp_path / "ids.txt")
        np.save(file, VECTORS.astype(np.float64))
        Path(ids).write_text("\n".join(IDS) + "\n")
    else:
        file, ids = str(tmp_path / "own.parquet"), "sku"
        pq.write_table(pa.table(LAYOUTS[layout]), file)
    out = str(tmp_path / "out")
    lines: list[str] = []
    config = TokenizeConfig(tables="t", output="s", tokenizer="rqkmeans")
    precomputed = read_precomputed(file, ids)

    manifest = embed_items(items, out, config, precomputed, lines.append)

    np.testing.assert_allclose(read_vectors(out), EXPECTED)
    assert lines == [
        f"note: 1 of 5 items have no row in {file}, which has 5 ids, and get zeros",
    ]
    config = replace(config, encoder="tfidf")
    repeated = embed_items(items, out, config, precomputed, lines.append)
    assert (repeated.hash, lines[-1]) == (manifest.hash, f"{out}: up to date")
