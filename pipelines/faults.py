"""Find the causes of errors that Ray and MLflow wrap in errors of their own.

Exception classes are compared by name, so this module imports neither Ray nor MLflow.
"""

from __future__ import annotations

from collections.abc import Iterator

from core.errors import UserError, one_line

LIBRARIES = {"ray", "mlflow", "torch", "sqlite3", "botocore", "boto3", "concurrent"}
"""Libraries whose errors report a lost process, storage or service."""


def iter_causes(
    error: BaseException | None, include_context: bool = False
) -> Iterator[BaseException]:
    """Yield an error and its causes, including causes in attributes of Ray's errors.

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
        # the error of a Ray task is an instance of its cause's class too
        if isinstance(current, UserError) and isinstance(current.cause, str):
            return current
    return None


def explain(error: BaseException) -> str | None:
    """Return the message of a failure of the machine or of a service in one line.

    Returns:
        The message of the last cause; None for any other error, which is a bug.
    """
    cause = list(iter_causes(error))[-1]
    library = type(cause).__module__.partition(".")[0]
    if isinstance(cause, OSError | MemoryError) or library in LIBRARIES:
        return one_line(cause)
    return None
