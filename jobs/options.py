"""Parse command lines and YAML files into dataclasses, and format their help.

    config = parse(Config)  # --config FILE --key value --section.key value --flag

A field whose type is a dataclass is a section: its options start with the name of the
field, unless the field has the metadata `inline`. A field with the metadata `variants`,
a mapping from names to dataclasses, is a section whose dataclass is chosen by its
option `name`, such as `--model.name sasrec`; with the metadata `by_name` it is chosen
by the field itself, and its options start with the chosen name, such as `--tokenizer
rqvae --rqvae.levels 4`. A mapping field accepts any key below its name. An option of a
`list[str]` field may be repeated, one item each.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import (
    MISSING,
    Field,
    dataclass,
    field,
    fields,
    is_dataclass,
    replace,
)
from itertools import pairwise
from types import NoneType
from typing import Any, Literal, TypeVar, get_origin, get_type_hints

import yaml

from core.errors import UserError, did_you_mean
from core.options import build, expected_type, format_value, read_yaml, union_members

Config = TypeVar("Config")

HELP_FLAGS = ("--help", "-h")


@dataclass(frozen=True)
class Option:
    """An option of a command."""

    kind: Any
    """Type of the value."""
    default: Any
    """Default value; MISSING if the option is required."""
    docstring: str
    """Docstring of the option's field."""
    path: tuple[str, ...]
    """Fields from the top-level dataclass to the option, such as `("fit", "lr")`."""
    section: str = ""
    """Docstring of the section; empty outside of sections."""

    @property
    def is_mapping(self) -> bool:
        """Whether the option takes any key below its name."""
        return any(get_origin(kind) is dict for kind in union_members(self.kind))

    @property
    def summary(self) -> str:
        """Choices or number type, otherwise the first sentence of the docstring."""
        is_scalar = all(
            kind in (bool, int, float, NoneType) or get_origin(kind) is Literal
            for kind in union_members(self.kind)
        )
        if is_scalar:
            return expected_type(self.kind, self.default)
        return self.docstring.split(". ")[0].rstrip(".")

    def parse_word(self, word: str) -> Any:
        """Convert a word of the command line to a value of the option's type."""
        kinds = union_members(self.kind)
        if word == "null" and NoneType in kinds:
            return None
        if all(
            kind in (str, NoneType) or get_origin(kind) is Literal for kind in kinds
        ):
            return word
        if list[str] in kinds and not word.startswith("["):
            return [word]
        return parse_scalar(word)


def parse_scalar(word: str) -> Any:
    """Convert a word by YAML's rules; `1e-4`, a string in YAML 1.1, is a number."""
    if re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", word):
        return float(word)
    try:
        return yaml.safe_load(word or '""')
    except yaml.YAMLError:
        return word


def list_options(
    kind: type, chosen: Mapping[str, str] | None = None, prefix: str = ""
) -> dict[str, Option]:
    """Return the options of a dataclass and its sections by key, such as `fit.lr`.

    Args:
        kind: Dataclass of the options.
        chosen: Names of the chosen variants, by field. A section whose variant is not
            in `chosen` is one option that accepts any keys below its name.
        prefix: Text before all keys.
    """
    return dict(_walk_options(kind, chosen or {}, prefix))


def _walk_options(
    kind: type,
    chosen: Mapping[str, str],
    prefix: str,
    path: tuple[str, ...] = (),
    section: str = "",
) -> Iterator[tuple[str, Option]]:
    hints = get_type_hints(kind)
    docstrings = read_field_docstrings(kind)
    for option_field in fields(kind):
        name = option_field.name
        key = prefix + name
        field_path = (*path, name)
        section_class = _section_class(hints[name])
        variants = option_field.metadata.get("variants")
        by_name = option_field.metadata.get("by_name")
        if variants and name in chosen:
            section_class = variants[chosen[name]]
            yield (
                name_key(option_field),
                Option(
                    kind=str,
                    default=chosen[name],
                    docstring=f"Which {name}: one of {', '.join(variants)}.",
                    path=(*field_path, "name"),
                    section="" if by_name else first_paragraph(section_class),
                ),
            )
            key = chosen[name] if by_name else key
        elif variants and by_name:
            for variant in variants:
                yield variant, Option(dict[str, Any], None, "", (variant,))
        if section_class and option_field.metadata.get("inline"):
            yield from _walk_options(section_class, {}, prefix, field_path, section)
        elif section_class:
            title = first_paragraph(section_class)
            yield from _walk_options(section_class, {}, f"{key}.", field_path, title)
        elif not option_field.metadata.get("hidden"):
            yield (
                key,
                Option(
                    kind=dict[str, Any] if variants else hints[name],
                    default=_default(option_field),
                    docstring=docstrings.get(name, ""),
                    path=field_path,
                    section=section,
                ),
            )


def name_key(section: Field[Any]) -> str:
    """Return the key of the option that chooses the variant of a section."""
    return section.name + ("" if section.metadata.get("by_name") else ".name")


def _section_class(hint: Any) -> Any:
    """Return the dataclass of a section, or None for a field of another type."""
    return next(filter(is_dataclass, union_members(hint)), None)


def _default(option_field: Field[Any]) -> Any:
    if option_field.default_factory is MISSING:
        return option_field.default
    return option_field.default_factory()


def first_paragraph(kind: type) -> str:
    """Return the first paragraph of a class's docstring, joined into one line."""
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split())


def read_field_docstrings(kind: type) -> dict[str, str]:
    """Return the docstrings below the fields of a dataclass and its bases, by field."""
    docstrings: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        # built-in classes and classes made at run time have no source
        with suppress(OSError, TypeError):
            (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            for statement, following in pairwise(body.body):  # type: ignore[attr-defined]
                if not isinstance(statement, ast.AnnAssign):
                    continue
                value = following.value if isinstance(following, ast.Expr) else None
                if isinstance(value, ast.Constant):
                    text = " ".join(str(value.value).split())
                    docstrings[statement.target.id] = text  # type: ignore[union-attr]
    return docstrings


def split_words(argv: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield the pairs of key and value of a command line.

    The value is None for a key that another key or nothing follows. Hyphens in keys
    become underscores: `--dry-run` equals `--dry_run`.
    """
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise UserError(f"'{word}' belongs to no option")
        key, equals, value = word[2:].partition("=")
        key = key.replace("-", "_")
        if equals:
            yield key, value
        elif words and not words[0].startswith("--"):
            yield key, words.pop(0)
        else:
            yield key, None


@dataclass(frozen=True)
class Layer:
    """Nested values from one source: a YAML file, or a mapping within a YAML file."""

    content: Mapping[str, Any]
    """Nested values by key."""
    source: str
    """Name of the layer in messages, such as the file's path."""


@dataclass(frozen=True)
class Setting:
    """A value of an option, set by a layer or by the command line."""

    key: str
    """Dotted key of the option, such as `fit.lr`."""
    value: Any
    """Parsed value."""
    label: str
    """Name of the key in messages: `--key`, or the key and its file."""
    appends: bool = False
    """Whether the value is added to the list of earlier values of a repeated option."""


def flatten_layer(layer: Layer, options: Mapping[str, Option]) -> Iterator[Setting]:
    """Yield the values of a layer by dotted keys.

    Raises:
        UserError: for a key that is not in `options`.
    """

    def walk(node: Mapping[str, Any], prefix: str) -> Iterator[Setting]:
        for name, value in node.items():
            key = f"{prefix}{name}"
            has_options = any(option.startswith(f"{key}.") for option in options)
            if has_options and isinstance(value, dict):
                yield from walk(value, f"{key}.")
            else:
                refuse_unknown(key, options, f" in {layer.source}")
                yield Setting(key, value, f"{key} in {layer.source}")

    yield from walk(layer.content, "")


def convert_words(
    words: Sequence[tuple[str, str | None]], options: Mapping[str, Option]
) -> Iterator[Setting]:
    """Convert the words of a command line to values. A flag without a value is true.

    Args:
        words: Pairs of key and value, from `split_words`.
        options: Options of the command by key.

    Raises:
        UserError: if the value of an option that is not boolean is missing.
    """
    for key, word in words:
        option = options.get(key)
        if word is None and option and bool in union_members(option.kind):
            word = "true"
        if word is None:
            raise UserError(f"--{key} has no value")
        value = option.parse_word(word) if option else parse_scalar(word)
        appends = isinstance(value, list) and not word.startswith("[")
        yield Setting(key, value, f"--{key}", appends)


def refuse_unknown(key: str, options: Mapping[str, Option], source: str = "") -> None:
    """Raise a UserError if a key is unknown, and suggest the most similar key.

    Args:
        key: Dotted key.
        options: Options of the command by key.
        source: Name of the key's file in the message, such as ` in FILE`.
    """
    mappings = [name for name, option in options.items() if option.is_mapping]
    in_mapping = any(key.startswith(f"{name}.") for name in mappings)
    if key not in options and not in_mapping:
        suggestion = did_you_mean(key, options)
        raise UserError(f"unknown key '{key}'{source}; {suggestion}")


@dataclass(frozen=True)
class Values:
    """Merged values of a command's options, not yet built into the dataclass."""

    content: dict[str, Any]
    """Values by field, nested by section."""
    labels: dict[str, str]
    """Names of the keys in messages, by path of fields joined by dots."""
    options: Mapping[str, Option]
    """The command's options by key."""
    variants: Mapping[str, type] = field(default_factory=dict)
    """Chosen dataclasses of sections with variants, by field."""

    def label(self, key: str) -> str:
        """Return the name of a key in messages."""
        return self.labels.get(key, f"'{key}'")

    def check_required(self) -> None:
        """Raise UserError if a required option is missing."""
        missing = [
            f"--{key} ({option.summary})"
            for key, option in self.options.items()
            if option.default is MISSING and ".".join(option.path) not in self.labels
        ]
        if missing:
            raise UserError(f"missing: {', '.join(missing)}")

    def build(self, kind: type[Config]) -> Config:
        """Build the dataclass.

        Raises:
            UserError: if a required option is missing, a value has the wrong type, or
                the dataclass rejects a value.
        """
        self.check_required()
        content = dict(self.content)
        try:
            for name, variant in self.variants.items():
                content[name] = build(variant, content[name], f"{name}.", self.label)
            return build(kind, content, label=self.label)  # type: ignore[no-any-return]
        except ValueError as error:
            raise UserError(str(error)) from error


def read_values(
    kind: type, layers: Sequence[Layer], argv: Sequence[str] = ()
) -> Values:
    """Merge layers, config files and a command line into the values of a dataclass.

    Later sources override earlier ones: `layers` in order, the files of `--config` in
    order, then the other options of `argv`.

    Args:
        kind: Dataclass of the options.
        layers: Nested values.
        argv: Words of a command line.

    Raises:
        UserError: for an unknown key; the message suggests the most similar key.
    """
    words = list(split_words(argv))
    files = [word or "" for key, word in words if key == "config"]
    words = [(key, word) for key, word in words if key != "config"]
    if "" in files:
        raise UserError("--config has no value")
    layers = [*layers, *map(read_layer, files)]

    def flatten_layers(options: Mapping[str, Option]) -> list[Setting]:
        for key, _ in words:
            refuse_unknown(key, options)
        settings: list[Setting] = []
        for layer in layers:
            settings += flatten_layer(layer, options)
        return settings

    options = list_options(kind)
    from_layers = flatten_layers(options)
    sections = {
        section.name: section
        for section in fields(kind)
        if "variants" in section.metadata
    }
    chosen = {
        name: choose_variant(section, from_layers, words)
        for name, section in sections.items()
    }
    if chosen:
        options = list_options(kind, chosen)
        from_layers = flatten_layers(options)
    variants = {
        name: section.metadata["variants"][chosen[name]]
        for name, section in sections.items()
    }
    settings = [*from_layers, *convert_words(words, options)]
    return merge_settings(settings, options, variants)


def read_layer(uri: str) -> Layer:
    """Read a YAML config file."""
    return Layer(read_yaml(uri), uri)


def choose_variant(
    section: Field[Any],
    from_layers: Iterable[Setting],
    words: Iterable[tuple[str, str | None]],
) -> str:
    """Return the name of the variant that layers or the command line set for a section.

    Args:
        section: Field of the section, with the metadata `variants`.
        from_layers: Values of all layers.
        words: Pairs of key and value of the command line, which override the layers.

    Raises:
        UserError: if no name or an unknown name is set.
    """
    name, key = None, name_key(section)
    from_words = [Setting(key, word, f"--{key}") for key, word in words]
    for setting in [*from_layers, *from_words]:
        if setting.key == key:
            name = setting.value
        elif setting.key == section.name and isinstance(setting.value, dict):
            name = setting.value.get("name", name)
        elif setting.key == section.name:
            value = format_value(setting.value)
            raise UserError(
                f"{setting.label} is {value}, it must be {expected_type(dict)}"
            )
    variants: Mapping[str, type] = section.metadata["variants"]
    if name is None:
        raise UserError(
            f"no {section.name} is named; give --{key} or a --config that has it: "
            f"one of {', '.join(variants)}"
        )
    if name not in variants:
        suggestion = did_you_mean(str(name), variants)
        raise UserError(
            f"unknown {section.name} '{name}'; {suggestion}; known are "
            f"{', '.join(variants)}"
        )
    say_loading("torch", "ray", "mlflow")  # the module of the variant imports them
    return str(name)


def merge_settings(
    settings: Iterable[Setting],
    options: Mapping[str, Option],
    variants: Mapping[str, type],
) -> Values:
    """Merge settings into nested content; later settings override earlier ones.

    Args:
        settings: Values of all layers and of the command line, in this order.
        options: Options of the command by key.
        variants: Chosen dataclasses of sections with variants, by field.
    """
    content: dict[str, Any] = {}
    labels: dict[str, str] = {}
    for key, setting in _merge_by_key(settings, options).items():
        mapping = next((name for name in options if key.startswith(f"{name}.")), None)
        *sections, name = options[mapping or key].path
        node = content
        for section in sections:
            node = node.setdefault(section, {})
        path = ".".join([*sections, name])
        if mapping:
            subkey = key[len(mapping) + 1 :]
            node[name] = {**(node.get(name) or {}), subkey: setting.value}
            labels[f"{path}.{subkey}"] = setting.label
        else:
            node[name] = setting.value
        labels[path] = setting.label
    return Values(content, labels, options, variants)


def _merge_by_key(
    settings: Iterable[Setting], options: Mapping[str, Option]
) -> dict[str, Setting]:
    """Return the last setting of each key, mappings and repeated lists joined."""
    merged: dict[str, Setting] = {}
    for setting in settings:
        key, value = setting.key, setting.value
        option, earlier = options.get(key), merged.get(key)
        if option and get_origin(option.kind) is dict and not isinstance(value, dict):
            raise UserError(
                f"{setting.label} is {format_value(value)}, it must be "
                f"{expected_type(option.kind)}"
            )
        if earlier and isinstance(value, dict) and "." not in key:
            value = {**(earlier.value or {}), **value}
        if earlier and setting.appends and earlier.appends:
            value = [*earlier.value, *value]
        merged[key] = replace(setting, value=value)
    return merged


def parse(
    kind: type[Config], argv: Sequence[str] | None = None, module: str = ""
) -> Config:
    """Build a dataclass from a command line. With `--help`, print the help and exit.

    Args:
        kind: Dataclass of the options.
        argv: Words of the command line; by default `sys.argv[1:]`.
        module: Name of the module whose docstring the help shows; by default the
            module of the dataclass.

    Raises:
        UserError: for an unknown key, a value of the wrong type, or a value that the
            dataclass rejects.
    """
    argv = sys.argv[1:] if argv is None else argv
    exit_with_help(kind, argv, module)
    return read_values(kind, [], argv).build(kind)


def read_mapping(kind: type, options: Mapping[str, Any], source: str) -> Values:
    """Read the values of a dataclass's options from a mapping.

    Args:
        kind: Dataclass of the options.
        options: Nested options. The key `config` names one or several YAML files, whose
            values the other options override.
        source: Name of the mapping in messages.
    """
    config = options.get("config") or []
    files = [config] if isinstance(config, str) else config
    others = {key: value for key, value in options.items() if key != "config"}
    return read_values(kind, [*map(read_layer, files), Layer(others, source)])


def merge_options(
    options: Mapping[str, Any], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Return nested options with the values of `overrides` in place of equal keys."""
    merged = {**options, **overrides}
    for name, value in overrides.items():
        section = options.get(name)
        if isinstance(value, dict) and isinstance(section, dict):
            merged[name] = merge_options(section, value)
    return merged


def to_words(options: Mapping[str, Any], prefix: str = "--") -> Iterator[str]:
    """Yield nested options as words of a command line, such as `--fit.lr`, `0.1`."""
    for name, value in options.items():
        if isinstance(value, dict) and value:
            yield from to_words(value, f"{prefix}{name}.")
            continue
        for item in value if isinstance(value, list) else [value]:
            yield f"{prefix}{name}"
            yield str(item).lower() if isinstance(item, bool) else str(item)


def exit_with_help(kind: type, argv: Sequence[str], module: str = "") -> None:
    """Print the help and exit if a command line contains `--help` or `-h`.

    Args:
        kind: Dataclass of the command's options.
        argv: Words of the command line, which may choose variants of sections.
        module: Name of the module whose docstring is printed; by default the module of
            the dataclass.
    """
    if not set(HELP_FLAGS) & set(argv):
        return
    words = [word for word in argv if word not in HELP_FLAGS]
    chosen = {
        section.name: choose_help_variant(section, words)
        for section in fields(kind)
        if "variants" in section.metadata
    }
    print(format_help(kind, chosen, sys.modules[module or kind.__module__]))
    sys.exit(0)


def choose_help_variant(section: Field[Any], argv: Sequence[str]) -> str:
    """Return the variant whose options the help shows: the named or the first one."""
    variants: Mapping[str, type] = section.metadata["variants"]
    words = list(split_words(argv))
    layers = [read_layer(word) for key, word in words if key == "config" and word]
    values = [layer.content.get(section.name, {}) for layer in layers]
    names = [
        value.get("name") if isinstance(value, dict) else value for value in values
    ]
    names += [word for key, word in words if key == name_key(section)]
    if names and names[-1] in variants:
        return str(names[-1])
    return next(iter(variants))


def format_help(kind: type, chosen: Mapping[str, str], module: Any) -> str:
    """Return the help of a command: usage, docstring, and options by section.

    Args:
        kind: Dataclass of the command's options.
        chosen: Names of the variants whose options are shown, by field.
        module: Module of the command.
    """
    name = module.__spec__.name if module.__spec__ else module.__name__
    lines = [
        f"usage: python -m {name} [--config FILE] [--OPTION VALUE ...]",
        "",
        (module.__doc__ or "").strip(),
        "",
        *describe_option(
            "--config FILE",
            "YAML file with the options below; options of the command line override "
            "its values.",
        ),
    ]
    options = list_options(kind, chosen)
    # options outside of sections come first, required options before others
    ordered = sorted(
        options.items(),
        key=lambda item: (item[1].section != "", item[1].default is not MISSING),
    )
    section = ""
    for key, option in ordered:
        if option.section != section:
            section = option.section
            title = f"{key.rpartition('.')[0]}: {section}"
            lines += ["", *textwrap.wrap(title, HELP_WIDTH)]
        text = option.docstring
        if option.default is MISSING:
            text += " (required)"
        elif option.default not in (None, ""):
            text += f" ({str(option.default).lower()})"
        lines += describe_option(f"--{key} {metavar(option.kind)}", text)
    return "\n".join(lines)


def metavar(kind: Any) -> str:
    """Return the placeholder for values of a type in the help, such as `N` for int."""
    words: list[str] = []
    for member in union_members(kind):
        if get_origin(member) is Literal:
            words += map(str, member.__args__)
        elif member is not NoneType:
            words.append(METAVARS.get(get_origin(member) or member, "VALUE"))
    return "|".join(words)


HELP_WIDTH = 120
"""Width of lines of help, in characters."""
METAVARS = {
    bool: "true|false",
    int: "N",
    float: "X",
    str: "TEXT",
    list: "[A, B]",
    dict: "'{K: V}'",
}


def describe_option(option: str, text: str) -> list[str]:
    """Return the lines of help for one option: its name, and the wrapped text."""
    indent = " " * 8
    return [
        f"  {option}",
        *textwrap.wrap(
            text, HELP_WIDTH, initial_indent=indent, subsequent_indent=indent
        ),
    ]


def say_loading(*packages: str) -> None:
    """Print that packages are being loaded, unless the first one is already imported.

    Imports of large packages take seconds, or a minute on a busy machine.
    """
    if packages[0] not in sys.modules:
        print(f"loading {', '.join(packages)}", flush=True)
