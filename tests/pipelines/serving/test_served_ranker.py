"""Test the inputs of registered search models and models of actions, and new items."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from mlflow.exceptions import MlflowException

from core.files import join
from core.tables import read_manifest
from pipelines.encode.config import EncodeConfig, TextConfig
from pipelines.encode.texts import encode_log
from tests.fixtures.actions_tables import write_actions
from tests.fixtures.commands import read_rows
from tests.fixtures.search_tables import write_search
from tests.fixtures.served_models import load_registered, register_ranker


@pytest.fixture
def store(new_store, tmp_path) -> str:
    """Create the MLflow store in which the models are registered."""
    return new_store(tmp_path)


def test_a_search_model_warns_of_inputs_without_training_data(store, tmp_path):
    tables, text = write_search(tmp_path)
    register_ranker(tmp_path, "qgs", tables, text)
    model = load_registered(store, "qgs").unwrap_python_model()
    row = {
        "candidates": ["item_id-003"],
        "history": ["item_id-001"],
        "query": "query-001",
    }

    def predict(**changes: Any) -> pd.DataFrame:
        return model.predict(None, pd.DataFrame([row | changes]))

    # An unknown query counts as no query.
    with pytest.warns(
        UserWarning, match="1 of 1 queries are not in the training tables"
    ):
        unknown = predict(query="Query-001")
    assert unknown["score"].tolist() == predict(query=None)["score"].tolist()

    # Unknown items come last, without a score.
    unseen = predict(candidates=[7, "item_id-003"], history=[np.int64(7)])
    assert unseen["item_id"][0] == ["item_id-003", "7"]
    assert np.isnan(unseen["score"][0][1])

    # Only one pair of query and item still has a text vector.
    text = model.requests.text.text
    text = replace(text, pair_keys=text.pair_keys[:1], pairs=text.pairs[:1])
    model.requests.text = replace(model.requests.text, text=text)
    with pytest.warns(
        UserWarning, match="1 of 1 pairs of document and query have no text"
    ):
        predict()
    with pytest.warns(
        UserWarning, match="1 of 1 pairs of document and query have no text"
    ):
        predict(query=None, history_query=["query-001"])

    no_rows = model.predict(None, pd.DataFrame([row])[:0])
    assert no_rows.columns.tolist() == ["item_id", "score"]

    for parameter in model.model.parameters():
        parameter.detach().fill_(torch.nan)
    with (
        pytest.raises(MlflowException, match="scores that are not finite"),
        pytest.warns(UserWarning, match="have no text vector"),
    ):
        predict()


FEED = {
    "candidates": ["item-003", "item-004"],
    "history": ["item-000", "item-001", "item-002"],
    "history_actions": [[1.0, 0.0, 0.5], [0.0, 1.0, 0.2], [1.0, 1.0, 0.9]],
    "timestamp_ms": 99,
    "features": [[0.5, 0.5], [0.1, 0.9]],
    "history_time_ms": [10, 20, 30],
    "viewer_device": "phone",
    "history_viewer_device": ["phone", "", "tablet"],
}


def test_a_model_of_actions_names_its_inputs_which_may_be_missing(store, tmp_path):
    tables = write_actions(tmp_path, viewers=True)
    setup = register_ranker(tmp_path, "attn_mvp", tables, None)
    model = load_registered(store, "attn_mvp")
    columns = model.unwrap_python_model().requests.request_class.model_fields
    assert set(columns) == {*FEED, "new_items"}
    scores = sorted(model.predict(pd.DataFrame([FEED]))["score"][0])

    # Unknown actions are no actions.
    unknown, none = (
        model.predict(pd.DataFrame([FEED | {"history_actions": [[value] * 3] * 3}]))
        for value in (np.nan, 0.0)
    )
    assert unknown["score"][0] == none["score"][0]

    # Without times, all events precede the request and come in their order.
    without_times = FEED | {"history_time_ms": None, "timestamp_ms": 0}
    answer = model.predict(pd.DataFrame([without_times]))
    assert sorted(answer["score"][0]) == pytest.approx(scores, abs=1e-6)

    metadata = model.metadata.metadata
    assert metadata["labels"] == list(setup.catalogue.labels)
    assert metadata["features"] == list(setup.catalogue.features)
    assert metadata["viewers"] == ["device"]
    inputs = metadata["inputs"]
    manifest = read_manifest(join(tables, "sequences"))
    assert inputs == manifest.info["definitions"]["inputs"]
    assert sorted(inputs) == sorted(metadata["actions"])


def test_a_model_that_reads_times_requires_them(store, tmp_path):
    tables, text = write_search(tmp_path)
    register_ranker(tmp_path, "hstu", tables, text)
    model = load_registered(store, "hstu").unwrap_python_model()
    row = {
        "candidates": ["item_id-003"],
        "history": ["item_id-001", "item_id-002"],
        "query": None,
    }
    with pytest.raises(
        MlflowException,
        match="history_time_ms is missing, and the model reads the time of each behaviour",
    ):
        model.predict(None, pd.DataFrame([row]))

    for gap in (1, 10**9):
        with_times = row | {"history_time_ms": [0, gap]}
        scores = model.predict(None, pd.DataFrame([with_times]))["score"][0]
        assert np.isfinite(scores).all()


CONTENT = {
    "text_title": "title",
    "num_price": "price",
    "cat_kind": "kind",
    "cat_author": "author",
}
BARE = {
    "candidates": ["X"],
    "history": ["item-000", "item-002", "item-004"],
    "history_actions": [[1.0, 0.0, 0.5]] * 3,
}


def score_first_candidates(model: Any, rows: list[dict[str, Any]]) -> list[float]:
    """Return the score of the first candidate of each row."""
    answers = model.predict(pd.DataFrame(rows))
    first_scores = []
    for row, items, scores in zip(
        rows, answers["item_id"], answers["score"], strict=True
    ):
        first_scores.append(scores[items.index(row["candidates"][0])])
    return first_scores


def replace_item(row: dict[str, Any], item_id: str) -> dict[str, Any]:
    """Return the row with this item in place of the item X."""
    return row | {
        column: [item_id if item == "X" else item for item in row[column]]
        for column in ("candidates", "history")
    }


def build_new_items(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Build new items `new-0`, `new-1`, ... with the content of catalogue items."""
    new_items = []
    for i, item in enumerate(items):
        content = {
            name: item[column]
            for column, name in CONTENT.items()
            if item[column] is not None
        }
        new_items.append({"item_id": f"new-{i}"} | content)
    return new_items


@pytest.mark.parametrize(
    ("name", "options"),
    [("attn_mvp", {"item_ids": "none"}), ("lac", {"id_dropout": 0.5})],
)
def test_a_new_item_is_scored_as_a_catalogue_item_with_its_content(
    name, options, store, tmp_path
):
    """The catalogue item's id carries no information: the model reads no ids, or the
    item has no training example.
    """
    tables = write_actions(tmp_path, viewers=True, content=True)
    text = str(tmp_path / "text")
    encode_log(EncodeConfig(tables, text, "tfidf", embed=TextConfig(svd=4)), say=str)
    items = read_rows(tables, "items")
    new_items = build_new_items(items)
    register_ranker(tmp_path, name, tables, text, **options)
    model = load_registered(store, name)
    in_history = BARE | {
        "history": ["item-000", "X", "item-002"],
        "candidates": ["X", "item-001"],
    }
    unseen = range(len(items)) if name == "attn_mvp" else [len(items) - 1]
    for i in unseen:
        for row in (BARE, in_history):
            catalogue_row = replace_item(row, f"item-{i:03d}")
            new_row = replace_item(row | {"new_items": new_items[::-1]}, f"new-{i}")
            assert score_first_candidates(model, [catalogue_row]) == pytest.approx(
                score_first_candidates(model, [new_row]), abs=1e-6
            )

    # Rows of one frame may use one id for different new items.
    row = replace_item(BARE, "new-0")
    rows = [row | {"new_items": [new_items[i] | {"item_id": "new-0"}]} for i in unseen]
    assert score_first_candidates(model, rows) == pytest.approx(
        [score_first_candidates(model, [single])[0] for single in rows], abs=1e-6
    )
