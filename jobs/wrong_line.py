"""What is wrong with a command line, said in the words of its options and not in those of the parser."""

from __future__ import annotations

import re
from argparse import Action
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentParser

from models.config import instead

OTHERS = ("help", "config", "print_config", "print_shtab")
"""What every parser takes, and no file has."""

KINDS = {int: "a whole number", float: "a number", str: "text", dict: "a mapping such as '{key: value}'"}
LISTS = {int: "whole numbers such as '[1, 2]'", float: "numbers such as '[0.1, 0.2]'", str: "names such as '[a, b]'"}


def keys_of(parser: ArgumentParser) -> list[str]:
    """The keys of all options, as a file has them."""
    return [a.dest for a in parser._actions if a.dest not in OTHERS and not a.dest.endswith(".help")]


def wrong_line(error: Exception, parser: ArgumentParser, files: Mapping[str, str]) -> str:
    """One line for a parse error. `files` has the config file of each key that stands in one and not on the line."""
    text = " ".join(str(error).split())
    options = {action.dest: action for action in parser._actions}
    if found := re.search(r"arguments are required: (.*)", text):
        return missing([options[key] for key in found[1].split(", ")])
    if found := re.search(r"argument --([\w.]+)\S*: expected one argument", text):
        return f"--{found[1]} has no value; give it ({described(options[found[1]])})"
    found = re.search(r'Parser key "([\w.]+)"', text)
    given = re.search(r"Given value: ?(.*)$", text) or re.search(r"Got value: ?(.*)$", text)
    if found and given and found[1] in options:
        return wrong_value(options[found[1]], given[1], files)
    if found and "Unable to load config" in text:
        return f"--{found[1]} takes no value: it has options of its own, such as --{below(found[1], list(options))}"
    if found := re.search(r"[Uu]nrecognized arguments: (?!--)(.*)", text):
        return f"'{found[1]}' belongs to no option; give --OPTION VALUE, one with blanks in quotes; see --help for all"
    unknown = re.search(r"[Uu]nrecognized arguments: --([\w.\-]+)", text) or re.search(
        r"[Kk]ey '?([\w.\-]+)'? is not expected|[Nn]ested key '?([\w.\-]+)'?|Option '?([\w.\-]+)'? is not accepted",
        text,
    )
    if unknown:
        key = next(group for group in unknown.groups() if group)
        return f"unknown key '{key}'; {instead(key, keys_of(parser))}; see --help for all"
    return text


def missing(options: Sequence[Action]) -> str:
    """Options that have to be given, with what each takes."""
    if len(options) == 1:
        return f"--{options[0].dest} is missing; give it ({described(options[0])})"
    each = [f"--{option.dest} ({described(option)})" for option in options]
    names = ", ".join(f"--{option.dest}" for option in options[:-1])
    return f"{names} and --{options[-1].dest} are missing; give {', '.join(each[:-1])} and {each[-1]}"


def wrong_value(option: Action, value: str, files: Mapping[str, str]) -> str:
    """An option whose value is of another type than it takes."""
    place = f"{option.dest} in {files[option.dest]}" if option.dest in files else f"--{option.dest}"
    shown = value if value[:1] in ("[", "{") else f"'{value}'"
    return f"{place} is {shown}, it must be {wanted(option)}"


def below(group: str, keys: Sequence[str]) -> str:
    """The first option of a group."""
    return next(key for key in keys if key.startswith(f"{group}.") and not key.endswith(".help"))


def types_of(option: Action) -> list[Any]:
    """The types that it takes; none of an option that is no field."""
    kind = vars(option).get("_typehint")
    return [] if kind is None else list(get_args(kind)) if get_origin(kind) in (Union, UnionType) else [kind]


def wanted(option: Action) -> str:
    """What an option takes, such as `a whole number, such as 20`."""
    words: list[str] = []
    others: list[str] = []
    for kind in types_of(option):
        if kind is bool:
            words += ["true", "false"]
        elif get_origin(kind) is Literal:
            words += map(str, get_args(kind))
        elif get_origin(kind) is list:
            others.append(f"a list of {LISTS.get(get_args(kind)[0], 'values')}")
        elif kind is not NoneType:
            others.append(KINDS.get(get_origin(kind) or kind, "another one"))
    if not others:
        return f"one of {', '.join(words)}" if words[2:] or "true" not in words else "true or false"
    known = option.default
    example = f", such as {known}" if isinstance(known, int | float) and known and known is not True else ""
    return " or ".join([*words, *others]) + example


def described(option: Action) -> str:
    """What an option takes: its choices or kind of number, else the first sentence of its help."""
    kinds = {get_origin(kind) or kind for kind in types_of(option)}
    if kinds and kinds <= {bool, int, float, Literal, NoneType}:
        return wanted(option)
    return (option.help or "").split(". ")[0].rstrip(".")
