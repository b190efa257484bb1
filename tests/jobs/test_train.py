"""Test that the configs of jobs.train are valid."""

from __future__ import annotations

from pathlib import Path

from jobs import cli
from jobs import train as job

ROOT = Path(__file__).parents[2]


def test_the_shipped_configs_are_valid():
    for path in (ROOT / "jobs/configs").glob("*/*.yaml"):
        words = ["--tables", "t", "--storage", "s", "--name", "n", "--config"]
        if path.parent.name != "sources":
            assert cli.config_from_words(job, [*words, str(path)]).model.name
