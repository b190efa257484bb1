"""Files at local paths and URIs such as s3://bucket/key, by pyarrow.fs. A URI that holds a secret is refused."""

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

    Jobs print it without a traceback and exit with code 1. Everything else is a defect and keeps its
    traceback.
    """


SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://")

SECRET = re.compile(
    r"secret|token|passw|passphrase|pwd|signature|credential|authorization|accesskey|accessid|accountkey|apikey|"
    r"privatekey|sharedkey|^(?:sig|key|keyid|user|username|login|auth|pass|uid)$"
)
"""Names of parameters that hold secrets, in small letters and digits alone."""

CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS",
    **dict.fromkeys(
        ("http", "https"),
        "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
    ),
    "postgresql": "set PGUSER and PGPASSWORD",
}
"""Where the credentials of a scheme come from."""


def refuse_secrets(value: Any, what: str = "a URI") -> None:
    """UserError for a URI with a user or a secret parameter, which records and logs would keep; in mappings and lists
    for each of their values. `what` names the value; the message does not print it."""
    for inner in (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, list | tuple)
        else ()
    ):
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
    shape = urlsplit(uri)
    user, at, host = unquote(shape.netloc).rpartition("@")
    if (at and user != "anonymous") or re.search(
        r":\D", host.rpartition("]")[2]
    ):  # a password ends at a / in it
        return True
    names = [
        re.sub(r"[^a-z0-9]", "", name.lower())
        for name, _ in parse_qsl(f"{shape.query}&{shape.fragment}")
    ]
    return any(map(SECRET.search, names))


REMEDIES = {
    "s3": "check the bucket, its ?region= or ?endpoint_override=, and the credentials (AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE)",
    "gs": "check the bucket and the credentials (GOOGLE_APPLICATION_CREDENTIALS)",
    "": "check that it is there and that you may read it",
}
"""What to do about a storage that does not answer, by its scheme; else: a local path."""


S3_PATIENCE: dict[str, Any] = {
    "connect_timeout": 10.0,
    "request_timeout": 30.0,  # until the first byte, and between bytes
    "retry_strategy": fs.AwsStandardS3RetryStrategy(max_attempts=9),
}
"""How long S3 may hesitate: by its waits of up to 20 s the nine attempts last for about a minute. What is forbidden or
missing (403, 404) is not tried again."""

GCS_PATIENCE: dict[str, Any] = {"retry_time_limit": timedelta(seconds=60)}
"""How long GCS may hesitate."""

OBSTORE_PATIENCE: dict[str, Any] = {
    "retry_config": {"max_retries": 9, "retry_timeout": timedelta(seconds=60)},
}
"""How long S3 and GCS may hesitate where a lock is read or written."""

_checks_first_contact = False
"""Whether this process asks a bucket once, and impatiently, before it works with it."""


def check_first_contact() -> None:
    """Let this process end within seconds where a storage does not answer at all.

    A job's own process calls this. Workers do not: the storage has answered their job, so they wait for it.
    """
    global _checks_first_contact
    _checks_first_contact = True


def open_uri(uri: str) -> tuple[fs.FileSystem, str]:
    """Return the file system and the path in it for a local path or a URI such as `s3://bucket/key`.

    This is the only place where file systems are opened. Raises UserError where the storage does not answer.
    """
    uri = str(uri)
    if "://" not in uri:
        return fs.LocalFileSystem(), str(Path(uri).expanduser().absolute())
    refuse_secrets(uri)
    with asked(uri):
        filesystem, path = fs.FileSystem.from_uri(uri)
        if _checks_first_contact and not isinstance(filesystem, fs.LocalFileSystem):
            _meet(filesystem, path, uri)
        return _with_options(filesystem, S3_PATIENCE, GCS_PATIENCE), path


def _with_options(
    filesystem: fs.FileSystem, s3: dict[str, Any], gcs: dict[str, Any]
) -> fs.FileSystem:
    """Return the file system of a bucket opened anew with other options."""
    options = {"s3": s3, "gcs": gcs}.get(filesystem.type_name)
    if not options:
        return filesystem
    settings = filesystem.__reduce__()[1][0]  # the same one, as it is pickled
    return type(filesystem)(**{**settings, **options})


@contextmanager
def asked(uri: str) -> Iterator[None]:
    """While a storage is asked for `uri`: what it answers with becomes one line that names the remedy."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        first = " ".join((str(error).splitlines() or [""])[0].split())[:300]
        scheme = uri.partition("://")[0].lower() if "://" in uri else ""
        remedy = REMEDIES.get(
            scheme,
            "check the address and its credentials; known are local paths, s3:// and gs://",
        )
        raise UserError(f"cannot reach {uri} ({first}); {remedy}") from error


_met: set[tuple[str, str, str]] = set()
"""Buckets that have answered this process: scheme, host, query."""


def _meet(filesystem: fs.FileSystem, path: str, uri: str) -> None:
    """Asks for the bucket once: an error where it is not there, or nobody answers within seconds. Work that has begun
    keeps the file system's own patience."""
    shape = urlsplit(uri)
    if (met := (shape.scheme, shape.netloc, shape.query)) in _met:
        return
    filesystem = _with_options(
        filesystem,
        {
            "connect_timeout": 5.0,
            "request_timeout": 30.0,
            "retry_strategy": fs.AwsStandardS3RetryStrategy(max_attempts=2),
        },
        {"retry_time_limit": timedelta(seconds=5)},
    )
    bucket = path.split("/")[0]
    try:
        if filesystem.get_file_info(bucket).type == fs.FileType.NotFound:
            raise FileNotFoundError(f"there is no bucket {bucket}")
    except OSError as error:
        if "ACCESS_DENIED" not in str(error):
            raise
        filesystem.get_file_info(
            path
        )  # a part of the bucket may be open to those who may not look at the whole
    _met.add(met)


def file_info(uri: str) -> fs.FileInfo:
    """What the storage knows of the file or folder; UserError where it cannot be asked."""
    filesystem, path = open_uri(uri)
    with asked(uri):
        return filesystem.get_file_info(path)


def join(uri: str, *names: str) -> str:
    """`uri` with path elements added, before its query where it has one."""
    place, sign, query = (
        str(uri).partition("?") if "://" in str(uri) else (str(uri), "", "")
    )
    return posixpath.join(place, *names) + sign + query


def absolute(uri: str) -> str:
    """A local path made absolute, since workers run in other folders; a URI as it is."""
    return uri.rstrip("/") if "://" in uri else str(Path(uri).expanduser().absolute())


def check_writable(uri: str) -> None:
    """Refuses an output that can never be written, and makes nothing: the storage answers, the folder that is there
    or is to hold it is one and may be written."""
    if "://" in uri:
        file_info(uri)
        return
    wanted = Path(uri).expanduser().absolute()
    there = next(path for path in (wanted, *wanted.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "is no folder" if not there.is_dir() else "may not be written by you"
        raise UserError(
            f"cannot write to {uri} ({there} {why}); choose an output folder that you may write"
        )


def write_file(uri: str, content: bytes | pa.Buffer) -> None:
    """Writes a file so that readers see the old content or the new, never a part of it."""
    filesystem, path = open_uri(uri)
    if isinstance(filesystem, fs.LocalFileSystem):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(
            f"{path}.{os.getpid()}.tmp"
        )  # `commit` removes one that a killed run leaves
        temporary.write_bytes(memoryview(content))
        temporary.replace(path)
        return
    with filesystem.open_output_stream(
        path
    ) as stream:  # object stores show a put when it is complete
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
