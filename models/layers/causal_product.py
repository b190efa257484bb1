"""Causal softmax attention, plain or with a bound of its own for every query, tile by tile or by a fused kernel.

    mixed = causal_product(q, k, v)
    mixed = prefix_product(q, k, v, bound, 1)              # ties: query i reads keys 0..bound_i - 1 and itself
    mixed = prefix_product(q, k, v, bound, None, (own_k, own_v))   # queries that are no keys: candidates

Plain causal attention of long rows, and on a GPU, is PyTorch's fused kernel. On a CPU that multiplies with a library
that `models/cpu/matmul.py` has reason to leave, and in narrow tiles where rows are short. Here a tile is two plain
products around a softmax; the backward pass computes its weights anew, so that no more than one tile of them is ever
held. With bounds it is tiles everywhere: a mask of all rows would be as large as the scores, and fused kernels copy it
as numbers. `python -m benchmarks actions` times whole models with it.

Shapes: `B` rows, `H` heads, `L` queries, `T` keys, `d` width of a head.
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

LARGE_TILE = 2**26
"""Those of a tile on a GPU."""


@wrap_torch_function(
    lambda q, k, v: (q, k, v)
)  # one call to those who count operations
def causal_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(B, H, L, d): softmax(q k' / sqrt(d)) v of three (B, H, L, d), where position t reads 0..t."""
    plain = (
        q.device.type == "cpu"
        and q.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
    )
    if plain and q.shape[2] <= LONGEST and not torch.compiler.is_compiling():
        return _Tiled.apply(q, k, v, None, 1, None, None)
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


@wrap_torch_function(lambda q, k, v, bound, group, own=None: (q, k, v))
def prefix_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bound: Tensor,
    group: int | None,
    own: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """(B, H, L, d): the same of queries (B, H, L, d) over keys and values (B, H, T, d), where query i reads keys
    0..bound_i - 1 of `bound` (B, L); zero where it reads nothing.

    With `group` query i is key i, its bound is i at most, and above 0 it also reads from the first key of its group of
    so many (1 or 2) on to itself. Without it queries are no keys, and `own` has a key and a value for each of them,
    (B, H, L, d) both, which no other reads: one more column of scores.
    """
    return _Tiled.apply(q, k, v, bound, group, *(own or (None, None)))


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bound: Tensor | None,
        group: int | None,
        own_k: Any,
        own_v: Any,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, bound, own_k, own_v)
        ctx.group, shape = group, q.shape
        q, k, v, own_k, own_v = _flat(q * shape[-1] ** -0.5, k, v, own_k, own_v)
        mixed = torch.empty_like(q)
        for heads, rows, keys, weights in _tiles(q, k, bound, group, own_k):
            weights = weights.to(v.dtype)
            mixed[heads, rows] = weights[..., : keys.stop] @ v[heads, keys]
            if own_v is not None:
                mixed[heads, rows] += weights[..., -1:] * own_v[heads, rows]
        return mixed.view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        shape, (q, k, v, bound, own_k, own_v) = gradient.shape, ctx.saved_tensors
        scale, of_keys = shape[-1] ** -0.5, k.shape
        q, k, v, own_k, own_v, gradient = _flat(q * scale, k, v, own_k, own_v, gradient)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        d_own_k, d_own_v = (
            None if own_k is None else torch.empty_like(q) for _ in range(2)
        )
        for heads, rows, keys, weights in _tiles(q, k, bound, ctx.group, own_k):
            mine = gradient[heads, rows]
            slope = mine @ v[heads, keys].mT
            if own_v is not None:
                slope = torch.cat(
                    [slope, (mine * own_v[heads, rows]).sum(-1, keepdim=True)], -1
                )
            slope = torch._softmax_backward_data(
                slope.to(weights.dtype), weights, -1, weights.dtype
            ).to(k.dtype)
            weights, past = weights.to(v.dtype), slope[..., : keys.stop]
            dv[heads, keys] += weights[..., : keys.stop].mT @ mine
            dk[heads, keys] += past.mT @ q[heads, rows]
            dq[heads, rows] = past @ k[heads, keys]
            if d_own_k is not None and d_own_v is not None:
                d_own_v[heads, rows] = weights[..., -1:] * mine
                d_own_k[heads, rows] = slope[..., -1:] * q[heads, rows]
                dq[heads, rows] += slope[..., -1:] * own_k[heads, rows]
        own = (
            None if part is None else part.view(shape) for part in (d_own_k, d_own_v)
        )
        return (
            dq.mul_(scale).view(shape),
            dk.view(of_keys),
            dv.view(of_keys),
            None,
            None,
            *own,
        )


def _flat(*tensors: Tensor | None) -> list[Any]:
    """(B * H, L, d), contiguous, of each (B, H, L, d); None of None."""
    return [
        None if tensor is None else tensor.contiguous().flatten(0, 1)
        for tensor in tensors
    ]


def _tiles(
    q: Tensor, k: Tensor, bound: Tensor | None, group: int | None, own_k: Tensor | None
) -> Iterator[tuple[slice, slice, slice, Tensor]]:
    """Of each tile its heads, queries, the keys up to the last that any of them may read, and the weights (heads,
    queries, keys) in float32 at least, with one more column for `own_k`. Without `bound` queries read causally."""
    above = q.new_full((BLOCK, BLOCK), -torch.inf).triu(1)
    place = torch.arange(
        max(k.shape[1], q.shape[1]), device=q.device, dtype=torch.int32
    )
    size = TILE if q.device.type == "cpu" else LARGE_TILE
    if bound is not None:
        bound = bound.to(torch.int32).repeat_interleave(len(q) // len(bound), 0)[
            ..., None
        ]  # (B * H, L, 1)
    # no more keys than a tile's queries read, and no mask where all read them; on a GPU the host would wait for that
    narrow = (
        group is None and q.device.type == "cpu" and not torch.compiler.is_compiling()
    )
    for first in range(0, q.shape[1], BLOCK):
        end = min(first + BLOCK, q.shape[1])
        rows, keys = slice(first, end), slice(0, k.shape[1] if group is None else end)
        most = max(1, size // ((end - first) * keys.stop))
        for head in range(0, len(q), most):
            heads, read, hidden = slice(head, head + most), keys, None
            if bound is not None:
                mine, shortest = bound[heads, rows], 0
                if narrow:
                    shortest, longest = (int(end) for end in mine.aminmax())
                    read = slice(0, longest)
                if shortest < read.stop:
                    hidden = place[read] >= mine
            scores = q[heads, rows] @ k[heads, read].mT
            if bound is None:
                scores[:, :, first:] += above[: end - first, : end - first]
            elif hidden is not None:
                if group:
                    query, key = place[rows, None], place[rows]
                    hidden[:, :, first:] &= (key < query // group * group) | (
                        key > query
                    )
                scores.masked_fill_(hidden, -torch.inf)
            if own_k is not None:
                own = (q[heads, rows] * own_k[heads, rows]).sum(-1, keepdim=True)
                scores = torch.cat([scores, own], -1)
            weights = scores.softmax(
                -1, torch.promote_types(scores.dtype, torch.float32)
            )
            if hidden is not None and not group and own_k is None:
                weights.masked_fill_(
                    hidden, 0.0
                )  # softmax over nothing is not a number
            yield heads, rows, read, weights
