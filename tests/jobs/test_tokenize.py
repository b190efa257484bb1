"""Test the command line of jobs.tokenize: options, output and refused inputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs import tokenize as job
from tests.fixtures.item_tables import write_items

TITLES = [f"thing {i % 4} of kind {i % 5} made by {i % 3}" for i in range(40)]


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """Write a table of 40 items with titles."""
    return write_catalogue(tmp_path, TITLES)


def write_catalogue(folder: Path, titles: list[str | None]) -> Path:
    """Write a table of items with these titles; return the folder of tables."""
    (folder / "tables" / "items").mkdir(parents=True)
    item_ids = [str(i) for i in range(100, 100 + len(titles))]
    write_items(folder / "tables" / "items", titles, item_ids)
    return folder / "tables"


def parse(*words: str) -> job.Config:
    """Parse a command line."""
    import jobs.cli

    return jobs.cli.config_from_words(job, list(words))


def build_rqkmeans_words(tables: Path, output: str, codebook_size: int) -> list[str]:
    """Return the words of a command line with two codebooks of this size."""
    words = ["--tables", str(tables), "--output", output, "--encoder", "tfidf"]
    words += ["--tokenizer", "rqkmeans", "--tokenizer.levels", "2"]
    return [*words, "--tokenizer.codebook_size", str(codebook_size)]


def test_a_run_reports_its_output_and_the_next_command(
    ray_local: None, tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = str(tmp_path / "sids")
    config = parse(*build_rqkmeans_words(tables, output, codebook_size=8))

    job.run(config)

    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[-2].startswith(f"made {output}")
    assert lines[-1].startswith(
        f"next: python -m jobs.train --config jobs/configs/retrieval/tiger_small.yaml --tables {tables}"
    )
    assert f"--sids {output}" in lines[-1]
    assert any(line.startswith("collision rate") for line in lines)

    job.run(config)
    assert f"nothing to do: {output} is up to date" in capsys.readouterr().out
