"""Test the tables `embeddings`, `sids` and `trie`, and when they are rewritten."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.errors import UserError
from core.schemas import EmbeddingsInfo, RetrievalInfo
from core.tables import Table, open_table, read_manifest
from models.retrieval.requests import find_train_items
from pipelines.encode.tokenize import read_codes, tokenize
from tests.fixtures.commands import read_table
from tests.fixtures.item_tables import build_config, build_titles, write_items

COUNT = 90
KMEANS = {"name": "rqkmeans", "levels": 2, "codebook_size": 8}
RQ_OTHER = {**KMEANS, "codebook_size": 5}


@pytest.fixture
def items(tmp_path) -> Table:
    """A table of 90 items."""
    return write_items(tmp_path / "items", build_titles(COUNT))


def tokenize_items(
    items: Table, output: Path, tokenizer: Any = KMEANS, **options: Any
) -> tuple[Any, Any, bool]:
    """Tokenize items by TF-IDF; return the manifests of `sids` and `trie`, and whether
    a table was written.
    """
    folder = Path(items.uri).parent
    return tokenize(build_config(folder, output, tokenizer=tokenizer, **options))


def read_change_times(folder: Path) -> dict[str, int]:
    """Return the time of change of all files below the folder."""
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_training_items_are_targets_of_training_requests_and_their_histories(small):
    sequences = f"{small[0]}/sequences"
    expected: set[int] = set()
    for user in read_table(sequences).to_pylist():
        for request in user["requests"]:
            history_end = request["history_end"]
            if request["split"] == "train" and history_end:
                expected |= set(user["item_index"][:history_end])
                expected.add(request["candidates"][0])
    assert find_train_items(open_table(sequences, RetrievalInfo)).tolist() == sorted(
        expected
    )


def check_paths(trie: str, codes: np.ndarray) -> None:
    """Check that the paths of the trie are the items' codes."""
    rows = read_table(trie).to_pylist()
    edges = {(row["level"], row["child"]): row for row in rows}
    assert [(r["level"], r["child"]) for r in rows] == sorted(edges)
    paths = {}
    for row in rows:
        if row["level"] < 2:
            assert row["item_index"] is None
            continue
        path = [row["token"]]
        parent = row
        while parent["level"]:
            parent = edges[parent["level"] - 1, parent["node"]]
            path.append(parent["token"])
        paths[row["item_index"]] = path[::-1]
    assert paths == dict(enumerate(codes.tolist()))


def test_tables_record_their_inputs_and_describe_the_codes(items, tmp_path):
    output = tmp_path / "sids"

    sids, trie, was_written = tokenize_items(items, output)

    assert was_written
    embeddings = open_table(str(output / "embeddings"), EmbeddingsInfo)
    assert sids.inputs == {"items": items.hash, "embeddings": embeddings.hash}
    assert trie.inputs == {"sids": sids.hash}
    assert sids.info.items_hash == items.hash
    assert sids.info.conflict_level
    assert sids.info.codebook_sizes[:2] == [8, 8]
    assert sids.info.measures.reconstruction_error is not None
    assert trie.info.codebook_sizes == sids.info.codebook_sizes
    assert (trie.info.levels, trie.info.items) == (3, COUNT)
    codes = read_codes(sids)
    assert len(np.unique(codes, axis=0)) == COUNT
    assert (codes < np.array(sids.info.codebook_sizes)).all()
    check_paths(str(output / "trie"), codes)


def test_a_second_run_writes_only_missing_tables(items, tmp_path):
    output = tmp_path / "sids"
    _, trie, _ = tokenize_items(items, output)
    change_times = read_change_times(output)

    _, _, was_written = tokenize_items(items, output)
    assert not was_written
    assert read_change_times(output) == change_times

    (output / "trie/manifest.json").unlink()
    _, new_trie, was_written = tokenize_items(items, output)
    assert was_written
    assert new_trie.hash == trie.hash
    other_tables = {
        name: time for name, time in change_times.items() if name[:4] != "trie"
    }
    assert other_tables.items() <= read_change_times(output).items()


def test_tokenizers_share_embeddings(items, tmp_path):
    shared = str(tmp_path / "embeddings")
    first = tokenize_items(items, tmp_path / "a", embeddings=shared)
    change_times = read_change_times(tmp_path / "embeddings")

    other = tokenize_items(
        items, tmp_path / "b", RQ_OTHER, embeddings=shared, overwrite=True
    )

    assert read_change_times(tmp_path / "embeddings") == change_times
    assert first[0].inputs == other[0].inputs
    assert first[0].hash == tokenize_items(items, tmp_path / "alone")[0].hash
    assert not (tmp_path / "a/embeddings").exists()
    with pytest.raises(UserError, match="embeddings was made with pca 6, not 5"):
        tokenize_items(items, tmp_path / "c", embeddings=shared, pca=5)
    assert not (tmp_path / "c/sids").exists()


def test_other_settings_need_overwrite_and_replace_all_tables(items, tmp_path):
    tokenize_items(items, tmp_path / "sids")
    change_times = read_change_times(tmp_path / "sids")
    message = "sids was made with rqkmeans.codebook_size 8, not 5"
    with pytest.raises(UserError, match=message):
        tokenize_items(items, tmp_path / "sids", RQ_OTHER)
    assert read_change_times(tmp_path / "sids") == change_times

    sids, trie, was_written = tokenize_items(
        items, tmp_path / "sids", RQ_OTHER, overwrite=True
    )
    assert was_written
    assert sids.info.codebook_sizes[:2] == [5, 5]
    assert trie.inputs == {"sids": sids.hash}
    listed = {
        part.path
        for name in ("embeddings", "quantizer", "sids", "trie")
        for part in read_manifest(str(tmp_path / "sids" / name)).files
    }
    assert {path.name for path in (tmp_path / "sids").rglob("*.parquet")} == listed


def test_published_sids_get_a_conflict_level_only_if_they_collide(items, tmp_path):
    path = tmp_path / "x.index.json"
    table = {f"i{i:04d}": [f"<a_{i % 10}>", f"<b_{i // 10}>"] for i in range(COUNT)}
    path.write_text(json.dumps({**table, "not in the catalogue": ["<a_99>", "<b_3>"]}))
    arguments: Any = (items, tmp_path / "sids", "published")
    sids, trie, was_written = tokenize_items(*arguments, published=str(path))
    assert was_written
    assert sids.info.conflict_level is False
    assert sids.info.codebook_sizes == [100, 9]
    assert read_codes(sids)[37].tolist() == [7, 3]
    assert trie.info.branching == [10, 9]
    _, _, was_written = tokenize_items(*arguments, published=str(path))
    assert not was_written

    path.write_text(json.dumps({**table, "i0000": table["i0001"]}))
    with pytest.raises(UserError, match="sids was made with published "):
        tokenize_items(*arguments, published=str(path))
    sids, _, _ = tokenize_items(*arguments, published=str(path), overwrite=True)
    assert sids.info.conflict_level is True
    assert sids.info.codebook_sizes == [10, 9, 2]
    assert sids.info.measures.collision_rate == pytest.approx(2 / COUNT)
    assert read_codes(sids)[:2].tolist() == [
        [1, 0, 0],
        [1, 0, 1],
    ]
