"""Run the tasks and shuffles of `jobs.prepare` on Ray, or in threads of this process.

    executor.map_unordered(function, calls)   # one Ray task per call
    executor.exchange(Exchange(...))
    # from_items -> map_batches(read) -> repartition(keys) -> map_batches(kernel)

Reads and kernels exchange polars frames; Ray Data moves them as Arrow tables. Kernels
process whole partitions and write their own parts.
Ray Data provides statistics, progress, backpressure, spilling and retries of lost
tasks. `Executor._build_context` sets its options (measured on 20 million events, see
docs/scale.md). Kernels set no `concurrency`, so Ray Data fuses them into the tasks that
gather the shards of a partition.

Ray is imported inside functions, so parsing a command line and previewing a log do not
load it.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import polars as pl

from core.errors import UserError
from pipelines.faults import find_user_error
from pipelines.prepare.settings.config import RayDataConfig
from pipelines.start import SHUFFLE_ENV, start_ray

if TYPE_CHECKING:
    import pyarrow as pa
    from ray.data import DataContext

MIN_SHARD_BYTES = 128 << 10
"""Minimum bytes of a map task per partition. Ray would keep objects below 100 KiB in
the driver's memory."""

MAX_PENDING_TASKS = 256
"""Maximum number of unfinished tasks, as each call of `ray.wait` scans all of them."""

KEY = "__partition"
"""Column of exchanged rows: the number of the row's partition."""

SUMMARY = "__summary"
"""Column of exchanged rows: the pickled summary of a read; null in rows of the log."""

RESULT = "__result"
"""Column of an exchange's output: a pickled result of the kernel, or a summary."""

MAX_THREADS = min(4, len(os.sched_getaffinity(0)))
"""Threads of an executor without Ray. Each thread holds one partition in memory."""

RAY_DATA_SUFFIX = "\nFailed to apply"
"""Start of the text that Ray Data appends to the message of an error."""

Call = tuple[Any, ...]
"""Positional arguments of one call of a function."""
Shared = Any
"""Result of `Executor.put`: an object reference, or the value itself in an executor
without Ray. `fetch` returns the value."""


@dataclasses.dataclass(frozen=True)
class ReadSummary:
    """A value that a read sends to the driver, for example counts of rejected rows."""

    index: int
    """Index of the read."""
    value: Any
    """Picklable value."""


Read = Callable[[int], Iterator[pl.DataFrame | ReadSummary]]
"""Yields the rows, and optionally a summary, of the read with the given index."""


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A shuffle: rows of many reads are grouped by partition and passed to a kernel."""

    read: Read
    """Yields frames of one schema that contain the column KEY."""
    num_reads: int
    kernel: Callable[..., Any]
    """Called as `kernel(*shared, partition, rows)` for each partition that has rows;
    returns a picklable result."""
    num_partitions: int
    shared: Call = ()
    """First arguments of the kernel; references are replaced by their values."""
    first_kernel: Callable[[pl.DataFrame], pl.DataFrame] | None = None
    """Kernel of a preceding shuffle into `num_first_partitions`, if any. Returns rows
    with the KEY of the second shuffle."""
    num_first_partitions: int = 0


def quiet_ray_data() -> None:
    """Silence Ray Data's log, and its progress bars outside of a terminal.

    Errors are still raised.
    """
    from ray.data import DataContext

    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    DataContext.get_current().enable_progress_bars = sys.stderr.isatty()


@dataclasses.dataclass
class Executor:
    """Runs the tasks and exchanges of one run of `prepare`."""

    settings: RayDataConfig = field(default_factory=RayDataConfig)
    """Settings of Ray Data."""
    in_process: bool = False
    """Run everything in threads of this process, without Ray: faster for a log that
    fits into memory."""
    is_started: bool = False
    """Whether Ray has been started, which happens before its first use."""

    def put(self, value: Any) -> Shared:
        """Store `value` in Ray's object store, where all tasks can read it."""
        if self.in_process:
            return value
        self._start_ray()
        import ray

        return ray.put(value)

    def submit(
        self, function: Callable[..., Any], calls: Iterable[Call], shared: Call = ()
    ) -> Iterator[Any]:
        """Yield a reference to the result of `function(*shared, *call)` for each call.

        References come in the order of `calls`, and a task is submitted when its
        reference is requested. Arguments that are references are replaced by their
        values.

        Args:
            function: Function to run in a task.
            calls: Arguments of each call, after the shared ones.
            shared: First arguments of every call.
        """
        if self.in_process:
            yield from _map_in_threads(lambda call: function(*shared, *call), calls)
            return
        self._start_ray()
        import ray

        task = ray.remote(function).options(num_cpus=1, **self._task_options())
        for call in calls:
            yield task.remote(*shared, *call)

    def map_unordered(
        self, function: Callable[..., Any], calls: Iterable[Call], shared: Call = ()
    ) -> Iterator[tuple[int, Any]]:
        """Run `function(*shared, *call)` for each call; yield results as tasks finish.

        Args:
            function: Function to run in a task.
            calls: Arguments of each call, after the shared ones.
            shared: First arguments of every call.

        Yields:
            The index of a call and its result.
        """
        references = enumerate(self.submit(function, calls, shared))
        if self.in_process:
            yield from references
            return
        self._start_ray()
        import ray

        max_tasks = min(MAX_PENDING_TASKS, self.settings.max_cpus or MAX_PENDING_TASKS)
        pending: dict[Any, int] = {}
        while True:
            free = max_tasks - len(pending)
            for index, reference in islice(references, free):
                pending[reference] = index
            if not pending:
                return
            [done], _ = ray.wait(list(pending), num_returns=1)
            with _unwrap_user_errors():
                yield pending.pop(done), ray.get(done)

    def exchange(self, exchange: Exchange) -> Iterator[Any]:
        """Shuffle rows into partitions, and run a kernel on each partition.

        Yields:
            The results of the kernel and the summaries of the reads, in any order.
        """
        if self.in_process:
            yield from _exchange_in_process(exchange)
            return
        self._start_ray()
        import ray
        from ray.data import DataContext

        max_partitions = max(exchange.num_partitions, exchange.num_first_partitions)
        blocks: dict[str, Any] = {"batch_size": None, "batch_format": "pyarrow"}
        with DataContext.current(self._build_context(max_partitions)):
            reads = [{"read": index} for index in range(exchange.num_reads)]
            rows: Any = ray.data.from_items(
                reads, override_num_blocks=exchange.num_reads
            )
            read = partial(_read_rows, exchange)
            rows = rows.map_batches(read, **self._task_options(), **blocks)
            if exchange.first_kernel:
                rows = rows.repartition(exchange.num_first_partitions, keys=[KEY])
                rows = rows.map_batches(partial(_run_first_kernel, exchange), **blocks)
            # the last partition has the summaries
            rows = rows.repartition(exchange.num_partitions + 1, keys=[KEY])
            rows = rows.map_batches(partial(_run_kernel, exchange), **blocks)
        with _unwrap_user_errors():
            for block in rows.iter_batches(prefetch_batches=0, **blocks):
                yield from map(pickle.loads, block[RESULT].to_pylist())

    def _start_ray(self) -> None:
        if self.is_started:
            return
        from pipelines import cluster

        start_ray()
        self.is_started = True
        needs = {"CPU": 1, "memory": self.settings.memory_gb * 2**30}
        cluster.check_room(1, needs)

    def _task_options(self) -> dict[str, Any]:
        """Return the Ray options of every task."""
        options: dict[str, Any] = {"runtime_env": SHUFFLE_ENV}
        if self.settings.memory_gb:
            options["memory"] = self.settings.memory_gb * 2**30
        return options

    def _build_context(self, num_partitions: int) -> DataContext:
        """Return the Ray Data context for an exchange."""
        import ray
        from ray.data import DataContext, ExecutionResources

        quiet_ray_data()
        context = DataContext.get_current().copy()
        context.shuffle_strategy = "shuffle_v2"
        nodes = [node for node in ray.nodes() if node["Alive"]]
        context.shuffle_compression = "lz4" if len(nodes) > 1 else "none"
        # With Ray's default of 1 GiB, one task would shuffle 20 million events.
        batch_bytes = max(
            self.settings.shuffle_batch_mb << 20, num_partitions * MIN_SHARD_BYTES
        )
        context.shuffle_input_batch_bytes = batch_bytes
        context.target_max_block_size = batch_bytes
        context.execution_options.resource_limits = ExecutionResources.for_limits(
            cpu=self.settings.max_cpus or None
        )
        return context


def fetch(shared: Shared) -> Any:
    """Return the value that `Executor.put` stored."""
    ray = sys.modules.get("ray")  # the import takes half a second
    return ray.get(shared) if ray and isinstance(shared, ray.ObjectRef) else shared


@contextmanager
def _unwrap_user_errors() -> Iterator[None]:
    """Re-raise a UserError of a task without Ray's wrapper and traceback."""
    try:
        yield
    except Exception as error:
        if user_error := find_user_error(error):
            message = str(user_error).partition(RAY_DATA_SUFFIX)[0]
            raise UserError(message, user_error.cause) from None
        raise


def _read_rows(exchange: Exchange, reads: pa.Table) -> Iterator[pa.Table]:
    """Yield the rows of reads. A summary becomes a row of one additional partition."""
    for index in reads["read"].to_pylist():
        rows = pl.DataFrame()  # the last frame, which a summary follows
        for block in exchange.read(index):
            if isinstance(block, ReadSummary):
                key = pl.lit(exchange.num_partitions, pl.Int32).alias(KEY)
                summary = pl.lit(pickle.dumps(block)).alias(SUMMARY)
                yield rows.clear(1).with_columns(key, summary).to_arrow()
                continue
            rows = block.with_columns(pl.lit(None, pl.Binary).alias(SUMMARY))
            yield rows.to_arrow()


def _run_first_kernel(exchange: Exchange, rows: pa.Table) -> pa.Table:
    """Run the kernel of the preceding shuffle on the rows of one task."""
    assert exchange.first_kernel is not None
    return exchange.first_kernel(pl.DataFrame(rows)).to_arrow()


def _run_kernel(exchange: Exchange, rows: pa.Table) -> Iterator[pa.Table]:
    """Yield the pickled kernel result of each partition in the rows of one task."""
    for partition, part in split_by_partition(pl.DataFrame(rows)).items():
        if partition == exchange.num_partitions:
            results = part[SUMMARY].to_list()
        else:
            part = part.drop(SUMMARY, strict=False)
            result = exchange.kernel(*map(fetch, exchange.shared), partition, part)
            results = [pickle.dumps(result)]
        yield pl.DataFrame({RESULT: results}, {RESULT: pl.Binary}).to_arrow()


def _exchange_in_process(exchange: Exchange) -> Iterator[Any]:
    """Run an exchange in threads of this process; yield results and summaries."""
    shards: dict[int, list[pl.DataFrame]] = defaultdict(list)

    def read(index: int) -> list[dict[int, pl.DataFrame] | ReadSummary]:
        return [
            block if isinstance(block, ReadSummary) else split_by_partition(block)
            for block in exchange.read(index)
        ]

    def add(parts: dict[int, pl.DataFrame]) -> None:
        for key, rows in parts.items():
            shards[key].append(rows)

    def gather(key: int) -> pl.DataFrame:
        return pl.concat(shards.pop(key), rechunk=True)

    for blocks in _map_in_threads(read, range(exchange.num_reads)):
        for block in blocks:
            if isinstance(block, ReadSummary):
                yield block
            else:
                add(block)
    if kernel := exchange.first_kernel:
        results = _map_in_threads(
            lambda bucket: split_by_partition(kernel(gather(bucket))), sorted(shards)
        )
        for parts in list(results):
            add(parts)
    yield from _map_in_threads(
        lambda key: exchange.kernel(*exchange.shared, key, gather(key)), sorted(shards)
    )


def split_by_partition(rows: pl.DataFrame) -> dict[int, pl.DataFrame]:
    """Return the rows of each partition without the column KEY."""
    if not rows.height:
        return {}
    parts = rows.partition_by(KEY, include_key=False, as_dict=True)
    return {key: part for (key,), part in parts.items()}


def _map_in_threads(
    function: Callable[[Any], Any], values: Iterable[Any]
) -> Iterator[Any]:
    """Yield `function(value)` for each value, in order."""
    with ThreadPoolExecutor(MAX_THREADS) as pool:
        yield from pool.map(function, values)
