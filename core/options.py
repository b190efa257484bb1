"""Typed options: dataclasses checked by pydantic, from YAML files and command lines.

    @dataclass(config=STRICT)
    class FitConfig:
        lr: PositiveFloat = 1e-3
        '''Peak learning rate.'''

    words = ["--config", "sasrec.yaml", "--fit.lr", "0.1"]
    config = build(TrainConfig, read_words(words, TrainConfig))
    fit = build(FitConfig, {"lr": 0.1}, "fit.")

A field whose type is a dataclass is a section, whose options start with its name. The
docstring below a field is its help.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from inspect import cleandoc, getsource
from itertools import pairwise
from types import UnionType
from typing import (
    Annotated,
    Any,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass
from pydantic_core import to_jsonable_python

from core.errors import UserError, did_you_mean, one_line
from core.files import absolute, open_uri

STRICT = ConfigDict(
    extra="forbid",
    allow_inf_nan=False,
    defer_build=True,
)
"""Settings of all configs: unknown keys, infinity and NaN are refused, and validators
are built when they are first used."""

Config = TypeVar("Config")

Fraction = Annotated[float, Field(ge=0, le=1)]
Dropout = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Folder = Annotated[str, Field(min_length=1)]
AbsoluteFolder = Annotated[Folder, AfterValidator(absolute)]
"""Folder whose path becomes absolute, since workers run in other folders."""
AbsolutePath = Annotated[str, AfterValidator(lambda path: path and absolute(path))]
"""Path that becomes absolute; "" for none."""
CheckpointPath = Annotated[AbsolutePath, "checkpoint"]
"""A checkpoint, or the folder of a run; "" for none."""

SECRET = re.compile(
    r"(^\w+:(?!/)\S*|://(?!anonymous@)([^/\s@]*:\S*|[^/\s]*))@|"
    r"://\S*[?&][\w-]*(key|secret|token|password|signature)=",
    re.IGNORECASE,
)
"""Pattern of an address with a user, or with a key among its parameters."""

SCIENTIFIC = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
"""Pattern of numbers such as `1e-4`, which are strings in YAML 1.1."""


def refuse_secrets(value: object, what: str) -> None:
    """Raise UserError if a value has an address with a password or key.

    Records, logs and messages have all values of a config.
    """
    if SECRET.search(str(value)):
        raise UserError(
            f"{what} has an address with a user, password or key, which would be "
            "stored and printed; docs/cluster.md has the variables for them"
        )


def parse_scalar(value: Any) -> Any:
    """Convert text by YAML's rules; return other values unchanged."""
    if not isinstance(value, str):
        return value
    if SCIENTIFIC.fullmatch(value):
        return float(value)
    try:
        return yaml.safe_load(value or '""')
    except yaml.YAMLError:
        return value


Free = Annotated[Any, BeforeValidator(parse_scalar)]
"""Type of a value whose type another config knows, such as an axis of a grid."""


@dataclass(config=STRICT, kw_only=True)
class NamedConfig:
    """Options of a model or a tokenizer, with its name."""

    name: str = ""
    """Name in the registry; several models may share a config class."""


class UniqueKeyLoader(yaml.SafeLoader):
    """A YAML loader that rejects duplicate keys in a mapping."""

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Any, Any]:
        """Construct a mapping, or raise MarkedYAMLError for a duplicate key."""
        keys = set[tuple[str, str]]()
        for key, _ in node.value:
            typed_key = (key.tag, str(key.value))
            if typed_key in keys:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} is duplicated",
                    problem_mark=key.start_mark,
                )
            keys.add(typed_key)
        return super().construct_mapping(node, deep)


def read_yaml(uri: str) -> dict[str, Any]:
    """Read the mapping in a YAML file, given its path or URI."""
    refuse_secrets(uri, "the name of a file")
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


def merge(base: Mapping[str, Any], *others: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested options; later values replace earlier ones of the same key."""
    merged = dict(base)
    for other in others:
        for key, value in other.items():
            old = merged.get(key)
            if isinstance(value, Mapping) and isinstance(old, Mapping):
                value = merge(old, value)
            merged[key] = value
    return merged


class Option(NamedTuple):
    """An option of a config."""

    key: str
    """Dotted key, such as `fit.lr`."""
    types: tuple[Any, ...]
    """Type, or the members of a union of types."""
    default: Any
    """Default value; MISSING if the option is required."""
    config_class: Any
    """Dataclass that has the option, or a subclass."""

    @property
    def help(self) -> str:
        """Docstring below the field, which may be in a base class."""
        name = self.key.rpartition(".")[2]
        texts = (read_docs(base).get(name) for base in self.config_class.__mro__)
        return next(filter(None, texts), "")


@cache
def read_docs(config_class: type) -> dict[str, str]:
    """Return the docstring below each field of a class, by name."""
    docs = {}
    with suppress(OSError, TypeError):  # the class is in no file
        body = ast.parse(cleandoc(getsource(config_class))).body[0].body  # type: ignore[attr-defined]
        for field, text in pairwise(body):
            target = getattr(field, "target", None)
            if isinstance(target, ast.Name) and isinstance(text, ast.Expr):
                docs[target.id] = cleandoc(ast.literal_eval(text.value))
    return docs


def list_types(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union of types, or the type alone."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def find_section(hint: Any) -> Any:
    """Return the dataclass of a section, or None for a field of another type."""
    return next(filter(is_dataclass, list_types(hint)), None)


def list_options(config_class: Any, prefix: str = "") -> Iterator[Option]:
    """Yield the options of a config and its sections."""
    hints = get_type_hints(config_class)
    for field in fields(config_class):
        section = find_section(hints[field.name])
        if section:
            yield from list_options(section, f"{prefix}{field.name}.")
            continue
        default = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        yield Option(
            f"{prefix}{field.name}",
            list_types(hints[field.name]),
            default,
            config_class,
        )


def read_words(words: Sequence[str], config_class: Any) -> dict[str, Any]:
    """Return the nested values of a command line's words and of their files.

    A flag without a value is true. Lists and mappings are YAML; text is converted by
    the types of the config. A repeated option of a list has several items. Text for a
    section, such as `--tokenizer psid --tokenizer.levels 4`, is its name.
    """
    options = {option.key: option.types for option in list_options(config_class)}
    options["config"] = (list[str],)
    mappings = [
        key
        for key, types in options.items()
        for kind in types
        if get_origin(kind) is dict and get_args(kind)[1] is not Any
    ]
    content: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise UserError(f"'{word}' belongs to no option")
        key, has_value, text = word[2:].partition("=")
        key = key.replace("-", "_")
        types = options.get(key, ())
        if not has_value and (not rest or rest[0].startswith("--")):
            if types and bool not in types:
                raise UserError(f"--{key} has no value")
            text = "true"
        elif not has_value:
            text = rest.pop(0)
        is_text = str in types and not {list, dict} & set(map(get_origin, types))
        is_nested = text == "null" or (text[:1] in ("[", "{") and not is_text)
        value: Any = parse_scalar(text) if is_nested else text
        *sections, name = key.split(".")
        for mapping in mappings:
            if key.startswith(f"{mapping}."):
                sections, name = mapping.split("."), key.removeprefix(f"{mapping}.")
        node = content
        for section in sections:
            if not isinstance(node.setdefault(section, {}), dict):
                node[section] = {"name": node[section]}
            node = node[section]
        if isinstance(value, str) and any(get_origin(t) is list for t in types):
            value = [*node.get(name, []), value]
        if isinstance(node.get(name), dict) and isinstance(value, str):
            node[name]["name"] = value
        else:
            node[name] = value
    return merge_config_files(content)


def merge_config_files(content: Mapping[str, Any], *opened: str) -> dict[str, Any]:
    """Merge nested options over the YAML files that their `config` keys name.

    Values of later files replace values of earlier ones. `opened` has the files from
    which the options come, none of which may be named again.
    """
    options = dict(content)
    files = options.pop("config", [])
    if not isinstance(files, list):
        files = [files]
    for key, value in options.items():
        if isinstance(value, Mapping):
            options[key] = merge_config_files(value, *opened)
    layers = []
    for file in files:
        if file in opened:
            raise UserError(f"config is {file}, which names itself")
        layers.append(merge_config_files(read_yaml(file), *opened, file))
    return merge({}, *layers, options)


def build(
    config_class: type[Config], content: Mapping[str, Any], prefix: str = ""
) -> Config:
    """Build a config from nested values.

    Args:
        config_class: Dataclass of the config.
        content: Values by field.
        prefix: Prefix of keys in messages, such as `fit.`.
    """
    refuse_secrets(content, "an option")
    check_keys(config_class, content, prefix)
    try:
        adapter = TypeAdapter(config_class)
        return adapter.validate_python(content, context=prefix)
    except ValidationError as error:
        raise UserError(describe_error(error, content, prefix)) from error


def as_base(config: Any, base_class: type[Config]) -> Config:
    """Return the options of a config that its base class has."""
    return base_class(
        **{field.name: getattr(config, field.name) for field in fields(base_class)}  # type: ignore[arg-type]
    )


def check_keys(config_class: Any, content: Mapping[str, Any], prefix: str = "") -> None:
    """Raise UserError for the first key that a config or its sections do not have."""
    hints = get_type_hints(config_class)
    names = {field.name for field in fields(config_class)}
    for key, value in content.items():
        if key not in names:
            section, point, name = str(key).partition(".")
            if point:
                raise UserError(
                    f"unknown key '{prefix}{key}'; in a file it is {section}: "
                    f"{{{name}: ...}}"
                )
            known = [option.key for option in list_options(config_class, prefix)]
            nearest = did_you_mean(f"{prefix}{key}", known)
            is_named = issubclass(config_class, NamedConfig)
            owner = f" of {content.get('name')}" if is_named else ""
            raise UserError(f"unknown key '{prefix}{key}'{owner}; {nearest}")
        types = list_types(hints[key])
        if isinstance(value, bool) and {int, float} & {*types} and bool not in types:
            raise UserError(f"{prefix}{key} is {value}; input should be a number")
        sections = {"": value}
        section = find_section(hints[key])
        if get_origin(types[0]) is dict and isinstance(value, Mapping):
            section = find_section(get_args(types[0])[1])
            sections = {f"{name}.": options for name, options in value.items()}
        for name, options in sections.items():
            if section and isinstance(options, Mapping):
                check_keys(section, options, f"{prefix}{key}.{name}")


def describe_error(
    error: ValidationError, content: Mapping[str, Any], prefix: str = ""
) -> str:
    """Return one line with the key, the value and the reason of an error."""
    faults = [(locate(fault["loc"], content), fault) for fault in error.errors()]
    missing = [key for key, fault in faults if fault["type"] == "missing"]
    others = [(key, fault) for key, fault in faults if fault["type"] != "missing"]
    if not others:
        return f"missing: {', '.join(prefix + key for key in missing)}"
    first, fault = others[0]
    if fault["type"] == "value_error":
        section, message = f"{prefix}{first}".rstrip("."), fault["msg"][13:]
        return message if section in message else f"{section}: {message}"
    reasons = [
        fault["msg"].partition(" or an instance of ")[0]
        for key, fault in others
        if key == first
    ]
    reason = " or ".join(dict.fromkeys(reasons))
    return (
        f"{prefix}{first} is {fault['input']!r:.200}; {reason[0].lower()}{reason[1:]}"
    )


def locate(path: Iterable[Any], content: Any) -> str:
    """Return the dotted key of an error, without the names of union members."""
    keys = list[str]()
    for part in path:
        kind = list if isinstance(part, int) else Mapping
        if not isinstance(content, kind):
            break
        keys.append(str(part))
        content = content[part] if kind is list or part in content else None
    return ".".join(keys)


def changed(config: Any, base: Any = None) -> dict[str, Any]:
    """Return the nested values of a config that differ from a base, or its defaults."""
    values = {}
    for option in fields(config):
        value, default = getattr(config, option.name), option.default
        if type(base) is type(config):
            default = getattr(base, option.name)
        elif option.default_factory is not MISSING:
            default = option.default_factory()
        if value != default:
            is_section = is_dataclass(value)
            values[option.name] = changed(value, default) if is_section else value
    return values


def to_words(options: Mapping[str, Any], prefix: str = "--") -> Iterator[str]:
    """Yield nested options as words of a command line: `--fit.lr`, `0.1`."""
    for name, value in options.items():
        if isinstance(value, dict) and value:
            yield from to_words(value, f"{prefix}{name}.")
            continue
        for item in value if isinstance(value, list) else [value]:
            yield f"{prefix}{name}"
            yield str(item).lower() if isinstance(item, bool) else str(item)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten nested values to strings with dotted names."""
    flat: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = str(to_jsonable_python(value))
    return flat


def find_difference(
    before: Mapping[str, Any], now: Mapping[str, Any], but: Collection[str] = ()
) -> str:
    """Return the first setting that differs, as `fit.lr 0.1, not 0.2`, or "".

    Args:
        before: Nested settings.
        now: Other settings.
        but: Dotted names of settings that may differ.
    """
    old, new = flatten(before), flatten(now)
    names = (old.keys() | new.keys()) - set(but)
    for name in sorted(names, key=lambda name: (name != "model.name", name)):
        if old.get(name) != new.get(name):
            return f"{name} {old.get(name)!s:.60}, not {new.get(name)!s:.60}"
    return ""


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
            nearest = did_you_mean(name, valid_names)
            raise UserError(f"unknown '{name}' in {what}; {nearest}")
