"""Logs that say less of time: earlier behaviours without times, the order of lines, and odd text files."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines.data.sources.mapping import Mapping
from pipelines.data.sources.pieces import Piece
from pipelines.data.sources.readers import UNIT, _Joined
from test_source_transforms import plain, read

from models.tables import UserError
from pipelines.data.kinds.search.config import SearchConfig
from pipelines.data.prepare_config import PrepareConfig
from pipelines.data.settings import check

MIND = """1\tU1\t11/15/2019 8:55:22 AM\tN1 N2\tN3-1 N4-0
2\tU2\t11/15/2019 9:00:00 AM\t\tN3-0 N5-1
3\tU1\t11/15/2019 1:00:00 PM\tN1 N2\tN5-0 N6-1
4\tU1\t11/16/2019 1:00:00 PM\tN1 N2 N3\tN7-1
"""
AT = 1_570_838_400_000  # 2019-10-12


def mind(**keys: Any) -> Mapping:
    return Mapping(
        **{
            "files": "behaviors.tsv",
            "header": ["impression", "user", "time", "history", "shown"],
            "user": "user",
            "request": "impression",
            "item": "news",
            "time": {"column": "time", "format": "%m/%d/%Y %I:%M:%S %p"},
            "explode": {"columns": ["news", "clicked"], "separator": " "},
            "labels": {"click": {"column": "clicked"}},
            "transforms": {
                "news": {"column": "shown", "regex": r"^(.+)-[01]$"},
                "clicked": {"column": "shown", "regex": r"-([01])$"},
            },
            "history": {"column": "history", "separator": " ", "at": "2019-10-12", "labels": ["click"]},
            **keys,
        }
    )


def earlier(source: Mapping, folder: Path) -> list[tuple[Any, ...]]:
    events = read(source, folder).events.to_pylist()
    return [
        (e["user_id"], e["item_id"], e["timestamp_ms"] - AT, e["label_click"]) for e in events if not e["request_id"]
    ]


def test_earlier_behaviours_are_events_before_the_log(tmp_path: Path) -> None:
    (tmp_path / "behaviors.tsv").write_text(MIND)
    source = mind()
    assert earlier(source, tmp_path) == [
        ("U1", "N1", 0, True),
        ("U1", "N2", 1, True),
        ("U1", "N1", 0, True),  # of the longer list of the last row: the same events again
        ("U1", "N2", 1, True),
        ("U1", "N3", 2, True),
    ]
    block = read(source, tmp_path)
    assert not block.rejects.num_rows
    rows = block.events["log_row"].to_pylist()
    assert rows == sorted(set(rows))
    shown = [(e["request_id"], e["item_id"], e["label_click"]) for e in block.events.to_pylist() if e["request_id"]]
    assert shown[:4] == [("1", "N3", True), ("1", "N4", False), ("2", "N3", False), ("2", "N5", True)]


def test_earlier_behaviours_may_come_newest_first_in_real_lists(tmp_path: Path) -> None:
    rows = [
        {"user": "a", "item": "x", "t": 1_600_000_000, "past": ["n2", "n1"], "age": "30", "price": 2.5},
        {"user": "a", "item": "y", "t": 1_600_000_001, "past": ["x", "n2", "n1"], "age": "30", "price": 3.5},
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = Mapping(
        files="log.jsonl",
        user="user",
        item="item",
        time={"column": "t", "unit": "s"},
        numbers=["price"],
        categories=["age"],
        transforms={"past": {"regex": "^n?(.+)$"}},
        history={"column": "past", "at": "2019-10-12", "newest_first": True},
    )
    events = [e for e in read(source, tmp_path).events.to_pylist() if e["num_price"] is None]
    assert [(e["item_id"], e["timestamp_ms"] - AT, e["cat_age"]) for e in events] == [
        ("1", 0, None), ("2", 1, None), ("1", 0, None), ("2", 1, None), ("x", 2, None),
    ]  # fmt: skip


def test_earlier_behaviours_that_are_not_before_their_row_are_rejects(tmp_path: Path) -> None:
    (tmp_path / "behaviors.tsv").write_text(MIND)
    source = mind(history={"column": "history", "separator": " ", "at": "2019-11-16", "labels": []})
    block = read(source, tmp_path)
    assert (
        block.rejects["reason"].to_pylist()
        == ["history: not before its row, give an earlier history.at than 2019-11-16"] * 2
    )
    assert [e["label_click"] for e in block.events.to_pylist() if not e["request_id"]] == [None] * 3


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"history": {"column": "history", "at": "2019-10-12"}}, "'history.labels' is missing; say which labels"),
        ({"history": {"column": "history", "at": "soon", "labels": []}}, "history.at is 'soon', which is no ISO 8601"),
        ({"history": {"column": "h", "at": "2019-10-12", "labels": ["buy"]}}, "history.labels has 'buy'"),
        ({"time": {"unit": "order"}}, "'history' dates earlier behaviours before the log, which needs clock times"),
        ({"history": {"colum": "h", "at": "2019-10-12"}}, "unknown key 'history.colum'; the nearest key is 'column'"),
    ],
)
def test_a_history_that_cannot_be_is_one_line(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        mind(**keys)


def test_a_history_needs_requests_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "behaviors.tsv").write_text(MIND)
    config = PrepareConfig(kind="search", behaviour="click", core=0, own=SearchConfig())
    with pytest.raises(
        UserError, match="'history', whose behaviours were never shown as results; use --kind retrieval"
    ):
        check(mind(), str(tmp_path), str(tmp_path / "out"), config)
    with pytest.raises(UserError, match="duplicates is keep, but 'history' comes again in each row"):
        check(mind(), str(tmp_path), str(tmp_path / "out"), PrepareConfig(duplicates="keep"))


def test_the_place_of_a_row_is_its_time(tmp_path: Path) -> None:
    (tmp_path / "log.1.csv").write_text("u,i\na,x\nb,y\n")
    (tmp_path / "log.2.csv").write_text("u,i\n\na,z\n,lost\na,x\n")
    source = plain(time={"unit": "order"}, files="log.*.csv")
    assert not source.info["clock"]
    assert source.origins["events"]["timestamp_ms"] == "the row's place"
    block = read(source, tmp_path)
    events = block.events.to_pylist()
    assert [(e["user_id"], e["item_id"]) for e in events] == [("a", "x"), ("b", "y"), ("a", "z"), ("a", "x")]
    times = [e["timestamp_ms"] for e in events]
    assert times == sorted(set(times))
    assert times[:2] == [0, 1]
    assert block.rejects["reason"].to_pylist() == ["u: missing"]


def test_a_label_has_no_time_where_the_log_has_none() -> None:
    with pytest.raises(ValueError, match=r"labels.buy.time needs times, but those of the log are the order of lines"):
        plain(time={"unit": "order"}, labels={"buy": {"column": "b", "time": "at"}})
    with pytest.raises(ValueError, match=r"'time.column' is missing; add such as 'column: time_ms'"):
        plain(time={"unit": "s"})


RATINGS = "1::Amélie (2001)::5::978300760\n2::a:b:::3::978302109\n3::short\n4::Heat::4::978301968\n"


def movies(**keys: Any) -> Mapping:
    return Mapping(
        **{
            "files": "*.dat",
            "format": "csv",
            "delimiter": "::",
            "encoding": "latin-1",
            "header": ["u", "i", "rating", "t"],
            "user": "u",
            "item": "i",
            "time": {"column": "t", "unit": "s"},
            **keys,
        }
    )


def test_a_delimiter_of_several_characters(tmp_path: Path) -> None:
    (tmp_path / "ratings.dat").write_bytes(RATINGS.encode("latin-1"))
    block = read(movies(), tmp_path)
    assert block.events["item_id"].to_pylist() == ["Amélie (2001)", "a:b", "Heat"]
    (reject,) = block.rejects.to_pylist()
    assert (reject["row"], reject["reason"]) == (2, "row: 2 columns, not 4")
    assert json.loads(reject["source"]) == {"line": "3::short"}


@settings(max_examples=200)
@given(
    text=st.text(alphabet="a:\n|", max_size=40), delimiter=st.sampled_from(["::", "|:|", "aa"]), size=st.integers(1, 9)
)
def test_a_delimiter_may_be_cut_by_the_blocks_in_which_a_file_comes(text: str, delimiter: str, size: int) -> None:
    stream, made = _Joined(io.BytesIO(text.encode()), delimiter), b""
    while block := stream.read_buffer(size).to_pybytes():
        made += block
    assert made.decode() == text.replace(delimiter, UNIT)


def test_a_delimiter_of_several_characters_in_pieces_and_with_a_header(tmp_path: Path) -> None:
    text = "u::i::t\n" + "".join(f"{n}::x{n}::{n + 1}\n" for n in range(10))
    (tmp_path / "log.csv").write_text(text)
    source = plain(delimiter="::")
    assert read(source, tmp_path).events["item_id"].to_pylist() == [f"x{n}" for n in range(10)]
    cut = text.index("5::")
    blocks = source.read_events(str(tmp_path), "log.csv", None, Piece(cut, len(text), 5))
    assert [item for block in blocks for item in block.events["item_id"].to_pylist()] == [f"x{n}" for n in range(5, 10)]
    with pytest.raises(UserError, match=r"its header is one column, 'u::i::t'; set 'delimiter: \"::\"'"):
        read(plain(), tmp_path)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"delimiter": "::", "quote": True}, "'quote' is true, but a delimiter such as '::' knows no quotes"),
        ({"delimiter": ""}, "'delimiter' is ''; it is one ASCII character"),
        ({"delimiter": "—"}, "'delimiter' is '—'; it is one ASCII character"),
    ],
)
def test_a_delimiter_that_cannot_be_is_one_line(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        movies(**keys)
