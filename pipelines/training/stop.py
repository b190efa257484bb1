"""Request to stop this process, which a training answers by saving a checkpoint.

The signal handler of `jobs.cli` calls `request`. Inside `defer_to_loop()` the training
loop reads the request after its current step; elsewhere the handler raises
KeyboardInterrupt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StopRequest:
    """A request to stop this process, and whether a training loop reads it."""

    def __init__(self) -> None:
        self.requested = False
        self._is_deferred = False
        self._callback: Callable[[], None] | None = None

    def request(self) -> bool:
        """Record the request, and return whether a training loop will read it."""
        self.requested = True
        if self._callback:
            self._callback()
        return self._is_deferred

    @contextmanager
    def call_on_request(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call a function at once if a stop is requested while the block runs.

        A signal handler calls the function, so it must not wait.
        """
        self._callback = callback
        try:
            yield
        finally:
            self._callback = None

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
