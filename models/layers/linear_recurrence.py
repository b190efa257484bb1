"""The linear recurrence h_t = decay * h_{t-1} + x_t, one decay per channel, in parallel.

    h = linear_recurrence(x, decay)            # (B, L, D): all positions at once, for training
    h = key_value_recurrence(k, v, decay)      # the same of x = k * v, on GPUs in one pass (linear_recurrence_triton)

The parallel form cuts the positions into about sqrt(L) chunks. All chunks run their own recurrence side by
side, the last states are carried from chunk to chunk, and what a chunk inherits is added to its positions.
That is 2 sqrt(L) vector operations and a cost linear in L. The decay appears in powers of 0 to sqrt(L) only,
never divided by, so nothing overflows; powers that underflow are contributions that are zero in fp32.

Shapes: `B` rows, `L` positions, `D` channels, `N` chunks of `K` positions.
"""

from __future__ import annotations

import importlib.util
import math
import os
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn


def linear_recurrence(x: Tensor, decay: Tensor) -> Tensor:
    """Return h_t = decay * h_{t-1} + x_t with h_0 = 0 (Eq. 8 of QGS), (B, L, D) in the dtype of `x`.

    `decay` is (D,), each in (0, 1). Sums are fp32 whatever the dtype of `x`. Differentiable in both.
    """
    return Recurrence.apply(x, decay.float())


def key_value_recurrence(k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    """(B, L, D) in the dtype of `k`: `linear_recurrence` of k * v, both (B, L, D) (Eq. 7 and 8 of QGS). On a GPU where
    Triton can be imported it is one pass over memory, unless TRIELINE_KERNELS=0."""
    if k.is_cuda and fused_available():
        from models.layers.linear_recurrence_triton import FusedRecurrence

        return FusedRecurrence.apply(k, v, decay.float())
    return linear_recurrence(k * v, decay)


@cache
def fused_available() -> bool:
    """Whether Triton is installed, as it is with PyTorch for GPUs, and wanted."""
    return (
        os.environ.get("TRIELINE_KERNELS") != "0"
        and importlib.util.find_spec("triton") is not None
    )


class Recurrence(torch.autograd.Function):
    """The parallel form and its gradient, which is the same recurrence run backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, decay: Tensor) -> Tensor:
        h = scan(x, decay)
        ctx.save_for_backward(h, decay)
        return h.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        h, decay = ctx.saved_tensors
        # dL/dx_t = g_t = dL/dh_t + decay * g_{t+1};  dL/d decay = sum_t g_t * h_{t-1}
        g = scan(gradients[0], decay, reverse=True)
        by_decay = (
            (g[:, 1:] * h[:, :-1]).sum((0, 1)) if ctx.needs_input_grad[1] else None
        )
        return g.to(gradients[0].dtype), by_decay


def scan(x: Tensor, decay: Tensor, reverse: bool = False) -> Tensor:
    """(B, L, D) fp32: the recurrence over `x`, from the last position to the first where `reverse`."""
    batch, length, width = x.shape
    size = max(1, math.isqrt(max(0, length - 1)) + 1)
    count = -(-length // size)
    padded = x.new_zeros(batch, count * size, width, dtype=torch.float32)
    padded[:, :length] = x
    h = padded.view(batch, count, size, width)
    places, chunks, step, edge = range(1, size), range(1, count), -1, size - 1
    if reverse:
        places, chunks, step, edge = (
            range(size - 2, -1, -1),
            range(count - 2, -1, -1),
            1,
            0,
        )
    for i in places:  # every chunk from a state of zero
        h[:, :, i].addcmul_(h[:, :, i + step], decay)
    whole = decay**size
    for n in chunks:  # the state after each chunk
        h[:, n, edge].addcmul_(h[:, n + step, edge], whole)
    if count > 1 and size > 1:
        power = (
            decay
            ** torch.arange(1, size, device=x.device, dtype=torch.float32)[:, None]
        )  # (K - 1, D)
        if reverse:
            h[:, :-1, 1:].addcmul_(h[:, 1:, :1], power.flip(0))
        else:
            h[:, 1:, :-1].addcmul_(h[:, :-1, -1:], power)
    return padded[:, :length]


class Decay(nn.Module):
    """(D,) learnable decays in (0, 1), initialised with memories of 2 to `longest` positions, log-spaced."""

    def __init__(self, width: int, longest: float = 200.0) -> None:
        super().__init__()
        memory = torch.logspace(
            math.log10(2), math.log10(longest), width, dtype=torch.float64
        )
        self.logit = nn.Parameter(
            torch.log(memory - 1).float()
        )  # sigmoid(logit) = 1 - 1 / memory

    def forward(self) -> Tensor:
        return torch.sigmoid(self.logit.float())
