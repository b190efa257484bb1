"""Test tables: manifests, concurrent writers, and damaged or foreign files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core.errors import UserError
from core.files import LOCK
from core.schemas import SIDS, embeddings_schema
from core.tables import (
    TableInfo,
    clear,
    commit,
    open_table,
    read_manifest,
    read_parquet,
    write_part,
    writing,
)


def build_sids(*codes: list[int]) -> pa.Table:
    """Build the rows of a table of semantic IDs."""
    return pa.table(
        {"item_index": range(len(codes)), "codes": list(codes)}, schema=SIDS
    )


def write_sids(
    folder: Path, *tables: pa.Table, config: dict[str, int] | None = None
) -> str:
    """Write a table of semantic IDs with a part per argument; return its URI."""
    uri = str(folder)
    parts = [write_part(uri, table) for table in tables]
    commit(uri, "sids", SIDS, parts, config=config or {}, inputs={"items": "h"})
    return uri


def test_parts_without_a_manifest_are_refused(tmp_path):
    write_part(str(tmp_path), build_sids([1]))
    with pytest.raises(UserError, match=r"is not a table: it holds no manifest\.json"):
        open_table(str(tmp_path), TableInfo)


def test_a_new_version_removes_the_files_of_older_ones(tmp_path):
    uri = write_sids(tmp_path / "t", build_sids([1]), build_sids([2]))
    write_part(uri, build_sids([9]))  # as a killed run leaves it
    write_sids(tmp_path / "t", build_sids([3]), config={"k": 1})

    (part,) = read_manifest(uri).files
    assert pq.read_table(f"{uri}/{part.path}").equals(build_sids([3]))
    files = sorted(path.name for path in (tmp_path / "t").iterdir())
    assert files == ["manifest.json", part.path]


def test_files_of_the_user_are_never_removed(tmp_path):
    folder = tmp_path / "t"
    uri = write_sids(folder, build_sids([1]))
    names = [
        "thesis.txt",
        "day1.csv",
        "part-0001.parquet",
        "part-00000-c000.snappy.parquet",
        ".notes",
        "a.tmp",
    ]
    for name in names:
        (folder / name).write_text("of the user")
    part = f"part-{'0' * 20}.parquet"
    for name in (part, f"{part}.7.tmp", "manifest.json.7.tmp"):
        (folder / name).write_text("of a killed run")
    (folder / "more").mkdir()
    write_sids(folder, build_sids([2]), config={"k": 1})

    parts = [part.path for part in read_manifest(uri).files]
    files = {path.name for path in folder.iterdir()}
    assert files == {*names, "more", "manifest.json", *parts}
    clear(uri)
    assert {path.name for path in folder.iterdir()} == {*names, "more"}


def test_a_folder_is_written_by_one_process_at_a_time(tmp_path):
    with writing(str(tmp_path / "t")):
        with pytest.raises(
            UserError,
            match=r"t is being written by another process",
        ):
            writing(str(tmp_path / "t")).__enter__()
        write_sids(tmp_path / "t", build_sids([1]))
        assert (tmp_path / "t" / LOCK).exists()
    with writing(str(tmp_path / "t")):
        pass


def flip_bits(file: Path, count: int = 150) -> Iterator[None]:
    """Flip one bit of a file at a time, at `count` positions spread over the file.

    Yield after each flip, and restore the file at the end.
    """
    content = file.read_bytes()
    for position in range(0, len(content), max(1, len(content) // count)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        file.write_bytes(damaged)
        yield
    file.write_bytes(content)


def test_a_flipped_bit_anywhere_in_a_part_is_detected(tmp_path):
    vectors = pa.table(
        {"item_index": range(40), "embedding": [[0.5 * i] * 8 for i in range(40)]},
        embeddings_schema(8),
    )
    for table in (build_sids(*([i, 1] for i in range(40))), vectors):
        part = tmp_path / write_part(str(tmp_path), table).path
        message = f"{part.name} is damaged"
        for _ in flip_bits(part):
            with pytest.raises(UserError, match=message):
                read_parquet(str(part))
        assert read_parquet(str(part)).equals(table)


@pytest.mark.parametrize(
    "path",
    ["../secret", "/etc/passwd", "..", "", "a/../../b", "%2e%2e%2fb", "a\\b", None],
)
def test_a_manifest_with_a_path_outside_its_folder_is_refused(tmp_path, path):
    uri = write_sids(tmp_path / "t", build_sids([1]))
    write_part(str(tmp_path), build_sids([2]))
    manifest = tmp_path / "t" / "manifest.json"
    content = json.loads(manifest.read_text())
    content["files"][0]["path"] = path
    manifest.write_text(json.dumps(content))
    with pytest.raises(UserError, match="is not a file name"):
        open_table(uri, TableInfo).read()
