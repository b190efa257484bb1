"""Tiled causal attention equals masked attention in float64 for all tile sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.layers import causal_product as module
from models.layers.causal_product import (
    MAX_TILED_LENGTH,
    causal_product,
    prefix_product,
)


def masked_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention by its definition, query by query."""
    rows = []
    for t in range(q.shape[2]):
        scores = (
            torch.einsum("bhd,bhsd->bhs", q[:, :, t], k[:, :, : t + 1])
            / q.shape[3] ** 0.5
        )
        rows.append(torch.einsum("bhs,bhsd->bhd", scores.softmax(-1), v[:, :, : t + 1]))
    return torch.stack(rows, 2)


@pytest.mark.parametrize(
    "length", [1, 2, 127, 128, 129, 300, MAX_TILED_LENGTH, MAX_TILED_LENGTH + 1]
)
def test_outputs_and_gradients_equal_masked_attention(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(length)
    shape = (2, 3, length, 8)
    inputs = [
        (2 * torch.randn(2, length, 3, 8)).transpose(1, 2).requires_grad_()
        for _ in range(3)
    ]  # not contiguous
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected, weight = masked_attention(*exact), torch.randn(shape)
    expected_gradients = torch.autograd.grad(expected, exact, weight.double())
    for tile in (1, 2**14, module.TILE_SCORES):
        monkeypatch.setattr(module, "TILE_SCORES", tile)
        mixed = causal_product(*inputs)
        assert mixed.shape == shape
        torch.testing.assert_close(mixed.double(), expected, rtol=0, atol=2e-5)
        for gradient, expected_gradient in zip(
            torch.autograd.grad(mixed, inputs, weight), expected_gradients, strict=True
        ):
            torch.testing.assert_close(
                gradient.double(), expected_gradient, rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize("small_tiles", [False, True])
@pytest.mark.parametrize(
    "kind", ["strict", "own", "pairs", "candidates", "strict candidates"]
)
def test_bounded_outputs_and_gradients_equal_a_loop_over_queries(
    kind: str, small_tiles: bool, monkeypatch
) -> None:
    torch.manual_seed(0)
    if small_tiles:
        monkeypatch.setattr(module, "TILE_QUERIES", 4)
        monkeypatch.setattr(module, "TILE_SCORES", 30)
    queries, keys = (11, 14) if "candidates" in kind else (14, 14)
    q, own_k, own_v = (
        torch.randn(2, 3, queries, 4, dtype=torch.double, requires_grad=True)
        for _ in range(3)
    )
    k, v = (
        torch.randn(2, 3, keys, 4, dtype=torch.double, requires_grad=True)
        for _ in range(2)
    )
    group = {"strict": 0, "own": 1, "pairs": 2}.get(kind)
    free = torch.randint(0, keys + 1, (2, queries))
    bound = (
        free
        if group is None
        else torch.minimum(free, torch.arange(14) // (group or 1) * (group or 1))
    )
    bound[0, :3] = 0
    own = (own_k, own_v) if kind == "candidates" else None
    got = prefix_product(q, k, v, bound, group, own)
    rows = []
    for row in range(2):
        for i in range(queries):
            read = list(range(bound[row, i]))
            read += list(range(i // group * group, i + 1)) if group else []
            some_k = (
                k[row][:, read]
                if own is None
                else torch.cat([k[row][:, read], own_k[row, :, i : i + 1]], 1)
            )
            some_v = (
                v[row][:, read]
                if own is None
                else torch.cat([v[row][:, read], own_v[row, :, i : i + 1]], 1)
            )
            scores = torch.einsum("hd,hsd->hs", q[row, :, i], some_k) / 2
            rows.append(torch.einsum("hs,hsd->hd", scores.softmax(1), some_v))
    expected = torch.stack(rows).view(2, queries, 3, 4).transpose(1, 2)
    torch.testing.assert_close(got, expected)
    weight, inputs = torch.randn_like(got), (q, k, v, *(own or ()))
    for left, right in zip(
        torch.autograd.grad(got, inputs, weight),
        torch.autograd.grad(expected, inputs, weight),
        strict=True,
    ):
        torch.testing.assert_close(left, right)


def test_bounds_work_under_autocast() -> None:
    q = torch.randn(1, 2, 6, 4, requires_grad=True)
    bound = torch.arange(6)[None]
    with torch.autocast("cpu", torch.bfloat16):
        half = q.bfloat16()
        mixed = prefix_product(half, half, half, bound, 1)
        own = prefix_product(half, half, half, bound, None, (half, half))
        (mixed + own).float().square().sum().backward()
    assert q.grad is not None
    assert q.grad.isfinite().all()
    torch.testing.assert_close(
        mixed.float(), masked_attention(q, q, q), rtol=0.05, atol=0.05
    )
    torch.testing.assert_close(own, mixed, rtol=0.05, atol=0.05)


def test_large_scores_do_not_overflow() -> None:
    q = torch.full((1, 1, 5, 4), 1e4)
    found = causal_product(
        q, q, torch.arange(5.0).view(1, 1, 5, 1).expand(-1, -1, -1, 4)
    )
    torch.testing.assert_close(
        found[0, 0, :, 0], torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0])
    )


def test_float64_and_autocast_use_the_fused_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_TiledAttention", None)
    q = torch.randn(1, 2, 6, 4)
    torch.testing.assert_close(
        causal_product(q.double(), q.double(), q.double()),
        masked_attention(*[q.double()] * 3),
    )
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(
            causal_product(q, q, q).float(),
            masked_attention(q, q, q),
            rtol=0.05,
            atol=0.05,
        )
    with pytest.raises(AttributeError):  # the tiles, which float32 takes
        causal_product(q, q, q)
