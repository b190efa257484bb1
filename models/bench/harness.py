"""What all benchmarks share: paired timings, peaks of memory, JSON lines.

Variants are timed in turn within one run (A B C A B C ...), so that their ratios hold on a noisy
machine. One JSON line per variant: benchmark, variant, params, runs, median_s, min_s, max_s, items_per_s,
peak_memory_mb.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

Row = dict[str, Any]

T = TypeVar("T")


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def resident_peak_mb() -> float:
    """The most memory that this process has held so far."""
    status = Path("/proc/self/status")
    if status.exists():  # on Linux a process inherits what getrusage says from the one that started it; not this
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 2**10  # kB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def risen_mb(before: float) -> float:
    """MB by which the peak has risen since it was `before`. As its counts are off by pages, at least 0."""
    return max(0.0, resident_peak_mb() - before)


def peak_memory(function: Callable[..., T], *arguments: Any) -> T:
    """The result of the function in a fresh process, so that no variant profits from another's memory."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def paired(
    benchmark: str, calls: dict[str, Callable[[int], Any]], params: Row, items: int,
    memory: dict[str, float] | None = None,
    parts: dict[str, tuple[str, Callable[[int], Any]]] | None = None, percentiles: Iterable[int] = (),
) -> Iterator[Row]:  # fmt: skip
    """Times each variant once per run, in turn; `items` is what one call gets done, `memory` the peak of each variant.

    `parts` gives variants the name of what they begin with and how to do that alone, which is timed beside them: a
    row then has `encode_s`, and as `decode_s` the median over the runs of what the rest took. `percentiles`, such as
    99, are named `p99_s`.
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
            print(f"{benchmark} {variant} run {run + 1}: {seconds[variant][-1]:.3f} s", file=sys.stderr, flush=True)
    for variant in calls:
        times, apart = seconds[variant], {}
        if variant in parts:
            first = seconds[parts[variant][0]]
            rest = statistics.median(whole - begun for whole, begun in zip(times, first, strict=True))
            apart = {"encode_s": round(statistics.median(first), 5), "decode_s": round(rest, 5)}
        yield {
            "benchmark": benchmark,
            "variant": variant,
            "params": {name: value for name, value in params.items() if name != "runs"},
            "runs": len(times),
            "median_s": round(statistics.median(times), 5),
            "min_s": round(min(times), 5),
            "max_s": round(max(times), 5),
            "items_per_s": round(items / statistics.median(times), 2),
            **apart,
            **{f"p{rank}_s": round(float(np.percentile(times, rank)), 5) for rank in percentiles},
            **({"peak_memory_mb": round(memory[variant], 1)} if memory else {}),
        }


def wait_for_device() -> None:
    if device().type == "cuda":
        torch.cuda.synchronize()


def write_rows(rows: Iterable[Row], path: str | None, origin: Row | None = None) -> list[Row]:
    """Prints each row, with its `origin`, as a JSON line, and writes it to the file at `path` if there is one."""
    written = []
    with Path(path).open("w") if path else nullcontext() as file:
        for row in ({**row, **(origin or {})} for row in rows):
            print(json.dumps(row), flush=True)
            if file:
                file.write(json.dumps(row) + "\n")
                file.flush()
            written.append(row)
    return written
