"""Paired timings, peak memory and JSON lines for all benchmarks.

Variants are timed in turn within one run (A B C A B C ...), so that their ratios hold
on a noisy machine. One JSON line per variant and setting: benchmark, variant, params,
runs, median_s, min_s, max_s, items_per_s, peak_memory_mb.

A benchmark gives `make(variant, params)`, which builds and warms up a variant and
returns a call that takes the number of a run.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
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
    """Run the function in a fresh process, so that no variant profits from another's
    memory.
    """
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
    """Return the peak memory in MB of a call of the variant, for each setting.

    Memory of the variant itself is not included. Call it in a process of its own: on a
    CPU a process's peak never falls, so a setting's value includes the settings before
    it.

    Args:
        first: Variant and params of a small call that is made before.
    """
    make(*first)
    before, found = resident_peak_mb(), []
    for params in settings:
        call, last = make(variant, params), params["runs"] - 1
        if device().type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            call(last)
            found.append((torch.cuda.max_memory_allocated() - held) / 2**20)
        else:
            call(last)
            found.append(
                max(0.0, resident_peak_mb() - before)
            )  # counts are off by pages
    return found


def time_in_turns(
    benchmark: str,
    calls: dict[str, Call],
    params: Row,
    items: int,
    memory: dict[str, float] | None = None,
    parts: dict[str, tuple[str, Call]] | None = None,
) -> Iterator[Row]:
    """Time each variant once per run, in turn, and yield one row per variant.

    Args:
        items: Number of items that one call processes.
        memory: Peak memory in MB of each variant.
        parts: Name and call of the first part of a variant, which is also timed alone:
            the row then has `encode_s`, and `decode_s` as the median over the runs of
            the rest.
    """
    parts = parts or {}
    alone = dict(parts.values())
    seconds: dict[str, list[float]] = {variant: [] for variant in [*alone, *calls]}
    for run in range(params["runs"]):
        for variant, call in {**alone, **calls}.items():
            wait_for_device()
            begin = time.perf_counter()
            call(run)
            wait_for_device()
            seconds[variant].append(time.perf_counter() - begin)
            print(
                f"{benchmark} {variant} run {run + 1}: {seconds[variant][-1]:.3f} s",
                file=sys.stderr,
                flush=True,
            )
    for variant in calls:
        times, more = seconds[variant], {}
        if variant in parts:
            first = seconds[parts[variant][0]]
            rest = statistics.median(
                whole - begun for whole, begun in zip(times, first, strict=True)
            )
            more = {
                "encode_s": round(statistics.median(first), 5),
                "decode_s": round(rest, 5),
            }
        more |= {"peak_memory_mb": round(memory[variant], 1)} if memory else {}
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


def run_module(module: str, *arguments: Any) -> Row:
    """Return the last line of `python -m module arguments` as JSON, with processor time
    and memory.

    `cpu_s` is the processor time, `peak_memory_mb` the peak memory of all its
    processes. After a failure the row has an `error`.
    """
    command = [sys.executable, "-m", module, *map(str, arguments)]
    settings = {
        "RAY_AUTH_MODE": "token",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # a local Ray is for its user alone
        "RAY_raylet_start_wait_time_s": "180",  # a busy machine starts Ray slowly
        "RAY_worker_niceness": "0",  # Ray's workers else give way to all other processes, and polars does not
    }
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env={**os.environ, **settings}, **pipes)
    watched, cpu, peak = psutil.Process(process.pid), dict[int, float](), 0.0
    while process.poll() is None:
        total = 0
        with suppress(psutil.Error):
            for each in [watched, *watched.children(recursive=True)]:
                with suppress(psutil.Error, OSError):
                    times = each.cpu_times()
                    cpu[each.pid] = times.user + times.system
                    memory = each.memory_full_info()._asdict()
                    total += memory.get(
                        "pss", memory["rss"]
                    )  # on Linux shared pages are counted once
        peak = max(peak, total / 2**20)
        time.sleep(0.25)
    out, err = process.communicate()
    found = {"cpu_s": round(sum(cpu.values()), 2), "peak_memory_mb": round(peak)}
    if process.returncode:
        killed = (
            "killed, as by a machine out of memory" if process.returncode < 0 else ""
        )
        return {
            **found,
            "error": killed or (err.strip().splitlines() or ["no words"])[-1][:300],
        }
    return {**found, **json.loads(out.splitlines()[-1])}


def describe_origin() -> Row:
    """Return the command, the hardware and the commit of a benchmark run."""
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
    """Print each row, merged with `more`, as a JSON line, and write it to the file if
    given.
    """
    written = []
    for each in ({**row, **(more or {})} for row in rows):
        for out in (sys.stdout, *([file] if file else [])):
            print(json.dumps(each), file=out, flush=True)
        written.append(each)
    return written
