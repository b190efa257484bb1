"""Test jobs.simulate: repeated runs, and the report on a simulated feed."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs import cli, simulate

SIZE = ["--users", "20", "--items", "10", "--events", "100"]


def test_a_second_run_changes_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = tmp_path / "raw"
    config = cli.parse(simulate.Config, ["--output", str(raw), *SIZE])
    simulate.run(config)
    assert "simulated 100 events of 20 users on 10 items" in capsys.readouterr().out
    change_times = {path: path.stat().st_mtime_ns for path in raw.iterdir()}

    simulate.run(config)

    assert "up to date" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in raw.iterdir()} == change_times


def test_the_report_on_a_feed_names_the_best_possible_entropy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--kind", "feed", "--output", str(tmp_path / "raw"), *SIZE]

    simulate.run(cli.parse(simulate.Config, words))

    output = capsys.readouterr().out
    assert "normalised entropy of like is 1 without actions and 0.469 at best" in output
    assert "simulated_feed.yaml" in output
