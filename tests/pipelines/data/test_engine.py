"""Ray Data as prepare uses it: every row once in its partition, in bounded memory,
whatever fails on the way.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import ray

from models.storage.tables import UserError
from pipelines.data.engine import (
    KEY,
    Engine,
    Exchange,
    RayDataConfig,
    ReadSummary,
    ResourceLimits,
)
from pipelines.data.events.build_events import PartitionWriter, read_partitions
from pipelines.data.events.columns import user_keys
from pipelines.data.prepare_config import PrepareConfig
from pipelines.data.reading.log import parse_log
from pipelines.data.run import OutputTables, Run
from pipelines.data.schemas import events_schema

ray.cloudpickle.register_pickle_by_value(
    sys.modules[__name__]
)  # workers cannot import a test

SCHEMA = pa.schema([("name", pa.string()), ("row", pa.int64()), (KEY, pa.int32())])


def log(
    keys: int, folder: str, fail: str, number: int, rows: int = 1000
) -> Iterator[pa.Table]:
    """A read of 4 tables; the first time that number 1 is in the middle it does as
    `fail` says.
    """
    for block in range(4):
        if number == 1 and block == 2 and fail:
            mark = Path(folder, f"failed-{len(list(Path(folder).iterdir()))}")
            first = not any(Path(folder).iterdir())
            mark.touch()
            if fail == "user error":
                raise UserError("line 3 of the log is 'x'; write a number")
            if first:
                os._exit(1)
        row = np.arange(rows) + rows * (4 * number + block)
        yield pa.table(
            {"name": row.astype(str), "row": row, KEY: (row % keys).astype(np.int32)},
            schema=SCHEMA,
        )


def gather(key: int, rows: pa.Table) -> tuple[int, list[int]]:
    return key, sorted(rows["row"].to_pylist())


def exchanged(
    partitions: int,
    keys: int,
    folder: str = "",
    fail: str = "",
    in_process: bool = False,
    **more: Any,
) -> dict[int, list[int]]:
    """The rows by their partition, which comes once."""
    engine = Engine(RayDataConfig(shuffle_batch_mb=1))
    read = partial(log, keys, folder, fail)
    exchange = Exchange(read, 5, gather, partitions, **more)
    results = list(engine.exchange(exchange, in_process))
    found = dict(results)
    assert len(found) == len(results)
    return found


def expected(keys: int) -> dict[int, list[int]]:
    return {key: list(range(key, 20_000, keys)) for key in range(keys)}


@pytest.mark.usefixtures("ray_local")
@pytest.mark.parametrize(
    ("partitions", "keys"),
    [(1, 1), (3, 3), (64, 64), (2, 3)],
    ids=[
        "one",
        "three",
        "more than tasks",
        "several in one task, as of a Ray whose hash does that",
    ],
)
@pytest.mark.parametrize("in_process", [False, True])
def test_every_row_comes_out_once_in_its_partition(
    partitions: int, keys: int, in_process: bool
) -> None:
    assert exchanged(partitions, keys, in_process=in_process) == expected(keys)


def sleep_a_moment(number: int) -> tuple[float, float]:
    """Return when this call began and ended."""
    began = time.time()
    time.sleep(0.3)
    return began, time.time()


@pytest.mark.usefixtures("ray_local")
def test_tasks_at_once_keep_the_resource_limits() -> None:
    limited = RayDataConfig(
        shuffle_batch_mb=1, memory_gb=0.25, resource_limits=ResourceLimits(cpu=1)
    )

    spans = [
        span
        for _, span in Engine(limited).map_unordered(
            sleep_a_moment, [(n,) for n in range(4)]
        )
    ]
    engine = Engine(limited)
    exchange = Exchange(partial(log, 3, "", ""), 5, gather, 3)
    rows = dict(engine.exchange(exchange))

    ordered = sorted(spans)
    assert all(end <= began for (_, end), (began, _) in itertools.pairwise(ordered))
    assert rows == expected(3)


def test_a_task_that_the_resource_limits_have_no_room_for_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"memory_gb is 2, less than the 4 that one task reserves"
    ):
        RayDataConfig(memory_gb=4, resource_limits=ResourceLimits(memory_gb=2))


@pytest.mark.usefixtures("ray_local")
@pytest.mark.parametrize("in_process", [False, True])
def test_rows_of_an_exchange_go_on_into_another(in_process: bool) -> None:
    def onward(rows: pa.Table) -> pa.Table:
        key = (rows["row"].to_numpy() // 5000).astype(np.int32)
        return rows.set_column(rows.column_names.index(KEY), KEY, pa.array(key))

    found = exchanged(
        4, 3, first_kernel=onward, num_first_partitions=3, in_process=in_process
    )
    assert found == {
        key: list(range(5000 * key, 5000 * key + 5000)) for key in range(4)
    }


def log_with_summary(number: int) -> Iterator[pa.Table | ReadSummary]:
    yield from log(3, "", "", number)
    yield ReadSummary(number, {"tables": 4})


@pytest.mark.usefixtures("ray_local")
@pytest.mark.parametrize("in_process", [False, True])
def test_summaries_of_reads_come_beside_the_results(in_process: bool) -> None:
    exchange = Exchange(log_with_summary, 5, gather, 3, summaries=True)

    outputs = list(Engine(RayDataConfig()).exchange(exchange, in_process))

    summaries = [each for each in outputs if isinstance(each, ReadSummary)]
    results = [each for each in outputs if not isinstance(each, ReadSummary)]
    assert sorted(each.number for each in summaries) == list(range(5))
    assert all(each.value == {"tables": 4} for each in summaries)
    assert dict(results) == expected(3)


@pytest.mark.usefixtures("ray_local")
def test_a_user_error_of_a_read_is_one_line_and_not_tried_again(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        exchanged(3, 3, str(tmp_path), "user error")
    assert str(caught.value) == "line 3 of the log is 'x'; write a number"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.usefixtures("ray_local")
@pytest.mark.exhaustive
def test_a_read_whose_worker_dies_is_run_again_and_counts_once(tmp_path: Path) -> None:
    assert exchanged(3, 3, str(tmp_path), "worker") == expected(3)
    assert len(list(tmp_path.iterdir())) == 2


def halve(by: int, number: int) -> float:
    if number == 2:
        raise UserError("2 is no good; take another")
    return number / by


@pytest.mark.usefixtures("ray_local")
@pytest.mark.parametrize("in_process", [False, True])
def test_each_gives_the_results_of_calls_by_their_numbers(in_process: bool) -> None:
    engine = Engine(in_process=in_process)
    assert dict(
        engine.map_unordered(halve, [(number,) for number in (4, 6, 8)], (ray.put(2),))
    ) == {0: 2, 1: 3, 2: 4}
    with pytest.raises(UserError) as caught:
        list(engine.map_unordered(halve, [(number,) for number in range(9)], (2,)))
    assert str(caught.value) == "2 is no good; take another"
    assert list(engine.map_unordered(halve, [])) == []


def test_events_in_a_wrong_partition_or_lost_are_found(tmp_path: Path) -> None:
    """Each user is in one part: his events are all in the partition of his key, of
    which there is one part.
    """
    users = pa.array([f"u{i}" for i in range(50)])
    count = len(users)
    rows = pa.table(
        {"user_id": users, "timestamp_ms": np.arange(count), "item_id": ["a"] * count}
    )
    write = PartitionWriter(str(tmp_path), events_schema(), None, False, 4, {})
    mine = user_keys(users) % 4 == 1
    written = write(None, 1, rows.filter(pa.array(mine)))
    assert written.users == written.part.rows == mine.sum()
    with pytest.raises(
        RuntimeError, match=f"put {count - mine.sum()} users into the wrong partition"
    ):
        write(None, 1, rows)

    class Broken(Engine):
        """An exchange that loses a partition or gives one twice."""

        def exchange(
            self, exchange: Exchange, in_process: bool = False
        ) -> Iterator[Any]:
            results = list(super().exchange(exchange, in_process))
            yield from [*results, *results[-1:]] if self.twice else results[:-1]

        twice = False

    (tmp_path / "log.csv").write_text(
        "u,t\n"
        + "".join(f"{user},{1_600_000_000 + n}\n" for n, user in enumerate(users))
    )
    source = parse_log(
        {
            "files": "log.csv",
            "user": "u",
            "item": "u",
            "time": {"column": "t", "unit": "s"},
        }
    )
    for name in ("events", "rejects"):
        (tmp_path / name).mkdir()
    engine = Engine(in_process=True)
    tables = OutputTables(str(tmp_path), print, engine)
    run = Run(source, str(tmp_path), PrepareConfig(), None, print, engine, tables)
    result = read_partitions(run, ["log.csv"], 4, None, None)
    assert sum(written.part.rows for written in result.partitions) == count
    assert sum(written.users for written in result.partitions) == count
    for Broken.twice, words in (
        (False, "but the shuffle returned"),
        (True, r"returned partition \d twice"),
    ):
        broken = replace(run, engine=Broken(in_process=True))
        with pytest.raises(RuntimeError, match=words):
            read_partitions(broken, ["log.csv"], 4, None, None)


BLOCKS, BLOCK_ROWS, STORE_MB = 5, 100_000, 80
"""Two million rows with names of 70 letters are twice the store."""


def wide(number: int) -> Iterator[pa.Table]:
    for i in range(BLOCKS):
        row = np.arange(BLOCK_ROWS) + BLOCK_ROWS * (BLOCKS * number + i)
        names = pl.Series(row).cast(pl.String).str.zfill(70).to_arrow()
        yield pa.table({"name": names, "row": row, KEY: row % 8}).cast(SCHEMA)


def size(_: int, rows: pa.Table) -> tuple[int, int]:
    return len(np.unique(rows["row"].to_numpy())), rows.nbytes


@pytest.mark.long
@pytest.mark.exhaustive
def test_a_log_larger_than_the_object_store_goes_through_the_disk() -> None:
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows, megabytes = json.loads(done.stdout.splitlines()[-1])
    assert rows == 4 * BLOCKS * BLOCK_ROWS
    assert megabytes > 1.5 * STORE_MB


def alone() -> None:
    """Prints rows and megabytes that came through an exchange in a Ray of its own with
    STORE_MB of object store.
    """
    with tempfile.TemporaryDirectory(prefix="trieline-") as folder:
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=STORE_MB << 20,
            log_to_driver=False,
            _temp_dir=folder,
        )
        engine = Engine(RayDataConfig(shuffle_batch_mb=16))
        sizes = list(engine.exchange(Exchange(wide, 4, size, 8)))
        total_rows = sum(rows for rows, _ in sizes)
        total_mb = sum(size for _, size in sizes) >> 20
        print(json.dumps([total_rows, total_mb]))
        ray.shutdown()


if __name__ == "__main__":
    alone()
