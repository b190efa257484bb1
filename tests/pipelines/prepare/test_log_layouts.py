"""Logs in the layouts of H&M, MovieLens-1M and MIND become tables by their mappings, and
a later log takes the catalogue of an earlier one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl

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


def test_mind_has_the_shown_news_and_the_clicks(tmp_path: Path) -> None:
    prepare_layout("mind", tmp_path)

    shown: list[str] = []
    for path in (tmp_path / "raw").glob("*/behaviors.tsv"):
        for line in path.read_text().splitlines():
            shown += line.split("\t")[4].split()
    events = read_rows(tmp_path / "tables", "events")
    found = [f"{e['item_id']}-{int(e['label_click'])}" for e in events]
    assert sorted(found) == sorted(shown)


FIRST_ARTICLE = 108775015
"""The articles of `write_hm` have every seventh number from this one on."""
UNSOLD = f"{FIRST_ARTICLE + 7 * 40:010d}"


def test_hm_has_all_articles_with_their_zeros(tmp_path: Path) -> None:
    prepare_layout("hm", tmp_path)

    assert find_violations(str(tmp_path / "tables")) == {}
    items = [row["item_id"] for row in read_rows(tmp_path / "tables", "items")]
    assert {f"{FIRST_ARTICLE:010d}", UNSOLD} <= {*items}
