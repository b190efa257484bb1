"""Tables `embeddings`, `sids` and `trie`: manifests, and when they are rewritten."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from models.retrieval.tokenizers import codes
from models.retrieval.tokenizers.config import PsidConfig, RqkmeansConfig
from models.storage.tables import (
    UserError,
    commit,
    has_manifest,
    read_manifest,
    read_table,
    write_part,
    writing,
)
from pipelines.data.schemas import SIDS, TRIE, items_schema
from pipelines.data.sids.config import EmbedConfig, TokenizerConfig
from pipelines.data.sids.embed import EmbeddingSource, read_embeddings
from pipelines.data.sids.tokenize import (
    TokenizerPaths,
    find_train_items,
    read_codes,
    tokenize,
)

COUNT = 90
KINDS, COLOURS = ["drill", "hose", "lamp"], ["red", "green", "blue", "black", "white"]
KMEANS = TokenizerConfig("rqkmeans", rqkmeans=RqkmeansConfig(levels=2, codebook_size=8))


def write_items(uri: Path, texts: list[str]) -> str:
    schema = items_schema(["title"])
    columns = [
        pa.array(range(len(texts)), pa.int32()),
        pa.array([f"i{i:04d}" for i in range(len(texts))]),
        pa.array(texts),
    ]
    part = write_part(str(uri), pa.Table.from_arrays(columns, schema=schema))
    commit(str(uri), "items", schema, [part], config={}, inputs={})
    return str(uri)


@pytest.fixture
def items_uri(tmp_path: Path) -> str:
    (tmp_path / "items").mkdir()
    return write_items(
        tmp_path / "items",
        [
            f"{COLOURS[i % 5]} {KINDS[i % 3]} with {i % 7} parts, model {i % 2}"
            for i in range(COUNT)
        ],
    )


def run(
    items: str, output: Path, config: TokenizerConfig = KMEANS, **options: Any
) -> tuple[Any, Any, bool]:
    paths = TokenizerPaths(items, str(output), options.pop("embeddings", ""))
    source = EmbeddingSource(
        "tfidf",
        options.pop("pca_width", 6),
        options.pop("embed", EmbedConfig()),
    )
    return tokenize(paths, config, source, **options)


def stamps(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_items_of_training_requests_are_targets_and_what_came_before_them(
    small: tuple[str, str],
) -> None:
    sequences = f"{small[0]}/sequences"
    expected: set[int] = set()
    for user in read_table(sequences).to_pylist():
        for request in user["requests"]:
            if request["split"] == "train" and request["history_end"]:
                expected |= {
                    *user["item_index"][: request["history_end"]],
                    request["candidates"][0],
                }
    assert find_train_items(sequences).tolist() == sorted(expected)


def check_paths(trie: str, codes: np.ndarray) -> None:
    """Check that the paths of the trie are the items' codes."""
    rows = read_table(trie).to_pylist()
    edges = {(row["level"], row["child"]): row for row in rows}
    assert [(r["level"], r["child"]) for r in rows] == sorted(edges)
    found = {}
    for row in rows:
        if row["level"] < 2:
            assert row["item_index"] is None
            continue
        path, step = [row["token"]], row
        while step["level"]:
            step = edges[step["level"] - 1, step["node"]]
            path.append(step["token"])
        found[row["item_index"]] = path[::-1]
    assert found == dict(enumerate(codes.tolist()))


def test_tables_name_what_they_are_made_from_and_a_second_run_changes_no_file(
    ray_local: None, items_uri: str, tmp_path: Path
) -> None:
    sids, trie, made = run(items_uri, tmp_path / "sids")
    assert made
    items, embeddings = (
        read_manifest(items_uri),
        read_manifest(str(tmp_path / "sids/embeddings"), "embeddings"),
    )
    assert embeddings.inputs["items"] == items.hash
    assert sids.inputs == {"items": items.hash, "embeddings": embeddings.hash}
    assert trie.inputs == {"sids": sids.hash}
    info = {"items_hash": items.hash, "tokenizer": "rqkmeans", "conflict_level": True}
    assert info.items() <= sids.info.items()
    assert sids.info["codebook_sizes"][:2] == [8, 8]
    assert {
        "reconstruction_error",
        "collision_rate",
        "levels",
        "branching",
        "duplicates",
    } <= sids.info.keys()
    assert trie.info["codebook_sizes"] == sids.info["codebook_sizes"]
    assert (trie.info["levels"], trie.info["items"]) == (3, COUNT)
    assert read_table(str(tmp_path / "sids/sids")).schema.equals(SIDS)
    assert read_table(str(tmp_path / "sids/trie")).schema.equals(TRIE)
    assert read_embeddings(str(tmp_path / "sids/embeddings")).shape == (COUNT, 6)
    codes = read_codes(str(tmp_path / "sids/sids"))
    assert len(np.unique(codes, axis=0)) == COUNT
    assert (codes < np.array(sids.info["codebook_sizes"])).all()
    check_paths(str(tmp_path / "sids/trie"), codes)

    before = stamps(tmp_path / "sids")
    assert run(items_uri, tmp_path / "sids")[2] is False
    assert stamps(tmp_path / "sids") == before
    # what is missing is made again, and nothing else
    (tmp_path / "sids/trie/manifest.json").unlink()
    _, again, made = run(items_uri, tmp_path / "sids")
    assert (made, again.hash) == (True, trie.hash)
    of_others = {
        name: stamp for name, stamp in before.items() if not name.startswith("trie")
    }
    assert of_others.items() <= stamps(tmp_path / "sids").items()
    other, _, made = run(items_uri, tmp_path / "sids", overwrite=True)
    assert (made, other.hash) == (True, sids.hash)


def test_tokenizers_share_embeddings_that_are_made_once(
    ray_local: None, items_uri: str, tmp_path: Path
) -> None:
    shared = str(tmp_path / "embeddings")
    first = run(items_uri, tmp_path / "a", embeddings=shared)
    before = stamps(tmp_path / "embeddings")
    other = run(items_uri, tmp_path / "b", RQ_OTHER, embeddings=shared, overwrite=True)
    assert stamps(tmp_path / "embeddings") == before
    assert first[0].inputs == other[0].inputs
    assert first[0].hash == run(items_uri, tmp_path / "alone")[0].hash
    assert not (tmp_path / "a/embeddings").exists()
    with pytest.raises(
        UserError, match=r"embeddings was made from other input or settings"
    ):
        run(items_uri, tmp_path / "c", embeddings=shared, pca_width=5)
    assert not (tmp_path / "c/sids").exists()
    run(items_uri, tmp_path / "c", embeddings=shared, pca_width=5, overwrite=True)
    assert read_embeddings(shared).shape == (COUNT, 5)


def test_folders_that_another_job_writes_are_left_alone(
    ray_local: None, items_uri: str, tmp_path: Path
) -> None:
    output, shared = tmp_path / "sids", tmp_path / "embeddings"
    for busy in (output, shared):
        with (
            writing(str(busy)),
            pytest.raises(
                UserError, match=f"{busy} is being written by another process"
            ),
        ):
            run(items_uri, output, embeddings=str(shared))
    assert not list(tmp_path.glob("[se]*/**/*.parquet"))
    run(items_uri, output, embeddings=str(shared))
    with writing(str(shared)):  # finished embeddings are read, whoever makes other ones
        assert run(items_uri, tmp_path / "other", RQ_OTHER, embeddings=str(shared))[2]


def test_other_settings_need_overwrite_and_replace_all(
    ray_local: None, items_uri: str, tmp_path: Path
) -> None:
    run(items_uri, tmp_path / "sids")
    before = stamps(tmp_path / "sids")
    psid = TokenizerConfig(
        "psid",
        rqkmeans=RqkmeansConfig(levels=3, codebook_size=6),
        psid=PsidConfig(width=3),
    )
    with pytest.raises(
        UserError, match=r"sids was made from other input or settings; use --overwrite"
    ):
        run(items_uri, tmp_path / "sids", RQ_OTHER)
    with pytest.raises(
        UserError,
        match=r"embeddings was made from other input or settings; use --overwrite",
    ):
        run(items_uri, tmp_path / "sids", pca_width=5)
    assert stamps(tmp_path / "sids") == before
    sids, trie, made = run(items_uri, tmp_path / "sids", RQ_OTHER, overwrite=True)
    assert made
    assert sids.info["codebook_sizes"][:2] == [5, 5]
    assert trie.inputs == {"sids": sids.hash}
    listed = {
        part.path
        for name in ("embeddings", "quantizer", "sids", "trie")
        for part in read_manifest(str(tmp_path / "sids" / name)).files
    }
    assert {path.name for path in (tmp_path / "sids").rglob("*.parquet")} == listed
    assert (
        run(items_uri, tmp_path / "sids", psid, overwrite=True)[0].info["tokenizer"]
        == "psid"
    )


RQ_OTHER = TokenizerConfig(
    "rqkmeans", rqkmeans=RqkmeansConfig(levels=2, codebook_size=5)
)


def test_psid_makes_unique_codes_of_the_same_depth(
    ray_local: None, items_uri: str, tmp_path: Path
) -> None:
    config = TokenizerConfig(
        "psid",
        rqkmeans=RqkmeansConfig(levels=3, codebook_size=6),
        psid=PsidConfig(width=3),
    )
    sids, _, _ = run(items_uri, tmp_path / "sids", config)
    assert sids.info["conflict_level"] is False
    assert sids.info["codebook_sizes"] == [6, 6, 6]
    assert sids.info["relaxed_items"] > 0
    assert sids.info["collision_rate"] == 0 < sids.info["collision_rate_before"]
    assert len(np.unique(read_codes(str(tmp_path / "sids/sids")), axis=0)) == COUNT


def test_items_of_one_text_take_two_conflict_codes_or_leave_no_sids_behind(
    ray_local: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "items").mkdir()
    items = write_items(
        tmp_path / "items", ["one and the same"] * 280 + ["another thing"] * 2
    )
    said: list[str] = []
    sids, trie, _ = run(
        items, tmp_path / "two", pca_width=0, embed=EmbedConfig(svd=2), say=said.append
    )
    assert sids.info["codebook_sizes"][-2:] == [2, 256]
    assert trie.rows > 280
    assert any(
        line.startswith(
            "note: 280 items share their codes, so the conflict code takes two"
        )
        for line in said
    )
    monkeypatch.setattr(codes, "MAX_CONFLICT_LEVELS", 1)
    with pytest.raises(UserError, match=r"280 items share the codes.*at most 256"):
        run(items, tmp_path / "sids", pca_width=0, embed=EmbedConfig(svd=2))
    assert not has_manifest(str(tmp_path / "sids/sids"))


def test_published_sids_get_a_conflict_level_only_where_they_collide(
    items_uri: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.index.json"
    table = {f"i{i:04d}": [f"<a_{i % 10}>", f"<b_{i // 10}>"] for i in range(COUNT)}
    path.write_text(json.dumps({**table, "not in the catalogue": ["<a_99>", "<b_3>"]}))
    config = TokenizerConfig("published", published=str(path))
    sids, trie, made = run(items_uri, tmp_path / "sids", config)
    assert made
    assert sids.info["conflict_level"] is False
    assert sids.info["codebook_sizes"] == [100, 9]
    assert read_codes(str(tmp_path / "sids/sids"))[37].tolist() == [7, 3]
    assert trie.info["branching"] == [10, 9]
    assert run(items_uri, tmp_path / "sids", config)[2] is False

    path.write_text(json.dumps({**table, "i0000": table["i0001"]}))
    with pytest.raises(UserError, match="--overwrite"):
        run(items_uri, tmp_path / "sids", config)
    sids, _, _ = run(items_uri, tmp_path / "sids", config, overwrite=True)
    assert sids.info["conflict_level"] is True
    assert sids.info["codebook_sizes"] == [10, 9, 2]
    assert sids.info["collision_rate"] == pytest.approx(2 / COUNT)
    assert read_codes(str(tmp_path / "sids/sids"))[:2].tolist() == [
        [1, 0, 0],
        [1, 0, 1],
    ]


def test_published_sids_leave_no_embeddings_of_other_sids(
    ray_local: None, items_uri: str, tmp_path: Path
) -> None:
    run(items_uri, tmp_path / "sids")
    path = tmp_path / "x.csv"
    path.write_text("item_id,c1\n" + "".join(f"i{i:04d},{i}\n" for i in range(COUNT)))
    run(
        items_uri,
        tmp_path / "sids",
        TokenizerConfig("published", published=str(path)),
        overwrite=True,
    )
    assert not (tmp_path / "sids/embeddings").exists()


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="needs --published FILE"):
        TokenizerConfig("published")
    with pytest.raises(ValueError, match="needs --published FILE"):
        TokenizerConfig("rqvae", published="x.csv")
