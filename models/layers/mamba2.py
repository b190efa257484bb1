"""The mixer of Mamba2 (Dao and Gu, 2024).

A_log, dt_bias and D are initialised as in the authors' code, linear layers as in
PyTorch.

Shapes: `B` rows, `L` positions, `D` width, `H` heads, `P` width of a head, `N` width of
the state.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.layers.gated_recurrence import (
    Inputs,
    RecurrentMixer,
    ShortConvolution,
    initial_step_bias,
    zero_padding,
)


class Mamba2(RecurrentMixer):
    """State space duality after a short convolution over x, B and C.

    All heads share B and C, which are the keys and queries (one group).

    Args:
        dim: Width D of the states.
        head_width: Width P of a head, a divisor of `expand * dim`.
        state: Width N of the state.
        expand: Inner width, as a multiple of D.
        chunk: Positions per chunk of the recurrence.
    """

    def __init__(
        self, dim: int, head_width: int, state: int, expand: int, chunk: int
    ) -> None:
        super().__init__()
        self.inner = expand * dim
        self.state = state
        self.heads = self.inner // head_width
        self.chunk = chunk
        self.memory_size = self.inner * state
        # x, B, C and the step size
        self.enter = nn.Linear(dim, self.inner + 2 * state + self.heads, bias=False)
        self.conv = ShortConvolution(self.inner + 2 * state, bias=True)
        initial_rate = torch.empty(self.heads).uniform_(1, 16)
        self.log_rate = nn.Parameter(initial_rate.log())  # A_log
        self.step_bias = nn.Parameter(initial_step_bias(self.heads))
        self.skip = nn.Parameter(torch.ones(self.heads))  # D
        self.gate = nn.Linear(dim, self.inner, bias=False)  # z
        self.norm = nn.RMSNorm(self.inner, eps=1e-5)
        self.out = nn.Linear(self.inner, dim, bias=False)

    def inputs(self, x: Tensor, real: Tensor | None, window: Tensor | None) -> Inputs:
        """Compute the inputs of the recurrence; the skip term is D * x."""
        channels = self.inner + 2 * self.state
        convolved, step = self.enter(x).split([channels, self.heads], -1)
        convolved, window = self.conv(zero_padding(convolved, real), window)
        values, keys, queries = convolved.split(
            [self.inner, self.state, self.state], -1
        )
        values = values.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, L, P)
        step = functional.softplus(step.to(self.step_bias.dtype) + self.step_bias)
        step = zero_padding(step, real).transpose(1, 2)  # (B, H, L)
        return Inputs(
            q=queries.unsqueeze(1),  # (B, 1, L, N)
            k=keys.unsqueeze(1),
            v=step.unsqueeze(-1) * values,
            log_decay=-self.log_rate.exp().unsqueeze(-1) * step,
            beta=None,
            skip=self.skip[:, None, None] * values,
            window=window,
        )

    def outputs(self, mixed: Tensor, x: Tensor) -> Tensor:
        """Return the outputs (B, L, D): gated, normalised and projected."""
        gated = mixed.transpose(1, 2).flatten(2) * functional.silu(self.gate(x))
        return self.out(self.norm(gated))
