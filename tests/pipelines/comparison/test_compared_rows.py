"""Test which MLflow runs a comparison has, which of them share a row, and their order."""

from __future__ import annotations

import json
import statistics

import pytest

from core.errors import UserError
from core.files import hold_lock
from pipelines import tracking
from pipelines.comparison.compare import (
    compare,
    find_best_run,
)
from tests.fixtures.logged_runs import evaluate_run, log_sweep, log_training


@pytest.fixture
def uri(new_store, tmp_path) -> str:
    """Create an empty store."""
    return new_store(tmp_path)


def test_a_row_has_mean_and_deviation_of_the_newest_run_of_each_seed(uri):
    values = {1: 0.25, 2: 0.5, 3: 0.125}
    log_training(uri, "sasrec-1", {"name": "sasrec"}, {"test/ndcg@10": 0.9}, seed=1)
    for seed, value in values.items():
        metrics = {"test/ndcg@10": value, "best/ndcg@10": value / 2}
        log_training(uri, f"sasrec-{seed}", {"name": "sasrec"}, metrics, seed=seed)
    wide = {"name": "sasrec", "dim": 9}
    log_training(uri, "wide", wide, {"test/ndcg@10": 0.4, "best/ndcg@10": 0.1})

    comparison = compare(uri, "retrieval/x")

    wide_row, row = comparison.rows.rows(named=True)
    assert (wide_row["name"], wide_row["settings"]) == ("wide", "model.dim 9")
    assert (row["name"], row["num_seeds"]) == ("sasrec*", 3)
    assert row["test/ndcg@10"] == pytest.approx(statistics.fmean(values.values()))
    assert row["test/ndcg@10 ±"] == pytest.approx(statistics.stdev(values.values()))
    assert row["val/ndcg@10"] == pytest.approx(row["test/ndcg@10"] / 2)
    assert find_best_run(comparison)["name"] == "sasrec-2"


def test_a_training_has_a_row_per_options_of_its_evaluations(uri):
    metrics = {"best/ndcg@10": 0.1, "best/looked_at_it/gauc": 0.6}
    training = log_training(uri, "tiger", {"name": "tiger", "beam": 50}, metrics)
    evaluate_run(training, [0.2], weights="before", **{"looked_at_it/gauc": 0.8})
    # the beam of the model's config
    evaluate_run(training, [0.3], options={"beam": 50}, **{"looked_at_it/gauc": 0.9})
    evaluate_run(training, [0.4], options={"beam": 5, "unseen": True})
    evaluate_run(training, [0.5], options={"batch_size": 3})
    evaluate_run(training, [0.6], sequences="other")

    rows = {row["name"]: row for row in compare(uri).rows.iter_rows(named=True)}

    plain = rows.pop("tiger")
    assert plain["test/ndcg@10"] == 0.5  # the newest evaluation
    assert plain["test/looked_at_it/gauc"] == 0.9  # with the newest weights
    assert plain["val/looked_at_it/gauc"] == 0.6
    values = {name: row["test/ndcg@10"] for name, row in rows.items()}
    assert values == {"tiger [beam 5, unseen]": 0.4}
    (other,) = rows.values()
    assert other["val/ndcg@10"] is None
    assert other["log"] != plain["log"]


def test_rows_are_sorted_by_the_metric_of_their_kind(uri):
    for weight in (0.5, 0.75, 1.0):
        model = {"name": "attn_mvp", "action_weight": weight}
        metrics = {
            "test/mean/normalised_entropy": 0.9 - weight / 10,
            "test/auc": weight,
        }
        log_training(uri, f"lambda-{weight}", model, metrics)

    comparison = compare(uri)
    assert comparison.metric == "mean/normalised_entropy"
    names = ["lambda-1.0", "lambda-0.75", "lambda-0.5"]  # lower is better
    assert comparison.rows["name"].to_list() == names

    log_training(uri, "qgs", {"name": "qgs"}, {"test/gauc": 0.66})
    assert compare(uri).metric == "gauc"
    assert compare(uri, metric="auc").rows["name"][0] == "lambda-1.0"
    with pytest.raises(UserError, match="'mrr' on val or test; it takes 'auc'"):
        compare(uri, metric="mrr")


def test_a_sweep_shows_its_best_settings_or_all_trials(uri):
    teacher = log_training(uri, "tiger", {"name": "tiger"}, {"test/ndcg@10": 0.05})
    tracking.Logger(teacher).tag(**{tracking.WEIGHTS_TAG: "W"})
    sweep = log_sweep(uri, "alphas", ["model.alpha", "fit.seed"])
    # The best single seed has not the best alpha.
    for alpha, values in ((0.5, (0.056, 0.059)), (0.7, (0.058, 0.0585))):
        for seed, value in enumerate(values, 42):
            point = json.dumps({"model.alpha": alpha, "fit.seed": seed})
            parent = {tracking.PARENT_TAG: sweep.run_id}
            trial = log_training(
                uri,
                f"seed-{seed}-{alpha}",
                {"name": "sid_mlp", "alpha": alpha, "teacher_hash": "W"},
                {"best/ndcg@10": value, "test/ndcg@10": value},
                tags=parent | {tracking.POINT_TAG: point},
                seed=seed,
            )
    pending = compare(uri)
    assert pending.rows["name"].to_list() == ["tiger"]
    tracking.Logger(sweep).tag(**{tracking.BEST_TAG: trial.run_id})

    comparison = compare(uri, "retrieval/x")
    assert "2 of 4 trials" in comparison.notes[0]
    assert comparison.rows["num_seeds"].to_list() == [2, 1]

    swept = compare(uri, sweep="alphas")
    assert swept.title == "retrieval/x: alphas"
    assert swept.rows["name"].to_list() == ["sid_mlp*", "sid_mlp*"]
    with pytest.raises(UserError, match="there is no sweep 'alpha'"):
        compare(uri, sweep="alpha")
    named = compare(uri, runs=["tiger", "seed-42-0.5"])
    assert named.title == "tiger, seed-42-0.5"


def test_smoke_sweeps_and_runs_of_earlier_formats_are_left_out(uri):
    sweep = log_sweep(uri, "tried", [], **{tracking.SMOKE_TAG: "true"})
    metrics = {"best/ndcg@10": 0.9}
    parent = {tracking.PARENT_TAG: sweep.run_id}
    log_training(uri, "trial", {"name": "sasrec"}, metrics, tags=parent)
    with pytest.raises(UserError, match="has no runs; tried: a smoke sweep, left out"):
        compare(uri, "retrieval/x")
    old = log_training(uri, "old", {"name": "sasrec"}, metrics)
    tracking.connect(uri).set_tag(old.run_id, tracking.FORMAT_TAG, "1")
    log_training(uri, "sasrec", {"name": "sasrec"}, metrics)

    comparison = compare(uri, "retrieval/x")

    assert comparison.rows["name"].to_list() == ["sasrec"]
    assert comparison.notes[0].startswith("tried: a smoke sweep")
    assert "1 run of earlier formats" in comparison.notes[1]
    assert compare(uri, sweep="tried").rows["name"].to_list() == ["trial"]


def test_a_running_run_without_a_live_process_is_marked_as_killed(uri, tmp_path):
    runs = {}
    config = {"model": {"name": "sasrec"}, "fit": {"seed": 1}}
    for name in ("dead", "alive"):
        folder = tmp_path / name
        folder.mkdir()
        tags = {tracking.FOLDER_TAG: str(folder)}
        runs[name] = tracking.open_run(
            uri, "retrieval/x", name, str(tmp_path), config=config, hashes={}, tags=tags
        )

    lock = hold_lock(tracking.lock_path(str(tmp_path / "alive")), "busy")
    with lock, pytest.raises(UserError, match="is finished"):
        compare(uri, "retrieval/x")

    client = tracking.connect(uri)
    statuses = {
        name: client.get_run(run.run_id).info.status for name, run in runs.items()
    }
    assert statuses == {"dead": "KILLED", "alive": "RUNNING"}
