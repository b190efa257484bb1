"""Beam search over semantic IDs within the trie of the catalogue.

The search works for every model that scores the next code (the `Scorer` protocol). It
is batched over users and beams, without Python loops over either, and does not
synchronise with a GPU. Beams stay in lexicographic order between levels, and of equal
scores the first is selected, so results are deterministic.

Shapes: `B` users, `W` beams, `M` children of the widest node, `C_l` codes of level l,
`L` levels.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from models.retrieval.search.topk import select, top_k
from models.retrieval.search.trie import Trie


class Scorer(Protocol):
    """A model of the next code that stores the states of a search's beams."""

    def start(self) -> Tensor:
        """Return the log-probabilities (B, C_0) of the first code."""
        ...

    def step(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """Return the log-probabilities (B, W, C_l) of the next code of each beam.

        Args:
            parents: (B, W) index of each beam's parent among the beams of the last
                step.
            tokens: (B, W) code that each beam appends to its parent.
        """
        ...


def beam_search(
    scorer: Scorer,
    trie: Trie,
    k: int,
    beam: int,
    children: bool = False,
    allowed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Find the items with the highest sums of log-probabilities.

    Only codes that continue a prefix of the catalogue are scored, so every returned
    item exists and is returned once. Items are sorted by score, then by their codes.
    The last level selects from all children of its beams, so `k` may exceed `beam`. If
    fewer than `k` items are found (in a small catalogue, or with log-probabilities of
    -inf), the tail is item -1 with score -inf.

    Args:
        scorer: Scores of the next code.
        trie: Trie of the catalogue.
        k: Number of items.
        beam: Number of beams.
        children: Whether to normalise log-probabilities over the valid children of each
            prefix from the second code on, as in the public code of SID-MLP. An only
            child then has log-probability 0, and the scorer's values after the first
            level matter up to a constant per beam only (but must be finite).
        allowed: (E,) mask of the edges that lead to a set of items (`Trie.mark_edges`).
            The search stays within the set; the scores of its items do not change.

    Returns:
        Items and scores, (B, k) both.
    """
    log_probs = scorer.start().unsqueeze(1)  # (B, 1, C_0)
    # (B, W): node of each beam in the trie
    node = log_probs.new_zeros(log_probs.shape[:2], dtype=torch.long)
    score = log_probs.new_zeros(log_probs.shape[:2])
    for level in range(trie.levels):
        scores, edge, token = score_pairs(
            trie, level, node, score, log_probs, children, allowed
        )
        if level == trie.levels - 1:
            position, score = top_k(scores, k)
            item = trie.leaves[edge.gather(1, position.clamp(min=0))]
            return torch.where(score == -torch.inf, -1, item), score
        position = select(scores, min(beam, trie.edges[level], scores.shape[1]))
        children_per_beam = scores.shape[1] // node.shape[1]
        parents = position // children_per_beam
        node = edge.gather(1, position)
        # -inf at all further levels if there are fewer prefixes than beams
        score = scores.gather(1, position)
        log_probs = scorer.step(parents, token.gather(1, position))
    raise ValueError("the trie has no levels")


def score_pairs(
    trie: Trie,
    level: int,
    node: Tensor,
    score: Tensor,
    log_probs: Tensor,
    children: bool,
    allowed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Score all pairs of a beam and a child, ordered by beam and child.

    Args:
        trie: Trie of the catalogue.
        level: Level of the children.
        node: (B, W) nodes of the beams.
        score: (B, W) scores of the beams.
        log_probs: (B, W, C_level) log-probabilities of the next code.
        children: As in `beam_search`.
        allowed: As in `beam_search`.

    Returns:
        Scores, edges and codes, (B, W * M) each. The score is -inf if there is no
        child.
    """
    edge, valid = trie.get_children(level, node)  # (B, W, M)
    token = trie.tokens(level)[edge]
    child_log_probs = log_probs.gather(2, token).masked_fill(~valid, -torch.inf)
    if children and level > 0:
        child_log_probs = child_log_probs.log_softmax(-1)
    if allowed is not None:
        is_allowed = allowed.split(trie.edges)[level][edge]
        child_log_probs = child_log_probs.masked_fill(~is_allowed, -torch.inf)
    scores = score.unsqueeze(-1) + child_log_probs
    return scores.flatten(1), edge.flatten(1), token.flatten(1)
