"""Test that pages are up to date: their commands parse, and their links resolve."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest
from pages import PAGES, ROOT, parse_jobs, read_anchors, read_commands, read_links

from jobs import cli

JOBS = [
    pytest.param(module, words, id=f"{page.stem}-{number}-{module}")
    for page in PAGES
    for number, command in enumerate(read_commands(page.read_text()))
    for module, words in parse_jobs(command)
]


@pytest.mark.parametrize(("module", "words"), JOBS)
def test_a_job_accepts_the_options_of_a_command(module, words, monkeypatch):
    monkeypatch.chdir(ROOT)  # paths of the checkout's files are relative to it
    job = importlib.import_module(module)
    if not module.startswith(("jobs.", "papers.")):
        assert callable(job.main)
        return
    expanded = [os.path.expandvars(word) for word in words]
    cli.config_from_words(job, use_shipped_source(expanded))
    # A path with a folder names a file of the checkout, a mere name one of the reader.
    paths = [word for word in words if word.endswith(".yaml") and "/" in word]
    files = [Path(path) for path in paths if "$" not in path]
    assert [file for file in files if not file.is_file()] == []


def use_shipped_source(words: list[str]) -> list[str]:
    """Replace a mapping file of the reader, which does not exist, by a shipped one."""
    if "--source" in words:
        position = words.index("--source") + 1
        if not Path(words[position]).is_file():
            words[position] = "jobs/configs/sources/simulated.yaml"
    return words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_existing_targets(page):
    for link in read_links(page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        if anchor:
            assert anchor in read_anchors(target.read_text()), link


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.stem
)
def test_a_page_begins_with_what_its_reader_learns(page):
    assert page.read_text().split("\n\n")[1].startswith("After this page you")


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_bytes()) <= 5000
