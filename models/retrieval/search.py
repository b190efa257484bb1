"""Beam search over semantic IDs within the trie of the catalogue.

The search works for every model that scores the next code (the `Scorer` protocol). It
is batched over users and beams, without Python loops over either, and does not
synchronise with a GPU. Beams stay in lexicographic order between levels, and of equal
scores the first is selected, so results are deterministic on every device.

The trie is in CSR form: the valid next codes of a prefix. A level is two tensors. The
children of node `n` are the edges `offsets[n] : offsets[n + 1]`, `tokens` holds their
codes in ascending order, and the number of an edge is the node that it leads to. Edges
of a level are sorted by prefix; edges of the last level are the items (`leaves`).

Shapes: `B` users, `W` beams, `M` children of the widest node, `C_l` codes of level l,
`L` levels.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from core.errors import UserError


class Trie(nn.Module):
    """The codes of all items as a trie, in buffers that are not saved with a model.

    Level l has `edges[l]` edges and `edges[l - 1]` nodes (level 0 has 1 node, the
    root).
    """

    leaves: Tensor
    """(N,) item_index of each edge of the last level, a permutation of 0 to N - 1."""

    def __init__(self, codes: Tensor, codebook_sizes: tuple[int, ...]) -> None:
        """Build the trie.

        Args:
            codes: (N, C) codes of the items.
            codebook_sizes: Number of codes per level.
        """
        super().__init__()
        codes = codes.long().cpu()
        items, levels = codes.shape
        if not items:
            raise UserError("there are 0 items and a trie needs at least 1")
        is_outside = (codes < 0) | (codes >= torch.tensor(codebook_sizes))
        if is_outside.any():
            item, level = is_outside.nonzero()[0].tolist()
            raise UserError(
                f"code {int(codes[item, level])} at level {level} is outside of its "
                f"codebook of {codebook_sizes[level]}"
            )
        self.codebook_sizes = codebook_sizes
        self.edges: list[int] = []
        """Number of edges per level, which is the number of distinct prefixes."""
        self.max_branching: list[int] = []
        """Most children of a node, per level."""
        order = torch.from_numpy(np.lexsort(codes.numpy().T[::-1]))
        ordered = codes[order]
        # (N, C) whether the item's prefix differs from the one before
        differs = torch.ones_like(codes, dtype=torch.bool)
        differs[1:] = (ordered[1:] != ordered[:-1]).cumsum(1) > 0
        node = torch.zeros(items, dtype=torch.long)  # node of each item's prefix
        num_nodes = 1
        for level in range(levels):
            is_new = differs[:, level]
            counts = torch.bincount(node[is_new], minlength=num_nodes)
            offsets = functional.pad(counts.cumsum(0), (1, 0))
            tokens = ordered[is_new, level].contiguous()
            self.register_buffer(f"offsets_{level}", offsets, persistent=False)
            self.register_buffer(f"tokens_{level}", tokens, persistent=False)
            node = is_new.cumsum(0) - 1
            num_nodes = int(is_new.sum())
            self.edges.append(num_nodes)
            self.max_branching.append(int(counts.max()))
        if num_nodes != items:
            duplicate = int((~is_new).nonzero()[0])
            raise UserError(
                f"items {int(order[duplicate - 1])} and {int(order[duplicate])} have "
                f"the same codes {ordered[duplicate].tolist()}"
            )
        self.register_buffer("leaves", order, persistent=False)

    @property
    def levels(self) -> int:
        """Number C of levels."""
        return len(self.edges)

    def offsets(self, level: int) -> Tensor:
        """Return the offsets (nodes + 1,) int64 of each node's edges."""
        return self.get_buffer(f"offsets_{level}")

    def tokens(self, level: int) -> Tensor:
        """Return the code (edges,) int64 of each edge."""
        return self.get_buffer(f"tokens_{level}")

    def mark_edges(self, items: Tensor) -> Tensor:
        """Return a mask of the edges that lead to any of the given items.

        Args:
            items: (N,) mask of items.

        Returns:
            (E,) mask of the edges of all levels, concatenated from the first level on.
        """
        is_marked = items[self.leaves]
        levels = [is_marked]
        for level in reversed(range(1, self.levels)):
            # an edge leads to a given item if any edge of its child node does
            num_marked = functional.pad(is_marked.cumsum(0), (1, 0))
            num_before = num_marked[self.offsets(level)]
            is_marked = num_before[1:] > num_before[:-1]
            levels.insert(0, is_marked)
        return torch.cat(levels)

    def get_children(self, level: int, node: Tensor) -> tuple[Tensor, Tensor]:
        """Return the edges of nodes (...) in ascending order.

        Args:
            level: Level of the edges.
            node: (...) nodes.

        Returns:
            Edges (..., M), 0 at padding, and a mask (..., M) of the valid edges. On a
            CPU, M is the most edges of the given nodes; on a GPU, the most edges of
            any node of the level, to avoid synchronisation.
        """
        offsets = self.offsets(level)
        begin = offsets[node]
        count = offsets[node + 1] - begin
        on_cpu = node.device.type == "cpu"
        widest = int(count.max()) if on_cpu else self.max_branching[level]
        child = torch.arange(widest, device=node.device)
        valid = child < count.unsqueeze(-1)
        return torch.where(valid, begin.unsqueeze(-1) + child, 0), valid

    def descend(self, level: int, node: Tensor, token: Tensor) -> Tensor:
        """Return the edges from nodes along tokens.

        Args:
            level: Level of the edges.
            node: (...) nodes, -1 for none.
            token: (...) codes of the level's codebook.

        Returns:
            (...) edges, -1 if a node has no edge with the code.
        """
        tokens, offsets = self.tokens(level), self.offsets(level)
        parent = torch.arange(len(offsets) - 1, device=tokens.device)
        # output_size avoids waiting for a GPU
        parent = torch.repeat_interleave(
            parent, offsets.diff(), output_size=len(tokens)
        )
        size = self.codebook_sizes[level]
        edge_keys = parent * size + tokens  # ascending, as edges are sorted
        key = node * size + token  # negative without a node
        edge = torch.searchsorted(edge_keys, key).clamp(max=len(edge_keys) - 1)
        return torch.where(edge_keys[edge] == key, edge, -1)

    def lookup(self, codes: Tensor) -> Tensor:
        """Return the item_index (...) of codes (..., C), -1 if no item has them."""
        node = torch.zeros_like(codes[..., 0])
        for level in range(self.levels):
            node = self.descend(level, node, codes[..., level])
        return torch.where(node >= 0, self.leaves[node], -1)


def select(scores: Tensor, k: int) -> Tensor:
    """Select the k highest scores of each row.

    Of equal scores the first are selected. NaN is above all numbers.

    Args:
        scores: (B, N) scores.
        k: Number of scores, at most N.

    Returns:
        (B, k) positions in ascending order.
    """
    batch, width = scores.shape
    if k == width:
        return torch.arange(width, device=scores.device).expand(batch, width)
    if scores.device.type != "cpu":
        # a GPU would have to wait for the rows with ties
        return _select_all_passes(scores, k)
    values, position = torch.topk(scores, k + 1)
    values, next_value = values.split([k, 1], 1)
    position = position[:, :k]
    # rows in which another score equals the k-th highest
    tied = (values[:, -1:] == next_value).nonzero()[:, 0]
    if len(tied):
        row, column = (scores[tied] == next_value[tied]).nonzero(as_tuple=True)
        start = torch.searchsorted(row, torch.arange(len(tied)))[:, None]
        # the first ties follow the higher scores
        num_above = (values[tied] != next_value[tied]).sum(1, keepdim=True)
        tie = torch.arange(k) - num_above
        ties = column[start + tie.clamp(min=0)]
        position = position.clone()
        position[tied] = torch.where(tie < 0, position[tied], ties)
    return position.sort(1).values


def _select_all_passes(scores: Tensor, k: int) -> Tensor:
    """Return the result of `select` for k < N, without a dynamic shape."""
    scores = torch.where(scores.isnan(), torch.inf, scores)
    kth_score = torch.topk(scores, k, sorted=False).values.amin(1, keepdim=True)
    above = scores > kth_score
    equal = scores == kth_score
    num_equal = k - above.sum(1, keepdim=True)  # number of ties to select
    is_selected = above | (equal & (equal.cumsum(1) <= num_equal))
    # all other positions go to an extra slot
    slot = torch.where(is_selected, is_selected.cumsum(1) - 1, k)
    position = torch.arange(scores.shape[1], device=scores.device).expand(scores.shape)
    slots = scores.new_zeros((scores.shape[0], k + 1), dtype=torch.long)
    return slots.scatter_(1, slot, position)[:, :k]


def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k highest scores of each row, sorted by score, then by position.

    Args:
        scores: (B, N) scores.
        k: Number of scores. If it exceeds N, the tail is position -1 and value -inf.

    Returns:
        Positions and values, (B, k) both.
    """
    available = min(k, scores.shape[1])
    position = select(scores, available)
    values, order = scores.gather(1, position).sort(dim=1, descending=True, stable=True)
    position = position.gather(1, order)
    if available < k:
        missing = (scores.shape[0], k - available)
        position = torch.cat([position, position.new_full(missing, -1)], 1)
        values = torch.cat([values, values.new_full(missing, -torch.inf)], 1)
    return position, values


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
