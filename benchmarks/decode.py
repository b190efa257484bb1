"""Users per second, latency and peak memory of every way to decode semantic IDs here, on one catalogue.

    python -m benchmarks decode

Variants, slowest first: TIGER by `transformers` generate without and with its cache; TIGER verifying AtSpeed's drafts,
of which random weights accept hardly any, their slowest case; TIGER by our decoder; Mamba2; Gated DeltaNet; one decoder
layer; EARN; NEZHA within the trie and with the published hash set after the search; SID-MLP and SID-MLP++ with every
history padded to the maximum, as published; and both by the fast path; `allowed` are TIGER and SID-MLP among half of
the items. TRIELINE_KERNELS chooses the kernels of all. LC-Rec, NEZHA and SID-MLP on it have a small language model of
their own, so they compare with each other.

Weights are random, as what most searches do depends on the shape of the catalogue and not on what was learned; or
`checkpoints` gives trained models, which are timed on the histories and codes of their own tables, with the variants
that are of these models. All variants of a size are timed in turn in one run; batches hold users of like history
length, as in evaluation, and those of the runs are spread evenly over the lengths, so the median run is that of the
median user. The encoder of each variant is timed alone in the same run (`encode_s`); `decode_s` is the rest, such as
the paper's 16.25 times are about.
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
from models.retrieval.data import PAD, Catalogue, RetrievalDataset
from models.retrieval.tiger import TigerConfig
from models.storage import checkpoint
from models.storage.tables import UserError, join

Batch = dict[str, Tensor]

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
"""All variants, slowest first, those of LC-Rec by themselves."""

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
"""Sizes of the others."""

SLOW_SIZE = (32, 50)
"""Batch and beam of the slow variants."""

MEAN_BRANCHING = (256, 38, 2.2, 1.2)
"""Children per node of the Instruments catalogue (Table 7 of the SID-MLP paper)."""

TOP_K = 10
USERS = 1024
"""Number of histories that batches are cut from."""


def random_codes(items: int, generator: torch.Generator) -> Tensor:
    """Return (items, 4) distinct codes whose mean branching follows `MEAN_BRANCHING`.

    Raises:
        UserError: if more items are asked for than codes can be drawn.
    """
    first, second, third, fourth = MEAN_BRANCHING
    scale = max(1.0, items / (first * second * third * fourth))
    # second codes: the highest of uneven random weights, so that some first codes have many and some few
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
            f"{items} items are more than the {len(prefix)} that codes can be made for; ask for fewer"
        )
    kept = torch.randperm(len(prefix), generator=generator)[:items]
    return torch.stack([prefix // 65536, prefix // 256 % 256, prefix % 256, last], 1)[
        kept
    ]


def random_histories(
    users: int, items: int, generator: torch.Generator
) -> list[list[int]]:
    """Return histories of 3 to 20 random items, 9 on average, shortest first."""
    extra = torch.empty(users).geometric_(1 / 8, generator=generator).long() - 1
    lengths = (3 + extra).clamp(max=20).sort().values
    return [
        torch.randint(0, items, (n,), generator=generator).tolist()
        for n in lengths.tolist()
    ]


def real_histories(users: int, tables: str, longest: int) -> list[list[int]]:
    """Return the latest `longest` items of test requests, shortest first.

    Args:
        users: Number of requests, spread evenly over the lengths; all if there are
            fewer.
        tables: Folder that jobs.prepare made.
        longest: Largest length of a history.
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
    return [examples.collate(row[None])["history"][0].tolist() for row in rows]


def model_name(variant: str) -> str:
    """Return the name of the variant's model."""
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
    """Origin of the models and histories of a benchmark."""

    items: int
    """Items of the random catalogue."""
    seed: int
    """Seed of codes, weights and histories."""
    histories: str | None = None
    """Tables of jobs.prepare; None for random histories."""
    sids: str | None = None
    """Semantic IDs that the checkpoints were trained with."""
    checkpoints: tuple[tuple[str, str], ...] = ()
    """(model, checkpoint) of trained models; empty for random weights."""


@lru_cache(maxsize=1)
def load_histories(source: Source) -> list[list[int]]:
    """Return the histories that batches are cut from, shortest first."""
    if source.histories:
        return real_histories(USERS, source.histories, TigerConfig().max_history)
    return random_histories(
        USERS, source.items, torch.Generator().manual_seed(source.seed)
    )


@lru_cache(maxsize=1)
def load_catalogue(source: Source) -> Catalogue:
    """Return the catalogue of the checkpoints, or a random one with all items of the
    histories.
    """
    if source.checkpoints:
        return Catalogue.load(str(source.histories), source.sids)
    items = max(source.items, 1 + max(map(max, load_histories(source))))
    codes = random_codes(items, torch.Generator().manual_seed(source.seed))
    return Catalogue.from_codes(codes, (256, 256, 256, 256))


@cache
def load_model(source: Source, name: str) -> nn.Module:
    """Return the model that all its variants share, trained or with random weights."""
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
    """Let SID-MLP++ as published compute padded positions too."""
    if variant.startswith("sid_mlp_pp"):
        model.backbone.pack = variant != "sid_mlp_pp_plain"


def make_encoder_call(variant: str, model: Any) -> tuple[str, Callable[[Batch], Any]]:
    """Return the name of the variant's encoder and a call that runs it.

    Variants that share a name share the encoder.
    """
    if variant in ("hf", "hf_nocache"):
        return "encoder/transformers", lambda batch: model.by_transformers().encoder(
            *model.with_mask(batch)
        )
    if variant.endswith("plain"):
        return f"encoder/{model_name(variant)}_plain", model.encode
    if variant in ("lc_rec", "lc_rec_sid_mlp"):
        return "encoder/lc_rec", model.backbone.infer
    own = model_name(variant) in ("earn", "nezha", "sid_mlp_pp", "lc_rec_nezha")
    return f"encoder/{model_name(variant) if own else 'tiger'}", model.backbone.infer


def make_call(variant: str, model: Any, beam: int) -> Callable[[Batch], Any]:
    """Return the timed call: recommending for a batch."""
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

    def call(batch: Batch) -> Any:
        set_padding(variant, model)
        return model.recommend(batch, TOP_K, **options)

    return call


def cut_batches(source: Source, variant: str, size: int, runs: int) -> list[Batch]:
    """Return one batch per run, shortest histories first.

    A batch is padded to its own longest history; batches of a plain variant to the
    longest of all.
    """
    histories = load_histories(source)
    if size > len(histories):
        raise UserError(
            f"batch {size} exceeds the {len(histories)} histories; give tables of more users"
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
        batch = {
            "history": torch.tensor(
                [row + [PAD] * (columns - len(row)) for row in rows]
            ),
            "history_length": torch.tensor([len(row) for row in rows]),
            "user": torch.arange(len(rows)),
        }
        batches.append({name: value.to(device()) for name, value in batch.items()})
    return batches


def make(variant: str, params: Row) -> Call:
    """Return a call that runs the variant on a run's batch, after one warm-up call."""
    torch.set_num_threads(params["threads"])
    use_exact_onednn()  # for all variants
    source, runs = params["source"], params["runs"]
    call = make_call(variant, model_for(source, variant), params["beam"])
    given = cut_batches(source, variant, params["batch"], runs)
    call(cut_batches(source, variant, 1, runs)[0])
    return lambda run: call(given[run])


def make_encoder(variant: str, params: Row) -> tuple[str, Call]:
    """Return the make_encoder_call's name and a call that runs it on a run's batch."""
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
    """Yield one row per variant and size (batch, beam), each size in one interleaved
    run.

    Args:
        slow: The only size of `SLOW` variants.
        histories: Tables of jobs.prepare; None for random histories.
        checkpoints: Models trained on these tables and on `sids`; empty for random
            weights.
    """
    trained = find_checkpoints(checkpoints)
    if trained and not (histories and sids):
        raise UserError(
            "--checkpoints are timed on their own tables; give --histories TABLES and --sids SIDS"
        )
    source = Source(items, seed, histories, sids, tuple(trained.items()))
    variants = [
        variant for variant in variants if not trained or model_name(variant) in trained
    ]
    sizes = [(batch, beam) for batch in sorted(batches) for beam in sorted(beams)]
    timed = {v: [slow] if v in SLOW else sizes for v in variants}
    shared: Row = {"threads": threads, "runs": runs, "source": source}
    memory: dict[tuple[str, tuple[int, int]], float] = {}
    for variant, own in timed.items():
        # so that the tables of a fast path count as its memory
        first = variant.replace("_fast", "_plain"), {"batch": 1, "beam": 2, **shared}
        settings = [{"batch": batch, "beam": beam, **shared} for batch, beam in own]
        found = in_fresh_process(peak_memory, make, first, variant, settings)
        memory |= {(variant, size): peak for size, peak in zip(own, found, strict=True)}
    told: Row = {
        "items": items,
        "threads": threads,
        "seed": seed,
        "runs": runs,
        "histories": histories,
    }
    told |= {"checkpoints": trained, "sids": sids, "k": TOP_K, "device": device_name()}
    told["kernels"] = (
        told["device"] == "cpu" and kernels.library() is not None
    )  # built here, if they are not yet
    told["mean_history"] = round(statistics.mean(map(len, load_histories(source))), 2)
    for size in dict.fromkeys(size for own in timed.values() for size in own):
        here = [variant for variant, own in timed.items() if size in own]
        params = {"batch": size[0], "beam": size[1], **shared}
        calls = {variant: make(variant, params) for variant in here}
        parts = {variant: make_encoder(variant, params) for variant in here}
        params = {"batch": size[0], "beam": size[1], **told}
        yield from time_in_turns(
            "decode", calls, params, size[0], {v: memory[v, size] for v in here}, parts
        )


def find_checkpoints(given: Iterable[str]) -> dict[str, str]:
    """Return the model's name of each checkpoint or finished run.

    Raises:
        UserError: for two checkpoints of one model, or a model without a variant.
    """
    found: dict[str, str] = {}
    for place in given:
        uri = checkpoint.locate(place)
        name = checkpoint.read(uri).model["name"]
        if name in found:
            raise UserError(
                f"{uri} and {found[name]} are both of the model '{name}'; give one of them"
            )
        if name not in map(model_name, VARIANTS):
            raise UserError(
                f"{uri} is of the model '{name}', which has no variant; leave it out"
            )
        found[name] = uri
    return found
