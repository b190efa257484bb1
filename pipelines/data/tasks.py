"""Ray tasks, one per file or part: submitted a few at a time, so that a long table needs no long queue."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import ray


def run_tasks(function: Callable[..., Any], calls: Iterable[tuple[Any, ...]]) -> Iterator[tuple[int, Any]]:
    """Runs `function(*call)` for every call as a Ray task; yields (number of the call, result) as they end."""
    remote = ray.remote(function)
    limit = 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))
    pending: dict[ray.ObjectRef, int] = {}
    for number, call in enumerate(calls):
        pending[remote.remote(*call)] = number
        if len(pending) >= limit:
            yield _next(pending)
    while pending:
        yield _next(pending)


def _next(pending: dict[ray.ObjectRef, int]) -> tuple[int, Any]:
    [done], _ = ray.wait(list(pending), num_returns=1)
    return pending.pop(done), ray.get(done)


def run_all(function: Callable[..., Any], calls: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Results of `run_tasks` in the order of the calls."""
    return [result for _, result in sorted(run_tasks(function, calls), key=lambda pair: pair[0])]
