"""SIDs of new items: old codes do not change, new items get the nearest free codes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.retrieval.tokenizers.config import PsidConfig, RqkmeansConfig, RqvaeConfig
from models.retrieval.tokenizers.psid import extend_codes as free_codes
from models.storage.tables import (
    UserError,
    commit,
    read_manifest,
    read_table,
    write_part,
)
from pipelines.data.schemas import items_schema
from pipelines.data.sids.config import EmbedConfig, TokenizerConfig
from pipelines.data.sids.embed import EmbeddingSource, read_embeddings
from pipelines.data.sids.extend import MAX_DRIFT, describe_drift, extend
from pipelines.data.sids.precomputed import read_precomputed
from pipelines.data.sids.tokenize import TokenizerPaths, read_codes, tokenize

COUNT, KINDS, COLOURS = (
    60,
    ["drill", "hose", "lamp"],
    ["red", "green", "blue", "black", "white"],
)
KMEANS = TokenizerConfig("rqkmeans", rqkmeans=RqkmeansConfig(levels=2, codebook_size=4))
TOKENIZERS = {
    "rqkmeans": KMEANS,
    "psid": TokenizerConfig(
        "psid", rqkmeans=RqkmeansConfig(levels=2, codebook_size=16)
    ),
    "rqvae": TokenizerConfig(
        "rqvae",
        rqvae=RqvaeConfig(levels=2, codebook_size=8, latent=4, hidden=[8], epochs=5),
    ),
}
SOURCE = EmbeddingSource("tfidf", 6, EmbedConfig())


def text(i: int) -> str:
    return f"{COLOURS[i % 5]} {KINDS[i % 3]} with {i % 7} parts, model {i % 11}"


def write_items(uri: Path, texts: list[str], before: Any = None) -> str:
    schema, index = items_schema(["title"]), range(len(texts))
    columns = [
        pa.array(index, pa.int32()),
        pa.array([f"i{i}" for i in index]),
        pa.array(texts),
    ]
    part = write_part(str(uri), pa.Table.from_arrays(columns, schema=schema))
    extends = [*before.extends, before.hash] if before else []
    commit(str(uri), "items", schema, [part], config={}, inputs={}, extends=extends)
    return str(uri)


def grow(uri: str, texts: list[str]) -> None:
    write_items(Path(uri), texts, read_manifest(uri))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_old_codes_stay_and_new_items_get_free_ones(
    ray_local: None, tmp_path: Path, name: str
) -> None:
    config, sids = TOKENIZERS[name], str(tmp_path / "sids")
    items = write_items(tmp_path / "items", [text(i) for i in range(COUNT)])
    tokenize(TokenizerPaths(items, sids), config, SOURCE)
    old, codes, vectors = (
        read_manifest(f"{sids}/sids"),
        read_codes(f"{sids}/sids"),
        read_embeddings(f"{sids}/embeddings"),
    )
    trie, more = read_manifest(f"{sids}/trie"), [text(i) for i in range(COUNT + 20)]
    grow(items, more)
    elsewhere, *_ = extend(
        TokenizerPaths(items, str(tmp_path / "other")), sids, config, SOURCE
    )
    made, new_trie, changed = extend(TokenizerPaths(items, sids), sids, config, SOURCE)
    assert changed
    assert made.hash == elsewhere.hash
    grown = read_codes(f"{sids}/sids")
    np.testing.assert_array_equal(grown[:COUNT], codes)
    assert len(np.unique(grown, axis=0)) == len(grown) == COUNT + 20
    assert made.info["codebook_sizes"] == old.info["codebook_sizes"]
    assert (grown < np.array(made.info["codebook_sizes"])).all()
    after = read_embeddings(f"{sids}/embeddings")
    np.testing.assert_array_equal(after[:COUNT], vectors)
    assert made.extends == [old.hash]
    assert new_trie.extends == [trie.hash]
    assert new_trie.info["items"] == COUNT + 20
    assert extend(TokenizerPaths(items, sids), sids, config, SOURCE)[2] is False
    assert tokenize(TokenizerPaths(items, sids), config, SOURCE)[2] is False

    # a text that is there already is encoded as it was
    grow(items, [*more, text(0)])
    made, *_ = extend(TokenizerPaths(items, sids), sids, config, SOURCE)
    np.testing.assert_allclose(
        read_embeddings(f"{sids}/embeddings")[-1], vectors[0], atol=1e-4
    )
    assert len(made.extends) == 2
    drift = made.info["drift"]
    assert drift["new_items"] == 21
    assert drift["error_old"] == pytest.approx(
        old.info["quantization_error"] if name != "rqvae" else drift["error_old"],
        abs=1e-4,
    )


def test_drift_is_said(ray_local: None, tmp_path: Path) -> None:
    sids, texts = str(tmp_path / "sids"), [text(i) for i in range(COUNT)]
    items = write_items(tmp_path / "items", texts)
    tokenize(TokenizerPaths(items, sids), KMEANS, SOURCE)
    grow(items, texts + [text(i) for i in range(5)])
    same, *_ = extend(
        TokenizerPaths(items, str(tmp_path / "same")), sids, KMEANS, SOURCE
    )
    measured = {**same.info["drift"], "collision_rate_new": 0}
    measured["error_new"] = measured["error_old"]
    assert len(describe_drift(measured)) == 1
    assert (
        len(
            describe_drift(
                {**measured, "error_new": 1.01 * MAX_DRIFT * measured["error_old"]}
            )
        )
        == 2
    )


@pytest.mark.parametrize(("width", "scale"), [(0, 1.0), (3, 1.0), (0, 1e-5)])
def test_own_embeddings_grow(tmp_path: Path, width: int, scale: float) -> None:
    ids, sids, said = (
        [f"i{i}" for i in range(COUNT + 20)],
        str(tmp_path / "sids"),
        list[str](),
    )
    vectors = scale * np.random.default_rng(0).standard_normal((COUNT + 20, 8)).astype(
        np.float32
    )

    def own(rows: list[int], vectors: np.ndarray = vectors) -> EmbeddingSource:
        table = {"id": [ids[row] for row in rows], "vector": vectors[rows].tolist()}
        pq.write_table(pa.table(table), tmp_path / "own.parquet")
        return EmbeddingSource(
            "minilm",
            width,
            EmbedConfig(),
            read_precomputed(str(tmp_path / "own.parquet"), "id"),
        )

    items = write_items(tmp_path / "items", [text(i) for i in range(COUNT)])
    first = own([*range(COUNT - 1)])  # the last has none
    tokenize(TokenizerPaths(items, sids), KMEANS, first)
    codes, before = read_codes(f"{sids}/sids"), read_embeddings(f"{sids}/embeddings")
    grow(items, [text(i) for i in range(COUNT + 20)])
    with pytest.raises(
        UserError,
        match=r"own.parquet of items of .* have changed.*give a file with the old embeddings",
    ):
        extend(
            TokenizerPaths(items, sids),
            sids,
            KMEANS,
            own([*range(COUNT + 20)], vectors[::-1]),
        )
    with pytest.raises(UserError, match=r"own.parquet of items of .* have changed"):
        extend(TokenizerPaths(items, sids), sids, KMEANS, own([*range(1, COUNT + 20)]))
    with pytest.raises(UserError, match="with another encoder"):
        extend(
            TokenizerPaths(items, sids),
            sids,
            KMEANS,
            EmbeddingSource("tfidf", width, EmbedConfig()),
        )
    grown = own([*range(COUNT + 20)][::-1])
    assert extend(
        TokenizerPaths(items, f"{sids}/"), sids, KMEANS, grown, say=said.append
    )[2]
    assert said[-1] == "note: 1 old item had no row before; codes do not change"
    after = read_embeddings(f"{sids}/embeddings")
    np.testing.assert_array_equal(after[:COUNT], before)
    np.testing.assert_array_equal(read_codes(f"{sids}/sids")[:COUNT], codes)
    if width == 0:
        np.testing.assert_array_equal(after[COUNT:], vectors[COUNT:])
    assert extend(TokenizerPaths(items, sids), sids, KMEANS, grown)[2] is False


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {
                "config": replace(
                    KMEANS, rqkmeans=RqkmeansConfig(levels=3, codebook_size=4)
                )
            },
            "other options of the token",
        ),
        (
            {"source": EmbeddingSource("tfidf", 5, EmbedConfig())},
            "with another encoder, --pca or --embed",
        ),
        (
            {"texts": ["another", *(text(i) for i in range(1, COUNT))]},
            "TF-IDF is fitted, of items of .* have changed",
        ),
        ({"extends": False}, "does not extend the items"),
        (
            {"config": TokenizerConfig("published", "FILE")},
            "give a --published file that also has the new items",
        ),
    ],
)
def test_refused_in_one_line(
    ray_local: None, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    sids, texts = str(tmp_path / "sids"), [text(i) for i in range(COUNT)]
    items = write_items(tmp_path / "items", texts)
    tokenize(TokenizerPaths(items, sids), KMEANS, SOURCE)
    write_items(
        tmp_path / "items",
        [*change.get("texts", texts), "new"],
        read_manifest(items) if change.get("extends", 1) else None,
    )
    before = read_table(f"{sids}/sids")
    with pytest.raises(UserError, match=said):
        extend(
            TokenizerPaths(items, sids),
            sids,
            change.get("config", KMEANS),
            change.get("source", SOURCE),
        )
    assert read_table(f"{sids}/sids") == before


def test_an_item_without_a_free_code_is_refused() -> None:
    every, none = np.arange(4)[:, None], np.zeros((1, 1), dtype=np.int64)
    with pytest.raises(
        UserError, match="item 4 gets no SID, as all 4 of 1 levels of 4 codes are taken"
    ):
        free_codes(np.ones((1, 3)), none, every, np.eye(4, 3)[None], [], PsidConfig())


@given(st.integers(0, 99), st.sampled_from([[], [3], [2, 4]]))
def test_free_codes_are_distinct_and_nearest_where_there_is_room(
    seed: int, conflicts: list[int]
) -> None:
    draw = np.random.default_rng(seed)
    codebooks, vectors = (
        draw.standard_normal((2, 4, 3)),
        draw.standard_normal((14, 3)).round(1),
    )
    nearest = np.stack([draw.integers(0, 4, 14), draw.integers(0, 2, 14)], 1)
    none = np.empty((0, 2 + len(conflicts)), dtype=np.int64)
    first = free_codes(
        vectors[:7], nearest[:7], none, codebooks, conflicts, PsidConfig(width=2)
    )
    then = free_codes(
        vectors[7:], nearest[7:], first, codebooks, conflicts, PsidConfig(width=2)
    )
    codes = np.concatenate([first, then])
    np.testing.assert_array_equal(
        codes,
        free_codes(vectors, nearest, none, codebooks, conflicts, PsidConfig(width=2)),
    )
    assert len(np.unique(codes, axis=0)) == len(codes)
    assert (codes < np.array([4, 4, *conflicts])).all()
    most = int(np.prod(conflicts))
    for item in range(14):
        if (codes[:item, :2] == nearest[item]).all(1).sum() < most:
            np.testing.assert_array_equal(codes[item, :2], nearest[item])
