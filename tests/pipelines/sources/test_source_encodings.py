"""Text that is not UTF-8: read by its `encoding`, refused with a likely one where it is of another."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Any

import pytest
from pipelines.data.sources.encodings import likely_encodings
from pipelines.data.sources.mapping import Mapping

from models.tables import UserError

EUROPE, CHINA, JAPAN = "Crème brûlée à l'été", "丝绸衬衫和棉质长裤", "絹のシャツと綿のズボン"


def plain(**keys: Any) -> Mapping:
    return Mapping(**{"files": "log*", "user": "u", "item": "i", "time": {"column": "t", "unit": "s"}, **keys})


def items_of(source: Mapping, folder: Path, file: str) -> list[str]:
    return [item for block in source.read_events(str(folder), file) for item in block.events["item_id"].to_pylist()]


@pytest.mark.parametrize(
    ("encoding", "text"),
    [("cp1252", EUROPE), ("latin-1", EUROPE), ("utf-16", CHINA), ("utf-16-le", CHINA), ("gb18030", CHINA),
     ("shift_jis", JAPAN), ("utf-8", CHINA), ("UTF8", CHINA)],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_file_of_another_encoding(tmp_path: Path, encoding: str, text: str, kind: str) -> None:
    rows = 3000
    if kind == "csv":
        content = "u,i,t\n" + f"a,{text},1700000000\n" * rows
    else:
        content = f'{{"u": "a", "i": "{text}", "t": 1700000000}}\n' * rows
    (tmp_path / f"log.{kind}").write_bytes(content.encode(encoding))
    assert items_of(plain(encoding=encoding), tmp_path, f"log.{kind}") == [text] * rows


@pytest.mark.parametrize("mark", [codecs.BOM_UTF8, codecs.BOM_UTF16_LE])
def test_a_byte_order_mark_is_no_part_of_the_header(tmp_path: Path, mark: bytes) -> None:
    encoding = "utf-8" if mark == codecs.BOM_UTF8 else "utf-16-le"
    (tmp_path / "log.csv").write_bytes(mark + f"u,i,t\na,{CHINA},1700000000\n".encode(encoding))
    assert items_of(plain(encoding=encoding), tmp_path, "log.csv") == [CHINA]


def test_items_and_users(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_bytes(f"id,name\nx,{EUROPE}\n".encode("cp1252"))
    (tmp_path / "users.csv").write_bytes(f"id,town\na,{CHINA}\n".encode("gb18030"))
    source = plain(
        items={"files": "items.csv", "item": "id", "texts": ["name"], "encoding": "cp1252"},
        users={"files": "users.csv", "user": "id", "attributes": ["town"], "encoding": "gb18030"},
    )
    [block] = source.read_items(str(tmp_path), "items.csv")
    assert block.rows["text_name"].to_pylist() == [EUROPE]
    users = source.read_users(str(tmp_path))
    assert users is not None
    assert users.rows["user: town"].to_pylist() == [CHINA]
    assert source.config["items"]["encoding"] == "cp1252"
    assert "encoding" not in source.config  # where none is set, tables are what they were


@pytest.mark.parametrize(
    ("encoding", "text", "likely"),
    [("cp1252", EUROPE, "cp1252"), ("gb18030", CHINA, "gb18030"), ("utf-16", CHINA, "utf-16"),
     ("utf-16-le", EUROPE, "utf-16-le")],
)  # fmt: skip
def test_the_error_names_the_likely_encoding(tmp_path: Path, encoding: str, text: str, likely: str) -> None:
    (tmp_path / "log.csv").write_bytes(("u,i,t\n" + f"a,{text},1700000000\n" * 9).encode(encoding))
    with pytest.raises(UserError) as caught:
        items_of(plain(), tmp_path, "log.csv")
    assert "log.csv is not UTF-8" in str(caught.value)
    assert f"set 'encoding: {likely}'" in str(caught.value)


def test_a_wrong_encoding_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(f"u,i,t\na,{EUROPE},1700000000\n")
    with pytest.raises(UserError, match=r"log\.csv is not ascii; set 'encoding: utf-8' beside its 'files'"):
        items_of(plain(encoding="ascii"), tmp_path, "log.csv")


def test_utf_16_without_its_mark_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("u,i,t\na,x,1700000000\n")
    with pytest.raises(UserError, match=r"log\.csv is not utf-16; set 'encoding: utf-8' beside its 'files'"):
        items_of(plain(encoding="utf-16"), tmp_path, "log.csv")


@pytest.mark.parametrize(
    ("encoding", "words"), [("utf-9", "'encoding' is 'utf-9', which is no encoding"), ("base64", "not of text")]
)
def test_an_unknown_encoding(encoding: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plain(encoding=encoding)


def test_likely_encodings_of_utf_8() -> None:
    assert likely_encodings(CHINA.encode())[0] == "utf-8"
