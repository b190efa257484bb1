"""The linear recurrence h_t = decay * h_{t-1} + k_t * v_t in Triton, with its gradient.

The module `linear_recurrence` is the reference. A program takes a block of channels of
one row through all positions, one tile after the other: an associative scan within the
tile, and a state passed from tile to tile. The backward pass does the same from the
last position to the first. Sums are float32 for every dtype of k and v.

Shapes: `B` rows, `L` positions, `D` channels, `T` positions and `C` channels of a tile.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

POSITIONS, CHANNELS = 32, 32
"""T and C. A row of a tile has 128 bytes of float32, the width of one GPU read."""


@triton.jit
def combine(first_decay, first, second_decay, second):  # type: ignore[no-untyped-def]
    """Combine the decays and final states of two consecutive stretches of positions."""
    return first_decay * second_decay, second_decay * first + second


@triton.jit
def forward_kernel(  # type: ignore[no-untyped-def]
    k,
    v,
    decay,
    h,
    length,
    width,
    k_row,
    k_step,
    v_row,
    v_step,
    T: tl.constexpr,
    C: tl.constexpr,
):
    """Write the states h (B, L, D) of a block of channels of one row.

    Args:
        k: Pointer to keys (B, L, D); channels are contiguous.
        v: Pointer to values (B, L, D); channels are contiguous.
        decay: Pointer to decays (D,).
        h: Pointer to the contiguous output.
        length: Number of positions L.
        width: Number of channels D.
        k_row: Stride of rows of `k`.
        k_step: Stride of positions of `k`.
        v_row: Stride of rows of `v`.
        v_step: Stride of positions of `v`.
        T: Positions of a tile.
        C: Channels of a tile.
    """
    row, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * C + tl.arange(0, C)
    offset, inside = tl.arange(0, T), channel < width
    gamma = tl.load(decay + channel, mask=inside, other=0.0)
    state = tl.zeros((C,), dtype=tl.float32)
    for begin in range(0, length, T):
        t = begin + offset
        mask = (t < length)[:, None] & inside[None, :]
        key = tl.load(
            k + row * k_row + t[:, None] * k_step + channel[None, :],
            mask=mask,
            other=0.0,
        )
        value = tl.load(
            v + row * v_row + t[:, None] * v_step + channel[None, :],
            mask=mask,
            other=0.0,
        )
        x = key.to(tl.float32) * value.to(tl.float32)  # (T, C)
        power, local = tl.associative_scan(
            (tl.broadcast_to(gamma[None, :], (T, C)), x), 0, combine
        )
        tile = local + power * state[None, :]
        tl.store(
            h + row * length * width + t[:, None] * width + channel[None, :],
            tile,
            mask=mask,
        )
        state = tl.sum(tl.where((offset == T - 1)[:, None], tile, 0.0), 0)


@triton.jit
def backward_kernel(  # type: ignore[no-untyped-def]
    grad,
    k,
    v,
    decay,
    h,
    dk,
    dv,
    decay_gradients,
    length,
    width,
    k_row,
    k_step,
    v_row,
    v_step,
    T: tl.constexpr,
    C: tl.constexpr,
):
    """Write the gradients dk and dv (B, L, D) and decay_gradients (B, D).

    Given grad = dL/dh and h, both contiguous (B, L, D), the gradients are

        g_t = grad_t + decay * g_{t+1}
        dk = g v,  dv = g k,  decay_gradients = sum_t g_t h_{t-1}

    Other arguments are as in `forward_kernel`.
    """
    row, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * C + tl.arange(0, C)
    offset, inside = tl.arange(0, T), channel < width
    gamma = tl.load(decay + channel, mask=inside, other=0.0)
    state, total = tl.zeros((C,), dtype=tl.float32), tl.zeros((C,), dtype=tl.float32)
    for begin in range(0, length, T):
        t = length - 1 - begin - offset
        mask = (t >= 0)[:, None] & inside[None, :]
        flat = row * length * width + t[:, None] * width + channel[None, :]
        x = tl.load(grad + flat, mask=mask, other=0.0).to(tl.float32)
        power, local = tl.associative_scan(
            (tl.broadcast_to(gamma[None, :], (T, C)), x), 0, combine
        )
        g = local + power * state[None, :]
        key = tl.load(
            k + row * k_row + t[:, None] * k_step + channel[None, :],
            mask=mask,
            other=0.0,
        )
        value = tl.load(
            v + row * v_row + t[:, None] * v_step + channel[None, :],
            mask=mask,
            other=0.0,
        )
        tl.store(dk + flat, g * value.to(tl.float32), mask=mask)
        tl.store(dv + flat, g * key.to(tl.float32), mask=mask)
        previous = tl.load(h + flat - width, mask=mask & (t > 0)[:, None], other=0.0)
        total += tl.sum(g * previous.to(tl.float32), 0)
        state = tl.sum(tl.where((offset == T - 1)[:, None], g, 0.0), 0)
    tl.store(decay_gradients + row * width + channel, total, mask=inside)


class FusedRecurrence(torch.autograd.Function):
    """Autograd function of the fused kernels.

    `FusedRecurrence.apply(k, v, decay)` takes k and v (B, L, D) and float32 decays
    (D,), and returns h (B, L, D) in the dtype of k.
    """

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
        """Return h (B, L, D) in the dtype of `k`, for k and v (B, L, D)."""
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
        batch, length, width = k.shape
        h = torch.empty(k.shape, dtype=torch.float32, device=k.device)
        if h.numel():
            forward_kernel[(batch, triton.cdiv(width, CHANNELS))](
                k,
                v,
                decay,
                h,
                length,
                width,
                *k.stride()[:2],
                *v.stride()[:2],
                T=POSITIONS,
                C=CHANNELS,
            )
        ctx.save_for_backward(k, v, decay, h)
        return h.to(k.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of k, v and the decays."""
        k, v, decay, h = ctx.saved_tensors
        batch, length, width = k.shape
        dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
        decay_gradients = torch.zeros(
            batch, width, dtype=torch.float32, device=k.device
        )
        if h.numel():
            backward_kernel[(batch, triton.cdiv(width, CHANNELS))](
                gradients[0].contiguous(),
                k,
                v,
                decay,
                h,
                dk,
                dv,
                decay_gradients,
                length,
                width,
                *k.stride()[:2],
                *v.stride()[:2],
                T=POSITIONS,
                C=CHANNELS,
            )
        return dk, dv, decay_gradients.sum(0)
