"""Test which runs of a comparison share a row, a reference and a plot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from models.retrieval.decoders.sid_mlp import SidMlpConfig
from models.retrieval.students.sid_mlp import SidMlp
from models.retrieval.tiger import Tiger, TigerConfig
from pipelines import tracking
from pipelines.comparison.load import load_rows
from pipelines.comparison.plots import (
    choose_colours,
    draw_settings,
    to_points,
)
from pipelines.comparison.rows import (
    ALL_ITEMS,
    KNOWN_LEFT_OUT,
    EvaluationOptions,
    Row,
    lower_is_better,
)
from pipelines.comparison.runs import select
from tests.fixtures.comparison_rows import NDCG, evaluate_run, make_comparison, make_row


def test_a_run_without_a_later_option_shares_the_row_of_runs_at_its_default(
    new_store: Callable[[Path], str], tmp_path: Path
) -> None:
    uri = new_store(tmp_path)
    student = SidMlp.config_to_dict(SidMlpConfig(teacher="runs/tiger"))
    teacher = Tiger.config_to_dict(TigerConfig())
    old_student = {k: v for k, v in student.items() if k != "attention_dropout"}
    old_teacher = {k: v for k, v in teacher.items() if k != "end_token"}
    other_student = {**student, "attention_dropout": 0.1}
    fit = {"lr": 0.1, "train_examples": 0}
    for seed, model, teacher_model, fit_options in (
        (42, old_student, old_teacher, {"lr": 0.1}),
        (43, student, teacher, fit),
        (44, other_student, teacher, fit),
    ):
        config = {
            "model": {**model, "teacher_model": teacher_model},
            "fit": {"seed": seed, **fit_options},
        }
        ref = tracking.open_run(
            uri,
            "retrieval/x",
            f"sid_mlp-{seed}",
            str(tmp_path),
            config=config,
            hashes={},
        )
        logger = tracking.Logger(ref)
        logger.log({"test/ndcg@10": 0.1}, 1)
        logger.end()

    rows = load_rows(select(uri, ["retrieval/x"]))

    seeds = sorted(sorted(run.seed for run in row.runs) for row in rows)
    assert seeds == [["42", "43"], ["44"]]
    settings = {setting for row in rows for setting in row.settings}
    assert settings == {"model.attention_dropout"}


@pytest.mark.parametrize(
    "metric",
    [
        "mse",
        "test/mse",
        "eval_loss",
        "log_loss",
        "mean/normalised_entropy",
        "seconds",
        "peak_memory_mb",
        "test/peak_memory_mb",
        "median_s",
    ],
)
def test_lower_is_better_for_losses_times_and_memory(metric: str) -> None:
    assert lower_is_better(metric)


@pytest.mark.parametrize(
    "metric",
    ["neg_mse", "ndcg@10", "gauc", "mean/rig", "r2", "users_per_s", "recall@5"],
)
def test_higher_is_better_for_other_metrics(metric: str) -> None:
    assert not lower_is_better(metric)


SWEEP = SimpleNamespace(
    data=SimpleNamespace(tags={"sweep.axes": '["model.alpha", "model.m"]'}),
    info=SimpleNamespace(artifact_uri="/none"),
)
"""The attributes of a sweep's MLflow run that plots read."""


def test_a_plot_of_settings_describes_how_its_trials_were_chosen() -> None:
    trials = [
        make_row(
            "sid_mlp", {NDCG: 0.03, "val/ndcg@10": 0.04}, model__alpha=alpha, model__m=m
        )
        for alpha, m in (("0", "0"), ("1", "0"), ("0", "1"), ("1", "1"))
    ]
    comparison = make_comparison(trials, sweep=SWEEP)
    colours = choose_colours([comparison])

    grid_drawings = draw_settings(comparison, colours)
    captions = [drawing.caption.split(";")[0] for drawing in grid_drawings]
    assert captions == ["model.alpha: all else equal", "model.m: all else equal"]
    legend = grid_drawings[0].figure.axes[0].get_legend()
    labels = {text.get_text() for text in legend.get_texts()}
    assert {f"{NDCG}: sid_mlp m 0", f"{NDCG}: sid_mlp m 1"} <= labels

    # Of a random search, no two trials differ in one setting alone.
    random_trials = [trials[0], trials[3]]
    for drawing in draw_settings(make_comparison(random_trials, sweep=SWEEP), colours):
        assert "the best trial on validation" in drawing.caption


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
