"""The one-shot context readout of SID-MLP (equation 1): one attention over the encoder's states per user.

q = mean(H) Wq;  x = LN(q + MHA(q, H, H));  z = LN(x + FFN(x)).

Shapes: `B` users, `W` queries of a user, `S` source positions, `D` width, `H` heads, `K` width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.retrieval.parts import History


def query_state(history: History) -> Tensor:
    """(B, D): the state that a readout asks with, by default the mean of the states that are no padding."""
    if history.query is not None:
        return history.query
    states, padding = history.states, history.padding
    if padding is None:
        return states.mean(1)
    real = (padding[:, 0, 0] == 0).unsqueeze(-1).to(states.dtype)  # (B, S, 1)
    return (states * real).sum(1) / real.sum(1)


class CrossAttention(nn.Module):
    """Multi-head attention without biases, its inner `width` independent of that of the states."""

    def __init__(self, dim: int, width: int, heads: int, dropout: float = 0.0) -> None:
        """`dropout` of the weights that states are mixed by."""
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.q = nn.Linear(dim, width, bias=False)
        self.k = nn.Linear(dim, width, bias=False)
        self.v = nn.Linear(dim, width, bias=False)
        self.o = nn.Linear(width, dim, bias=False)

    def forward(self, query: Tensor, states: Tensor, padding: Tensor | None) -> Tensor:
        """(B, W, D): `query` (B, W, D) attends to `states` (B, S, D); scores are scaled by 1 / sqrt(K).

        In training, which asks once per user, the same without keys and values of the states.
        """
        if self.training and query.shape[1] == 1:
            return self.one_query(query[:, 0], states, padding).unsqueeze(1)
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, W or S, K)
            for layer, x in ((self.q, query), (self.k, states), (self.v, states))
        )
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        scores = scores if padding is None else scores + padding
        return self.o((self.dropout(scores.softmax(-1)) @ v).transpose(1, 2).flatten(2))

    def one_query(self, query: Tensor, states: Tensor, padding: Tensor | None) -> Tensor:
        """(B, D) of `query` (B, D): the query goes through the projection of keys, and the states as each head weighs
        them through that of values: q (H Wk)' = (q Wk') H' and p (H Wv) = (p H) Wv."""
        k, v = (layer.weight.unflatten(0, (self.heads, -1)) for layer in (self.k, self.v))  # (H, K, D)
        keyed = torch.einsum("bhk,hkd->bhd", self.q(query).unflatten(1, (self.heads, -1)), k)
        scores = keyed @ states.transpose(1, 2) * k.shape[1] ** -0.5  # (B, H, S)
        scores = scores if padding is None else scores + padding[:, 0]
        mixed = self.dropout(scores.softmax(-1)) @ states  # (B, H, D)
        return self.o(torch.einsum("bhd,hkd->bhk", mixed, v).flatten(1))


class Readout(nn.Module):
    """Equation 1. With `given` > 0 the query also reads a vector of that width, the prefix of a digit."""

    def __init__(
        self, dim: int, width: int, heads: int, ffn_width: int, dropout: float, ffn: bool = True, given: int = 0,
        attention_dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.query = nn.Linear(dim + given, dim)
        self.attention = CrossAttention(dim, width, heads, attention_dropout)
        self.norm1 = nn.LayerNorm(dim)
        self.ffn: nn.Sequential | None = None
        if ffn:
            self.ffn = nn.Sequential(
                nn.Linear(dim, ffn_width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(ffn_width, dim)
            )
            self.norm2 = nn.LayerNorm(dim)

    def forward(self, history: History, given: Tensor | None = None) -> Tensor:
        """z (B, D) of the history; with `given` (B, W, G) one per query, (B, W, D)."""
        mean = query_state(history).unsqueeze(1)  # (B, 1, D)
        if given is not None:
            mean = torch.cat([mean.expand(-1, given.shape[1], -1), given], -1)
        query = self.query(mean)
        z = self.norm1(query + self.attention(query, history.states, history.padding))
        if self.ffn is not None:
            z = self.norm2(z + self.ffn(z))
        return z[:, 0] if given is None else z


class MeanReadout(nn.Module):
    """A linear projection of the mean state: Table 5's row without multi-head attention."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query = nn.Linear(dim, dim)

    def forward(self, history: History) -> Tensor:
        """z (B, D) of the history."""
        return self.query(query_state(history))
