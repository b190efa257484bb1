"""Bad input: one line that names the file, the column or key, and what to do."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pipelines.data.ingest import hash_file
from pipelines.data.sources import load_source
from pipelines.data.sources.mapping import Mapping

from models.tables import UserError
from pipelines.data.tables import REJECTS

CSV = "u,i,t\n" + "".join(f"user{n},item{n * 7 % 101},{n}\n" for n in range(5000))
JSONL = "".join(json.dumps({"u": n, "i": n, "t": n}) + "\n" for n in range(5000))


def mapping(**changes: Any) -> Mapping:
    return Mapping(**{"files": "log.*", "user": "u", "item": "i", "time": {"column": "t", "unit": "ms"}, **changes})


def fails(source: Any, folder: Path) -> str:
    """The one line of the UserError that reading the folder raises."""

    def read_all() -> None:
        for file in source.event_files(str(folder)):
            for _ in source.read_events(str(folder), file):
                pass

    with pytest.raises(UserError) as caught:
        read_all()
    text = str(caught.value)
    assert "\n" not in text
    return text


def parquet(folder: Path, **columns: Any) -> None:
    table = {"u": ["a"] * 3, "i": ["x"] * 3, "t": [1, 2, 3], **columns}
    pq.write_table(pa.table(table), folder / "log.parquet")


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl", "log.parquet"])
def test_a_missing_column_is_named_with_its_nearest(tmp_path: Path, name: str) -> None:
    if name == "log.parquet":
        parquet(tmp_path, item_ident=["x"] * 3)
    else:
        row = {"u": 1, "t": 2, "item_ident": 3}
        text = json.dumps(row) if name == "log.jsonl" else "u,t,item_ident\n1,2,3\n"
        (tmp_path / name).write_text(text)
    text = fails(mapping(item="item_id"), tmp_path)
    assert name in text
    assert "no column 'item_id'" in text
    assert "'item_ident'" in text


@pytest.mark.parametrize(
    ("column", "values", "role"),
    [
        ("t", [1.0, 2.0, 3.0], {}),
        ("t", [True, False, True], {}),
        ("t", [[1], [2], [3]], {}),
        ("u", [1.0, 2.0, 3.0], {}),
        ("i", [["x"], ["y"], ["z"]], {}),
        ("v", [["x"], ["y"], ["z"]], {"labels": {"done": {"column": "v"}}}),
        ("v", [["x"], ["y"], ["z"]], {"numbers": ["v"]}),
        ("v", [1, 2, 3], {"labels": {"done": {"column": "v", "true_when": "== buy"}}}),
        ("i", ["x", "y", "z"], {"explode": {"columns": ["i"]}}),
        ("i", [1, 2, 3], {"explode": {"columns": ["i"], "separator": " "}}),
        ("t", [1, 2, 3], {"time": {"column": "t", "unit": "iso"}}),
    ],
)
def test_a_wrong_type_is_named_with_its_column(tmp_path: Path, column: str, values: list, role: dict) -> None:
    parquet(tmp_path, **{column: values})
    text = fails(mapping(**role), tmp_path)
    assert "log.parquet" in text
    assert f"column '{column}'" in text
    assert "source file" in text


@pytest.mark.parametrize("name", ["log.csv", "log.tsv", "log.jsonl", "log.parquet", "log.csv.gz"])
def test_an_empty_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(gzip.compress(b"") if name.endswith(".gz") else b"")
    text = fails(mapping(), tmp_path)
    assert name in text
    assert "empty" in text


def test_an_empty_csv_without_a_header(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_bytes(b"")
    assert "empty" in fails(mapping(header=["u", "i", "t"]), tmp_path)


@pytest.mark.parametrize("name", ["log.csv.gz", "log.jsonl.gz"])
def test_a_truncated_gzip(tmp_path: Path, name: str) -> None:
    content = gzip.compress((CSV if "csv" in name else JSONL).encode())
    (tmp_path / name).write_bytes(content[: len(content) * 2 // 3])
    text = fails(mapping(), tmp_path)
    assert name in text
    assert "truncated" in text


def test_a_truncated_gzip_behind_whole_files_is_named(tmp_path: Path) -> None:
    file = tmp_path / "log2.csv.gz"
    content = gzip.compress(CSV.encode() * 100)
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"log2.csv.gz cannot be read .* truncated or damaged: copy it again"):
        hash_file(str(file))


def test_a_truncated_parquet(tmp_path: Path) -> None:
    parquet(tmp_path)
    content = (tmp_path / "log.parquet").read_bytes()
    (tmp_path / "log.parquet").write_bytes(content[:-20])
    text = fails(mapping(), tmp_path)
    assert "log.parquet" in text
    assert "truncated" in text


def test_a_parquet_file_with_damage_inside(tmp_path: Path) -> None:
    table = pa.table({"u": [f"u{n}" for n in range(4000)], "i": ["x"] * 4000, "t": list(range(4000))})
    pq.write_table(table, tmp_path / "log.parquet", compression="zstd")
    content = bytearray((tmp_path / "log.parquet").read_bytes())
    content[40:4000] = bytes(3960)
    (tmp_path / "log.parquet").write_bytes(content)
    assert "log.parquet cannot be read as parquet" in fails(mapping(), tmp_path)


def test_truncated_json_lines(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(JSONL[:-9])
    assert "truncated" in fails(mapping(), tmp_path)


def test_a_json_array_is_not_json_lines(tmp_path: Path) -> None:
    (tmp_path / "log.json").write_text('[{"u": 1, "i": 2, "t": 3},\n {"u": 1, "i": 2, "t": 3}]\n')
    assert "one JSON object per line" in fails(mapping(), tmp_path)


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_bytes(b"u,i,t\na,\xff\xfe,1\n")
    assert "not UTF-8" in fails(mapping(), tmp_path)


def test_a_suffix_that_lies(tmp_path: Path) -> None:
    (tmp_path / "log.csv.gz").write_text(CSV)
    assert "log.csv.gz cannot be read as csv" in fails(mapping(), tmp_path)


def test_a_suffix_that_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "log.dat").write_text(CSV)
    assert "set 'format'" in fails(mapping(), tmp_path)
    (tmp_path / "log.dat").write_text("u,i,t\na,x,1\n")
    (block,) = mapping(format="csv").read_events(str(tmp_path), "log.dat")
    assert block.rows_read == 1


def test_no_file_of_that_name(tmp_path: Path) -> None:
    text = fails(mapping(), tmp_path)
    assert str(tmp_path) in text
    assert "'log.*'" in text
    assert "--input" in fails(mapping(), tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("yaml", "expected"),
    [
        ("files: a\n", "names no layout"),
        ("- 1\n", "holds list, not a mapping"),
        ("layout: [\n", "not valid YAML"),
        ("layout: csv\n", "unknown layout 'csv'"),
        ("layout: mapping\nuserr: u\n", "unknown key 'userr'; the nearest key is 'user'"),
        ("layout: mapping\nfiles: a\nuser: u\nitem: i\n", "time"),
        ("layout: mapping\nfiles: a\nuser: u\nitem: i\ntime: {column: t, unti: s}\n", "'time.unti'"),
        ("layout: mapping\nfiles: a\nuser: u\nitem: i\ntime: {column: t, unit: days}\n", "'days'; it must be one of"),
        ("layout: mapping\nfiles: a\nuser: 5\nitem: i\ntime: {column: t, unit: s}\n", "'user' is 5"),
        ("layout: mapping\nfiles: a\nuser: u\nitem: i\ntime: t\n", "'time' is 't'"),
        ("layout: lcrec\nitmes: x\n", "the nearest key is 'items'"),
        ("layout: amazon2023\nprepare: 5\n", "'prepare' is int"),
    ],
)
def test_a_bad_source_file(tmp_path: Path, yaml: str, expected: str) -> None:
    (tmp_path / "source.yaml").write_text(yaml)
    with pytest.raises(UserError) as caught:
        load_source(str(tmp_path / "source.yaml"))
    assert "source.yaml" in str(caught.value)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_source_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--source"):
        load_source(str(tmp_path / "source.yaml"))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"labels": {"x": {"column": "v", "type": "int"}}}, "bool, float32"),
        ({"labels": {"x": {"column": "v", "member_of": "w"}}}, "exactly one"),
        ({"labels": {"x": {}}}, "exactly one"),
        ({"labels": {"x": {"column": "v", "true_when": "about 4"}}}, "operator"),
        ({"labels": {"x": {"column": "v", "true_when": "> many"}}}, "needs a number"),
        ({"labels": {"x y": {"column": "v"}}}, "letters"),
        ({"labels": {"x": "v"}}, "labels.x"),
        ({"numbers": {"x": 3}}, "numbers.x"),
        ({"explode": {"columns": ["w"]}}, "must be in it"),
        ({"explode": {"columns": ["i"], "separator": ""}}, "separator is empty"),
        ({"format": "xml"}, "csv, jsonl, parquet"),
    ],
)
def test_a_mapping_refuses_what_cannot_be(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        mapping(**changes)


def test_broken_lines_of_item_and_user_files_are_rejected_and_counted(tmp_path: Path) -> None:
    lines = '{"id": 1, "v": "a"}\noops\n{"id": "", "v": "b"}\n[1]\n{"id": 1, "v": "c"}\n'
    for name in ("items.jsonl", "users.jsonl"):
        (tmp_path / name).write_text(lines)
    source = mapping(
        items={"files": "items.jsonl", "item": "id", "texts": ["v"]},
        users={"files": "users.jsonl", "user": "id", "attributes": ["v"]},
    )
    (items,) = source.read_items(str(tmp_path), "items.jsonl")
    users = source.read_users(str(tmp_path))
    assert users is not None
    for found, values in ((items, ["a", "c"]), (users, ["a"])):
        assert found.rows.columns[1].to_pylist() == values
        assert found.rows_read == 5
        assert found.rejects.schema == REJECTS
        assert sorted(found.rejects["row"].to_pylist()) == [1, 2, 3]
        assert "id: missing" in found.rejects["reason"].to_pylist()


def test_users_that_are_given_are_not_read_again(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("u,i,t\na,x,1\nb,x,2\n")
    (tmp_path / "users.csv").write_text("id,age\na,70\n")
    source = mapping(
        time={"column": "t", "unit": "order"}, users={"files": "users.csv", "user": "id", "attributes": ["age"]}
    )
    (alone,) = source.read_events(str(tmp_path), "log.csv")
    users = source.read_users(str(tmp_path))
    assert users is not None
    (tmp_path / "users.csv").unlink()
    (given,) = source.read_events(str(tmp_path), "log.csv", users.rows)
    assert given.events["cat_age"].to_pylist() == alone.events["cat_age"].to_pylist() == ["70", None]
