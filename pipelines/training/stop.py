"""Request to stop this process, which a training answers by saving a checkpoint.

The signal handler of `jobs.cli` calls `request`. Inside `defer_to_loop()` the training
loop reads the request after its current step; elsewhere the handler raises
KeyboardInterrupt.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class StopRequest:
    """A request to stop this process, and whether a training loop reads it."""

    def __init__(self) -> None:
        self.requested = False
        self._is_deferred = False

    def request(self) -> bool:
        """Record the request, and return whether a training loop will read it."""
        self.requested = True
        return self._is_deferred

    @contextmanager
    def defer_to_loop(self) -> Iterator[None]:
        """Leave a stop request to the training loop while the block runs.

        The loop reads `requested`; no KeyboardInterrupt is raised.
        """
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False


STOP_REQUEST = StopRequest()
"""The request of this process."""
