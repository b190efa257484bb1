"""Users per second, latency and peak memory of every way to decode semantic IDs here, on one catalogue.

    python -m models.bench decode

Variants, slowest first: TIGER by `transformers` generate without and with its cache; TIGER verifying AtSpeed's drafts,
of which random weights accept hardly any, their slowest case; TIGER by our decoder; Mamba2; Gated DeltaNet; one decoder
layer; EARN; NEZHA within the trie and with the published hash set after the search; SID-MLP and SID-MLP++ with every
history padded to the maximum, as published; and both by the fast path. On a CPU SID-MLP's is timed without the compiled
kernels (`_torch`) and with those for processors without AVX-512 (`_v3`) too. LC-Rec, NEZHA and SID-MLP on it have a
small language model of their own, so they compare with each other.

Weights are random, as what most searches do depends on the shape of the catalogue and not on what was learned; or
`checkpoints` gives trained models, which are timed on the histories and codes of their own tables, with the variants
that are of these models. All variants of a size are timed in turn in one run; batches hold users of like history
length, as in evaluation, and those of the runs are spread evenly over the lengths, so the median run is that of the
median user. The encoder of each variant is timed alone in the same run (`encode_s`); `decode_s` is the rest, such as
the paper's 16.25 times are about.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from models import checkpoint, registry
from models.bench.harness import Row, device, paired, peak_memory, resident_peak_mb, risen_mb
from models.matmul import use_exact_onednn
from models.retrieval import kernels
from models.retrieval.data import PAD, Catalogue, Examples
from models.retrieval.teacher import locate
from models.retrieval.tiger import TigerConfig
from models.tables import UserError, join

Batch = dict[str, Tensor]

VARIANTS = (
    "hf_nocache",
    "hf",
    "atspeed_r",
    "atspeed_s",
    "tiger_shared_kv",
    "mamba2",
    "gdn",
    "one_layer",
    "earn",
    "nezha",
    "nezha_hash",
    "sid_mlp_plain",
    "sid_mlp_fast",
    "sid_mlp_pp_plain",
    "sid_mlp_pp_fast",
    "lc_rec",
    "lc_rec_nezha",
    "lc_rec_sid_mlp",
)
"""All variants, slowest first, those of LC-Rec by themselves."""

BUILDS = {"_torch": "0", "_v3": "x86-64-v3"}
"""TRIELINE_KERNELS of variants so named; others take what is set."""

SLOW = ("hf_nocache", "hf", "atspeed_r", "atspeed_s", "tiger_shared_kv")
"""Timed at one size only."""

BATCHES, BEAMS = (1, 32, 256), (10, 20, 50)
"""Sizes of the others."""

SLOW_SIZE = (32, 50)
"""Batch and beam of the slow ones."""

MEAN_BRANCHING = (256, 38, 2.2, 1.2)
"""Children per node of the Instruments catalogue (Table 7 of the SID-MLP paper)."""

TOP_K = 10
USERS = 1024
"""Histories that batches are cut from."""


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


def real_histories(users: int, tables: str, longest: int) -> list[list[int]]:
    """The latest `longest` items of test requests of the folder `tables` of jobs.prepare, shortest first; `users` of
    them, evenly over the lengths, or all where there are fewer."""
    examples = Examples.load(join(tables, "sequences"), "test", max_history=longest)
    if len(examples) == 0:
        raise UserError(f"{tables} has no test requests to take histories from; give other tables")
    order = np.argsort(examples.lengths, kind="stable")
    rows = order[np.linspace(0, len(order) - 1, min(users, len(order))).round().astype(np.int64)]
    return [examples.collate(row[None])["history"][0].tolist() for row in rows]


def model_of(variant: str) -> str:
    """The model that the variant is of."""
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


def random_models(items: int, seed: int) -> Callable[[str], nn.Module]:
    """What makes the model of a name, with random weights, on a catalogue of random codes."""
    codes = random_codes(items, torch.Generator().manual_seed(seed))
    catalogue = Catalogue.from_codes(codes, (256, 256, 256, 256))
    return lambda name: registry.build(registry.config_from_dict({"name": name}), catalogue).eval()


def trained_models(checkpoints: dict[str, str], tables: str, sids: str) -> Callable[[str], nn.Module]:
    """What loads the model of a name from its checkpoint."""
    catalogue = Catalogue.load(tables, sids)
    return lambda name: registry.load(checkpoints[name], catalogue, name)[0]


def make_models(make: Callable[[str], nn.Module], seed: int, variants: Iterable[str]) -> dict[str, nn.Module]:
    """A model per variant, those of one kind shared."""
    torch.manual_seed(seed)
    made: dict[str, Any] = {}
    models: dict[str, nn.Module] = {}
    for variant in variants:
        kind = "sid_mlp_pp_plain" if variant == "sid_mlp_pp_plain" else model_of(variant)
        if kind not in made:
            made[kind] = make(model_of(variant)).to(device())
        if kind == "sid_mlp_pp_plain":
            made[kind].backbone.pack = False  # computes the places of padding too, as published
        models[variant] = made[kind]
    return models


def encoder(variant: str, model: Any) -> tuple[str, Callable[[Batch], Any]]:
    """What a call of the variant begins with, by a name that variants with the same one share."""
    if variant in ("hf", "hf_nocache"):
        return "encoder/transformers", lambda batch: model.by_transformers().encoder(*model.with_mask(batch))
    if variant.endswith("plain"):
        return f"encoder/{model_of(variant)}_plain", model.encode
    if variant in ("lc_rec", "lc_rec_sid_mlp"):
        return "encoder/lc_rec", model.backbone.infer
    own = model_of(variant) in ("earn", "nezha", "sid_mlp_pp", "lc_rec_nezha")
    return f"encoder/{model_of(variant) if own else 'tiger'}", model.backbone.infer


def builds() -> list[str]:
    """SID-MLP's fast path with other builds of the kernels, as many as this machine can run."""
    if device().type != "cpu" or kernels.library() is None:
        return []
    other = platform.machine() == "x86_64" and torch.cpu._is_avx2_supported()
    return [f"sid_mlp_fast{suffix}" for suffix in BUILDS if suffix != "_v3" or other]


def caller(variant: str, model: nn.Module, beam: int) -> Callable[[Batch], Any]:
    """What is timed: recommending to a batch."""
    options: dict[str, Any] = {"beam": beam}
    if variant in SLOW and not variant.startswith("atspeed"):  # which has one way to search
        options["decoder"] = "shared_kv" if variant == "tiger_shared_kv" else variant
    elif variant.startswith("nezha"):
        options["constrained"] = variant != "nezha_hash"
    elif variant.startswith("sid_mlp"):
        options["path"] = "plain" if variant.endswith("plain") else "fast"
    recommend: Any = model.recommend
    usual = os.environ.get("TRIELINE_KERNELS", "")
    build = next((build for suffix, build in BUILDS.items() if variant.endswith(suffix)), usual)

    def call(batch: Batch) -> Any:
        os.environ["TRIELINE_KERNELS"] = build
        try:
            return recommend(batch, TOP_K, **options)
        finally:
            os.environ["TRIELINE_KERNELS"] = usual

    return call


def make_batches(histories: list[list[int]], size: int, runs: int, width: int | None) -> list[Batch]:
    """A batch per run, shortest histories first, padded to `width` or else to its own longest."""
    batches = []
    for run in range(runs):
        begin = max(0, round((run + 0.5) / runs * (len(histories) - size)))
        rows = histories[begin : begin + size]
        columns = width or max(map(len, rows))
        batch = {
            "history": torch.tensor([row + [PAD] * (columns - len(row)) for row in rows]),
            "history_length": torch.tensor([len(row) for row in rows]),
            "user": torch.arange(len(rows)),
        }
        batches.append({name: value.to(device()) for name, value in batch.items()})
    return batches


class Setting:
    """Models, histories and batches of the benchmark."""

    def __init__(self, params: Row, variants: Iterable[str]) -> None:
        torch.set_num_threads(params["threads"])
        use_exact_onednn()  # for all variants
        longest, tables = TigerConfig().max_history, params["histories"]
        if tables is None:
            generator = torch.Generator().manual_seed(params["seed"])
            self.histories = random_histories(USERS, params["items"], generator)
        else:
            self.histories = real_histories(USERS, tables, longest)
        self.longest, self.runs = longest, params["runs"]
        if params["checkpoints"]:
            make = trained_models(params["checkpoints"], tables, params["sids"])
        else:
            make = random_models(max(params["items"], 1 + max(map(max, self.histories))), params["seed"])
        self.models = make_models(make, params["seed"], variants)

    def batches(self, variant: str, size: int) -> list[Batch]:
        """One per run; for a plain variant padded to the longest history there may be."""
        if size > len(self.histories):
            raise UserError(f"batch {size} exceeds the {len(self.histories)} histories; give tables of more users")
        return make_batches(self.histories, size, self.runs, self.longest if variant.endswith("plain") else None)

    def calls(self, variant: str, size: int, beam: int) -> Callable[[int], Any]:
        """What a run of the variant does, by the number of the run."""
        call, given = caller(variant, self.models[variant], beam), self.batches(variant, size)
        return lambda run: call(given[run])

    def encoder(self, variant: str, size: int) -> tuple[str, Callable[[int], Any]]:
        """As `encoder`, on the batches of the runs."""
        (name, encode), given = encoder(variant, self.models[variant]), self.batches(variant, size)

        @torch.no_grad()
        def call(run: int) -> Any:
            return encode(given[run])

        return name, call

    def warm_up(self, variant: str) -> None:
        """Builds what a first call builds."""
        caller(variant, self.models[variant], 2)(self.batches(variant, 1)[0])


def decode(
    runs: int = 5,
    threads: int = 2,
    items: int = 25_000,
    seed: int = 0,
    variants: Iterable[str] | None = None,
    batches: Iterable[int] = BATCHES,
    beams: Iterable[int] = BEAMS,
    slow: tuple[int, int] = SLOW_SIZE,
    histories: str | None = None,
    checkpoints: Iterable[str] = (),
    sids: str | None = None,
) -> Iterator[Row]:
    """One row per variant and size (batch, beam), each size timed in one interleaved run; `SLOW` variants at the size
    `slow` alone; without `variants` all are timed. `histories` are tables of jobs.prepare, or None for random ones;
    `checkpoints` are trained on them and on `sids`, or empty for random weights."""
    trained = find_checkpoints(checkpoints)
    if trained and not (histories and sids):
        raise UserError("--checkpoints are timed on their own tables; give --histories TABLES and --sids SIDS")
    shared: Row = {"items": items, "threads": threads, "seed": seed, "runs": runs, "histories": histories}
    shared |= {"checkpoints": trained, "sids": sids}
    shared |= {"k": TOP_K, "device": torch.cuda.get_device_name() if device().type == "cuda" else "cpu"}
    shared["kernels"] = shared["device"] == "cpu" and kernels.library() is not None  # built here, if they are not yet
    variants = [*VARIANTS, *builds()] if variants is None else list(variants)
    variants = [variant for variant in variants if not trained or model_of(variant) in trained]
    quick = [variant for variant in variants if variant not in SLOW]
    sizes = {(batch, beam): list(quick) for batch in sorted(batches) for beam in sorted(beams)} if quick else {}
    if len(quick) < len(variants):
        sizes.setdefault(slow, [])[:0] = [variant for variant in variants if variant in SLOW]
    memory = {
        variant: peak_memory(peaks, shared, variant, [size for size, timed in sizes.items() if variant in timed])
        for variant in variants
    }
    setting = Setting(shared, variants)
    for variant in variants:
        setting.warm_up(variant)
    shared["mean_history"] = round(statistics.mean(map(len, setting.histories)), 2)
    for (batch, beam), timed in sizes.items():
        calls = {variant: setting.calls(variant, batch, beam) for variant in timed}
        params = {"batch": batch, "beam": beam, **shared}
        parts = {variant: setting.encoder(variant, batch) for variant in timed}
        yield from paired("decode", calls, params, batch, {v: memory[v][batch, beam] for v in timed}, parts)


def find_checkpoints(given: Iterable[str]) -> dict[str, str]:
    """The model's name of each checkpoint, or finished run; UserError for two of one model, or what nobody times."""
    found: dict[str, str] = {}
    for place in given:
        uri = locate(place, "checkpoint")
        name = checkpoint.read(uri).model["name"]
        if name in found:
            raise UserError(f"{uri} and {found[name]} are both of the model '{name}'; give one of them")
        if name not in map(model_of, VARIANTS):
            raise UserError(f"{uri} is of the model '{name}', which has no variant; leave it out")
        found[name] = uri
    return found


def peaks(params: Row, variant: str, sizes: list[tuple[int, int]]) -> dict[tuple[int, int], float]:
    """MB that a call of a variant needs at its peak, by size, on the longest histories; in a process of its own.

    On a CPU a process's peak never falls, so a size's is that of all sizes up to it.
    """
    setting = Setting(params, [variant])
    plain = variant.split("_fast")[0] + "_plain" if "_fast" in variant else variant
    setting.models[plain] = setting.models[variant]
    setting.warm_up(plain)  # so that the tables of a fast path count as its memory
    found = {}
    before = resident_peak_mb()
    for batch, beam in sizes:
        call, longest = caller(variant, setting.models[variant], beam), setting.batches(variant, batch)[-1]
        if device().type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            call(longest)
            found[batch, beam] = (torch.cuda.max_memory_allocated() - held) / 2**20
        else:
            call(longest)
            found[batch, beam] = risen_mb(before)
    return found
