"""Fields of objects in JSON lines and Parquet, named by paths with dots: `item.sku`, also where `item` is a list of
objects. A column at the top whose name has dots goes before a path.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import polars as pl
import pyarrow as pa

Path = tuple[str | None, ...]
"""The keys that lead to a value; None stands for each element of a list."""

Places = dict[str, list[Path]]
"""Where a line of JSON may have each wanted column: that at the top first."""


def objects(chunk: bytes) -> Iterator[dict[str, Any]]:
    """The lines that are JSON objects."""
    for line in chunk.split(b"\n"):
        with suppress(ValueError):
            if isinstance(row := json.loads(line, strict=False), dict):
                yield row


def places_of(name: str, listed: bool, chunk: bytes) -> list[Path]:
    """Where a column of JSON may be. Of a path to lists the first line that has one tells where on the path it is."""
    keys = tuple(name.split("."))
    if len(keys) == 1 or not all(keys):
        return [(name, None) if listed else (name,)]
    if not listed:
        return [(name,), keys]
    heads = [keys[:n] for n in range(1, len(keys) + 1)]
    found = (head for row in objects(chunk) for head in heads if isinstance(value_at(row, head), list))
    head = next(found, heads[0])
    return [(name, None), (*head, None, *keys[len(head) :])]


def value_at(value: Any, path: Path) -> Any:
    """What is at a path of a JSON value; None where the path leads through what is no object, or no list."""
    for n, key in enumerate(path):
        if key is None:
            return [value_at(each, path[n + 1 :]) for each in value] if isinstance(value, list) else None
        value = value.get(key) if isinstance(value, dict) else None
    return value


def has(value: Any, path: Path) -> bool:
    """Whether a JSON value has the path, null or not; where null or an empty list stands on the way, it may have it."""
    for n, key in enumerate(path):
        if value is None:
            return True
        if key is None:
            return isinstance(value, list) and (not value or any(has(each, path[n + 1 :]) for each in value))
        if not isinstance(value, dict) or key not in value:
            return False
        value = value[key]
    return True


def json_paths(value: Any, path: Path = ()) -> Iterator[Path]:
    """The paths to what is no object in a JSON value, some of them several times."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from json_paths(each, (*path, key))
    elif isinstance(value, list) and None not in path:
        for each in value:
            yield from json_paths(each, (*path, None))
    elif path:
        yield path


def arrow_paths(kind: pa.DataType, path: Path = ()) -> Iterator[Path]:
    """The paths to what is no object in an Arrow type."""
    if pa.types.is_struct(kind):
        for field in kind:
            yield from arrow_paths(field.type, (*path, field.name))
    elif _is_list(kind) and None not in path:
        yield from arrow_paths(kind.value_type, (*path, None))
    else:
        yield path


def names_of(paths: Iterable[Path]) -> dict[str, Path]:
    """The paths by their dotted names, each once; without those of fields that have a dot in a name themselves."""
    found: dict[str, Path] = {}
    for path in sorted(dict.fromkeys(paths), key=lambda path: len(path) - path.count(None)):  # columns go first
        keys = [key for key in path if key is not None]
        if len(keys) == 1 or all(key and "." not in key for key in keys):
            found.setdefault(".".join(keys), path)
    return found


def arrow_path(schema: pa.Schema, name: str) -> Path | None:
    """Where a column is; None where it is not. What has no type, as it is always null, may be of objects."""
    if name in schema.names:
        return (name,)
    kind, path = pa.struct(list(schema)), Path()
    for key in name.split("."):
        if path and pa.types.is_null(kind):
            return path
        if _is_list(kind):
            kind, path = kind.value_type, (*path, None)
        if not pa.types.is_struct(kind) or kind.get_field_index(key) < 0:
            return None
        kind, path = kind.field(key).type, (*path, key)
    return path


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def column_at(path: Path) -> pl.Expr:
    """What is at a path of a frame with objects as structs."""

    def within(value: pl.Expr, rest: Path) -> pl.Expr:
        if not rest:
            return value
        if rest[0] is None:
            return value.list.eval(within(pl.element(), rest[1:])) if rest[1:] else value
        return within(value.struct.field(rest[0]), rest[1:])

    return within(pl.col(str(path[0])), path[1:])


def parse(text: bytes, places: Places) -> pl.DataFrame:
    """JSON lines as rows of these columns, as text or lists of text. PolarsError where a line is none of them."""
    found: dict[Path, pl.Series] = {}
    for kind, paths in _kinds(path for each in places.values() for path in each):
        schema = {field.name: field.dtype for field in kind.fields}
        try:
            rows = pl.read_ndjson(text, schema=schema)
        except pl.exceptions.PolarsError:
            if all(len(path) - path.count(None) == 1 for path in paths):
                raise
            rows = pl.read_ndjson(_fitted(text, kind), schema=schema)
        found |= {path: rows.select(column_at(path)).to_series() for path in paths}
    return pl.select(pl.coalesce(*(found[path] for path in paths)).alias(name) for name, paths in places.items())


def _kinds(paths: Iterable[Path]) -> list[tuple[pl.Struct, list[Path]]]:
    """Types of lines with the paths that each has: one, but where a path leads through a column that is wanted whole
    too."""
    kinds: list[tuple[pl.Struct, list[Path]]] = []
    for path in paths:
        kind: Any = pl.String()
        for key in reversed(path):
            kind = pl.List(kind) if key is None else pl.Struct({key: kind})
        for n, (other, mine) in enumerate(kinds):
            if (both := _merged(other, kind)) is not None:
                kinds[n] = both, [*mine, path]
                break
        else:
            kinds.append((kind, [path]))
    return kinds


def _merged(one: Any, other: Any) -> Any:
    """The type with the fields of both; None where there is none."""
    if isinstance(one, pl.Struct) and isinstance(other, pl.Struct):
        made = {field.name: field.dtype for field in one.fields}
        for field in other.fields:
            made[field.name] = _merged(made[field.name], field.dtype) if field.name in made else field.dtype
        return None if any(kind is None for kind in made.values()) else pl.Struct(made)
    if isinstance(one, pl.List) and isinstance(other, pl.List):
        inner = _merged(one.inner, other.inner)
        return None if inner is None else pl.List(inner)
    return one if one == other else None


def _fitted(text: bytes, kind: pl.Struct) -> bytes:
    """The lines with null for what is no object, such as [] or a text, where a path leads through it."""

    def fit(value: Any, kind: Any) -> Any:
        if isinstance(kind, pl.List) and isinstance(kind.inner, pl.Struct):
            return [fit(each, kind.inner) for each in value] if isinstance(value, list) else None
        if not isinstance(kind, pl.Struct):
            return value
        if not isinstance(value, dict):
            return None
        return value | {f.name: fit(value[f.name], f.dtype) for f in kind.fields if f.name in value}

    lines = text.split(b"\n")
    for number, line in enumerate(lines):
        with suppress(ValueError):
            row = json.loads(line, strict=False)
            if isinstance(row, dict) and (fitted := fit(row, kind)) != row:
                lines[number] = json.dumps(fitted).encode()
    return b"\n".join(lines)
