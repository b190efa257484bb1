"""Files at local paths and URIs such as s3://bucket/key, through pyarrow.fs, and locks.

    filesystem, path = open_uri("s3://bucket/tables/items")
    with hold_lock("s3://bucket/tables/.lock", "another process writes to the tables"):
        ...

A lock outlives a killed holder by seconds at most: the kernel releases a local lock,
and a lock at a URI expires without heartbeats.
"""

from __future__ import annotations

import json
import os
import posixpath
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import UserError, one_line

if TYPE_CHECKING:  # its import takes longer than a command's first line may
    import pyarrow as pa
    from pyarrow import fs

GCS_RETRIES: dict[str, Any] = {"retry_time_limit": timedelta(seconds=60)}
"""Retries of GCS."""

OBSTORE_RETRIES: dict[str, Any] = {
    "retry_config": {"max_retries": 9, "retry_timeout": timedelta(seconds=60)},
}
"""Retries of S3 and GCS when a lock is read or written through obstore."""


def open_uri(uri: str) -> tuple[fs.FileSystem, str]:
    """Open the file system of a local path or of a URI like `s3://bucket/key`.

    All file systems are opened by this function, with retries.

    Returns:
        The file system, and the path within it.
    """
    from pyarrow import fs

    uri = str(uri)
    if "://" not in uri:
        return fs.LocalFileSystem(), str(Path(uri).expanduser().absolute())
    with storage_errors(uri):
        filesystem, path = fs.FileSystem.from_uri(uri)
    retries: dict[str, Any] = {}
    if filesystem.type_name == "s3":
        # Nine attempts, with pauses of up to 20 s, take about a minute. 403 and 404 are
        # not retried.
        retries["retry_strategy"] = fs.AwsStandardS3RetryStrategy(max_attempts=9)
        retries["connect_timeout"] = 10.0
        retries["request_timeout"] = 30.0  # until the first byte, and between bytes
    elif filesystem.type_name == "gcs":
        retries = GCS_RETRIES
    if retries:
        filesystem = type(filesystem)(**{**read_settings(filesystem), **retries})
    return filesystem, path


def read_settings(filesystem: fs.FileSystem) -> dict[str, Any]:
    """Return the arguments that make a file system, which pyarrow has for pickling."""
    return filesystem.__reduce__()[1][0]  # type: ignore[no-any-return]


@contextmanager
def storage_errors(uri: str) -> Iterator[None]:
    """Turn storage errors in the block into UserErrors that name `uri`."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError) as error:
        raise UserError(f"cannot reach {uri} ({one_line(error)})") from error


def file_info(uri: str) -> fs.FileInfo:
    """Return the type and size of a file or folder."""
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
    """Make a local path absolute, and strip trailing slashes from a URI."""
    return uri.rstrip("/") if "://" in uri else str(Path(uri).expanduser().absolute())


def write_file(uri: str, content: bytes | pa.Buffer) -> None:
    """Write a file atomically: readers see the old or the new content, never a part."""
    filesystem, path = open_uri(uri)
    if filesystem.type_name == "local":
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        # `tables.commit` removes the temporary files of killed jobs
        temporary = Path(f"{path}.{os.getpid()}.tmp")
        try:
            temporary.write_bytes(memoryview(content))
            temporary.replace(path)
        finally:  # such as a folder of the file's name
            temporary.unlink(missing_ok=True)
        return
    # object stores show an object only once it is complete
    with filesystem.open_output_stream(path) as stream:
        stream.write(content)


def read_json(uri: str) -> Any:
    """Return the content of a JSON file, or None if it does not exist."""
    filesystem, path = open_uri(uri)
    if not filesystem.get_file_info(path).is_file:
        return None
    with filesystem.open_input_stream(path) as stream:
        content = stream.read()
    try:
        return json.loads(content)
    except ValueError as error:
        raise UserError(f"{uri} is damaged ({error})", "damaged") from error


LOCK = ".lock"
"""Name of the lock file of a folder. A local lock file remains beside written files."""

HEARTBEAT_S = 5.0
"""Seconds between the heartbeats of a lock at a URI."""

EXPIRES_S = 30.0
"""Seconds without a heartbeat after which a lock at a URI expires."""


@contextmanager
def hold_lock(uri: str, busy: str, wait: float = 0) -> Iterator[None]:
    """Hold the lock file at a path or URI while the block runs.

    A local lock is a kernel lock, which excludes processes of this machine. A lock at a
    URI is an object with heartbeats, which excludes processes on any machine.

    Args:
        uri: Path or URI of the lock file.
        busy: Message if another process holds the lock.
        wait: Seconds to wait for the lock.
    """
    filesystem, file_path = open_uri(uri)
    if filesystem.type_name != "local":
        with _hold_lock_object(uri, busy, wait):
            yield
        return
    # imported late: it imports asyncio, and commands print their first line early
    from filelock import FileLock, Timeout

    path = Path(file_path)
    lock, is_new = FileLock(path), not path.parent.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(wait, poll_interval=0.2)
    except Timeout as error:
        raise UserError(busy) from error
    try:
        yield
    finally:
        is_alone = os.listdir(path.parent) == [path.name]
        if is_alone:  # the block wrote nothing, so remove the lock file too
            path.unlink()
        lock.release()
        if is_alone and is_new:
            with suppress(OSError):  # another process holds the lock
                path.parent.rmdir()


@contextmanager
def _hold_lock_object(uri: str, busy: str, wait: float) -> Iterator[None]:
    """Hold a lock at a URI, an object that its holder rewrites as a heartbeat.

    The object is written through obstore, as pyarrow.fs has no conditional writes.
    """
    # imported late: jobs with local paths do not need obstore
    from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

    bucket, _, key = open_uri(uri)[1].partition("/")
    store, done = _open_store(uri, bucket), threading.Event()
    started = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}"
    holder = f"process {os.getpid()} on {socket.gethostname()}, since {started}"
    prefix = f"{holder}; {uuid.uuid4().hex}."
    held: Any = None  # version that this process wrote; None if it lost the lock

    def read() -> tuple[str, Any] | None:
        try:
            found = store.get(key)
        except FileNotFoundError:
            return None
        tags = {name: found.meta[name] for name in ("e_tag", "version")}
        version = {name: tag for name, tag in tags.items() if tag}
        return bytes(found.bytes()).decode(errors="replace"), version

    def write(version: Any) -> bool:
        nonlocal held
        content = f"{prefix}{uuid.uuid4().hex}"
        with suppress(AlreadyExistsError, PreconditionError, FileNotFoundError):
            store.put(key, content.encode(), mode=version or "create")
        current = read()
        held = current[1] if current and current[0].startswith(prefix) else None
        return held is not None

    def acquire() -> None:
        deadline = time.monotonic() + wait
        previous, unchanged_since = None, time.monotonic()
        while True:
            current, now = read(), time.monotonic()
            has_expired = current == previous and now - unchanged_since >= EXPIRES_S
            if (current is None or has_expired) and write(current and current[1]):
                return
            if current and current != previous:
                if previous and now >= deadline:
                    raise UserError(f"{busy} ({current[0].partition(';')[0]})")
                previous, unchanged_since = current, now
            time.sleep(1)

    def send_heartbeats() -> None:
        while held and not done.wait(HEARTBEAT_S):
            with suppress(BaseError):  # the next heartbeat may reach the storage
                write(held)

    with storage_errors(uri):
        try:
            acquire()
        except BaseError as error:
            raise OSError(str(error)) from error
    thread = threading.Thread(target=send_heartbeats, daemon=True, name="lock")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        with suppress(BaseError):
            current = read()
            if current and current[1] == held:
                store.delete(key)
    if not held:
        raise UserError(
            f"another process acquired the lock {uri} meanwhile, because this process "
            f"sent no heartbeat for {EXPIRES_S:g} s"
        )


def _open_store(uri: str, bucket: str) -> Any:
    """Open a bucket through obstore."""
    from obstore import store

    filesystem, _ = open_uri(uri)
    if filesystem.type_name == "gcs":
        return store.GCSStore(bucket, **OBSTORE_RETRIES)
    options = read_settings(filesystem)
    settings: dict[str, Any] = {}
    endpoint = options["endpoint_override"]
    # An endpoint from AWS_ENDPOINT_URL has a scheme, one from a URI's query has none.
    if endpoint and "://" not in endpoint:
        endpoint = f"{options['scheme']}://{endpoint}"
    if endpoint:
        settings["endpoint"] = endpoint
    if os.environ.get("AWS_PROFILE"):  # obstore does not read profiles
        from obstore.auth.boto3 import Boto3CredentialProvider

        settings["credential_provider"] = Boto3CredentialProvider()
    return store.S3Store(
        bucket,
        region=options["region"],
        client_options={"allow_http": True},  # of an endpoint, as in pyarrow
        **OBSTORE_RETRIES,
        **settings,
    )
