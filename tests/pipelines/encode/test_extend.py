"""Test semantic IDs of new items.

Codes of old items do not change, and new items get the nearest free codes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import UserError
from models.retrieval.tokenizers.psid import extend_codes
from pipelines.encode.config import TokenizeConfig
from pipelines.encode.extend import extend
from pipelines.encode.tokenize import read_codes, tokenize
from tests.fixtures import item_tables
from tests.fixtures.commands import read_table
from tests.fixtures.item_tables import (
    append_items,
    build_titles,
    read_vectors,
    write_items,
)

COUNT = 60
KMEANS = {"name": "rqkmeans", "levels": 2, "codebook_size": 4}
TOKENIZERS = {
    "rqkmeans": KMEANS,
    "psid": {"name": "psid", "levels": 2, "codebook_size": 16},
    "rqvae": {
        "name": "rqvae",
        "levels": 2,
        "codebook_size": 8,
        "latent": 4,
        "hidden": [8],
        "epochs": 5,
    },
}


build_config = partial(item_tables.build_config, tokenizer=KMEANS)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_old_codes_stay_and_new_items_get_free_ones(tmp_path, name):
    sids, tokenizer = str(tmp_path / "sids"), TOKENIZERS[name]
    items = write_items(tmp_path / "items", build_titles(COUNT))
    config = build_config(tmp_path, tokenizer=tokenizer)
    old_sids, old_trie, _ = tokenize(config)
    old_codes = read_codes(old_sids)
    old_vectors = read_vectors(f"{sids}/embeddings")
    items = append_items(items, build_titles(COUNT + 20))

    other = build_config(tmp_path, "other", tokenizer=tokenizer, extend=sids)
    elsewhere, *_ = extend(other)
    in_place = replace(config, extend=sids)
    extended, trie, was_written = extend(in_place)

    assert was_written
    assert extended.hash == elsewhere.hash
    codes = read_codes(extended)
    np.testing.assert_array_equal(codes[:COUNT], old_codes)
    assert len(np.unique(codes, axis=0)) == len(codes) == COUNT + 20
    assert extended.info.codebook_sizes == old_sids.info.codebook_sizes
    assert (codes < np.array(extended.info.codebook_sizes)).all()
    vectors = read_vectors(f"{sids}/embeddings")
    np.testing.assert_array_equal(vectors[:COUNT], old_vectors)
    assert extended.extends == [old_sids.hash]
    assert trie.extends == [old_trie.hash]
    assert trie.info.items == COUNT + 20
    assert extend(in_place)[2] is False
    assert tokenize(config)[2] is False

    # A new item with the text of an old one gets its vector.
    append_items(items, [*build_titles(COUNT + 20), build_titles(1)[0]])
    extended, *_ = extend(in_place)
    last_vector = read_vectors(f"{sids}/embeddings")[-1]
    np.testing.assert_allclose(last_vector, old_vectors[0], atol=1e-4)
    assert len(extended.extends) == 2
    drift = extended.info.drift
    assert drift
    assert drift.new_items == 21
    if name != "rqvae":
        error = old_sids.info.measures.quantization_error
        assert drift.error_old == pytest.approx(error, abs=1e-4)


@pytest.mark.parametrize(("width", "scale"), [(0, 1.0), (3, 1.0), (0, 1e-5)])
def test_precomputed_embeddings_of_new_items_are_added(tmp_path, width, scale):
    sids = str(tmp_path / "sids")
    draw = np.random.default_rng(0)
    vectors = scale * draw.standard_normal((COUNT + 20, 8)).astype(np.float32)

    def build_own(rows: list[int], vectors: np.ndarray = vectors) -> TokenizeConfig:
        """Write the vectors of some items to a file; return the options to read it."""
        file = str(tmp_path / "own.parquet")
        item_ids = [f"i{row:04d}" for row in rows]
        pq.write_table(
            pa.table({"id": item_ids, "vector": vectors[rows].tolist()}), file
        )
        return build_config(tmp_path, embeddings=file, id="id", pca=width, extend=sids)

    every_row = [*range(COUNT + 20)]
    items = write_items(tmp_path / "items", build_titles(COUNT))
    # the last item has no vector
    old_sids, _, _ = tokenize(build_own([*range(COUNT - 1)]))
    old_codes = read_codes(old_sids)
    old_vectors = read_vectors(f"{sids}/embeddings")
    append_items(items, build_titles(COUNT + 20))

    with pytest.raises(UserError, match=r"items of .* have changed"):
        extend(build_own(every_row, vectors[::-1]))
    with pytest.raises(UserError, match=r"items of .* have changed"):
        extend(build_own(every_row[1:]))
    with pytest.raises(UserError, match="with another encoder"):
        extend(build_config(tmp_path, pca=width, extend=sids))

    config = build_own(every_row[::-1])
    extended, _, was_written = extend(replace(config, output=f"{sids}/"))
    assert was_written
    new_vectors = read_vectors(f"{sids}/embeddings")
    np.testing.assert_array_equal(new_vectors[:COUNT], old_vectors)
    np.testing.assert_array_equal(read_codes(extended)[:COUNT], old_codes)
    if width == 0:
        np.testing.assert_array_equal(new_vectors[COUNT:], vectors[COUNT:])
    assert extend(config)[2] is False


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"tokenizer": {**KMEANS, "levels": 3}},
            "other options of the token",
        ),
        (
            {"pca": 5},
            "with another encoder, pca or embed",
        ),
        (
            {"titles": ["another", *build_titles(COUNT)[1:]]},
            "new embeddings have the width 22",
        ),
        ({"extends": False}, "does not extend the items"),
        (
            {"tokenizer": "published", "published": "sids.csv"},
            "no trained codebooks",
        ),
    ],
)
def test_an_extension_that_does_not_fit_is_refused(tmp_path, change, message):
    sids, titles = str(tmp_path / "sids"), build_titles(COUNT)
    items = write_items(tmp_path / "items", titles)
    tokenize(build_config(tmp_path))
    options = dict(change)
    extends = items.ancestry if options.pop("extends", True) else ()
    new_titles = [*options.pop("titles", titles), "new"]
    write_items(items.uri, new_titles, extends=extends)
    old_sids = read_table(f"{sids}/sids")

    with pytest.raises(UserError, match=message):
        extend(build_config(tmp_path, extend=sids, **options))

    assert read_table(f"{sids}/sids") == old_sids


@given(st.integers(0, 99), st.sampled_from([[], [3], [2, 4]]))
def test_free_codes_are_distinct_and_the_nearest_ones_if_these_are_free(
    seed, conflicts
):
    draw = np.random.default_rng(seed)
    codebooks = draw.standard_normal((2, 4, 3))
    vectors = draw.standard_normal((14, 3)).round(1)
    nearest = np.stack([draw.integers(0, 4, 14), draw.integers(0, 2, 14)], 1)
    no_codes = np.empty((0, 2 + len(conflicts)), dtype=np.int64)

    def assign(items: slice, taken: np.ndarray) -> np.ndarray:
        return extend_codes(
            vectors[items],
            nearest[items],
            taken,
            codebooks,
            conflicts,
            2,
        )

    first = assign(slice(0, 7), no_codes)
    second = assign(slice(7, 14), first)

    codes = np.concatenate([first, second])
    np.testing.assert_array_equal(codes, assign(slice(0, 14), no_codes))
    assert len(np.unique(codes, axis=0)) == len(codes)
    assert (codes < np.array([4, 4, *conflicts])).all()
    capacity = int(np.prod(conflicts))  # number of items that can share two codes
    for item in range(14):
        num_sharing = (codes[:item, :2] == nearest[item]).all(1).sum()
        if num_sharing < capacity:
            np.testing.assert_array_equal(codes[item, :2], nearest[item])
