"""A mapping file turns log rows into events. Rows that break the schema are rejected,
and every row read is either an event or a reject.
"""

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


def complete_mapping(**keys: Any) -> Row:
    """Return the keys of a mapping with the required keys, less the keys set to None."""
    mapping = {"files": "log*", "user": "u", "item": "i", "time": ORDER, **keys}
    return {key: value for key, value in mapping.items() if value is not None}


def make_log(**keys: Any) -> Log:
    """Parse a mapping of the files `log*`, with `keys` on top of the required keys."""
    return parse_log(complete_mapping(**keys))


def read_log(
    log: Log, folder: Path, size: int | None = None
) -> tuple[list[Row], list[Row]]:
    """Read the events and rejects of all files, in pieces of `size` bytes if set.

    Checks that each row of a file is either an event or a reject, and that the log rows
    of the events ascend.
    """
    log = pickle.loads(pickle.dumps(log))  # as a Ray task receives it
    events: list[Row] = []
    rejects: list[Row] = []
    users = log.read_users(str(folder), {})
    user_rows = users.rows if users else None
    for number, file in enumerate(log.event_files(str(folder))):
        pieces = split_file(str(folder / file), log, size) if size else [None]
        for piece in pieces:
            log_rows: list[int] = []
            for block in log.read_events(str(folder), file, user_rows, piece, number):
                assert block.rows.schema == log.schema.append(LOG_ROW)
                assert block.rejects.schema == REJECTS
                assert block.rows_read == block.rows.num_rows + block.rejects.num_rows
                log_rows += block.rows["log_row"].to_pylist()
                events += block.rows.drop_columns("log_row").to_pylist()
                rejects += block.rejects.to_pylist()
            assert log_rows == sorted(set(log_rows))
    return events, rejects


def select_columns(rows: Sequence[Row], *names: str) -> list[tuple]:
    """Return the values of some columns, one tuple per row."""
    return [tuple(row[name] for name in names) for row in rows]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as JSON lines, CSV or Parquet, by the suffix of the path."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return
    table = pl.DataFrame(rows, infer_schema_length=None)
    if path.suffix == ".csv":
        table.write_csv(path)
    else:
        table.write_parquet(path, row_group_size=64)


def read_rows(
    folder: Path, rows: Sequence[Row], name: str = "log.csv", **keys: Any
) -> tuple[list[Row], list[Row]]:
    """Write rows to a file and read its events and rejects.

    Rows without user, item or time get user `a`, item `i{n}` and time `n`.
    """
    defaults = [{"u": "a", "i": f"i{n}", "t": n} for n in range(len(rows))]
    complete = [default | row for default, row in zip(defaults, rows, strict=True)]
    write_rows(folder / name, complete)
    return read_log(make_log(**keys), folder)


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl", "log.parquet"])
def test_csv_json_lines_and_parquet_give_the_same_events(
    tmp_path: Path, name: str
) -> None:
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

    events, rejects = read_rows(tmp_path, rows, name, request="q || '-' || tab", **keys)

    assert events == [
        {
            "user_id": "a",
            "request_id": "red shoes-home",
            "timestamp_ms": MOMENT,
            "item_id": 'y,\n"z"',
            "position": 0,
            "query": "red shoes",
            "label_click": True,
            "label_secs": 1.5,
            "num_secs": 1.5,
            "cat_tab": "home",
        }
    ]
    assert select_columns(rejects, "row", "reason") == [(1, "q || '-' || tab: missing")]
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
def test_a_row_that_breaks_the_schema_is_rejected_with_its_row_and_reason(
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

    events, rejects = read_rows(tmp_path, [good, good | change, good], name, **keys)

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
def test_a_bool_label_is_true_false_or_missing_by_its_expression(
    tmp_path: Path, text: str, values: list, expected: list
) -> None:
    rows = [{"v": value} for value in values]

    events, rejects = read_rows(tmp_path, rows, labels={"done": text})

    assert [event["label_done"] for event in events] == expected
    assert not rejects


def test_expressions_read_columns_whose_names_need_quotes(tmp_path: Path) -> None:
    rows = [{"timestamp:float": 3, "my col": "A", "select": "B", "x": "7", "2d": "C"}]
    keys = {
        "item": "lpad(x, 4, '0')",
        "time": {"column": "timestamp:float", "unit": "order"},
        "categories": {
            "a": '"my col"',
            "b": "select",
            "c": 'lower("2d") || x',
            "d": "my col",
        },
    }

    [event], _ = read_rows(tmp_path, rows, **keys)

    assert (event["item_id"], event["timestamp_ms"]) == ("0007", 3)
    categories = {name: event[f"cat_{name}"] for name in "abcd"}
    assert categories == {"a": "A", "b": "B", "c": "c7", "d": "A"}


def test_the_second_column_of_a_name_is_read_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("u,i,t,i,\na,x,1,y,\n")
    log = make_log(categories={"second": '"i.1"'})

    events, _ = read_log(log, tmp_path)

    assert select_columns(events, "item_id", "cat_second") == [("x", "y")]


# A row per search, with the lists of shown and clicked items and of dwell times.
SEARCHES: list[Row] = [
    {
        "u": "a",
        "t": 1,
        "q": "lamp",
        "shown": [10, 11, 12],
        "clicked": [12, 10],
        "dwell": [1, 2, 3],
    },
    {"u": "b", "t": 2, "q": "mug", "shown": [10], "clicked": [], "dwell": [4]},
    # fewer dwell times than shown items
    {
        "u": "c",
        "t": 3,
        "q": "cup",
        "shown": [10, 11],
        "clicked": [10],
        "dwell": [4],
    },
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


def join_lists(row: Row) -> Row:
    """Return a row with its lists as text between `|`, as CSV files have them."""
    joined = dict(row)
    for name in ("shown", "clicked", "dwell"):
        if row[name] is not None:
            texts = ["" if value is None else str(value) for value in row[name]]
            joined[name] = "|".join(texts)
    return joined


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl", "log.parquet"])
@pytest.mark.parametrize("block", [60, 8 << 20])
def test_a_row_with_lists_becomes_an_impression_per_element(
    tmp_path: Path, name: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "BLOCK_BYTES", block if name == "log.csv" else 8 << 20)
    if name == "log.csv":
        write_rows(tmp_path / name, [join_lists(row) for row in SEARCHES])
        explode = {
            "shown": "string_to_array(shown, '|')",
            "dwell": "string_to_array(dwell, '|')",
        }
        clicked = "array_contains(string_to_array(clicked, '|'), shown)"
    else:
        write_rows(tmp_path / name, SEARCHES)
        explode = {"shown": "shown", "dwell": "dwell"}
        clicked = "array_contains(clicked, shown)"
    log = make_log(
        explode=explode,
        item="shown",
        query="q",
        labels={"click": clicked, "dwell": {"column": "dwell", "type": "float32"}},
    )

    events, rejects = read_log(log, tmp_path)

    impressions = select_columns(events, "query", "item_id", "position", "label_dwell")
    assert impressions == [
        ("lamp", "10", 0, 1.0),
        ("lamp", "11", 1, 2.0),
        ("lamp", "12", 2, 3.0),
        ("mug", "10", 0, 4.0),
        ("jar", "13", 0, 5.0),
    ]
    # an empty list of clicked items gives a missing label in some formats
    clicks = [bool(event["label_click"]) for event in events]
    assert clicks == [True, False, True, False, True]
    requests = set(select_columns(events, "query", "request_id"))
    assert len({request_id for _, request_id in requests}) == len(requests) == 3
    reasons = {json.loads(row["source"])["q"]: row["reason"] for row in rejects}
    assert reasons == {
        "pot": "shown: missing",
        "jug": "shown: missing",
        "jar": "shown: missing",
        "cup": "shown: lists of unequal length",
    }


def test_a_row_has_the_same_request_id_in_every_file(tmp_path: Path) -> None:
    rows = [row for row in SEARCHES if row["q"] in ("lamp", "mug", "jar")]
    rows.append({**SEARCHES[0], "q": None})
    ids_per_file = []
    for number, part in enumerate((rows, rows[::-1], rows[1:3])):
        write_rows(tmp_path / f"log-{number}.jsonl", part)
        log = make_log(
            files=f"log-{number}*", explode=["shown"], item="shown", query="q"
        )
        events, _ = read_log(log, tmp_path)
        ids_per_file.append({event["query"]: event["request_id"] for event in events})

    assert len(set(ids_per_file[0].values())) == 4
    for ids in ids_per_file:
        assert ids.items() <= ids_per_file[0].items()


def test_the_time_that_a_label_becomes_known_is_a_delay_or_a_column(
    tmp_path: Path,
) -> None:
    rows: list[Row] = [
        {"t": MOMENT, "click": 1, "secs": 2.5, "at": MOMENT + 5},
        {"t": MOMENT, "click": 0, "secs": None, "at": None},
        {"t": MOMENT, "click": 1, "secs": 1.0, "at": MOMENT - 1},
        {"t": MOMENT, "click": 1, "secs": 1.0, "at": 5},
        {"t": MOMENT, "click": 1, "secs": 1.0, "at": None},
    ]
    labels = {
        "click": {"column": "click", "delay_minutes": 1.5},
        "secs": {"column": "secs", "type": "float32", "time": "at"},
    }

    events, rejects = read_rows(tmp_path, rows, time=CLOCK, labels=labels)

    assert select_columns(events, "known_click", "known_secs") == [
        (MOMENT + 90_000, MOMENT + 5),
        (None, None),
    ]
    before_event, before_1980, missing = [reject["reason"] for reject in rejects]
    assert "at: before its event" in before_event
    assert "at: before 1980" in before_1980
    assert "at: missing" in missing


def test_a_history_column_gives_a_users_events_before_the_log(tmp_path: Path) -> None:
    rows: list[Row] = [
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
    start = 1_570_838_400_000  # 2019-10-12, the time of the histories

    events, rejects = read_rows(
        tmp_path, rows, time={"column": "t"}, history=history, labels={"click": "click"}
    )

    earlier = [event for event in events if event["timestamp_ms"] < start + 1000]
    earlier_of_a = [event for event in earlier if event["user_id"] == "a"]
    columns = ("item_id", "timestamp_ms", "label_click")
    assert set(select_columns(earlier_of_a, *columns)) == {
        ("x", start, True),
        ("y", start + 1, True),
        ("z", start + 2, True),
    }
    assert len([event for event in events if event["timestamp_ms"] > start + 1000]) == 4
    not_before, missing = sorted(reject["reason"] for reject in rejects)
    assert "not before its row" in not_before
    assert missing == "u: missing"


@pytest.mark.parametrize("item", [None, "i"])
def test_a_sequence_column_gives_a_users_items_in_order(
    tmp_path: Path, item: str | None
) -> None:
    rows: list[Row] = [
        {"u": "a", "s": "x y x", "i": "z"},
        {"u": None, "s": "x y", "i": "z"},
        {"u": "b", "s": None, "i": "w"},
        {"u": "c", "s": "y", "i": None},
    ]
    write_rows(tmp_path / "log.csv", rows)
    log = make_log(time=None, item=item, sequence="string_to_array(s, ' ')")

    events, rejects = read_log(log, tmp_path)

    expected = [("a", "x", 0), ("a", "y", 1), ("a", "x", 2)]
    if item:
        expected += [("a", "z", 3), ("b", "w", 0)]
    expected.append(("c", "y", 0))
    assert select_columns(events, "user_id", "item_id", "timestamp_ms") == expected
    rejected_users = {json.loads(row["source"])["u"] for row in rejects}
    assert rejected_users == ({None} if item else {None, "b"})
    assert not log.has_clock_times


def test_folders_are_columns_and_users_are_joined(tmp_path: Path) -> None:
    users_by_folder = {"se": "ab", "d%20e": "c", "__HIVE_DEFAULT_PARTITION__": "d"}
    for country, users in users_by_folder.items():
        folder = tmp_path / f"country={country}"
        folder.mkdir()
        rows = [{"u": user, "i": "x", "t": 1} for user in users]
        write_rows(folder / "log.csv", rows)
    write_rows(
        tmp_path / "users.csv",
        [{"id": "a", "age": 30}, {"id": " a", "age": 99}, {"id": "c", "age": None}],
    )
    log = make_log(
        files="country=*/*.csv",
        categories=["country"],
        labels={"se": "country = 'se'"},
        users={"files": "users.csv", "user": "id", "attributes": ["age"]},
    )

    events, rejects = read_log(log, tmp_path)

    columns = ("user_id", "cat_country", "label_se", "cat_age")
    assert sorted(select_columns(events, *columns)) == [
        ("a", "se", True, "30"),
        ("b", "se", True, None),
        ("c", "d e", False, None),
        ("d", None, None, None),
    ]
    assert not rejects


def test_item_files_give_texts_and_numbers(tmp_path: Path) -> None:
    rows: list[Row] = [
        {"id": 1, "name": " Tea ", "tags": ["a", None, "b"], "price": 2.5},
        {"id": None, "name": "x"},
    ]
    write_rows(tmp_path / "items.jsonl", rows)
    items = {
        "files": "items.jsonl",
        "item": "id",
        "texts": {"title": "name", "tags": "tags"},
        "numbers": ["price"],
    }
    log = make_log(files="log.csv", time={"column": "t"}, items=items)
    assert log.items is not None

    (block,) = log.items.read(str(tmp_path), *log.item_files(str(tmp_path)))

    assert block.rows.schema == log.items.schema
    assert block.rows.to_pylist() == [
        {"item_id": "1", "text_title": "Tea", "text_tags": "a b", "num_price": 2.5}
    ]
    assert block.rejects["reason"].to_pylist() == ["id: missing"]


def test_files_of_changing_features_give_numbers_with_times(tmp_path: Path) -> None:
    rows = [
        {"id": 1, "at": "2023-11-14", "left": 3},
        {"id": 2, "at": "soon", "left": 4},
    ]
    write_rows(tmp_path / "stock.csv", rows)
    stock = {
        "files": "stock.csv",
        "item": "id",
        "time": {"column": "at"},
        "numbers": {"left": "left"},
    }
    log = make_log(files="log.csv", time={"column": "t"}, as_of={"stock": stock})

    (block,) = log.as_of["stock"].read(str(tmp_path), "stock.csv")

    assert block.rows.to_pylist() == [
        {"item_id": "1", "timestamp_ms": 1_699_920_000_000, "num_left": 3.0}
    ]
    assert block.rejects["reason"].to_pylist() == ["at: not an ISO 8601 time"]


UNUSUAL_IDS = st.sampled_from(
    [
        *NULL_WORDS,
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
    ]
)
NUMBERS_AS_TEXT = st.from_regex(
    r"[+-]?\d{1,4}(\.\d{0,3})?([eE][+-]?\d{1,2})?", fullmatch=True
)


@settings(max_examples=200)
@given(st.lists(st.text(max_size=6) | UNUSUAL_IDS | st.none() | NUMBERS_AS_TEXT))
def test_ids_of_text_are_cleaned_alike_by_value_and_by_column(
    values: list[str | None],
) -> None:
    expected = [None if value is None else clean_id(value) for value in values]

    assert clean_ids(pl.Series(values, dtype=pl.String)).to_list() == expected
    for cleaned in expected:
        if cleaned is not None:
            assert clean_id(cleaned) == cleaned
            assert unicodedata.is_normalized("NFC", cleaned)
            assert cleaned.strip(" \t\r\n\xa0\u200b\ufeff") == cleaned != ""
            assert cleaned.lower() not in NULL_WORDS


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1)),
    st.lists(st.floats() | st.integers(-(2**52), 2**52).map(float)),
)
def test_ids_of_whole_numbers_have_no_fraction(
    integers: list[int], floats: list[float]
) -> None:
    integer_ids = clean_ids(pl.Series(integers, dtype=pl.Int64)).to_list()
    float_ids = clean_ids(pl.Series(floats, dtype=pl.Float64)).to_list()

    assert integer_ids == [str(value) for value in integers]
    for value, float_id in zip(floats, float_ids, strict=True):
        if not math.isfinite(value):
            assert float_id is None
        elif abs(value) < 2**53 and value == int(value):
            assert float_id == str(int(value))
        else:
            assert float_id is not None
            assert float(float_id) == value


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl", "log.parquet"])
def test_events_do_not_depend_on_blocks_or_pieces(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = random.Random(0)
    rows = [
        {
            "u": generator.choice(["a", "b ", "nan", ""]),
            "i": f"i{generator.randrange(9)}",
            "t": MOMENT + generator.randrange(10**6),
            "p": generator.choice(["1", "2", "-3", "x"]),
            "c": generator.choice(['say "x"', "plain", "a, b", None]),
        }
        for _ in range(700)
    ]
    write_rows(tmp_path / name, rows)
    log = make_log(time=CLOCK, position="p", categories=["c"])

    events, rejects = read_log(log, tmp_path)

    assert len(events) + len(rejects) == len(rows)
    reasons = select_columns(rejects, "reason", "source")
    for size in (900, 5000):
        piece_events, piece_rejects = read_log(log, tmp_path, size)
        assert piece_events == events
        assert select_columns(piece_rejects, "reason", "source") == reasons
    for block in (500, 4000):
        monkeypatch.setattr(reading, "BLOCK_BYTES", block)
        assert read_log(log, tmp_path) == (events, rejects)


def test_rows_without_a_time_column_are_in_the_order_of_files_and_rows(
    tmp_path: Path,
) -> None:
    items = []
    for name in ("log-1.csv", "log-2.csv"):
        items_of_file = [f"{name}-{n}" for n in range(300)]
        write_rows(tmp_path / name, [{"u": "a", "i": item} for item in items_of_file])
        items += items_of_file
    log = make_log(time={"unit": "order"})

    for size in (None, 1 << 20):
        events, _ = read_log(log, tmp_path, size)
        times = [event["timestamp_ms"] for event in events]
        assert times == sorted(set(times))
        assert [event["item_id"] for event in events] == items


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
def test_a_column_that_cannot_be_read_as_its_key_needs_is_refused(
    tmp_path: Path, rows: list[Row], keys: Row, words: str
) -> None:
    with pytest.raises(UserError) as caught:
        read_rows(tmp_path, rows, "log.jsonl", **keys)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_event_files_in_two_formats_are_refused_unless_one_is_of_items(
    tmp_path: Path,
) -> None:
    write_rows(tmp_path / "log.csv", [{"u": 1}])
    write_rows(tmp_path / "log.jsonl", [{"u": 1}])
    items = {"files": "*.jsonl", "item": "u", "texts": ["u"]}

    with pytest.raises(UserError, match="may be the same"):
        make_log().event_files(str(tmp_path))
    assert make_log(items=items).event_files(str(tmp_path)) == ["log.csv"]


def test_a_pattern_that_matches_no_event_file_is_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "log.csv", [{"u": 1}])

    with pytest.raises(UserError, match="no event file"):
        make_log(files="*.tsv").event_files(str(tmp_path))


INVALID_MAPPINGS: list[tuple[Row, str]] = [
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


@pytest.mark.parametrize(
    ("keys", "words"), INVALID_MAPPINGS, ids=range(len(INVALID_MAPPINGS))
)
def test_an_invalid_mapping_is_refused_in_one_line(
    keys: Row, words: str, tmp_path: Path
) -> None:
    mapping = complete_mapping(files="log.csv", **keys)
    (tmp_path / "source.yaml").write_text(json.dumps(mapping))

    with pytest.raises(UserError) as caught:
        load_source(str(tmp_path / "source.yaml"))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_mapping_file_gives_the_log_and_the_settings_of_prepare(
    tmp_path: Path,
) -> None:
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


def test_a_request_id_does_not_depend_on_the_types_of_the_other_rows(
    tmp_path: Path,
) -> None:
    row = {"u": 1, "l": ["x", "y"], "o": [{"a": 1}], "t": 5}
    other = {"u": "k", "l": ["z"], "o": [{"a": 1.5, "b": 2}], "t": 6.5}
    (tmp_path / "log-1.jsonl").write_text(json.dumps(row))
    (tmp_path / "log-2.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(other))
    log = make_log(explode={"x": "l"}, item="x", time=ORDER, categories={"c": "o[1].a"})

    events, rejects = read_log(log, tmp_path)

    ids = [event["request_id"] for event in events]
    assert len(set(ids[:2])) == 1
    assert ids[:2] == ids[2:4]
    assert [reject["reason"] for reject in rejects] == ["t: not an integer"]


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
def test_lists_that_differ_have_different_texts(lists: list[Any]) -> None:
    texts = as_text(pl.Series(lists))
    assert texts.n_unique() == len(lists)


def test_rows_whose_lists_differ_are_different_requests(tmp_path: Path) -> None:
    lists = [["a", "b c"], ["a b", "c"]]
    rows = [{"u": "u", "l": values, "t": 5} for values in lists]
    write_rows(tmp_path / "log.jsonl", rows)
    log = make_log(explode={"x": "l"}, item="x")

    events, _ = read_log(log, tmp_path)

    assert len({event["request_id"] for event in events}) == len(lists)


@pytest.mark.parametrize(
    "values", [["1", "2"], [1.0, 2.0], ["1.0", "2.0"]], ids=["text", "float", "both"]
)
def test_a_list_has_the_same_text_whatever_its_type(values: list[Any]) -> None:
    [text] = as_text(pl.Series([values]))
    [text_of_integers] = as_text(pl.Series([[1, 2]]))

    assert text == text_of_integers


def test_lists_that_differ_are_different_categories(tmp_path: Path) -> None:
    lists = [["a", "b c"], ["a b", "c"], ["a", "b"], ["a"], []]
    rows = [
        {"u": "u", "i": "x", "l": values, "t": time}
        for time, values in enumerate(lists)
    ]
    write_rows(tmp_path / "log.jsonl", rows)

    events, _ = read_log(make_log(categories=["l"]), tmp_path)

    categories = [event["cat_l"] for event in events]
    assert categories == ['["a", "b c"]', '["a b", "c"]', "a b", "a", None]


def parse_dates(column: str) -> Row:
    """Return the mapping of times that are dates in a column, by an expression."""
    expression = f"extract(epoch from strptime({column}, '%Y-%m-%d'))"
    return {"column": expression, "unit": "s"}


def test_rows_that_an_expression_cannot_read_are_rejected(tmp_path: Path) -> None:
    days = [f"u{day},i{day},2023-11-{day:02d}" for day in range(1, 20)]
    lines = ["u,i,t", *days, "a,x,14.11.2023", "b,y,"]
    (tmp_path / "log.csv").write_text("\n".join(lines))

    events, rejects = read_log(make_log(time=parse_dates("t")), tmp_path)

    assert len(events) == 19
    other_format, empty = [reject["reason"] for reject in rejects]
    assert "cannot read" in other_format
    assert "cannot read" not in empty


def test_all_rows_are_rejected_if_an_expression_can_read_none(tmp_path: Path) -> None:
    days = [f"u{day},i{day},2023-11-{day:02d}" for day in range(1, 20)]
    lines = ["u,i,t", *days, "a,x,14.11.2023", "b,y,"]
    (tmp_path / "log.csv").write_text("\n".join(lines))

    events, rejects = read_log(make_log(time=parse_dates("u")), tmp_path)

    assert not events
    assert len(rejects) == 21
    assert all("cannot read" in reject["reason"] for reject in rejects)


def test_an_expression_that_can_read_no_row_of_many_is_refused(tmp_path: Path) -> None:
    lines = ["u,i,t", *(f"a,x,never{n}" for n in range(2000))]
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")

    with pytest.raises(UserError, match=r"cannot be evaluated .*try_cast"):
        read_log(make_log(time=parse_dates("t")), tmp_path)


def test_a_column_that_no_item_file_has_is_reported_with_the_nearest(
    tmp_path: Path,
) -> None:
    (tmp_path / "items.csv").write_text("id,title\nx,tea\n")
    log = make_log(items={"files": "items.csv", "item": "id", "texts": ["titel"]})
    assert log.items

    (block,) = log.items.read(str(tmp_path), "items.csv")

    assert "nearest is 'title'" in block.missing["titel"]


def test_a_number_that_marks_missing_values_is_rejected_with_the_expression_to_use(
    tmp_path: Path,
) -> None:
    _, rejects = read_rows(tmp_path, [{"n": 1}, {"n": -3.4e38}], numbers=["n"])
    [reason] = [reject["reason"] for reject in rejects]
    expression = reason.split("write ")[1]

    events, rejects = read_log(make_log(numbers={"n": expression}), tmp_path)

    assert not rejects
    assert [event["num_n"] for event in events] == [1.0, None]
