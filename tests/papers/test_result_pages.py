"""Test that the pages of results are generated from the stored runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from papers.pages import Config, run

RESULTS = Path(__file__).parents[2] / "docs/results"


def is_written_by_hand(page: str) -> bool:
    """Return whether a page names the page whose figures it has, as written pages do."""
    return page.partition("\n\n")[2].startswith(("Figures behind", "Runs behind"))


@pytest.mark.exhaustive
def test_generated_pages_and_plots_are_up_to_date(tmp_path: Path) -> None:
    run(Config(output=str(tmp_path)))

    generated = {path.name: path.read_text() for path in tmp_path.iterdir()}
    stored = {path.name: path.read_text() for path in RESULTS.iterdir()}
    stored = {k: text for k, text in stored.items() if not is_written_by_hand(text)}
    assert generated.keys() == stored.keys()
    for name, text in generated.items():
        message = f"docs/results/{name} is out of date; run python -m papers.pages"
        assert stored[name] == text, message
