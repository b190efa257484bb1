"""Logs in the layouts of H&M, MovieLens-1M and MIND become tables by their mappings, and
a later log takes the catalogue of an earlier one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from core.errors import UserError
from core.tables import read_manifest
from tests.fixtures.audited_tables import find_violations
from tests.fixtures.commands import prepare_log, read_rows
from tests.fixtures.log_layouts import LOG_WRITERS

SOURCES = Path("jobs/configs/sources")


def prepare_layout(name: str, folder: Path) -> dict[str, Any]:
    """Write a log of a layout to `raw` and prepare `tables`; return the statistics."""
    raw = LOG_WRITERS[name](folder / "raw")
    mapping = (SOURCES / f"{name}.yaml").read_text()
    statistics = prepare_log(mapping, raw, folder / "tables")
    assert find_violations(str(folder / "tables")) == {}
    assert statistics["raw"]["rejects"] == 0
    return statistics


def test_hm_has_an_event_per_purchase_and_all_articles(tmp_path: Path) -> None:
    prepare_layout("hm", tmp_path)

    events = read_rows(tmp_path / "tables", "events")
    items = read_rows(tmp_path / "tables", "items")
    log = pl.read_csv(tmp_path / "raw/transactions_train.csv", infer_schema=False)
    articles = pl.read_csv(tmp_path / "raw/articles.csv", infer_schema=False)
    # equal rows are purchases of several pieces
    assert sorted(row["item_id"] for row in events) == sorted(log["article_id"])
    assert len({row["cat_age"] for row in events}) > 10
    assert sorted(row["item_id"] for row in items) == sorted(articles["article_id"])
    assert [row["text_description"] for row in items].count(None) == 1
    info = read_manifest(str(tmp_path / "tables/items")).info
    assert info["items_without_behaviours"] == 20


def test_movielens_1m_has_an_event_per_rating_and_movies_with_years(
    tmp_path: Path,
) -> None:
    prepare_layout("movielens_1m", tmp_path)

    lines = (tmp_path / "raw/ratings.dat").read_text().splitlines()
    events = read_rows(tmp_path / "tables", "events")
    ratings = {
        f"{e['user_id']}::{e['item_id']}::{e['label_rating']:.0f}::{e['timestamp_ms'] // 1000}"
        for e in events
    }
    assert ratings == set(lines)
    assert all(e["label_liked"] == (e["label_rating"] >= 4) for e in events)
    assert {e["cat_gender"] for e in events} == {"F", "M"}
    movies = {row["item_id"]: row for row in read_rows(tmp_path / "tables", "items")}
    assert movies["7"]["text_title"] == "Les Misérables: Part 7 (1957)"
    assert movies["7"]["cat_year"] == "1957"
    assert movies["40"]["text_title"] == 'Untitled "No Year"'
    assert movies["40"]["cat_year"] is None


def test_mind_has_the_clicks_and_the_histories_before_the_log(tmp_path: Path) -> None:
    prepare_layout("mind", tmp_path)

    num_clicks = 0
    histories: dict[str, list[str]] = {}
    for path in (tmp_path / "raw").glob("*/behaviors.tsv"):
        for line in path.read_text().splitlines():
            _, user, _, clicked_before, shown = line.split("\t")
            num_clicks += shown.count("-1")
            histories[user] = clicked_before.split()
    events = read_rows(tmp_path / "tables", "events")
    earlier = [row for row in events if row["request_id"] == ""]
    assert len(earlier) == sum(map(len, histories.values()))
    assert sum(bool(e["label_click"]) for e in events) == num_clicks + len(earlier)
    for user, history in histories.items():  # the same in each row of the user
        items = [row["item_id"] for row in events if row["user_id"] == user]
        assert items[: len(history)] == history


FIRST_ARTICLE = 108775015
"""The articles of `write_hm` have every seventh number from this one on."""
UNSOLD = f"{FIRST_ARTICLE + 7 * 40:010d}"


def test_a_later_log_takes_the_catalogue_and_drops_other_items(tmp_path: Path) -> None:
    prepare_layout("hm", tmp_path)
    (tmp_path / "later").mkdir()
    (tmp_path / "later/transactions_train.csv").write_text(
        "t_dat,customer_id,article_id,price,sales_channel_id\n"
        "2019-04-01,new,0108775015,0.01,1\n"
        f"2019-04-02,new,{UNSOLD},0.01,1\n"
        "2019-04-02,new,0999999999,0.01,1\n"
        "2019-04-01,old,0108775022,0.01,1\n"
        "2019-04-05,old,0108775029,0.01,1\n"
    )
    (tmp_path / "later/customers.csv").write_text(
        "customer_id,FN,club_member_status,fashion_news_frequency,age\n"
        "new,1,ACTIVE,NONE,21\nold,1,ACTIVE,NONE,21\n"
    )
    mapping, raw = (SOURCES / "hm.yaml").read_text(), tmp_path / "later"
    options = {"catalogue": tmp_path / "tables", "core": 0}

    statistics = prepare_log(mapping, raw, tmp_path / "out", **options)

    assert find_violations(str(tmp_path / "out")) == {}
    assert statistics["requests"] == {"train": 0, "val": 0, "test": 4}
    items = [row["item_id"] for row in read_rows(tmp_path / "out", "items")]
    assert items == [row["item_id"] for row in read_rows(tmp_path / "tables", "items")]
    sequences = read_rows(tmp_path / "out", "sequences")
    assert {r["user_id"]: [items[i] for i in r["item_index"]] for r in sequences} == {
        "new": ["0108775015", UNSOLD],
        "old": ["0108775022", "0108775029"],
    }
    for key, value, words in (
        ("core", 5, "no user has 5 behaviours"),
        ("min_matched", 0.9, "'0999999999'"),
    ):
        with pytest.raises(UserError, match=words):
            prepare_log(mapping, raw, tmp_path / key, **options | {key: value})
