"""Locks that keep other processes out of a place, local or at a URI, while this one writes there.

A killed holder stands in nobody's way: the kernel lets go of a local lock, and one at a URI falls silent.
"""

from __future__ import annotations

import fcntl
import json
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

from pyarrow import fs

from models.tables import UserError, asked, open_uri

LOCK = ".lock"
"""File by which the folder is held that someone writes."""

BEAT, SILENT, SETTLE = 5.0, 30.0, 1.0
"""Seconds, of a lock at a URI: between two heartbeats; without one until its holder counts as dead; from writing it to
reading it again."""


@contextmanager
def locked(
    place: str, busy: str, wait: float = 0, remedy: str = "choose an output folder that you may write"
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
    until = time.monotonic() + wait
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = path.open("a")
        except OSError as error:
            raise UserError(f"cannot write to {path.parent} ({error.strerror}); {remedy}") from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() >= until:
                    raise UserError(busy) from error
                time.sleep(0.2)
                continue
            if not _is_at(lock.fileno(), path):  # its last holder has removed it meanwhile
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


@contextmanager
def _leased(place: str, busy: str, wait: float) -> Iterator[None]:
    """`locked` at a URI: the object `place` names its holder and is written again every BEAT seconds.

    Whoever finds one looks on for as long as a holder may be silent, by its own clock, so that no clocks are compared:
    one that beats is alive, and refused after `wait`; one that is silent for SILENT seconds is dead, as is one of this
    machine whose process is gone, and gives way. Object stores have no exclusive create through pyarrow. So the lock is
    written, and read again after SETTLE seconds: of several that begin together the last writer has it. What remains:
    a write that takes longer than SETTLE to arrive takes the lock from one who believes to hold it, and a holder that
    the storage does not hear for SILENT seconds is taken for dead. Both find out at their next beat and end with
    UserError when their work is done; until then the commit of a table, which misses the parts that the other one
    removed, is what keeps it whole.
    """
    mine: dict[str, Any] = {
        "owner": uuid.uuid4().hex,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": _now(),
    }
    _leases.add(mine["owner"])
    done = threading.Event()
    thieves: list[dict[str, Any]] = []

    def beat() -> None:
        while not done.wait(BEAT):
            try:
                if (now := _lease_at(place)) and now["owner"] != mine["owner"]:
                    thieves.append(now)
                    return
                _beat(place, mine)
            except (UserError, OSError):  # a storage that is away for a moment: the next beat may reach it
                continue

    try:
        _take(place, mine, busy, wait)
        thread = threading.Thread(target=beat, daemon=True, name="lock")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            with suppress(UserError, OSError):  # where the storage is gone, the lock falls silent by itself
                if not thieves and (now := _lease_at(place)) and now["owner"] == mine["owner"]:
                    filesystem, where = open_uri(place)
                    filesystem.delete_file(where)
    finally:
        _leases.discard(mine["owner"])
    if thieves:
        raise UserError(
            f"process {thieves[0]['pid']} on {thieves[0]['host']} took {place} meanwhile, as this one was not "
            f"heard for {SILENT:g} s; both have written there, so look at what it holds, or remove it and start again"
        )


def _take(place: str, mine: dict[str, Any], busy: str, wait: float) -> None:
    """Waits until the lock at a URI is ours; UserError where its holder is alive for longer than `wait`."""
    until, heard = time.monotonic() + wait, time.monotonic()
    seen: dict[str, Any] | None = None
    while True:
        found = _lease_at(place)
        if found is None or _is_gone(found) or (found == seen and time.monotonic() - heard >= SILENT):
            _beat(place, mine)
            time.sleep(SETTLE)
            if (found := _lease_at(place)) and found["owner"] == mine["owner"]:
                return
            seen = None  # another one was later, or has let go already
            continue
        if seen is None or found["owner"] != seen["owner"]:
            seen, heard = found, time.monotonic()
        elif found != seen:
            if time.monotonic() >= until:
                raise UserError(f"{busy} (process {found['pid']} on {found['host']}, since {found['since']})")
            seen, heard = found, time.monotonic()
        time.sleep(1)


_leases: set[str] = set()
"""Owners of the locks at URIs that this process holds or is about to take."""


def _beat(place: str, mine: dict[str, Any]) -> None:
    filesystem, path = open_uri(place)
    with asked(place), filesystem.open_output_stream(path) as stream:  # seen when it is complete
        stream.write(json.dumps({**mine, "beat": _now()}).encode())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _lease_at(place: str) -> dict[str, Any] | None:
    """What the lock at a URI says; None where there is none, or one that says nothing."""
    filesystem, path = open_uri(place)
    with asked(place):
        try:
            with filesystem.open_input_stream(path) as stream:
                content = json.loads(stream.read())
        except (FileNotFoundError, ValueError):
            return None
    return (
        content if isinstance(content, dict) and {"owner", "host", "pid", "since", "beat"} <= content.keys() else None
    )


def _is_gone(lease: dict[str, Any]) -> bool:
    """Whether the process that holds it was on this machine and is no more."""
    if lease["host"] != socket.gethostname():
        return False
    if lease["pid"] == os.getpid():
        return lease["owner"] not in _leases
    with suppress(PermissionError):  # another user's is alive
        try:
            os.kill(lease["pid"], 0)
        except ProcessLookupError:
            return True
    return False


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
