"""The exchange of rows by Ray Data: every row arrives once in its partition, in bounded
memory, even if workers die.
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

# Workers cannot import a test.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

SCHEMA = pa.schema([("name", pa.string()), ("row", pa.int64()), (KEY, pa.int32())])


NUM_READS, TABLES_PER_READ, ROWS_PER_TABLE = 5, 4, 1000
NUM_ROWS = NUM_READS * TABLES_PER_READ * ROWS_PER_TABLE


def read_tables(
    num_keys: int, folder: str, fault: str, number: int
) -> Iterator[pa.Table]:
    """Yield the tables of one read, with row numbers and keys.

    Read number 1 fails at its third table by `fault`: always by a user error, or by the
    death of its worker at the first attempt. It leaves a file in `folder` per failure.
    """
    for block in range(TABLES_PER_READ):
        if number == 1 and block == 2 and fault:
            attempt = len(list(Path(folder).iterdir()))
            Path(folder, f"attempt-{attempt}").touch()
            if fault == "user error":
                raise UserError("line 3 of the log is 'x'")
            if attempt == 0:
                os._exit(1)
        first_row = ROWS_PER_TABLE * (TABLES_PER_READ * number + block)
        row = np.arange(ROWS_PER_TABLE) + first_row
        key = (row % num_keys).astype(np.int32)
        columns = {"name": row.astype(str), "row": row, KEY: key}
        yield pa.table(columns, schema=SCHEMA)


def collect_rows(key: int, rows: pa.Table) -> tuple[int, list[int]]:
    """Return a partition's key and its sorted row numbers."""
    return key, sorted(rows["row"].to_pylist())


def exchange_rows(
    partitions: int,
    num_keys: int,
    folder: str = "",
    fault: str = "",
    in_process: bool = False,
    **options: Any,
) -> dict[int, list[int]]:
    """Return the rows of each partition, and check that no partition comes twice."""
    engine = Engine(RayDataConfig(shuffle_batch_mb=1))
    read = partial(read_tables, num_keys, folder, fault)
    exchange = Exchange(read, NUM_READS, collect_rows, partitions, **options)
    results = list(engine.exchange(exchange, in_process))
    assert len(dict(results)) == len(results)
    return dict(results)


def expect_rows(num_keys: int) -> dict[int, list[int]]:
    """Return the row numbers of each key."""
    return {key: list(range(key, NUM_ROWS, num_keys)) for key in range(num_keys)}


@pytest.mark.usefixtures("ray_local")
@pytest.mark.parametrize(
    ("partitions", "num_keys"),
    [(1, 1), (3, 3), (64, 64), (2, 3)],
    ids=[
        "one partition",
        "three partitions",
        "more partitions than tasks",
        "several keys in one partition",  # if Ray's hash puts them there
    ],
)
@pytest.mark.parametrize("in_process", [False, True])
def test_every_row_comes_out_once_in_its_partition(
    partitions: int, num_keys: int, in_process: bool
) -> None:
    rows = exchange_rows(partitions, num_keys, in_process=in_process)

    assert rows == expect_rows(num_keys)


LIMITED_TO_ONE_CPU = RayDataConfig(
    shuffle_batch_mb=1, memory_gb=0.25, resource_limits=ResourceLimits(cpu=1)
)


def sleep_and_time(number: int) -> tuple[float, float]:
    """Return the times at which a call begins and ends."""
    start = time.time()
    time.sleep(0.3)
    return start, time.time()


@pytest.mark.usefixtures("ray_local")
def test_tasks_run_one_by_one_within_the_limit_of_one_cpu() -> None:
    engine = Engine(LIMITED_TO_ONE_CPU)

    results = list(engine.map_unordered(sleep_and_time, [(n,) for n in range(4)]))

    spans = sorted(span for _, span in results)
    assert len(spans) == 4
    for (_, end), (next_start, _) in itertools.pairwise(spans):
        assert end <= next_start


@pytest.mark.usefixtures("ray_local")
def test_an_exchange_works_within_the_limit_of_one_cpu() -> None:
    read = partial(read_tables, 3, "", "")
    exchange = Exchange(read, NUM_READS, collect_rows, 3)

    rows = dict(Engine(LIMITED_TO_ONE_CPU).exchange(exchange))

    assert rows == expect_rows(3)


def test_resource_limits_below_the_memory_of_one_task_are_refused() -> None:
    error = r"memory_gb is 2, less than the 4 that one task reserves"
    with pytest.raises(ValueError, match=error):
        RayDataConfig(memory_gb=4, resource_limits=ResourceLimits(memory_gb=2))


def set_key_by_row_range(rows: pa.Table) -> pa.Table:
    """Return rows whose key is the range of 5,000 rows that they are in."""
    key = (rows["row"].to_numpy() // 5000).astype(np.int32)
    return rows.set_column(rows.column_names.index(KEY), KEY, pa.array(key))


@pytest.mark.usefixtures("ray_local")
@pytest.mark.parametrize("in_process", [False, True])
def test_a_first_kernel_gives_rows_other_keys_for_a_second_exchange(
    in_process: bool,
) -> None:
    rows = exchange_rows(
        4,
        3,
        first_kernel=set_key_by_row_range,
        num_first_partitions=3,
        in_process=in_process,
    )

    assert rows == {key: list(range(5000 * key, 5000 * key + 5000)) for key in range(4)}


def read_tables_with_summary(number: int) -> Iterator[pa.Table | ReadSummary]:
    """Yield the tables of one read, and then its summary."""
    yield from read_tables(3, "", "", number)
    yield ReadSummary(number, {"tables": TABLES_PER_READ})


@pytest.mark.usefixtures("ray_local")
@pytest.mark.parametrize("in_process", [False, True])
def test_summaries_of_reads_come_beside_the_results(in_process: bool) -> None:
    exchange = Exchange(
        read_tables_with_summary, NUM_READS, collect_rows, 3, summaries=True
    )

    outputs = list(Engine(RayDataConfig()).exchange(exchange, in_process))

    summaries = [output for output in outputs if isinstance(output, ReadSummary)]
    results = [output for output in outputs if not isinstance(output, ReadSummary)]
    assert sorted(summary.index for summary in summaries) == list(range(NUM_READS))
    for summary in summaries:
        assert summary.value == {"tables": TABLES_PER_READ}
    assert dict(results) == expect_rows(3)


@pytest.mark.usefixtures("ray_local")
def test_a_user_error_in_a_read_is_one_line_and_not_retried(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        exchange_rows(3, 3, str(tmp_path), "user error")

    assert str(caught.value) == "line 3 of the log is 'x'"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.usefixtures("ray_local")
@pytest.mark.exhaustive
def test_a_read_whose_worker_dies_is_run_again_and_counted_once(
    tmp_path: Path,
) -> None:
    rows = exchange_rows(3, 3, str(tmp_path), "worker")

    assert rows == expect_rows(3)
    assert len(list(tmp_path.iterdir())) == 2


def divide(divisor: int, number: int) -> float:
    """Return a quotient; the number 2 is refused."""
    if number == 2:
        raise UserError("2 is no good")
    return number / divisor


@pytest.mark.usefixtures("ray_local")
@pytest.mark.parametrize("in_process", [False, True])
def test_map_unordered_numbers_the_results_of_its_calls(in_process: bool) -> None:
    engine = Engine(in_process=in_process)
    calls = [(number,) for number in (4, 6, 8)]

    results = dict(engine.map_unordered(divide, calls, (ray.put(2),)))

    assert results == {0: 2, 1: 3, 2: 4}
    assert list(engine.map_unordered(divide, [])) == []


@pytest.mark.usefixtures("ray_local")
@pytest.mark.parametrize("in_process", [False, True])
def test_map_unordered_raises_the_user_error_of_a_call(in_process: bool) -> None:
    engine = Engine(in_process=in_process)
    calls = [(number,) for number in range(9)]

    with pytest.raises(UserError) as caught:
        list(engine.map_unordered(divide, calls, (2,)))

    assert str(caught.value) == "2 is no good"


NUM_USERS = 50
USERS = pa.array([f"u{number}" for number in range(NUM_USERS)])


def test_the_writer_of_a_partition_refuses_users_of_others(tmp_path: Path) -> None:
    columns = {
        "user_id": USERS,
        "timestamp_ms": np.arange(NUM_USERS),
        "item_id": ["a"] * NUM_USERS,
    }
    rows = pa.table(columns)
    writer = PartitionWriter(str(tmp_path), events_schema(), None, False, 4, {})
    in_partition = user_keys(USERS) % 4 == 1
    num_others = NUM_USERS - in_partition.sum()

    result = writer(None, 1, rows.filter(pa.array(in_partition)))
    assert result.users == result.part.rows == in_partition.sum()

    error = f"put {num_others} users into the wrong partition"
    with pytest.raises(RuntimeError, match=error):
        writer(None, 1, rows)


class LosesPartition(Engine):
    """An engine whose exchange loses the last partition."""

    def exchange(self, exchange: Exchange, in_process: bool = False) -> Iterator[Any]:
        yield from list(super().exchange(exchange, in_process))[:-1]


class RepeatsPartition(Engine):
    """An engine whose exchange returns the last partition twice."""

    def exchange(self, exchange: Exchange, in_process: bool = False) -> Iterator[Any]:
        results = list(super().exchange(exchange, in_process))
        yield from [*results, results[-1]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run of prepare in this process, on a log with an event per user."""
    lines = [f"{user},{1_600_000_000 + n}\n" for n, user in enumerate(USERS)]
    (tmp_path / "log.csv").write_text("u,t\n" + "".join(lines))
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
    return Run(source, str(tmp_path), PrepareConfig(), None, print, engine, tables)


def test_the_partitions_of_a_log_have_all_events_and_users(run: Run) -> None:
    result = read_partitions(run, ["log.csv"], 4, None, None)

    assert sum(partition.part.rows for partition in result.partitions) == NUM_USERS
    assert sum(partition.users for partition in result.partitions) == NUM_USERS


@pytest.mark.parametrize(
    ("engine", "error"),
    [
        (LosesPartition, "but the shuffle returned"),
        (RepeatsPartition, r"returned partition \d twice"),
    ],
)
def test_a_partition_lost_or_repeated_by_the_exchange_is_an_error(
    run: Run, engine: type[Engine], error: str
) -> None:
    faulty = replace(run, engine=engine(in_process=True))

    with pytest.raises(RuntimeError, match=error):
        read_partitions(faulty, ["log.csv"], 4, None, None)


# Two million rows with names of 70 letters are twice the object store.
WIDE_READS, BLOCKS, BLOCK_ROWS, STORE_MB = 4, 5, 100_000, 80


def read_wide_tables(number: int) -> Iterator[pa.Table]:
    """Yield the tables of one read, with names of 70 letters."""
    for block in range(BLOCKS):
        row = np.arange(BLOCK_ROWS) + BLOCK_ROWS * (BLOCKS * number + block)
        names = pl.Series(row).cast(pl.String).str.zfill(70).to_arrow()
        yield pa.table({"name": names, "row": row, KEY: row % 8}).cast(SCHEMA)


def measure_rows(_: int, rows: pa.Table) -> tuple[int, int]:
    """Return the number of different rows and of bytes of a partition."""
    return len(np.unique(rows["row"].to_numpy())), rows.nbytes


@pytest.mark.long
@pytest.mark.exhaustive
def test_a_log_larger_than_the_object_store_spills_to_the_disk() -> None:
    completed = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True
    )

    assert completed.returncode == 0, completed.stderr[-2000:]
    rows, megabytes = json.loads(completed.stdout.splitlines()[-1])
    assert rows == WIDE_READS * BLOCKS * BLOCK_ROWS
    assert megabytes > 1.5 * STORE_MB


def exchange_in_small_store() -> None:
    """Exchange rows in a local Ray with STORE_MB of object store, and print the number
    of rows and of megabytes.
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
        exchange = Exchange(read_wide_tables, WIDE_READS, measure_rows, 8)
        sizes = list(engine.exchange(exchange))
        total_rows = sum(rows for rows, _ in sizes)
        total_mb = sum(num_bytes for _, num_bytes in sizes) >> 20
        print(json.dumps([total_rows, total_mb]))
        ray.shutdown()


if __name__ == "__main__":
    exchange_in_small_store()
