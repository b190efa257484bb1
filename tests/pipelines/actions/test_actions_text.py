"""jobs.encode on a feed: the text of its items alone, equal to encoding them by hand;
other logs are refused.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from models.actions.catalogue import ActionsCatalogue
from models.storage.tables import UserError, join, read_manifest, read_table
from pipelines.data.sids.config import TextConfig
from pipelines.data.sids.texts import check_texts, encode_log, fit_tfidf_encoder
from tests.fixtures.actions_tables import write_actions
from tests.fixtures.training_tables import write_tables


def test_the_text_of_a_feed_is_that_of_its_items(tmp_path: Path) -> None:
    tables, text = write_actions(tmp_path, content=True), str(tmp_path / "text")
    made = encode_log(
        tables,
        text,
        "tfidf",
        TextConfig(svd=4, template="{title} by {author}"),
        say=str,
    )
    assert (
        list(made)
        == ["items"]
        == [path.name for path in Path(text).iterdir() if path.name[0] != "."]
    )
    items = read_table(join(tables, "items")).to_pylist()
    texts = [
        " ".join(f"{row['text_title']} by {row['cat_author'] or ''}".split())
        for row in items
    ]
    catalogue = ActionsCatalogue.load(tables, text)
    assert catalogue.text.tolist() == fit_tfidf_encoder(texts, 4).encode(texts).tolist()
    assert catalogue.hashes["text_items"] == read_manifest(join(text, "items")).hash
    said: list[str] = []
    encode_log(
        tables,
        text,
        "tfidf",
        TextConfig(svd=4, template="{title} by {author}"),
        say=said.append,
    )
    assert said == ["items: up to date"]
    assert np.isfinite(catalogue.text.numpy()).all()


def test_what_has_no_text_is_refused(tmp_path: Path) -> None:
    write_tables(tmp_path / "retrieval")
    with pytest.raises(
        UserError,
        match=r"is of kind 'retrieval', whose models read no embeddings of jobs.encode",
    ):
        check_texts(
            str(tmp_path / "retrieval/tables"),
            "tfidf",
            TextConfig(),
            str(tmp_path / "text"),
        )
    tables = write_actions(tmp_path / "feed")
    with pytest.raises(UserError, match="the items have no text to embed"):
        encode_log(tables, str(tmp_path / "text"), "tfidf", say=str)
    with pytest.raises(
        UserError, match="the items have no text to embed"
    ):  # before Ray starts
        check_texts(tables, "tfidf", TextConfig(), str(tmp_path / "text"))
    authors = write_actions(tmp_path / "authors", content=True)
    without = sum(
        not row["cat_author"] for row in read_table(join(authors, "items")).to_pylist()
    )
    with pytest.raises(
        UserError,
        match=f"^{without} of .* items have no text in author; use a template",
    ):
        check_texts(
            authors,
            "tfidf",
            TextConfig(template="{author}", empty="error"),
            str(tmp_path / "text"),
        )
    with pytest.raises(UserError, match="query_condition joint is only for searches"):
        check_texts(
            tables,
            "minilm",
            TextConfig(query_condition="joint"),
            str(tmp_path / "text"),
        )
