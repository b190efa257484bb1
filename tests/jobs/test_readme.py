"""README and pages: every command of a job that they show is one that the job takes, with files that are there, and
links lead somewhere."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

from jobs import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHOWN = re.compile(r"^\s*(?:\$ )?(python -m jobs\.\w+ --?[^\n]*?)(?:\s+#.*)?$", re.M)


def commands() -> list[str]:
    """Each once, continued lines joined, what follows `#` left out."""
    return sorted({line for page in PAGES for line in SHOWN.findall(re.sub(r"\\\n\s*", "", page.read_text()))})


def test_the_readme_is_short() -> None:
    assert (ROOT / "README.md").stat().st_size <= 8000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    targets = re.findall(r"\]\((?!https?://)([^)#]+)", prose)
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_readme_shows_the_jobs_of_every_flow() -> None:
    jobs = {command.split()[2].removeprefix("jobs.") for command in commands()}
    assert {"prepare", "audit", "tokenize", "encode", "train", "evaluate", "sweep", "compare"} <= jobs


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_readme_is_taken(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    _, _, module, *argv = shlex.split(command)
    job = importlib.import_module(module)
    assert cli.options_for(job, argv)
    named = [word for word in argv if word.endswith(".yaml") and "/" in word]  # one without a folder is the reader's
    assert [word for word in named if not Path(word).is_file()] == []
