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
from pipelines.encode.config import EncodeConfig, TextConfig
from pipelines.encode.texts import encode_log, fit_tfidf
from tests.fixtures.actions_tables import write_actions
from tests.fixtures.commands import read_rows


def test_the_items_of_a_feed_are_embedded_once(tmp_path):
    tables, text = write_actions(tmp_path, content=True), str(tmp_path / "text")
    config = TextConfig(svd=4, template="{title} by {author}")

    manifests = encode_log(EncodeConfig(tables, text, "tfidf", embed=config), say=str)

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
    assert (
        catalogue.versions["text_items"].hash == read_manifest(join(text, "items")).hash
    )

    reported: list[str] = []
    encode_log(EncodeConfig(tables, text, "tfidf", embed=config), say=reported.append)
    assert reported == ["items: up to date"]
    other = write_actions(tmp_path / "other", items=50, content=True)
    (replaced,) = encode_log(
        EncodeConfig(other, text, "tfidf", embed=config), say=str
    ).values()
    assert replaced.rows == 50
    with pytest.raises(UserError, match="was made with"):
        encode_log(EncodeConfig(other, text, "tfidf"), say=str)
