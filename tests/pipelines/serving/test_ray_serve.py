"""Registered versions behind Ray Serve answer as `predict` does: in batches, beside
errors and by several replicas.
"""

from __future__ import annotations

import importlib
import json
import socket
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
import pytest
import torch
import yaml
from ray import serve
from ray.serve.schema import ServeDeploySchema

from models.storage import checkpoint
from pipelines.serving import package
from pipelines.serving.ray_serve import Options, Replica, build, resolve_version
from pipelines.serving.registered_model import register
from tests.fixtures.search_tables import write_search
from tests.fixtures.training_tables import write_tables
from tests.pipelines.serving.test_registered_model import train_nothing
from tests.pipelines.serving.test_served_ranker import trained
from tests.pipelines.serving.test_served_scores import searches

BATCH = 5
"""Requests that the served TIGER waits for, longer than any test does."""

HISTORIES = [
    {"history": [f"item-{i:03d}" for i in range(n, 2 * n)]} for n in range(1, BATCH + 1)
]


class Served:
    """A registered model, loaded here and asked by HTTP."""

    def __init__(self, url: str, model: str) -> None:
        self.url, self.model = (
            f"{url}/invocations",
            mlflow.pyfunc.load_model(f"models:/{model}/1"),
        )

    def ask(self, rows: Sequence[dict[str, Any]], **params: Any) -> tuple[int, Any]:
        """(status, predictions or message)"""
        return self.post({"dataframe_records": rows, "params": params})

    def post(self, content: dict[str, Any]) -> tuple[int, Any]:
        """(status, predictions or message) of a whole body."""
        body = json.dumps(content).encode()
        headers = {"Content-Type": "application/json"}
        try:
            with urllib.request.urlopen(
                urllib.request.Request(self.url, body, headers), timeout=100
            ) as answer:
                return answer.status, json.load(answer)["predictions"]
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)["message"]

    def here(self, rows: Sequence[dict[str, Any]], **params: Any) -> Any:
        return self.model.predict(pd.DataFrame(rows), params=params).to_dict("records")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ray_serve")


@pytest.fixture(scope="module")
def made(
    ray_local: None, new_store: Callable[[Path], str], folder: Path
) -> Iterator[tuple[Served, list[dict[str, Any]], Served]]:
    """QGS by two replicas, requests of it, and TIGER by one that waits until a batch is
    full.
    """
    uri = new_store(folder)
    tables, text = write_search(folder / "search")
    rows = [
        row
        for row, _ in searches(trained(folder, "qgs", tables, text), tables, text, 8)
    ]
    write_tables(folder / "small")
    register(train_nothing(folder, "tiger", None, seed=1, ndcg=0.5), "tiger")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"port": port})
    with package.use_store(uri):
        for options in (
            Options(model="models:/qgs/1", num_replicas=2, num_cpus=0.1),
            Options(
                model="models:/tiger/1",
                num_cpus=0.1,
                max_batch_size=BATCH,
                batch_wait_timeout_s=200,
            ),
        ):
            name = options.model.split("/")[1]
            serve.run(build(options), name=name, route_prefix=f"/{name}")
        qgs, tiger = (
            Served(f"http://127.0.0.1:{port}/{name}", name) for name in ("qgs", "tiger")
        )
    yield qgs, rows, tiger
    serve.shutdown()


def test_answers_are_those_of_predict(
    made: tuple[Served, list[dict[str, Any]], Served],
) -> None:
    """Bit for bit, where a request is not batched with others."""
    qgs, rows, _ = made
    torch.set_num_threads(1)  # as in a replica
    for asked in (*([row] for row in rows), rows):
        for label in ("click", "purchase"):
            assert qgs.ask(asked, label=label) == (200, qgs.here(asked, label=label))
    states = serve.status().applications["qgs"].deployments[Replica.name].replica_states
    assert states == {"RUNNING": 2}
    assert qgs.ask(rows[:1], label="no") == (
        400,
        "the model has no label 'no'; choose one of click, purchase",
    )
    assert qgs.ask([{"history": "x"}])[0] == 400


def test_what_is_not_understood_is_refused_by_name(
    made: tuple[Served, list[dict[str, Any]], Served],
) -> None:
    qgs, rows, _ = made
    words = "which is not known there; the nearest is"
    for asked, message in (
        (qgs.ask(rows[:1], lable="click"), f"params has 'lable', {words} 'label'"),
        (
            qgs.ask([rows[0] | {"qery": "x"}]),
            f"a record has 'qery', {words} 'query'",
        ),
        (
            qgs.post({"dataframe_records": rows[:1], "param": {"label": "click"}}),
            f"the request has 'param', {words} 'params'",
        ),
    ):
        assert asked == (400, message)


def test_a_batch_answers_as_single_requests_and_none_fails_by_its_neighbours(
    made: tuple[Served, list[dict[str, Any]], Served],
) -> None:
    *_, tiger = made
    torch.set_num_threads(1)
    alone = [tiger.here([row], k=3) for row in HISTORIES]
    with ThreadPoolExecutor(BATCH) as clients:

        def at_once(
            rows: list[dict[str, Any]], k: Sequence[int]
        ) -> list[tuple[int, Any]]:
            return list(clients.map(lambda row, k: tiger.ask([row], k=k), rows, k))

        for answer, want in zip(at_once(HISTORIES, [3] * BATCH), alone, strict=True):
            assert (answer[0], answer[1][0]["item_id"]) == (200, want[0]["item_id"])
            assert answer[1][0]["score"] == pytest.approx(
                want[0]["score"], abs=1e-5
            )  # sums of other sizes
        *good, bad = at_once(
            [*HISTORIES[:-1], {"history": ["item-001", 1.5]}], [3] * BATCH
        )
        assert good == [(200, want) for want in alone[:-1]]
        assert bad == (
            400,
            "history has 1.5; an item id is a string, as in the log, or an integer",
        )
        sets = [
            ["item-001"],
            ["item-002", "item-003"],
            ["item-001"],
            ["item-004"],
            ["item-005"],
        ]
        asked = clients.map(
            lambda row, some: tiger.ask([row], allowed=some, unseen=True),
            HISTORIES,
            sets,
        )
        wanted = [
            sorted(set(some) - set(row["history"]))
            for row, some in zip(HISTORIES, sets, strict=True)
        ]
        assert [(status, sorted(answer[0]["item_id"])) for status, answer in asked] == [
            (200, want) for want in wanted
        ]
        counts = [
            len(answer[0]["item_id"])
            for _, answer in at_once(HISTORIES, range(1, BATCH + 1))
        ]
        assert counts == [*range(1, BATCH + 1)]


@pytest.mark.exhaustive
def test_a_replica_follows_an_alias_and_answers_meanwhile(
    made: tuple[Served, list[dict[str, Any]], Served],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    qgs, rows, _ = made
    tables, text = str(folder / "search/tables"), str(folder / "search/text")
    row = max(rows, key=lambda row: len(row["history"]))
    uri = f"sqlite:///{folder}/mlflow.db"
    with package.use_store(uri):
        client = mlflow.MlflowClient()
        client.set_registered_model_alias("qgs", "running", "1")
        options = Options(model="models:/qgs@running", num_cpus=0.1, follow_s=0.1)
        serve.run(build(options), name="followed", route_prefix="/followed")
        followed = Served(qgs.url.replace("/qgs/invocations", "/followed"), "qgs")
        want = followed.here([row])[0]
        answers = [want]

        def said(version: int) -> str:
            """What is said of the version that is the running one from now on."""
            client.set_registered_model_alias("qgs", "running", str(version))
            for _ in range(3000):
                status, (answer,) = followed.ask([row])
                assert (status, answer["score"]) in [
                    (200, pytest.approx(one["score"], abs=1e-5)) for one in answers
                ]
                with urllib.request.urlopen(
                    followed.url.replace("invocations", "ping"), timeout=100
                ) as ping:
                    found = json.load(ping)
                if f"qgs/{version} " in found["note"]:
                    return str(found["note"])
                time.sleep(0.02)
            raise TimeoutError(found)

        assert said(1) == "models:/qgs/1 answers"
        trained(folder, "qgs", tables, text)  # the same weights
        assert said(2) == "models:/qgs/2 answers"

        write_code = package.write_code

        def other_code(place: Path) -> Path:
            with zipfile.ZipFile(made := write_code(place), "a") as archive:
                archive.writestr("models/more.py", "")
            return made

        with monkeypatch.context() as patched:
            patched.setattr(package, "write_code", other_code)
            trained(folder, "qgs", tables, text, seed=1)
        assert (
            said(3)
            == "models:/qgs/2 stays: models:/qgs/3 has other code; start the application again"
        )

        trained(folder, "qgs", tables, text, seed=1)
        now = mlflow.pyfunc.load_model("models:/qgs/4")
        (want,) = now.predict(pd.DataFrame([row])).to_dict("records")
        answers.append(want)
        assert said(4) == "models:/qgs/4 answers"
        assert want["score"] != pytest.approx(answers[0]["score"], abs=1e-5)

        trained(folder, "qgs", tables, text)
        assert resolve_version("models:/qgs/latest") == "models:/qgs/5"
        stored = Path(mlflow.artifacts.download_artifacts("models:/qgs/5"))
        (stored / "artifacts/data/checkpoint" / checkpoint.WEIGHTS).write_bytes(b"")
        assert said(5).startswith(
            "models:/qgs/4 stays: models:/qgs/5 cannot be loaded: "
        )
        assert followed.ask([row]) == (
            200,
            [{**want, "score": pytest.approx(want["score"], abs=1e-5)}],
        )
    serve.delete("followed")


def test_the_service_for_kubernetes_is_valid_to_serve() -> None:
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
