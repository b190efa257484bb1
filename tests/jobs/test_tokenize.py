"""Test the command line of jobs.tokenize: options, output and refused inputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.errors import UserError
from core.schemas import ItemsInfo
from core.tables import open_table, read_manifest
from jobs import tokenize as job
from tests.fixtures.item_tables import append_items, write_items

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


def test_a_run_reports_sparse_codes_and_items_newer_than_the_codebooks(
    ray_local: None, tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = str(tmp_path / "many")
    words = build_rqkmeans_words(tables, output, codebook_size=16)

    job.run(parse(*words))

    item_ids = [str(i) for i in range(100, 140)] + ["new 1", "new 2"]
    items = open_table(str(tables / "items"), ItemsInfo)
    append_items(items, [*TITLES, "thing 1", "thing 2"], item_ids)
    job.run(parse(*words, "--extend", output))
    assert "2 items since the codebooks were trained" in capsys.readouterr().out


def test_incomplete_published_sids_do_not_replace_imported_ones(
    tables: Path, tmp_path: Path
) -> None:
    published = tmp_path / "sids.csv"
    rows = [f"{i},{i % 7},{i // 7}" for i in range(100, 140)]
    published.write_text("\n".join(["item_id,c1,c2", *rows]))
    output = str(tmp_path / "out")
    words = [
        "--tables",
        str(tables),
        "--output",
        output,
        "--tokenizer",
        "published",
        "--published",
        str(published),
    ]
    job.run(parse(*words))
    published.write_text("\n".join(["item_id,c1,c2", *rows[5:]]))
    with pytest.raises(
        UserError, match=r"none for 5 of the catalogue's 40 \(such as '100'\)"
    ):
        job.run(parse(*words, "--overwrite"))

    assert read_manifest(output + "/trie").info["items"] == 40
