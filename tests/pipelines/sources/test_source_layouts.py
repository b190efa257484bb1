"""The LC-Rec and Amazon Reviews 2023 layouts, and the source files that ship."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipelines.data.sources import Block, Source, load_source
from pipelines.data.sources.amazon2023 import Amazon2023
from pipelines.data.sources.lcrec import LcRec
from pipelines.data.sources.normalise import NO_ID

from models.tables import UserError
from pipelines.data.settings import read_config

CONFIGS = Path(__file__).parents[3] / "jobs" / "configs" / "sources"
DATA = Path(__file__).parents[3] / "../shared/data"


def read(source: Source, folder: Path) -> Block:
    blocks = [b for f in source.event_files(str(folder)) for b in source.read_events(str(folder), f)]
    assert all(block.events.schema == source.block_schema for block in blocks)
    events = pa.concat_tables([block.events for block in blocks])
    rejects = pa.concat_tables([block.rejects for block in blocks])
    return Block(events, rejects, sum(block.rows_read for block in blocks))


def items(source: Source, folder: Path) -> list[dict]:
    files = source.item_files(str(folder))
    return [row for f in files for found in source.read_items(str(folder), f) for row in found.rows.to_pylist()]


names = st.text(st.characters(codec="utf-8"), max_size=5).map(str.strip).filter(lambda name: name not in ("", *NO_ID))


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(histories=st.dictionaries(names, st.lists(st.one_of(names, st.integers(0, 99)), max_size=6), min_size=1))
def test_lcrec_histories_keep_their_order(tmp_path: Path, histories: dict[str, list]) -> None:
    (tmp_path / "Toys.inter.json.gz").write_bytes(gzip.compress(json.dumps(histories).encode()))
    block = read(LcRec(), tmp_path)
    read_back: dict[str, list] = {}
    for event in block.events.to_pylist():
        history = read_back.setdefault(event["user_id"], [])
        assert event["timestamp_ms"] == len(history)
        history.append(event["item_id"])
    assert read_back == {user: [str(i) for i in history] for user, history in histories.items() if history}
    assert block.rejects.num_rows == 0


def test_lcrec_items_without_an_id_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "inter.json").write_text('{"a": [1, null, 2.5, true, "x"], "": [3]}')
    block = read(LcRec(), tmp_path)
    assert block.events["item_id"].to_pylist() == ["1", "x"]
    assert block.events["timestamp_ms"].to_pylist() == [0, 4]
    assert block.rejects["row"].to_pylist() == [1, 2, 3, 5]
    assert block.rows_read == 6


def test_lcrec_ids_are_bare_of_white_space(tmp_path: Path) -> None:
    (tmp_path / "inter.json").write_text('{" a ": ["x ", "  ", " y"], "  ": ["x"]}')
    (tmp_path / "item.json").write_text('{" x": {"title": "Car"}, " ": {"title": "None"}}')
    block = read(LcRec(), tmp_path)
    assert block.events["user_id"].to_pylist() == ["a", "a"]
    assert block.events["item_id"].to_pylist() == ["x", "y"]
    assert block.rejects["row"].to_pylist() == [1, 3]
    (found,) = LcRec(texts=["title"]).read_items(str(tmp_path), "item.json")
    assert found.rows["item_id"].to_pylist() == ["x"]
    assert (found.rejects["reason"].to_pylist(), found.rows_read) == (["item_id: missing"], 2)
    (tmp_path / "inter.json").write_text('{"a": [1], "a ": [2]}')
    with pytest.raises(UserError, match=r"inter.json: the key 'a' comes twice; merge its entries"):
        read(LcRec(), tmp_path)


def test_lcrec_item_texts(tmp_path: Path) -> None:
    (tmp_path / "Toys.inter.json").write_text('{"a": [0, 1]}')
    content = {"0": {"title": " Car ", "categories": [["Toys", "Cars"], ["Red"]]}, "1": {"brand": "", "title": "Kite"}}
    (tmp_path / "Toys.item.json").write_text(json.dumps(content))
    source = LcRec(texts=["title", "categories"], attributes=["brand"])
    assert source.event_files(str(tmp_path)) == ["Toys.inter.json"]
    assert items(source, tmp_path) == [
        {"item_id": "0", "text_title": "Car", "text_categories": "Toys Cars Red", "cat_brand": None},
        {"item_id": "1", "text_title": "Kite", "text_categories": None, "cat_brand": None},
    ]
    assert LcRec(items=None).items_columns == ([], [])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "empty"),
        ('{"a": [1, 2', "truncated"),
        ("[1, 2]", "holds a JSON list"),
        ('{"a": 5}', "user 'a' has 5"),
        ('{"a": [1], "a": [2]}', "'a' comes twice"),
    ],
)
def test_lcrec_bad_files(tmp_path: Path, content: str, expected: str) -> None:
    (tmp_path / "inter.json").write_text(content)
    with pytest.raises(UserError) as caught:
        read(LcRec(), tmp_path)
    assert "inter.json" in str(caught.value)
    assert expected in str(caught.value)


REVIEW = {
    "rating": 4.0,
    "title": "Fine",
    "text": 'He said "timestamp": 1.5',
    "images": [],
    "asin": "B1",
    "parent_asin": "P1",
    "user_id": "U1",
    "timestamp": 1588687728923,
    "helpful_vote": 3,
    "verified_purchase": True,
}


def test_amazon_reviews_and_metadata(tmp_path: Path) -> None:
    other = REVIEW | {"parent_asin": "P2", "verified_purchase": False, "timestamp": -1}
    reviews = json.dumps(REVIEW) + "\n" + json.dumps(other) + "\n"
    (tmp_path / "Toys.jsonl.gz").write_bytes(gzip.compress(reviews.encode()))
    meta = {
        "parent_asin": "P1",
        "title": "Car",
        "store": "Acme",
        "main_category": "Toys",
        "categories": ["Toys", "Cars"],
        "features": [],
        "description": ["Red.", "Fast."],
        "price": None,
        "details": {"a": "b"},
    }
    (tmp_path / "meta_Toys.jsonl.gz").write_bytes(gzip.compress(json.dumps(meta).encode() + b"\n"))
    source = Amazon2023()
    assert source.event_files(str(tmp_path)) == ["Toys.jsonl.gz"]
    block = read(source, tmp_path)
    (event,) = block.events.to_pylist()
    assert (event["user_id"], event["item_id"], event["timestamp_ms"]) == ("U1", "P1", 1588687728923)
    assert (event["label_rating"], event["label_verified"]) == (4.0, True)
    assert block.rejects["reason"].to_pylist() == ["timestamp: negative"]
    (item,) = items(source, tmp_path)
    assert item == {
        "item_id": "P1",
        "text_title": "Car",
        "text_store": "Acme",
        "text_categories": "Toys Cars",
        "text_features": None,
        "text_description": "Red. Fast.",
        "cat_main_category": "Toys",
        "cat_store": "Acme",
    }


def test_amazon_ratings_have_the_schema_of_the_reviews(tmp_path: Path) -> None:
    (tmp_path / "Toys.csv.gz").write_bytes(
        gzip.compress(b"user_id,parent_asin,rating,timestamp\nU1,P1,4.0,1588687728923\nU2,P1,5.0,1.5e12\n")
    )
    block = read(Amazon2023(), tmp_path)
    (event,) = block.events.to_pylist()
    assert (event["label_rating"], event["label_verified"], event["timestamp_ms"]) == (4.0, None, 1588687728923)
    assert block.rejects["reason"].to_pylist() == ["timestamp: not an integer"]
    assert items(Amazon2023(), tmp_path) == []


def test_amazon_refuses_the_same_events_twice(tmp_path: Path) -> None:
    (tmp_path / "Toys.csv").write_text("user_id,parent_asin,rating,timestamp\n")
    (tmp_path / "Toys.jsonl").write_text(json.dumps(REVIEW))
    with pytest.raises(UserError, match="set 'files'"):
        Amazon2023().event_files(str(tmp_path))
    assert Amazon2023(files="*.jsonl").event_files(str(tmp_path)) == ["Toys.jsonl"]
    (tmp_path / "Toys.csv").unlink()
    (tmp_path / "Toys.jsonl").rename(tmp_path / "meta_Toys.jsonl")
    with pytest.raises(UserError, match="no reviews"):
        Amazon2023().event_files(str(tmp_path))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_source_file_loads(path: Path) -> None:
    source, prepare = load_source(str(path))
    config = read_config(prepare)
    assert config.kind != "search" or config.behaviour
    if config.kind == "actions":
        assert config.own.resolve(source.info, source.items_columns[1]).tasks
    behaviour = prepare.get("behaviour")
    assert behaviour is None or source.info["labels"][behaviour] == "bool"
    assert source.info["clock"] or prepare["split"]["kind"] == "leave_last_out"
    assert json.dumps(source.config)


@pytest.mark.long
@pytest.mark.shared_data
@pytest.mark.skipif(not DATA.is_dir(), reason="the real logs are not there")
@pytest.mark.parametrize(
    ("name", "events", "users", "items_used", "items_listed"),
    [
        ("amazon18_industrial", 22_743, 3_285, 3_541, 3_686),  # some listed items have no event left
        ("amazon14_beauty", 198_502, 22_363, 12_101, 12_101),
        ("amazon14_beauty_llm_sids", 198_502, 22_363, 12_101, 0),
        ("amazon18_instruments", 206_153, 24_772, 9_922, 0),
        ("movielens_small", 100_004, 671, 9_066, 9_125),
        ("kuairand_pure", 228_329, 25_156, 6_361, 7_583),
        ("beauty_search", 1_857_497, 22_363, None, 12_101),
        ("kuaisearch_demo", 25_430, None, None, 200),
    ],
)
def test_real_logs_are_read_whole(
    name: str, events: int, users: int | None, items_used: int | None, items_listed: int
) -> None:
    source, _ = load_source(str(CONFIGS / f"{name}.yaml"))
    block = read(source, DATA / name)
    assert (block.events.num_rows, block.rejects.num_rows, block.rows_read) == (events, 0, events)
    assert users is None or len(block.events["user_id"].unique()) == users
    assert items_used is None or len(block.events["item_id"].unique()) == items_used
    assert len(items(source, DATA / name)) == items_listed
    if name == "kuairand_pure":
        sums = {label: block.events[f"label_{label}"].to_pandas().sum() for label in source.info["labels"]}
        known = {"click": 100_900, "like": 3_915, "follow": 304, "comment": 579, "forward": 195, "hate": 190}
        assert {label: sums[label] for label in known} == known
        assert sums["long_view"] == 70_963
    if name == "beauty_search":
        assert len(block.events["request_id"].unique()) == 188_078
        assert len(block.events["query"].unique()) == 27_494
    if name == "kuaisearch_demo":
        clicks = sum(block.events["label_click"].to_pylist()) + sum(block.events["label_purchase"].to_pylist())
        assert clicks == 602
