"""The simulated feed: reproducible, and dog and cat users differ in their actions only."""

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


def test_the_same_settings_give_the_same_log(tmp_path: Path) -> None:
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        simulate_feed(str(tmp_path / folder), FeedSettings(20, 30, 300, seed))
    content = {
        folder: [
            path.read_bytes() for path in sorted((tmp_path / folder).glob("*.parquet"))
        ]
        for folder in "abc"
    }
    assert content["a"] == content["b"]
    assert content["a"] != content["c"]
    assert is_simulated(str(tmp_path / "a"), FeedSettings(20, 30, 300, 1), "feed")
    assert not is_simulated(
        str(tmp_path / "a"), FeedSettings(20, 30, 300, 1), "retrieval"
    )


def test_what_is_shown_tells_nothing_and_actions_tell_all() -> None:
    feed = draw_feed(FeedSettings(400, 60, 60_000, 5))
    dog_user = feed.taste[feed.user] == 0
    shown = np.array(
        [
            np.bincount(feed.item[mine], minlength=60) / mine.sum()
            for mine in (dog_user, ~dog_user)
        ]
    )
    assert np.abs(shown[0] - shown[1]).max() < 0.01
    liked = feed.kind[feed.item] == feed.taste[feed.user]
    for name, (other, own) in PROBABILITY.items():
        assert feed.actions[name][liked].mean() == pytest.approx(own, abs=0.01), name
        assert feed.actions[name][~liked].mean() == pytest.approx(other, abs=0.01), name
    for kind in (0, 1):  # what an item got from all users is the same for dogs and cats
        assert feed.actions["like"][
            feed.kind[feed.item] == kind
        ].mean() == pytest.approx(0.5, abs=0.03)
    assert np.median(feed.dwell_ms[liked]) > 10_000 > np.median(feed.dwell_ms[~liked])
    assert abs(int((feed.taste == 0).sum()) - 200) <= 1


def test_items_that_are_shown_for_a_week_are_new_to_the_end_of_the_log() -> None:
    feed = draw_feed(FeedSettings(400, 3000, 60_000, 5, shown_days=7))
    first, last = np.full(3000, np.inf), np.full(3000, -np.inf)
    np.minimum.at(first, feed.item, feed.time)
    np.maximum.at(last, feed.item, feed.time)
    assert (last - first)[
        np.isfinite(first)
    ].max() <= 8 * DAY_MS  # and an item's part of a day
    late = feed.time > START_MS + 0.9 * SPAN_MS
    new = first[feed.item] > START_MS + 0.82 * SPAN_MS
    assert late.sum() > 1000
    assert new[late].mean() > 0.98
    dogs = feed.kind[feed.item] == 0
    assert np.abs(dogs[feed.taste[feed.user] == 0].mean() - dogs.mean()) < 0.01


def test_the_best_entropy_is_that_of_a_model_which_knows_the_taste() -> None:
    feed = draw_feed(FeedSettings(300, 60, 200_000, 6))
    liked = (feed.kind[feed.item] == feed.taste[feed.user]).astype(int)
    chance = np.array(PROBABILITY["like"])[liked]
    like, rate = feed.actions["like"], feed.actions["like"].mean()
    loss = -np.where(like, np.log(chance), np.log(1 - chance)).mean()
    assert best_entropy("like") == pytest.approx(0.469, abs=0.001)
    assert loss / -(
        rate * np.log(rate) + (1 - rate) * np.log(1 - rate)
    ) == pytest.approx(best_entropy("like"), abs=0.01)


def test_items_show_what_their_text_and_author_say(tmp_path: Path) -> None:
    feed = simulate_feed(str(tmp_path / "raw"), FeedSettings(10, 64, 200, 1))
    items = pq.read_table(tmp_path / "raw" / "items.parquet").to_pylist()
    assert [ITEM_KINDS.index(row["kind"]) for row in items] == feed.kind.tolist()
    assert all(row["kind"] in row["description"] for row in items)
    of_author: dict[str, set[str]] = {}
    for row in items:
        of_author.setdefault(row["author"], set()).add(row["kind"])
    assert all(len(kinds) == 1 for kinds in of_author.values())
    events = pq.read_table(tmp_path / "raw" / "events-00000.parquet")
    assert events.num_rows == 200
    assert events["timestamp_ms"].to_pylist() == sorted(
        events["timestamp_ms"].to_pylist()
    )
