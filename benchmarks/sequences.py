"""Paired timings of the sequence step and of bare polars on the same log.

    python -m benchmarks sequences

The log is simulated and written once, as Parquet in time order. Both variants read it,
sort by user and time, index the items, build every list column with requests, histories
and a temporal split, and write Parquet; a test checks that the rows are equal.
`trieline` calls the functions of jobs.prepare with the shuffle, so it also drops
duplicates, writes an events table, checks that each user is in one part, and commits
with hashes. `polars` is one process with the whole log in memory, on all cores.

The time is from the first read to the last byte written, without imports and the start
of Ray. Peak memory is the sum over all processes of the variant, including Ray's, with
shared pages counted once. A run that fails, as polars does if the log exceeds the
memory, is a line with an `error`.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from benchmarks.harness import Row, make_row, run_module
from pipelines.data.prepare import prepare
from pipelines.data.prepare_config import PrepareConfig
from pipelines.data.reading.log import parse_log
from pipelines.data.sequences.splits import SplitConfig
from pipelines.data.simulation import Settings, draw_interactions, write_log
from pipelines.ray_inside import SHUFFLE_ENV

EVENTS_PER_USER = 20
EVENTS_PER_ITEM = 400
SPLIT = SplitConfig("temporal")
SIZES = (1_000_000, 5_000_000, 20_000_000)

LOG: dict[str, Any] = {
    "files": "events-*.parquet",
    "user": "user_id",
    "item": "item_id",
    "time": {"column": "timestamp_ms", "unit": "ms"},
}
"""Mapping of the simulated log."""


def run_trieline(log: str, output: str) -> None:
    """Write all tables of the log with the functions of jobs.prepare."""
    config = PrepareConfig(core=0, split=SPLIT)
    prepare(
        parse_log(LOG),
        log,
        output,
        config,
        existing="overwrite",
        report=lambda line: None,
    )


def run_polars(log: str, output: str) -> None:
    """Write one Parquet file of sequences with polars alone."""
    frame = pl.read_parquet(f"{log}/events-*.parquet")
    items = (
        frame.select("item_id").unique().sort("item_id").with_row_index("item_index")
    )
    last_row = max(frame.height - 1, 1)
    train_and_val_share = 1 - SPLIT.test_fraction
    train_share = train_and_val_share - SPLIT.val_fraction
    val_start, test_start = (
        frame["timestamp_ms"].quantile(
            (int(frame.height * share) + 0.5) / last_row, "lower"
        )
        for share in (train_share, train_and_val_share)
    )
    user = pl.col("user_id")
    stamp = pl.col("timestamp_ms")
    row = pl.int_range(pl.len(), dtype=pl.Int32)
    new_user = (user != user.shift(1)).fill_null(True)
    new_time = new_user | (stamp != stamp.shift(1)).fill_null(True)

    def first_row(starts: pl.Expr) -> pl.Expr:
        """Return the row number at which the group of each row starts."""
        return pl.when(starts).then(row).forward_fill()

    sequences = (
        frame.lazy()
        .join(
            items.lazy().with_columns(pl.col("item_index").cast(pl.Int32)), on="item_id"
        )
        .sort("user_id", "timestamp_ms", "item_id")
        .with_columns(
            (first_row(new_time) - first_row(new_user)).alias("history_end"),
            pl.when(stamp < val_start)
            .then(pl.lit("train"))
            .when(stamp < test_start)
            .then(pl.lit("val"))
            .otherwise(pl.lit("test"))
            .alias("split"),
            pl.lit(None, dtype=pl.String).alias("query"),
            pl.concat_list("item_index").alias("candidates"),
        )
        .group_by("user_id", maintain_order=True)
        .agg(
            "item_index",
            "timestamp_ms",
            "query",
            pl.struct(
                "timestamp_ms", "query", "history_end", "split", "candidates"
            ).alias("requests"),
        )
    )
    Path(output).mkdir(parents=True, exist_ok=True)
    sequences.collect().write_parquet(
        f"{output}/sequences.parquet", compression="zstd", compression_level=1
    )


VARIANTS: dict[str, Callable[[str, str], None]] = {
    "trieline": run_trieline,
    "polars": run_polars,
}


def sequences(
    sizes: Sequence[int] = SIZES, runs: int = 5, store_mb: int | None = None
) -> Iterator[Row]:
    """Yield a row per size and variant.

    Args:
        sizes: Numbers of events.
        runs: Timings per variant.
        store_mb: Size of Ray's object store in MiB; None for Ray's default.
    """
    with tempfile.TemporaryDirectory(prefix="trieline-benchmark-") as folder:
        for events in sizes:
            log = f"{folder}/log-{events}"
            users = max(1, events // EVENTS_PER_USER)
            items = max(8, events // EVENTS_PER_ITEM)
            settings = Settings(users, items, events)
            write_log(log, "retrieval", settings, draw_interactions)
            params = {
                "events": events,
                "users": users,
                "items": items,
                "cpus": os.cpu_count(),
                "store_mb": store_mb,
            }
            results: dict[str, list[Row]] = {variant: [] for variant in VARIANTS}
            store = [store_mb] if store_mb else []
            for _ in range(runs):
                for variant, rows in results.items():
                    output = f"{folder}/{variant}"
                    rows.append(
                        run_module("benchmarks.sequences", variant, log, output, *store)
                    )
            for variant, rows in results.items():
                yield summarize_runs(variant, params, rows, events)


def summarize_runs(
    variant: str, params: Row, rows: Sequence[Row], num_events: int
) -> Row:
    """Return the row of a variant, or its first error.

    Args:
        variant: Name of the variant.
        params: Settings of the benchmark.
        rows: Result of each run, from `run_module`.
        num_events: Number of events of the log.
    """
    errors = [row["error"] for row in rows if "error" in row]
    if errors:
        return {
            "benchmark": "sequences",
            "variant": variant,
            "params": params,
            "error": errors[0],
        }
    return make_row(
        "sequences",
        variant,
        params,
        [row["seconds"] for row in rows],
        num_events,
        peak_memory_mb=max(row["peak_memory_mb"] for row in rows),
        cpu_s=statistics.median(row["cpu_s"] for row in rows),
    )


def time_variant(variant: str, log: str, output: str, store_mb: str = "0") -> float:
    """Time a variant in this process.

    Args:
        variant: Name in `VARIANTS`.
        log: Folder of the simulated log.
        output: Folder for the result.
        store_mb: Size of Ray's object store in MiB, as a command-line argument; `0` for
            Ray's default.

    Returns:
        Duration in seconds, without the start of Ray.
    """
    if variant == "trieline":
        import ray

        options: dict[str, Any] = {
            "object_store_memory": int(store_mb) << 20 or None,
            "runtime_env": SHUFFLE_ENV,
        }
        ray.init(
            address="local",
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
            **options,
        )
    start_s = time.perf_counter()
    VARIANTS[variant](log, output)
    return time.perf_counter() - start_s


if __name__ == "__main__":
    print(json.dumps({"seconds": time_variant(*sys.argv[1:])}))
