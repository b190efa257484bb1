"""jobs.encode on a feed embeds the text of its items alone; logs without text are
rejected.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from core.errors import UserError
from core.files import join
from core.schemas import Inputs
from core.tables import read_manifest
from models.actions.catalogue import ActionsCatalogue
from pipelines.encode.config import TextConfig
from pipelines.encode.texts import encode_log, fit_tfidf
from tests.fixtures.actions_tables import write_actions
from tests.fixtures.commands import read_rows


def test_the_items_of_a_feed_are_embedded_once(tmp_path: Path) -> None:
    tables, text = write_actions(tmp_path, content=True), str(tmp_path / "text")
    config = TextConfig(svd=4, template="{title} by {author}")

    manifests = encode_log(tables, text, "tfidf", config, say=str)

    assert list(manifests) == ["items"]
    visible = [path.name for path in Path(text).iterdir() if path.name[0] != "."]
    assert visible == ["items"]
    texts = []
    for row in read_rows(tables, "items"):
        words = f"{row['text_title']} by {row['cat_author'] or ''}".split()
        texts.append(" ".join(words))
    catalogue = ActionsCatalogue.load(Inputs(tables, text=text))
    expected = fit_tfidf(texts, 4).encode(texts)
    assert catalogue.text.tolist() == expected.tolist()
    assert np.isfinite(catalogue.text.numpy()).all()
    assert catalogue.hashes["text_items"] == read_manifest(join(text, "items")).hash

    reported: list[str] = []
    encode_log(tables, text, "tfidf", config, say=reported.append)
    assert reported == ["items: up to date"]


def test_items_without_a_value_of_the_template_are_counted(tmp_path: Path) -> None:
    tables = write_actions(tmp_path, content=True)
    items = read_rows(tables, "items")
    num_missing = sum(not row["cat_author"] for row in items)
    with pytest.raises(
        UserError,
        match=f"^{num_missing} of .* items have no text in author",
    ):
        encode_log(
            tables,
            str(tmp_path / "text"),
            "tfidf",
            TextConfig(template="{author}", empty="error"),
        )
