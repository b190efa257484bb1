"""The tables: their schemas, one comment per column, and how they are written.

A table is written in two steps. Tasks anywhere write parts with `write_part`; the driver then calls
`commit`, which writes `manifest.json` last and removes parts that it does not list. Parts are named by
the hash of their content, so a task that Ray runs twice writes the same file, a killed run leaves only
files that no reader sees, and a new version never touches a file of the old one before the switch.

Jobs hold their output while they write (`writing`), since `commit` would remove the parts of another one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from models.locks import LOCK, locked
from models.tables import (
    MANIFEST,
    Manifest,
    Part,
    UserError,
    file_info,
    has_manifest,
    join,
    open_uri,
    read_manifest,
)

SCHEMA_VERSION = 1

OWN = re.compile(r"(part-[0-9a-f]{20}\.parquet|manifest\.json|tally-\d+\.json)(\.\d+\.tmp)?|\.writable-\d+")
"""Names of the files that we write into the folder of a table; a file of any other name is the user's."""

LABEL_TYPES = {"bool": pa.bool_(), "float32": pa.float32()}


CARRIED = ("label_", "known_", "num_", "cat_")
"""Beginnings of the columns of events that sequences carry."""


def events_schema(
    labels: dict[str, str] | None = None,
    numbers: Iterable[str] = (),
    categories: Iterable[str] = (),
    known: Iterable[str] = (),
) -> pa.Schema:
    """events: one row per impression or interaction. `labels` maps names to `bool` or `float32`; `known` are those
    that have a time of their own or a delay."""
    return pa.schema(
        [
            pa.field("user_id", pa.string(), nullable=False),
            pa.field("request_id", pa.string(), nullable=False),  # one request or page view; "" if the log has none
            pa.field("timestamp_ms", pa.int64(), nullable=False),  # epoch ms, or the ordinal of an order-only log
            pa.field("item_id", pa.string(), nullable=False),
            pa.field("query", pa.string()),  # null where the event had no query
            pa.field("position", pa.int32(), nullable=False),  # rank shown, from 0; 0 if the log has none
            *(pa.field(f"label_{name}", LABEL_TYPES[kind]) for name, kind in (labels or {}).items()),
            *(pa.field(f"known_{name}", pa.int64()) for name in known),  # from when on; null where the label is not set
            *(pa.field(f"num_{name}", pa.float32()) for name in numbers),
            *(pa.field(f"cat_{name}", pa.string()) for name in categories),
        ]
    )


REJECTS = pa.schema(
    [
        pa.field("file", pa.string(), nullable=False),  # raw file, relative to the input folder
        pa.field("piece", pa.int64(), nullable=False),  # where the piece that was read begins: byte, or row group
        pa.field("row", pa.int64(), nullable=False),  # row in that piece, from 0, without header and blank lines
        pa.field("reason", pa.string(), nullable=False),  # by the log's own column, such as "bought_at: negative"
        pa.field("source", pa.string(), nullable=False),  # the source row as JSON
    ]
)


def items_schema(texts: Iterable[str] = (), attributes: Iterable[str] = (), numbers: Iterable[str] = ()) -> pa.Schema:
    """items: one row per item of the catalogue, sorted by `item_index`."""
    return pa.schema(
        [
            pa.field("item_index", pa.int32(), nullable=False),  # dense, from 0, in the order of item_id
            pa.field("item_id", pa.string(), nullable=False),
            *(pa.field(f"text_{name}", pa.string()) for name in texts),
            *(pa.field(f"cat_{name}", pa.string()) for name in attributes),
            *(pa.field(f"num_{name}", pa.float32()) for name in numbers),
        ]
    )


def _list(name: str, value: pa.DataType) -> pa.Field:
    return pa.field(name, pa.list_(pa.field("item", value)), nullable=False)


def sequences_schema(events: pa.Schema) -> pa.Schema:
    """sequences: one row per user. Every column of `events` that is not a key becomes an equal-length list.

    Behaviours are sorted by (timestamp_ms, request_id, position, item_id), with `ties: log_order` by (timestamp_ms,
    position, item_id); where their label has a time of its own, by that first. `requests` has one struct per request,
    in the same order.
    """
    extra = [field for field in events if field.name == "query" or field.name.startswith(CARRIED)]
    request = pa.struct(
        [
            pa.field("timestamp_ms", pa.int64()),
            pa.field("query", pa.string()),
            pa.field("history_end", pa.int32()),  # behaviours known strictly before the request
            pa.field("split", pa.string()),  # train, val or test
            pa.field("candidates", pa.list_(pa.field("item", pa.int32()))),  # item_index; retrieval: the target
        ]
    )
    return pa.schema(
        [
            pa.field("user_id", pa.string(), nullable=False),
            _list("item_index", pa.int32()),
            _list("timestamp_ms", pa.int64()),
            *(_list(field.name, field.type) for field in extra),
            _list("requests", request),
        ]
    )


QUERIES = pa.schema(
    [
        pa.field("query_index", pa.int32(), nullable=False),  # dense, from 0, in the order of the text
        pa.field("query", pa.string(), nullable=False),
    ]
)


def search_schema(events: pa.Schema, labels: Iterable[str], features: int) -> pa.Schema:
    """sequences of a search log: one row per user with a request.

    Behaviours (results with the first of `labels`, sorted by (timestamp_ms, request_id, position, item_id), and by
    `known_*` of the label first where the log has it) are equal-length lists. `requests` has one struct per search,
    at its earliest result, sorted by (timestamp_ms, request_id, query_index); its candidates by (position,
    timestamp_ms, item_id).
    `labels` are the bool labels, `features` is the number F of features. Own features, `num_*` and `cat_*` of events,
    are in behaviours and in requests.
    """
    extra = [field for field in events if field.name.startswith(CARRIED)]
    own = [field for field in extra if field.name.startswith(("num_", "cat_"))]
    request = pa.struct(
        [
            pa.field("timestamp_ms", pa.int64()),
            pa.field("query_index", pa.int32()),  # -1: no query
            pa.field("history_end", pa.int32()),  # behaviours known strictly before the request
            pa.field("split", pa.string()),  # train, val or test
            pa.field("candidates", pa.list_(pa.field("item", pa.int32()))),  # item_index of each result shown
            pa.field("positions", pa.list_(pa.field("item", pa.int32()))),  # its rank shown, from 0
            *(pa.field(f"label_{name}", pa.list_(pa.field("item", pa.bool_()))) for name in labels),
            pa.field("features", pa.list_(pa.field("item", pa.float32()))),  # candidates x F, row after row
            *(
                pa.field(f.name, pa.list_(pa.field("item", f.type))) for f in own
            ),  # of each candidate, as the log has it
        ]
    )
    return pa.schema(
        [
            pa.field("user_id", pa.string(), nullable=False),
            _list("item_index", pa.int32()),
            _list("timestamp_ms", pa.int64()),
            _list("query_index", pa.int32()),  # -1: no query
            _list("position", pa.int32()),
            *(_list(field.name, field.type) for field in extra),
            _list(
                "features", pa.list_(pa.field("item", pa.float32()), features)
            ),  # as of the request that showed the result
            _list("requests", request),
        ]
    )


def actions_schema(events: pa.Schema, tasks: int, actions: int, features: int) -> pa.Schema:
    """sequences of a log of actions: one row per user, all lists of equal length, an entry per impression.

    Events are sorted by (timestamp_ms, request_id, position, item_id). The manifest names the `tasks`,
    `actions` and `features` in order, and the values of each `cat_*` column in training (`viewers`). Context of
    validation: events before `train_end`; its candidates: from there to `val_end`. Of test: before `val_end`, and
    from there on.
    """
    extra = [field for field in events if field.name.startswith(CARRIED)]
    return pa.schema(
        [
            pa.field("user_id", pa.string(), nullable=False),
            _list("item_index", pa.int32()),
            _list("timestamp_ms", pa.int64()),
            *(_list(field.name, field.type) for field in extra),
            _list("tasks", pa.list_(pa.field("item", pa.uint8()), tasks)),  # 0 or 1
            _list("actions", pa.list_(pa.field("item", pa.float32()), actions)),  # what models read, from 0 to 1
            _list("features", pa.list_(pa.field("item", pa.float32()), features)),  # counts before the event or its cut
            pa.field("train_end", pa.int32(), nullable=False),  # the user's events before the validation cut
            pa.field("val_end", pa.int32(), nullable=False),  # the user's events before the test cut
        ]
    )


def counts_schema(features: Iterable[Iterable[str]]) -> pa.Schema:
    """counts: what is counted before a moment of a log of searches; one row per item, per query and per pair. The
    manifest says which `features` are of which; those of the other kinds are null."""
    return pa.schema(
        [
            pa.field("item_id", pa.string()),  # null in a row of a query
            pa.field("query", pa.string()),  # null in a row of an item
            *(pa.field(name, pa.float32()) for names in features for name in names),  # as in the features of sequences
        ]
    )


def embeddings_schema(
    width: int, keys: Iterable[str] = ("item_index",), vectors: Iterable[str] = ("embedding",)
) -> pa.Schema:
    """embeddings: one row per item, query (`query_index`) or pair of both, sorted by the keys."""
    return pa.schema(
        [
            *(pa.field(name, pa.int32(), nullable=False) for name in keys),
            *(pa.field(name, pa.list_(pa.float32(), width), nullable=False) for name in vectors),
        ]
    )


TOKENS = pa.schema(
    [
        pa.field("item_index", pa.int32(), nullable=False),  # sorted, dense
        pa.field("tokens", pa.list_(pa.field("item", pa.int32())), nullable=False),  # of the document, as encoded
    ]
)

SIDS = pa.schema(
    [
        pa.field("item_index", pa.int32(), nullable=False),  # sorted, dense
        pa.field("codes", pa.list_(pa.field("item", pa.uint16())), nullable=False),  # one code per level
    ]
)

TRIE = pa.schema(
    [
        pa.field("level", pa.int16(), nullable=False),  # 0 for the edges that leave the root
        pa.field("node", pa.int32(), nullable=False),  # parent: the edge's rank within the level above; root 0
        pa.field("token", pa.uint16(), nullable=False),  # code on the edge
        pa.field("child", pa.int32(), nullable=False),  # the edge's own rank within its level
        pa.field("item_index", pa.int32()),  # set at the last level, null above it
    ]
)


def digest(content: Any) -> str:
    """A stable hash of JSON-like content."""
    text = json.dumps(content, sort_keys=True, default=str, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def fingerprint(config: dict[str, Any], inputs: dict[str, str]) -> str:
    """Hash of what a table is made from; equal fingerprints mean that the step need not run again."""
    return digest([SCHEMA_VERSION, config, inputs])


def up_to_date(uri: str, print_: str) -> bool:
    """Whether the table at `uri` is finished and was made from what `print_` (a fingerprint) says."""
    return has_manifest(uri) and read_manifest(uri).fingerprint == print_


def check_writable(uri: str) -> None:
    """Creates the directory and tries a write, so that an unwritable output fails before any work."""
    filesystem, path = open_uri(uri)
    probe = f"{path}/.writable-{os.getpid()}"
    try:
        filesystem.create_dir(path, recursive=True)
        with filesystem.open_output_stream(probe) as stream:
            stream.write(b"")
        filesystem.delete_file(probe)
    except OSError as error:
        first = str(error).splitlines()[0]
        raise UserError(f"cannot write to {uri} ({first}); choose an output folder that you may write") from error


def check_can_write(uri: str) -> None:
    """Refuses an output that can never be written, and makes nothing: the storage answers, the folder that is there
    or is to hold it is one and may be written."""
    if "://" in uri:
        file_info(uri)
        return
    wanted = Path(uri).expanduser().absolute()
    there = next(path for path in (wanted, *wanted.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "is no folder" if not there.is_dir() else "may not be written by you"
        raise UserError(f"cannot write to {uri} ({there} {why}); choose an output folder that you may write")


def check_place(uri: str, table: str) -> bool:
    """Whether `uri` holds an earlier `table`. UserError where it holds anything else that is not hidden."""
    if has_manifest(uri):
        try:
            held = read_manifest(uri).table
        except UserError:  # a damaged one, to be replaced
            held = table
        if held != table:
            raise UserError(f"{uri} holds the table '{held}', not '{table}'; choose a new or empty folder")
        return True
    if other := _first_other(uri, lambda name: bool(OWN.fullmatch(name))):
        raise UserError(f"{uri} holds '{other}', which is no part of a table; choose a new or empty folder")
    return False


def check_output(uri: str, tables: Mapping[str, str], files: Collection[str] = ()) -> None:
    """UserError where the folder `uri` holds other things than `tables`, {folder: table}, and `files`.

    One with a finished table of these is an earlier output, whatever the user keeps beside it.
    """
    earlier = [check_place(join(uri, folder), table) for folder, table in tables.items()]
    other = None if any(earlier) else _first_other(uri, lambda name: name in tables or name in files)
    if other:
        raise UserError(
            f"{uri} holds '{other}' and no {next(iter(tables))} made here before; choose a new or empty output folder, "
            f"such as {join(uri, 'tables')}"
        )


def _first_other(uri: str, known: Callable[[str], bool]) -> str | None:
    """A file or folder in `uri`, not hidden, that is not `known`."""
    filesystem, root = open_uri(uri)
    if filesystem.get_file_info(root).type != fs.FileType.Directory:
        return None
    names = sorted(entry.base_name for entry in filesystem.get_file_info(fs.FileSelector(root)))
    return next((name for name in names if not name.startswith(".") and not known(name)), None)


def writing(uri: str) -> AbstractContextManager[None]:
    """Holds a folder of tables while a job writes them (`locked`)."""
    return locked(
        join(uri, LOCK), f"{uri} is being written by another process; wait for it or choose another output folder"
    )


def write_part(uri: str, table: pa.Table) -> Part:
    """Writes one Parquet file into the directory `uri`, named by the hash of its bytes.

    The bytes are assembled in memory (a part is one partition), hashed and put in one go. Strings of flat
    tables may come dictionary-coded, which saves the writer from coding them; the file holds plain strings.
    """
    buffer = pa.BufferOutputStream()
    leaves = [leaf for field in table.schema for leaf in _leaves(field.name, field.type)]
    # int64 columns are times, sorted within a user: packed differences are smaller and faster than a dictionary
    times = [path for path, kind in leaves if kind == pa.int64()]
    pq.write_table(
        table,
        buffer,
        compression="zstd",
        compression_level=1,
        use_dictionary=[path for path, _ in leaves if path not in times],
        column_encoding=dict.fromkeys(times, "DELTA_BINARY_PACKED"),
        store_schema=not any(pa.types.is_dictionary(kind) for kind in table.schema.types),
    )
    content = buffer.getvalue()
    sha256 = hashlib.sha256(content).hexdigest()
    part = Part(path=f"part-{sha256[:20]}.parquet", bytes=content.size, rows=table.num_rows, sha256=sha256)
    write_file(join(uri, part.path), content)
    return part


def _leaves(path: str, kind: pa.DataType) -> list[tuple[str, pa.DataType]]:
    """Columns of a Parquet file: their paths and types."""
    if isinstance(kind, pa.ListType | pa.FixedSizeListType):
        return _leaves(f"{path}.list.element", kind.value_type)
    if isinstance(kind, pa.StructType):
        return [leaf for field in kind for leaf in _leaves(f"{path}.{field.name}", field.type)]
    return [(path, kind)]


def code_version() -> str:
    """Package version and, in a checkout, the git commit."""
    try:
        release = version("trieline")
    except PackageNotFoundError:
        release = "unknown"
    return f"{release} {git('describe', '--always', '--dirty') or ''}".strip()


def git(*words: str) -> str | None:
    """What git says of the checkout that this code runs from; None where there is none, or no git, as in an image."""
    try:
        said = subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return said.stdout.strip() if said.returncode == 0 else None


def commit(
    uri: str,
    table: str,
    schema: pa.Schema,
    parts: list[Part],
    *,
    config: dict[str, Any],
    inputs: dict[str, str],
    info: dict[str, Any] | None = None,
    timings: dict[str, Any] | None = None,
) -> Manifest:
    """Makes the parts the table: writes the manifest, then removes every part that it does not list.

    UserError where a part is gone: another job that wrote to `uri` too has removed it.
    """
    manifest = Manifest(
        table=table,
        schema_version=SCHEMA_VERSION,
        schema=[{"name": f.name, "type": str(f.type), "nullable": str(f.nullable)} for f in schema],
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
    )
    filesystem, root = open_uri(uri)
    filesystem.create_dir(root, recursive=True)
    there = filesystem.get_file_info(fs.FileSelector(root))
    if gone := {part.path for part in parts} - {entry.base_name for entry in there}:
        raise UserError(
            f"{join(uri, min(gone))} is gone before its table was complete: another job writes to {uri} too; wait "
            f"for it, then run this one again or choose another output folder"
        )
    write_file(join(uri, MANIFEST), manifest.to_json().encode())
    clear(uri, {part.path for part in parts} | {MANIFEST})
    return manifest


def clear(uri: str, keep: Collection[str] = ()) -> None:
    """Deletes the files of our own (`OWN`) but those of `keep`, and the folder if nothing is left in it."""
    filesystem, root = open_uri(uri)
    left = 0
    for entry in sorted(filesystem.get_file_info(fs.FileSelector(root)), key=lambda e: e.base_name):  # manifest first
        if entry.type == fs.FileType.File and OWN.fullmatch(entry.base_name) and entry.base_name not in keep:
            filesystem.delete_file(entry.path)
        else:
            left += 1
    if not left:
        filesystem.delete_dir(root)


def write_file(uri: str, content: bytes | pa.Buffer) -> None:
    """Writes a file so that readers see the old content or the new, never a part of it."""
    filesystem, path = open_uri(uri)
    if isinstance(filesystem, fs.LocalFileSystem):
        temporary = Path(f"{path}.{os.getpid()}.tmp")  # `commit` removes one that a killed run leaves
        temporary.write_bytes(memoryview(content))
        temporary.replace(path)
        return
    with filesystem.open_output_stream(path) as stream:  # object stores show a put when it is complete
        stream.write(content)


def read_json(uri: str) -> Any:
    """What a JSON file holds, or None where there is no file; ValueError for one that is damaged."""
    filesystem, path = open_uri(uri)
    if filesystem.get_file_info(path).type != fs.FileType.File:
        return None
    with filesystem.open_input_stream(path) as stream:
        content = json.loads(stream.read())
    if content is None:
        raise ValueError("it holds nothing")
    return content
