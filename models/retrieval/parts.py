"""The parts that a retriever of semantic IDs is made of, and what passes between them.

    history = backbone.encode(batch)                    what was read of the user
    logits = decoder.teacher_forced(history, codes)     training: all codes of the target at once
    scorer = decoder.scorer(history)                    search: code by code, for beams
    items, scores = beam_search(scorer, trie, k, beam)

Shapes: `B` requests, `S` positions of the longest history, `D` width, `L` levels (codes of an item), `W` beams,
`C_l` codes of level l, `O_l` codes or tokens that a decoder predicts at level l, `V` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.retrieval.data import PAD, Catalogue
from models.storage.tables import UserError


def real_positions(lengths: Tensor, longest: int) -> Tensor:
    """(B, longest): True at the first `lengths` (B,) positions of each row, False at the padding after them."""
    return torch.arange(longest, device=lengths.device) < lengths.unsqueeze(1)


def padding_mask(lengths: Tensor, longest: int, dtype: torch.dtype) -> Tensor | None:
    """(B, 1, 1, longest), to be added to the scores of attention: 0 at the first `lengths` (B,) positions and -inf
    after them; None, on a CPU, where nothing is padded."""
    outside = ~real_positions(lengths, longest)
    if (
        outside.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not bool(outside.any())
    ):
        return None  # a GPU would have to wait for the answer
    mask = torch.zeros(outside.shape, dtype=dtype, device=outside.device).masked_fill(
        outside, -torch.inf
    )
    return mask[:, None, None]


Memory = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, each (B, heads, S, width of a head)."""


@dataclass(frozen=True)
class History:
    """What a backbone gives: states of the history's positions."""

    states: Tensor
    """(B, S, D); those of padding are finite and mean nothing."""
    lengths: Tensor
    """(B,) positions that are no padding, the first ones of each row."""
    query: Tensor | None = None
    """(B, D) the state that readouts ask with, where it comes from another layer; None: the mean of the states."""
    memory: Memory | None = None
    """What a causal language model keeps of the prompt, from which its decoder goes on; None of other backbones."""

    def rows(self, begin: int, end: int) -> History:
        """Those of the requests from `begin` to before `end`."""
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
    """Semantic IDs as tokens of one vocabulary: 0 is padding and start, then the codes level after level, then users,
    then the end. Code c of level l is the token `first[l] + c`."""

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

    def lengths(self, batch: dict[str, Tensor]) -> Tensor:
        """(B,) tokens of each history."""
        return 2 + self.levels * batch["history_length"]

    def history(self, batch: dict[str, Tensor]) -> Tensor:
        """(B, S) `[user, L codes per item, end]` of each request, 0 after it; S = 2 + L * T for histories (B, T)."""
        history = batch["history"]
        codes = torch.where(
            (history == PAD).unsqueeze(-1), 0, self.items[history.clamp(min=0)]
        )  # (B, T, L)
        user = self.first_user + batch["user"] % self.n_user_tokens
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
        """(B, L) codes of `items` (B,)."""
        return self.items[items] - self.offset

    def started(self, codes: Tensor) -> Tensor:
        """(B, L) what decoders are given to predict `codes` (B, L): the start token, then all codes but the last."""
        return functional.pad((codes + self.offset)[:, :-1], (1, 0))


class Backbone(nn.Module):
    """Reads histories. A subclass has `tokens`, `embedding` and `encode`."""

    tokens: SidTokens
    """The vocabulary."""
    embedding: nn.Embedding
    """(V, D) of the tokens; D is the width of the states too."""
    max_history: int
    """Latest items read."""
    gives_query = False
    """Whether its histories have a query state."""

    def encode(self, batch: dict[str, Tensor]) -> History:
        """States of the requests' histories, with gradients and dropout where the module trains."""
        raise NotImplementedError

    def infer(self, batch: dict[str, Tensor]) -> History:
        """As `encode`, for search: up to rounding the same states, in the fastest way there is."""
        return self.encode(batch)

    def packed(self) -> Any:
        """The encoder for histories that stand end to end (`models/cpu/t5_packed.py`); None where there is none."""
        return None


class Scorer(Protocol):
    """Next-code log-probabilities of a batch of users; it holds what it needs to know about them and their beams."""

    def start(self) -> Tensor:
        """(B, C_0): log-probabilities of the first code."""
        ...

    def step(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """(B, W, C_l): of the next code of each beam, which extends beam `parents` (B, W) of the last
        step by the code `tokens` (B, W)."""
        ...


class Decoder(nn.Module):
    """Scores codes given a history and the codes before. A subclass has `hidden`, `logits` and `scorer`."""

    tokens: SidTokens
    """The vocabulary."""
    first_level = 0
    """Levels before this one are another decoder's."""
    hidden_width: int
    """N of `hidden`."""
    beam_bytes = 0
    """Bytes that a beam carries in search, where they are so many that a batch is searched in pieces."""

    def span(self, level: int) -> tuple[int, int]:
        """(first token, number of tokens O_l) that logits of the level are of: its codebook."""
        return self.tokens.first[level], self.tokens.sizes[level]

    def targets(self, codes: Tensor) -> list[Tensor]:
        """(B,) of each level from `first_level` on: where in the level's logits those of `codes` (B, L) are."""
        levels = range(self.first_level, self.tokens.levels)
        return [
            codes[:, level] + (self.tokens.first[level] - self.span(level)[0])
            for level in levels
        ]

    def hidden(self, history: History, codes: Tensor) -> Tensor:
        """(B, L - first_level, N): what the logits of each code of `codes` (B, L) are made of, given those before."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Sequence[Tensor]:
        """(B, O_l) of each level from `first_level` on."""
        raise NotImplementedError

    def teacher_forced(self, history: History, codes: Tensor) -> Sequence[Tensor]:
        """(B, O_l) of each level from `first_level` on: logits of `codes` (B, L), each given those before it."""
        return self.logits(self.hidden(history, codes))

    def scorer(self, history: History) -> Scorer:
        """For search, without gradients."""
        raise NotImplementedError
