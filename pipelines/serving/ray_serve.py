"""A registered version as a Ray Serve application, asked and answering as `mlflow models serve` does.

    serve run pipelines.serving.ray_serve:build model=models:/searches/1 num_replicas=2

`build` is the `import_path` in a config file too, with `Options` as its `args` (`deploy/serve.yaml`). Each replica
loads the version, from MLFLOW_TRACKING_URI and with SERVING_MODEL_CONFIG as `build` finds them, onto its GPU where it
has one. POST /invocations takes JSON: `dataframe_records`, `dataframe_split`, `inputs` or `instances`, and `params`. A
request that the model refuses is answered with 400 and one line, a fault of the server with 500; its log has more.

Requests that wait together and have the same columns and params are one call of the model.
"""  # Serve and FastAPI read the annotations below, so they are no strings: no `from __future__ import annotations`

import asyncio
import json
import os
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from io import StringIO
from itertools import accumulate, pairwise
from typing import Any, Literal

os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")

import mlflow
import pandas as pd
import ray
from fastapi import FastAPI, Request, Response
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import BAD_REQUEST
from mlflow.pyfunc.scoring_server import infer_and_parse_data, predictions_to_json
from pydantic import BaseModel, Field
from ray import serve

STICKY = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


class Options(BaseModel, extra="forbid"):
    """What an application is built by."""

    model: str
    """A registered version: models:/NAME/VERSION or models:/NAME@ALIAS."""
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
    sticky: bool = False
    """Requests with the same header `x-session-id` go to the same replica, as those of a user whose state it keeps."""


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


app = FastAPI()


@serve.deployment(name="model")
@serve.ingress(app)
class Replica:
    """A process with the model."""

    def __init__(self, options: Options, tracking_uri: str, settings: dict[str, Any]) -> None:
        mlflow.set_tracking_uri(tracking_uri)
        if ray.get_runtime_context().get_accelerator_ids()["GPU"]:
            settings = {"device": "cuda", **settings}
        self.model = mlflow.pyfunc.load_model(options.model, model_config=settings)
        from models.tables import UserError  # of the version's own code, which is loaded now

        self.refusals = (UserError, MlflowException)
        self.ask.set_max_batch_size(options.max_batch_size)  # type: ignore[attr-defined]
        self.ask.set_batch_wait_timeout_s(options.batch_wait_timeout_s)  # type: ignore[attr-defined]

    @app.get("/ping")
    @app.get("/health")
    async def ping(self) -> None:
        """Answers where the model is loaded."""

    @app.post("/invocations")
    async def invocations(self, request: Request) -> Response:
        """`predictions` of the rows that are sent."""
        try:
            answer = await self.ask(self.read(await request.body()))
            if isinstance(answer, Exception):
                raise answer
            return Response(answer, media_type="application/json")
        except self.refusals as error:
            told = error if isinstance(error, MlflowException) else MlflowException(str(error), BAD_REQUEST)
            told.message = " ".join(told.message.split())
            return Response(told.serialize_as_json(), told.get_http_status_code(), media_type="application/json")

    def read(self, body: bytes) -> Asked:
        """What a client asks; MlflowException for what is no request."""
        try:
            sent = json.loads(body)
        except (ValueError, RecursionError) as error:  # also of what is no UTF-8
            raise MlflowException(f"the request is no JSON ({error})", BAD_REQUEST) from error
        if not isinstance(sent, dict):
            raise MlflowException("the request is no JSON object with rows, such as dataframe_records", BAD_REQUEST)
        params = sent.pop("params", None) or {}
        return Asked(infer_and_parse_data(sent, self.model.metadata.get_input_schema()), params)

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
            answers |= zip(places, self.answer_alike([requests[place] for place in places]), strict=True)
        return [answers[place] for place in range(len(requests))]

    def answer_alike(self, requests: list[Asked]) -> list[str | Exception]:
        """Asks the model once; where it refuses, for each request alone, so that none fails by its neighbours."""
        rows = [request.data for request in requests]
        try:
            if len(rows) == 1:
                return [as_json(self.model.predict(rows[0], params=requests[0].params))]
            found = self.model.predict(pd.concat(rows, ignore_index=True), params=requests[0].params)
        except Exception as error:
            if len(rows) == 1:
                return [error]
            return [answer for request in requests for answer in self.answer_alike([request])]
        return [as_json(found[begin:end]) for begin, end in pairwise(accumulate(map(len, rows), initial=0))]


def build(options: Options) -> serve.Application:
    """The application."""
    more = {"request_router_config": {"request_router_class": STICKY}} if options.sticky else {}
    return Replica.options(  # type: ignore[attr-defined]  # the decorator makes a deployment of the class
        num_replicas=options.num_replicas,
        max_ongoing_requests=2 * options.max_batch_size,  # a batch is collected while another one is ranked
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
        **more,
    ).bind(options, mlflow.get_tracking_uri(), json.loads(os.environ.get("SERVING_MODEL_CONFIG") or "{}"))
