"""Values that mapping files transform: what they become, and rows that cannot be read are rejects with their reason."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pipelines.data.sources.base import Block
from pipelines.data.sources.load import load_source
from pipelines.data.sources.mapping import Mapping

from models.tables import UserError


def plain(**keys: Any) -> Mapping:
    return Mapping(**{"files": "log.*", "user": "u", "item": "i", "time": {"column": "t", "unit": "order"}, **keys})


def read(source: Mapping, folder: Path) -> Block:
    """All blocks of the event files as one."""
    blocks = [block for file in source.event_files(str(folder)) for block in source.read_events(str(folder), file)]
    for block in blocks:
        assert block.rows_read == block.events.num_rows + block.rejects.num_rows
    return Block(
        pa.concat_tables(block.events for block in blocks),
        pa.concat_tables(block.rejects for block in blocks),
        sum(block.rows_read for block in blocks),
    )


def items_of(source: Mapping, folder: Path) -> list[str]:
    return read(source, folder).events["item_id"].to_pylist()


@pytest.mark.parametrize(
    ("transform", "raw", "made"),
    [
        ({"pad": 10}, "108775015", "0108775015"),
        ({"pad": 3}, "ünï", "ünï"),
        ({"html": True}, "<b>Foo</b> &amp; Bar", "Foo & Bar"),
        ({"html": True}, '<p class="x">Tea,<br/>\n milk</p><!-- 1 > 0 --><p>&lt;3 &#228;&nbsp;</p>', "Tea, milk <3 ä"),
        ({"html": True, "lower": True}, "1 < 2 A<I>B</I>", "1 < 2 a b"),
        ({"strip": True}, "  a b\t", "a b"),
        ({"strip": "'"}, "'a'b'", "a'b"),
        ({"lower": True}, "ÄBC", "äbc"),
        ({"regex": r"item/(\d+)"}, "https://shop/item/17?x", "17"),
        ({"regex": r"^(?:SKU-)?(\w+)$"}, "SKU-a1", "a1"),
        ({"strip": "#", "lower": True, "regex": r"^n(\d+)", "pad": 4}, "#N12-x#", "0012"),
        ({"regex": r"(\d+)$", "optional": True}, "a7", "7"),
        ({"decimal": ","}, "12,50", "12.50"),
        ({"decimal": ","}, " -1.234.567,5", "-1234567.5"),
        ({"decimal": ","}, "1\u202f234", "1234"),
        ({"decimal": ","}, "1,5E+05", "1.5E+05"),
        ({"decimal": "."}, "1,234.50", "1234.50"),
        ({"decimal": "."}, "-.5", "-.5"),
        ({"decimal": ","}, ",5", ".5"),
        ({"regex": r"([\d.,]+)", "decimal": ","}, "EUR 12,50 only", "12.50"),
        ({"regex": r"^([+-]?[\d.,\s]*\d)\s*€$", "decimal": ","}, "-12,50 €", "-12.50"),
        ({"decimal": ","}, "0,999", "0.999"),
    ],
)
@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_value_becomes_what_its_transform_says(
    tmp_path: Path, kind: str, transform: dict[str, Any], raw: str, made: str
) -> None:
    rows = pl.DataFrame({"u": ["a"], "i": [raw], "t": [1]})
    {"csv": rows.write_csv, "jsonl": rows.write_ndjson, "parquet": rows.write_parquet}[kind](tmp_path / f"log.{kind}")
    assert items_of(plain(transforms={"i": transform}), tmp_path) == [made]


def test_integers_are_padded_as_text(tmp_path: Path) -> None:
    pq.write_table(pa.table({"u": [7], "i": pa.array([108775015], pa.int64()), "t": [1]}), tmp_path / "log.parquet")
    assert items_of(plain(transforms={"i": {"pad": 10}}), tmp_path) == ["0108775015"]


def test_a_column_of_its_own_from_a_part_of_another_and_a_constant(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("u,i,t\na,shoe|42|red,1\nb,shirt|38|blue,2\n")
    source = plain(
        transforms={
            "size": {"column": "i", "regex": r"\|(\d+)\|"},
            "colour": {"column": "i", "regex": r"(\w+)$"},
            "i": {"regex": r"^(\w+)"},
            "market": {"constant": "se"},
        },
        numbers=["size"],
        categories=["colour", "market"],
    )
    assert source.reading.columns == ("u", "i", "t")
    events = read(source, tmp_path).events
    names = ["item_id", "num_size", "cat_colour", "cat_market"]
    assert events.select(names).to_pylist() == [
        dict(zip(names, row, strict=True)) for row in [("shoe", 42.0, "red", "se"), ("shirt", 38.0, "blue", "se")]
    ]


def test_a_row_that_a_transform_cannot_read_is_a_reject_with_its_raw_value(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("u,i,t\na,id-1,1\nb,two,2\nc,id-12345,3\nd,,4\n")
    block = read(plain(transforms={"i": {"regex": r"^id-(\d+)$", "pad": 4}}), tmp_path)
    assert block.events["item_id"].to_pylist() == ["0001"]
    assert [(row["row"], row["reason"]) for row in block.rejects.to_pylist()] == [
        (1, r"i: no match of regex ^id-(\d+)$"),
        (2, "i: longer than pad 4"),
        (3, "i: missing"),  # an empty value is for the schema to judge
    ]
    assert json.loads(block.rejects["source"][0].as_py())["i"] == "two"


def test_numbers_with_another_decimal_mark_are_refused_with_the_key_that_reads_them(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text('u,i,t,Preis\na,x,1,"12,50"\nb,x,2,3\nc,x,3,12.50\nd,x,4,\ne,x,5,"1.250,00"\n')
    (reason,) = set(read(plain(numbers=["Preis"]), tmp_path).rejects["reason"].to_pylist())
    assert reason == 'Preis: not a plain number, transforms: {"Preis": {decimal: ","}}'
    block = read(plain(numbers=["Preis"], transforms={"Preis": {"decimal": ","}}), tmp_path)
    assert block.events["num_Preis"].to_pylist() == [12.5, 3.0, None, 1250.0]
    assert [(row["row"], row["reason"]) for row in block.rejects.to_pylist()] == [
        (2, "Preis: no number with decimal ','")  # neither 12.5 nor 1250 is sure
    ]


def test_item_numbers_with_a_decimal_comma(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text("id;Preis\n1;12,50\n2;1.234,5\n")
    items: dict[str, Any] = {"files": "items.csv", "item": "id", "numbers": ["Preis"], "delimiter": ";"}
    with pytest.raises(
        UserError, match=r"""'12,50', which is no number; under 'items' write transforms: {"Preis": {de"""
    ):
        list(plain(items=items).read_items(str(tmp_path), "items.csv"))
    (made,) = plain(items={**items, "transforms": {"Preis": {"decimal": ","}}}).read_items(str(tmp_path), "items.csv")
    assert made.rows["num_Preis"].to_pylist() == [12.5, 1234.5]


def test_tables_as_of_have_transforms(tmp_path: Path) -> None:
    (tmp_path / "prices.csv").write_text("art;since;Preis\nA-1;5;12,50\nA-2;6;x\n")
    prices = {"files": "prices.csv", "item": "art", "time": {"column": "since", "unit": "order"}, "numbers": ["Preis"]}
    prices |= {"delimiter": ";", "transforms": {"art": {"regex": "A-(.)"}, "Preis": {"decimal": ","}}}
    table = plain(as_of={"prices": prices}).tables_as_of["prices"]
    (block,) = table.read(str(tmp_path), "prices.csv")
    assert block.events.to_pylist() == [{"item_id": "1", "timestamp_ms": 5, "num_Preis": 12.5}]
    assert block.rejects["reason"].to_pylist() == ["Preis: no number with decimal ','"]


def test_an_optional_transform_leaves_the_value_empty(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("u,i,t\na,Heat (1995),1\nb,Untitled,2\n")
    year = {"column": "i", "regex": r"\((\d{4})\)$", "optional": True}
    block = read(plain(transforms={"year": year}, categories=["year"]), tmp_path)
    assert block.events["cat_year"].to_pylist() == ["1995", None]
    assert not block.rejects.num_rows


def test_items_and_users_have_transforms_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("u,i,t\nA,0000000001,1\nb,0000000002,2\n")
    (tmp_path / "items.csv").write_text("id,name\n1, Tea \n2,x\nlonger than ten,y\n")
    (tmp_path / "users.csv").write_text("id,age\na,age 30\nB,age 40\nc,unknown\n")
    source = plain(
        transforms={"u": {"lower": True}},
        items={"files": "items.csv", "item": "id", "texts": ["name"], "transforms": {"id": {"pad": 10}}},
        users={
            "files": "users.csv",
            "user": "id",
            "attributes": ["age"],
            "transforms": {"id": {"lower": True}, "age": {"regex": r"(\d+)"}},
        },
    )
    events = read(source, tmp_path).events
    assert events["user_id"].to_pylist() == ["a", "b"]
    assert events["cat_age"].to_pylist() == ["30", "40"]
    (items,) = source.read_items(str(tmp_path), "items.csv")
    assert items.rows.to_pylist() == [
        {"item_id": "0000000001", "text_name": "Tea"},
        {"item_id": "0000000002", "text_name": "x"},
    ]
    assert items.rejects["reason"].to_pylist() == ["id: longer than pad 10"]
    users = source.read_users(str(tmp_path))
    assert users is not None
    assert users.rows.num_rows == 2
    assert users.rejects["reason"].to_pylist() == [r"age: no match of regex (\d+)"]


def test_a_label_that_is_glued_to_the_ids_of_a_list(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("r,u,t,shown\n1,a,10,N1-0 N2-1 N3-0\n2,b,20,N7\n3,c,30,\n")
    source = plain(
        item="news",
        request="r",
        explode={"columns": ["news", "clicked"], "separator": " "},
        labels={"click": {"column": "clicked"}},
        transforms={
            "news": {"column": "shown", "regex": r"^(.+)-[01]$"},
            "clicked": {"column": "shown", "regex": r"-([01])$"},
        },
    )
    block = read(source, tmp_path)
    names = ["request_id", "item_id", "position", "label_click"]
    assert block.events.select(names).to_pylist() == [
        dict(zip(names, row, strict=True))
        for row in [("1", "N1", 0, False), ("1", "N2", 1, True), ("1", "N3", 2, False)]
    ]
    assert block.rejects["reason"].to_pylist() == [r"news: no match of regex ^(.+)-[01]$", "news: missing"]


def test_members_of_a_list_are_transformed_like_the_items(tmp_path: Path) -> None:
    rows = [
        {"u": "a", "t": 1, "shown": ["x1", "x2"], "clicked": ["X2"]},
        {"u": "b", "t": 2, "shown": ["x3"], "clicked": ["none at all"]},
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = plain(
        item="shown",
        explode={"columns": ["shown"]},
        labels={"click": {"member_of": "clicked"}},
        transforms={"shown": {"regex": "x(.)"}, "clicked": {"lower": True, "regex": "^x(.)$"}},
    )
    block = read(source, tmp_path)
    assert block.events.select(["item_id", "label_click"]).to_pylist() == [
        {"item_id": "1", "label_click": False},
        {"item_id": "2", "label_click": True},
    ]
    assert block.rejects["reason"].to_pylist() == ["clicked: no match of regex ^x(.)$"]


@pytest.mark.parametrize(
    ("written", "raw", "expected"),
    [
        ("%m/%d/%Y %I:%M:%S %p", "11/15/2019 8:55:22 PM", 1_573_851_322_000),
        ("%d.%m.%Y", "15.11.2019", 1_573_776_000_000),
        ("%Y%m%d", "20191115", 1_573_776_000_000),
        ("%Y-%m-%d %H:%M:%S %z", "2019-11-15 20:55:22 +0200", 1_573_844_122_000),
        ("%d %b %Y %H:%M", " 15 Nov 2019 20:55 ", 1_573_851_300_000),
    ],
)
def test_times_in_a_format_of_strptime(tmp_path: Path, written: str, raw: str, expected: int) -> None:
    (tmp_path / "log.csv").write_text(f"u,i,t\na,x,{raw}\nb,x,yesterday\nc,x,\n")
    source = plain(time={"column": "t", "format": written})
    assert source.info["clock"]
    block = read(source, tmp_path)
    assert block.events["timestamp_ms"].to_pylist() == [expected]
    assert block.rejects["reason"].to_pylist() == [f"t: not a time as {written}", "t: missing"]


def test_a_year_of_two_digits_that_is_read_as_one_of_four_is_said(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("u,i,t\na,x,24.12.25\n")
    assert read(plain(time={"column": "t", "format": "%d.%m.%Y"}), tmp_path).rejects["reason"].to_pylist() == [
        "t: before 1980, check time.format (%y reads a year of two digits)"
    ]
    read_right = read(plain(time={"column": "t", "format": "%d.%m.%y"}), tmp_path)
    assert read_right.events["timestamp_ms"].to_pylist() == [1_766_534_400_000]


def test_the_time_of_a_label_is_in_the_format_of_the_log_unless_it_has_its_own(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("u,i,t,bought,at,seen\na,x,15.11.2019,1,16.11.2019,1573776001\n")
    source = plain(
        time={"column": "t", "format": "%d.%m.%Y"},
        labels={
            "buy": {"column": "bought", "time": "at"},
            "see": {"column": "bought", "time": {"column": "seen", "unit": "s"}},
        },
    )
    (event,) = read(source, tmp_path).events.to_pylist()
    assert (event["known_buy"], event["known_see"]) == (1_573_862_400_000, 1_573_776_001_000)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"transforms": {"i": {"padd": 3}}}, "unknown key 'transforms.i.padd'; the nearest key is 'pad'"),
        ({"transforms": {"i": {"regex": "("}}}, "'transforms.i': regex is '(', which cannot be read"),
        ({"transforms": {"i": {"regex": "a"}}}, "'transforms.i': regex is 'a', which has 0 groups; put one pair"),
        ({"transforms": {"i": {"pad": 0}}}, "'transforms.i': pad is 0; it is a number of characters from 1 to 1000"),
        ({"transforms": {"i": {}}}, "'transforms.i': it does nothing; give html, strip, lower, regex, decimal, pad, "),
        (
            {"transforms": {"i": {"decimal": ";"}}},
            "'transforms.i': decimal is ';'; it is ',' for numbers such as 1.234,50",
        ),
        ({"transforms": {"i": {"constant": "x", "lower": True}}}, "'constant' stands for every row; give it alone"),
        ({"transforms": {"i": {"lower": True, "optional": True}}}, "'optional' is of 'regex', 'decimal'"),
        ({"transforms": {"itm": {"lower": True}}}, "'transforms.itm' makes a column that nothing reads; the nearest"),
        ({"transforms": {"i": "lower"}}, "'transforms.i' is 'lower'; write column: {strip: true}"),
        (
            {"transforms": {"i": {"column": "a", "lower": True}, "u": {"column": "i"}}},
            "'transforms.u' reads 'i', which another transform makes",
        ),
        ({"time": {"column": "t", "format": "%H:%M"}}, "time.format is '%H:%M'"),
        ({"time": {"column": "t", "format": "%m/%d"}}, "time.format is '%m/%d'"),
        ({"time": {"column": "t", "format": "%Y-%m-%d %H"}}, "time.format is '%Y-%m-%d %H', which cannot be read"),
        ({"time": {"column": "t", "unit": "s", "format": "%Y"}}, "time has both unit 's' and format '%Y'"),
        ({"time": {"column": "t"}}, "'time.unit' is missing; add such as 'unit: ms'"),
    ],
)
def test_a_transform_that_cannot_be_is_one_line(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        plain(**keys)
    assert "\n" not in str(caught.value)


def test_a_column_that_is_no_text_is_named_with_a_value(tmp_path: Path) -> None:
    pq.write_table(pa.table({"u": ["a"], "i": [1.5], "t": [1]}), tmp_path / "log.parquet")
    with pytest.raises(UserError, match=r"log.parquet: column 'i' is Float64, such as 1.5, and transforms are of text"):
        read(plain(transforms={"i": {"pad": 4}}), tmp_path)


def test_what_a_mapping_does_not_set_is_not_in_its_fingerprint() -> None:
    source = plain(
        labels={"buy": {"column": "b", "time": "at"}},
        items={"files": "items.csv", "item": "id"},
        users={"files": "users.csv", "user": "id", "attributes": ["age"]},
    )
    assert source.config == {
        "layout": "Mapping", "files": "log.*", "user": "u", "item": "i", "time": {"column": "t", "unit": "order"},
        "labels": {"buy": {"column": "b", "time": {"column": "at", "unit": "order"}}},
        "items": {"files": "items.csv", "item": "id"},
        "users": {"files": "users.csv", "user": "id", "attributes": {"age": "age"}},
    }  # fmt: skip


@pytest.mark.parametrize("path", sorted(Path("jobs/configs/sources").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_mapping_of_the_repository_can_be_read(path: Path) -> None:
    source, _ = load_source(str(path))
    assert source.config == json.loads(json.dumps(source.config))
