"""Paired timings of all ways to decode semantic IDs, on one catalogue.

    python -m benchmarks decode

Variants, slowest first: TIGER by `transformers` generate without and with its cache;
TIGER verifying AtSpeed's drafts (random weights accept hardly any, the slowest case);
TIGER by this project's decoder; Mamba2; Gated DeltaNet; one decoder layer; EARN; NEZHA
within the trie, and with the published hash set after the search; SID-MLP and SID-MLP++
with histories padded to the maximum, as published; and both by the fast path. `allowed`
are TIGER and SID-MLP among half of the items. LC-Rec, and NEZHA and SID-MLP on it, have
a small language model and compare with each other.

Weights are random, as most searches depend on the shape of the catalogue only. With
`checkpoints`, trained models are timed on histories and codes of their own tables. All
variants of a size are timed in turn in one run. A batch has users with histories of
similar length, as in evaluation, and the batches of the runs are spread evenly over the
lengths, so the median run is the run of the median user. The encoder of each variant is
timed separately (`encode_s`); `decode_s` is the rest, which the paper's factor of 16.25
is about.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.generate import encoder_inputs, generate, to_transformers
from benchmarks.harness import (
    Call,
    Row,
    device,
    device_name,
    in_fresh_process,
    peak_memory,
    time_in_turns,
)
from models import build
from models.cpu import kernels
from models.cpu.matmul import use_exact_onednn
from models.dataset.encoding import PAD
from models.retrieval.data import Catalogue, HistoryBatch, RetrievalDataset
from models.retrieval.distillation.student import Student
from models.retrieval.tiger import TigerConfig
from models.storage import checkpoint
from models.storage.tables import UserError, join

VARIANTS = (
    "hf_nocache",
    "hf",
    "atspeed_r",
    "atspeed_s",
    "tiger_shared_kv",
    "tiger_allowed",
    "mamba2",
    "gdn",
    "one_layer",
    "earn",
    "nezha",
    "nezha_hash",
    "sid_mlp_plain",
    "sid_mlp_fast",
    "sid_mlp_allowed",
    "sid_mlp_pp_plain",
    "sid_mlp_pp_fast",
    "lc_rec",
    "lc_rec_nezha",
    "lc_rec_sid_mlp",
)
"""All variants, slowest first; the variants of LC-Rec come last."""

SLOW = (
    "hf_nocache",
    "hf",
    "atspeed_r",
    "atspeed_s",
    "tiger_shared_kv",
    "tiger_allowed",
)
"""Variants that are timed at one size only."""

BATCHES = (1, 32, 256)
"""Batch sizes of the other variants."""

BEAMS = (10, 20, 50)
"""Beam widths of the other variants."""

SLOW_SIZE = (32, 50)
"""Batch and beam of the slow variants."""

MEAN_BRANCHING = (256, 38, 2.2, 1.2)
"""Children per node of the Instruments catalogue (Table 7 of the SID-MLP paper)."""

TOP_K = 10
USERS = 1024
"""Number of histories from which batches are drawn."""


def random_codes(num_items: int, generator: torch.Generator) -> Tensor:
    """Return random distinct codes (N, 4) of N items with uneven branching.

    The mean number of children per level follows `MEAN_BRANCHING`.

    Raises:
        UserError: If the drawn trie has fewer than N leaves.
    """
    first, second, third, fourth = MEAN_BRANCHING
    scale = max(1.0, num_items / (first * second * third * fourth))
    # (256, 256): random weights of pairs of first and second code, with a random offset
    # per first code, so that first codes have different numbers of children
    weight = torch.randn(256, 1, generator=generator) * 0.5 + torch.randn(
        256, 256, generator=generator
    )
    prefix = (
        weight.flatten().topk(min(256 * 256, round(first * second * scale))).indices
    )
    children = (
        1
        + torch.poisson(torch.full((len(prefix),), third - 1 + 0.15), generator).long()
    )
    prefix = prefix.repeat_interleave(children)
    prefix = (
        prefix * 256 + torch.randint(0, 256, prefix.shape, generator=generator)
    ).unique()
    conflicts = (
        1
        + torch.poisson(torch.full((len(prefix),), fourth - 1 + 0.05), generator).long()
    )
    last = torch.cat([torch.arange(int(n)) for n in conflicts.tolist()])
    prefix = prefix.repeat_interleave(conflicts)
    if len(prefix) < num_items:
        raise UserError(
            f"{num_items} items exceed the {len(prefix)} codes of the random trie; "
            "give fewer items"
        )
    sample = torch.randperm(len(prefix), generator=generator)[:num_items]
    codes = torch.stack([prefix // 65536, prefix // 256 % 256, prefix % 256, last], 1)
    return codes[sample]


def random_histories(
    users: int, items: int, generator: torch.Generator
) -> list[list[int]]:
    """Return random histories of 3 to 20 items, 9 on average, shortest first.

    Args:
        users: Number of histories.
        items: Number of items of the catalogue.
        generator: Source of random numbers.
    """
    extra = torch.empty(users).geometric_(1 / 8, generator=generator).long() - 1
    lengths = (3 + extra).clamp(max=20).sort().values
    return [
        torch.randint(0, items, (n,), generator=generator).tolist()
        for n in lengths.tolist()
    ]


def real_histories(num_users: int, tables: str, longest: int) -> list[list[int]]:
    """Return the histories of test requests, shortest first.

    Args:
        num_users: Largest number of histories, spread evenly over the lengths.
        tables: TABLES, made by jobs.prepare.
        longest: Largest number of items per history, the latest ones.

    Raises:
        UserError: If there are no test requests.
    """
    examples = RetrievalDataset.load(
        join(tables, "sequences"), "test", max_history=longest
    )
    if len(examples) == 0:
        raise UserError(f"{tables} has no test requests; give tables with a test split")
    order = np.argsort(examples.lengths, kind="stable")
    ranks = np.linspace(0, len(order) - 1, min(num_users, len(order))).round()
    rows = order[ranks.astype(np.int64)]
    return [examples.collate(row[None]).history[0].tolist() for row in rows]


def model_name(variant: str) -> str:
    """Return the registry's name of a variant's model."""
    names = (
        "lc_rec_nezha",
        "lc_rec_sid_mlp",
        "lc_rec",
        "mamba2",
        "gdn",
        "one_layer",
        "earn",
        "nezha",
        "atspeed_r",
        "atspeed_s",
        "sid_mlp_pp",
        "sid_mlp",
    )
    return next((name for name in names if variant.startswith(name)), "tiger")


@dataclass(frozen=True)
class Source:
    """Where models, catalogue and histories come from."""

    items: int
    """Number of items of the random catalogue."""
    seed: int
    """Seed of codes, weights and histories."""
    tables: str | None = None
    """TABLES with the histories, or None for random histories."""
    sids: str | None = None
    """SIDS of the checkpoints."""
    checkpoints: tuple[tuple[str, str], ...] = ()
    """Pairs (model, checkpoint) of trained models; empty for random weights."""


@lru_cache(maxsize=1)
def load_histories(source: Source) -> list[list[int]]:
    """Return the histories from which batches are drawn, shortest first."""
    if source.tables:
        return real_histories(USERS, source.tables, TigerConfig().max_history)
    return random_histories(
        USERS, source.items, torch.Generator().manual_seed(source.seed)
    )


@lru_cache(maxsize=1)
def load_catalogue(source: Source) -> Catalogue:
    """Return the catalogue of the checkpoints, or one with random codes.

    A random catalogue has `source.items` items, or more if the histories need them.
    """
    if source.checkpoints:
        return Catalogue.load(str(source.tables), source.sids)
    largest_item = max(max(history) for history in load_histories(source))
    num_items = max(source.items, largest_item + 1)
    codes = random_codes(num_items, torch.Generator().manual_seed(source.seed))
    return Catalogue.from_codes(codes, (256, 256, 256, 256))


@cache
def load_model(source: Source, name: str) -> nn.Module:
    """Return a model on the device, trained or with random weights."""
    torch.manual_seed(source.seed)
    if source.checkpoints:
        uri = dict(source.checkpoints)[name]
        model, _ = build.load_model(uri, load_catalogue(source), name)
    else:
        model = build.build_model({"name": name}, load_catalogue(source)).eval()
    return model.to(device())


def model_for(source: Source, variant: str) -> Any:
    """Return the model of a variant; variants of one model share it."""
    return load_model(source, model_name(variant))


def make_encoder_call(
    variant: str, model: Any
) -> tuple[str, Callable[[HistoryBatch], Any]]:
    """Return the name of a variant's encoder, and the function to time.

    Variants that share an encoder have the same name.
    """
    if variant in ("hf", "hf_nocache"):
        library = to_transformers(model)
        return "encoder/transformers", lambda batch: library.encoder(
            *encoder_inputs(model, batch)
        )
    if variant.endswith("plain"):
        return f"encoder/{model_name(variant)}_plain", model.encode
    if variant in ("lc_rec", "lc_rec_sid_mlp"):
        return "encoder/lc_rec", model.backbone.infer
    name = model_name(variant)
    if name not in ("earn", "nezha", "sid_mlp_pp", "lc_rec_nezha"):
        name = "tiger"
    return f"encoder/{name}", model.backbone.infer


def make_call(variant: str, model: Any, beam: int) -> Callable[[HistoryBatch], Any]:
    """Return the function to time: `recommend` for a batch with a variant's options.

    Args:
        variant: Name in `VARIANTS`.
        model: Model of the variant.
        beam: Number of beams.
    """
    options: dict[str, Any] = {"beam": beam}
    if variant in ("hf", "hf_nocache"):
        library = to_transformers(model)
        use_cache = variant == "hf"
        return lambda batch: generate(model, library, batch, TOP_K, beam, use_cache)
    if variant.startswith("nezha"):
        options["constrained"] = variant != "nezha_hash"
    if variant.endswith("allowed"):
        generator = torch.Generator().manual_seed(0)
        allowed = torch.rand(model.trie.num_items, generator=generator) < 0.5
        options["allowed"] = model.encode_allowed(allowed.to(device()))

    def call(batch: HistoryBatch) -> Any:
        if variant.endswith("plain"):
            return Student.recommend(model, batch, TOP_K, **options)
        return model.recommend(batch, TOP_K, **options)

    return call


def cut_batches(
    source: Source, variant: str, size: int, runs: int
) -> list[HistoryBatch]:
    """Return a batch per run, shortest histories first.

    Histories are padded to the longest history of their batch, or for plain variants
    to the maximum of the model.

    Args:
        source: Where the histories come from.
        variant: Variant whose padding is used.
        size: Users per batch.
        runs: Number of batches, spread evenly over the lengths of histories.

    Raises:
        UserError: If there are fewer histories than `size`.
    """
    histories = load_histories(source)
    if size > len(histories):
        raise UserError(
            f"batch {size} exceeds the {len(histories)} histories; give tables of more "
            f"users"
        )
    batches = []
    for run in range(runs):
        begin = max(0, round((run + 0.5) / runs * (len(histories) - size)))
        rows = histories[begin : begin + size]
        columns = max(map(len, rows))
        if variant.endswith("plain"):
            columns = TigerConfig().max_history
        batch = HistoryBatch(
            history=torch.tensor([row + [PAD] * (columns - len(row)) for row in rows]),
            history_length=torch.tensor([len(row) for row in rows]),
            user=torch.arange(len(rows)),
        )
        batches.append(batch.to(device()))
    return batches


def make(variant: str, params: Row) -> Call:
    """Return a warmed-up call of a variant: `recommend` for the batch of a run.

    Args:
        variant: Name in `VARIANTS`.
        params: Settings of the benchmark, among them the `source` of histories.
    """
    torch.set_num_threads(params["threads"])
    use_exact_onednn()
    source, runs = params["source"], params["runs"]
    recommend = make_call(variant, model_for(source, variant), params["beam"])
    batches = cut_batches(source, variant, params["batch"], runs)
    recommend(cut_batches(source, variant, 1, runs)[0])
    return lambda run: recommend(batches[run])


def make_encoder(variant: str, params: Row) -> tuple[str, Call]:
    """Return the name of a variant's encoder, and the call that runs it alone."""
    model = model_for(params["source"], variant)
    name, encode = make_encoder_call(variant, model)
    batches = cut_batches(params["source"], variant, params["batch"], params["runs"])

    @torch.no_grad()
    def call(run: int) -> Any:
        return encode(batches[run])

    return name, call


def decode(
    runs: int = 5,
    threads: int = 2,
    items: int = 25_000,
    seed: int = 0,
    variants: Iterable[str] = VARIANTS,
    batches: Iterable[int] = BATCHES,
    beams: Iterable[int] = BEAMS,
    slow: tuple[int, int] = SLOW_SIZE,
    histories: str | None = None,
    checkpoints: Iterable[str] = (),
    sids: str | None = None,
) -> Iterator[Row]:
    """Yield a row per variant and size (batch, beam).

    Args:
        runs: Timings per variant.
        threads: CPU threads.
        items: Items of a random catalogue.
        seed: Seed of codes, weights and histories.
        variants: Variants to time.
        batches: Batch sizes.
        beams: Beam widths.
        slow: The only size (batch, beam) of `SLOW` variants.
        histories: TABLES with the histories, or None for random histories.
        checkpoints: Checkpoints trained on `histories` and `sids`; empty for random
            weights.
        sids: SIDS of the checkpoints.

    Raises:
        UserError: If `checkpoints` are given without `histories` and `sids`.
    """
    trained = find_checkpoints(checkpoints)
    if trained and not (histories and sids):
        raise UserError(
            "--checkpoints are timed on their own tables; give --histories TABLES and "
            "--sids SIDS"
        )
    source = Source(items, seed, histories, sids, tuple(trained.items()))
    variants = [
        variant for variant in variants if not trained or model_name(variant) in trained
    ]
    sizes = [(batch, beam) for batch in sorted(batches) for beam in sorted(beams)]
    sizes_by_variant = {
        variant: [slow] if variant in SLOW else sizes for variant in variants
    }
    shared: Row = {"threads": threads, "runs": runs, "source": source}
    memory = measure_memory(sizes_by_variant, shared)
    on_cpu = device_name() == "cpu"
    reported: Row = {
        "items": items,
        "threads": threads,
        "seed": seed,
        "runs": runs,
        "histories": histories,
        "checkpoints": trained,
        "sids": sids,
        "k": TOP_K,
        "device": device_name(),
        "kernels": on_cpu and kernels.library() is not None,  # built on first use
    }
    reported["mean_history"] = round(
        statistics.mean(map(len, load_histories(source))), 2
    )
    for size in dict.fromkeys(chain(*sizes_by_variant.values())):
        memory_by_variant = {
            variant: memory[variant, size]
            for variant in variants
            if size in sizes_by_variant[variant]
        }
        yield from time_size(size, memory_by_variant, shared, reported)


def time_size(
    size: tuple[int, int], memory: dict[str, float], shared: Row, reported: Row
) -> Iterator[Row]:
    """Time the variants of one size in turn, and yield a row per variant.

    Args:
        size: Batch size and beam width.
        memory: Peak memory in MB of each variant to time.
        shared: Params of the calls other than the size.
        reported: Params other than the size that rows show.
    """
    batch, beam = size
    params = {"batch": batch, "beam": beam, **shared}
    calls = {variant: make(variant, params) for variant in memory}
    parts = {variant: make_encoder(variant, params) for variant in memory}
    shown = {"batch": batch, "beam": beam, **reported}
    yield from time_in_turns("decode", calls, shown, batch, memory, parts)


def measure_memory(
    sizes: dict[str, list[tuple[int, int]]], shared: Row
) -> dict[tuple[str, tuple[int, int]], float]:
    """Return the peak memory in MB by variant and size, each variant in a new process.

    Args:
        sizes: Sizes (batch, beam) of each variant.
        shared: Params other than the size.
    """
    memory = {}
    for variant, variant_sizes in sizes.items():
        # The plain path is built before the measurement, so that the tables of a fast
        # path count as memory of the fast path.
        first = variant.replace("_fast", "_plain"), {"batch": 1, "beam": 2, **shared}
        settings = [
            {"batch": batch, "beam": beam, **shared} for batch, beam in variant_sizes
        ]
        peaks = in_fresh_process(peak_memory, make, first, variant, settings)
        for size, peak in zip(variant_sizes, peaks, strict=True):
            memory[variant, size] = peak
    return memory


def find_checkpoints(folders: Iterable[str]) -> dict[str, str]:
    """Return the URI of the checkpoint of each model, by the name of the model.

    Args:
        folders: Folders of checkpoints or of finished runs.

    Raises:
        UserError: If two checkpoints are of one model, or a model has no variant.
    """
    checkpoints: dict[str, str] = {}
    for folder in folders:
        uri = checkpoint.locate(folder)
        name = checkpoint.read(uri).model["name"]
        if name in checkpoints:
            raise UserError(
                f"{uri} and {checkpoints[name]} are both of the model '{name}'; give "
                f"one of them"
            )
        if name not in map(model_name, VARIANTS):
            raise UserError(
                f"{uri} is of the model '{name}', which has no variant; remove it"
            )
        checkpoints[name] = uri
    return checkpoints
