"""No page goes stale: its commands have the options that the jobs have, and its links
lead somewhere.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest
import yaml
from pages import PAGES, ROOT, anchors, commands, jobs_of, links

from jobs import cli
from pipelines.data.settings import read_config
from tests import source_keys

EACH = [
    pytest.param(module, words, id=f"{page.stem}-{number}-{module}")
    for page in PAGES
    for number, command in enumerate(commands(page.read_text()))
    for module, words in jobs_of(command)
]


@pytest.mark.parametrize(("module", "words"), EACH)
def test_a_job_takes_the_options_of_a_command(
    module: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # files of the checkout are named from there
    job = importlib.import_module(module)
    if module.startswith(("jobs.", "papers.")):
        expanded = [os.path.expandvars(word) for word in words]
        cli.config_from_words(job, with_shipped_source(expanded))
        named = [
            word for word in words if word.endswith(".yaml") and "/" in word
        ]  # others are the reader's
        assert [
            word for word in named if "$" not in word and not Path(word).is_file()
        ] == []
    else:
        assert callable(job.main)


def with_shipped_source(words: list[str]) -> list[str]:
    """Replace the reader's own mapping file, which does not exist, by a shipped one."""
    if "--source" in words:
        place = words.index("--source") + 1
        if not Path(words[place]).is_file():
            words[place] = "jobs/configs/sources/simulated.yaml"
    return words


def test_there_are_commands_of_every_job_to_look_at() -> None:
    shown = {str(param.values[0]).removeprefix("jobs.") for param in EACH}
    assert {
        "prepare",
        "audit",
        "tokenize",
        "encode",
        "train",
        "evaluate",
        "sweep",
        "compare",
    } <= shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text()), link


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.stem
)
def test_a_page_begins_with_what_its_reader_can_do_after_it(page: Path) -> None:
    assert page.read_text().split("\n\n")[1].startswith("After this page you")


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= 8000


def test_the_keys_of_mapping_files_are_those_of_the_code() -> None:
    text = (ROOT / "jobs/configs/sources/README.md").read_text()
    assert source_keys.page(text) == text


def test_the_examples_of_keys_are_read() -> None:
    assert list(source_keys.EXAMPLES) == [
        key for key, *_ in source_keys.rows(source_keys.KINDS)
    ]
    for key, example in source_keys.EXAMPLES.items():
        kind, name = key.split(".")[0], key.split(".")[-1]
        assert f"{name}: " in example
        read_config({"kind": kind, kind: yaml.safe_load(example)})
