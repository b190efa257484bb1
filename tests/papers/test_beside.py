"""Test the tables that set runs beside the papers' figures, on hand-written rows."""

from __future__ import annotations

import math

import pytest

from papers.claims import FAILS, HOLDS, OPEN, Claim, decide
from papers.plots import draw_beams
from papers.published import Papers, Published, System, compare_with, load
from papers.tables import non_inferiority_tables, parameter_tables, relative_tables
from pipelines.comparison.rows import EvaluationOptions, Row, Run
from pipelines.comparison.tables import compare_with_best, task_tables
from tests.fixtures.comparison_rows import LOSS, NDCG, make_comparison, make_row

PRINTED = Published(
    "Table 3",
    [NDCG],
    {"A": {"tiger": [0.030], "sid_mlp": [0.033], "sid_mlp_pp": [0.03]}},
    "tiger",
)
SYSTEMS = {name: System(name) for name in ("tiger", "sid_mlp", "sid_mlp_pp")}


def test_each_trie_has_its_reference_above_the_systems_compared_with_it() -> None:
    rows = []
    for trie, figures in (("a", (0.045, 0.050, 0.030)), ("b", (0.052, 0.048, 0.049))):
        for model, value in zip(SYSTEMS, figures, strict=True):
            if model == "tiger":
                identity = {"weights": f"W{trie}"}
            else:
                identity = {"teacher": f"W{trie}"}
            rows.append(
                make_row(
                    model,
                    {NDCG: value},
                    table__trie=trie,
                    sids=f"sids-{trie}",
                    **identity,
                )
            )
    sorted_rows = sorted(rows, key=lambda r: -r.mean(NDCG))

    table = compare_with(make_comparison(sorted_rows), PRINTED, SYSTEMS)

    assert table is not None
    names = [f"{cells[0]} of {cells[1].split(':')[0]}" for cells in table.cells]
    assert names == [
        "tiger of retrieval/x, sids-a",
        "sid_mlp of retrieval/x, sids-a",
        "sid_mlp_pp of retrieval/x, sids-a",
        "tiger of retrieval/x, sids-b",
        "sid_mlp of retrieval/x, sids-b",
        "sid_mlp_pp of retrieval/x, sids-b",
    ]
    assert [cells[5] for cells in table.cells] == [
        "",
        "+11.1%",
        "-33.3%",
        "",
        "-7.7%",
        "-5.8%",
    ]
    one_trie = [make_row("sasrec", {NDCG: 0.9}), *rows[:3]]
    one_trie_table = compare_with(make_comparison(one_trie), PRINTED, SYSTEMS)
    assert one_trie_table is not None
    assert [cells[1] for cells in one_trie_table.cells] == [
        "tiger-1",
        "sid_mlp-1",
        "sid_mlp_pp-1",
    ]


def test_no_change_is_relative_to_a_value_of_zero() -> None:
    rows = [
        make_row("sid_mlp", {NDCG: 0.0}, {NDCG: 0.0}, teacher="W"),
        make_row("tiger", {NDCG: 0.0}, {NDCG: 0.0}, weights="W"),
    ]

    table = compare_with(make_comparison(rows), PRINTED, SYSTEMS)
    assert table is not None
    assert [cells[4:6] for cells in table.cells] == [["0.0300", ""], ["0.0330", "-"]]

    (paired,) = compare_with_best(make_comparison(rows))
    assert paired.cells[0][4] == "-"

    claim = Claim(
        "c",
        "Table 15",
        "says",
        NDCG,
        left="sid_mlp",
        right="tiger",
        match="teacher",
        expect="no_worse",
    )
    (verdict,) = decide(claim, rows, Papers(SYSTEMS, [], []))
    assert (verdict.verdict, verdict.why) == (OPEN, "the right value is 0")


def test_a_repeated_seed_counts_once_and_only_shared_seeds_are_compared() -> None:
    fusion = make_row("attn_mvp", {LOSS: 1.99}, seeds="1")
    baseline = make_row(
        "interleaved", {LOSS: 2.0}, {LOSS: 2.4}, {LOSS: 2.4}, seeds="122"
    )
    assert baseline.mean(LOSS) == pytest.approx(2.2)
    assert baseline.deviation(LOSS) == pytest.approx(0.2 * math.sqrt(2))

    claim = Claim(
        "c", "Table 2", "says", LOSS, left="l", right="r", expect="lower", size="any"
    )
    systems = {"l": System("attn_mvp"), "r": System("interleaved")}
    (verdict,) = decide(claim, [fusion, baseline], Papers(systems, [], []))
    assert (verdict.ours, verdict.why) == ("-0.50%", "direction; seeds 1 / 1")

    published = Published(
        "Table 2", [LOSS], {"A": {"r": [0.0], "l": [-0.008]}}, "r", relative=True
    )
    table = compare_with(make_comparison([fusion, baseline]), published, systems)
    assert table is not None
    assert [cells[3:5] for cells in table.cells] == [
        ["2.0000", ""],
        ["1.9900", "-0.50%"],
    ]

    (relative,) = relative_tables([fusion, baseline])
    assert relative.cells[0][3] == "-0.50%"


def test_rows_of_another_log_are_not_compared() -> None:
    rows = []
    for log, baseline_loss in (("temporal", 2.0), ("per user", 1.5)):
        for model, factor in (("interleaved", 1.0), ("attn_mvp", 0.99)):
            loss = baseline_loss * factor
            rows.append(
                make_row(model, {LOSS: loss}, {LOSS: loss * 1.1}, table__sequences=log)
            )

    (relative,) = relative_tables(rows)
    assert [cells[3] for cells in relative.cells] == ["-1.00% ± 0.00%"] * 2

    by_loss = make_comparison(sorted(rows, key=lambda r: r.mean(LOSS)), "eval_loss")
    (paired,) = compare_with_best(by_loss)
    assert [cells[4] for cells in paired.cells] == ["+1.0%"] * 2


@pytest.mark.parametrize(
    ("factor", "expected"),
    [(0.49, FAILS), (0.51, HOLDS), (1.0, HOLDS), (1.99, HOLDS), (2.01, FAILS)],
)
@pytest.mark.parametrize("published", [8.74, 0.043])
def test_a_size_holds_from_half_to_double(
    published: float, factor: float, expected: str
) -> None:
    expect = "higher" if published > 1 else "lower"
    claim = Claim(
        "c",
        "s",
        "says",
        "speed",
        left="l",
        right="r",
        as_="times",
        expect=expect,
        paper=(published,) * 2,
    )
    systems = {"l": System("decode/fast"), "r": System("decode/slow")}
    rows = [
        make_row("decode/fast", {"speed": published * factor}, seeds=" "),
        make_row("decode/slow", {"speed": 1.0}, seeds=" "),
    ]

    (verdict,) = decide(claim, rows, Papers(systems, [], []))

    assert (verdict.verdict, verdict.why) == (expected, "size")


def test_the_claim_on_lac_fails_when_its_loss_is_clearly_below_attn_mvps() -> None:
    papers = load()
    (claim,) = [Claim(**fields) for fields in papers.claims if fields["id"] == "lac"]
    for loss, expected in ((1.990, FAILS), (1.999, HOLDS), (2.1, HOLDS)):
        rows = [
            make_row("lac", {LOSS: loss}),
            make_row(
                "attn_mvp",
                {LOSS: 2.0},
                model__action_weight="1.0",
                model__late_fusion="True",
            ),
        ]
        assert decide(claim, rows, papers)[0].verdict == expected, loss


def test_the_beam_plot_has_a_line_per_checkpoint() -> None:
    rows = [
        make_row(
            "tiger",
            {NDCG: value + beam / 1e4},
            checkpoint=f"/runs/{name}/best",
            evaluate__beam=str(beam),
        )
        for name, value in (("one", 0.03), ("two", 0.05))
        for beam in (10, 50)
    ]

    (drawing,) = draw_beams(make_comparison(rows))

    (axes,) = drawing.figure.axes
    lines = {line.get_label(): line.get_ydata() for line in axes.get_lines()}
    assert lines == {
        "tiger one": pytest.approx([0.031, 0.035]),
        "tiger two": pytest.approx([0.051, 0.055]),
    }


def test_students_evaluated_on_unseen_items_are_compared_with_such_a_teacher() -> None:
    def build_row(name: str, value: float, **options: str) -> Row:
        identity = {"weights": "t"} if name == "tiger" else {"teacher": "t"}
        return make_row(
            name,
            {NDCG: value, "test/users_per_s": 10.0},
            seeds="1",
            options=EvaluationOptions.from_values(options),
            **identity,
        )

    rows = [
        build_row("sid_mlp", 0.05, unseen="True"),
        build_row("tiger", 0.04, unseen="True"),
        build_row("sid_mlp", 0.03),
        build_row("tiger", 0.02),
        build_row("tiger", 0.021, beam="100"),
    ]

    (students,) = non_inferiority_tables(rows, "ndcg@10")

    assert [tuple(line[:2]) for line in students.cells] == [
        ("sid_mlp-1 [unseen]", "tiger-1 [unseen]"),
        ("sid_mlp-1", "tiger-1"),
        ("sid_mlp-1", "tiger-1 [beam 100]"),
    ]


def build_actions_row(
    model: str, seeds: str, *figures: tuple[float, float], **num_parameters: int
) -> Row:
    """Build the row of a model of actions.

    Args:
        model: Name of the model.
        seeds: One character per seed.
        *figures: Loss and normalised entropy of each seed.
        **num_parameters: Number of parameters of each part of the model.
    """
    parameters = {
        f"parameters/{part}": float(number) for part, number in num_parameters.items()
    }
    entropies = ("test/mean/normalised_entropy", "test/like/normalised_entropy")
    values = [
        {LOSS: loss, **dict.fromkeys(entropies, entropy), **parameters}
        for loss, entropy in figures
    ]
    return make_row(model, *values, seeds=seeds)


def test_changes_are_relative_to_the_baseline_of_the_same_seed() -> None:
    rows = [
        build_actions_row(
            "attn_mvp", "12", (1.8, 0.72), (1.9, 0.76), items=10, pool=3, total=13
        ),
        build_actions_row(
            "interleaved", "123", (2.0, 0.8), (1.9, 0.8), (9.0, 0.1), items=10, total=10
        ),
        build_actions_row("lac", "4", (1.0, 0.5), items=10, first=1, total=11),
    ]

    (tasks,) = task_tables(rows)
    assert tasks.header == ["model", "run", "like"]
    assert tasks.cells[0] == ["attn_mvp", "attn_mvp-*", "0.7400 ± 0.0283"]

    (relative,) = relative_tables(rows)
    assert relative.header == [
        "model",
        "run",
        "seeds",
        "eval loss",
        "mean NE",
        "like NE",
    ]
    assert relative.cells == [
        [
            "attn_mvp",
            "attn_mvp-*",
            "2",
            "-5.00% ± 7.07%",
            "-7.50% ± 3.54%",
            "-7.50% ± 3.54%",
        ]
    ]

    (parameters,) = parameter_tables(rows)
    assert parameters.header == ["model", "items", "pool", "first", "total"]
    assert parameters.cells == [
        ["attn_mvp", "10", "3", "-", "13"],
        ["interleaved", "10", "-", "-", "10"],
        ["lac", "10", "-", "1", "11"],
    ]


def test_models_of_other_kinds_have_no_tables_of_actions() -> None:
    values = {NDCG: 0.1, "test/gauc": 0.5, "test/normalised_entropy": 0.9}
    rows = [make_row("sasrec", values)]

    assert task_tables(rows) == []
    assert relative_tables(rows) == []
    assert parameter_tables(rows) == []


def build_evaluated_row(
    name: str,
    ndcg_by_seed: dict[int, float],
    weights: str = "",
    teacher: str = "",
    options: EvaluationOptions | None = None,
) -> Row:
    """Build the row of a model evaluated on test, with a run per seed."""
    evaluated = make_row(name, options=options)
    for seed, value in ndcg_by_seed.items():
        run = Run(
            f"{name}_{seed}",
            f"{name}-{seed}",
            str(seed),
            True,
            weights,
            teacher,
            {NDCG: value},
        )
        evaluated.runs.append(run)
    return evaluated


def test_students_are_compared_with_each_evaluation_of_their_teacher() -> None:
    tiger = build_evaluated_row("tiger", {42: 0.0330}, weights="abc")
    unconstrained = build_evaluated_row(
        "tiger",
        {42: 0.0323},
        weights="abc",
        options=EvaluationOptions.from_values({"constrained": "False"}),
    )
    ndcg_by_seed = {42: 0.0333, 43: 0.0332, 44: 0.0331}
    students = build_evaluated_row("sid_mlp", ndcg_by_seed, teacher="abc")
    without_teacher = build_evaluated_row("gdn", {7: 0.02}, teacher="other")
    rows = [tiger, unconstrained, students, without_teacher]

    (table,) = non_inferiority_tables(rows, "ndcg@10")

    assert table.cells == [
        [
            "sid_mlp-4*",
            "tiger-42",
            "3",
            "0.0332 ± 0.0001",
            "0.0330",
            "+0.0002",
            "0.006 †",
        ],
        [
            "sid_mlp-4*",
            "tiger-42 [constrained False]",
            "3",
            "0.0332 ± 0.0001",
            "0.0323",
            "+0.0009",
            "0.001 †",
        ],
    ]


def test_a_student_with_one_seed_trained_twice_needs_a_second_seed() -> None:
    tiger = build_evaluated_row("tiger", {42: 0.0330}, weights="abc")
    repeated = build_evaluated_row("sid_mlp", {42: 0.031}, teacher="abc")
    repeated.runs *= 2

    (table,) = non_inferiority_tables([tiger, repeated], "ndcg@10")

    assert table.cells == [
        ["sid_mlp-42", "tiger-42", "1", "0.0310", "0.0330", "-0.0020", "needs 2 seeds"]
    ]
