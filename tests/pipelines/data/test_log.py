"""Mapping files: SQL gives events, invalid rows are rejected, and no row is lost."""

from __future__ import annotations

import json
import math
import pickle
import random
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.item_ids import NULL_WORDS, clean_id
from models.storage.tables import UserError
from pipelines.data.reading import read as reading
from pipelines.data.reading.log import LOG_ROW, Log, load_source, parse_log
from pipelines.data.reading.read import split_file
from pipelines.data.reading.rows import as_text, clean_ids
from pipelines.data.schemas import REJECTS

ORDER = {"column": "t", "unit": "order"}
CLOCK = {"column": "t", "unit": "ms"}
MOMENT = 1_700_000_000_000
Row = dict[str, Any]


def plain(**keys: Any) -> Log:
    made = {"files": "log*", "user": "u", "item": "i", "time": ORDER, **keys}
    return parse_log({key: value for key, value in made.items() if value is not None})


def read(
    log: Log, folder: Path, size: int | None = None
) -> tuple[list[Row], list[Row]]:
    """Read events and rejects of all files, and check that no row is lost."""
    log, events, rejects = pickle.loads(pickle.dumps(log)), [], []
    users = log.read_users(str(folder), {})
    for number, file in enumerate(log.event_files(str(folder))):
        for piece in split_file(str(folder / file), log, size) if size else [None]:
            places: list[int] = []
            for block in log.read_events(
                str(folder), file, users.rows if users else None, piece, number
            ):
                assert block.rows.schema == log.schema.append(LOG_ROW)
                assert block.rejects.schema == REJECTS
                assert block.rows_read == block.rows.num_rows + block.rejects.num_rows
                places += block.rows["log_row"].to_pylist()
                events += block.rows.drop_columns("log_row").to_pylist()
                rejects += block.rejects.to_pylist()
            assert places == sorted(set(places))
    return events, rejects


def of(found: Sequence[Row], *names: str) -> list[tuple]:
    return [tuple(row[name] for name in names) for row in found]


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write JSON lines, CSV or Parquet by the suffix."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        table = pl.DataFrame(rows, infer_schema_length=None)
        table.write_csv(path) if path.suffix == ".csv" else table.write_parquet(
            path, row_group_size=64
        )


def made(
    folder: Path, rows: Sequence[Row], name: str = "log.csv", **keys: Any
) -> tuple[list[Row], list[Row]]:
    """Read events and rejects of rows, completed by user, item and time."""
    write(
        folder / name,
        [{"u": "a", "i": f"i{n}", "t": n, **row} for n, row in enumerate(rows)],
    )
    return read(plain(**keys), folder)


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl", "log.parquet"])
def test_every_format_gives_the_same_events(tmp_path: Path, name: str) -> None:
    rows = [
        {
            "u": " a ",
            "i": 'y,\n"z"',
            "t": MOMENT,
            "click": 1,
            "secs": 1.5,
            "tab": "home",
            "q": "red shoes",
            "p": 0,
        },
        {
            "u": "b",
            "i": "007",
            "t": MOMENT + 1,
            "click": 0,
            "secs": None,
            "tab": None,
            "q": None,
            "p": 7,
        },
    ]
    labels = {
        "click": "click",
        "secs": {"column": "secs", "type": "float32", "range": [0, 2]},
    }
    keys = {
        "time": CLOCK,
        "query": "q",
        "position": "p",
        "numbers": ["secs"],
        "categories": ["tab"],
        "labels": labels,
    }
    events, rejects = made(tmp_path, rows, name, request="q || '-' || tab", **keys)
    expected = {
        "user_id": "a",
        "request_id": "red shoes-home",
        "timestamp_ms": MOMENT,
        "item_id": 'y,\n"z"',
    }
    expected |= {
        "position": 0,
        "query": "red shoes",
        "label_click": True,
        "label_secs": 1.5,
        "num_secs": 1.5,
    }
    assert events == [expected | {"cat_tab": "home"}]
    assert of(rejects, "row", "reason") == [(1, "q || '-' || tab: missing")]
    assert json.loads(rejects[0]["source"])["i"] == "007"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"u": ""}, "u: missing"),
        ({"i": None}, "i: missing"),
        ({"i": "NULL"}, "i: missing, written as text such as nan"),
        ({"t": ""}, "t: missing"),
        ({"t": "soon"}, "t: not a number of ms"),
        ({"t": "5"}, "t: before 1980"),
        ({"p": "-1"}, "p: negative"),
        ({"p": str(2**31)}, "p: negative, or more than int32"),
        ({"p": "x"}, "p: missing or not an integer"),
        ({"click": "maybe"}, "click: not a bool"),
        ({"stars": "fast"}, "stars: not a number"),
        ({"stars": "12,50"}, "replace(stars, ',', '.')"),
        ({"stars": "inf"}, "stars: not finite"),
        ({"stars": "9"}, "stars: outside 0 to 5"),
        ({"cost": "x9"}, "cast(cost as double) * 2: a value that it cannot read"),
    ],
)
@pytest.mark.parametrize("name", ["log.csv", "log.jsonl"])
def test_a_row_that_breaks_the_schema_is_a_reject(
    tmp_path: Path, name: str, change: Row, reason: str
) -> None:
    good = {
        "u": "a",
        "i": "x",
        "t": str(MOMENT),
        "p": "1",
        "click": "true",
        "stars": " 4 ",
        "cost": "1.5",
    }
    labels = {
        "click": "click",
        "stars": {"column": "stars", "type": "float32", "range": [0, 5]},
    }
    keys = {
        "time": CLOCK,
        "position": "p",
        "numbers": {"cost": "cast(cost as double) * 2"},
        "labels": labels,
    }
    events, rejects = made(tmp_path, [good, good | change, good], name, **keys)
    assert len(events) == 2
    (reject,) = rejects
    assert (reject["file"], reject["row"]) == (name, 1)
    assert reason in reject["reason"]


@pytest.mark.parametrize(
    ("text", "values", "expected"),
    [
        ("cast(v as double) > 0", ["0", "3", None, "-1"], [False, True, None, False]),
        ("v = 'buy'", ["buy", "view", None], [True, False, None]),
        ("v in ('buy', 'cart')", ["buy", "view"], [True, False]),
        ("try_cast(v as double) >= 4", ["3.9", "4", "x"], [False, True, None]),
        (
            "v",
            ["1", "0", "TRUE", "false", "1.0", None],
            [True, False, True, False, True, None],
        ),
        ("case when v = 'a' then 1 else 0 end", ["a", "b"], [True, False]),
    ],
)
def test_bool_labels(tmp_path: Path, text: str, values: list, expected: list) -> None:
    events, rejects = made(
        tmp_path, [{"v": value} for value in values], labels={"done": text}
    )
    assert of(events, "label_done") == [(value,) for value in expected]
    assert not rejects


def test_expressions_and_odd_names(tmp_path: Path) -> None:
    rows = [{"timestamp:float": 3, "my col": "A", "select": "B", "x": "7", "2d": "C"}]
    keys = {
        "item": "lpad(x, 4, '0')",
        "time": {"column": "timestamp:float", "unit": "order"},
    }
    keys["categories"] = {
        "a": '"my col"',
        "b": "select",
        "c": 'lower("2d") || x',
        "d": "my col",
    }
    ((*found,),) = (row.values() for row in made(tmp_path, rows, **keys)[0])
    assert {"0007", 3, "A", "B", "c7"} <= set(found)
    (tmp_path / "log.csv").write_text("u,i,t,i,\na,x,1,y,\n")
    assert of(
        read(plain(categories={"second": '"i.1"'}), tmp_path)[0],
        "item_id",
        "cat_second",
    ) == [("x", "y")]


SEARCHES = [
    {
        "u": "a",
        "t": 1,
        "q": "lamp",
        "shown": [10, 11, 12],
        "clicked": [12, 10],
        "dwell": [1, 2, 3],
    },
    {"u": "b", "t": 2, "q": "mug", "shown": [10], "clicked": [], "dwell": [4]},
    {
        "u": "c",
        "t": 3,
        "q": "cup",
        "shown": [10, 11],
        "clicked": [10],
        "dwell": [4],
    },  # unequal
    {"u": "d", "t": 4, "q": "pot", "shown": [], "clicked": [], "dwell": []},
    {"u": "e", "t": 5, "q": "jug", "shown": None, "clicked": None, "dwell": None},
    {
        "u": "f",
        "t": 6,
        "q": "jar",
        "shown": [13, None],
        "clicked": [13],
        "dwell": [5, None],
    },
]


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl", "log.parquet"])
@pytest.mark.parametrize("block", [60, 8 << 20])
def test_lists_become_impressions(
    tmp_path: Path, name: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "BLOCK_BYTES", block if name == "log.csv" else 8 << 20)
    rows, shown, dwell, clicked = (
        SEARCHES,
        "shown",
        "dwell",
        "array_contains(clicked, shown)",
    )
    if name == "log.csv":

        def text(value: Any) -> Any:
            if isinstance(value, list):
                return "|".join("" if e is None else str(e) for e in value)
            return value

        rows = [{key: text(value) for key, value in row.items()} for row in rows]
        shown, dwell = "string_to_array(shown, '|')", "string_to_array(dwell, '|')"
        clicked = "array_contains(string_to_array(clicked, '|'), shown)"
    write(tmp_path / name, rows)
    labels = {"click": clicked, "dwell": {"column": "dwell", "type": "float32"}}
    keys = {
        "explode": {"shown": shown, "dwell": dwell},
        "item": "shown",
        "query": "q",
        "labels": labels,
    }
    events, rejects = read(plain(**keys), tmp_path)
    expected = [
        ("lamp", "10", 0, True, 1.0),
        ("lamp", "11", 1, False, 2.0),
        ("lamp", "12", 2, True, 3.0),
        ("mug", "10", 0, False, 4.0),
        ("jar", "13", 0, True, 5.0),
    ]
    found = of(events, "query", "item_id", "position", "label_click", "label_dwell")
    assert [(*row[:3], bool(row[3]), row[4]) for row in found] == expected
    requests = {row["query"]: row["request_id"] for row in events}
    assert len({row["request_id"] for row in events}) == len(requests) == 3
    reasons = {json.loads(row["source"])["q"]: row["reason"] for row in rejects}
    assert reasons == dict.fromkeys(["pot", "jug", "jar"], "shown: missing") | {
        "cup": "shown: lists of unequal length"
    }


def test_a_row_is_the_same_request_in_every_file(tmp_path: Path) -> None:
    rows = [row for row in SEARCHES if row["q"] in ("lamp", "mug", "jar")] + [
        {**SEARCHES[0], "q": None}
    ]
    found = []
    for number, part in enumerate((rows, rows[::-1], rows[1:3])):
        write(tmp_path / f"log-{number}.jsonl", part)
        log = plain(files=f"log-{number}*", explode=["shown"], item="shown", query="q")
        found.append(
            {row["query"]: row["request_id"] for row in read(log, tmp_path)[0]}
        )
    assert len(set(found[0].values())) == 4
    assert all(each.items() <= found[0].items() for each in found)


def test_labels_that_are_known_later(tmp_path: Path) -> None:
    rows = [
        {"t": MOMENT, "click": 1, "secs": 2.5, "at": MOMENT + 5},
        {"t": MOMENT, "click": 0, "secs": None, "at": None},
        {"t": MOMENT, "click": 1, "secs": 1.0, "at": MOMENT - 1},
        {"t": MOMENT, "click": 1, "secs": 1.0, "at": 5},
        {"t": MOMENT, "click": 1, "secs": 1.0, "at": None},
    ]
    labels: Row = {"click": {"column": "click", "delay_minutes": 1.5}}
    labels["secs"] = {"column": "secs", "type": "float32", "time": "at"}
    events, rejects = made(tmp_path, rows, time=CLOCK, labels=labels)
    assert of(events, "known_click", "known_secs") == [
        (MOMENT + 90_000, MOMENT + 5),
        (None, None),
    ]
    words = ["at: before its event", "at: before 1980", "at: missing"]
    assert all(
        word in reason
        for word, (reason,) in zip(words, of(rejects, "reason"), strict=True)
    )


def test_earlier_behaviours_without_times(tmp_path: Path) -> None:
    rows = [
        {"u": "a", "i": "z", "t": "2019-11-01", "h": "x y", "click": 1},
        {"u": "a", "i": "w", "t": "2019-11-02", "h": "x y", "click": 0},
        {"u": "a", "i": "v", "t": "2019-11-03", "h": "x y z", "click": 1},
        {"u": "b", "i": "v", "t": "2019-11-03", "h": None, "click": 1},
        {"u": None, "i": "v", "t": "2019-11-03", "h": "lost", "click": 1},
        {"u": "c", "i": "v", "t": "2019-10-01", "h": "late", "click": 1},
    ]
    history = {
        "column": "string_to_array(h, ' ')",
        "at": "2019-10-12",
        "labels": ["click"],
    }
    events, rejects = made(
        tmp_path, rows, time={"column": "t"}, history=history, labels={"click": "click"}
    )
    at = 1_570_838_400_000
    found = of(events, "user_id", "item_id", "timestamp_ms", "label_click")
    earlier = [row for row in found if row[0] == "a" and row[2] < at + 1000]
    assert set(earlier) == {
        ("a", "x", at, True),
        ("a", "y", at + 1, True),
        ("a", "z", at + 2, True),
    }
    assert len([row for row in events if row["timestamp_ms"] > at + 1000]) == 4
    lost = sorted(reason for (reason,) in of(rejects, "reason"))
    assert "not before its row" in lost[0]
    assert lost[1:] == ["u: missing"]


@pytest.mark.parametrize("item", [None, "i"])
def test_sequences(tmp_path: Path, item: str | None) -> None:
    rows = [
        {"u": "a", "s": "x y x", "i": "z"},
        {"u": None, "s": "x y", "i": "z"},
        {"u": "b", "s": None, "i": "w"},
    ]
    rows.append({"u": "c", "s": "y", "i": None})
    write(tmp_path / "log.csv", rows)
    log = plain(time=None, item=item, sequence="string_to_array(s, ' ')")
    events, rejects = read(log, tmp_path)
    right = [
        ("a", "x", 0),
        ("a", "y", 1),
        ("a", "x", 2),
        *([("a", "z", 3), ("b", "w", 0)] if item else []),
        ("c", "y", 0),
    ]
    assert of(events, "user_id", "item_id", "timestamp_ms") == right
    assert {json.loads(row["source"])["u"] for row in rejects} == (
        {None} if item else {None, "b"}
    )
    assert not log.clock


def test_folders_are_columns_and_users_are_joined(tmp_path: Path) -> None:
    for country, users in (
        ("se", "ab"),
        ("d%20e", "c"),
        ("__HIVE_DEFAULT_PARTITION__", "d"),
    ):
        (folder := tmp_path / f"country={country}").mkdir()
        write(folder / "log.csv", [{"u": user, "i": "x", "t": 1} for user in users])
    write(
        tmp_path / "users.csv",
        [{"id": "a", "age": 30}, {"id": " a", "age": 99}, {"id": "c", "age": None}],
    )
    users = {"files": "users.csv", "user": "id", "attributes": ["age"]}
    log = plain(
        files="country=*/*.csv",
        categories=["country"],
        labels={"se": "country = 'se'"},
        users=users,
    )
    events, rejects = read(log, tmp_path)
    found = sorted(of(events, "user_id", "cat_country", "label_se", "cat_age"))
    assert found[:2] == [("a", "se", True, "30"), ("b", "se", True, None)]
    assert found[2:] == [("c", "d e", False, None), ("d", None, None, None)]
    assert not rejects


def test_items_and_features_that_change(tmp_path: Path) -> None:
    rows = [
        {"id": 1, "name": " Tea ", "tags": ["a", None, "b"], "price": 2.5},
        {"id": None, "name": "x"},
    ]
    write(tmp_path / "items.jsonl", rows)
    write(
        tmp_path / "stock.csv",
        [{"id": 1, "at": "2023-11-14", "left": 3}, {"id": 2, "at": "soon", "left": 4}],
    )
    items = {
        "files": "items.jsonl",
        "item": "id",
        "texts": {"title": "name", "tags": "tags"},
        "numbers": ["price"],
    }
    stock = {
        "files": "stock.csv",
        "item": "id",
        "time": {"column": "at"},
        "numbers": {"left": "left"},
    }
    log = plain(
        files="log.csv", time={"column": "t"}, items=items, as_of={"stock": stock}
    )
    assert log.items is not None
    (block,) = log.items.read(str(tmp_path), *log.item_files(str(tmp_path)))
    assert block.rows.schema == log.items.schema
    assert block.rows.to_pylist() == [
        {"item_id": "1", "text_title": "Tea", "text_tags": "a b", "num_price": 2.5}
    ]
    assert block.rejects["reason"].to_pylist() == ["id: missing"]
    (block,) = log.as_of["stock"].read(str(tmp_path), "stock.csv")
    assert block.rows.to_pylist() == [
        {"item_id": "1", "timestamp_ms": 1_699_920_000_000, "num_left": 3.0}
    ]
    assert block.rejects["reason"].to_pylist() == ["at: not an ISO 8601 time"]


ODD = st.text(max_size=6) | st.sampled_from(
    [
        *NULL_WORDS,
        *[
            "NaN",
            " None ",
            "12.0",
            "1e5",
            "1.5e3",
            "+7.0",
            "1.5",
            "007",
            "-0.0",
            "1e400",
            "\ufeff",
            "é",
            "ﬁ",
            "Å",
        ],
    ]
)


@settings(max_examples=200)
@given(
    st.lists(
        ODD
        | st.none()
        | st.from_regex(r"[+-]?\d{1,4}(\.\d{0,3})?([eE][+-]?\d{1,2})?", fullmatch=True)
    )
)
def test_ids_of_text(values: list[str | None]) -> None:
    expected = [None if value is None else clean_id(value) for value in values]
    assert clean_ids(pl.Series(values, dtype=pl.String)).to_list() == expected
    for made in expected:
        if made is not None:
            assert clean_id(made) == made
            assert unicodedata.is_normalized("NFC", made)
            assert made.strip(" \t\r\n\xa0\u200b\ufeff") == made != ""
            assert made.lower() not in NULL_WORDS


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1)),
    st.lists(st.floats() | st.integers(-(2**52), 2**52).map(float)),
)
def test_ids_of_numbers(integers: list[int], floats: list[float]) -> None:
    assert clean_ids(pl.Series(integers, dtype=pl.Int64)).to_list() == [
        str(value) for value in integers
    ]
    found = clean_ids(pl.Series(floats, dtype=pl.Float64)).to_list()
    for value, made in zip(floats, found, strict=True):
        if not math.isfinite(value):
            assert made is None
        elif abs(value) < 2**53 and value == int(value):
            assert made == str(int(value))
        else:
            assert made is not None
            assert float(made) == value


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl", "log.parquet"])
def test_events_do_not_depend_on_blocks_or_pieces(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(0)
    rows = [
        {
            "u": draw.choice(["a", "b ", "nan", ""]),
            "i": f"i{draw.randrange(9)}",
            "t": MOMENT + draw.randrange(10**6),
            "p": draw.choice(["1", "2", "-3", "x"]),
            "c": draw.choice(['say "x"', "plain", "a, b", None]),
        }
        for _ in range(700)
    ]
    write(tmp_path / name, rows)
    log = plain(time=CLOCK, position="p", categories=["c"])
    events, rejects = read(log, tmp_path)
    assert len(events) + len(rejects) == len(rows)
    for size in (900, 5000):
        found, lost = read(log, tmp_path, size)
        assert found == events
        assert of(lost, "reason", "source") == of(rejects, "reason", "source")
    for block in (500, 4000):
        monkeypatch.setattr(reading, "BLOCK_BYTES", block)
        assert read(log, tmp_path) == (events, rejects)


def test_the_order_of_rows_as_times(tmp_path: Path) -> None:
    for name in ("log-1.csv", "log-2.csv"):
        write(tmp_path / name, [{"u": "a", "i": f"{name}-{n}"} for n in range(300)])
    log = plain(time={"unit": "order"})
    for size in (None, 1 << 20):
        events, _ = read(log, tmp_path, size)
        times = [row["timestamp_ms"] for row in events]
        assert times == sorted(set(times))
        assert [row["item_id"] for row in events] == [
            f"log-{k}.csv-{n}" for k in (1, 2) for n in range(300)
        ]


@pytest.mark.parametrize(
    ("rows", "keys", "words"),
    [
        ([{"v": {"x": 1}}], {"user": "v"}, "name a field"),
        ([{"v": [1]}], {"item": "v"}, "explode lists"),
        (
            [{"v": "a b"}],
            {"explode": {"e": "v"}, "item": "e"},
            "not a list; split text",
        ),
        ([{"v": [1]}], {"labels": {"l": "v"}}, "not 0, 1, true or false"),
        ([{"v": [1]}], {"numbers": ["v"]}, "not numbers"),
        ([{"v": {"x": 1}}], {"categories": ["v"]}, "not text"),
        ([{"v": True}], {"time": {"column": "v", "unit": "s"}}, "not times as s"),
        ([{"v": "x"}], {"user": "usr"}, "no column 'usr'; the nearest is 'u'"),
        ([{"v": "x"}], {"numbers": {"n": "v * 2"}}, "cannot be evaluated"),
    ],
)
def test_types_that_a_column_cannot_have(
    tmp_path: Path, rows: list[Row], keys: Row, words: str
) -> None:
    with pytest.raises(UserError) as caught:
        made(tmp_path, rows, "log.jsonl", **keys)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_events_in_two_formats_are_not_read_twice(tmp_path: Path) -> None:
    write(tmp_path / "log.csv", [{"u": 1}])
    write(tmp_path / "log.jsonl", [{"u": 1}])
    with pytest.raises(UserError, match="may be the same"):
        plain().event_files(str(tmp_path))
    with pytest.raises(UserError, match="no event file"):
        plain(files="*.tsv").event_files(str(tmp_path))
    assert plain(items={"files": "*.jsonl", "item": "u", "texts": ["u"]}).event_files(
        str(tmp_path)
    ) == ["log.csv"]


WRONG: list[tuple[Row, str]] = [
    ({"usr": "u"}, "the nearest key is 'user'"),
    (
        {"time": {"column": "t", "unti": "ms"}},
        "'time.unti'; the nearest key is 'time.unit'",
    ),
    (
        {"labels": {"click": {"colum": "c"}}},
        "'labels.click.colum'; the nearest key is 'labels.click.column'",
    ),
    ({"item": None}, "'item' is missing"),
    ({"time": None}, "'time' is missing"),
    ({"user": None}, "'user' is missing"),
    ({"user": False}, "'user' is false"),
    ({"header": "u"}, "'header' is"),
    ({"delimiter": "—"}, "'delimiter' is '—'"),
    ({"format": "xml"}, "one of csv, jsonl, parquet, lines, keyed"),
    ({"quote": "''"}, "'quote'"),
    ({"escape": "é"}, "'escape'"),
    ({"encoding": "base64"}, "not a text encoding"),
    ({"numbers": {"n": "sum(a)"}}, "not an expression of one row"),
    (
        {"categories": {"n": "lead(a) over (order by t)"}},
        "not an expression of one row",
    ),
    ({"labels": {"l": "max(a) > 1"}}, "not an expression of one row"),
    ({"item": "lower(i"}, "not a SQL expression"),
    ({"user": "u ||"}, "not a SQL expression"),
    ({"categories": {"my tab": "tab"}}, "'my tab' in 'categories' is not a valid name"),
    ({"numbers": ["2d"]}, "is not a valid name"),
    ({"labels": {"a" * 260: "l"}}, "'labels' has 260 characters, too many"),
    ({"labels": {"like_at_5": "l"}}, "'like_at_5' in 'labels' ends like the cutoff"),
    ({"categories": {"a" * 81: "c"}}, "'categories' has 81 characters"),
    (
        {
            "users": {"files": "u", "user": "u", "attributes": ["x"]},
            "categories": ["x"],
        },
        "'x' is the name of two",
    ),
    ({"sequence": "s"}, "'sequence' reads lists without times"),
    ({"history": {"column": "h", "at": "2019-01-01"}}, "needs a log with clock times"),
    ({"time": CLOCK, "history": {"column": "h", "at": "once"}}, "not an ISO 8601 time"),
    (
        {
            "time": CLOCK,
            "labels": {"l": "l"},
            "history": {"column": "h", "at": "2019-01-01"},
        },
        "'history.labels' is",
    ),
    (
        {
            "time": CLOCK,
            "history": {"column": "h", "at": "2019-01-01", "labels": ["x"]},
        },
        "not a bool label",
    ),
    ({"labels": {"l": {"column": "l", "type": "int"}}}, "one of bool, float32"),
    (
        {"labels": {"l": {"column": "l", "range": [0, 1]}}},
        "'range', which only float32 labels support",
    ),
    (
        {"labels": {"l": {"column": "l", "type": "float32", "range": [5, 1]}}},
        "the smallest and the largest",
    ),
    ({"labels": {"l": {"column": "l", "delay_minutes": 5}}}, "needs clock times"),
    (
        {"time": CLOCK, "labels": {"l": {"column": "l", "delay_minutes": 0}}},
        "delay_minutes is 0",
    ),
    (
        {
            "time": CLOCK,
            "labels": {"l": {"column": "l", "delay_minutes": 5, "time": "at"}},
        },
        "both 'time' and",
    ),
    (
        {
            "time": CLOCK,
            "labels": {"l": {"column": "l", "time": {"column": "at", "unit": "order"}}},
        },
        "use clock times for both",
    ),
    (
        {"time": {"unit": "order"}, "labels": {"l": {"column": "l", "time": "at"}}},
        "events are in the order of rows",
    ),
    ({"items": {"files": "i.csv"}}, "'items.item' is missing"),
    (
        {"items": {"files": "i.csv", "item": "i", "user": "u"}},
        "unknown key 'items.user'",
    ),
    ({"items": {"files": "i.csv", "item": "i", "keep": "some"}}, "must be used or all"),
    ({"users": {"files": "u.csv", "user": "u"}}, "users.attributes is empty"),
    (
        {"as_of": {"stock": {"files": "s", "item": "i", "numbers": ["n"]}}},
        "as_of.stock needs a 'time'",
    ),
    (
        {
            "as_of": {
                "stock": {"files": "s", "item": "i", "time": CLOCK, "numbers": ["n"]}
            }
        },
        "like that of events",
    ),
]


@pytest.mark.parametrize(("keys", "words"), WRONG, ids=range(len(WRONG)))
def test_mappings_that_cannot_be(keys: Row, words: str, tmp_path: Path) -> None:
    content = {"files": "log.csv", "user": "u", "item": "i", "time": ORDER, **keys}
    content = {key: value for key, value in content.items() if value is not None}
    (tmp_path / "source.yaml").write_text(json.dumps(content))
    with pytest.raises(UserError) as caught:
        load_source(str(tmp_path / "source.yaml"))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_a_mapping_file_gives(tmp_path: Path) -> None:
    text = "files: a.csv\nuser: u\nitem: i\ntime: {column: t}\nprepare: {core: 0}\nnumbers: [n]\n"
    (tmp_path / "source.yaml").write_text(text)
    log, prepare = load_source(str(tmp_path / "source.yaml"))
    assert prepare == {"core": 0}
    assert log.config == {
        "files": "a.csv",
        "user": "u",
        "item": "i",
        "time": {"column": "t"},
        "numbers": {"n": "n"},
    }
    assert parse_log(log.config) == log


def test_a_request_has_one_id_whatever_types_its_file_gives(tmp_path: Path) -> None:
    row = {"u": 1, "l": ["x", "y"], "o": [{"a": 1}], "t": 5}
    other = {"u": "k", "l": ["z"], "o": [{"a": 1.5, "b": 2}], "t": 6.5}
    (tmp_path / "log-1.jsonl").write_text(json.dumps(row))
    (tmp_path / "log-2.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(other))
    log = plain(
        explode={"x": "l"},
        item="x",
        time={"column": "t", "unit": "order"},
        categories={"c": "o[1].a"},
    )
    events, rejects = read(log, tmp_path)
    ids = [event["request_id"] for event in events]
    assert len(set(ids[:2])) == 1
    assert ids[:2] == ids[2:4]
    assert of(rejects, "reason") == [("t: not an integer",)]


DIFFERENT_LISTS = [
    [["a", "b c"], ["a b", "c"], ["a b c"], ["a", "b", "c"]],
    [["a,b"], ["a", "b"], ['a","b']],
    [["v1.0"], ["v1"]],
    [["a", None], ["a", "null"], ["a"]],
    [["a", ":null"], ["a"]],
    [[["a"], ["b"]], [["a", "b"]]],
    [[{"k": "a"}, {"v": "b"}], [{"k": "a", "v": "b"}], [{"k": "a v b"}]],
]


@pytest.mark.parametrize("lists", DIFFERENT_LISTS, ids=str)
def test_nested_values_that_differ_have_different_texts(lists: list[Any]) -> None:
    texts = as_text(pl.Series(lists))
    assert texts.n_unique() == len(lists)


def test_rows_whose_lists_differ_are_different_requests(tmp_path: Path) -> None:
    lists = [["a", "b c"], ["a b", "c"]]
    write(tmp_path / "log.jsonl", [{"u": "u", "l": each, "t": 5} for each in lists])
    log = plain(explode={"x": "l"}, item="x", time=ORDER)

    events, _ = read(log, tmp_path)

    assert len({event["request_id"] for event in events}) == len(lists)


@pytest.mark.parametrize(
    "other", [["1", "2"], [1.0, 2.0], ["1.0", "2.0"]], ids=["text", "float", "both"]
)
def test_a_list_has_one_text_whatever_its_type(other: list[Any]) -> None:
    [text] = as_text(pl.Series([other]))
    assert text == as_text(pl.Series([[1, 2]]))[0]


def test_lists_that_differ_are_different_categories(tmp_path: Path) -> None:
    lists = [["a", "b c"], ["a b", "c"], ["a", "b"], ["a"], []]
    rows = [{"u": "u", "i": "x", "l": each, "t": n} for n, each in enumerate(lists)]
    write(tmp_path / "log.jsonl", rows)
    log = plain(time={"column": "t", "unit": "order"}, categories=["l"])

    events, _ = read(log, tmp_path)

    found = [event["cat_l"] for event in events]
    assert found == ['["a", "b c"]', '["a b", "c"]', "a b", "a", None]


def test_rows_that_an_expression_cannot_read_are_rejects(tmp_path: Path) -> None:
    lines = [
        "u,i,t",
        *(f"u{n},i{n},2023-11-{n:02d}" for n in range(1, 20)),
        "a,x,14.11.2023",
        "b,y,",
    ]
    (tmp_path / "log.csv").write_text("\n".join(lines))
    epoch = {"column": "extract(epoch from strptime(t, '%Y-%m-%d'))", "unit": "s"}
    events, rejects = read(plain(time=epoch), tmp_path)
    assert len(events) == 19
    assert ["cannot read" in reason for (reason,) in of(rejects, "reason")] == [
        True,
        False,
    ]
    events, rejects = read(
        plain(time={**epoch, "column": "extract(epoch from strptime(u, '%Y-%m-%d'))"}),
        tmp_path,
    )
    assert not events
    assert all("cannot read" in reason for (reason,) in of(rejects, "reason"))
    (tmp_path / "log.csv").write_text(
        "u,i,t\n" + "".join(f"a,x,never{n}\n" for n in range(2000))
    )
    with pytest.raises(UserError, match=r"cannot be evaluated .*try_cast"):
        read(plain(time=epoch), tmp_path)


def test_columns_that_no_file_of_a_section_has_are_missing(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text("id,title\nx,tea\n")
    log = plain(items={"files": "items.csv", "item": "id", "texts": ["titel"]})
    assert log.items
    (block,) = log.items.read(str(tmp_path), "items.csv")
    assert "nearest is 'title'" in block.missing["titel"]


def test_a_number_that_stands_for_none_is_rejected_with_an_expression_that_helps(
    tmp_path: Path,
) -> None:
    rows = [{"u": "u", "i": "x", "t": n, "n": v} for n, v in enumerate([1, -3.4e38])]
    write(tmp_path / "log.csv", rows)
    _, rejects = read(plain(numbers=["n"]), tmp_path)
    [reason] = [reject["reason"] for reject in rejects]

    events, rejects = read(plain(numbers={"n": reason.split("write ")[1]}), tmp_path)

    assert not rejects
    assert [event["num_n"] for event in events] == [1.0, None]
