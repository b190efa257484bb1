"""k-means, RQ-KMeans and RQ-VAE: clusters, initialisation, dead codes, seeds."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from models.retrieval.tokenizers import rqkmeans
from models.retrieval.tokenizers.config import RqkmeansConfig, RqvaeConfig
from models.retrieval.tokenizers.rqkmeans import (
    Rqkmeans,
    nearest_centres,
    quantize_vectors,
)
from models.retrieval.tokenizers.rqvae import (
    RqvaeTokenizer,
)
from models.retrieval.tokenizers.tokenizer import Training
from tests.fixtures.golden import check_golden

BRANCHES = (4, 3, 2)
"""Children per node of the tree of `draw_hierarchy`."""


def seeded(seed: int) -> torch.Generator:
    """Return a random generator."""
    return torch.Generator().manual_seed(seed)


def finish(training: Training) -> Any:
    """Run a training and return its result."""
    while True:
        try:
            next(training)
        except StopIteration as end:
            return end.value


def draw_hierarchy(
    per_leaf: int = 8, width: int = 16, seed: int = 0
) -> tuple[Tensor, np.ndarray]:
    """Return points (N, width) around a tree of centres, and their paths (N, 3).

    The spread of the centres shrinks tenfold per level.
    """
    generator = seeded(seed)
    level_offsets = [
        torch.randn(children, width, generator=generator) * 10.0**-level
        for level, children in enumerate(BRANCHES)
    ]
    points, paths = [], []
    for path in itertools.product(*(range(children) for children in BRANCHES)):
        offsets = [level_offsets[level][child] for level, child in enumerate(path)]
        centre = offsets[0] + offsets[1] + offsets[2]
        noise = torch.randn(per_leaf, width, generator=generator)
        points.append(centre + 1e-4 * noise)
        paths += [path] * per_leaf
    return torch.cat(points), np.array(paths)


def test_codebooks_of_many_items_are_fitted_on_a_sample_and_all_get_nearest_codes(
    monkeypatch,
):
    monkeypatch.setattr(rqkmeans, "BLOCK_ROWS", 128)
    generator = seeded(3)
    centres = 20 * torch.randn(8, 6, generator=generator)
    labels = torch.randint(8, (1000,), generator=generator)
    vectors = centres[labels] + torch.randn(1000, 6, generator=generator)
    config = RqkmeansConfig(levels=2, codebook_size=8)
    whole = finish(Rqkmeans(config).fit(vectors))

    monkeypatch.setattr(rqkmeans, "ITEMS_PER_CODE", 30)
    sampled = finish(Rqkmeans(config).fit(vectors))

    assert not torch.equal(sampled.codebooks, whole.codebooks)
    assert sampled.codes.shape == (1000, 2)
    nearest, _ = nearest_centres(vectors, sampled.codebooks[0])
    assert torch.equal(sampled.codes[:, 0], nearest)
    assert sampled.reconstruction_error < 1.1 * whole.reconstruction_error
    quantized = sampled.codebooks[torch.arange(2), sampled.codes].sum(1)
    squared_error = (vectors - quantized).square().sum()
    variance = (vectors - vectors.mean(0)).square().sum()
    expected = float(squared_error / variance)
    assert sampled.reconstruction_error == pytest.approx(expected, rel=1e-5)


def test_greedy_codes_are_the_nearest_centroids_of_the_residuals():
    generator = seeded(2)
    vectors = torch.randn(30, 6, generator=generator)
    codebooks = torch.randn(3, 5, 6, generator=generator)

    codes, quantized = quantize_vectors(vectors, codebooks)

    for row, vector in enumerate(vectors):
        residual = vector
        for level, codebook in enumerate(codebooks):
            nearest = torch.cdist(residual[None], codebook)[0].argmin()
            assert int(nearest) == int(codes[row, level])
            residual = residual - codebook[nearest]
        torch.testing.assert_close(vector - residual, quantized[row])


def test_rqkmeans_fitted_on_some_items_encodes_the_others_with_their_codebooks():
    points, _ = draw_hierarchy()
    config = RqkmeansConfig(levels=2, codebook_size=BRANCHES[0])
    fitted = torch.arange(0, len(points), 3)

    alone = finish(Rqkmeans(config).fit(points[fitted]))
    with_others = finish(Rqkmeans(config).fit(points, fitted))

    assert torch.equal(alone.codebooks, with_others.codebooks)
    assert torch.equal(alone.codes, with_others.codes[fitted])
    expected, _ = quantize_vectors(points, with_others.codebooks)
    assert torch.equal(expected, with_others.codes)


@pytest.mark.parametrize("kind", ["rqkmeans", "rqvae"])
def test_codes_depend_on_the_seed_alone_and_their_error_is_the_golden_files(kind):
    torch.set_num_threads(1)  # sums of two threads differ in their last digits
    points, _ = draw_hierarchy()

    def quantize(seed: int) -> Any:
        torch.rand(seed + 1)  # the global random state must not matter
        if kind == "rqkmeans":
            kmeans_config = RqkmeansConfig(codebook_size=16, seed=seed)
            return finish(Rqkmeans(kmeans_config).fit(points))
        config = RqvaeConfig(
            codebook_size=16,
            latent=6,
            hidden=[16],
            epochs=12,
            batch_size=128,
            seed=seed,
        )
        return finish(RqvaeTokenizer(config).fit(points))

    first = quantize(1)
    assert torch.equal(quantize(1).codes, first.codes)
    assert not torch.equal(quantize(2).codes, first.codes)
    usage = [len(level.unique()) for level in first.codes.T]
    check_golden(kind, [first.reconstruction_error, *usage], rel=0.02)
