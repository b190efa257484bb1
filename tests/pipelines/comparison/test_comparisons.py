"""What stands beside what: references, seeds and logs of a comparison, from rows as
MLflow gives them.
"""

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
    draw_pareto,
    draw_settings,
    plots,
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
from pipelines.comparison.tables import compare_with_best, runs_table
from tests.fixtures.comparison_rows import NDCG, compared, evaluate_run, row


def test_a_run_from_before_an_option_stands_with_those_at_its_default(
    new_store: Callable[[Path], str], tmp_path: Path
) -> None:
    uri = new_store(tmp_path)
    now = SidMlp.config_to_dict(SidMlpConfig(teacher="runs/tiger"))
    teacher = Tiger.config_to_dict(TigerConfig())
    for seed, left_out, more in (
        (42, {"attention_dropout"}, {}),
        (43, set(), {}),
        (44, set(), {"attention_dropout": 0.1}),
    ):
        taught = {
            name: value
            for name, value in teacher.items()
            if seed != 42 or name != "end_token"
        }
        model = {
            name: value
            for name, value in {**now, **more}.items()
            if name not in left_out
        }
        fit = {"seed": seed, "lr": 0.1} | ({"train_examples": 0} if seed != 42 else {})
        config = {"model": {**model, "teacher_model": taught}, "fit": fit}
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
    assert sorted(sorted(run.seed for run in row.runs) for row in rows) == [
        ["42", "43"],
        ["44"],
    ]
    assert {value for row in rows for value in row.settings} == {
        "model.attention_dropout"
    }


def test_rows_say_in_what_their_trainings_differ() -> None:
    def made(model: str, batch: str, seeds: str, *steps: float) -> Row:
        return row(
            model,
            *({"train/steps": step, NDCG: 0.1} for step in steps),
            seeds=seeds,
            fit__batch_size=batch,
        )

    tiger, sasrec = (
        made("tiger", "64", "12", 1000, 3000),
        made("sasrec", "64", "12", 500, 500),
    )
    assert tiger.describe_training_difference(sasrec) == "steps 2,000 / 500"
    assert (
        tiger.describe_training_difference(made("sasrec", "16", "2", 2000))
        == "batch 64 / 16; seeds 1, 2 / 2"
    )
    assert tiger.describe_training_difference(made("popularity", "256", "0", 1)) == ""
    (paired,) = compare_with_best(compared([tiger, sasrec]))
    assert [line[-1] for line in paired.cells] == ["steps 500 / 2,000"]


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
def test_smaller_is_better(metric: str) -> None:
    assert lower_is_better(metric)


@pytest.mark.parametrize(
    "metric",
    ["neg_mse", "ndcg@10", "gauc", "mean/rig", "r2", "users_per_s", "recall@5"],
)
def test_larger_is_better(metric: str) -> None:
    assert not lower_is_better(metric)


def test_points_below_zero_are_seen() -> None:
    def bottom(metric: str, *values: float) -> float:
        rows = [
            row(f"m{i}", {f"test/{metric}": v, "test/users_per_s": 10.0**i})
            for i, v in enumerate(values)
        ]
        comparison = compared(rows, metric)
        (drawing,) = draw_pareto(comparison, choose_colours([comparison]))
        return drawing.figure.axes[0].get_ylim()[0]

    assert bottom("mean/rig", -0.3, -0.1) < -0.3
    assert bottom("ndcg@10", 0.001, 0.1) == 0


SWEPT = SimpleNamespace(
    data=SimpleNamespace(tags={"sweep.axes": '["model.alpha", "model.m"]'}),
    info=SimpleNamespace(artifact_uri="/none"),
)
"""The run of a sweep, as far as plots read it."""


def test_a_plot_says_how_its_trials_were_chosen() -> None:
    trials = [
        row(
            "sid_mlp", {NDCG: 0.03, "val/ndcg@10": 0.04}, model__alpha=alpha, model__m=m
        )
        for alpha, m in (("0", "0"), ("1", "0"), ("0", "1"), ("1", "1"))
    ]
    comparison = compared(trials, sweep=SWEPT)
    whole = draw_settings(comparison, choose_colours([comparison]))
    assert [drawing.caption.split(";")[0] for drawing in whole] == [
        "model.alpha: all else equal",
        "model.m: all else equal",
    ]
    legend = whole[0].figure.axes[0].get_legend()
    labels = [text.get_text() for text in legend.get_texts()]
    assert {f"{NDCG}: sid_mlp m 0", f"{NDCG}: sid_mlp m 1"} <= set(labels)
    apart = [
        trials[0],
        trials[3],
    ]  # drawn at random: no two differ in one setting alone
    assert all(
        "the best trial on validation" in drawing.caption
        for drawing in draw_settings(
            compared(apart, sweep=SWEPT), choose_colours([comparison])
        )
    )


def test_names_are_shown_as_they_are() -> None:
    names = (r"a $\foo$ b", "_hidden")
    rows = [
        row(
            "sid_mlp",
            {NDCG: 0.03 + i / 100, "test/users_per_s": 10.0 + i},
            name=name,
            seeds="1",
            model__m=str(i),
        )
        for i, name in enumerate(names)
    ]
    (plot,) = plots(compared(rows))
    assert all(name in plot.svg for name in names)


def test_what_is_asked_without_known_items_stands_apart() -> None:
    """In no plot of the others, and never the best of those."""

    def made(name: str, value: float, fresh: str = "", **options: str) -> Row:
        told = {"weights": "t"} if name == "tiger" else {"teacher": "t"}
        return row(
            name,
            {NDCG: value, "test/users_per_s": 10.0},
            seeds="1",
            options=EvaluationOptions.from_values(options, fresh),
            **told,
        )

    rows = [
        made("sid_mlp", 0.05, unseen="True"),
        made("tiger", 0.04, unseen="True"),
        made("sid_mlp", 0.03),
        made("tiger", 0.02),
        made("tiger", 0.021, beam="100"),
    ]
    assert [point.row.name for point in to_points(rows, "ndcg@10")] == [
        "sid_mlp-1",
        "tiger-1",
        "tiger-1 [beam 100]",
    ]
    assert [point.row.name for point in to_points(rows[:2], "ndcg@10")] == [
        each.name for each in rows[:2]
    ]
    assert made("tiger", 0.0, beam="20").task == ("", ALL_ITEMS)
    assert made("tiger", 0.0, beam="20", unseen="True").task == ("", KNOWN_LEFT_OUT)
    fresh = made("tiger", 0.0, "ca83aebe", unseen="True")
    assert fresh.task == ("ca83aebe", KNOWN_LEFT_OUT)


def test_a_training_has_a_row_for_each_way_of_evaluating_it(
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
    own, other, repeated = {"beam": 50}, {"beam": 5, "unseen": True}, {"batch_size": 3}

    evaluate_run(training, {"looked_at_it/gauc": 0.8}, weights="before")
    evaluate_run(training, {"ndcg@10": 0.3, "looked_at_it/gauc": 0.9}, options=own)
    evaluate_run(training, {"ndcg@10": 0.4}, options=other)
    evaluate_run(training, {"ndcg@10": 0.5}, options=repeated)
    evaluate_run(training, {"ndcg@10": 0.6}, hashes={"sequences": "ca83aebe11"})

    rows = {row.name: row for row in load_rows(select(uri, ["retrieval/x"]))}
    plain = rows.pop("tiger").runs[0].metrics
    assert plain["test/ndcg@10"] == 0.5  # the newest evaluation
    assert plain["test/looked_at_it/gauc"] == 0.9  # of the weights evaluated last
    assert plain["val/looked_at_it/gauc"] == 0.6
    values = {name: row.values("test/ndcg@10") for name, row in rows.items()}
    assert values == {"tiger [beam 5, unseen]": [0.4], "tiger [log ca83aebe]": [0.6]}
    assert not any(row.values("val/ndcg@10") for row in rows.values())


def test_a_row_says_where_its_training_was_cut_short() -> None:
    def trained(best: float, done: float, **params: str) -> Row:
        values = {"val/epoch": best, "epoch": done, "val/ndcg@10": 0.5}
        return row("sasrec", values, fit__max_epochs="3", **params)

    rising, ended, early, share = (
        "\n".join(runs_table(compared([one])).notes)
        for one in (
            trained(3, 3),
            trained(2, 3),
            trained(1, 2),
            trained(2, 3, fit__train_examples="1076"),
        )
    )

    assert "not trained to its end, the last of its 3 epochs is the best" in rising
    assert "not trained to its end" not in ended + early + share
    assert "trained on 1,076 of its training examples alone" in share
