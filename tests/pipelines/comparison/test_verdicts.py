"""Test the comparison of models on the same users: intervals, pairs and verdicts."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines import tracking
from pipelines.comparison.compare import ALL_ITEMS, KNOWN_LEFT_OUT, compare
from pipelines.comparison.page import describe_best
from pipelines.comparison.tables import build_tables
from pipelines.comparison.verdicts import (
    BELOW,
    CLEARS,
    DRAWS,
    UNDECIDED,
    VERDICTS,
    Baseline,
    bootstrap_intervals,
    describe_verdict,
    judge_difference,
    judge_result,
    measure_differences,
)
from tests.fixtures.logged_runs import (
    evaluate_run,
    log_training,
    pack_values,
    to_result,
)

NUM_USERS = 600


def test_intervals_are_those_of_users_drawn_one_by_one():
    rng = np.random.default_rng(3)
    counts = rng.integers(1, 4, 40)
    differences = rng.normal(0.02, 0.5, (2, 40))
    draws = np.random.default_rng(0)
    means = []
    for _ in range(DRAWS):
        users = draws.integers(40, size=40)
        means.append(np.average(differences[:, users], axis=1, weights=counts[users]))

    intervals = bootstrap_intervals(differences, counts)

    mean = np.average(differences, axis=1, weights=counts)
    assert intervals["mean"].to_numpy() == pytest.approx(mean)
    for name, quantile in (("low", 0.025), ("high", 0.975)):
        assert intervals[name].to_numpy() == pytest.approx(
            np.quantile(means, quantile, axis=0)
        )


def test_a_verdict_needs_200_users_and_an_interval_without_zero():
    for low, high, num_users, metric, verdict in (
        (-0.15, -0.05, 200, "log_loss", CLEARS),
        (-0.1, 0.3, 200, "ndcg@10", UNDECIDED),
        (0.05, 0.15, 199, "ndcg@10", "-"),
    ):
        assert judge_difference(low, high, num_users, metric, VERDICTS) == verdict


@pytest.mark.long
def test_students_share_a_row_if_their_teachers_do(new_store, tmp_path):
    uri = new_store(tmp_path)
    values = [0.0, 1.0] * (NUM_USERS // 2)
    better = [min(1.0, value + 0.25) for value in values]

    def log_run(name: str, seed: int, values: list[float], **model: str) -> None:
        metrics = {"best/ndcg@10": 0.1}
        run = log_training(
            uri, f"{name}-{seed}", {"name": name, **model}, metrics, seed=seed
        )
        first_user = int(name == "popularity")  # other users
        evaluate_run(run, values, weights=f"w-{name}-{seed}", first_user=first_user)

    for seed, shift in ((1, 0.0), (2, 0.5)):
        moved = [value - shift for value in values]
        log_run("tiger", seed, moved)
        teacher = f"w-tiger-{seed}"
        log_run("sid_mlp", seed, [v - shift for v in better], teacher_hash=teacher)
    log_run("sasrec", 3, values)
    log_run("popularity", 1, values)

    comparison = compare(uri)
    differences = measure_differences(comparison)
    assert differences.is_empty()  # the only baseline has other users
    ((_, models, _),) = build_tables(comparison, differences)
    names = ["sid_mlp*", "popularity-1", "sasrec-3", "tiger*"]
    assert sorted(models["run"]) == sorted(names)


@pytest.mark.long
def test_each_ranking_is_compared_with_its_best_baseline(new_store, tmp_path):
    """Of runs with the same seed the newest that was evaluated counts."""
    uri = new_store(tmp_path)
    low, middle, high = (
        [value, value / 2] * (NUM_USERS // 2) for value in (0.2, 0.4, 0.6)
    )
    for name, plain, unseen in (
        ("best_number", high, low),
        ("shown_order", high, low),
        ("ease", low, middle),
        ("sasrec", low, low),
        ("sasrec", middle, high),
    ):
        value = 0.2 if name == "sasrec" else 0.1
        run = log_training(uri, name, {"name": name}, {"best/ndcg@10": value})
        if name == "best_number":
            tracking.Logger(run).tag(**{tracking.RANKS_BY_TAG: "price, ascending"})
        first = {"first/examples": NUM_USERS * 0.7}
        evaluate_run(run, plain, gauc_within_positions=0.61, **first)
        evaluate_run(run, unseen, options={"unseen": True}, **first)
    log_training(uri, "sasrec", {"name": "sasrec"}, {"best/ndcg@10": 0.1})

    comparison = compare(uri)
    differences = measure_differences(comparison)
    (_, table, notes), _ = build_tables(comparison, differences)

    columns = ["run", "ranking", "against", "verdict"]
    assert table.select(columns).rows() == [
        ("sasrec", ALL_ITEMS, "price, ascending", BELOW),
        ("sasrec", ALL_ITEMS, "shown_order", "worse"),
        ("sasrec [unseen]", KNOWN_LEFT_OUT, "ease", CLEARS),
        ("sasrec [unseen]", KNOWN_LEFT_OUT, "shown_order", "better"),
    ]
    assert float(table["test/ndcg@10"][0]) == pytest.approx(-0.15, abs=0.001)
    assert "30.0% of the test requests" in notes[0]
    answer = describe_best(comparison, differences)
    assert "Against price, ascending" in answer
    assert "positions: 0.6100" in answer


def test_a_result_is_judged_by_its_interval_also_with_few_users():
    """Otherwise jobs.daily would register models that are below the baseline."""
    low, high = pack_values([0.1, 0.2] * 50), pack_values([0.4, 0.6] * 50)
    result = to_result({"ndcg@10": 0.15}, {"ndcg@10": low}, 100)
    baselines = [Baseline("ease", "ease", {"ndcg@10": 0.5}, {"ndcg@10": high})]
    assert judge_result(result, baselines, "ndcg@10").verdict == BELOW


def test_a_search_model_is_judged_by_its_baseline_on_the_same_users():
    def pack(*values: float) -> dict[str, dict[str, str]]:
        return {"gauc": pack_values(np.linspace(*values, NUM_USERS).tolist())}

    result = to_result({"gauc": 0.8}, pack(0.8, 0.8), NUM_USERS)
    baselines = [
        Baseline("pair_ctr", "pair_ctr", {"gauc": 0.6}, pack(0.5, 0.7)),
        Baseline("shown_order", "shown_order", {"gauc": 0.9}, pack(0.9, 0.9), True),
    ]

    line, shown = describe_verdict(judge_result(result, baselines, "gauc")).splitlines()

    assert line.startswith("candidates: gauc 0.8000, best baseline (pair_ctr) 0.6000")
    assert line.endswith("clears it")
    assert "against the shown order: -0.10" in shown
