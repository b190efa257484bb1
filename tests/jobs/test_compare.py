"""The comparison table: aligned for the terminal, whole as Markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from jobs.compare import Config, parse, run
from models.tables import UserError, commit, write_part
from pipelines import tracking
from pipelines.comparison.pareto import Point, frontier
from pipelines.comparison.rows import compare, shared_name
from pipelines.comparison.run_tables import tables
from pipelines.comparison.runs import select
from pipelines.comparison.table import Table
from pipelines.data.schemas import items_schema
from pipelines.data.sids.tokenize import TokenizerConfig, tokenize


def test_text_is_aligned_and_markdown_whole() -> None:
    table = Table(
        "retrieval/x", ["model", "run", "test/ndcg@10"], [["sasrec", "a|b", "0.1"], ["t", "c", "-"]], ["note"]
    )
    _, header, rule, first, second, note = table.text().splitlines()
    assert header.index("test/ndcg@10") + len("test/ndcg@10") == len(first) == len(second) == len(rule)
    assert note == "note"
    assert "| sasrec | a\\|b | 0.1 |" in table.markdown()


def test_names_of_seeds_are_shortened_to_what_they_share() -> None:
    name = "tiger-seed1"
    for other in ("tiger-seed2", "tiger-seed3"):
        name = shared_name(name, other)
    assert name == "tiger*"
    assert shared_name("lr-0.1-seed-42-ab", "lr-0.1-seed-43-cd") == "lr-0.1*"
    assert shared_name("a", "a") == "a"
    assert shared_name("a", "b") == "*"


def test_runs_with_other_settings_stay_apart(
    new_store: Callable[[Path], str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    uri = new_store(tmp_path)
    for name, width, value in [("narrow", 8, 0.1), ("wide", 16, 0.2)]:
        config = {"model": {"name": "sasrec", "dim": width}, "fit": {"seed": 1}}
        logger = tracking.Logger(tracking.open_run(uri, "retrieval/x", name, str(tmp_path), config=config, hashes={}))
        logger.log({"test/ndcg@10": value, "val/ndcg@10": 0.3}, 5)
        logger.log({"best/ndcg@10": 0.4}, 6)
    run(Config(["retrieval/x"], tracking_uri=[uri], markdown=str(tmp_path / "out/table.md")))
    printed = capsys.readouterr().out
    assert printed.index("wide ") < printed.index("narrow ")  # best first
    assert "0.4000" in printed  # val at the best epoch
    assert "0.3000" not in printed
    assert "wide: model.dim 16" in printed
    assert "wide: 1 of 1 run not finished" in printed
    assert "| sasrec | wide |" in (tmp_path / "out/table.md").read_text()
    with pytest.raises(UserError, match="cannot write /proc/x"):
        run(Config(["retrieval/x"], tracking_uri=[uri], markdown="/proc/x/table.md"))


def log_run(uri: str, folder: Path, name: str, metrics: dict[str, float], seed: int = 42, **model: str) -> None:
    """A run as a training and its evaluation leave it."""
    weights = model.pop("weights", "")
    config = {"model": {"name": name.rstrip("0123456789-"), **model}, "fit": {"seed": seed}}
    run = tracking.open_run(uri, "retrieval/x", name, str(folder), config=config, hashes={"trie": "t"})
    logger = tracking.Logger(run)
    logger.log(metrics, 5)
    logger.tag(**{tracking.WEIGHTS_TAG: weights or name})
    logger.end()


def tables_of(uri: str) -> list[Table]:
    """The tables of the runs that `log_run` logged."""
    return tables(compare(select(uri, ["retrieval/x"])))


def evaluated(ndcg: float, speed: float, options: str = "") -> dict[str, float]:
    return {f"test{options}/ndcg@10": ndcg, f"test{options}/users_per_s": speed, f"test{options}/examples": 100.0}


@pytest.fixture
def logged(new_store: Callable[[Path], str], tmp_path: Path) -> str:
    """A teacher evaluated in two ways, three seeds of its student, the student of a teacher that is not here."""
    uri = new_store(tmp_path)
    teacher = {**evaluated(0.0330, 20), **evaluated(0.0323, 25, "-constrained-False")}
    log_run(uri, tmp_path, "tiger", teacher, weights="abc")
    for seed, value in [(42, 0.0333), (43, 0.0332), (44, 0.0331)]:
        measured = {**evaluated(value, 300 + seed), "best/epoch": float(seed), "test/temporal80/examples": 7.0}
        measured["test/temporal80/ndcg@10"] = value / 2
        log_run(uri, tmp_path, f"sid_mlp-{seed}", measured, seed, teacher=f"/there/{seed}", teacher_hash="abc")
    log_run(uri, tmp_path, "sid_mlp-7", evaluated(0.02, 290), 7, teacher="/gone", teacher_hash="other")
    return uri


def test_students_stand_beside_each_evaluation_of_their_own_teacher(logged: str) -> None:
    runs, students, shift = tables_of(logged)
    assert [row[1] for row in runs.cells] == ["sid_mlp-4*", "tiger", "tiger [constrained-False]", "sid_mlp-7"]
    assert [row[-1] for row in runs.cells] == ["343", "20", "25", "290"]  # users per second
    rows = {row[1]: row for row in students.cells}
    assert set(rows) == {
        "tiger",
        "tiger [constrained-False]",
    }  # by the hash, not the path; the other has no teacher here
    published = rows["tiger [constrained-False]"]
    assert published == [
        "sid_mlp-4*", "tiger [constrained-False]", "3", "0.0332 ± 0.0001", "0.0323", "+0.0009", "0.001 †"
    ]  # fmt: skip
    assert rows["tiger"][-2:] == ["+0.0002", "0.006 †"]
    assert [row[1:3] for row in shift.cells] == [["sid_mlp-4*", "7"]]
    assert shift.cells[0][3:] == ["-", "0.0166 ± 0.0000"] or shift.cells[0][4] == "0.0166 ± 0.0001"


def test_one_seed_is_no_test(new_store: Callable[[Path], str], tmp_path: Path) -> None:
    uri = new_store(tmp_path)
    log_run(uri, tmp_path, "tiger", evaluated(0.03, 20), weights="abc")
    for _ in range(2):  # the same seed twice is one seed
        log_run(uri, tmp_path, "sid_mlp", evaluated(0.031, 300), 42, teacher_hash="abc")
    _, students = tables_of(uri)
    assert students.cells == [["sid_mlp", "tiger", "1", "0.0310", "0.0300", "+0.0010", "needs 2 seeds"]]


def test_the_frontier_is_what_no_other_beats_in_both() -> None:
    rng = np.random.default_rng(0)
    points = [Point(str(i), "m", float(s), float(a)) for i, (s, a) in enumerate(rng.integers(1, 9, (40, 2)))]
    points += [Point("twin", "m", 9.0, 9.0), Point("other twin", "m", 9.0, 9.0)]
    unbeaten = {
        (p.speed, p.accuracy)
        for p in points
        if not any(
            q.speed >= p.speed and q.accuracy >= p.accuracy and (q.speed, q.accuracy) != (p.speed, p.accuracy)
            for q in points
        )
    }
    found = [(p.speed, p.accuracy) for p in frontier(points)]
    assert set(found) == unbeaten
    assert found == sorted(found)


def test_the_picture_has_a_point_per_evaluated_row(logged: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run(Config(["retrieval/x"], tracking_uri=[logged], pareto=str(tmp_path / "new/pareto.svg")))
    assert "4 points drawn" in capsys.readouterr().out
    assert "constrained-False" in (tmp_path / "new/pareto.svg").read_text()
    with pytest.raises(UserError, match=r"ends in one of \.png"):
        run(Config(["retrieval/x"], tracking_uri=[logged], pareto="pareto.txt"))
    with pytest.raises(UserError, match=r"no run of retrieval/x has the metric 'recall@7' .* the nearest is"):
        run(Config(["retrieval/x"], tracking_uri=[logged], metric="recall@7", pareto="pareto.png"))


def test_tokenizers_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folders = []
    for name, codes in {"one": [[0, 0], [0, 0], [1, 0], [1, 1]], "two": [[0, 0], [0, 1], [1, 0], [1, 1]]}.items():
        items = tmp_path / name / "items"
        schema = items_schema()
        columns = pa.table({"item_index": pa.array(range(4), pa.int32()), "item_id": list("abcd")}, schema=schema)
        commit(str(items), "items", schema, [write_part(str(items), columns)], config={}, inputs={})
        index = tmp_path / name / "index.json"
        index.write_text(
            json.dumps({item: [f"<a_{a}>", f"<b_{b}>"] for item, (a, b) in zip("abcd", codes, strict=True)})
        )
        folders.append(str(tmp_path / name / "sids"))
        tokenize(str(items), folders[-1], TokenizerConfig("published", published=str(index)), say=lambda _: None)
    run(parse("compare", ["--sids", folders[0], f"--sids={folders[1]}"]))
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    one, two = ([cell.strip() for cell in line if cell] for line in lines[3:5])
    assert one[:4] == [folders[0], "published", "4", "2 / 1.5 / 1.33"]  # with the conflict code
    assert one[4:7] == ["2 / 2", "100% / 100%", "1.00 / 0.81"]
    assert one[7:] == ["3", "0.5000", "2"]
    assert two[3] == "2 / 2"
    assert two[7:] == ["4", "0.0000", "1"]
    with pytest.raises(UserError, match=r"which holds no table sids; give a folder that jobs\.tokenize made"):
        run(parse("compare", ["--sids", str(tmp_path)]))
    with pytest.raises(UserError, match="nothing is given to compare"):
        parse("compare", [])


def test_stores_are_compared_as_one(
    new_store: Callable[[Path], str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    uris = [new_store(tmp_path / name) for name in ("first", "second")]
    log_run(uris[0], tmp_path, "sid_mlp-1", evaluated(0.031, 300), 1, teacher_hash="abc")
    for name, found, seed, given in (
        ("tiger", 0.03, 42, {"weights": "abc"}),
        ("sid_mlp-2", 0.033, 2, {"teacher_hash": "abc"}),
    ):
        log_run(uris[1], tmp_path, name, evaluated(found, 20), seed, **given)
    words = ["--tracking_uri", uris[0], f"--tracking_uri={uris[1]}"]
    (tmp_path / "claims.yaml").write_text(
        "systems: {t: {model: tiger}, s: {model: sid_mlp}}\n"
        "claims: [{id: a, source: T, says: keeps, left: s, right: t, match: teacher, metric: test/ndcg@10, "
        "expect: no_worse}]"
    )
    words += ["--claims_file", str(tmp_path / "claims.yaml")]
    run(parse("compare", [*words, "--experiment", "retrieval/x", "--claims"]))
    printed = capsys.readouterr().out
    assert re.search(r"sid_mlp-\* +2 +0\.0320 ± 0\.0014", printed)
    assert re.search(r"holds +T +keeps .* \+6\.7%", printed)
    with pytest.raises(UserError, match=r"'retrieval/y' is not at .*first/.*second/.*; there are retrieval/x"):
        run(parse("compare", [*words, "--experiment", "retrieval/y"]))
    with pytest.raises(UserError, match="tracking_uri is given 2 times; a sweep or runs are of one store"):
        parse("compare", [*words, "--run", "tiger"])


def test_the_store_must_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(UserError, match="give --tracking_uri"):
        run(Config(["retrieval/x"]))


def test_models_that_rank_candidates_are_sorted_by_gauc(new_store: Callable[[Path], str], tmp_path: Path) -> None:
    uri = new_store(tmp_path)
    for name, value in (("base", 0.61), ("qgs", 0.66)):
        log_run(uri, tmp_path, name, {"test/gauc": value, "test/auc": 0.9 - value, "test/users_per_s": 5.0})
    (table,) = tables_of(uri)
    assert [row[1:5] for row in table.cells] == [["qgs", "1", "0.6600", "0.2400"], ["base", "1", "0.6100", "0.2900"]]
    assert table.header[3:5] == ["test/gauc", "test/auc"]
    assert "candidates ranked in each" in table.text()
