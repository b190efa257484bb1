"""Paired timings of the encoders of search models, with PyTorch alone.

    python -m benchmarks search_encoder

Variants, one row per mode and length: `linear_hstu`; `hstu`, without its relative bias, which favours it; and
`projections`, the same four products of every layer and nothing else, which is the floor of both (HSTU's fifth
product, of its output, is not in it). Weights are random.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

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
from models.cpu.matmul import use_exact_onednn
from models.search.encoders import HSTULayer, LinearHSTUEncoder
from models.training.fit import autocast

MODES = ("forward", "train")
LENGTHS = (100, 300, 1000, 4000, 16000)
VARIANTS = ("hstu", "linear_hstu", "projections")

MAX_ATTENTION_MB = 6000
"""Limit of the attention matrices of `hstu`, which is skipped above it."""


class Projections(nn.Module):
    """The matrix products of every layer alone: D to 4 D; the first quarter is the next
    input.
    """

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(width, 4 * width, bias=False) for _ in range(num_layers)
        )

    def forward(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h).chunk(4, -1)[0]
        return h


def build_encoder(variant: str, params: Row) -> nn.Module:
    width, layers = params["width"], params["layers"]
    if variant == "projections":
        return Projections(width, layers)
    if variant == "hstu":
        return nn.Sequential(
            *(
                HSTULayer(width, params["heads"], params["length"])
                for _ in range(layers)
            )
        )
    return LinearHSTUEncoder(width, layers)


def make(variant: str, params: Row) -> Call:
    """Return a call that encodes random tokens of `batch` users, with gradients in mode
    `train`.
    """
    torch.set_num_threads(params["threads"])
    use_exact_onednn()  # for all variants
    torch.manual_seed(params["seed"])
    encoder = build_encoder(variant, params).to(device())
    tokens = torch.randn(
        params["batch"], params["length"], params["width"], device=device()
    )

    def forward(run: int) -> None:
        with torch.no_grad(), autocast("auto", device()):
            encoder(tokens)

    def train(run: int) -> None:
        with autocast("auto", device()):
            loss = encoder(tokens).float().mean()
        loss.backward()
        encoder.zero_grad()

    call = train if params["mode"] == "train" else forward
    call(0)
    return call


def fits_in_memory(variant: str, params: Row) -> bool:
    """Return whether the variant's attention matrices stay below `MAX_ATTENTION_MB`."""
    if variant != "hstu":
        return True
    kept = (
        params["layers"] if params["mode"] == "train" else 1
    )  # layers whose matrices are held at once
    matrices = (
        3 * kept * params["heads"] * params["batch"]
    )  # scores, SiLU and its causal part
    return matrices * params["length"] ** 2 * 4 / 2**20 <= MAX_ATTENTION_MB


def search_encoder(
    runs: int = 5,
    threads: int = 2,
    batch: int = 1,
    width: int = 512,
    layers: int = 12,
    heads: int = 8,
    seed: int = 0,
    modes: Iterable[str] = MODES,
    lengths: Iterable[int] = LENGTHS,
    variants: Iterable[str] = VARIANTS,
) -> Iterator[Row]:
    """Yield the users per second of every variant, mode by mode and length by length."""
    variants = list(variants)
    for mode, length in product(modes, lengths):
        params: Row = {
            "mode": mode,
            "length": length,
            "batch": batch,
            "width": width,
            "layers": layers,
            "heads": heads,
            "threads": threads,
            "seed": seed,
            "runs": runs,
            "device": device_name(),
        }
        chosen = [variant for variant in variants if fits_in_memory(variant, params)]
        small = params | {"length": 2}
        memory = {
            v: in_fresh_process(peak_memory, make, (v, small), v, [params])[0]
            for v in chosen
        }
        calls = {variant: make(variant, params) for variant in chosen}
        yield from time_in_turns("search_encoder", calls, params, batch, memory)
