"""Ray Data as the steps of prepare use it, for `python -m jobs.prepare`.

    each(function, calls)              read (a row per call) -> map_batches(function)
    exchange(reads, count, kernel)     read -> repartition(count, keys) -> map_batches(kernel)

Kernels work on whole partitions with polars, numpy and Arrow, write their parts themselves, and give rows back: what
the driver commits and adds up. Stats, backpressure, spilling and the retries of lost tasks are Ray Data's. What matters
of its settings (measured on 20 million events, see docs/scale.md) is in `context`, and two things more: a local Ray
and all tasks have the environment of the shuffle's own (`WORKERS`), so that they run in the same processes, and
`kernel` has no `concurrency`, so that it fuses into the tasks that gather the shards of a partition.
"""

from __future__ import annotations

import base64
import logging
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import ray
import ray.data
from ray.data import DataContext, Datasource, ReadTask
from ray.data._internal.execution.execution_callback import ExecutionCallback
from ray.data.block import BlockMetadata

from models.tables import UserError
from pipelines.data.ray_data_config import WORKERS, RayDataConfig
from pipelines.faults import user_error_in

SHARD_BYTES = 128 << 10
"""Ray keeps objects below 100 KiB in the driver's own memory: a map task has at least these for each partition."""

KEY = "__partition"
"""Column of what is exchanged: the key of the row's partition, of `partition_keys`, or TALLY."""

TALLY = -1
"""Key of the rows that tell what was read beside the rows themselves."""

SILENCE = 60.0
"""Seconds without the end of a task after which that is said."""

RETRIES = "\nFailed to apply"
"""What Ray Data adds to the words of an error."""

Call = tuple[Any, ...]
Shared = Any
"""What `Engine.put` gave: a reference to what all tasks read, or the thing itself; `fetch` gives the thing."""
Read = Callable[[], Iterator[pa.Table]]
Progress = Callable[[int], None]


def quiet_ray_data() -> None:
    """Keeps what Ray Data says of its progress off the terminal, where jobs say how far they are; errors are raised."""
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    DataContext.get_current().enable_progress_bars = False


class _Watch(ExecutionCallback):
    """Tells `listener` how many rows the reads have given, while they run; and says where nothing ends for long, as
    where another job holds all CPUs."""

    listener: Progress | None = None

    def __init__(self) -> None:
        self.rows = 0
        self.ended, self.told = -1, time.monotonic()

    def on_execution_step(self, executor: Any) -> None:
        self.say_what_is_waited_for(sum(op.metrics.num_tasks_finished for op in executor._topology))
        of_reads = [op.metrics for op in executor._topology if op.name.startswith("Read")]
        rows = sum(metrics.rows_task_outputs_generated - metrics.num_tasks_finished for metrics in of_reads)
        if _Watch.listener is not None and rows > self.rows:  # each read ends with a tally
            self.rows = rows
            _Watch.listener(rows)

    def say_what_is_waited_for(self, ended: int) -> None:
        now = time.monotonic()
        if ended != self.ended:
            self.ended, self.told = ended, now
        elif now - self.told >= SILENCE:
            self.told = now
            free, all_ = (found.get("CPU", 0) for found in (ray.available_resources(), ray.cluster_resources()))
            print(f"no task has ended for {SILENCE:.0f} s; {free:g} of the cluster's {all_:g} CPUs are free "
                  f"(ray status says what holds them)", flush=True)  # fmt: skip


class Engine:
    """How one run of prepare uses Ray Data, and what Ray Data says of what it ran."""

    def __init__(self, settings: RayDataConfig | None = None, here: bool = False) -> None:
        """here: whether this process runs the kernels itself, one after the other, without Ray: for a log of one
        partition, which processes of Ray would take longer to start for than to make."""
        self.settings, self.here = settings or RayDataConfig(), here
        self.stats: list[str] = []
        """`Dataset.stats()` of all that ran since `take_stats`."""

    def put(self, value: Any) -> Shared:
        """`value` where all tasks can read it."""
        return value if self.here else ray.put(value)

    def take_stats(self) -> str:
        """What Ray Data says of all that ran since the last call, for a manifest's timings."""
        said, self.stats = "\n".join(self.stats), []
        return "made by the driver alone" if self.here else said

    def context(self, partitions: int | None = None) -> DataContext:
        """The settings of an execution; partitions: those of its exchange, None without."""
        quiet_ray_data()
        context = DataContext.get_current().copy()
        context.shuffle_strategy = "shuffle_v2"
        several = len([node for node in ray.nodes() if node["Alive"]]) > 1
        auto = "lz4" if several else "none"
        context.shuffle_compression = auto if self.settings.compression == "auto" else self.settings.compression
        # Ray's default of 1 GiB leaves a log of 20 million events to one task
        batch = max(self.settings.shuffle_batch_mb << 20, (partitions or 1) * SHARD_BYTES)
        context.shuffle_input_batch_bytes = batch
        # None: what one call gives stays one block, so that no user is cut in two
        context.target_max_block_size = batch if partitions else None
        context.custom_execution_callback_classes = [_Watch]
        return context

    def each(self, function: Callable[..., Any], calls: Iterable[Call], shared: Call = ()) -> Iterator[tuple[int, Any]]:
        """Runs `function(*shared, *call)` for every call as a task; yields (number of the call, result) as they end.
        References in `shared` are given as what they refer to."""
        if self.here:
            for number, call in enumerate(calls):
                yield number, function(*_given(shared), *call)
            return
        tasks = [partial(_one_row, number, call) for number, call in enumerate(calls)]
        if not tasks:
            return
        with DataContext.current(self.context()):
            rows = _read("Parts", tasks).map_batches(
                _named(_run, function),
                fn_args=(function, shared),
                batch_size=None,
                batch_format="pyarrow",
                runtime_env=WORKERS,
            )
        yield from self._results(rows)

    def kept(
        self, function: Callable[..., pa.Table], calls: Iterable[Call], shared: Call = ()
    ) -> ray.data.Dataset | list[pa.Table]:
        """What `function(*shared, *call)` gives for every call, a block each, in the object store; for `over`."""
        if self.here:
            return [function(*_given(shared), *call) for call in calls]
        tasks = [partial(_one_row, number, call) for number, call in enumerate(calls)]
        with DataContext.current(self.context()):
            rows = _read("Parts", tasks).map_batches(
                _named(_tables, function),
                fn_args=(function, shared),
                batch_size=None,
                batch_format="pyarrow",
                runtime_env=WORKERS,
            )
        kept = rows.materialize()
        self.stats.append(kept.stats())
        return kept

    def over(
        self, kept: ray.data.Dataset | list[pa.Table], function: Callable[..., pa.Table], arguments: Call
    ) -> Iterator[pa.Table]:
        """`function(block, *arguments)` of every block of `kept`, as they end."""
        if isinstance(kept, list):
            yield from (function(block, *arguments) for block in kept)
            return
        rows = kept.map_batches(
            _named(function, function),
            fn_args=arguments,
            batch_size=None,
            batch_format="pyarrow",
            runtime_env=WORKERS,
        )
        yield from _batches(rows)
        self.stats.append(rows.stats())

    def exchange(
        self,
        reads: Sequence[Read],
        partitions: int,
        kernel: Callable[..., Any],
        shared: Call = (),
        carrier: str = "",
        progress: Progress | None = None,
        at_once: bool | None = None,
        first: tuple[int, Callable[[pa.Table], pa.Table]] | None = None,
    ) -> Iterator[tuple[int, Any]]:
        """Brings rows of one key together: yields (key, `kernel(*shared, key, rows)`) for every partition that has
        some, and (TALLY, tally) for every tally.

        The reads give tables of one schema with KEY, and tallies as rows of `tally_row` with `carrier`. What is read
        `at_once`, by default one partition, needs no exchange: one task does everything. progress: takes the rows read
        so far. first: the number of partitions of an exchange before, and what it makes of each: rows with the KEY that
        they go on to.
        """
        at_once = partitions == 1 if at_once is None else at_once
        if self.here:
            for row in _all_at_once(list(reads), first[1] if first else None, kernel, shared, carrier):
                yield from _results_of(row)
            return
        with DataContext.current(self.context(max(partitions, first[0] if first else 1))):
            if at_once:
                task = partial(_all_at_once, list(reads), first[1] if first else None, kernel, shared, carrier)
                rows = _read("Log", [task])
            else:
                rows = _read("Log", list(reads))
                if first:
                    rows = rows.repartition(first[0], keys=[KEY])
                    rows = rows.map_batches(_named(first[1], first[1]), batch_size=None, batch_format="pyarrow")
                rows = rows.repartition(partitions, keys=[KEY]).map_batches(
                    _named(_by_key, kernel), fn_args=(kernel, shared, carrier), batch_size=None, batch_format="pyarrow"
                )
        _Watch.listener = progress
        try:
            yield from self._results(rows)
        finally:
            _Watch.listener = None

    def _results(self, rows: ray.data.Dataset) -> Iterator[tuple[int, Any]]:
        """The rows of `_row`, as they come; a UserError of a task as it was raised there, in one line."""
        try:
            for batch in _batches(rows):
                yield from _results_of(batch)
        except Exception as error:
            if known := user_error_in(error):
                raise UserError(str(known).partition(RETRIES)[0]) from None
            raise
        self.stats.append(rows.stats())


class _Tasks(Datasource):
    """One read task for each function that yields tables. Ray's own reader of Parquet would start a pool of tasks for
    footers and pack several files into one task."""

    def __init__(self, name: str, tasks: Sequence[Read]) -> None:
        super().__init__()
        self.name, self.tasks = name, tasks

    def get_name(self) -> str:
        return self.name

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:
        nothing = BlockMetadata(num_rows=None, size_bytes=None, exec_stats=None, input_files=None)
        return [ReadTask(task, nothing) for task in self.tasks]


def _read(name: str, tasks: Sequence[Read]) -> ray.data.Dataset:
    return ray.data.read_datasource(_Tasks(name, tasks), override_num_blocks=len(tasks), runtime_env=WORKERS)


def _batches(rows: ray.data.Dataset) -> Iterator[pa.Table]:
    """The blocks, as they are made."""
    return iter(rows.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0))  # type: ignore[arg-type]


def _row(number: int, result: Any) -> pa.Table:
    content = pa.array([pickle.dumps(result, protocol=5)], pa.large_binary())
    return pa.table({"number": pa.array([number], pa.int64()), "result": content})


def _results_of(rows: pa.Table) -> Iterator[tuple[int, Any]]:
    """What `_row` was given."""
    for number, result in zip(rows["number"].to_pylist(), rows["result"], strict=True):
        yield number, pickle.loads(result.as_buffer())


def _one_row(number: int, call: Call) -> Iterator[pa.Table]:
    yield _row(number, call)


def _named(work: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """`work` under the name of the function that it runs, which is what the dashboard and the stats show."""

    def named(rows: pa.Table, *arguments: Any) -> Any:
        return work(rows, *arguments)

    while isinstance(function, partial):
        function = function.func
    kind = function if isinstance(function, FunctionType) else type(function)
    named.__name__ = kind.__name__.strip("_")
    return named


def fetch(shared: Shared) -> Any:
    """What `Engine.put` was given."""
    return ray.get(shared) if isinstance(shared, ray.ObjectRef) else shared


def _given(shared: Call) -> Call:
    return tuple(map(fetch, shared))


def _run(calls: pa.Table, function: Callable[..., Any], shared: Call) -> Iterator[pa.Table]:
    for number, call in zip(calls["number"].to_pylist(), calls["result"], strict=True):
        yield _row(number, function(*_given(shared), *pickle.loads(call.as_buffer())))


def _tables(calls: pa.Table, function: Callable[..., pa.Table], shared: Call) -> Iterator[pa.Table]:
    for call in calls["result"]:
        yield function(*_given(shared), *pickle.loads(call.as_buffer()))


def _by_key(rows: pa.Table, kernel: Callable[..., Any], shared: Call, carrier: str) -> Iterator[pa.Table]:
    """What `exchange` yields of the rows of one task, which are of one partition, and tallies."""
    if not rows.num_rows:
        return
    key = rows[KEY].to_numpy()
    values = pl.Series(key).unique().sort().to_list()
    for value in values:
        mine = rows if len(values) == 1 else rows.filter(pa.array(key == value))
        if value == TALLY:
            for tally in mine[carrier].to_pylist():
                yield _row(TALLY, pickle.loads(base64.b64decode(tally)))
        else:
            yield _row(value, kernel(*_given(shared), value, mine.drop_columns([KEY])))


def _all_at_once(
    reads: list[Read],
    first: Callable[[pa.Table], pa.Table] | None,
    kernel: Callable[..., Any],
    shared: Call,
    carrier: str,
) -> Iterator[pa.Table]:
    tables = [table for read in reads for table in read()]
    if tables:
        rows = pa.concat_tables(tables).combine_chunks()
        yield from _by_key(first(rows) if first else rows, kernel, shared, carrier)


def partition_keys(partitions: int) -> np.ndarray:
    """(partitions,) int32 keys that Ray's hash of a row puts into a partition each. Should another Ray hash otherwise,
    some tasks would have several partitions and others none, with the same results."""
    if partitions == 1:
        return np.zeros(1, dtype=np.int32)
    found = np.zeros(0, dtype=np.int32)
    tried = 16 * partitions
    while len(found) < partitions:
        tried *= 2
        keys = np.arange(tried, dtype=np.int32)
        place = pl.DataFrame({KEY: keys}).hash_rows(seed=0).to_numpy() % np.uint64(partitions)
        found = np.unique(place, return_index=True)[1].astype(np.int32)
    return found


def tally_row(schema: pa.Schema, carrier: str, tally: Any) -> pa.Table:
    """A row of the schema, with KEY, that brings a tally to the driver: as text in the string column `carrier`."""
    values = {KEY: TALLY, carrier: base64.b64encode(pickle.dumps(tally)).decode()}
    return pa.table([pa.array([values.get(field.name)], field.type) for field in schema], schema=schema)
