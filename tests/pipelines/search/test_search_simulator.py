"""The simulated search log: the same for the same settings, and the causes that it
claims.
"""

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
    SearchSettings,
    best_gauc,
    simulate_search,
    taste_from_clicks,
)
from pipelines.data.simulation import MAKERS, is_simulated


def digests(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }


@pytest.mark.parametrize(
    ("users", "items", "searches"), [(300, 400, 2000), (1, 36, 1), (5, 50, 5)]
)
def test_searches_are_exact_and_show_distinct_items(
    tmp_path: Path, users: int, items: int, searches: int
) -> None:
    simulate_search(str(tmp_path), SearchSettings(users, items, searches, seed=3))
    log = pl.read_parquet(tmp_path / "events-*.parquet")
    assert len(log) == searches * RESULTS
    assert log["user_id"].n_unique() == users
    assert log["search_id"].n_unique() == searches
    shown = log.group_by("search_id").agg(
        pl.col("item_id").n_unique(),
        pl.col("position").sort(),
        pl.col("query").n_unique(),
    )
    assert set(shown["item_id"]) == {RESULTS}
    assert set(shown["query"]) == {1}
    assert shown["position"].to_list() == [list(range(RESULTS))] * searches
    assert log["timestamp_ms"].is_sorted()
    assert log.filter(pl.col("purchase") & ~pl.col("click")).is_empty()
    assert log.filter(pl.col("dwell_ms").is_null() == pl.col("click")).is_empty()


def test_the_same_settings_give_the_same_bytes_and_others_do_not(
    tmp_path: Path,
) -> None:
    for name, share in (("a", 0.5), ("b", 0.5), ("c", 0.6)):
        simulate_search(str(tmp_path / name), SearchSettings(100, 50, 500, 1, share))
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert (
        digests(tmp_path / "a")["events-00000.parquet"]
        != digests(tmp_path / "c")["events-00000.parquet"]
    )
    settings = SearchSettings(100, 50, 500, 1, 0.5)
    assert is_simulated(str(tmp_path / "a"), settings, "search")
    assert not is_simulated(str(tmp_path / "c"), settings, "search")
    assert not is_simulated(str(tmp_path / "a"), settings)


@pytest.mark.parametrize("driven", [1.0, 0.0])
def test_clicks_have_the_causes_that_are_claimed(tmp_path: Path, driven: float) -> None:
    world, log = simulate_search(
        str(tmp_path), SearchSettings(1000, 400, 12_000, 42, driven)
    )
    rate = log.click.mean(0)
    assert rate[0] > 2 * rate[-1]  # position bias
    assert (np.diff(rate) < 0.03).all()
    assert log.click[log.liked].mean() > 2 * log.click[~log.liked].mean()  # taste
    of_intent = world.cluster[log.item] == log.intent[:, None]
    assert log.click[of_intent].mean() > 5 * log.click[~of_intent].mean()
    assert (
        log.purchase[log.click & log.liked].mean()
        > 4 * log.purchase[log.click & ~log.liked].mean()
    )
    # What tells the intent: the query, or the intent before.
    same_user = log.user[1:] == log.user[:-1]
    follows = (world.following_cluster[log.intent[:-1]] == log.intent[1:])[
        same_user
    ].mean()
    asked = (log.query_cluster == log.intent).mean()
    chance = 1 / len(world.following_cluster)
    assert (asked, follows) == pytest.approx(
        (1.0, chance) if driven else (chance, 0.82), abs=0.04
    )


def test_taste_by_query_is_told_by_history_and_query_together(tmp_path: Path) -> None:
    world, log = simulate_search(
        str(tmp_path), SearchSettings(300, 400, 6000, 0, taste="query")
    )
    brand = pl.read_parquet(tmp_path / "items.parquet")["brand"].to_numpy()
    frame = pl.DataFrame(
        {
            "user": np.repeat(log.user, RESULTS),
            "maker": brand[log.item.ravel()],
            "odd": world.cluster[log.item.ravel()] % 2,
            "liked": log.liked.ravel(),
            "click": log.click.ravel(),
        }
    )
    likes = frame.group_by("user", "maker", "odd").agg(
        pl.col("liked").n_unique().alias("kinds"), pl.col("liked").first()
    )
    assert likes["kinds"].max() == 1
    sides = likes.pivot("odd", index=["user", "maker"], values="liked").drop_nulls()
    assert (sides["0"] != sides["1"]).all()
    assert 0.45 < log.liked.mean() < 0.55
    assert log.click[log.liked].mean() > 2 * log.click[~log.liked].mean()


def test_some_searches_have_no_click_and_histories_fill(tmp_path: Path) -> None:
    _, log = simulate_search(str(tmp_path), SearchSettings(300, 100, 3000, 0))
    clicks = log.click.sum(1)
    assert 0.05 < (clicks == 0).mean() < 0.6
    assert 0.7 < clicks.mean() < 3


def test_who_knows_more_causes_can_rank_better(tmp_path: Path) -> None:
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
    for known in (
        "taste",
        "intent",
    ):  # the place is not known when results are ranked, and hides what is
        assert best[f"{known} and position"] > best[known] > 0.55
    assert (
        best["intent and taste"]
        > best["intent and earlier clicks"]
        > best["intent"]
        > best["taste"]
    )
    latest = best_gauc(world, log, 0.1)
    aucs = []  # by position alone: earlier results above later ones; searches in the order of time
    for click in log.click[np.argsort(log.time)]:
        pairs = [i < j for i in np.flatnonzero(click) for j in np.flatnonzero(~click)]
        aucs.append(np.mean(pairs) if pairs else np.nan)
    assert best["position"] == pytest.approx(np.nanmean(aucs))
    assert latest["position"] == pytest.approx(np.nanmean(aucs[-300:]))
    assert (
        latest["intent and earlier clicks"] > best["intent and earlier clicks"]
    )  # there are more of them


def test_nobody_knows_the_intent_where_queries_name_any_cluster(tmp_path: Path) -> None:
    for driven in (0.0, 0.5):
        best = best_gauc(
            *simulate_search(str(tmp_path), SearchSettings(100, 100, 1000, 0, driven))
        )
        assert set(best) == {"all causes", "taste and position", "position", "taste"}


@pytest.mark.parametrize("taste", ["user", "class", "query"])
def test_earlier_clicks_tell_taste_the_more_the_more_it_matters(
    tmp_path: Path, taste: Literal["user", "class", "query"]
) -> None:
    told = {}
    for chance in (0.85, 0.25, 0.05):
        best = best_gauc(
            *simulate_search(
                str(tmp_path),
                SearchSettings(300, 100, 9000, 0, taste=taste, disliked_click=chance),
            )
        )
        told[chance] = (
            best["intent, position and earlier clicks"] - best["intent and position"]
        )
    assert told[0.85] == pytest.approx(0, abs=0.002)
    assert told[0.05] > told[0.25] + 0.01


def test_earlier_clicks_are_those_of_the_user_in_earlier_searches(
    tmp_path: Path,
) -> None:
    """The same chances from a loop over searches, which keeps each user's clicks in a
    dictionary.
    """
    world, log = simulate_search(
        str(tmp_path),
        SearchSettings(20, 100, 400, 0, taste="query", disliked_click=0.1),
    )
    of_intent = (world.cluster[log.item] == log.intent[:, None]).astype(int)
    told = taste_from_clicks(world, log, of_intent, 0.5)
    seen: dict[int, list[tuple[int, int]]] = {}
    for s, user in enumerate(log.user.tolist()):
        clicks = seen.setdefault(user, [])
        for p in range(RESULTS):
            odd = world.cluster[log.item[s, p]] % 2
            agree = [1 if kind == odd else -1 for _, kind in clicks]
            of_maker = sum(
                a
                for a, (maker, _) in zip(agree, clicks, strict=True)
                if maker == log.maker[s, p]
            )
            odds = np.log(0.85 / 0.1) * of_maker - sum(agree) * 0.75 / 0.475 / len(
                MAKERS
            )
            assert told[s, p] == pytest.approx(1 / (1 + np.exp(-odds)))
        shown = zip(
            log.maker[s],
            world.cluster[log.item[s]] % 2,
            log.click[s] & (of_intent[s] == 1),
            strict=True,
        )
        clicks += [(maker, kind) for maker, kind, clicked in shown if clicked]


def test_taste_by_class_is_told_by_clicks_on_any_maker(tmp_path: Path) -> None:
    world, log = simulate_search(
        str(tmp_path),
        SearchSettings(40, 100, 800, 0, taste="class", disliked_click=0.1),
    )
    fine = log.maker % 2 == 1
    likes_fine = np.zeros(40, bool)
    likes_fine[log.user] = (log.liked == fine)[:, 0]
    assert (
        log.liked == (fine == likes_fine[log.user][:, None])
    ).all()  # makers of one class, all of them and no other
    assert 8 < likes_fine.sum() < 32
    of_intent = (world.cluster[log.item] == log.intent[:, None]).astype(int)
    told = taste_from_clicks(world, log, of_intent, 0.5)
    more_fine: dict[
        int, int
    ] = {}  # clicks on fine makers less those on cheap ones, of each user
    for s, user in enumerate(log.user.tolist()):
        odds = np.log(0.85 / 0.1) * more_fine.get(user, 0) * np.where(fine[s], 1, -1)
        assert told[s] == pytest.approx(1 / (1 + np.exp(-odds)))
        more_fine[user] = more_fine.get(user, 0) + int(
            np.where(fine[s], 1, -1)[log.click[s] & (of_intent[s] == 1)].sum()
        )
    best = best_gauc(world, log)
    assert best["intent and earlier clicks"] > best["intent"] + 0.03


@pytest.mark.parametrize("chance", [0.0, 0.9])
def test_impossible_chances_are_refused(chance: float) -> None:
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
def test_impossible_settings_are_refused(sizes: tuple) -> None:
    with pytest.raises(ValueError, match=r"give|least|between"):
        SearchSettings(*sizes)


def test_the_job_simulates_and_says_what_is_next(
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
    said = capsys.readouterr().out
    assert "60 searches of 20 users on 50 items, seed 42, 25% query-driven" in said
    assert "best GAUC of clicks over all searches, by all causes 0." in said
    assert (
        "best GAUC of clicks over the latest tenth, which models are tested on, by all causes 0."
        in said
    )
    assert "intent" not in said  # which no query tells for sure
    assert "simulated_search.yaml" in said
    job.run(config)
    assert "up to date" in capsys.readouterr().out
    for options in ({"query_driven": 0.5}, {"taste": "query"}, {"disliked_click": 0.1}):
        with pytest.raises(ValueError, match="add --kind search"):
            job.Config(output=str(tmp_path), **options)
    with pytest.raises(
        ValueError, match="taste is 'item'; it must be one of user, class, query"
    ):
        SearchSettings(taste="item")  # type: ignore[arg-type]
