"""Paired timings of models and decoders, with PyTorch alone.

    python -m models.bench decode [--json FILE] [--runs 5] [--threads 2]

Variants are timed in turn within one run (A B C A B C ...), so that their ratios hold on a noisy
machine. One JSON line per variant: benchmark, variant, params, runs, median_s, min_s, max_s, items_per_s,
peak_memory_mb.
"""

from __future__ import annotations

import argparse
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
from typing import Any

import torch
from torch import Tensor

from models.matmul import use_exact_onednn
from models.retrieval.data import PAD, Catalogue
from models.retrieval.tiger import Decoder, Tiger, TigerConfig
from models.tables import UserError

Row = dict[str, Any]

DECODERS: dict[str, Decoder] = {"hf_nocache": "hf_nocache", "hf": "hf", "tiger_shared_kv": "shared_kv"}
"""Variants of `decode`, slowest first."""

MEAN_BRANCHING = (256, 38, 2.2, 1.2)
"""Children per node of the Instruments catalogue (Table 7 of the SID-MLP paper)."""

TOP_K = 10


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def random_codes(items: int, generator: torch.Generator) -> Tensor:
    """(items, 4) distinct codes of uneven branching whose means follow `MEAN_BRANCHING`."""
    first, second, third, fourth = MEAN_BRANCHING
    scale = max(1.0, items / (first * second * third * fourth))
    # second codes: the highest of uneven random weights, so that some first codes have many and some few
    weight = torch.randn(256, 1, generator=generator) * 0.5 + torch.randn(256, 256, generator=generator)
    prefix = weight.flatten().topk(min(256 * 256, round(first * second * scale))).indices
    children = 1 + torch.poisson(torch.full((len(prefix),), third - 1 + 0.15), generator).long()
    prefix = prefix.repeat_interleave(children)
    prefix = (prefix * 256 + torch.randint(0, 256, prefix.shape, generator=generator)).unique()
    conflicts = 1 + torch.poisson(torch.full((len(prefix),), fourth - 1 + 0.05), generator).long()
    last = torch.cat([torch.arange(int(n)) for n in conflicts.tolist()])
    prefix = prefix.repeat_interleave(conflicts)
    if len(prefix) < items:
        raise UserError(f"{items} items are more than the {len(prefix)} that codes can be made for; ask for fewer")
    kept = torch.randperm(len(prefix), generator=generator)[:items]
    return torch.stack([prefix // 65536, prefix // 256 % 256, prefix % 256, last], 1)[kept]


def random_histories(users: int, items: int, generator: torch.Generator) -> list[list[int]]:
    """Histories of 3 to 20 random items, 9 in the mean, shortest first."""
    extra = torch.empty(users).geometric_(1 / 8, generator=generator).long() - 1
    lengths = (3 + extra).clamp(max=20).sort().values
    return [torch.randint(0, items, (n,), generator=generator).tolist() for n in lengths.tolist()]


def decode_setting(params: Row) -> tuple[Tiger, list[dict[str, Tensor]]]:
    """TIGER with random weights on a random catalogue, and one batch per run.

    As in evaluation, batches hold users of like history length; those of the runs are spread evenly over
    the lengths of 1,024 users, so the median run is that of the median user.
    """
    torch.set_num_threads(params["threads"])
    use_exact_onednn()  # for all variants
    torch.manual_seed(params["seed"])
    generator = torch.Generator().manual_seed(params["seed"])
    codes = random_codes(params["items"], generator)
    model = Tiger(TigerConfig(beam=params["beam"]), Catalogue.from_codes(codes, (256, 256, 256, 256)))
    histories = random_histories(1024, params["items"], generator)
    batches = []
    for run in range(params["runs"]):
        begin = round((run + 0.5) / params["runs"] * (len(histories) - params["batch"]))
        rows = histories[begin : begin + params["batch"]]
        width = max(map(len, rows))
        batch = {
            "history": torch.tensor([row + [PAD] * (width - len(row)) for row in rows]),
            "history_length": torch.tensor([len(row) for row in rows]),
            "user": torch.arange(len(rows)),
        }
        batches.append({name: value.to(device()) for name, value in batch.items()})
    return model.eval().to(device()), batches


def decode(
    runs: int = 5,
    threads: int = 2,
    batch: int = 32,
    beam: int = 50,
    items: int = 25_000,
    seed: int = 0,
    variants: Iterable[str] = DECODERS,
) -> Iterator[Row]:
    """TIGER's users per second by decoder; one row per variant."""
    params: Row = {"batch": batch, "beam": beam, "items": items, "threads": threads, "seed": seed, "runs": runs}
    params |= {"k": TOP_K, "device": torch.cuda.get_device_name() if device().type == "cuda" else "cpu"}
    variants = list(variants)
    memory = {variant: peak_memory(decode_once, params, variant) for variant in variants}
    model, batches = decode_setting(params)

    def call(decoder: Decoder) -> Callable[[int], Any]:
        return lambda run: model.recommend(batches[run], TOP_K, decoder=decoder)

    calls = {variant: call(DECODERS[variant]) for variant in variants}
    model.recommend(batches[0], TOP_K)
    if set(variants) & {"hf", "hf_nocache"}:  # builds the library's model and warms it up
        model.recommend({name: value[:1] for name, value in batches[0].items()}, 1, beam=2, decoder="hf")
    yield from paired("decode", calls, params, batch, memory)


def decode_once(params: Row, variant: str) -> float:
    """MB that one run of a variant needs at its peak, on the longest histories; in its own process."""
    model, batches = decode_setting(params)
    decoder = DECODERS[variant]
    small = {name: value[:1] for name, value in batches[0].items()}
    model.recommend(small, 1, beam=2, decoder=decoder)
    if device().type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        model.recommend(batches[-1], TOP_K, decoder=decoder)
        return (torch.cuda.max_memory_allocated() - held) / 2**20
    before = resident_peak_mb()
    model.recommend(batches[-1], TOP_K, decoder=decoder)
    return resident_peak_mb() - before


def resident_peak_mb() -> float:
    """The most memory that this process has held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def peak_memory(function: Callable[..., float], *arguments: Any) -> float:
    """The result of the function in a fresh process, so that no variant profits from another's memory."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def paired(
    benchmark: str, calls: dict[str, Callable[[int], Any]], params: Row, items: int, memory: dict[str, float]
) -> Iterator[Row]:
    """Times each variant once per run, in turn; `items` is what one call gets done."""
    seconds: dict[str, list[float]] = {variant: [] for variant in calls}
    for run in range(params["runs"]):
        for variant, call in calls.items():
            wait_for_device()
            begin = time.perf_counter()
            call(run)
            wait_for_device()
            seconds[variant].append(time.perf_counter() - begin)
            print(f"{benchmark} {variant} run {run + 1}: {seconds[variant][-1]:.3f} s", file=sys.stderr, flush=True)
    for variant, times in seconds.items():
        yield {
            "benchmark": benchmark,
            "variant": variant,
            "params": {name: value for name, value in params.items() if name != "runs"},
            "runs": len(times),
            "median_s": round(statistics.median(times), 5),
            "min_s": round(min(times), 5),
            "max_s": round(max(times), 5),
            "items_per_s": round(items / statistics.median(times), 2),
            "peak_memory_mb": round(memory[variant], 1),
        }


def wait_for_device() -> None:
    if device().type == "cuda":
        torch.cuda.synchronize()


def search_encoder(**options: Any) -> Iterator[Row]:
    """See `models/search/bench.py`, which stands on this module."""
    from models.search import bench

    return bench.search_encoder(**options)


BENCHMARKS: dict[str, Callable[..., Iterator[Row]]] = {"decode": decode, "search_encoder": search_encoder}


def write_rows(rows: Iterable[Row], path: str | None) -> list[Row]:
    """Prints each row as a JSON line, and writes it to the file at `path` if there is one."""
    written = []
    with Path(path).open("w") if path else nullcontext() as file:
        for row in rows:
            print(json.dumps(row), flush=True)
            if file:
                file.write(json.dumps(row) + "\n")
                file.flush()
            written.append(row)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m models.bench", description=__doc__)
    parser.add_argument("name", choices=BENCHMARKS)
    parser.add_argument("--json", help="file for the JSON lines, which are printed too")
    parser.add_argument("--runs", type=int, default=5, help="timings of each variant")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    options = parser.parse_args()
    write_rows(BENCHMARKS[options.name](runs=options.runs, threads=options.threads), options.json)


if __name__ == "__main__":
    main()
