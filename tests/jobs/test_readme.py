"""The README: every command of a job that it shows is one that the job takes, with files that are there."""

from __future__ import annotations

import importlib
import re
import shlex
from functools import partial
from pathlib import Path

import pytest

from jobs import cli

ROOT = Path(__file__).parents[2]
SHOWN = re.compile(r"^\s*(?:\$ )?(python -m jobs\.\w+ --?[^\n]*?)(?:\s+#.*)?$", re.M)


def commands() -> list[str]:
    """Each once, continued lines joined, what follows `#` left out."""
    return sorted(set(SHOWN.findall(re.sub(r"\\\n\s*", "", (ROOT / "README.md").read_text()))))


def test_the_readme_shows_the_jobs_of_every_flow() -> None:
    jobs = {command.split()[2].removeprefix("jobs.") for command in commands()}
    assert {"prepare", "audit", "tokenize", "encode", "train", "evaluate", "sweep", "compare"} <= jobs


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_readme_is_taken(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    _, _, module, *argv = shlex.split(command)
    job = importlib.import_module(module)
    parse = getattr(job, "parse", partial(cli.parse, job.Config))
    assert parse(module.removeprefix("jobs."), argv)
    named = [word for word in argv if word.endswith(".yaml") and "/" in word]  # one without a folder is the reader's
    assert [word for word in named if not Path(word).is_file()] == []
