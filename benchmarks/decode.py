"""Paired timings of all ways to decode semantic IDs, on one catalogue.

    python -m benchmarks decode

Variants, slowest first: TIGER by `transformers` generate without and with its cache;
TIGER verifying AtSpeed's drafts (random weights accept hardly any, the slowest case);
TIGER by this project's decoder; Mamba2; Gated DeltaNet; one decoder layer; EARN; NEZHA
within the trie, and with the published hash set after the search; SID-MLP and SID-MLP++
with histories padded to the maximum, as published; and both by the fast path. `allowed`
are TIGER and SID-MLP among half of the items. TRIELINE_KERNELS chooses the kernels of
all variants. LC-Rec, and NEZHA and SID-MLP on it, have a small language model and
compare with each other.

Weights are random, as most searches depend on the shape of the catalogue only. With
`checkpoints`, trained models are timed on histories and codes of their own tables. All
variants of a size are timed in turn in one run. A batch has users with histories of
similar length, as in evaluation, and the batches of the runs are spread evenly over the
lengths, so the median run is that of the median user. The encoder of each variant is
timed separately (`encode_s`); `decode_s` is the rest, which the paper's factor of 16.25
is about.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

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
from models.retrieval.data import PAD, Catalogue, HistoryBatch, RetrievalDataset
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
"""All variants, slowest first; those of LC-Rec come last."""

SLOW = (
    "hf_nocache",
    "hf",
    "atspeed_r",
    "atspeed_s",
    "tiger_shared_kv",
    "tiger_allowed",
)
"""Variants that are timed at one size only."""

BATCHES, BEAMS = (1, 32, 256), (10, 20, 50)
"""Sizes of the other variants."""

SLOW_SIZE = (32, 50)
"""Batch and beam of the slow variants."""

MEAN_BRANCHING = (256, 38, 2.2, 1.2)
"""Children per node of the Instruments catalogue (Table 7 of the SID-MLP paper)."""

TOP_K = 10
USERS = 1024
"""Histories that batches are taken from."""


def random_codes(items: int, generator: torch.Generator) -> Tensor:
    """Return distinct codes (items, 4) with uneven branching.

    Mean branching follows `MEAN_BRANCHING`.

    Raises:
        UserError: If there are more items than codes.
    """
    first, second, third, fourth = MEAN_BRANCHING
    scale = max(1.0, items / (first * second * third * fourth))
    # second codes by uneven random weights: first codes differ in their children
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
    if len(prefix) < items:
        raise UserError(
            f"{items} items are more than the {len(prefix)} that codes can be made "
            f"for; ask for fewer"
        )
    kept = torch.randperm(len(prefix), generator=generator)[:items]
    return torch.stack([prefix // 65536, prefix // 256 % 256, prefix % 256, last], 1)[
        kept
    ]


def random_histories(
    users: int, items: int, generator: torch.Generator
) -> list[list[int]]:
    """Return histories of 3 to 20 random items, 9 in the mean, shortest first."""
    extra = torch.empty(users).geometric_(1 / 8, generator=generator).long() - 1
    lengths = (3 + extra).clamp(max=20).sort().values
    return [
        torch.randint(0, items, (n,), generator=generator).tolist()
        for n in lengths.tolist()
    ]


def real_histories(users: int, tables: str, longest: int) -> list[list[int]]:
    """Return the latest items of test requests, shortest first.

    Args:
        users: Most histories, spread evenly over the lengths.
        tables: Folder of jobs.prepare.
        longest: Most items of a history.

    Raises:
        UserError: If there are no test requests.
    """
    examples = RetrievalDataset.load(
        join(tables, "sequences"), "test", max_history=longest
    )
    if len(examples) == 0:
        raise UserError(
            f"{tables} has no test requests to take histories from; give other tables"
        )
    order = np.argsort(examples.lengths, kind="stable")
    rows = order[
        np.linspace(0, len(order) - 1, min(users, len(order))).round().astype(np.int64)
    ]
    return [examples.collate(row[None]).history[0].tolist() for row in rows]


def model_name(variant: str) -> str:
    """Return the name of the model of a variant."""
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
    """Source of models and histories."""

    items: int
    """Items of the random catalogue."""
    seed: int
    """Seed of codes, weights and histories."""
    histories: str | None = None
    """Folder of jobs.prepare, or None for random histories."""
    sids: str | None = None
    """Semantic IDs of the checkpoints."""
    checkpoints: tuple[tuple[str, str], ...] = ()
    """(model, checkpoint) of trained models; empty for random weights."""


@lru_cache(maxsize=1)
def load_histories(source: Source) -> list[list[int]]:
    """Return the histories that batches are taken from, shortest first."""
    if source.histories:
        return real_histories(USERS, source.histories, TigerConfig().max_history)
    return random_histories(
        USERS, source.items, torch.Generator().manual_seed(source.seed)
    )


@lru_cache(maxsize=1)
def load_catalogue(source: Source) -> Catalogue:
    """Return the checkpoints' catalogue, or a random one with the histories' items."""
    if source.checkpoints:
        return Catalogue.load(str(source.histories), source.sids)
    items = max(source.items, 1 + max(map(max, load_histories(source))))
    codes = random_codes(items, torch.Generator().manual_seed(source.seed))
    return Catalogue.from_codes(codes, (256, 256, 256, 256))


@cache
def load_model(source: Source, name: str) -> nn.Module:
    """Return the model of all its variants, trained or with random weights."""
    torch.manual_seed(source.seed)
    if source.checkpoints:
        uri = dict(source.checkpoints)[name]
        model, _ = build.load_model(uri, load_catalogue(source), name)
    else:
        model = build.build_model({"name": name}, load_catalogue(source)).eval()
    return model.to(device())


def model_for(source: Source, variant: str) -> Any:
    return load_model(source, model_name(variant))


def set_padding(variant: str, model: Any) -> None:
    """Make SID-MLP++ compute padding too, as published, if the variant is plain."""
    if variant.startswith("sid_mlp_pp"):
        model.backbone.pack = variant != "sid_mlp_pp_plain"


def make_encoder_call(
    variant: str, model: Any
) -> tuple[str, Callable[[HistoryBatch], Any]]:
    """Return the name of a variant's encoder, and the function to time for it.

    Variants that share an encoder get the same name.
    """
    if variant in ("hf", "hf_nocache"):
        return "encoder/transformers", lambda batch: model.transformers_model().encoder(
            *model.encoder_inputs(batch)
        )
    if variant.endswith("plain"):
        return f"encoder/{model_name(variant)}_plain", model.encode
    if variant in ("lc_rec", "lc_rec_sid_mlp"):
        return "encoder/lc_rec", model.backbone.infer
    own = model_name(variant) in ("earn", "nezha", "sid_mlp_pp", "lc_rec_nezha")
    return f"encoder/{model_name(variant) if own else 'tiger'}", model.backbone.infer


def make_call(variant: str, model: Any, beam: int) -> Callable[[HistoryBatch], Any]:
    """Return the function to time: recommending to a batch."""
    options: dict[str, Any] = {"beam": beam}
    if variant in SLOW and not variant.startswith(
        "atspeed"
    ):  # which has one way to search
        options["decoder"] = "shared_kv" if variant.startswith("tiger") else variant
    elif variant.startswith("nezha"):
        options["constrained"] = variant != "nezha_hash"
    elif variant.startswith("sid_mlp"):
        options["path"] = "plain" if variant.endswith("plain") else "fast"
    if variant.endswith("allowed"):
        some = (
            torch.rand(model.trie.num_items, generator=torch.Generator().manual_seed(0))
            < 0.5
        )
        options["allowed"] = model.encode_allowed(some.to(device()))

    def call(batch: HistoryBatch) -> Any:
        set_padding(variant, model)
        return model.recommend(batch, TOP_K, **options)

    return call


def cut_batches(
    source: Source, variant: str, size: int, runs: int
) -> list[HistoryBatch]:
    """Return a batch per run, shortest histories first.

    Histories are padded to the longest of their batch, those of plain variants to the
    maximum.
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
        columns = (
            TigerConfig().max_history
            if variant.endswith("plain")
            else max(map(len, rows))
        )
        batch = HistoryBatch(
            history=torch.tensor([row + [PAD] * (columns - len(row)) for row in rows]),
            history_length=torch.tensor([len(row) for row in rows]),
            user=torch.arange(len(rows)),
        )
        batches.append(batch.to(device()))
    return batches


def make(variant: str, params: Row) -> Call:
    """Build a call of a variant, and warm it up."""
    torch.set_num_threads(params["threads"])
    use_exact_onednn()  # for all variants
    source, runs = params["source"], params["runs"]
    call = make_call(variant, model_for(source, variant), params["beam"])
    given = cut_batches(source, variant, params["batch"], runs)
    call(cut_batches(source, variant, 1, runs)[0])
    return lambda run: call(given[run])


def make_encoder(variant: str, params: Row) -> tuple[str, Call]:
    """Build the call of a variant's `encoder`."""
    model = model_for(params["source"], variant)
    name, encode = make_encoder_call(variant, model)
    given = cut_batches(params["source"], variant, params["batch"], params["runs"])

    @torch.no_grad()
    def call(run: int) -> Any:
        set_padding(variant, model)
        return encode(given[run])

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
        histories: Folder of jobs.prepare, or None for random histories.
        checkpoints: Models that were trained on `histories` and `sids`; empty for
            random weights.
        sids: Semantic IDs of the checkpoints.
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
    timed = {v: [slow] if v in SLOW else sizes for v in variants}
    shared: Row = {"threads": threads, "runs": runs, "source": source}
    memory: dict[tuple[str, tuple[int, int]], float] = {}
    for variant, variant_sizes in timed.items():
        # so that the tables of a fast path count as its memory
        first = variant.replace("_fast", "_plain"), {"batch": 1, "beam": 2, **shared}
        settings = [
            {"batch": batch, "beam": beam, **shared} for batch, beam in variant_sizes
        ]
        peaks = in_fresh_process(peak_memory, make, first, variant, settings)
        memory |= {
            (variant, size): peak
            for size, peak in zip(variant_sizes, peaks, strict=True)
        }
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
    for size in dict.fromkeys(
        size for variant_sizes in timed.values() for size in variant_sizes
    ):
        variants_of_size = [
            variant for variant, variant_sizes in timed.items() if size in variant_sizes
        ]
        params = {"batch": size[0], "beam": size[1], **shared}
        calls = {variant: make(variant, params) for variant in variants_of_size}
        parts = {variant: make_encoder(variant, params) for variant in variants_of_size}
        params = {"batch": size[0], "beam": size[1], **reported}
        yield from time_in_turns(
            "decode",
            calls,
            params,
            size[0],
            {v: memory[v, size] for v in variants_of_size},
            parts,
        )


def find_checkpoints(places: Iterable[str]) -> dict[str, str]:
    """Return the checkpoint, or finished run, of each model.

    Raises:
        UserError: If two are of one model, or a model has no variant.
    """
    checkpoints: dict[str, str] = {}
    for place in places:
        uri = checkpoint.locate(place)
        name = checkpoint.read(uri).model["name"]
        if name in checkpoints:
            raise UserError(
                f"{uri} and {checkpoints[name]} are both of the model '{name}'; give "
                f"one of them"
            )
        if name not in map(model_name, VARIANTS):
            raise UserError(
                f"{uri} is of the model '{name}', which has no variant; leave it out"
            )
        checkpoints[name] = uri
    return checkpoints
