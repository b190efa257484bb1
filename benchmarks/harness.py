"""Time variants in pairs, measure peak memory, and write JSON lines.

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
    """Return the GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name() -> str:
    """Return the name of the GPU, or `cpu`."""
    return torch.cuda.get_device_name() if device().type == "cuda" else "cpu"


def wait_for_device() -> None:
    """Wait until the GPU has finished all submitted work."""
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
    """Return the peak memory of a variant's calls, less the memory before the calls.

    Call this function in a new process. On a CPU the peak of a process never falls, so
    each peak is at least the peak of the earlier settings.

    Args:
        make: Function that builds a variant and returns its call.
        first: Variant and params that are built before the measurement starts.
        variant: Variant to measure.
        settings: Params of the variant, one per measurement.

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
            # The kernel's counters are exact to a few pages only.
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
        items: Number of items that one call processes.
        memory: Peak memory of each variant in MB.
        parts: Name and call of the encoder of each variant, which is timed as well.
            Rows then have the medians `encode_s` of the encoder and `decode_s` of the
            remaining time.
    """
    parts = parts or {}
    part_calls = dict(parts.values())
    seconds: dict[str, list[float]] = {name: [] for name in [*part_calls, *calls]}
    for run in range(params["runs"]):
        for name, call in {**part_calls, **calls}.items():
            wait_for_device()
            start_s = time.perf_counter()
            call(run)
            wait_for_device()
            seconds[name].append(time.perf_counter() - start_s)
            print(
                f"{benchmark} {name} run {run + 1}: {seconds[name][-1]:.3f} s",
                file=sys.stderr,
                flush=True,
            )
    for variant in calls:
        times = seconds[variant]
        measures = {}
        if variant in parts:
            encode_times = seconds[parts[variant][0]]
            decode_times = [
                total - encode
                for total, encode in zip(times, encode_times, strict=True)
            ]
            measures = {
                "encode_s": round(statistics.median(encode_times), 5),
                "decode_s": round(statistics.median(decode_times), 5),
            }
        if memory:
            measures["peak_memory_mb"] = round(memory[variant], 1)
        yield make_row(benchmark, variant, params, times, items, **measures)


def make_row(
    benchmark: str,
    variant: str,
    params: Row,
    seconds: Sequence[float],
    items: int,
    **measures: Any,
) -> Row:
    """Return the row of a variant.

    Args:
        benchmark: Name of the benchmark.
        variant: Name of the variant.
        params: Settings of the benchmark.
        seconds: Time of each run.
        items: Number of items that one run processes.
        **measures: Further columns of the row.
    """
    median = statistics.median(seconds)
    return {
        "benchmark": benchmark,
        "variant": variant,
        "params": {name: value for name, value in params.items() if name != "runs"},
        "runs": len(seconds),
        "median_s": round(median, 5),
        "min_s": round(min(seconds), 5),
        "max_s": round(max(seconds), 5),
        "items_per_s": round(items / median, 2),
        **measures,
    }


def sample_usage(pid: int, cpu_seconds: dict[int, float]) -> float:
    """Return the memory in MB of a process and its children.

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
                # PSS, on Linux, divides shared pages among their processes.
                memory_bytes += memory.get("pss", memory["rss"])
    return memory_bytes / 2**20


def run_module(module: str, *arguments: Any) -> Row:
    """Run `python -m module arguments`, and measure its processor time and memory.

    Returns:
        The values of the last line of its output, a JSON object, or the last line of
        stderr as `error`; also `cpu_s` and `peak_memory_mb` of all its processes.
    """
    command = [sys.executable, "-m", module, *map(str, arguments)]
    settings = {
        "RAY_AUTH_MODE": "token",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # listen on 127.0.0.1 only
        "RAY_raylet_start_wait_time_s": "180",  # Ray starts slowly on a busy machine
        "RAY_worker_niceness": "0",  # by default Ray's workers have a low priority
    }
    cpu_seconds: dict[int, float] = {}
    peak = 0.0
    # A process that fills a pipe would wait for a reader; files do not block.
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
    """Return the command line, the hardware and the commit of this run."""
    name = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(
            line.split(":", 1)[1].strip()
            for line in lines
            if line.startswith("model name")
        )
    gpu = "" if device().type == "cpu" else f"{device_name()}; "
    git = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=Path(__file__).parent,
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
    rows: Iterable[Row], file: IO[str] | None, origin: Row | None = None
) -> list[Row]:
    """Print rows as JSON lines, and write them to a file.

    Args:
        rows: Rows of a benchmark.
        file: Open file, or None to print only.
        origin: Values that are added to each row, such as the commit.

    Returns:
        The complete rows.
    """
    written = []
    for row in rows:
        complete = {**row, **(origin or {})}
        line = json.dumps(complete)
        print(line, flush=True)
        if file:
            print(line, file=file, flush=True)
        written.append(complete)
    return written
