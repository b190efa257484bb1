"""Generative retrieval: a backbone, a decoder of semantic IDs, and beam search.

Shapes: `B` requests, `L` levels (codes of an item).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.nn import functional

from models.retrieval.data import Catalogue, HistoryBatch, RequestBatch
from models.retrieval.model import RetrievalModel
from models.retrieval.options import BeamOptions, Scores
from models.retrieval.parts import Backbone, Decoder, History
from models.retrieval.recommend import recommender
from models.retrieval.search import Scorer, Trie, beam_search
from models.training.distributed import global_mean

MAX_BEAM_BYTES = 1 << 30
"""Most bytes of the beams' states in one search. Gathering the states takes about twice
as much in addition."""


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
