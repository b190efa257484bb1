"""Command-line entry points, one per verb: `python -m jobs.NAME --help`."""

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

STOPPED = "stopped; the same line again goes on from what is finished\n"
"""What a command says that SIGINT (Ctrl-C) or SIGTERM ends; its exit code is then 130 or 143."""


def leave(number: int, frame: FrameType | None = None) -> NoReturn:
    """Ends the process at once."""
    os.write(2, STOPPED.encode())
    os._exit(128 + number)


if (
    sys.argv[:1] == ["-m"]
):  # `python -m jobs.NAME` is on its way: its imports take seconds, and nothing is begun
    signal.signal(signal.SIGINT, leave)
    signal.signal(signal.SIGTERM, leave)

if not os.environ.get(
    "RAY_ADDRESS"
):  # a local Ray is for its user alone; read when ray is imported
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    # Ray's switch for laptops: a node's address is then 127.0.0.1, where all that it starts listens, its metrics too.
    # `ray.init(_node_ip_address="127.0.0.1")` is no way: Ray makes the machine's own address of it.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    # Its workers get as much of a busy machine as any process: Ray's own niceness of 15 leaves them one part in 28.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Threads that wait sleep: beside other processes, spinning ones take many times the time of the work itself.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
