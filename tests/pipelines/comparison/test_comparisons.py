"""Test which runs of a comparison share a row, a reference and a plot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipelines import tracking
from pipelines.comparison.load import load_rows
from pipelines.comparison.plots import to_points
from pipelines.comparison.rows import (
    ALL_ITEMS,
    KNOWN_LEFT_OUT,
    EvaluationOptions,
    Row,
    lower_is_better,
)
from pipelines.comparison.runs import select
from tests.fixtures.comparison_rows import NDCG, evaluate_run, make_row


def test_lower_is_better_for_losses_times_and_memory() -> None:
    lower = ["mse", "eval_loss", "log_loss", "mean/normalised_entropy", "seconds"]
    lower += ["test/mse", "peak_memory_mb", "test/peak_memory_mb", "median_s"]
    higher = ["neg_mse", "ndcg@10", "gauc", "mean/rig", "r2", "users_per_s", "recall@5"]
    assert all(lower_is_better(metric) for metric in lower)
    assert not any(lower_is_better(metric) for metric in higher)


def build_evaluated_row(
    name: str, value: float, other_log: str = "", **options: str
) -> Row:
    """Build the row of a TIGER or of its student, evaluated with these options."""
    identity = {"weights": "t"} if name == "tiger" else {"teacher": "t"}
    return make_row(
        name,
        {NDCG: value, "test/users_per_s": 10.0},
        seeds="1",
        options=EvaluationOptions.from_values(options, other_log),
        **identity,
    )


def test_the_pareto_plot_has_no_evaluations_on_unseen_items_beside_others() -> None:
    unseen_rows = [
        build_evaluated_row("sid_mlp", 0.05, unseen="True"),
        build_evaluated_row("tiger", 0.04, unseen="True"),
    ]
    rows = [
        *unseen_rows,
        build_evaluated_row("sid_mlp", 0.03),
        build_evaluated_row("tiger", 0.02),
        build_evaluated_row("tiger", 0.021, beam="100"),
    ]

    names = [point.row.name for point in to_points(rows, "ndcg@10")]
    assert names == ["sid_mlp-1", "tiger-1", "tiger-1 [beam 100]"]
    names = [point.row.name for point in to_points(unseen_rows, "ndcg@10")]
    assert names == [unseen_row.name for unseen_row in unseen_rows]


def test_the_task_of_a_row_is_its_log_and_its_candidates() -> None:
    all_items = build_evaluated_row("tiger", 0.0, beam="20")
    unseen = build_evaluated_row("tiger", 0.0, beam="20", unseen="True")
    other_log = build_evaluated_row("tiger", 0.0, "ca83aebe", unseen="True")
    assert all_items.task == ("", ALL_ITEMS)
    assert unseen.task == ("", KNOWN_LEFT_OUT)
    assert other_log.task == ("ca83aebe", KNOWN_LEFT_OUT)


def test_a_training_has_a_row_per_task_and_options_of_its_evaluations(
    new_store: Callable[[Path], str], tmp_path: Path
) -> None:
    uri = new_store(tmp_path)
    training = tracking.open_run(
        uri,
        "retrieval/x",
        "tiger",
        str(tmp_path),
        config={"model": {"name": "tiger", "beam": 50}},
        hashes={"sequences": "s"},
    )
    logger = tracking.Logger(training)
    logger.log({"val/ndcg@10": 0.1, "best/looked_at_it/gauc": 0.6}, 1)
    logger.end()
    same_task = {"beam": 50}  # the beam of the model's config
    other_task = {"beam": 5, "unseen": True}

    evaluate_run(training, {"looked_at_it/gauc": 0.8}, weights="before")
    evaluate_run(
        training, {"ndcg@10": 0.3, "looked_at_it/gauc": 0.9}, options=same_task
    )
    evaluate_run(training, {"ndcg@10": 0.4}, options=other_task)
    evaluate_run(training, {"ndcg@10": 0.5}, options={"batch_size": 3})
    evaluate_run(training, {"ndcg@10": 0.6}, hashes={"sequences": "ca83aebe11"})

    rows = {row.name: row for row in load_rows(select(uri, ["retrieval/x"]))}
    default = rows.pop("tiger").runs[0].metrics
    assert default["test/ndcg@10"] == 0.5  # the newest evaluation
    assert default["test/looked_at_it/gauc"] == 0.9  # with the newest weights
    assert default["val/looked_at_it/gauc"] == 0.6
    values = {name: row.values("test/ndcg@10") for name, row in rows.items()}
    assert values == {"tiger [beam 5, unseen]": [0.4], "tiger [log ca83aebe]": [0.6]}
    assert not any(row.values("val/ndcg@10") for row in rows.values())
