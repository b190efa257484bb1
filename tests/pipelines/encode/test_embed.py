"""Test embeddings of items: encoders on Ray, TF-IDF and PCA, and refused inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from core.errors import UserError
from pipelines.encode import texts as embed
from pipelines.encode.config import EmbedConfig
from pipelines.encode.texts import (
    encode_texts,
    encoder_version,
    fit_pca,
    item_texts,
)
from tests.fixtures.encoders import encode_alone, save_bert

WORDS = [
    "red",
    "green",
    "blue",
    "big",
    "small",
    "drill",
    "hose",
    "tape",
    "lamp",
    "glove",
]
TEXTS = [
    " ".join(WORDS[(i * j) % 10] for j in range(1, 2 + i % 9)) for i in range(1, 40)
] + ["", "red", "red"]


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory) -> str:
    """Save a random BERT of width 16 with the vocabulary WORDS."""
    return save_bert(tmp_path_factory.mktemp("bert"), WORDS, 12)


def test_actors_encode_as_the_model_does_for_single_texts(
    ray_local, tiny_bert, monkeypatch
):
    monkeypatch.setattr(embed, "TEXTS_PER_BLOCK", 8)  # several blocks for two actors
    lines: list[str] = []

    vectors = encode_texts(
        TEXTS,
        tiny_bert,
        EmbedConfig(batch_size=4, workers=2, pooling="mean"),
        lines.append,
    )

    expected = np.stack(
        [encode_alone(tiny_bert, text, pooling="mean", max_tokens=12) for text in TEXTS]
    )
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    distinct = len(set(TEXTS))
    assert f"{len(TEXTS)} texts, {distinct} distinct" in lines[0]
    assert lines[-1] == f"encoded {distinct} of {distinct} texts"


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


def test_texts_are_joined_in_the_order_of_columns_or_template():
    table = build_items(
        text_title=["Drill", "Hose"], text_brand=[None, "Acme"], cat_color=["red", None]
    )
    assert item_texts(table, EmbedConfig()) == ["Drill", "Hose Acme"]
    assert item_texts(table, EmbedConfig(template="{brand}: {title} ({color})")) == [
        ": Drill (red)",
        "Acme: Hose ()",
    ]


def test_items_without_text_are_empty_strings_and_reported_or_refused():
    table = build_items(text_title=["Drill", " ", None], text_brand=["x", "", None])
    lines: list[str] = []

    assert item_texts(table, EmbedConfig(), lines.append) == ["Drill x", "", ""]

    assert lines == [
        "note: 2 of 3 items have no text in title, brand; their embeddings carry no information about them"
    ]
    with pytest.raises(UserError, match=r"2 of 2 items have no text in title, brand"):
        item_texts(table[1:], EmbedConfig())


def test_pca_whitens_and_can_be_repeated():
    generator = np.random.default_rng(0)
    mixing = generator.normal(size=(200, 10)) @ generator.normal(size=(10, 10))
    vectors = (mixing + 3).astype(np.float32)

    projected = fit_pca(vectors, 4).project(vectors)

    np.testing.assert_allclose(np.cov(projected.T), np.eye(4), atol=1e-3)
    repeated = fit_pca(vectors.copy(), 4).project(vectors)
    np.testing.assert_array_equal(projected, repeated)
