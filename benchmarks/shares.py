"""What training workers hold and read of a table: memory beside the arrays of their share, and bytes read.

    python -m benchmarks shares --histories TABLES

A row per number of workers; each worker is a fresh process that reads its share of the examples as a training does.
`share_mb` are the arrays that it holds, `held_mb` what its memory has grown by once they are read, and
`peak_memory_mb` while they are read: of the worker that holds most. `read_mb` is what all workers read together.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from benchmarks.harness import Row, in_fresh_process, row
from models import registry
from models.fit import FitConfig
from models.memory import resident_peak_mb
from models.setup import read_share
from models.tables import UserError, family_of, join, read_manifest
from models.words import number_of

WORKERS = (1, 2, 4)


def shares(
    *, runs: int = 5, histories: str | None = None, max_history: int = 50
) -> Iterator[Row]:
    """A row per number of workers; UserError without tables."""
    if not histories:
        raise UserError("shares reads the tables of a log; give them with --histories")
    manifest = read_manifest(join(histories, "sequences"), "sequences")
    family = family_of(manifest)
    model = next(
        name
        for name, entry in registry.MODELS.items()
        if entry.family.name == family and entry.gradient
    )
    params = {
        "model": model,
        "users": manifest.rows,
        "table_mb": round(sum(p.bytes for p in manifest.files) / 2**20),
    }
    for world in WORKERS:
        seconds: list[float] = []
        found: dict[str, float] = {}
        for _ in range(runs):
            ranks = [
                in_fresh_process(one_worker, histories, model, max_history, rank, world)
                for rank in range(world)
            ]
            seconds.append(max(rank["seconds"] for rank in ranks))
            most = max(ranks, key=lambda rank: rank["share_mb"])
            found = {
                name: round(most[name], 1)
                for name in ("share_mb", "held_mb", "peak_memory_mb")
            }
            found["read_mb"] = round(sum(rank["read_mb"] for rank in ranks), 1)
        yield row(
            "shares",
            number_of(world, "worker"),
            params,
            seconds,
            manifest.rows,
            **found,
        )


def one_worker(
    tables: str, model: str, max_history: int, rank: int, world: int
) -> dict[str, float]:
    """What one worker's share takes, in MB and seconds."""
    import pyarrow.compute
    import pyarrow.parquet  # noqa: F401  # which every process has; not the share's memory

    read_before, before, began = read_bytes(), resident_mb(), time.perf_counter()
    fit = FitConfig(memory_budget_gb=1e6)  # all is held
    entry = registry.find(model)
    config = entry.config(max_history=max_history)
    examples = read_share(entry, join(tables, "sequences"), fit, config, rank, world)
    seconds = time.perf_counter() - began
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(
            0
        )  # what is free, and only not given back yet
    return {
        "seconds": seconds,
        "share_mb": sum(part.nbytes for part in examples) / 2**20,
        "held_mb": resident_mb() - before,
        "peak_memory_mb": resident_peak_mb() - before,
        "read_mb": (read_bytes() - read_before) / 2**20,
    }


def resident_mb() -> float:
    """Memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def read_bytes() -> int:
    """Bytes that this process has read from files so far."""
    return int(Path("/proc/self/io").read_text().split()[1])
