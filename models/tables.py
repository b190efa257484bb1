"""Reading tables: a table is a directory of Parquet files that its `manifest.json` lists.

The manifest is written last, so a directory without one is not a table, and readers read the files it
lists and nothing else. Works at any `pyarrow.fs` URI (local path, s3://, gs://). Writing is in
`pipelines/data/tables.py`; reading stands here so that models can be trained with no Ray installed.

Damage is found when data is used: a part is read into memory once, hashed, and parsed from there (`read_parquet`);
the manifest holds a hash of itself (`sealed`). So a flipped bit anywhere is an error that names the file.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from models.uri import UserError, asked, file_info, join, open_uri

MANIFEST = "manifest.json"

SEAL = "seal"
"""Key of the hash that a JSON file holds of the rest of its content."""

PART = re.compile(r"part-([0-9a-f]{20})\.parquet")
"""Name of a part: the beginning of its SHA-256."""

INSIDE = re.compile(r"[\w-][\w.-]*", re.ASCII)
"""A file's name, which leads out of no folder."""


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
        return sealed(asdict(self))


def sealed(content: dict[str, Any]) -> str:
    """`content` as JSON with a hash of itself, by which `unsealed` finds damage."""
    plain = json.loads(json.dumps(content, default=str))
    return json.dumps({**plain, SEAL: _seal(plain)}, indent=2, sort_keys=True)


def unsealed(text: bytes | str) -> dict[str, Any]:
    """The content that `sealed` was given. ValueError where it is damaged; files from before had no seal."""
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError(f"it holds {type(content).__name__}, not a mapping")
    seal = content.pop(SEAL, None)
    if seal is not None and seal != _seal(content):
        raise ValueError("its content is not what its seal says")
    return content


def _seal(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_inside(names: Iterable[str]) -> None:
    """ValueError unless each is the name of a file, which leads out of no folder."""
    for name in names:
        if not isinstance(name, str) or not INSIDE.fullmatch(name):
            raise ValueError(f"the path {name!r} is not a file's name")


def has_manifest(uri: str) -> bool:
    """Whether the directory holds a finished table."""
    return bool(file_info(join(uri, MANIFEST)).type == fs.FileType.File)


def read_manifest(uri: str, table: str | None = None) -> Manifest:
    """The manifest of the table at `uri`; an error if there is none or it is of another `table`."""
    if file_info(join(uri, MANIFEST)).type != fs.FileType.File:
        raise UserError(
            f"{uri} is not a table: it holds no {MANIFEST}; run the job that makes it again, or point at "
            f"a finished table"
        )
    filesystem, path = open_uri(join(uri, MANIFEST))
    with asked(uri), filesystem.open_input_stream(path) as stream:
        text = stream.read()
    try:
        content = unsealed(text)
        content["files"] = [Part(**part) for part in content["files"]]
        manifest = Manifest(**content)
        check_inside(part.path for part in manifest.files)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{join(uri, MANIFEST)} is damaged ({error}); make the table again") from error
    if table is not None and manifest.table != table:
        raise UserError(f"{uri} holds the table '{manifest.table}', not '{table}'; check the path")
    return manifest


def kind_of(sequences: Manifest) -> str:
    """The kind of request of a table of sequences; the oldest ones do not name theirs."""
    return str(sequences.info.get("kind", "retrieval"))


def family_of(sequences: Manifest) -> str:
    """The family whose models read the sequences: the namesake of their kind of request, unless they name another."""
    return str(sequences.info.get("family", kind_of(sequences)))


def sequences_manifest(uri: str, family: str) -> Manifest:
    """The manifest of sequences that models of the family read; an error for those of another one."""
    manifest = read_manifest(uri, "sequences")
    if family_of(manifest) != family:
        kind = kind_of(manifest)
        raise UserError(
            f"{uri} holds sequences of kind '{kind}'; models of {family} need '{family}' (prepare: kind: {family})"
        )
    return manifest


def part_uris(uri: str, manifest: Manifest) -> list[str]:
    """URIs of the table's files, each checked to be there at its listed size."""
    filesystem, root = open_uri(uri)
    with asked(uri):
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


def read_parquet(
    uri: str, columns: list[str] | None = None, sha256: str = "", dictionary: Iterable[str] = ()
) -> pa.Table:
    """One Parquet file, `dictionary` naming columns to keep dictionary-coded; UserError where it is damaged.

    All of the file is read and hashed, whatever the columns. Its hash must begin with `sha256`: by default that in a
    part's name, so that whoever is told a part's URI alone checks it too. Files of other names are not checked.
    """
    filesystem, path = open_uri(uri)
    named = PART.fullmatch(posixpath.basename(path))
    try:
        with filesystem.open_input_file(path) as file:
            content = file.read_buffer()
        expected = sha256 or (named.group(1) if named else "")
        if expected and not (found := hashlib.sha256(content).hexdigest()).startswith(expected):
            raise UserError(
                f"{uri} is damaged: its SHA-256 is {found[:12]}, not {expected[:12]} as when it was written; make it "
                f"again with --overwrite"
            )
        return pq.ParquetFile(pa.BufferReader(content), read_dictionary=list(dictionary)).read(columns=columns)
    except (pa.ArrowException, OSError) as error:
        first = str(error).splitlines()[0]
        raise UserError(f"{uri} is not a readable Parquet file ({first}); make it again with --overwrite") from error


def iter_parts(uri: str, table: str | None = None, columns: list[str] | None = None) -> Iterator[pa.Table]:
    """The table's files one after the other, in manifest order."""
    manifest = read_manifest(uri, table)
    for part, place in zip(manifest.files, part_uris(uri, manifest), strict=True):
        yield read_parquet(place, columns, part.sha256)


def read_table(uri: str, table: str | None = None, columns: list[str] | None = None) -> pa.Table:
    """The whole table, in manifest order."""
    parts = list(iter_parts(uri, table, columns))
    if not parts:
        raise UserError(f"the table {uri} has no rows; check the input and the filters of the job that made it")
    return pa.concat_tables(parts)
