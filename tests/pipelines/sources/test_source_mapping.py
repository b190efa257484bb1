"""The mapping source: every format and unit gives the same events; rows that break the schema are rejects."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import pickle
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipelines.data.sources import readers
from pipelines.data.sources.base import Block, Metadata, Source
from pipelines.data.sources.mapping import Mapping
from pipelines.data.sources.normalise import NO_ID

from models.tables import UserError
from pipelines.data.prepare_config import PrepareConfig
from pipelines.data.settings import check, read_config
from pipelines.data.tables import REJECTS

Row = dict[str, Any]

ROWS: list[Row] = [
    {"u": "a", "i": "x", "t": 1_588_687_728_923, "click": 1, "secs": 1.5, "tab": "home", "q": "red shoes", "p": 0},
    {"u": "b", "i": "y,\n\"z\"", "t": 315_532_800_000, "click": 0, "secs": 0.0, "tab": "ünï", "q": None, "p": 7},
    {"u": "a", "i": "007", "t": 4_102_444_799_999, "click": 1, "secs": None, "tab": None, "q": "x", "p": 2},
]  # fmt: skip


def full(files: str = "log.*", **changes: Any) -> Mapping:
    return Mapping(
        **{
            "files": files,
            "user": "u",
            "item": "i",
            "time": {"column": "t", "unit": "ms"},
            "query": "q",
            "position": "p",
            "labels": {"click": {"column": "click"}, "secs": {"column": "secs", "type": "float32"}},
            "numbers": ["secs"],
            "categories": {"tab": "tab"},
            **changes,
        }
    )


def plain(**changes: Any) -> Mapping:
    return Mapping(**{"files": "log.*", "user": "u", "item": "i", "time": {"column": "t", "unit": "order"}, **changes})


def to_csv(rows: list[Row], delimiter: str = ",") -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def to_jsonl(rows: list[Row]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def to_parquet(rows: list[Row]) -> bytes:
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), buffer)
    return buffer.getvalue().to_pybytes()


def read(source: Source, folder: Path) -> Block:
    """All of a source's files as one block, each block checked on the way."""
    events, rejects, rows_read = [], [], 0
    source = pickle.loads(pickle.dumps(source))
    for file in source.event_files(str(folder)):
        numbers: list[int] = []
        for block in source.read_events(str(folder), file):
            assert block.events.schema == source.block_schema
            assert block.rejects.schema == REJECTS
            assert block.rows_read == block.events.num_rows + block.rejects.num_rows
            for name in source.absent:
                assert set(block.events[name].to_pylist()) <= {{"request_id": "", "position": 0}.get(name)}
            numbers += block.events["log_row"].to_pylist()
            events.append(block.events)
            rejects.append(block.rejects)
            rows_read += block.rows_read
        assert numbers == sorted(set(numbers))
    return Block(pa.concat_tables(events), pa.concat_tables(rejects), rows_read)


def reasons(block: Block | Metadata) -> list[str]:
    return block.rejects["reason"].to_pylist()


FORMATS: dict[str, Callable[[list[Row]], bytes]] = {
    "log.csv": to_csv,
    "log.csv.gz": lambda rows: gzip.compress(to_csv(rows)),
    "log.csv.bz2": lambda rows: bz2.compress(to_csv(rows)),
    "log.tsv": lambda rows: to_csv(rows, "\t"),
    "log.jsonl": to_jsonl,
    "log.jsonl.gz": lambda rows: gzip.compress(to_jsonl(rows)),
    "log.parquet": to_parquet,
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_events(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FORMATS[name](ROWS))
    block = read(full(), tmp_path)
    assert block.rejects.num_rows == 0
    assert block.events.to_pylist() == [
        {
            "user_id": row["u"],
            "request_id": "",
            "timestamp_ms": row["t"],
            "item_id": row["i"],
            "query": row["q"],
            "position": row["p"],
            "label_click": bool(row["click"]),
            "label_secs": row["secs"],
            "num_secs": row["secs"],
            "cat_tab": row["tab"],
            "log_row": number,
        }
        for number, row in enumerate(ROWS)
    ]


ids = (
    st.text(st.characters(codec="utf-8", exclude_categories=["C"]), max_size=8)
    .map(str.strip)
    .filter(lambda name: name not in ("", *NO_ID))
)
rows = st.lists(
    st.fixed_dictionaries(
        {
            "u": ids,
            "i": ids,
            "t": st.integers(315_532_800_000, 4_102_444_799_999),
            "click": st.sampled_from([0, 1]),
            "secs": st.one_of(st.none(), st.floats(0, 1e6, width=32)),
            "tab": st.one_of(st.none(), ids),
            "q": st.one_of(st.none(), ids),
            "p": st.integers(0, 2**31 - 1),
        }
    ),
    min_size=1,
    max_size=20,
)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=rows)
def test_events_round_trip_through_every_format(tmp_path: Path, rows: list[Row]) -> None:
    read_back = {}
    for name in ("log.csv", "log.jsonl", "log.parquet"):
        content = FORMATS[name](rows)
        (tmp_path / name).write_bytes(content)
        read_back[name] = read(full(name), tmp_path)
        assert read_back[name].rejects.num_rows == 0
    for block in read_back.values():
        events = block.events.to_pylist()
        assert [(e["user_id"], e["item_id"], e["timestamp_ms"]) for e in events] == [
            (r["u"], r["i"], r["t"]) for r in rows
        ]
        assert [e["num_secs"] for e in events] == [r["secs"] for r in rows]
        assert [(e["query"], e["cat_tab"]) for e in events] == [(r["q"], r["tab"]) for r in rows]


MOMENT = 1_588_687_728_923


@pytest.mark.parametrize(
    ("unit", "raw", "expected"),
    [
        ("s", "1588687728", 1_588_687_728_000),
        ("ms", "1588687728923", MOMENT),
        ("us", "1588687728923999", MOMENT),
        ("ns", "1588687728923999999", MOMENT),
        ("order", "9007199254740993", 9_007_199_254_740_993),  # 2**53 + 1: no float holds it
        ("iso", "2020-05-05T14:08:48.923Z", MOMENT),
        ("iso", "2020-05-05 14:08:48.923", MOMENT),
        ("iso", "2020-05-05T16:08:48.923+02:00", MOMENT),
        ("iso", "2020-05-05", 1_588_636_800_000),
    ],
)
@pytest.mark.parametrize("name", ["log.csv", "log.jsonl"])
def test_every_unit_of_time(tmp_path: Path, name: str, unit: str, raw: str, expected: int) -> None:
    value = raw if unit == "iso" or name == "log.csv" else int(raw)
    (tmp_path / name).write_bytes(FORMATS[name]([{"u": "a", "i": "x", "t": value}]))
    source = plain(time={"column": "t", "unit": unit})
    assert read(source, tmp_path).events["timestamp_ms"].to_pylist() == [expected]
    assert source.info["clock"] == (unit != "order")


@pytest.mark.parametrize("kind", [pa.timestamp("us", "UTC"), pa.timestamp("ms"), pa.timestamp("ns", "Asia/Tokyo")])
def test_a_typed_parquet_timestamp_knows_its_unit(tmp_path: Path, kind: pa.DataType) -> None:
    moment = datetime(2020, 5, 5, 14, 8, 48, 923000, UTC)
    times = pa.array([moment], pa.timestamp("us", "UTC")).cast(kind)
    pq.write_table(pa.table({"u": ["a"], "i": [5], "t": times}), tmp_path / "log.parquet")
    block = read(plain(time={"column": "t", "unit": "iso"}), tmp_path)
    assert block.events["timestamp_ms"].to_pylist() == [MOMENT]
    assert block.events["item_id"].to_pylist() == ["5"]


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"u": ""}, "u: missing"),
        ({"i": None}, "i: missing"),
        ({"t": None}, "t: missing"),
        ({"t": -5}, "t: negative"),
        ({"t": 1.5}, "t: not an integer"),
        ({"t": 1588687728923.0}, "t: not an integer"),
        ({"t": "1e9"}, "t: not an integer"),
        ({"t": "yesterday"}, "t: not an integer"),
        ({"t": 99999999999999999999}, "t: not an integer"),
        ({"t": 4_102_444_800_000}, "t: after the year 2099, check time.unit"),
        ({"t": 315_532_799_999}, "t: before 1980, check time.unit"),
        ({"u": "  "}, "u: missing"),
        ({"i": " \t"}, "i: missing"),
        ({"u": "nan"}, "u: missing, written as text such as nan or null"),
        ({"i": "NULL"}, "i: missing, written as text such as nan or null"),
        ({"p": -1}, "p: negative"),
        ({"p": 2**31}, "p: more than int32 holds"),
        ({"click": "maybe"}, 'click: not a bool, compare it as in true_when: "> 0"'),
        ({"click": 2}, 'click: not a bool, compare it as in true_when: "> 0"'),
        ({"secs": "fast"}, "secs: not a number"),
        ({"secs": "inf"}, "secs: not finite"),
    ],
)
def test_a_row_that_breaks_the_schema_is_rejected_with_its_reason(
    tmp_path: Path, name: str, change: Row, reason: str
) -> None:
    bad = ROWS[0] | change
    (tmp_path / name).write_bytes(FORMATS[name]([ROWS[0], bad, ROWS[2]]))
    block = read(full(), tmp_path)
    assert block.events["item_id"].to_pylist() == ["x", "007"]
    assert block.events["log_row"].to_pylist() == [0, 2]
    (reject,) = block.rejects.to_pylist()
    assert (reject["file"], reject["row"], reject["reason"]) == (name, 1, reason)
    kept = json.loads(reject["source"])
    (key,) = change
    assert str(kept[key] or "") == str(change[key] if change[key] is not None else "")


def test_a_json_number_with_an_exponent_is_not_an_integer(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"u": "a", "i": "x", "t": 1e9}\n{"u": "a", "i": "x", "t":-2.5E+3}\n')
    block = read(plain(), tmp_path)
    assert reasons(block) == ["t: not an integer"] * 2
    assert [json.loads(r)["t"] for r in block.rejects["source"].to_pylist()] == ["1e9", "-2.5E+3"]


@pytest.mark.parametrize(
    ("value", "unit", "reason"),
    [
        ("1588687728923", "s", "after the year 2099"),
        ("9999-12-31", "iso", "after the year 2099"),
        ("4102444800000000", "us", "after the year 2099"),
        ("1588687728", "ms", "before 1980"),
        ("1588687728923", "us", "before 1980"),
        ("1588687728923", "ns", "before 1980"),
        ("1970-01-19T09:18:07", "iso", "before 1980"),
    ],
)
def test_a_wrong_unit_is_told_from_the_time(tmp_path: Path, value: str, unit: str, reason: str) -> None:
    (tmp_path / "log.csv").write_text(f"u,i,t\na,x,{value}\n")
    found = read(plain(time={"column": "t", "unit": unit}), tmp_path)
    assert reasons(found) == [f"t: {reason}, check time.unit"]


@pytest.mark.parametrize(
    ("rule", "values", "expected"),
    [
        ("> 0", ["0", "3", "0.5", "", "-1"], [False, True, True, None, False]),
        (">= 4", ["3.9", "4", "5.0"], [False, True, True]),
        ("< 2", ["1", "2"], [True, False]),
        ("<= 2", ["2", "3"], [True, False]),
        ("!= 0", ["0", "1"], [False, True]),
        ("== buy", ["buy", "view", ""], [True, False, None]),
        (None, ["1", "0", "TRUE", "false", "1.0", ""], [True, False, True, False, True, None]),
    ],
)
def test_bool_labels_follow_their_rule(tmp_path: Path, rule: str | None, values: list[str], expected: list) -> None:
    (tmp_path / "log.csv").write_bytes(to_csv([{"u": "a", "i": "x", "t": 1, "v": value} for value in values]))
    block = read(plain(labels={"done": {"column": "v", "true_when": rule}}), tmp_path)
    assert block.events["label_done"].to_pylist() == expected


SEARCHES = [
    {"u": "a", "s": "1", "t": 10, "q": "lamp", "shown": ["x", "y", "z"], "clicked": ["z", "x"], "dwell": [1, 2, 3]},
    {"u": "b", "s": "2", "t": 20, "q": "mug", "shown": ["x"], "clicked": [], "dwell": [4]},
]


def searches(separator: str | None) -> Mapping:
    return plain(
        request="s",
        query="q",
        item="shown",
        explode={"columns": ["shown", "dwell"], "separator": separator},
        labels={"click": {"member_of": "clicked"}, "dwell": {"column": "dwell", "type": "float32"}},
    )


def joined(rows: list[Row], separator: str) -> list[Row]:
    return [{k: separator.join(map(str, v)) if isinstance(v, list) else v for k, v in row.items()} for row in rows]


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl", "log.parquet"])
def test_lists_become_impressions(tmp_path: Path, name: str) -> None:
    separator = "|" if name == "log.csv" else None
    rows = joined(SEARCHES, "|") if separator else SEARCHES
    (tmp_path / name).write_bytes(FORMATS[name](rows))
    events = read(searches(separator), tmp_path).events
    assert events.select(
        ["request_id", "query", "item_id", "position", "label_click", "label_dwell", "log_row"]
    ).to_pylist() == [
        {"request_id": s, "query": q, "item_id": i, "position": p, "label_click": c, "label_dwell": d, "log_row": n}
        for n, (s, q, i, p, c, d) in enumerate(
            [
                ("1", "lamp", "x", 0, True, 1.0),
                ("1", "lamp", "y", 1, False, 2.0),
                ("1", "lamp", "z", 2, True, 3.0),
                ("2", "mug", "x", 0, False, 4.0),
            ]
        )
    ]


def test_lists_of_integers_match_lists_of_integers(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"u": 1, "t": 2, "shown": [10, 11], "clicked": [11]}\n')
    source = plain(item="shown", explode={"columns": ["shown"]}, labels={"click": {"member_of": "clicked"}})
    events = read(source, tmp_path).events
    assert events["item_id"].to_pylist() == ["10", "11"]
    assert events["label_click"].to_pylist() == [False, True]
    assert len(set(events["request_id"].to_pylist())) == 1  # a row is a request


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl", "log.parquet"])
def test_a_row_is_the_same_request_in_every_file(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its place; another search of the same user and time is another request."""
    searches = [{"u": 1, "t": 2, "q": q, "shown": [10, 11]} for q in ("lamp", None, "mug", "lámp")]
    separator = "|" if name == "log.csv" else None
    rows = joined(searches, "|") if separator else searches
    source = plain(item="shown", query="q", explode={"columns": ["shown"], "separator": separator})
    found = []
    for place, part in (("a", rows), ("b", rows[::-1]), ("c", rows[1:3])):
        (tmp_path / place).mkdir()
        (tmp_path / place / name).write_bytes(FORMATS[name](part))
        events = read(source, tmp_path / place).events
        requests = dict(zip(events["query"].to_pylist(), events["request_id"].to_pylist(), strict=True))
        assert len(set(requests.values())) == len(requests)
        found.append(requests)
        monkeypatch.setattr(readers, "TEXT_BLOCK", 40)
        monkeypatch.setattr(readers, "PARQUET_BLOCK", 1)
    assert found[0] == found[1]
    assert found[2].items() <= found[0].items()
    if name == "log.jsonl":
        assert found[0]["lamp"] == "4d3fc27db04639c1"  # as in tables that were made before


@pytest.mark.parametrize("name", ["log.jsonl", "log.parquet"])
def test_integer_items_are_found_in_lists(tmp_path: Path, name: str) -> None:
    rows = [{"u": 1, "t": 2, "i": item, "clicked": [11, 12], "bought": [12]} for item in (10, 11, 12)]
    (tmp_path / name).write_bytes(FORMATS[name](rows))
    source = plain(item="i", labels={"click": {"member_of": "clicked"}, "buy": {"member_of": "bought"}})
    events = read(source, tmp_path).events
    assert events["label_click"].to_pylist() == [False, True, True]
    assert events["label_buy"].to_pylist() == [False, False, True]


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl", "log.parquet"])
def test_ids_are_bare_of_white_space_wherever_they_stand(tmp_path: Path, name: str) -> None:
    """In events, in lists, in what lists name, and in the files of items and users."""
    separator = "|" if name == "log.csv" else None
    rows: list[Row] = [{"u": " a ", "t": 1, "shown": [" x", "y ", "z"], "clicked": ["x ", "y"]}]
    (tmp_path / name).write_bytes(FORMATS[name](joined(rows, "|") if separator else rows))
    (tmp_path / "items.csv").write_text("id,title\nx ,Mug\n  ,None\n")
    (tmp_path / "users.csv").write_text("id,age\n a,70\n  ,7\n")
    source = plain(
        files=name,
        item="shown",
        explode={"columns": ["shown"], "separator": separator},
        labels={"click": {"member_of": "clicked"}},
        items={"files": "items.csv", "item": "id", "texts": ["title"]},
        users={"files": "users.csv", "user": "id", "attributes": ["age"]},
    )
    events = read(source, tmp_path).events
    assert events["user_id"].to_pylist() == ["a"] * 3
    assert events["item_id"].to_pylist() == ["x", "y", "z"]
    assert events["label_click"].to_pylist() == [True, True, False]
    assert events["cat_age"].to_pylist() == ["70"] * 3
    (items,) = source.read_items(str(tmp_path), "items.csv")
    assert items.rows["item_id"].to_pylist() == ["x"]
    users = source.read_users(str(tmp_path))
    assert users is not None
    assert (reasons(items), reasons(users)) == (["id: missing"], ["id: missing"])


def test_rows_without_impressions_or_with_unequal_lists_are_rejected(tmp_path: Path) -> None:
    odd = [SEARCHES[0] | {"dwell": [1]}, SEARCHES[0] | {"shown": [], "dwell": []}, SEARCHES[1]]
    (tmp_path / "log.jsonl").write_bytes(to_jsonl(odd))
    block = read(searches(None), tmp_path)
    assert block.events["item_id"].to_pylist() == ["x"]
    assert block.rejects["row"].to_pylist() == [0, 1]
    assert reasons(block) == ["shown: lists of unequal length", "shown: missing"]


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl", "log.parquet"])
def test_events_do_not_depend_on_the_size_of_blocks(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"u": f"u{n % 7}", "i": f"i{n}", "t": -1 if n % 50 == 3 else n, "shown": ["x", f"i{n}"], "clicked": ["x"]}
        for n in range(500)
    ]
    separator = " " if name == "log.csv" else None
    (tmp_path / name).write_bytes(FORMATS[name](joined(rows, " ") if separator else rows))
    source = plain(
        item="shown",
        explode={"columns": ["shown"], "separator": separator},
        labels={"click": {"member_of": "clicked"}},
    )
    whole = read(source, tmp_path)
    monkeypatch.setattr(readers, "TEXT_BLOCK", 700)
    monkeypatch.setattr(readers, "PARQUET_BLOCK", 17)
    monkeypatch.setattr("pipelines.data.sources.normalise.EXPLODED_ROWS", 9)
    small = list(source.read_events(str(tmp_path), name))
    assert len(small) > 20
    assert pa.concat_tables([b.events for b in small]).to_pylist() == whole.events.to_pylist()
    assert pa.concat_tables([b.rejects for b in small]).to_pylist() == whole.rejects.to_pylist()
    assert whole.rejects.num_rows == 20
    assert sum(b.rows_read for b in small) == whole.rows_read == 1000


def test_lines_that_are_no_rows_are_rejected_and_counted(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("u,i,t\na,x,1\na,x\nb,y,2\nc,z,3,4\n\nd,w,-1\n")
    block = read(plain(), tmp_path)
    assert block.events["item_id"].to_pylist() == ["x", "y"]
    assert dict(zip(block.rejects["row"].to_pylist(), reasons(block), strict=True)) == {
        1: "row: 2 columns, not 3",
        3: "row: 4 columns, not 3",
        4: "t: negative",
    }
    lines = [json.loads(source).get("line") for source in block.rejects["source"].to_pylist()]
    assert lines[:2] == ["a,x", "c,z,3,4"]


def test_broken_json_lines_are_rejected_and_counted(tmp_path: Path) -> None:
    good = '{"u": "a", "i": "x", "t": 1}\n'
    (tmp_path / "log.jsonl").write_text(good + "oops\n" + good + "\n" + "[1]\n" + '{"u": "a", "i": "x", "t": -1}\n')
    block = read(plain(), tmp_path)
    assert block.events.num_rows == 2
    assert sorted(block.rejects["row"].to_pylist()) == [1, 3, 4]


def test_a_csv_without_a_header_takes_its_names_from_the_mapping(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("a,x,1\nb,y\nc,z,-3\n")
    block = read(plain(header=["u", "i", "t"]), tmp_path)
    assert block.events["user_id"].to_pylist() == ["a"]
    assert block.rejects["row"].to_pylist() == [1, 2]


def test_several_files_and_folders_are_read_in_order(tmp_path: Path) -> None:
    for day in ("2024-02", "2024-01"):
        (tmp_path / day).mkdir()
        (tmp_path / day / "log.csv").write_text(f"u,i,t\n{day},x,1\n")
    (tmp_path / "_SUCCESS").write_text("")
    source = plain(files="*log.csv")
    assert source.event_files(str(tmp_path)) == ["2024-01/log.csv", "2024-02/log.csv"]
    assert read(source, tmp_path).events["user_id"].to_pylist() == ["2024-01", "2024-02"]


def test_items_are_text_and_lists_are_joined(tmp_path: Path) -> None:
    items = {
        "files": "items.*",
        "item": "id",
        "texts": {"title": "name", "tags": "tags"},
        "attributes": ["brand"],
        "lists": ["tags"],
    }
    rows = [
        {"id": 1, "name": " Mug ", "tags": ["red", None, "big"], "brand": 7},
        {"id": 2, "name": "", "tags": [], "brand": None},
        {"id": None, "name": "nobody", "tags": ["x"], "brand": 1},
    ]
    (tmp_path / "items.jsonl").write_bytes(to_jsonl(rows))
    source = plain(items=items)
    assert source.items_columns == (["title", "tags"], ["brand"])
    expected = [
        {"item_id": "1", "text_title": "Mug", "text_tags": "red big", "cat_brand": "7"},
        {"item_id": "2", "text_title": None, "text_tags": None, "cat_brand": None},
    ]
    assert source.item_files(str(tmp_path)) == ["items.jsonl"]
    (found,) = source.read_items(str(tmp_path), "items.jsonl")
    assert found.rows.to_pylist() == expected
    assert reasons(found) == ["id: missing"]
    assert found.rows_read == 3
    pl.DataFrame(rows).write_parquet(tmp_path / "items.parquet")
    (again,) = source.read_items(str(tmp_path), "items.parquet")
    assert again.rows.to_pylist() == expected


LATE_ROWS: list[Row] = [
    {"u": "a", "i": "x", "t": 1_588_687_728_923, "click": 1, "at": 1_588_687_729},
    {"u": "a", "i": "y", "t": 1_588_687_728_923, "click": 0, "at": None},
    {"u": "b", "i": "x", "t": 1_588_687_728_923, "click": 0, "at": 0},  # a time of no click says nothing
]  # fmt: skip


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl", "log.parquet"])
def test_a_label_may_have_a_time_of_its_own(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FORMATS[name](LATE_ROWS))
    time = {"column": "t", "unit": "ms"}
    source = plain(time=time, labels={"click": {"column": "click", "time": {"column": "at", "unit": "s"}}})
    assert source.info["known"] == {"click": {"column": "at", "unit": "s"}}
    block = read(source, tmp_path)
    assert reasons(block) == []
    assert block.events["known_click"].to_pylist() == [1_588_687_729_000, None, None]


def test_a_label_time_has_the_unit_of_the_log_unless_it_has_its_own(tmp_path: Path) -> None:
    rows = [{"u": "a", "i": "x", "t": 5, "click": 1, "at": 7}, {"u": "a", "i": "x", "t": 6, "click": 1, "at": 6}]
    (tmp_path / "log.csv").write_bytes(to_csv(rows))
    block = read(plain(labels={"click": {"column": "click", "time": "at"}}), tmp_path)
    assert block.events["known_click"].to_pylist() == [7, 6]


def test_a_set_label_without_a_time_or_before_its_event_is_a_reject(tmp_path: Path) -> None:
    rows = [
        {"u": "a", "i": "x", "t": 5, "secs": secs, "at": at}
        for secs, at in ((1.0, 4), (1.0, None), (None, 3), (2.0, 5))
    ]
    (tmp_path / "log.jsonl").write_bytes(to_jsonl(rows))
    labels = {"secs": {"column": "secs", "type": "float32", "time": "at"}}
    block = read(plain(labels=labels), tmp_path)
    assert reasons(block) == ["at: before its event, check labels.secs.time", "at: missing (time of the label secs)"]
    assert block.events["known_secs"].to_pylist() == [None, 5]


def test_a_label_may_be_known_after_a_delay(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_bytes(to_csv(LATE_ROWS))
    labels = {"click": {"column": "click", "delay_minutes": 1.5}}
    block = read(plain(time={"column": "t", "unit": "ms"}, labels=labels), tmp_path)
    assert block.events["known_click"].to_pylist() == [1_588_687_728_923 + 90_000, None, None]


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ({"time": "at", "delay_minutes": 5}, "both 'time' and 'delay_minutes'"),
        ({"delay_minutes": 0}, "delay_minutes is 0"),
        ({"delay_minutes": 5}, "unit is order"),
        ({"time": {"column": "at", "unit": "ms"}}, "the log's time has order"),
        ({"time": 7}, "name its column"),
        ({"time": {"colum": "at"}}, "nearest key is 'column'"),
    ],
)
def test_label_times_that_cannot_be(label: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plain(labels={"click": {"column": "click", **label}})


def test_a_log_without_label_times_keeps_its_fingerprint() -> None:
    source = plain(labels={"click": {"column": "click"}})
    assert source.config["labels"]["click"] == {"column": "click"}
    assert "known" not in source.info
    assert not [name for name in source.schema.names if name.startswith("known_")]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            read_config({"kind": "actions", "core": 0}),
            "label 'click' is known later than its event.*kind search or retrieval",
        ),
        (PrepareConfig(core=0, behaviour="click", ties="log_order"), "ties is log_order, .*use --ties strict"),
    ],
)
def test_label_times_are_refused_where_they_would_not_be_kept(
    tmp_path: Path, config: PrepareConfig, words: str
) -> None:
    (tmp_path / "log.csv").write_bytes(to_csv(LATE_ROWS))
    labels = {"click": {"column": "click", "delay_minutes": 60}}
    source = plain(time={"column": "t", "unit": "ms"}, labels=labels)
    with pytest.raises(UserError, match=words):
        check(source, str(tmp_path), str(tmp_path / "out"), config)
