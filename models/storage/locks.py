"""Locks that keep other processes out of a place, local or at a URI, while this one writes there.

A killed holder stands in nobody's way: the kernel lets go of a local lock, and one at a URI falls silent.
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

from models.storage.uri import OBSTORE_PATIENCE, UserError, asked, open_uri

LOCK = ".lock"
"""File by which the folder is held that someone writes. A local one stays beside what was written."""

BEAT, SILENT = 5.0, 30.0
"""Seconds, of a lock at a URI: between two heartbeats; without one until its holder counts as dead."""


@contextmanager
def locked(
    place: str,
    busy: str,
    wait: float = 0,
    remedy: str = "choose an output folder that you may write",
) -> Iterator[None]:
    """Keeps other processes out by the lock file `place`; let go when the process ends, however it ends. One that
    another process holds is waited for `wait` seconds, then UserError says `busy`; one that cannot be written raises
    UserError with the `remedy`.

    On a local path it keeps out the processes of this machine, by the kernel's lock. At a URI, processes anywhere, by
    heartbeats (`_leased`).
    """
    filesystem, where = open_uri(place)
    if not isinstance(filesystem, fs.LocalFileSystem):
        with _leased(place, busy, wait):
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
        if os.listdir(path.parent) == [
            path.name
        ]:  # nothing was written: nothing is left
            path.unlink()  # whoever waits for it sees that it is gone, and makes a new one
        lock.release()


@contextmanager
def _leased(place: str, busy: str, wait: float) -> Iterator[None]:
    """`locked` at a URI: the object `place` names its holder and is written again every BEAT seconds.

    Whoever finds one looks on, by its own clock, so that no clocks are compared: one that changes is alive, and refused
    after `wait`; one that stays the same for SILENT seconds is dead and written over. Every write is conditional, on
    there being no object or on its version, so of several writers one succeeds. A holder that the storage does not hear
    for SILENT seconds may lose its lock; it finds out at its next beat and ends with UserError when its work is done.
    """
    from obstore.exceptions import BaseError  # of those who write to URIs alone

    done = threading.Event()
    lost = threading.Event()

    def beat() -> None:
        while not done.wait(BEAT):
            try:
                if not lease.write(lease.version):
                    return lost.set()
            except (
                BaseError
            ):  # a storage that is away for a moment: the next beat may reach it
                continue

    with asked(place):
        try:
            lease = _Lease(place)
            lease.take(busy, wait)
        except BaseError as error:
            raise OSError(str(error)) from error
    thread = threading.Thread(target=beat, daemon=True, name="lock")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        lease.let_go()
    if lost.is_set():
        raise UserError(
            f"another process took {place} meanwhile, as this one was not heard for {SILENT:g} s; both have written "
            f"there, so look at what it holds, or remove it and start again"
        )


class _Lease:
    """The object of a lock at a URI. pyarrow.fs has no conditional writes, so it is written through obstore."""

    def __init__(self, place: str) -> None:
        from obstore import store

        filesystem, path = open_uri(place)
        bucket, _, self.key = path.partition("/")
        if isinstance(filesystem, fs.GcsFileSystem):
            self.store: Any = store.GCSStore(bucket, **OBSTORE_PATIENCE)
        else:
            options = filesystem.__reduce__()[1][0]
            more: dict[str, Any] = {}
            if endpoint := options[
                "endpoint_override"
            ]:  # of a query without, of AWS_ENDPOINT_URL with its scheme
                more["endpoint"] = (
                    endpoint
                    if "://" in endpoint
                    else f"{options['scheme']}://{endpoint}"
                )
            if os.environ.get("AWS_PROFILE"):  # obstore reads none by itself
                from obstore.auth.boto3 import Boto3CredentialProvider

                more["credential_provider"] = Boto3CredentialProvider()
            self.store = store.S3Store(
                bucket,
                region=options["region"],
                client_options={"allow_http": True},
                **OBSTORE_PATIENCE,
                **more,
            )
        self.holder = f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now(UTC):%Y-%m-%d %H:%M:%S}"
        self.id = uuid.uuid4().hex
        self.version: Any = None
        """The version of the object that this process wrote last."""

    def take(self, busy: str, wait: float) -> None:
        """Waits until the lock is ours; UserError where its holder is alive for longer than `wait`."""
        until, since = time.monotonic() + wait, time.monotonic()
        seen: tuple[str, Any] | None = None
        while True:
            found, now = self.read(), time.monotonic()
            if found is None or (found == seen and now - since >= SILENT):
                if self.write(found and found[1]):
                    return
            elif found != seen:
                if seen and now >= until:
                    raise UserError(f"{busy} ({found[0].partition(';')[0]})")
                seen, since = found, now
            time.sleep(1)

    def read(self) -> tuple[str, Any] | None:
        """Content and version of the object; None where there is none."""
        try:
            found = self.store.get(self.key)
        except FileNotFoundError:
            return None
        return bytes(found.bytes()).decode(errors="replace"), {
            name: found.meta[name] for name in ("e_tag", "version") if found.meta[name]
        }

    def write(self, over: Any) -> bool:
        """Write the object over this version of it, None: where there is none. Return whether it is ours then.

        It may be ours after an error too: where an answer is lost, obstore writes again, and so does the next
        heartbeat where obstore gave up.
        """
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        content = f"{self.holder}; {self.id}.{uuid.uuid4().hex}"
        with suppress(AlreadyExistsError, PreconditionError, FileNotFoundError):
            self.store.put(self.key, content.encode(), mode=over or "create")
        found = self.read()
        if found is None or not found[0].startswith(f"{self.holder}; {self.id}."):
            return False
        self.version = found[1]
        return True

    def let_go(self) -> None:
        """Removes the object if it is ours; where the storage is gone, it falls silent by itself."""
        from obstore.exceptions import BaseError

        with suppress(BaseError):
            if (found := self.read()) and found[1] == self.version:
                self.store.delete(self.key)
