"""Replay of logged searches: exact against loops, unbiased where the click model holds, errors in one line."""

from __future__ import annotations

import json
import math
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from search_tables import FEATURES, write_search, write_tables

from models import checkpoint, registry
from models.fit import FitConfig
from models.inputs import Inputs
from models.setup import set_up
from models.tables import UserError, join, read_table
from papers.loaded import load
from papers.replay import (
    Config,
    Log,
    bootstrap,
    click_rates,
    estimates_of,
    matched,
    new_theta,
    read_log,
    run,
    scores_of,
    user_sums,
)

SMALL = {
    "width": 16,
    "num_layers": 1,
    "max_history": 8,
    "dnn_width": 16,
    "tower_width": 8,
    "text_width": 8,
}


def draw(rng: np.random.Generator, users: int, requests: int, results: int) -> Log:
    """A log with random clicks and dwell times, some of the `results` positions in any order."""
    counts = rng.integers(1, results + 1, users * requests)
    click = rng.random(counts.sum()) < 0.4
    return Log(
        np.repeat(np.arange(users), requests),
        np.arange(users * requests),
        counts,
        np.concatenate([rng.permutation(results)[:n] for n in counts]),
        click,
        np.where(click, 1000 * rng.random(len(click)), 0.0),
    )


def looped(
    log: Log, scores: np.ndarray, theta: np.ndarray, page: int
) -> dict[int, np.ndarray]:
    """The sums of each user, request by request and result by result."""
    found: dict[int, np.ndarray] = {}
    begin = 0
    for user, count in zip(log.user.tolist(), log.counts.tolist(), strict=True):
        rows = range(begin, begin + count)
        begin += count
        ranked = sorted(rows, key=lambda i: -scores[i])
        at = sorted(log.position[i] for i in rows)
        new, place = {}, 0
        for _, tied in groupby(ranked, key=lambda i: scores[i]):
            tied = list(tied)
            places = range(place, place + len(tied))
            place += len(tied)
            share = sum(theta[at[k]] if k < page else 0.0 for k in places) / len(tied)
            new |= dict.fromkeys(tied, share)
        weights = {i: new[i] / theta[log.position[i]] for i in rows if log.click[i]}
        none = math.prod(1 - weight for weight in weights.values())
        dwell = sum(weight * log.dwell[i] for i, weight in weights.items())
        part = np.array([min(count, page), 1, sum(weights.values()), 1 - none, dwell])
        found[user] = found.get(user, 0) + part
    return found


@pytest.mark.parametrize("page", [1, 3, 10])
def test_sums_are_those_of_a_loop(page):
    rng = np.random.default_rng(page)
    log = draw(rng, 7, 5, 6)
    theta = np.array([1.0, 0.7, 0.5, 0.4, 0.3, 0.25])
    scores = rng.integers(0, 4, len(log.click)).astype(float)  # with ties
    users, sums = user_sums(log, scores, theta, page)
    want = looped(log, scores, theta, page)
    assert users.tolist() == sorted(want)
    np.testing.assert_allclose(
        sums, np.stack([want[user] for user in users.tolist()]), rtol=1e-12, atol=1e-12
    )


def test_the_logged_order_is_what_was_logged():
    log = draw(np.random.default_rng(0), 20, 4, 6)
    theta = np.linspace(1, 0.2, 6)
    _, sums = user_sums(log, -log.position.astype(float), theta, 10)
    ctr, searches, dwell = estimates_of(sums.sum(0))
    request = np.repeat(log.request, log.counts)
    assert ctr == pytest.approx(log.click.mean())
    assert searches == pytest.approx(
        len(set(request[log.click].tolist())) / len(log.counts)
    )
    assert dwell == pytest.approx(log.dwell.sum() / len(log.counts))


def test_estimates_are_unbiased_where_the_click_model_holds():
    """Clicks of the logged order, replayed in another one, against the chances of clicks in that one."""
    rng = np.random.default_rng(1)
    theta, interest = np.array([1.0, 0.6, 0.4, 0.2]), np.array([0.1, 0.3, 0.2, 0.7])
    searches = 200_000
    shown = rng.permuted(np.tile(np.arange(4), (searches, 1)), axis=1)  # by position
    click = rng.random(shown.shape) < theta * interest[shown]
    log = Log(
        np.arange(searches) % 1000,
        np.arange(searches),
        np.full(searches, 4),
        np.tile(np.arange(4), searches),
        click.ravel(),
        np.where(click, 100.0 * (1 + shown), 0.0).ravel(),
    )
    assert np.allclose(
        click_rates(log), theta, atol=0.02
    )  # in a random order, click rates are theta
    page = 3
    _, sums = user_sums(log, interest[shown].ravel(), theta, page)
    best = np.argsort(-interest)[:page]
    chance = theta[:page] * interest[best]
    truth = [
        chance.sum() / page,
        1 - np.prod(1 - chance),
        (chance * 100.0 * (1 + best)).sum(),
    ]
    found = bootstrap(sums, sums, seed=0, resamples=100)
    for name, value in zip(
        ("ctr", "click_search_ratio", "dwell_ms_per_page"), truth, strict=True
    ):
        estimate = found[name]
        assert estimate.low < estimate.value < estimate.high
        assert estimate.value == pytest.approx(
            value, abs=2 * (estimate.high - estimate.low)
        )
        assert estimate.value == pytest.approx(value, rel=0.03)
        lift = found[f"{name}_lift"]
        assert (lift.low, lift.high) == pytest.approx(
            (0, 0), abs=1e-12
        )  # the same resamples for both


def test_no_position_is_looked_at_more_than_the_one_before_it():
    """Clicks that do not depend on the position give 1 throughout, so that noise moves no estimate."""
    shown = np.tile(np.arange(4), 1000)
    click = np.isin(
        np.arange(4000),
        np.concatenate(
            [4 * np.arange(n) + p for p, n in enumerate((100, 110, 90, 50))]
        ),
    )
    log = Log(
        np.zeros(1000, int), np.arange(1000), np.full(1000, 4), shown, click, None
    )
    assert click_rates(log) == pytest.approx([1, 1, 90 / 105, 50 / 105])


def test_an_interval_covers_as_a_resampling_of_users_does():
    rng = np.random.default_rng(3)
    sums = np.stack(
        [
            np.full(60, 10.0),
            np.full(60, 1.0),
            rng.poisson(2, 60),
            rng.random(60),
            rng.random(60),
        ],
        1,
    )
    found = bootstrap(sums, sums, seed=0, resamples=2000)["ctr"]
    means = [rng.choice(sums[:, 2], 60).mean() / 10 for _ in range(4000)]
    low, high = np.percentile(means, [2.5, 97.5])
    assert found.low == pytest.approx(low, abs=0.004)
    assert found.high == pytest.approx(high, abs=0.004)


def test_places_are_the_logged_positions_up_to_the_page():
    theta = np.array([1.0, 0.8, 0.6, 0.5, 0.4, 0.3])
    found = new_theta(
        np.array([3.0, 2.0, 1.0, 0.0]), np.array([4]), np.array([5, 2, 3, 4]), theta, 3
    )
    assert found.tolist() == [0.6, 0.5, 0.4, 0.0]
    nothing = np.zeros(0, int)
    assert new_theta(np.zeros(0), nothing, nothing, theta, 3).tolist() == []


def test_dwell_comes_from_the_behaviour_of_the_same_result():
    keys = tuple(
        np.array(values)
        for values in ([0, 0, 1], [5, 5, 5], [2, 2, 2], [7, 8, 7], [0, 1, 0])
    )
    table = tuple(
        np.array(values) for values in ([1, 0], [5, 5], [2, 2], [7, 8], [0, 1])
    )
    assert matched(keys, table, np.array([30.0, np.nan])).tolist() == [0.0, 0.0, 30.0]


def test_dwell_of_a_result_that_is_later_than_its_request():
    keys = tuple(
        np.array(values)
        for values in ([0, 0, 0], [20, 5, 9], [2, 2, 2], [7, 7, 7], [0, 0, 1])
    )
    table = tuple(
        np.array(values)
        for values in ([0, 0, 0], [8, 23, 4], [2, 2, 2], [7, 7, 7], [0, 0, 1])
    )
    values = np.array([30.0, 40.0, 50.0])
    assert matched(keys, table, values, 3).tolist() == [40.0, 30.0, 0.0]
    assert matched(keys, table, values, 2).tolist() == [0.0, 0.0, 0.0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    folder = tmp_path_factory.mktemp("replay")
    tables, text = write_search(folder)
    for name in ("base", "qgs"):
        setup = set_up(
            {"name": name} | (SMALL if name == "qgs" else {}),
            FitConfig(),
            Inputs(tables, text=text),
        )
        checkpoint.save(folder / name, setup.model, setup.checkpoint(epoch=1))
    return folder, tables, text


def test_a_log_is_the_split_of_the_table_and_scores_are_in_its_order(trained):
    folder, tables, text = trained
    log = read_log(join(tables, "sequences"), "test")
    rows = read_table(join(tables, "sequences")).to_pylist()
    requests = [
        (user, request) for user, row in enumerate(rows) for request in row["requests"]
    ]
    chosen = [
        (user, request) for user, request in requests if request["split"] == "test"
    ]
    assert log.user.tolist() == [user for user, _ in chosen]
    assert log.click.tolist() == [
        click for _, request in chosen for click in request["label_click"]
    ]
    assert log.dwell is None
    base = load(str(folder / "base"), tables, text=text, split="test", device="cpu")
    scores, again = (scores_of(base, log, batch_size) for batch_size in (7, 64))
    np.testing.assert_allclose(scores, again, atol=1e-5)


def test_models_do_not_see_where_a_result_was_logged(trained, tmp_path):
    """The same log with other values of the feature `position` gives the same scores; with other rates not."""
    folder, tables, text = trained
    scores = {}
    for feature in ("", "position", "pair_ctr_7d"):
        setup = set_up({"name": "base"}, FitConfig(), Inputs(tables, text=text))
        loaded = registry.load(str(folder / "base"), setup.catalogue)[0]
        if feature:
            loaded.scale.mean[FEATURES.index(feature)] += (
                1  # as if all values were lower
            )
        checkpoint.save(tmp_path / f"base{feature}", loaded, setup.checkpoint(epoch=1))
        log = read_log(join(tables, "sequences"), "test")
        changed = load(
            str(tmp_path / f"base{feature}"),
            tables,
            text=text,
            split="test",
            device="cpu",
        )
        scores[feature] = scores_of(changed, log, 64)
    np.testing.assert_allclose(scores["position"], scores[""], atol=1e-6)
    assert np.abs(scores["pair_ctr_7d"] - scores[""]).max() > 1e-3


def test_estimates_are_printed_and_kept(trained, capsys):
    folder, tables, text = trained
    options = {"tables": tables, "text": text, "page": 3, "device": "cpu"}
    run(Config(str(folder / "qgs"), base=str(folder / "base"), **options))
    printed = capsys.readouterr().out
    assert "estimates on logged clicks, first 3 results" in printed
    assert "over base" in printed
    assert "dwell" not in printed
    kept = json.loads((folder / "qgs" / "replay-test.json").read_text())
    assert kept["replay@3/ctr_low"] <= kept["replay@3/ctr"] <= kept["replay@3/ctr_high"]
    mine = run(Config(str(folder / "qgs"), **options))
    assert mine.estimates["ctr"].value == pytest.approx(kept["replay@3/ctr"])
    assert mine.base == "the logged order"


def test_impossible_replays_are_refused(trained, tmp_path):
    _, tables, _ = trained
    with pytest.raises(UserError, match="has no result to replay"):
        read_log(join(tables, "sequences"), "nothing")
    rows = read_table(join(tables, "sequences")).to_pylist()
    for request in (request for row in rows for request in row["requests"]):
        request["positions"] = [0] * len(request["positions"])
    nowhere, _ = write_tables(tmp_path, rows, items=24, queries=8)
    with pytest.raises(
        UserError,
        match="says of no result where it was shown; name the log's `position`",
    ):
        read_log(join(nowhere, "sequences"), "test")
