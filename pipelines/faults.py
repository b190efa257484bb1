"""What has befallen the machines, in one line: a disk that is full, a storage or a process that is gone.

    error: the disk is full (No space left on device); free some space, then run the same line again: it goes on ...

These are neither the user's mistakes (`UserError`) nor defects. Classes are told by their names, so that nothing of Ray
or MLflow is imported here.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

from models.storage.tables import UserError

AGAIN = "then run the same line again, which goes on from what is finished"

FULL = re.compile(
    r"no space left on device|disk is full|disk quota exceeded|file too large|PytorchStreamWriter failed|"
    r"unexpected pos \d+ vs",
    re.I,
)
"""What a full disk says through Python, Arrow, SQLite, safetensors and PyTorch."""

NO_MEMORY = re.compile(
    r"can't allocate memory|cannot allocate memory|not enough memory|std::bad_alloc|enforce fail at alloc_cpu",
    re.I,
)
"""How PyTorch and C++ report that this machine's memory does not suffice."""

FORBIDDEN = re.compile(r"ACCESS_DENIED|AccessDenied|HTTP response code 403")
"""What Arrow says where S3 or GCS refuses."""

DEAD = {
    "RayActorError",
    "ActorDiedError",
    "ActorUnavailableError",
    "WorkerCrashedError",
    "NodeDiedError",
    "LocalRayletDiedError",
    "ObjectLostError",
    "OwnerDiedError",
    "WorkerHealthCheckTimeoutError",
}
"""Ray's errors where a process or a node was lost."""

BOTO = {"BotoCoreError", "ClientError", "Boto3Error"}
"""Errors of boto3, by which MLflow reads and writes artifacts on S3."""

LOST_PEER = {"DistBackendError", "DistNetworkError", "DistStoreError"}
"""PyTorch's errors where a worker, or what they meet by, is gone; NCCL's errors are among them."""

PEER = re.compile(r"^\[\S*/gloo/\S*\] *(.*?)(?:\. This is typically|$)")
"""What a training worker says where another one is gone that it sums gradients with."""

UNREACHED = {"RaySystemError", "GetTimeoutError", "RpcError"}
"""Ray's errors where Ray itself is gone."""


def causes(
    error: BaseException | None, handled: bool = False
) -> Iterator[BaseException]:
    """An error and what it was raised from, through the errors of Ray that carry others; with `handled` also what was
    being handled when one was raised."""
    seen: set[int] = set()
    stack: list[BaseException | None] = [error]
    while stack:
        current = stack.pop(0)
        if not isinstance(current, BaseException) or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        stack += [current.__cause__, current.__context__ if handled else None]
        stack += [
            getattr(current, name, None)
            for name in ("cause", "controller_failure", "health_check_failure")
        ]
        stack += [
            getattr(current, "_base_exc", None),
            *getattr(current, "worker_failures", {}).values(),
        ]


def user_error_in(error: BaseException | None) -> UserError | None:
    """The UserError that a Ray task, actor or training worker failed with, if that is what happened."""
    for one in causes(error, handled=True):
        if isinstance(one, UserError):
            cause = getattr(one, "cause", None)  # ray's RayTaskError poses as its cause
            return cause if isinstance(cause, UserError) else one
    return None


def explain(error: BaseException) -> str | None:
    """One line with the cause and the remedy; None for what is no fault of the machines."""
    found = [
        one for one in causes(error) if "RayTaskError" not in names(one)
    ]  # its text is a traceback
    for one in found:
        if is_full(one):
            return f"{describe_full_disk(one, error)}; free some space, {AGAIN}"
    for one in found:
        if is_gpu_too_small(one):
            return (
                f"the GPU's memory does not suffice ({first_line(one)}); use smaller batches, a smaller model, "
                f"or in a training more workers, which share each batch, {AGAIN}"
            )
        if is_memory_too_small(one):
            return (
                f"the memory does not suffice ({first_line(one)}); use smaller batches, a smaller model, fewer "
                f"workers on a node or nodes with more memory, {AGAIN}"
            )
        if "OutOfMemoryError" in names(one):
            return (
                f"the memory ran out and Ray ended a process ({first_line(one)}); use fewer workers or smaller "
                f"batches, {AGAIN}"
            )
        if "MlflowException" in names(one):
            return f"MLflow fails ({first_line(one)}); see that its store can be reached, {AGAIN}"
        if names(one) & LOST_PEER:
            return f"a training worker lost another one ({first_line(one)}); see that the machines are well, {AGAIN}"
        if gone := PEER.match(first_line(one)):
            return f"a training worker lost another one ({gone[1]}); see that the machines are well, {AGAIN}"
        if names(one) & BOTO:
            return f"S3 fails ({first_line(one)}); see that it can be reached and the credentials are right, {AGAIN}"
        if names(one) & DEAD:
            return f"a process of Ray was lost ({lost(one)}); see that the machines are well, {AGAIN}"
    for one in found:
        if names(one) & UNREACHED:
            return f"Ray is not there any more ({first_line(one)}); see that it runs, {AGAIN}"
        if isinstance(one, ConnectionError | TimeoutError):
            return f"a connection failed ({first_line(one)}); see that what it leads to runs, {AGAIN}"
        if isinstance(one, OSError):
            where = f"{one.filename}: " if one.filename else ""
            return (
                f"a file cannot be read or written ({where}{one.strerror or first_line(one)}); see that the storage "
                f"is there and may be written, {AGAIN}"
            )
    return None


NODE = re.compile(r"\[Node ([^\]\s]+)\]|\bip[=:] ?(\d+(?:\.\d+){3})")
"""A node in errors of Ray: of its runtime-environment agent, and of tasks and actors."""

PATH = re.compile(r"(?:No space left on device|Disk quota exceeded):? '([^']+)'")
"""A file in the text of an OSError."""


def describe_full_disk(full: BaseException, error: BaseException) -> str:
    """Return a message about a full disk, with its node and path where the error or its causes name them."""
    text = "\n".join(map(str, causes(error)))
    node, path = NODE.search(text), PATH.search(text)
    where = f" on node {node[1] or node[2]}" if node else ""
    if file := getattr(full, "filename", None) or (path and path[1]):
        where += f" at {file}"
    lines = [" ".join(line.split()) for line in str(full).splitlines()]
    reason = next((line for line in lines if FULL.search(line)), first_line(full))
    return f"the disk is full{where} ({reason[:200]})"


def lasting(error: BaseException) -> bool:
    """Return whether the same would happen again at once: trying again is for what was lost."""
    permanent = (is_full, is_closed, is_gpu_too_small, is_memory_too_small)
    return user_error_in(error) is not None or any(
        check(one) for one in causes(error) for check in permanent
    )


def is_gpu_too_small(error: BaseException) -> bool:
    """Return whether a model or its batch does not fit on a GPU: PyTorch's error is named as one of Ray's."""
    is_torch = type(error).__module__.startswith("torch")
    return is_torch and "OutOfMemoryError" in names(error)


def is_memory_too_small(error: BaseException) -> bool:
    """Return whether a process got no memory from its machine."""
    text = isinstance(error, RuntimeError) and NO_MEMORY.search(first_line(error))
    return isinstance(error, MemoryError) or bool(text)


def is_full(error: BaseException) -> bool:
    """Whether a disk has no room."""
    full = isinstance(error, OSError) and error.errno in (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
    )
    raised_by_a_write = "RayTaskError" not in names(error) and not isinstance(
        error, UserError
    )
    return (
        full
        or "OutOfDiskError" in names(error)
        or bool(raised_by_a_write and FULL.search(str(error)))
    )


def is_closed(error: BaseException) -> bool:
    """Whether a storage may not be written."""
    closed = isinstance(error, OSError) and error.errno in (
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
    )
    return closed or bool(isinstance(error, OSError) and FORBIDDEN.search(str(error)))


def names(error: BaseException) -> set[str]:
    """Names of the error's class and of those that it is one of."""
    return {kind.__name__ for kind in type(error).__mro__}


def first_line(error: BaseException) -> str:
    """The first line that says something, cut to 200 characters; of a library's class without words, its name."""
    lines = [" ".join(line.split()) for line in str(error).splitlines()]
    return next((line for line in lines if line), type(error).__name__)[:200]


def lost(error: BaseException) -> str:
    """Which process was lost, and what Ray knows of it."""
    text = " ".join(str(error).split())
    who = re.search(r"class_name: (\w+)", text)
    why = re.search(
        r"Worker exit detail: (.*?)(?: There are some potential root causes|$)", text
    )
    said = why.group(1).rstrip(".") if why else first_line(error)
    return f"{who.group(1)}: {said}"[:250] if who else said[:250]
