"""Test the version of an encoder, and items without text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from core.errors import UserError
from pipelines.encode.config import EmbedConfig
from pipelines.encode.texts import (
    encoder_version,
    item_texts,
)
from tests.fixtures.encoders import save_bert


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory) -> str:
    """Save a random BERT of width 16."""
    return save_bert(tmp_path_factory.mktemp("bert"), ["red"], 12)


def test_the_version_of_an_encoder_depends_on_its_weights(tiny_bert, tmp_path):
    version = encoder_version(tiny_bert)
    assert version == encoder_version(tiny_bert)
    for file in Path(tiny_bert).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert encoder_version(str(tmp_path)) == version
    weights = bytearray((tmp_path / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert encoder_version(str(tmp_path)) != version


def build_items(**columns: Any) -> pa.Table:
    """Build a table of items with these columns."""
    count = len(next(iter(columns.values())))
    return pa.table(
        {
            "item_index": pa.array(range(count), pa.int32()),
            "item_id": [str(i) for i in range(count)],
            **columns,
        }
    )


def test_items_without_text_are_empty_strings_and_reported_or_refused():
    table = build_items(text_title=["Drill", " ", None], text_brand=["x", "", None])
    lines: list[str] = []

    assert item_texts(table, EmbedConfig(), lines.append) == ["Drill x", "", ""]

    assert lines == [
        "note: 2 of 3 items have no text in title, brand; their embeddings carry no information about them"
    ]
    with pytest.raises(UserError, match=r"2 of 2 items have no text in title, brand"):
        item_texts(table[1:], EmbedConfig())
