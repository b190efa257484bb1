"""The comparison table: aligned for the terminal, whole as Markdown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jobs.compare import Config, run
from models.storage.locks import hold_lock
from models.storage.tables import UserError
from pipelines import tracking
from pipelines.comparison.load import compare
from pipelines.comparison.plots import Point, pareto_frontier
from pipelines.comparison.rows import shared_name
from pipelines.comparison.runs import select
from pipelines.comparison.table import Table
from pipelines.comparison.tables import tables
from tests.fixtures.comparison_rows import row


def test_text_is_aligned_and_markdown_whole() -> None:
    table = Table(
        "retrieval/x",
        ["model", "run", "test/ndcg@10"],
        [["sasrec", "a|b", "0.1"], ["t", "c", "-"]],
        ["note"],
    )
    _, header, rule, first, second, note = table.text().splitlines()
    assert (
        header.index("test/ndcg@10") + len("test/ndcg@10")
        == len(first)
        == len(second)
        == len(rule)
    )
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
        logger = tracking.Logger(
            tracking.open_run(
                uri, "retrieval/x", name, str(tmp_path), config=config, hashes={}
            )
        )
        logger.log({"test/ndcg@10": value, "val/ndcg@10": 0.3}, 5)
        logger.log({"best/ndcg@10": 0.4}, 6)
        logger.flush()
    run(
        Config(
            ["retrieval/x"], tracking_uri=uri, markdown=str(tmp_path / "out/table.md")
        )
    )
    printed = capsys.readouterr().out
    assert printed.index("wide ") < printed.index("narrow ")  # best first
    assert "0.4000" in printed  # val at the best epoch
    assert "0.3000" not in printed
    assert "wide: model.dim 16" in printed
    assert "wide: 1 of 1 run not finished" in printed
    assert "| sasrec | wide |" in (tmp_path / "out/table.md").read_text()
    with pytest.raises(UserError, match="cannot write /proc/x"):
        run(Config(["retrieval/x"], tracking_uri=uri, markdown="/proc/x/table.md"))


def test_the_frontier_is_what_no_other_beats_in_both() -> None:
    rng = np.random.default_rng(0)
    points = [
        Point(row(str(i)), float(s), float(a))
        for i, (s, a) in enumerate(rng.integers(1, 9, (40, 2)))
    ]
    points += [Point(row("twin"), 9.0, 9.0), Point(row("other twin"), 9.0, 9.0)]
    unbeaten = {
        (p.speed, p.accuracy)
        for p in points
        if not any(
            q.speed >= p.speed
            and q.accuracy >= p.accuracy
            and (q.speed, q.accuracy) != (p.speed, p.accuracy)
            for q in points
        )
    }
    found = [(p.speed, p.accuracy) for p in pareto_frontier(points)]
    assert set(found) == unbeaten
    assert found == sorted(found)


def test_the_store_must_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(UserError, match="give --tracking_uri"):
        run(Config(["retrieval/x"]))


def test_a_run_that_nobody_trains_any_more_is_ended(
    new_store: Callable[[Path], str], tmp_path: Path
) -> None:
    uri = new_store(tmp_path)
    opened = {}
    for name in ("dead", "alive"):
        (tmp_path / name).mkdir()
        tags = {tracking.FOLDER_TAG: str(tmp_path / name)}
        config = {"model": {"name": "sasrec"}, "fit": {"seed": 1}}
        opened[name] = tracking.open_run(
            uri, "retrieval/x", name, str(tmp_path), config=config, hashes={}, tags=tags
        )
    with hold_lock(tracking.lock_path(str(tmp_path / "alive")), "busy"):
        select(uri, ["retrieval/x"])
    client = tracking.connect(uri)
    said = {
        name: client.get_run(run.run_id).info.status for name, run in opened.items()
    }
    assert said == {"dead": "KILLED", "alive": "RUNNING"}


def test_models_that_rank_candidates_are_sorted_by_gauc(
    new_store: Callable[[Path], str], tmp_path: Path
) -> None:
    uri = new_store(tmp_path)
    for name, value in (("base", 0.61), ("qgs", 0.66)):
        config = {"model": {"name": name}, "fit": {"seed": 42}}
        logger = tracking.Logger(
            tracking.open_run(
                uri, "search/x", name, str(tmp_path), config=config, hashes={}
            )
        )
        logger.log(
            {"test/gauc": value, "test/auc": 0.9 - value, "test/users_per_s": 5.0}, 5
        )
        logger.end()
    table = tables(compare(select(uri, ["search/x"])))[0]
    assert [cells[1:5] for cells in table.cells] == [
        ["qgs", "1", "0.6600", "0.2400"],
        ["base", "1", "0.6100", "0.2900"],
    ]
    assert table.header[3:5] == ["test/gauc", "test/auc"]
    assert "candidates ranked in each" in table.text()
