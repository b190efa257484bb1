"""Tables: folders of Parquet files, listed in a `manifest.json`.

    parts = [write_part(uri, rows) for rows in partitions]     # in tasks on any node
    commit(uri, "items", schema, parts, config={}, inputs={})  # in one process
    items = open_table(uri, ItemsInfo).read()

A table is at a local path or a URI (s3://, gs://) and is written in two steps. Tasks
write parts with `write_part`; then one process calls `commit`, which writes the
manifest and removes files that the manifest does not list. The name of a part is the
hash of its content. So a task that runs twice writes the same file, a killed job leaves
only files that readers ignore, and a new version of a table does not change the files
of the old version before the manifest is replaced. A folder without a manifest is not a
table, and readers read only the listed files. Jobs lock their output while they write
(`writing`), because `commit` would remove the parts of another job.

Damage is detected when data is read. A part is read into memory once, hashed, and
parsed from memory (`read_parquet`), so a flipped bit leads to an error that names the
file.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs
from pydantic import ConfigDict, TypeAdapter, ValidationError

from core.errors import UserError, one_line
from core.files import (
    LOCK,
    hold_lock,
    join,
    open_uri,
    read_json,
    storage_errors,
    write_file,
)
from core.options import find_difference

if TYPE_CHECKING:
    import polars as pl

MANIFEST = "manifest.json"

SCHEMA_VERSION = 1

CHECKED = ConfigDict(extra="forbid", defer_build=True)
"""Settings of validated dataclasses: unknown keys are refused, and validators are built
when they are first used, so that imports stay fast."""

LARGEST_NUMBER = 1.8e19
"""Largest float32 whose square is finite. In many exports larger numbers, such as
FLT_MAX, mark a missing value."""


DICTIONARY = pa.dictionary(pa.int32(), pa.string())
"""Type of the text of an enum, which is written as it is, without a copy per row."""

PART = re.compile(r"part-([0-9a-f]{20})\.parquet")
"""Pattern of the name of a part, with the first digits of the part's SHA-256."""

JOB_FILES = re.compile(r"(part-[0-9a-f]{20}\.parquet|manifest\.json)(\.\d+\.tmp)?")
"""Pattern of the names of files that jobs write into the folder of a table. Files with
other names belong to the user."""

FILE_NAME = re.compile(r"[\w-][\w.-]*", re.ASCII)
"""Pattern of a file name without a folder."""


@dataclass(frozen=True)
class Part:
    """A Parquet file of a table."""

    path: str
    """Name of the file in the folder of the table."""
    bytes: int
    """Size of the file in bytes."""
    rows: int
    """Number of rows in the file."""
    sha256: str
    """SHA-256 of the file."""


@dataclass
class TableInfo:
    """Base class of a table's settings and statistics.

    Parsing with this class itself ignores all fields.
    """

    table: ClassVar[str] = ""
    """Name of the table; "" if there are several."""
    version: ClassVar[int] = 4
    """Version of the format, which a manifest records as `schema_version`."""

    @classmethod
    def parse(cls, content: dict[str, Any]) -> Self:
        """Validate the `info` of a manifest."""
        return TypeAdapter(cls).validate_python(content)


Info = TypeVar("Info", bound=TableInfo)


@dataclass(frozen=True)
class Table(Generic[Info]):
    """A table whose manifest was read, or is about to be written."""

    uri: str
    """Folder of the table; not in the manifest."""
    table: str
    """Name of the table, such as `sequences`."""
    schema_version: int
    """Version of the tables' schemas."""
    columns: list[str]
    """Names of the columns."""
    files: list[Part]
    """Files in the order in which they are read."""
    rows: int
    """Number of rows in all files."""
    hash: str
    """Hash of the hashes of all files, in order."""
    fingerprint: str
    """Hash of configuration, inputs and schema version. Tables with equal fingerprints
    are equal."""
    config: dict[str, Any]
    """Configuration of the job that made the table."""
    inputs: dict[str, str]
    """Hashes of the tables and files that the table was made from, by name."""
    info: Info
    """Settings and statistics, such as the number of dropped duplicates."""
    extends: list[str] = field(default_factory=list)
    """Hashes of the versions that the table extends, the latest last. The items of an
    extended version keep their index."""

    @property
    def ancestry(self) -> list[str]:
        """Hashes of the versions that the table extends, and its own."""
        return [*self.extends, self.hash]

    def check_made_with(self, config: dict[str, Any], inputs: dict[str, str]) -> None:
        """Raise UserError if the table has other settings or inputs."""
        if self.fingerprint != fingerprint(config, inputs):
            asked = json.loads(json.dumps(config, default=str))
            difference = find_difference(self.config, asked)
            difference = difference or find_difference(self.inputs, inputs)
            raise UserError(f"{self.uri} was made with {difference}", "settings")

    def part_uris(self) -> list[str]:
        """Check the sizes of the files, and return their URIs."""
        filesystem, root = open_uri(self.uri)
        paths = [posixpath.join(root, part.path) for part in self.files]
        with storage_errors(self.uri):
            infos = filesystem.get_file_info(paths)
        uris = [join(self.uri, part.path) for part in self.files]
        for part, info, uri in zip(self.files, infos, uris, strict=True):
            if info.size != part.bytes:
                raise UserError(
                    f"{uri} has {info.size} bytes, its manifest says {part.bytes}"
                )
        return uris

    def read(self, columns: list[str] | None = None) -> pa.Table:
        """Read some or all columns of all rows."""
        if not self.files:
            raise UserError(f"the table {self.uri} has no rows")
        return pa.concat_tables(read_parquet(uri, columns) for uri in self.part_uris())


MANIFEST_KEYS = [field.name for field in fields(Table) if field.name != "uri"]
"""Keys of a manifest."""


def table_hashes(versions: Mapping[str, Table[Any]]) -> dict[str, str]:
    """Return the hash of each table, by the table's name."""
    return {name: version.hash for name, version in versions.items()}


def check_file_names(names: Iterable[str]) -> None:
    """Raise ValueError if a name is not a plain file name."""
    for name in names:
        if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
            raise ValueError(f"the path {name!r} is not a file name")


def read_manifest(uri: str) -> Table[Any] | None:
    """Read a table's manifest, with any `info`; None without the file."""
    path = join(uri, MANIFEST)
    try:
        with storage_errors(uri):
            content = read_json(path)
        if content is None:
            return None
        content["files"] = [Part(**part) for part in content["files"]]
        check_file_names(part.path for part in content["files"])
        content.setdefault("columns", [])  # an earlier format, which `find_table` names
        return Table(uri=uri, **{name: content[name] for name in MANIFEST_KEYS})
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error})") from error


def find_table(uri: str, info_class: type[Info]) -> Table[Info] | None:
    """Open a table; None if the folder holds no finished table."""
    table = read_manifest(uri)
    if table is None:
        return None
    name, version = info_class.table, info_class.version
    if name and table.table != name:
        raise UserError(f"{uri} holds the table '{table.table}', not '{name}'")
    if table.schema_version != version:
        raise UserError(
            f"{uri} has format {table.schema_version} of {table.table}, this version "
            f"reads format {version}",
            "format",
        )
    try:
        return replace(table, info=info_class.parse(table.info))
    except ValidationError as error:
        path = join(uri, MANIFEST)
        raise UserError(f"{path} is damaged ({one_line(error)})") from error


def open_table(uri: str, info_class: type[Info]) -> Table[Info]:
    """Open a table."""
    table = find_table(uri, info_class)
    if table is None:
        raise UserError(f"{uri} is not a table: it holds no {MANIFEST}")
    return table


def read_parquet(
    uri: str,
    columns: list[str] | None = None,
) -> pa.Table:
    """Read one Parquet file, and verify the hash in its name.

    The whole file is read and hashed, even if only some columns are returned.

    Args:
        uri: Path or URI of the file.
        columns: Columns to return; None for all.
    """
    filesystem, path = open_uri(uri)
    part = PART.fullmatch(posixpath.basename(path))
    try:
        with filesystem.open_input_file(path) as file:
            content = file.read_buffer()
        if part and hashlib.sha256(content).hexdigest()[: len(part[1])] != part[1]:
            raise UserError(f"{uri} is damaged: its content does not match its name")
        parquet = pq.ParquetFile(pa.BufferReader(content))
        check_plain_types(parquet.schema_arrow, uri)
        return parquet.read(columns=columns)
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"{uri} is not a readable Parquet file ({one_line(error)})"
        ) from error


def check_plain_types(schema: pa.Schema, uri: str) -> None:
    """Check that no column has an extension type, whose values may be pickles."""
    types = [(field.name, field.type) for field in schema]
    while types:
        name, arrow_type = types.pop()
        if isinstance(arrow_type, pa.BaseExtensionType):
            raise UserError(f"{uri}: the column {name} has the type {arrow_type}")
        types += [
            (name, arrow_type.field(i).type) for i in range(arrow_type.num_fields)
        ]


def digest(content: Any) -> str:
    """Return a stable SHA-256 of JSON-like content."""
    text = json.dumps(content, sort_keys=True, default=str, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def fingerprint(config: dict[str, Any], inputs: dict[str, str]) -> str:
    """Return a hash of configuration and inputs.

    A job need not run again if its output has the same fingerprint.

    Args:
        config: Configuration of the job.
        inputs: Hash of each input by name.
    """
    return digest([SCHEMA_VERSION, config, inputs])


def writing(uri: str) -> AbstractContextManager[None]:
    """Lock a folder of tables while a job writes the tables (`hold_lock`)."""
    return hold_lock(
        join(uri, LOCK),
        f"{uri} is being written by another process; wait for it or choose another "
        "output folder",
    )


def write_part(uri: str, table: pa.Table, **options: Any) -> Part:
    """Write one part of a table, a Parquet file named by the hash of its bytes.

    The file is assembled in memory, hashed and written at once. String columns may be
    dictionary-encoded, which makes writing faster; the file contains plain strings.

    Args:
        uri: Folder of the table.
        table: Rows of the part.
        options: Options of `pyarrow.parquet.write_table`, which replace the defaults
            for tables of ids and times.
    """
    buffer = pa.BufferOutputStream()
    if not options:
        sink = pa.BufferOutputStream()
        pq.write_metadata(table.schema, sink)
        described = pq.read_metadata(pa.BufferReader(sink.getvalue())).schema
        leaves = [described.column(index) for index in range(len(described))]
        # int64 columns are times, sorted within a user: delta encoding is smaller and
        # faster than a dictionary
        times = [leaf.path for leaf in leaves if leaf.physical_type == "INT64"]
        options = {
            "use_dictionary": [leaf.path for leaf in leaves if leaf.path not in times],
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


def write_frame(uri: str, rows: pl.DataFrame, schema: pa.Schema) -> Part:
    """Write the rows of a frame as one part of a table with this schema."""
    table = rows.select(schema.names).to_arrow()
    for index, column in enumerate(table.schema):
        if pa.types.is_dictionary(column.type):
            schema = schema.set(index, schema.field(index).with_type(DICTIONARY))
    return write_part(uri, table.cast(schema).combine_chunks())


def make_table(
    uri: str,
    table: str,
    schema: pa.Schema,
    parts: list[Part],
    *,
    config: dict[str, Any],
    inputs: dict[str, str],
    info: TableInfo | None = None,
    extends: Iterable[str] = (),
) -> Table[Any]:
    """Describe a table whose parts have been written, for `replace_tables`.

    Args:
        uri: Folder of the table.
        table: Name of the table.
        schema: Schema of the table.
        parts: Parts in the order in which they are read.
        config: Configuration of the job that made the table.
        inputs: Hashes of the tables and files from which the table was made, by name.
        info: Settings and statistics; None for a table without.
        extends: Hashes of the versions that the table extends, the latest last.
    """
    info = info or TableInfo()
    return Table(
        uri=uri,
        table=table,
        schema_version=info.version,
        columns=schema.names,
        files=parts,
        rows=sum(part.rows for part in parts),
        hash=digest([part.sha256 for part in parts]),
        fingerprint=fingerprint(config, inputs),
        config=config,
        inputs=inputs,
        info=info,
        extends=list(extends),
    )


def replace_tables(tables: Collection[Table[Any]]) -> None:
    """Replace tables by new versions, whose parts have been written.

    All manifests are written, one right after the other. Then the files that they do
    not list are removed.
    """
    for table in tables:
        content = asdict(table)
        del content["uri"]
        text = json.dumps(content, indent=2, sort_keys=True, default=str)
        write_file(join(table.uri, MANIFEST), text.encode())
    for table in tables:
        clear(table.uri, {part.path for part in table.files} | {MANIFEST})


def commit(
    uri: str, table: str, schema: pa.Schema, parts: list[Part], **provenance: Any
) -> Table[Any]:
    """Create or replace the table at `uri`, whose parts have been written.

    Args:
        uri: Folder of the table.
        table: Name of the table.
        schema: Schema of the table.
        parts: Parts in the order in which they are read.
        provenance: Keyword arguments of `make_table`, such as `config`.
    """
    committed = make_table(uri, table, schema, parts, **provenance)
    replace_tables([committed])
    return committed


def clear(uri: str, keep: Collection[str] = ()) -> None:
    """Delete the files that jobs have written into a table's folder.

    The folder is deleted too if it is empty afterwards.

    Args:
        uri: Folder of the table.
        keep: Names of files to keep.
    """
    filesystem, root = open_uri(uri)
    infos = filesystem.get_file_info(fs.FileSelector(root))
    remaining = 0
    for info in sorted(infos, key=lambda info: info.base_name):  # the manifest first
        is_file = info.type == fs.FileType.File
        matches = JOB_FILES.fullmatch(info.base_name) is not None
        if is_file and matches and info.base_name not in keep:
            filesystem.delete_file(info.path)
        else:
            remaining += 1
    if not remaining:
        filesystem.delete_dir(root)


def check_replaceable(uri: str, table: str) -> None:
    """Raise UserError if `uri` holds another table than an earlier `table`."""
    try:
        current = read_manifest(uri)
    except UserError:  # damaged: the job replaces the table
        return
    if current and current.table != table:
        raise UserError(f"{uri} holds the table '{current.table}', not '{table}'")
