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


def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return the attention (..., H, D) of one query per head.

    Args:
        query: (..., H, D) queries.
        keys: (..., H, S, D) keys.
        values: (..., H, S, D) values.
    """
    scores = torch.einsum("...d,...sd->...s", query, keys) / query.shape[-1] ** 0.5
    return torch.einsum("...s,...sd->...d", scores.softmax(-1), values)


def attend_causally(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention (B, H, S, D) by its definition, query by query."""
    rows = []
    for t in range(q.shape[2]):
        rows.append(attend(q[:, :, t], k[:, :, : t + 1], v[:, :, : t + 1]))
    return torch.stack(rows, 2)


@pytest.mark.parametrize(
    "length", [1, 2, 127, 128, 129, 300, MAX_TILED_LENGTH, MAX_TILED_LENGTH + 1]
)
def test_outputs_and_gradients_equal_masked_attention(length, monkeypatch):
    torch.manual_seed(length)
    shape = (2, 3, length, 8)
    # inputs are not contiguous
    inputs = [
        (2 * torch.randn(2, length, 3, 8)).transpose(1, 2).requires_grad_()
        for _ in range(3)
    ]
    double_inputs = [x.detach().double().requires_grad_() for x in inputs]
    expected = attend_causally(*double_inputs)
    weight = torch.randn(shape)
    expected_gradients = torch.autograd.grad(expected, double_inputs, weight.double())

    for tile in (1, 2**14, module.TILE_SCORES):
        monkeypatch.setattr(module, "TILE_SCORES", tile)
        mixed = causal_product(*inputs)
        gradients = torch.autograd.grad(mixed, inputs, weight)
        assert mixed.shape == shape
        torch.testing.assert_close(mixed.double(), expected, rtol=0, atol=2e-5)
        for gradient, expected_gradient in zip(
            gradients, expected_gradients, strict=True
        ):
            torch.testing.assert_close(
                gradient.double(), expected_gradient, rtol=1e-4, atol=1e-4
            )


def attend_within_bounds(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bound: Tensor,
    group: int | None,
    own: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Return the result of `prefix_product` by a loop over queries."""
    num_rows, heads, num_queries, width = q.shape
    mixed = torch.zeros(num_rows, num_queries, heads, width, dtype=q.dtype)
    for row in range(num_rows):
        for query in range(num_queries):
            visible = list(range(bound[row, query]))
            if group:
                visible += range(query // group * group, query + 1)
            keys, values = k[row][:, visible], v[row][:, visible]
            if own is not None:
                own_k, own_v = (part[row, :, query : query + 1] for part in own)
                keys, values = (
                    torch.cat([keys, own_k], 1),
                    torch.cat([values, own_v], 1),
                )
            mixed[row, query] = attend(q[row, :, query], keys, values)
    return mixed.transpose(1, 2)


@pytest.mark.parametrize("small_tiles", [False, True])
@pytest.mark.parametrize(
    "kind", ["strict", "own", "pairs", "candidates", "strict candidates"]
)
def test_bounded_outputs_and_gradients_equal_a_loop_over_queries(
    kind, small_tiles, monkeypatch
):
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
    bound = torch.randint(0, keys + 1, (2, queries))
    if group is not None:
        # no bound is after the first position of the query's group
        size = group or 1
        bound = torch.minimum(bound, torch.arange(14) // size * size)
    bound[0, :3] = 0
    own = (own_k, own_v) if kind == "candidates" else None
    inputs = (q, k, v, *(own or ()))

    mixed = prefix_product(q, k, v, bound, group, own)

    expected = attend_within_bounds(q, k, v, bound, group, own)
    torch.testing.assert_close(mixed, expected)
    weight = torch.randn_like(mixed)
    gradients = torch.autograd.grad(mixed, inputs, weight)
    expected_gradients = torch.autograd.grad(expected, inputs, weight)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient)
