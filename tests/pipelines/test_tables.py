"""Tables: nothing is seen before its manifest, and damage is named."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from models.storage.locks import LOCK
from models.storage.tables import (
    UserError,
    add_seal,
    check_output,
    check_seal,
    clear,
    code_version,
    commit,
    fingerprint,
    has_earlier_table,
    read_manifest,
    read_parquet,
    read_table,
    run_git,
    up_to_date,
    write_part,
    writing,
)
from models.storage.uri import check_writable
from pipelines.data.events.columns import read_part
from pipelines.data.schemas import SIDS, embeddings_schema


def sids(*codes: list[int]) -> pa.Table:
    return pa.table(
        {"item_index": range(len(codes)), "codes": list(codes)}, schema=SIDS
    )


def make(folder: Path, *tables: pa.Table, config: dict[str, int] | None = None) -> str:
    uri = str(folder)
    parts = [write_part(uri, table) for table in tables]
    commit(uri, "sids", SIDS, parts, config=config or {}, inputs={"items": "h"})
    return uri


def test_round_trip_keeps_the_order_of_parts(tmp_path: Path) -> None:
    first, second = sids([1, 2]), sids([3, 4], [5, 6])
    uri = make(tmp_path / "t", first, second)
    assert read_table(uri, "sids").equals(pa.concat_tables([first, second]))
    assert read_manifest(uri).rows == 3


def test_parts_without_a_manifest_are_no_table(tmp_path: Path) -> None:
    write_part(str(tmp_path), sids([1]))
    with pytest.raises(UserError, match=r"is not a table: it holds no manifest\.json"):
        read_table(str(tmp_path))


def test_a_new_version_leaves_only_its_own_files(tmp_path: Path) -> None:
    uri = make(tmp_path / "t", sids([1]), sids([2]))
    write_part(uri, sids([9]))  # what a killed run leaves
    make(tmp_path / "t", sids([3]), config={"k": 1})
    assert pq.read_table(
        uri.rstrip("/") + "/" + read_manifest(uri).files[0].path
    ).equals(sids([3]))
    assert sorted(p.name for p in (tmp_path / "t").iterdir()) == [
        "manifest.json",
        read_manifest(uri).files[0].path,
    ]


def test_files_of_the_user_stay_where_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    uri = make(folder, sids([1]))
    names = [
        "thesis.txt",
        "day1.csv",
        "part-0001.parquet",
        "part-00000-c000.snappy.parquet",
        ".notes",
        "a.tmp",
    ]
    for name in names:
        (folder / name).write_text("mine")
    part = f"part-{'0' * 20}.parquet"
    for name in (part, f"{part}.7.tmp", "manifest.json.7.tmp"):
        (folder / name).write_text("of a killed run")
    (folder / "more").mkdir()
    make(folder, sids([2]), config={"k": 1})
    listed = [part.path for part in read_manifest(uri).files]
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        [*names, "more", "manifest.json", *listed]
    )
    clear(uri)
    assert sorted(p.name for p in folder.iterdir()) == sorted([*names, "more"])
    clear(make(tmp_path / "whole", sids([1])))
    assert not (tmp_path / "whole").exists()


def test_parts_that_another_job_removed_are_no_table(tmp_path: Path) -> None:
    uri = make(tmp_path / "t", sids([1]))
    mine = write_part(uri, sids([2]))
    make(tmp_path / "t", sids([3]), config={"k": 1})  # removes what it does not list
    with pytest.raises(
        UserError,
        match=r"part-.* was removed before its table was complete: another job writes to",
    ):
        commit(uri, "sids", SIDS, [mine], config={}, inputs={})
    assert read_table(uri, "sids").equals(sids([3]))


def test_a_folder_is_written_by_one_process_at_a_time(tmp_path: Path) -> None:
    with writing(str(tmp_path / "t")):
        with pytest.raises(
            UserError,
            match=r"t is being written by another process; wait for it or choose another",
        ):
            writing(str(tmp_path / "t")).__enter__()
        make(tmp_path / "t", sids([1]))
        assert (tmp_path / "t" / LOCK).exists()
    with writing(str(tmp_path / "t")):
        pass


def test_same_content_same_hash(tmp_path: Path) -> None:
    first, second = (
        make(tmp_path / "a", sids([1], [2])),
        make(tmp_path / "b", sids([1], [2])),
    )
    assert read_manifest(first).hash == read_manifest(second).hash
    assert (
        read_manifest(first).hash
        != read_manifest(make(tmp_path / "c", sids([1], [3]))).hash
    )


def test_fingerprint_decides_whether_a_step_runs_again(tmp_path: Path) -> None:
    uri = make(tmp_path / "t", sids([1]), config={"k": 5})
    assert up_to_date(uri, fingerprint({"k": 5}, {"items": "h"}))
    assert not up_to_date(uri, fingerprint({"k": 6}, {"items": "h"}))
    assert not up_to_date(str(tmp_path / "none"), fingerprint({}, {}))


def test_truncated_part(tmp_path: Path) -> None:
    uri = make(tmp_path / "t", sids([1]))
    part = tmp_path / "t" / read_manifest(uri).files[0].path
    part.write_bytes(part.read_bytes()[:-10])
    with pytest.raises(
        UserError, match=r"has \d+ bytes, its manifest says \d+: truncated"
    ):
        read_table(uri)


def test_a_file_that_is_no_parquet(tmp_path: Path) -> None:
    (tmp_path / "other.parquet").write_bytes(b"x" * 100)
    with pytest.raises(UserError, match="is not a readable Parquet file"):
        read_parquet(str(tmp_path / "other.parquet"))


def flips(file: Path, count: int = 150) -> Iterator[None]:
    """The file with one bit flipped, at that many places of it, and as it was at the
    end.
    """
    whole = file.read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // count)):
        file.write_bytes(
            whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :]
        )
        yield
    file.write_bytes(whole)


def test_a_flipped_bit_anywhere_in_a_part_is_found(tmp_path: Path) -> None:
    vectors = pa.table(
        {"item_index": range(40), "embedding": [[0.5 * i] * 8 for i in range(40)]},
        embeddings_schema(8),
    )
    events = pa.table(
        {
            "user_id": [f"u{i // 4}" for i in range(40)],
            "item_id": [f"i{i % 7}" for i in range(40)],
        }
    )
    for table in (sids(*([i, 1] for i in range(40))), vectors, events):
        part = tmp_path / write_part(str(tmp_path), table).path
        for _ in flips(part):
            for read in (
                (read_parquet, read_part) if table is events else (read_parquet,)
            ):
                with pytest.raises(
                    UserError,
                    match=rf"{part.name} is damaged: its SHA-256.*; make it again with --over",
                ):
                    read(str(part))
        assert read_parquet(str(part)).equals(table)


def test_a_flipped_bit_in_a_manifest_is_found_or_of_no_account(tmp_path: Path) -> None:
    uri = make(tmp_path / "t", sids([1, 2], [3, 4]))
    right, said = read_manifest(uri), []
    for _ in flips(tmp_path / "t" / "manifest.json"):
        try:
            assert read_manifest(uri) == right
        except UserError as error:
            said.append(str(error))
    assert all(
        "manifest.json is damaged" in line and "make the table again" in line
        for line in said
    )
    assert len(said) > 100


@pytest.mark.parametrize(
    "path",
    ["../secret", "/etc/passwd", "..", "", "a/../../b", "%2e%2e%2fb", "a\\b", None],
)
def test_a_manifests_paths_stay_in_its_folder(tmp_path: Path, path: str | None) -> None:
    uri = make(tmp_path / "t", sids([1]))
    write_part(str(tmp_path), sids([2]))
    manifest = tmp_path / "t" / "manifest.json"
    content = check_seal(manifest.read_text())
    content["files"][0]["path"] = path
    manifest.write_text(add_seal(content))
    with pytest.raises(
        UserError,
        match=r"manifest\.json is damaged \(the path .* is not a file name\); make the",
    ):
        read_table(uri)


def test_missing_part_damaged_manifest_wrong_table(tmp_path: Path) -> None:
    uri = make(tmp_path / "t", sids([1]))
    with pytest.raises(UserError, match="holds the table 'sids', not 'trie'"):
        read_table(uri, "trie")
    (tmp_path / "t" / read_manifest(uri).files[0].path).unlink()
    with pytest.raises(UserError, match="is missing; make the table"):
        read_table(uri)
    manifest = tmp_path / "t" / "manifest.json"
    manifest.write_text(json.dumps({"table": "sids"}))
    with pytest.raises(UserError, match="is damaged"):
        read_table(uri)


def test_unwritable_output(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to"):
        check_writable(str(tmp_path / "file" / "t"))


def test_an_output_that_holds_other_things_is_refused(tmp_path: Path) -> None:
    """Home, a folder of runs, tables of another job: before anything is written."""
    tables = {"sids": "sids", "trie": "trie"}
    out = tmp_path / "out"
    check_output(str(out), tables)  # new
    assert not out.exists()
    (out / "sids").mkdir(parents=True)
    (out / ".lock").write_text("")
    (out / "sids" / f"part-{'0' * 20}.parquet").write_text("of a killed run")
    check_output(str(out), tables)
    (out / "statistics.json").write_text("{}")
    check_output(str(out), tables, ["statistics.json"])
    with pytest.raises(
        UserError,
        match=r"out holds 'statistics.json' and no table 'sids' of an earlier run; choose a new or",
    ):
        check_output(str(out), tables)
    make(out / "sids", sids([1]))
    check_output(str(out), tables)  # an earlier output, with what the user keeps there
    assert has_earlier_table(str(out / "sids"), "sids")
    with pytest.raises(
        UserError,
        match=r"sids holds the table 'sids', not 'recommendations'; choose a new or empty",
    ):
        has_earlier_table(str(out / "sids"), "recommendations")
    (out / "trie").mkdir()
    (out / "trie" / "thesis.txt").write_text("mine")
    with pytest.raises(
        UserError, match=r"trie holds 'thesis.txt', which is not part of a table"
    ):
        check_output(str(out), tables)
    with pytest.raises(
        UserError, match=r"out holds 'sids', which is not part of a table"
    ):
        has_earlier_table(
            str(out), "recommendations"
        )  # recommendations into a folder of tables


def test_tables_are_made_where_there_is_no_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_git("rev-parse", "HEAD") is None
    code_version.cache_clear()
    assert re.fullmatch(r"\S+ code [0-9a-f]{12}", code_version())
    make(tmp_path / "t", sids([1, 2]))
    assert read_manifest(str(tmp_path / "t")).code_version == code_version()
