"""What stands beside what: references, seeds and logs of a comparison, from rows as MLflow gives them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from comparison_rows import NDCG, compared, row

from models.retrieval.decoders.sid_mlp import SidMlpConfig
from models.retrieval.students.sid_mlp import SidMlp
from models.retrieval.tiger import Tiger, TigerConfig
from pipelines import tracking
from pipelines.comparison.plots import pareto, plots, points_of, settings
from pipelines.comparison.rows import Row, evaluations, lower_is_better, rows_of
from pipelines.comparison.runs import select
from pipelines.comparison.tables import paired_tables, runs_table


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
    rows = rows_of(select(uri, ["retrieval/x"]))
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
    assert tiger.unlike(sasrec) == "steps 2,000 / 500"
    assert (
        tiger.unlike(made("sasrec", "16", "2", 2000)) == "batch 64 / 16; seeds 1, 2 / 2"
    )
    assert tiger.unlike(made("popularity", "256", "0", 1)) == ""
    (paired,) = paired_tables(compared([tiger, sasrec]))
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
        ((_, _, _, figure),) = pareto(compared(rows, metric))
        return figure.axes[0].get_ylim()[0]

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
    whole = settings(compared(trials, sweep=SWEPT))
    assert [caption.split(";")[0] for _, _, caption, _ in whole] == [
        "model.alpha: all else equal",
        "model.m: all else equal",
    ]
    labels = [text.get_text() for text in whole[0][3].axes[0].get_legend().get_texts()]
    assert {f"{NDCG}: sid_mlp m 0", f"{NDCG}: sid_mlp m 1"} <= set(labels)
    apart = [
        trials[0],
        trials[3],
    ]  # drawn at random: no two differ in one setting alone
    assert all(
        "the best trial on validation" in caption
        for _, _, caption, _ in settings(compared(apart, sweep=SWEPT))
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

    def made(name: str, value: float, options: str) -> Row:
        told = {"weights": "t"} if name == "tiger" else {"teacher": "t"}
        return row(
            name,
            {NDCG: value, "test/users_per_s": 10.0},
            seeds="1",
            options=options,
            **told,
        )

    rows = [
        made("sid_mlp", 0.05, "unseen-True"),
        made("tiger", 0.04, "unseen-True"),
        made("sid_mlp", 0.03, ""),
        made("tiger", 0.02, ""),
        made("tiger", 0.021, "beam-100"),
    ]
    assert [point.label for point in points_of(rows, "ndcg@10")] == [
        "sid_mlp-1",
        "tiger-1",
        "tiger-1 [beam-100]",
    ]
    assert [point.label for point in points_of(rows[:2], "ndcg@10")] == [
        each.name for each in rows[:2]
    ]
    beams, both = "beam-20-unseen-True", "unseen-True-fresh-ca83aebe"
    assert [made("tiger", 0.0, options).asked for options in ("", beams, both)] == [
        ("", ""),
        ("", "unseen"),
        ("ca83aebe", "unseen"),
    ]


def test_a_label_with_at_in_its_name_keeps_its_columns() -> None:
    logged = {
        tracking.metric_name(name): value
        for name, value in {
            "test/looked_at_it/normalised_entropy": 0.9,
            "best/looked_at_it/gauc": 0.6,
            "test-beam-5/ndcg@10": 0.1,
        }.items()
    }
    found = evaluations(logged)
    assert found[""] == {
        "test/looked_at_it/normalised_entropy": 0.9,
        "val/looked_at_it/gauc": 0.6,
    }
    assert found["beam-5"] == {"test/ndcg@10": 0.1}


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
