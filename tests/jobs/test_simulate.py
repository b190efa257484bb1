"""jobs.simulate: writes once, and says so the second time."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs import cli, simulate

SIZE = ["--users", "20", "--items", "10", "--events", "100"]


def test_a_second_run_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = cli.parse(simulate.Config, ["--output", str(tmp_path / "raw"), *SIZE])
    simulate.run(config)
    assert "simulated 100 events of 20 users on 10 items" in capsys.readouterr().out
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "raw").iterdir()}
    simulate.run(config)
    assert "up to date" in capsys.readouterr().out
    assert {
        path: path.stat().st_mtime_ns for path in (tmp_path / "raw").iterdir()
    } == before


def test_a_feed_says_what_can_be_reached_on_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate.run(
        cli.parse(
            simulate.Config,
            ["--kind", "feed", "--output", str(tmp_path / "raw"), *SIZE],
        )
    )
    said = capsys.readouterr().out
    assert "normalised entropy of like is 1 without actions and 0.469 at best" in said
    assert "simulated_feed.yaml" in said
