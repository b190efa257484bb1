"""Every use of Ray's private interfaces. Jobs do without the result if a version of Ray has changed one of them.

`models.storage.tables.submission_id` reads one more, an environment variable, because `models` imports no Ray.

Ray 2.60 is supported. Ray 2.59 has the shuffle that prepare uses, but refuses an empty block between two shuffles, which
windowed counts have. All other tests of data and training pass with it (`make test-ray RAY=2.59.0`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import ray

WORKERS = {
    "env_vars": {
        "RAY_DATA_SHUFFLE_MAP_WORKER": "1",
        "RAY_DATA_SHUFFLE_REDUCE_WORKER": "1",
    }
}
"""The environments that Ray Data gives the tasks of its shuffle, as that of a whole Ray: so all tasks share the same
processes, where each kind would start its own: 5 s of starts, which are spared where a log is small. A version with
other ones starts these."""


@contextmanager
def signals_as_they_are() -> Iterator[None]:
    """Keeps Ray, while it starts, from taking SIGTERM: its handler raises SystemExit, which Python drops in places."""
    utils: Any = getattr(getattr(ray, "_private", None), "utils", None)
    theirs = getattr(utils, "set_sigterm_handler", None)
    if theirs:
        utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        if theirs:
            utils.set_sigterm_handler = theirs


def has_autoscaler() -> bool:
    """Return whether an autoscaler starts nodes of this cluster.

    Version 1 reports node types to GCS, and on a cluster without an autoscaler one type per node, `node_ID`. Version 2
    numbers its reports. (The label `ray.io/node-group` says nothing: KubeRay sets it on all pods.)
    """
    with suppress(ImportError, AttributeError, ValueError):
        from ray.experimental.internal_kv import _internal_kv_get

        status = json.loads(_internal_kv_get("__autoscaling_status") or "{}")
        report = status.get("autoscaler_report", {})
        types = {*report.get("active_nodes", {}), *report.get("pending_launches", {})}
        if any(not kind.startswith("node_") for kind in types):
            return True
    with suppress(ImportError, AttributeError, ray.exceptions.RayError):
        from ray.autoscaler.v2.sdk import get_cluster_status

        status = get_cluster_status(ray.get_runtime_context().gcs_address)
        return int(status.stats.autoscaler_version or 0) > 0
    return False


HIDDEN = ("maximum expected startup concurrency", "infeasible resource requests")
"""In warnings that mislead: of processes without a CPU, such as trials that wait for their workers, and of requests
that an autoscaler is about to serve (`pipelines.cluster.check_room` refuses the others)."""


def shorten_raylet_errors() -> None:
    """Print the first line of each error that Ray pushes to the driver, in place of a node's last 20 log lines.

    Both agents of a lost node push those lines. Ray has no option for them; the logs are in the dashboard.
    """
    worker: Any = getattr(getattr(ray, "_private", None), "worker", None)
    print_lines = getattr(worker, "print_to_stdstream", None)
    if print_lines is None or hasattr(print_lines, "shortens"):
        return

    def print_first_line(data: dict[str, Any], *arguments: Any, **options: Any) -> None:
        if data.get("pid") == "raylet":
            lines = [
                first_sentences(text)
                for text in data["lines"]
                if not any(words in text for words in HIDDEN)
            ]
            data = {**data, "lines": lines}
        if data["lines"]:
            print_lines(data, *arguments, **options)

    print_first_line.shortens = True  # type: ignore[attr-defined]
    worker.print_to_stdstream = print_first_line


def first_sentences(text: str) -> str:
    """Return the first line of an error, without the announcement of the log lines that follow it."""
    first = text.strip().partition("\n")[0]
    return first.partition(" Last 20 lines")[0]


def first_answer(address: str, token: str) -> grpc.StatusCode:
    """How the cluster at HOST:PORT answers a client with that token (empty: without), within 10 seconds: `ray.init`
    would wait for minutes where it is refused."""
    try:
        from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc
    except ImportError:
        return grpc.StatusCode.OK
    bearer = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(address) as channel:
        try:
            request = gcs_service_pb2.CheckAliveRequest()  # type: ignore[attr-defined]  # made at import
            gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel).CheckAlive(
                request, 10, bearer
            )
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    return grpc.StatusCode.OK


@contextmanager
def cpp_silenced() -> Iterator[None]:
    """Keep the lines of Ray's C++ off the terminal, such as a warning for each actor of Ray Data about its restart.

    Ray's logs have them too, and failures are raised in Python. What Python writes to stderr is shown.
    """
    sys.stderr.flush()
    before, terminal = sys.stderr, os.dup(2)
    with open(os.devnull, "w") as nothing, os.fdopen(os.dup(2), "w") as ours:
        os.dup2(nothing.fileno(), 2)
        sys.stderr = ours
        try:
            yield
        finally:
            sys.stderr = before
            os.dup2(terminal, 2)
            os.close(terminal)
