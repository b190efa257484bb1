"""Linear recurrences with a matrix as state and one decay per head.

    out, memory = gated_recurrence(q, k, v, log_decay, beta)      # all positions
    out = gated_step(q_t, k_t, v_t, log_decay_t, beta_t, memory)  # the next position

Training computes all positions at once in chunks; decoding continues position by
position. With a_t = exp(log_decay_t), q and k of width K and v of width V, the memory S
(K, V) of a head becomes

    S_t = a_t S_{t-1} + k_t u_t',    out_t = S_t' q_t,
    u_t = v_t                            Mamba2 (Dao and Gu, 2024): duality of SSMs
    u_t = beta_t (v_t - a_t S_{t-1}' k_t)    Gated DeltaNet (Yang et al., 2025)

A position with log_decay 0 and v 0 (or beta 0) does not change the memory; padding uses
this. Within a chunk all u are computed at once, for the delta rule by solving one
triangular system, and the memory is passed from chunk to chunk. Decays appear as exp of
sums that are never positive, so nothing overflows.

Shapes: `B` rows, `L` positions, `C` positions of a chunk, `H` heads, `G` heads of q and
k: H, or 1 if all heads share them.
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
    """Run the recurrence over L >= 1 positions, in float32 or more.

    Args:
        q: (B, G, L, K) queries.
        k: (B, G, L, K) keys.
        v: (B, H, L, V) values.
        log_decay: (B, H, L) logarithms of the decays, none above 0.
        beta: (B, H, L) strengths of the delta rule; None for the recurrence without it.
        memory: (B, H, K, V) before the first position; None for zeros.
        chunk: Positions that are computed at once.

    Returns:
        The outputs (B, H, L, V) in the dtype of `v`, and the memory (B, H, K, V) after
        the last position.
    """
    dtype = v.dtype
    precise = torch.promote_types(dtype, torch.float32)
    outputs = []
    with torch.autocast(v.device.type, enabled=False):
        q, k, v, log_decay = (x.to(precise) for x in (q, k, v, log_decay))
        if beta is not None:
            beta = beta.to(precise).unsqueeze(-1)  # (B, H, L, 1)
        for begin in range(0, v.shape[2], chunk):
            part = slice(begin, begin + chunk)
            out, memory = _run_chunk(
                q[:, :, part],
                k[:, :, part],
                v[:, :, part],
                log_decay[..., part],
                None if beta is None else beta[:, :, part],
                memory,
            )
            outputs.append(out)
    assert memory is not None
    return torch.cat(outputs, 2).to(dtype), memory


def _run_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    memory: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run `gated_recurrence` over the C positions of a chunk."""
    # (B, H, C): log decay from before the chunk up to each position. In float64, as
    # differences of large sums would lose digits.
    total = log_decay.double().cumsum(-1)
    size = total.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=v.device).triu(1)
    log_between = (total.unsqueeze(-1) - total.unsqueeze(-2)).to(v.dtype)
    between = log_between.masked_fill(later, -torch.inf).exp()  # (B, H, C, C)
    from_start = total.to(v.dtype).exp().unsqueeze(-1)  # (B, H, C, 1)
    to_end = (total[..., -1:] - total).to(v.dtype).exp().unsqueeze(-1)  # (B, H, C, 1)
    u = v
    if beta is not None:
        error = v if memory is None else v - from_start * (k @ memory)
        # contribution of earlier positions of the chunk to u of each position
        system = (beta * between * (k @ k.mT)).tril(-1)
        u = torch.linalg.solve_triangular(
            system, beta * error, upper=False, unitriangular=True
        )
    out = (between * (q @ k.mT)) @ u
    new_memory = k.mT @ (to_end * u)
    if memory is not None:
        out = out + from_start * (q @ memory)
        new_memory = new_memory + from_start[..., -1:, :] * memory
    return out, new_memory


def gated_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    memory: Tensor,
    keep: bool = True,
) -> Tensor:
    """Run the recurrence over one more position, without gradients.

    Args:
        q: (B, G, K) query.
        k: (B, G, K) key.
        v: (B, H, V) value.
        log_decay: (B, H) logarithm of the decay.
        beta: (B, H) strength of the delta rule, or None.
        memory: (B, H, K, V), overwritten by the memory after the position.
        keep: Whether to update `memory`; may be false for the last position.

    Returns:
        The output (B, H, V).
    """
    dtype = v.dtype
    with torch.autocast(v.device.type, enabled=False):
        q, k, v = (x.to(memory.dtype) for x in (q, k, v))
        decay = log_decay.to(memory.dtype).exp().unsqueeze(-1)  # (B, H, 1)
        # one product reads the memory by the query, and by the key of the delta rule
        readers = [q] if beta is None else [q, k]
        values = decay.unsqueeze(-1) * (torch.stack(readers, 2) @ memory)
        u = v
        if beta is not None:
            u = beta.to(memory.dtype).unsqueeze(-1) * (v - values[:, :, 1])
        out = values[:, :, 0] + (q * k).sum(-1, keepdim=True) * u
        if keep:
            memory.mul_(decay.unsqueeze(-1)).addcmul_(k.unsqueeze(-1), u.unsqueeze(-2))
    return out.to(dtype)


class MixerState(NamedTuple):
    """The state of a mixer after some positions."""

    window: Tensor
    """(B, size - 1, channels) latest inputs of the short convolution."""
    memory: Tensor
    """(B, H, K, V) memory of the recurrence, in float32 or more."""

    def rows(self, index: Tensor) -> MixerState:
        """Return a copy of the rows `index` (N,)."""
        return MixerState(
            self.window.index_select(0, index), self.memory.index_select(0, index)
        )


class ShortConvolution(nn.Module):
    """A causal depthwise convolution over 4 positions, followed by SiLU."""

    def __init__(self, channels: int, bias: bool) -> None:
        super().__init__()
        size = 4
        bound = size**-0.5  # PyTorch's bound for a convolution
        self.weight = nn.Parameter(torch.empty(size, channels).uniform_(-bound, bound))
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.empty(channels).uniform_(-bound, bound))

    def forward(self, x: Tensor, window: Tensor | None) -> tuple[Tensor, Tensor]:
        """Convolve `x` (B, L, channels) and apply SiLU.

        Args:
            x: (B, L, channels) inputs.
            window: (B, size - 1, channels) inputs before `x`; None for zeros.

        Returns:
            The outputs (B, L, channels), and the window after `x`.
        """
        size = len(self.weight)
        length = x.shape[1]
        if window is None:
            window = x.new_zeros((len(x), size - 1, x.shape[2]))
        x = torch.cat([window.to(x.dtype), x], 1)
        mixed = x[:, :length] * self.weight[0]
        for i in range(1, size):
            mixed = mixed + x[:, i : i + length] * self.weight[i]
        if self.bias is not None:
            mixed = mixed + self.bias
        return functional.silu(mixed), x[:, length:]


class Inputs(NamedTuple):
    """Inputs of `gated_recurrence` for L positions, plus skip term and window."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor | None
    skip: Tensor | None
    """(B, H, L, V) added to the output of the recurrence, or None."""
    window: Tensor
    """(B, size - 1, channels) latest inputs of the convolution, for the next step."""


class RecurrentMixer(nn.Module):
    """A base class of mixers: a gated recurrence after a short convolution.

    Subclasses implement `inputs` and `outputs`.
    """

    chunk: int
    """Positions per chunk of the recurrence."""
    conv: ShortConvolution
    memory_size: int
    """Numbers in the memory of a row, H x K x V."""

    @property
    def state_size(self) -> int:
        """Number of values in the state of a row."""
        size, channels = self.conv.weight.shape
        return (size - 1) * channels + self.memory_size

    def inputs(self, x: Tensor, real: Tensor | None, window: Tensor | None) -> Inputs:
        """Compute the inputs of the recurrence from `x`.

        Args:
            x: (B, L, D) states.
            real: (B, L, 1), 0 at padding, which then leaves the memory unchanged; or
                None.
            window: (B, size - 1, channels) inputs of the convolution before `x`; None
                for zeros.
        """
        raise NotImplementedError

    def outputs(self, mixed: Tensor, x: Tensor) -> Tensor:
        """Return the outputs (B, L, D) of the mixer.

        Args:
            mixed: (B, H, L, V) outputs of the recurrence.
            x: (B, L, D) inputs of the mixer, for its gate.
        """
        raise NotImplementedError

    def no_decay_parameters(self) -> list[nn.Parameter]:
        """Return the parameters without weight decay: `log_rate`, `step_bias`, `skip`.

        The authors' code of Mamba2 and Gated DeltaNet exempts them too, as A_log,
        dt_bias and D.
        """
        return [
            parameter
            for name, parameter in self.named_parameters(recurse=False)
            if name in ("log_rate", "step_bias", "skip")
        ]

    def forward(
        self, x: Tensor, real: Tensor | None = None, last: int | None = None
    ) -> tuple[Tensor, MixerState]:
        """Mix the positions of `x`.

        Args:
            x: (B, L, D) states.
            real: (B, L, 1), 0 at padding and 1 elsewhere; None without padding. Padding
                comes before the other positions of its row.
            last: Return outputs of only this many positions at the end; None for all.

        Returns:
            The outputs (B, L, D) or (B, last, D), and the state after all positions.
        """
        q, k, v, log_decay, beta, skip, window = self.inputs(x, real, None)
        mixed, memory = gated_recurrence(q, k, v, log_decay, beta, chunk=self.chunk)
        if skip is not None:
            mixed = mixed + skip
        first = 0 if last is None else x.shape[1] - last
        out = self.outputs(mixed[:, :, first:], x[:, first:])
        return out, MixerState(window, memory)

    def step(
        self, x: Tensor, state: MixerState, keep: bool = True
    ) -> tuple[Tensor, MixerState]:
        """Mix one more position, without gradients.

        Args:
            x: (B, D) input of the position.
            state: State before the position. Its memory is overwritten.
            keep: Whether to update the memory. If false, the returned state must not be
                used.

        Returns:
            The output (B, D), and the state after the position.
        """
        x = x.unsqueeze(1)
        q, k, v, log_decay, beta, skip, window = self.inputs(x, None, state.window)
        mixed = gated_step(
            q[:, :, 0],
            k[:, :, 0],
            v[:, :, 0],
            log_decay[..., 0],
            None if beta is None else beta[..., 0],
            state.memory,
            keep,
        ).unsqueeze(2)
        if skip is not None:
            mixed = mixed + skip
        return self.outputs(mixed, x)[:, 0], MixerState(window, state.memory)


def zero_padding(x: Tensor, real: Tensor | None) -> Tensor:
    """Set `x` (B, L, N) to 0 where `real` (B, L, 1) is 0."""
    return x if real is None else x * real


def initial_step_bias(heads: int) -> Tensor:
    """Return (H,) biases whose softplus is log-uniform in 0.001..0.1, as in Mamba."""
    steps = torch.empty(heads).uniform_(math.log(1e-3), math.log(0.1)).exp()
    return steps + torch.log(-torch.expm1(-steps))
