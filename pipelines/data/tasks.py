"""Ray tasks, one per file or part: submitted a few at a time, so that a long table needs no long queue."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import ray

from models.tables import UserError


def run_tasks(
    function: Callable[..., Any], calls: Iterable[tuple[Any, ...]], num_returns: int = 1
) -> Iterator[tuple[int, Any]]:
    """Runs `function(*call)` for every call as a Ray task; yields (number of the call, result) as they end.

    With more than one return the result is (the first, references to the others, which stay in Ray's
    object store). A UserError of a task is raised as it was; the other tasks have then ended.
    """
    remote: Any = ray.remote(num_returns=num_returns)(function)
    pending: dict[ray.ObjectRef, tuple[int, list[ray.ObjectRef]]] = {}

    def next_result() -> tuple[int, Any]:
        [done], _ = ray.wait(list(pending), num_returns=1)
        number, others = pending[done]
        result = fetch(done)
        del pending[done]
        return number, (result, *others) if others else result

    try:
        for number, call in enumerate(calls):
            first, *others = remote.remote(*call) if num_returns > 1 else [remote.remote(*call)]
            pending[first] = number, others
            if len(pending) >= in_flight():
                yield next_result()
        while pending:
            yield next_result()
    finally:
        stop([ref for first, (_, others) in pending.items() for ref in (first, *others)])


def run_all(function: Callable[..., Any], calls: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Results of `run_tasks` in the order of the calls."""
    return [result for _, result in sorted(run_tasks(function, calls), key=lambda pair: pair[0])]


def in_flight() -> int:
    """How many tasks to have submitted: one that runs and one that waits for each CPU."""
    return 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))


def fetch(ref: ray.ObjectRef) -> Any:
    """The value of a reference; a task's UserError as it was raised there, in one line."""
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise UserError(str(error.cause)) from None
        raise


def quiet_ray_data() -> None:
    """Keeps what Ray Data says of its progress off the terminal, where jobs say how far they are; errors stay."""
    import ray.data  # sets up its logger, so it comes first

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False


def stop(refs: list[ray.ObjectRef]) -> None:
    """Cancels tasks and waits until they have ended, so that none writes a file after its step was given up. All
    that they return is fetched: Ray prints the error of a return that nobody fetches."""
    for ref in refs:
        ray.cancel(ref)
    if refs:
        ray.wait(refs, num_returns=len(refs), fetch_local=False)
    for ref in refs:
        with suppress(Exception):
            ray.get(ref)
