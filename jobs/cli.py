"""The command line that all jobs share: dataclasses to options, errors to one line, Ray started once.

A job is a dataclass of options and a function of it:

    if __name__ == "__main__":
        cli.main(run, Config)
"""

from __future__ import annotations

import gc
import logging
import os
import re
import select
import shlex
import signal
import socket
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

from jobs.options import parse
from models.config import pluralize
from models.storage.tables import UserError
from models.storage.uri import check_buckets_first
from pipelines.faults import explain, find_user_error, first_line
from pipelines.training.stop import STOP_REQUEST

STOPPED = "stopped; the same line again goes on from what is finished\n"
"""Message of a command that SIGINT (Ctrl-C) or SIGTERM ends, with exit code 130 or 143."""

TRACEBACK = "TRIELINE_TRACEBACK"
"""Environment variable that shows tracebacks, and on a cluster all that workers print."""

STARTS = 3
"""How often the start of a local Ray is tried: it gives its processes 30 seconds, which a busy machine may not have."""


def start_ray(num_cpus: int | None = None) -> None:
    """Connects to the cluster that this job was submitted to (RAY_ADDRESS), else starts a local Ray.

    Never joins a Ray that happens to run on this machine. A local one listens on loopback alone.
    """
    say_loading("ray")
    import ray

    from pipelines.ray_inside import keep_sigterm_handler

    if ray.is_initialized():
        return
    main = threading.current_thread() is threading.main_thread()
    # While processes are forked Python drops exceptions, and nothing is begun that is to be let go of: a stop ends it.
    before = (
        {
            number: signal.signal(number, leave)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        if main
        else {}
    )
    try:
        with keep_sigterm_handler():
            _start_ray(num_cpus)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start_ray(num_cpus: int | None) -> None:
    if address := os.environ.get("RAY_ADDRESS"):
        join_cluster(address)
        return
    import ray

    from pipelines.ray_inside import SHUFFLE_ENV

    for attempt in range(1, STARTS + 1):
        try:
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                logging_level=logging.WARNING,
                log_to_driver=False,
                runtime_env=SHUFFLE_ENV,
            )
            break
        except Exception as error:  # Ray raises nothing more special where its processes do not come up in time
            ray.shutdown()
            if attempt == STARTS:
                raise UserError(
                    f"a local Ray did not start ({first_line(error)}); see that the machine has memory, room in /tmp "
                    f"and is not too busy, then run the same line again"
                ) from error
            print(
                f"note: a local Ray did not start ({first_line(error)}); trying again, {attempt + 1} of {STARTS}"
            )


def preflight(**places: str | None) -> None:
    """For a job that was submitted to a cluster (RAY_ADDRESS): joins it, and refuses before any work places, by the
    options that name them, that its other nodes do not reach. Nothing without one: a job starts its own Ray later."""
    if not os.environ.get("RAY_ADDRESS"):
        return
    start_ray()
    from pipelines.cluster import check_paths, check_room

    check_paths(places)
    check_room(1, {"CPU": 1}, "no task can run on it")


def check_cpus(workers: int, each: float, remedy: str) -> None:
    """UserError where the Ray that a job starts here has never room for so many workers of `each` CPUs; a cluster's
    CPUs are known once it is joined."""
    here = os.cpu_count() or 1
    if not os.environ.get("RAY_ADDRESS") and workers > (
        fits := int(here / each) if each else workers
    ):
        raise UserError(
            f"{pluralize(workers, 'worker')} need{'s' * (workers == 1)} {workers * each:g} CPUs, {each:g} CPU for "
            f"each; this machine has {here}, room for {fits}; {remedy}, or submit the job to a cluster "
            f"(docs/cluster.md)"
        )


def join_cluster(address: str) -> None:
    """Connects to a cluster that is there; UserError at once where nobody answers or there is no token."""
    check_address(address)
    check_token(address)
    import ray

    from pipelines.ray_inside import shorten_raylet_errors

    if not os.environ.get(TRACEBACK):
        shorten_raylet_errors()
    try:
        # what workers print stands in the dashboard: what is worth a line here, they tell the job
        ray.init(
            log_to_driver=bool(os.environ.get(TRACEBACK)), logging_level=logging.WARNING
        )
    except (
        ray.exceptions.RayError,
        ConnectionError,
        RuntimeError,
        ValueError,
    ) as error:
        first = " ".join((str(error).splitlines() or [""])[0].split())[:300]
        raise UserError(
            f"cannot join the Ray cluster at RAY_ADDRESS={address} ({first}); check the address, and the cluster's "
            f"token: {TOKEN}"
        ) from error


TOKEN = (
    "make one where the cluster is started (ray get-auth-token --generate), copy it here to ~/.ray/auth_token or into "
    "RAY_AUTH_TOKEN, and export RAY_AUTH_MODE=token"
)
"""What to do where a cluster's token is missing."""


def check_address(address: str) -> None:
    """UserError for a RAY_ADDRESS that is none, or at which nobody answers within seconds."""
    if address in ("auto", "local"):
        return
    shape = re.fullmatch(
        r"(?:ray://)?(\[[0-9a-fA-F:]+\]|[^\s:/@\[\]]+):(\d{1,5})", address
    )
    if shape is None or not 0 < int(shape[2]) < 65536:
        raise UserError(
            f"RAY_ADDRESS={address} is no address of a Ray cluster; give HOST:PORT (6379 by default), "
            f"ray://HOST:10001 or auto, or unset it to start a local Ray"
        )
    try:
        socket.create_connection(
            (shape[1].strip("[]"), int(shape[2])), timeout=5
        ).close()
    except OSError as error:
        raise UserError(
            f"nobody answers at RAY_ADDRESS={address} ({error.strerror or error}); start the cluster, correct the "
            f"address, or unset it to start a local Ray"
        ) from error


def token() -> str:
    """The token of this client, as Ray finds it; empty where there is none."""
    if given := os.environ.get("RAY_AUTH_TOKEN"):
        return given.strip()
    path = Path(
        os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token"
    )
    return path.read_text().strip() if path.is_file() else ""


def check_token(address: str) -> None:
    """UserError where the cluster wants a token and this client has none, or another one: Ray would wait for long.

    Where the environment does not say whether there is authentication, the cluster is asked.
    """
    import grpc

    from pipelines.ray_inside import probe_token

    given, mode = token(), os.environ.get("RAY_AUTH_MODE", "").lower()
    if mode == "token" and not given:
        raise UserError(
            f"there is no token for the Ray cluster at RAY_ADDRESS={address}; {TOKEN}"
        )
    if address in ("auto", "local") or address.startswith("ray://"):
        return
    answer = probe_token(address, given if mode != "disabled" else "")
    if answer in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        what = (
            "another token than this client's"
            if given
            else "a token, and this client has none"
        )
        raise UserError(
            f"the Ray cluster at RAY_ADDRESS={address} wants {what}; {TOKEN}"
        )
    if answer != grpc.StatusCode.OK:
        raise UserError(
            f"what answers at RAY_ADDRESS={address} is no Ray cluster ({answer.name.lower()}); give the address that "
            f"`ray start --head` printed, or unset it to start a local Ray"
        )


_signals: list[int] = []
"""Signals that asked this process to stop."""


def leave(number: int, frame: FrameType | None = None) -> NoReturn:
    """End the process at once, with the exit code of the signal."""
    os.write(2, STOPPED.encode())
    os._exit(128 + number)


def set_ray_defaults() -> None:
    """Set the environment of a local Ray. Ray reads it when `ray` is imported."""
    if os.environ.get("RAY_ADDRESS"):
        return
    # A local Ray is for its user alone.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    # Ray's switch for laptops: a node's address is then 127.0.0.1, where everything
    # that the node starts listens, its metrics too. Ray turns
    # `ray.init(_node_ip_address="127.0.0.1")` into the machine's own address.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    # Ray's own niceness of 15 leaves its workers one part in 28 of a busy machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Waiting threads sleep: beside other processes, spinning threads take many times
    # the time of the work itself.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def catch_signals() -> None:
    """Let SIGINT and SIGTERM stop the job. The first one lets a training save a checkpoint, and is elsewhere a
    KeyboardInterrupt, so that the job lets go of what it holds; a second one ends it at once. So does the first one
    after `GRACE`, as Python drops exceptions in some places."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _interrupt)
        signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, leave)
    signal.signal(signal.SIGTERM, leave)
    _signals.append(number)
    last = threading.Timer(GRACE, leave, [number])
    last.daemon = True
    last.start()
    if not STOP_REQUEST.request():
        raise KeyboardInterrupt


GRACE = 25.0
"""Seconds that a stopped job has for its last words to MLflow: less than the 30 that Kubernetes gives."""


def kept_traceback(error: BaseException) -> str:
    """Where the traceback of an error is that one line stands for: in a file, and on the terminal if TRIELINE_TRACEBACK
    is set."""
    told = "".join(traceback.format_exception(error))
    if os.environ.get(TRACEBACK):
        sys.stderr.write(told)
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="trieline-", suffix=".log", delete=False
        ) as file:
            file.write(told)
        return f" (traceback in {file.name})"
    except OSError:  # there is no room for it
        return " (TRIELINE_TRACEBACK=1 shows the traceback)"


def output_is_read() -> bool:
    """Whether something still reads what is printed; else what is printed from now on goes nowhere."""
    output = select.poll()
    output.register(sys.stdout.fileno(), select.POLLOUT)
    gone = any(event & (select.POLLERR | select.POLLHUP) for _, event in output.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return not gone


def line(module: str, **options: str) -> str:
    """A command to run next, quoted for a shell."""
    return shlex.join(
        [
            "python",
            "-m",
            module,
            *(
                word
                for key, value in options.items()
                for word in (f"--{key}", str(value))
            ),
        ]
    )


def say_loading(*packages: str) -> None:
    """Print which packages are imported next, unless the first one is imported already. Importing them takes seconds,
    on a busy machine a minute."""
    if packages[0] not in sys.modules:
        print(f"loading {', '.join(packages)}", flush=True)


def runs_beside(output: str) -> str:
    """Return the storage to suggest for trainings: `runs`, or on a cluster a folder beside `output`.

    Nodes of a cluster do not share the working folder.
    """
    if not os.environ.get("RAY_ADDRESS"):
        return "runs"
    parent, _, _ = output.rstrip("/").rpartition("/")
    return f"{parent}/runs"


def options_for(job: ModuleType, argv: Sequence[str]) -> Any:
    """The options of a job's module that a command line gives."""
    return job.parse(argv) if hasattr(job, "parse") else parse(job.Config, argv)


def main(
    run: Callable[[Any], Any], config: type, parse_: Callable[[], Any] | None = None
) -> NoReturn:
    """Parses the command line, runs the job, and exits: 0 when done, 1 with one line for a UserError or a fault
    of the machines (`pipelines/faults.py`), 130 and 143 when SIGINT or SIGTERM stopped it, 141 as other commands where
    what reads its output is gone (`| head`).

    `parse_()` is for jobs whose options are more than those of `config`.
    """
    catch_signals()
    set_ray_defaults()
    check_buckets_first()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # for those who watch a file or a pipe
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"  # type: ignore[assignment]
    try:
        run(parse_() if parse_ else parse(config))
        sys.stdout.flush()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(
                number, lambda *_: os._exit(0)
            )  # all is done but for what Python and Ray tidy up
        gc.freeze()  # else the last collection goes through all of PyTorch's and MLflow's objects, for seconds
    except BaseException as error:
        if _signals:  # whatever has become of KeyboardInterrupt on its way
            leave(_signals[0])  # what Ray has started ends with the process
        if not isinstance(error, Exception):
            raise
        if isinstance(error, BrokenPipeError) and not output_is_read():
            sys.exit(141)
        known = find_user_error(error)
        fault = None if known else explain(error)
        if known is None and fault is None:
            traceback.print_exc()
            sys.exit(1)
        # The line says what is wrong; Ray would add the errors of tasks that came to nothing for the same reason.
        os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
        said = known or f"{fault}{kept_traceback(error)}"
        print(f"error: {' '.join(str(said).split())}", file=sys.stderr)
        sys.stderr.flush()
        sys.exit(1)
    sys.exit(0)
