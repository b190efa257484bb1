"""Text of a search log: each text and pair once, in order, equal to encoding one at a
time; the [SEP] state leaks.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from sklearn.metrics.pairwise import cosine_similarity
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertModel,
    BertTokenizerFast,
)

from jobs import encode as job
from models.search.catalogue import SearchCatalogue
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import (
    MANIFEST,
    UserError,
    commit,
    join,
    read_manifest,
    read_table,
)
from models.text.text_encoder import TextEncoder
from models.training.fit import FitConfig
from pipelines.data.prepare import prepare
from pipelines.data.reading.log import load_source
from pipelines.data.search.simulator import SearchSettings, simulate_search
from pipelines.data.settings import read_config
from pipelines.data.sids import texts as log_texts
from pipelines.data.sids.config import TextConfig
from pipelines.data.sids.texts import encode_log, fit_tfidf_encoder
from pipelines.data.simulation import MAKERS, NOUNS, STYLES, TRAITS
from pipelines.serving.package import write_bundle
from pipelines.serving.served_model import ServedModel
from tests.fixtures.trainings import build_training

pytestmark = pytest.mark.exhaustive

SOURCE = (
    Path(__file__).parents[3] / "jobs" / "configs" / "sources" / "simulated_search.yaml"
)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random BERT of width 16 that knows the words of simulated items."""
    folder = tmp_path_factory.mktemp("bert")
    words = sorted(
        {word.lower() for word in [*NOUNS, *STYLES, *TRAITS, *MAKERS, "made", "by"]}
    )
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokens),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=40,
        initializer_range=0.5,
    )
    BertModel(config).eval().save_pretrained(folder)
    BertTokenizerFast(
        vocab={token: i for i, token in enumerate(tokens)}, model_max_length=40
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory, ray_local: None) -> str:
    """Tables of a small simulated log, in two parts."""
    folder = tmp_path_factory.mktemp("text")
    simulate_search(str(folder / "raw"), SearchSettings(20, 50, 60, 3, 0.5))
    source, defaults = load_source(str(SOURCE))
    prepare(
        source,
        str(folder / "raw"),
        str(folder / "tables"),
        read_config(defaults, {"partitions": 2}),
        report=str,
    )
    return str(folder / "tables")


def texts_of(tables: str) -> tuple[list[str], list[str]]:
    items = read_table(join(tables, "items")).to_pylist()
    queries = read_table(join(tables, "queries"))["query"].to_pylist()
    return [f"{row['text_title']} {row['text_description']}" for row in items], queries


def shown_pairs(tables: str) -> list[tuple[int, int]]:
    rows = read_table(join(tables, "sequences")).to_pylist()
    pairs = {
        (i, r["query_index"])
        for row in rows
        for r in row["requests"]
        for i in r["candidates"]
    }
    return sorted(
        pairs
        | {
            pair
            for row in rows
            for pair in zip(row["item_index"], row["query_index"], strict=True)
        }
    )


def vectors(table: pa.Table, column: str = "embedding") -> np.ndarray:
    return np.array(table[column].to_pylist(), dtype=np.float32)


def state(folder: str, query: str, document: str) -> tuple[np.ndarray, np.ndarray]:
    """([CLS], first [SEP]) of one pair on its own, of length 1."""
    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        AutoModel.from_pretrained(folder).eval(),
    )
    inputs = tokenizer(
        query, document, truncation=True, max_length=24, return_tensors="pt"
    )
    with torch.inference_mode():
        states = model(**inputs)[0][0]
    first = inputs["input_ids"][0].tolist().index(tokenizer.sep_token_id)
    return tuple((states[place] / states[place].norm()).numpy() for place in (0, first))


def test_texts_and_pairs_are_encoded_once_and_as_one_at_a_time(
    tables: str, bert: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_texts, "MAX_PART_PAIRS", 100)
    config = TextConfig(max_tokens=24, batch_size=7, workers=1, query_condition="joint")
    said: list[str] = []
    made = encode_log(tables, str(tmp_path), bert, config, say=said.append)
    assert any("leaks the document" in line for line in said)
    items, queries = texts_of(tables)
    found = {
        name: read_table(str(tmp_path / name), "embeddings")
        for name in ("items", "queries", "pairs")
    }
    assert found["items"]["item_index"].to_pylist() == list(range(len(items)))
    assert found["queries"]["query_index"].to_pylist() == list(range(len(queries)))
    encoder = TextEncoder(bert, "cls", 24, 1, True)
    np.testing.assert_allclose(
        vectors(found["items"]), encoder.encode(items), atol=1e-5
    )
    np.testing.assert_allclose(
        vectors(found["queries"]), encoder.encode(queries), atol=1e-5
    )

    keys = list(
        zip(*(found["pairs"][name].to_pylist() for name in log_texts.PAIR), strict=True)
    )
    assert keys == shown_pairs(tables)
    assert len(made["pairs"].files) == -(-len(keys) // 100) > 1
    embedding, joint = vectors(found["pairs"]), vectors(found["pairs"], "joint")
    for place in range(0, len(keys), 37):
        item, query = keys[place]
        pooled, separator = state(bert, queries[query], items[item])
        np.testing.assert_allclose(embedding[place], pooled, atol=1e-5)
        np.testing.assert_allclose(joint[place], separator, atol=1e-4)

    # The joint condition of one query differs by document; the query alone cannot.
    query = max({q for _, q in keys}, key=[q for _, q in keys].count)
    same = [place for place, (_, q) in enumerate(keys) if q == query]
    assert np.abs(joint[same] - joint[same[0]]).max() > 0.01
    assert (
        made["pairs"].inputs["sequences"]
        == read_manifest(join(tables, "sequences")).hash
    )
    assert {made[name].info["width"] for name in found} == {16}

    # The documents' tokens give the same embeddings.
    documents = SearchCatalogue.load(tables, str(tmp_path)).text.documents
    assert documents is not None
    assert (documents.begin.diff() <= 24).all()
    model = AutoModel.from_pretrained(bert).eval()
    for place in range(0, len(items), 7):
        tokens = documents.tokens[documents.begin[place] : documents.begin[place + 1]]
        assert (
            tokens.tolist()
            == encoder.tokenizer(items[place], truncation=True, max_length=24)[
                "input_ids"
            ]
        )
        with torch.inference_mode():
            pooled = model(input_ids=tokens[None].long()).last_hidden_state[0, 0]
        np.testing.assert_allclose(
            vectors(found["items"])[place], pooled / pooled.norm(), atol=1e-5
        )

    again = encode_log(
        tables,
        str(tmp_path),
        bert,
        config,
        say=said.append,
        start_ray=lambda: pytest.fail("Ray starts for nothing"),
    )
    assert {name: manifest.hash for name, manifest in again.items()} == {
        n: m.hash for n, m in made.items()
    }
    assert said[-4:] == [
        f"{name}: up to date" for name in ("items", "queries", "tokens", "pairs")
    ]
    with pytest.raises(UserError, match="use --overwrite"):
        encode_log(
            tables, str(tmp_path), bert, TextConfig(max_tokens=12), say=said.append
        )

    # TF-IDF over it, which knows no tokens.
    by_words(tables, str(tmp_path))
    assert not (tmp_path / "tokens" / MANIFEST).exists()
    assert SearchCatalogue.load(tables, str(tmp_path)).text.documents is None


def by_words(tables: str, output: str) -> None:
    """TF-IDF needs no weights and knows the words of documents only."""
    job.run(
        job.Config(
            tables=tables,
            output=output,
            encoder="tfidf",
            embed=TextConfig(svd=12),
            overwrite=True,
        )
    )
    items, queries = texts_of(tables)
    found = {
        name: read_table(join(output, name)) for name in ("items", "queries", "pairs")
    }
    assert [len(found[name]) for name in ("items", "queries")] == [
        len(items),
        len(queries),
    ]
    encoder = fit_tfidf_encoder(items, 12)
    np.testing.assert_allclose(
        vectors(found["queries"]), encoder.encode(queries), atol=1e-5
    )
    item, query = shown_pairs(tables)[5]
    both = encoder.encode([f"{queries[query]} {items[item]}"])
    np.testing.assert_allclose(vectors(found["pairs"])[5], both[0], atol=1e-5)
    near = cosine_similarity(encoder.encode([queries[0]]), vectors(found["items"]))[0]
    assert queries[0].split()[-1] in items[int(near.argmax())]
    assert not encoder.encode(["zzz unheard"]).any()


def test_queries_of_unknown_words_and_no_query_are_defined(
    tmp_path: Path, ray_local: None
) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    rows = [
        "u,s1,1600000001000,red lamp,a,1",
        "u,s1,1600000001000,red lamp,b,0",
        "u,s2,1600000002000,zzz,a,1",
        "u,s3,1600000003000,,b,0",
        "u,s4,1600000009000,red,b,1",
    ]
    (raw / "log.csv").write_text("user,search,ms,query,item,click\n" + "\n".join(rows))
    (raw / "items.csv").write_text("item,title\na,red lamp shade\nb,blue lamp oil\n")
    (tmp_path / "source.yaml").write_text(
        "{files: log.csv, user: user, item: item, request: search, query: query, "
        "time: {column: ms, unit: ms}, labels: {click: {column: click}}, "
        "items: {files: items.csv, item: item, texts: [title]}}"
    )
    source, _ = load_source(str(tmp_path / "source.yaml"))
    out = str(tmp_path / "tables")
    prepare(
        source,
        str(raw),
        out,
        read_config(
            {
                "kind": "search",
                "core": 0,
                "behaviour": "click",
                "split": {"kind": "leave_last_out"},
            }
        ),
        report=str,
    )
    made = encode_log(out, str(tmp_path / "text"), "tfidf", TextConfig(svd=1), say=str)
    assert made["queries"].info["texts_without_known_word"] == 1
    pairs = read_table(str(tmp_path / "text" / "pairs"))
    keys = list(
        zip(
            pairs["item_index"].to_pylist(),
            pairs["query_index"].to_pylist(),
            strict=True,
        )
    )
    assert keys == [
        (0, 1),
        (0, 2),
        (1, -1),
        (1, 0),
        (1, 1),
    ]  # queries: red, red lamp, zzz
    assert np.isfinite(vectors(pairs)).all()


def test_what_cannot_be_encoded_is_refused(tables: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no \\[SEP\\] token"):
        encode_log(tables, str(tmp_path), "tfidf", TextConfig(query_condition="joint"))
    with pytest.raises(ValueError, match="one of query, joint"):
        TextConfig(query_condition="sep")  # type: ignore[arg-type]
    assert TextConfig().max_tokens == 180
    schema = pa.schema([("user_id", pa.string())])
    retrieval = str(tmp_path / "tables")
    for table in ("items", "sequences"):
        commit(
            join(retrieval, table),
            table,
            schema,
            [],
            config={},
            inputs={},
            info={"kind": "retrieval"},
        )
    with pytest.raises(
        UserError, match="of kind 'retrieval', whose models read no embeddings"
    ):
        job.run(
            job.Config(tables=retrieval, output=str(tmp_path / "text"), encoder="tfidf")
        )
    assert not (tmp_path / "text").exists()


@pytest.mark.parametrize("query_condition", ["query", "joint"])
@pytest.mark.parametrize("encoder", ["tfidf", "bert"])
def test_a_served_model_encodes_what_training_has_not_seen(
    tables: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    encoder: str,
    query_condition: str,
) -> None:
    if (encoder, query_condition) == ("tfidf", "joint"):
        return  # TF-IDF has no [SEP]
    text = str(tmp_path / "text")
    name = request.getfixturevalue("bert") if encoder == "bert" else encoder
    config = TextConfig(max_tokens=24, svd=12, query_condition=query_condition)  # type: ignore[arg-type]
    encode_log(tables, text, name, config, say=str)
    sizes = {
        "width": 16,
        "num_layers": 2,
        "max_history": 8,
        "dnn_width": 16,
        "tower_width": 8,
        "text_width": 8,
    }
    sizes |= {"query_condition": query_condition}
    setup = build_training(
        {"name": "qgs", **sizes}, FitConfig(batch_size=8), Inputs(tables, text=text)
    )
    checkpoint.save(tmp_path / "qgs", setup.model, setup.checkpoint(epoch=1))
    write_bundle(tmp_path / "data", str(tmp_path / "qgs"), Inputs(tables, text=text))
    model = ServedModel()
    model.load_context(
        SimpleNamespace(artifacts={"data": str(tmp_path / "data")}, model_config=None)
    )
    rows = [
        row
        for row in read_table(join(tables, "sequences")).to_pylist()
        if len(row["item_index"]) > 2
    ]
    items, queries = (
        read_table(join(tables, "items"))["item_id"].to_pylist(),
        texts_of(tables)[1],
    )
    asked = rows[0]["requests"][-1]
    given = pd.DataFrame(
        [
            {
                "candidates": [items[i] for i in asked["candidates"]],
                "query": queries[asked["query_index"]],
                "history": [items[i] for i in row["item_index"]],
                "history_query": [queries[i] for i in row["query_index"]],
            }
            for row in rows[:3]
        ]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        want = model.predict(None, given)
        held = model.ranker.requests.text
        assert not len(held.cache._vectors)
        # without the query, and then without anything that was encoded before
        del held.query_index[queries[asked["query_index"]]]
        for _ in range(2):
            found = model.predict(None, given)
            assert found["item_id"].tolist() == want["item_id"].tolist()
            for mine, theirs in zip(found["score"], want["score"], strict=True):
                assert mine == pytest.approx(theirs, abs=1e-5)
            held.query_index = {}
            held.text = replace(
                held.text,
                pair_keys=held.text.pair_keys[:0],
                pairs=held.text.pairs[:0],
                joint=held.text.joint[:0],
            )
        encoded, held.encoder = len(held.cache._vectors), None
        with pytest.warns(UserWarning, match="1 of 3 queries|3 of 3 queries"):
            assert (
                model.predict(None, given)["score"].tolist() != want["score"].tolist()
            )
    assert encoded > len(asked["candidates"])
