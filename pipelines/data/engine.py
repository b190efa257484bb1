"""Ray as the steps of prepare use it, by its public interface.

    each(function, calls)                  a task per call, `ray.remote` and `ray.wait`
    exchange(read, reads, count, kernel)   from_items -> map_batches(read) -> repartition(keys) -> map_batches(kernel)

Kernels work on whole partitions with polars, numpy and Arrow, write their parts themselves, and give a table of a few
columns back. Stats, progress, backpressure, spilling and the retries of lost tasks are Ray Data's. What matters of its
settings (measured on 20 million events, see docs/scale.md) is in `context`; a `kernel` has no `concurrency`, so that it
fuses into the tasks that gather the shards of a partition.

Functions import Ray when they use it. So a command line is parsed, and a log is looked at, without it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from models.config import check_choices, check_least
from models.storage.tables import UserError
from pipelines.faults import find_user_error

if TYPE_CHECKING:
    from ray.data import DataContext


@dataclass
class ResourceLimits:
    """Part of a shared cluster that one job may use at once."""

    cpu: float = 0
    """CPUs of all its tasks together; 0: those of the cluster."""
    memory_gb: float = 0
    """GiB of memory that all its tasks together reserve (`memory_gb` each); 0: that of the cluster."""

    def __post_init__(self) -> None:
        check_least(self, ["cpu", "memory_gb"], 0, "ray_data.resource_limits.")


@dataclass
class RayDataConfig:
    """How Ray Data runs; nothing of it changes the tables."""

    shuffle_batch_mb: int = 64
    """MiB of rows that one task cuts by partition."""
    compression: Literal["auto", "none", "lz4", "zstd"] = "auto"
    """Of rows between tasks; auto: none on one node, lz4 between nodes."""
    read_mb: int = 128
    """MiB of a plain file that one task reads; a compressed file is read by one task."""
    memory_gb: float = 0
    """GiB of memory that Ray reserves for each task, so that it starts only as many on a node as fit; 0: Ray
    counts CPUs alone."""
    resource_limits: ResourceLimits = field(default_factory=ResourceLimits)
    """Part of a shared cluster that prepare may use at once."""

    def __post_init__(self) -> None:
        check_least(self, ["shuffle_batch_mb", "read_mb"], 1, "ray_data.")
        check_least(self, ["memory_gb"], 0, "ray_data.")
        limits = self.resource_limits
        if 0 < limits.memory_gb < self.memory_gb:
            raise ValueError(
                f"ray_data.resource_limits.memory_gb is {limits.memory_gb:g}, which has no room for a task of "
                f"ray_data.memory_gb {self.memory_gb:g}; raise it, or lower ray_data.memory_gb"
            )
        check_choices(self, "ray_data.")


SHARD_BYTES = 128 << 10
"""Ray keeps objects below 100 KiB in the driver's own memory: a map task has at least these for each partition."""

AT_ONCE = 256
"""Tasks that wait or run at once: `ray.wait` looks at all of them each time."""

KEY = "__partition"
"""Column of what is exchanged: the number of the row's partition."""

THREADS = min(4, len(os.sched_getaffinity(0)))
"""Threads of a process that runs everything itself: each has the memory of a partition."""

RETRIES = "\nFailed to apply"
"""What Ray Data adds to the words of an error."""

Call = tuple[Any, ...]
Shared = Any
"""What `Engine.put` gave: a reference to what all tasks read, or the thing itself; `fetch` gives the thing."""
Read = Callable[[int], Iterator[pa.Table]]


def quiet_ray_data() -> None:
    """Leaves the terminal to what jobs say, and to Ray Data's bars of progress where it is one; errors are raised."""
    from ray.data import DataContext

    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    DataContext.get_current().enable_progress_bars = sys.stderr.isatty()


class Engine:
    """How one run of prepare uses Ray, and what Ray Data says of what it ran."""

    def __init__(
        self,
        settings: RayDataConfig | None = None,
        here: bool = False,
        small: bool = True,
        start: Callable[[], None] | None = None,
    ) -> None:
        """here: whether this process runs everything itself, in threads, without Ray: for a log of few partitions,
        which processes of Ray would take longer to start for than to make. small: whether all tasks share
        the same processes, where Ray Data keeps those of its shuffle apart. start: starts Ray, before it is first used.
        """
        self.settings, self.here, self.start = settings or RayDataConfig(), here, start
        self.small = small
        self.stats: list[str] = []
        """`Dataset.stats()` of all that ran since `take_stats`."""

    def processes(self) -> dict[str, Any]:
        """Return the options of Ray for every task."""
        from pipelines.ray_inside import SHUFFLE_ENV

        options: dict[str, Any] = {"runtime_env": SHUFFLE_ENV} if self.small else {}
        if self.settings.memory_gb:
            options["memory"] = self.settings.memory_gb * 2**30
        return options

    def _begin(self) -> None:
        if self.start is not None:
            self.start()
            self.start = None

    def put(self, value: Any) -> Shared:
        """`value` where all tasks can read it."""
        if self.here:
            return value
        self._begin()
        import ray

        return ray.put(value)

    def take_stats(self) -> str:
        """What Ray Data says of all that ran since the last call, for a manifest's timings."""
        said, self.stats = "\n".join(self.stats), []
        return "made by the driver alone" if self.here else said

    def context(self, partitions: int) -> DataContext:
        """The settings of an exchange of so many partitions."""
        import ray
        from ray.data import DataContext, ExecutionResources

        quiet_ray_data()
        context = DataContext.get_current().copy()
        context.shuffle_strategy = "shuffle_v2"
        several = len([node for node in ray.nodes() if node["Alive"]]) > 1
        auto = "lz4" if several else "none"
        context.shuffle_compression = (
            auto if self.settings.compression == "auto" else self.settings.compression
        )
        # Ray's default of 1 GiB leaves a log of 20 million events to one task
        batch = max(self.settings.shuffle_batch_mb << 20, partitions * SHARD_BYTES)
        context.shuffle_input_batch_bytes = batch
        context.target_max_block_size = batch
        limits = self.settings.resource_limits
        context.execution_options.resource_limits = ExecutionResources.for_limits(
            cpu=limits.cpu or None, memory=limits.memory_gb * 2**30 or None
        )
        return context

    @property
    def tasks_at_once(self) -> int:
        """Tasks that `each` submits before it waits for one of them, within the resource limits."""
        limits, most = self.settings.resource_limits, AT_ONCE
        if limits.cpu:
            most = min(most, int(limits.cpu))
        if limits.memory_gb and self.settings.memory_gb:
            most = min(most, int(limits.memory_gb / self.settings.memory_gb))
        return max(1, most)

    def refs(
        self, function: Callable[..., Any], calls: Iterable[Call], shared: Call = ()
    ) -> Iterator[Any]:
        """A reference to the result of `function(*shared, *call)` for every call in order, each a task once it is asked
        for; arguments that are references are given as what they refer to."""
        if self.here:
            yield from _in_threads(
                lambda call: function(*map(fetch, shared), *call), calls
            )
            return
        self._begin()
        import ray

        task = ray.remote(function).options(
            num_cpus=1, name=_name(function), **self.processes()
        )
        yield from (task.remote(*shared, *call) for call in calls)

    def each(
        self, function: Callable[..., Any], calls: Iterable[Call], shared: Call = ()
    ) -> Iterator[tuple[int, Any]]:
        """Runs `function(*shared, *call)` for every call as a task; yields (number of the call, result) as they end."""
        every = enumerate(self.refs(function, calls, shared))
        if self.here:
            yield from every
            return
        self._begin()
        import ray

        waiting: dict[Any, int] = {}
        while waiting := waiting | {
            ref: number
            for number, ref in islice(every, self.tasks_at_once - len(waiting))
        }:
            (done, *_), _ = ray.wait(list(waiting), num_returns=1)
            with _one_line():
                yield waiting.pop(done), ray.get(done)

    def exchange(
        self,
        read: Read,
        reads: int,
        partitions: int,
        kernel: Callable[..., pa.Table],
        shared: Call = (),
        first: tuple[int, Callable[[pa.Table], pa.Table]] | None = None,
        here: bool = False,
    ) -> Iterator[pa.Table]:
        """Brings rows of one KEY together: yields `kernel(*shared, key, rows)` for each of the `partitions` that has
        some.

        `read(number)` gives tables of one schema with KEY, for `reads` numbers. first: the number of partitions of an
        exchange before, and what it makes of each: rows with the KEY that they go on to. here: as of `__init__`.
        """
        if self.here or here:
            rows = _join(_in_threads(lambda number: _join(read(number)), range(reads)))
            if first:
                share = rows[KEY].to_numpy() % THREADS
                shares = (
                    rows.filter(pa.array(share == number))
                    for number in np.flatnonzero(np.bincount(share))
                )
                rows = _join(_in_threads(first[1], shares))
            values, of = _partitions(rows)
            yield from _in_threads(
                lambda value: kernel(*map(fetch, shared), value, of(value)), values
            )
            return
        self._begin()
        import ray
        from ray.data import DataContext

        with DataContext.current(
            self.context(max(partitions, first[0] if first else 1))
        ):
            rows = ray.data.from_items(
                [{"number": number} for number in range(reads)],
                override_num_blocks=reads,
            )
            every: dict[str, Any] = {"batch_size": None, "batch_format": "pyarrow"}
            rows = rows.map_batches(
                _named(_read, read), fn_args=(read,), **self.processes(), **every
            )
            if first:
                rows = rows.repartition(first[0], keys=[KEY])
                rows = rows.map_batches(_named(first[1], first[1]), **every)
            rows = rows.repartition(partitions, keys=[KEY])
            rows = rows.map_batches(
                _named(_by_key, kernel), fn_args=(kernel, shared), **every
            )
        with _one_line():
            yield from rows.iter_batches(
                batch_size=None, batch_format="pyarrow", prefetch_batches=0
            )
        self.stats.append(rows.stats())


@contextmanager
def _one_line() -> Iterator[None]:
    """A UserError of a task as it was raised there, in one line."""
    try:
        yield
    except Exception as error:
        if known := find_user_error(error):
            raise UserError(str(known).partition(RETRIES)[0]) from None
        raise


def _read(numbers: pa.Table, read: Read) -> Iterator[pa.Table]:
    for number in numbers["number"].to_pylist():
        yield from read(number)


def _by_key(
    rows: pa.Table, kernel: Callable[..., pa.Table], shared: Call
) -> Iterator[pa.Table]:
    """What `exchange` yields of the rows of one task, of no, one or several partitions."""
    values, of = _partitions(rows)
    for value in values:
        yield kernel(*map(fetch, shared), value, of(value))


def _partitions(rows: pa.Table) -> tuple[list[int], Callable[[int], pa.Table]]:
    """The partitions that rows are of, and what gives the rows of one, without KEY."""
    key = rows[KEY].to_numpy()
    values, rest = np.flatnonzero(np.bincount(key)).tolist(), rows.drop_columns([KEY])
    return (
        values,
        lambda value: rest if len(values) == 1 else rest.filter(pa.array(key == value)),
    )


def _join(tables: Iterable[pa.Table]) -> pa.Table:
    return pa.concat_tables(list(tables)).combine_chunks()


def _in_threads(work: Callable[[Any], Any], calls: Iterable[Any]) -> Iterator[Any]:
    """`work(call)` of every call, in order: sorting, gathering and writing leave other threads the processor."""
    with ThreadPoolExecutor(THREADS) as pool:
        yield from pool.map(work, calls)


def fetch(shared: Shared) -> Any:
    """What `Engine.put` was given."""
    import ray

    return ray.get(shared) if isinstance(shared, ray.ObjectRef) else shared


def _name(function: Callable[..., Any]) -> str:
    while isinstance(function, partial):
        function = function.func
    kind = function if isinstance(function, FunctionType) else type(function)
    return kind.__name__.strip("_")


def _named(
    work: Callable[..., Any], function: Callable[..., Any]
) -> Callable[..., Any]:
    """`work` under the name of the function that it runs, which is what the dashboard and the stats show."""

    def named(rows: pa.Table, *arguments: Any) -> Any:
        return work(rows, *arguments)

    named.__name__ = _name(function)
    return named
