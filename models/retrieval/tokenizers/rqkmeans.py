"""RQ-KMeans: one k-means per level on the residuals of the levels above.

Codebooks of a large catalogue are fitted on a sample with as many points per centroid
as in faiss; then all items get their nearest codes. `rqvae` uses functions of this
module.

Shapes: N items, D width of the quantised space, C levels, K codes per level.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from core.errors import UserError
from models.retrieval.tokenizers.config import RqkmeansConfig
from models.retrieval.tokenizers.tokenizer import Quantized, Tokenizer, Training

CHUNK_ROWS = 16384
"""Rows of a chunk in steps that compute a rows x K matrix."""
BLOCK_ROWS = 64 * CHUNK_ROWS
"""Rows of a chunk in steps that compute rows x D matrices."""
ITEMS_PER_CODE = 256
"""Most items per code to fit a level on: 65,536 items for codebooks of 256."""


class Rqkmeans(Tokenizer):
    """Residual k-means: codebooks of centroids, and the nearest codes."""

    name = "rqkmeans"
    config_class = RqkmeansConfig
    config: RqkmeansConfig

    @property
    def on_train_items(self) -> bool:
        """Whether codebooks are fitted on the items of training requests only."""
        return self.config.train_items

    def fit(self, embeddings: Tensor, chosen: Tensor | None = None) -> Training:
        """Train the codebooks by k-means, and yield the progress.

        If there are more than `ITEMS_PER_CODE` items per code, a random sample is used.
        """
        config = self.config
        generator = torch.Generator().manual_seed(config.seed)
        sample = embeddings if chosen is None else embeddings[chosen]
        max_items = ITEMS_PER_CODE * config.codebook_size
        if len(sample) > max_items:
            order = torch.randperm(len(sample), generator=generator)
            sample = sample[order[:max_items].to(sample.device)]
        residual, codebooks = sample, []
        for level in range(config.levels):
            codebook = kmeans(
                residual, config.codebook_size, generator, config.iterations
            )  # (K, D)
            codes, _ = nearest_centres(residual, codebook)
            residual = residual - codebook[codes]
            codebooks.append(codebook)
            error = unexplained_variance(sample, sample - residual)
            yield f"{level + 1}/{config.levels}: unexplained variance {error:.4f}"
        stacked = torch.stack(codebooks)
        codes, quantized = quantize_vectors(embeddings, stacked)
        error = unexplained_variance(embeddings, quantized)
        return Quantized(embeddings.cpu(), stacked.cpu(), codes.cpu(), error)

    def assign(self, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Return the embeddings and their nearest codes."""
        codes, _ = quantize_vectors(embeddings, self.arrays["codebooks"])
        return embeddings, codes


def nearest_centres(points: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Find the nearest centre of each point, the first one of ties.

    Args:
        points: (N, D) points.
        centres: (K, D) centres.

    Returns:
        Index of the centre and squared distance, (N,) both.
    """
    squares = centres.square().sum(1)
    codes, distances = [], []
    for rows in points.split(CHUNK_ROWS):
        # ||x - c||^2 without the constant ||x||^2, which does not change the order
        code = (squares - 2 * rows @ centres.T).argmin(1)
        codes.append(code)
        # computed exactly, so that equal vectors have distance 0
        distances.append((rows - centres[code]).square().sum(1))
    return torch.cat(codes), torch.cat(distances)


def quantize_vectors(vectors: Tensor, codebooks: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise vectors greedily, level by level.

    Args:
        vectors: (N, D) vectors.
        codebooks: (C, K, D) centroids.

    Returns:
        Codes (N, C), and the quantised vectors (N, D), which are sums of centroids.
    """
    all_codes, quantized = [], []
    for rows in vectors.split(BLOCK_ROWS):
        residual, codes = rows, []
        for codebook in codebooks:
            code, _ = nearest_centres(residual, codebook)
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
) -> Tensor:
    """Run Lloyd's k-means from greedy k-means++ seeds.

    An empty cluster restarts at the point farthest from its centre.

    Args:
        points: (N, D) points.
        k: Number of centres.
        generator: CPU generator. Equal seeds give equal centres.
        iterations: Most iterations.

    Returns:
        (k, D) centres.
    """
    if len(points) < k:
        raise UserError(
            f"{k} codes per level need at least {k} items, there are {len(points)}"
        )
    centres = _seed_centres(points, k, generator)
    previous = torch.full((len(points),), -1, device=points.device)
    for _ in range(iterations):
        codes, distances = nearest_centres(points, centres)
        counts = torch.bincount(codes, minlength=k)
        empty = (counts == 0).nonzero().flatten()
        can_fill_empty = len(empty) and float(distances.max()) > 0
        if torch.equal(codes, previous) and not can_fill_empty:
            break
        previous = codes
        # matrix products add in a fixed order on a GPU too
        total = torch.zeros_like(centres)
        for rows, code in zip(
            points.split(CHUNK_ROWS), codes.split(CHUNK_ROWS), strict=True
        ):
            total += F.one_hot(code, k).to(points.dtype).T @ rows
        means = total / counts.clamp(min=1).unsqueeze(1)
        centres = torch.where(counts.unsqueeze(1) > 0, means, centres)
        if len(empty):
            far = distances.sort(descending=True, stable=True).indices[: len(empty)]
            far = far[distances[far] > 0]
            centres[empty[: len(far)]] = points[far]
    return centres


def _seed_centres(points: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """Choose initial centres (k, D) by greedy k-means++."""
    num_candidates = 2 + int(math.log(k))
    uniform = torch.rand(k, num_candidates, generator=generator, dtype=torch.float64)
    uniform = uniform.to(points.device)
    squares = points.square().sum(1)
    seeds = [int(uniform[0, 0] * len(points))]
    distances = (points - points[seeds[0]]).square().sum(1)
    for draw in uniform[1:]:
        mass = distances.double().cumsum(0)
        candidates = torch.searchsorted(mass, draw * mass[-1], right=True)
        candidates = candidates.clamp(max=len(points) - 1)  # (candidates,)
        products = points @ points[candidates].T
        # (N, candidates): squared distances if a candidate becomes a seed
        new_distances = squares[:, None] - 2 * products + squares[candidates]
        new_distances = torch.minimum(new_distances.clamp(min=0), distances[:, None])
        best = int(new_distances.double().sum(0).argmin())
        seeds.append(int(candidates[best]))
        distances = new_distances[:, best].clone()
        distances[seeds[-1]] = 0
    return points[seeds]


def unexplained_variance(embeddings: Tensor, reconstruction: Tensor) -> float:
    """Return ||x - x'||^2 / ||x - mean||^2, with both norms summed over items.

    0 is an exact reconstruction, 1 is as good as the mean.

    Args:
        embeddings: (N, D) vectors x.
        reconstruction: (N, D) vectors x'.
    """
    mean = embeddings.mean(0)
    error = spread = torch.zeros((), dtype=torch.float64, device=embeddings.device)
    for original, reconstructed in zip(
        embeddings.split(BLOCK_ROWS), reconstruction.split(BLOCK_ROWS), strict=True
    ):
        error = error + (original - reconstructed).double().square().sum()
        spread = spread + (original - mean).double().square().sum()
    return float(error / spread) if float(spread) > 0 else 0.0


def quantization_error(quantized: Quantized) -> float:
    """Return the share of the vectors' variance that the codes do not explain."""
    level = torch.arange(quantized.codes.shape[1])
    blocks = []
    for block in quantized.codes.split(BLOCK_ROWS):
        centroids = quantized.codebooks[level, block]  # (rows, C, D)
        blocks.append(centroids.sum(1))
    return unexplained_variance(quantized.vectors, torch.cat(blocks))
