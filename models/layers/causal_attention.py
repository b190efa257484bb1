"""Causal attention by timestamp over a context, and from candidates to the context.

    layout = Layout.build(earlier, context, width // heads, tied=False)
    attention = CausalAttention(width, heads, strict=True)
    mixed = attention(states, values, layout)

The positions of a row are its context, ordered by time and padded on the right,
followed by its candidates. A position attends to the context positions with a strictly
earlier timestamp. The context is sorted, so these positions are a prefix of it.
Candidates do not attend to each other.

If all timestamps of a row differ, the context needs no mask and fused kernels apply:
causal attention is `causal_product`. Strict causal attention, in which a position does
not attend to itself, is the same product of queries 1..n-1 with keys 0..n-2; its first
output is zero (Fig. 6 of AttnMVP). Rows with equal timestamps, and candidates, use
`prefix_product`.

Positions are encoded by rotary embeddings (RoPE, Su et al., 2023): pairs of channels
are rotated by an angle proportional to the position, so the product of a query and a
key depends on their distance.

Shapes: `B` rows, `T` context positions, `C` candidates, `L` = T + C, `D` width, `H`
heads, `d` = D / H.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.layers.causal_product import causal_product, prefix_product

ROPE_BASE = 10_000.0
"""Base of the rotary angles.

Channel pair j turns by `ROPE_BASE ** (-2 j / d)` radians per position (RoFormer,
Sec. 3.3).
"""


def compute_rope(position: Tensor, width: int) -> Tensor:
    """Compute rotary cosines and sines.

    Args:
        position: (B, L) integer positions.
        width: Width d of a head, an even number.

    Returns:
        (2, B, 1, L, d / 2) float32: cosines, then sines.
    """
    speed = ROPE_BASE ** (
        -torch.arange(0, width, 2, device=position.device, dtype=torch.float32) / width
    )
    angle = position[:, None, :, None].float() * speed
    return torch.stack([angle.cos(), angle.sin()])


def apply_rope(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate the channels of `x` by the angles in `rope`.

    Args:
        x: (B, H, L, d) queries or keys. Channel j is paired with channel j + d / 2.
        rope: Cosines and sines from `compute_rope`.

    Returns:
        (B, H, L, d) in the dtype of `x`.
    """
    cosine, sine = rope
    left, right = x.chunk(2, -1)
    return torch.cat(
        [left * cosine - right * sine, right * cosine + left * sine], -1
    ).to(x.dtype)


def strict_causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute softmax attention in which position t attends to 0..t-1, not to itself.

    All tensors are (B, H, T, d). The output at t = 0 is zero.
    """
    if q.shape[2] == 1:
        # DDP expects a gradient for every weight in every step
        return (q + k + v) * 0
    later = causal_product(q[:, :, 1:], k[:, :, :-1], v[:, :, :-1])
    return functional.pad(later, (0, 0, 1, 0))


@dataclass(frozen=True)
class Layout:
    """Positions of a batch: context length, visible context and rotary embeddings."""

    context: int
    """Number T of context positions, including padding."""
    earlier: Tensor
    """(B, L) int64: number of context positions strictly before each position."""
    tied: bool
    """Whether context positions may share a timestamp with the position before them."""
    rope: Tensor
    """Rotary cosines and sines of all L positions."""
    tokens: int = 1
    """Context positions per event. Positions of one event attend to each other
    causally."""

    @classmethod
    def build(
        cls, earlier: Tensor, context: int, width: int, *, tied: bool, tokens: int = 1
    ) -> Self:
        """Build the layout from the number of earlier events of each event.

        An event or candidate that sees n positions gets rotary position n. Its position
        therefore depends neither on other candidates nor on events with its timestamp.

        Args:
            earlier: (B, L) number of context events strictly before each event. The
                first `context` columns are context events, the others candidates.
            context: Number of context events.
            width: Width d of a head.
            tied: Whether events of the context may share a timestamp.
            tokens: Consecutive positions per context event. A candidate has one.
        """
        context_end = tokens * earlier[:, :context]
        candidate_end = tokens * earlier[:, context:]
        token = torch.arange(tokens, device=earlier.device)
        context_position = (context_end[..., None] + token).flatten(1)
        position = torch.cat([context_position, candidate_end], 1)
        context_end = context_end.repeat_interleave(tokens, 1)
        return cls(
            context=tokens * context,
            earlier=torch.cat([context_end, candidate_end], 1),
            tied=tied,
            rope=compute_rope(position, width),
            tokens=tokens,
        )

    def context_only(self) -> Layout:
        """Return the layout of the context without the candidates."""
        return replace(
            self,
            earlier=self.earlier[:, : self.context],
            rope=self.rope[:, :, :, : self.context],
        )

    def mix(self, q: Tensor, k: Tensor, v: Tensor, strict: bool) -> Tensor:
        """Attend from every position to the context positions that are visible to it.

        Args:
            q: (B, H, L, d) queries.
            k: Keys (B, H, L, d), or (B, H, T, d) of the context alone if `strict`.
            v: Values, in the shape of `k`.
            strict: Whether positions do not attend to themselves.

        Returns:
            (B, H, L, d)
        """
        n = self.context
        context = q[:, :, :n], k[:, :, :n], v[:, :, :n]
        if self.tied:
            group = 0 if strict else self.tokens
            mixed = prefix_product(*context, self.earlier[:, :n], group)
        elif strict:
            mixed = strict_causal_attention(*context)
        else:
            mixed = causal_product(*context)
        if q.shape[2] == n:
            return mixed
        candidate_kv = None if strict else (k[:, :, n:], v[:, :, n:])
        candidates = prefix_product(
            q[:, :, n:], *context[1:], self.earlier[:, n:], None, candidate_kv
        )
        return torch.cat([mixed, candidates], 2)


class CausalAttention(nn.Module):
    """Multi-head attention with RoPE over strictly earlier context.

    Unless `strict`, a position also attends to itself. No position attends to another
    position's candidate. Projections have no bias, so a position that sees nothing gets
    a zero output. Weights are initialised Xavier-uniform (Glorot and Bengio, 2010).
    """

    def __init__(self, width: int, heads: int, *, strict: bool) -> None:
        super().__init__()
        self.heads = heads
        self.strict = strict
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        for projection in (self.q, self.k, self.v, self.o):
            # a 1.7 times wider range than the default of nn.Linear
            nn.init.xavier_uniform_(projection.weight)

    def forward(self, states: Tensor, values: Tensor, layout: Layout) -> Tensor:
        """Return the attention output (B, L, D).

        Args:
            states: (B, L, D) inputs of queries and keys.
            values: (B, L, D) inputs of values; (B, T, D) is enough if the attention is
                strict, as no position reads the value of a candidate then.
            layout: Positions of the batch.
        """
        num_keys = layout.context if self.strict else states.shape[1]
        q = apply_rope(self.split(self.q(states)), layout.rope)
        k = apply_rope(
            self.split(self.k(states[:, :num_keys])), layout.rope[:, :, :, :num_keys]
        )
        v = self.split(self.v(values[:, :num_keys]))
        return self.o(layout.mix(q, k, v, self.strict).transpose(1, 2).flatten(2))

    def split(self, x: Tensor) -> Tensor:
        """Split the heads: (B, L, D) to (B, H, L, d)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class CausalBlock(nn.Module):
    """A pre-norm Transformer block with `CausalAttention`."""

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
        """Return the states (B, L, D) after attention and feed-forward.

        Args:
            x: (B, L, D) states.
            layout: Positions of the batch.
            added_values: (B, T, D) added to the inputs of the values, never to queries
                or keys. Not allowed with candidates unless the block is strict.
        """
        states = values = self.norm(x)
        if added_values is not None:
            values = states[:, : layout.context] + added_values
        mixed = self.attention(states, values, layout)
        x = x + functional.dropout(mixed, self.dropout, self.training)
        return x + functional.dropout(self.ffn(x), self.dropout, self.training)
