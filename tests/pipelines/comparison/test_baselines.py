"""Test the comparison of models with the best untrained baseline, on the same users."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from core.schemas import RunRef
from models import registry
from models.metrics.per_user_metrics import PerUserValues
from pipelines import tracking
from pipelines.comparison.baselines import (
    BELOW,
    CLEARS,
    UNDECIDED,
    VERDICTS,
    baseline_tables,
    best_trained_baseline,
    compare_per_user,
    describe_verdict,
    explain_ranking,
    judge_result,
)
from pipelines.comparison.load import compare
from pipelines.comparison.over_users import Interval, judge_difference
from pipelines.comparison.rows import ALL_ITEMS, KNOWN_LEFT_OUT, Row, Run
from pipelines.comparison.runs import select
from pipelines.evaluation.baselines import Baseline
from tests.fixtures.comparison_rows import (
    evaluate_run,
    to_result,
)

NUM_USERS = 600


def build_row(repeats: int) -> Row:
    """Build a row with 1,000 test requests, of which `repeats` repeat an item."""
    metrics = {"test/examples": 1000.0, "test/first/examples": 1000.0 - repeats}
    return Row("sasrec", runs=[Run("id", "a", "1", True, "", "", metrics)])


def test_repeats_decide_which_ranking_comes_first() -> None:
    assert "20.0% of the test requests" in explain_ranking([build_row(200)])
    assert "the ranking of all items comes first" in explain_ranking([build_row(200)])
    assert "without known items comes first" in explain_ranking([build_row(10)])
    assert explain_ranking([]) == ""


def test_a_verdict_needs_an_interval_without_zero() -> None:
    above, below = Interval(0.1, 0.05, 0.15), Interval(-0.1, -0.15, -0.05)
    for interval, metric, verdict in (
        (above, "ndcg@10", CLEARS),
        (below, "ndcg@10", BELOW),
        (below, "log_loss", CLEARS),
        (Interval(0.1, -0.1, 0.3), "ndcg@10", UNDECIDED),
    ):
        assert judge_difference(interval, 200, metric, VERDICTS) == verdict


def pack_values(values: list[float], first_user: int = 0) -> dict[str, str]:
    """Return the values of consecutive users as an evaluation stores them."""
    users = torch.arange(first_user, first_user + len(values))
    return PerUserValues.from_batch(users, torch.tensor(values)).to_text()


def test_metrics_are_compared_only_on_the_same_users() -> None:
    ones, halves = pack_values([1.0] * 300), pack_values([0.5] * 300)
    comparison = compare_per_user(ones, halves)
    assert comparison is not None
    interval, num_users = comparison
    assert interval.mean == pytest.approx(0.5)
    assert num_users == 300

    other_users = pack_values([0.5] * 300, first_user=1)
    assert compare_per_user(ones, other_users) is None


def log_run(
    uri: str,
    folder: Path,
    name: str,
    evaluations: list[tuple[dict[str, bool], list[float]]],
    hashes: dict[str, str],
    validated: float = 0.1,
) -> RunRef:
    """Log a training with evaluations, each with its options and values per user."""
    config = {"model": {"name": name}, "fit": {"seed": 1, "metric": "ndcg@10"}}
    ref = tracking.open_run(
        uri, "retrieval/x", name, str(folder), config=config, hashes=hashes
    )
    if name == "best_number":
        tracking.Logger(ref).tag(**{tracking.RANKS_BY_TAG: "price, ascending"})
    logger = tracking.Logger(ref)
    logger.log({"val/ndcg@10": validated, "best/ndcg@10": validated}, 1)
    logger.end()
    for options, values in evaluations:
        metrics = {
            "ndcg@10": float(np.mean(values)),
            "examples": float(NUM_USERS),
            "first/examples": NUM_USERS * 0.7,
        }
        by_user = {"ndcg@10": pack_values(values)}
        evaluate_run(ref, metrics, by_user=by_user, options=options, hashes=hashes)
    return ref


@pytest.mark.long
def test_each_ranking_is_compared_with_its_best_baseline(
    new_store: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older of two runs with the same seed does not count."""
    uri, hashes = new_store(tmp_path), {"sequences": "s", "items": "i"}
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
        evaluations = [({}, plain), ({"unseen": True}, unseen)]
        log_run(uri, tmp_path, name, evaluations, hashes)

    comparison = compare(select(uri, ["retrieval/x"]))
    (table,) = baseline_tables(comparison)

    assert [line[:3] + line[-1:] for line in table.cells] == [
        ["sasrec", ALL_ITEMS, "price, ascending", BELOW],
        ["  against the shown order", ALL_ITEMS, "shown_order", "worse"],
        ["sasrec [unseen]", KNOWN_LEFT_OUT, "ease", CLEARS],
        ["  against the shown order", KNOWN_LEFT_OUT, "shown_order", "better"],
    ]
    assert "clicks on it favour it" in table.notes[-1]
    assert float(table.cells[0][5]) == pytest.approx(-0.15, abs=0.001)
    assert "30.0% of the test requests" in table.notes[0]
    assert "counts as a miss of every model" in table.notes[1]
    assert [row.ranking for row in comparison.rows[:3]] == [ALL_ITEMS] * 3

    monkeypatch.setattr("pipelines.comparison.over_users.MIN_USERS", NUM_USERS + 1)
    (table,) = baseline_tables(comparison)
    assert [line[-1] for line in table.cells] == ["-"] * 4


@pytest.mark.long
def test_a_training_is_compared_with_baselines_on_the_same_tables(
    new_store: Callable[[Path], str], tmp_path: Path
) -> None:
    uri = new_store(tmp_path)
    hashes, other_hashes = {"sequences": "a"}, {"sequences": "b"}
    run = log_run(uri, tmp_path, "sasrec", [], hashes, 0.9)
    assert best_trained_baseline(run, "ndcg@10") is None
    log_run(uri, tmp_path, "popularity", [], hashes, 0.1)
    log_run(uri, tmp_path, "ease", [], hashes, 0.2)
    log_run(uri, tmp_path, "own_items", [], other_hashes, 0.3)
    assert best_trained_baseline(run, "ndcg@10") == ("ease", 0.2)


def test_baselines_of_rankers_are_rates_and_numbers() -> None:
    baselines = ["pair_ctr", "item_ctr", "best_number", "shown_order"]
    assert registry.find_baselines("search") == baselines
    rates = ["base_rate", "item_rate", "user_rate"]
    assert registry.find_baselines("actions") == rates


def test_a_result_is_judged_by_its_interval_also_with_few_users() -> None:
    """Otherwise jobs.daily would register models that are below the baseline."""
    low, high = pack_values([0.1, 0.2] * 50), pack_values([0.4, 0.6] * 50)
    result = to_result({"ndcg@10": 0.15}, {"ndcg@10": low}, examples=100)
    baselines = [Baseline("ease", {"ndcg@10": 0.5}, {"ndcg@10": high})]
    assert judge_result(result, baselines, "ndcg@10")["verdict"] == BELOW


def test_a_search_model_is_judged_by_its_baseline_on_the_same_users() -> None:
    users = torch.arange(NUM_USERS)
    values = PerUserValues.from_batch(users, torch.full((NUM_USERS,), 0.8), 1)
    baseline_values = PerUserValues.from_batch(
        users, torch.linspace(0.5, 0.7, NUM_USERS), 1
    )
    result = to_result({"gauc": 0.8}, {"gauc": values.to_text()}, examples=NUM_USERS)
    shown_values = PerUserValues.from_batch(users, torch.full((NUM_USERS,), 0.9), 1)
    baselines = [
        Baseline("pair_ctr", {"gauc": 0.6}, {"gauc": baseline_values.to_text()}),
        Baseline("shown_order", {"gauc": 0.9}, {"gauc": shown_values.to_text()}, True),
    ]

    verdict = judge_result(result, baselines, "gauc")

    line, shown = describe_verdict(verdict).splitlines()
    assert line.startswith("candidates: gauc 0.8000, best baseline (pair_ctr) 0.6000")
    assert line.endswith("clears it")
    assert "against the shown order: -0.10" in shown
