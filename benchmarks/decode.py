"""Time all ways to decode semantic IDs on one catalogue, in turn.

    python -m benchmarks decode --batch 32 --beam 50 --variants '[hf, tiger_shared_kv]'

Variants: TIGER by `transformers` generate without and with its cache; TIGER by this
project's decoder, whose beams share keys and values; TIGER verifying AtSpeed's drafts
(random weights accept hardly any, the slowest case); Mamba2; Gated DeltaNet; one
decoder layer; EARN; NEZHA; SID-MLP and SID-MLP++ with histories padded to the maximum,
as published; and both by the fast path. LC-Rec, and NEZHA and SID-MLP on it, have a
small language model and compare with each other.

Weights are random, as most searches depend on the shape of the catalogue only. A batch
has users with histories of similar length, as in evaluation, and the batches of the
runs are spread evenly over the lengths, so the median run is that of the median user.
A variant has two lines: `decode`, the time without the encoder, which the paper's
factor of 16.25 is about, and `encode` with `onednn_share`, the encoder's floating-point
operations per second as a share of those of a product of two matrices (1024, 1024). On
a GPU searches are CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.generate import encoder_inputs, generate, to_transformers
from benchmarks.harness import (
    Call,
    Line,
    device,
    in_fresh_process,
    peak_memory,
    time_in_turns,
    to_line,
)
from core.options import check_known
from models import loaded_model
from models.cpu.weights import use_exact_onednn
from models.dataset.batch import PAD
from models.retrieval.data import Catalogue, HistoryBatch
from models.retrieval.distillation.student import Student
from models.retrieval.tiger.tiger import TigerConfig

MODELS = {
    **dict.fromkeys(("hf_nocache", "hf", "tiger_shared_kv"), "tiger"),
    **{name: name for name in ("atspeed_r", "atspeed_s", "mamba2", "gdn", "one_layer")},
    **{name: name for name in ("earn", "nezha", "lc_rec", "lc_rec_nezha")},
    "lc_rec_sid_mlp": "lc_rec_sid_mlp",
    **dict.fromkeys(("sid_mlp_plain", "sid_mlp_fast"), "sid_mlp"),
    **dict.fromkeys(("sid_mlp_pp_plain", "sid_mlp_pp_fast"), "sid_mlp_pp"),
}
"""Model of each variant."""

MEAN_BRANCHING = (256, 38, 2.2, 1.2)
"""Children per node of the Instruments catalogue (Table 7 of the SID-MLP paper)."""

MAX_HISTORY = TigerConfig().max_history
TOP_K = 10
USERS = 1024
"""Number of histories from which batches are drawn."""

Step = Callable[[HistoryBatch], Any]
"""The encoder or the search of a variant."""


def random_codes(num_items: int, generator: torch.Generator) -> Tensor:
    """Return random distinct codes (N, 4) of N items with uneven branching.

    The mean number of children per level follows `MEAN_BRANCHING`, so N is at most
    about 25,000.
    """
    first, second, third, fourth = MEAN_BRANCHING
    # (256, 256): random weights of pairs of first and second code, with a random offset
    # per first code, so that first codes have different numbers of children
    weight = torch.randn(256, 256, generator=generator)
    weight += torch.randn(256, 1, generator=generator) * 0.5
    prefix = weight.flatten().topk(int(first * second)).indices
    for mean in (third + 0.15, fourth + 0.05):  # some leaves are dropped below
        more = torch.poisson(torch.full((len(prefix),), mean - 1), generator).long()
        prefix = prefix.repeat_interleave(1 + more)
        code = torch.randint(0, 256, prefix.shape, generator=generator)
        prefix = (prefix * 256 + code).unique()
    prefix = prefix[torch.randperm(len(prefix), generator=generator)[:num_items]]
    return torch.stack([prefix >> shift & 255 for shift in (24, 16, 8, 0)], 1)


@cache
def draw_inputs(items: int) -> tuple[list[list[int]], Catalogue]:
    """Draw histories of 3 to 20 items, shortest first, and a catalogue."""
    generator = torch.Generator().manual_seed(0)
    codes = random_codes(items, generator)
    extra = torch.empty(USERS).geometric_(1 / 8, generator=generator).long() - 1
    lengths = (3 + extra).clamp(max=MAX_HISTORY).sort().values.tolist()
    histories = [
        torch.randint(0, len(codes), (length,), generator=generator).tolist()
        for length in lengths
    ]
    return histories, Catalogue.from_codes(codes, (256, 256, 256, 256))


@cache
def load_model(name: str, items: int) -> Any:
    """Return a model with random weights on the device."""
    torch.manual_seed(0)
    model = loaded_model.build_model({"name": name}, draw_inputs(items)[1])
    return model.eval().to(device())


def cut_batches(variant: str, params: Line) -> list[HistoryBatch]:
    """Return a batch per run, shortest histories first.

    Histories are padded to the longest of their batch, or for plain variants to the
    maximum of the model.
    """
    histories = draw_inputs(params["items"])[0]
    size, runs = params["batch"], params["runs"]
    batches = []
    for run in range(runs):
        begin = max(0, round((run + 0.5) / runs * (len(histories) - size)))
        rows = histories[begin : begin + size]
        columns = max(map(len, rows))
        columns = MAX_HISTORY if variant.endswith("plain") else columns
        batch = HistoryBatch(
            history=torch.tensor([row + [PAD] * (columns - len(row)) for row in rows]),
            history_length=torch.tensor([len(row) for row in rows]),
            user=torch.arange(len(rows)),
        )
        batches.append(batch.to(device()))
    return batches


def make_steps(variant: str, model: Any, beam: int) -> tuple[Step, Step]:
    """Return two functions of a batch: the encoder of a variant, and its search."""
    if variant.startswith("hf"):
        library, use_cache = to_transformers(model), variant == "hf"
        return (
            lambda batch: library.encoder(*encoder_inputs(model, batch)),
            lambda batch: generate(model, library, batch, TOP_K, beam, use_cache),
        )
    if not variant.endswith("plain"):
        return (
            model.backbone.infer,
            lambda batch: model.recommend(batch, TOP_K, beam=beam),
        )

    @torch.no_grad()
    def search(batch: HistoryBatch) -> Any:
        history = model.encode(batch)
        return Student.search(model, history, TOP_K, beam=beam)

    return model.encode, search


def make(variant: str, params: Line, *, encoder: bool = False) -> Call:
    """Warm a variant up, and return the function that a run calls."""
    torch.set_num_threads(params["threads"])
    use_exact_onednn()
    model = load_model(MODELS[variant], params["items"])
    encode, search = make_steps(variant, model, params["beam"])
    batches = cut_batches(variant, params)
    search(cut_batches(variant, {**params, "batch": 1})[0])

    @torch.no_grad()
    def call(run: int) -> Any:
        return encode(batches[run]) if encoder else search(batches[run])

    return call


def decode(
    batch: int = 32,
    beam: int = 50,
    runs: int = 5,
    threads: int = 2,
    items: int = 25_000,
    variants: Sequence[str] = tuple(MODELS),
) -> Iterator[Line]:
    """Yield two lines per variant; items per second are users.

    Args:
        batch: Users per batch.
        beam: Number of beams.
        runs: Timings per variant.
        threads: CPU threads.
        items: Items of the catalogue.
        variants: Names in `MODELS`.
    """
    check_known(variants, MODELS, "variants")
    params: Line = {"batch": batch, "beam": beam, "items": items}
    params |= {"threads": threads, "runs": runs, "device": str(device())}
    memory = {
        name: in_fresh_process(peak_memory, make, name, params) for name in variants
    }
    calls = {name: make(name, params) for name in variants}
    for name in variants:
        calls[f"{name} encoder"] = make(name, params, encoder=True)
    square = torch.rand(1024, 1024, device=device())
    calls["product"] = lambda run: square @ square
    seconds = time_in_turns(calls, runs)
    rate = 2 * len(square) ** 3 / np.median(seconds["product"])
    for name in variants:
        encode_s, both_s = seconds[f"{name} encoder"], np.array(seconds[name])
        with FlopCounterMode(display=False) as counter:
            load_model(MODELS[name], items).encode(cut_batches(name, params)[runs // 2])
        share = counter.get_total_flops() / float(np.median(encode_s) * rate)
        yield to_line("encode", name, params, encode_s, batch, onednn_share=share)
        decode_s, peak_mb = (both_s - encode_s).tolist(), round(memory[name], 1)
        yield to_line("decode", name, params, decode_s, batch, peak_memory_mb=peak_mb)
