"""Simulated logs have exact sizes, depend on their settings alone, and behaviours follow
the causes that the settings name.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from core.errors import UserError
from pipelines.prepare.kinds.registry import KINDS
from pipelines.prepare.kinds.simulation import DAY_MS, MAKERS, write_log
from pipelines.prepare.settings.simulation import Settings


def draw_log(folder: Path, kind: str, settings: Settings) -> pl.DataFrame:
    """Write a log, and return its rows with the columns of their items."""
    assert write_log(str(folder), kind, settings, KINDS[kind].draw_log)
    log = pl.read_parquet(folder / "events-*.parquet")
    items = pl.read_parquet(folder / "items.parquet")
    assert items["item_id"].n_unique() == settings.items
    return log.join(items, on="item_id", maintain_order="left")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(200, 60, 2000), (1, 36, 1), (50, 1000, 50)])
def test_sizes_are_exact_and_equal_settings_give_equal_rows(tmp_path, kind, sizes):
    settings = Settings(*sizes, seed=1, files=3)
    log = draw_log(tmp_path / "a", kind, settings)

    assert not write_log(str(tmp_path / "a"), kind, settings, KINDS[kind].draw_log)
    assert log.equals(draw_log(tmp_path / "b", kind, settings))
    assert not log.equals(draw_log(tmp_path / "c", kind, Settings(*sizes, seed=2)))
    assert log["timestamp_ms"].is_sorted()
    assert log["user_id"].n_unique() == sizes[0]
    assert len(log) == sizes[2] * (10 if kind == "search" else 1)


def test_items_follow_from_the_last_item_and_not_from_popularity(tmp_path):
    log = draw_log(tmp_path, "retrieval", Settings()).sort("user_id", "timestamp_ms")

    last = pl.col("item_id").shift().over("user_id").alias("last")
    pairs = log.with_columns(last).drop_nulls("last").group_by("last", "item_id").len()
    ranked = pairs.with_columns(
        pl.col("len").rank("ordinal", descending=True).over("last")
    )
    following = ranked.filter(pl.col("len") <= 3).join(pairs, on=["last", "item_id"])
    assert 0.6 < following["len_right"].sum() / pairs["len"].sum() < 0.75
    popular = log["item_id"].value_counts(sort=True)["count"].head(10).sum()
    assert popular / len(log) < 0.15


def test_clicks_follow_the_query_the_position_and_the_class_of_makers(tmp_path):
    settings = Settings(1000, taste="class", disliked_click=0.05)
    log = draw_log(tmp_path, "search", settings)

    searches = log.group_by("search_id").agg(pl.col("item_id", "position").n_unique())
    assert set(searches["item_id"]) == set(searches["position"]) == {10}
    by_position = log.group_by("position").agg(pl.col("click").mean()).sort("position")
    assert by_position["click"][0] > 2 * by_position["click"][-1]
    noun = pl.col("query").str.split(" ").list.last()
    is_named = pl.col("description").str.contains(pl.format(" {},", noun))
    is_fine = pl.col("brand").is_in(MAKERS[1::2])
    clicks = dict(log.group_by(is_named).agg(pl.col("click").mean()).rows())
    assert clicks[True] > 5 * clicks[False]
    # of each user, the class with more clicks
    of_class = log.filter("click", is_named).group_by("user_id").agg(is_fine.mean())
    assert (of_class["brand"] - 0.5).abs().mean() > 0.35
    assert log.filter(pl.col("dwell_ms").is_null() == pl.col("click")).is_empty()


def test_users_like_dogs_or_cats_among_items_that_all_are_shown(tmp_path):
    settings = Settings(200, 3000, 60_000, shown_days=7)
    log = draw_log(tmp_path, "actions", settings)

    rates = log.group_by("user_id", "kind").agg(pl.col("like").mean())
    by_kind = rates.pivot("kind", index="user_id", values="like")
    likes = by_kind["dog"] - by_kind["cat"]
    assert likes.abs().min() > 0.3
    assert (likes > 0).sum() == 100
    dogs = log.group_by("user_id").agg((pl.col("kind") == "dog").mean())
    assert dogs["kind"].mean() == pytest.approx(0.5, abs=0.02)
    shown = log.group_by("item_id").agg(
        days=(pl.col("timestamp_ms").max() - pl.col("timestamp_ms").min()) / DAY_MS
    )
    assert 6 < shown["days"].max() <= 8


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="holds other files"):
        draw_log(tmp_path, "retrieval", Settings())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
