"""Timings of training steps and searches on a GPU, with and without CUDA graphs.

    python -m benchmarks.gpu [--json FILE] [--part train search] [--variants tiger]

Needs neither Ray nor MLflow: PyTorch, pyarrow, numpy, safetensors, PyYAML and psutil.
`train` runs `models.training.fit` on batches in memory: plain, captured as CUDA graphs
(`fit.cuda_graphs`), and captured after compilation (`fit.compile`). Weights and batches
are random, and the first `SKIPPED` steps are not timed. After these steps, `same` is
whether the weights equal the plain run's weights, and `off` the largest difference.
`search` times `recommend` without a graph, as a graph, and as a graph with products in
TF32, in turn.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import actions, decode
from benchmarks.harness import describe_origin
from models import build
from models.actions.batch import ActionsBatch
from models.dataset.batch import Batch
from models.retrieval.data import Catalogue, HistoryBatch, RequestBatch, WindowBatch
from models.retrieval.distillation.student import Student
from models.retrieval.distillation.teacher import build_teacher
from models.training.cuda_graphs import CudaGraphs
from models.training.fit import EpochEvent, FitConfig, StepEvent, fit

Row = dict[str, Any]
CUDA = torch.device("cuda")
ITEMS = 12_101
"""Items of the catalogue, as many as in amazon14_beauty."""
MODES = ("plain", "captured", "compiled")
STEPS = 130
SKIPPED = 50
"""First steps, in which graphs and kernels are built; they are not timed."""


def random_catalogue() -> Catalogue:
    """Return a catalogue of `ITEMS` items with random codes."""
    codes = decode.random_codes(ITEMS, torch.Generator().manual_seed(0))
    return Catalogue.from_codes(codes, (256, 256, 256, 256))


def retrieval_batches(size: int, unit: str) -> list[HistoryBatch]:
    """Return two batches of random users with histories of 20 items.

    Args:
        size: Users per batch.
        unit: `user` for 16 requests per user in a window, else one request per user.
    """
    generator = torch.Generator().manual_seed(1)
    batches: list[HistoryBatch] = []
    for _ in range(2):
        by_row: dict[str, Any] = {
            "history": torch.randint(0, ITEMS, (size, 20), generator=generator),
            "history_length": torch.full((size,), 20),
            "user": torch.arange(size),
            "user_row": torch.arange(size),
            "request": torch.arange(size),
        }
        requests = size * 16 if unit == "user" else size
        target = torch.randint(0, ITEMS, (requests,), generator=generator)
        if unit == "user":
            batch: HistoryBatch = WindowBatch(
                **by_row,
                target=target,
                target_row=torch.arange(size).repeat_interleave(16),
                target_position=torch.arange(4, 20).repeat(size),
            )
        else:
            batch = RequestBatch(
                **by_row, target=target, repeats=torch.zeros(size, dtype=torch.long)
            )
        batches.append(batch)
    return batches


def actions_batches(name: str, num_rows: int, length: int) -> list[ActionsBatch]:
    """Return two batches of random sequences for a model of actions.

    Args:
        name: Name of the model; GenRank's sequences are half candidates.
        num_rows: Sequences per batch.
        length: Events and candidates per sequence.
    """
    candidates = length // 2 if name == "genrank" else 0
    batches = [
        actions.random_batch(num_rows, length - candidates, candidates)
        for _ in range(2)
    ]
    return [replace(batch.map(Tensor.contiguous), has_ties=False) for batch in batches]


TRAINING_VARIANTS: dict[
    str, tuple[dict[str, Any], Callable[[], Sequence[Batch]], dict[str, Any]]
] = {
    "tiger": (
        {"name": "tiger"},
        lambda: retrieval_batches(256, "request"),
        {"lr": 0.003},
    ),
    "sid_mlp": (
        {"name": "sid_mlp"},
        lambda: retrieval_batches(512, "request"),
        {"lr": 5e-5, "weight_decay": 1e-4},
    ),
    "sasrec": (
        {"name": "sasrec", "max_history": 50},
        lambda: retrieval_batches(256, "user"),
        {},
    ),
    "gdn": ({"name": "gdn"}, lambda: retrieval_batches(256, "request"), {}),
    **{
        f"{name}-{length}": (
            {"name": name},
            lambda name=name, length=length: actions_batches(
                name, 16384 // length, length
            ),  # type: ignore[misc]
            {"lr": 1e-3},
        )
        for length in (512, 1024)
        for name in ("interleaved", "attn_lfa", "attn_mvp", "genrank")
    },
}
"""Options of the model, function that makes its batches, and options of `fit`, by name
of the variant."""


class RepeatedBatches:
    """Loader for `fit` that cycles through a few batches."""

    def __init__(self, batches: Sequence[Batch], num_steps: int) -> None:
        self.batches = batches
        self.num_steps = num_steps

    def steps(self, epoch: int) -> int:
        """Return the number of steps of an epoch."""
        return self.num_steps

    def __call__(self, epoch: int, skip: int) -> Iterator[Batch]:
        """Yield the batches of an epoch after its first `skip` steps."""
        return itertools.islice(itertools.cycle(self.batches), skip, self.num_steps)


def build_model(options: dict[str, Any]) -> Any:
    """Build a model on the GPU, a student with an untrained teacher."""
    torch.manual_seed(0)
    catalogue: Any = random_catalogue()
    if options["name"] in actions.VARIANTS:
        catalogue = actions.random_catalogue()
    model: Any = build.build_model(options, catalogue)
    if isinstance(model, Student):
        model.set_teacher(build_teacher(model.config, catalogue))
    return model.to(CUDA)


def time_training(variant: str, mode: str) -> tuple[Row, dict[str, Tensor]]:
    """Train a model for `STEPS` steps, and time the steps after `SKIPPED`.

    Args:
        variant: Name in `TRAINING_VARIANTS`.
        mode: One of `MODES`, or `again` for another plain run.

    Returns:
        The row of the run, and the weights after `SKIPPED` steps.
    """
    options, batches, settings = TRAINING_VARIANTS[variant]
    model = build_model(options)
    if isinstance(model, Student):
        model.teacher.to(CUDA)
    config = FitConfig(
        max_epochs=1,
        log_every_steps=10,
        metric="none",
        seed=3,
        warmup_share=0.1,
        cuda_graphs="off" if mode in ("plain", "again") else "auto",
        compile=mode == "compiled",
        **settings,
    )
    torch.cuda.reset_peak_memory_stats()
    start_s = time.perf_counter()
    first_steps_s = 0.0
    rates: list[float] = []
    losses: dict[int, float] = {}
    weights: dict[str, Tensor] = {}
    for event in fit(
        model,
        RepeatedBatches(batches(), STEPS),
        lambda m: ({"none": 0.0}, 1),
        config,
        device=CUDA,
    ):
        if isinstance(event, StepEvent):
            losses[event.step] = event.loss
            if event.step == SKIPPED:
                first_steps_s = time.perf_counter() - start_s
                weights = {
                    name: value.float().cpu()
                    for name, value in model.state_dict().items()
                }
            if event.step > SKIPPED:
                rates.append(event.examples_per_s)
        elif isinstance(event, EpochEvent):
            data_wait = event.data_wait
    rows = batches()[0].num_rows
    row = {
        "benchmark": "gpu train",
        "variant": variant,
        "mode": mode,
        "rows": rows,
        "examples_per_s": statistics.median(rates),
        "step_ms": 1e3 * rows / statistics.median(rates),
        "first_steps_s": first_steps_s,
        "data_wait": data_wait,
        "peak_memory_mb": torch.cuda.max_memory_allocated() / 2**20,
        "reserved_mb": torch.cuda.max_memory_reserved() / 2**20,
        "losses": [losses[step] for step in sorted(losses)][:5],
    }
    return row, weights


def train(variants: list[str], modes: list[str]) -> Iterator[Row]:
    """Yield a row per variant and mode of training, or a row with the error.

    Rows after the plain run of a variant compare weights and speed with the plain run.

    Args:
        variants: Names in `TRAINING_VARIANTS`.
        modes: Modes of each variant, in the order in which they run.
    """
    for variant in variants:
        plain_weights: dict[str, Tensor] = {}
        plain_row: Row = {}
        for mode in modes:
            torch._dynamo.reset()
            torch.cuda.empty_cache()
            CudaGraphs.enabled = True
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    row, weights = time_training(variant, mode)
                except Exception as error:
                    traceback.print_exc()
                    yield {
                        "benchmark": "gpu train",
                        "variant": variant,
                        "mode": mode,
                        "error": str(error)[:400],
                    }
                    continue
            row["warnings"] = sorted(
                {str(w.message)[:300] for w in caught if "CUDA graph" in str(w.message)}
            )
            if row["warnings"] and mode != "plain":
                row["mode"] = f"{mode}, without graphs"
            if mode == "plain":
                plain_weights, plain_row = weights, row
            elif plain_weights:
                row["same"] = all(
                    torch.equal(plain, weights[name])
                    for name, plain in plain_weights.items()
                )
                row["off"] = max(
                    float((plain - weights[name]).abs().max())
                    for name, plain in plain_weights.items()
                    if plain.numel()
                )
                row["speedup"] = row["examples_per_s"] / plain_row["examples_per_s"]
            yield row


SEARCH_VARIANTS = (
    "sid_mlp",
    "tiger",
    "sid_mlp_pp",
    "one_layer",
    "earn",
    "nezha",
    "gdn",
    "mamba2",
    "sasrec",
)
SIZES = (1, 32, 256)
"""Batch sizes of the searches."""
BEAM = 50
"""Beams of the searches."""


def search(variants: list[str], runs: int = 5) -> Iterator[Row]:
    """Yield a row per variant and batch size of `recommend`, or a row with the error.

    Args:
        variants: Names of `SEARCH_VARIANTS`.
        runs: Rounds in which all ways of search are timed in turn.
    """
    for variant in variants:
        try:
            yield from time_search(variant, runs)
        except Exception as error:
            traceback.print_exc()
            yield {
                "benchmark": "gpu search",
                "variant": variant,
                "error": str(error)[:400],
            }


def time_calls(call: Callable[[], Any], times: int = 5) -> list[float]:
    """Return the duration in seconds of each of `times` calls, after an untimed one."""
    call()
    seconds = []
    for _ in range(times):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        call()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start_s)
    return seconds


@torch.no_grad()
def time_search(variant: str, runs: int) -> Iterator[Row]:
    """Time the eager search, CUDA graphs and TF32, and compare their results.

    Args:
        variant: Name of the model.
        runs: Rounds in which all ways of search are timed in turn.

    Yields:
        A row per batch size.
    """
    model = build_model({"name": variant}).eval()
    plain = type(model).recommend.__wrapped__.__wrapped__
    options = {} if variant == "sasrec" else {"beam": BEAM}
    for size in SIZES:
        batch = retrieval_batches(size, "request")[0].to(CUDA)
        calls: dict[str, Callable[[], Any]] = {
            "plain": partial(plain, model, batch, 10, **options),
            "graph": partial(model.recommend, batch, 10, **options),
            "tf32": partial(model.recommend, batch, 10, precision="high", **options),
        }
        results = {}
        for name, call in calls.items():
            for _ in range(3):  # the graph is captured in the first calls
                results[name] = [part.clone() for part in call()]
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(runs):
            for name, call in calls.items():
                times[name] += time_calls(call)
        plain_items, plain_scores = results["plain"]
        graph_items, graph_scores = results["graph"]
        tf32_items, _ = results["tf32"]
        difference = (plain_scores - graph_scores).nan_to_num(0, 0, 0).abs()
        yield {
            "benchmark": "gpu search",
            "variant": variant,
            "params": {"batch": size, "beam": BEAM, "k": 10},
            **{
                f"{name}_ms": 1e3 * statistics.median(values)
                for name, values in times.items()
            },
            "same_items": torch.equal(plain_items, graph_items),
            "off": float(difference.max()),
            "tf32_lists_changed": float(
                (tf32_items != graph_items).any(1).float().mean()
            ),
        }


def format_tables(rows: list[Row]) -> Iterator[str]:
    """Yield the lines of Markdown tables of saved rows."""
    rows_by_mode: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row["benchmark"] == "gpu train":
            rows_by_mode.setdefault(row["variant"], {})[row["mode"]] = row
    yield (
        "| training step | plain, ms | captured, ms | compiled, ms "
        "| captured, examples/s |"
    )
    yield "| --- | ---: | ---: | ---: | ---: |"
    for variant, modes in rows_by_mode.items():
        cells = [
            f"{modes[mode]['step_ms']:.1f}" if mode in modes else "" for mode in MODES
        ]
        rate = (
            f"{modes['captured']['examples_per_s']:,.0f}" if "captured" in modes else ""
        )
        yield f"| {variant} | {' | '.join(cells)} | {rate} |"
    yield ""
    yield "| search, beam 50 | batch | plain, ms | graph, ms | graph and TF32, ms |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for row in rows:
        if row["benchmark"] == "gpu search":
            times = " | ".join(
                f"{row[name]:.1f}" for name in ("plain_ms", "graph_ms", "tf32_ms")
            )
            yield f"| {row['variant']} | {row['params']['batch']} | {times} |"


def main() -> None:
    """Time the variants of the command line, or print the page of saved timings."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__
    )
    parser.add_argument("--json", help="append the JSON lines to this file")
    parser.add_argument(
        "--part", nargs="+", default=["train", "search"], choices=["train", "search"]
    )
    parser.add_argument(
        "--variants", nargs="+", help="variants to time; by default all"
    )
    parser.add_argument(
        "--modes", nargs="+", default=["plain", "captured"], choices=[*MODES, "again"]
    )
    parser.add_argument(
        "--page",
        metavar="FILE",
        help="only print the tables of the JSON lines in this file",
    )
    options = parser.parse_args()
    if options.page:
        lines = Path(options.page).read_text().splitlines()
        print("\n".join(format_tables([json.loads(line) for line in lines])))
        return
    if not torch.cuda.is_available():
        sys.exit("error: PyTorch sees no GPU on this machine")
    origin = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        **describe_origin(),
    }

    def select_variants(available: Iterable[str]) -> list[str]:
        if options.variants is None:
            return list(available)
        return [name for name in available if name in options.variants]

    parts = {
        "train": lambda: train(select_variants(TRAINING_VARIANTS), options.modes),
        "search": lambda: search(select_variants(SEARCH_VARIANTS)),
    }
    for part in options.part:
        for row in parts[part]():
            line = json.dumps(origin | row)
            print(line, flush=True)
            if options.json:
                with open(options.json, "a") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
