"""Test that models behind Ray Serve answer as `predict` does.

The answers come from several replicas, in batches, and next to failing requests.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import mlflow
import pandas as pd
import pytest
import torch
import yaml
from fastapi import HTTPException, Request
from ray import serve
from ray.serve.schema import ServeDeploySchema

from models import own_code
from models.training import checkpoint
from pipelines.serving import package
from pipelines.serving.ray_serve import (
    MAX_BODY_BYTES,
    Options,
    Replica,
    build,
    read_body,
    resolve_version,
)
from pipelines.serving.registered_model import register
from tests.fixtures.search_tables import write_search
from tests.fixtures.served_models import (
    build_search_requests,
    register_ranker,
    save_tiger_run,
)
from tests.fixtures.training_tables import write_tables

BATCH = 5
"""Batch size of the served TIGER; it waits for a full batch longer than any test."""

HISTORIES = [
    {"history": [f"item-{i:03d}" for i in range(n, 2 * n)]} for n in range(1, BATCH + 1)
]


class ServedModel:
    """A registered model that is loaded in this process and also served by HTTP."""

    def __init__(self, url: str, model: str) -> None:
        self.url = f"{url}/invocations"
        self.model = mlflow.pyfunc.load_model(f"models:/{model}/1")

    def request(self, rows: Sequence[dict[str, Any]], **params: Any) -> tuple[int, Any]:
        """Send rows; return the status, and the predictions or the error message."""
        body = json.dumps({"dataframe_records": rows, "params": params}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=100) as answer:
                return answer.status, json.load(answer)["predictions"]
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)["message"]

    def predict(self, rows: Sequence[dict[str, Any]], **params: Any) -> Any:
        """Return the predictions of the model in this process."""
        return self.model.predict(pd.DataFrame(rows), params=params).to_dict("records")


@dataclass
class Service:
    """Two served models."""

    qgs: ServedModel
    """A search model with two replicas."""
    requests: list[dict[str, Any]]
    """Requests to the search model."""
    tiger: ServedModel
    """A retrieval model with one replica, which waits until a batch is full."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Create the folder of the MLflow store, tables and checkpoints."""
    return tmp_path_factory.mktemp("ray_serve")


@pytest.fixture(scope="module")
def service(ray_local, new_store, folder) -> Iterator[Service]:
    """Serve a search model and a retrieval model by Ray Serve."""
    uri = new_store(folder)
    tables, text = write_search(folder / "search")
    setup = register_ranker(folder, "qgs", tables, text)
    requests, _ = build_search_requests(setup, tables, 8)
    write_tables(folder / "small")
    register(save_tiger_run(folder, "tiger", None, seed=1, ndcg=0.5), "tiger")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    qgs_options = Options(model="models:/qgs/1", num_replicas=2, num_cpus=0.1)
    tiger_options = Options(
        model="models:/tiger/1",
        num_cpus=0.1,
        max_batch_size=BATCH,
        batch_wait_timeout_s=200,
    )
    serve.start(http_options={"port": port})
    url = f"http://127.0.0.1:{port}"
    with package.use_store(uri):
        serve.run(build(qgs_options), name="qgs", route_prefix="/qgs")
        serve.run(build(tiger_options), name="tiger", route_prefix="/tiger")
        qgs = ServedModel(f"{url}/qgs", "qgs")
        tiger = ServedModel(f"{url}/tiger", "tiger")
    yield Service(qgs, requests, tiger)
    serve.shutdown()


def test_unbatched_answers_equal_predict_bit_for_bit(service):
    torch.set_num_threads(1)  # as in a replica
    single_rows = [[row] for row in service.requests]
    for rows in (*single_rows, service.requests):
        for label in ("click", "purchase"):
            expected = service.qgs.predict(rows, label=label)
            assert service.qgs.request(rows, label=label) == (200, expected)

    states = serve.status().applications["qgs"].deployments[Replica.name].replica_states
    assert states == {"RUNNING": 2}


def test_half_sent_requests_do_not_stop_a_replica(service):
    url = urlsplit(service.qgs.url)
    head = f"POST {url.path} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{"
    rows = service.requests[:1]
    with ExitStack() as clients:
        slow = [
            clients.enter_context(socket.create_connection((url.hostname, url.port)))
            for _ in range(100)
        ]
        for client in slow:
            client.sendall(head.encode())
        assert service.qgs.request(rows)[0] == 200
        slow[0].settimeout(100)
        assert b" 408 " in slow[0].recv(100)
    large = b" " * (MAX_BODY_BYTES + 1)
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(service.qgs.url, large, timeout=100)
    assert error.value.code == 413


def test_a_client_that_leaves_is_no_error_of_the_server():
    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    with pytest.raises(HTTPException, match="incomplete"):
        asyncio.run(read_body(Request({"type": "http"}, receive)))


def test_requests_of_a_batch_are_answered_independently(service):
    tiger = service.tiger
    torch.set_num_threads(1)
    expected = [tiger.predict([row], k=3) for row in HISTORIES]
    with ThreadPoolExecutor(BATCH) as clients:

        def request_all(
            rows: list[dict[str, Any]], params: list[dict[str, Any]]
        ) -> list[tuple[int, Any]]:
            """Send one request per row at once; return their answers."""
            answers = clients.map(
                lambda row, options: tiger.request([row], **options), rows, params
            )
            return list(answers)

        k_is_3: list[dict[str, Any]] = [{"k": 3}] * BATCH

        # Sums over a batch differ in their last digits.
        for (status, answer), (row,) in zip(
            request_all(HISTORIES, k_is_3), expected, strict=True
        ):
            assert status == 200
            assert answer[0]["item_id"] == row["item_id"]
            assert answer[0]["score"] == pytest.approx(row["score"], abs=1e-5)

        invalid = {"history": ["item-001", 1.5]}
        status, message = tiger.request([invalid], k=3)  # waits for no batch
        assert status == 400
        assert "history.1 is 1.5" in message

        allowed_sets = [
            ["item-001"],
            ["item-002", "item-003"],
            ["item-001"],
            ["item-004"],
            ["item-005"],
        ]
        answers = request_all(
            HISTORIES, [{"allowed": items, "unseen": True} for items in allowed_sets]
        )
        for (status, answer), row, allowed in zip(
            answers, HISTORIES, allowed_sets, strict=True
        ):
            assert status == 200
            expected_items = sorted(set(allowed) - set(row["history"]))
            assert sorted(answer[0]["item_id"]) == expected_items

        answers = request_all(HISTORIES, [{"k": k} for k in range(1, BATCH + 1)])
        counts = [len(answer[0]["item_id"]) for _, answer in answers]
        assert counts == [*range(1, BATCH + 1)]


@pytest.mark.exhaustive
def test_a_replica_follows_an_alias_while_it_answers(service, folder, monkeypatch):
    tables, text = str(folder / "search/tables"), str(folder / "search/text")
    row = max(service.requests, key=lambda row: len(row["history"]))
    uri = f"sqlite:///{folder}/mlflow.db"
    with package.use_store(uri):
        client = mlflow.MlflowClient()
        client.set_registered_model_alias("qgs", "running", "1")
        options = Options(model="models:/qgs@running", num_cpus=0.1, follow_s=0.1)
        serve.run(build(options), name="followed", route_prefix="/followed")
        url = service.qgs.url.replace("/qgs/invocations", "/followed")
        followed = ServedModel(url, "qgs")
        (first_answer,) = followed.predict([row])
        valid_answers = [first_answer]

        def move_alias(version: int) -> str:
            """Move the alias to a version; return the replica's note on the version.

            Every answer meanwhile must be one of `valid_answers`.
            """
            client.set_registered_model_alias("qgs", "running", str(version))
            for _ in range(3000):
                status, (answer,) = followed.request([row])
                assert status == 200
                assert answer["score"] in [
                    pytest.approx(valid["score"], abs=1e-5) for valid in valid_answers
                ]
                ping_url = followed.url.replace("invocations", "ping")
                with urllib.request.urlopen(ping_url, timeout=100) as ping:
                    state = json.load(ping)
                if f"qgs/{version} " in state["note"]:
                    return str(state["note"])
                time.sleep(0.02)
            raise TimeoutError(state)

        assert move_alias(1) == "models:/qgs/1 answers"
        register_ranker(folder, "qgs", tables, text)  # the same weights
        assert move_alias(2) == "models:/qgs/2 answers"

        move_imports = own_code.move_imports

        def change_code(source: str, name: str) -> str:
            return move_imports(source, name) + "\n# another version\n"

        with monkeypatch.context() as patched:
            patched.setattr(own_code, "move_imports", change_code)
            register_ranker(folder, "qgs", tables, text)
        assert move_alias(3) == "models:/qgs/3 answers"

        register_ranker(folder, "qgs", tables, text, seed=1)
        reloaded = mlflow.pyfunc.load_model("models:/qgs/4")
        (new_answer,) = reloaded.predict(pd.DataFrame([row])).to_dict("records")
        valid_answers.append(new_answer)
        assert move_alias(4) == "models:/qgs/4 answers"
        assert new_answer["score"] != pytest.approx(first_answer["score"], abs=1e-5)

        register_ranker(folder, "qgs", tables, text)
        assert resolve_version("models:/qgs/latest") == "models:/qgs/5"
        stored = Path(mlflow.artifacts.download_artifacts("models:/qgs/5"))
        (stored / "artifacts/data/checkpoint" / checkpoint.WEIGHTS).write_bytes(b"")
        assert move_alias(5).startswith(
            "models:/qgs/4 stays: models:/qgs/5 cannot be loaded: "
        )
        assert followed.request([row]) == (
            200,
            [{**new_answer, "score": pytest.approx(new_answer["score"], abs=1e-5)}],
        )
    serve.delete("followed")


def test_the_kubernetes_service_is_a_valid_serve_config():
    service = yaml.safe_load(
        (Path(__file__).parents[3] / "deploy/serve.yaml").read_text()
    )
    config = ServeDeploySchema.model_validate(
        yaml.safe_load(service["spec"]["serveConfigV2"])
    )
    (application,) = config.applications
    module, name = application.import_path.split(":")
    assert getattr(importlib.import_module(module), name) is build
    options = Options.model_validate(application.args)
    assert build(options)
    assert {deployment.name for deployment in application.deployments} <= {Replica.name}
