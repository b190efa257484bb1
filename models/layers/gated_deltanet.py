"""Gated DeltaNet's mixer (Yang et al., 2025), built as in flash-linear-attention.

Sizes are the caller's. A_log and dt_bias start as there, linear layers as PyTorch has them.

Shapes: `B` rows, `L` positions, `D` width, `H` heads, `K` width of a head's keys, `V` of its values.
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


class GatedDeltaNet(RecurrentMixer):
    """q, k, v after short convolutions, q and k of length 1; decay and beta per head; a gated norm per head."""

    def __init__(
        self,
        dim: int,
        heads: int,
        head_width: int,
        expand_v: int,
        conv: int,
        chunk: int,
    ) -> None:
        super().__init__()
        self.heads, self.chunk = heads, chunk
        self.keys, self.values = heads * head_width, heads * head_width * expand_v
        self.memory_size = head_width * self.values
        self.qkv = nn.Linear(dim, 2 * self.keys + self.values, bias=False)
        self.conv = ShortConvolution(2 * self.keys + self.values, conv, bias=False)
        self.rates = nn.Linear(dim, 2 * heads, bias=False)  # of the decay, then of beta
        self.log_rate = nn.Parameter(
            torch.empty(heads).uniform_(1e-3, 16).log()
        )  # A_log
        self.step_bias = nn.Parameter(initial_step_bias(heads))
        self.gate = nn.Linear(dim, self.values, bias=False)
        self.norm = nn.RMSNorm(head_width * expand_v, eps=1e-6)
        self.out = nn.Linear(self.values, dim, bias=False)

    def inputs(self, x: Tensor, real: Tensor | None, window: Tensor | None) -> Inputs:
        mixed, window = self.conv(masked(self.qkv(x), real), window)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, L, K or V)
            for part in mixed.split([self.keys, self.keys, self.values], -1)
        )
        step, strength = self.rates(x).to(self.log_rate.dtype).chunk(2, -1)  # (B, L, H)
        log_decay = -self.log_rate.exp() * functional.softplus(step + self.step_bias)
        log_decay, beta = (
            masked(part, real).transpose(1, 2)
            for part in (log_decay, strength.sigmoid())
        )
        return Inputs(
            _unit(q) * q.shape[-1] ** -0.5, _unit(k), v, log_decay, beta, None, window
        )

    def outputs(self, mixed: Tensor, x: Tensor) -> Tensor:
        return self.out(
            self.norm(mixed).transpose(1, 2).flatten(2) * functional.silu(self.gate(x))
        )


def _unit(x: Tensor) -> Tensor:
    """`x` over its length along the last axis; 0 where it is 0."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
