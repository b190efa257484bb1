"""Ray Data as prepare uses it: every row once in its partition, in bounded memory, whatever fails on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import ray
from pipelines.data.dataflow import KEY, TALLY, Engine, partition_keys, tally_row

from models.tables import UserError
from pipelines.data import dataflow
from pipelines.data import ingest as ingest_module
from pipelines.data.ray_data_config import RayDataConfig

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test

SCHEMA = pa.schema([("name", pa.string()), ("row", pa.int64()), (KEY, pa.int32())])


@pytest.mark.parametrize("partitions", [1, 2, 3, 64, 1000])
def test_each_partition_has_a_key_of_its_own_by_the_hash_of_ray_data(partitions: int) -> None:
    from ray.data._internal.arrow_ops.transform_pyarrow import hash_partition

    keys = partition_keys(partitions)
    parted = hash_partition(pa.table({KEY: keys}), hash_cols=[KEY], num_partitions=partitions)
    assert sorted(parted) == list(range(partitions))
    assert all(table.num_rows == 1 for table in parted.values())
    assert len(set(keys.tolist())) == partitions
    assert TALLY not in keys


def log(number: int, folder: str, fail: str, keys: np.ndarray, rows: int = 1000) -> Iterator[pa.Table]:
    """A read of 4 tables and a tally; the first time that number 1 is in the middle it does as `fail` says."""
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
        yield pa.table({"name": row.astype(str), "row": row, KEY: keys[row % len(keys)]}, schema=SCHEMA)
    yield tally_row(SCHEMA, "name", f"tally {number}")


def gathered(key: int, rows: pa.Table) -> tuple[int, list[int]]:
    return key, sorted(rows["row"].to_pylist())


def exchanged(partitions: int, keys: np.ndarray, folder: str = "", fail: str = "", **more: Any) -> dict[int, Any]:
    reads = [partial(log, number, folder, fail, keys) for number in range(5)]
    found: dict[int, Any] = {TALLY: []}
    for key, result in Engine(RayDataConfig(shuffle_batch_mb=1)).exchange(
        reads, partitions, gathered, (), "name", **more
    ):
        if key == TALLY:
            found[TALLY].append(result)
        else:
            assert key not in found
            assert result[0] == key
            found[key] = result[1]
    assert sorted(found.pop(TALLY)) == [f"tally {number}" for number in range(5)]
    return found


def expected(keys: np.ndarray) -> dict[int, list[int]]:
    return {int(key): list(range(place, 20_000, len(keys))) for place, key in enumerate(keys)}


@pytest.mark.usefixtures("ray_local")
@pytest.mark.parametrize("partitions", [1, 3])
def test_every_row_comes_out_once_in_its_partition(partitions: int) -> None:
    keys = partition_keys(partitions)
    assert exchanged(partitions, keys) == expected(keys)


@pytest.mark.usefixtures("ray_local")
def test_partitions_that_share_a_task_stay_apart() -> None:
    """As with a Ray whose hash puts several keys into one partition and none into others."""
    keys = np.arange(3, dtype=np.int32)
    assert exchanged(2, keys) == expected(keys)


@pytest.mark.usefixtures("ray_local")
def test_rows_of_an_exchange_go_on_into_another() -> None:
    keys = partition_keys(4)

    def onward(rows: pa.Table) -> pa.Table:
        tally = pa.array(rows[KEY].to_numpy() == TALLY)
        key = np.where(tally, TALLY, keys[rows["row"].fill_null(0).to_numpy() // 5000])
        return rows.set_column(rows.column_names.index(KEY), KEY, pa.array(key, pa.int32()))

    for at_once in (False, True):
        found = exchanged(4, partition_keys(3), first=(3, onward), at_once=at_once)
        assert found == {int(key): list(range(5000 * i, 5000 * i + 5000)) for i, key in enumerate(keys)}


@pytest.mark.usefixtures("ray_local")
def test_a_user_error_of_a_read_is_one_line_and_not_tried_again(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        exchanged(3, partition_keys(3), str(tmp_path), "user error")
    assert str(caught.value) == "line 3 of the log is 'x'; write a number"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.usefixtures("ray_local")
def test_a_read_whose_worker_dies_is_run_again_and_counts_once(tmp_path: Path) -> None:
    keys = partition_keys(3)
    assert exchanged(3, keys, str(tmp_path), "worker") == expected(keys)
    assert len(list(tmp_path.iterdir())) == 2


def halve(by: int, number: int) -> float:
    if number == 2:
        raise UserError("2 is no good; take another")
    return number / by


@pytest.mark.usefixtures("ray_local")
def test_each_gives_the_results_of_calls_by_their_numbers() -> None:
    engine = Engine()
    assert dict(engine.each(halve, [(number,) for number in (4, 6, 8)], (ray.put(2),))) == {0: 2, 1: 3, 2: 4}
    assert "MapBatches(halve)" in engine.take_stats()
    assert engine.take_stats() == ""
    with pytest.raises(UserError) as caught:
        list(engine.each(halve, [(number,) for number in range(9)], (2,)))
    assert str(caught.value) == "2 is no good; take another"
    assert list(engine.each(halve, [])) == []


def test_events_in_a_wrong_partition_or_lost_are_found(tmp_path: Path) -> None:
    """Each user is in one part: his events are all in the partition of his key, of which there is one part."""
    from pipelines.data.tables import events_schema

    keys, users = partition_keys(4), pa.array([f"u{i}" for i in range(50)])
    count = len(users)
    rows = pa.table({"user_id": users, "timestamp_ms": np.arange(count), "item_id": ["a"] * count})
    write = ingest_module._Write(str(tmp_path), events_schema(), None, False, None, keys)
    mine = keys[ingest_module.user_keys(users) % 4] == keys[1]
    written = write(None, int(keys[1]), rows.filter(pa.array(mine)))
    assert written.users == mine.sum()
    with pytest.raises(RuntimeError, match=f"put {count - mine.sum()} users into the wrong partition"):
        write(None, int(keys[1]), rows)
    tally = ingest_module._Tally(events=int(mine.sum()))
    assert ingest_module._checked(tally, [written], None, False).parts == [written.part]
    tally.events += 1
    with pytest.raises(RuntimeError, match="came out of the shuffle"):
        ingest_module._checked(tally, [written], None, False)


BLOCKS, BLOCK_ROWS, STORE_MB = 5, 100_000, 80
"""Two million rows with names of 70 letters are twice the store."""


def wide(number: int, keys: np.ndarray) -> Iterator[pa.Table]:
    for i in range(BLOCKS):
        row = np.arange(BLOCK_ROWS) + BLOCK_ROWS * (BLOCKS * number + i)
        names = pl.Series(row).cast(pl.String).str.zfill(70).to_arrow()
        yield pa.table({"name": names, "row": row, KEY: keys[row % 8]}).cast(SCHEMA)


def size(_: int, rows: pa.Table) -> tuple[int, int]:
    return len(np.unique(rows["row"].to_numpy())), rows.nbytes


@pytest.mark.long
def test_a_log_larger_than_the_object_store_goes_through_the_disk() -> None:
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows, megabytes = json.loads(done.stdout.splitlines()[-1])
    assert rows == 4 * BLOCKS * BLOCK_ROWS
    assert megabytes > 1.5 * STORE_MB


def alone() -> None:
    """Prints rows and megabytes that came through an exchange in a Ray of its own with STORE_MB of object store."""
    with tempfile.TemporaryDirectory(prefix="trieline-") as folder:
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=STORE_MB << 20,
            log_to_driver=False,
            _temp_dir=folder,
        )
        keys = partition_keys(8)
        engine = Engine(RayDataConfig(shuffle_batch_mb=16))
        found = [of for _, of in engine.exchange([partial(wide, i, keys) for i in range(4)], 8, size)]
        print(json.dumps([sum(rows for rows, _ in found), sum(size for _, size in found) >> 20]))
        ray.shutdown()


if __name__ == "__main__":
    alone()


def test_what_is_waited_for_is_said(
    ray_local: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another job holds all CPUs of the cluster for a while."""
    from ray.util.placement_group import placement_group, remove_placement_group

    monkeypatch.setattr(dataflow, "SILENCE", 0.5)
    cpus = int(ray.cluster_resources()["CPU"])
    held = placement_group([{"CPU": cpus}])
    ray.get(held.ready())
    said = []

    def wait() -> None:
        while not (line := capsys.readouterr().out):
            time.sleep(0.05)
        said.append(line)
        remove_placement_group(held)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    assert sorted(Engine().each(lambda number: number, [(1,), (2,)])) == [(0, 1), (1, 2)]
    waiting.join()
    assert said[0].startswith(f"no task has ended for 0 s; 0 of the cluster's {cpus} CPUs are free (ray status")
