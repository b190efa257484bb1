"""A registered version as a Ray Serve application, asked and answering as `mlflow models serve` does.

    serve run pipelines.serving.ray_serve:build model=models:/searches/1 num_replicas=2

`build` is the `import_path` in a config file too, with `Options` as its `args` (`deploy/serve.yaml`). Each replica
loads the version, from MLFLOW_TRACKING_URI and with SERVING_MODEL_CONFIG as `build` finds them, onto its GPU where it
has one. POST /invocations takes JSON: `dataframe_records`, `dataframe_split`, `inputs` or `instances`, and `params`. A
request that the model refuses is answered with 400 and one line, a fault of the server with 500; its log has more.

Requests that wait together and have the same columns and params are one call of the model.

Where `model` is an alias, or models:/NAME/latest, a replica asks the registry which version that is, loads another one
beside its own, and then answers by it. GET /ping says which version answers, and what was last said of another one.
"""  # Serve and FastAPI read the annotations below, so they are no strings: no `from __future__ import annotations`

import asyncio
import json
import logging
import os
import time
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from io import StringIO
from itertools import accumulate, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any, Literal
from zipfile import ZipFile
from zlib import crc32

os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")

import mlflow
import pandas as pd
import ray
from fastapi import FastAPI, Request, Response
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import BAD_REQUEST
from mlflow.pyfunc.scoring_server import infer_and_parse_data, predictions_to_json
from mlflow.store.artifact.utils.models import get_model_name_and_version
from pydantic import BaseModel, Field
from ray import serve


class Options(BaseModel, extra="forbid"):
    """What an application is built by."""

    model: str
    """A registered version: models:/NAME/VERSION, or to be followed models:/NAME@ALIAS or models:/NAME/latest."""
    follow_s: float = Field(default=60, gt=0)
    """Seconds until the registry is asked again which version that is."""
    num_replicas: int | Literal["auto"] = 1
    """Processes with the model; `auto` lets Serve add and end them (from 1 to 100)."""
    num_cpus: float = 1
    """CPUs of a replica: as many threads does PyTorch use."""
    num_gpus: float = 0
    """GPUs of a replica, or a share of one."""
    max_batch_size: int = Field(default=16, ge=1)
    """Requests that are ranked together at most."""
    batch_wait_timeout_s: float = Field(default=0.002, ge=0)
    """How long a request waits for others."""


@dataclass
class Asked:
    """A request."""

    data: Any
    """Its rows: a frame, or what else the model takes."""
    params: dict[str, Any]

    def kind(self) -> Hashable:
        """Equal for requests that one call of the model can answer."""
        columns = tuple(self.data) if isinstance(self.data, pd.DataFrame) else id(self)
        return columns, json.dumps(self.params, sort_keys=True)


def as_json(found: Any) -> str:
    """The body of an answer."""
    body = StringIO()
    predictions_to_json(found, body)
    return body.getvalue()


def version_of(model: str) -> str:
    """The version that an alias is of now."""
    return "models:/" + "/".join(
        map(str, get_model_name_and_version(mlflow.MlflowClient(), model))
    )


def code_of(folder: str) -> dict[str, int]:
    """Checksums of the code that a version runs, by file."""
    with ZipFile(Path(folder, "code", "models.zip")) as archive:
        found = {file.filename: file.CRC for file in archive.infolist()}
    return found | {
        file.name: crc32(file.read_bytes()) for file in Path(folder).glob("*.py")
    }


app = FastAPI()
log = logging.getLogger("ray.serve")


@serve.deployment(name="model")
@serve.ingress(app)
class Replica:
    """A process with the model."""

    def __init__(
        self, options: Options, tracking_uri: str, settings: dict[str, Any]
    ) -> None:
        mlflow.set_tracking_uri(tracking_uri)
        if ray.get_runtime_context().get_accelerator_ids()["GPU"]:
            settings = {"device": "cuda", **settings}
        self.settings, self.version = settings, version_of(options.model)
        folder = mlflow.artifacts.download_artifacts(self.version)
        self.model = mlflow.pyfunc.load_model(folder, model_config=settings)
        self.seen, self.code, self.note = (
            self.version,
            code_of(folder),
            f"{self.version} answers",
        )
        from models.storage.tables import (
            UserError,
        )  # of the version's own code, which is loaded now

        self.refusals = (UserError, MlflowException)
        if not hasattr(self.model.unwrap_python_model(), "check_body"):
            raise UserError(
                f"{self.version} was registered before requests were checked; register its run again"
            )
        self.ask.set_max_batch_size(options.max_batch_size)  # type: ignore[attr-defined]
        self.ask.set_batch_wait_timeout_s(options.batch_wait_timeout_s)  # type: ignore[attr-defined]
        Thread(target=self.follow, args=[options], daemon=True).start()

    def follow(self, options: Options) -> None:
        """Changes to the version that `options.model` is, whenever that is another one."""
        while True:
            time.sleep(options.follow_s)
            try:
                if (version := version_of(options.model)) != self.seen:
                    self.note = self.change_to(version)
                    log.info(self.note)
            except Exception as error:  # the registry is asked again
                log.warning(f"{self.version} stays: {' '.join(str(error).split())}")

    def change_to(self, version: str) -> str:
        """Loads a version while the one before answers, and then answers by it; what there is to say."""
        with TemporaryDirectory() as folder:
            path = mlflow.artifacts.download_artifacts(version, dst_path=folder)
            self.seen = version  # what fails from here on fails always
            if code_of(path) != self.code:
                return f"{self.version} stays: {version} has other code; start the application anew"
            try:
                model = mlflow.pyfunc.load_model(path, model_config=self.settings)
            except Exception as error:
                return f"{self.version} stays: {version} cannot be loaded: {' '.join(str(error).split())}"
        self.model, self.version = model, version
        return f"{version} answers"

    @app.get("/ping")
    @app.get("/health")
    async def ping(self) -> dict[str, str]:
        """Answers where the model is loaded."""
        return {"version": self.version, "note": self.note}

    @app.post("/invocations")
    async def invocations(self, request: Request) -> Response:
        """`predictions` of the rows that are sent."""
        try:
            answer = await self.ask(self.read(await request.body()))
            if isinstance(answer, Exception):
                raise answer
            return Response(answer, media_type="application/json")
        except self.refusals as error:
            told = (
                error
                if isinstance(error, MlflowException)
                else MlflowException(str(error), BAD_REQUEST)
            )
            told.message = " ".join(told.message.split())
            return Response(
                told.serialize_as_json(),
                told.get_http_status_code(),
                media_type="application/json",
            )

    def read(self, body: bytes) -> Asked:
        """What a client asks; MlflowException for what is no request."""
        try:
            sent = json.loads(body)
        except (ValueError, RecursionError) as error:  # also of what is no UTF-8
            raise MlflowException(
                f"the request is no JSON ({error})", BAD_REQUEST
            ) from error
        if not isinstance(sent, dict):
            raise MlflowException(
                "the request is no JSON object with rows, such as dataframe_records",
                BAD_REQUEST,
            )
        self.model.unwrap_python_model().check_body(sent, self.model)
        params = {} if sent.get("params") is None else sent["params"]
        sent.pop("params", None)
        return Asked(
            infer_and_parse_data(sent, self.model.metadata.get_input_schema()), params
        )

    @serve.batch
    async def ask(self, requests: list[Asked]) -> list[str | Exception]:
        """The answer to each request, or why there is none; others are read meanwhile."""
        return await asyncio.to_thread(self.answer, requests)

    def answer(self, requests: list[Asked]) -> list[str | Exception]:
        """Asks the model once for all requests that are alike."""
        alike: dict[Hashable, list[int]] = defaultdict(list)
        for place, request in enumerate(requests):
            alike[request.kind()].append(place)
        answers: dict[int, str | Exception] = {}
        for places in alike.values():
            answers |= zip(
                places,
                self.answer_alike([requests[place] for place in places]),
                strict=True,
            )
        return [answers[place] for place in range(len(requests))]

    def answer_alike(self, requests: list[Asked]) -> list[str | Exception]:
        """Asks the model once; where it refuses, for each request alone, so that none fails by its neighbours."""
        rows = [request.data for request in requests]
        try:
            if len(rows) == 1:
                return [as_json(self.model.predict(rows[0], params=requests[0].params))]
            found = self.model.predict(
                pd.concat(rows, ignore_index=True), params=requests[0].params
            )
        except Exception as error:
            if len(rows) == 1:
                return [error]
            return [
                answer
                for request in requests
                for answer in self.answer_alike([request])
            ]
        return [
            as_json(found[begin:end])
            for begin, end in pairwise(accumulate(map(len, rows), initial=0))
        ]


def build(options: Options) -> serve.Application:
    """The application."""
    return Replica.options(  # type: ignore[attr-defined]  # the decorator makes a deployment of the class
        num_replicas=options.num_replicas,
        max_ongoing_requests=2
        * options.max_batch_size,  # a batch is collected while another one is ranked
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
    ).bind(
        options,
        mlflow.get_tracking_uri(),
        json.loads(os.environ.get("SERVING_MODEL_CONFIG") or "{}"),
    )
