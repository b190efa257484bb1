"""Interfaces of the parts of a generative retriever: tokens, backbone, decoder, scorer.

    history = backbone.encode(batch)                 # states of the user's history
    logits = decoder.teacher_forced(history, codes)  # training: all codes at once
    scorer = decoder.scorer(history)                 # search: code by code, for beams
    items, scores = beam_search(scorer, trie, k, beam)

Shapes: `B` requests, `S` positions of the longest history, `D` width, `L` levels (codes
of an item), `W` beams, `C_l` codes of level l, `O_l` codes or tokens that a decoder
predicts at level l, `V` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.retrieval.data import PAD, Catalogue, HistoryBatch
from models.storage.tables import UserError


def real_positions(lengths: Tensor, longest: int) -> Tensor:
    """Return (B, longest): True at the first `lengths` (B,) positions of each row, False at padding."""
    return torch.arange(longest, device=lengths.device) < lengths.unsqueeze(1)


def padding_mask(lengths: Tensor, longest: int, dtype: torch.dtype) -> Tensor | None:
    """Return (B, 1, 1, longest) to add to attention scores: 0 at the first `lengths` (B,) positions, then -inf.

    Returns None on a CPU if nothing is padded.
    """
    outside = ~real_positions(lengths, longest)
    if (
        outside.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not bool(outside.any())
    ):
        return None  # a GPU would have to synchronize
    mask = torch.zeros(outside.shape, dtype=dtype, device=outside.device).masked_fill(
        outside, -torch.inf
    )
    return mask[:, None, None]


Memory = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, each (B, heads, S, width of a head)."""


@dataclass(frozen=True)
class History:
    """States of a history's positions, the output of a backbone."""

    states: Tensor
    """(B, S, D); states of padding are finite and meaningless."""
    lengths: Tensor
    """(B,) real positions, the first ones of each row."""
    query: Tensor | None = None
    """(B, D) query of readouts; None for the mean of the states."""
    memory: Memory | None = None
    """Keys and values of the prompt of a causal language model; None for other
    backbones."""

    def rows(self, begin: int, end: int) -> History:
        """Return the histories of the requests from `begin` to before `end`."""
        query = None if self.query is None else self.query[begin:end]
        memory = (
            None
            if self.memory is None
            else [(k[begin:end], v[begin:end]) for k, v in self.memory]
        )
        return History(self.states[begin:end], self.lengths[begin:end], query, memory)

    @property
    def padding(self) -> Tensor | None:
        """The padding mask of the states."""
        return padding_mask(self.lengths, self.states.shape[1], self.states.dtype)


class SidTokens(nn.Module):
    """Semantic IDs as tokens of one vocabulary.

    Token 0 is padding and start; then come the codes level after level, the users, and
    the end. Code c of level l is the token `first[l] + c`.
    """

    items: Tensor
    """(N, L) tokens of each item."""
    offset: Tensor
    """(L,) `first` as a tensor."""

    def __init__(self, catalogue: Catalogue, n_user_tokens: int) -> None:
        super().__init__()
        if catalogue.sids is None or catalogue.trie is None:
            raise UserError(
                "the model needs semantic IDs; give --sids with what jobs.tokenize made"
            )
        self.sizes = list(catalogue.codebook_sizes)
        self.first = [1 + sum(self.sizes[:level]) for level in range(len(self.sizes))]
        self.first_user, self.n_user_tokens = 1 + sum(self.sizes), n_user_tokens
        self.end = self.first_user + n_user_tokens
        self.vocabulary = self.end + 1
        offset = torch.tensor(self.first)
        self.register_buffer("offset", offset, persistent=False)
        self.register_buffer("items", catalogue.sids + offset, persistent=False)

    @property
    def levels(self) -> int:
        return len(self.sizes)

    def lengths(self, batch: HistoryBatch) -> Tensor:
        """Return the number of tokens (B,) of each history."""
        return 2 + self.levels * batch.history_length

    def history(self, batch: HistoryBatch) -> Tensor:
        """Return (B, S) `[user, L codes per item, end]` of each request, padded with 0; S = 2 + L * T for T items."""
        history = batch.history
        codes = torch.where(
            (history == PAD).unsqueeze(-1), 0, self.items[history.clamp(min=0)]
        )  # (B, T, L)
        user = self.first_user + batch.user % self.n_user_tokens
        tokens = torch.cat(
            [
                user.unsqueeze(1),
                codes.flatten(1),
                history.new_zeros((history.shape[0], 1)),
            ],
            1,
        )
        return tokens.scatter(1, self.lengths(batch).unsqueeze(1) - 1, self.end)

    def codes(self, items: Tensor) -> Tensor:
        """Return the codes (B, L) of `items` (B,)."""
        return self.items[items] - self.offset

    def shift_right(self, codes: Tensor) -> Tensor:
        """Return the inputs (B, L) that predict `codes` (B, L): the start token, then all codes but the last."""
        return functional.pad((codes + self.offset)[:, :-1], (1, 0))


class Backbone(nn.Module):
    """An encoder of histories. A subclass has `tokens`, `embedding` and `encode`."""

    tokens: SidTokens
    """The vocabulary."""
    embedding: nn.Embedding
    """(V, D) token embeddings; D is also the width of the states."""
    max_history: int
    """Latest items read."""
    gives_query = False
    """Whether its histories have a query state."""

    def encode(self, batch: HistoryBatch) -> History:
        """Return the states of the requests' histories, with dropout in training mode."""
        raise NotImplementedError

    def infer(self, batch: HistoryBatch) -> History:
        """Return the states of `encode`, up to rounding, in the fastest way for search."""
        return self.encode(batch)

    def packed_encoder(self) -> Any:
        """Return an encoder for histories without padding (`models/cpu/t5_packed.py`), or None."""
        return None


class Scorer(Protocol):
    """Next-code log-probabilities of the beams of a batch of users; it keeps the beams' states."""

    def start(self) -> Tensor:
        """Return (B, C_0) log-probabilities of the first code."""
        ...

    def step(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """Return (B, W, C_l) log-probabilities of the next code of each beam.

        Each beam extends the beam `parents` (B, W) of the last step by the code
        `tokens` (B, W).
        """
        ...


class Decoder(nn.Module):
    """A model of the next code, given a history and the codes before. A subclass has `hidden`, `logits` and `scorer`."""

    tokens: SidTokens
    """The vocabulary."""
    first_level = 0
    """First level that it decodes; another decoder has the levels before."""
    hidden_width: int
    """Width N of `hidden`."""
    beam_bytes = 0
    """Bytes of a beam's state in search, if large enough that batches are searched in
    pieces."""

    def span(self, level: int) -> tuple[int, int]:
        """Return (first token, number of tokens O_l) of the level's logits: its codebook."""
        return self.tokens.first[level], self.tokens.sizes[level]

    def targets(self, codes: Tensor) -> list[Tensor]:
        """Return the index (B,) of `codes` (B, L) in the logits of each level from `first_level` on."""
        levels = range(self.first_level, self.tokens.levels)
        return [
            codes[:, level] + (self.tokens.first[level] - self.span(level)[0])
            for level in levels
        ]

    def hidden(self, history: History, codes: Tensor) -> Tensor:
        """Return (B, L - first_level, N) hidden states of `codes` (B, L), each given the codes before it."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Sequence[Tensor]:
        """Return the logits (B, O_l) of each level from `first_level` on."""
        raise NotImplementedError

    def teacher_forced(self, history: History, codes: Tensor) -> Sequence[Tensor]:
        """Return the logits (B, O_l) of each level from `first_level` on, each given the `codes` (B, L) before it."""
        return self.logits(self.hidden(history, codes))

    def scorer(self, history: History) -> Scorer:
        """Return a scorer for search, without gradients."""
        raise NotImplementedError
