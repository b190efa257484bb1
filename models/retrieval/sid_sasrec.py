"""SID-SASRec: SASRec whose item vectors are sums over the trie of semantic IDs.

It is in no paper. Each node n of the trie has a vector v_n, and an item's vector is the
sum over its path (`NodeVectors`). Histories are read and items are scored with the same
vectors. With the state s of SASRec after a history:

    p(child | node) = softmax over the node's children c of s v_c
    log p(item)     = sum over the item's path of log p(child | node)
    log q(item)     = log softmax over all items of s vector_item

The loss is -log p, and with `joint` -log p - log q. Items are searched in the trie by
log p, and with `rerank` all items below the last beams are ranked by log p + log q.

Shapes: `B` requests, `W` beams, `M` children of the widest node (`R` targets in
training), `D` width, `E` edges of the trie, `C_l` codes of level l.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import ClassVar, Literal

import torch
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import functional

from core.options import STRICT
from models.dataset.batch import PAD
from models.retrieval.data import HistoryBatch
from models.retrieval.node_vectors import NodeVectors
from models.retrieval.options import BeamOptions
from models.retrieval.recommend import recommender
from models.retrieval.sasrec import SASRec, SASRecConfig
from models.retrieval.search import beam_search, top_k


@dataclass(config=STRICT)
class SidSASRecConfig(SASRecConfig):
    """Options of SID-SASRec."""

    item_vectors: Literal["ids_and_sids"] = "ids_and_sids"
    """Item vectors are always sums over the trie."""
    joint: bool = True
    """Whether the loss also has the softmax over all items."""
    rerank: bool = True
    """Whether the found items are ranked by the sum of both log-probabilities, of their
    path and among all items; otherwise by their path's."""
    beam: PositiveInt = 20
    """Number of beams when recommending."""


class NodeScorer:
    """Scores of the next code for `beam_search`: products of states and nodes."""

    def __init__(self, states: Tensor, vectors: NodeVectors) -> None:
        self.states, self.vectors, self.trie = states, vectors, vectors.trie
        self.level = 0
        self.node = states.new_zeros((len(states), 1), dtype=torch.long)

    def start(self) -> Tensor:
        """Return the log-probabilities (B, C_0) of the first code."""
        return self._score().squeeze(1).log_softmax(-1)

    def step(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """Return logits (B, W, C_l) of the children of each beam."""
        node = self.trie.descend(self.level, self.node.gather(1, parents), tokens)
        self.level, self.node = self.level + 1, node.clamp(min=0)
        return self._score()

    def _score(self) -> Tensor:
        """Return the children's logits (B, W, C_l) by code, -1e30 for no child."""
        edge, logits = self.vectors.child_logits(self.states, self.level, self.node)
        size = self.trie.codebook_sizes[self.level]
        # padded children go to an extra code
        code = self.trie.tokens(self.level)[edge].masked_fill(logits.isneginf(), size)
        scores = logits.new_full((*self.node.shape, size + 1), -1e30)
        return scores.scatter(2, code, logits)[..., :-1]


class SidSASRec(SASRec):
    """SASRec that decodes semantic IDs through the vectors of the trie's nodes."""

    name = "sid_sasrec"
    config_class = SidSASRecConfig
    extra_inputs: ClassVar[Mapping[str, bool]] = {"sids": True}
    options_class: ClassVar[type] = BeamOptions

    config: SidSASRecConfig
    item: NodeVectors

    def loss(self, states: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss of `target` (R,) after `states` (R, D)."""
        total = super().loss(states, target) if self.config.joint else torch.zeros(())
        path = self.item.paths[target.clamp(min=0)]  # (R, L)
        node = torch.zeros_like(target)
        for level, target_edge in enumerate(path.T):
            edge, logits = self.item.child_logits(states, level, node[:, None])
            # the edges of a node are consecutive
            child = (target_edge - edge[:, 0, 0]).masked_fill(target == PAD, PAD)
            total = total + functional.cross_entropy(
                logits.squeeze(1), child, ignore_index=PAD
            )
            node = target_edge
        return total

    def encode_allowed(self, items: Tensor) -> Tensor:
        """Return a mask (E,) of the trie's edges that lead to the `items` (N,) bool."""
        return self.item.trie.mark_edges(items)

    @recommender
    def recommend(
        self, batch: HistoryBatch, k: int, beam: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Search items in the trie, and return items and scores, (B, k) both.

        If fewer than k items are found, the tail is item -1 with score -inf.
        """
        states, trie = self.last_states(batch), self.item.trie
        beam = beam or self.config.beam
        search = partial(
            beam_search,
            NodeScorer(states, self.item),
            trie,
            beam=beam,
            children=True,
            allowed=batch.allowed,
        )
        if not self.config.rerank:
            return search(k)
        # rerank all children of the last beams; at least k, so that top_k needs no
        # padding
        num_found = min(beam * trie.max_branching[-1], trie.edges[-1])
        items, scores = search(max(k, num_found))
        log_probs = (states @ self.item.weight.T).log_softmax(-1)
        scores += log_probs.gather(1, items.clamp(min=0))
        position, scores = top_k(scores, k)
        return items.gather(1, position), scores
