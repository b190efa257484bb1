"""Count the workers that fit on the nodes of a Ray cluster.

check_room(workers=4, needs={"CPU": 1, "GPU": 1})
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import ray

from core.errors import UserError, pluralize


def count_room(needs: Mapping[str, float]) -> int:
    """Return how many workers the living nodes can run at once if nothing else runs.

    Args:
        needs: Resources of one worker, such as {"CPU": 1}.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    amounts = {kind: amount for kind, amount in needs.items() if amount}
    return sum(
        min(int(node.get(kind, 0) / amount) for kind, amount in amounts.items())
        for node in nodes
    )


def may_grow() -> bool:
    """Return whether nodes may join: on a cluster, but not on a local Ray."""
    return bool(os.environ.get("RAY_ADDRESS"))


def check_room(workers: int, needs: Mapping[str, float]) -> None:
    """Refuse workers that do not fit a local Ray; warn if a cluster lacks room."""
    room = count_room(needs)
    if room >= workers:
        return
    problem = (
        f"{pluralize(workers, 'worker')} with {dict(needs)} for each do not fit: "
        f"there is room for {room}"
    )
    if not may_grow():
        raise UserError(problem)
    warnings.warn(f"{problem}; the job waits until nodes join", stacklevel=2)


@contextmanager
def silence_cpp_log() -> Iterator[None]:
    """Keep log lines of Ray's C++ code off the terminal while the block runs.

    Ray's log files have the lines, and failures are raised in Python. Python's output
    to stderr is still printed. The variable RAY_BACKEND_LOG_LEVEL is no alternative: it
    prints a line about itself in every job.
    """
    sys.stderr.flush()
    original = sys.stderr
    terminal = os.dup(2)
    with open(os.devnull, "w") as nothing, os.fdopen(os.dup(2), "w") as python_stderr:
        os.dup2(nothing.fileno(), 2)
        sys.stderr = python_stderr
        try:
            yield
        finally:
            sys.stderr = original
            os.dup2(terminal, 2)
            os.close(terminal)
