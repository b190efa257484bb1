"""Reading configurations: YAML files, and the nearest of the known names for one that is unknown.

content = read_yaml("jobs/configs/sasrec.yaml", "check --config")
check_known(content, known, lambda key, near: f"unknown key '{key}'; the nearest key is '{near}'")
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from models.places import near_file
from models.tables import UserError, open_uri


def nearest(word: str, known: Iterable[str]) -> str:
    """The one of `known`, of which there must be one, that is most like `word`."""
    return difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.0)[0]


ALSO_CALLED = {"device": "use_gpu", "learning_rate": "lr"}
"""Words that others have for an option, by the last part of its key."""


def instead(key: str, known: Iterable[str]) -> str:
    """Half a sentence that says what to write in place of a key that is not known: the one of the same last part, which
    another section may have, else the one most like it."""
    last, known = key.rsplit(".", 1)[-1], list(known)
    if not known:
        return "it takes no keys"
    same = [other for other in known if other.rsplit(".", 1)[-1] in (last, ALSO_CALLED.get(last))]
    return f"the nearest key is '{nearest(key, same or known)}'"


def hint(word: str, known: Iterable[str], none: str = "there is none") -> str:
    """Half a sentence that names the nearest of `known`; `none` where there is nothing to name."""
    known = list(known)
    return f"the nearest is '{nearest(word, known)}'" if known else none


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


def check_least(config: Any, names: Iterable[str], least: float, section: str = "") -> None:
    """ValueError for the first of these fields that is below `least`; one that is None is not given.

    section: what stands before the names in messages, such as `fit.`; the next two take it too.
    """
    for name in names:
        if (value := getattr(config, name)) is not None and not value >= least:
            raise ValueError(f"{section}{name} is {value}, it must be at least {least}")


def check_shares(config: Any, names: Iterable[str], section: str = "") -> None:
    """ValueError for the first of these fields that is no share from 0 to 1."""
    for name in names:
        if not 0 <= (value := getattr(config, name)) <= 1:
            raise ValueError(f"{section}{name} is {value}, it is a share and must be between 0 and 1")


def check_choices(config: Any, section: str = "") -> None:
    """ValueError for the first field that is none of the words of its type, such as Literal["adamw", "adagrad"]."""
    for name, kind in get_type_hints(type(config)).items():
        if get_origin(kind) is Literal and (value := getattr(config, name)) not in get_args(kind):
            raise ValueError(f"{section}{name} is {value!r}, it must be one of {', '.join(map(str, get_args(kind)))}")


def check_positive(config: Any, names: Iterable[str]) -> None:
    """ValueError for the first of these fields that is below 1."""
    check_least(config, names, 1)


def check_dropout(config: Any, *names: str) -> None:
    """ValueError for the first of these fields that is no share of values to drop."""
    for name in names:
        if not 0 <= getattr(config, name) < 1:
            raise ValueError(f"{name} {getattr(config, name)} is not in [0, 1); give a share")


def check_known(given: Iterable[str], known: Iterable[str], message: Callable[[str, str], str]) -> None:
    """UserError(message(name, nearest)) for the first of `given` that is not among `known`."""
    known = list(known)
    for name in given:
        if name not in known:
            raise UserError(message(name, nearest(name, known) if known else "none"))


def read_yaml(uri: str, remedy: str) -> dict[str, Any]:
    """The mapping in a YAML file at a path or URI; UserError with the remedy where there is none."""
    filesystem, path = open_uri(uri)
    try:
        with filesystem.open_input_stream(path) as stream:
            content = yaml.safe_load(stream.read())
    except OSError as error:
        why = "no such file" if isinstance(error, FileNotFoundError) else " ".join(str(error).split())
        near = f"the nearest is {found}; " if (found := near_file(uri)) else ""
        raise UserError(f"cannot read {uri} ({why}); {near}{remedy}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{uri} is not valid YAML: {' '.join(str(error).split())}; {remedy}") from error
    if not isinstance(content, dict):
        raise UserError(f"{uri} holds {type(content).__name__}, not a mapping; {remedy}")
    return content


def read_configs(uris: Iterable[str], remedy: str) -> dict[str, Any]:
    """The sections of several YAML files; of what more than one says, the last counts."""
    content: dict[str, Any] = {}
    for uri in uris:
        for name, section in read_yaml(uri, remedy).items():
            both = isinstance(section, dict) and isinstance(content.get(name), dict)
            content[name] = {**content[name], **section} if both else section
    return content


def build(kind: type, content: dict[str, Any], where: str = "") -> Any:
    """An instance of the dataclass `kind` from plain values, dataclasses within it too. ValueError names the first key
    that is unknown, missing or of another type; `where` is what stands before the keys."""
    from pydantic import TypeAdapter, ValidationError  # a machine with PyTorch alone builds nothing from files

    known = [f.name for f in fields(kind)]
    for key in content:
        if key not in known:
            raise ValueError(f"unknown key '{where}{key}'; {instead(str(key), known)}")
    _refuse_bools(kind, content, where)
    try:
        return TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        faults = sorted(error.errors(), key=lambda fault: fault["type"] == "missing")  # a mistyped key is missing too
    fault = faults[0]
    if fault["type"] == "value_error":
        raise ValueError(fault["msg"].removeprefix("Value error, "))
    *inside, last = fault["loc"]
    key, given = where + ".".join(str(part) for part in fault["loc"]), fault["input"]
    if fault["type"] == "missing":
        raise ValueError(f"'{key}' is missing; add such as '{last}: ...'")
    if fault["type"] == "unexpected_keyword_argument":
        missing = [
            str(other["loc"][-1])
            for other in faults
            if other["type"] == "missing" and other["loc"][:-1] == tuple(inside)
        ]
        raise ValueError(f"unknown key '{key}'; {hint(str(last), missing or _keys_at(kind, inside))}")
    quotes = "; write it in quotes" if "valid string" in fault["msg"] and not isinstance(given, dict | list) else ""
    raise ValueError(f"'{key.removesuffix('.[key]')}' is {given!r}; {fault['msg'].lower()}{quotes}")


def _refuse_bools(kind: type, content: dict[str, Any], where: str) -> None:
    """ValueError for true or false in the place of a number, which pydantic takes for 1 and 0."""
    for key, option in get_type_hints(kind).items():
        value, kinds = content.get(key), {option, *get_args(option)}
        if isinstance(value, bool) and kinds & {int, float} and bool not in kinds:
            raise ValueError(f"'{where}{key}' is {value!r}; give a number")
        for nested in filter(is_dataclass, kinds):
            for each in value.values() if get_origin(option) is dict and isinstance(value, dict) else [value]:
                if isinstance(each, dict):
                    _refuse_bools(nested, each, f"{where}{key}.")  # type: ignore[arg-type]


def _keys_at(kind: type, path: Iterable[Any]) -> list[str]:
    """The fields of the dataclass that a path of keys leads to."""
    for key in path:
        hints = get_type_hints(kind)
        of = hints.get(key, kind)  # a name in a mapping leads to the values' type
        kind = next((each for each in (of, *get_args(of)) if is_dataclass(each)), kind)  # type: ignore[assignment]
    return [f.name for f in fields(kind)]
