"""Join the Ray cluster at RAY_ADDRESS, or start a local Ray.

The module imports Ray when Ray starts, so that commands print their first line early.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from types import FrameType
from typing import NoReturn

from core.errors import UserError, one_line
from core.options import refuse_secrets

STOPPED = "stopped; the same command again keeps the finished work and continues\n"
"""Message of a command that SIGINT (Ctrl-C, exit code 130) or SIGTERM (143) stops."""

TRACEBACK = "TRIELINE_TRACEBACK"
"""Environment variable that shows tracebacks and, on a cluster, the workers' output."""

MAX_START_ATTEMPTS = 3
"""Attempts to start a local Ray. Ray gives its processes 30 s, too little on a busy
machine."""

SHUFFLE_ENV = {
    "env_vars": {
        "RAY_DATA_SHUFFLE_MAP_WORKER": "1",
        "RAY_DATA_SHUFFLE_REDUCE_WORKER": "1",
    }
}
"""Runtime environment with the variables that Ray Data sets for the tasks of its
shuffle.

Ray starts separate processes for each environment. If all tasks have this environment,
they share processes, which saves 5 s of process starts for a small log. With a version
of Ray that sets other variables, only this saving is lost.
"""


def start_ray(num_cpus: int | None = None) -> None:
    """Connect to the cluster at RAY_ADDRESS, or start a local Ray if it is unset.

    Other Ray instances on this machine are never joined. A local Ray listens on
    loopback only.

    Args:
        num_cpus: CPUs of a local Ray; by default all CPUs of the machine.
    """
    say_loading("ray")
    import ray

    if ray.is_initialized():
        return
    # Python drops exceptions that signal handlers raise during a fork, so while Ray's
    # processes start, a signal ends this process at once.
    old_handlers = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            old_handlers[number] = signal.signal(number, leave)
    try:
        if address := os.environ.get("RAY_ADDRESS"):
            join_cluster(address)
        else:
            start_local_ray(num_cpus)
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


def start_local_ray(num_cpus: int | None) -> None:
    """Start a Ray on this machine; on a busy machine a first attempt may time out."""
    import ray

    for attempt in range(1, MAX_START_ATTEMPTS + 1):
        try:
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                logging_level=logging.WARNING,
                log_to_driver=False,
                runtime_env=SHUFFLE_ENV,
            )
            return
        except Exception as error:  # ray.init raises a bare Exception on a timeout
            ray.shutdown()
            reason = one_line(error)
            if attempt == MAX_START_ATTEMPTS:
                raise UserError(f"a local Ray did not start ({reason})") from error
            print(f"note: a local Ray did not start ({reason}); starting it again")


def join_cluster(address: str) -> None:
    """Connect to a running cluster."""
    import ray

    refuse_secrets(address, "RAY_ADDRESS")
    try:
        if address not in ("auto", "local"):
            # Ray itself waits for minutes
            host, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        # The dashboard shows the workers' output. Messages for the user are reported
        # to the driver.
        ray.init(
            log_to_driver=bool(os.environ.get(TRACEBACK)), logging_level=logging.WARNING
        )
    except (ray.exceptions.RayError, OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"cannot join the Ray cluster at RAY_ADDRESS={address} ({one_line(error)})"
        ) from error


def leave(number: int, frame: FrameType | None = None) -> NoReturn:
    """End the process at once, with the exit code of the signal."""
    os.write(2, STOPPED.encode())
    os._exit(128 + number)


def set_ray_defaults() -> None:
    """Set the environment of a local Ray. Ray reads it when `ray` is imported."""
    if os.environ.get("RAY_ADDRESS"):
        return
    # Require a token, so that other users of the machine cannot connect.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    # With this value Ray takes 127.0.0.1 as the address of the node, and all of its
    # servers listen there, the metrics server too. `_node_ip_address="127.0.0.1"` in
    # `ray.init` does not help: Ray replaces it by the machine's external address.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    # Ray's default niceness of 15 leaves its workers 1/28 of a CPU on a busy machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # OpenMP threads that spin while they wait slow other processes down many times.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def say_loading(*packages: str) -> None:
    """Print that packages are being loaded, unless the first one is already imported.

    Imports of large packages take seconds, or a minute on a busy machine.
    """
    if packages[0] not in sys.modules:
        print(f"loading {', '.join(packages)}", file=sys.stderr, flush=True)
