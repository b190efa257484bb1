"""RQ-KMeans: one k-means per level, each on what the levels above left over; and what all trained tokenizers share.

Of a large catalogue the codebooks are fitted on a sample, as faiss does it, with as many points per centroid; every
item takes the nearest codes all the same.

A training is a generator of `Progress` that returns what it made.

Shapes: N items, D width of the quantised space, C levels, K codes per level.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from models.retrieval.tokenizers.config import RqkmeansConfig
from models.storage.tables import UserError

ROWS = 16384
"""Rows handled at once where a step needs an N x K matrix."""
BLOCK = 64 * ROWS
"""Rows handled at once where a step needs a few N x D matrices beside what it is given."""
ITEMS_PER_CODE = 256
"""Items that a level is fitted on, at most, per code of its codebook: 65,536 for codebooks of 256."""
SILENCE = 30.0
"""Seconds after which a training shows what it is doing within a step."""


@dataclass(frozen=True)
class Quantized:
    """A trained quantiser applied to the items, all on the CPU."""

    vectors: Tensor  # (N, D): what was quantised: embeddings, or the RQ-VAE's latents
    codebooks: Tensor  # (C, K, D)
    codes: Tensor  # (N, C) int64, the nearest centroid of the residual at each level
    reconstruction_error: (
        float  # share of the embeddings' variance that the codes do not explain
    )
    encoder: dict[str, Tensor] = field(
        default_factory=dict
    )  # weights of the RQ-VAE's encoder, by name


@dataclass(frozen=True)
class Progress:
    """How far a tokenizer's training has come."""

    step: int
    """Steps done: epochs, or levels."""
    steps: int
    """Steps in all."""
    message: str
    """What to show, such as the losses."""
    within: bool = False
    """Whether it is from within a step: to be shown only where nothing else is for a while."""


R = TypeVar("R")
Training = Generator[Progress, None, R]


def paced(
    training: Training[R], clock: Callable[[], float] = time.monotonic
) -> Training[R]:
    """The training's progress without most of what is from within its steps: one of them after each `SILENCE`."""
    told = clock()
    while True:
        try:
            progress = next(training)
        except StopIteration as end:
            return cast(R, end.value)
        if not progress.within or clock() - told >= SILENCE:
            yield progress
            told = clock()


def fit(
    embeddings: Tensor, config: RqkmeansConfig, chosen: Tensor | None = None
) -> Training[Quantized]:
    """Trains the codebooks on `embeddings` (N, D), on their device, on those of the `chosen` items (n,), or on a sample
    of them; yields once per level, and within.

    Raises UserError if there are fewer items than codes per level.
    """
    generator = torch.Generator().manual_seed(config.seed)
    sample = embeddings if chosen is None else embeddings[chosen]
    if len(sample) > (most := ITEMS_PER_CODE * config.codebook_size):
        sample = sample[
            torch.randperm(len(sample), generator=generator)[:most].to(sample.device)
        ]
    residual, codebooks = sample, []
    for level in range(config.levels):
        at = (level, config.levels, f"level {level + 1}: ")
        codebook = yield from kmeans(
            residual, config.codebook_size, generator, config.iterations, at
        )  # (K, D)
        codes, _ = nearest(residual, codebook)
        residual = residual - codebook[codes]
        codebooks.append(codebook)
        error = unexplained_variance(sample, sample - residual)
        yield Progress(level + 1, config.levels, f"unexplained variance {error:.4f}")
    stacked = torch.stack(codebooks)
    codes, quantized = encode(embeddings, stacked)
    error = unexplained_variance(embeddings, quantized)
    return Quantized(embeddings.cpu(), stacked.cpu(), codes.cpu(), error)


def nearest(points: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest centre of each point (the first of equals) and the squared distance to it: (N,), (N,)."""
    squares = centres.square().sum(1)
    codes, distances = [], []
    for rows in points.split(ROWS):
        # ||x - c||^2 without the constant ||x||^2, which does not change the order
        code = (squares - 2 * rows @ centres.T).argmin(1)
        codes.append(code)
        distances.append(
            (rows - centres[code]).square().sum(1)
        )  # exact, so that equal vectors are at 0
    return torch.cat(codes), torch.cat(distances)


def encode(vectors: Tensor, codebooks: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy residual quantisation: codes (N, C) and the quantised vectors (N, D), their sum of centroids."""
    all_codes, quantized = [], []
    for rows in vectors.split(BLOCK):
        residual, codes = rows, []
        for codebook in codebooks:
            code, _ = nearest(residual, codebook)
            residual = residual - codebook[code]
            codes.append(code)
        all_codes.append(torch.stack(codes, 1))
        quantized.append(rows - residual)
    return torch.cat(all_codes), torch.cat(quantized)


def kmeans(
    points: Tensor,
    k: int,
    generator: torch.Generator,
    iterations: int = 100,
    at: tuple[int, int, str] = (0, 1, ""),
) -> Training[Tensor]:
    """Lloyd's k-means from greedy k-means++ seeds: centres (k, D), one per row.

    `generator` is a CPU generator; equal seeds give equal centres. A cluster that runs empty restarts at the point
    farthest from its centre. Of the training's progress it is the part `at`: step, steps, and what stands before the
    messages. Raises UserError for fewer points than centres.
    """
    if len(points) < k:
        raise UserError(
            f"{k} codes per level need at least {k} items, there are {len(points)}; set codebook_size lower"
        )
    step, steps, prefix = at
    # Of some points drawn by their squared distance to the seeds so far, a seed is the one that leaves the least
    # distance in all. Plain k-means++ is drawn to outliers in high dimensions.
    trials = 2 + int(math.log(k))
    draws = torch.rand(k, trials, generator=generator, dtype=torch.float64).to(
        points.device
    )
    squares = points.square().sum(1)
    chosen = [int(draws[0, 0] * len(points))]
    distances = (points - points[chosen[0]]).square().sum(1)
    for draw in draws[1:]:
        mass = distances.double().cumsum(0)
        drawn = torch.searchsorted(mass, draw * mass[-1], right=True).clamp(
            max=len(points) - 1
        )  # (trials,)
        after = (
            squares[:, None] - 2 * points @ points[drawn].T + squares[drawn]
        )  # (N, trials)
        after = torch.minimum(after.clamp(min=0), distances[:, None])
        best = int(after.double().sum(0).argmin())
        chosen.append(int(drawn[best]))
        distances = after[:, best].clone()
        distances[chosen[-1]] = 0
        yield Progress(
            step, steps, f"{prefix}k-means seed {len(chosen)} of {k}", within=True
        )
    centres = points[chosen]
    previous = torch.full((len(points),), -1, device=points.device)
    for iteration in range(iterations):
        codes, distances = nearest(points, centres)
        counts = torch.bincount(codes, minlength=k)
        empty = (counts == 0).nonzero().flatten()
        if torch.equal(codes, previous) and not (
            len(empty) and float(distances.max()) > 0
        ):
            break
        previous = codes
        total = torch.zeros_like(
            centres
        )  # by matrix products, which add in a fixed order on a GPU too
        for rows, code in zip(points.split(ROWS), codes.split(ROWS), strict=True):
            total += F.one_hot(code, k).to(points.dtype).T @ rows
        centres = torch.where(
            counts.unsqueeze(1) > 0, total / counts.clamp(min=1).unsqueeze(1), centres
        )
        if len(empty):
            far = distances.sort(descending=True, stable=True).indices[: len(empty)]
            far = far[distances[far] > 0]
            centres[empty[: len(far)]] = points[far]
        yield Progress(
            step,
            steps,
            f"{prefix}k-means iteration {iteration + 1} of at most {iterations}",
            within=True,
        )
    return centres


def unexplained_variance(embeddings: Tensor, reconstruction: Tensor) -> float:
    """||x - x'||^2 over ||x - mean||^2, summed over items: 0 is exact, 1 is as good as the mean."""
    mean = embeddings.mean(0)
    error = spread = torch.zeros((), dtype=torch.float64, device=embeddings.device)
    for rows, again in zip(
        embeddings.split(BLOCK), reconstruction.split(BLOCK), strict=True
    ):
        error = error + (rows - again).double().square().sum()
        spread = spread + (rows - mean).double().square().sum()
    return float(error / spread) if float(spread) > 0 else 0.0


def quantization_error(quantized: Quantized, codes: np.ndarray) -> float:
    """Share of the quantised vectors' variance that `codes` (N, C), nearest or not, do not explain."""
    blocks, level = torch.from_numpy(codes).split(BLOCK), torch.arange(codes.shape[1])
    chosen = torch.cat(
        [quantized.codebooks[level, rows].sum(1) for rows in blocks]
    )  # (N, D), from (rows, C, D)
    return unexplained_variance(quantized.vectors, chosen)
