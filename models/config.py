"""Reading configurations: YAML files, and the nearest of the known names for one that is unknown.

content = read_yaml("jobs/configs/sasrec.yaml", "check --config")
check_known(content, known, lambda key, near: f"unknown key '{key}'; the nearest key is '{near}'")
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from models.storage.tables import UserError, open_uri


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the name of `known` that is most like `word`, upper or lower case.

    Args:
        word: An unknown name.
        known: At least one name.
    """
    by_lower: dict[str, list[str]] = {}
    for name in known:
        by_lower.setdefault(str(name).lower(), []).append(name)
    word = str(word)
    (lower,) = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.0)
    return difflib.get_close_matches(word, by_lower[lower], n=1, cutoff=0.0)[0]


ALSO_CALLED = {"device": "use_gpu", "learning_rate": "lr"}
"""Words that others have for an option, by the last part of its key."""


def instead(key: str, known: Iterable[str]) -> str:
    """Half a sentence that says what to write in place of a key that is not known: the one of the same last part, which
    another section may have, else the one most like it."""
    last, known = key.rsplit(".", 1)[-1], list(known)
    if not known:
        return "it takes no keys"
    same = [
        other
        for other in known
        if other.rsplit(".", 1)[-1] in (last, ALSO_CALLED.get(last))
    ]
    return f"the nearest key is '{nearest(key, same or known)}'"


def hint(word: str, known: Iterable[str], none: str = "there is none") -> str:
    """Half a sentence that names the nearest of `known`; `none` where there is nothing to name."""
    known = list(known)
    return f"the nearest is '{nearest(word, known)}'" if known else none


def pluralize(count: int, noun: str) -> str:
    """Return `count` with its noun, as `1 row`, `2,000 rows`, `0 queries` or `2 searches`."""
    if count == 1:
        return f"1 {noun}"
    if noun.endswith("y"):
        return f"{count:,} {noun[:-1]}ies"
    ending = "es" if noun.endswith(("rch", "tch")) else "s"
    return f"{count:,} {noun}{ending}"


def duration(seconds: float) -> str:
    """Format a duration as seconds, minutes or hours, whichever reads as a number of two digits or so."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"


def naming(config: type, *what: str) -> set[str]:
    """Options of a config dataclass that name a place: a `checkpoint`, a `folder`, or an `encoder`, which is a folder
    or a name of the model hub. Their fields declare it: `metadata={"names": "checkpoint"}`."""
    return {f.name for f in fields(config) if f.metadata.get("names") in what}


def flattened(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested values under dotted names."""
    flat: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, dict) and value:
            flat |= flattened(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = str(value)
    return flat


def check_least(
    config: Any, names: Iterable[str], least: float, section: str = ""
) -> None:
    """ValueError for the first of these fields that is below `least`; one that is None is not given. section: what
    stands before the names in messages, such as `fit.`; the next two take it too."""
    for name in names:
        if (value := getattr(config, name)) is not None and not value >= least:
            raise ValueError(f"{section}{name} is {value}, it must be at least {least}")


def check_shares(config: Any, names: Iterable[str], section: str = "") -> None:
    """ValueError for the first of these fields that is no share from 0 to 1."""
    for name in names:
        if not 0 <= (value := getattr(config, name)) <= 1:
            raise ValueError(
                f"{section}{name} is {value}, it is a share and must be between 0 and 1"
            )


def check_choices(config: Any, section: str = "") -> None:
    """ValueError for the first field that is none of the words of its type, such as Literal["adamw", "adagrad"]."""
    for name, kind in get_type_hints(type(config)).items():
        if get_origin(kind) is Literal and (
            value := getattr(config, name)
        ) not in get_args(kind):
            raise ValueError(
                f"{section}{name} is {value!r}, it must be one of {', '.join(map(str, get_args(kind)))}"
            )


def check_positive(config: Any, names: Iterable[str]) -> None:
    """ValueError for the first of these fields that is below 1."""
    check_least(config, names, 1)


def check_dropout(config: Any, *names: str) -> None:
    """ValueError for the first of these fields that is no share of values to drop."""
    for name in names:
        if not 0 <= getattr(config, name) < 1:
            raise ValueError(
                f"{name} {getattr(config, name)} is not in [0, 1); give a share"
            )


def check_known(
    given: Iterable[str], known: Iterable[str], message: Callable[[str, str], str]
) -> None:
    """UserError(message(name, nearest)) for the first of `given` that is not among `known`."""
    known = list(known)
    for name in given:
        if name not in known:
            raise UserError(message(name, nearest(name, known) if known else "none"))


class OneOfEach(yaml.SafeLoader):
    """YAML in which no key stands twice: the first would be lost without a word."""

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Any, Any]:
        seen = set[tuple[str, str]]()
        for key, _ in node.value:
            if (key.tag, str(key.value)) in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} stands twice",
                    problem_mark=key.start_mark,
                )
            seen.add((key.tag, str(key.value)))
        return super().construct_mapping(node, deep)


def read_yaml(uri: str, remedy: str) -> dict[str, Any]:
    """The mapping in a YAML file at a path or URI; UserError with the remedy where there is none."""
    filesystem, path = open_uri(uri)
    try:
        with filesystem.open_input_stream(path) as stream:
            content = yaml.load(stream.read(), OneOfEach)
    except OSError as error:
        why = (
            "no such file"
            if isinstance(error, FileNotFoundError)
            else " ".join(str(error).split())
        )
        raise UserError(f"cannot read {uri} ({why}); {remedy}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(
            f"{uri} is not valid YAML: {' '.join(str(error).split())}; {remedy}"
        ) from error
    if not isinstance(content, dict):
        raise UserError(
            f"{uri} holds {type(content).__name__}, not a mapping; {remedy}"
        )
    return content


def read_configs(uris: Iterable[str], remedy: str) -> dict[str, Any]:
    """The sections of several YAML files; of what more than one says, the last counts."""
    content: dict[str, Any] = {}
    for uri in uris:
        for name, section in read_yaml(uri, remedy).items():
            both = isinstance(section, dict) and isinstance(content.get(name), dict)
            content[name] = {**content[name], **section} if both else section
    return content


def build(
    kind: type,
    content: dict[str, Any],
    where: str = "",
    named: Callable[[str], str] = "'{}'".format,
) -> Any:
    """An instance of the dataclass `kind` from plain values, dataclasses within it too. ValueError names the first key
    that is unknown, missing or of another type; `where` is what stands before the keys, and `named` how messages call
    one."""
    _check_values(kind, content, where, named)
    try:
        from pydantic import TypeAdapter, ValidationError
    except ImportError:  # on a machine with PyTorch alone nothing turns '1e-3' into a number, or refuses 1.5 layers
        return kind(**content)
    try:
        return TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        faults = sorted(
            error.errors(), key=lambda fault: fault["type"] == "missing"
        )  # a mistyped key is missing too
    fault = faults[0]
    if fault["type"] == "value_error":
        raise ValueError(fault["msg"].removeprefix("Value error, "))
    path, option, default = _follow(kind, fault["loc"])
    key = where + ".".join(path)
    if fault["type"] == "missing":
        raise ValueError(f"{named(key)} is missing; add such as '{path[-1]}: ...'")
    quotes = (
        "; write it in quotes"
        if str in kinds_of(option) and not isinstance(fault["input"], dict | list)
        else ""
    )
    raise ValueError(
        f"{named(key)} is {shown(fault['input'])}, it must be {wanted(option, default)}{quotes}"
    )


def typed(kind: type, content: dict[str, Any], where: str) -> dict[str, Any]:
    """The values as the fields of the dataclass take them; ValueError for one that they do not."""
    built = build(kind, content, where)
    return {key: getattr(built, key) for key in content}


def _check_values(
    kind: type, content: dict[str, Any], where: str, named: Callable[[str], str]
) -> None:
    """ValueError for an unknown key, and for true or false in the place of a number, which pydantic takes for 1 and 0,
    or no number in the place of one."""
    hints = get_type_hints(kind)
    known = {f.name: f.default for f in fields(kind)}
    for key, value in content.items():
        if key not in known:
            raise ValueError(
                f"unknown key '{where}{key}'; {instead(f'{where}{key}', [where + k for k in known])}"
            )
        option = hints[key]
        kinds = {option, *kinds_of(option), *get_args(option)}
        wrong = (
            isinstance(value, bool)
            and bool not in kinds
            and not any(get_origin(k) is Literal for k in kinds)
        )
        if kinds & {int, float} and (wrong or str(value).lower() == "nan"):
            raise ValueError(
                f"{named(where + key)} is {shown(value)}, it must be {wanted(option, known[key])}"
            )
        for nested in filter(is_dataclass, kinds):
            many = get_origin(option) is dict and isinstance(value, dict)
            for name, each in (
                {f".{k}": each for k, each in value.items()}.items()
                if many
                else [("", value)]
            ):
                if isinstance(each, dict):
                    _check_values(nested, each, f"{where}{key}{name}.", named)  # type: ignore[arg-type]


def _follow(kind: Any, path: Iterable[Any]) -> tuple[list[str], Any, Any]:
    """The keys of a path that are fields, or names in a mapping; the type that the last one takes, and its default."""
    keys: list[str] = []
    default: Any = None
    for part in path:
        within = next(filter(is_dataclass, (kind, *kinds_of(kind))), None)
        if within is not None and part in (hints := get_type_hints(within)):
            default = next(f.default for f in fields(within) if f.name == part)  # type: ignore[arg-type]
            kind = hints[part]
        elif get_origin(kind) is dict:
            kind = get_args(kind)[1]
        else:
            break
        keys.append(str(part))
    return keys, kind, default


def kinds_of(kind: Any) -> list[Any]:
    """The types that a field takes."""
    return list(get_args(kind)) if get_origin(kind) in (Union, UnionType) else [kind]


def shown(value: Any) -> str:
    """A value as YAML has it."""
    return (
        "null"
        if value is None
        else repr(value).lower()
        if isinstance(value, bool)
        else repr(value)
    )


KINDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "a mapping such as '{key: value}'",
}
LISTS = {
    int: "whole numbers such as '[1, 2]'",
    float: "numbers such as '[0.1, 0.2]'",
    str: "names such as '[a, b]'",
}


def wanted(kind: Any, default: Any = None) -> str:
    """What a field takes, such as `a whole number, such as 20`."""
    words: list[str] = []
    others: list[str] = []
    for each in kinds_of(kind):
        if each is bool:
            words += ["true", "false"]
        elif get_origin(each) is Literal:
            words += map(str, get_args(each))
        elif get_origin(each) is list:
            others.append(f"a list of {LISTS.get(get_args(each)[0], 'values')}")
        elif each is not NoneType:
            others.append(
                KINDS.get(
                    get_origin(each) or each,
                    "a mapping" if is_dataclass(each) else "another one",
                )
            )
    if not others:
        return (
            f"one of {', '.join(words)}"
            if words[2:] or "true" not in words
            else "true or false"
        )
    example = (
        f", such as {default}"
        if isinstance(default, int | float) and default and default is not True
        else ""
    )
    return " or ".join([*words, *others]) + example
