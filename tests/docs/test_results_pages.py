"""The pages of results are what their runs give, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import ROOT

from jobs.compare import parse, run


@pytest.mark.long
def test_pages_and_plots_come_from_the_runs_that_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = ["--from", "results", "--claims", "--markdown"]
    run(parse("compare", [*words, f"{tmp_path}/"]))
    made, kept = (
        {path.name: path.read_text() for path in folder.iterdir()} for folder in (tmp_path, ROOT / "docs/results")
    )
    assert made.keys() == kept.keys()
    for name, text in made.items():
        assert kept[name] == text, (
            f"docs/results/{name} is another: python -m jobs.compare {' '.join(words)} docs/results/"
        )
