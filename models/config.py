"""Read YAML files, build typed configurations, and suggest the nearest key for an unknown one.

content = read_yaml("jobs/configs/sasrec.yaml", "check --config")
fit = build(FitConfig, content["fit"], "fit.")
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from models.storage.tables import UserError, open_uri


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the name of `known` that is most like `word`, in upper or lower case.

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


SYNONYMS = {"device": "use_gpu", "learning_rate": "lr"}
"""Names that other projects have for an option, by the last part of its key."""


def did_you_mean_key(key: str, known: Iterable[str]) -> str:
    """Return half a sentence that names the nearest of the known keys.

    A key with the same last part, in whatever section, counts as nearest.
    """
    last, known = key.rsplit(".", 1)[-1], list(known)
    if not known:
        return "it takes no keys"
    names = (last, SYNONYMS.get(last))
    same = [other for other in known if other.rsplit(".", 1)[-1] in names]
    return f"the nearest key is '{nearest(key, same or known)}'"


def did_you_mean(word: str, known: Iterable[str], none: str = "there is none") -> str:
    """Return half a sentence that names the nearest of `known`; `none` if it is empty."""
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


def format_duration(seconds: float) -> str:
    """Format a duration as seconds, minutes or hours, in about two digits."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"


def path_fields(config: type, *kinds: str) -> set[str]:
    """Return the names of a config's fields that take a path of one of some kinds.

    A kind is `checkpoint`, `folder`, or `encoder`, which is a folder or a name of the
    model hub. Fields declare it by `metadata={"names": "checkpoint"}`.
    """
    return {one.name for one in fields(config) if one.metadata.get("names") in kinds}


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested values as texts under dotted names."""
    flat: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = str(value)
    return flat


def check_least(
    config: Any, names: Iterable[str], least: float, section: str = ""
) -> None:
    """Raise ValueError for the first of some fields that is below `least`.

    Args:
        config: The dataclass instance.
        names: Names of the fields; None is a valid value of each.
        least: The smallest valid value.
        section: Text before the names in messages, such as `fit.`.
    """
    for name in names:
        value = getattr(config, name)
        if value is not None and not value >= least:
            raise ValueError(f"{section}{name} is {value}, it must be at least {least}")


def check_shares(config: Any, names: Iterable[str], section: str = "") -> None:
    """Raise ValueError for the first of some fields that is no share from 0 to 1."""
    for name in names:
        value = getattr(config, name)
        if not 0 <= value <= 1:
            raise ValueError(
                f"{section}{name} is {value}, it is a share and must be between 0 and 1"
            )


def check_choices(config: Any, section: str = "") -> None:
    """Raise ValueError for the first field with a Literal type that has another value."""
    for name, kind in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if get_origin(kind) is Literal and value not in get_args(kind):
            choices = ", ".join(map(str, get_args(kind)))
            raise ValueError(
                f"{section}{name} is {value!r}, it must be one of {choices}"
            )


def check_positive(config: Any, names: Iterable[str]) -> None:
    """Raise ValueError for the first of some fields that is below 1."""
    check_least(config, names, 1)


def check_dropout(config: Any, *names: str) -> None:
    """Raise ValueError for the first of some fields that is no dropout probability."""
    for name in names:
        value = getattr(config, name)
        if not 0 <= value < 1:
            raise ValueError(f"{name} {value} is not in [0, 1); give a share")


def check_known(
    names: Iterable[str], known: Iterable[str], message: Callable[[str, str], str]
) -> None:
    """Raise UserError(message(name, nearest)) for the first name that is not in `known`."""
    known = list(known)
    for name in names:
        if name not in known:
            raise UserError(message(name, nearest(name, known) if known else "none"))


class UniqueKeyLoader(yaml.SafeLoader):
    """A YAML loader that refuses a key which stands twice in one mapping."""

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Any, Any]:
        """Construct a mapping with distinct keys."""
        keys = set[tuple[str, str]]()
        for key, _ in node.value:
            if (key.tag, str(key.value)) in keys:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} stands twice",
                    problem_mark=key.start_mark,
                )
            keys.add((key.tag, str(key.value)))
        return super().construct_mapping(node, deep)


def read_yaml(uri: str, remedy: str) -> dict[str, Any]:
    """Read the mapping in a YAML file.

    Args:
        uri: Path or URI of the file.
        remedy: End of the messages: what the user can do.

    Raises:
        UserError: if there is no such file, or it holds no mapping.
    """
    filesystem, path = open_uri(uri)
    try:
        with filesystem.open_input_stream(path) as stream:
            content = yaml.load(stream.read(), UniqueKeyLoader)
    except FileNotFoundError as error:
        raise UserError(f"cannot read {uri} (no such file); {remedy}") from error
    except OSError as error:
        why = " ".join(str(error).split())
        raise UserError(f"cannot read {uri} ({why}); {remedy}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        why = " ".join(str(error).split())
        raise UserError(f"{uri} is not valid YAML: {why}; {remedy}") from error
    if not isinstance(content, dict):
        raise UserError(
            f"{uri} holds {type(content).__name__}, not a mapping; {remedy}"
        )
    return content


def read_configs(uris: Iterable[str], remedy: str) -> dict[str, Any]:
    """Merge the sections of several YAML files; values of later files win."""
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
    label: Callable[[str], str] = "'{}'".format,
) -> Any:
    """Build a dataclass, and the dataclasses within it, from plain values.

    Args:
        kind: The dataclass.
        content: Values by field.
        where: Text before the keys in messages, such as `fit.`.
        label: Return how messages call a key.

    Raises:
        ValueError: for the first key that is unknown, missing or of another type.
    """
    _check_values(kind, content, where, label)
    try:
        from pydantic import TypeAdapter, ValidationError
    except ImportError:
        # With PyTorch alone '1e-3' stays a text, and 1.5 layers are not refused.
        return kind(**content)
    try:
        return TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        # a mistyped key is also missing, so missing ones come last
        faults = sorted(error.errors(), key=lambda fault: fault["type"] == "missing")
    fault = faults[0]
    if fault["type"] == "value_error":
        raise ValueError(fault["msg"].removeprefix("Value error, "))
    path, option, default = _find_field(kind, fault["loc"])
    key = where + ".".join(path)
    if fault["type"] == "missing":
        raise ValueError(f"{label(key)} is missing; add such as '{path[-1]}: ...'")
    value = fault["input"]
    is_text = str in union_members(option) and not isinstance(value, dict | list)
    quotes = "; write it in quotes" if is_text else ""
    raise ValueError(
        f"{label(key)} is {format_value(value)}, it must be {expected_type(option, default)}{quotes}"
    )


def _check_values(
    kind: type, content: dict[str, Any], where: str, label: Callable[[str], str]
) -> None:
    """Raise ValueError for an unknown key, and for a boolean or NaN that should be a number.

    Pydantic takes true and false for 1 and 0.
    """
    hints = get_type_hints(kind)
    defaults = {one.name: one.default for one in fields(kind)}
    for key, value in content.items():
        if key not in defaults:
            near = did_you_mean_key(
                f"{where}{key}", [f"{where}{name}" for name in defaults]
            )
            raise ValueError(f"unknown key '{where}{key}'; {near}")
        option = hints[key]
        if _is_no_number(option, value):
            raise ValueError(
                f"{label(where + key)} is {format_value(value)}, it must be {expected_type(option, defaults[key])}"
            )
        for section, name, inner in _sections(option, value):
            _check_values(section, inner, f"{where}{key}{name}.", label)


def _is_no_number(option: Any, value: Any) -> bool:
    """Return whether a value of a numeric option is a boolean or not a number."""
    kinds = {option, *union_members(option), *get_args(option)}
    if not kinds & {int, float}:
        return False
    takes_words = bool in kinds or any(get_origin(kind) is Literal for kind in kinds)
    is_bool = isinstance(value, bool) and not takes_words
    return is_bool or str(value).lower() == "nan"


def _sections(option: Any, value: Any) -> Iterator[tuple[Any, str, dict[str, Any]]]:
    """Yield the dataclass, name and values of each section within an option's value."""
    for kind in {option, *union_members(option), *get_args(option)}:
        if not is_dataclass(kind) or not isinstance(value, dict):
            continue
        if get_origin(option) is not dict:
            yield kind, "", value
            continue
        for name, inner in value.items():
            if isinstance(inner, dict):
                yield kind, f".{name}", inner


def _find_field(kind: Any, path: Iterable[Any]) -> tuple[list[str], Any, Any]:
    """Follow a path of keys, as far as it leads to fields or into mappings.

    Returns:
        The keys, the type of the last one, and its default.
    """
    keys: list[str] = []
    default: Any = None
    for part in path:
        section = next(filter(is_dataclass, (kind, *union_members(kind))), None)
        hints = get_type_hints(section) if section else {}
        if section and part in hints:
            default = next(one.default for one in fields(section) if one.name == part)  # type: ignore[arg-type]
            kind = hints[part]
        elif get_origin(kind) is dict:
            kind = get_args(kind)[1]
        else:
            break
        keys.append(str(part))
    return keys, kind, default


def union_members(kind: Any) -> list[Any]:
    """Return the members of a union type, or the type alone."""
    return list(get_args(kind)) if get_origin(kind) in (Union, UnionType) else [kind]


def format_value(value: Any) -> str:
    """Format a value as YAML does."""
    if value is None:
        return "null"
    return repr(value).lower() if isinstance(value, bool) else repr(value)


TYPE_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "a mapping such as '{key: value}'",
}
ITEM_WORDS = {
    int: "whole numbers such as '[1, 2]'",
    float: "numbers such as '[0.1, 0.2]'",
    str: "names such as '[a, b]'",
}


def expected_type(kind: Any, default: Any = None) -> str:
    """Describe the values that an option takes: `true or false`."""
    choices: list[str] = []
    others: list[str] = []
    for member in union_members(kind):
        if member is bool:
            choices += ["true", "false"]
        elif get_origin(member) is Literal:
            choices += map(str, get_args(member))
        elif get_origin(member) is list:
            others.append(f"a list of {ITEM_WORDS.get(get_args(member)[0], 'values')}")
        elif member is not NoneType:
            other = "a mapping" if is_dataclass(member) else "another one"
            others.append(TYPE_WORDS.get(get_origin(member) or member, other))
    if not others:
        is_flag = choices == ["true", "false"]
        return "true or false" if is_flag else f"one of {', '.join(choices)}"
    is_number = isinstance(default, int | float) and not isinstance(default, bool)
    example = f", such as {default}" if is_number and default else ""
    return " or ".join([*choices, *others]) + example
