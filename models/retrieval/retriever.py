"""Generative retrieval: a backbone, a decoder of semantic IDs, and beam search in the catalogue's trie.

Shapes: `B` requests, `L` levels (codes of an item).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.nn import functional

from models.retrieval.data import Catalogue, HistoryBatch, RequestBatch
from models.retrieval.model import RetrievalModel
from models.retrieval.options import BeamOptions
from models.retrieval.parts import Backbone, Decoder, History
from models.retrieval.recommend import recommender
from models.retrieval.search.beam import beam_search, unconstrained_beam_search
from models.retrieval.search.trie import Trie
from models.training.distributed import global_mean

MAX_BEAM_BYTES = 1 << 30
"""Bytes of the states of all beams of a search at most. Gathering them takes about
twice as much on top."""


class Retriever(RetrievalModel):
    """A backbone and a decoder, trained on the target's codes; it can be a student's teacher.

    A subclass that learns or searches in another way overrides `forward` or
    `recommend`.
    """

    example_unit = "request"
    extra_inputs: ClassVar[Mapping[str, bool]] = {"sids": True}
    can_teach = True
    options_class: ClassVar[type | None] = BeamOptions
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
        """Return the mean cross-entropy over the L codes of each target, each given the codes before it."""
        codes = self.tokens.codes(batch.target)
        return self.loss(
            self.decoder.teacher_forced(self.encode(batch), codes),
            self.decoder.targets(codes),
        )

    def encode_allowed(self, items: Tensor) -> Tensor:
        """Return the edges (E,) of the trie that lead to the `items` (N,) bool."""
        return self.trie.edges_to(items)

    def loss(
        self, logits: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """Return the mean cross-entropy over positions, each with logits (B, O) and targets (B,)."""
        losses = [
            functional.cross_entropy(
                level.float(), target, label_smoothing=self.label_smoothing
            )
            for level, target in zip(logits, targets, strict=True)
        ]
        return {"loss": global_mean(torch.stack(losses).mean(), len(targets[0]))}

    @recommender
    def recommend(
        self,
        batch: HistoryBatch,
        k: int,
        beam: int | None = None,
        constrained: bool | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (items, scores), each (B, k), by falling log-probability of the items' codes.

        Options left out are the config's. Known items are ranked too, as in the papers,
        unless `unseen` leaves them out. If fewer than k items are found, the tail is item
        -1 with score -inf.
        """
        return self.find(
            self.backbone.infer(batch),
            k,
            beam,
            constrained,
            allowed=batch.allowed,
        )

    def find(
        self,
        history: History,
        k: int,
        beam: int | None,
        constrained: bool | None,
        children: bool = False,
        allowed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (items, scores), each (B, k), found by beam search.

        Requests whose beams have more than `MAX_BEAM_BYTES` bytes of state are searched
        one piece after the other.

        Args:
            history: States of B requests.
            k: Number of items.
            beam: Number of beams; None for the config's.
            constrained: Whether beams stay within the trie; otherwise tuples of no item
                are dropped in the end. None for the config's.
            children: Whether scores are normalised over the valid children of a prefix.
            allowed: Edges (E,) of the trie that lead to allowed items.
        """
        beam = self.config.beam if beam is None else beam
        constrained = self.config.constrained if constrained is None else constrained
        at_once = max(
            1, MAX_BEAM_BYTES // max(1, max(1, beam) * self.decoder.beam_bytes)
        )
        if at_once < len(history.lengths):
            pieces = [
                history.rows(i, i + at_once)
                for i in range(0, len(history.lengths), at_once)
            ]
            found = [
                self.find(piece, k, beam, constrained, children, allowed)
                for piece in pieces
            ]
            items, scores = zip(*found, strict=True)
            return torch.cat(items), torch.cat(scores)
        scorer = self.decoder.scorer(history)
        if constrained:
            return beam_search(scorer, self.trie, k, beam, children, allowed)
        return unconstrained_beam_search(scorer, self.trie, k, beam, allowed)
