"""Runs beside what the papers print: references, seeds and logs, from rows made by
hand.
"""

from __future__ import annotations

import math

import pytest

from papers.claims import FAILS, HOLDS, OPEN, Claim, decide
from papers.plots import beams
from papers.published import Papers, Published, System, compare_with, load
from papers.tables import non_inferiority_tables, parameter_tables, relative_tables
from pipelines.comparison.rows import EvaluationOptions, Row, Run
from pipelines.comparison.tables import compare_with_best, task_tables
from tests.fixtures.comparison_rows import LOSS, NDCG, compared, row

PRINTED = Published(
    "Table 3",
    [NDCG],
    {"A": {"tiger": [0.030], "sid_mlp": [0.033], "sid_mlp_pp": [0.03]}},
    "tiger",
)
SYSTEMS = {name: System(name) for name in ("tiger", "sid_mlp", "sid_mlp_pp")}


def test_every_trie_has_its_reference_above_what_is_seen_against_it() -> None:
    rows = []
    for trie, figures in (("a", (0.045, 0.050, 0.030)), ("b", (0.052, 0.048, 0.049))):
        for model, value in zip(SYSTEMS, figures, strict=True):
            taught = {} if model == "tiger" else {"teacher": f"W{trie}"}
            weights = f"W{trie}" if model == "tiger" else ""
            rows.append(
                row(
                    model,
                    {NDCG: value},
                    table__trie=trie,
                    sids=f"sids-{trie}",
                    weights=weights,
                    **taught,
                )
            )
    table = compare_with(
        compared(sorted(rows, key=lambda r: -r.mean(NDCG))), PRINTED, SYSTEMS
    )
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
    alone = compare_with(
        compared([row("sasrec", {NDCG: 0.9}), *rows[:3]]), PRINTED, SYSTEMS
    )
    assert alone is not None
    assert [cells[1] for cells in alone.cells] == [
        "tiger-1",
        "sid_mlp-1",
        "sid_mlp_pp-1",
    ]


def test_nothing_is_relative_to_zero() -> None:
    rows = [
        row("sid_mlp", {NDCG: 0.0}, {NDCG: 0.0}, teacher="W"),
        row("tiger", {NDCG: 0.0}, {NDCG: 0.0}, weights="W"),
    ]
    table = compare_with(compared(rows), PRINTED, SYSTEMS)
    assert table is not None
    assert [cells[4:6] for cells in table.cells] == [["0.0300", ""], ["0.0330", "-"]]
    (paired,) = compare_with_best(compared(rows))
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
    (found,) = decide(claim, rows, Papers(SYSTEMS, [], []))
    assert (found.verdict, found.why) == (OPEN, "the right value is 0")


def test_a_repeated_seed_counts_once_and_shared_seeds_alone_are_compared() -> None:
    ours = row("attn_mvp", {LOSS: 1.99}, seeds="1")
    theirs = row("interleaved", {LOSS: 2.0}, {LOSS: 2.4}, {LOSS: 2.4}, seeds="122")
    assert theirs.mean(LOSS) == pytest.approx(2.2)
    assert theirs.deviation(LOSS) == pytest.approx(0.2 * math.sqrt(2))
    claim = Claim(
        "c", "Table 2", "says", LOSS, left="l", right="r", expect="lower", size="any"
    )
    systems = {"l": System("attn_mvp"), "r": System("interleaved")}
    (found,) = decide(claim, [ours, theirs], Papers(systems, [], []))
    assert (found.ours, found.why) == ("-0.50%", "direction; seeds 1 / 1")
    printed = Published(
        "Table 2", [LOSS], {"A": {"r": [0.0], "l": [-0.008]}}, "r", relative=True
    )
    table = compare_with(compared([ours, theirs]), printed, systems)
    assert table is not None
    assert [cells[3:5] for cells in table.cells] == [
        ["2.0000", ""],
        ["1.9900", "-0.50%"],
    ]
    (relative,) = relative_tables([ours, theirs])
    assert relative.cells[0][3] == "-0.50%"


def test_rows_of_another_log_are_not_compared() -> None:
    cuts = {"temporal": 2.0, "per user": 1.5}
    rows = [
        row(model, {LOSS: loss * part}, {LOSS: loss * part * 1.1}, table__sequences=cut)
        for cut, loss in cuts.items()
        for model, part in (("interleaved", 1.0), ("attn_mvp", 0.99))
    ]
    (relative,) = relative_tables(rows)
    assert [cells[3] for cells in relative.cells] == ["-1.00% ± 0.00%"] * 2
    by_loss = compared(sorted(rows, key=lambda r: r.mean(LOSS)), "eval_loss")
    (paired,) = compare_with_best(by_loss)
    assert [cells[4] for cells in paired.cells] == ["+1.0%"] * 2


@pytest.mark.parametrize(
    ("times", "verdict"),
    [(0.49, FAILS), (0.51, HOLDS), (1.0, HOLDS), (1.99, HOLDS), (2.01, FAILS)],
)
@pytest.mark.parametrize("printed", [8.74, 0.043])
def test_a_size_holds_from_half_to_double(
    printed: float, times: float, verdict: str
) -> None:
    expect = "higher" if printed > 1 else "lower"
    claim = Claim(
        "c",
        "s",
        "says",
        "speed",
        left="l",
        right="r",
        as_="times",
        expect=expect,
        paper=(printed,) * 2,
    )
    systems = {"l": System("decode/fast"), "r": System("decode/slow")}
    rows = [
        row("decode/fast", {"speed": printed * times}, seeds=" "),
        row("decode/slow", {"speed": 1.0}, seeds=" "),
    ]
    (found,) = decide(claim, rows, Papers(systems, [], []))
    assert (found.verdict, found.why) == (verdict, "size")


def test_who_gains_more_than_attn_mvp_is_better_than_it() -> None:
    papers = load()
    (claim,) = [Claim(**given) for given in papers.claims if given["id"] == "lac"]
    for loss, verdict in ((1.990, FAILS), (1.999, HOLDS), (2.1, HOLDS)):
        rows = [
            row("lac", {LOSS: loss}),
            row(
                "attn_mvp",
                {LOSS: 2.0},
                model__action_weight="1.0",
                model__late_fusion="True",
            ),
        ]
        assert decide(claim, rows, papers)[0].verdict == verdict, loss


def test_checkpoints_of_one_model_have_lines_of_their_own() -> None:
    rows = [
        row(
            "tiger",
            {NDCG: value + beam / 1e4},
            checkpoint=f"/runs/{name}/best",
            evaluate__beam=str(beam),
        )
        for name, value in (("one", 0.03), ("two", 0.05))
        for beam in (10, 50)
    ]
    (drawing,) = beams(compared(rows))
    (drawn,) = drawing.figure.axes
    lines = {line.get_label(): line.get_ydata() for line in drawn.get_lines()}
    assert lines == {
        "tiger one": pytest.approx([0.031, 0.035]),
        "tiger two": pytest.approx([0.051, 0.055]),
    }


def test_what_is_asked_without_known_items_stands_apart() -> None:
    """Students so asked are beside a teacher asked the same."""

    def made(name: str, value: float, **options: str) -> Row:
        told = {"weights": "t"} if name == "tiger" else {"teacher": "t"}
        return row(
            name,
            {NDCG: value, "test/users_per_s": 10.0},
            seeds="1",
            options=EvaluationOptions.from_values(options),
            **told,
        )

    rows = [
        made("sid_mlp", 0.05, unseen="True"),
        made("tiger", 0.04, unseen="True"),
        made("sid_mlp", 0.03),
        made("tiger", 0.02),
        made("tiger", 0.021, beam="100"),
    ]
    (students,) = non_inferiority_tables(rows, "ndcg@10")
    assert [tuple(line[:2]) for line in students.cells] == [
        ("sid_mlp-1 [unseen]", "tiger-1 [unseen]"),
        ("sid_mlp-1", "tiger-1"),
        ("sid_mlp-1", "tiger-1 [beam 100]"),
    ]


def of_actions(
    model: str, seeds: str, *figures: tuple[float, float], **parts: int
) -> Row:
    """A model of actions by its loss and entropies, and the parameters of its parts."""
    of_parts = {f"parameters/{part}": float(number) for part, number in parts.items()}
    entropies = ("test/mean/normalised_entropy", "test/like/normalised_entropy")
    values = [
        {LOSS: loss, **dict.fromkeys(entropies, entropy), **of_parts}
        for loss, entropy in figures
    ]
    return row(model, *values, seeds=seeds)


def test_changes_are_relative_to_the_baseline_of_the_same_seed() -> None:
    rows = [
        of_actions(
            "attn_mvp", "12", (1.8, 0.72), (1.9, 0.76), items=10, pool=3, total=13
        ),
        of_actions(
            "interleaved", "123", (2.0, 0.8), (1.9, 0.8), (9.0, 0.1), items=10, total=10
        ),
        of_actions("lac", "4", (1.0, 0.5), items=10, first=1, total=11),
    ]
    (tasks,), (relative,), (parameters,) = (
        task_tables(rows),
        relative_tables(rows),
        parameter_tables(rows),
    )
    assert tasks.header == ["model", "run", "like"]
    assert tasks.cells[0] == ["attn_mvp", "attn_mvp-*", "0.7400 ± 0.0283"]
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
    assert parameters.header == ["model", "items", "pool", "first", "total"]
    assert parameters.cells == [
        ["attn_mvp", "10", "3", "-", "13"],
        ["interleaved", "10", "-", "-", "10"],
        ["lac", "10", "-", "1", "11"],
    ]
    others = [
        row("sasrec", {NDCG: 0.1, "test/gauc": 0.5, "test/normalised_entropy": 0.9})
    ]
    assert [
        *task_tables(others),
        *relative_tables(others),
        *parameter_tables(others),
    ] == []


def evaluated(
    name: str,
    weights: str = "",
    teacher: str = "",
    options: EvaluationOptions | None = None,
    **figures: float,
) -> Row:
    """A model evaluated on test, by its seeds."""
    row_ = row(name, options=options)
    for seed, value in figures.items():
        row_.runs.append(
            Run(
                f"{name}{seed}",
                f"{name}-{seed[1:]}",
                seed[1:],
                True,
                weights,
                teacher,
                {NDCG: value},
            )
        )
    return row_


def test_students_are_beside_each_evaluation_of_their_own_teacher() -> None:
    tiger = evaluated("tiger", "abc", _42=0.0330)
    students = evaluated("sid_mlp", "", "abc", _42=0.0333, _43=0.0332, _44=0.0331)
    gone = evaluated("gdn", "", "other", _7=0.02)  # whose teacher is not here
    asked = [
        tiger,
        evaluated(
            "tiger",
            "abc",
            options=EvaluationOptions.from_values({"constrained": "False"}),
            _42=0.0323,
        ),
        students,
        gone,
    ]
    (table,) = non_inferiority_tables(asked, "ndcg@10")
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
    twice = evaluated("sid_mlp", "", "abc", _42=0.031)
    twice.runs *= 2  # the same seed twice is one seed
    (table,) = non_inferiority_tables([tiger, twice], "ndcg@10")
    assert table.cells == [
        ["sid_mlp-42", "tiger-42", "1", "0.0310", "0.0330", "-0.0020", "needs 2 seeds"]
    ]
