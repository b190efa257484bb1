"""Residual quantisation: k-means, greedy encoding, and what a trained quantiser hands on.

Shapes: N items, D width of the quantised space, C levels, K codes per level.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from models.tables import UserError

ROWS = 16384
"""Rows handled at once where a step needs an N x K matrix."""
BLOCK = 64 * ROWS
"""Rows handled at once where a step needs a few N x D matrices beside what it is given."""


@dataclass(frozen=True)
class Quantized:
    """A trained quantiser applied to the items, all on the CPU."""

    vectors: Tensor  # (N, D): what was quantised: embeddings, or the RQ-VAE's latents
    codebooks: Tensor  # (C, K, D)
    codes: Tensor  # (N, C) int64, the nearest centroid of the residual at each level
    reconstruction_error: float  # share of the embeddings' variance that the codes do not explain


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


SILENCE = 30.0
"""Seconds after which a training shows what it is doing within a step."""

R = TypeVar("R")


def paced(
    training: Generator[Progress, None, R], clock: Callable[[], float] = time.monotonic
) -> Generator[Progress, None, R]:
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


def finished(training: Generator[Any, None, R]) -> R:
    """What a training gives in the end, whatever it says on the way."""
    while True:
        try:
            next(training)
        except StopIteration as end:
            return cast(R, end.value)


def within(messages: Generator[str, None, R], step: int, steps: int, prefix: str) -> Generator[Progress, None, R]:
    """What a part of a step says, as progress from within it."""
    while True:
        try:
            message = next(messages)
        except StopIteration as end:
            return cast(R, end.value)
        yield Progress(step, steps, prefix + message, within=True)


def nearest(points: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest centre of each point (the first of equals) and the squared distance to it: (N,), (N,)."""
    squares = centres.square().sum(1)
    codes, distances = [], []
    for rows in points.split(ROWS):
        # ||x - c||^2 without the constant ||x||^2, which does not change the order
        code = (squares - 2 * rows @ centres.T).argmin(1)
        codes.append(code)
        distances.append((rows - centres[code]).square().sum(1))  # exact, so that equal vectors are at 0
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


def _seeds(points: Tensor, k: int, generator: torch.Generator) -> Generator[str, None, Tensor]:
    """Greedy k-means++ seeds (k, D): of some points drawn by their squared distance to the seeds so far, the
    one that leaves the least distance in all. Plain k-means++ is drawn to outliers in high dimensions."""
    trials = 2 + int(math.log(k))
    draws = torch.rand(k, trials, generator=generator, dtype=torch.float64).to(points.device)
    squares = points.square().sum(1)
    chosen = [int(draws[0, 0] * len(points))]
    distances = (points - points[chosen[0]]).square().sum(1)
    for draw in draws[1:]:
        mass = distances.double().cumsum(0)
        drawn = torch.searchsorted(mass, draw * mass[-1], right=True).clamp(max=len(points) - 1)  # (trials,)
        after = squares[:, None] - 2 * points @ points[drawn].T + squares[drawn]  # (N, trials)
        after = torch.minimum(after.clamp(min=0), distances[:, None])
        best = int(after.double().sum(0).argmin())
        chosen.append(int(drawn[best]))
        distances = after[:, best].clone()
        distances[chosen[-1]] = 0
        yield f"k-means seed {len(chosen)} of {k}"
    return points[chosen]


def _sums(points: Tensor, codes: Tensor, k: int) -> Tensor:
    """Sum of each cluster's points (k, D), by matrix products, which add in a fixed order on a GPU too."""
    total = torch.zeros(k, points.shape[1], dtype=points.dtype, device=points.device)
    for rows, code in zip(points.split(ROWS), codes.split(ROWS), strict=True):
        total += F.one_hot(code, k).to(points.dtype).T @ rows
    return total


def kmeans(points: Tensor, k: int, generator: torch.Generator, iterations: int = 100) -> Tensor:
    """Lloyd's k-means from k-means++ seeds: centres (k, D), one per row.

    `generator` is a CPU generator; equal seeds give equal centres. A cluster that runs empty restarts at
    the point farthest from its centre. Raises UserError for fewer points than centres.
    """
    return finished(kmeans_steps(points, k, generator, iterations))


def kmeans_steps(
    points: Tensor, k: int, generator: torch.Generator, iterations: int = 100
) -> Generator[str, None, Tensor]:
    """As `kmeans`, saying at every seed and iteration what it does."""
    if len(points) < k:
        raise UserError(
            f"{k} codes per level need at least {k} items, there are {len(points)}; set codebook_size lower"
        )
    centres = yield from _seeds(points, k, generator)
    previous = torch.full((len(points),), -1, device=points.device)
    for iteration in range(iterations):
        codes, distances = nearest(points, centres)
        counts = torch.bincount(codes, minlength=k)
        empty = (counts == 0).nonzero().flatten()
        if torch.equal(codes, previous) and not (len(empty) and float(distances.max()) > 0):
            break
        previous = codes
        means = _sums(points, codes, k) / counts.clamp(min=1).unsqueeze(1)
        centres = torch.where(counts.unsqueeze(1) > 0, means, centres)
        if len(empty):
            far = distances.sort(descending=True, stable=True).indices[: len(empty)]
            far = far[distances[far] > 0]
            centres[empty[: len(far)]] = points[far]
        yield f"k-means iteration {iteration + 1} of at most {iterations}"
    return centres


def unexplained_variance(embeddings: Tensor, reconstruction: Tensor) -> float:
    """||x - x'||^2 over ||x - mean||^2, summed over items: 0 is exact, 1 is as good as the mean."""
    mean = embeddings.mean(0)
    error = spread = torch.zeros((), dtype=torch.float64, device=embeddings.device)
    for rows, again in zip(embeddings.split(BLOCK), reconstruction.split(BLOCK), strict=True):
        error = error + (rows - again).double().square().sum()
        spread = spread + (rows - mean).double().square().sum()
    return float(error / spread) if float(spread) > 0 else 0.0


def quantization_error(quantized: Quantized, codes: np.ndarray) -> float:
    """Share of the quantised vectors' variance that `codes` (N, C), nearest or not, do not explain."""
    blocks, level = torch.from_numpy(codes).split(BLOCK), torch.arange(codes.shape[1])
    chosen = torch.cat([quantized.codebooks[level, rows].sum(1) for rows in blocks])  # (N, D), from (rows, C, D)
    return unexplained_variance(quantized.vectors, chosen)
