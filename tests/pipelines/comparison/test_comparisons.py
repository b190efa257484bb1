"""What stands beside what: references, seeds and logs of a comparison, from rows as MLflow gives them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from models import registry
from pipelines import tracking
from pipelines.comparison.baseline_tables import relative_tables
from pipelines.comparison.claims import FAILS, HOLDS, OPEN, Claim, decide
from pipelines.comparison.pareto import Point, picture, points_of
from pipelines.comparison.plots import plots
from pipelines.comparison.published import Papers, Published, System, beside, load
from pipelines.comparison.rows import Comparison, Row, Run, lower_is_better, rows_of
from pipelines.comparison.run_plots import beams
from pipelines.comparison.run_tables import non_inferiority_tables, paired_tables
from pipelines.comparison.runs import Selection, select
from pipelines.comparison.sweep_plots import axes

NDCG, LOSS = "test/ndcg@10", "test/eval_loss"


def row(model: str, *values: dict[str, float], seeds: str = "123", options: str = "", **params: str) -> Row:
    """A row with a run per seed; params with __ for dots, and the runs' name, teacher and sids."""
    told = {key: params.pop(key, "") for key in ("name", "weights", "teacher", "sids")}
    runs = [
        Run(f"{id(value)}", f"{told['name'] or model}-{seed}", seed, True, told["weights"], told["teacher"], value,
            told["sids"])
        for seed, value in zip(seeds, values, strict=False)
    ]  # fmt: skip
    return Row(
        model, options, runs, {}, "retrieval/x", {key.replace("__", "."): value for key, value in params.items()}
    )


def compared(rows: list[Row], metric: str = "ndcg@10", sweep: Any = None) -> Comparison:
    return Comparison(Selection("sqlite:////none", "retrieval/x", [], {}, sweep), rows, metric)


PRINTED = Published(
    "Table 3", [NDCG], {"A": {"tiger": [0.030], "sid_mlp": [0.033], "sid_mlp_pp": [0.03]}}, "tiger"
)  # fmt: skip
SYSTEMS = {name: System(name) for name in ("tiger", "sid_mlp", "sid_mlp_pp")}


def test_a_run_from_before_an_option_stands_with_those_at_its_default(
    new_store: Callable[[Path], str], tmp_path: Path
) -> None:
    uri = new_store(tmp_path)
    now = registry.config_to_dict(registry.model_config("sid_mlp")(teacher="runs/tiger"))
    teacher = registry.config_to_dict(registry.model_config("tiger")())
    for seed, left_out, more in (
        (42, {"attention_dropout"}, {}), (43, set(), {}), (44, set(), {"attention_dropout": 0.1})
    ):  # fmt: skip
        taught = {name: value for name, value in teacher.items() if seed != 42 or name != "end_token"}
        model = {name: value for name, value in {**now, **more}.items() if name not in left_out}
        fit = {"seed": seed, "lr": 0.1} | ({"train_examples": 0} if seed != 42 else {})
        config = {"model": {**model, "teacher_model": taught}, "fit": fit}
        ref = tracking.open_run(uri, "retrieval/x", f"sid_mlp-{seed}", str(tmp_path), config=config, hashes={})
        logger = tracking.Logger(ref)
        logger.log({"test/ndcg@10": 0.1}, 1)
        logger.end()
    rows = rows_of(select(uri, ["retrieval/x"]))
    assert sorted(sorted(run.seed for run in row.runs) for row in rows) == [["42", "43"], ["44"]]
    assert {value for row in rows for value in row.settings} == {"model.attention_dropout"}


def test_every_trie_has_its_reference_above_what_is_seen_against_it() -> None:
    rows = []
    for trie, figures in (("a", (0.045, 0.050, 0.030)), ("b", (0.052, 0.048, 0.049))):
        for model, value in zip(SYSTEMS, figures, strict=True):
            taught = {} if model == "tiger" else {"teacher": f"W{trie}"}
            weights = f"W{trie}" if model == "tiger" else ""
            rows.append(row(model, {NDCG: value}, table__trie=trie, sids=f"sids-{trie}", weights=weights, **taught))
    table = beside(compared(sorted(rows, key=lambda r: -r.mean(NDCG))), PRINTED, SYSTEMS)
    assert table is not None
    names = [f"{cells[0]} of {cells[1].split(':')[0]}" for cells in table.cells]
    assert names == [
        "tiger of retrieval/x, sids-a", "sid_mlp of retrieval/x, sids-a", "sid_mlp_pp of retrieval/x, sids-a",
        "tiger of retrieval/x, sids-b", "sid_mlp of retrieval/x, sids-b", "sid_mlp_pp of retrieval/x, sids-b",
    ]  # fmt: skip
    assert [cells[5] for cells in table.cells] == ["", "+11.1%", "-33.3%", "", "-7.7%", "-5.8%"]
    alone = beside(compared([row("sasrec", {NDCG: 0.9}), *rows[:3]]), PRINTED, SYSTEMS)
    assert alone is not None
    assert [cells[1] for cells in alone.cells] == ["tiger-1", "sid_mlp-1", "sid_mlp_pp-1"]


def test_nothing_is_relative_to_zero() -> None:
    rows = [
        row("sid_mlp", {NDCG: 0.0}, {NDCG: 0.0}, teacher="W"), row("tiger", {NDCG: 0.0}, {NDCG: 0.0}, weights="W"),
    ]  # fmt: skip
    table = beside(compared(rows), PRINTED, SYSTEMS)
    assert table is not None
    assert [cells[4:6] for cells in table.cells] == [["0.0300", ""], ["0.0330", "-"]]
    (paired,) = paired_tables(compared(rows))
    assert paired.cells[0][4] == "-"
    claim = Claim("c", "Table 15", "says", NDCG, left="sid_mlp", right="tiger", match="teacher", expect="no_worse")
    (found,) = decide(claim, rows, Papers(SYSTEMS, [], []))
    assert (found.verdict, found.why) == (OPEN, "nothing to be relative to")


def test_a_repeated_seed_counts_once_and_shared_seeds_alone_are_compared() -> None:
    ours = row("attn_mvp", {LOSS: 1.99}, seeds="1")
    theirs = row("interleaved", {LOSS: 2.0}, {LOSS: 2.4}, {LOSS: 2.4}, seeds="122")
    assert theirs.mean(LOSS) == pytest.approx(2.2)
    assert theirs.deviation(LOSS) == pytest.approx(0.2 * math.sqrt(2))
    claim = Claim("c", "Table 2", "says", LOSS, left="l", right="r", expect="lower", size="any")
    systems = {"l": System("attn_mvp"), "r": System("interleaved")}
    (found,) = decide(claim, [ours, theirs], Papers(systems, [], []))
    assert (found.ours, found.why) == ("-0.50%", "direction; seeds 1 / 1")
    printed = Published("Table 2", [LOSS], {"A": {"r": [0.0], "l": [-0.008]}}, "r", relative=True)
    table = beside(compared([ours, theirs]), printed, systems)
    assert table is not None
    assert [cells[3:5] for cells in table.cells] == [["2.0000", ""], ["1.9900", "-0.50%"]]
    (relative,) = relative_tables([ours, theirs], [])
    assert relative.cells[0][3] == "-0.50%"


def test_rows_of_another_log_are_not_compared() -> None:
    cuts = {"temporal": 2.0, "per user": 1.5}
    rows = [
        row(model, {LOSS: loss * part}, {LOSS: loss * part * 1.1}, table__sequences=cut)
        for cut, loss in cuts.items()
        for model, part in (("interleaved", 1.0), ("attn_mvp", 0.99))
    ]
    (relative,) = relative_tables(rows, [])
    assert [cells[3] for cells in relative.cells] == ["-1.00% ± 0.00%"] * 2
    by_loss = compared(sorted(rows, key=lambda r: r.mean(LOSS)), "eval_loss")
    (paired,) = paired_tables(by_loss)
    assert [cells[4] for cells in paired.cells] == ["+1.0%"] * 2


@pytest.mark.parametrize(
    ("times", "verdict"), [(0.49, FAILS), (0.51, HOLDS), (1.0, HOLDS), (1.99, HOLDS), (2.01, FAILS)]
)  # fmt: skip
@pytest.mark.parametrize("printed", [8.74, 0.043])
def test_a_size_holds_from_half_to_double(printed: float, times: float, verdict: str) -> None:
    expect = "higher" if printed > 1 else "lower"
    claim = Claim("c", "s", "says", "speed", left="l", right="r", as_="times", expect=expect, paper=(printed,) * 2)
    systems = {"l": System("decode/fast"), "r": System("decode/slow")}
    rows = [
        row("decode/fast", {"speed": printed * times}, seeds=" "), row("decode/slow", {"speed": 1.0}, seeds=" ")
    ]  # fmt: skip
    (found,) = decide(claim, rows, Papers(systems, [], []))
    assert (found.verdict, found.why) == (verdict, "size")


def test_who_gains_more_than_attn_mvp_is_better_than_it() -> None:
    papers = load()
    (claim,) = [Claim(**given) for given in papers.claims if given["id"] == "lac"]
    for loss, verdict in ((1.990, FAILS), (1.999, HOLDS), (2.1, HOLDS)):
        rows = [
            row("lac", {LOSS: loss}),
            row("attn_mvp", {LOSS: 2.0}, model__action_weight="1.0", model__late_fusion="True"),
        ]
        assert decide(claim, rows, papers)[0].verdict == verdict, loss


@pytest.mark.parametrize("metric", ["mse", "test/mse", "eval_loss", "log_loss", "mean/normalised_entropy", "seconds",
                                    "peak_memory_mb", "test/peak_memory_mb", "median_s"])  # fmt: skip
def test_smaller_is_better(metric: str) -> None:
    assert lower_is_better(metric)


@pytest.mark.parametrize("metric", ["neg_mse", "ndcg@10", "gauc", "mean/rig", "r2", "users_per_s", "recall@5"])
def test_larger_is_better(metric: str) -> None:
    assert not lower_is_better(metric)


def test_points_below_zero_are_seen() -> None:
    (axes,) = picture([Point("a", "m", 10.0, -0.3), Point("b", "n", 100.0, -0.1)], "mean/rig", "").axes
    low, high = axes.get_ylim()
    assert low < -0.3 < -0.1 < high
    (axes,) = picture([Point("a", "m", 10.0, 0.001), Point("b", "n", 100.0, 0.1)], "ndcg@10", "").axes
    assert axes.get_ylim()[0] == 0


def test_checkpoints_of_one_model_have_lines_of_their_own() -> None:
    rows = [
        row("tiger", {NDCG: value + beam / 1e4}, checkpoint=f"/runs/{name}/best", evaluate__beam=str(beam))
        for name, value in (("one", 0.03), ("two", 0.05))
        for beam in (10, 50)
    ]
    ((_, _, _, figure),) = beams(compared(rows))
    (drawn,) = figure.axes
    lines = {line.get_label(): line.get_ydata() for line in drawn.get_lines()}
    assert lines == {"tiger one": pytest.approx([0.031, 0.035]), "tiger two": pytest.approx([0.051, 0.055])}


SWEPT = SimpleNamespace(
    data=SimpleNamespace(tags={"sweep.axes": '["model.alpha", "model.m"]'}), info=SimpleNamespace(artifact_uri="/none")
)
"""The run of a sweep, as far as plots read it."""


def test_a_plot_says_how_its_trials_were_chosen() -> None:
    trials = [
        row("sid_mlp", {NDCG: 0.03, "val/ndcg@10": 0.04}, model__alpha=alpha, model__m=m)
        for alpha, m in (("0", "0"), ("1", "0"), ("0", "1"), ("1", "1"))
    ]
    whole = axes(compared(trials, sweep=SWEPT))
    assert [caption.split(";")[0] for _, _, caption, _ in whole] == [
        "model.alpha: all else equal", "model.m: all else equal",
    ]  # fmt: skip
    labels = [text.get_text() for text in whole[0][3].axes[0].get_legend().get_texts()]
    assert {f"{NDCG}: sid_mlp m 0", f"{NDCG}: sid_mlp m 1"} <= set(labels)
    apart = [trials[0], trials[3]]  # drawn at random: no two differ in one setting alone
    assert all("the best trial on validation" in caption for _, _, caption, _ in axes(compared(apart, sweep=SWEPT)))


def test_names_are_shown_as_they_are() -> None:
    names = (r"a $\foo$ b", "_hidden")
    rows = [
        row("sid_mlp", {NDCG: 0.03 + i / 100, "test/users_per_s": 10.0 + i}, name=name, seeds="1", model__m=str(i))
        for i, name in enumerate(names)
    ]
    (plot,) = plots(compared(rows))
    assert all(name in plot.svg for name in names)
    lines = [row("tiger", {NDCG: 0.03}, name="_hidden", options=f"beam-{beam}", seeds="1") for beam in (10, 20)]
    ((_, _, _, figure),) = beams(compared(lines))
    assert [text.get_text().strip() for text in figure.axes[0].get_legend().get_texts()] == ["_hidden-1"]


def test_what_is_asked_without_known_items_stands_apart() -> None:
    """Beside a teacher asked the same, in no plot of the others, and never the best of those."""

    def made(name: str, value: float, options: str) -> Row:
        told = {"weights": "t"} if name == "tiger" else {"teacher": "t"}
        return row(name, {NDCG: value, "test/users_per_s": 10.0}, seeds="1", options=options, **told)

    rows = [
        made("sid_mlp", 0.05, "unseen-True"), made("tiger", 0.04, "unseen-True"), made("sid_mlp", 0.03, ""),
        made("tiger", 0.02, ""), made("tiger", 0.021, "beam-100"),
    ]  # fmt: skip
    (students,) = non_inferiority_tables(rows, "ndcg@10")
    assert [tuple(line[:2]) for line in students.cells] == [
        ("sid_mlp-1 [unseen-True]", "tiger-1 [unseen-True]"), ("sid_mlp-1", "tiger-1"),
        ("sid_mlp-1", "tiger-1 [beam-100]"),
    ]  # fmt: skip
    assert [point.label for point in points_of(rows, "ndcg@10")] == ["sid_mlp-1", "tiger-1", "tiger-1 [beam-100]"]
    assert [point.label for point in points_of(rows[:2], "ndcg@10")] == [each.name for each in rows[:2]]
    beams, both = "beam-20-unseen-True", "unseen-True-fresh-ca83aebe"
    assert [made("tiger", 0.0, options).asked for options in ("", beams, both)] == [
        ("", ""), ("", "unseen"), ("ca83aebe", "unseen"),
    ]  # fmt: skip
