"""Reading tables: a table is a directory of Parquet files that its `manifest.json` lists.

The manifest is written last, so a directory without one is not a table, and readers read the files it
lists and nothing else. Works at any `pyarrow.fs` URI (local path, s3://, gs://). Writing is in
`pipelines/data/tables.py`; reading stands here so that models can be trained with no Ray installed.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

MANIFEST = "manifest.json"


class UserError(Exception):
    """An error of input or configuration: one line that names the value, the limit and the remedy.

    Jobs print it without a traceback and exit with code 1. Everything else is a defect and keeps its
    traceback.
    """


@dataclass(frozen=True)
class Part:
    """One Parquet file of a table."""

    path: str
    """File name, relative to the table's directory."""
    bytes: int
    """Size of the file."""
    rows: int
    """Rows in the file."""
    sha256: str
    """Hash of the file's bytes."""


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` holds."""

    table: str
    """Name of the table, such as `sequences`."""
    schema_version: int
    """Version of the table's schema in `pipelines/data/tables.py`."""
    schema: list[dict[str, str]]
    """Columns: `name`, `type` and whether `nullable`."""
    files: list[Part]
    """The files, in the order in which rows are read."""
    rows: int
    """Rows in all files."""
    hash: str
    """Hash of the content: of the files' hashes in order."""
    fingerprint: str
    """Hash of what the table is made from: config, inputs and schema version."""
    config: dict[str, Any]
    """The configuration that it was made with."""
    inputs: dict[str, str]
    """Hashes of what it was made from, by name."""
    info: dict[str, Any] = field(default_factory=dict)
    """What the step that made it counted (duplicates dropped, codebook sizes, ...)."""
    code_version: str = ""
    """Version of the package and git commit, where known."""
    created: str = ""
    """UTC time of the commit, ISO 8601."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds per phase."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, sort_keys=True)


def open_uri(uri: str) -> tuple[fs.FileSystem, str]:
    """The file system and the path in it for a local path or a URI such as `s3://bucket/key`."""
    if "://" in str(uri):
        try:
            return fs.FileSystem.from_uri(str(uri))
        except (pa.ArrowInvalid, OSError) as error:
            first = str(error).splitlines()[0]
            raise UserError(f"cannot open {uri}: {first}; use a local path, s3:// or gs://") from error
    return fs.LocalFileSystem(), str(Path(uri).expanduser().absolute())


def join(uri: str, *names: str) -> str:
    """`uri` with path elements added."""
    return posixpath.join(str(uri), *names)


def has_manifest(uri: str) -> bool:
    """Whether the directory holds a finished table."""
    filesystem, path = open_uri(join(uri, MANIFEST))
    return bool(filesystem.get_file_info(path).type == fs.FileType.File)


def read_manifest(uri: str, table: str | None = None) -> Manifest:
    """The manifest of the table at `uri`; an error if there is none or it is of another `table`."""
    filesystem, path = open_uri(join(uri, MANIFEST))
    if filesystem.get_file_info(path).type != fs.FileType.File:
        raise UserError(
            f"{uri} is not a table: it holds no {MANIFEST}; run the job that makes it again, or point at "
            f"a finished table"
        )
    with filesystem.open_input_stream(path) as stream:
        text = stream.read()
    try:
        content = json.loads(text)
        content["files"] = [Part(**part) for part in content["files"]]
        manifest = Manifest(**content)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{join(uri, MANIFEST)} is damaged ({error}); make the table again") from error
    if table is not None and manifest.table != table:
        raise UserError(f"{uri} holds the table '{manifest.table}', not '{table}'; check the path")
    return manifest


def part_uris(uri: str, manifest: Manifest) -> list[str]:
    """URIs of the table's files, each checked to be there at its listed size."""
    filesystem, root = open_uri(uri)
    infos = filesystem.get_file_info([posixpath.join(root, part.path) for part in manifest.files])
    for part, info in zip(manifest.files, infos, strict=True):
        if info.type != fs.FileType.File:
            raise UserError(f"{join(uri, part.path)} is missing; make the table {uri} again with --overwrite")
        if info.size != part.bytes:
            raise UserError(
                f"{join(uri, part.path)} has {info.size} bytes, its manifest says {part.bytes}: truncated or "
                f"replaced; make the table {uri} again with --overwrite"
            )
    return [join(uri, part.path) for part in manifest.files]


def read_parquet(uri: str, columns: list[str] | None = None) -> pa.Table:
    """One Parquet file, with damage reported as a `UserError`."""
    filesystem, path = open_uri(uri)
    try:
        with filesystem.open_input_file(path) as file:
            return pq.ParquetFile(file).read(columns=columns)
    except (pa.ArrowInvalid, OSError) as error:
        first = str(error).splitlines()[0]
        raise UserError(f"{uri} is not a readable Parquet file ({first}); make it again") from error


def iter_parts(uri: str, table: str | None = None, columns: list[str] | None = None) -> Iterator[pa.Table]:
    """The table's files one after the other, in manifest order."""
    for part in part_uris(uri, read_manifest(uri, table)):
        yield read_parquet(part, columns)


def read_table(uri: str, table: str | None = None, columns: list[str] | None = None) -> pa.Table:
    """The whole table, in manifest order."""
    manifest = read_manifest(uri, table)
    parts = [read_parquet(part, columns) for part in part_uris(uri, manifest)]
    if not parts:
        raise UserError(f"the table {uri} has no rows; check the input and the filters of the job that made it")
    return pa.concat_tables(parts)
