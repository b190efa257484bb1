"""All that is asked of Ray beside its public interface. Where a version of Ray answers otherwise, jobs do without it.

Supported is Ray 2.60, the newest at this time. 2.59 has the shuffle that prepare uses, but refuses an empty block
between two of them, as windowed counts have; all other tests of data and training pass (`make test-ray RAY=2.59.0`).
"""

from __future__ import annotations

import json
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


def node_types() -> set[str]:
    """The types of nodes that the cluster's autoscaler starts; empty where there is none, or it does not say."""
    with suppress(ImportError, AttributeError, ValueError):
        from ray.experimental.internal_kv import _internal_kv_get

        status = json.loads(_internal_kv_get("__autoscaling_status") or "{}").get(
            "autoscaler_report", {}
        )
        return {*status.get("active_nodes", {}), *status.get("pending_launches", {})}
    return set()


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
