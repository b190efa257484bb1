"""SID-MLP's decoder (Guo et al., 2026): one attention readout per user and an MLP per digit, no attention per beam.

z = readout(states) is computed once per user (equation 1): q = mean(H) Wq;  x = LN(q + MHA(q, H, H));  z = LN(x +
FFN(x)). The logits of digit t are f_t([z; e(c_1); ...; e(c_{t-1})]) (equation 2). The paper's ablations are options;
each has its YAML under `jobs/configs/sid_mlp/`.

Shapes: `B` requests, `W` prefixes or queries of a user, `S` source positions, `D` width, `H` heads, `K` width of a
head, `N` hidden width of a digit's head, `L` levels (digits), `C_l` codes of level l, `V` tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.config import check_dropout, check_positive
from models.retrieval.distillation.student import StudentConfig
from models.retrieval.options import Path
from models.retrieval.parts import Backbone, Decoder, History


@dataclass
class SidMlpConfig(StudentConfig):
    """SID-MLP; the defaults are the paper's student and the facts of its public code."""

    path: Path = "fast"
    """`fast` is the same search with shared work done once, where it covers the variant; `plain` is the definition."""
    attention_heads: int = 4
    """Heads of the readout (public code; swept over 4 and 8, Appendix C.2)."""
    attention_width: int = 384
    """Inner width of the readout (public code; swept from 128 to 512, Appendix C.2)."""
    ffn_width: int = 1024
    """Inner width of the readout's feed-forward (public code)."""
    head_width: int = 512
    """Hidden width of each digit's head (public code; swept from 128 to 2048, Appendix C.2)."""
    dropout: float = 0.2
    """Dropout of heads and feed-forward (public code; 0.1 and 0.2 in Appendix C.2)."""
    attention_dropout: float = 0.0
    """Dropout of the readout's attention weights, which the paper does not name."""
    prefix: Literal["concat", "none", "sum", "cascade"] = "concat"
    """What a head sees of the prefix (Table 5, G1): all embeddings in order; nothing; [z; their sum]; or the newest
    embedding and the previous head's hidden activation in place of z."""
    shared_head: bool = False
    """One head for all digits, on the summed prefix (Table 5, G1)."""
    readout: Literal["attention", "mean", "per_digit"] = "attention"
    """z by one attention per user; by a linear projection of the mean state; or by one attention per digit whose
    query reads the prefix too (Table 5, G2)."""
    context_ffn: bool = True
    """Whether the readout has its feed-forward (Table 5, G2)."""
    logits: Literal["codebook", "vocabulary"] = "codebook"
    """What heads predict and the teacher's logits are cut to (Table 5, G3)."""
    embeddings: Literal["teacher", "random"] = "teacher"
    """Embeddings of the prefix: the teacher's, frozen, or random ones, trained (Table 5, G3)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(
            self, ("attention_heads", "attention_width", "ffn_width", "head_width")
        )
        if self.attention_width % self.attention_heads:
            raise ValueError(
                f"attention_width {self.attention_width} does not divide by attention_heads {self.attention_heads}; "
                f"give a multiple"
            )
        check_dropout(self, "dropout", "attention_dropout")
        for holds, message in (
            (
                self.shared_head and self.prefix != "sum",
                "shared_head needs the same input per digit; set prefix sum",
            ),
            (
                self.readout == "mean" and not self.context_ffn,
                "readout mean has no feed-forward to leave out",
            ),
            (
                self.readout == "per_digit" and self.prefix in ("none", "cascade"),
                f"readout per_digit reads the prefix and prefix {self.prefix} does not fit it; "
                "set prefix concat or sum",
            ),
            (
                self.prefix == "none" and self.embeddings == "random",
                "prefix none has no embeddings to train",
            ),
            (
                self.prefix == "cascade" and self.m > 0,
                f"prefix cascade starts at the first digit; set m {self.m} to 0",
            ),
        ):
            if holds:
                raise ValueError(message)


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
            layer(x)
            .unflatten(-1, (self.heads, -1))
            .transpose(1, 2)  # (B, H, W or S, K)
            for layer, x in ((self.q, query), (self.k, states), (self.v, states))
        )
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        scores = scores if padding is None else scores + padding
        return self.o((self.dropout(scores.softmax(-1)) @ v).transpose(1, 2).flatten(2))

    def one_query(
        self, query: Tensor, states: Tensor, padding: Tensor | None
    ) -> Tensor:
        """(B, D) of `query` (B, D): the query goes through the projection of keys, and the states as each head weighs
        them through that of values: q (H Wk)' = (q Wk') H' and p (H Wv) = (p H) Wv."""
        k, v = (
            layer.weight.unflatten(0, (self.heads, -1)) for layer in (self.k, self.v)
        )  # (H, K, D)
        keyed = torch.einsum(
            "bhk,hkd->bhd", self.q(query).unflatten(1, (self.heads, -1)), k
        )
        scores = keyed @ states.transpose(1, 2) * k.shape[1] ** -0.5  # (B, H, S)
        scores = scores if padding is None else scores + padding[:, 0]
        mixed = self.dropout(scores.softmax(-1)) @ states  # (B, H, D)
        return self.o(torch.einsum("bhd,hkd->bhk", mixed, v).flatten(1))


class Readout(nn.Module):
    """Equation 1. With `given` > 0 the query also reads a vector of that width, the prefix of a digit."""

    def __init__(
        self,
        dim: int,
        width: int,
        heads: int,
        ffn_width: int,
        dropout: float,
        ffn: bool = True,
        given: int = 0,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.query = nn.Linear(dim + given, dim)
        self.attention = CrossAttention(dim, width, heads, attention_dropout)
        self.norm1 = nn.LayerNorm(dim)
        self.ffn: nn.Sequential | None = None
        if ffn:
            self.ffn = nn.Sequential(
                nn.Linear(dim, ffn_width),
                nn.ReLU(),
                nn.Dropout(dropout),
                nn.Linear(ffn_width, dim),
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


class SidMlpDecoder(Decoder):
    """Readout and heads over the states and the embeddings of a backbone, whose they stay."""

    def __init__(
        self, config: SidMlpConfig, backbone: Backbone, width: int | None = None
    ) -> None:
        """`width` of z and of the prefix's embeddings; by default D."""
        super().__init__()
        self.config, self.tokens, self.first_level = config, backbone.tokens, config.m
        self.hidden_width = config.head_width
        self._embedding = (backbone.embedding,)  # the backbone's, no submodule here
        dim = backbone.embedding.embedding_dim if width is None else width
        if config.embeddings == "random":
            self.embeddings = nn.Embedding(self.tokens.vocabulary, dim)
        self.readout = self._make_readout(dim)
        self.heads = self._make_heads(dim)

    def _make_readout(self, dim: int) -> nn.Module:
        """What `config.readout` names; with per_digit one for each level, none where the teacher generates it."""
        config = self.config

        def make(level: int = 0) -> Readout:
            return Readout(
                dim,
                config.attention_width,
                config.attention_heads,
                config.ffn_width,
                config.dropout,
                ffn=config.context_ffn,
                given=level * dim,
                attention_dropout=config.attention_dropout,
            )

        if config.readout == "mean":
            return MeanReadout(dim)
        if config.readout == "attention":
            return make()
        return self._of_levels(make)

    def _make_heads(self, dim: int) -> nn.ModuleList:
        """f_t of each digit (with `shared_head` the same one), none where the teacher generates the digit."""
        config, sizes = self.config, self.tokens.sizes

        def make(level: int) -> nn.Sequential:
            inputs = {
                "concat": (level + 1) * dim,
                "none": dim,
                "sum": 2 * dim,
                "cascade": dim + config.head_width if level else dim,
            }[config.prefix]
            outputs = max(sizes) if config.shared_head else sizes[level]
            return nn.Sequential(
                nn.Linear(inputs, config.head_width),
                nn.LayerNorm(config.head_width),
                nn.GELU(),
                nn.Dropout(config.dropout),
                nn.Linear(
                    config.head_width,
                    self.tokens.vocabulary
                    if config.logits == "vocabulary"
                    else outputs,
                ),
            )

        return (
            nn.ModuleList([make(0)] * len(sizes))
            if config.shared_head
            else self._of_levels(make)
        )

    def _of_levels(self, make: Callable[[int], nn.Module]) -> nn.ModuleList:
        levels = range(self.tokens.levels)
        return nn.ModuleList(
            nn.Identity() if level < self.first_level else make(level)
            for level in levels
        )

    def span(self, level: int) -> tuple[int, int]:
        return (
            (0, self.tokens.vocabulary)
            if self.config.logits == "vocabulary"
            else super().span(level)
        )

    def embedding(self) -> Tensor:
        """(V, D): e of each token."""
        return (
            self.embeddings.weight
            if self.config.embeddings == "random"
            else self._embedding[0].weight
        )

    def context(self, history: History) -> Tensor | None:
        """z (B, D) of equation 1; None where each digit has its own."""
        return None if self.config.readout == "per_digit" else self.readout(history)

    def head_hidden(
        self,
        level: int,
        history: History,
        z: Tensor | None,
        given: Tensor,
        previous: Tensor | None,
    ) -> Tensor:
        """(B, W, N): the hidden layer of the level's head after the embedded prefix `given` (B, W, level, D); `z` is
        the `context`, `previous` (B, W, N) what this gave of the level before."""
        if z is None:
            z = cast(nn.ModuleList, self.readout)[level](
                history, given.flatten(2)
            )  # (B, W, D)
        else:
            z = z.unsqueeze(1).expand(-1, given.shape[1], -1)
        if self.config.prefix == "concat":
            z = torch.cat([z, given.flatten(2)], -1)
        elif self.config.prefix == "sum":
            z = torch.cat([z, given.sum(2)], -1)
        elif self.config.prefix == "cascade" and previous is not None:
            z = torch.cat([previous, given[:, :, -1]], -1)
        return cast(nn.Sequential, self.heads[level])[:-1](z)

    def output(self, level: int, hidden: Tensor) -> Tensor:
        """(..., O_l): the level's logits of its hidden layer (..., N)."""
        return cast(nn.Sequential, self.heads[level])[-1](hidden)[
            ..., : self.span(level)[1]
        ]

    def hidden(self, history: History, codes: Tensor) -> Tensor:
        """(B, L - first_level, N): hidden layers of the heads."""
        tokens = (codes + self.tokens.offset)[:, None, :-1]
        embedded = functional.embedding(tokens, self.embedding())  # (B, 1, L - 1, D)
        z, previous, found = self.context(history), None, []
        for level in range(self.first_level, self.tokens.levels):
            previous = self.head_hidden(
                level, history, z, embedded[:, :, :level], previous
            )
            found.append(previous[:, 0])
        return torch.stack(found, 1)

    def logits(self, hidden: Tensor) -> Sequence[Tensor]:
        levels = range(self.first_level, self.tokens.levels)
        return [
            self.output(level, x)
            for level, x in zip(levels, hidden.unbind(1), strict=True)
        ]

    def scorer(self, history: History) -> HeadScorer:
        return HeadScorer(self, history)


class HeadScorer:
    """A `Scorer` (see `parts.py`): log-probabilities of each level's codebook. Of levels before `first_level` it has
    none to give."""

    def __init__(self, decoder: SidMlpDecoder, history: History) -> None:
        self.decoder, self.history, self.z = decoder, history, decoder.context(history)
        self.prefix = history.lengths.new_zeros(
            (len(history.lengths), 1, 0)
        )  # (B, W, level) tokens
        self.hidden: Tensor | None = (
            None  # (B, W, N) of the level before, where the prefix is cascaded
        )

    def start(self) -> Tensor:
        return self._score(0)[:, 0]

    def step(self, parents: Tensor, tokens: Tensor) -> Tensor:
        level = self.prefix.shape[2] + 1
        before = self.prefix.gather(1, parents.unsqueeze(-1).expand(-1, -1, level - 1))
        newest = tokens + self.decoder.tokens.first[level - 1]
        self.prefix = torch.cat([before, newest.unsqueeze(-1)], -1)
        if self.hidden is not None:
            self.hidden = self.hidden.gather(
                1, parents.unsqueeze(-1).expand(-1, -1, self.hidden.shape[2])
            )
        return self._score(level)

    def _score(self, level: int) -> Tensor:
        decoder, (_, width, _) = self.decoder, self.prefix.shape
        if level < decoder.first_level:
            return self.history.states.new_zeros((len(self.prefix), width, 0))
        given = functional.embedding(self.prefix, decoder.embedding())
        hidden = decoder.head_hidden(level, self.history, self.z, given, self.hidden)
        if decoder.config.prefix == "cascade":
            self.hidden = hidden
        logits = decoder.output(level, hidden)
        first, size = decoder.tokens.first[level], decoder.tokens.sizes[level]
        return (
            logits.narrow(-1, first - decoder.span(level)[0], size)
            .float()
            .log_softmax(-1)
        )
