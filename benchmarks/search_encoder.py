"""Paired timings of the encoders of search models, with PyTorch alone.

    python -m benchmarks search_encoder

There is a row per variant, mode and length. `hstu` has no relative bias, which favours
it. `projections` runs only the four products of every layer, a lower bound of
`linear_hstu` and `hstu` (without the fifth product of HSTU, its output). Weights are
random.
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
"""Largest memory of the attention matrices of `hstu` in MiB; longer inputs are
skipped."""


class Projections(nn.Module):
    """The matrix products of all layers: D to 4 D; the next layer reads D of them."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(width, 4 * width, bias=False) for _ in range(num_layers)
        )

    def forward(self, h: Tensor) -> Tensor:
        """Return (B, L, D) from tokens (B, L, D)."""
        for layer in self.layers:
            h = layer(h).chunk(4, -1)[0]
        return h


def build_encoder(variant: str, params: Row) -> nn.Module:
    """Build the encoder of a variant, with random weights."""
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
    """Return a warmed-up call: a forward pass over random tokens, or a training step.

    Args:
        variant: Name in `VARIANTS`.
        params: Settings of the benchmark, among them `mode` and sizes.
    """
    torch.set_num_threads(params["threads"])
    use_exact_onednn()
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
    """Return whether the attention matrices of a variant need at most 6,000 MiB."""
    if variant != "hstu":
        return True
    # number of layers whose matrices are in memory at the same time
    layers = params["layers"] if params["mode"] == "train" else 1
    # three (L, L) matrices per head: scores, SiLU, and SiLU with the causal mask
    matrices = 3 * layers * params["heads"] * params["batch"]
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
    """Yield a row per variant, mode and length; items per second are users.

    Args:
        runs: Timings per variant.
        threads: CPU threads.
        batch: Users per batch.
        width: Width of the encoders.
        layers: Number of layers.
        heads: Number of attention heads of `hstu`.
        seed: Seed of weights and tokens.
        modes: Subset of `MODES`.
        lengths: Lengths of the users' histories.
        variants: Subset of `VARIANTS`.
    """
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
        fitting = [variant for variant in variants if fits_in_memory(variant, params)]
        small = params | {"length": 2}
        memory = {
            variant: in_fresh_process(
                peak_memory, make, (variant, small), variant, [params]
            )[0]
            for variant in fitting
        }
        calls = {variant: make(variant, params) for variant in fitting}
        yield from time_in_turns("search_encoder", calls, params, batch, memory)
