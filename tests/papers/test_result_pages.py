"""The pages of results are what the kept runs give, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from papers.pages import Config, run

KEPT = Path(__file__).parents[2] / "docs/results"


@pytest.mark.long
def test_pages_and_plots_come_from_the_runs_that_are_kept(tmp_path: Path) -> None:
    run(Config(output=str(tmp_path)))
    made, kept = (
        {path.name: path.read_text() for path in folder.iterdir()}
        for folder in (tmp_path, KEPT)
    )
    assert made.keys() == kept.keys()
    for name, text in made.items():
        assert kept[name] == text, (
            f"docs/results/{name} is another: python -m papers.pages"
        )
