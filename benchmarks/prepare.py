"""Time jobs.prepare, in process and on Ray, and polars alone on the same log, in turn.

    python -m benchmarks prepare --events "[1000000, 5000000]" --runs 3

The log is Parquet in time order, with 20 events per user and 400 per item. Both
commands sort by user and time, index the items, build every list column with requests
and histories, and write Parquet; a test checks that the rows are equal. jobs.prepare
also splits the requests by time, drops duplicates, writes events and texts of items,
and commits with hashes; polars has the whole log in memory.

The time is that of the whole command. Processor time and peak memory are sums over all
processes, Ray's included, with shared pages counted once.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress

import polars as pl
import psutil

from benchmarks.harness import Line

SOURCE = "jobs/configs/sources/simulated.yaml"


def prepare(
    events: Sequence[int] = (1_000_000, 5_000_000), runs: int = 3
) -> Iterator[Line]:
    """Yield a line per variant of two sizes, then its fixed and per-event cost."""
    costs: dict[str, list[float]] = defaultdict(list)
    for size in events:
        usages: dict[str, list[Line]] = defaultdict(list)
        with tempfile.TemporaryDirectory(prefix="trieline-benchmark-") as folder:
            log = f"{folder}/log"
            sizes = f"--users {size // 20} --items {size // 400} --events {size}"
            run_module(f"jobs.simulate {sizes} --output {log}")
            job = f"jobs.prepare --source {SOURCE} --input {log} --output {folder}"
            commands = {
                "trieline": f"{job}/alone --overwrite",
                "ray": f"{job}/ray --overwrite --partitions {2 + size // 900_000}",
                "polars": f"benchmarks.prepare {log} {folder}/polars",
            }
            for name, command in [*commands.items()] * runs:
                usages[name].append(run_module(command))
        for name, measured in usages.items():
            medians = {
                key: statistics.median(usage[key] for usage in measured)
                for key in ("seconds", "cpu_s", "peak_mb")
            }
            costs[name].append(medians["cpu_s"])
            yield {"variant": name, "events": size, **medians}
    for name, (before, last) in costs.items():
        per_event = (last - before) / (events[-1] - events[-2])
        fixed = last - per_event * events[-1]
        yield {"variant": name, "cpu_s_per_event": per_event, "fixed_cpu_s": fixed}


def run_module(command: str) -> Line:
    """Run a module, and return its seconds, processor time and peak memory in MiB."""
    cpu_s: dict[int, float] = {}
    peak = 0.0
    start_s = time.perf_counter()
    words = [sys.executable, "-m", *command.split()]
    process = subprocess.Popen(words, stdout=sys.stderr)
    while process.poll() is None:
        with suppress(psutil.Error):  # a process has ended
            parent = psutil.Process(process.pid)
            tree = [parent, *parent.children(recursive=True)]
            cpu_s |= {one.pid: sum(one.cpu_times()[:2]) for one in tree}
            # PSS divides shared pages among their processes
            peak = max(peak, sum(one.memory_full_info().pss for one in tree))
        time.sleep(0.25)
    assert not process.returncode, words
    seconds = time.perf_counter() - start_s
    return {"seconds": seconds, "cpu_s": sum(cpu_s.values()), "peak_mb": peak / 2**20}


def run_polars(log: str, output: str) -> None:
    """Write one Parquet file of sequences with polars alone."""
    frame = pl.read_parquet(f"{log}/events-*.parquet")
    items = frame.select("item_id").unique().sort("item_id").with_row_index("index")
    user, stamp = pl.col("user_id"), pl.col("timestamp_ms")
    is_new_user = user.ne_missing(user.shift(1))
    is_new_time = is_new_user | stamp.ne_missing(stamp.shift(1))
    # row number at which the time and the user of each row start
    time_row, user_row = (
        pl.when(is_new).then(pl.int_range(pl.len(), dtype=pl.Int32)).forward_fill()
        for is_new in (is_new_time, is_new_user)
    )
    requests = pl.struct("timestamp_ms", "query", "history_end", "candidates")
    sequences = (
        frame.lazy()
        .join(items.lazy(), on="item_id")
        .sort("user_id", "timestamp_ms", "item_id")
        .with_columns(
            pl.col("index").cast(pl.Int32).alias("item_index"),
            history_end=time_row - user_row,
            query=pl.lit(None, pl.String),
        )
        .with_columns(candidates=pl.concat_list("item_index"))
        .group_by("user_id", maintain_order=True)
        .agg("item_index", "timestamp_ms", "query", requests=requests)
    )
    sequences.collect().write_parquet(
        f"{output}/sequences.parquet",
        compression="zstd",
        compression_level=1,
        mkdir=True,
    )


if __name__ == "__main__":
    run_polars(*sys.argv[1:])
