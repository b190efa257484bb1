"""Test that no command opens the manifest of a table more often than it has steps."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from core import tables
from tests.fixtures.commands import run_job

SOURCE = "jobs/configs/sources/simulated.yaml"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Number of reads of each table's manifest."""
    counts: Counter[str] = Counter()
    read_manifest = tables.read_manifest

    def count(uri: str) -> object:
        content = read_manifest(uri)
        counts[uri.rpartition("/")[2]] += content is not None
        return content

    monkeypatch.setattr(tables, "read_manifest", count)
    return counts


def test_steps_open_each_table_once(tmp_path: Path, opened: Counter[str]) -> None:
    raw, folder, sids = tmp_path / "raw", f"{tmp_path}/tables", f"{tmp_path}/sids"
    run_job("simulate", output=raw, users=40, items=30, events=400)

    def count(job: str, /, **options: object) -> int:
        """Run a job, and return the largest number of reads of one manifest."""
        opened.clear()
        run_job(job, **options)
        return max(opened.values(), default=0)

    prepare = {"source": SOURCE, "input": raw, "output": folder}
    assert count("prepare", **prepare) == 0
    assert count("prepare", **prepare) == 1
    assert count("audit", tables=folder) == 1
    tokenize = {
        "tables": folder,
        "output": sids,
        "encoder": "tfidf",
        "pca": 4,
        "tokenizer": "rqkmeans",
        "tokenizer.codebook_size": 4,
    }
    assert count("tokenize", **tokenize) == 1
    assert count("tokenize", **tokenize) == 1
    train = {"tables": folder, "storage": f"{tmp_path}/runs", "name": "popularity"}
    config = "jobs/configs/retrieval/popularity.yaml"
    # when the options are checked, by the worker, and for the served model
    assert count("train", config=config, **train) == 3
    run = f"{tmp_path}/runs/popularity"
    # when the checkpoint is checked, and by the worker
    assert count("evaluate", checkpoint=run, tables=folder) == 2
