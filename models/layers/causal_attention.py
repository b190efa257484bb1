"""Causal and strictly causal attention over a context, and candidates that read the context but not each other.

    layout = Layout.of(visible, width // heads)
    attention = CausalAttention(width, heads, strict=True)
    mixed = attention(states, values, layout)

Positions are the context's, in order of time, padded on the right, then the candidates'. No mask is needed
over the context, so fused kernels apply: causal attention is `causal_product`, and the strict form is the same
on queries 1..n-1 against keys 0..n-2, with zero for the first position, which has no past (Fig. 6 of
AttnMVP). Candidates have a mask of their own.

Shapes: `B` rows, `T` context positions, `C` candidates, `L` = T + C, `D` width, `H` heads, `d` = D / H.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.layers.causal_product import causal_product
from models.layers.rotary import rotary, rotate


def shifted_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(B, H, T, d): softmax attention in which position t reads 0..t-1 and never itself; zero at t = 0."""
    if q.shape[2] == 1:
        return (q + k + v) * 0  # of the graph, as DDP wants gradients of all weights in every step
    later = causal_product(q[:, :, 1:], k[:, :, :-1], v[:, :, :-1])
    return functional.pad(later, (0, 0, 1, 0))


@dataclass(frozen=True)
class Layout:
    """Where the context ends, what each candidate reads of it, and every position's place in time."""

    context: int
    """T: positions of the context, padding included."""
    visible: Tensor
    """(B, C, T) bool: true where a candidate reads a context position."""
    rope: Tensor
    """Rotary tables of all L positions."""

    @classmethod
    def of(cls, visible: Tensor, width: int) -> Self:
        """For heads of `width`. A candidate stands right after the last of the positions that it reads, as if it
        were the context's next one; so its place does not depend on other candidates."""
        rows, _, context = visible.shape
        place = torch.arange(context, device=visible.device).expand(rows, -1)
        return cls(context, visible, rotary(torch.cat([place, visible.sum(2)], 1), width))

    def past(self) -> Layout:
        """The context alone."""
        return Layout(self.context, self.visible[:, :0], self.rope[:, :, :, : self.context])


class CausalAttention(nn.Module):
    """Multi-head attention with RoPE. Context position t reads 0..t, or 0..t-1 where `strict`; a candidate reads
    what it sees of the context and, unless `strict`, itself. Nobody reads a candidate. Without biases, so that
    reading nothing gives zero."""

    def __init__(self, width: int, heads: int, *, strict: bool) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of num_heads {heads}; change either")
        self.heads, self.strict = heads, strict
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, states: Tensor, values: Tensor, layout: Layout) -> Tensor:
        """(B, L, D) from `states` (B, L, D), which give queries and keys, and `values` (B, L, D).

        Where `strict`, no value of a candidate is read, and `values` may be (B, T, D).
        """
        n, read = layout.context, layout.context if self.strict else states.shape[1]
        q = rotate(self.split(self.q(states)), layout.rope)
        k = rotate(self.split(self.k(states[:, :read])), layout.rope[:, :, :, :read])
        v = self.split(self.v(values[:, :read]))
        past = q[:, :, :n], k[:, :, :n], v[:, :, :n]
        mixed = shifted_attention(*past) if self.strict else causal_product(*past)
        if states.shape[1] > n:
            mixed = torch.cat([mixed, self.of_candidates(q[:, :, n:], k, v, layout.visible)], 2)
        return self.o(mixed.transpose(1, 2).flatten(2))

    def of_candidates(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        """(B, H, C, d) for `q` (B, H, C, d) over the context, and over the candidate itself unless strict."""
        if not self.strict:
            own = torch.eye(q.shape[2], dtype=torch.bool, device=q.device).expand(len(q), -1, -1)
            mask = torch.cat([visible, own], 2)[:, None]
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        some = visible.any(2, keepdim=True)  # softmax over nothing is not a number: read all, then keep nothing
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=(visible | ~some)[:, None])
        return mixed.masked_fill(~some[:, None], 0.0)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class CausalBlock(nn.Module):
    """A pre-norm Transformer block on `CausalAttention`."""

    def __init__(self, width: int, heads: int, ffn: int, dropout: float, *, strict: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads, strict=strict)
        self.ffn = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, ffn), nn.GELU(), nn.Dropout(dropout), nn.Linear(ffn, width)
        )
        self.dropout = dropout

    def forward(self, x: Tensor, layout: Layout, added_values: Tensor | None = None) -> Tensor:
        """(B, L, D). `added_values` (B, T, D) is added to the values, never to queries or keys; not where a block
        that is not strict has candidates, for they have no value of their own then."""
        states = self.norm(x)
        values = states if added_values is None else states[:, : layout.context] + added_values
        x = x + functional.dropout(self.attention(states, values, layout), self.dropout, self.training)
        return x + functional.dropout(self.ffn(x), self.dropout, self.training)
