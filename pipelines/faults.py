"""Turn infrastructure failures (full disk, lost process) into one-line messages.

    error: the disk is full (No space left on device); free some space, then run the
        same command again, which ...

These failures are neither mistakes of the user (`UserError`) nor bugs. Exception
classes are compared by name, so this module imports neither Ray nor MLflow.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from functools import partial

from models.error_text import MAX_REASON_CHARS, first_line
from models.storage.tables import UserError

RETRY_ADVICE = "then run the same command again, which keeps the finished work"

DISK_FULL = re.compile(
    r"no space left on device|disk is full|disk quota exceeded|file too large|"
    r"PytorchStreamWriter failed|unexpected pos \d+ vs",
    re.I,
)
"""Messages of Python, Arrow, SQLite, safetensors and PyTorch about a full disk."""

NO_MEMORY = re.compile(
    r"can't allocate memory|cannot allocate memory|not enough memory|std::bad_alloc|"
    r"enforce fail at alloc_cpu",
    re.I,
)
"""Messages of PyTorch and C++ about a machine without enough memory."""

FORBIDDEN = re.compile(r"ACCESS_DENIED|AccessDenied|HTTP response code 403")
"""Messages of Arrow about a request that S3 or GCS rejects."""

LOST_PROCESS = {
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
"""Errors of Ray about a lost process or node."""

BOTO = {"BotoCoreError", "ClientError", "Boto3Error"}
"""Errors of boto3, which MLflow uses for artifacts on S3."""

LOST_PEER = {"DistBackendError", "DistNetworkError", "DistStoreError"}
"""Errors of PyTorch about a lost worker or store of the process group, including those
of NCCL."""

GLOO_LOST_PEER = re.compile(r"^\[\S*/gloo/\S*\] *(.*?)(?:\. This is typically|$)")
"""Message of gloo about a lost worker."""

LOST_RAY = {"RaySystemError", "GetTimeoutError", "RpcError"}
"""Errors of Ray about a cluster that does not answer."""

NODE = re.compile(r"\[Node ([^\]\s]+)\]|\bip[=:] ?(\d+(?:\.\d+){3})")
"""Node in the errors of Ray's runtime-environment agent, of tasks and of actors."""

PATH = re.compile(r"(?:No space left on device|Disk quota exceeded):? '([^']+)'")
"""Path of the file in the text of an OSError."""

SETUP = "Failed to set up runtime environment"
"""Message of Ray if it could not prepare the environment of a job's processes on a
node."""


def iter_causes(
    error: BaseException | None, include_context: bool = False
) -> Iterator[BaseException]:
    """Yield an error and its causes, including those in attributes of Ray's errors.

    Args:
        error: The error; None yields nothing.
        include_context: Whether to follow `__context__` too, the error that was being
            handled when another was raised.
    """
    visited: set[int] = set()
    queue: list[BaseException | None] = [error]
    while queue:
        current = queue.pop(0)
        if not isinstance(current, BaseException) or id(current) in visited:
            continue
        visited.add(id(current))
        yield current
        queue.append(current.__cause__)
        if include_context:
            queue.append(current.__context__)
        queue += [
            getattr(current, "cause", None),
            getattr(current, "controller_failure", None),
            getattr(current, "health_check_failure", None),
            getattr(current, "_base_exc", None),
            *getattr(current, "worker_failures", {}).values(),
        ]


def find_user_error(error: BaseException | None) -> UserError | None:
    """Return the UserError that caused the failure of a task or worker, or None."""
    for current in iter_causes(error, include_context=True):
        if isinstance(current, UserError):
            # the error of a Ray task is an instance of its cause's class too
            cause = getattr(current, "cause", None)
            return cause if isinstance(cause, UserError) else current
    return None


def explain(error: BaseException) -> str | None:
    """Return a one-line message about an infrastructure failure, with its remedy.

    Returns:
        The message, or None if the error is not an infrastructure failure.
    """
    # the text of a RayTaskError is a traceback; its cause has the message
    errors = [
        current
        for current in iter_causes(error)
        if "RayTaskError" not in class_names(current)
    ]
    for explain_cause in (
        partial(explain_full_disk, root=error),
        lambda current: explain_memory(current) or explain_loss(current),
        explain_connection,
    ):
        for current in errors:
            message = explain_cause(current)
            if message:
                return f"{message}, {RETRY_ADVICE}"
    return None


def explain_full_disk(error: BaseException, root: BaseException) -> str | None:
    """Return a message about a full disk, with its node and path if they are known.

    Args:
        error: Error to explain.
        root: The error that was raised; its causes can name the node and the path.

    Returns:
        The message, or None if the error is not about a full disk.
    """
    if not is_disk_full(error):
        return None
    text = "\n".join(map(str, iter_causes(root)))
    node = NODE.search(text)
    path = PATH.search(text)
    file = getattr(error, "filename", None) or (path and path[1])
    location = f" on node {node[1] or node[2]}" if node else ""
    remedy = "free some space"
    if file:
        location += f" at {file}"
    if SETUP in text:
        if not file:
            location += " in Ray's temporary folder"
        # Ray's agent on the node repeats the error of an environment that failed
        remedy += " and restart Ray on that node, which else repeats the error"
    lines = [" ".join(line.split()) for line in str(error).splitlines()]
    reasons = [line for line in lines if DISK_FULL.search(line)]
    reason = reasons[0] if reasons else first_line(error)
    return f"the disk is full{location} ({reason[:MAX_REASON_CHARS]}); {remedy}"


def explain_memory(error: BaseException) -> str | None:
    """Return a message about insufficient memory, or None for another error."""
    line = first_line(error)
    if is_gpu_memory_short(error):
        return (
            f"the GPU's memory does not suffice ({line}); use smaller batches, a "
            "smaller model, or in a training more workers, which share each batch"
        )
    if is_memory_short(error):
        return (
            f"the memory does not suffice ({line}); use smaller batches, a smaller "
            "model, fewer workers on a node or nodes with more memory"
        )
    if "OutOfMemoryError" in class_names(error):
        return (
            f"the memory ran out and Ray ended a process ({line}); use fewer workers "
            "or smaller batches"
        )
    return None


def explain_loss(error: BaseException) -> str | None:
    """Return a message about a lost process or service, or None for another error."""
    line = first_line(error)
    names = class_names(error)
    if "MlflowException" in names:
        return f"MLflow fails ({line}); see that its store can be reached"
    gloo = GLOO_LOST_PEER.match(line)
    if gloo or names & LOST_PEER:
        reason = gloo[1] if gloo else line
        return (
            f"a training worker lost another one ({reason}); see that the machines are "
            "well"
        )
    if names & BOTO:
        return (
            f"S3 fails ({line}); see that it can be reached and the credentials are "
            "right"
        )
    if names & LOST_PROCESS:
        return (
            f"a process of Ray was lost ({describe_lost_process(error)}); see that the "
            "machines are well"
        )
    return None


def explain_connection(error: BaseException) -> str | None:
    """Return a message about a lost connection or an inaccessible file, or None."""
    line = first_line(error)
    if class_names(error) & LOST_RAY:
        return f"Ray is not there any more ({line}); see that it runs"
    if isinstance(error, ConnectionError | TimeoutError):
        return f"a connection failed ({line}); see that the service it leads to runs"
    if isinstance(error, OSError):
        file = f"{error.filename}: " if error.filename else ""
        return (
            f"a file cannot be read or written ({file}{error.strerror or line}); see "
            "that the storage is there and may be written"
        )
    return None


def is_permanent(error: BaseException) -> bool:
    """Return whether a retry would fail with the same error."""
    checks = (is_disk_full, is_forbidden, is_gpu_memory_short, is_memory_short)
    return find_user_error(error) is not None or any(
        check(current) for current in iter_causes(error) for check in checks
    )


def is_gpu_memory_short(error: BaseException) -> bool:
    """Return whether a model or its batch does not fit on a GPU.

    Ray has an error of the same name as PyTorch, so the module is checked too.
    """
    is_torch = type(error).__module__.startswith("torch")
    return is_torch and "OutOfMemoryError" in class_names(error)


def is_memory_short(error: BaseException) -> bool:
    """Return whether a process could not allocate memory on its machine."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(NO_MEMORY.search(first_line(error)))


def is_disk_full(error: BaseException) -> bool:
    """Return whether a disk is full."""
    numbers = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if isinstance(error, OSError) and error.errno in numbers:
        return True
    names = class_names(error)
    if "OutOfDiskError" in names:
        return True
    # texts of these errors can quote a message about a full disk
    is_quoting = "RayTaskError" in names or isinstance(error, UserError)
    return not is_quoting and bool(DISK_FULL.search(str(error)))


def is_forbidden(error: BaseException) -> bool:
    """Return whether a storage rejects a request for lack of permission."""
    if not isinstance(error, OSError):
        return False
    numbers = (errno.EACCES, errno.EPERM, errno.EROFS)
    return error.errno in numbers or bool(FORBIDDEN.search(str(error)))


def class_names(error: BaseException) -> set[str]:
    """Return the names of the error's class and of its base classes."""
    return {kind.__name__ for kind in type(error).__mro__}


def describe_lost_process(error: BaseException) -> str:
    """Return the class of a lost actor and the reason, if Ray reports them."""
    text = " ".join(str(error).split())
    actor = re.search(r"class_name: (\w+)", text)
    detail = re.search(
        r"Worker exit detail: (.*?)(?: There are some potential root causes|$)", text
    )
    reason = detail[1].rstrip(".") if detail else first_line(error)
    lost = f"{actor[1]}: {reason}" if actor else reason
    return lost[:MAX_REASON_CHARS]
