"""The shuffle: every row once in the partition of its user, in bounded memory, whatever fails on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray
from hypothesis import given, settings
from hypothesis import strategies as st

from models.tables import UserError
from pipelines.data import shuffle
from pipelines.data.shuffle import Shards, gather, scatter, split, user_keys
from pipelines.data.tasks import in_flight, run_tasks


def table(users: list[str], first: int = 0) -> pa.Table:
    return pa.table(
        {"user_id": pa.array(users, pa.string()), "row": pa.array(range(first, first + len(users)), pa.int64())}
    )


@settings(max_examples=50, deadline=None)
@given(
    users=st.lists(st.text(max_size=3), max_size=60),
    partitions=st.sampled_from([1, 2, 7, 255, 256, 65_535, 65_536, 10**6]),
    cut=st.integers(0, 60),
)
def test_split_puts_each_row_where_its_user_belongs(users: list[str], partitions: int, cut: int) -> None:
    whole = pa.concat_tables([table(users[:cut]), table(users[cut:], min(cut, len(users)))])
    expected: dict[int, list[int]] = {}
    for row, key in enumerate(user_keys(whole["user_id"]) if users else []):
        expected.setdefault(int(key) % partitions, []).append(row)
    parted = split(whole, partitions)
    assert {number: rows["row"].to_pylist() for number, rows in parted.items()} == expected
    assert all(rows["user_id"].to_pylist() == [users[i] for i in expected[number]] for number, rows in parted.items())


def read_back(stream: Iterator[Any]) -> tuple[list[Any], dict[int, list[int]]]:
    """(records, rows of each partition) of what `scatter` yields."""
    records: list[Any] = []
    rows: dict[int, list[int]] = {}
    for header, numbers in stream:
        records += header
        for number in numbers:
            rows.setdefault(number, []).extend(next(stream)["row"].to_pylist())
    return records, rows


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(0, 30), max_size=12), partitions=st.integers(1, 5), shard_bytes=st.integers(1, 400))
def test_scatter_yields_every_record_and_row_once(sizes: list[int], partitions: int, shard_bytes: int) -> None:
    users = [f"u{i % 11}" for i in range(sum(sizes))]
    firsts = np.cumsum([0, *sizes])
    blocks = [(i, table(users[firsts[i] : firsts[i + 1]], firsts[i])) for i in range(len(sizes))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffle, "SHARD_BYTES", shard_bytes)
        records, rows = read_back(scatter(blocks, partitions))
    assert records == list(range(len(sizes)))
    whole = split(table(users), partitions)
    assert rows == {number: part["row"].to_pylist() for number, part in whole.items()}


def test_scatter_holds_no_more_rows_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    block = table([f"u{i}" for i in range(1000)])
    monkeypatch.setattr(shuffle, "SHARD_BYTES", block.nbytes)
    monkeypatch.setattr(shuffle, "MAX_WAITING", 10 * block.nbytes)
    for partitions, held in ((1, 1), (4, 4), (1000, 10)):
        taken = sent = 0

        def blocks() -> Iterator[tuple[None, pa.Table]]:
            nonlocal taken
            for _ in range(50):
                taken += 1
                yield None, block

        stream = scatter(blocks(), partitions)
        for header, numbers in stream:
            assert taken - sent <= held
            sent += len(header)
            for _ in numbers:
                next(stream)
        assert taken == sent == 50


SENT_AT_ONCE = 50_000  # rows of a block that is enough for shards of its own
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test


def after_the_error(folder: str) -> None:
    """The others are at work when one raises, however late a busy machine starts it."""
    while not Path(folder, "raised").exists():
        time.sleep(0.05)
    time.sleep(0.1)


def log(number: int, folder: str, fail: str) -> Iterator[Any]:
    """A reader of 6 blocks; the first time that number 1 is in the middle it does as `fail` says."""

    def blocks() -> Iterator[tuple[tuple[int, int], pa.Table]]:
        for i in range(6):
            if number == 1 and i == 3 and fail == "user error":
                Path(folder, "raised").touch()
                raise UserError("line 3 of the log is 'x'; write a number")
            mark = Path(folder, "failed")
            if number == 1 and i == 3 and fail == "worker" and not mark.exists():
                mark.touch()
                os._exit(1)
            if fail == "user error" and number != 1:
                after_the_error(folder)
                Path(folder, f"at-{number}-{i}").touch()
            yield (number, i), table([f"u{j}" for j in range(SENT_AT_ONCE)], SENT_AT_ONCE * (6 * number + i))

    yield from scatter(blocks(), 3)


@pytest.mark.usefixtures("ray_local")
def test_a_user_error_of_a_reader_is_one_line_and_ends_the_others(tmp_path: Path) -> None:
    calls = [(number, str(tmp_path), "user error") for number in range(30)]
    with pytest.raises(UserError) as caught:
        list(gather(log, calls, [[] for _ in range(3)]))
    assert str(caught.value) == "line 3 of the log is 'x'; write a number"
    assert {int(path.name.split("-")[1]) for path in tmp_path.glob("at-*")} <= set(range(2 * in_flight()))
    after = sorted(tmp_path.iterdir())
    time.sleep(0.5)
    assert sorted(tmp_path.iterdir()) == after


def double(number: int, folder: str) -> tuple[int, int]:
    if number == 2:
        Path(folder, "raised").touch()
        raise UserError("2 is no good; take another")
    if folder:
        if number > 2:
            after_the_error(folder)
        Path(folder, str(number)).touch()
    return number, 2 * number


@pytest.mark.usefixtures("ray_local")
def test_tasks_give_results_references_and_errors(tmp_path: Path) -> None:
    found = dict(run_tasks(double, [(number, "") for number in (0, 1, 3, 4, 5, 6)], num_returns=2))
    assert sorted(result[0] for result in found.values()) == [0, 1, 3, 4, 5, 6]
    assert all(ray.get(ref) == 2 * number for number, ref in found.values())
    with pytest.raises(UserError) as caught:
        list(run_tasks(double, [(number, str(tmp_path)) for number in range(20)]))
    assert str(caught.value) == "2 is no good; take another"
    after = sorted(tmp_path.iterdir())
    assert len(after) <= 2 * in_flight()
    time.sleep(0.5)
    assert sorted(tmp_path.iterdir()) == after


RAY_FAULT = "Tried to complete task that was not pending"
"""Ray's own check on retried streaming tasks (see `shuffle.py`): the driver ends, and the job is run again."""


@pytest.fixture(scope="module")
def apart() -> dict[str, Any]:
    """What `alone` found in a process of its own: its Ray has a small store, and no other test goes down with it."""
    for _ in range(2):
        done = subprocess.run([sys.executable, __file__], capture_output=True, text=True)
        if RAY_FAULT not in done.stderr:
            break
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])  # Ray tells of the reader before


@pytest.mark.long
def test_a_log_larger_than_the_object_store_goes_through_the_disk(apart: dict[str, Any]) -> None:
    sent, kept, megabytes = apart["small store"]
    assert kept == sent
    assert megabytes > 1.5 * STORE_MB


@pytest.mark.long
def test_a_reader_that_dies_is_run_again_and_counts_once(apart: dict[str, Any]) -> None:
    records, shards, rows = apart["reader dies"]
    assert records == [[number, i] for number in range(5) for i in range(6)]
    assert shards == 30  # it had sent some when it died
    assert rows == 30 * SENT_AT_ONCE


BLOCKS, BLOCK_ROWS, STORE_MB = 20, 100_000, 80


def wide(number: int) -> Iterator[Any]:
    def blocks() -> Iterator[tuple[int, pa.Table]]:
        for i in range(BLOCKS):
            values = np.random.default_rng(i).random(BLOCK_ROWS)  # (rows,): 0.8 MB, and as much of ids
            yield i, pa.table({"user_id": [f"u{j:05}" for j in range(BLOCK_ROWS)], "row": values})

    yield from scatter(blocks(), 8)


def size(*parts: pa.Table) -> tuple[int, int]:
    return sum(part.num_rows for part in parts), sum(part.nbytes for part in parts)


def through_a_small_store() -> tuple[int, int, int]:
    """Rows sent, rows kept, megabytes of them."""
    shards: Shards = [[] for _ in range(8)]
    sent = BLOCK_ROWS * len(list(gather(wide, [(number,) for number in range(4)], shards)))
    sizes = [result for _, result in run_tasks(size, (tuple(shards.pop()) for _ in range(8)))]
    return sent, sum(rows for rows, _ in sizes), sum(size for _, size in sizes) >> 20


def a_reader_dies() -> tuple[list[tuple[int, int]], int, int]:
    """Records, tables of the partition with most, and how many rows came, each once."""
    with tempfile.TemporaryDirectory() as folder:
        shards: Shards = [[] for _ in range(3)]
        records = list(gather(log, [(number, folder, "worker") for number in range(5)], shards))
        assert Path(folder, "failed").exists()
        rows = np.concatenate([part["row"].to_numpy() for refs in shards for part in ray.get(refs)])
        assert (np.sort(rows) == np.arange(len(rows))).all()
        return sorted(records), max(map(len, shards)), len(rows)


def alone() -> None:
    """Prints what both find in a Ray of their own with STORE_MB of object store."""
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, object_store_memory=STORE_MB << 20, log_to_driver=False
    )
    print(json.dumps({"small store": through_a_small_store(), "reader dies": a_reader_dies()}))


if __name__ == "__main__":
    alone()
