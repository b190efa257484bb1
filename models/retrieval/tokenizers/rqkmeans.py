"""RQ-KMeans: one k-means per level on the residuals of the levels above.

A codebook of a large catalogue is fitted on a sample with as many points per centroid
as in faiss; then all items get their nearest codes. `rqvae` uses functions of this
module.

Shapes: N items, D width of the quantised space, C levels, K codes per level.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

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
        """Train the codebooks by k-means, and yield the progress."""
        config = self.config
        sample = embeddings if chosen is None else embeddings[chosen]
        residual, codebooks = sample, []
        for level in range(config.levels):
            codebook = kmeans(
                residual, config.codebook_size, config.seed, config.iterations
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
    residual, codes = vectors, []
    for codebook in codebooks:
        code, _ = nearest_centres(residual, codebook)
        residual = residual - codebook[code]
        codes.append(code)
    return torch.stack(codes, 1), vectors - residual


def kmeans(points: Tensor, k: int, seed: int, iterations: int = 100) -> Tensor:
    """Return the centres (k, D) of scikit-learn's k-means from k-means++ seeds.

    If there are more than `ITEMS_PER_CODE` points per centre, a random sample is used.
    Equal seeds give equal centres.

    Args:
        points: (N, D) points.
        k: Number of centres.
        seed: Seed of the sample and the first centres.
        iterations: Most iterations.
    """
    # imported here, as ranking models do not need scikit-learn
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits

    if len(points) < k:
        raise UserError(
            f"{k} codes per level need at least {k} items, there are {len(points)}"
        )
    if len(points) > ITEMS_PER_CODE * k:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(points), generator=generator)
        points = points[order[: ITEMS_PER_CODE * k].to(points.device)]
    model = KMeans(k, n_init=1, max_iter=iterations, tol=0, random_state=seed)
    # one thread, as several add their sums in the order in which they end
    with warnings.catch_warnings(), threadpool_limits(1, user_api="openmp"):
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct points
        model.fit(points.cpu().numpy())
    return torch.from_numpy(model.cluster_centers_).to(points)


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
