"""The linear recurrence h_t = decay * h_{t-1} + x_t with one decay per channel.

    h = linear_recurrence(x, decay)  # (B, L, D), all positions at once

The parallel form splits the positions into about sqrt(L) chunks. All chunks run their
recurrence side by side, the last states are passed from chunk to chunk, and each
position adds what its chunk inherits. This takes 2 sqrt(L) vector operations at a cost
linear in L. Only the powers 0..sqrt(L) of the decay appear, never as divisors, so
nothing overflows; powers that underflow are contributions that are zero in float32.

Shapes: `B` rows, `L` positions, `D` channels, `N` chunks of `K` positions.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


def linear_recurrence(x: Tensor, decay: Tensor) -> Tensor:
    """Return h_t = decay * h_{t-1} + x_t with h_0 = 0 (Eq. 8 of QGS).

    Sums are float32 for every dtype of `x`. Differentiable in both arguments.

    Args:
        x: (B, L, D) inputs.
        decay: (D,) decays in (0, 1).

    Returns:
        (B, L, D) in the dtype of `x`.
    """
    return Recurrence.apply(x, decay.float())


class Recurrence(torch.autograd.Function):
    """The parallel recurrence. Its gradient is the same recurrence run backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, decay: Tensor) -> Tensor:
        """Return h (B, L, D) in the dtype of `x` (B, L, D), for decays (D,)."""
        h = scan(x, decay)
        ctx.save_for_backward(h, decay)
        return h.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of `x` (B, L, D) and of the decays (D,)."""
        h, decay = ctx.saved_tensors
        # dL/dx_t = g_t = dL/dh_t + decay * g_{t+1};  dL/d decay = sum_t g_t * h_{t-1}
        g = scan(gradients[0], decay, reverse=True)
        decay_gradient = None
        if ctx.needs_input_grad[1]:
            decay_gradient = (g[:, 1:] * h[:, :-1]).sum((0, 1))
        return g.to(gradients[0].dtype), decay_gradient


def scan(x: Tensor, decay: Tensor, reverse: bool = False) -> Tensor:
    """Run the recurrence over `x` in chunks.

    Args:
        x: (B, L, D) inputs.
        decay: (D,) decays.
        reverse: Whether to run from the last position to the first.

    Returns:
        (B, L, D) float32.
    """
    batch, length, width = x.shape
    size = max(1, math.isqrt(max(0, length - 1)) + 1)  # K
    count = math.ceil(length / size)  # N
    padded = x.new_zeros(batch, count * size, width, dtype=torch.float32)
    padded[:, :length] = x
    h = padded.view(batch, count, size, width)  # (B, N, K, D)
    if reverse:
        positions, chunks = range(size - 2, -1, -1), range(count - 2, -1, -1)
        previous, last = 1, 0  # offset to the previous state, last position of a chunk
    else:
        positions, chunks = range(1, size), range(1, count)
        previous, last = -1, size - 1
    # run each chunk from a zero state
    for i in positions:
        h[:, :, i].addcmul_(h[:, :, i + previous], decay)
    # pass the states at the ends of chunks on
    chunk_decay = decay**size
    for n in chunks:
        h[:, n, last].addcmul_(h[:, n + previous, last], chunk_decay)
    # add the inherited state to the other positions of each chunk
    if count > 1 and size > 1:
        exponent = torch.arange(1, size, device=x.device, dtype=torch.float32)
        power = decay ** exponent[:, None]  # (K - 1, D)
        if reverse:
            h[:, :-1, 1:].addcmul_(h[:, 1:, :1], power.flip(0))
        else:
            h[:, 1:, :-1].addcmul_(h[:, :-1, -1:], power)
    return padded[:, :length]


class Decay(nn.Module):
    """Learnable decays (D,) in (0, 1).

    Initial memories 1 / (1 - decay) are log-spaced from 2 to `longest` positions.
    """

    def __init__(self, width: int, longest: float = 200.0) -> None:
        super().__init__()
        memory = torch.logspace(
            math.log10(2), math.log10(longest), width, dtype=torch.float64
        )
        # sigmoid(logit) = 1 - 1 / memory
        self.logit = nn.Parameter(torch.log(memory - 1).float())

    def forward(self) -> Tensor:
        """Return the decays (D,) in float32."""
        return torch.sigmoid(self.logit.float())
