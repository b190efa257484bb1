"""Locks at URIs: two jobs on one output of an S3 storage, holders that are killed, and what a thief is told."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from models import locks
from models.locks import BEAT, LOCK, locked
from models.tables import UserError, open_uri

ROOT = Path(__file__).parents[2]

HOLDS = """
import sys, time
from models.locks import locked
with locked(sys.argv[1], "it is held"):
    print("held", flush=True)
    sys.stdin.read()
"""


def writing(uri: str) -> AbstractContextManager[None]:
    return locked(f"{uri}/{LOCK}", f"{uri} is being written")


def lock(uri: str) -> dict | None:
    """What the lock says; None where there is none."""
    return locks._lease_at(f"{uri}/{LOCK}")


def holder(uri: str) -> subprocess.Popen:
    """Another process, which holds `uri` until its input is closed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, f"{uri}/{LOCK}"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
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
        assert time.monotonic() - began < locks.SILENT  # it does not wait for the first one to fall silent
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


def test_a_killed_job_of_this_machine_gives_way_at_once(s3: str) -> None:
    first = holder(f"{s3}/killed")
    first.kill()
    first.wait()
    assert lock(f"{s3}/killed")
    began = time.monotonic()
    with writing(f"{s3}/killed"):
        assert time.monotonic() - began < locks.SILENT


def test_a_silent_job_of_another_machine_gives_way_and_one_that_beats_does_not(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "SILENT", 3.0)
    there = {"owner": "x", "host": "elsewhere", "pid": 1, "since": "then"}
    locks._beat(f"{s3}/far/{LOCK}", there)
    began = time.monotonic()
    with writing(f"{s3}/far"):
        assert time.monotonic() - began > 3
    done = threading.Event()

    def beats() -> None:
        while not done.wait(0.5):
            locks._beat(f"{s3}/alive/{LOCK}", there)

    locks._beat(f"{s3}/alive/{LOCK}", there)
    thread = threading.Thread(target=beats)
    thread.start()
    try:
        with pytest.raises(UserError, match=r"\(process 1 on elsewhere, since then\)"), writing(f"{s3}/alive"):
            raise AssertionError("two hold it")
    finally:
        done.set()
        thread.join()


def test_of_several_that_begin_together_one_has_it(s3: str) -> None:
    inside, most, refused = 0, 0, []
    guard = threading.Lock()

    def work() -> None:
        nonlocal inside, most
        try:
            with writing(f"{s3}/run"):
                with guard:
                    inside += 1
                    most = max(most, inside)
                time.sleep(2.5 * BEAT)
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


def test_who_loses_the_lock_says_so_at_the_end(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "BEAT", 0.2)
    thief = {"owner": "x", "host": "elsewhere", "pid": 7, "since": "then"}

    def write() -> None:
        with writing(f"{s3}/lost"):
            for _ in range(6):  # a beat that was under way may overwrite the first
                locks._beat(f"{s3}/lost/{LOCK}", thief)
                time.sleep(0.3)

    with pytest.raises(UserError, match=r"process 7 on elsewhere took .*/lost/\.lock meanwhile"):
        write()
    found = lock(f"{s3}/lost")
    assert found
    assert found["owner"] == "x"  # it is left to whom it belongs now


def test_a_lock_that_says_nothing_is_none(s3: str) -> None:
    filesystem, path = open_uri(f"{s3}/odd/{LOCK}")
    for content in (b"", b"{", b"[]", json.dumps({"owner": 1}).encode()):
        with filesystem.open_output_stream(path) as stream:
            stream.write(content)
        assert lock(f"{s3}/odd") is None
    with writing(f"{s3}/odd"):
        assert lock(f"{s3}/odd")
