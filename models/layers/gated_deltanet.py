"""The mixer of Gated DeltaNet (Yang et al., 2025), as in flash-linear-attention.

The caller chooses the sizes. A_log and dt_bias are initialised as in that library,
linear layers as in PyTorch.

Shapes: `B` rows, `L` positions, `D` width, `H` heads, `K` key width of a head, `V`
value width of a head.
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


class GatedDeltaNet(RecurrentMixer):
    """A gated delta rule after short convolutions, with a gated norm per head.

    Queries and keys are normalised to length 1. Decay and beta are computed per head.

    Args:
        dim: Width D of the states.
        heads: Number of heads H.
        head_width: Key width K of a head.
        expand_v: Value width V of a head, as a multiple of K.
        chunk: Positions per chunk of the recurrence.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        head_width: int,
        expand_v: int,
        chunk: int,
    ) -> None:
        super().__init__()
        self.heads, self.chunk = heads, chunk
        self.keys, self.values = heads * head_width, heads * head_width * expand_v
        self.memory_size = head_width * self.values
        self.qkv = nn.Linear(dim, 2 * self.keys + self.values, bias=False)
        self.conv = ShortConvolution(2 * self.keys + self.values, bias=False)
        self.rates = nn.Linear(dim, 2 * heads, bias=False)  # decay rates, then betas
        initial_rate = torch.empty(heads).uniform_(1e-3, 16)
        self.log_rate = nn.Parameter(initial_rate.log())  # A_log
        self.step_bias = nn.Parameter(initial_step_bias(heads))
        self.gate = nn.Linear(dim, self.values, bias=False)
        self.norm = nn.RMSNorm(head_width * expand_v, eps=1e-6)
        self.out = nn.Linear(self.values, dim, bias=False)

    def inputs(self, x: Tensor, real: Tensor | None, window: Tensor | None) -> Inputs:
        """Compute the inputs of the recurrence, with normalised queries and keys."""
        qkv, window = self.conv(zero_padding(self.qkv(x), real), window)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, L, K or V)
            for part in qkv.split([self.keys, self.keys, self.values], -1)
        )
        step, strength = self.rates(x).to(self.log_rate.dtype).chunk(2, -1)  # (B, L, H)
        log_decay = -self.log_rate.exp() * functional.softplus(step + self.step_bias)
        return Inputs(
            q=_normalize(q) * q.shape[-1] ** -0.5,
            k=_normalize(k),
            v=v,
            log_decay=zero_padding(log_decay, real).transpose(1, 2),
            beta=zero_padding(strength.sigmoid(), real).transpose(1, 2),
            skip=None,
            window=window,
        )

    def outputs(self, mixed: Tensor, x: Tensor) -> Tensor:
        """Return the outputs (B, L, D): normalised per head, gated and projected."""
        normed = self.norm(mixed).transpose(1, 2).flatten(2)
        return self.out(normed * functional.silu(self.gate(x)))


def _normalize(x: Tensor) -> Tensor:
    """Divide `x` by its length along the last axis; zero vectors stay zero."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
