"""Time variants in turn, measure peak memory, and describe the machine.

Variants are timed in turn within one run (A B C A B C ...), so that their ratios hold
on a noisy machine. A line has benchmark, variant, params, runs, median_s, min_s, max_s,
items_per_s and peak_memory_mb.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from models.training.memory import resident_peak_mb

Line = dict[str, Any]
Call = Callable[[int], Any]
"""A variant's call, which gets the number of the run."""


def device() -> torch.device:
    """Return the GPU if PyTorch sees one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in a fresh process, so that variants do not share memory."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(function, *arguments).result()


def peak_memory(make: Callable[[str, Line], Call], variant: str, params: Line) -> float:
    """Return by how many MB the last run's call raises the peak of a fresh process.

    Args:
        make: Function that builds a variant, warms it up and returns its call.
        variant: Name of the variant.
        params: Settings of the benchmark, with the number of `runs`.
    """
    call = make(variant, params)
    before = read_peak_mb()
    call(params["runs"] - 1)
    return read_peak_mb() - before


def read_peak_mb() -> float:
    """Return the peak memory in MB of this process, or on a GPU since the last call."""
    if device().type == "cpu":
        return resident_peak_mb()
    peak = torch.cuda.max_memory_allocated() / 2**20
    torch.cuda.reset_peak_memory_stats()
    return peak


def time_in_turns(calls: dict[str, Call], runs: int) -> dict[str, list[float]]:
    """Return the seconds of each run of each call, timed in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for run in range(runs):
        for name, call in calls.items():
            start_s = time.perf_counter()
            call(run)
            if device().type == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start_s)
    return seconds


def to_line(
    benchmark: str,
    variant: str,
    params: Line,
    seconds: Sequence[float],
    items: int,
    **measures: Any,
) -> Line:
    """Return the line of a variant.

    Args:
        benchmark: Name of the benchmark.
        variant: Name of the variant.
        params: Settings of the benchmark.
        seconds: Time of each run.
        items: Number of items that one run processes.
        **measures: Further values of the line.
    """
    median = statistics.median(seconds)
    return {
        "benchmark": benchmark,
        "variant": variant,
        "params": params,
        "runs": len(seconds),
        "median_s": round(median, 5),
        "min_s": round(min(seconds), 5),
        "max_s": round(max(seconds), 5),
        "items_per_s": round(items / median, 2),
        **measures,
    }


def describe_origin() -> Line:
    """Return the command line, the hardware and the commit of this run."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    names = re.findall("model name\\s*: (.*)", text) or [platform.processor()]
    gpu = torch.cuda.get_device_name() + ", " if torch.cuda.is_available() else ""
    git = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "command": f"python -m benchmarks {' '.join(sys.argv[1:])}",
        "hardware": f"{gpu}{names[0]}, {os.cpu_count()} cores",
        "commit": git.stdout.strip(),
    }
