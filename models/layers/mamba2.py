"""Mamba2's mixer (Dao and Gu, 2024). A_log, dt_bias and D start as its authors have them, linear layers as PyTorch has.

Shapes: `B` rows, `L` positions, `D` width, `H` heads, `P` width of a head, `N` width of the state.
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
    masked,
)


class Mamba2(RecurrentMixer):
    """x, B and C after a short convolution; B and C, the keys and queries, are shared by all heads (one group)."""

    def __init__(
        self, dim: int, head_width: int, state: int, expand: int, conv: int, chunk: int
    ) -> None:
        super().__init__()
        self.inner, self.state, self.heads, self.chunk = (
            expand * dim,
            state,
            expand * dim // head_width,
            chunk,
        )
        self.memory_size = self.inner * state
        if self.heads * head_width != self.inner:
            raise ValueError(
                f"head_width {head_width} does not divide the inner width {self.inner}; give one that does"
            )
        self.enter = nn.Linear(
            dim, self.inner + 2 * state + self.heads, bias=False
        )  # x, B, C and the step size
        self.conv = ShortConvolution(self.inner + 2 * state, conv, bias=True)
        self.log_rate = nn.Parameter(
            torch.empty(self.heads).uniform_(1, 16).log()
        )  # A_log
        self.step_bias = nn.Parameter(initial_step_bias(self.heads))
        self.skip = nn.Parameter(torch.ones(self.heads))  # D
        self.gate = nn.Linear(dim, self.inner, bias=False)  # z
        self.norm = nn.RMSNorm(self.inner, eps=1e-5)
        self.out = nn.Linear(self.inner, dim, bias=False)

    def inputs(self, x: Tensor, real: Tensor | None, window: Tensor | None) -> Inputs:
        channels = self.inner + 2 * self.state
        given, step = self.enter(x).split([channels, self.heads], -1)
        mixed, window = self.conv(masked(given, real), window)
        mixed, keys, queries = mixed.split([self.inner, self.state, self.state], -1)
        mixed = mixed.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, L, P)
        step = masked(
            functional.softplus(step.to(self.step_bias.dtype) + self.step_bias), real
        )  # (B, L, H)
        step = step.transpose(1, 2)
        log_decay = -self.log_rate.exp().unsqueeze(-1) * step
        skip = self.skip[:, None, None] * mixed
        shared = queries.unsqueeze(1), keys.unsqueeze(1)  # (B, 1, L, N)
        return Inputs(
            *shared, step.unsqueeze(-1) * mixed, log_decay, None, skip, window
        )

    def outputs(self, mixed: Tensor, x: Tensor) -> Tensor:
        return self.out(
            self.norm(mixed.transpose(1, 2).flatten(2) * functional.silu(self.gate(x)))
        )
