"""Locks at URIs: two jobs on one output of an S3 storage, holders that are killed, and
who loses the lock.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from models.storage import locks
from models.storage.locks import LOCK, hold_lock
from models.storage.tables import UserError, open_uri

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).parents[2]

HOLDS = """
import sys
from models.storage import locks
locks.HEARTBEAT_S = 0.5
with locks.hold_lock(sys.argv[1], "it is held"):
    print("held", flush=True)
    sys.stdin.read()
"""


def writing(uri: str) -> AbstractContextManager[None]:
    return hold_lock(f"{uri}/{LOCK}", f"{uri} is being written")


def lock(uri: str) -> str | None:
    """What the lock says; None where there is none."""
    found = locks._LockObject(f"{uri}/{LOCK}").read()
    return found and found[0]


def holder(uri: str) -> subprocess.Popen:
    """Another process, which holds `uri` until its input is closed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, f"{uri}/{LOCK}"],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_job_is_refused_while_the_first_one_lives(s3: str) -> None:
    first = holder(f"{s3}/t")
    try:
        said = rf"/t is being written \(process {first.pid} on {socket.gethostname()}, since"
        began = time.monotonic()
        with pytest.raises(UserError, match=said), writing(f"{s3}/t"):
            raise AssertionError("two hold it")
        assert (
            time.monotonic() - began < locks.EXPIRES_S / 2
        )  # it does not wait for the first one to fall silent
        with writing(f"{s3}/other"):
            assert lock(f"{s3}/other")
        first.communicate("")
        assert lock(f"{s3}/t") is None
        with writing(f"{s3}/t"):
            assert lock(f"{s3}/t")
        assert lock(f"{s3}/t") is None
    finally:
        first.kill()
        first.wait()


def test_a_killed_job_gives_way_when_it_is_silent_and_one_that_beats_does_not(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "EXPIRES_S", 4.0)
    first, alive = holder(f"{s3}/killed"), holder(f"{s3}/alive")
    first.kill()
    first.wait()
    began = time.monotonic()
    with writing(f"{s3}/killed"):
        assert time.monotonic() - began > 4
    try:
        began = time.monotonic()
        with (
            pytest.raises(UserError, match=f"process {alive.pid} on"),
            hold_lock(f"{s3}/alive/{LOCK}", "held", 5),
        ):
            raise AssertionError("two hold it")
        assert time.monotonic() - began > 5
    finally:
        alive.communicate("")


def test_of_several_that_begin_together_one_has_it(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "HEARTBEAT_S", 1.0)
    inside, most, refused = 0, 0, []
    guard = threading.Lock()

    def work() -> None:
        nonlocal inside, most
        try:
            with writing(f"{s3}/run"):
                with guard:
                    inside += 1
                    most = max(most, inside)
                time.sleep(2.5)
                with guard:
                    inside -= 1
        except UserError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert refused
    assert all("/run is being written (process" in said for said in refused)


def test_of_two_that_find_a_silent_one_one_takes_it(s3: str) -> None:
    """The write over a version that is no longer there fails."""
    one, two, three = (locks._LockObject(f"{s3}/silent/{LOCK}") for _ in range(3))
    assert one.write(None)
    silent = one.version
    assert not two.write(None)
    assert two.write(silent)
    assert not three.write(silent)
    assert not one.write(one.version)
    one.release()
    assert lock(f"{s3}/silent")  # it is left to whom it belongs now
    two.release()
    assert lock(f"{s3}/silent") is None


def test_who_loses_the_lock_says_so_at_the_end(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "HEARTBEAT_S", 0.2)

    def write() -> None:
        with writing(f"{s3}/lost"):
            filesystem, path = open_uri(f"{s3}/lost/{LOCK}")
            with filesystem.open_output_stream(path) as stream:
                stream.write(b"process 7 on elsewhere")
            time.sleep(1)

    with pytest.raises(
        UserError, match=r"another process acquired the lock .*/lost/\.lock meanwhile"
    ):
        write()
    assert lock(f"{s3}/lost") == "process 7 on elsewhere"
