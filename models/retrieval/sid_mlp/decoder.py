"""SID-MLP's decoder (Guo et al., 2026): one readout per user, an MLP per level.

z = readout(states) is computed once per user (equation 1):

    q = mean(H) Wq;  x = LN(q + MHA(q, H, H));  z = LN(x + FFN(x))

The logits of level t are f_t([z; e(c_1); ...; e(c_{t-1})]) (equation 2), so a beam
needs no attention. The paper's ablations are options; each has its YAML under
`jobs/configs/retrieval/ablations/sid_mlp/`.

Shapes: `B` requests, `W` prefixes or queries of a user, `S` source positions, `D`
width, `H` heads, `K` width of a head, `N` hidden width of a level's head, `L` levels
(the paper's digits), `C_l` codes and `O_l` logits of level l, `V` tokens of the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, cast

import torch
from pydantic import NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.nn import functional

from core.options import STRICT, Dropout
from models.retrieval.distillation.student import StudentConfig
from models.retrieval.retriever import Backbone, Decoder, History


@dataclass(config=STRICT)
class SidMlpConfig(StudentConfig):
    """Options of SID-MLP; the defaults are the paper's student and its public code."""

    m: NonNegativeInt = 0
    """Number of first levels that the teacher's decoder generates; the student decodes
    the others (Table 1; Appendix E.1)."""
    attention_heads: PositiveInt = 4
    """Heads of the readout (public code; swept over 4 and 8, Appendix C.2)."""
    attention_width: PositiveInt = 384
    """Inner width of the readout (public code; swept from 128 to 512, Appendix C.2)."""
    ffn_width: PositiveInt = 1024
    """Inner width of the readout's feed-forward (public code)."""
    head_width: PositiveInt = 512
    """Hidden width of each level's head (public code; swept from 128 to 2048, Appendix
    C.2)."""
    dropout: Dropout = 0.2
    """Dropout of heads and feed-forward (public code; 0.1 and 0.2 in Appendix C.2)."""
    attention_dropout: Dropout = 0.0
    """Dropout of the readout's attention weights; the paper names none."""
    prefix: Literal["concat", "none", "sum", "cascade"] = "concat"
    """Input of a head from the prefix (Table 5, G1): `concat`, all embeddings in order;
    `none`, no embedding; `sum`, the sum of the embeddings; `cascade`, the newest
    embedding, with the hidden layer of the previous head in place of z."""
    shared_head: bool = False
    """Whether all levels share one head, which needs prefix sum (Table 5, G1)."""
    readout: Literal["attention", "mean", "per_digit"] = "attention"
    """Computation of z (Table 5, G2): `attention`, one per user; `mean`, a linear layer
    on the mean state; `per_digit`, one attention per level with the prefix in its
    query."""
    context_ffn: bool = True
    """Whether the readout has its feed-forward (Table 5, G2)."""
    logits: Literal["codebook", "vocabulary"] = "codebook"
    """Tokens that heads predict, and that the teacher's logits are restricted to (Table
    5, G3)."""
    embeddings: Literal["teacher", "random"] = "teacher"
    """Embeddings of the prefix: the teacher's, frozen, or random ones, trained (Table
    5, G3)."""

    def __post_init__(self) -> None:
        if self.attention_width % self.attention_heads:
            raise ValueError(
                f"attention_width {self.attention_width} does not divide by "
                f"attention_heads {self.attention_heads}"
            )
        if self.shared_head and self.prefix != "sum":
            raise ValueError("shared_head needs prefix sum")
        if self.prefix == "cascade" and self.m:
            raise ValueError("prefix cascade starts at the first level, not at m")


def query_state(history: History) -> Tensor:
    """Return the history's query (B, D), by default the mean of its real states."""
    if history.query is not None:
        return history.query
    states, padding = history.states, history.padding
    if padding is None:
        return states.mean(1)
    is_real = (padding[:, 0, 0] == 0).unsqueeze(-1).to(states.dtype)  # (B, S, 1)
    return (states * is_real).sum(1) / is_real.sum(1)


class CrossAttention(nn.Module):
    """Multi-head attention without biases, with an inner width other than D."""

    def __init__(self, dim: int, width: int, heads: int, dropout: float = 0.0) -> None:
        """Build the layer; `dropout` is applied to the attention weights."""
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.q = nn.Linear(dim, width, bias=False)
        self.k = nn.Linear(dim, width, bias=False)
        self.v = nn.Linear(dim, width, bias=False)
        self.o = nn.Linear(width, dim, bias=False)

    def forward(self, query: Tensor, states: Tensor, padding: Tensor | None) -> Tensor:
        """Return the output (B, W, D) of queries that attend to states.

        With states X, q (X Wk)' = (q Wk') X' and p (X Wv) = (p X) Wv: the projections
        of keys and values are applied to one vector per query and head instead of all
        states. Scores are scaled by 1 / sqrt(K).

        Args:
            query: (B, W, D) queries.
            states: (B, S, D) states.
            padding: (B, 1, 1, S) padding mask to add to scores, or None.
        """
        k = self.k.weight.unflatten(0, (self.heads, -1))  # (H, K, D)
        v = self.v.weight.unflatten(0, (self.heads, -1))
        q = self.q(query).unflatten(-1, (self.heads, -1))  # (B, W, H, K)
        keyed = torch.einsum("bwhk,hkd->bwhd", q, k).flatten(1, 2)  # (B, W * H, D)
        scores = keyed @ states.transpose(1, 2) * k.shape[1] ** -0.5  # (B, W * H, S)
        if padding is not None:
            scores = scores + padding[:, 0]
        mixed = self.dropout(scores.softmax(-1)) @ states  # (B, W * H, D)
        mixed = mixed.unflatten(1, (-1, self.heads))
        return self.o(torch.einsum("bwhd,hkd->bwhk", mixed, v).flatten(2))


class Readout(nn.Module):
    """The readout of equation 1, or its query alone without attention (Table 5)."""

    def __init__(self, config: SidMlpConfig, dim: int, prefix_width: int = 0) -> None:
        """Build the readout.

        Args:
            config: Options of SID-MLP.
            dim: Width D of the states.
            prefix_width: Width G of a prefix that the query reads too; 0 for none.
        """
        super().__init__()
        self.query = nn.Linear(dim + prefix_width, dim)
        self.has_attention = config.readout != "mean"
        if not self.has_attention:
            return
        self.attention = CrossAttention(
            dim,
            config.attention_width,
            config.attention_heads,
            config.attention_dropout,
        )
        self.norm1 = nn.LayerNorm(dim)
        self.ffn: nn.Sequential | None = None
        if config.context_ffn:
            self.ffn = nn.Sequential(
                nn.Linear(dim, config.ffn_width),
                nn.ReLU(),
                nn.Dropout(config.dropout),
                nn.Linear(config.ffn_width, dim),
            )
            self.norm2 = nn.LayerNorm(dim)

    def forward(self, history: History, prefix: Tensor | None = None) -> Tensor:
        """Return z (B, D), or one z per prefix (B, W, D) for `prefix` (B, W, G)."""
        query_input = query_state(history).unsqueeze(1)  # (B, 1, D)
        if prefix is not None:
            expanded = query_input.expand(-1, prefix.shape[1], -1)
            query_input = torch.cat([expanded, prefix], -1)
        z = self.query(query_input)
        if self.has_attention:
            mixed = self.attention(z, history.states, history.padding)
            z = self.norm1(z + mixed)
            if self.ffn is not None:
                z = self.norm2(z + self.ffn(z))
        return z[:, 0] if prefix is None else z


class SidMlpDecoder(Decoder):
    """SID-MLP's readout and heads over the states and embeddings of a backbone."""

    def __init__(
        self, config: SidMlpConfig, backbone: Backbone, width: int | None = None
    ) -> None:
        """Build the decoder.

        Args:
            config: Options of SID-MLP.
            backbone: Backbone whose states and embeddings are read.
            width: Width of z; None for the backbone's D. With another width, a subclass
                projects the teacher's embeddings to it.
        """
        super().__init__(backbone, config.m)
        self.config = config
        dim = width or self.embedding.embedding_dim
        if config.embeddings == "random":
            self.embeddings = nn.Embedding(self.tokens.vocabulary, dim)
        self.readout = self._make_readout(dim)
        if config.shared_head:
            self.heads = nn.ModuleList([self._make_head(0, dim)] * self.tokens.levels)
        else:
            self.heads = self._make_per_level(lambda level: self._make_head(level, dim))

    def _make_readout(self, dim: int) -> nn.Module:
        """Return the readout, or a list of one readout per level for `per_digit`."""
        config = self.config
        if config.readout != "per_digit":
            return Readout(config, dim)
        return self._make_per_level(
            lambda level: Readout(config, dim, prefix_width=level * dim)
        )

    def _make_head(self, level: int, dim: int) -> nn.Sequential:
        """Return the head of a level for z and embeddings of width `dim`."""
        config, sizes = self.config, self.tokens.sizes
        inputs = {
            "concat": (level + 1) * dim,
            "none": dim,
            "sum": 2 * dim,
            "cascade": dim + config.head_width if level else dim,
        }[config.prefix]
        if config.logits == "vocabulary":
            outputs = self.tokens.vocabulary
        else:
            outputs = max(sizes) if config.shared_head else sizes[level]
        return nn.Sequential(
            nn.Linear(inputs, config.head_width),
            nn.LayerNorm(config.head_width),
            nn.GELU(),
            nn.Dropout(config.dropout),
            nn.Linear(config.head_width, outputs),
        )

    def _make_per_level(self, make: Callable[[int], nn.Module]) -> nn.ModuleList:
        """Return one module per level, an identity for levels of the teacher."""
        return nn.ModuleList(
            nn.Identity() if level < self.first_level else make(level)
            for level in range(self.tokens.levels)
        )

    def span(self, level: int) -> tuple[int, int]:
        """Return the first token and the number of tokens of a level's logits.

        They cover the level's codebook, or the whole vocabulary.
        """
        if self.config.logits == "vocabulary":
            return 0, self.tokens.vocabulary
        return super().span(level)

    def table(self) -> Tensor:
        """Return the embeddings (V, D) of the tokens."""
        if self.config.embeddings == "random":
            return self.embeddings.weight
        return self.embedding.weight

    def context(self, history: History) -> Tensor | None:
        """Return z (B, D) of equation 1, or None if each level computes its own z."""
        return None if self.config.readout == "per_digit" else self.readout(history)

    def head_hidden(
        self,
        level: int,
        history: History,
        z: Tensor | None,
        prefix: Tensor,
        previous: Tensor | None,
    ) -> Tensor:
        """Return the hidden layer (B, W, N) of a level's head.

        Args:
            level: Level of the head.
            history: Histories of B requests.
            z: Result of `context`.
            prefix: (B, W, level, D) embedded codes before the level.
            previous: (B, W, N) hidden layer of the level before, or None.
        """
        if z is None:
            readouts = cast(nn.ModuleList, self.readout)
            x = readouts[level](history, prefix.flatten(2))  # (B, W, D)
        else:
            x = z.unsqueeze(1).expand(-1, prefix.shape[1], -1)
        if self.config.prefix == "concat":
            x = torch.cat([x, prefix.flatten(2)], -1)
        elif self.config.prefix == "sum":
            x = torch.cat([x, prefix.sum(2)], -1)
        elif self.config.prefix == "cascade" and previous is not None:
            x = torch.cat([previous, prefix[:, :, -1]], -1)
        return cast(nn.Sequential, self.heads[level])[:-1](x)

    def output(self, level: int, hidden: Tensor) -> Tensor:
        """Return the logits (..., O_l) of a level from its hidden layer (..., N)."""
        logits = cast(nn.Sequential, self.heads[level])[-1](hidden)
        return logits[..., : self.span(level)[1]]

    def hidden(self, history: History, codes: Tensor) -> Tensor:
        """Return the heads' hidden layers (B, L - first_level, N) before each code."""
        tokens = (codes + self.tokens.offset)[:, None, :-1]
        embedded = functional.embedding(tokens, self.table())  # (B, 1, L - 1, D)
        z = self.context(history)
        hidden = None  # (B, 1, N) of the level before
        layers = []
        for level in range(self.first_level, self.tokens.levels):
            prefix = embedded[:, :, :level]
            hidden = self.head_hidden(level, history, z, prefix, hidden)
            layers.append(hidden[:, 0])
        return torch.stack(layers, 1)

    def logits(self, hidden: Tensor) -> Sequence[Tensor]:
        """Return the logits (B, O_l) of each head from its hidden layer."""
        levels = range(self.first_level, self.tokens.levels)
        pairs = zip(levels, hidden.unbind(1), strict=True)
        return [self.output(level, x) for level, x in pairs]

    def scorer(self, history: History) -> HeadScorer:
        """Return a scorer over each level's codebook."""
        return HeadScorer(self, history)


class HeadScorer:
    """A `Scorer` over each level's codebook, from `first_level` on."""

    def __init__(self, decoder: SidMlpDecoder, history: History) -> None:
        self.decoder, self.history = decoder, history
        self.z = decoder.context(history)
        rows = len(history.lengths)
        self.prefix = history.lengths.new_zeros((rows, 1, 0))  # (B, W, level) tokens
        # (B, W, N): hidden layer of the level before, for prefix cascade
        self.hidden: Tensor | None = None

    def start(self) -> Tensor:
        """Return the log-probabilities (B, C_0) of the first code."""
        return self._score(0)[:, 0]

    def step(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """Return the log-probabilities (B, W, C_l) of each beam's next code."""
        level = self.prefix.shape[2] + 1
        parent = parents.unsqueeze(-1)  # (B, W, 1)
        parent_prefix = self.prefix.gather(1, parent.expand(-1, -1, level - 1))
        newest = tokens + self.decoder.tokens.first[level - 1]
        self.prefix = torch.cat([parent_prefix, newest.unsqueeze(-1)], -1)
        if self.hidden is not None:
            index = parent.expand(-1, -1, self.hidden.shape[2])
            self.hidden = self.hidden.gather(1, index)
        return self._score(level)

    def _score(self, level: int) -> Tensor:
        """Return the log-probabilities (B, W, C_level) after the prefixes."""
        decoder = self.decoder
        if level < decoder.first_level:
            return self.history.states.new_zeros((*self.prefix.shape[:2], 0))
        prefix = functional.embedding(self.prefix, decoder.table())
        hidden = decoder.head_hidden(level, self.history, self.z, prefix, self.hidden)
        if decoder.config.prefix == "cascade":
            self.hidden = hidden
        logits = decoder.output(level, hidden)
        first, size = decoder.tokens.first[level], decoder.tokens.sizes[level]
        codebook = logits.narrow(-1, first - decoder.span(level)[0], size)
        return codebook.float().log_softmax(-1)
