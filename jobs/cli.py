"""The command line that all jobs share: dataclasses to options, errors to one line, Ray started once.

A job is a dataclass of options and a function of it:

    if __name__ == "__main__":
        cli.main(run, Config)
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from models.tables import UserError

set_parsing_settings(docstring_parse_attribute_docstrings=True)

if not os.environ.get("RAY_ADDRESS"):  # a local Ray is for its user alone; read when ray is imported
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    # Threads that wait sleep: beside other processes, spinning ones take many times the time of the work itself. What
    # is timed runs alone, where a thread that wakes at every product is slower than one that spins.
    if Path(sys.argv[0]).stem != "benchmark":
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

Config = TypeVar("Config")


def build_parser(config: type, job: str, groups: dict[str, type]) -> ArgumentParser:
    """Options of the dataclass `config`; `groups` adds dataclasses under a name, as `--name.field`."""
    parser = ArgumentParser(
        prog=f"python -m jobs.{job}",
        description=(sys.modules[config.__module__].__doc__ or "").strip(),
        exit_on_error=False,
        default_env=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="YAML file with the options below; the line wins over it")
    parser.add_class_arguments(config, fail_untyped=True, skip=set(groups))
    for name, group in groups.items():
        parser.add_class_arguments(group, name, fail_untyped=True)
    return parser


def _known_keys(parser: ArgumentParser) -> list[str]:
    return [a.dest for a in parser._actions if a.dest not in ("help", "config") and not a.dest.endswith(".help")]


def _explain(error: Exception, parser: ArgumentParser) -> str:
    """One line for a parse error; a key that is not known is answered with the nearest that is."""
    text = " ".join(str(error).split())
    keys = _known_keys(parser)
    unknown = re.search(r"[Uu]nrecognized arguments: --([\w.\-]+)", text) or re.search(
        r"[Kk]ey '?([\w.\-]+)'? is not expected|[Nn]ested key '?([\w.\-]+)'?|Option '?([\w.\-]+)'? is not accepted",
        text,
    )
    if unknown:
        key = next(group for group in unknown.groups() if group)
        near = difflib.get_close_matches(key, keys, n=1, cutoff=0.0)
        hint = f"the nearest key is '{near[0]}'" if near else "it takes no keys"
        return f"unknown key '{key}'; {hint}; see --help for all"
    return text


def _check_config_keys(path: str, parser: ArgumentParser) -> None:
    """Names unknown keys of a config file, with the file, before jsonargparse sees them."""
    try:
        content = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise UserError(f"cannot read the config {path} ({error.strerror}); check --config") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds {type(content).__name__}, not a mapping of options; see --help for the keys")
    keys = set(_known_keys(parser))

    def walk(node: dict[str, Any], prefix: str) -> None:
        for name, value in node.items():
            key = f"{prefix}{name}"
            if isinstance(value, dict) and any(k.startswith(key + ".") for k in keys):
                walk(value, key + ".")
                continue
            if key in keys:
                continue
            near = difflib.get_close_matches(key, sorted(keys), n=1, cutoff=0.0)
            raise UserError(f"unknown key '{key}' in {path}; the nearest key is '{near[0]}'; see --help for all")

    walk(content, "")


def _complete_flags(argv: list[str], config: type) -> list[str]:
    """`--overwrite` alone means `--overwrite true`."""
    flags = {f"--{f.name}" for f in fields(config) if f.type in (bool, "bool")}
    completed: list[str] = []
    for i, word in enumerate(argv):
        completed.append(word)
        if word in flags and (i + 1 == len(argv) or argv[i + 1].startswith("--")):
            completed.append("true")
    return completed


def config_paths(argv: Sequence[str]) -> list[str]:
    """The files named by --config on a command line."""
    paths = [argv[i + 1] for i, word in enumerate(argv[:-1]) if word == "--config"]
    return paths + [word.split("=", 1)[1] for word in argv if word.startswith("--config=")]


def parse(
    config: type[Config], job: str, argv: Sequence[str] | None = None, groups: dict[str, type] | None = None
) -> Config:
    """The options of a command line as an instance of `config`; `groups` are passed to it by name.

    Raises UserError for an unknown key (with the nearest one), a wrong type, or a value that the
    dataclass refuses.
    """
    argv = _complete_flags(list(sys.argv[1:] if argv is None else argv), config)
    groups = groups or {}
    parser = build_parser(config, job, groups)
    for path in config_paths(argv):
        _check_config_keys(path, parser)
    try:
        namespace = parser.parse_args(argv)
        values = parser.instantiate_classes(namespace)
        arguments = {f.name: values[f.name] for f in fields(config) if f.name in values}  # type: ignore[arg-type]
        for name, group in groups.items():
            value = arguments[name]
            arguments[name] = value if isinstance(value, group) else group(**vars(value))
        return config(**arguments)
    except (ArgumentError, ValueError, TypeError, KeyError) as error:
        raise UserError(_explain(error, parser)) from error


def start_ray(num_cpus: int | None = None) -> None:
    """Connects to the cluster that this job was submitted to (RAY_ADDRESS), else starts a local Ray.

    Never joins a Ray that happens to run on this machine.
    """
    import ray

    if ray.is_initialized():
        return
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=True, logging_level=logging.WARNING)
        return
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        logging_level=logging.WARNING,
        log_to_driver=False,
    )


def user_error_in(error: BaseException | None) -> UserError | None:
    """The UserError that a Ray task, actor or training worker failed with, if that is what happened."""
    seen: set[int] = set()
    stack: list[BaseException | None] = [error]
    while stack:
        current = stack.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current, UserError):
            cause = getattr(current, "cause", None)  # ray's RayTaskError poses as its cause
            return cause if isinstance(cause, UserError) else current
        stack += [current.__cause__, current.__context__, getattr(current, "cause", None)]
        stack += list(getattr(current, "worker_failures", {}).values())
    return None


def main(run: Callable[[Any], Any], config: type, parse_: Callable[[str], Any] | None = None) -> NoReturn:
    """Parses the command line, runs the job, and exits: 0 when done, 1 with one line for a UserError.

    `parse_(job)` is for jobs whose options are more than those of `config`.
    """
    job = Path(sys.argv[0]).stem
    try:
        run(parse_(job) if parse_ else parse(config, job))
    except Exception as error:
        known = user_error_in(error)
        if known is None:
            raise
        print(f"error: {' '.join(str(known).split())}", file=sys.stderr)
        sys.stderr.flush()
        sys.exit(1)
    sys.exit(0)
