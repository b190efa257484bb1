"""Test verdicts on the papers' claims from MLflow runs and benchmark results."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_1samp

from benchmarks.tables import to_rows
from models import registry
from models.metrics.per_user_metrics import PerUserValues
from models.storage.tables import UserError
from papers.claims import (
    FAILS,
    HOLDS,
    OPEN,
    Claim,
    Verdict,
    decide,
    read_claims,
    verdicts,
    verdicts_table,
)
from papers.kept import select_all
from papers.published import USERS, Papers, beside_the_papers, fits, load
from pipelines import tracking
from pipelines.comparison.load import compare, load_rows
from pipelines.comparison.runs import select
from pipelines.comparison.table import percent
from pipelines.comparison.tables import paired_t_test

PAPERS = """
systems:
  teacher: {model: tiger}
  student: {model: sid_mlp, params: {alpha: {above: 0}}}
  scratch: {like: student, params: {alpha: 0}}
  fast: {model: decode/fast, params: {batch: 32}}
  slow: {model: decode/slow, params: {batch: 32}}
published:
  - source: Table 1
    reference: teacher
    metrics: [test/ndcg@10]
    datasets: {Games: {teacher: [0.030], student: [0.033], scratch: [0.027]}, B: {teacher: [0.05], student: [0.05]}}
claims:
  - {id: keeps, source: Table 1, says: keeps, left: student, right: teacher, match: teacher,
     metric: test/ndcg@10, expect: no_worse}
  - {id: above, source: Table 1, says: above, left: student, right: teacher, match: teacher,
     metric: test/ndcg@10, expect: higher}
  - {id: scratch, source: Table 1, says: loses, left: scratch, right: student,
     metric: test/ndcg@10, expect: lower, paper: [-0.2, -0.1]}
  - {id: seeds, source: Table 1, says: not inferior, left: student, right: teacher, match: teacher,
     metric: test/ndcg@10, expect: non_inferior}
  - {id: speed, source: Table 2, says: faster, left: fast, right: slow,
     metric: items_per_s, as: times, expect: higher, paper: [8, 8]}
  - {id: peak, source: Fig. 1, says: best at, system: student, param: alpha,
     metric: ndcg@10, expect: best_in, values: [0.7]}
  - {id: falls, source: Fig. 1, says: falls, system: student, param: alpha,
     metric: test/users_per_s, expect: falls}
  - {id: flat, source: Fig. 1, says: flat, system: student, param: alpha,
     metric: ndcg@10, expect: flat, within: 0.5}
  - {id: branching, source: Table 3, says: few, system: teacher, metric: sids/branching/1, range: [1, 2]}
"""


@pytest.fixture
def papers(tmp_path: Path) -> Papers:
    """Load the systems, published figures and claims of `PAPERS`."""
    (tmp_path / "claims.yaml").write_text(PAPERS)
    return load(tmp_path / "claims.yaml")


class Store:
    """An MLflow store with runs logged as trainings and evaluations log them."""

    def __init__(self, folder: Path, uri: str) -> None:
        self.folder = folder
        self.uri = uri

    def log(
        self,
        run: str,
        ndcg: float,
        *,
        seed: int = 1,
        speed: float = 10.0,
        end: bool = True,
        sequences: str = "s",
        users: Sequence[float] = (),
        num_users: float = USERS["Games"],
        **model: object,
    ) -> None:
        """Log a run of a model.

        Args:
            run: Name of the run, also the hash of its weights.
            ndcg: NDCG@10 on test and validation.
            seed: Seed of the training.
            speed: Users per second.
            end: Whether the run is finished.
            sequences: Hash of the table of sequences.
            users: NDCG@10 of each user.
            num_users: Number of test users.
            **model: Options of the model, by default a `sid_mlp`.
        """
        config = {
            "model": {"name": "sid_mlp", "head_width": 512, **model},
            "fit": {"seed": seed},
        }
        hashes = {"trie": "t", "sequences": sequences}
        opened = tracking.open_run(
            self.uri, "retrieval/x", run, str(self.folder), config=config, hashes=hashes
        )
        logger = tracking.Logger(opened)
        metrics = {
            "test/ndcg@10": ndcg,
            "best/ndcg@10": ndcg,
            "test/users_per_s": speed,
            "sids/branching/1": 1.5,
            "test/users": num_users,
        }
        logger.log(metrics, 1)
        logger.flush()
        logger.tag(**{tracking.WEIGHTS_TAG: run})
        if len(users):
            per_user = PerUserValues.from_batch(
                torch.arange(len(users)), torch.tensor(users)
            )
            content = {"by_user": {"ndcg@10": per_user.to_text()}}
            tracking.log_json(opened, content, "evaluation-test.json")
        if end:
            logger.end()

    def mark_as_simulated(self, run_name: str) -> None:
        """Tag a run as one on a simulated log."""
        client = tracking.connect(self.uri)
        runs = select_all(self.uri).runs
        (run,) = [run for run in runs if run.info.run_name == run_name]
        client.set_tag(run.info.run_id, tracking.SIMULATED_TAG, "true")

    def decide(self, papers: Papers) -> dict[str, Verdict]:
        """Return the verdicts on the papers' claims, by the claim's id."""
        rows = load_rows(select_all(self.uri))
        return {verdict.claim.id: verdict for verdict in verdicts(rows, papers)}


@pytest.fixture
def empty_store(tmp_path: Path, new_store: Callable[[Path], str]) -> Store:
    """Create a store without runs."""
    return Store(tmp_path, new_store(tmp_path))


@pytest.fixture
def store(empty_store: Store) -> Store:
    """Log a teacher and three seeds of its student, which is within one per cent."""
    empty_store.log("teacher", 0.0300, name="tiger")
    for seed, value in ((1, 0.0301), (2, 0.0302), (3, 0.0303)):
        empty_store.log(
            f"student-{seed}", value, seed=seed, alpha=0.7, teacher_hash="teacher"
        )
    return empty_store


def test_unfinished_runs_decide_nothing(empty_store: Store, papers: Papers) -> None:
    empty_store.log("unfinished", 0.03, end=False, alpha=0.7, teacher_hash="teacher")
    empty_store.log("teacher", 0.03, end=False, name="tiger")

    assert {v.verdict for v in empty_store.decide(papers).values()} == {OPEN}


def test_simulated_logs_decide_nothing(store: Store, papers: Papers) -> None:
    assert store.decide(papers)["keeps"].verdict == HOLDS
    store.mark_as_simulated("teacher")
    assert store.decide(papers)["keeps"].verdict == OPEN


@pytest.mark.parametrize(("num_users", "verdict"), [(199, OPEN), (200, HOLDS)])
def test_logs_of_few_test_users_decide_nothing(
    empty_store: Store, papers: Papers, num_users: int, verdict: str
) -> None:
    empty_store.log("teacher", 0.03, name="tiger", num_users=num_users)
    empty_store.log(
        "student", 0.03, alpha=0.7, teacher_hash="teacher", num_users=num_users
    )

    assert empty_store.decide(papers)["keeps"].verdict == verdict


def test_students_are_compared_with_their_teacher(store: Store, papers: Papers) -> None:
    store.log("other teacher", 0.09, name="tiger")  # the teacher of no student

    verdict = store.decide(papers)

    assert verdict["keeps"].verdict == HOLDS
    assert verdict["keeps"].ours == "+0.67%"
    assert verdict["keeps"].paper == "+0.00% to +10.0%"
    assert "seeds 3 / 1" in verdict["keeps"].why
    assert verdict["above"].verdict == HOLDS  # printed: 0 to 10%; up to 20% would hold
    assert verdict["seeds"].verdict == HOLDS
    assert verdict["branching"].verdict == HOLDS
    for claim in ("scratch", "speed", "peak"):
        assert verdict[claim].verdict == OPEN


def test_students_of_several_teachers_are_decided_by_all_pairs(
    empty_store: Store, papers: Papers
) -> None:
    store = empty_store
    draw = np.random.default_rng(7)
    pairs = [  # NDCG of each user by the teacher and by its student
        (draw.random(50).astype(np.float16), draw.random(50).astype(np.float16))
        for _ in range(3)
    ]
    for seed, (teacher, student) in reversed(list(enumerate(pairs))):
        store.log(
            f"teacher-{seed}",
            teacher.mean(dtype=float),
            seed=seed,
            users=teacher.tolist(),
            name="tiger",
        )
        store.log(
            f"student-{seed}",
            student.mean(dtype=float),
            seed=seed,
            users=student.tolist(),
            teacher_hash=f"teacher-{seed}",
            alpha=0.7,
        )
    store.log("apart", 0.9, seed=4, alpha=0.7, teacher_hash="not here")

    verdict = store.decide(papers)

    changes = [
        float(np.mean(s, dtype=float) / np.mean(t, dtype=float)) - 1 for t, s in pairs
    ]
    low, high = bootstrap_relative_change(pairs)
    assert verdict["keeps"].ours == percent(sum(changes) / 3)
    assert verdict["keeps"].why == f"within 1.0%; seeds 3 / 3; 95% {low} to {high}"
    above_margin = [change + 0.01 for change in changes]
    p = ttest_1samp(above_margin, 0, alternative="greater").pvalue
    assert verdict["seeds"].why.startswith(f"p = {p:.3f}; seeds 3 / 3")
    (table,) = beside_the_papers(compare(select(store.uri, ["retrieval/x"])), papers)
    assert [line[1] for line in table.cells] == ["teacher-*", "student-*"]
    assert table.cells[1][5] == percent(sum(changes) / 3)


def bootstrap_relative_change(
    pairs: list[tuple[np.ndarray, np.ndarray]],
) -> tuple[str, str]:
    """Return the 95% interval of the students' relative change by a bootstrap of users.

    Args:
        pairs: NDCG of 50 users by a teacher and by its student, for three teachers.
    """
    resample = np.random.default_rng(0)
    differences = []
    for _ in range(2000):
        users = resample.integers(50, size=50)
        total = sum(
            float(student[user]) - float(teacher[user])
            for teacher, student in pairs
            for user in users
        )
        differences.append(total / 150)
    base = sum(float(value) for teacher, _ in pairs for value in teacher) / 150
    low, high = np.quantile(differences, [0.025, 0.975])
    return percent(float(low) / base), percent(float(high) / base)


def test_direction_and_size_both_count(store: Store, papers: Papers) -> None:
    def log_scratch(value: float, seed: int) -> Verdict:
        store.log(
            f"scratch-{value}", value, seed=seed, alpha=0.0, teacher_hash="teacher"
        )
        return store.decide(papers)["scratch"]

    lower = log_scratch(0.0302 * 0.94, 1)  # printed: 10 to 20%; half of 10% is enough
    assert (lower.verdict, lower.why.split(";")[0]) == (HOLDS, "size")
    higher = log_scratch(0.0302 * 1.2, 2)  # the mean of both is above the student
    assert higher.verdict == FAILS
    assert higher.why.startswith("direction")


def test_too_small_a_difference_fails(store: Store, papers: Papers) -> None:
    store.log("scratch", 0.0302 * 0.97, alpha=0.0, teacher_hash="teacher")

    scratch = store.decide(papers)["scratch"]

    assert (scratch.verdict, scratch.ours, scratch.why) == (
        FAILS,
        "-2.7%",
        "size; seeds 1 / 1",  # only the seed that both have
    )


def test_of_several_rows_the_best_on_validation_is_compared(
    store: Store, papers: Papers
) -> None:
    store.log("scratch", 0.027, alpha=0.0, teacher_hash="other")
    for alpha, value in ((0.3, 0.028), (0.5, 0.030), (0.8, 0.029)):
        store.log(f"alpha-{alpha}", value, alpha=alpha, teacher_hash="other")

    assert store.decide(papers)["scratch"].ours == "-10.0%"


def test_rows_that_differ_in_other_options_are_not_compared(
    store: Store, papers: Papers
) -> None:
    store.log("scratch", 0.02, alpha=0.0, head_width=64, teacher_hash="teacher")
    store.log("elsewhere", 0.02, alpha=0.0, teacher_hash="teacher", sequences="others")

    assert store.decide(papers)["scratch"].verdict == OPEN


def test_rows_with_different_encoders_are_compared(
    empty_store: Store, tmp_path: Path
) -> None:
    (tmp_path / "pp.yaml").write_text("""
systems:
  own: {model: sid_mlp_pp, params: {shared_mlp: false}}
  shared: {model: sid_mlp_pp, params: {shared_mlp: true}}
claims: [{id: shared, source: Table 14, says: loses, left: shared, right: own, metric: test/ndcg@10, expect: lower,
          paper: [-0.2, -0.1]}]
""")
    papers = load(tmp_path / "pp.yaml")
    empty_store.log(
        "own", 0.030, name="sid_mlp_pp", shared_mlp=False, encoder="a", encoder_hash="a"
    )
    empty_store.log(
        "narrow",
        0.027,
        name="sid_mlp_pp",
        shared_mlp=True,
        head_width=64,
        encoder="b",
        encoder_hash="b",
    )
    assert empty_store.decide(papers)["shared"].verdict == OPEN
    empty_store.log(
        "shared",
        0.027,
        name="sid_mlp_pp",
        shared_mlp=True,
        encoder="b",
        encoder_hash="b",
    )
    assert empty_store.decide(papers)["shared"].verdict == HOLDS


def test_claims_on_a_setting_are_decided_over_its_values(
    store: Store, papers: Papers
) -> None:
    for alpha, value, speed in (
        (0.3, 0.025, 30.0),
        (0.5, 0.028, 29.0),
        (1.0, 0.029, 28.0),
    ):
        store.log(
            f"alpha-{alpha}", value, speed=speed, alpha=alpha, teacher_hash="teacher"
        )

    verdict = store.decide(papers)

    assert verdict["peak"].ours == "best at 0.7"
    assert verdict["peak"].verdict == verdict["flat"].verdict == HOLDS
    assert verdict["falls"].verdict == FAILS  # 30, 29, 10, 28
    assert "0.3, 0.5, 0.7, 1" in verdict["flat"].why


def test_claims_on_speed_are_decided_by_benchmark_results(papers: Papers) -> None:
    lines = [
        {
            "benchmark": "decode",
            "variant": variant,
            "params": {"batch": batch},
            "median_s": 1.0,
            "items_per_s": speed,
        }
        for variant, batch, speed in (
            ("fast", 32, 60.0),
            ("slow", 32, 10.0),
            ("slow", 1, 2.0),
        )
    ]

    def decide_speed(lines: list[dict]) -> Verdict:
        every_verdict = verdicts(to_rows(lines), papers)
        (verdict,) = [v for v in every_verdict if v.claim.id == "speed"]
        return verdict

    speed = decide_speed(lines)
    assert (speed.verdict, speed.ours, speed.paper) == (HOLDS, "6x", "8x")
    # Of repeated measurements the mean counts.
    repeated = {**lines[0], "items_per_s": 12.0, "median_s": 2.0}
    assert decide_speed([*lines, repeated]).ours == "3.6x"


def test_the_table_counts_verdicts(store: Store, papers: Papers) -> None:
    table = verdicts_table(list(store.decide(papers).values()))

    assert table.notes[0] == "4 holds, 0 does not hold, 5 not yet measured."
    assert [row[0] for row in table.cells].count(OPEN) == 5


def test_a_table_sets_our_values_beside_the_published_ones(
    store: Store, papers: Papers
) -> None:
    (table,) = beside_the_papers(compare(select(store.uri, ["retrieval/x"])), papers)

    assert table.header == [
        "system",
        "run",
        "metric",
        "ours",
        "Games",
        "ours vs teacher",
        "Games vs teacher",
    ]
    assert table.cells == [
        ["teacher", "teacher", "test/ndcg@10", "0.0300", "0.0300", "", ""],
        [
            "student",
            "student-*",
            "test/ndcg@10",
            "0.0302",
            "0.0330",
            "+0.67%",
            "+10.0%",
        ],
    ]


def test_no_table_compares_runs_on_another_log_of_the_same_name(
    store: Store, papers: Papers
) -> None:
    comparison = compare(select(store.uri, ["retrieval/x"]))
    for row in comparison.rows:
        for run in row.runs:
            run.metrics["test/users"] = 24_772.0  # another log of Amazon's games

    assert beside_the_papers(comparison, papers) == []


def test_every_claim_of_the_papers_can_be_decided() -> None:
    papers = load()
    claims = read_claims(papers)
    assert len({claim.id for claim in claims}) == len(claims) > 90
    for claim in claims:
        (verdict,) = decide(claim, [], papers)
        assert verdict.verdict == OPEN
        compares = claim.left and claim.expect in ("higher", "lower")
        if compares and claim.size == "printed":
            assert verdict.paper, f"no published figures show the size of {claim.id}"


def test_systems_of_the_papers_name_options_of_their_models() -> None:
    for system in load().systems.values():
        names = system.model if isinstance(system.model, list) else [system.model]
        for name in [name for name in names if "/" not in name]:
            fields = registry.find(name).config_class.__dataclass_fields__.values()
            options = {field.name for field in fields}
            assert set(system.params) <= options | {"beam"}


def test_claims_on_benchmarks_name_metrics_that_benchmarks_measure() -> None:
    files = [*(Path(__file__).parents[2] / "benchmarks").glob("*.py")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    keys = [key for node in nodes if isinstance(node, ast.Dict) for key in node.keys]
    measured = {key.value for key in keys if isinstance(key, ast.Constant)}
    papers = load()
    benchmark_claims = [
        claim
        for claim in read_claims(papers)
        if claim.left and "/" in str(papers.systems[claim.left].model)
    ]
    assert len(benchmark_claims) > 10
    assert not {claim.metric for claim in benchmark_claims} - measured


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"systems": {"a": {"params": {"m": 1}}}},
            "system a: model missing; give model",
        ),
        ({"systems": {"a": {"like": "b"}}}, "system a: 'b' is unknown"),
        (
            {"claims": [{"id": "c", "says": "x"}]},
            "claim c: source, metric missing; give id, source, says, metric",
        ),
        (
            {"claims": [{"id": "a", "left": "studnt", "right": "teacher"}]},
            r"'studnt' is unknown; .* 'student'",
        ),
        ({"claim": []}, "'claim' is unknown; the nearest is 'claims'"),
        (
            {"published": [{"source": "s", "metrics": ["m"]}]},
            "s: datasets missing; give source, metrics, datasets",
        ),
        (
            {
                "published": [
                    {
                        "source": "T",
                        "metrics": ["m", "n"],
                        "datasets": {"A": {"teacher": [1]}},
                    }
                ]
            },
            "1 figures",
        ),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, change: dict, message: str) -> None:
    content = {**yaml.safe_load(PAPERS), **change}
    (tmp_path / "claims.yaml").write_text(yaml.safe_dump(content, sort_keys=False))

    with pytest.raises(UserError, match=message):
        read_claims(load(tmp_path / "claims.yaml"))


def test_an_impossible_rule_is_refused(papers: Papers) -> None:
    rule = {"id": "a", "source": "", "says": "", "metric": "m"}
    with pytest.raises(
        UserError, match="claim a, expect: 'hiher' is unknown; the nearest is 'higher'"
    ):
        Claim(**rule, left="student", right="teacher", expect="hiher")
    with pytest.raises(UserError, match="claim a: give left and right, or a system"):
        Claim(**rule, system="student")


@given(st.floats(-10, 10), st.floats(-10, 10))
def test_params_are_compared_as_numbers_where_possible(
    value: float, expected: float
) -> None:
    assert fits(str(value), expected) == (value == expected)
    assert fits(str(value), {"above": expected}) == (value > expected)
    assert fits(str(value), ["x", value])
    assert not fits(None, expected)
    assert fits("False", False)
    assert not fits("0", False)


def test_the_paired_t_test_equals_scipys() -> None:
    from scipy.stats import ttest_rel

    left, right = [0.31, 0.35, 0.33, 0.30], [0.30, 0.31, 0.32, 0.30]
    differences = [a - b for a, b in zip(left, right, strict=True)]
    assert math.isclose(paired_t_test(differences), ttest_rel(left, right).pvalue)
    assert paired_t_test([0.0, 0.0]) == 1.0
    assert paired_t_test([0.1, 0.1]) == 0.0
    with pytest.raises(ValueError, match="1 differences, the test needs at least 2"):
        paired_t_test([0.1])
