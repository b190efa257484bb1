"""Test embeddings from a user's file: all layouts, and files that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import cli, tokenize
from models.storage.tables import UserError, read_manifest
from pipelines.data.sids.embed import EmbeddingSource, embed_items, read_embeddings
from pipelines.data.sids.precomputed import read_precomputed
from tests.fixtures.item_tables import write_items

IDS = [f"i{n:04d}" for n in (3, 0, 9, 1, 2)]
VECTORS = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
EXPECTED = np.stack(
    [VECTORS[1], VECTORS[3], VECTORS[4], VECTORS[0], np.zeros(3, np.float32)]
)


def write_parquet(folder: Path, columns: dict[str, Any]) -> str:
    """Write a Parquet file of embeddings; return its path."""
    pq.write_table(pa.table(columns), folder / "own.parquet")
    return str(folder / "own.parquet")


def write_npy(folder: Path, vectors: Any, ids: str) -> tuple[str, str]:
    """Write a NumPy file of embeddings and a text file of ids; return their paths."""
    np.save(folder / "own.npy", vectors)
    (folder / "ids.txt").write_text(ids)
    return str(folder / "own.npy"), str(folder / "ids.txt")


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
def items(tmp_path: Path) -> str:
    """Write a table of 5 items; return its URI."""
    (tmp_path / "items").mkdir()
    return write_items(tmp_path / "items", ["thing"] * 5)


@pytest.mark.parametrize("layout", [*LAYOUTS, "npy"])
def test_each_item_gets_its_row(layout: str, items: str, tmp_path: Path) -> None:
    if layout == "npy":
        file = write_npy(tmp_path, VECTORS.astype(np.float64), "\n".join(IDS) + "\n")
    else:
        file = write_parquet(tmp_path, LAYOUTS[layout]), "sku"
    out = str(tmp_path / "out")
    lines: list[str] = []
    source = EmbeddingSource(precomputed=read_precomputed(*file))

    manifest = embed_items(
        items,
        out,
        source,
        say=lines.append,
        start_ray=lambda: pytest.fail("Ray starts"),
    )

    np.testing.assert_allclose(read_embeddings(out), EXPECTED)
    assert lines == [
        f"note: 1 of 5 items have no row in {file[0]} and get zeros",
        f"note: 1 of 5 ids of {file[0]} are not in the items table",
    ]
    same_file = EmbeddingSource("tfidf", precomputed=source.precomputed)
    repeated = embed_items(items, out, same_file, say=lines.append)
    assert (repeated.hash, lines[-1]) == (manifest.hash, f"{out}: up to date")


def test_another_file_needs_overwrite(items: str, tmp_path: Path) -> None:
    file = write_parquet(tmp_path, LAYOUTS["lists"])
    out = str(tmp_path / "out")
    embed_items(
        items, out, EmbeddingSource(precomputed=read_precomputed(file, "sku")), say=str
    )
    doubled = {"vector": pa.array((2 * VECTORS).tolist(), LISTS)}
    other_file = write_parquet(tmp_path, LAYOUTS["lists"] | doubled)

    with pytest.raises(UserError, match="was made from other input or settings"):
        embed_items(
            items, out, EmbeddingSource(precomputed=read_precomputed(other_file, "sku"))
        )


def test_the_hash_depends_on_the_column_of_ids(tmp_path: Path) -> None:
    file = write_parquet(tmp_path, LAYOUTS["lists"] | {"parent": IDS[::-1]})
    by_parent, by_sku = read_precomputed(file, "parent"), read_precomputed(file, "sku")
    assert by_parent.sha256 != by_sku.sha256


def test_a_file_without_rows_of_the_items_is_refused(
    items: str, tmp_path: Path
) -> None:
    file = write_parquet(tmp_path, {"sku": ["x"], "a": [1]})
    source = EmbeddingSource(precomputed=read_precomputed(file, "sku"))
    with pytest.raises(
        UserError,
        match=r"has no row for any item, such as 'i0000'; its first id is 'x'",
    ):
        embed_items(items, str(tmp_path / "none"), source)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"sku": IDS, "a": [1.0, 2.0, np.nan, 3.0, np.inf]},
            "not finite or over .*, first in row 2 .id 'i0009'.",
        ),
        (
            {"sku": IDS, "a": [1.0, 2.0, 3.4e38, 3.0, 4.0]},
            "over 1.8e.19, first in row 2 .id 'i0009'.",
        ),
        (
            {"sku": IDS, "a": [1.0, 2.0, -1.5e19, 3.0, 4.0]},
            "first in row 2",
        ),
        (
            {"sku": IDS, "a": pa.array([[1.0], [2.0], [None], [3.0], [4.0]], LISTS)},
            "not finite or over .*, first in row 2",
        ),
        (
            {"sku": IDS, "a": pa.array([[1.0], None, [2.0], [3.0], [4.0]], LISTS)},
            "of 0 to 1 numbers",
        ),
        (
            {
                "sku": IDS,
                "a": pa.array([[1.0], [2.0, 3.0], [2.0], [3.0], [4.0]], LISTS),
            },
            "of 1 to 2 numbers",
        ),
        (
            {"sku": ["1", "2", "1.0"], "a": [1, 2, 3]},
            "has the item '1' twice, in rows 0 and 2",
        ),
        ({"sku": ["1", None], "a": [1, 2]}, "has None instead of an id in row 1"),
        ({"item": IDS, "a": [1] * 5}, "has no column 'sku'; --id is one of item, a"),
        (
            {"sku": IDS, "a": [1] * 5, "title": IDS},
            "has columns without numbers, title",
        ),
        ({"sku": IDS}, "has no columns of numbers"),
        (
            {"sku": IDS, **{name: pa.array([[1.0]] * 5, LISTS) for name in "ab"}},
            "several list columns, a, b",
        ),
        (
            {"sku": pa.array([], pa.string()), "a": pa.array([], LISTS)},
            "holds no embeddings",
        ),
    ],
)
def test_a_parquet_file_without_a_matrix_and_ids_is_refused(
    columns: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        read_precomputed(write_parquet(tmp_path, columns), "sku")


@pytest.mark.parametrize(
    ("vectors", "ids", "message"),
    [
        (VECTORS, "a\nb\n", "ids.txt has 2 lines and .*own.npy 5 rows"),
        (
            VECTORS[0],
            "a",
            r"float32 of shape \(3,\)",
        ),
        (np.array([["x"]]), "a", "holds <U1 of shape"),
        (np.array([[None]], object), "a", "is not a NumPy array"),
    ],
)
def test_an_array_that_does_not_match_its_ids_is_refused(
    vectors: Any, ids: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        read_precomputed(*write_npy(tmp_path, vectors, ids))


def test_the_job_tokenizes_precomputed_embeddings(
    ray_local: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tables/items").mkdir(parents=True)
    write_items(tmp_path / "tables/items", [""] * 40)  # text is not read
    vectors = np.random.default_rng(1).standard_normal((40, 4))
    file = write_parquet(
        tmp_path,
        {
            "sku": [f"i{n:04d}" for n in range(40)],
            "v": pa.array(vectors.tolist(), LISTS),
        },
    )
    words = [
        "--tables",
        f"{tmp_path}/tables",
        "--output",
        f"{tmp_path}/sids",
        "--embeddings",
        file,
    ]
    words += ["--tokenizer", "rqkmeans", "--rqkmeans.codebook_size", "8"]
    with pytest.raises(UserError, match=r"a \.parquet or .npy file needs --id"):
        cli.parse(tokenize.Config, words)
    for status in ("made ", "nothing to do: "):
        tokenize.run(cli.parse(tokenize.Config, [*words, "--id", "sku"]))
        assert f"{status}{tmp_path}/sids" in capsys.readouterr().out
    assert read_manifest(f"{tmp_path}/sids/sids").rows == 40
