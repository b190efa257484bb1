"""Causal softmax attention in tiles, with an optional bound per query.

    mixed = causal_product(q, k, v)
    mixed = prefix_product(q, k, v, bound, 1)  # query i: keys 0..bound_i - 1 and itself
    mixed = prefix_product(q, k, v, bound, None, (self_k, self_v))  # candidates

Long rows without bounds, and GPUs, use PyTorch's fused kernel. On a CPU that kernel
multiplies with a library that `models/cpu/weights.py` avoids, and short rows get narrow
tiles. Here a tile is two matrix products around a softmax. The backward pass recomputes
the weights of a tile, so the weights of only one tile are in memory at a time. With
bounds, all devices use tiles: a mask of all rows would be as large as the scores, and
fused kernels copy it as floating-point numbers.

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

MAX_TILED_LENGTH = 767
"""Rows up to this length are faster in tiles than in PyTorch's fused kernel."""

TILE_QUERIES = 128
"""Maximum queries of a tile. More queries would waste work above the diagonal."""

TILE_SCORES = 2**18
"""Scores of a tile over all its heads, few enough to fit into a core's cache."""

GPU_TILE_SCORES = 2**26
"""Scores of a tile on a GPU."""


# a single operation for tools that count operations
@wrap_torch_function(lambda q, k, v: (q, k, v))
def causal_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return softmax(q k' / sqrt(d)) v, where position t attends to 0..t.

    All tensors are (B, H, L, d).
    """
    is_plain_float32 = (
        q.device.type == "cpu"
        and q.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
    )
    is_short = q.shape[2] <= MAX_TILED_LENGTH
    if is_plain_float32 and is_short:
        return _TiledAttention.apply(q, k, v, None, 1, None, None)
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


@wrap_torch_function(lambda q, k, v, bound, group, self_kv=None: (q, k, v))
def prefix_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bound: Tensor,
    group: int | None,
    self_kv: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return softmax attention in which query i attends to the keys 0..bound_i - 1.

    A query without any key gets zeros.

    Args:
        q: (B, H, L, d) queries.
        k: (B, H, T, d) keys.
        v: (B, H, T, d) values.
        bound: (B, L) number of keys that each query attends to.
        group: None if queries are candidates, which are not among the keys. Otherwise
            query i is key i, and its bound is at most i. Above 0, keys form groups of
            this size (1 or 2), and query i also attends to the keys from the start of
            its group up to itself.
        self_kv: A key and a value of each query, (B, H, L, d) both, that only this
            query attends to. Needs `group` None.

    Returns:
        (B, H, L, d)
    """
    self_k, self_v = self_kv or (None, None)
    return _TiledAttention.apply(q, k, v, bound, group, self_k, self_v)


class _TiledAttention(torch.autograd.Function):
    """Attention that computes scores tile by tile, in the forward and backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bound: Tensor | None,
        group: int | None,
        self_k: Any,
        self_v: Any,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, bound, self_k, self_v)
        ctx.group, shape = group, q.shape
        q, k, v, self_k, self_v = _merge_heads(
            q * shape[-1] ** -0.5, k, v, self_k, self_v
        )
        mixed = torch.empty_like(q)
        for heads, rows, keys, weights in _tiles(q, k, bound, group, self_k):
            weights = weights.to(v.dtype)
            mixed[heads, rows] = weights[..., : keys.stop] @ v[heads, keys]
            if self_v is not None:
                mixed[heads, rows] += weights[..., -1:] * self_v[heads, rows]
        return mixed.view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bound, self_k, self_v = ctx.saved_tensors
        query_shape = gradient.shape
        key_shape = k.shape
        scale = query_shape[-1] ** -0.5
        q, k, v, self_k, self_v, gradient = _merge_heads(
            q * scale, k, v, self_k, self_v, gradient
        )
        dq = torch.empty_like(q)
        dk = torch.zeros_like(k)
        dv = torch.zeros_like(v)
        d_self_k = None if self_k is None else torch.empty_like(q)
        d_self_v = None if self_k is None else torch.empty_like(q)
        for heads, rows, keys, weights in _tiles(q, k, bound, ctx.group, self_k):
            d_mixed = gradient[heads, rows]
            d_weights = d_mixed @ v[heads, keys].mT
            if self_v is not None:
                d_self_weight = (d_mixed * self_v[heads, rows]).sum(-1, keepdim=True)
                d_weights = torch.cat([d_weights, d_self_weight], -1)
            d_scores = torch._softmax_backward_data(
                d_weights.to(weights.dtype), weights, -1, weights.dtype
            ).to(k.dtype)
            weights = weights.to(v.dtype)
            d_key_scores = d_scores[..., : keys.stop]
            dv[heads, keys] += weights[..., : keys.stop].mT @ d_mixed
            dk[heads, keys] += d_key_scores.mT @ q[heads, rows]
            dq[heads, rows] = d_key_scores @ k[heads, keys]
            if d_self_k is not None and d_self_v is not None:
                d_self_score = d_scores[..., -1:]
                d_self_v[heads, rows] = weights[..., -1:] * d_mixed
                d_self_k[heads, rows] = d_self_score * q[heads, rows]
                dq[heads, rows] += d_self_score * self_k[heads, rows]
        return (
            dq.mul_(scale).view(query_shape),
            dk.view(key_shape),
            dv.view(key_shape),
            None,
            None,
            None if d_self_k is None else d_self_k.view(query_shape),
            None if d_self_v is None else d_self_v.view(query_shape),
        )


def _merge_heads(*tensors: Tensor | None) -> list[Any]:
    """Reshape each (B, H, L, d) tensor to a contiguous (B * H, L, d)."""
    return [
        None if tensor is None else tensor.contiguous().flatten(0, 1)
        for tensor in tensors
    ]


def _tiles(
    q: Tensor, k: Tensor, bound: Tensor | None, group: int | None, self_k: Tensor | None
) -> Iterator[tuple[slice, slice, slice, Tensor]]:
    """Yield the attention weights tile by tile."""
    above_diagonal = q.new_full((TILE_QUERIES, TILE_QUERIES), -torch.inf).triu(1)
    positions = max(k.shape[1], q.shape[1])
    index = torch.arange(positions, device=q.device, dtype=torch.int32)
    on_cpu = q.device.type == "cpu"
    tile_scores = TILE_SCORES if on_cpu else GPU_TILE_SCORES
    if bound is not None:
        heads_per_row = len(q) // len(bound)
        bound = bound.to(torch.int32).repeat_interleave(heads_per_row, 0)
        bound = bound[..., None]  # (B * H, L, 1)
    # Candidates may read far fewer keys than there are. Only a CPU can look at the
    # bounds and skip the unread keys; a GPU would make the host wait.
    skip_unread_keys = group is None and on_cpu
    for first in range(0, q.shape[1], TILE_QUERIES):
        end = min(first + TILE_QUERIES, q.shape[1])
        rows = slice(first, end)
        keys = slice(0, k.shape[1] if group is None else end)
        num_heads = max(1, tile_scores // ((end - first) * keys.stop))
        for head in range(0, len(q), num_heads):
            heads = slice(head, head + num_heads)
            tile_keys = keys
            hidden = None
            if bound is not None:
                tile_keys, hidden = _visible_keys(
                    bound[heads, rows], index, keys, skip_unread_keys
                )
            scores = q[heads, rows] @ k[heads, tile_keys].mT
            if bound is None:
                scores[:, :, first:] += above_diagonal[: end - first, : end - first]
            elif hidden is not None:
                if group:
                    hidden[:, :, first:] &= _outside_group(index[rows], group)
                scores.masked_fill_(hidden, -torch.inf)
            if self_k is not None:
                self_score = (q[heads, rows] * self_k[heads, rows]).sum(
                    -1, keepdim=True
                )
                scores = torch.cat([scores, self_score], -1)
            precision = torch.promote_types(scores.dtype, torch.float32)
            weights = scores.softmax(-1, precision)
            if hidden is not None and not group and self_k is None:
                # the softmax of a query without keys is NaN
                weights.masked_fill_(hidden, 0.0)
            yield heads, rows, tile_keys, weights


def _visible_keys(
    bound: Tensor, index: Tensor, keys: slice, skip_unread_keys: bool
) -> tuple[slice, Tensor | None]:
    """Return the keys of a tile, and a mask of the keys hidden by the bounds."""
    shortest = 0
    if skip_unread_keys:
        shortest, longest = (int(x) for x in bound.aminmax())
        keys = slice(0, longest)
    hidden = index[keys] >= bound if shortest < keys.stop else None
    return keys, hidden


def _outside_group(index: Tensor, group: int) -> Tensor:
    """Return a mask of the keys that are not in a query's group, or come after it."""
    query = index[:, None]
    return (index < query // group * group) | (index > query)
