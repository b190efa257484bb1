"""Fitting item_knn and ease on logs of 10,000, 30,000 and 100,000 items.

    python -m benchmarks floors --sizes 10000 30000 100000

A log has 2 users per item with 10 behaviours each. Items have a Zipf-like popularity,
and half of the behaviours are in the user's part of the catalogue. Each fit runs in a
process of its own, for its peak memory. `cpu_s` is processor time, which depends less
on other work on the machine than `median_s`.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from models.build import parse_options
from models.retrieval.data import Catalogue, InteractionBatch

BEHAVIOURS_PER_USER = 10
PARTS = 100
"""Parts of the catalogue; each user prefers one part."""
MODELS = ("item_knn", "ease")


def draw_batch(num_items: int) -> InteractionBatch:
    """Return all training behaviours of a random log as one batch.

    Args:
        num_items: Number of items, and seed of the log.
    """
    rng = np.random.default_rng(num_items)
    users = np.repeat(np.arange(2 * num_items), BEHAVIOURS_PER_USER)
    # n**u - 1 with uniform u has a density of 1 / rank: Zipf's law
    any_item = (num_items ** rng.random(len(users))).astype(np.int64) - 1
    part_size = num_items // PARTS
    rank_in_part = (part_size ** rng.random(len(users))).astype(np.int64) - 1
    preferred_item = users % PARTS * part_size + rank_in_part
    target = np.where(rng.random(len(users)) < 0.5, any_item, preferred_item)
    return InteractionBatch(
        user_row=torch.from_numpy(users),
        target=torch.from_numpy(target),
    )


def fit(name: str, num_items: int, results: Any) -> None:
    """Fit a model, and report its time and memory.

    Args:
        name: Name of the model.
        num_items: Number of items of the log.
        results: Queue that receives seconds, processor seconds and peak memory in MB.
    """
    catalogue, batch = Catalogue(num_items), draw_batch(num_items)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model_class, options = parse_options({"name": name})
    config = model_class.resolve_config(options, catalogue)
    model: Any = model_class(config, catalogue)
    start_s = time.perf_counter()
    cpu_start_s = time.process_time()
    model.fit_in_one_pass([batch])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = time.perf_counter() - start_s
    cpu_seconds = time.process_time() - cpu_start_s
    results.put((seconds, cpu_seconds, (peak - before) / 1024))


def floors(
    sizes: Sequence[int] = (10_000, 30_000, 100_000),
) -> Iterator[dict[str, Any]]:
    """Yield a row per model and number of items."""
    context = multiprocessing.get_context("spawn")
    for num_items in sizes:
        for name in MODELS:
            results = context.Queue()
            process = context.Process(target=fit, args=(name, num_items, results))
            process.start()
            seconds, cpu_seconds, memory = results.get()
            process.join()
            yield {
                "benchmark": "floors",
                "variant": name,
                "params": {"items": num_items, "behaviours": 20 * num_items},
                "runs": 1,
                "median_s": seconds,
                "min_s": seconds,
                "max_s": seconds,
                "cpu_s": cpu_seconds,
                "items_per_s": num_items / seconds,
                "peak_memory_mb": memory,
            }
