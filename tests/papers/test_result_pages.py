"""The pages of results are made from the stored runs, except for pages that are written
by hand.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from papers.pages import Config, run

KEPT = Path(__file__).parents[2] / "docs/results"


def is_written_by_hand(page: str) -> bool:
    """Return whether a page names the page whose figures it has, as written pages do."""
    return page.partition("\n\n")[2].startswith(("Figures behind", "Runs behind"))


@pytest.mark.long
def test_pages_and_plots_come_from_the_runs_that_are_kept(tmp_path: Path) -> None:
    run(Config(output=str(tmp_path)))
    made, kept = (
        {path.name: path.read_text() for path in folder.iterdir()}
        for folder in (tmp_path, KEPT)
    )
    kept = {name: text for name, text in kept.items() if not is_written_by_hand(text)}
    assert made.keys() == kept.keys()
    for name, text in made.items():
        assert kept[name] == text, (
            f"docs/results/{name} is another: python -m papers.pages"
        )
