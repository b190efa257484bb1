"""The simulated search log is reproducible and has the causes of clicks that it claims."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl
import pytest

from jobs import simulate as job
from pipelines.data.search.simulator import (
    RESULTS,
    Searches,
    SearchSettings,
    best_gauc,
    simulate_search,
    taste_from_clicks,
)
from pipelines.data.simulation import MAKERS, World, is_simulated


def hash_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file by its name."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }


def is_in_intent(world: World, log: Searches) -> np.ndarray:
    """Return a mask (S, P) of the results whose cluster is the search's intent."""
    return world.cluster[log.item] == log.intent[:, None]


@pytest.mark.parametrize(
    ("users", "items", "searches"), [(300, 400, 2000), (1, 36, 1), (5, 50, 5)]
)
def test_a_log_has_the_requested_size_and_distinct_items_per_search(
    tmp_path: Path, users: int, items: int, searches: int
) -> None:
    simulate_search(str(tmp_path), SearchSettings(users, items, searches, seed=3))

    log = pl.read_parquet(tmp_path / "events-*.parquet")
    assert len(log) == searches * RESULTS
    assert log["user_id"].n_unique() == users
    assert log["search_id"].n_unique() == searches
    by_search = log.group_by("search_id").agg(
        pl.col("item_id").n_unique(),
        pl.col("position").sort(),
        pl.col("query").n_unique(),
    )
    assert set(by_search["item_id"]) == {RESULTS}
    assert set(by_search["query"]) == {1}
    assert by_search["position"].to_list() == [list(range(RESULTS))] * searches
    assert log["timestamp_ms"].is_sorted()
    assert log.filter(pl.col("purchase") & ~pl.col("click")).is_empty()
    assert log.filter(pl.col("dwell_ms").is_null() == pl.col("click")).is_empty()


def test_equal_settings_give_equal_bytes_and_other_settings_do_not(
    tmp_path: Path,
) -> None:
    for name, share in (("a", 0.5), ("b", 0.5), ("c", 0.6)):
        simulate_search(str(tmp_path / name), SearchSettings(100, 50, 500, 1, share))

    hashes, other_hashes = hash_files(tmp_path / "a"), hash_files(tmp_path / "c")
    assert hashes == hash_files(tmp_path / "b")
    assert hashes["events-00000.parquet"] != other_hashes["events-00000.parquet"]
    settings = SearchSettings(100, 50, 500, 1, 0.5)
    assert is_simulated(str(tmp_path / "a"), settings, "search")
    assert not is_simulated(str(tmp_path / "c"), settings, "search")
    assert not is_simulated(str(tmp_path / "a"), settings)


@pytest.mark.parametrize("driven", [1.0, 0.0])
def test_clicks_follow_position_taste_and_intent(tmp_path: Path, driven: float) -> None:
    settings = SearchSettings(1000, 400, 12_000, 42, driven)
    world, log = simulate_search(str(tmp_path), settings)

    rate_by_position = log.click.mean(0)
    assert rate_by_position[0] > 2 * rate_by_position[-1]
    assert (np.diff(rate_by_position) < 0.03).all()
    assert log.click[log.liked].mean() > 2 * log.click[~log.liked].mean()
    in_intent = is_in_intent(world, log)
    assert log.click[in_intent].mean() > 5 * log.click[~in_intent].mean()
    purchases_of_liked = log.purchase[log.click & log.liked]
    purchases_of_disliked = log.purchase[log.click & ~log.liked]
    assert purchases_of_liked.mean() > 4 * purchases_of_disliked.mean()


@pytest.mark.parametrize("driven", [1.0, 0.0])
def test_the_intent_follows_the_query_or_the_previous_intent(
    tmp_path: Path, driven: float
) -> None:
    settings = SearchSettings(1000, 400, 12_000, 42, driven)
    world, log = simulate_search(str(tmp_path), settings)

    same_user = log.user[1:] == log.user[:-1]
    follows = world.following_cluster[log.intent[:-1]] == log.intent[1:]
    share_of_query = (log.query_cluster == log.intent).mean()
    share_of_previous = follows[same_user].mean()

    chance = 1 / len(world.following_cluster)
    expected = (1.0, chance) if driven else (chance, 0.82)
    assert (share_of_query, share_of_previous) == pytest.approx(expected, abs=0.04)


def test_taste_by_query_depends_on_maker_and_cluster_together(tmp_path: Path) -> None:
    settings = SearchSettings(300, 400, 6000, 0, taste="query")
    world, log = simulate_search(str(tmp_path), settings)
    brand = pl.read_parquet(tmp_path / "items.parquet")["brand"].to_numpy()
    results = pl.DataFrame(
        {
            "user": np.repeat(log.user, RESULTS),
            "maker": brand[log.item.ravel()],
            "odd": world.cluster[log.item.ravel()] % 2,
            "liked": log.liked.ravel(),
        }
    )

    likes = results.group_by("user", "maker", "odd").agg(
        pl.col("liked").n_unique().alias("num_values"), pl.col("liked").first()
    )

    assert likes["num_values"].max() == 1
    by_parity = likes.pivot("odd", index=["user", "maker"], values="liked")
    by_parity = by_parity.drop_nulls()
    assert (by_parity["0"] != by_parity["1"]).all()
    assert 0.45 < log.liked.mean() < 0.55
    assert log.click[log.liked].mean() > 2 * log.click[~log.liked].mean()


def test_some_searches_have_no_click_and_most_have_one_to_three(tmp_path: Path) -> None:
    _, log = simulate_search(str(tmp_path), SearchSettings(300, 100, 3000, 0))
    clicks = log.click.sum(1)
    assert 0.05 < (clicks == 0).mean() < 0.6
    assert 0.7 < clicks.mean() < 3


def test_more_visible_causes_give_a_higher_best_gauc(tmp_path: Path) -> None:
    world, log = simulate_search(str(tmp_path), SearchSettings(300, 100, 3000, 0))
    best = best_gauc(world, log)

    assert (
        best["all causes"]
        > best["intent and position"]
        > best["taste and position"]
        > best["position"]
        > 0.55
    )
    assert best["all causes"] > best["intent, position and earlier clicks"]
    # without the position, which is unknown when results are ranked
    assert best["taste and position"] > best["taste"] > 0.55
    assert best["intent and position"] > best["intent"] > 0.55
    assert (
        best["intent and taste"]
        > best["intent and earlier clicks"]
        > best["intent"]
        > best["taste"]
    )


def test_the_best_gauc_of_the_position_is_that_of_a_ranking_by_position(
    tmp_path: Path,
) -> None:
    world, log = simulate_search(str(tmp_path), SearchSettings(300, 100, 3000, 0))
    best, latest = best_gauc(world, log), best_gauc(world, log, 0.1)

    aucs = []
    for click in log.click[np.argsort(log.time)]:
        clicked, not_clicked = np.flatnonzero(click), np.flatnonzero(~click)
        # (positives, negatives): whether the positive is ranked higher
        is_higher = clicked[:, None] < not_clicked
        aucs.append(is_higher.mean() if is_higher.size else np.nan)

    assert best["position"] == pytest.approx(np.nanmean(aucs))
    assert latest["position"] == pytest.approx(np.nanmean(aucs[-300:]))
    # users of later searches have more earlier clicks
    assert latest["intent and earlier clicks"] > best["intent and earlier clicks"]


@pytest.mark.parametrize("driven", [0.0, 0.5])
def test_the_intent_is_no_visible_cause_where_queries_name_any_cluster(
    tmp_path: Path, driven: float
) -> None:
    settings = SearchSettings(100, 100, 1000, 0, driven)
    best = best_gauc(*simulate_search(str(tmp_path), settings))
    assert set(best) == {"all causes", "taste and position", "position", "taste"}


@pytest.mark.parametrize("taste", ["user", "class", "query"])
def test_earlier_clicks_reveal_more_taste_the_fewer_disliked_items_are_clicked(
    tmp_path: Path, taste: Literal["user", "class", "query"]
) -> None:
    gains = {}
    for chance in (0.85, 0.25, 0.05):
        settings = SearchSettings(300, 100, 9000, 0, taste=taste, disliked_click=chance)
        best = best_gauc(*simulate_search(str(tmp_path), settings))
        with_clicks = best["intent, position and earlier clicks"]
        gains[chance] = with_clicks - best["intent and position"]

    assert gains[0.85] == pytest.approx(0, abs=0.002)
    assert gains[0.05] > gains[0.25] + 0.01


LOG_ODDS_OF_CLICK = np.log(0.85 / 0.1)
"""Evidence of one click for a liked item, where 10% of disliked items are clicked."""


def to_probability(log_odds: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-log_odds))


def test_taste_by_query_is_inferred_from_the_user_s_clicks_in_earlier_searches(
    tmp_path: Path,
) -> None:
    """The reference is a loop over searches that stores each user's clicks."""
    settings = SearchSettings(20, 100, 400, 0, taste="query", disliked_click=0.1)
    world, log = simulate_search(str(tmp_path), settings)
    in_intent = is_in_intent(world, log)
    is_odd = world.cluster[log.item] % 2

    probabilities = taste_from_clicks(world, log, in_intent.astype(int), 0.5)

    clicks_by_user: dict[int, list[tuple[int, int]]] = {}
    for s, user in enumerate(log.user.tolist()):
        clicks = clicks_by_user.setdefault(user, [])
        for p in range(RESULTS):
            # +1 for a click on a cluster of the same parity, -1 for one of the other
            all_votes, maker_votes = 0, 0
            for maker, odd in clicks:
                vote = 1 if odd == is_odd[s, p] else -1
                all_votes += vote
                if maker == log.maker[s, p]:
                    maker_votes += vote
            log_odds = LOG_ODDS_OF_CLICK * maker_votes
            log_odds -= all_votes * 0.75 / 0.475 / len(MAKERS)
            assert probabilities[s, p] == pytest.approx(to_probability(log_odds))
        is_counted = log.click[s] & in_intent[s]
        clicks += zip(log.maker[s][is_counted], is_odd[s][is_counted], strict=True)


def simulate_class_taste(folder: Path) -> tuple[World, Searches]:
    """Simulate users who like either all fine makers or all cheap ones."""
    settings = SearchSettings(40, 100, 800, 0, taste="class", disliked_click=0.1)
    return simulate_search(str(folder), settings)


def test_taste_by_class_is_for_all_makers_of_one_class(tmp_path: Path) -> None:
    _, log = simulate_class_taste(tmp_path)
    is_fine = log.maker % 2 == 1
    likes_fine = np.zeros(40, bool)
    likes_fine[log.user] = (log.liked == is_fine)[:, 0]
    assert (log.liked == (is_fine == likes_fine[log.user][:, None])).all()
    assert 8 < likes_fine.sum() < 32


def test_taste_by_class_is_inferred_from_earlier_clicks_on_any_maker(
    tmp_path: Path,
) -> None:
    world, log = simulate_class_taste(tmp_path)
    in_intent = is_in_intent(world, log)
    # +1 for a fine maker, -1 for a cheap maker
    maker_class = np.where(log.maker % 2 == 1, 1, -1)

    probabilities = taste_from_clicks(world, log, in_intent.astype(int), 0.5)

    votes_by_user: dict[int, int] = {}
    for s, user in enumerate(log.user.tolist()):
        votes = votes_by_user.get(user, 0)
        expected = to_probability(LOG_ODDS_OF_CLICK * votes * maker_class[s])
        assert probabilities[s] == pytest.approx(expected)
        votes_by_user[user] = votes + maker_class[s][log.click[s] & in_intent[s]].sum()
    best = best_gauc(world, log)
    assert best["intent and earlier clicks"] > best["intent"] + 0.03


@pytest.mark.parametrize("chance", [0.0, 0.9])
def test_click_chances_of_disliked_items_out_of_range_are_rejected(
    chance: float,
) -> None:
    with pytest.raises(
        ValueError,
        match=f"disliked_click is {chance}; it must be above 0 and at most 0.85",
    ):
        SearchSettings(disliked_click=chance)


@pytest.mark.parametrize(
    "sizes",
    [
        (0, 50, 10, 1, 1.0),
        (10, 35, 10, 1, 1.0),
        (10, 50, 9, 1, 1.0),
        (1, 50, 9, 1, 1.5),
    ],
)
def test_sizes_out_of_range_are_rejected(sizes: tuple) -> None:
    with pytest.raises(ValueError, match=r"give|least|between"):
        SearchSettings(*sizes)


def test_an_unknown_taste_is_rejected() -> None:
    with pytest.raises(
        ValueError, match="taste is 'item'; it must be one of user, class, query"
    ):
        SearchSettings(taste="item")  # type: ignore[arg-type]


def test_the_job_simulates_once_and_reports_the_best_gauc_and_the_next_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = job.Config(
        output=str(tmp_path),
        kind="search",
        users=20,
        items=50,
        events=60,
        query_driven=0.25,
    )

    job.run(config)
    output = capsys.readouterr().out
    assert "60 searches of 20 users on 50 items, seed 42, 25% query-driven" in output
    assert "best GAUC of clicks over all searches, by all causes 0." in output
    assert (
        "best GAUC of clicks over the latest tenth, which models are tested on, by all causes 0."
        in output
    )
    assert "intent" not in output  # it is not visible, as queries name any cluster
    assert "simulated_search.yaml" in output

    job.run(config)
    assert "up to date" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options", [{"query_driven": 0.5}, {"taste": "query"}, {"disliked_click": 0.1}]
)
def test_options_of_searches_are_rejected_for_other_kinds(
    tmp_path: Path, options: dict
) -> None:
    with pytest.raises(ValueError, match="add --kind search"):
        job.Config(output=str(tmp_path), **options)
