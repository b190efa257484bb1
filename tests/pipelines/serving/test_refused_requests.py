"""Test that requests with unknown keys are refused, in Python and by MLflow's server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
import pytest
from fastapi.testclient import TestClient
from mlflow.pyfunc import PyFuncModel, scoring_server

from core.errors import UserError
from pipelines.serving import package
from pipelines.serving.registered_model import register
from tests.fixtures.actions_tables import write_actions
from tests.fixtures.search_tables import write_search
from tests.fixtures.served_models import register_ranker, save_tiger_run
from tests.fixtures.training_tables import write_tables

HISTORY = {"history": ["item-001"]}
SEARCH = {"history": [], "candidates": ["item_id-003"], "query": "query-001"}
FEED = {"history": [], "history_actions": [], "candidates": ["item-003"]}

RECORDS = {"dataframe_records": [HISTORY]}
REFUSED_BODIES: list[tuple[str, dict[str, Any], str]] = [
    ("tiger", {**RECORDS, "params": {"alowed": ["item-002"]}}, "'alowed'"),
    ("tiger", {"inputs": [HISTORY]}, "the request has 'inputs'"),
    (
        "tiger",
        {"dataframe_records": [HISTORY | {"allowed": []}]},
        "a record has 'allowed'",
    ),
    ("tiger", {**RECORDS, "param": {}}, "the request has 'param'"),
    ("tiger", {**RECORDS, "params": [["k", 3]]}, "Parameters must be a dictionary"),
    ("tiger", {"params": {"k": 3}}, "the request has no rows"),
    ("tiger", {**RECORDS, "params": {"unseen": None}}, "no value for 'unseen'"),
    ("tiger", {**RECORDS, "params": {"allowed": "item-002"}}, "allowed is 'item-002'"),
    ("tiger", {**RECORDS, "params": {"k": 0}}, "k is 0"),
    (
        "tiger",
        {"dataframe_records": [HISTORY] * 101, "params": {"k": 10_000}},
        "over 1000000",
    ),
    ("tiger", {"dataframe_records": [{}]}, "missing inputs ['history']"),
    ("qgs", {"dataframe_records": [SEARCH], "params": {"label": "buy"}}, "'buy'"),
    (
        "qgs",
        {"dataframe_records": [SEARCH | {"query": "q" * 10_001}]},
        "query has a text of over 10000",
    ),
    ("qgs", {"dataframe_records": [SEARCH | {"query": 5}]}, "query is 5"),
    ("qgs", {"dataframe_records": [SEARCH | {"query": {"a": 1}}]}, "not a text"),
    (
        "attn_mvp",
        {"dataframe_records": [FEED | {"viewer_device": {"a": 1}}]},
        "viewer_device is {'a': 1}",
    ),
    ("qgs", {"dataframe_records": [SEARCH | {"candidate": []}]}, "'candidate'"),
    ("attn_mvp", {"dataframe_records": [FEED | {"timestamp": 5}]}, "'timestamp'"),
    (
        "attn_mvp",
        {"dataframe_records": [FEED | {"new_items": [{"item_id": "x", "hue": 1}]}]},
        "column new_items",
    ),
]


@pytest.fixture(scope="module")
def served(
    new_store: Callable[[Path], str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, PyFuncModel]:
    """Register a model of each kind, and load the models by MLflow."""
    folder = tmp_path_factory.mktemp("refused")
    uri = new_store(folder)
    write_tables(folder / "small")
    register(save_tiger_run(folder, "tiger", None, seed=1, ndcg=0.5), "tiger")
    register_ranker(folder, "qgs", *write_search(folder / "search"))
    register_ranker(
        folder, "attn_mvp", write_actions(folder / "feed", viewers=True), None
    )
    with package.use_store(uri):
        names = ("tiger", "qgs", "attn_mvp")
        return {name: mlflow.pyfunc.load_model(f"models:/{name}/1") for name in names}


@pytest.mark.parametrize(("name", "body", "reason"), REFUSED_BODIES)
def test_the_server_refuses_invalid_requests_in_one_line(
    name: str,
    body: dict[str, Any],
    reason: str,
    served: dict[str, PyFuncModel],
) -> None:
    client = TestClient(scoring_server.init(served[name]))

    answer = client.post("/invocations", json=body)

    error = answer.json()
    assert (answer.status_code, error["error_code"]) == (400, "BAD_REQUEST")
    assert reason in error["message"]
    assert "\n" not in error["message"]
    assert "stack_trace" not in error


def test_the_server_answers_valid_requests(served: dict[str, PyFuncModel]) -> None:
    client = TestClient(scoring_server.init(served["tiger"]))
    params = {"k": 3, "allowed": ["item-002"]}
    body = json.dumps({"dataframe_records": [HISTORY], "params": params})
    headers = {"Content-Type": "application/json; charset=utf-8"}
    answer = client.post("/invocations", content=body, headers=headers)

    (prediction,) = answer.json()["predictions"]
    assert prediction["item_id"] == ["item-002"]
    assert prediction["note"] == "1 of 3 items: allowed has 1 item of the catalogue"


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/vnd.apache.parquet"]
)
def test_a_body_that_is_not_declared_as_json_is_refused(
    served: dict[str, PyFuncModel], content_type: str | None
) -> None:
    client = TestClient(scoring_server.init(served["tiger"]))
    headers = {"Content-Type": content_type} if content_type else {}
    body = json.dumps({"dataframe_records": [HISTORY]})

    answer = client.post("/invocations", content=body, headers=headers)

    assert answer.status_code == 400
    assert "not application/json" in answer.json()["message"]


def test_an_answer_repeats_at_most_200_characters_of_a_value(
    served: dict[str, PyFuncModel],
) -> None:
    client = TestClient(scoring_server.init(served["tiger"]))
    word = "x" * 100_000
    for body in (
        RECORDS | {word: 1},
        RECORDS | {"params": {word: 1}},
        RECORDS | {"params": {"k": word}},
        RECORDS | {"params": {"allowed": word}},
        {"dataframe_records": [{"history": word}]},
        {"dataframe_records": [{"history": [{"item": word}]}]},
        {"dataframe_records": [word]},
        {"dataframe_split": {word: 1}},
    ):
        answer = client.post("/invocations", json=body)
        assert answer.status_code == 400
        assert len(answer.text) < 500


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"dataframe_records": [HISTORY] * 100_000}, "100000 rows"),
        ({"dataframe_split": {"data": [[["item-001"]]] * 10_001}}, "10001 rows"),
        (
            {"dataframe_split": {"data": {"history": "x"}, "index": [0] * 100_000}},
            "no list of rows",
        ),
        # pandas has a value for each row and each name or the longest row
        ({"dataframe_records": [{f"x{n}": 1} for n in range(4000)]}, "a record has"),
        ({"dataframe_split": {"data": [[]] * 4000 + [[1] * 4000]}}, "4000 values"),
    ],
)
def test_a_body_is_refused_before_it_becomes_a_large_frame(
    body: dict[str, Any], reason: str, served: dict[str, PyFuncModel]
) -> None:
    client = TestClient(scoring_server.init(served["tiger"]))
    start = time.process_time()

    answer = client.post("/invocations", json=body)

    assert answer.status_code == 400
    assert reason in answer.json()["message"]
    assert time.process_time() - start < 1


def test_long_and_short_histories_are_ranked_together_as_alone(
    served: dict[str, PyFuncModel],
) -> None:
    histories = [["item-001"], ["item-002", "item-003"] * 2000, [], ["item-004"] * 9]
    for params in ({"k": 3}, {"k": 3, "unseen": True}):
        together = served["tiger"].predict(
            pd.DataFrame({"history": histories * 70}), params=params
        )
        for row, history in enumerate(histories):
            alone = served["tiger"].predict(
                pd.DataFrame({"history": [history]}), params=params
            )
            assert together["item_id"][row] == alone["item_id"][0]
            assert together["item_id"][row + 4 * 69] == alone["item_id"][0]
            assert together["score"][row] == pytest.approx(alone["score"][0], abs=1e-5)


@pytest.mark.parametrize(
    ("history", "params", "note"),
    [
        (["item-001"], {"k": 24}, ""),
        (["item-001"], {"k": 30}, "24 of 30 items: the catalogue has 24 items"),
        (
            ["new"],
            {"k": 3},
            "0 of 3 items: no item of the history is in the catalogue",
        ),
        (
            ["item-001"],
            {"k": 3, "allowed": ["item-001", "item-002", "x"], "unseen": True},
            "1 of 3 items: allowed has 2 items of the catalogue, and the items of the history are left out",
        ),
    ],
)
def test_a_note_explains_why_a_ranking_has_fewer_than_k_items(
    history: list[str], params: dict[str, Any], note: str, served: dict[str, Any]
) -> None:
    frame = pd.DataFrame({"history": [history]})

    answer = served["tiger"].predict(frame, params=params)

    assert answer["note"].tolist() == [note]
    assert bool(note) == (len(answer["item_id"][0]) < params["k"])


def test_an_unknown_setting_of_a_server_is_refused(
    served: dict[str, PyFuncModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = served["qgs"].unwrap_python_model()
    context = served["qgs"]._model_impl.context
    monkeypatch.setenv("SERVING_MODEL_CONFIG", '{"count": "tables/counts"}')
    with pytest.raises(UserError, match="SERVING_MODEL_CONFIG has 'count'"):
        type(inner)().load_context(context)
