"""Request to stop this process: a training saves a checkpoint first, everything else ends at once.

The signal handler of `jobs.cli` calls `request`. Inside `defer_to_loop()` the request
is only noted, for the training loop to read after its current step; elsewhere the
handler raises KeyboardInterrupt.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class StopRequest:
    """Whether this process is to stop, and whether a training loop reads the request."""

    def __init__(self) -> None:
        self.requested = False
        self._awaited = False

    def request(self) -> bool:
        """Note the request. Return whether a training loop will read it."""
        self.requested = True
        return self._awaited

    @contextmanager
    def defer_to_loop(self) -> Iterator[None]:
        """Let a training loop read `requested` while the block runs, instead of an interrupt."""
        self._awaited = True
        try:
            yield
        finally:
            self._awaited = False


STOP_REQUEST = StopRequest()
"""The request of this process."""
