"""Generative retrieval: tokens, backbone, decoder, and beam search of semantic IDs.

    history = backbone.encode(batch)                 # states of the user's history
    logits = decoder.teacher_forced(history, codes)  # training: all codes at once
    scorer = decoder.scorer(history)                 # search: code by code, for beams
    items, scores = beam_search(scorer, trie, k, beam)

Shapes: `B` requests, `S` positions of the longest history, `D` width, `L` levels (codes
of an item), `W` beams, `C_l` codes of level l, `O_l` codes or tokens that a decoder
predicts at level l, `V` tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from core.errors import UserError
from models.dataset.batch import PAD
from models.retrieval.data import Catalogue, HistoryBatch, RequestBatch
from models.retrieval.model import RetrievalModel
from models.retrieval.options import BeamOptions, Scores
from models.retrieval.recommend import recommender
from models.retrieval.search import Scorer, Trie, beam_search
from models.training.distributed import global_mean

MAX_BEAM_BYTES = 1 << 30
"""Most bytes of the beams' states in one search. Gathering the states takes about twice
as much in addition."""


def real_positions(lengths: Tensor, longest: int) -> Tensor:
    """Return a mask (B, longest) that is true at the first `lengths` (B,) positions."""
    return torch.arange(longest, device=lengths.device) < lengths.unsqueeze(1)


def padding_mask(lengths: Tensor, longest: int, dtype: torch.dtype) -> Tensor | None:
    """Return a mask to add to attention scores.

    Args:
        lengths: (B,) number of real positions, the first ones of each row.
        longest: Number of positions.
        dtype: Type of the attention scores.

    Returns:
        (B, 1, 1, longest), 0 at real positions and -inf at padding; on a CPU None if
        there is no padding.
    """
    is_padding = ~real_positions(lengths, longest)
    # a GPU would have to synchronise to know whether there is padding
    on_cpu = is_padding.device.type == "cpu"
    if on_cpu and not bool(is_padding.any()):
        return None
    mask = torch.zeros(is_padding.shape, dtype=dtype, device=is_padding.device)
    return mask.masked_fill(is_padding, -torch.inf)[:, None, None]


Memory = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, each (B, heads, S, width of a head)."""


@dataclass(frozen=True)
class History:
    """The output of a backbone: states of the positions of histories."""

    states: Tensor
    """(B, S, D); states of padding are finite and meaningless."""
    lengths: Tensor
    """(B,) real positions, the first ones of each row."""
    query: Tensor | None = None
    """(B, D) query of readouts; None for the mean of the states."""
    memory: Memory | None = None
    """Keys and values of the prompt of a causal language model; None for other
    backbones."""

    def rows(self, index: slice | Tensor) -> History:
        """Return the histories of some requests."""
        query = None if self.query is None else self.query[index]
        memory = None
        if self.memory is not None:
            memory = [(k[index], v[index]) for k, v in self.memory]
        return History(self.states[index], self.lengths[index], query, memory)

    @property
    def padding(self) -> Tensor | None:
        """The padding mask of the states."""
        return padding_mask(self.lengths, self.states.shape[1], self.states.dtype)


class SidTokens(nn.Module):
    """Semantic IDs as tokens of one vocabulary.

    Token 0 is padding and start. The codes of all levels follow, then the users, then
    the end token. Code c of level l is the token `first[l] + c`.
    """

    items: Tensor
    """(N, L) tokens of each item."""
    offset: Tensor
    """(L,) `first` as a tensor."""

    def __init__(self, catalogue: Catalogue, n_user_tokens: int) -> None:
        """Assign numbers to the tokens.

        Args:
            catalogue: The items with their semantic IDs.
            n_user_tokens: Number of tokens that users are hashed to.
        """
        super().__init__()
        if catalogue.sids is None or catalogue.trie is None:
            raise UserError("the model needs semantic IDs")
        self.sizes = list(catalogue.codebook_sizes)
        self.first = [1 + sum(self.sizes[:level]) for level in range(len(self.sizes))]
        self.first_user = 1 + sum(self.sizes)
        self.n_user_tokens = n_user_tokens
        self.end = self.first_user + n_user_tokens
        self.vocabulary = self.end + 1
        offset = torch.tensor(self.first)
        self.register_buffer("offset", offset, persistent=False)
        self.register_buffer("items", catalogue.sids + offset, persistent=False)

    @property
    def levels(self) -> int:
        """Number L of codes of an item."""
        return len(self.sizes)

    def lengths(self, batch: HistoryBatch) -> Tensor:
        """Return the number of tokens (B,) of each history."""
        return 2 + self.levels * batch.history_length

    def history(self, batch: HistoryBatch) -> Tensor:
        """Return the tokens `[user, L codes per item, end]` of each request.

        Returns:
            (B, S), padded with 0, with S = 2 + L * T for histories (B, T).
        """
        history = batch.history
        is_padding = (history == PAD).unsqueeze(-1)
        codes = self.items[history.clamp(min=0)].masked_fill(is_padding, 0)  # (B, T, L)
        user = self.first_user + batch.user % self.n_user_tokens
        end_column = history.new_zeros((history.shape[0], 1))
        tokens = torch.cat([user.unsqueeze(1), codes.flatten(1), end_column], 1)
        return tokens.scatter(1, self.lengths(batch).unsqueeze(1) - 1, self.end)

    def codes(self, items: Tensor) -> Tensor:
        """Return the codes (B, L) of `items` (B,)."""
        return self.items[items] - self.offset

    def shift_right(self, codes: Tensor) -> Tensor:
        """Return the decoder's input tokens (B, L) for the targets `codes` (B, L).

        The input tokens are the start token and all codes but the last.
        """
        return functional.pad((codes + self.offset)[:, :-1], (1, 0))


class Backbone(nn.Module):
    """An encoder of histories.

    A subclass sets `tokens`, `embedding` and `max_history`, and implements `encode`.
    """

    tokens: SidTokens
    """Vocabulary of the codes that histories consist of."""
    embedding: nn.Embedding
    """(V, D) token embeddings; D is also the width of the states."""
    max_history: int
    """Number of latest items that the encoder reads."""

    def encode(self, batch: HistoryBatch) -> History:
        """Return the states of the histories, with dropout in training mode."""
        raise NotImplementedError

    def infer(self, batch: HistoryBatch) -> History:
        """Return the states of `encode`, up to rounding, as fast as possible."""
        return self.encode(batch)


class Decoder(nn.Module):
    """A model of an item's next code, given a history and the item's earlier codes.

    A subclass implements `hidden`, `logits` and `scorer`.
    """

    tokens: SidTokens
    """Vocabulary of the codes to predict."""
    first_level: int
    """First level that the decoder predicts; another decoder has the levels before."""
    beam_bytes = 0
    """Bytes of a beam's state in search; 0 if too small to split batches for it."""

    def __init__(self, backbone: Backbone, first_level: int = 0) -> None:
        super().__init__()
        self.tokens, self.first_level = backbone.tokens, first_level
        self._embedding = (backbone.embedding,)  # in a tuple: no submodule

    @property
    def embedding(self) -> nn.Embedding:
        """Token embeddings of the backbone."""
        return self._embedding[0]

    def span(self, level: int) -> tuple[int, int]:
        """Return the first token and the number O_l of tokens of a level's logits.

        By default they are the level's codebook.
        """
        return self.tokens.first[level], self.tokens.sizes[level]

    def targets(self, codes: Tensor) -> list[Tensor]:
        """Return the index (B,) of each code in the logits of its level.

        Args:
            codes: (B, L) codes; levels before `first_level` are left out.
        """
        indices = []
        for level in range(self.first_level, self.tokens.levels):
            first_token, _ = self.span(level)
            indices.append(codes[:, level] + (self.tokens.first[level] - first_token))
        return indices

    def hidden(self, history: History, codes: Tensor) -> Tensor:
        """Return the states (B, L - first_level, N) that predict each code.

        Args:
            history: Histories of B requests.
            codes: (B, L) codes; a state depends only on the codes before its own.
        """
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Sequence[Tensor]:
        """Return the logits (B, O_l) of each level from `first_level` on.

        Args:
            hidden: (B, L - first_level, N) states.
        """
        raise NotImplementedError

    def teacher_forced(self, history: History, codes: Tensor) -> Sequence[Tensor]:
        """Return the logits (B, O_l) of each level, given the true codes before it.

        Args:
            history: Histories of B requests.
            codes: (B, L) codes of the targets.
        """
        return self.logits(self.hidden(history, codes))

    def scorer(self, history: History) -> Scorer:
        """Return a scorer for search, without gradients."""
        raise NotImplementedError


class Retriever(RetrievalModel):
    """A backbone and a decoder, trained on the target's codes.

    A retriever can be the teacher of a student. A subclass with another loss or search
    overrides `forward` or `recommend`.
    """

    example_unit = "request"
    extra_inputs: ClassVar[Mapping[str, bool]] = {"sids": True}
    options_class: ClassVar[type] = BeamOptions
    label_smoothing = 0.0
    """Share of each target's probability that training spreads evenly over all
    logits."""

    def __init__(
        self, config: Any, catalogue: Catalogue, backbone: Backbone, decoder: Decoder
    ) -> None:
        super().__init__(config, catalogue)
        self.trie, self.tokens = cast(Trie, catalogue.trie), backbone.tokens
        self.backbone, self.decoder = backbone, decoder

    def encode(self, batch: HistoryBatch) -> History:
        """Return the backbone's states of the requests' histories."""
        return self.backbone.encode(batch)

    def forward(self, batch: RequestBatch) -> dict[str, Tensor]:
        """Return the mean cross-entropy over the L codes of each target.

        Each code is predicted from the history and the codes before it.
        """
        codes = self.tokens.codes(batch.target)
        logits = self.decoder.teacher_forced(self.encode(batch), codes)
        losses = [
            functional.cross_entropy(
                level_logits.float(), target, label_smoothing=self.label_smoothing
            )
            for level_logits, target in zip(
                logits, self.decoder.targets(codes), strict=True
            )
        ]
        return {"loss": global_mean(torch.stack(losses).mean(), len(codes))}

    def encode_allowed(self, items: Tensor) -> Tensor:
        """Return a mask (E,) of the trie's edges that lead to the `items` (N,) bool."""
        return self.trie.mark_edges(items)

    @recommender
    def recommend(
        self, batch: HistoryBatch, k: int, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Rank items by the log-probability of their codes.

        Items of the history are ranked too, as in the papers, unless `unseen` is true.

        Args:
            batch: Histories of B requests.
            k: Number of items to return.
            options: Options of `search`.

        Returns:
            Items and scores, (B, k) both, best first. If fewer than k items are found,
            the tail is item -1 with score -inf.
        """
        history = self.backbone.infer(batch)
        return self.search(history, k, batch.allowed, **options)

    def scorer(self, history: History) -> Scorer:
        """Return the scorer of a beam search."""
        return self.decoder.scorer(history)

    def search(
        self,
        history: History,
        k: int,
        allowed: Tensor | None = None,
        beam: int | None = None,
        scores: Scores | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Decode items by beam search.

        The requests are searched in pieces whose beams take at most `MAX_BEAM_BYTES`.

        Args:
            history: States of B requests.
            k: Number of items.
            allowed: Mask (E,) of the trie's edges that lead to allowed items.
            beam: Number of beams; None for the config's.
            scores: Codes that log-probabilities are normalised over; None for the
                config's.

        Returns:
            Items and scores, (B, k) both, best first.
        """
        beam = beam or self.config.beam
        bytes_per_request = max(1, beam * self.decoder.beam_bytes)
        requests_per_piece = max(1, MAX_BEAM_BYTES // bytes_per_request)
        pieces = []
        for first in range(0, len(history.lengths), requests_per_piece):
            piece = history.rows(slice(first, first + requests_per_piece))
            found = beam_search(
                self.scorer(piece),
                self.trie,
                k,
                beam,
                self.normalizes_children(scores),
                allowed,
            )
            pieces.append(found)
        items, item_scores = zip(*pieces, strict=True)
        return torch.cat(items), torch.cat(item_scores)

    def normalizes_children(self, scores: Scores | None) -> bool:
        """Return whether scores are normalised over the valid children of a prefix.

        `scores` None is the value in the config.
        """
        scores = scores or getattr(self.config, "scores", "codebook")
        return scores == "children"
