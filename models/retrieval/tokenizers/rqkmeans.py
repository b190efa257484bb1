"""RQ-KMeans: one k-means per level, each on what the levels above left over.

Of a large catalogue the codebooks are fitted on a sample, as faiss does it, with as many points per centroid; every
item takes the nearest codes all the same.

Shapes: N items, D embedding width, C levels, K codes per level.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from models.retrieval.tokenizers.residual import (
    Progress,
    Quantized,
    encode,
    kmeans_steps,
    nearest,
    unexplained_variance,
    within,
)

ITEMS_PER_CODE = 256
"""Items that a level is fitted on, at most, per code of its codebook: 65,536 for codebooks of 256."""


@dataclass(frozen=True)
class RqkmeansConfig:
    """Residual k-means."""

    levels: int = 3
    """Codes per item before any conflict code (Sec. 2.1 of SID-MLP)."""
    codebook_size: int = 256
    """Codes per level (Sec. 2.1 of SID-MLP)."""
    iterations: int = 100
    """Most k-means iterations per level; it stops when no item changes its cluster."""
    seed: int = 0
    """Seed of the k-means++ draws."""
    train_items: bool = False
    """Whether codebooks are fitted on the items of training requests alone; the others get the nearest codes."""

    def __post_init__(self) -> None:
        if not 1 <= self.levels <= 16:
            raise ValueError(f"rqkmeans.levels is {self.levels}; it must be from 1 to 16")
        if not 2 <= self.codebook_size <= 65536:
            raise ValueError(f"rqkmeans.codebook_size is {self.codebook_size}; codes are uint16: use 2 to 65536")
        if self.iterations < 1:
            raise ValueError(f"rqkmeans.iterations is {self.iterations}; it must be 1 or more")


def fit(
    embeddings: Tensor, config: RqkmeansConfig, chosen: Tensor | None = None
) -> Generator[Progress, None, Quantized]:
    """Trains the codebooks on `embeddings` (N, D), on their device, on those of the `chosen` items (n,), or on a sample
    of them; yields once per level, and within.

    Raises UserError if there are fewer items than codes per level.
    """
    generator = torch.Generator().manual_seed(config.seed)
    sample = embeddings if chosen is None else embeddings[chosen]
    if len(sample) > (most := ITEMS_PER_CODE * config.codebook_size):
        sample = sample[torch.randperm(len(sample), generator=generator)[:most].to(sample.device)]
    residual, codebooks = sample, []
    for level in range(config.levels):
        training = kmeans_steps(residual, config.codebook_size, generator, config.iterations)
        codebook = yield from within(training, level, config.levels, f"level {level + 1}: ")  # (K, D)
        codes, _ = nearest(residual, codebook)
        residual = residual - codebook[codes]
        codebooks.append(codebook)
        error = unexplained_variance(sample, sample - residual)
        yield Progress(level + 1, config.levels, f"unexplained variance {error:.4f}")
    stacked = torch.stack(codebooks)
    codes, quantized = encode(embeddings, stacked)
    error = unexplained_variance(embeddings, quantized)
    return Quantized(embeddings.cpu(), stacked.cpu(), codes.cpu(), error)
