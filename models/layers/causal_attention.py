"""Causal and strictly causal attention by time over a context, and candidates that read the context but not each other.

    layout = Layout.of(earlier, context, width // heads)
    attention = CausalAttention(width, heads, strict=True)
    mixed = attention(states, values, layout)

Positions are the context's, in order of time, padded on the right, then the candidates'. Each reads the context that is
strictly earlier than it, which as the context is in order are its first so many positions. Where no two of a row have
one time, no mask is needed over the context, so fused kernels apply: causal attention is `causal_product`, and the
strict form is the same on queries 1..n-1 against keys 0..n-2, with zero for the first position, which has no past
(Fig. 6 of AttnMVP). Else, and for candidates, it is `prefix_product`.

Positions are rotary (RoPE, Su et al., 2023): pairs of channels turn by an angle that grows with the position, so the
product of a query and a key depends on how far apart they are.

Shapes: `B` rows, `T` context positions, `C` candidates, `L` = T + C, `D` width, `H` heads, `d` = D / H.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.layers.causal_product import causal_product, prefix_product

BASE = 10_000.0
"""Channel pair j turns by BASE ** (-2 j / d) radians per position (Sec. 3.3 of RoFormer)."""


def rotary(position: Tensor, width: int) -> Tensor:
    """(2, B, 1, L, d / 2) fp32 cosines and sines for heads of an even `width` = d at `position` (B, L), integers."""
    speed = BASE ** (
        -torch.arange(0, width, 2, device=position.device, dtype=torch.float32) / width
    )
    angle = position[:, None, :, None].float() * speed
    return torch.stack([angle.cos(), angle.sin()])


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """(B, H, L, d) turned by `rope` of `rotary`, in the dtype of `x`; channel j is paired with channel j + d / 2."""
    cosine, sine = rope
    left, right = x.chunk(2, -1)
    return torch.cat(
        [left * cosine - right * sine, right * cosine + left * sine], -1
    ).to(x.dtype)


def shifted_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(B, H, T, d): softmax attention in which position t reads 0..t-1 and never itself; zero at t = 0."""
    if q.shape[2] == 1:
        return (
            q + k + v
        ) * 0  # of the graph, as DDP wants gradients of all weights in every step
    later = causal_product(q[:, :, 1:], k[:, :, :-1], v[:, :, :-1])
    return functional.pad(later, (0, 0, 1, 0))


@dataclass(frozen=True)
class Layout:
    """Where the context ends, what each position reads of it, and its place in time."""

    context: int
    """T: positions of the context, padding included."""
    earlier: Tensor
    """(B, L) int64: positions of the context that are strictly earlier than each; these are its first ones."""
    tied: bool
    """Whether positions of the context share their time with one before them, and do not read it."""
    rope: Tensor
    """Rotary tables of all L positions."""
    tokens: int = 1
    """Positions of the context to an event; those of one event read each other, causally."""

    @classmethod
    def of(
        cls, earlier: Tensor, context: int, width: int, *, tied: bool, tokens: int = 1
    ) -> Self:
        """For heads of `width`, of events: `earlier` (B, L) counts the `context` ones that are strictly earlier, each
        of so many `tokens` that follow each other; a candidate is one.

        What reads n positions stands at place n, a candidate and an event of the context alike, so that its place
        depends neither on other candidates nor on what has its own time.
        """
        past, asked = tokens * earlier[:, :context], tokens * earlier[:, context:]
        of_tokens = torch.arange(tokens, device=earlier.device)
        place = torch.cat([(past[..., None] + of_tokens).flatten(1), asked], 1)
        earlier = torch.cat([past.repeat_interleave(tokens, 1), asked], 1)
        return cls(tokens * context, earlier, tied, rotary(place, width), tokens)

    def past(self) -> Layout:
        """The context alone."""
        return replace(
            self,
            earlier=self.earlier[:, : self.context],
            rope=self.rope[:, :, :, : self.context],
        )

    def mix(self, q: Tensor, k: Tensor, v: Tensor, strict: bool) -> Tensor:
        """(B, H, L, d): the values that each position reads, by its queries `q` (B, H, L, d); keys and values are of as
        many positions, or where `strict` of the context alone."""
        n = self.context
        past = q[:, :, :n], k[:, :, :n], v[:, :, :n]
        if self.tied:
            mixed = prefix_product(
                *past, self.earlier[:, :n], 0 if strict else self.tokens
            )
        else:
            mixed = shifted_attention(*past) if strict else causal_product(*past)
        if q.shape[2] == n:
            return mixed
        own = None if strict else (k[:, :, n:], v[:, :, n:])
        return torch.cat(
            [
                mixed,
                prefix_product(q[:, :, n:], *past[1:], self.earlier[:, n:], None, own),
            ],
            2,
        )


class CausalAttention(nn.Module):
    """Multi-head attention with RoPE. A position reads the context that is strictly earlier and, unless `strict`,
    itself. Nobody reads a candidate. Without biases, so that reading nothing gives zero. Weights start
    Xavier-uniform (Glorot and Bengio, 2010)."""

    def __init__(self, width: int, heads: int, *, strict: bool) -> None:
        super().__init__()
        self.heads, self.strict = heads, strict
        self.q, self.k, self.v, self.o = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        for projection in (
            self.q,
            self.k,
            self.v,
            self.o,
        ):  # 1.7 times wider than nn.Linear starts
            nn.init.xavier_uniform_(projection.weight)

    def forward(self, states: Tensor, values: Tensor, layout: Layout) -> Tensor:
        """(B, L, D) from `states` (B, L, D), which give queries and keys, and `values` (B, L, D). Where `strict`, no
        value of a candidate is read, and `values` may be (B, T, D)."""
        read = layout.context if self.strict else states.shape[1]
        q = rotate(self.split(self.q(states)), layout.rope)
        k = rotate(self.split(self.k(states[:, :read])), layout.rope[:, :, :, :read])
        v = self.split(self.v(values[:, :read]))
        return self.o(layout.mix(q, k, v, self.strict).transpose(1, 2).flatten(2))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class CausalBlock(nn.Module):
    """A pre-norm Transformer block on `CausalAttention`."""

    def __init__(
        self, width: int, heads: int, ffn: int, dropout: float, *, strict: bool
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads, strict=strict)
        self.ffn = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, ffn),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(ffn, width),
        )
        self.dropout = dropout

    def forward(
        self, x: Tensor, layout: Layout, added_values: Tensor | None = None
    ) -> Tensor:
        """(B, L, D). `added_values` (B, T, D) is added to the values, never to queries or keys; not where a block
        that is not strict has candidates, for they have no value of their own then."""
        states = self.norm(x)
        values = (
            states
            if added_values is None
            else states[:, : layout.context] + added_values
        )
        x = x + functional.dropout(
            self.attention(states, values, layout), self.dropout, self.training
        )
        return x + functional.dropout(self.ffn(x), self.dropout, self.training)
