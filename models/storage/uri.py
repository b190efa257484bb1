"""Files at local paths and URIs such as s3://bucket/key, through pyarrow.fs.

    filesystem, path = open_uri("s3://bucket/tables/items")

URIs that hold a secret are refused, since records and logs would keep them.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import pyarrow as pa
from pyarrow import fs


class UserError(Exception):
    """An error of input or configuration: one line that names the value, the limit and the remedy.

    Jobs print the line without a traceback and exit with code 1. Every other exception
    is a defect and keeps its traceback.
    """


SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://")

SECRET = re.compile(
    r"secret|token|passw|passphrase|pwd|signature|credential|authorization|accesskey|accessid|accountkey|apikey|"
    r"privatekey|sharedkey|^(?:sig|key|keyid|user|username|login|auth|pass|uid)$"
)
"""Names of URI parameters that hold secrets, in lower-case letters and digits."""

CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS",
    **dict.fromkeys(
        ("http", "https"),
        "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
    ),
    "postgresql": "set PGUSER and PGPASSWORD",
}
"""Remedy for a URI that holds credentials, by scheme."""


def refuse_secrets(value: Any, what: str = "a URI") -> None:
    """Raise UserError if a value contains, at any depth, a URI with a user or a secret
    parameter.

    Args:
        what: Name of the value in the message, which does not print the URI.
    """
    if isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            refuse_secrets(inner, what)
    if isinstance(value, str) and SCHEME.match(value) and _has_secret(value):
        scheme = value.partition("://")[0].lower()
        remedy = CREDENTIALS.get(
            scheme, "give it to an mlflow server, whose address you give here"
        )
        raise UserError(
            f"{what} ({scheme}://...) holds a user, password or key; leave it out and {remedy}"
        )


def _has_secret(uri: str) -> bool:
    parts = urlsplit(uri)
    user, has_user, host = unquote(parts.netloc).rpartition("@")
    if has_user and user != "anonymous":
        return True
    port = host.rpartition("]")[2]
    if re.search(r":\D", port):  # a password with a slash ends the host there
        return True
    parameters = parse_qsl(f"{parts.query}&{parts.fragment}")
    names = [re.sub(r"[^a-z0-9]", "", name.lower()) for name, _ in parameters]
    return any(map(SECRET.search, names))


REMEDIES = {
    "s3": "check the bucket, its ?region= or ?endpoint_override=, and the credentials (AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE)",
    "gs": "check the bucket and the credentials (GOOGLE_APPLICATION_CREDENTIALS)",
    "": "check that it is there and that you may read it",
}
"""Remedy for a storage that does not answer, by scheme; a local path has an empty
one."""

UNKNOWN_SCHEME = (
    "check the address and its credentials; known are local paths, s3:// and gs://"
)


S3_RETRIES: dict[str, Any] = {
    "connect_timeout": 10.0,
    "request_timeout": 30.0,  # until the first byte, and between bytes
    "retry_strategy": fs.AwsStandardS3RetryStrategy(max_attempts=9),
}
"""Retries of S3: with its pauses of up to 20 s, nine attempts take about a minute. 403
and 404 are not retried."""

GCS_RETRIES: dict[str, Any] = {"retry_time_limit": timedelta(seconds=60)}
"""Retries of GCS."""

OBSTORE_RETRIES: dict[str, Any] = {
    "retry_config": {"max_retries": 9, "retry_timeout": timedelta(seconds=60)},
}
"""Retries of S3 and GCS for reads and writes of locks."""

FIRST_S3_RETRIES: dict[str, Any] = {
    "connect_timeout": 5.0,
    "request_timeout": 30.0,
    "retry_strategy": fs.AwsStandardS3RetryStrategy(max_attempts=2),
}
"""Retries of a job's first request to a bucket of S3."""

FIRST_GCS_RETRIES: dict[str, Any] = {"retry_time_limit": timedelta(seconds=5)}
"""Retries of a job's first request to a bucket of GCS."""

_checks_buckets = False
"""Whether `open_uri` sends a first request with few retries to every bucket."""

_answered: set[tuple[str, str, str]] = set()
"""Scheme, host and query of the buckets that have answered this process."""


def check_buckets_first() -> None:
    """Let `open_uri` fail within seconds in this process if a bucket does not answer at all.

    The driver of a job calls this. Workers do not: the storage has answered their
    driver, so they retry for a minute.
    """
    global _checks_buckets
    _checks_buckets = True


def open_uri(uri: str) -> tuple[fs.FileSystem, str]:
    """Return the file system and the path of a local path or a URI (`s3://bucket/key`).

    All file systems are opened by this function, with retries.

    Raises:
        UserError: if the URI holds a secret, or the storage does not answer.
    """
    uri = str(uri)
    if "://" not in uri:
        return fs.LocalFileSystem(), str(Path(uri).expanduser().absolute())
    refuse_secrets(uri)
    with storage_errors(uri):
        filesystem, path = fs.FileSystem.from_uri(uri)
        if _checks_buckets and not isinstance(filesystem, fs.LocalFileSystem):
            _check_bucket(filesystem, path, uri)
        return _with_options(filesystem, S3_RETRIES, GCS_RETRIES), path


def _with_options(
    filesystem: fs.FileSystem, s3: dict[str, Any], gcs: dict[str, Any]
) -> fs.FileSystem:
    """Return a file system with other options if it is one of S3 or GCS."""
    options = {"s3": s3, "gcs": gcs}.get(filesystem.type_name)
    if not options:
        return filesystem
    settings = filesystem.__reduce__()[1][0]  # pyarrow has no copy with changes
    return type(filesystem)(**{**settings, **options})


@contextmanager
def storage_errors(uri: str) -> Iterator[None]:
    """Turn errors of a storage inside the block into UserErrors that name `uri` and a remedy."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        lines = str(error).splitlines() or [""]
        reason = " ".join(lines[0].split())[:300]
        scheme = uri.partition("://")[0].lower() if "://" in uri else ""
        remedy = REMEDIES.get(scheme, UNKNOWN_SCHEME)
        raise UserError(f"cannot reach {uri} ({reason}); {remedy}") from error


def _check_bucket(filesystem: fs.FileSystem, path: str, uri: str) -> None:
    """Send a first request with few retries to a bucket that has not answered yet; raise OSError if it fails."""
    parts = urlsplit(uri)
    bucket_id = (parts.scheme, parts.netloc, parts.query)
    if bucket_id in _answered:
        return
    filesystem = _with_options(filesystem, FIRST_S3_RETRIES, FIRST_GCS_RETRIES)
    bucket = path.split("/")[0]
    try:
        if filesystem.get_file_info(bucket).type == fs.FileType.NotFound:
            raise FileNotFoundError(f"there is no bucket {bucket}")
    except OSError as error:
        if "ACCESS_DENIED" not in str(error):
            raise
        # a prefix of the bucket may be open to accounts that may not list the bucket
        filesystem.get_file_info(path)
    _answered.add(bucket_id)


def file_info(uri: str) -> fs.FileInfo:
    """Return type and size of a file or folder. Raise UserError if the storage does not answer."""
    filesystem, path = open_uri(uri)
    with storage_errors(uri):
        return filesystem.get_file_info(path)


def join(uri: str, *names: str) -> str:
    """Return `uri` with path elements added, before its query if it has one."""
    uri = str(uri)
    if "://" not in uri:
        return posixpath.join(uri, *names)
    path, mark, query = uri.partition("?")
    return posixpath.join(path, *names) + mark + query


def absolute(uri: str) -> str:
    """Return a local path as an absolute path, since workers run in other folders, and a URI without a last slash."""
    return uri.rstrip("/") if "://" in uri else str(Path(uri).expanduser().absolute())


def check_writable(uri: str) -> None:
    """Raise UserError if an output folder cannot be written: its storage does not answer, or permissions are missing.

    Nothing is created.
    """
    if "://" in uri:
        file_info(uri)
        return
    folder = Path(uri).expanduser().absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        why = "is no folder"
    elif not os.access(existing, os.W_OK | os.X_OK):
        why = "may not be written by you"
    else:
        return
    raise UserError(
        f"cannot write to {uri} ({existing} {why}); choose an output folder that you may write"
    )


def write_file(uri: str, content: bytes | pa.Buffer) -> None:
    """Write a file so that readers see either its old content or all of the new content."""
    filesystem, path = open_uri(uri)
    if isinstance(filesystem, fs.LocalFileSystem):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        # `tables.commit` removes a temporary file that a killed job leaves
        temporary = Path(f"{path}.{os.getpid()}.tmp")
        temporary.write_bytes(memoryview(content))
        temporary.replace(path)
        return
    # an object store shows a new object when it is complete
    with filesystem.open_output_stream(path) as stream:
        stream.write(content)


def read_json(uri: str) -> Any:
    """Return the content of a JSON file, or None if it does not exist.

    Raises:
        ValueError: if the file is damaged.
    """
    filesystem, path = open_uri(uri)
    if filesystem.get_file_info(path).type != fs.FileType.File:
        return None
    with filesystem.open_input_stream(path) as stream:
        content = json.loads(stream.read())
    if content is None:
        raise ValueError("it holds nothing")
    return content
