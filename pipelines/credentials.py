"""What URIs hide (`models/uri.py`), told to the workers of the same job through Ray's own key-value store.

It is kept under the job's id, in memory, and taken away when the job ends; configs, tasks and records hold masked URIs
alone.
"""

from __future__ import annotations

import atexit
import json
import sys
from typing import Any

from pyarrow import fs

from models import uri
from models.tables import open_uri

SPACE = b"trieline"

_asked: dict[bytes, list[str]] = {}
"""What a job has told, once it was found."""


def _job() -> bytes | None:
    """Key of this job in Ray's store; None in a process that has no Ray."""
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    return f"credentials:{ray.get_runtime_context().get_job_id()}".encode()


def tell(known: list[str]) -> None:
    """Puts the URIs where the job's workers find them; nothing without secrets, or before Ray is started."""
    job = _job() if known else None
    if job is None:
        return
    from ray.experimental.internal_kv import _internal_kv_put

    told = list(dict.fromkeys([*_told(job), *known]))
    _internal_kv_put(job, json.dumps(told).encode(), overwrite=True, namespace=SPACE)
    atexit.register(_forget, job)


def share() -> None:
    """Tells what was hidden before Ray was started."""
    tell(uri.known())


def ask() -> list[str]:
    """What the job's other processes have told."""
    job = _job()
    if job is None:
        return []
    if not _asked.get(job):
        _asked[job] = _told(job)
    return _asked[job]


def _told(job: bytes) -> list[str]:
    from ray.experimental.internal_kv import _internal_kv_get

    content = _internal_kv_get(job, namespace=SPACE)
    return list(json.loads(content)) if content else []


def _forget(job: bytes) -> None:
    if _job() == job:
        import ray
        from ray.experimental.internal_kv import _internal_kv_del

        if ray.get_runtime_context().worker.mode == ray.SCRIPT_MODE:  # workers end before their job does
            _internal_kv_del(job, namespace=SPACE)


class Reopened(fs.S3FileSystem):
    """An S3 file system that is pickled as its masked URI, and opened again where it is read."""

    place: str
    """The masked URI."""

    def __reduce__(self) -> Any:
        return _reopened, (self.place,)


def _reopened(place: str) -> fs.FileSystem:
    filesystem, _ = open_uri(place)
    if filesystem.type_name != "s3":
        return filesystem
    made = Reopened(**filesystem.__reduce__()[1][0])
    made.place = place
    return made


def storage(place: str) -> dict[str, Any]:
    """`storage_path` and, for a masked URI, `storage_filesystem` of Ray's RunConfig, which Ray writes into its records
    of a run."""
    if uri.real(place) == place:
        return {"storage_path": place}
    return {"storage_path": open_uri(place)[1], "storage_filesystem": _reopened(place)}


uri.tell, uri.ask = tell, ask
