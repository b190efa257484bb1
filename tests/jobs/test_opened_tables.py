"""Test how often commands open the manifests of tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from core import tables
from core.schemas import (
    Inputs,
    ItemsInfo,
)
from core.tables import (
    open_table,
)
from jobs import evaluate
from models.retrieval.tokenizers.rqkmeans import Rqkmeans, RqkmeansConfig
from models.training.fit_config import FitConfig
from pipelines.data.sids.embed import EmbeddingSource
from pipelines.data.sids.tokenize import TokenizerPaths, tokenize
from tests.fixtures.training_tables import write_tables
from tests.fixtures.trainings import train


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Number of reads of each table's manifest."""
    counts: Counter[str] = Counter()

    read_manifest = tables.read_manifest

    def count(uri: str) -> object:
        counts[uri.rpartition("/")[2]] += 1
        return read_manifest(uri)

    monkeypatch.setattr(tables, "read_manifest", count)
    return counts


def test_train_evaluate_and_tokenize_open_few_manifests(
    tmp_path: Path, opened: Counter[str], new_store: Callable[[Path], str]
) -> None:
    folder, _ = write_tables(tmp_path, titles=True)
    store = new_store(tmp_path)
    result = train(
        model={"name": "sasrec", "dim": 8, "num_layers": 1},
        fit=FitConfig(batch_size=16, max_epochs=1),
        inputs=Inputs(folder),
        storage=str(tmp_path / "runs"),
        name="sasrec",
        tracking_uri=store,
        on_checkpoint=lambda saved: None,
    )
    # when the options are checked, by the worker, and for the served model
    assert opened == {"sequences": 3, "items": 3}

    opened.clear()
    evaluate.run(
        evaluate.Config(checkpoint=result.checkpoint, tables=folder, tracking_uri=store)
    )
    assert max(opened.values()) <= 5

    opened.clear()
    paths = TokenizerPaths(
        open_table(f"{folder}/items", ItemsInfo), str(tmp_path / "new")
    )
    tokenizer = Rqkmeans(RqkmeansConfig(levels=2, codebook_size=4))
    tokenize(paths, tokenizer, EmbeddingSource("tfidf", 6))
    assert max(opened.values()) <= 4
