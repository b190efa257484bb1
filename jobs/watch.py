"""Watches over a local Ray: a driver waits for ever for a raylet or a GCS that is gone, so the job ends with one line.

It ends as if it had been killed: whatever jobs write is whole or invisible, and the next start goes on from it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading

import psutil
import ray

from pipelines.faults import AGAIN

PARTS = ("raylet", "gcs_server")
"""Processes without which nothing goes on."""


def watch(every: float = 1.0) -> None:
    """Starts a thread that looks every so many seconds whether the processes of the Ray started here are there."""
    parts = {child.name(): child for child in psutil.Process().children() if child.name() in PARTS}
    over = threading.Event()
    atexit.register(over.set)

    def work() -> None:
        while not over.wait(every) and ray.is_initialized():
            gone = [name for name, process in parts.items() if not alive(process)]
            if gone and not over.wait(2 * every) and ray.is_initialized():  # not as Ray is being shut down
                end(gone[0])

    threading.Thread(target=work, daemon=True, name="watch").start()


def alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def end(name: str) -> None:
    """Says what is gone, ends what is left of this Ray, and the job with exit code 1."""
    print(
        f"error: Ray's process {name} is gone, killed or out of memory; see that the machine is well, {AGAIN}",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.kill()
    os._exit(1)
