"""How semantic IDs, their trie and decoding grow with the catalogue.

`python -m benchmarks catalogue` prints what `catalogue` yields: of each number of items what `jobs.tokenize` takes for
simulated titles (TF-IDF, then RQ-KMeans of a few iterations), what loading and checking the trie takes as every job
that ranks does it, and how many users a second TIGER's beam search ranks within it. Each step is a process of its own;
its peak memory is the sum over that process and Ray's.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from benchmarks.decode import random_histories
from benchmarks.harness import Row, measured, row
from models import registry
from models.retrieval.data import Catalogue, batch_of
from models.tables import commit, join, read_manifest, write_part
from pipelines.data.schemas import items_schema
from pipelines.data.sids.embed import EmbedConfig
from pipelines.data.sids.tokenize import RqkmeansConfig, TokenizerConfig, tokenize

WIDTH, ITERATIONS, LEVELS = 32, 10, 4
"""Numbers of an embedding, k-means iterations per level, and levels before those of conflicts: the time is about
proportional to each."""

SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
OF_SIDS = ("codebook_sizes", "largest_group", "collision_rate")
BATCH, BATCHES, BEAM, TOP_K = 32, 8, 20, 10
ITEMS_PER_PART = 1 << 20
WORDS, KINDS, OWN = 2_000, 1_000, 5
"""Words of all titles, kinds of items, and words of a title beside the two of its kind. So few words that all of them
count in an embedding: with 20,000 a million titles are near to a few thousand points."""


def write_items(uri: str, items: int, seed: int = 0) -> None:
    """A table of `items` with simulated titles of seven words."""
    rng = np.random.default_rng(seed)
    schema, parts = items_schema(["title"]), []
    words = pa.array([f"w{word}" for word in range(WORDS)])
    for first in range(0, items, ITEMS_PER_PART):
        index = np.arange(first, min(first + ITEMS_PER_PART, items), dtype=np.int32)
        kind = rng.integers(KINDS, size=len(index))
        own = rng.integers(WORDS, size=(OWN, len(index)))
        title = pc.binary_join_element_wise(
            *(words.take(pa.array(word)) for word in (kind * 2, kind * 2 + 1, *own)),
            " ",
        )
        names = pc.binary_join_element_wise(
            "item", pc.cast(pa.array(index), pa.string()), "-"
        )
        parts.append(
            write_part(uri, pa.Table.from_arrays([index, names, title], schema=schema))
        )
    commit(
        uri,
        "items",
        schema,
        parts,
        config={},
        inputs={},
        info={"core": 0, "texts": ["title"]},
    )


def catalogue(sizes: Sequence[int] = SIZES) -> Iterator[Row]:
    """A line per number of items and step; the `items` of `decode` are users."""
    for items in sizes:
        params = {
            "items": items,
            "width": WIDTH,
            "iterations": ITERATIONS,
            "levels": LEVELS,
            "batch": BATCH,
            "beam": BEAM,
            "cpus": os.cpu_count(),
        }
        with tempfile.TemporaryDirectory(prefix="trieline-benchmark-") as folder:
            write_items(join(folder, "items"), items)
            for step in STEPS:
                found = measured("benchmarks.catalogue", step, folder)
                if "error" in found:
                    yield {
                        "benchmark": "catalogue",
                        "variant": step,
                        "params": params,
                        **found,
                    }
                    break
                yield row(
                    "catalogue",
                    step,
                    params,
                    [found.pop("seconds")],
                    found.pop("done"),
                    **found,
                )


def run_tokenize(folder: str) -> dict[str, Any]:
    """Titles to codes and trie, as jobs.tokenize makes them."""
    import ray

    ray.init(
        address="local",
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    items, sids = join(folder, "items"), join(folder, "sids")
    config = TokenizerConfig(
        "rqkmeans", rqkmeans=RqkmeansConfig(levels=LEVELS, iterations=ITERATIONS)
    )
    begin = time.perf_counter()
    made = tokenize(
        items,
        sids,
        config,
        "tfidf",
        embed=EmbedConfig(svd=WIDTH),
        say=lambda line: None,
    )[:2]
    seconds = time.perf_counter() - begin
    count = read_manifest(items, "items").rows
    stored = {
        f"{table.table}_bytes_per_item": sum(part.bytes for part in table.files) / count
        for table in made
    }
    return {
        "seconds": seconds,
        "done": count,
        **stored,
        **{name: made[0].info[name] for name in OF_SIDS},
    }


def load(folder: str) -> tuple[Catalogue, float]:
    """The catalogue with its checked trie, and the seconds it took."""
    hashes, uri = (
        {"items": read_manifest(join(folder, "items"), "items").hash},
        join(folder, "sequences"),
    )
    commit(
        uri, "sequences", pa.schema([]), [], config={}, inputs=hashes, info={}
    )  # none is read
    begin = time.perf_counter()
    return Catalogue.load(folder, join(folder, "sids")), time.perf_counter() - begin


def run_load(folder: str) -> dict[str, Any]:
    """Codes and trie read and checked, as every job that ranks does."""
    catalogue, seconds = load(folder)
    return {"seconds": seconds, "done": catalogue.num_items}


def run_decode(folder: str) -> dict[str, Any]:
    """TIGER of random weights, after one batch to warm up."""
    catalogue, _ = load(folder)
    torch.manual_seed(0)
    model: Any = registry.build(
        registry.config_from_dict({"name": "tiger", "beam": BEAM}), catalogue
    ).eval()
    histories = random_histories(
        BATCH * BATCHES, catalogue.num_items, torch.Generator().manual_seed(0)
    )
    starts = range(0, len(histories), BATCH)
    batches = [
        batch_of(histories[first : first + BATCH], np.arange(BATCH)) for first in starts
    ]
    with torch.no_grad():
        model.recommend(batches[0], TOP_K)
        begin = time.perf_counter()
        for batch in batches:
            model.recommend(batch, TOP_K)
    return {"seconds": time.perf_counter() - begin, "done": len(histories)}


STEPS: dict[str, Callable[[str], dict[str, Any]]] = {
    "tokenize": run_tokenize,
    "load": run_load,
    "decode": run_decode,
}


if __name__ == "__main__":
    step, folder = sys.argv[1:]
    print(json.dumps(STEPS[step](folder)))
