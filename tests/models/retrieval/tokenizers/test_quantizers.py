"""k-means, RQ-KMeans and RQ-VAE: clusters, initialisation, dead codes, seeds."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
import torch

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
from models.storage.tables import UserError

BRANCHES = (4, 3, 2)


def finish(training: Generator[Progress, None, Any]) -> Any:
    """Run a training and return its result."""
    while True:
        try:
            next(training)
        except StopIteration as end:
            return end.value


def planted(
    per_leaf: int = 8, width: int = 16, seed: int = 0
) -> tuple[torch.Tensor, np.ndarray]:
    """Return points around a tree of centres, and their paths.

    The spread of the centres shrinks tenfold per level.
    """
    generator = torch.Generator().manual_seed(seed)
    points, paths = [], []
    level_offsets = [
        torch.randn(k, width, generator=generator) * 10.0**-i
        for i, k in enumerate(BRANCHES)
    ]
    for a in range(BRANCHES[0]):
        for b in range(BRANCHES[1]):
            for c in range(BRANCHES[2]):
                centre = level_offsets[0][a] + level_offsets[1][b] + level_offsets[2][c]
                points.append(
                    centre + 1e-4 * torch.randn(per_leaf, width, generator=generator)
                )
                paths += [(a, b, c)] * per_leaf
    return torch.cat(points), np.array(paths)


def same_partition(left: np.ndarray, right: np.ndarray) -> bool:
    pairs = len(set(zip(map(tuple, left), map(tuple, right), strict=True)))
    return pairs == len(set(map(tuple, left))) == len(set(map(tuple, right)))


def test_kmeans_finds_separated_clusters_and_returns_one_centre_per_row() -> None:
    generator = torch.Generator().manual_seed(1)
    truth = torch.randn(12, 5, generator=generator) * 10
    points = truth.repeat_interleave(20, 0) + 0.01 * torch.randn(
        240, 5, generator=generator
    )
    centres = finish(kmeans(points, 12, torch.Generator().manual_seed(0)))
    assert centres.shape == (12, 5)
    assert torch.cdist(truth, centres).min(1).values.max() < 0.05


@pytest.mark.parametrize("codes", [8, 12])
def test_kmeans_gives_each_distinct_point_a_centre_where_there_are_enough(
    codes: int,
) -> None:
    points = torch.cat(
        [torch.zeros(50, 2), torch.arange(1.0, 8.0)[:, None].repeat(1, 2)]
    )  # 8 distinct points
    centres = finish(kmeans(points, codes, torch.Generator().manual_seed(0)))
    assert float(nearest_centres(points, centres)[1].max()) < 1e-6


def test_more_codes_than_items_is_an_error_that_names_both() -> None:
    with pytest.raises(
        UserError, match="256 codes per level need at least 256 items, there are 10"
    ):
        finish(rqkmeans.fit(torch.randn(10, 4), RqkmeansConfig()))


def test_codebooks_of_many_items_are_fitted_on_a_sample_and_all_get_nearest_codes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rqkmeans, "BLOCK_ROWS", 128)
    generator = torch.Generator().manual_seed(3)
    truth = 20 * torch.randn(8, 6, generator=generator)
    vectors = truth[torch.randint(8, (1000,), generator=generator)] + torch.randn(
        1000, 6, generator=generator
    )
    config = RqkmeansConfig(levels=2, codebook_size=8)
    whole = finish(rqkmeans.fit(vectors, config))
    monkeypatch.setattr(rqkmeans, "ITEMS_PER_CODE", 30)
    sampled = finish(rqkmeans.fit(vectors, config))
    assert not torch.equal(sampled.codebooks, whole.codebooks)
    assert sampled.codes.shape == (1000, 2)
    assert torch.equal(
        sampled.codes[:, 0], nearest_centres(vectors, sampled.codebooks[0])[0]
    )
    assert sampled.reconstruction_error < 1.1 * whole.reconstruction_error
    total = sampled.codebooks[torch.arange(2), sampled.codes].sum(1)
    expected = (vectors - total).square().sum() / (
        vectors - vectors.mean(0)
    ).square().sum()
    assert sampled.reconstruction_error == pytest.approx(float(expected), rel=1e-5)


def test_greedy_codes_are_the_nearest_centroids_of_the_residuals() -> None:
    generator = torch.Generator().manual_seed(2)
    vectors, codebooks = (
        torch.randn(30, 6, generator=generator),
        torch.randn(3, 5, 6, generator=generator),
    )
    codes, quantized = quantize_vectors(vectors, codebooks)
    for vector, code, total in zip(vectors, codes, quantized, strict=True):
        residual = vector
        for level in range(3):
            assert int(
                torch.cdist(residual[None], codebooks[level])[0].argmin()
            ) == int(code[level])
            residual = residual - codebooks[level][code[level]]
        torch.testing.assert_close(vector - residual, total)


def test_rqkmeans_of_some_items_encodes_the_others_by_what_it_learned() -> None:
    points, _ = planted()
    config = RqkmeansConfig(levels=2, codebook_size=BRANCHES[0])
    chosen = torch.arange(0, len(points), 3)
    alone, all_ = (
        finish(rqkmeans.fit(points[chosen], config)),
        finish(rqkmeans.fit(points, config, chosen)),
    )
    assert torch.equal(alone.codebooks, all_.codebooks)
    assert torch.equal(alone.codes, all_.codes[chosen])
    assert torch.equal(quantize_vectors(points, all_.codebooks)[0], all_.codes)


def test_rqkmeans_recovers_planted_hierarchy() -> None:
    points, paths = planted()
    # one codebook size for all levels: the last two have spare codes, so sizes follow
    # the first level
    quantized = finish(
        rqkmeans.fit(points, RqkmeansConfig(levels=2, codebook_size=BRANCHES[0]))
    )
    assert same_partition(quantized.codes[:, :1].numpy(), paths[:, :1])
    full = finish(
        rqkmeans.fit(points, RqkmeansConfig(levels=4, codebook_size=BRANCHES[0]))
    )
    assert full.reconstruction_error < 1e-4
    for leaf in np.unique(
        paths, axis=0
    ):  # the items of a leaf stay together to the third level
        assert (
            len(np.unique(full.codes[(paths == leaf).all(1), :2].numpy(), axis=0)) == 1
        )


SMALL = RqvaeConfig(
    levels=2, codebook_size=4, latent=8, hidden=[32], batch_size=64, epochs=150, lr=3e-3
)


@pytest.mark.long
def test_rqvae_recovers_planted_clusters() -> None:
    points, paths = planted()
    quantized = finish(rqvae.fit(points, SMALL))
    assert same_partition(quantized.codes[:, :1].numpy(), paths[:, :1])
    assert quantized.reconstruction_error < 0.02


def test_kmeans_initialisation_lowers_the_quantisation_error_and_uses_every_code() -> (
    None
):
    points = torch.randn(500, 12, generator=torch.Generator().manual_seed(4))
    config = RqvaeConfig(levels=3, codebook_size=16, latent=6, hidden=[24])
    torch.manual_seed(0)
    model = Rqvae(12, config)
    latents = model.latents(points)

    def error() -> list[float]:
        residual, errors = latents, []
        for codebook in model.codebooks.detach():
            code, distances = nearest_centres(residual, codebook)
            residual = residual - codebook[code]
            errors.append(float(distances.mean()))
        return errors

    random = error()
    finish(model.initialise_codebooks(points, torch.Generator().manual_seed(0)))
    initialised = error()
    assert all(
        after < before for after, before in zip(initialised, random, strict=True)
    )
    assert (
        initialised[0] > initialised[1] > initialised[2]
    )  # each level is fitted to what the last left over
    codes, _ = quantize_vectors(latents, model.codebooks.detach())
    assert all(len(codes[:, level].unique()) == 16 for level in range(3))


def test_dead_codes_restart_at_residuals_and_come_into_use() -> None:
    points = torch.randn(200, 12, generator=torch.Generator().manual_seed(5))
    torch.manual_seed(0)
    model = Rqvae(12, RqvaeConfig(levels=2, codebook_size=8, latent=6, hidden=[24]))
    finish(model.initialise_codebooks(points, torch.Generator().manual_seed(0)))
    with torch.no_grad():
        model.codebooks[0, 3:] = 1e3  # five codes that nothing is near to
    optimizer = torch.optim.AdamW(model.parameters())
    model(points)["loss"].backward()
    optimizer.step()
    restarted = model.restart_dead_codes(
        points, torch.Generator().manual_seed(0), optimizer
    )
    assert restarted[0] == 5
    codes, _ = quantize_vectors(model.latents(points), model.codebooks.detach())
    assert len(codes[:, 0].unique()) == 8
    assert float(optimizer.state[model.codebooks]["exp_avg"][0, 3:].abs().max()) == 0
    assert float(optimizer.state[model.codebooks]["exp_avg"][0, :3].abs().max()) > 0


def test_straight_through_gradient_reaches_the_encoder_and_commitment_pulls_it_to_the_code() -> (
    None
):
    torch.manual_seed(0)
    model = Rqvae(6, RqvaeConfig(levels=2, codebook_size=4, latent=3, hidden=[8]))
    points = torch.randn(10, 6)
    losses = model(points)
    losses["reconstruction"].backward(retain_graph=True)
    assert all(
        p.grad is not None and p.grad.abs().sum() > 0
        for p in model.encoder.parameters()
    )
    assert model.codebooks.grad is None  # codes learn from the quantisation loss alone
    losses["quantization"].backward()
    assert model.codebooks.grad is not None
    # the codebook term's gradient is 2 (e - r) / elements, summed over the code's items
    latents = model.latents(points)
    code, _ = nearest_centres(latents, model.codebooks.detach()[0])
    expected = torch.zeros(4, 3).index_add_(
        0, code, 2 * (model.codebooks.detach()[0][code] - latents) / latents.numel()
    )
    torch.testing.assert_close(model.codebooks.grad[0], expected)


@pytest.mark.parametrize("kind", ["rqkmeans", "rqvae"])
def test_equal_seeds_give_equal_codes_and_others_do_not(kind: str) -> None:
    points = torch.randn(300, 10, generator=torch.Generator().manual_seed(6))

    def codes(seed: int) -> np.ndarray:
        torch.rand(seed + 1)  # the global state must not matter
        if kind == "rqkmeans":
            return finish(
                rqkmeans.fit(points, RqkmeansConfig(codebook_size=16, seed=seed))
            ).codes.numpy()
        config = RqvaeConfig(
            codebook_size=16,
            latent=6,
            hidden=[16],
            epochs=12,
            batch_size=128,
            seed=seed,
        )
        return finish(rqvae.fit(points, config)).codes.numpy()

    assert np.array_equal(codes(1), codes(1))
    assert not np.array_equal(codes(1), codes(2))


def test_training_leaves_the_global_random_state_alone() -> None:
    points = torch.randn(60, 4)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    finish(
        rqvae.fit(points, RqvaeConfig(codebook_size=8, latent=3, hidden=[8], epochs=2))
    )
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (RqkmeansConfig, {"levels": 0}, "rqkmeans.levels is 0"),
        (RqkmeansConfig, {"codebook_size": 70000}, "codes are uint16"),
        (RqvaeConfig, {"epochs": 0}, "rqvae.epochs is 0"),
        (RqvaeConfig, {"sinkhorn": -1}, "rqvae.sinkhorn is -1"),
        (RqvaeConfig, {"lr": 0.0}, "rqvae.lr is 0.0"),
        (RqvaeConfig, {"hidden": [8, 0]}, "rqvae.hidden"),
    ],
)
def test_impossible_settings_are_refused(
    config: type, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config(**fields)


def messages(found: list[str], steps: int) -> Generator[Progress, None, str]:
    """Yield progress within the only step of a training."""
    for number in range(steps):
        yield Progress(0, 1, f"part {number}", within=True)
    found.append("trained")
    yield Progress(1, 1, "step")
    return "made"


def test_what_is_within_a_step_is_shown_every_30_seconds() -> None:
    time = iter([0, 10, 20, 31, 35, 40, 66, 70, 70, 100])
    made: list[str] = []

    def watched() -> Generator[Progress, None, None]:
        made.append(
            (
                yield from limit_progress(
                    messages([], 6), clock=lambda: float(next(time))
                )
            )
        )

    shown = [progress.message for progress in watched()]
    assert made == ["made"]
    assert shown == ["part 2", "part 4", "step"]


@pytest.mark.parametrize("kind", ["rqkmeans", "rqvae"])
def test_k_means_and_epochs_say_how_far_they_are(kind: str) -> None:
    points = torch.randn(300, 8, generator=torch.Generator().manual_seed(0))
    if kind == "rqkmeans":
        training = rqkmeans.fit(points, RqkmeansConfig(levels=2, codebook_size=16))
    else:
        training = rqvae.fit(
            points,
            RqvaeConfig(levels=2, codebook_size=16, hidden=[8], latent=4, epochs=3),
        )
    inside = [progress.message for progress in training if progress.within]
    assert any("level 2: k-means seed 16 of 16" in message for message in inside)
    assert any(
        "level 2: k-means iteration 1 of at most 100" in message for message in inside
    )
    assert kind == "rqkmeans" or "1 step of epoch 3" in inside


@pytest.mark.parametrize("seed", range(4))
def test_the_plan_is_that_of_plain_sinkhorn(seed: int) -> None:
    draw = np.random.default_rng(seed)
    points, centres = draw.normal(size=(30, 3)), draw.normal(size=(8, 3))
    cost = ((points[:, None] - centres[None]) ** 2).sum(2)
    plan = np.exp(-(2 * (cost - cost.min()) / (cost.max() - cost.min()) - 1) / 0.05)
    for _ in range(50):
        plan /= plan.sum(0) * 8
        plan /= plan.sum(1, keepdims=True) * 30
    assert (
        assign_evenly(torch.tensor(points), torch.tensor(centres), 0.05).tolist()
        == plan.argmax(1).tolist()
    )


def test_the_last_codes_that_differ_cost_the_least() -> None:
    generator = torch.Generator().manual_seed(3)
    codebooks = torch.randn(2, 6, 3, generator=generator)
    vectors = codebooks[0, 0] + 0.3 * torch.randn(4, 3, generator=generator)
    codes = separate_equal_codes(
        vectors, codebooks, torch.zeros(4, 2, dtype=torch.long)
    )
    cost = torch.cdist(
        (vectors - codebooks[0, 0]).double(), codebooks[1].double()
    ).square()
    least = min(
        sum(float(cost[i, k]) for i, k in enumerate(some))
        for some in itertools.permutations(range(6), 4)
    )
    assert float(cost[torch.arange(4), codes[:, 1]].sum()) == pytest.approx(least)


def test_codes_are_used_evenly_where_the_nearest_is_the_same_for_all() -> None:
    generator = torch.Generator().manual_seed(0)
    points = 5 + 0.1 * torch.randn(64, 4, generator=generator)
    centres = torch.randn(16, 4, generator=generator)
    assert torch.bincount(
        assign_evenly(points, centres, 0.003), minlength=16
    ).tolist() == pytest.approx([4] * 16, abs=2)


def test_items_with_equal_codes_are_spread_and_others_stay() -> None:
    generator = torch.Generator().manual_seed(1)
    codebooks = torch.stack(
        [
            10 * torch.randn(8, 4, generator=generator),
            torch.randn(8, 4, generator=generator),
        ]
    )
    vectors = codebooks[0][torch.arange(18) % 3] + 0.2 * torch.randn(
        18, 4, generator=generator
    )
    codes, _ = quantize_vectors(vectors, codebooks)
    assert len(codes.unique(dim=0)) < 18
    after = separate_equal_codes(vectors, codebooks, codes)
    assert len(after.unique(dim=0)) == 18
    assert torch.equal(after[:, 0], codes[:, 0])
    again = separate_equal_codes(vectors, codebooks, after)
    assert torch.equal(again, after)


def test_a_tokenizer_with_even_last_codes_has_fewer_collisions() -> None:
    generator = torch.Generator().manual_seed(2)
    centres = torch.randn(12, 8, generator=generator)
    vectors = centres[torch.arange(240) % 12] + 0.05 * torch.randn(
        240, 8, generator=generator
    )
    settings = {
        "levels": 3,
        "codebook_size": 16,
        "latent": 4,
        "hidden": [16],
        "epochs": 20,
        "batch_size": 120,
    }
    plain, even = (
        finish(rqvae.fit(vectors, RqvaeConfig(**settings, sinkhorn=epsilon))).codes
        for epsilon in (0.0, 0.003)
    )
    assert len(plain.unique(dim=0)) < 200
    assert len(even.unique(dim=0)) > len(plain.unique(dim=0)) + 20
