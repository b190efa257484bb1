"""The shuffle: rows that many tasks read are parted by user, so that each user is in one partition.

`ingest.ingest` runs it, for `python -m jobs.prepare`. One streaming Ray task per raw file (`scatter`) cuts
what it reads into one Arrow table per partition, a shard; a task per partition then takes its shards. In
between they lie in Ray's object store, which spills to disk what goes over its own limit.

What bounds it, however long the log:
- tasks: two per CPU are submitted, one per CPU runs, whatever the number of files and partitions;
- a reader holds one block of its file and, until it cuts them, at most `partitions * SHARD_BYTES` of rows,
  never more than `MAX_WAITING`;
- a writer holds one partition, whose size is set (`ingest.BYTES_PER_PARTITION`);
- the number of shards grows with the bytes of the log, not with files times partitions: a shard averages
  SHARD_BYTES or more, up to MAX_WAITING / SHARD_BYTES = 1024 partitions.

A reader whose worker dies is run again by Ray, and what it sent counts once. Ray 2.60 has open faults there (such as
ray-project/ray#64695): under load one of its own checks has ended a driver. Nothing is committed then, and the job
run again makes the tables. Readers that do not stream would need no such retries, but hold a whole file's rows;
without retries a lost node would be a lost job.

Ray Data's hash shuffle was measured beside this, with the same work in its tasks: RESULTS.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import ray

from pipelines.data.tasks import fetch, in_flight, stop

SHARD_BYTES = 256 << 10  # Ray keeps objects below 100 KiB in the driver's own memory
MAX_WAITING = 256 << 20

Shards = list[list[ray.ObjectRef]]
"""Per partition: references to its tables."""


def user_keys(users: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """63-bit hashes of the user ids, the same in every process."""
    hashes = pl.Series(pl.from_arrow(users)).hash(seed=0).to_numpy()
    return (hashes >> np.uint64(1)).astype(np.int64)


def split(table: pa.Table, partitions: int) -> dict[int, pa.Table]:
    """The rows by the partition of their `user_id`, in their order; partitions without rows are left out."""
    if not table.num_rows:
        return {}
    partition = (user_keys(table["user_id"]) % partitions).astype(np.min_scalar_type(partitions))
    order = np.argsort(partition, kind="stable")  # of 8 or 16 bits: a radix sort
    ends = np.cumsum(np.bincount(partition, minlength=partitions))
    starts = np.append(0, ends[:-1])
    table = table.take(pa.array(order))
    return {
        int(number): table.slice(starts[number], ends[number] - starts[number])
        for number in np.flatnonzero(ends > starts)
    }


def scatter(blocks: Iterable[tuple[Any, pa.Table]], partitions: int) -> Iterator[Any]:
    """What a reader task streams, over and over: (records, numbers of partitions), then a table for each number.

    blocks: (record, rows) as they are read. Rows wait until there are enough for shards of SHARD_BYTES.
    Record and rows arrive exactly once each, also if Ray runs the task twice.
    """
    limit = min(partitions * SHARD_BYTES, MAX_WAITING)
    records: list[Any] = []
    waiting: list[pa.Table] = []
    size = 0

    def shards() -> Iterator[Any]:
        parted = split(pa.concat_tables(waiting, promote_options="permissive"), partitions) if waiting else {}
        yield list(records), list(parted)
        yield from (shard for shard in parted.values())  # a generator: Ray sends to what it iterates
        records.clear()
        waiting.clear()

    for record, table in blocks:
        if size + table.nbytes > MAX_WAITING and waiting:  # so that what is cut stays far below Arrow's 2 GB of text
            yield from shards()
            size = 0
        records.append(record)
        waiting.append(table)
        size += table.nbytes
        if size >= limit:
            yield from shards()
            size = 0
    if records:
        yield from shards()


def gather(read: Callable[..., Iterator[Any]], calls: Iterable[tuple[Any, ...]], shards: Shards) -> Iterator[Any]:
    """Runs `read(*call)`, which yields as `scatter` does, for every call as a Ray task. Adds references to the
    tables to `shards` and yields the records as they come. A UserError of a task is raised as it was; the
    other tasks have then ended."""
    remote: Any = ray.remote(num_returns="streaming")(read)
    left = iter(calls)
    readers: list[Any] = []
    try:
        while True:
            while len(readers) < in_flight() and (call := next(left, None)) is not None:
                readers.append(remote.remote(*call))
            if not readers:
                return
            reader: Any
            [reader], _ = ray.wait(readers, num_returns=1)
            try:
                header = next(reader)
            except StopIteration:
                readers.remove(reader)
                continue
            records, numbers = fetch(header)
            for number in numbers:
                shards[number].append(next(reader))
            yield from records
    finally:
        stop([reader.completed() for reader in readers])
