"""Custom features of a search log, from the mapping file to the tables, with the values
and moments of the training split.
"""

from __future__ import annotations

import polars as pl
import pytest

from core.schemas import Category
from core.tables import read_manifest
from pipelines.prepare.sequences import custom_features
from pipelines.prepare.sequences.custom_features import (
    TrainingValues,
    describe_features,
)
from tests.fixtures.audited_tables import Row, copy_with_change, find_violations
from tests.fixtures.commands import read_column, read_rows
from tests.fixtures.custom_features_log import prepare_tables


def test_the_manifest_describes_custom_features_by_the_values_of_training(tables):
    assert find_violations(tables) == {}
    info = read_manifest(f"{tables}/sequences").info
    [number] = info["custom"]["numbers"]
    assert (number["name"], number["missing"]) == ("num_bm25", True)
    [category] = info["custom"]["categories"]
    assert category == {
        "name": "cat_city",
        "values": ["Lima", "Oslo", "Rome"],
        "buckets": 0,
    }
    # A city of the test window alone is no value of the category.
    assert "Kyiv" in read_column(tables, "events", "cat_city")


def test_the_settings_may_group_features_by_name(tmp_path, raw):
    groups = {"match": ["bm25", "pair_ctr_7d"], "place": ["city"]}

    tables = prepare_tables(tmp_path, raw, settings={"search": {"groups": groups}})

    info = read_manifest(f"{tables}/sequences").info
    by_name = {group["name"]: group["features"] for group in info["groups"]}
    assert by_name["match"] == ["pair_ctr_7d", "num_bm25"]
    assert by_name["place"] == ["cat_city"]
    assert "own" not in by_name
    assert "pair_ctr_7d" not in by_name["cross"]


@pytest.fixture(scope="module")
def tables_with_item_features(tmp_path_factory, raw) -> str:
    """Path of tables whose candidates and behaviours have features of their items."""
    settings = {"search": {"item_features": ["brand", "weight"]}}
    return prepare_tables(tmp_path_factory.mktemp("items"), raw, settings=settings)


def test_candidates_and_behaviours_may_have_features_of_their_items(
    tables_with_item_features,
):
    tables = tables_with_item_features

    assert find_violations(tables) == {}
    info = read_manifest(f"{tables}/sequences").info
    features = ["num_weight", "cat_brand"]
    assert info["item_features"] == features
    assert info["groups"][-1] == {"name": "items", "features": features}
    ids = read_column(tables, "items", "item_id")
    numbers = [int(id_.removeprefix("i")) for id_ in ids]  # of each item in the log
    row = read_rows(tables, "sequences")[3]
    request = row["requests"][0]
    candidates = [numbers[item] for item in request["candidates"]]
    brands = [None if number == 0 else f"b{number % 4}" for number in candidates]
    assert request["cat_brand"] == brands
    weights = [numbers[item] / 10 for item in row["item_index"]]
    assert row["num_weight"] == pytest.approx(weights)


def replace_number(rows: list[Row], info: Row) -> None:
    """Replace the number of a candidate."""
    rows[0]["requests"][0]["num_bm25"][0] = 9.0


def add_value_of_test(rows: list[Row], info: Row) -> None:
    """Add a city of the test window to the values of the category."""
    info["custom"]["categories"][0]["values"] = ["Kyiv", "Lima", "Oslo", "Rome"]


def shift_mean(rows: list[Row], info: Row) -> None:
    """Change the mean of a number, as if it were of the whole log."""
    info["custom"]["numbers"][0]["mean"] += 0.01


@pytest.mark.parametrize("change", [replace_number, add_value_of_test, shift_mean])
def test_the_audit_finds_values_that_are_not_of_the_log_or_of_training(
    tables, tmp_path, change
):
    assert set(find_violations(copy_with_change(tables, tmp_path, change))) == {
        "features"
    }


def test_a_category_with_more_values_than_the_limit_is_hashed(monkeypatch):
    monkeypatch.setattr(custom_features, "MAX_VALUES", 2)
    first, second = (
        TrainingValues.from_frame(pl.DataFrame({"cat_a": values}))
        for values in (["x", "y"], ["y", "z"])
    )

    (few,) = describe_features([first], ["cat_a"]).categories
    assert few == Category("cat_a", ("x", "y"))
    (many,) = describe_features([first, second], ["cat_a"]).categories
    assert many == Category("cat_a", buckets=custom_features.BUCKETS)
