"""Own features of a search log: from the mapping file to the tables, as training has
them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from models.storage.tables import UserError, read_manifest, read_table
from pipelines.data.search.config import SearchConfig
from pipelines.data.search.features import feature_groups
from pipelines.data.sequences import custom_features
from pipelines.data.sequences.custom_features import (
    Moments,
    TrainingValues,
    describe_features,
)
from tests.fixtures.audited import broken, rewrite
from tests.fixtures.custom_features_log import make


def test_candidates_have_what_the_log_says_and_the_manifest_what_training_says(
    tables: str,
) -> None:
    assert broken(tables) == {}
    info = read_manifest(f"{tables}/sequences").info
    (number,), (category,) = info["own"]["numbers"], info["own"]["categories"]
    assert (number["name"], number["missing"]) == ("num_bm25", True)
    assert category == {
        "name": "cat_city",
        "values": ["Lima", "Oslo", "Rome"],
        "buckets": 0,
    }
    assert (
        "Kyiv" in read_table(f"{tables}/events")["cat_city"].to_pylist()
    )  # of the test window alone
    assert [group["name"] for group in info["groups"]] == [
        "cross",
        "document",
        "query",
        "context",
        "own",
    ]
    assert info["groups"][-1]["features"] == ["num_bm25", "cat_city"]


def test_features_are_grouped_by_what_they_are_about() -> None:
    names = ["pair_ctr_7d", "pair_gap", "item_clicks_1d", "query_searches_1d", "page"]
    groups = {
        group["name"]: group["features"]
        for group in feature_groups(SearchConfig(), names, {})
    }
    assert groups == {
        "cross": names[:1],
        "document": names[2:3],
        "query": [names[1], names[3]],
        "context": names[4:],
    }


def test_groups_are_those_of_the_source_file(tmp_path: Path, raw: Path) -> None:
    groups = {"match": ["bm25", "pair_ctr_7d"], "place": ["city"]}
    made = read_manifest(
        make(tmp_path, raw, settings={"search": {"groups": groups}}) + "/sequences"
    ).info["groups"]
    by_name = {group["name"]: group["features"] for group in made}
    assert by_name["match"] == ["pair_ctr_7d", "num_bm25"]
    assert by_name["place"] == ["cat_city"]
    assert "own" not in by_name
    assert "pair_ctr_7d" not in by_name["cross"]
    with pytest.raises(
        UserError,
        match="'bm52', which is not a feature of the log; the nearest is 'bm25'",
    ):
        make(
            tmp_path / "wrong",
            raw,
            settings={"search": {"groups": {"match": ["bm52"]}}},
        )
    with pytest.raises(UserError, match="'bm25' in 'a' and again in 'b'"):
        make(
            tmp_path / "twice",
            raw,
            settings={"search": {"groups": {"a": ["bm25"], "b": ["bm25"]}}},
        )


def other_brand(rows: list[dict], info: dict) -> None:
    rows[0]["requests"][0]["cat_brand"][0] = "b9"


def test_items_have_features_where_the_source_file_says_so(
    tmp_path: Path, raw: Path
) -> None:
    settings = {"search": {"item_features": ["brand", "weight"]}}
    tables = make(tmp_path, raw, settings=settings)
    info = read_manifest(f"{tables}/sequences").info
    assert info["item_features"] == ["num_weight", "cat_brand"]
    assert info["groups"][-1] == {
        "name": "items",
        "features": ["num_weight", "cat_brand"],
    }
    items = read_table(f"{tables}/items")["item_id"].to_pylist()
    row = read_table(f"{tables}/sequences").to_pylist()[3]
    number = [int(items[item][1:]) for item in row["requests"][0]["candidates"]]
    assert row["requests"][0]["cat_brand"] == [
        None if i == 0 else f"b{i % 4}" for i in number
    ]
    assert row["num_weight"] == pytest.approx(
        [int(items[item][1:]) / 10 for item in row["item_index"]]
    )
    assert broken(tables) == {}
    assert set(broken(rewrite(tables, tmp_path / "other", other_brand))) == {"features"}
    for names, message in (
        (
            ["brnd"],
            "item_features has 'brnd', which is not an attribute or number of items; the nearest is 'brand'",
        ),
        (["title"], "item_features has 'title', which is not an attribute"),
    ):
        with pytest.raises(UserError, match=message):
            make(tmp_path / "wrong", raw, settings={"search": {"item_features": names}})


def other_number(rows: list[dict], info: dict) -> None:
    rows[0]["requests"][0]["num_bm25"][0] = 9.0


def other_category(rows: list[dict], info: dict) -> None:
    rows[0]["requests"][0]["cat_city"][0] = "Bonn"


def value_of_the_test_window(rows: list[dict], info: dict) -> None:
    info["own"]["categories"][0]["values"] = ["Kyiv", "Lima", "Oslo", "Rome"]


def mean_of_the_whole_log(rows: list[dict], info: dict) -> None:
    info["own"]["numbers"][0]["mean"] += 0.01


@pytest.mark.parametrize(
    ("change", "rules"),
    [
        (other_number, {"features"}),
        (other_category, {"features"}),
        (value_of_the_test_window, {"features"}),
        (mean_of_the_whole_log, {"features"}),
    ],
)
def test_the_audit_finds_what_is_not_of_the_log_or_of_training(
    tables: str, tmp_path: Path, change: Any, rules: set[str]
) -> None:
    assert set(broken(rewrite(tables, tmp_path, change))) == rules


def test_moments_add_up_and_large_vocabularies_are_hashed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = [1e9 + 1, 1e9 + 2, None, 1e9 + 4, 1e9 + 9]
    whole = Moments.from_values(pl.Series(values))
    parts = Moments.from_values(pl.Series(values[:2])) + Moments.from_values(
        pl.Series([None], dtype=pl.Float64)
    )
    parts += Moments.from_values(pl.Series(values[3:]))
    for key, value in whole.to_info("x").items():
        assert parts.to_info("x")[key] == (
            pytest.approx(value) if isinstance(value, float) else value
        )
    assert whole.to_info("x")["std"] == pytest.approx(pl.Series(values).std(ddof=0))
    assert Moments.from_values(pl.Series([3.0, 3.0])).to_info("x") == {
        "name": "x",
        "mean": 3.0,
        "std": 0.0,
        "missing": False,
    }
    monkeypatch.setattr(custom_features, "MAX_VALUES", 2)
    seen = [
        TrainingValues.from_columns({"cat_a": pl.Series(part).to_arrow()})
        for part in (["x", "y"], ["y", "z"])
    ]
    assert describe_features(seen[:1], ["cat_a"])["categories"][0] == {
        "name": "cat_a",
        "values": ["x", "y"],
        "buckets": 0,
    }
    assert describe_features(seen, ["cat_a"])["categories"] == [
        {"name": "cat_a", "values": [], "buckets": custom_features.BUCKETS}
    ]
