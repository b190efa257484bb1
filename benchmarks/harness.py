"""Paired timings, peaks of memory, and JSON lines for all benchmarks.

Variants are timed in turn within one run (A B C A B C ...), so that their ratios hold
on a noisy machine. There is one JSON line per variant and setting: benchmark, variant,
params, runs, median_s, min_s, max_s, items_per_s, peak_memory_mb.

A benchmark has a function `make(variant, params)` that builds the variant, warms it up,
and returns its call, a function of the number of the run.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TypeVar

import psutil
import torch

from models.training.memory import resident_peak_mb

Row = dict[str, Any]
Call = Callable[[int], Any]
T = TypeVar("T")


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name() -> str:
    return torch.cuda.get_device_name() if device().type == "cuda" else "cpu"


def wait_for_device() -> None:
    if device().type == "cuda":
        torch.cuda.synchronize()


def in_fresh_process(function: Callable[..., T], *arguments: Any) -> T:
    """Run a function in a fresh process, so that variants do not share memory."""
    with ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        return pool.submit(function, *arguments).result()


def peak_memory(
    make: Callable[[str, Row], Call],
    first: tuple[str, Row],
    variant: str,
    settings: Sequence[Row],
) -> list[float]:
    """Measure the peak memory of calls of a variant, without the built variant.

    Call it in a process of its own. On a CPU the peak of a process never falls, so the
    peak of a setting includes those of the settings before it.

    Args:
        make: Builds a variant.
        first: Variant and params that are built before.
        variant: Variant to measure.
        settings: Params of the variant.

    Returns:
        Peak of each setting in MB.
    """
    make(*first)
    before = resident_peak_mb()
    peaks = []
    for params in settings:
        call = make(variant, params)
        last_run = params["runs"] - 1
        if device().type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            allocated = torch.cuda.memory_allocated()
            call(last_run)
            peaks.append((torch.cuda.max_memory_allocated() - allocated) / 2**20)
        else:
            call(last_run)
            # the counts of the system may be off by pages
            peaks.append(max(0.0, resident_peak_mb() - before))
    return peaks


def time_in_turns(
    benchmark: str,
    calls: dict[str, Call],
    params: Row,
    items: int,
    memory: dict[str, float] | None = None,
    parts: dict[str, tuple[str, Call]] | None = None,
) -> Iterator[Row]:
    """Time each variant once per run, in turn, and yield a row per variant.

    Args:
        benchmark: Name of the benchmark.
        calls: Call of each variant.
        params: Settings, with the number of `runs`.
        items: Items that one call processes.
        memory: Peak memory of each variant in MB.
        parts: Name and call of the first part of variants, which is timed too. Rows
            then have `encode_s` for the part, and `decode_s`, the median of the rest.
    """
    parts = parts or {}
    part_calls = dict(parts.values())
    seconds: dict[str, list[float]] = {name: [] for name in [*part_calls, *calls]}
    for run in range(params["runs"]):
        for name, call in {**part_calls, **calls}.items():
            wait_for_device()
            begin = time.perf_counter()
            call(run)
            wait_for_device()
            seconds[name].append(time.perf_counter() - begin)
            print(
                f"{benchmark} {name} run {run + 1}: {seconds[name][-1]:.3f} s",
                file=sys.stderr,
                flush=True,
            )
    for variant in calls:
        times, more = seconds[variant], {}
        if variant in parts:
            part_times = seconds[parts[variant][0]]
            rest = [t - part for t, part in zip(times, part_times, strict=True)]
            more = {
                "encode_s": round(statistics.median(part_times), 5),
                "decode_s": round(statistics.median(rest), 5),
            }
        if memory:
            more["peak_memory_mb"] = round(memory[variant], 1)
        yield row(benchmark, variant, params, times, items, **more)


def row(
    benchmark: str,
    variant: str,
    params: Row,
    seconds: Sequence[float],
    items: int,
    **more: Any,
) -> Row:
    """Return the row of a variant from the seconds of its runs."""
    median = statistics.median(seconds)
    return {
        "benchmark": benchmark,
        "variant": variant,
        "params": {k: v for k, v in params.items() if k != "runs"},
        "runs": len(seconds),
        "median_s": round(median, 5),
        "min_s": round(min(seconds), 5),
        "max_s": round(max(seconds), 5),
        "items_per_s": round(items / median, 2),
        **more,
    }


def sample_usage(pid: int, cpu_seconds: dict[int, float]) -> float:
    """Return the memory in MB of a process and its children, and update their processor times.

    Args:
        pid: Id of the process.
        cpu_seconds: Processor time in seconds by process id, updated in place.
    """
    memory_bytes = 0
    with suppress(psutil.Error):
        parent = psutil.Process(pid)
        for process in [parent, *parent.children(recursive=True)]:
            with suppress(psutil.Error, OSError):
                times = process.cpu_times()
                cpu_seconds[process.pid] = times.user + times.system
                memory = process.memory_full_info()._asdict()
                # on Linux PSS counts shared pages once
                memory_bytes += memory.get("pss", memory["rss"])
    return memory_bytes / 2**20


def run_module(module: str, *arguments: Any) -> Row:
    """Run `python -m module arguments` and measure its processor time and memory.

    Returns:
        The last line of its output, which is JSON, or its `error`; with `cpu_s` and
        `peak_memory_mb` of all its processes.
    """
    command = [sys.executable, "-m", module, *map(str, arguments)]
    settings = {
        "RAY_AUTH_MODE": "token",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # a local Ray is for its user only
        "RAY_raylet_start_wait_time_s": "180",  # Ray starts slowly on a busy machine
        "RAY_worker_niceness": "0",  # by default Ray's workers have a low priority
    }
    cpu_seconds: dict[int, float] = {}
    peak = 0.0
    # files, since a process that fills a pipe waits for its reader
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command, env={**os.environ, **settings}, stdout=out, stderr=err
        )
        while process.poll() is None:
            peak = max(peak, sample_usage(process.pid, cpu_seconds))
            time.sleep(0.25)
        out.seek(0)
        err.seek(0)
        output, errors = out.read(), err.read()
    usage = {
        "cpu_s": round(sum(cpu_seconds.values()), 2),
        "peak_memory_mb": round(peak),
    }
    if process.returncode < 0:
        return {**usage, "error": "killed, possibly out of memory"}
    if process.returncode:
        lines = errors.strip().splitlines() or ["no error output"]
        return {**usage, "error": lines[-1][:300]}
    return {**usage, **json.loads(output.splitlines()[-1])}


def describe_origin() -> Row:
    """Return the command, the processor or GPU, and the commit."""
    name = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(
            line.split(":", 1)[1].strip()
            for line in lines
            if line.startswith("model name")
        )
    gpu = "" if device().type == "cpu" else f"{device_name()}; "
    here = Path(__file__).parent
    git = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "command": f"python -m benchmarks {' '.join(sys.argv[1:])}",
        "hardware": f"{gpu}{name}, {os.cpu_count()} cores",
        "commit": git.stdout.strip(),
    }


def write_rows(
    rows: Iterable[Row], file: IO[str] | None, more: Row | None = None
) -> list[Row]:
    """Print rows, completed by `more`, as JSON lines, and write them to a file."""
    written = []
    for row in rows:
        complete = {**row, **(more or {})}
        line = json.dumps(complete)
        print(line, flush=True)
        if file:
            print(line, file=file, flush=True)
        written.append(complete)
    return written
