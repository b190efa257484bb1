"""Command lines and config files as instances of dataclasses, and the help that shows their fields.

    config = parse(Config)          # of sys.argv: --config FILE, --key value, --section.key value, --flag

A field that is a dataclass is a section with options of its own (an `inline` one without its name before them); one
that is a mapping takes any key below its name; one that is a list of texts takes them one by one too, where the option
is given several times.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from itertools import pairwise
from types import NoneType
from typing import Any, Literal, TypeVar, get_origin, get_type_hints

import yaml

from models.config import build, instead, kinds_of, read_yaml, shown, wanted
from models.storage.tables import UserError
from models.storage.uri import refuse_secrets

Config = TypeVar("Config")


@dataclass(frozen=True)
class Option:
    """What a key takes."""

    kind: Any
    """Its type."""
    default: Any
    """MISSING where it has to be given."""
    about: str
    """Its field's docstring."""
    section: str
    """What the dataclass of its section says; empty outside of sections."""

    @property
    def takes(self) -> str:
        """Choices or kind of number, else the first sentence about it."""
        plain = all(
            kind in (bool, int, float, NoneType) or get_origin(kind) is Literal
            for kind in kinds_of(self.kind)
        )
        return (
            wanted(self.kind, self.default)
            if plain
            else self.about.split(". ")[0].rstrip(".")
        )

    def value(self, word: str) -> Any:
        """Of a word of the command line."""
        kinds = kinds_of(self.kind)
        if word == "null" and NoneType in kinds:
            return None
        if all(
            kind in (str, NoneType) or get_origin(kind) is Literal for kind in kinds
        ):
            return word
        if list[str] in kinds and not word.startswith("["):
            return [word]
        return scalar(word)


def scalar(word: str) -> Any:
    """A number, a list, a mapping, true, null or text; 1e-4 is a number."""
    try:
        return (
            float(word)
            if re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", word)
            else yaml.safe_load(word or '""')
        )
    except yaml.YAMLError:
        return word


def options_of(kind: type, prefix: str = "") -> dict[str, Option]:
    """The options of a dataclass by their keys, those of its sections too."""
    hints, about = get_type_hints(kind), abouts(kind)
    found: dict[str, Option] = {}
    for one in fields(kind):
        key, section = (
            prefix + one.name,
            next(filter(is_dataclass, kinds_of(hints[one.name])), None),
        )
        if section:
            inner = prefix if one.metadata.get("inline") else f"{key}."
            found |= options_of(section, inner)  # type: ignore[arg-type]
        elif not one.metadata.get("hidden"):
            default = (
                one.default if one.default_factory is MISSING else one.default_factory()
            )
            said = (
                " ".join((kind.__doc__ or "").split("\n\n")[0].split())
                if prefix
                else ""
            )
            found[key] = Option(
                hints[one.name],
                default,
                one.metadata.get("about") or about.get(one.name, ""),
                said,
            )
    return found


def abouts(kind: type) -> dict[str, str]:
    """What the docstrings below the fields of a dataclass say, those of its bases too."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        with suppress(
            OSError, TypeError
        ):  # one that was made in memory, or is built in, has no source
            (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            for before, line in pairwise(body.body):  # type: ignore[attr-defined]
                said = (
                    line.value
                    if isinstance(before, ast.AnnAssign) and isinstance(line, ast.Expr)
                    else None
                )
                if isinstance(said, ast.Constant):
                    found[before.target.id] = " ".join(str(said.value).split())  # type: ignore[union-attr]
    return found


def most_derived(kinds: Iterable[type]) -> tuple[type, ...]:
    """The classes that no other one of them inherits from."""
    known = list(dict.fromkeys(kinds))
    return tuple(
        kind for kind in known if not any(kind in other.__mro__[1:] for other in known)
    )


def words_of(
    argv: Sequence[str], options: dict[str, Option]
) -> Iterator[tuple[str, str]]:
    """Keys and what stands after them. `--flag` alone is `--flag true`, and `--dry-run` is `--dry_run`."""
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise UserError(
                f"'{word}' belongs to no option; give --OPTION VALUE, one with blanks in quotes; see --help for all"
            )
        key, equals, value = word[2:].partition("=")
        key = key.replace("-", "_")
        if not equals:
            if words and not words[0].startswith("--"):
                value = words.pop(0)
            elif key in options and bool in kinds_of(options[key].kind):
                value = "true"
            elif known(key, options) or key == "config":
                raise UserError(f"--{key} has no value; give one after it")
        yield key, value


def known(key: str, options: dict[str, Option]) -> bool:
    """Whether a key is an option, or one below an option that takes a mapping."""
    free = [
        name
        for name, option in options.items()
        if any(get_origin(kind) is dict for kind in kinds_of(option.kind))
    ]
    return key in options or any(key.startswith(f"{name}.") for name in free)


def file_values(path: str, options: dict[str, Option]) -> Iterator[tuple[str, Any]]:
    """Keys and values of a config file."""

    def walk(node: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in node.items():
            key = f"{prefix}{name}"
            section = isinstance(value, dict) and any(
                option.startswith(f"{key}.") for option in options
            )
            yield from walk(value, f"{key}.") if section else [(key, value)]

    yield from walk(read_yaml(path, "check --config, and see --help for the keys"), "")


@dataclass(frozen=True)
class Given:
    """What a command line and its files say."""

    values: dict[str, Any]
    """By section and key."""
    places: dict[str, str]
    """By dotted key: `--key`, or the key in its file."""

    def named(self, key: str) -> str:
        """A key as it was given, for messages."""
        return self.places.get(key, f"'{key}'")


def read(kind: type, argv: Sequence[str] | None = None) -> Given:
    """The values of a command line that fields of the dataclass `kind` take; the line wins over files, later files over
    earlier ones. Prints the help and ends where it is asked for. UserError for a key that is none, with the nearest."""
    argv = sys.argv[1:] if argv is None else argv
    if {"--help", "-h"} & set(argv):
        print(help_of(kind))
        sys.exit(0)
    options = options_of(kind)
    files: list[tuple[str, str]] = []
    line: list[tuple[str, str]] = []
    for key, word in words_of(argv, options):
        (files if key == "config" else line).append((key, word))
    given: dict[str, Any] = {}
    places: dict[str, str] = {}

    def take(key: str, value: Any, place: str, path: str = "") -> None:
        if not known(key, options):
            raise UserError(
                f"unknown key '{key}'{path}; {instead(key, options)}; see --help for all"
            )
        refuse_secrets(value, place)
        if (
            key in options
            and get_origin(options[key].kind) is dict
            and not isinstance(value, dict)
        ):
            raise UserError(
                f"{place} is {shown(value)}, it must be {wanted(options[key].kind)}"
            )
        if isinstance(value, dict) and "." not in key:  # a section whose keys are free
            value = {**(given.get(key) or {}), **value}
        given[key], places[key] = value, place

    for _, path in files:
        for key, value in file_values(path, options):
            take(key, value, f"{key} in {path}", f" in {path}")
    for key, word in line:
        value = options[key].value(word) if key in options else scalar(word)
        several = (
            isinstance(value, list)
            and not word.startswith("[")
            and places.get(key) == f"--{key}"
        )
        take(key, [*given[key], *value] if several else value, f"--{key}")
    return Given(nested(given, options), places)


def nested(given: dict[str, Any], options: dict[str, Option]) -> dict[str, Any]:
    """Values by dotted key as mappings within mappings; keys below an option stay whole."""
    content: dict[str, Any] = {}
    for key, value in given.items():
        whole = next((name for name in options if key.startswith(f"{name}.")), None)
        *sections, last = (whole or key).split(".")
        inside = content
        for section in sections:
            inside = inside.setdefault(section, {})
        if whole:
            inside[last] = {**(inside.get(last) or {}), key[len(whole) + 1 :]: value}
        else:
            inside[last] = value
    return content


def check_whole(kind: type, given: Given) -> None:
    """UserError for what has to be given and is not."""
    options = [
        (key, one) for key, one in options_of(kind).items() if one.default is MISSING
    ]
    if missing := [
        f"--{key} ({one.takes})" for key, one in options if key not in given.places
    ]:
        raise UserError(
            f"missing: {', '.join(missing)}; give {'them' if missing[1:] else 'it'}, see --help for all"
        )


def parse(kind: type[Config], argv: Sequence[str] | None = None) -> Config:
    """The options of a command line as an instance of the dataclass.

    Raises UserError for an unknown key (with the nearest one), a wrong type, or a value that the dataclass refuses.
    """
    given = read(kind, argv)
    check_whole(kind, given)
    try:
        return build(kind, given.values, named=given.named)  # type: ignore[no-any-return]
    except ValueError as error:
        raise UserError(str(error)) from error


def help_of(kind: type) -> str:
    """What the command does, and its options by section."""
    module = sys.modules[kind.__module__]
    lines = [
        f"usage: python -m {module.__spec__.name} [--config FILE] [--OPTION VALUE ...]",  # type: ignore[union-attr]
        "",
        (module.__doc__ or "").strip(),
        "",
        *described(
            "--config FILE", "YAML file with the options below; the line wins over it."
        ),
    ]
    section = ""
    options = options_of(
        kind
    ).items()  # those of sections last, and what has to be given first
    for key, one in sorted(
        options,
        key=lambda item: (item[1].section != "", item[1].default is not MISSING),
    ):
        if one.section != section:
            section = one.section
            lines += ["", *textwrap.wrap(f"{key.rpartition('.')[0]}: {section}", WIDTH)]
        default = (
            ""
            if one.default in (MISSING, None, "")
            else f" ({str(one.default).lower()})"
        )
        required = " (required)" if one.default is MISSING else ""
        lines += described(
            f"--{key} {metavar(one.kind)}", one.about + required + default
        )
    return "\n".join(lines)


def metavar(kind: Any) -> str:
    """A word for what an option takes."""
    words: list[str] = []
    for each in kinds_of(kind):
        if get_origin(each) is Literal:
            words += map(str, each.__args__)
        elif each is not NoneType:
            words.append(METAVARS.get(get_origin(each) or each, "VALUE"))
    return "|".join(words)


WIDTH = 120
"""Of lines of help."""
METAVARS = {
    bool: "true|false",
    int: "N",
    float: "X",
    str: "TEXT",
    list: "[A, B]",
    dict: "'{K: V}'",
}


def described(option: str, about: str) -> list[str]:
    """Lines of help for one option."""
    return [
        f"  {option}",
        *textwrap.wrap(about, WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8),
    ]
