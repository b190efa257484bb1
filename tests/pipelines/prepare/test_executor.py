"""The exchange of rows: every row arrives once in its partition, even if a worker dies."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import ray

from core.errors import UserError
from pipelines.prepare.executor import KEY, Exchange, Executor
from pipelines.prepare.settings.config import RayDataConfig

# Workers cannot import a test.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

NUM_READS, TABLES_PER_READ, ROWS_PER_TABLE = 5, 4, 1000
NUM_ROWS = NUM_READS * TABLES_PER_READ * ROWS_PER_TABLE


def read_tables(folder: str, fault: str, number: int) -> Iterator[pl.DataFrame]:
    """Yield the tables of one read, with row numbers and keys.

    Read number 1 fails at its third table by `fault`: always by a user error, or by the
    death of its worker at the first attempt. It leaves a file in `folder` per failure.
    """
    for block in range(TABLES_PER_READ):
        if number == 1 and block == 2:
            attempt = len(list(Path(folder).iterdir()))
            Path(folder, f"attempt-{attempt}").touch()
            if fault == "user error":
                raise UserError("line 3 of the log is 'x'; write a number")
            if attempt == 0:
                os._exit(1)
        first_row = ROWS_PER_TABLE * (TABLES_PER_READ * number + block)
        row = np.arange(ROWS_PER_TABLE) + first_row
        key = (row % 3).astype(np.int32)
        yield pl.DataFrame({"name": map(str, row), "row": row, KEY: key})


def collect_rows(key: int, rows: pl.DataFrame) -> tuple[int, list[int]]:
    """Return a partition's key and its sorted row numbers."""
    return key, rows["row"].sort().to_list()


def exchange_rows(folder: Path, fault: str) -> dict[int, list[int]]:
    """Return the rows of each of 3 partitions, and check that none comes twice."""
    executor = Executor(RayDataConfig(shuffle_batch_mb=1), in_process=False)
    read = partial(read_tables, str(folder), fault)
    exchange = Exchange(read, NUM_READS, collect_rows, 3)
    results = list(executor.exchange(exchange))
    assert len(dict(results)) == len(results)
    return dict(results)


@pytest.mark.usefixtures("ray_local")
def test_a_user_error_in_a_read_is_one_line_and_not_retried(tmp_path):
    with pytest.raises(UserError) as caught:
        exchange_rows(tmp_path, "user error")

    assert str(caught.value) == "line 3 of the log is 'x'; write a number"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.usefixtures("ray_local")
@pytest.mark.exhaustive
def test_a_read_whose_worker_dies_is_run_again_and_counted_once(tmp_path):
    rows = exchange_rows(tmp_path, "worker")

    assert rows == {key: [*range(key, NUM_ROWS, 3)] for key in range(3)}
    assert len(list(tmp_path.iterdir())) == 2
