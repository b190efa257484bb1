"""Read command lines and YAML files into dataclasses, and print the help that shows their fields.

    config = parse(Config)          # of sys.argv: --config FILE, --key value, --section.key value, --flag

A field that is a dataclass is a section with options of its own; an `inline` section
has no name before its options. A field that is a mapping takes any key below its name.
A field that is a list of texts also takes them one by one, if the option is given
several times. A field with the metadata `variants` is a section whose dataclass is
chosen by its option `name`, such as `--model.name sasrec`; `variants` maps names to
dataclasses.
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

from models.config import (
    build,
    did_you_mean,
    did_you_mean_key,
    expected_type,
    format_value,
    read_yaml,
    union_members,
)
from models.storage.tables import UserError
from models.storage.uri import refuse_secrets

Config = TypeVar("Config")

HELP = ("--help", "-h")


@dataclass(frozen=True)
class Option:
    """An option of a command."""

    kind: Any
    """Type of its values."""
    default: Any
    """Default value; MISSING if the option is required."""
    about: str
    """Docstring of the option's field."""
    path: tuple[str, ...]
    """Names of the sections that hold the value, and of its field."""
    section: str = ""
    """Docstring of the section; empty outside of sections."""

    @property
    def is_mapping(self) -> bool:
        """Whether the option takes any key below its name."""
        return any(get_origin(kind) is dict for kind in union_members(self.kind))

    @property
    def summary(self) -> str:
        """Choices or kind of number, else the first sentence of the docstring."""
        plain = all(
            kind in (bool, int, float, NoneType) or get_origin(kind) is Literal
            for kind in union_members(self.kind)
        )
        if plain:
            return expected_type(self.kind, self.default)
        return self.about.split(". ")[0].rstrip(".")

    def parse_word(self, word: str) -> Any:
        """Convert a word of the command line to a value."""
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
    """Convert a word to a number, list, mapping, true, null or text; 1e-4 is a number."""
    if re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", word):
        return float(word)
    try:
        return yaml.safe_load(word or '""')
    except yaml.YAMLError:
        return word


def list_options(
    kind: type, chosen: Mapping[str, str] | None = None, prefix: str = ""
) -> dict[str, Option]:
    """List the options of a dataclass by their keys, its sections' options included.

    Args:
        kind: The dataclass.
        chosen: Names of the variants of sections, by field. A section whose variant is
            not chosen yet counts as a mapping with any keys.
        prefix: Text before the keys.
    """
    return dict(_walk_options(kind, chosen or {}, prefix))


def _walk_options(
    kind: type,
    chosen: Mapping[str, str],
    prefix: str,
    path: tuple[str, ...] = (),
    section: str = "",
) -> Iterator[tuple[str, Option]]:
    hints, abouts = get_type_hints(kind), read_field_docstrings(kind)
    for one in fields(kind):
        key, inner_path = prefix + one.name, (*path, one.name)
        inner = _section_class(hints[one.name])
        variants = one.metadata.get("variants")
        if variants and one.name in chosen:
            name = chosen[one.name]
            inner = variants[name]
            about = f"Which {one.name}: one of {', '.join(variants)}."
            title = first_paragraph(inner)
            yield f"{key}.name", Option(str, name, about, (*inner_path, "name"), title)
        if inner:
            is_inline = one.metadata.get("inline")
            yield from _walk_options(
                inner,
                {},
                prefix if is_inline else f"{key}.",
                inner_path,
                section if is_inline else first_paragraph(inner),
            )
        elif not one.metadata.get("hidden"):
            type_ = dict[str, Any] if variants else hints[one.name]
            about = abouts.get(one.name, "")
            yield key, Option(type_, _default(one), about, inner_path, section)


def _section_class(hint: Any) -> Any:
    """Return the dataclass of a section, None for a field of another type."""
    return next(filter(is_dataclass, union_members(hint)), None)


def _default(one: Field[Any]) -> Any:
    return one.default if one.default_factory is MISSING else one.default_factory()


def first_paragraph(kind: type) -> str:
    """Return the first paragraph of a class's docstring in one line."""
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split())


def read_field_docstrings(kind: type) -> dict[str, str]:
    """Read the docstrings below the fields of a dataclass and its bases."""
    docstrings: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        # a class that was made in memory, or is built in, has no source
        with suppress(OSError, TypeError):
            (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            for before, line in pairwise(body.body):  # type: ignore[attr-defined]
                if not isinstance(before, ast.AnnAssign):
                    continue
                value = line.value if isinstance(line, ast.Expr) else None
                if isinstance(value, ast.Constant):
                    text = " ".join(str(value.value).split())
                    docstrings[before.target.id] = text  # type: ignore[union-attr]
    return docstrings


def most_derived(kinds: Iterable[type]) -> tuple[type, ...]:
    """Return the classes that no other one of them inherits from."""
    distinct = list(dict.fromkeys(kinds))
    return tuple(
        kind
        for kind in distinct
        if not any(kind in other.__mro__[1:] for other in distinct)
    )


def split_words(argv: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield the keys of a command line and the words after them, None for a key alone.

    `--dry-run` is `--dry_run`.
    """
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise UserError(
                f"'{word}' belongs to no option; give --OPTION VALUE, one with blanks in quotes; see --help for all"
            )
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
    """Values that are given together: a YAML file, or a mapping within one."""

    content: Mapping[str, Any]
    """Nested values by key."""
    source: str
    """Name of the layer in messages, such as the file's path."""


@dataclass(frozen=True)
class Given:
    """A value that a layer or the command line gives for a key."""

    key: str
    value: Any
    label: str
    """How messages call the key: `--key`, or the key in its file."""
    appends: bool = False
    """Whether the value is one more item of a list."""


def flatten_layer(layer: Layer, options: Mapping[str, Option]) -> Iterator[Given]:
    """Yield the values of a layer by dotted keys. Raise UserError for an unknown key."""

    def walk(node: Mapping[str, Any], prefix: str) -> Iterator[Given]:
        for name, value in node.items():
            key = f"{prefix}{name}"
            has_options = any(option.startswith(f"{key}.") for option in options)
            if has_options and isinstance(value, dict):
                yield from walk(value, f"{key}.")
            else:
                refuse_unknown(key, options, f" in {layer.source}")
                yield Given(key, value, f"{key} in {layer.source}")

    yield from walk(layer.content, "")


def convert_words(
    words: Sequence[tuple[str, str | None]], options: Mapping[str, Option]
) -> Iterator[Given]:
    """Yield the values of a command line. `--flag` alone is `--flag true`."""
    for key, word in words:
        option = options.get(key)
        if word is None and option and bool in union_members(option.kind):
            word = "true"
        if word is None:
            raise UserError(f"--{key} has no value; give one after it")
        value = option.parse_word(word) if option else parse_scalar(word)
        appends = isinstance(value, list) and not word.startswith("[")
        yield Given(key, value, f"--{key}", appends)


def refuse_unknown(key: str, options: Mapping[str, Option], source: str = "") -> None:
    """Raise UserError for a key that is no option, with the nearest one."""
    if key not in options and not any(
        key.startswith(f"{name}.")
        for name, option in options.items()
        if option.is_mapping
    ):
        near = did_you_mean_key(key, options)
        raise UserError(f"unknown key '{key}'{source}; {near}; see --help for all")


@dataclass(frozen=True)
class Values:
    """Values of a command's options."""

    content: dict[str, Any]
    """The values by section and field."""
    labels: dict[str, str]
    """How messages call the keys that are given, by section and field, joined by
    dots."""
    options: Mapping[str, Option]
    """The command's options."""
    variants: Mapping[str, type] = field(default_factory=dict)
    """Dataclasses of sections with variants, by field."""

    def label(self, key: str) -> str:
        """Return how messages call a key."""
        return self.labels.get(key, f"'{key}'")

    def check_required(self) -> None:
        """Raise UserError if a required option is not given."""
        missing = [
            f"--{key} ({option.summary})"
            for key, option in self.options.items()
            if option.default is MISSING and ".".join(option.path) not in self.labels
        ]
        if missing:
            them = "them" if len(missing) > 1 else "it"
            raise UserError(
                f"missing: {', '.join(missing)}; give {them}, see --help for all"
            )

    def build(self, kind: type[Config]) -> Config:
        """Build the dataclass.

        Raises:
            UserError: if a required option is missing, a value is of a wrong type, or
                the dataclass refuses it.
        """
        self.check_required()
        content = dict(self.content)
        try:
            for name, variant in self.variants.items():
                inner = {
                    key: value for key, value in content[name].items() if key != "name"
                }
                content[name] = build(variant, inner, f"{name}.", self.label)
            return build(kind, content, label=self.label)  # type: ignore[no-any-return]
        except ValueError as error:
            raise UserError(str(error)) from error


def read_values(
    kind: type, layers: Sequence[Layer], argv: Sequence[str] = ()
) -> Values:
    """Read the values of a dataclass's options.

    Args:
        kind: The dataclass.
        layers: Values, of which the later ones win.
        argv: A command line, which wins over the layers and its own files over them.

    Raises:
        UserError: for an unknown key, with the nearest one.
    """
    words = list(split_words(argv))
    files = [word or "" for key, word in words if key == "config"]
    words = [(key, word) for key, word in words if key != "config"]
    if "" in files:
        raise UserError("--config has no value; give one after it")
    layers = [*layers, *map(read_layer, files)]

    def collect(options: Mapping[str, Option]) -> list[Given]:
        for key, _ in words:
            refuse_unknown(key, options)
        return [given for one in layers for given in flatten_layer(one, options)]

    options = list_options(kind)
    from_layers = collect(options)
    chosen = {
        one.name: choose_variant(one, from_layers, words)
        for one in fields(kind)
        if "variants" in one.metadata
    }
    if chosen:
        options = list_options(kind, chosen)
        from_layers = collect(options)
    all_given = [*from_layers, *convert_words(words, options)]
    variants = {
        one.name: one.metadata["variants"][chosen[one.name]]
        for one in fields(kind)
        if one.name in chosen
    }
    return merge_values(all_given, options, variants)


def read_layer(uri: str) -> Layer:
    """Read a config file."""
    return Layer(read_yaml(uri, "check --config, and see --help for the keys"), uri)


def choose_variant(
    section: Field[Any],
    from_layers: Iterable[Given],
    words: Iterable[tuple[str, str | None]],
) -> str:
    """Return the name of the variant that is given for a section."""
    name = None
    on_line = [Given(key, word, f"--{key}") for key, word in words]
    for given in [*from_layers, *on_line]:
        if given.key == f"{section.name}.name":
            name = given.value
        elif given.key == section.name and isinstance(given.value, dict):
            name = given.value.get("name", name)
        elif given.key == section.name:
            value = format_value(given.value)
            raise UserError(
                f"{given.label} is {value}, it must be {expected_type(dict)}"
            )
    known: Mapping[str, type] = section.metadata["variants"]
    if name is None:
        raise UserError(
            f"no {section.name} is named; give a --config that has `{section.name}: {{name: ...}}`, or "
            f"--{section.name}.name, with one of {', '.join(known)}"
        )
    if name not in known:
        near = did_you_mean(str(name), known)
        raise UserError(
            f"unknown {section.name} '{name}'; {near}; known are {', '.join(known)}"
        )
    say_loading("torch", "ray", "mlflow")  # the module of the variant imports them
    return str(name)


def merge_values(
    all_given: Iterable[Given],
    options: Mapping[str, Option],
    variants: Mapping[str, type],
) -> Values:
    """Merge values into nested content; later values win."""
    merged: dict[str, Given] = {}
    for given in all_given:
        key, value = given.key, given.value
        refuse_secrets(value, given.label)
        option, before = options.get(key), merged.get(key)
        if option and get_origin(option.kind) is dict and not isinstance(value, dict):
            raise UserError(
                f"{given.label} is {format_value(value)}, it must be {expected_type(option.kind)}"
            )
        if before and isinstance(value, dict) and "." not in key:
            value = {**(before.value or {}), **value}
        if before and given.appends and before.appends:
            value = [*before.value, *value]
        merged[key] = replace(given, value=value)
    content: dict[str, Any] = {}
    labels: dict[str, str] = {}
    for key, given in merged.items():
        mapping = next((name for name in options if key.startswith(f"{name}.")), None)
        *sections, last = options[mapping or key].path
        inner = content
        for section in sections:
            inner = inner.setdefault(section, {})
        path = ".".join([*sections, last])
        if mapping:
            below = key[len(mapping) + 1 :]
            inner[last] = {**(inner.get(last) or {}), below: given.value}
            labels[f"{path}.{below}"] = given.label
        else:
            inner[last] = given.value
        labels[path] = given.label
    return Values(content, labels, options, variants)


def parse(
    kind: type[Config], argv: Sequence[str] | None = None, module: str = ""
) -> Config:
    """Build a dataclass from a command line. Print the help and exit if it is asked for.

    Args:
        kind: The dataclass.
        argv: Words of the command line; by default those of this process.
        module: The job's module, whose docstring the help shows; by default the
            dataclass's own.

    Raises:
        UserError: for an unknown key (with the nearest one), a wrong type, or a value
            that
            the dataclass refuses.
    """
    argv = sys.argv[1:] if argv is None else argv
    exit_with_help(kind, argv, module)
    return read_values(kind, [], argv).build(kind)


def read_mapping(kind: type, options: Mapping[str, Any], source: str) -> Values:
    """Read the options of a dataclass from a mapping.

    Args:
        kind: The dataclass.
        options: Nested options; `config` names files, over which the other options win.
        source: Name of the mapping in messages.
    """
    files = options.get("config") or []
    names = [files] if isinstance(files, str) else files
    others = {key: value for key, value in options.items() if key != "config"}
    return read_values(kind, [*map(read_layer, names), Layer(others, source)])


def merge_options(
    options: Mapping[str, Any], later: Mapping[str, Any]
) -> dict[str, Any]:
    """Merge nested options; later options win."""
    merged = {**options, **later}
    for name, value in later.items():
        before = options.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            merged[name] = merge_options(before, value)
    return merged


def to_words(options: Mapping[str, Any], prefix: str = "--") -> Iterator[str]:
    """Yield nested options as words of a command line."""
    for name, value in options.items():
        if isinstance(value, dict) and value:
            yield from to_words(value, f"{prefix}{name}.")
            continue
        for item in value if isinstance(value, list) else [value]:
            yield f"{prefix}{name}"
            yield str(item).lower() if isinstance(item, bool) else str(item)


def exit_with_help(kind: type, argv: Sequence[str], module: str = "") -> None:
    """Print the help and exit if a command line asks for it."""
    if not set(HELP) & set(argv):
        return
    words = [word for word in argv if word not in HELP]
    chosen = {
        one.name: shown_variant(one, words)
        for one in fields(kind)
        if "variants" in one.metadata
    }
    print(format_help(kind, chosen, sys.modules[module or kind.__module__]))
    sys.exit(0)


def shown_variant(section: Field[Any], argv: Sequence[str]) -> str:
    """Return the variant of a section that the help shows: the named or the first one."""
    known: Mapping[str, type] = section.metadata["variants"]
    words = list(split_words(argv))
    layers = [read_layer(word) for key, word in words if key == "config" and word]
    names = [layer.content.get(section.name, {}).get("name") for layer in layers]
    names += [word for key, word in words if key == f"{section.name}.name"]
    return str(names[-1]) if names and names[-1] in known else next(iter(known))


def format_help(kind: type, chosen: Mapping[str, str], module: Any) -> str:
    """Describe a command and its options by section."""
    name = module.__spec__.name if module.__spec__ else module.__name__
    lines = [
        f"usage: python -m {name} [--config FILE] [--OPTION VALUE ...]",
        "",
        (module.__doc__ or "").strip(),
        "",
        *describe_option(
            "--config FILE", "YAML file with the options below; the line wins over it."
        ),
    ]
    options = list_options(kind, chosen)
    # options of sections come last, and required ones first
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
        about = option.about
        if option.default is MISSING:
            about += " (required)"
        elif option.default not in (None, ""):
            about += f" ({str(option.default).lower()})"
        lines += describe_option(f"--{key} {metavar(option.kind)}", about)
    return "\n".join(lines)


def metavar(kind: Any) -> str:
    """Return a placeholder for the values of a type: `N` for whole numbers."""
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


def describe_option(option: str, about: str) -> list[str]:
    """Return the lines of help for one option."""
    indent = " " * 8
    return [
        f"  {option}",
        *textwrap.wrap(
            about, HELP_WIDTH, initial_indent=indent, subsequent_indent=indent
        ),
    ]


def say_loading(*packages: str) -> None:
    """Print which packages are imported next, unless the first one is imported already.

    Importing them takes seconds, on a busy machine a minute.
    """
    if packages[0] not in sys.modules:
        print(f"loading {', '.join(packages)}", flush=True)
