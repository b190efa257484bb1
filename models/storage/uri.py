"""Files at local paths and URIs such as s3://bucket/key, through pyarrow.fs.

    filesystem, path = open_uri("s3://bucket/tables/items")

URIs that contain secrets are rejected, because they would end up in logs and records.
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

from models.error_text import first_line


class UserError(Exception):
    """An error in the input or configuration, with a one-line message for the user.

    The message names the value, the limit and the remedy. Jobs print the message
    without a traceback and exit with code 1. Every other exception is a bug and is
    printed with its traceback.
    """


SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://")

SECRET_PARAMETER = re.compile(
    r"secret|token|passw|passphrase|pwd|signature|credential|authorization|accesskey|"
    r"accessid|accountkey|apikey|privatekey|sharedkey|"
    r"^(?:sig|key|keyid|user|username|login|auth|pass|uid)$"
)
"""Pattern of the names of secret URI parameters, as lower-case letters and digits."""

CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS",
    **dict.fromkeys(
        ("http", "https"),
        "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
        "MLFLOW_TRACKING_TOKEN",
    ),
    "postgresql": "set PGUSER and PGPASSWORD",
}
"""Remedy for a URI with credentials, by scheme."""


def refuse_secrets(value: Any, what: str = "a URI") -> None:
    """Raise UserError if a value contains a URI with a user name or a secret parameter.

    Args:
        value: A value of a configuration. Mappings and sequences are searched at any
            depth.
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
            f"{what} ({scheme}://...) holds a user, password or key; leave it out and "
            f"{remedy}"
        )


def _has_secret(uri: str) -> bool:
    """Return whether a URI has a user name, a password or a secret parameter."""
    parts = urlsplit(uri)
    user, has_user, host = unquote(parts.netloc).rpartition("@")
    if has_user and user != "anonymous":
        return True
    port = host.rpartition("]")[2]
    # a slash in a password ends the host, so the password looks like a port
    if re.search(r":\D", port):
        return True
    parameters = parse_qsl(f"{parts.query}&{parts.fragment}")
    names = [re.sub(r"[^a-z0-9]", "", name.lower()) for name, _ in parameters]
    return any(map(SECRET_PARAMETER.search, names))


REMEDIES = {
    "s3": "check the bucket, its ?region= or ?endpoint_override=, and the credentials "
    "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE)",
    "gs": "check the bucket and the credentials (GOOGLE_APPLICATION_CREDENTIALS)",
    "": "check that it exists and that you may read it",
}
"""Remedy for a storage that does not respond, by scheme; a local path has an empty
scheme."""

UNKNOWN_SCHEME = (
    "check the address and the credentials; use a local path, s3:// or gs://"
)


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

FIRST_S3_RETRIES: dict[str, Any] = {
    "connect_timeout": 5.0,
    "request_timeout": 30.0,
    "retry_strategy": fs.AwsStandardS3RetryStrategy(max_attempts=2),
}
"""Retries of the first request of a job to an S3 bucket."""

FIRST_GCS_RETRIES: dict[str, Any] = {"retry_time_limit": timedelta(seconds=5)}
"""Retries of the first request of a job to a GCS bucket."""

_checks_buckets = False
"""Whether `open_uri` checks each bucket by a first request with few retries."""

_reachable_buckets: set[tuple[str, str, str]] = set()
"""Scheme, host and query of the buckets that have responded to this process."""


def check_buckets_first() -> None:
    """Make `open_uri` fail within seconds if a bucket does not respond at all.

    The driver of a job calls this function. Workers do not: the storage has responded
    to their driver, so they retry for a minute.
    """
    global _checks_buckets
    _checks_buckets = True


def open_uri(uri: str) -> tuple[fs.FileSystem, str]:
    """Open the file system of a local path or a URI such as `s3://bucket/key`.

    All file systems are opened by this function, with retries.

    Returns:
        The file system, and the path within it.

    Raises:
        UserError: If the URI contains a secret, or the storage does not respond.
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
    """Return an S3 or GCS file system with changed options; others are unchanged."""
    options = {"s3": s3, "gcs": gcs}.get(filesystem.type_name)
    if not options:
        return filesystem
    settings = filesystem.__reduce__()[1][0]  # pyarrow has no copy with changes
    return type(filesystem)(**{**settings, **options})


@contextmanager
def storage_errors(uri: str) -> Iterator[None]:
    """Turn storage errors in the block into UserErrors that name `uri` and a remedy."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        scheme = uri.partition("://")[0].lower() if "://" in uri else ""
        remedy = REMEDIES.get(scheme, UNKNOWN_SCHEME)
        raise UserError(
            f"cannot reach {uri} ({first_line(error)}); {remedy}"
        ) from error


def _check_bucket(filesystem: fs.FileSystem, path: str, uri: str) -> None:
    """Send a first request to a bucket that has not responded yet."""
    parts = urlsplit(uri)
    bucket_id = (parts.scheme, parts.netloc, parts.query)
    if bucket_id in _reachable_buckets:
        return
    filesystem = _with_options(filesystem, FIRST_S3_RETRIES, FIRST_GCS_RETRIES)
    bucket = path.split("/")[0]
    try:
        if filesystem.get_file_info(bucket).type == fs.FileType.NotFound:
            raise FileNotFoundError(f"there is no bucket {bucket}")
    except OSError as error:
        if "ACCESS_DENIED" not in str(error):
            raise
        # an account may have access to a prefix of the bucket without listing it
        filesystem.get_file_info(path)
    _reachable_buckets.add(bucket_id)


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


def check_writable(uri: str) -> None:
    """Check that an output folder can be written, without creating it.

    Raises:
        UserError: If the storage does not respond, or permissions are missing.
    """
    if "://" in uri:
        file_info(uri)
        return
    folder = Path(uri).expanduser().absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        reason = "is not a folder"
    elif not os.access(existing, os.W_OK | os.X_OK):
        reason = "is not writable by you"
    else:
        return
    raise UserError(
        f"cannot write to {uri} ({existing} {reason}); choose an output folder that "
        "you may write"
    )


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
