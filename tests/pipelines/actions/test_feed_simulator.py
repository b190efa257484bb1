"""The simulated feed is reproducible, and users who like dogs or cats differ in their
actions only.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipelines.data.actions.simulator import (
    DAY_MS,
    ITEM_KINDS,
    PROBABILITY,
    FeedSettings,
    best_entropy,
    draw_feed,
    simulate_feed,
)
from pipelines.data.simulation import SPAN_MS, START_MS, is_simulated


def test_equal_settings_give_equal_files(tmp_path: Path) -> None:
    settings = FeedSettings(20, 30, 300, 1)
    simulate_feed(str(tmp_path / "a"), settings)
    simulate_feed(str(tmp_path / "b"), settings)
    simulate_feed(str(tmp_path / "c"), FeedSettings(20, 30, 300, 2))

    content = {
        folder: [
            path.read_bytes() for path in sorted((tmp_path / folder).glob("*.parquet"))
        ]
        for folder in "abc"
    }
    assert content["a"] == content["b"]
    assert content["a"] != content["c"]
    assert is_simulated(str(tmp_path / "a"), settings, "feed")
    assert not is_simulated(str(tmp_path / "a"), settings, "retrieval")


def test_users_are_shown_equal_items_and_differ_in_their_actions() -> None:
    feed = draw_feed(FeedSettings(400, 60, 60_000, 5))
    likes_dogs = feed.taste[feed.user] == 0

    item_shares = [
        np.bincount(feed.item[mask], minlength=60) / mask.sum()
        for mask in (likes_dogs, ~likes_dogs)
    ]
    assert np.abs(item_shares[0] - item_shares[1]).max() < 0.01

    liked = feed.kind[feed.item] == feed.taste[feed.user]
    for name, (chance_disliked, chance_liked) in PROBABILITY.items():
        action = feed.actions[name]
        assert action[liked].mean() == pytest.approx(chance_liked, abs=0.01), name
        assert action[~liked].mean() == pytest.approx(chance_disliked, abs=0.01), name
    # over all users, dogs and cats get equally many likes
    for kind in (0, 1):
        likes = feed.actions["like"][feed.kind[feed.item] == kind]
        assert likes.mean() == pytest.approx(0.5, abs=0.03)
    assert np.median(feed.dwell_ms[liked]) > 10_000 > np.median(feed.dwell_ms[~liked])
    assert abs(int((feed.taste == 0).sum()) - 200) <= 1


def test_items_shown_for_a_week_are_new_until_the_end_of_the_log() -> None:
    feed = draw_feed(FeedSettings(400, 3000, 60_000, 5, shown_days=7))
    first_time, last_time = np.full(3000, np.inf), np.full(3000, -np.inf)
    np.minimum.at(first_time, feed.item, feed.time)
    np.maximum.at(last_time, feed.item, feed.time)

    shown_ms = (last_time - first_time)[np.isfinite(first_time)]
    assert shown_ms.max() <= 8 * DAY_MS  # and an item's part of a day
    is_late = feed.time > START_MS + 0.9 * SPAN_MS
    is_new = first_time[feed.item] > START_MS + 0.82 * SPAN_MS
    assert is_late.sum() > 1000
    assert is_new[is_late].mean() > 0.98
    is_dog = feed.kind[feed.item] == 0
    likes_dogs = feed.taste[feed.user] == 0
    assert np.abs(is_dog[likes_dogs].mean() - is_dog.mean()) < 0.01


def test_the_best_entropy_is_that_of_a_model_with_the_true_taste_of_users() -> None:
    feed = draw_feed(FeedSettings(300, 60, 200_000, 6))
    liked = (feed.kind[feed.item] == feed.taste[feed.user]).astype(int)
    chance = np.array(PROBABILITY["like"])[liked]
    like = feed.actions["like"]

    loss = -np.where(like, np.log(chance), np.log(1 - chance)).mean()
    rate = like.mean()
    base_loss = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))

    assert best_entropy("like") == pytest.approx(0.469, abs=0.001)
    assert loss / base_loss == pytest.approx(best_entropy("like"), abs=0.01)


def test_the_kind_of_an_item_follows_from_its_description_and_author(
    tmp_path: Path,
) -> None:
    feed = simulate_feed(str(tmp_path / "raw"), FeedSettings(10, 64, 200, 1))

    items = pq.read_table(tmp_path / "raw" / "items.parquet").to_pylist()
    assert [ITEM_KINDS.index(row["kind"]) for row in items] == feed.kind.tolist()
    assert all(row["kind"] in row["description"] for row in items)
    kinds_by_author: dict[str, set[str]] = {}
    for row in items:
        kinds_by_author.setdefault(row["author"], set()).add(row["kind"])
    assert all(len(kinds) == 1 for kinds in kinds_by_author.values())


def test_events_are_in_the_order_of_time(tmp_path: Path) -> None:
    simulate_feed(str(tmp_path), FeedSettings(10, 64, 200, 1))
    events = pq.read_table(tmp_path / "events-00000.parquet")
    times = events["timestamp_ms"].to_pylist()
    assert events.num_rows == 200
    assert times == sorted(times)
