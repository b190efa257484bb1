"""The command line that all jobs share: dataclasses to options, errors to one line, Ray started once.

A job is a dataclass of options and a function of it:

    if __name__ == "__main__":
        cli.main(run, Config)
"""

from __future__ import annotations

import gc
import importlib
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

from jobs.options import parse, read_mapping, say_loading, to_words
from models.config import pluralize
from models.storage.tables import RAY_PACKAGE, UserError
from models.storage.uri import check_buckets_first
from pipelines.faults import explain, find_user_error, first_line
from pipelines.training.stop import STOP_REQUEST

STOPPED = "stopped; the same command again continues from what is finished\n"
"""Message of a command that SIGINT (Ctrl-C) or SIGTERM ends, with exit code 130 or
143."""

TRACEBACK = "TRIELINE_TRACEBACK"
"""Environment variable that shows tracebacks, and on a cluster all that workers
print."""

STARTS = 3
"""Attempts to start a local Ray, which gives its processes 30 seconds; a busy machine
may need longer."""


def start_ray(num_cpus: int | None = None) -> None:
    """Connect to the cluster that this job was submitted to (RAY_ADDRESS), or start a local Ray.

    A Ray that happens to run on this machine is never joined. A local Ray listens on
    loopback alone.
    """
    say_loading("ray")
    import ray

    from pipelines.ray_inside import keep_sigterm_handler

    if ray.is_initialized():
        return
    main = threading.current_thread() is threading.main_thread()
    # Python drops exceptions while it forks processes, so a signal ends this process at
    # once.
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
                    f"and is not too busy, then run the same command again"
                ) from error
            print(
                f"note: a local Ray did not start ({first_line(error)}); trying again, {attempt + 1} of {STARTS}"
            )


def preflight(**places: str | None) -> None:
    """Join the cluster that this job was submitted to, and refuse paths that its other nodes do not reach.

    Does nothing without a cluster (RAY_ADDRESS), as a job starts its own Ray later.

    Args:
        places: Paths by the options that name them.
    """
    if not os.environ.get("RAY_ADDRESS"):
        return
    start_ray()
    from pipelines.cluster import check_paths, check_room

    check_paths(places)
    check_room(1, {"CPU": 1}, "no task can run on it")


def check_cpus(workers: int, each: float, remedy: str) -> None:
    """Raise UserError if a local Ray has no room for the workers.

    The CPUs of a cluster are checked once the job has joined it.

    Args:
        workers: Number of workers.
        each: CPUs of each worker.
        remedy: What the user can do.
    """
    cpus = os.cpu_count() or 1
    room = int(cpus / each) if each else workers
    if os.environ.get("RAY_ADDRESS") or workers <= room:
        return
    need = "needs" if workers == 1 else "need"
    raise UserError(
        f"{pluralize(workers, 'worker')} {need} {workers * each:g} CPUs, {each:g} CPU for each; this machine has "
        f"{cpus}, room for {room}; {remedy}, or submit the job to a cluster (docs/cluster.md)"
    )


def join_cluster(address: str) -> None:
    """Connect to a running cluster; raise UserError at once if nobody answers or the token is missing."""
    check_address(address)
    check_token(address)
    import ray

    from pipelines.ray_inside import shorten_raylet_errors

    if not os.environ.get(TRACEBACK):
        shorten_raylet_errors()
    try:
        # what workers print stands in the dashboard: what is worth a line here, they
        # tell the job
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
"""Remedy for a missing token."""


def check_address(address: str) -> None:
    """Raise UserError for an invalid RAY_ADDRESS, or if nobody answers at it within seconds."""
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


def read_token() -> str:
    """Return this client's token as Ray finds it, or an empty text."""
    if given := os.environ.get("RAY_AUTH_TOKEN"):
        return given.strip()
    path = Path(
        os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token"
    )
    return path.read_text().strip() if path.is_file() else ""


def check_token(address: str) -> None:
    """Raise UserError if the cluster wants another token than this client's, as Ray would wait for long.

    The cluster is asked if the environment does not say whether it authenticates.
    """
    import grpc

    from pipelines.ray_inside import probe_token

    given, mode = read_token(), os.environ.get("RAY_AUTH_MODE", "").lower()
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
    """Let SIGINT and SIGTERM stop the job.

    The first signal lets a training save a checkpoint; elsewhere it raises
    KeyboardInterrupt, so that the job releases its locks. A second signal, or `GRACE`
    seconds after the first one, ends the process at once.
    """
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
"""Seconds that a stopped job has to end its MLflow run: less than the 30 of
Kubernetes."""


def save_traceback(error: BaseException) -> str:
    """Write the traceback of an error to a file, and to stderr if TRIELINE_TRACEBACK is set.

    Returns:
        The end of the error's line, which names the file.
    """
    text = "".join(traceback.format_exception(error))
    if os.environ.get(TRACEBACK):
        sys.stderr.write(text)
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="trieline-", suffix=".log", delete=False
        ) as file:
            file.write(text)
        return f" (traceback in {file.name})"
    except OSError:  # the disk is full
        return " (TRIELINE_TRACEBACK=1 shows the traceback)"


def is_output_closed() -> bool:
    """Return whether the reader of stdout is gone; if so, discard further output."""
    output = select.poll()
    output.register(sys.stdout.fileno(), select.POLLOUT)
    events = [event for _, event in output.poll(0)]
    is_closed = any(event & (select.POLLERR | select.POLLHUP) for event in events)
    if is_closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return is_closed


def line(module: str, **options: str) -> str:
    """Return the command line of a job, quoted for a shell.

    A submitted job runs in a private copy of the user's working directory. Paths in
    this copy are shown relative to it, as the user wrote them.
    """
    words = [shorten_private_path(word) for word in to_words(options)]
    return shlex.join(["python", "-m", module, *words])


def shorten_private_path(word: str) -> str:
    """Return a path in the working directory of a submitted job relative to it.

    Other words are returned unchanged.
    """
    folder = Path.cwd()
    is_private = any(RAY_PACKAGE.fullmatch(part) for part in folder.parts)
    path = Path(word)
    if not is_private or not path.is_relative_to(folder):
        return word
    return str(path.relative_to(folder))


def runs_beside(output: str) -> str:
    """Return the storage to suggest for trainings: `runs`, or on a cluster a folder beside `output`.

    Nodes of a cluster do not share the working folder.
    """
    if not os.environ.get("RAY_ADDRESS"):
        return "runs"
    parent, _, _ = output.rstrip("/").rpartition("/")
    return f"{parent}/runs"


def options_for(job: ModuleType, argv: Sequence[str]) -> Any:
    """Build the configuration of a job from a command line."""
    if hasattr(job, "parse"):
        return job.parse(argv)
    return parse(job.Config, argv, job.__name__)


def config_from_options(job: ModuleType, options: Mapping[str, Any]) -> Any:
    """Build the configuration of a job from nested options, as its config file has them."""
    values = read_mapping(job.Config, options, job.__name__)
    if hasattr(job, "build_config"):
        return job.build_config(values)
    return values.build(job.Config)


def run_job(name: str, options: Mapping[str, Any]) -> Any:
    """Run a job in this process, printed as the command line to repeat it.

    Args:
        name: Name of the job, such as `train`.
        options: Nested options of the job.
    """
    words = shlex.join(to_words(options))
    print(f"$ python -m jobs.{name} {words}", flush=True)
    job = importlib.import_module(f"jobs.{name}")
    return job.run(config_from_options(job, options))


def main(
    run: Callable[[Any], Any], config: type, parse_: Callable[[], Any] | None = None
) -> NoReturn:
    """Parse the command line, run the job, and exit.

    The exit code is 0 for success, 1 after a UserError or an infrastructure failure
    (`pipelines/faults.py`), 130 or 143 after SIGINT or SIGTERM, and 141 if the reader
    of the output is gone (`| head`).

    Args:
        run: Function of the job, in the job's module.
        config: The dataclass of its options.
        parse_: Build the configuration of a job with further options.
    """
    try:
        catch_signals()
        set_ray_defaults()
        check_buckets_first()
        # so that a file or a pipe can be watched
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        warnings.formatwarning = lambda message, *_: f"warning: {message}\n"  # type: ignore[assignment]
        run(parse_() if parse_ else parse(config, module=run.__module__))
        sys.stdout.flush()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: os._exit(0))  # only cleaning up is left
        # else the last collection visits all objects of PyTorch and MLflow, for seconds
        gc.freeze()
    except BaseException as error:
        if _signals:  # KeyboardInterrupt may have become another error
            leave(_signals[0])  # Ray's processes end with this one
        if not isinstance(error, Exception):
            raise
        if isinstance(error, BrokenPipeError) and is_output_closed():
            sys.exit(141)
        user_error = find_user_error(error)
        fault = None if user_error else explain(error)
        if user_error is None and fault is None:
            traceback.print_exc()
            sys.exit(1)
        # Ray would add the errors of other tasks that failed for the same reason.
        os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
        message = user_error or f"{fault}{save_traceback(error)}"
        print(f"error: {' '.join(str(message).split())}", file=sys.stderr)
        sys.stderr.flush()
        sys.exit(1)
    sys.exit(0)
