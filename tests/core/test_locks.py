"""Locks in an S3 storage: two jobs with one output, killed holders, and a lost lock."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from core import files as locks
from core.errors import UserError
from core.files import LOCK, hold_lock, open_uri

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).parents[2]

HOLD_LOCK = """
import sys
from core import files as locks
locks.HEARTBEAT_S = 0.5
with locks.hold_lock(sys.argv[1], "it is held"):
    print("held", flush=True)
    sys.stdin.read()
"""


def hold_output(uri: str) -> AbstractContextManager[None]:
    """Hold the lock of an output while it is written."""
    return hold_lock(f"{uri}/{LOCK}", f"{uri} is being written")


def read_lock(uri: str) -> str | None:
    """Return the content of a lock, or None without a lock."""
    filesystem, path = open_uri(f"{uri}/{LOCK}")
    if not filesystem.get_file_info(path).is_file:
        return None
    with filesystem.open_input_stream(path) as stream:
        return stream.read().decode()


def start_holder(uri: str) -> subprocess.Popen:
    """Start a process that holds the lock of `uri` until its input is closed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, f"{uri}/{LOCK}"],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_job_is_rejected_while_the_first_one_lives(s3):
    holder = start_holder(f"{s3}/t")
    try:
        message = rf"/t is being written \(process {holder.pid} on {socket.gethostname()}, since"
        begin = time.monotonic()
        with pytest.raises(UserError, match=message), hold_output(f"{s3}/t"):
            raise AssertionError("two processes hold the lock")
        # it does not wait until the lock would expire
        assert time.monotonic() - begin < locks.EXPIRES_S / 2
        with hold_output(f"{s3}/other"):
            assert read_lock(f"{s3}/other")

        holder.communicate("")
        assert read_lock(f"{s3}/t") is None
        with hold_output(f"{s3}/t"):
            assert read_lock(f"{s3}/t")
        assert read_lock(f"{s3}/t") is None
    finally:
        holder.kill()
        holder.wait()


def test_the_lock_of_a_killed_job_expires(s3, monkeypatch):
    monkeypatch.setattr(locks, "EXPIRES_S", 4.0)
    holder = start_holder(f"{s3}/killed")
    holder.kill()
    holder.wait()
    begin = time.monotonic()
    with hold_output(f"{s3}/killed"):
        assert time.monotonic() - begin > 4


def test_a_job_that_lost_its_lock_fails_at_the_end(s3, monkeypatch):
    monkeypatch.setattr(locks, "HEARTBEAT_S", 0.2)

    def lose_lock() -> None:
        with hold_output(f"{s3}/lost"):
            filesystem, path = open_uri(f"{s3}/lost/{LOCK}")
            with filesystem.open_output_stream(path) as stream:
                stream.write(b"process 7 on elsewhere")
            time.sleep(1)

    with pytest.raises(
        UserError, match=r"another process acquired the lock .*/lost/\.lock meanwhile"
    ):
        lose_lock()
    assert read_lock(f"{s3}/lost") == "process 7 on elsewhere"
