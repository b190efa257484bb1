"""Test search models and models of actions that are loaded from the registry.

They rank as the trained module does, and refuse requests that do not fit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
import torch

from models.actions.catalogue import ActionsCatalogue
from models.actions.data import ActionsDataset
from models.actions.requests import ActionsRequests
from models.requests import Row
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import UserError, join, read_manifest, read_table
from models.training.fit import FitConfig
from models.training_run import TrainingRun
from pipelines.data.sids.config import TextConfig
from pipelines.data.sids.texts import encode_log
from pipelines.serving import package
from pipelines.serving.served_model import ServedModel
from tests.fixtures.actions_tables import TRAIN_DEVICES, write_actions
from tests.fixtures.search_tables import write_search
from tests.fixtures.served_models import (
    SMALL_RANKERS,
    build_search_requests,
    register_ranker,
)
from tests.fixtures.trainings import build_training

UNKNOWN = "2 of 10 queries are not in the training tables and are treated as no query"


@pytest.fixture(autouse=True)
def store(new_store: Callable[[Path], str], tmp_path: Path) -> None:
    """Create the MLflow store in which the models are registered."""
    new_store(tmp_path)


def load_registered(folder: Path, name: str) -> Any:
    """Load version 1 of a registered model through MLflow's pyfunc interface."""
    with package.use_store(f"sqlite:///{folder}/mlflow.db"):
        return mlflow.pyfunc.load_model(f"models:/{name}/1")


def build_feed_requests(
    setup: TrainingRun, tables: str
) -> tuple[list[dict[str, Any]], list[dict[str, float]]]:
    """Build requests of users with distinct candidates, and their expected scores.

    The requests also have the user's events that are older than the model's longest
    history, an item that is not in the catalogue, and events after the request. The
    last request has no times. The scores are the module's probabilities of the second
    task by candidate.
    """
    items = read_table(join(tables, "items"))["item_id"].to_pylist()
    devices = [
        "watch",
        *TRAIN_DEVICES,
    ]  # by code; the watch is in no model's vocabulary
    sequences = join(tables, "sequences")
    truncated = ActionsDataset.load(sequences, "test", max_history=8)
    full = ActionsDataset.load(sequences, "test", max_history=100)

    def score_candidates(batch: Any, candidates: list[str]) -> dict[str, float]:
        with torch.no_grad():
            chances = torch.sigmoid(setup.model.score(batch)[:, 1])
        return dict(zip(candidates, chances.tolist(), strict=True))

    rows, scores = [], []
    for number in range(len(truncated)):
        batch = truncated.collate(np.array([number]))
        every_event = full.collate(np.array([number]))
        candidates = batch.candidate_item[0].tolist()
        if len(set(candidates)) < len(candidates):
            continue
        batch.candidate_time[:] = 99  # one request shows all candidates
        past = int(every_event.valid.sum())  # number of events before the request
        history = [items[i] for i in every_event.item[0, :past].tolist()]
        actions = every_event.action[0, :past].tolist()
        times = every_event.time[0, :past].tolist()
        later_times = range(99, 99 + len(items))
        row = {
            "candidates": [items[i] for i in candidates],
            "timestamp_ms": 99,
            "history": [*history[:-1], "who", *history[-1:], *items],
            "history_actions": [
                *actions[:-1],
                [1.0] * 3,
                *actions[-1:],
                *[[1.0] * 3] * len(items),
            ],
            "history_time_ms": [*times[:-1], *times[-1:] * 2, *later_times],
            "features": batch.candidate_feature[0].tolist(),
        }
        if not past:
            row["history_time_ms"] = [5, *later_times]
        if batch.viewer is not None:
            batch.candidate_viewer[:] = batch.candidate_viewer[:, :1]
            viewer_codes = every_event.viewer[0, :past, 0].tolist()
            past_devices = [devices[code] for code in viewer_codes]
            row["viewer_device"] = devices[int(batch.candidate_viewer[0, 0, 0])]
            row["history_viewer_device"] = [
                *past_devices[:-1],
                "tablet",
                *past_devices[-1:],
                *["phone"] * len(items),
            ]
        rows.append(row)
        scores.append(score_candidates(batch, row["candidates"]))
        last_batch = batch

    # Without times, all events precede the request and come in their order.
    without_times = {**rows[-1], "history_time_ms": None, "timestamp_ms": 0}
    for column in ("history", "history_actions", "history_viewer_device"):
        if column in without_times:
            without_times[column] = without_times[column][: -len(items)]
    times = torch.arange(last_batch.time.shape[1])[None]
    in_order = replace(last_batch, time=times)
    rows.append(without_times)
    scores.append(score_candidates(in_order, without_times["candidates"]))
    return rows, scores


def test_registered_models_rank_as_the_module_does(tmp_path: Path) -> None:
    """The last requests have no history, and an unknown item or no candidates."""
    tables, text = write_search(tmp_path / "search")
    feed = write_actions(tmp_path / "feed", viewers=True)
    setups = {
        "qgs": register_ranker(tmp_path, "qgs", tables, text),
        "attn_mvp": register_ranker(tmp_path, "attn_mvp", feed, None),
    }
    requests = {
        "qgs": build_search_requests(setups["qgs"], tables, 8, label=1),
        "attn_mvp": build_feed_requests(setups["attn_mvp"], feed),
    }
    assert len(requests["attn_mvp"][0]) > 3

    for name, (rows, expected_scores) in requests.items():
        empty = {
            column: [] if isinstance(value, list) else value
            for column, value in rows[0].items()
        }
        if name == "qgs":
            empty["query"] = "what is this"
        candidates = ["who", *rows[0]["candidates"]]
        rows.append({**empty, "candidates": candidates, "features": None})
        rows.append({**empty, "candidates": [], "features": []})
        model = load_registered(tmp_path, name)
        catalogue = setups[name].catalogue

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ranked = model.predict(
                pd.DataFrame(rows), params={"label": catalogue.labels[1]}
            )

        for expected, ranked_items, scores in zip(
            expected_scores, ranked["item_id"], ranked["score"], strict=False
        ):
            assert ranked_items == sorted(expected, key=lambda item: -expected[item])
            assert scores == pytest.approx(
                [expected[item] for item in ranked_items], abs=1e-5
            )
        with_unknown, without_candidates = ranked["item_id"].tolist()[-2:]
        assert sorted(with_unknown) == sorted(candidates)
        assert with_unknown[-1] == "who"
        assert without_candidates == []
        is_scored = np.isfinite(ranked["score"].tolist()[-2]).tolist()
        assert is_scored == [item != "who" for item in with_unknown]

        metadata = model.metadata.metadata
        assert metadata["labels"] == list(catalogue.labels)
        assert metadata["features"] == list(catalogue.features)
        assert metadata.get("viewers") == {"attn_mvp": ["device"]}.get(name)
        messages = [str(w.message) for w in caught if w.category is UserWarning]
        assert messages == ([UNKNOWN] if name == "qgs" else [])


def test_a_search_model_warns_of_inputs_without_training_data(tmp_path: Path) -> None:
    tables, text = write_search(tmp_path)
    register_ranker(tmp_path, "qgs", tables, text)
    model = load_registered(tmp_path, "qgs").unwrap_python_model()
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
    text_requests = model.ranker.requests.text
    text_requests.text = replace(
        text_requests.text,
        pair_keys=text_requests.text.pair_keys[:1],
        pairs=text_requests.text.pairs[:1],
        joint=text_requests.text.joint[:1],
    )
    with pytest.warns(
        UserWarning, match="1 of 1 candidates have no text vector for the pair"
    ):
        predict()
    with pytest.warns(
        UserWarning, match="1 of 1 behaviours have no text vector for the pair"
    ):
        predict(query=None, history_query=["query-001"])

    no_rows = model.predict(None, pd.DataFrame([row])[:0])
    assert no_rows.columns.tolist() == ["item_id", "score"]

    for parameter in model.ranker.model.parameters():
        parameter.detach().fill_(torch.nan)
    with (
        pytest.raises(UserError, match="scores that are not finite"),
        pytest.warns(UserWarning, match="no text vector for the pair"),
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


def test_every_column_of_a_model_of_actions_changes_a_score(tmp_path: Path) -> None:
    tables = write_actions(tmp_path, viewers=True)
    register_ranker(tmp_path, "attn_mvp", tables, None)
    model = load_registered(tmp_path, "attn_mvp")
    changes = {
        "candidates": ["item-005", "item-006"],
        "history": ["item-007", "item-001", "item-002"],
        "history_actions": [[1.0, 0.0, 0.5], [0.0, 0.0, 0.2], [1.0, 1.0, 0.9]],
        "timestamp_ms": 30,
        "features": [[0.5, 0.5], [0.9, 0.1]],
        "history_time_ms": [10, 20, 100],
        "viewer_device": "tablet",
        "history_viewer_device": ["", "", "tablet"],
    }
    columns = model.metadata.get_input_schema().input_names()
    assert set(columns) == {*changes, "new_items"}

    scores = sorted(model.predict(pd.DataFrame([FEED]))["score"][0])
    for column, value in changes.items():
        answer = model.predict(pd.DataFrame([FEED | {column: value}]))
        assert sorted(answer["score"][0]) != pytest.approx(scores, abs=1e-6), column

    inputs = model.metadata.metadata["inputs"]
    manifest = read_manifest(join(tables, "sequences"), "sequences")
    assert inputs == manifest.info["definitions"]["inputs"]
    assert sorted(inputs) == sorted(model.metadata.metadata["actions"])


@pytest.fixture(scope="module")
def actions_requests(tmp_path_factory: pytest.TempPathFactory) -> ActionsRequests:
    """Build the request parser of a model of actions."""
    folder = tmp_path_factory.mktemp("actions_requests")
    tables = write_actions(folder, viewers=True)
    setup = build_training(
        {"name": "attn_mvp", **SMALL_RANKERS["attn_mvp"]},
        FitConfig(batch_size=8),
        Inputs(tables),
    )
    checkpoint.save(folder / "attn_mvp", setup.model, setup.checkpoint())
    package.write_bundle(folder / "data", str(folder / "attn_mvp"), Inputs(tables))
    return ActionsRequests(str(folder / "data"), setup.model, setup.catalogue, {})


def test_unknown_actions_count_as_none(actions_requests: ActionsRequests) -> None:
    unknown = FEED | {"history_actions": [[np.nan] * 3] * 3}

    request = actions_requests.parse(Row(unknown))

    assert not actions_requests.collate([request]).action.any()


def test_a_model_that_reads_times_requires_them(tmp_path: Path) -> None:
    tables, text = write_search(tmp_path)
    register_ranker(tmp_path, "hstu", tables, text)
    model = load_registered(tmp_path, "hstu").unwrap_python_model()
    row = {
        "candidates": ["item_id-003"],
        "history": ["item_id-001", "item_id-002"],
        "query": None,
    }
    with pytest.raises(
        UserError,
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
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """The catalogue item's id carries no information: the model reads no ids, or the
    item has no training example. Requests without new items are scored as in training.
    """
    tables = write_actions(tmp_path, viewers=True, content=True)
    text = str(tmp_path / "text")
    encode_log(tables, text, "tfidf", TextConfig(svd=4), say=str)
    items = read_table(join(tables, "items")).to_pylist()
    new_items = build_new_items(items)
    setup = register_ranker(tmp_path, name, tables, text, **options)
    model = load_registered(tmp_path, name)

    rows, expected_scores = build_feed_requests(setup, tables)
    ranked = model.predict(pd.DataFrame(rows), params={"label": "contribution"})
    for expected, ranked_items, scores in zip(
        expected_scores, ranked["item_id"], ranked["score"], strict=True
    ):
        assert scores == pytest.approx(
            [expected[item] for item in ranked_items], abs=1e-5
        )

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

    # Each kind of content changes the score; an unknown author is no author.
    def build_row(**content: Any) -> dict[str, Any]:
        return row | {"new_items": [new_items[1] | {"item_id": "new-0"} | content]}

    original, *changed = score_first_candidates(
        model,
        [
            build_row(),
            build_row(price=3),
            build_row(title="husky"),
            build_row(author="author-2"),
            build_row(author=None),
        ],
    )
    assert all(score != pytest.approx(original, abs=1e-6) for score in changed)
    unknown_authors = [build_row(author="nobody"), build_row(author=None)]
    assert len(set(score_first_candidates(model, unknown_authors))) == 1


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """Build a served model that scores new items by their content."""
    folder = tmp_path_factory.mktemp("ranker")
    tables = write_actions(folder, content=True)
    text = str(folder / "text")
    encode_log(tables, text, "tfidf", TextConfig(svd=4), say=str)
    setup = build_training(
        {"name": "lac", **SMALL_RANKERS["lac"]},
        FitConfig(batch_size=8),
        Inputs(tables, text=text),
    )
    checkpoint.save(folder / "lac", setup.model, setup.checkpoint(epoch=1))
    package.write_bundle(
        folder / "bundle", str(folder / "lac"), Inputs(tables, text=text)
    )
    model = ServedModel()
    model.load_context(
        SimpleNamespace(artifacts={"data": str(folder / "bundle")}, model_config=None)
    )
    return model


def test_new_items_without_id_or_text_encoder_cause_warnings(
    ranker: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranker.ranker.requests.new_items, "encoder", None)
    new_item = {"item_id": "p", "title": "husky"}
    row = replace_item(BARE, "p") | {"new_items": [new_item]}

    with (
        pytest.warns(
            UserWarning,
            match="1 new items are scored without an id, but the model was always trained",
        ),
        pytest.warns(
            UserWarning,
            match="without its text encoder; 1 new items are scored without their text",
        ),
    ):
        ranker.predict(None, pd.DataFrame([row]))


def test_text_of_other_items_is_refused(tmp_path: Path) -> None:
    tables = write_actions(tmp_path / "a", content=True)
    text = str(tmp_path / "text")
    encode_log(tables, text, "tfidf", TextConfig(svd=4), say=str)
    other_tables = write_actions(tmp_path / "b", items=13, content=True)

    with pytest.raises(UserError, match=r"items was made from other items"):
        ActionsCatalogue.load(other_tables, text)
