"""Text embeddings of a search log: every text and pair is encoded once, in order, and
equals its encoding alone.
"""

from __future__ import annotations

import shutil
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModel

from core.errors import UserError
from core.files import join
from core.schemas import Inputs
from core.tables import Table, read_manifest
from jobs import encode as job
from models.search.catalogue import SearchCatalogue
from models.text.text_encoder import TextEncoder
from pipelines.encode import texts as log_texts
from pipelines.encode.config import EncodeConfig, TextConfig
from pipelines.encode.texts import encode_log
from pipelines.prepare.kinds.simulation import (
    MAKERS,
    NOUNS,
    STYLES,
    TRAITS,
)
from tests.fixtures.commands import (
    prepare_log,
    read_column,
    read_rows,
    run_job,
)
from tests.fixtures.encoders import encode_alone, save_bert
from tests.fixtures.search_log import draw_searches, prepare_searches
from tests.fixtures.served_models import load_bundle, serve_ranker

pytestmark = pytest.mark.exhaustive

SOURCE = (
    Path(__file__).parents[3] / "jobs" / "configs" / "sources" / "simulated_search.yaml"
)


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> str:
    """Folder of a random BERT of width 16 whose vocabulary is the words of simulated
    items.
    """
    words = {word.lower() for word in [*NOUNS, *STYLES, *TRAITS, *MAKERS, "made", "by"]}
    return save_bert(tmp_path_factory.mktemp("bert"), sorted(words), 40)


@pytest.fixture(scope="module")
def tables(tmp_path_factory, ray_local) -> str:
    """Tables of a small simulated log, in two parts."""
    folder = tmp_path_factory.mktemp("text")
    sizes = {"users": 20, "items": 50, "events": 60, "seed": 3}
    run_job("simulate", kind="search", output=folder / "raw", **sizes)
    prepare_log(SOURCE.read_text(), folder / "raw", folder / "tables", partitions=2)
    return str(folder / "tables")


def read_texts(tables: str) -> tuple[list[str], list[str]]:
    """Return the texts of all items and queries, in the order of their indices."""
    items = read_rows(tables, "items")
    queries = read_column(tables, "queries", "query")
    return [f"{row['text_title']} {row['text_description']}" for row in items], queries


def read_pairs(tables: str) -> list[tuple[int, int]]:
    """Return the sorted (item, query) pairs of all candidates and behaviours."""
    pairs: set[tuple[int, int]] = set()
    for row in read_rows(tables, "sequences"):
        pairs.update(zip(row["item_index"], row["query_index"], strict=True))
        for request in row["requests"]:
            pairs.update((i, request["query_index"]) for i in request["candidates"])
    return sorted(pairs)


def read_pair_keys(folder: str) -> list[tuple[int, int]]:
    """Return the (item, query) pairs of the stored embeddings, in their order."""
    columns = [read_column(folder, "pairs", name) for name in log_texts.PAIR]
    return list(zip(*columns, strict=True))


@dataclass(frozen=True)
class Encoded:
    """Output of one encoding of the search log."""

    folder: str
    manifests: dict[str, Table]


CONFIG = TextConfig(max_tokens=24, batch_size=7, workers=2)


@pytest.fixture(scope="module")
def encoded(tables, bert, tmp_path_factory) -> Encoded:
    """Embeddings of the log, with pairs in parts of 100."""
    folder = str(tmp_path_factory.mktemp("encoded"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_texts, "MAX_PART_PAIRS", 100)
        manifests = encode_log(
            EncodeConfig(tables, folder, bert, embed=CONFIG), say=str
        )
    return Encoded(folder, manifests)


def test_every_item_query_and_pair_is_encoded_once_and_as_if_alone(
    tables, bert, encoded
):
    items, queries = read_texts(tables)
    encoder = TextEncoder(bert, "cls", 24, 1)

    for name, texts in {"items": items, "queries": queries}.items():
        stored = read_column(encoded.folder, name, "embedding")
        np.testing.assert_allclose(stored, encoder.encode(texts), atol=1e-5)
    keys = read_pair_keys(encoded.folder)
    embeddings = read_column(encoded.folder, "pairs", "embedding")
    assert keys == read_pairs(tables)
    for index in range(0, len(keys), 37):
        item, query = keys[index]
        pooled = encode_alone(bert, queries[query], items[item])
        np.testing.assert_allclose(embeddings[index], pooled, atol=1e-5)
    manifest = encoded.manifests["pairs"]
    assert len(manifest.files) == -(-len(keys) // 100) > 1
    sequences = read_manifest(join(tables, "sequences"))
    assert manifest.inputs["sequences"] == sequences.hash


def test_stored_tokens_of_documents_give_the_same_embeddings(bert, encoded):
    embeddings = read_column(encoded.folder, "items", "embedding")
    model = AutoModel.from_pretrained(bert).eval()

    tokens = read_column(encoded.folder, "tokens", "tokens")

    assert max(map(len, tokens)) <= 24
    for index in range(0, len(tokens), 7):
        with torch.inference_mode():
            states = model(input_ids=torch.tensor([tokens[index]])).last_hidden_state
        pooled = states[0, 0] / states[0, 0].norm()
        np.testing.assert_allclose(embeddings[index], pooled, atol=1e-5)


def test_tfidf_replaces_the_embeddings_and_removes_the_tokens(
    tables, encoded, tmp_path
):
    output = str(shutil.copytree(encoded.folder, tmp_path / "text"))

    job.run(
        job.Config(
            tables=tables,
            output=output,
            encoder="tfidf",
            embed=TextConfig(svd=12),
            overwrite=True,
        )
    )

    assert len(read_column(output, "items", "embedding")[0]) == 12
    assert SearchCatalogue.load(Inputs(tables, text=output)).text.documents is None


def test_queries_without_known_words_and_missing_queries_get_finite_embeddings(
    tmp_path,
):
    """The words of the titles are `title` and numbers; a query is a colour or missing."""
    tables, text = prepare_searches(tmp_path, draw_searches(40)), str(tmp_path / "text")
    config = EncodeConfig(tables, text, "tfidf", embed=TextConfig(svd=1))
    lines: list[str] = []

    manifests = encode_log(config, say=lines.append)

    assert manifests.keys() == {"items", "queries", "pairs"}
    assert "3 without a known word" in " ".join(lines)
    keys = read_pair_keys(text)
    assert keys == read_pairs(tables)
    assert min(query for _, query in keys) == -1
    assert np.isfinite(read_column(text, "pairs", "embedding")).all()


def build_request_rows(tables: str) -> pd.DataFrame:
    """Return three requests: the candidates and query of one user's last request, for
    the histories of three users.
    """
    users = [
        row for row in read_rows(tables, "sequences") if len(row["item_index"]) > 2
    ]
    items = read_column(tables, "items", "item_id")
    _, queries = read_texts(tables)
    request = users[0]["requests"][-1]
    rows = []
    for user in users[:3]:
        rows.append(
            {
                "candidates": [items[i] for i in request["candidates"]],
                "query": queries[request["query_index"]],
                "history": [items[i] for i in user["item_index"]],
                "history_query": [queries[i] for i in user["query_index"]],
            }
        )
    return pd.DataFrame(rows)


@pytest.mark.parametrize("encoder", ["tfidf", "bert"])
def test_a_served_model_encodes_new_queries_and_pairs_as_training_did(
    tables, tmp_path, request, encoder
):
    text = str(tmp_path / "text")
    name = request.getfixturevalue("bert") if encoder == "bert" else encoder
    config = TextConfig(max_tokens=24, svd=12)
    encode_log(EncodeConfig(tables, text, name, embed=config), say=str)
    _, model = serve_ranker({"name": "qgs"}, tmp_path, tables, text, max_history=8)
    rows = build_request_rows(tables)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = model.predict(None, rows)
        served_text = model.requests.text
        assert not len(served_text.cache._vectors)
        # first without the query's embedding, then without any stored embedding
        del served_text.index[rows["query"][0]]
        for _ in range(2):
            ranking = model.predict(None, rows)
            assert ranking["item_id"].tolist() == expected["item_id"].tolist()
            for scores, expected_scores in zip(
                ranking["score"], expected["score"], strict=True
            ):
                assert scores == pytest.approx(expected_scores, abs=1e-5)
            served_text = replace(
                served_text,
                index={},
                text=replace(
                    served_text.text,
                    pair_keys=served_text.text.pair_keys[:0],
                    pairs=served_text.text.pairs[:0],
                ),
            )
            model.requests.text = served_text
        assert len(served_text.cache._vectors) > len(rows["candidates"][0])

        model.requests.text = replace(served_text, encoder=None)
        with pytest.warns(UserWarning, match="not in the training tables"):
            without_encoder = model.predict(None, rows)
        assert without_encoder["score"].tolist() != expected["score"].tolist()

    # a bundle may come from anyone, and values of extension types may be pickles
    vectors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.ones((2, 3)))
    table = pa.table({"text": vectors})
    pq.write_table(table, tmp_path / "data/encoder/documents.parquet")
    with pytest.raises(UserError, match="column text has the type"):
        load_bundle(tmp_path / "data")
