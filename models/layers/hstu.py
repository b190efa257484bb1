"""HSTU's pointwise aggregated attention (Zhai et al., 2024, Eq. 1-3): SiLU in place of softmax, and a gate.

Shapes: `B` rows, `L` positions, `D` width, `H` heads, `d` = D / H.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class HSTULayer(nn.Module):
    """One layer: U, V, Q, K = SiLU(W1 norm(x)); x + W2(norm(SiLU(Q K^T + bias) V / n) * U), and an FFN if asked.

    `length` is the n of the paper, the largest number of positions; constant, so that no position's output
    depends on how many others are padded. `causal` hides later positions. `relative` adds a learned bias by
    distance (and by time where times are given). `ffn` is the inner width of a feed-forward block that HSTU
    leaves out; 0 for none. As in the authors' code scores are not scaled by the width of a head, projections and
    biases begin as N(0, 0.02), and the norms' eps is small beside what the division by n leaves.
    """

    EPS = 1e-6
    """Of the norms."""
    STD = 0.02
    """Standard deviation of what projections and biases begin as."""

    TIME_BUCKETS = 64
    """Buckets of log2(1 + seconds) between two positions."""

    def __init__(
        self,
        width: int,
        heads: int,
        length: int,
        *,
        causal: bool = True,
        relative: bool = False,
        ffn: int = 0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.heads, self.length, self.causal, self.dropout = (
            heads,
            length,
            causal,
            dropout,
        )
        self.norm = nn.LayerNorm(width, eps=self.EPS)
        self.project = nn.Linear(width, 4 * width, bias=False)
        self.mixed_norm = nn.LayerNorm(width, eps=self.EPS)
        self.out = nn.Linear(width, width)
        nn.init.xavier_uniform_(self.out.weight)
        self.by_distance = (
            nn.Parameter(torch.zeros(2 * length - 1)) if relative else None
        )
        self.by_time = (
            nn.Parameter(torch.zeros(self.TIME_BUCKETS)) if relative else None
        )
        self.ffn = (
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, ffn),
                nn.ReLU(),
                nn.Linear(ffn, width),
            )
            if ffn
            else None
        )
        for weight in (self.project.weight, self.by_distance, self.by_time):
            if weight is not None:
                nn.init.normal_(weight, std=self.STD)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, times: Tensor | None = None
    ) -> Tensor:
        """(B, L, D). `mask` (B, L) is true where a position may be attended to; `times` (B, L) int64 ms."""
        count = x.shape[1]
        u, v, q, k = functional.silu(self.project(self.norm(x))).chunk(4, -1)
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v)
        )  # (B, H, L, d)
        v = (
            v / self.length
            if mask is None
            else v * (mask[:, None, :, None] / self.length)
        )
        scores = q @ k.transpose(2, 3)  # (B, H, L, L)
        if self.by_distance is not None and self.by_time is not None:
            place = torch.arange(count, device=x.device)
            scores = scores + self.by_distance[place[:, None] - place + self.length - 1]
            if times is not None:
                apart = (times[:, :, None] - times[:, None]).abs().double() / 1000
                bucket = torch.log2(1 + apart).long().clamp(max=self.TIME_BUCKETS - 1)
                scores = scores + self.by_time[bucket][:, None]
        weights = functional.silu(scores)
        if self.causal:
            weights = weights.tril()
        mixed = (weights @ v).transpose(1, 2).flatten(2)
        x = x + functional.dropout(
            self.out(self.mixed_norm(mixed) * u), self.dropout, self.training
        )
        return (
            x
            if self.ffn is None
            else x + functional.dropout(self.ffn(x), self.dropout, self.training)
        )
