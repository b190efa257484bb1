"""HSTU's pointwise aggregated attention (Zhai et al., 2024, Eq. 1-3).

Attention weights are SiLU instead of softmax, and the output is gated.

Shapes: `B` rows, `L` positions, `D` width, `H` heads, `d` = D / H.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class HSTULayer(nn.Module):
    """An HSTU layer, optionally followed by a feed-forward block.

        U, V, Q, K = SiLU(W1 norm(x))
        out = x + W2(norm(SiLU(Q K^T + bias) V / n) * U)

    As in the authors' code, scores are not scaled by the head width, projections and
    biases are initialised from N(0, 0.02), and the epsilon of the norms is small
    compared with values divided by n.

    Args:
        width: Width D of the states.
        heads: Number of attention heads.
        length: Maximum number of positions, n of the paper. The constant keeps outputs
            independent of the amount of padding.
        causal: Whether to hide later positions.
        relative: Whether to add a learned bias by distance, and by time difference if
            `forward` gets times.
        ffn: Inner width of an additional feed-forward block, which HSTU does not have;
            0 for none.
        dropout: Dropout probability of the residual branches.
    """

    EPS = 1e-6
    """Epsilon of the layer norms."""
    STD = 0.02
    """Standard deviation of the initial projections and biases."""

    TIME_BUCKETS = 64
    """Number of buckets of log2(1 + seconds) between two positions."""

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
        self.heads = heads
        self.length = length
        self.causal = causal
        self.dropout = dropout
        self.norm = nn.LayerNorm(width, eps=self.EPS)
        self.project = nn.Linear(width, 4 * width, bias=False)
        self.mixed_norm = nn.LayerNorm(width, eps=self.EPS)
        self.out = nn.Linear(width, width)
        nn.init.xavier_uniform_(self.out.weight)
        self.by_distance = None
        self.by_time = None
        if relative:
            self.by_distance = nn.Parameter(torch.zeros(2 * length - 1))
            self.by_time = nn.Parameter(torch.zeros(self.TIME_BUCKETS))
        self.ffn = None
        if ffn:
            self.ffn = nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, ffn),
                nn.ReLU(),
                nn.Linear(ffn, width),
            )
        for weight in (self.project.weight, self.by_distance, self.by_time):
            if weight is not None:
                nn.init.normal_(weight, std=self.STD)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, times: Tensor | None = None
    ) -> Tensor:
        """Return the states (B, L, D) after the layer.

        Args:
            x: (B, L, D) states.
            mask: (B, L) bool, true where a position may be attended to; None for all.
            times: (B, L) int64 timestamps in ms for the bias by time difference.
        """
        u, v, q, k = functional.silu(self.project(self.norm(x))).chunk(4, -1)
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v)
        )  # (B, H, L, d)
        if mask is None:
            v = v / self.length
        else:
            v = v * (mask[:, None, :, None] / self.length)
        scores = q @ k.transpose(2, 3)  # (B, H, L, L)
        if self.by_distance is not None and self.by_time is not None:
            index = torch.arange(x.shape[1], device=x.device)
            distance = index[:, None] - index + self.length - 1
            bias = functional.embedding(distance, self.by_distance[:, None])
            scores = scores + bias.squeeze(-1)
            if times is not None:
                seconds = (times[:, :, None] - times[:, None]).abs().double() / 1000
                bucket = torch.log2(1 + seconds).long().clamp(max=self.TIME_BUCKETS - 1)
                bias = functional.embedding(bucket, self.by_time[:, None])
                scores = scores + bias.squeeze(-1)[:, None]
        weights = functional.silu(scores)
        if self.causal:
            weights = weights.tril()
        mixed = (weights @ v).transpose(1, 2).flatten(2)
        out = self.out(self.mixed_norm(mixed) * u)
        x = x + functional.dropout(out, self.dropout, self.training)
        if self.ffn is None:
            return x
        return x + functional.dropout(self.ffn(x), self.dropout, self.training)
