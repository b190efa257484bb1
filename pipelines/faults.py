"""Turn infrastructure failures (full disk, lost storage, dead process) into one-line messages.

    error: the disk is full (No space left on device); free some space, then run the
        same command again, which ...

These failures are neither mistakes of the user (`UserError`) nor defects. Exception
classes are compared by name, so this module imports neither Ray nor MLflow.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from functools import partial

from models.storage.tables import UserError

AGAIN = "then run the same command again, which continues from what is finished"

DISK_FULL = re.compile(
    r"no space left on device|disk is full|disk quota exceeded|file too large|PytorchStreamWriter failed|"
    r"unexpected pos \d+ vs",
    re.I,
)
"""Messages of Python, Arrow, SQLite, safetensors and PyTorch about a full disk."""

NO_MEMORY = re.compile(
    r"can't allocate memory|cannot allocate memory|not enough memory|std::bad_alloc|enforce fail at alloc_cpu",
    re.I,
)
"""Messages of PyTorch and C++ about a machine whose memory does not suffice."""

FORBIDDEN = re.compile(r"ACCESS_DENIED|AccessDenied|HTTP response code 403")
"""Messages of Arrow about S3 or GCS refusing a request."""

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
"""Errors of boto3, by which MLflow reads and writes artifacts on S3."""

LOST_PEER = {"DistBackendError", "DistNetworkError", "DistStoreError"}
"""Errors of PyTorch about a lost worker or store of the process group. Errors of NCCL
are among them."""

GLOO_LOST_PEER = re.compile(r"^\[\S*/gloo/\S*\] *(.*?)(?:\. This is typically|$)")
"""Message of gloo about a worker that it exchanges gradients with."""

LOST_RAY = {"RaySystemError", "GetTimeoutError", "RpcError"}
"""Errors of Ray about a cluster that does not answer."""

NODE = re.compile(r"\[Node ([^\]\s]+)\]|\bip[=:] ?(\d+(?:\.\d+){3})")
"""Node in errors of Ray's runtime-environment agent, of tasks and of actors."""

PATH = re.compile(r"(?:No space left on device|Disk quota exceeded):? '([^']+)'")
"""File in the text of an OSError."""


def iter_causes(
    error: BaseException | None, handled: bool = False
) -> Iterator[BaseException]:
    """Yield an error and the errors that it was raised from, also through errors of Ray that carry others.

    With `handled`, errors that were being handled when one was raised are included.
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
        if handled:
            queue.append(current.__context__)
        queue += [
            getattr(current, "cause", None),
            getattr(current, "controller_failure", None),
            getattr(current, "health_check_failure", None),
            getattr(current, "_base_exc", None),
            *getattr(current, "worker_failures", {}).values(),
        ]


def find_user_error(error: BaseException | None) -> UserError | None:
    """Return the UserError behind a failed Ray task, actor or training worker, or None."""
    for current in iter_causes(error, handled=True):
        if isinstance(current, UserError):
            # an error of a Ray task is of its cause's class too
            cause = getattr(current, "cause", None)
            return cause if isinstance(cause, UserError) else current
    return None


def explain(error: BaseException) -> str | None:
    """Return one line with the cause and the remedy, or None if the error is no fault of the machines."""
    # the text of a RayTaskError is a traceback; its cause has the message
    errors = [
        current
        for current in iter_causes(error)
        if "RayTaskError" not in class_names(current)
    ]
    for explain_cause in (
        partial(explain_full_disk, root=error),
        explain_loss,
        explain_connection,
    ):
        for current in errors:
            if line := explain_cause(current):
                return f"{line}, {AGAIN}"
    return None


def explain_full_disk(error: BaseException, root: BaseException) -> str | None:
    """Return a line about a full disk, with its node and path if `root` or one of its causes names them."""
    if not is_disk_full(error):
        return None
    text = "\n".join(map(str, iter_causes(root)))
    node = NODE.search(text)
    path = PATH.search(text)
    file = getattr(error, "filename", None) or (path and path[1])
    where = f" on node {node[1] or node[2]}" if node else ""
    if file:
        where += f" at {file}"
    lines = [" ".join(line.split()) for line in str(error).splitlines()]
    reasons = [line for line in lines if DISK_FULL.search(line)]
    reason = reasons[0] if reasons else first_line(error)
    return f"the disk is full{where} ({reason[:200]}); free some space"


def explain_loss(error: BaseException) -> str | None:
    """Return a line about a lost process or service, or about memory that does not suffice."""
    line = first_line(error)
    names = class_names(error)
    if is_gpu_memory_short(error):
        return (
            f"the GPU's memory does not suffice ({line}); use smaller batches, a smaller model, or in a training "
            f"more workers, which share each batch"
        )
    if is_memory_short(error):
        return (
            f"the memory does not suffice ({line}); use smaller batches, a smaller model, fewer workers on a node or "
            f"nodes with more memory"
        )
    if "OutOfMemoryError" in names:
        return (
            f"the memory ran out and Ray ended a process ({line}); use fewer workers or smaller "
            f"batches"
        )
    if "MlflowException" in names:
        return f"MLflow fails ({line}); see that its store can be reached"
    gloo = GLOO_LOST_PEER.match(line)
    if gloo or names & LOST_PEER:
        reason = gloo[1] if gloo else line
        return f"a training worker lost another one ({reason}); see that the machines are well"
    if names & BOTO:
        return f"S3 fails ({line}); see that it can be reached and the credentials are right"
    if names & LOST_PROCESS:
        return f"a process of Ray was lost ({describe_lost_process(error)}); see that the machines are well"
    return None


def explain_connection(error: BaseException) -> str | None:
    """Return a line about a lost connection or a file that cannot be read or written."""
    line = first_line(error)
    if class_names(error) & LOST_RAY:
        return f"Ray is not there any more ({line}); see that it runs"
    if isinstance(error, ConnectionError | TimeoutError):
        return f"a connection failed ({line}); see that what it leads to runs"
    if isinstance(error, OSError):
        file = f"{error.filename}: " if error.filename else ""
        return (
            f"a file cannot be read or written ({file}{error.strerror or line}); see that the storage is there and "
            f"may be written"
        )
    return None


def is_permanent(error: BaseException) -> bool:
    """Return whether the same error would come again at once, so that a retry is useless."""
    checks = (is_disk_full, is_forbidden, is_gpu_memory_short, is_memory_short)
    return find_user_error(error) is not None or any(
        check(current) for current in iter_causes(error) for check in checks
    )


def is_gpu_memory_short(error: BaseException) -> bool:
    """Return whether a model or its batch does not fit on a GPU. Ray has an error of the same name as PyTorch's."""
    is_torch = type(error).__module__.startswith("torch")
    return is_torch and "OutOfMemoryError" in class_names(error)


def is_memory_short(error: BaseException) -> bool:
    """Return whether a process got no memory from its machine."""
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
    is_of_a_write = "RayTaskError" not in names and not isinstance(error, UserError)
    return is_of_a_write and bool(DISK_FULL.search(str(error)))


def is_forbidden(error: BaseException) -> bool:
    """Return whether a storage refuses the request for good."""
    if not isinstance(error, OSError):
        return False
    numbers = (errno.EACCES, errno.EPERM, errno.EROFS)
    return error.errno in numbers or bool(FORBIDDEN.search(str(error)))


def class_names(error: BaseException) -> set[str]:
    """Return the names of the error's class and of its base classes."""
    return {kind.__name__ for kind in type(error).__mro__}


def first_line(error: BaseException) -> str:
    """Return the first line of the error's text that is not empty, at most 200 characters, else its class name."""
    for line in str(error).splitlines():
        if words := line.split():
            return " ".join(words)[:200]
    return type(error).__name__


def describe_lost_process(error: BaseException) -> str:
    """Return the class of a lost actor and the reason, as far as Ray knows them."""
    text = " ".join(str(error).split())
    actor = re.search(r"class_name: (\w+)", text)
    detail = re.search(
        r"Worker exit detail: (.*?)(?: There are some potential root causes|$)", text
    )
    reason = detail[1].rstrip(".") if detail else first_line(error)
    return f"{actor[1]}: {reason}"[:250] if actor else reason[:250]
