"""Typed configurations from YAML files, with suggestions for unknown keys.

content = read_yaml("jobs/configs/retrieval/sasrec.yaml")
fit = build(FitConfig, content["fit"], "fit.")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from core.errors import UserError, did_you_mean, one_line
from core.files import open_uri


def path_fields(config: type, *kinds: str) -> set[str]:
    """Return the names of a config's fields that hold paths of some kinds.

    Args:
        config: Dataclass of the config.
        kinds: Kinds of path: `checkpoint`, `folder`, or `encoder`, which is a
            folder or a name of the model hub. A field declares its kind by
            `metadata={"names": "checkpoint"}`.
    """
    return {
        field.name for field in fields(config) if field.metadata.get("names") in kinds
    }


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten nested values to strings with dotted names."""
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
    """Raise ValueError for the first field whose value is too small.

    Args:
        config: Instance of the dataclass.
        names: Names of the fields to check; a value of None is valid.
        least: Smallest valid value.
        section: Prefix of the names in messages, such as `fit.`.
    """
    for name in names:
        value = getattr(config, name)
        if value is not None and not value >= least:
            raise ValueError(f"{section}{name} is {value}, it must be at least {least}")


def check_shares(config: Any, names: Iterable[str], section: str = "") -> None:
    """Raise ValueError for the first field whose value is not between 0 and 1.

    Args:
        config: Instance of the dataclass.
        names: Names of the fields to check.
        section: Prefix of the names in messages, such as `fit.`.
    """
    for name in names:
        value = getattr(config, name)
        if not 0 <= value <= 1:
            raise ValueError(
                f"{section}{name} is {value}, it must be a fraction between 0 and 1"
            )


def check_positive(config: Any, names: Iterable[str]) -> None:
    """Raise ValueError for the first field whose value is below 1."""
    check_least(config, names, 1)


def check_known(names: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raise UserError for the first unknown name.

    Args:
        names: Names to check.
        known: Valid names.
        what: Setting with the names, for the message.
    """
    valid_names = list(known)
    for name in names:
        if name not in valid_names:
            suggestion = did_you_mean(name, valid_names)
            raise UserError(f"{what} has '{name}'; {suggestion}")


class UniqueKeyLoader(yaml.SafeLoader):
    """A YAML loader that rejects duplicate keys in a mapping."""

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Any, Any]:
        """Construct a mapping, or raise MarkedYAMLError for a duplicate key."""
        keys = set[tuple[str, str]]()
        for key, _ in node.value:
            if (key.tag, str(key.value)) in keys:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} is duplicated",
                    problem_mark=key.start_mark,
                )
            keys.add((key.tag, str(key.value)))
        return super().construct_mapping(node, deep)


def read_yaml(uri: str) -> dict[str, Any]:
    """Read the mapping in a YAML file, given its path or URI.

    Raises:
        UserError: If the file does not exist or does not contain a mapping.
    """
    filesystem, path = open_uri(uri)
    try:
        with filesystem.open_input_stream(path) as stream:
            content = yaml.load(stream.read(), UniqueKeyLoader)
    except OSError as error:
        raise UserError(f"cannot read {uri} ({one_line(error)})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{uri} is not valid YAML: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise UserError(f"{uri} holds {type(content).__name__}, not a mapping")
    return content


def read_configs(uris: Iterable[str]) -> dict[str, Any]:
    """Merge the sections of several YAML files.

    Values of later files override values of earlier files.

    Raises:
        UserError: If a file does not exist or does not contain a mapping.
    """
    content: dict[str, Any] = {}
    for uri in uris:
        for name, section in read_yaml(uri).items():
            earlier = content.get(name)
            if isinstance(section, dict) and isinstance(earlier, dict):
                section = {**earlier, **section}
            content[name] = section
    return content


@dataclass(kw_only=True)
class NamedConfig:
    """Options of a model or a tokenizer, with its name."""

    name: str = field(default="", metadata={"hidden": True})
    """Name in the registry; several models may share a config class."""

    may_be_zero: ClassVar[tuple[str, ...]] = ()
    """Sizes that may be 0, though their default is larger."""


def build(
    kind: type,
    content: dict[str, Any],
    where: str = "",
    label: Callable[[str], str] = "'{}'".format,
) -> Any:
    """Build a dataclass and its nested dataclasses from plain values.

    Args:
        kind: Dataclass to build.
        content: Values by field.
        where: Prefix of the keys in messages, such as `fit.`.
        label: Formats a key for messages.

    Raises:
        ValueError: For the first key that is unknown, missing or of another type.
    """
    _check_values(kind, content, where, label)
    try:
        from pydantic import TypeAdapter, ValidationError
    except ImportError:
        # Without pydantic, '1e-3' remains a string and 1.5 layers are accepted.
        return kind(**content)
    try:
        return TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        # a misspelt key leads to a missing key too, so missing keys come last
        faults = sorted(error.errors(), key=lambda fault: fault["type"] == "missing")
    fault = faults[0]
    if fault["type"] == "value_error":
        raise ValueError(fault["msg"].removeprefix("Value error, "))
    path, option, default = _find_field(kind, fault["loc"])
    key = where + ".".join(path)
    if fault["type"] == "missing":
        raise ValueError(f"{label(key)} is missing")
    value = fault["input"]
    is_text = str in union_members(option) and not isinstance(value, dict | list)
    quotes = "; write it in quotes" if is_text else ""
    expected = expected_type(option, default)
    raise ValueError(
        f"{label(key)} is {format_value(value)}, it must be {expected}{quotes}"
    )


def _check_values(
    kind: type, content: dict[str, Any], where: str, label: Callable[[str], str]
) -> None:
    """Check keys and numbers, because pydantic accepts true and false as 1 and 0."""
    hints = get_type_hints(kind)
    defaults = {field.name: field.default for field in fields(kind)}
    for key, value in content.items():
        if key not in defaults:
            suggestion = did_you_mean(
                f"{where}{key}", [f"{where}{name}" for name in defaults]
            )
            raise ValueError(f"unknown key '{where}{key}'; {suggestion}")
        option = hints[key]
        if _is_no_number(option, value):
            expected = expected_type(option, defaults[key])
            raise ValueError(
                f"{label(where + key)} is {format_value(value)}, it must be {expected}"
            )
        if issubclass(kind, NamedConfig):
            least = int(bool(defaults[key]) and key not in kind.may_be_zero)
            _check_size(f"{where}{key}", key, value, defaults[key], least)
        for section, name, inner in _sections(option, value):
            _check_values(section, inner, f"{where}{key}{name}.", label)


def _check_size(label: str, name: str, value: Any, default: Any, least: int) -> None:
    """Check a size or dropout of a model, which PyTorch would accept or find late."""
    is_size = type(value) is type(default) is int and name != "max_depth"
    if is_size and value < least:
        raise ValueError(f"{label} is {value}, it must be at least {least}")
    if name.endswith("dropout") and not 0 <= value < 1:
        raise ValueError(f"{label} is {value}, it must be at least 0 and below 1")


def _is_no_number(option: Any, value: Any) -> bool:
    """Return whether the value of a numeric option is a boolean or NaN."""
    kinds = {option, *union_members(option), *get_args(option)}
    if not kinds & {int, float}:
        return False
    accepts_bool = bool in kinds or any(get_origin(kind) is Literal for kind in kinds)
    is_bool = isinstance(value, bool) and not accepts_bool
    return is_bool or str(value).lower() == "nan"


def _sections(option: Any, value: Any) -> Iterator[tuple[Any, str, dict[str, Any]]]:
    """Yield the dataclass, name and values of each nested section of an option."""
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
    """Follow a path of keys through nested dataclasses and mappings."""
    keys: list[str] = []
    default: Any = None
    for part in path:
        section: Any = next(filter(is_dataclass, (kind, *union_members(kind))), None)
        hints = get_type_hints(section) if section else {}
        if section and part in hints:
            defaults = {field.name: field.default for field in fields(section)}
            default = defaults[part]
            kind = hints[part]
        elif get_origin(kind) is dict:
            kind = get_args(kind)[1]
        else:
            break
        keys.append(str(part))
    return keys, kind, default


def union_members(kind: Any) -> list[Any]:
    """Return the members of a union type, or a list of the type itself."""
    return list(get_args(kind)) if get_origin(kind) in (Union, UnionType) else [kind]


def format_value(value: Any) -> str:
    """Format a value like YAML, for messages."""
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
    """Describe the valid values of an option, such as `true or false`.

    Args:
        kind: Type of the option.
        default: Default of the option; a number is shown as an example.
    """
    choices: list[str] = []
    descriptions: list[str] = []
    for member in union_members(kind):
        if member is bool:
            choices += ["true", "false"]
        elif get_origin(member) is Literal:
            choices += map(str, get_args(member))
        elif get_origin(member) is list:
            items = ITEM_WORDS.get(get_args(member)[0], "values")
            descriptions.append(f"a list of {items}")
        elif member is not NoneType:
            fallback = "a mapping" if is_dataclass(member) else "another value"
            plain_type = get_origin(member) or member
            descriptions.append(TYPE_WORDS.get(plain_type, fallback))
    if not descriptions:
        is_flag = choices == ["true", "false"]
        return "true or false" if is_flag else f"one of {', '.join(choices)}"
    is_number = isinstance(default, int | float) and not isinstance(default, bool)
    example = f", such as {default}" if is_number and default else ""
    return " or ".join([*choices, *descriptions]) + example
