"""Locks that let one process write to a folder, local or at a URI.

    with hold_lock("s3://bucket/tables/.lock", "s3://bucket/tables is being written by another process"):
        ...

A lock outlives its holder by seconds at most: the kernel releases a local lock, and a
lock at a URI expires without heartbeats.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pyarrow import fs

from models.storage.uri import OBSTORE_RETRIES, UserError, open_uri, storage_errors

LOCK = ".lock"
"""Lock file of a folder. A local one stays beside the files that were written."""

HEARTBEAT_S = 5.0
"""Seconds between two heartbeats of a lock at a URI."""

EXPIRES_S = 30.0
"""Seconds without a heartbeat after which a lock at a URI is free."""


@contextmanager
def hold_lock(
    uri: str,
    busy: str,
    wait: float = 0,
    remedy: str = "choose an output folder that you may write",
) -> Iterator[None]:
    """Hold the lock file at a path or URI while the block runs.

    A local lock is one of the kernel and excludes processes of this machine. A lock at
    a URI has heartbeats and excludes processes anywhere (`_hold_lock_object`).

    Args:
        uri: Path or URI of the lock file.
        busy: Message if another process holds the lock.
        wait: Seconds to wait for another holder.
        remedy: End of the message if the lock file cannot be written.

    Raises:
        UserError: if another process holds the lock, or the lock file cannot be
            written.
    """
    filesystem, where = open_uri(uri)
    if not isinstance(filesystem, fs.LocalFileSystem):
        with _hold_lock_object(uri, busy, wait):
            yield
        return
    path = Path(where)
    lock = FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(wait, poll_interval=0.2)
    except Timeout as error:
        raise UserError(busy) from error
    except OSError as error:
        raise UserError(
            f"cannot write to {path.parent} ({error.strerror}); {remedy}"
        ) from error
    try:
        yield
    finally:
        is_alone = os.listdir(path.parent) == [path.name]
        if is_alone:  # the block wrote nothing, so no lock file stays either
            path.unlink()
        lock.release()


@contextmanager
def _hold_lock_object(uri: str, busy: str, wait: float) -> Iterator[None]:
    """Hold a lock at a URI: an object that names its holder and that a thread rewrites every `HEARTBEAT_S` seconds.

    A process that finds the object watches it by its own clock, so no clocks are
    compared. While the object changes, its holder lives, and the process is refused
    after `wait` seconds. An object that stays the same for `EXPIRES_S` seconds is
    overwritten. Every write is conditional on the object's version, so of several
    writers one succeeds. A holder that cannot reach the storage for `EXPIRES_S` seconds
    may lose its lock; its next heartbeat finds out, and the block ends with UserError.
    """
    from obstore.exceptions import BaseError  # jobs with local paths do not need it

    done = threading.Event()
    lost = threading.Event()

    def beat() -> None:
        while not done.wait(HEARTBEAT_S):
            with suppress(BaseError):  # the next heartbeat may reach the storage
                if not lock.write(lock.version):
                    lost.set()
                    return

    with storage_errors(uri):
        try:
            lock = _LockObject(uri)
            lock.acquire(busy, wait)
        except BaseError as error:
            raise OSError(str(error)) from error
    thread = threading.Thread(target=beat, daemon=True, name="lock")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        lock.release()
    if lost.is_set():
        raise UserError(
            f"another process took {uri} meanwhile, as this one was not heard for {EXPIRES_S:g} s; both have written "
            f"there, so look at what it holds, or remove it and start again"
        )


class _LockObject:
    """A lock's object in a bucket, written through obstore because pyarrow.fs has no conditional writes."""

    def __init__(self, uri: str) -> None:
        bucket, _, self.key = open_uri(uri)[1].partition("/")
        self.store = _open_store(uri, bucket)
        started = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}"
        self.holder = (
            f"process {os.getpid()} on {socket.gethostname()}, since {started}"
        )
        self.id = uuid.uuid4().hex
        self.version: Any = None
        """Version of the object that this process wrote last."""

    def acquire(self, busy: str, wait: float) -> None:
        """Wait until this process holds the lock.

        Raises:
            UserError: if another holder still sends heartbeats after `wait` seconds.
        """
        until = time.monotonic() + wait
        previous: tuple[str, Any] | None = None
        unchanged_since = time.monotonic()
        while True:
            current = self.read()
            now = time.monotonic()
            has_expired = current == previous and now - unchanged_since >= EXPIRES_S
            if current is None:
                if self.write(None):
                    return
            elif has_expired:
                if self.write(current[1]):
                    return
            elif current != previous:
                if previous and now >= until:
                    raise UserError(f"{busy} ({current[0].partition(';')[0]})")
                previous = current
                unchanged_since = now
            time.sleep(1)

    def read(self) -> tuple[str, Any] | None:
        """Return the content and the version of the object, or None if it does not
        exist.
        """
        try:
            found = self.store.get(self.key)
        except FileNotFoundError:
            return None
        version = {
            name: found.meta[name] for name in ("e_tag", "version") if found.meta[name]
        }
        return bytes(found.bytes()).decode(errors="replace"), version

    def write(self, version: Any) -> bool:
        """Write the object over one of its versions, or create it for None. Return whether this process holds it then.

        The write may succeed after an error too: if an answer is lost, obstore writes
        again, and so does the next heartbeat if obstore has given up.
        """
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        mine = f"{self.holder}; {self.id}."
        content = f"{mine}{uuid.uuid4().hex}".encode()
        with suppress(AlreadyExistsError, PreconditionError, FileNotFoundError):
            self.store.put(self.key, content, mode=version or "create")
        current = self.read()
        if current is None or not current[0].startswith(mine):
            return False
        self.version = current[1]
        return True

    def release(self) -> None:
        """Delete the object if this process holds it. If the storage does not answer, the lock expires."""
        from obstore.exceptions import BaseError

        with suppress(BaseError):
            current = self.read()
            if current and current[1] == self.version:
                self.store.delete(self.key)


def _open_store(uri: str, bucket: str) -> Any:
    """Return obstore's store of a bucket, with the endpoint, region and credentials of its pyarrow file system."""
    from obstore import store

    filesystem, _ = open_uri(uri)
    if isinstance(filesystem, fs.GcsFileSystem):
        return store.GCSStore(bucket, **OBSTORE_RETRIES)
    options = filesystem.__reduce__()[1][0]
    settings: dict[str, Any] = {}
    endpoint = options["endpoint_override"]
    if (
        endpoint and "://" not in endpoint
    ):  # AWS_ENDPOINT_URL has a scheme, a query none
        endpoint = f"{options['scheme']}://{endpoint}"
    if endpoint:
        settings["endpoint"] = endpoint
    if os.environ.get("AWS_PROFILE"):  # obstore reads no profiles by itself
        from obstore.auth.boto3 import Boto3CredentialProvider

        settings["credential_provider"] = Boto3CredentialProvider()
    return store.S3Store(
        bucket,
        region=options["region"],
        client_options={"allow_http": True},
        **OBSTORE_RETRIES,
        **settings,
    )
