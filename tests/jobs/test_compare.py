"""Test the table of jobs.compare: its text, Markdown, rows and order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from core.errors import UserError
from core.files import hold_lock
from jobs.compare import Config, run
from pipelines import tracking
from pipelines.comparison.load import compare
from pipelines.comparison.plots import Point, pareto_frontier
from pipelines.comparison.rows import shared_name
from pipelines.comparison.runs import select
from pipelines.comparison.table import Table
from pipelines.comparison.tables import tables
from tests.fixtures.comparison_rows import make_row


def test_the_text_is_aligned_and_the_markdown_escaped() -> None:
    table = Table(
        "retrieval/x",
        ["model", "run", "test/ndcg@10"],
        [["sasrec", "a|b", "0.1"], ["t", "c", "-"]],
        ["note"],
    )
    _, header, rule, first, second, note = table.text().splitlines()
    width = header.index("test/ndcg@10") + len("test/ndcg@10")
    assert len(first) == len(second) == len(rule) == width
    assert note == "note"
    assert "| sasrec | a\\|b | 0.1 |" in table.markdown()


def test_names_of_seeds_are_shortened_to_their_common_prefix() -> None:
    name = "tiger-seed1"
    for other in ("tiger-seed2", "tiger-seed3"):
        name = shared_name(name, other)
    assert name == "tiger*"
    assert shared_name("lr-0.1-seed-42-ab", "lr-0.1-seed-43-cd") == "lr-0.1*"
    assert shared_name("a", "a") == "a"
    assert shared_name("a", "b") == "*"


def test_runs_with_different_options_have_different_rows(
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
    markdown = tmp_path / "out/table.md"

    run(Config(["retrieval/x"], tracking_uri=uri, markdown=str(markdown)))

    output = capsys.readouterr().out
    assert output.index("wide ") < output.index("narrow ")  # best first
    assert "0.4000" in output  # validation at the best epoch
    assert "0.3000" not in output
    assert "wide: model.dim 16" in output
    assert "wide: 1 of 1 run not finished" in output
    assert "| sasrec | wide |" in markdown.read_text()
    with pytest.raises(UserError, match="cannot write /proc/x"):
        run(Config(["retrieval/x"], tracking_uri=uri, markdown="/proc/x/table.md"))


def test_the_frontier_has_the_points_that_no_other_point_dominates() -> None:
    rng = np.random.default_rng(0)
    points = [
        Point(make_row(str(i)), float(speed), float(accuracy))
        for i, (speed, accuracy) in enumerate(rng.integers(1, 9, (40, 2)))
    ]
    points += [
        Point(make_row("twin"), 9.0, 9.0),
        Point(make_row("other twin"), 9.0, 9.0),
    ]

    def dominates(other: Point, point: Point) -> bool:
        is_equal = (other.speed, other.accuracy) == (point.speed, point.accuracy)
        is_as_good = other.speed >= point.speed and other.accuracy >= point.accuracy
        return is_as_good and not is_equal

    frontier = [(point.speed, point.accuracy) for point in pareto_frontier(points)]

    undominated = {
        (point.speed, point.accuracy)
        for point in points
        if not any(dominates(other, point) for other in points)
    }
    assert set(frontier) == undominated
    assert frontier == sorted(frontier)


def test_a_running_run_without_a_live_process_is_marked_as_killed(
    new_store: Callable[[Path], str], tmp_path: Path
) -> None:
    uri = new_store(tmp_path)
    runs = {}
    for name in ("dead", "alive"):
        (tmp_path / name).mkdir()
        tags = {tracking.FOLDER_TAG: str(tmp_path / name)}
        config = {"model": {"name": "sasrec"}, "fit": {"seed": 1}}
        runs[name] = tracking.open_run(
            uri, "retrieval/x", name, str(tmp_path), config=config, hashes={}, tags=tags
        )

    with hold_lock(tracking.lock_path(str(tmp_path / "alive")), "busy"):
        select(uri, ["retrieval/x"])

    client = tracking.connect(uri)
    statuses = {
        name: client.get_run(run.run_id).info.status for name, run in runs.items()
    }
    assert statuses == {"dead": "KILLED", "alive": "RUNNING"}


def test_runs_of_earlier_formats_are_left_out_and_counted(
    new_store: Callable[[Path], str], tmp_path: Path
) -> None:
    uri = new_store(tmp_path)
    client = tracking.connect(uri)
    config = {"model": {"name": "sasrec"}, "fit": {"seed": 1}}
    for name in ("new", "old"):
        run = tracking.open_run(
            uri, "retrieval/x", name, str(tmp_path), config=config, hashes={}
        )
    client.set_tag(run.run_id, tracking.FORMAT_TAG, "1")

    selection = select(uri, ["retrieval/x"])

    assert [run.info.run_name for run in selection.runs] == ["new"]
    assert any("1 run of earlier formats" in note for note in selection.notes)


def test_rankers_are_sorted_by_gauc(
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
            {
                "test/gauc": value,
                "test/auc": 0.9 - value,
                "test/mrr": 0.5,
                "test/users_per_s": 5.0,
            },
            5,
        )
        logger.end()

    table, *_ = tables(compare(select(uri, ["search/x"])))
    by_mrr, *_ = tables(compare(select(uri, ["search/x"]), "mrr"))

    assert [cells[1:5] for cells in table.cells] == [
        ["qgs", "1", "0.6600", "0.2400"],
        ["base", "1", "0.6100", "0.2900"],
    ]
    assert table.header[3:5] == ["test/gauc", "test/auc"]
    assert "candidates ranked in each" in table.text()
    assert "candidates ranked in each" in by_mrr.text()
