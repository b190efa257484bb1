"""Causal softmax attention: tile by tile for short rows on a CPU, else PyTorch's fused kernel.

    mixed = causal_product(q, k, v)

On a CPU the fused kernel multiplies with a library that `models/matmul.py` has reason to leave, and in narrow tiles
where rows are short. Here a tile is two plain products around a softmax; the backward pass computes its weights anew,
so that no more than one tile of them is ever held. `python -m models.bench actions` times whole models with it.

Shapes: `B` rows, `H` heads, `T` positions, `d` width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import wrap_torch_function

LONGEST = 767
"""Positions up to which tiles are faster: from 768 on PyTorch's kernel takes wider ones itself."""

BLOCK = 128
"""Queries of a tile at most: few enough that little is computed above the diagonal."""

TILE = 2**18
"""Scores of a tile, over as many heads as make them up: they stay in a core's cache between the products."""


@wrap_torch_function(lambda q, k, v: (q, k, v))  # one call to those who count operations
def causal_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(B, H, T, d): softmax(q k' / sqrt(d)) v of three (B, H, T, d), where position t reads 0..t."""
    plain = q.device.type == "cpu" and q.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    if plain and q.shape[2] <= LONGEST and not torch.compiler.is_compiling():
        return _Tiled.apply(q, k, v)
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        shape = q.shape
        q, k, v = _flat(q * shape[-1] ** -0.5, k, v)
        mixed = torch.empty_like(q)
        for heads, rows, keys, weights in _tiles(q, k):
            mixed[heads, rows] = weights @ v[heads, keys]
        return mixed.view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape, (q, k, v) = gradient.shape, ctx.saved_tensors
        scale = shape[-1] ** -0.5
        q, k, v, gradient = _flat(q * scale, k, v, gradient)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for heads, rows, keys, weights in _tiles(q, k):
            dv[heads, keys] += weights.mT @ gradient[heads, rows]
            slope = gradient[heads, rows] @ v[heads, keys].mT
            slope = torch._softmax_backward_data(slope, weights, -1, slope.dtype)
            dq[heads, rows] = slope @ k[heads, keys]
            dk[heads, keys] += slope.mT @ q[heads, rows]
        return dq.mul_(scale).view(shape), dk.view(shape), dv.view(shape)


def _flat(*tensors: Tensor) -> list[Tensor]:
    """(B * H, T, d), contiguous, of each (B, H, T, d)."""
    return [tensor.contiguous().flatten(0, 1) for tensor in tensors]


def _tiles(q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice, slice, Tensor]]:
    """Of each tile its heads, queries, the keys up to the last of them, and the weights (heads, queries, keys)."""
    length = q.shape[1]
    above = q.new_full((BLOCK, BLOCK), -torch.inf).triu(1)
    for first in range(0, length, BLOCK):
        end = min(first + BLOCK, length)
        group = max(1, TILE // ((end - first) * end))
        for head in range(0, len(q), group):
            heads, rows, keys = slice(head, head + group), slice(first, end), slice(0, end)
            scores = q[heads, rows] @ k[heads, keys].mT
            scores[:, :, first:] += above[: end - first, : end - first]
            yield heads, rows, keys, scores.softmax(-1)
