"""Serve a registered version by Ray Serve, with the interface of `mlflow models serve`.

    serve run pipelines.serving.ray_serve:build model=models:/searches/1 num_replicas=2

In a config file, `build` is the `import_path` and the fields of `Options` are its
`args` (`deploy/serve.yaml`). Each replica loads the version onto its GPU if it has one;
it uses the values that MLFLOW_TRACKING_URI and SERVING_MODEL_CONFIG have when `build`
is called.

POST /invocations accepts JSON with `dataframe_records` and `params`; /docs has its
schema. A request that the model rejects gets status 400 and a one-line message, a
failure of the server status 500, with details in its log. Waiting requests with the
same params are answered by one call of the model.

If `model` is an alias or models:/NAME/latest, a replica checks the registry for a new
version, loads it while the old version answers, and then switches to it. GET /ping
returns the current version and the result of the last change.
"""

# Serve and FastAPI read the annotations below, so there is no `from __future__ import
# annotations`

import asyncio
import json
import logging
import os
import time
from collections import defaultdict
from itertools import accumulate, chain, pairwise
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any, Literal, NamedTuple

os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")

import mlflow
import ray
from fastapi import FastAPI, HTTPException, Request, Response
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.utils.models import get_model_name_and_version
from pydantic import BaseModel, Field
from ray import serve
from starlette.requests import ClientDisconnect

MAX_BODY_BYTES = 4 * 2**20
"""Largest body of a request."""

BODY_TIMEOUT_S = 5.0
"""Seconds within which the body of a request must arrive."""

MAX_ONGOING_REQUESTS = 1000
"""Requests that a replica reads or answers at once."""

MAX_QUEUED_REQUESTS = 1000
"""Requests that wait for a replica; further requests get the status 503."""


SCHEMA_REFERENCE = (
    "#/paths/~1invocations/post/requestBody/content/application~1json/schema/$defs/"
    "{model}"
)
"""References to the parts of a request's schema."""


class Options(BaseModel, extra="forbid"):
    """Options of the Serve application."""

    model: str
    """Registered version, models:/NAME/VERSION, or an alias to follow:
    models:/NAME@ALIAS or models:/NAME/latest."""
    follow_s: float = Field(default=60, gt=0)
    """Seconds between two checks of the registry for a new version."""
    num_replicas: int | Literal["auto"] = 1
    """Number of processes with the model; `auto` lets Serve scale from 1 to 100."""
    num_cpus: float = 1
    """CPUs of a replica, which is also its number of PyTorch threads."""
    num_gpus: float = 0
    """GPUs of a replica; may be a fraction."""
    max_batch_size: int = Field(default=16, ge=1)
    """Largest number of requests that are ranked together."""
    batch_wait_timeout_s: float = Field(default=0.002, ge=0)
    """Seconds that a request waits for others to be ranked with."""


class ParsedRequest(NamedTuple):
    """The body of a request, and the `ServedModel` that parsed and answers it."""

    model: Any
    body: Any


def resolve_version(model: str) -> str:
    """Return the URI of the version that an alias currently points to.

    Args:
        model: URI of a version or of an alias.
    """
    name, version = get_model_name_and_version(mlflow.MlflowClient(), model)
    return f"models:/{name}/{version}"


async def read_body(request: Request) -> bytearray:
    """Read the body of a request.

    Raises:
        HTTPException: If the body is too large, or incomplete: the client leaves, or
            `BODY_TIMEOUT_S` are over.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise HTTPException(413, f"the limit is {MAX_BODY_BYTES} bytes")
    except (TimeoutError, ClientDisconnect) as error:
        raise HTTPException(408, "the request is incomplete") from error
    return body


def join_lines(error: Exception) -> str:
    """Return the text of an error in one line."""
    return " ".join(str(error).split())


log = logging.getLogger("ray.serve")


@serve.deployment(name="model")
@serve.ingress()
class Replica:
    """Process that answers requests with the model.

    Args:
        options: Options of the application.
        tracking_uri: Tracking URI of the registry.
        settings: Settings of the model, such as its device.
    """

    def __init__(
        self, options: Options, tracking_uri: str, settings: dict[str, Any]
    ) -> None:
        mlflow.set_tracking_uri(tracking_uri)
        if ray.get_runtime_context().get_accelerator_ids()["GPU"]:
            settings = {"device": "cuda", **settings}
        self.settings = settings
        self.version = self.last_seen = resolve_version(options.model)
        self.model = mlflow.pyfunc.load_model(self.version, model_config=settings)
        self.note = f"{self.version} answers"
        self.answer_batched.set_max_batch_size(options.max_batch_size)  # type: ignore[attr-defined]
        self.answer_batched.set_batch_wait_timeout_s(options.batch_wait_timeout_s)  # type: ignore[attr-defined]
        Thread(target=self.follow, args=[options], daemon=True).start()

    def follow(self, options: Options) -> None:
        """Check the registry every `follow_s` seconds, and load new versions."""
        while True:
            time.sleep(options.follow_s)
            try:
                version = resolve_version(options.model)
                if version != self.last_seen:
                    self.note = self.change_to(version)
                    log.info(self.note)
            except Exception as error:  # such as a registry that does not answer
                log.warning(f"{self.version} stays: {join_lines(error)}")

    def change_to(self, version: str) -> str:
        """Load a new version while the current one answers, then switch to it.

        Args:
            version: URI of the version.

        Returns:
            A message with the result.
        """
        with TemporaryDirectory() as folder:
            path = mlflow.artifacts.download_artifacts(version, dst_path=folder)
            self.last_seen = version  # later failures are permanent: no second try
            try:
                model = mlflow.pyfunc.load_model(path, model_config=self.settings)
            except Exception as error:
                return (
                    f"{self.version} stays: {version} cannot be loaded: "
                    f"{join_lines(error)}"
                )
        self.model, self.version = model, version
        return f"{version} answers"

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the app, whose /docs shows the model's requests."""
        app = FastAPI()
        app.get("/ping")(self.ping)
        app.get("/health")(self.ping)
        body_class = self.model.unwrap_python_model().body_class
        schema = body_class.model_json_schema(ref_template=SCHEMA_REFERENCE)
        body = {"content": {"application/json": {"schema": schema}}}
        app.post("/invocations", openapi_extra={"requestBody": body})(self.invocations)
        return app

    async def ping(self) -> dict[str, str]:
        """Return the current version, and the result of the last change."""
        return {"version": self.version, "note": self.note}

    async def invocations(self, request: Request) -> Response:
        """Return the predictions for the rows of a request."""
        served = self.model.unwrap_python_model()
        data = await read_body(request)
        try:
            body = served.read_body(data, request.headers.get("content-type"))
            answer = await self.answer_batched(ParsedRequest(served, body))
            if isinstance(answer, Exception):
                raise answer
        except MlflowException as error:
            return Response(
                error.serialize_as_json(),
                error.get_http_status_code(),
                media_type="application/json",
            )
        return Response(answer, media_type="application/json")

    @serve.batch
    async def answer_batched(
        self, requests: list[ParsedRequest]
    ) -> list[str | Exception]:
        """Answer a batch of requests in a thread, while other requests are parsed.

        Returns:
            The JSON body or the error of each request.
        """
        return await asyncio.to_thread(self.answer, requests)

    def answer(self, requests: list[ParsedRequest]) -> list[str | Exception]:
        """Answer requests with one call per model and params."""
        # the model may change between requests
        groups: dict[tuple[int, str], list[int]] = defaultdict(list)
        for index, (model, body) in enumerate(requests):
            groups[id(model), body.params.model_dump_json()].append(index)
        answers: dict[int, str | Exception] = {}
        for indices in groups.values():
            model = requests[indices[0]].model
            bodies = [requests[index].body for index in indices]
            answers |= zip(indices, answer_together(model, bodies), strict=True)
        return [answers[index] for index in sorted(answers)]


def answer_together(served: Any, bodies: list[Any]) -> list[str | Exception]:
    """Answer requests that have the same params with one call of the model.

    If the call fails, the model is called for each request separately, so that one
    request does not make the others fail.
    """
    rows = [body.dataframe_records for body in bodies]
    try:
        answers = served.answer(list(chain.from_iterable(rows)), bodies[0].params)
    except Exception as error:
        if len(rows) == 1:
            return [error]
        return [answer_together(served, [body])[0] for body in bodies]
    ends = accumulate(map(len, rows), initial=0)
    return [
        json.dumps({"predictions": answers[begin:end]}) for begin, end in pairwise(ends)
    ]


def build(options: Options) -> serve.Application:
    """Build the Serve application."""
    settings = json.loads(os.environ.get("SERVING_MODEL_CONFIG") or "{}")
    # mypy does not see that the decorator turns the class into a deployment
    deployment = Replica.options(  # type: ignore[attr-defined]
        num_replicas=options.num_replicas,
        # many more than a batch, as bodies that arrive slowly count too
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        max_queued_requests=MAX_QUEUED_REQUESTS,
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
    )
    return deployment.bind(options, mlflow.get_tracking_uri(), settings)
