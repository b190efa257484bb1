"""Beam search over semantic IDs, batched over users and beams, within the trie of the catalogue.

Works for any model that gives log-probabilities of the next code: the `Scorer` protocol. Beams are kept
in lexicographic order between levels and selected by score with ties to the first, so equal scores are
resolved the same way every time. No Python loop over users or beams; nothing waits for a GPU.

Shapes: `B` users, `W` beams, `M` children of the widest node, `C_l` codes of level l, `L` levels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.retrieval.parts import Scorer
from models.retrieval.search.topk import select, top_k
from models.retrieval.search.trie import Trie


def beam_search(
    scorer: Scorer,
    trie: Trie,
    k: int,
    beam: int,
    children: bool = False,
    allowed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(items, scores), each (B, k): the items of the highest sums of log-probabilities found.

    Only codes that continue a prefix of the catalogue are scored, so each item returned exists and
    comes once. Order: score falling, then the items' codes rising. The last level is taken from all
    children of its beams, so k may exceed `beam`; a beam above the catalogue keeps every prefix. Where
    fewer items are found than k (a small catalogue, or log-probabilities of -inf) the tail is item -1
    with score -inf.

    With `children`, log-probabilities are normalised anew over the valid children of each prefix at every
    level but the first, as the public code of SID-MLP does; the first code keeps the scorer's. Scores are
    then those of a distribution that knows the catalogue from the second code on, an only child costs
    nothing, and the scorer's values after the first need be right up to a constant per beam only (and
    finite).

    With `allowed`, the edges (E,) that lead to a set of items (`Trie.edges_to`), beams take no others: the search is
    within the set, and its items have the scores that they have without it.
    """
    if k < 1 or beam < 1:
        raise ValueError(f"k {k} and beam {beam} need to be at least 1")
    log_probs = scorer.start().unsqueeze(1)  # (B, 1, C_0)
    node = log_probs.new_zeros(
        log_probs.shape[:2], dtype=torch.long
    )  # (B, W): where each beam stands in the trie
    score = log_probs.new_zeros(log_probs.shape[:2])
    for level in range(trie.levels):
        scores, edge, token = pairs_of(
            trie, level, node, score, log_probs, children, allowed
        )
        if level == trie.levels - 1:
            position, score = top_k(scores, k)
            item = trie.leaves[edge.gather(1, position.clamp(min=0))]
            return torch.where(score == -torch.inf, -1, item), score
        position = select(scores, min(beam, trie.edges[level], scores.shape[1]))
        children_each = scores.shape[1] // node.shape[1]
        node = edge.gather(1, position)
        score = scores.gather(
            1, position
        )  # -inf where fewer prefixes than beams are left: dead from here on
        log_probs = scorer.step(position // children_each, token.gather(1, position))
    raise ValueError("the trie has no levels; it needs at least one codebook")


def pairs_of(
    trie: Trie,
    level: int,
    node: Tensor,
    score: Tensor,
    log_probs: Tensor,
    children: bool,
    allowed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(scores, edges, codes), each (B, W * M): of all pairs of a beam at `node` (B, W) with `score` (B, W) and a child,
    rising along the beams; scores are -inf where there is no child. `log_probs` (B, W, C_level), `children` and
    `allowed` as in `beam_search`."""
    if log_probs.shape[-1] != trie.codebook_sizes[level]:
        raise ValueError(
            f"the model scores {log_probs.shape[-1]} codes at level {level}, the trie has "
            f"{trie.codebook_sizes[level]}; give the semantic IDs that it was trained with"
        )
    edge, valid = trie.children_of(level, node)  # (B, W, M)
    token = trie.tokens(level)[edge]
    of_children = log_probs.gather(2, token).masked_fill(~valid, -torch.inf)
    if children and level > 0:
        of_children = of_children.log_softmax(-1)
    if allowed is not None:
        of_children = of_children.masked_fill(
            ~allowed.split(trie.edges)[level][edge], -torch.inf
        )
    return (
        (score.unsqueeze(-1) + of_children).flatten(1),
        edge.flatten(1),
        token.flatten(1),
    )


def unconstrained_beam_search(
    scorer: Scorer, trie: Trie, k: int, beam: int, allowed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `beam_search`, with the trie looked at only in the end: code tuples of no item, or of one that is not allowed,
    are dropped.

    What a decoder without a trie does, for comparison: fewer than k items may be left. At each level only
    codes of that level are scored.
    """
    if k < 1 or beam < 1:
        raise ValueError(f"k {k} and beam {beam} need to be at least 1")
    log_probs = scorer.start().unsqueeze(1)
    score = log_probs.new_zeros(log_probs.shape[:2])
    codes = score.new_zeros((*score.shape, 0), dtype=torch.long)  # (B, W, level)
    for level in range(trie.levels):
        scores = (score.unsqueeze(-1) + log_probs).flatten(1)
        position = select(
            scores,
            min(max(beam, k) if level == trie.levels - 1 else beam, scores.shape[1]),
        )
        score = scores.gather(1, position)
        parents = position // log_probs.shape[-1]
        token = position % log_probs.shape[-1]
        kept = codes.gather(1, parents.unsqueeze(-1).expand(-1, -1, level))
        codes = torch.cat([kept, token.unsqueeze(-1)], -1)
        if level < trie.levels - 1:
            log_probs = scorer.step(parents, token)
    item = trie.lookup(codes, allowed)
    position, score = top_k(
        score.masked_fill((item < 0) & ~score.isnan(), -torch.inf), k
    )  # NaN is for all to see
    item = item.gather(1, position.clamp(min=0))
    return torch.where(score == -torch.inf, -1, item), score
