"""k-means, RQ-KMeans and RQ-VAE: clusters, initialisation, dead codes, seeds."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from models.retrieval.tokenizers import rqkmeans, rqvae
from models.retrieval.tokenizers.config import RqkmeansConfig, RqvaeConfig
from models.retrieval.tokenizers.rqkmeans import (
    Progress,
    kmeans,
    limit_progress,
    nearest_centres,
    quantize_vectors,
)
from models.retrieval.tokenizers.rqvae import Rqvae, assign_evenly, separate_equal_codes

BRANCHES = (4, 3, 2)
"""Children per node of the tree of `draw_hierarchy`."""


def seeded(seed: int) -> torch.Generator:
    """Return a random generator."""
    return torch.Generator().manual_seed(seed)


def finish(training: Generator[Progress, None, Any]) -> Any:
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


def is_same_partition(left: np.ndarray, right: np.ndarray) -> bool:
    """Return whether two sets of labels (N, columns) group the rows alike."""
    left_labels, right_labels = list(map(tuple, left)), list(map(tuple, right))
    num_pairs = len(set(zip(left_labels, right_labels, strict=True)))
    return num_pairs == len(set(left_labels)) == len(set(right_labels))


def test_kmeans_finds_separated_clusters_and_returns_one_centre_per_row() -> None:
    generator = seeded(1)
    true_centres = torch.randn(12, 5, generator=generator) * 10
    noise = 0.01 * torch.randn(240, 5, generator=generator)
    points = true_centres.repeat_interleave(20, 0) + noise

    centres = finish(kmeans(points, 12, seeded(0)))

    assert centres.shape == (12, 5)
    assert torch.cdist(true_centres, centres).min(1).values.max() < 0.05


@pytest.mark.parametrize("codes", [8, 12])
def test_kmeans_gives_each_distinct_point_a_centre_if_there_are_enough_centres(
    codes: int,
) -> None:
    equal_points = torch.zeros(50, 2)
    other_points = torch.arange(1.0, 8.0)[:, None].repeat(1, 2)
    points = torch.cat([equal_points, other_points])  # 8 distinct points
    centres = finish(kmeans(points, codes, seeded(0)))
    _, distances = nearest_centres(points, centres)
    assert float(distances.max()) < 1e-6


def test_codebooks_of_many_items_are_fitted_on_a_sample_and_all_get_nearest_codes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rqkmeans, "BLOCK_ROWS", 128)
    generator = seeded(3)
    centres = 20 * torch.randn(8, 6, generator=generator)
    labels = torch.randint(8, (1000,), generator=generator)
    vectors = centres[labels] + torch.randn(1000, 6, generator=generator)
    config = RqkmeansConfig(levels=2, codebook_size=8)
    whole = finish(rqkmeans.fit(vectors, config))

    monkeypatch.setattr(rqkmeans, "ITEMS_PER_CODE", 30)
    sampled = finish(rqkmeans.fit(vectors, config))

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


def test_greedy_codes_are_the_nearest_centroids_of_the_residuals() -> None:
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


def test_rqkmeans_fitted_on_some_items_encodes_the_others_with_their_codebooks() -> (
    None
):
    points, _ = draw_hierarchy()
    config = RqkmeansConfig(levels=2, codebook_size=BRANCHES[0])
    fitted = torch.arange(0, len(points), 3)

    alone = finish(rqkmeans.fit(points[fitted], config))
    with_others = finish(rqkmeans.fit(points, config, fitted))

    assert torch.equal(alone.codebooks, with_others.codebooks)
    assert torch.equal(alone.codes, with_others.codes[fitted])
    expected, _ = quantize_vectors(points, with_others.codebooks)
    assert torch.equal(expected, with_others.codes)


def test_rqkmeans_recovers_a_hierarchy_of_clusters() -> None:
    """All levels have the size of the first, so later levels have spare codes."""
    points, paths = draw_hierarchy()
    config = RqkmeansConfig(levels=2, codebook_size=BRANCHES[0])
    two_levels = finish(rqkmeans.fit(points, config))
    assert is_same_partition(two_levels.codes[:, :1].numpy(), paths[:, :1])

    config = RqkmeansConfig(levels=4, codebook_size=BRANCHES[0])
    four_levels = finish(rqkmeans.fit(points, config))
    assert four_levels.reconstruction_error < 1e-4
    for leaf in np.unique(paths, axis=0):
        prefixes = four_levels.codes[(paths == leaf).all(1), :2]
        assert len(prefixes.unique(dim=0)) == 1


@pytest.mark.long
def test_rqvae_recovers_clusters() -> None:
    points, paths = draw_hierarchy()
    config = RqvaeConfig(
        levels=2,
        codebook_size=4,
        latent=8,
        hidden=[32],
        batch_size=64,
        epochs=150,
        lr=3e-3,
    )
    quantized = finish(rqvae.fit(points, config))
    assert is_same_partition(quantized.codes[:, :1].numpy(), paths[:, :1])
    assert quantized.reconstruction_error < 0.02


def level_errors(latents: Tensor, codebooks: Tensor) -> list[float]:
    """Return the mean squared error that each level leaves."""
    residual, errors = latents, []
    for codebook in codebooks:
        code, distances = nearest_centres(residual, codebook)
        residual = residual - codebook[code]
        errors.append(float(distances.mean()))
    return errors


def test_kmeans_initialisation_lowers_the_quantisation_error_and_uses_every_code() -> (
    None
):
    points = torch.randn(500, 12, generator=seeded(4))
    config = RqvaeConfig(levels=3, codebook_size=16, latent=6, hidden=[24])
    torch.manual_seed(0)
    model = Rqvae(12, config)
    latents = model.latents(points)
    before = level_errors(latents, model.codebooks.detach())

    finish(model.initialise_codebooks(points, seeded(0)))

    codebooks = model.codebooks.detach()
    after = level_errors(latents, codebooks)
    for error, error_before in zip(after, before, strict=True):
        assert error < error_before
    # each level is fitted to the residuals of the last
    assert after[0] > after[1] > after[2]
    codes, _ = quantize_vectors(latents, codebooks)
    assert all(len(codes[:, level].unique()) == 16 for level in range(3))


def test_dead_codes_restart_at_residuals_and_are_used() -> None:
    points = torch.randn(200, 12, generator=seeded(5))
    torch.manual_seed(0)
    model = Rqvae(12, RqvaeConfig(levels=2, codebook_size=8, latent=6, hidden=[24]))
    finish(model.initialise_codebooks(points, seeded(0)))
    with torch.no_grad():
        model.codebooks[0, 3:] = 1e3  # five codes far from all points
    optimizer = torch.optim.AdamW(model.parameters())
    model(points)["loss"].backward()
    optimizer.step()

    num_restarted = model.restart_dead_codes(points, seeded(0), optimizer)

    assert num_restarted[0] == 5
    codes, _ = quantize_vectors(model.latents(points), model.codebooks.detach())
    assert len(codes[:, 0].unique()) == 8
    momentum = optimizer.state[model.codebooks]["exp_avg"][0]
    assert float(momentum[3:].abs().max()) == 0
    assert float(momentum[:3].abs().max()) > 0


def test_the_reconstruction_trains_the_encoder_and_the_quantisation_the_codes() -> None:
    """The reconstruction has a straight-through gradient.

    The gradient of the codebook term is 2 (e - r) / elements, summed over the items of
    a code.
    """
    torch.manual_seed(0)
    model = Rqvae(6, RqvaeConfig(levels=2, codebook_size=4, latent=3, hidden=[8]))
    points = torch.randn(10, 6)
    losses = model(points)

    losses["reconstruction"].backward(retain_graph=True)
    for parameter in model.encoder.parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().sum() > 0
    assert model.codebooks.grad is None

    losses["quantization"].backward()
    assert model.codebooks.grad is not None
    latents, codebook = model.latents(points), model.codebooks.detach()[0]
    code, _ = nearest_centres(latents, codebook)
    item_gradients = 2 * (codebook[code] - latents) / latents.numel()
    expected = torch.zeros(4, 3).index_add_(0, code, item_gradients)
    torch.testing.assert_close(model.codebooks.grad[0], expected)


@pytest.mark.parametrize("kind", ["rqkmeans", "rqvae"])
def test_equal_seeds_give_equal_codes_and_other_seeds_do_not(kind: str) -> None:
    points = torch.randn(300, 10, generator=seeded(6))

    def compute_codes(seed: int) -> Tensor:
        torch.rand(seed + 1)  # the global random state must not matter
        if kind == "rqkmeans":
            kmeans_config = RqkmeansConfig(codebook_size=16, seed=seed)
            return finish(rqkmeans.fit(points, kmeans_config)).codes
        config = RqvaeConfig(
            codebook_size=16,
            latent=6,
            hidden=[16],
            epochs=12,
            batch_size=128,
            seed=seed,
        )
        return finish(rqvae.fit(points, config)).codes

    assert torch.equal(compute_codes(1), compute_codes(1))
    assert not torch.equal(compute_codes(1), compute_codes(2))


def test_training_leaves_the_global_random_state_unchanged() -> None:
    points = torch.randn(60, 4)
    config = RqvaeConfig(codebook_size=8, latent=3, hidden=[8], epochs=2)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    finish(rqvae.fit(points, config))
    assert torch.equal(torch.rand(3), expected)


def report_parts(count: int) -> Generator[Progress, None, str]:
    """Yield progress within the only step of a training, then the step."""
    for number in range(count):
        yield Progress(0, 1, f"part {number}", within=True)
    yield Progress(1, 1, "step")
    return "result"


def test_progress_within_a_step_is_shown_every_30_seconds() -> None:
    times = iter([0, 10, 20, 31, 35, 40, 66, 70, 70, 100])
    results: list[str] = []

    def training() -> Generator[Progress, None, None]:
        limited = limit_progress(report_parts(6), clock=lambda: float(next(times)))
        result = yield from limited
        results.append(result)

    shown = [progress.message for progress in training()]

    assert results == ["result"]
    assert shown == ["part 2", "part 4", "step"]


@pytest.mark.parametrize("kind", ["rqkmeans", "rqvae"])
def test_kmeans_and_epochs_report_their_progress(kind: str) -> None:
    points = torch.randn(300, 8, generator=seeded(0))
    if kind == "rqkmeans":
        training = rqkmeans.fit(points, RqkmeansConfig(levels=2, codebook_size=16))
    else:
        config = RqvaeConfig(levels=2, codebook_size=16, hidden=[8], latent=4, epochs=3)
        training = rqvae.fit(points, config)

    messages = [progress.message for progress in training if progress.within]

    for part in (
        "level 2: k-means seed 16 of 16",
        "level 2: k-means iteration 1 of at most 100",
    ):
        assert any(part in message for message in messages)
    if kind == "rqvae":
        assert "1 step of epoch 3" in messages


@pytest.mark.parametrize("seed", range(4))
def test_even_assignment_is_sinkhorns_algorithm(seed: int) -> None:
    rng = np.random.default_rng(seed)
    points, centres = rng.normal(size=(30, 3)), rng.normal(size=(8, 3))
    cost = ((points[:, None] - centres[None]) ** 2).sum(2)
    scaled = 2 * (cost - cost.min()) / (cost.max() - cost.min()) - 1
    plan = np.exp(-scaled / 0.05)
    for _ in range(50):
        plan /= plan.sum(0) * 8
        plan /= plan.sum(1, keepdims=True) * 30

    codes = assign_evenly(torch.tensor(points), torch.tensor(centres), 0.05)

    assert codes.tolist() == plan.argmax(1).tolist()


def test_codes_are_used_evenly_if_all_points_have_one_nearest_code() -> None:
    generator = seeded(0)
    points = 5 + 0.1 * torch.randn(64, 4, generator=generator)
    centres = torch.randn(16, 4, generator=generator)
    counts = torch.bincount(assign_evenly(points, centres, 0.003), minlength=16)
    assert counts.tolist() == pytest.approx([4] * 16, abs=2)


def test_equal_codes_are_separated_at_the_least_total_cost() -> None:
    generator = seeded(3)
    codebooks = torch.randn(2, 6, 3, generator=generator)
    vectors = codebooks[0, 0] + 0.3 * torch.randn(4, 3, generator=generator)
    residuals = (vectors - codebooks[0, 0]).double()
    cost = torch.cdist(residuals, codebooks[1].double()).square()  # (items, codes)
    rows = torch.arange(4)
    choices = itertools.permutations(range(6), 4)
    least_cost = min(float(cost[rows, list(choice)].sum()) for choice in choices)

    equal_codes = torch.zeros(4, 2, dtype=torch.long)
    codes = separate_equal_codes(vectors, codebooks, equal_codes)

    total_cost = float(cost[rows, codes[:, 1]].sum())
    assert total_cost == pytest.approx(least_cost)


def test_separation_changes_last_codes_alone_and_distinct_codes_not_at_all() -> None:
    generator = seeded(1)
    first_codebook = 10 * torch.randn(8, 4, generator=generator)
    last_codebook = torch.randn(8, 4, generator=generator)
    codebooks = torch.stack([first_codebook, last_codebook])
    noise = 0.2 * torch.randn(18, 4, generator=generator)
    vectors = first_codebook[torch.arange(18) % 3] + noise
    codes, _ = quantize_vectors(vectors, codebooks)
    assert len(codes.unique(dim=0)) < 18

    separated = separate_equal_codes(vectors, codebooks, codes)

    assert len(separated.unique(dim=0)) == 18
    assert torch.equal(separated[:, 0], codes[:, 0])
    again = separate_equal_codes(vectors, codebooks, separated)
    assert torch.equal(again, separated)


def test_a_tokenizer_with_even_last_codes_has_fewer_collisions() -> None:
    generator = seeded(2)
    centres = torch.randn(12, 8, generator=generator)
    noise = 0.05 * torch.randn(240, 8, generator=generator)
    vectors = centres[torch.arange(240) % 12] + noise
    settings = {
        "levels": 3,
        "codebook_size": 16,
        "latent": 4,
        "hidden": [16],
        "epochs": 20,
        "batch_size": 120,
    }

    nearest = finish(rqvae.fit(vectors, RqvaeConfig(**settings, sinkhorn=0.0)))
    even = finish(rqvae.fit(vectors, RqvaeConfig(**settings, sinkhorn=0.003)))

    num_nearest = len(nearest.codes.unique(dim=0))
    assert num_nearest < 200
    assert len(even.codes.unique(dim=0)) > num_nearest + 20
