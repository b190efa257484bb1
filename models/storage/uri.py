"""Files at local paths and URIs such as s3://bucket/key, through pyarrow.fs.

filesystem, path = open_uri("s3://bucket/tables/items")
"""

from __future__ import annotations

import json
import os
import posixpath
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs

from models.error_text import one_line


class UserError(Exception):
    """An error in the input or configuration, with a one-line message for the user.

    The message names the value and the limit. Jobs print the message
    without a traceback and exit with code 1. Every other exception is a bug and is
    printed with its traceback.
    """


S3_RETRIES: dict[str, Any] = {
    "connect_timeout": 10.0,
    "request_timeout": 30.0,  # until the first byte, and between bytes
    "retry_strategy": fs.AwsStandardS3RetryStrategy(max_attempts=9),
}
"""Retries of S3. Nine attempts, with pauses of up to 20 s, take about a minute. 403 and
404 are not retried."""

GCS_RETRIES: dict[str, Any] = {"retry_time_limit": timedelta(seconds=60)}
"""Retries of GCS."""

OBSTORE_RETRIES: dict[str, Any] = {
    "retry_config": {"max_retries": 9, "retry_timeout": timedelta(seconds=60)},
}
"""Retries of S3 and GCS when a lock is read or written through obstore."""


def open_uri(uri: str) -> tuple[fs.FileSystem, str]:
    """Open the file system of a local path or a URI such as `s3://bucket/key`.

    All file systems are opened by this function, with retries.

    Returns:
        The file system, and the path within it.

    Raises:
        UserError: If the storage does not respond.
    """
    uri = str(uri)
    if "://" not in uri:
        return fs.LocalFileSystem(), str(Path(uri).expanduser().absolute())
    with storage_errors(uri):
        filesystem, path = fs.FileSystem.from_uri(uri)
    retries = {"s3": S3_RETRIES, "gcs": GCS_RETRIES}.get(filesystem.type_name)
    if retries:
        settings = filesystem.__reduce__()[1][0]  # pyarrow has no copy with changes
        filesystem = type(filesystem)(**{**settings, **retries})
    return filesystem, path


@contextmanager
def storage_errors(uri: str) -> Iterator[None]:
    """Turn storage errors in the block into UserErrors that name `uri`."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"cannot reach {uri} ({one_line(error)})") from error


def file_info(uri: str) -> fs.FileInfo:
    """Return the type and size of a file or folder.

    Raises:
        UserError: If the storage does not respond.
    """
    filesystem, path = open_uri(uri)
    with storage_errors(uri):
        return filesystem.get_file_info(path)


def join(uri: str, *names: str) -> str:
    """Append path elements to a path or URI, in front of the query of a URI."""
    uri = str(uri)
    if "://" not in uri:
        return posixpath.join(uri, *names)
    path, mark, query = uri.partition("?")
    return posixpath.join(path, *names) + mark + query


def absolute(uri: str) -> str:
    """Make a local path absolute, and strip trailing slashes from a URI.

    Workers run in other folders, so they need absolute paths.
    """
    return uri.rstrip("/") if "://" in uri else str(Path(uri).expanduser().absolute())


def write_file(uri: str, content: bytes | pa.Buffer) -> None:
    """Write a file atomically: readers see the old or the new content, never a part."""
    filesystem, path = open_uri(uri)
    if isinstance(filesystem, fs.LocalFileSystem):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        # `tables.commit` removes the temporary files of killed jobs
        temporary = Path(f"{path}.{os.getpid()}.tmp")
        temporary.write_bytes(memoryview(content))
        temporary.replace(path)
        return
    # object stores show an object only once it is complete
    with filesystem.open_output_stream(path) as stream:
        stream.write(content)


def read_json(uri: str) -> Any:
    """Return the content of a JSON file, or None if it does not exist.

    Raises:
        ValueError: If the file is damaged.
    """
    filesystem, path = open_uri(uri)
    if filesystem.get_file_info(path).type != fs.FileType.File:
        return None
    with filesystem.open_input_stream(path) as stream:
        content = json.loads(stream.read())
    if content is None:
        raise ValueError("it is empty")
    return content
