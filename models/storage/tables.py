"""Tables: folders of Parquet files that a `manifest.json` lists, at any `pyarrow.fs` URI (local path, s3://, gs://).

    parts = [write_part(uri, rows) for rows in partitions]     # in tasks on any node
    commit(uri, "items", schema, parts, config={}, inputs={})  # in one process
    items = read_table(uri, "items")

A table is written in two steps. Tasks write parts with `write_part`; then one process
calls `commit`, which writes the manifest last and removes parts that it does not list.
The name of a part is the hash of its content. So a task that runs twice writes the same
file, a killed job leaves only files that no reader sees, and a new version changes no
file of the old one before the manifest is replaced. A folder without a manifest is not
a table, and readers read only the listed files. Jobs lock their output while they write
(`writing`), because `commit` would remove the parts of another job.

Damage is found when data is read: a part is read into memory once, hashed, and parsed
from there (`read_parquet`), and the manifest holds a hash of itself (`add_seal`). So an
error names the file with a flipped bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import re
import subprocess
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from models.storage.locks import LOCK, hold_lock
from models.storage.uri import (
    UserError,
    file_info,
    join,
    open_uri,
    storage_errors,
    write_file,
)

MANIFEST = "manifest.json"

SCHEMA_VERSION = 1

LARGEST_NUMBER = 1.8e19
"""Largest float32 whose square is finite. In many exports larger numbers, such as
FLT_MAX, mark a missing value."""


SEAL = "seal"
"""Key of a JSON file with the hash of the rest of its content."""

PART = re.compile(r"part-([0-9a-f]{20})\.parquet")
"""Name of a part, with the first digits of its SHA-256."""

JOB_FILES = re.compile(
    r"(part-[0-9a-f]{20}\.parquet|manifest\.json|tally-\d+\.json)(\.\d+\.tmp)?"
)
"""Names of the files that jobs write into the folder of a table. Files with other names
belong to the user."""

FILE_NAME = re.compile(r"[\w-][\w.-]*", re.ASCII)
"""Name of a file in the same folder."""


@dataclass(frozen=True)
class Part:
    """A Parquet file of a table."""

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
    """Content of `manifest.json`."""

    table: str
    """Name of the table, such as `sequences`."""
    schema_version: int
    """Version of the tables' schemas."""
    schema: list[dict[str, str]]
    """Columns: `name`, `type` and whether `nullable`."""
    files: list[Part]
    """Files in the order in which rows are read."""
    rows: int
    """Rows in all files."""
    hash: str
    """Hash of the hashes of the files in order."""
    fingerprint: str
    """Hash of configuration, inputs and schema version. Equal fingerprints mean equal
    tables."""
    config: dict[str, Any]
    """Configuration that the table was made with."""
    inputs: dict[str, str]
    """Hashes of the tables and files that the table was made from, by name."""
    info: dict[str, Any]
    """Counts of the step that made the table (duplicates dropped, codebook sizes,
    ...)."""
    code_version: str
    """Version of the code that made the table (`code_version`)."""
    created: str
    """UTC time of the commit, ISO 8601."""
    timings: dict[str, float]
    """Seconds per phase."""
    submission_id: str = ""
    """Id in `ray job list` of the job that made the table, if it was submitted."""
    extends: list[str] = field(default_factory=list)
    """Hashes of the versions that the table extends, the latest last. Their items keep
    their numbers."""


@dataclass(frozen=True)
class TableVersion:
    """The hash of a table and the hashes of the versions that the table extends."""

    hash: str
    """Hash of the table's content."""
    extends: tuple[str, ...] = ()
    """Hashes of the versions that the table extends, the latest last."""

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> Self:
        """Return the version of the table that a manifest describes."""
        return cls(manifest.hash, tuple(manifest.extends))


def table_hashes(versions: Mapping[str, TableVersion]) -> dict[str, str]:
    """Return the hash of each table, by the table's name."""
    return {name: version.hash for name, version in versions.items()}


def add_seal(content: dict[str, Any]) -> str:
    """Return `content` as JSON with a hash of itself, by which `check_seal` finds damage."""
    plain = json.loads(json.dumps(content, default=str))
    return json.dumps({**plain, SEAL: _seal(plain)}, indent=2, sort_keys=True)


def check_seal(text: bytes | str) -> dict[str, Any]:
    """Return the content that `add_seal` was given. Raise ValueError if the text is damaged."""
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError(f"it holds {type(content).__name__}, not a mapping")
    if content.pop(SEAL, None) != _seal(content):
        raise ValueError("its content is not what its seal says")
    return content


def _seal(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_file_names(names: Iterable[str]) -> None:
    """Raise ValueError unless each name is the name of a file in the same folder."""
    for name in names:
        if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
            raise ValueError(f"the path {name!r} is not a file's name")


def has_manifest(uri: str) -> bool:
    """Return whether the folder holds a finished table."""
    return bool(file_info(join(uri, MANIFEST)).type == fs.FileType.File)


def read_manifest(uri: str, table: str | None = None) -> Manifest:
    """Return the manifest of the table at `uri`.

    Raises:
        UserError: if there is no manifest, it is damaged, or it is of another table
            than `table`.
    """
    if not has_manifest(uri):
        raise UserError(
            f"{uri} is not a table: it holds no {MANIFEST}; run the job that makes it again, or point at "
            f"a finished table"
        )
    filesystem, path = open_uri(join(uri, MANIFEST))
    with storage_errors(uri), filesystem.open_input_stream(path) as stream:
        text = stream.read()
    try:
        content = check_seal(text)
        content["files"] = [Part(**part) for part in content["files"]]
        manifest = Manifest(**content)
        check_file_names(part.path for part in manifest.files)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{join(uri, MANIFEST)} is damaged ({error}); make the table again"
        ) from error
    if table is not None and manifest.table != table:
        raise UserError(
            f"{uri} holds the table '{manifest.table}', not '{table}'; check the path"
        )
    return manifest


def model_family(sequences: Manifest) -> str:
    """Return the family of the models that read the sequences.

    It is named like their kind of request, unless the manifest names another family.
    """
    return str(sequences.info.get("family", sequences.info["kind"]))


def sequences_manifest(uri: str, family: str) -> Manifest:
    """Return the manifest of `sequences`. Raise UserError if models of another family read them."""
    manifest = read_manifest(uri, "sequences")
    if model_family(manifest) != family:
        raise UserError(
            f"{uri} holds sequences of kind '{manifest.info['kind']}'; models of {family} need '{family}' (prepare: "
            f"kind: {family})"
        )
    return manifest


def part_uris(uri: str, manifest: Manifest) -> list[str]:
    """Return the URIs of a table's files. Raise UserError if a file is missing or has another size than listed."""
    filesystem, root = open_uri(uri)
    with storage_errors(uri):
        infos = filesystem.get_file_info(
            [posixpath.join(root, part.path) for part in manifest.files]
        )
    for part, info in zip(manifest.files, infos, strict=True):
        if info.type != fs.FileType.File:
            raise UserError(
                f"{join(uri, part.path)} is missing; make the table {uri} again with --overwrite"
            )
        if info.size != part.bytes:
            raise UserError(
                f"{join(uri, part.path)} has {info.size} bytes, its manifest says {part.bytes}: truncated or "
                f"replaced; make the table {uri} again with --overwrite"
            )
    return [join(uri, part.path) for part in manifest.files]


def read_parquet(
    uri: str,
    columns: list[str] | None = None,
    sha256: str = "",
    dictionary: Iterable[str] = (),
) -> pa.Table:
    """Read one Parquet file. All of the file is read and hashed, whatever the columns.

    Args:
        uri: Path or URI of the file.
        columns: Columns to return; None: all.
        sha256: First digits of the expected hash; empty: the digits in the name of a
            part. A file with another name
            is not checked then.
        dictionary: Columns to keep dictionary-coded.

    Raises:
        UserError: if the file is damaged.
    """
    filesystem, path = open_uri(uri)
    part = PART.fullmatch(posixpath.basename(path))
    expected = sha256 or (part[1] if part else "")
    try:
        with filesystem.open_input_file(path) as file:
            content = file.read_buffer()
        actual = hashlib.sha256(content).hexdigest() if expected else ""
        if not actual.startswith(expected):
            raise UserError(
                f"{uri} is damaged: its SHA-256 is {actual[:12]}, not {expected[:12]} as when it was written; make it "
                f"again with --overwrite"
            )
        parquet = pq.ParquetFile(
            pa.BufferReader(content), read_dictionary=list(dictionary)
        )
        return parquet.read(columns=columns)
    except (pa.ArrowException, OSError) as error:
        first = str(error).splitlines()[0]
        raise UserError(
            f"{uri} is not a readable Parquet file ({first}); make it again with --overwrite"
        ) from error


def iter_parts(
    uri: str,
    table: str | None = None,
    columns: list[str] | None = None,
    manifest: Manifest | None = None,
) -> Iterator[pa.Table]:
    """Yield the files of a table in the order of its manifest, which is read unless `manifest` is given."""
    manifest = manifest or read_manifest(uri, table)
    for part, part_uri in zip(manifest.files, part_uris(uri, manifest), strict=True):
        yield read_parquet(part_uri, columns, part.sha256)


def read_table(
    uri: str,
    table: str | None = None,
    columns: list[str] | None = None,
    manifest: Manifest | None = None,
) -> pa.Table:
    """Return all rows of a table; `iter_parts` describes the arguments."""
    parts = list(iter_parts(uri, table, columns, manifest))
    if not parts:
        raise UserError(
            f"the table {uri} has no rows; check the input and the filters of the job that made it"
        )
    return pa.concat_tables(parts)


def digest(content: Any) -> str:
    """Return a stable hash of JSON-like content."""
    text = json.dumps(content, sort_keys=True, default=str, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def fingerprint(config: dict[str, Any], inputs: dict[str, str]) -> str:
    """Return a hash of configuration and inputs. Equal fingerprints mean that a step need not run again."""
    return digest([SCHEMA_VERSION, config, inputs])


def up_to_date(uri: str, expected: str) -> bool:
    """Return whether the table at `uri` is finished and has the expected fingerprint."""
    return has_manifest(uri) and read_manifest(uri).fingerprint == expected


def writing(uri: str) -> AbstractContextManager[None]:
    """Lock a folder of tables while a job writes them (`hold_lock`)."""
    return hold_lock(
        join(uri, LOCK),
        f"{uri} is being written by another process; wait for it or choose another output folder",
    )


def write_part(uri: str, table: pa.Table, **options: Any) -> Part:
    """Write one Parquet file, named by the hash of its bytes, into the folder `uri`.

    The bytes are assembled in memory (a part is one partition), hashed and written at
    once. Strings of flat tables may be dictionary-coded, which saves the writer from
    coding them; the file holds plain strings. `options` of the Parquet writer replace
    the options for tables of ids and times.
    """
    buffer = pa.BufferOutputStream()
    if not options:
        leaves = [
            leaf
            for column in table.schema
            for leaf in _leaves(column.name, column.type)
        ]
        # int64 columns are times, sorted within a user: packed differences are smaller
        # and faster than a dictionary
        times = [path for path, kind in leaves if kind == pa.int64()]
        options = {
            "use_dictionary": [path for path, _ in leaves if path not in times],
            "column_encoding": dict.fromkeys(times, "DELTA_BINARY_PACKED"),
            "store_schema": not any(
                pa.types.is_dictionary(kind) for kind in table.schema.types
            ),
        }
    pq.write_table(table, buffer, compression="zstd", compression_level=1, **options)
    content = buffer.getvalue()
    sha256 = hashlib.sha256(content).hexdigest()
    part = Part(
        path=f"part-{sha256[:20]}.parquet",
        bytes=content.size,
        rows=table.num_rows,
        sha256=sha256,
    )
    write_file(join(uri, part.path), content)
    return part


def _leaves(path: str, kind: pa.DataType) -> list[tuple[str, pa.DataType]]:
    """Return the paths and types of a column's Parquet columns."""
    if isinstance(kind, pa.ListType | pa.FixedSizeListType):
        return _leaves(f"{path}.list.element", kind.value_type)
    if isinstance(kind, pa.StructType):
        return [
            leaf
            for column in kind
            for leaf in _leaves(f"{path}.{column.name}", column.type)
        ]
    return [(path, kind)]


RAY_PACKAGE = re.compile(r"_ray_pkg_[0-9a-f]+")
"""Folder into which Ray unpacks the code of a job, named by the hash of its content."""


@cache
def code_version() -> str:
    """Return the package version and an identifier of the code that this process runs.

    That is the git commit of a checkout without changes, else the package that Ray
    unpacked, else a hash of the project's Python files.
    """
    try:
        release = version("trieline")
    except PackageNotFoundError:
        release = "unknown"
    commit = git("describe", "--always", "--dirty") or ""
    packages = [name for name in Path(__file__).parts if RAY_PACKAGE.fullmatch(name)]
    if commit and not commit.endswith("-dirty"):
        return f"{release} {commit}"
    if packages:
        return f"{release} {packages[-1]}"
    return " ".join(filter(None, (release, commit, f"code {code_hash()[:12]}")))


def submission_id() -> str:
    """Return the id by which `ray job` lists the job of this process, or an empty string for another process.

    Ray passes the job's settings to the driver of a submitted job in this variable, and
    has no public call for the id.
    """
    settings = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}")
    return str(settings.get("metadata", {}).get("job_submission_id", ""))


def code_hash() -> str:
    """Return the SHA-256 of the Python files of this project's packages."""
    root = Path(__file__).parents[2]
    found = hashlib.sha256()
    for package in ("models", "pipelines", "tuning", "jobs"):
        for path in sorted((root / package).rglob("*.py")):
            found.update(f"{path.relative_to(root)}\n".encode())
            found.update(path.read_bytes())
    return found.hexdigest()


def git(*words: str) -> str | None:
    """Return the output of git about the checkout of this code, or None without a checkout or git, as in an image."""
    try:
        done = subprocess.run(
            ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def describe(
    table: str,
    schema: pa.Schema,
    parts: list[Part],
    *,
    config: dict[str, Any],
    inputs: dict[str, str],
    info: dict[str, Any] | None = None,
    timings: dict[str, Any] | None = None,
    extends: Iterable[str] = (),
) -> Manifest:
    """Return the manifest of a table with these parts, for `switch`."""
    return Manifest(
        table=table,
        schema_version=SCHEMA_VERSION,
        schema=[
            {"name": f.name, "type": str(f.type), "nullable": str(f.nullable)}
            for f in schema
        ],
        files=parts,
        rows=sum(part.rows for part in parts),
        hash=digest([part.sha256 for part in parts]),
        fingerprint=fingerprint(config, inputs),
        config=config,
        inputs=inputs,
        info=info or {},
        code_version=code_version(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        timings=timings or {},
        submission_id=submission_id(),
        extends=list(extends),
    )


def switch(tables: Mapping[str, Manifest]) -> None:
    """Make the parts of each manifest the table at its URI.

    All manifests are written, one right after the other; then parts that they do not
    list are removed.

    Raises:
        UserError: if a part is missing, because another job wrote to the same folder.
    """
    for uri, manifest in tables.items():
        filesystem, root = open_uri(uri)
        filesystem.create_dir(root, recursive=True)
        infos = filesystem.get_file_info(fs.FileSelector(root))
        existing = {info.base_name for info in infos}
        missing = {part.path for part in manifest.files} - existing
        if missing:
            raise UserError(
                f"{join(uri, min(missing))} is gone before its table was complete: another job writes to {uri} too; "
                f"wait for it, then run this one again or choose another output folder"
            )
    for uri, manifest in tables.items():
        write_file(join(uri, MANIFEST), add_seal(asdict(manifest)).encode())
    for uri, manifest in tables.items():
        clear(uri, {part.path for part in manifest.files} | {MANIFEST})


def commit(
    uri: str, table: str, schema: pa.Schema, parts: list[Part], **described: Any
) -> Manifest:
    """Make the parts the table at `uri`. `described` are arguments of `describe`."""
    manifest = describe(table, schema, parts, **described)
    switch({uri: manifest})
    return manifest


def clear(uri: str, keep: Collection[str] = ()) -> None:
    """Delete the files of jobs in a table's folder, except `keep`, and the folder if it is empty then."""
    filesystem, root = open_uri(uri)
    infos = filesystem.get_file_info(fs.FileSelector(root))
    remaining = 0
    for info in sorted(infos, key=lambda info: info.base_name):  # the manifest first
        is_job_file = info.type == fs.FileType.File and bool(
            JOB_FILES.fullmatch(info.base_name)
        )
        if is_job_file and info.base_name not in keep:
            filesystem.delete_file(info.path)
        else:
            remaining += 1
    if not remaining:
        filesystem.delete_dir(root)


def has_earlier_table(uri: str, table: str) -> bool:
    """Return whether `uri` holds an earlier version of `table`.

    Raises:
        UserError: if it holds another table or other files that are not hidden.
    """
    if has_manifest(uri):
        try:
            current = read_manifest(uri).table
        except UserError:  # damaged, so it is replaced
            current = table
        if current != table:
            raise UserError(
                f"{uri} holds the table '{current}', not '{table}'; choose a new or empty folder"
            )
        return True
    if other := _first_other(uri, lambda name: bool(JOB_FILES.fullmatch(name))):
        raise UserError(
            f"{uri} holds '{other}', which is no part of a table; choose a new or empty folder"
        )
    return False


def check_output(
    uri: str, tables: Mapping[str, str], files: Collection[str] = ()
) -> None:
    """Check the output folder of a job.

    A folder with a finished table of `tables` is an earlier output, whatever else the
    user keeps in it.

    Args:
        uri: The folder.
        tables: Tables that the job makes, by subfolder.
        files: Other files that the job makes.

    Raises:
        UserError: if the folder holds anything else and no earlier output.
    """
    earlier = [
        has_earlier_table(join(uri, folder), table) for folder, table in tables.items()
    ]
    other = (
        None
        if any(earlier)
        else _first_other(uri, lambda name: name in tables or name in files)
    )
    if other:
        raise UserError(
            f"{uri} holds '{other}' and no table '{next(iter(tables))}' of an earlier run; choose a new or empty output folder, "
            f"such as {join(uri, 'tables')}"
        )


def _first_other(uri: str, known: Callable[[str], bool]) -> str | None:
    """Return the first visible file or folder in `uri` that is not `known`, or None."""
    filesystem, root = open_uri(uri)
    if filesystem.get_file_info(root).type != fs.FileType.Directory:
        return None
    names = sorted(
        entry.base_name for entry in filesystem.get_file_info(fs.FileSelector(root))
    )
    return next(
        (name for name in names if not name.startswith(".") and not known(name)), None
    )
