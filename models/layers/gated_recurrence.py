"""Linear recurrences with a matrix as state and one decay per head: in chunks, and position by position.

    out, memory = gated_recurrence(q, k, v, log_decay, beta)          # all positions at once, for training
    out = gated_step(q_t, k_t, v_t, log_decay_t, beta_t, memory)      # the next position, for decoding

With a_t = exp(log_decay_t), k and q of width K and v of width V, the memory S (K, V) of a head becomes

    S_t = a_t S_{t-1} + k_t u_t',    out_t = S_t' q_t,
    u_t = v_t                                      Mamba2 (Dao and Gu, 2024): state space duality
    u_t = beta_t (v_t - a_t S_{t-1}' k_t)          Gated DeltaNet (Yang et al., 2025): the delta rule

A position with log_decay 0 and v 0 (or beta 0) leaves the memory as it was: so padding is passed over. Within a chunk
all u are found at once, those of the delta rule from one triangular system, and the memory is carried from chunk to
chunk. Decays appear as exp of sums that are never positive, so nothing overflows.

Shapes: `B` rows, `L` positions, `C` positions of a chunk, `H` heads, `G` heads of q and k: H, or 1 that all share.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


def gated_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None = None,
    memory: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """`out` (B, H, L, V) in the dtype of `v`, and the memory (B, H, K, V) after the last of at least one positions.

    `q` and `k` are (B, G, L, K), `v` (B, H, L, V), `log_decay` (B, H, L), none above 0, `beta` (B, H, L) or None for
    the recurrence without the delta rule, `memory` that before the first position, or None for 0. Sums are of fp32 at
    least, whatever the autocast.
    """
    dtype, outs = v.dtype, []
    precise = torch.promote_types(dtype, torch.float32)
    with torch.autocast(v.device.type, enabled=False):
        q, k, v, log_decay = (x.to(precise) for x in (q, k, v, log_decay))
        for begin in range(0, v.shape[2], chunk):
            part = slice(begin, begin + chunk)
            strength = (
                None if beta is None else beta[..., part].to(precise).unsqueeze(-1)
            )  # (B, H, C, 1)
            given = q[:, :, part], k[:, :, part], v[:, :, part], log_decay[..., part]
            out, memory = _chunk(*given, strength, memory)
            outs.append(out)
    assert memory is not None
    return torch.cat(outs, 2).to(dtype), memory


def _chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    memory: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As `gated_recurrence` for the C positions of one chunk; `beta` is (B, H, C, 1)."""
    # (B, H, C): from before the chunk to each position. In float64, as differences of large sums keep few digits.
    total = log_decay.double().cumsum(-1)
    later = torch.ones(
        total.shape[-1], total.shape[-1], dtype=torch.bool, device=v.device
    ).triu(1)
    between = (
        (total.unsqueeze(-1) - total.unsqueeze(-2))
        .to(v.dtype)
        .masked_fill(later, -torch.inf)
        .exp()
    )
    since, until = (
        x.to(v.dtype).exp().unsqueeze(-1) for x in (total, total[..., -1:] - total)
    )  # (B, H, C, 1)
    u = v
    if beta is not None:
        recalled = v if memory is None else v - since * (k @ memory)
        own = (beta * between * (k @ k.mT)).tril(
            -1
        )  # what a position's u takes from those before it in the chunk
        u = torch.linalg.solve_triangular(
            own, beta * recalled, upper=False, unitriangular=True
        )
    out = (between * (q @ k.mT)) @ u
    kept = k.mT @ (until * u)
    if memory is not None:
        out = out + since * (q @ memory)
        kept = kept + since[..., -1:, :] * memory
    return out, kept


def gated_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    memory: Tensor,
    keep: bool = True,
) -> Tensor:
    """`out` (B, H, V) of one more position: `q` and `k` are (B, G, K), `v` (B, H, V), `log_decay` and `beta` (B, H).

    `memory` (B, H, K, V) is read once and then overwritten by the one after the position, which `keep` False spares.
    Without gradients.
    """
    dtype = v.dtype
    with torch.autocast(v.device.type, enabled=False):
        q, k, v = (x.to(memory.dtype) for x in (q, k, v))
        decay = log_decay.to(memory.dtype).exp().unsqueeze(-1)  # (B, H, 1)
        asked = (
            q.unsqueeze(2) if beta is None else torch.stack([q, k], 2)
        )  # (B, G, 1 or 2, K)
        read = decay.unsqueeze(-1) * (asked @ memory)  # (B, H, 1 or 2, V)
        u = (
            v
            if beta is None
            else beta.to(memory.dtype).unsqueeze(-1) * (v - read[:, :, 1])
        )
        out = read[:, :, 0] + (q * k).sum(-1, keepdim=True) * u
        if keep:
            memory.mul_(decay.unsqueeze(-1)).addcmul_(k.unsqueeze(-1), u.unsqueeze(-2))
    return out.to(dtype)


class MixerState(NamedTuple):
    """What a mixer knows of the positions so far."""

    window: Tensor
    """(B, size - 1, channels): the last inputs of the short convolution."""
    memory: Tensor
    """(B, H, K, V), of fp32 at least."""

    def rows(self, index: Tensor) -> MixerState:
        """A copy of the rows `index` (N,)."""
        return MixerState(
            self.window.index_select(0, index), self.memory.index_select(0, index)
        )


class ShortConvolution(nn.Module):
    """A causal convolution of `size` positions per channel, followed by SiLU."""

    def __init__(self, channels: int, size: int, bias: bool) -> None:
        super().__init__()
        bound = size**-0.5  # PyTorch's for a convolution
        self.weight = nn.Parameter(torch.empty(size, channels).uniform_(-bound, bound))
        self.bias = (
            nn.Parameter(torch.empty(channels).uniform_(-bound, bound))
            if bias
            else None
        )

    def forward(self, x: Tensor, window: Tensor | None) -> tuple[Tensor, Tensor]:
        """(B, L, channels) of `x` (B, L, channels) and the window after it; `window` is that before it, None for 0."""
        size, length = len(self.weight), x.shape[1]
        if window is None:
            window = x.new_zeros((len(x), size - 1, x.shape[2]))
        x = torch.cat([window.to(x.dtype), x], 1)
        mixed = x[:, :length] * self.weight[0]
        for i in range(1, size):
            mixed = mixed + x[:, i : i + length] * self.weight[i]
        mixed = mixed if self.bias is None else mixed + self.bias
        return functional.silu(mixed), x[:, length:]


class Inputs(NamedTuple):
    """Of `gated_recurrence` for L positions, and what goes past it."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor | None
    skip: Tensor | None
    """(B, H, L, V), added to what the recurrence gives, or None."""
    window: Tensor
    """(B, size - 1, channels) after the positions."""


class RecurrentMixer(nn.Module):
    """Mixes positions by a gated recurrence after a short convolution. A subclass has `inputs` and `outputs`."""

    chunk: int
    """Positions of a chunk."""
    conv: ShortConvolution
    """The short convolution."""
    memory_size: int
    """Numbers of a row's memory, H x K x V."""

    @property
    def state_size(self) -> int:
        """Numbers of a row's state."""
        size, channels = self.conv.weight.shape
        return (size - 1) * channels + self.memory_size

    def inputs(self, x: Tensor, real: Tensor | None, window: Tensor | None) -> Inputs:
        """What the recurrence reads of `x` (B, L, D), nothing where `real` (B, L, 1) is 0; `window` is that before."""
        raise NotImplementedError

    def outputs(self, mixed: Tensor, x: Tensor) -> Tensor:
        """(B, L, D) of what the recurrence gave, `mixed` (B, H, L, V), and of `x` (B, L, D)."""
        raise NotImplementedError

    def undecayed(self) -> list[nn.Parameter]:
        """Parameters without weight decay: A_log, dt_bias and D, as in the code of Mamba2 and Gated DeltaNet."""
        return [
            p
            for name, p in self.named_parameters(recurse=False)
            if name in ("log_rate", "step_bias", "skip")
        ]

    def forward(
        self, x: Tensor, real: Tensor | None = None, last: int | None = None
    ) -> tuple[Tensor, MixerState]:
        """(B, L, D) of `x` (B, L, D), or of its `last` positions alone, and the state after all.

        `real` (B, L, 1) is 0 at padding, which must come before the other positions of its row, and 1 elsewhere."""
        q, k, v, log_decay, beta, skip, window = self.inputs(x, real, None)
        mixed, memory = gated_recurrence(q, k, v, log_decay, beta, chunk=self.chunk)
        mixed = mixed if skip is None else mixed + skip
        first = 0 if last is None else x.shape[1] - last
        return self.outputs(mixed[:, :, first:], x[:, first:]), MixerState(
            window, memory
        )

    def step(
        self, x: Tensor, state: MixerState, keep: bool = True
    ) -> tuple[Tensor, MixerState]:
        """(B, D) of one more position `x` (B, D), and the state after it, whose memory is written where that of `state`
        was; with `keep` False it is not, and the state is of no use any more. Without gradients."""
        x = x.unsqueeze(1)
        q, k, v, log_decay, beta, skip, window = self.inputs(x, None, state.window)
        newest = None if beta is None else beta[..., 0]
        mixed = gated_step(
            q[:, :, 0],
            k[:, :, 0],
            v[:, :, 0],
            log_decay[..., 0],
            newest,
            state.memory,
            keep,
        )
        mixed = mixed.unsqueeze(2) if skip is None else mixed.unsqueeze(2) + skip
        return self.outputs(mixed, x)[:, 0], MixerState(window, state.memory)


def masked(x: Tensor, real: Tensor | None) -> Tensor:
    """`x` (B, L, N), 0 where `real` (B, L, 1) is."""
    return x if real is None else x * real


def initial_step_bias(heads: int) -> Tensor:
    """(H,): softplus of it is a step size, log-uniform from 0.001 to 0.1 (Mamba's, taken by Gated DeltaNet)."""
    steps = torch.empty(heads).uniform_(math.log(1e-3), math.log(0.1)).exp()
    return steps + torch.log(-torch.expm1(-steps))
